"""Runs programs, several at a time, and tells what each printed: a script that `test_programs` starts.

It reads one JSON object from stdin: ``folder``, and ``runs``, a list of programs, each with face, method and further
arguments. It writes one line of JSON to stdout whenever a run has ended. Every run is an interpreter's ``__main__``, in
a process, a session and a folder of its own. Those of torch's faces are forks of this process, which has imported torch
already: it takes two seconds, and nothing else, off each of them. Those of Phalanx begin with a fresh interpreter.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from types import ModuleType
from typing import Any

AT_ONCE = 3
"""Of two cores: a program of torch's waits now and then, and then another may go on."""
LIMIT = 90.0
"""Seconds for one run, after which it is killed and has failed."""
PROGRAMS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs")

# What a launcher above us, or a developer's shell, may have set.
REMOVED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def _started(folder: str, run: list[Any]) -> int:
    """Fork. Returns the pid, and 0 in the child, which is where the program is to be by then."""
    for name in ("w", "t"):
        os.makedirs(os.path.join(folder, name))
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored where a shell has started us with &
    stdin = os.open(os.devnull, os.O_RDONLY)
    streams = [stdin, *(os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY) for name in ("out", "err"))]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1024)
    os.chdir(os.path.join(folder, "w"))
    for name in REMOVED:
        os.environ.pop(name, None)
    os.environ |= {"TMPDIR": os.path.join(folder, "t"), "OMP_NUM_THREADS": "1"}
    program, face, method, arguments = run
    path = os.path.join(PROGRAMS, f"{program}.py")
    if not face.startswith("torch"):
        os.execv(sys.executable, [sys.executable, path, face, method, *arguments])
    sys.argv = [path, face, method, *arguments]
    sys.path[0] = PROGRAMS
    tempfile.tempdir = None
    return 0


def _be(path: str) -> None:
    """Do what ``python path`` does."""
    main = ModuleType("__main__")
    main.__file__ = path
    main.__dict__.update(__builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the second as multiprocessing has it
    with open(path, encoding="utf-8") as stream:
        code = compile(stream.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 - it is what an interpreter does


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as stream:
        return stream.read()


def _loop(folder: str, runs: list[Any]) -> bool:
    """Run them all. Returns False in the child that is to be a program."""
    waiting = list(enumerate(runs))
    running: dict[int, tuple[int, float, str, Any]] = {}  # by pidfd: pid, deadline, folder, run
    poll = select.poll()
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                number, run = waiting.pop(0)
                own = os.path.join(folder, str(number))
                pid = _started(own, run)
                if not pid:
                    running.clear()
                    return False
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid, time.monotonic() + LIMIT, own, run
                poll.register(pidfd, select.POLLIN)
            first = min(deadline for _, deadline, _, _ in running.values())
            ended = {fd for fd, _ in poll.poll(max(0.0, first - time.monotonic()) * 1000)}
            now = time.monotonic()
            for pidfd, (pid, deadline, own, run) in list(running.items()):
                if pidfd not in ended and now < deadline:
                    continue
                if pidfd not in ended:
                    os.killpg(pid, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                del running[pidfd]
                poll.unregister(pidfd)
                os.close(pidfd)
                seconds = round(now - deadline + LIMIT, 1)
                result = {"run": run[:3], "code": code if pidfd in ended else None, "folder": own, "seconds": seconds}
                result |= {name: _read(own, name) for name in ("out", "err")}
                sys.stdout.write(json.dumps(result) + "\n")
                sys.stdout.flush()
    finally:
        for pid, *_ in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    return True


def _hasten(folder: str) -> None:
    """Let every interpreter that is started from here collect garbage less often: torch is imported a fifth faster."""
    os.makedirs(folder)
    with open(os.path.join(folder, "sitecustomize.py"), "w", encoding="utf-8") as stream:
        stream.write("import gc\ngc.set_threshold(1_000_000)\n")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


def _wanted() -> bool:
    """Read what is wanted, and do it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    wanted = json.load(sys.stdin)
    _hasten(os.path.join(wanted["folder"], "site"))
    if any(face.startswith("torch") for _, face, _, _ in wanted["runs"]):
        import torch.distributed.elastic.multiprocessing
        import torch.multiprocessing  # noqa: F401 - the programs are forks that have it
    done = _loop(wanted["folder"], wanted["runs"])
    if done:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is done, and this process is about to leave
    return done


if __name__ == "__main__" and not _wanted():
    _be(sys.argv[0])
