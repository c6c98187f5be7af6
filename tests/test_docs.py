"""The documentation says what is so: links lead somewhere, examples run, the group's table is the one in the code.

Conventions of the pages: the blocks marked ``pycon`` are run as doctests, those of one page in order and with the same
names; a block marked ``python`` must compile. In the README, the ``console`` block shows a run of the script in the
``python`` block, which opens with ``# name.py``, and each of its lines must occur in the real output.
"""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from phalanx._core import clock
from phalanx._core.fold import Fold

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md", *sorted(ROOT.glob("docs/*.md"))]

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language, each with the number of the line that it follows."""
    text = page.read_text(encoding="utf-8")
    found = BLOCK.finditer(text)
    return [(text.count("\n", 0, block.start(2)), block[2]) for block in found if block[1] == language]


def anchors(page: Path) -> set[str]:
    """What can follow the ``#`` of a link: headings, in lower case, with hyphens for spaces and little else."""
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(prose)}


def masked(text: str) -> list[str]:
    """The lines of a console without what differs from run to run."""
    text = re.sub(r"(?<!\w)/\S*/", "/", text)  # folders
    text = re.sub(r"\d{8}-\d{6}_\w{8}", "RUN", text)
    text = re.sub(r"(?m)^(  (time|host) +: ).*$", r"\1…", text)
    return re.sub(r"pid: \d+", "pid: …", text).splitlines()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own: to be in, for temporary files, and for the logs of runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    monkeypatch.setattr(Fold.__init__, "__defaults__", (60.0, clock.wall))  # equal lines may come late: a busy machine
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{name_of(page)}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
@pytest.mark.usefixtures("elsewhere")
def test_examples_run(page: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "__main__"}  # as in an interpreter
    runner = doctest.DocTestRunner()
    for line, source in blocks(page, "pycon"):
        example = doctest.DocTestParser().get_doctest(source, names, name_of(page), str(page), line)
        runner.run(example, clear_globs=False)
        names = example.globs
    assert not runner.failures, capfd.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_compile(page: Path) -> None:
    for line, source in blocks(page, "python"):
        compile("\n" * line + source, name_of(page), "exec")


MEETING = """
import os, sys
def meet(rank, time):
    sys.stdout.flush()
    open(f"rank-{rank}", "w").close()
    while not all(os.path.exists(f"rank-{each}") for each in range(4)):
        time.sleep(0.01)
"""


def test_the_session_in_the_readme_is_real(elsewhere: Path) -> None:
    page = ROOT / "README.md"
    ((_, script),) = blocks(page, "python")
    # A second is what the others have for their first line: here, rank 2 goes on when all have said it.
    assert script.count("time.sleep(1)\n") == 1
    script = script.replace("time.sleep(1)\n", "__import__('meeting').meet(rank, time)\n")
    (elsewhere / "meeting.py").write_text(MEETING)
    (elsewhere / script.split("\n")[0].removeprefix("# ")).write_text(script)
    ((_, session),) = blocks(page, "console")
    command, _, shown = session.partition("\n")
    words = shlex.split(command.removeprefix("$ "))
    assert words.pop(0) == "phalanx"
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *words],
        env=os.environ | {"NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    missing = [line for line in masked(shown) if line != "…" and line not in masked(done.stdout)]
    assert not missing, done.stdout


def render_table() -> ModuleType:
    """The tool, as a module."""
    spec = importlib.util.spec_from_file_location("render_table", ROOT / "tools" / "render_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_groups_table_is_the_one_in_the_code() -> None:
    tool = render_table()
    assert tool.main(["--check"]) == 0, "python tools/render_table.py brings it up to date"


def test_a_stale_table_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = render_table()
    page = tmp_path / "architecture.md"
    page.write_text(f"before\n{tool.BEGIN}\nan old table\n{tool.END}\nafter\n")
    monkeypatch.setattr(tool, "PAGE", page)
    assert tool.main(["--check"]) == 1
    assert tool.main([]) == 0
    assert tool.main(["--check"]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "an old table" not in text
