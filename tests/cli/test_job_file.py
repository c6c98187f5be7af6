"""`phalanx run -f FILE`: what a job file says, what goes before it and after it, and how mistakes in it are told."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli._commands import cli
from phalanx.cli._job_file import MOST_BYTES, statements
from phalanx.cli.run import run
from tests.support.command import Place, refused

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('NAME')]))"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return tmp_path / "job.toml"


def parsed(*argv: object) -> dict[str, Any]:
    return run.make_context("phalanx run", list(map(str, argv))).params


def refusal(*argv: object) -> str:
    """The line of an error, after which nothing starts."""
    done = CliRunner().invoke(cli, ["run", *map(str, argv)])
    assert done.exit_code == 2, done.output
    return done.output.splitlines()[-1]


# --- a real run


@pytest.mark.slow
def test_a_run_from_a_file(place: Place) -> None:
    place.write(SHOW, "show ü.py")
    place.write(
        """
        # what is run each night
        script = "show ü.py"
        args = ["--lr", "0.1", "a b",  # three
                '''multi
        line''']
        nproc-per-node = 2
        log_dir = "by file"
        tee = 1

        [env]
        NAME = "ü"
        """,
        "job.toml",
    )
    done = place.run("-f", "job.toml", logs=False)
    line = '[["--lr", "0.1", "a b", "multi\\nline"], "\\u00fc"]'
    assert sorted(done.out.splitlines()) == [f"[0] {line}", f"[1] {line}"], done
    assert len(list(place.folder.glob("by file/*/attempt_0/*/stdout.log"))) == 2


@pytest.mark.long
def test_a_typed_script_takes_the_place_of_the_files(place: Place) -> None:
    place.write(SHOW)
    place.write('script = "no_such.py"\nargs = ["a"]\n[env]\nNAME = "x"', "job.toml")
    assert place.run("-f", "job.toml", "script.py").out == '[0] [[], "x"]\n'
    assert place.run("-f", "job.toml", "--", "script.py", "-f", "y").out == '[0] [["-f", "y"], "x"]\n'
    refused(place.run("-f", "job.toml", "--", "--lr"), "script '--lr' does not exist")
    refused(place.run("-f", "job.toml"), "script 'no_such.py' does not exist")
    place.write("nproc-per-node = 1", "job.toml")
    refused(place.run("-f", "job.toml"), "Missing argument 'SCRIPT'")
    assert place.run("-f", "job.toml", "script.py").out == "[0] [[], null]\n"


@pytest.mark.slow
def test_variables_of_workers(place: Place) -> None:
    """A number of threads that the file has chosen is not divided among workers; numbers become texts."""
    place.write("import os; print(os.environ['OMP_NUM_THREADS'], os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'])")
    del place.env["OMP_NUM_THREADS"]
    place.write("nproc-per-node = 2\n[env]\nOMP_NUM_THREADS = 7\nTORCH_NCCL_ASYNC_ERROR_HANDLING = '3'", "job.toml")
    done = place.run("-f", "job.toml", "script.py")
    assert sorted(done.out.splitlines()) == ["[0] 7 3", "[1] 7 3"], done
    assert "OMP_NUM_THREADS" not in done.err


def test_a_flag_that_is_gone_may_be_false(job: Path) -> None:
    """As in the files of older runs, for `phalanx rerun`."""
    job.write_text("no-standby = false")
    assert parsed("-f", job, "x.py")["script"] == "x.py"


# --- each option


def test_lists(job: Path) -> None:
    job.write_text("""
        grep = ["a, b", "c"]
        ranks = [0, "4-6"]
        local-ranks-filter = 1
        preload = ["json", "numpy"]
        rlimit = ["nofile=64", "as=8GiB"]
        never-restart-on = [2, "SIGILL"]
        always-restart-on = 75
        on-expiry = ["report", "kill:30"]
        exclude = "x,y"
        """)
    values = parsed("-f", job, "x.py")
    assert (values["grep"], values["exclude"], values["ranks"]) == (["a, b", "c"], ["x,y"], [0, 4, 5, 6])
    assert (values["preload"], values["rlimit"]) == (["json", "numpy"], {"nofile": "64", "as": "8GiB"})
    assert (values["never_restart_on"], values["always_restart_on"]) == ([2, -4], [75])
    assert (values["local_ranks_filter"], values["on_expiry"]) == ([1], (("report", 0.0), ("kill", 30.0)))
    assert parsed("-f", job, "--grep", "d", "x.py")["grep"] == ["d"]  # it takes its place, and adds nothing


def test_further_names_are_keys_too(job: Path) -> None:
    job.write_text("shutdown-timeout = inf\nrank = 3")
    assert parsed("-f", job, "x.py")["grace"] == float("inf")
    assert parsed("-f", job, "x.py")["ranks"] == [3]


def test_other_line_ends_and_a_byte_order_mark(job: Path) -> None:
    job.write_bytes(b"\xef\xbb\xbf# first\r\ngrace = 3\r\ntee = '''\r\n1'''\r\n")
    assert parsed("-f", job, "x.py")["grace"] == 3


# --- mistakes


@pytest.mark.parametrize(
    "text,said",
    [
        ("\ngrase = 3", "job.toml, line 2: grase: there is no such option; did you mean 'grace'?"),
        ("nproc_per_nod = 3", "line 1: nproc_per_nod: there is no such option; did you mean 'nproc-per-node'?"),
        ("xyz = 3", "job.toml, line 1: xyz: there is no such option"),
        ("no-standby = true", "job.toml, line 1: no-standby: restarts have no standby any more; leave it out"),
        ("use_env = true", "job.toml, line 1: use_env: the rank is in LOCAL_RANK, as with torchrun; leave it out"),
        ("rdzv_id = true", "job.toml, line 1: rdzv_id: expected a string"),
        ("nprocs = 3", "job.toml, line 1: nprocs: it is --nproc-per-node here"),
        ("dry-run = true", "job.toml, line 1: dry-run: it is for the command line alone"),
        ('args = ["x"]', 'job.toml, line 1: args: there is no script that they are for; add script = "train.py"'),
        ('script = "x.py"\nargs = "a"', "job.toml, line 2: args: expected a list of strings, found 'a'"),
        ('script = "x.py"\nargs = ["a",\ntrue]', "line 2: args: expected a list of strings, found true in it"),
        ("script = 3", "job.toml, line 1: script: expected a string, found 3"),
        ('grace = "3 s"', "'--grace' (in job.toml, line 1): '3 s': expected a time, 0 or more, like 90"),
        ("grace = true", "job.toml, line 1: grace: expected a string or a number, found true"),
        ("grace = 2026-11-20", "job.toml, line 1: grace: expected a string or a number, found a date or a time"),
        ('log-keep = "3"', "job.toml, line 1: log-keep: expected a whole number, found '3'"),
        ("log-mode = 0o750", "job.toml, line 1: log-mode: expected a string, found 488"),
        ("fold = 1", "job.toml, line 1: fold: expected true or false, found 1"),
        ('fold = "true"', "job.toml, line 1: fold: expected true or false, found 'true'"),
        ("nproc-per-node = [1]", "line 1: nproc-per-node: expected a string or a whole number, found a list"),
        ("nproc-per-node.x = 1", "line 1: nproc-per-node: expected a string or a whole number, found a table"),
        ('a = """\n"""\ngrep = [["x"]]', "job.toml, line 1: a: there is no such option"),
        ('grep = [["x"]]', "job.toml, line 1: grep: expected a list of strings, found a list in it"),
        ("grace = 1\n\nshutdown_timeout = 2",
         "job.toml, line 3: shutdown_timeout: it is grace (job.toml, line 1) again; leave one of them out"),
        ("grace = -1", "Invalid value for '--grace' (in job.toml, line 1): '-1': expected a time, 0 or more, like"),
        ('nproc-per-node = "many"', "Invalid value for '--nproc-per-node' (in job.toml, line 1): 'many': expected"),
        ('color = "red"', "Invalid value for '--color' (in job.toml, line 1): 'red' is not one of"),
        ("\nlog-keep = 3", "(--log-keep is in job.toml, line 2)"),
        ("timestamps = true\nelapsed = true",
         "exclude each other (--timestamps is in job.toml, line 1, --elapsed is in job.toml, line 2)"),
        (f"log-keep = {1 << 70}", "job.toml, line 1: log-keep: the number is too large"),
        ('run-id = "a\\u0000"', "job.toml, line 1: run-id: a null character cannot be part of it"),
        ('on-event = ["failed a\\u0000b"]', "job.toml, line 1: on-event: a null character cannot be part of it"),
        ("[run]\ngrace = 3", "job.toml, line 1: run: there is no such table; options stand at the top"),
        ("env = 3", "job.toml, line 1: env: expected a table of variables, below [env], found 3"),
        ("[env]\n\ngrace = 3", "job.toml, line 3: env.grace: it is an option, not a variable; put it above [env]"),
        ("[env]\nA-B = 3", "job.toml, line 2: env.A-B: it is no name of a variable"),
        ("[env]\nA = true", "job.toml, line 2: env.A: expected a string or a number, found true"),
        ("env = {B = '1', RANK = 3}", "job.toml, line 1: env.RANK: each worker gets its own from phalanx run"),
        ("[env]\nMASTER_PORT = 3", "line 2: env.MASTER_PORT: each worker gets its own from phalanx run; the option m"),
        ("[env]\nPHALANX_GROUP = 3", "job.toml, line 2: env.PHALANX_GROUP: each worker gets its own"),
        ("a = 1\na = 2", "job.toml, line 2: cannot overwrite a value"),
        ('\nlog-dir = "$NO_SUCH/x"', "job.toml, line 2: log-dir: '$NO_SUCH/x': the variable NO_SUCH is not set"),
        ('log-dir = "a$/x"', "job.toml, line 1: log-dir: 'a$/x': a $ in it begins no variable"),
        ('log-dir = "~no-such/x"', "job.toml, line 1: log-dir: '~no-such/x': there is no user 'no-such'"),
        ('script = "$NO_SUCH"', "job.toml, line 1: script: '$NO_SUCH': the variable NO_SUCH is not set"),
        ('rdzv-conf = "ca=$NO_SUCH"', "job.toml, line 1: rdzv-conf: '$NO_SUCH': the variable NO_SUCH is not set"),
        ("virtual-local-rank = true\n[env]\nHIP_VISIBLE_DEVICES = '0,1'", "it sets HIP_VISIBLE_DEVICES, which"),
        ("grace 3", "job.toml, line 1, column 7: expected '=' after a key in a key/value pair"),
        ("a = 1\na = 2\n", "job.toml, line 2, column 6: cannot overwrite a value"),
        ("grace = [1,\n\n", "job.toml, line 1: invalid value"),
        (f"grep = {'[' * 50_000}", "job.toml: values are nested too deep"),
    ],
    ids=lambda text: text.splitlines()[-1][:40] if text else "",
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(job: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    monkeypatch.chdir(job.parent)
    job.write_text(text)
    Path("script.py").touch()
    assert said in refusal("-f", "job.toml", "script.py")


@pytest.mark.slow
def test_an_environment_that_is_wrong_beside_the_file(place: Place) -> None:
    """What the file says goes before it; what it does not say comes from it."""
    place.write(SHOW)
    place.write("grace = 3", "job.toml")
    place.env["PET_GRACE"] = "soon"
    assert place.run("-f", "job.toml", "script.py").status == 0
    place.env["PET_SETTLE"] = "soon"
    refused(place.run("-f", "job.toml", "script.py"), "'--settle' (PET_SETTLE in the environment)")


def test_a_file_that_is_no_job_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("folder").mkdir()
    Path("bytes").write_bytes(b"grace = 3\nrun-id = '\xff'")
    Path("large").write_bytes(b"#" * (MOST_BYTES + 1))
    for name, said in (
        ("no_such", "no_such: No such file or directory"),
        ("fifo", "fifo: it is not a regular file, but a FIFO; a job file is a regular file"),
        ("folder", "folder: it is not a regular file, but a folder; a job file is a regular file"),
        ("/dev/null", "/dev/null: it is not a regular file, but a device; a job file is a regular file"),
        ("bytes", "bytes, line 2: expected UTF-8, found the byte 0xff"),
        ("large", "large: a job file has 1,048,576 bytes at most"),
        ("", "'': No such file or directory"),
    ):
        assert refusal("-f", name, "script.py") == f"Error: {said}"
    assert "there can be one job file, and there are 2: a, b" in refusal("-f", "a", "--job-file", "b", "script.py")


@pytest.mark.long
def test_a_file_as_large_as_it_can_be(job: Path) -> None:
    """The line of a mistake at its end is found in a moment."""
    lines = (MOST_BYTES - 100) // 6
    job.write_text("grep = [\n" + "'[#',\n" * lines + "]\nfoldd = 1")
    with pytest.raises(Exception, match=f"line {lines + 3}: foldd: there is no such option"):
        parsed("-f", job, "x.py")


VALUES = st.one_of(
    st.text("ab'\"#[]{}=\n\\").map(lambda text: "'''" + text.replace("'", "") + "'''"),
    st.text("ab'#[]{}=\n").map(lambda text: f'"""{text}"""'),
    st.text("ab'#[]{}= ").map(lambda text: f'"{text}"'),
    st.lists(st.sampled_from(["'#'", "3", "{a = ']'}", "\n# x]\n1"])).map(lambda items: f"[{', '.join(items)}]"),
)


@given(st.lists(st.tuples(VALUES, st.sampled_from(["\n", "\n\n", " # '''\n", "\n[t]\n# [x\n"])), max_size=5))
def test_statements_are_found_whatever_they_are(parts: list[tuple[str, str]]) -> None:
    text, lines, tables = "", [], 0
    for number, (value, after) in enumerate(parts):
        lines.append(text.count("\n") + 1)
        text += f"k{number} = {value}" + after.replace("[t]", f"[t{tables}]")
        tables += "[t]" in after
    tomllib.loads(text)
    found = [(line, statement) for line, statement in statements(text) if not statement.startswith("[t")]
    assert [line for line, _ in found] == lines
    assert [next(iter(tomllib.loads(statement))) for _, statement in found] == [f"k{n}" for n in range(len(parts))]
