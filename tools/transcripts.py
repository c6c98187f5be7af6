#!/usr/bin/env python3
"""Run every transcript of the documentation anew, and write what was to be seen into its page.

    python tools/transcripts.py                    # all
    python tools/transcripts.py session ctrl-c     # some
    python tools/transcripts.py --check            # exit code 1 if a page shows what is not so any more

The scenarios stand in `transcripts.toml`: the files, what is typed, and what is cut. Each is run in a new folder, on a
terminal of 120 columns without colours, by a user called ada with an empty home. What differs from run to run (dates,
process ids, names of runs, the machine) is put in one form by `Steady`, and by nothing else.

Where a file waits for a second so that others get on, a run here waits for what is to be seen by then: no page, and no
test of one, depends on how busy the machine is.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import marks

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
SCENARIOS = Path(__file__).with_suffix(".toml")
HOME = "home/ada"
RUNS = ".local/state/phalanx/runs"
END = "<!-- end of the transcript -->"
PATIENCE = 60.0
"""Seconds for which a text is waited for, and the end of a command."""

FENCE = re.compile(r"^```(?:\w+)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PHALANX = """\
import sys
from tests.support.waits import wait_long_for_stacks
wait_long_for_stacks()
from phalanx.cli import main
main()
"""
"""The command, which waits for stacks as long as a busy machine may need."""

UNTIL = """\
import os, time
def until(name):
    while not os.path.exists(name):
        time.sleep(0.01)
def meet(name):
    open(name + os.environ["RANK"], "w").close()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        until(name + str(rank))
"""


class NoDiskError(OSError):
    """A scenario takes a small disk, and none can be mounted here."""


class Steady:
    """Puts what differs from run to run in one form: the same in the same place is the same here."""

    RUNS = (
        "20261120-144610_ibiu5pti", "20261120-151203_35bd0h54", "20261120-154612_m0w1z2aa", "20261120-160148_x7d0c4qp",
        "20261120-163321_yv444cg5", "20261120-170259_k1w0rd4z",
    )  # fmt: skip
    FIXED = (
        (r"\x1b\[[0-9;]*m|\r", ""),
        (
            r"OMP_NUM_THREADS=\d+( to \d+)? for each of (\d+) workers \([^)]*\)",
            r"OMP_NUM_THREADS=2 for each of \2 workers (8 CPUs)",
        ),
        (r"(?m)^(  time      : ).*$", r"\g<1>2026-11-20_14:46:10"),
        (r"(?m)^(  host      : ).*$", r"\g<1>node7"),
        (
            r"(?m)^( +)(?:Current thread|Thread) 0x[0-9a-f]+.*:$",
            r"\1Current thread 0x00007f4197381b80 (most recent call first):",
        ),
        (r'"/[^" ]*/lib/python3\.\d+/([^"]*)", line \d+', r'"/usr/lib/python3.12/\1", line 525'),
        (r"(?m)^(    .*\S +)(threading)\.py:\d+$", r"\1\2.py:359"),
        (r"\buser \S+, pid", "user ada, pid"),
        (r"\b[\d.]+m?s over", "2ms over"),
        (r"\b[\d.]+m?s old", "1.1s old"),
        (r"(failed|succeeded,|\d\d) after [\d.]+m?s", r"\1 after 2.1s"),
        (r"(?m)^(\d{8}-\d{6}_\w{8}: [a-z]+(?: with exit code \d+)? (?:after|for)) \S+$", r"\1 2.1s"),
        (r"follows in [\d.]+m?s", "follows in 1.9s"),
        (r"(rank \d  .*  since )[\d:]+", r"\g<1>14:46:12"),
        (r"(attempts? \d[\d to]*, )\d\d:\d\d:\d\d", r"\g<1>14:46:10"),
        (r"(, 14:46:10 to )\d\d:\d\d:\d\d", r"\g<1>14:48:22"),
        (r"\d+(?:\.\d)? (?:KiB|MiB)", "56.0 KiB"),
    )  # fmt: skip

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._runs: dict[str, str] = {}
        self._pids: dict[str, str] = {}

    def seen(self, text: str) -> None:
        """Take note of the runs and processes that a text names."""
        for run in re.findall(r"\d{8}-\d{6}_\w{8}", text):
            self._runs.setdefault(run, self.RUNS[len(self._runs)])
        for pid in re.findall(r"(?i)\bpid:? (\d+)", text):
            self._pids.setdefault(pid, str(32397 + len(self._pids)))

    def put(self, text: str) -> str:
        """The text in that form."""
        self.seen(text)
        for path, shown in ((sys.executable, "python"), (f"{ROOT}/src/", "/usr/lib/python3.12/")):
            # Where the path has a space, it is in quotes as a word for a shell.
            text = re.sub(rf"'{re.escape(path)}([^\s']*)'", rf"{shown}\1", text).replace(path, shown)
        text = text.replace(self._folder, "")
        text = re.sub(r"\d{8}-\d{6}_\w{8}", lambda found: self._runs[found[0]], text)
        text = re.sub(r"(?i)(\bpid:? )(\d+)", lambda found: found[1] + self._pids[found[2]], text)
        for pattern, fixed in self.FIXED:
            text = re.sub(pattern, fixed, text)
        return "\n".join(self._row(line).rstrip() for line in text.split("\n"))

    @staticmethod
    def _row(line: str) -> str:
        """A line of the tables of runs, with the time of its name, and one width for durations."""
        cells = re.split(r" {2,}", line)
        if cells[0] != "RUN" and cells[0] not in Steady.RUNS:
            return line
        name, state, *rest = cells
        if len(rest) == len(("AGE", "SIZE")):
            return f"{name:24}  {state:9}  {rest[0] if name == 'RUN' else '12m05s':>6}  {rest[1]:>8}"
        started = rest[0] if name == "RUN" else f"{name[9:11]}:{name[11:13]}:{name[13:15]}"
        spent = rest[1] if rest[1] in ("TIME", "-") else "2.1s"
        pid = "32397" if rest[4].isdecimal() else rest[4]
        command = "  ".join(rest[5:])
        return f"{name:24}  {state:9}  {started:8}  {spent:>5}  {rest[2]:>5}  {rest[3]:>4}  {pid:>5}  {command}"


class Terminal:
    """A terminal on which commands are typed, one after the other, and what was to be seen of each."""

    def __init__(self, root: Path) -> None:
        self.home = root / HOME
        self._root = root
        tools, self._extra = root / "bin", root / "lib"
        for folder in (self.home, tools, self._extra, root / "tmp"):
            folder.mkdir(parents=True)
        (self._extra / "waiting.py").write_text(UNTIL)
        (self._extra / "phalanx_command.py").write_text(PHALANX)
        records = f"{RUNS}/*/run.json"
        for name, code in (
            ("python", f'exec "{sys.executable}" "$@"'),
            ("phalanx", f'exec "{sys.executable}" -P "{self._extra}/phalanx_command.py" "$@"'),
            ("until-there", 'until [ -e "$1" ]; do sleep 0.01; done'),
            ("until-recorded", f'until [ "$(ls {records} 2>&1 | grep -c ^{RUNS})" = "$1" ]; do sleep 0.01; done'),
            ("until-asleep", 'for pid; do until grep -q "^State:.S" "/proc/$pid/status"; do sleep 0.01; done; done'),
        ):
            (tools / name).write_text(f"#!/bin/sh\n{code}\n")
            (tools / name).chmod(0o755)
        path = f"{ROOT / 'src'}:{ROOT}:{self._extra}"
        self._env = {
            "HOME": str(self.home), "PATH": f"{tools}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": path, "TERM": "dumb",
            "COLUMNS": "120", "LINES": "50", "LC_ALL": "C.UTF-8", "TZ": "UTC", "TMPDIR": str(root / "tmp"),
        }  # fmt: skip
        self._running: list[_Command] = []

    def type(self, command: str, when: list[dict[str, Any]], until: list[str]) -> str:
        """Run a command to its end, or until texts are seen; what it has shown."""
        it = _Command(command, self.home, self._env)
        self._running.append(it)
        for step in when:
            it.read(step["seen"])
            if "type" in step:
                it.type(step["type"])
            if "release" in step:
                (self._root / step["release"]).touch()
            if "run" in step:
                subprocess.run(["bash", "-c", step["run"]], cwd=self.home, env=self._env, check=True, timeout=PATIENCE)
        return it.read(until) if until else it.end()

    def close(self) -> None:
        """End what still runs."""
        for it in self._running:
            it.close()


class _Command:
    """A command on a terminal of its own."""

    def __init__(self, command: str, folder: Path, env: dict[str, str]) -> None:
        self._fd, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (50, 120))
        # Who leads a session and opens a terminal has it for its own: a Ctrl-C is for what runs there.
        own = ["bash", "-c", 'exec <"$0"; exec bash -c "$1"', os.ttyname(theirs), command]
        self._process = subprocess.Popen(
            own, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self._command = command
        self._shown = b""
        self._deadline = time.monotonic() + PATIENCE

    def read(self, texts: list[str]) -> str:
        """All that was shown, once these texts are among it. Raises RuntimeError if that takes too long."""
        while not all(text in self._text() for text in texts):
            if not self._more():
                message = f"{self._command}: {texts} did not come:\n{self._text()}"
                raise RuntimeError(message)
        return self._text()

    def type(self, text: str) -> None:
        """Type something."""
        os.write(self._fd, text.encode())

    def end(self) -> str:
        """All that was shown, at the end. Raises RuntimeError if that takes too long."""
        while self._more():
            pass
        self._process.wait(max(1.0, self._deadline - time.monotonic()))
        return self._text()

    def close(self) -> None:
        """End it, if it still runs."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            while self._more():  # it may have something to say, and would wait for a reader
                pass
            self._process.wait(PATIENCE)
        os.close(self._fd)

    def _text(self) -> str:
        return self._shown.decode(errors="replace").replace("\r\n", "\n")

    def _more(self) -> bool:
        """Read more. False: there is no more, or none comes."""
        if not select.select([self._fd], [], [], max(0.0, self._deadline - time.monotonic()))[0]:
            message = f"{self._command}: it takes too long:\n{self._text()}"
            raise RuntimeError(message)
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the last process that had the terminal has gone
            return False
        self._shown += data
        return bool(data)


@contextlib.contextmanager
def _small(folder: Path) -> Iterator[None]:
    """Have a folder be a disk of 256 KiB, which takes root. Raises NoDiskError."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        message = f"no disk can be mounted here: {done.stderr.decode().strip()}"
        raise NoDiskError(message)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def scenarios() -> dict[str, dict[str, Any]]:
    """All of them, by name."""
    return tomllib.loads(SCENARIOS.read_text(encoding="utf-8"))


def play(scenario: dict[str, Any]) -> str:
    """What a scenario shows, as it stands in the page. Raises NoDiskError."""
    with tempfile.TemporaryDirectory(prefix="transcript-") as name, contextlib.ExitStack() as until_end:
        root = Path(name).resolve()
        terminal, steady = Terminal(root), Steady(str(root))
        if "disk" in scenario:
            until_end.enter_context(_small(terminal.home / scenario["disk"]))
        for path, text in _files(scenario, root).items():
            (terminal.home / path).parent.mkdir(parents=True, exist_ok=True)
            (terminal.home / path).write_text(text, encoding="utf-8")
        shown = ""
        try:
            for command in scenario["commands"]:
                text = terminal.type(command["type"], command.get("when", []), command.get("until", []))
                steady.seen(text)
                if not command.get("hidden"):
                    shown += f"$ {command['type']}\n" + _edited(steady.put(text), command)
        finally:
            terminal.close()
    return shown


def _files(scenario: dict[str, Any], root: Path) -> dict[str, str]:
    """The files of a scenario: its own, and those that the page shows. Pauses wait for what is to be seen."""
    shown = dict(FENCE.findall((ROOT / scenario["page"]).read_text(encoding="utf-8")))
    found = {}
    for path, text in scenario["files"].items():
        found[path] = f"# {path}\n{shown[path]}" if text == "as in the page" else text
        if text.startswith("from "):
            found[path] = (ROOT / text.removeprefix("from ")).read_text(encoding="utf-8")
    for number, (path, pause) in enumerate(scenario.get("pauses", [])):
        mark = str(root / f"pause-{number}")
        here = f"until-there {mark}" if path.endswith(".sh") else f"__import__('waiting').until({mark!r})"
        found[path] = _replaced(found[path], pause, here, path)
    for path, place in scenario.get("meetings", []):
        found[path] = _replaced(found[path], place, f"__import__('waiting').meet({str(root / 'rank-')!r})", path)
    return found


def _replaced(text: str, old: str, new: str, path: str) -> str:
    if text.count(old) != 1:
        message = f"{path} must have once: {old}"
        raise ValueError(message)
    return text.replace(old, new)


def _edited(text: str, command: dict[str, Any]) -> str:
    """What is left of what a command has shown: lines whose order is by chance sorted, and what is cut marked."""
    lines = text.removesuffix("\n").split("\n") if text else []
    for pattern in command.get("by chance", []):
        places = [number for number, line in enumerate(lines) if re.search(pattern, line)]
        for place, line in zip(places, sorted(lines[number] for number in places), strict=True):
            lines[place] = line
    for first, last in command.get("cut", []):
        begin = next((number for number, line in enumerate(lines) if re.search(first, line)), None)
        after = range(begin or 0, len(lines))
        end = next((number for number in after if re.search(last, lines[number])), None)
        if begin is None or end is None:
            message = f"{command['type']}: there is nothing to cut from {first!r} to {last!r}:\n{text}"
            raise ValueError(message)
        lines[begin : end + 1] = ["…"]
    if "up to" in command:
        last = next(number for number, line in enumerate(lines) if re.search(command["up to"], line))
        lines[last + 1 :] = ["…"]
    return "".join(f"{line}\n" for line in lines)


def begin(name: str) -> str:
    """The marker before a transcript."""
    return f"<!-- transcript: {name} -->"


def main(arguments: list[str]) -> int:
    """Do what the command line asks for and return the exit code."""
    known = scenarios()
    check, names = "--check" in arguments, [name for name in arguments if name != "--check"]
    if unknown := set(names) - set(known):
        sys.stderr.write(f"there is no transcript {min(unknown)!r}; there are {', '.join(known)}\n")
        return 2
    stale = []
    for name in names or known:
        page = ROOT / known[name]["page"]
        try:
            block = f"```console\n{play(known[name])}```\n"
        except NoDiskError as error:
            sys.stdout.write(f"{name}: left as it is: {error}\n")
            continue
        old = page.read_text(encoding="utf-8")
        new = marks.replace(old, begin(name), END, block, page.name)
        if new != old:
            stale.append(name)
            if not check:
                page.write_text(new, encoding="utf-8")
        sys.stdout.write(f"{name}: {'as before' if new == old else 'it differs' if check else 'new'}\n")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
