"""The process that starts a group is a guest house: its signals, its descriptors, its odd states, before and after."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from phalanx.multiprocessing import PContext, SignalException, start_processes
from tests.support import workers
from tests.support.command import Place, refused
from tests.support.workers import run_script

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.helpers import Gate, Ready

pytestmark = [pytest.mark.each_python, pytest.mark.usefixtures("own_temporary_folder")]

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def waiting(ready: Ready, gate: Gate) -> PContext:
    """A group of one, whose worker has told that it is there, and waits at the gate."""
    group = start_processes("w", workers.announce, {0: (ready.address, gate.address)}, start_method="fork")
    ready.wait()
    return group


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in HANDLED]


@pytest.mark.parametrize("number", HANDLED)
def test_a_signal_raises_in_the_main_thread(ready: Ready, gate: Gate, number: signal.Signals) -> None:
    before = handlers()
    with pytest.raises(SignalException) as caught, waiting(ready, gate) as group:  # noqa: PT012 - the group is the point
        os.kill(os.getpid(), number)
        group.wait()
    assert caught.value.sigval is number
    assert str(caught.value) == f"Process {os.getpid()} got signal: {number.value} ({number.name})"
    assert handlers() == before
    result = group.wait()
    assert result is not None
    assert result.outcomes[0].state == "stopped"


def test_which_signals(ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    before = handlers()
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", " SIGUSR1,SIGUSR2, ")
    with pytest.raises(SignalException) as caught, waiting(ready, gate) as group:  # noqa: PT012 - the group is the point
        assert handlers() == before
        os.kill(os.getpid(), signal.SIGUSR2)
        group.wait()
    assert caught.value.sigval is signal.SIGUSR2
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_no_signals(ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    before = handlers()
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    with waiting(ready, gate):
        assert handlers() == before


@pytest.mark.parametrize(
    "names,text", [("SIGTERM,SIGNONE", "SIGNONE"), ("SIGKILL", "SIGKILL cannot be handled"), ("15", "15")]
)
def test_signals_that_cannot_be(monkeypatch: pytest.MonkeyPatch, names: str, text: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", names)
    with pytest.raises(ValueError, match="TORCHELASTIC_SIGNALS_TO_HANDLE") as caught:
        start_processes("n", "true", nprocs=1)
    assert text in str(caught.value)


@pytest.mark.slow
def test_an_unknown_signal_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    place = Place(tmp_path / "place")
    place.env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGNONE"
    done = place.run("--no-python", "touch", "started")
    refused(done, "TORCHELASTIC_SIGNALS_TO_HANDLE in the environment): 'SIGTERM,SIGNONE': expected names of")
    assert list(place.folder.iterdir()) == []


@pytest.mark.slow
def test_nested_groups_share_the_handlers(ready: Ready, gate: Gate) -> None:
    before = handlers()
    outer = waiting(ready, gate)
    during = handlers()
    assert during != before
    inner = waiting(ready, gate)
    assert handlers() == during
    for _ in range(2):  # in whatever order, and however often
        outer.close()
    assert handlers() == during
    inner.close()
    assert handlers() == before


def test_a_handler_that_the_user_sets_meanwhile_stays(ready: Ready, gate: Gate) -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        with waiting(ready, gate):
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_transparent_once_another_thread_has_closed(
    ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the main thread may restore them. Until it comes by, they pass each signal on."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1,SIGUSR2,SIGWINCH")
    seen: list[int] = []

    def note(number: int, _frame: object) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGUSR1, note)
    ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        group = waiting(ready, gate)
        assert signal.getsignal(signal.SIGUSR1) is not note
        closer = threading.Thread(target=group.close)
        closer.start()
        closer.join()
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGWINCH)  # default: ignored
        assert seen == [signal.SIGUSR1] * 2
        group.wait(0)
        assert signal.getsignal(signal.SIGUSR1) is note
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGWINCH) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGUSR2, ignored)


def test_handlers_are_restored_when_the_start_fails() -> None:
    before = handlers()
    with pytest.raises(FileNotFoundError):
        start_processes("n", "no-such-program", nprocs=1)
    with pytest.raises(TypeError):
        start_processes("n", print, {0: (threading.Lock(),)})
    assert handlers() == before


TERMINATED = """
import os, sys
from phalanx.multiprocessing import SignalException, start_processes
group = start_processes("t", sys.executable, {0: ("-c", sys.argv[1])})
try:
    open(sys.argv[2], "w").close()  # the worker waits for this: a signal within the start would be raised there
    group.wait()
except SignalException as error:
    print(error.sigval.name, flush=True)
finally:
    group.close()
print(*(f"{outcome.state} {outcome.exitcode}" for outcome in group.wait().outcomes.values()), flush=True)
os.kill(os.getpid(), 15)
"""


@pytest.mark.slow
def test_sigterm_in_a_program(tmp_path: Path, gate: Gate) -> None:
    """The worker ends its launcher, which is its keeper's guard's parent. Afterwards SIGTERM is SIGTERM."""
    fifo = tmp_path / "started"
    os.mkfifo(fifo)
    code = (
        f"open({str(fifo)!r}).read(); "
        "import os; stat = lambda pid: open(f'/proc/{pid}/stat').read().rpartition(')')[2].split(); "
        f"guard = int(stat(os.getppid())[1]); os.kill(int(stat(guard)[1]), 15); {gate.python()}"
    )
    done = run_script(tmp_path, TERMINATED, code, str(fifo))
    assert (done.stdout, done.stderr) == ("SIGTERM\nstopped -15\n", "")
    assert done.returncode == -signal.SIGTERM


# --- launchers in odd states

FACTS = """
import json, os, signal, sys
if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN if sys.argv[2] == "nochld" else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD})
    os.umask(0o027)
    inherited = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    from phalanx.multiprocessing import Std, start_processes
    from tests.support import workers
    # Read by the shell itself: while it starts a program, it blocks all signals.
    read = 'while IFS= read -r line; do printf "%s\\n" "$line"; done </proc/$$/status; '
    binary = ("-c", read + "ls -l /proc/$$/fd; umask; pwd; cat")
    if sys.argv[1] == "binary":
        group = start_processes("b", "sh", {0: binary}, log_dir=sys.argv[3], redirects=Std.ALL)
    else:
        options = {"start_method": sys.argv[1], "log_dir": sys.argv[3], "redirects": Std.ALL}
        group = start_processes("b", workers.facts, {0: ()}, **options)
    with group:
        result = group.wait()
    assert not result.is_failed(), result.root_cause
    value = result.return_values[0]
    print(json.dumps(value and {name: sorted(it) if isinstance(it, set) else it for name, it in value.items()}))
    assert signal.getsignal(signal.SIGHUP) == signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGCHLD) == (signal.SIG_IGN if sys.argv[2] == "nochld" else signal.SIG_DFL)
    assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


@pytest.mark.slow
@pytest.mark.parametrize("child", ["chld", "nochld"])
def test_a_binary_starts_fresh(tmp_path: Path, logs: Path, child: str) -> None:
    done = run_script(tmp_path, FACTS, "binary", child, str(logs))
    assert (done.stdout, done.stderr, done.returncode) == ("null\n", "", 0)
    lines = (logs / "0/stdout.log").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert workers.signals_of(status["SigIgn"]) == set()
    assert workers.signals_of(status["SigBlk"]) == set()
    # The shell catches nothing that concerns us; dash handles SIGCHLD for itself.
    assert workers.signals_of(status["SigCgt"]) <= {signal.SIGCHLD, signal.SIGINT}
    assert status["NSsid"].split()[-1] == status["NSpid"].split()[-1]  # a session of its own
    assert workers.links_of("\n".join(lines)) == {
        "0": "/dev/null",
        "1": str(logs / "0/stdout.log"),
        "2": str(logs / "0/stderr.log"),
    }
    assert lines[-2:] == ["0027", os.getcwd()]
    assert (logs / "0/stderr.log").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("child", ["chld", "nochld"])
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_function_starts_fresh(tmp_path: Path, logs: Path, method: str, child: str) -> None:
    import json

    done = run_script(tmp_path, FACTS, method, child, str(logs))
    assert (done.stderr, done.returncode) == ("", 0)
    facts = json.loads(done.stdout)
    assert facts["session"] == facts["group"] == facts["pid"]
    assert facts["cwd"] == os.getcwd()
    assert facts["umask"] == 0o027
    assert facts["stdin"] == ""
    assert set(facts["ignored"]) == {signal.SIGPIPE, signal.SIGXFSZ}  # as in any Python
    assert facts["blocked"] == []
    assert facts["int_handler"]
    # SIGINT is Python's, the fatal ones leave their stack in a neighbour of the error file, two ask for stacks.
    assert set(facts["caught"]) == {
        signal.SIGINT, signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL,
        signal.SIGRTMIN + 18, signal.SIGRTMIN + 19,
    }  # fmt: skip
    assert facts["threads"] == 1
    assert facts["argv"][1:] == [method, child, str(logs)]
    fds = facts["fds"]
    assert (fds.pop("0"), fds.pop("1"), fds.pop("2")) == (
        "/dev/null", str(logs / "0/stdout.log"), str(logs / "0/stderr.log")
    )  # fmt: skip
    kinds = sorted(target.partition(":")[0] for target in fds.values())
    # The last is the sentinel of its parent, as in `multiprocessing`.
    mine = [str(logs / "0/error.json.fatal"), str(logs / "0/error.json.stacks"), "socket", "anon_inode"]
    if method == "fork":  # it has what its launcher has
        mine += ["/dev/null"]
    assert kinds == sorted(mine)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_a_worker_starts_inherits_nothing_of_ours(method: str) -> None:
    with start_processes("c", workers.fds_of_a_child, {0: ()}, start_method=method) as group:
        result = group.wait()
    assert result is not None
    assert workers.links_of(result.return_values[0]).keys() == {"0", "1", "2", "3"}  # 3 is the listing's own


CLOSED = """
import os, sys
if __name__ == "__main__":
    os.closerange(0, 3)
    from phalanx.multiprocessing import Std, start_processes
    from tests.support import workers
    out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o666) if sys.argv[3] == "low" else -1
    text = ""
    for method in ("spawn", "forkserver", "fork"):
        with start_processes("c", workers.add, {0: (1, 2), 1: (3, 4)}, start_method=method) as group:
            result = group.wait()
        text += f"{result.return_values} {result.root_cause}\\n"
    os.makedirs(sys.argv[2])
    command = ("-c", "ls -l /proc/$$/fd; echo x >&2")
    with start_processes("c", "sh", {0: command}, log_dir=sys.argv[2], tee=Std.ALL) as group:
        result = group.wait()
    text += f"{result.root_cause}\\n"
    if out >= 0:
        os.close(out)
    with open(sys.argv[1], "a") as file:
        file.write(text)
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["low", "free", "from the start"])
def test_a_launcher_whose_standard_streams_are_closed(tmp_path: Path, how: str) -> None:
    """Also when it has opened a file since, which has become its stdin by number; or when it never had any.

    As by a shell's <&- >&- 2>&-: Python itself has no sys.stdout then.
    """
    out, logs = tmp_path / "out", tmp_path / "logs"
    prefix = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh") if how == "from the start" else ()
    done = run_script(tmp_path, CLOSED, str(out), str(logs), how, prefix=prefix)
    assert done.returncode == 0
    assert out.read_text() == "{0: 3, 1: 7} None\n" * 3 + "None\n"
    assert workers.links_of((logs / "0/stdout.log").read_text()).keys() == {"0", "1", "2"}
    assert (logs / "0/stderr.log").read_text() == "x\n"


PRINTS = """
import sys
if __name__ == "__main__":
    print("before", end=" ")
    from phalanx.multiprocessing import start_processes
    with start_processes("c", print, {0: ("inside",)}, start_method=sys.argv[1]) as group:
        group.wait()
    print("after")
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_buffered_output_of_the_launcher_is_written_once(tmp_path: Path, method: str) -> None:
    done = run_script(tmp_path, PRINTS, method)
    assert sorted(done.stdout.split()) == ["after", "before", "inside"]
    assert done.stderr == ""


def test_import_has_no_effect(tmp_path: Path) -> None:
    text = """
import os, signal, sys, threading
before = [signal.getsignal(number) for number in range(1, 32)], threading.active_count(), os.listdir("/proc/self/fd")
import phalanx.multiprocessing
after = [signal.getsignal(number) for number in range(1, 32)], threading.active_count(), os.listdir("/proc/self/fd")
assert before == after
assert not {"cloudpickle", "click"} & sys.modules.keys()
"""
    done = run_script(tmp_path, text)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
