#!/usr/bin/env python3
"""Write the table of the options of `phalanx run` into docs/reference/cli.md, between its two markers.

    python tools/render_options.py            # bring the page up to date
    python tools/render_options.py --check    # exit code 1 if it is not

The table is made from the declarations that the command line and job files are made from (`RunOptions`), so the page
cannot tell another story. It needs click; the source tree is found beside this folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import marks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.cli._declare import Option

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "cli.md"
BEGIN = "<!-- options of phalanx run: rendered by tools/render_options.py -->"
END = "<!-- end of the options -->"

KINDS = {bool: "boolean", str: "string", list: "array", int: "integer", float: "float"}


def render() -> str:
    """Return the options as Markdown: a table for each section of the help."""
    from phalanx.cli._declare import SECTIONS, declarations
    from phalanx.cli._run_config import RunOptions

    lines = []
    every = declarations(RunOptions)
    for heading in (*SECTIONS, ""):
        found = [declared for declared in every if declared.section == heading]
        if not found:
            continue
        lines += [f"**{heading or 'Accepted, and not in the help'}**", ""]
        lines += ["| option | in a job file | default | of torchrun | |", "| --- | --- | --- | --- | --- |"]
        lines += [*map(_row, found), ""]
    return "\n".join(lines)


def _row(declared: Option) -> str:
    letters = [name for name in declared.names if not name.startswith("--")]
    spelled = ", ".join(f"`{name}`" for name in (*letters, *declared.longs))
    metavar = "" if bool in declared.written else f" {_escaped(declared.metavar or _choices(declared))}"
    kinds = " or ".join(KINDS[kind] for kind in KINDS if kind in declared.written).replace("integer or float", "number")
    default = "" if not declared.default else f"`{_escaped(declared.default)}`"
    from phalanx.cli.torchrun_shim import torchrun_name

    torchrun = f"`{name}`" if (name := torchrun_name(declared.longs)) else ""
    further = f" Also {', '.join(f'`{name}`' for name in declared.further)}." if declared.further else ""
    return f"| {spelled}{metavar} | {kinds} | {default} | {torchrun} | {_escaped(declared.sentence)}{further} |"


def _choices(declared: Option) -> str:
    return "|".join(getattr(declared.kind, "choices", ())) or "TEXT"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("$", "&#36;")


def put(page: str) -> str:
    """Return the page with the options as they are now. Raises ValueError when a marker is missing, or there twice."""
    return marks.replace(page, BEGIN, END, f"\n{render()}\n", PAGE.name)


def main(arguments: list[str]) -> int:
    """Do what the command line asks for and return the exit code."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python tools/render_options.py [--check]\n")
        return 2
    old = PAGE.read_text(encoding="utf-8")
    new = put(old)
    if old == new:
        return 0
    if arguments:
        sys.stderr.write(f"{PAGE}: the options are out of date; python {Path(__file__).name} renders them\n")
        return 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main(sys.argv[1:]))
