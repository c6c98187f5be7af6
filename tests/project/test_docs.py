"""The documentation says what is so: links lead somewhere, examples run, the group's table is the one in the code.

Conventions of the pages: the blocks marked ``pycon`` are run as doctests, those of one page in order and with the same
names; a block marked ``python`` must compile. A ``console`` block is the transcript of a run: `tools/transcripts.py`
makes it, and a new run must show the same. A block that opens with ``# name.py`` is a file that one of them is about.
"""

from __future__ import annotations

import doctest
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from phalanx._logs import dedup
from phalanx.cli._job_file import JobFile
from phalanx.cli._run_config import RunOptions

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "examples" / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

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


@cache
def tool(name: str) -> ModuleType:
    """A program of the folder ``tools``, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own: to be in, for temporary files, and for the logs of runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    monkeypatch.setattr(dedup, "WINDOW", 60.0)  # equal lines may come late: a busy machine
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_bash_scripts_can_be_read(page: Path) -> None:
    for _, source in blocks(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=source, check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("examples/**/*.yaml"))], ids=name_of)
def test_manifests_set_variables_of_options(page: Path) -> None:
    texts = [page.read_text("utf-8")] if page.suffix == ".yaml" else [source for _, source in blocks(page, "yaml")]
    names = {name for source in texts for name in re.findall(r"PHALANX_(\w+)", source)}
    assert all(hasattr(RunOptions, name.lower()) for name in names - {"JOB_SECRET"})


KINDS = {"python", "pycon", "console", "sh", "bash", "json", "toml", "yaml", ""}
"""The blocks that tests look at; and what is shown: a file's content, or a part of a text."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_is_overlooked(page: Path) -> None:
    """One in another form (with indents, in another language, of four backticks) would be in no test."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^\s*(?:>\s*)?(?:```|~~~).*$", text, re.MULTILINE)
    found = [block[1] for block in BLOCK.finditer(text)]
    assert len(fences) == 2 * len(found), fences
    assert set(found) <= KINDS
    assert not [source for _, source in blocks(page, "") if re.search(r"^(phalanx|python) ", source, re.MULTILINE)]


@pytest.mark.long
@pytest.mark.parametrize("name", tool("transcripts").scenarios())
def test_a_transcript_is_what_a_new_run_shows(name: str) -> None:
    if name == "debug" and sys.version_info >= (3, 13):
        pytest.skip("since Python 3.13, breakpoint() stops at its own line")
    it = tool("transcripts")
    scenario = it.scenarios()[name]
    text = (ROOT / scenario["page"]).read_text(encoding="utf-8")
    shown = text.partition(f"{it.begin(name)}\n```console\n")[2].partition(f"```\n{it.END}")[0]
    try:
        found = it.play(scenario)
    except it.NoDiskError as error:
        pytest.skip(str(error))
    assert found == shown, f"make transcripts ARGS={name} shows it as it is"


def test_each_transcript_has_a_scenario_and_each_has_its_place() -> None:
    it = tool("transcripts")
    places = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = re.findall(
            rf"^<!-- transcript: (\S+) -->\n```console\n(?:(?!```).*\n)*```\n{it.END}$", text, re.MULTILINE
        )
        assert len(found) == len(blocks(page, "console")), f"{name_of(page)}: a transcript without its markers"
        assert not [source for _, source in blocks(page, "") if re.search(r"^\$ ", source, re.MULTILINE)]
        places += [(name_of(page), name) for name in found]
    assert sorted(places) == sorted((scenario["page"], name) for name, scenario in it.scenarios().items())


def test_what_differs_from_run_to_run_is_put_in_one_form() -> None:
    steady = tool("transcripts").Steady("/tmp/x/1")
    assert steady.put("logs in /tmp/x/1/home/ada/20250101-000000_aaaaaaaa; pid: 5, PID 7 and pid 5") == (
        "logs in /home/ada/20261120-144610_ibiu5pti; pid: 32397, PID 32398 and pid 32397"
    )
    assert steady.put("20250101-000000_aaaaaaaa  lost     00:00:00   -      8     -  train.py  x") == (
        "20261120-144610_ibiu5pti  lost       14:46:10      -      8     -  train.py  x"
    )
    assert steady.put("loss 2.30, 12 epochs") == "loss 2.30, 12 epochs"


def test_tables_of_group_agent_and_protocol_are_the_codes() -> None:
    table = tool("render_table")
    assert table.main(["--check"]) == 0, "python tools/render_table.py brings it up to date"


def test_the_options_are_those_that_are_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = tool("render_options")
    assert options.main(["--check"]) == 0, "python tools/render_options.py brings it up to date"
    page = tmp_path / "cli.md"
    page.write_text(f"before\n{options.BEGIN}\nold\n{options.END}\nafter\n")
    monkeypatch.setattr(options, "PAGE", page)
    assert [options.main(arguments) for arguments in (["--check"], [], ["--check"])] == [1, 0, 0]
    assert page.read_text().startswith(f"before\n{options.BEGIN}\n")
    assert page.read_text().endswith(f"{options.END}\nafter\n")
    assert "| `--no-python` | boolean |" in page.read_text()


def test_the_manual_page_is_what_the_help_says() -> None:
    manual = tool("render_man")
    assert manual.main(["--check"]) == 0, "python tools/render_man.py brings it up to date"
    page = manual.PAGE.read_text(encoding="utf-8")
    for words in ('.SH "PHALANX RUNS PRUNE"', ".TP\n\\fB\\-\\-nproc\\-per\\-node N|auto|cpu|gpu\\fR\n"):
        assert words in page
    if shutil.which("groff"):
        done = subprocess.run(["groff", "-man", "-ww", "-z", manual.PAGE], check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_of_toml_are_job_files(page: Path) -> None:
    for _, source in blocks(page, "toml"):
        name = source.split("\n")[0].removeprefix("# ")
        JobFile(name, source, RunOptions, {})


def test_a_stale_table_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tool("render_table")
    page = tmp_path / "architecture.md"
    marks = [(table.BEGIN, table.END), (table.BEGIN_AGENT, table.END_AGENT)]
    marks += [(table.BEGIN_NODE, table.END_NODE), (table.BEGIN_PROTOCOL, table.END_PROTOCOL)]
    parts = "\n".join(f"{begin}\nan old table\n{end}" for begin, end in marks)
    page.write_text(f"before\n{parts}\nafter\n")
    monkeypatch.setattr(table, "PAGE", page)
    assert table.main(["--check"]) == 1
    assert table.main([]) == 0
    assert table.main(["--check"]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "an old table" not in text
