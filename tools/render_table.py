#!/usr/bin/env python3
"""Write the tables of group, agent and node and the protocol into docs/architecture.md, each between its two markers.

    python tools/render_table.py            # bring the page up to date
    python tools/render_table.py --check    # exit code 1 if it is not

The tables are those that run (`phalanx._engine.lifecycle.TABLE`, `phalanx._run.attempts.TABLE`,
`phalanx._rendezvous.life.TABLE`), and the protocol's is made from the functions that build the messages
(`phalanx._engine.protocol`), so the page cannot tell another story. Only the standard library is
needed, and no installation: the source tree is found beside this folder.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import marks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- group table: rendered by tools/render_table.py -->"
END = "<!-- end of the group table -->"
BEGIN_AGENT = "<!-- agent table: rendered by tools/render_table.py -->"
END_AGENT = "<!-- end of the agent table -->"
BEGIN_NODE = "<!-- node table: rendered by tools/render_table.py -->"
END_NODE = "<!-- end of the node table -->"
BEGIN_PROTOCOL = "<!-- protocol: rendered by tools/render_table.py -->"
END_PROTOCOL = "<!-- end of the protocol -->"


def render(table: ModuleType) -> str:
    """Return a table as Markdown: for each state, what can happen, where it leads, and what is done."""
    lines = []
    for state, meaning in table.STATES.items():
        cells = [(event, *cell) for (before, event), cell in table.TABLE.items() if before == state]
        lines += [f"**{state}**: {meaning}.", ""]
        if cells:
            lines += ["| when | it becomes | and we |", "| --- | --- | --- |"]
        for event, after, actions in cells:
            becomes = "" if after == state else after
            done = "; ".join(table.ACTIONS[action] for action in actions)
            lines.append(f"| {table.EVENTS[event]} | {becomes} | {done} |")
        lines += [""] * bool(cells)
    return "\n".join(lines)


def render_protocol() -> str:
    """Return the messages as Markdown: for each direction, the verbs with their fields and meanings."""
    from phalanx._engine import protocol

    lines = []
    for direction, verbs in (
        ("launcher to keeper", protocol.TO_KEEPER),
        ("keeper to launcher", protocol.TO_LAUNCHER),
        ("launcher to fork server", protocol.TO_FORK_SERVER),
        ("fork server to launcher", protocol.FROM_FORK_SERVER),
    ):
        lines += [f"**From {direction}**", "", "| verb | fields | meaning |", "| --- | --- | --- |"]
        for verb in verbs:
            fields = ", ".join(f"`{name}`" for name in inspect.signature(verb).parameters)
            meaning = " ".join(inspect.getdoc(verb).split()).replace("``", "`")  # type: ignore[union-attr]  # all have one
            lines.append(f"| `{verb.__name__}` | {fields} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def put(page: str) -> str:
    """Return the page with all as they are now. Raises ValueError when a marker is missing, or there twice."""
    from phalanx._engine import lifecycle
    from phalanx._rendezvous import life as node
    from phalanx._run import attempts as life

    page = marks.replace(page, BEGIN, END, f"\n{render(lifecycle)}\n", PAGE.name)
    page = marks.replace(page, BEGIN_AGENT, END_AGENT, f"\n{render(life)}\n", PAGE.name)
    page = marks.replace(page, BEGIN_NODE, END_NODE, f"\n{render(node)}\n", PAGE.name)
    return marks.replace(page, BEGIN_PROTOCOL, END_PROTOCOL, f"\n{render_protocol()}\n", PAGE.name)


def main(arguments: list[str]) -> int:
    """Do what the command line asks for and return the exit code."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python tools/render_table.py [--check]\n")
        return 2
    old = PAGE.read_text(encoding="utf-8")
    new = put(old)
    if old == new:
        return 0
    if arguments:
        sys.stderr.write(f"{PAGE}: the table is out of date; python {Path(__file__).name} renders it\n")
        return 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main(sys.argv[1:]))
