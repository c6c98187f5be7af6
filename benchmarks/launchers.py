"""The commands that run N copies of a program on one machine, each with what a user would give it for the same job.

Owns the peers' command lines and their configuration files; what is measured of them is in `cases`. A command that
ends when its copies have ended is a runner; the others (supervisord, circus, s6) supervise until they are stopped.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks import peers
from benchmarks.case import FLOOR, PHALANX, TORCH

if TYPE_CHECKING:
    from collections.abc import Callable


class Job(NamedTuple):
    """``copies`` of the program ``argv``, in a folder of the launcher's own. ``grace``: seconds between the two kills.

    ``teed``: whether the copies' output is to be on the launcher's, line by line, marked by the copy.
    """

    argv: list[str]
    copies: int
    folder: Path
    grace: int = 2
    teed: bool = False


class Launcher(NamedTuple):
    """A way to run a job.

    Attributes:
        command: The command line for a job; it may write its configuration into the job's folder.
        runs: Whether it ends when the copies have ended, so that a program can be run by it.
        falls: Whether one failed copy ends the others.
        tees: The mark that it puts before a line, as a pattern whose group is the copy; empty: it puts none.
        names: The variable in which it tells a copy what it is called in the mark.
        note: What the mapping is, for the page.
    """

    command: Callable[[Job], list[str]]
    runs: bool = True
    falls: bool = True
    tees: bytes = b""
    names: str = "LOCAL_RANK"
    note: str = ""


def _phalanx(job: Job) -> list[str]:
    tee = ["--tee", "3"] if job.teed else []
    return [
        *(sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(job.copies), "--no-python"),
        *("--grace", str(job.grace), "--log-dir", str(job.folder / "logs"), *tee, *job.argv),
    ]


def _torchrun(job: Job) -> list[str]:
    tee = ["--tee", "3"] if job.teed else []
    return [
        *(peers.python(TORCH), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.copies)),
        *("--no-python", "--log-dir", str(job.folder / "logs"), "--shutdown-timeout", str(job.grace), *tee, *job.argv),
    ]


def _parallel(job: Job) -> list[str]:
    shown = ["--line-buffer", "--tagstring", "{#}"] if job.teed else ["--ungroup"]
    return [
        *("parallel", "--will-cite", "-N0", "-j", str(job.copies), "--halt", "now,fail=1", *shown),
        *("--termseq", f"TERM,{job.grace * 1000},KILL,25", "-q", *job.argv, ":::", *map(str, range(job.copies))),
    ]


def _mpirun(job: Job) -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    shown = ["--tag-output"] if job.teed else []
    return ["mpirun", *root, "--oversubscribe", "--bind-to", "none", *shown, "-n", str(job.copies), *job.argv]


def _honcho(job: Job) -> list[str]:
    procfile = job.folder / "Procfile"
    procfile.write_text("".join(f"w{copy}: exec {shlex.join(job.argv)}\n" for copy in range(job.copies)))
    return [peers.program("honcho", "honcho"), "start", "--no-colour", "-f", str(procfile)]


def _supervisord(job: Job) -> list[str]:
    config = job.folder / "supervisord.conf"
    command = shlex.join(job.argv).replace("%", "%%")
    config.write_text(
        textwrap.dedent(f"""\
            [supervisord]
            nodaemon=true
            logfile=/dev/null
            logfile_maxbytes=0
            minfds=4096
            pidfile={job.folder}/supervisord.pid
            [program:w]
            command={command}
            process_name=%(program_name)s_%(process_num)d
            numprocs={job.copies}
            autorestart=false
            startsecs=0
            stopwaitsecs={job.grace}
            stopasgroup=true
            killasgroup=true
            stdout_logfile=/dev/null
            stderr_logfile=/dev/null
            """)
    )
    return [peers.program("supervisord", "supervisord"), "-c", str(config)]


def _circus(job: Job) -> list[str]:
    config = job.folder / "circus.ini"
    config.write_text(
        textwrap.dedent(f"""\
            [circus]
            endpoint = ipc://{job.folder}/endpoint
            pubsub_endpoint = ipc://{job.folder}/pubsub
            [watcher:w]
            cmd = {shlex.join(job.argv)}
            numprocesses = {job.copies}
            respawn = false
            copy_env = true
            graceful_timeout = {job.grace}
            stop_children = true
            """)
    )
    return [peers.program("circus", "circusd"), str(config)]


def _s6(job: Job) -> list[str]:
    scan = job.folder / "scan"
    for copy in range(job.copies):
        service = scan / f"w{copy}"
        service.mkdir(parents=True)
        (service / "run").write_text(f"#!/bin/sh\nexec {shlex.join(job.argv)}\n")
        (service / "run").chmod(0o755)
        (service / "timeout-kill").write_text(f"{job.grace * 1000}\n")
        (service / "finish").write_text("#!/bin/sh\nexit 125\n")  # not started again
        (service / "finish").chmod(0o755)
    return ["s6-svscan", "-c", "2000", "-t", "0", str(scan)]


_FLOOR = """
import os, signal, sys
copies = set()
def end(*_):
    for pid in copies:
        os.kill(pid, signal.SIGTERM)
signal.signal(signal.SIGTERM, end)
for _ in range(int(sys.argv[1])):
    copies.add(os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ))
failed = 0
while copies:
    pid, status = os.wait()
    copies.remove(pid)
    if status and not failed:
        failed = 1
        end()
os._exit(failed)
"""


def _floor(job: Job) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _FLOOR, str(job.copies), *job.argv]


LAUNCHERS = {
    PHALANX: Launcher(_phalanx, tees=rb" *\[(\d+)\] ", note="`phalanx run --no-python`"),
    TORCH: Launcher(_torchrun, tees=rb"\[default(\d+)\]:", note="`torchrun --standalone --no-python`"),
    "parallel": Launcher(
        _parallel, tees=rb"(\d+)\t", names="PARALLEL_SEQ", note="GNU parallel, `-j N --halt now,fail=1`"
    ),
    "mpirun": Launcher(
        _mpirun,
        tees=rb"\[\d+,(\d+)\]<stdout>:",
        names="OMPI_COMM_WORLD_RANK",
        note="OpenMPI's, `--oversubscribe --bind-to none`",
    ),
    "honcho": Launcher(
        _honcho, tees=rb"\d\d:\d\d:\d\d (\S+) +\| ", names="HONCHO_PROCESS_NAME", note="a Procfile of N lines"
    ),
    "supervisord": Launcher(_supervisord, runs=False, falls=False, note="`numprocs=N`, no restarts"),
    "circus": Launcher(_circus, runs=False, falls=False, note="`numprocesses = N`, no respawn"),
    "s6": Launcher(_s6, runs=False, falls=False, note="s6-svscan, a service a copy"),
    FLOOR: Launcher(_floor, note="a bare Python that starts them, waits, and ends the rest if one fails"),
}


def missing(name: str) -> str:
    """Return why a launcher cannot take part here; nothing if it can. Makes its environment if it has one."""
    if program := peers.PROGRAMS.get(name):
        found = shutil.which(program)
        return "" if found else f"there is no {program} on the PATH (Debian: {_PACKAGES[name]})"
    return peers.missing(name)


_PACKAGES = {"parallel": "parallel", "mpirun": "openmpi-bin", "s6": "s6"}
