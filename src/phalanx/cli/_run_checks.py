"""What `phalanx run` refuses before anything starts. Everything here raises click's UsageError or BadParameter."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Iterable
from typing import Any

import click

from phalanx._group.warm import check_preload as check_names
from phalanx._timers.specs import TimerSpecs
from phalanx.cli._options import GONE, is_here_gone

_LOOKED_AT = 1 << 16  # bytes of a file that is asked what it is
_NO_PYTHONS = re.compile(
    r"(ba|da|z|k|mk|c|tc|fi|tcl|wi)?sh|[gmn]?awk|perl|ruby|php|node|deno|bun|lua|Rscript|julia|make|sed|expect"
)
"""What interprets other languages. What interprets Python has any name: ``#!/usr/bin/env -S phalanx run``."""

_STRING = re.compile(r"#!.*\n([ \t\r]*(#.*)?\n)*[ \t]*['\"]")
"""How a script begins for a shell that is Python, too: with a string that the shell obeys. So pip writes it, where the
path is long."""


def check_preload(preload: list[str] | None, *, no_python: bool, python: str, run_path: str = "") -> None:
    """Refuse modules that cannot be imported for workers to have them."""
    if not preload:
        return
    if no_python:
        raise click.UsageError("--preload and --no-python exclude each other: a binary imports nothing")
    if run_path not in ("", "forkserver"):
        raise click.UsageError("--preload: with --run-path, workers are forks with --start-method forkserver only")
    if python != sys.executable:
        msg = f"--preload: workers are forks of this interpreter, {sys.executable}; PYTHON_EXEC is {python}"
        raise click.UsageError(msg)
    if "__main__" in preload:
        raise click.UsageError("--preload: __main__ is the script, which every worker runs; name what it imports")
    try:
        check_names(preload)
    except ValueError as error:
        msg = f"--{error}"
        raise click.UsageError(msg) from None


def check_command(script: str, *, module: bool, no_python: bool) -> None:
    """Refuse a script, a module or a binary that is not there; and a script that is a program of another language."""
    if no_python and module:
        raise click.UsageError("--module and --no-python exclude each other")
    if (module or not (os.path.isabs(script) or (no_python and os.sep not in script))) and is_here_gone():
        msg = f"{'--module' if module else 'script'} {script!r}: {GONE}; start it elsewhere, or by an absolute path"
        raise click.UsageError(msg)
    if no_python:
        return
    if module:
        if not script or os.sep in script or (script.endswith(".py") and os.path.isfile(script)):
            msg = f"--module: {script!r} is no module's name, like package.train; for a file, leave -m out"
            raise click.UsageError(msg)
        return
    try:
        mode = os.stat(script).st_mode
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            msg = f"script {script!r}: {error.strerror}"
            raise click.UsageError(msg) from None
        msg = f"script {script!r} does not exist{_meant(script)}"
        raise click.UsageError(msg) from None
    if stat.S_ISDIR(mode) and not os.path.exists(os.path.join(script, "__main__.py")):
        msg = f"script {script!r} is a folder without a __main__.py"
        raise click.UsageError(msg)
    if stat.S_ISREG(mode) and (kind := _other_program(script)):
        msg = f"script {script!r} is {kind}, and no Python: give --no-python to start it as it is"
        raise click.UsageError(msg)


def _other_program(script: str) -> str:
    """Return what a file is that is a program, and none in Python; "": nothing says so."""
    start = b""
    with contextlib.suppress(OSError), open(script, "rb") as file:  # not for us to read: its interpreter says so
        start = file.read(_LOOKED_AT)
    text = start.decode("utf-8", "replace")
    line = text.partition("\n")[0]
    words = line[2:].split() if line.startswith("#!") and not script.endswith(".py") else []
    is_binary = start.startswith(b"\x7fELF")
    is_other = any(_NO_PYTHONS.fullmatch(os.path.basename(word)) for word in words) and not _STRING.match(text)
    if not (is_binary or is_other):
        return ""
    import zipfile

    if zipfile.is_zipfile(script):  # which Python runs, whatever stands before it: a .pex can begin with #!/bin/sh
        return ""
    return "a binary (ELF)" if is_binary else f"a program for {line[2:].strip()!r}"


def _meant(script: str) -> str:
    """A hint for somebody who has named a script that is not there."""
    import difflib  # these two are not on the way to a start
    import shutil

    if shutil.which(script):
        return f"; to run the program {script!r}, give --no-python; a Python script needs neither"
    folder, name = os.path.split(script)
    close: list[str] = []
    with contextlib.suppress(OSError):  # it is not there either, or not for us to read
        close = difflib.get_close_matches(name, os.listdir(folder or "."), n=1)
    return f"; did you mean {os.path.join(folder, close[0])!r}?" if close else ""


def check_destination(name: str) -> None:
    """Refuse what is no destination of events, in ``--event-log-handler``."""
    from phalanx.events import UnknownDestinationError, get_logging_handler

    try:
        get_logging_handler(name)
    except (UnknownDestinationError, TypeError) as error:
        msg = f"--event-log-handler: {error}"
        raise click.UsageError(msg) from None
    except Exception as error:
        msg = f"--event-log-handler: {name!r}: {type(error).__name__}: {error}"
        raise click.UsageError(msg) from error


def check_ranks(nproc: int, *choices: Any) -> None:
    """Refuse local ranks that there are not, in ``--redirects``, ``--tee`` and ``--local-ranks-filter``."""
    for name, choice in zip(("--redirects", "--tee", "--local-ranks-filter"), choices, strict=True):
        if isinstance(choice, (dict, set)):
            wrong = sorted(rank for rank in choice if not 0 <= rank < nproc)
            if wrong:
                msg = f"{name}: there is no local rank {', '.join(map(str, wrong))}; ranks are 0 to {nproc - 1}"
                raise click.UsageError(msg)


def check_shown(world_size: int, ranks: Iterable[int] | None) -> None:
    """Refuse ranks that there are not, in ``--ranks``."""
    wrong = sorted(rank for rank in ranks or () if rank >= world_size)
    if wrong:
        msg = f"--ranks: there is no rank {', '.join(map(str, wrong))}; ranks are 0 to {world_size - 1}"
        raise click.UsageError(msg)


def health_address() -> tuple[str, int] | None:
    """Return where the run is to answer how it is, by the environment; None: nowhere."""
    if "TORCHELASTIC_HEALTH_CHECK_PORT" not in os.environ:
        return None
    from phalanx._agent.health import address_of_environment

    try:
        return address_of_environment()
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def check_rotation(max_size: int | None, *, keep: int | None, compress: bool) -> None:
    """Refuse what is said of files that are set aside, where none are."""
    for name, is_given in (("--log-keep", keep is not None), ("--log-compress", compress)):
        if is_given and max_size is None:
            msg = f"{name}: files are set aside only with --log-max-size; give that, too, like --log-max-size 100MB"
            raise click.UsageError(msg)


def timer_specs(on_expiry: tuple[tuple[str, float], ...], hang_timeout: float | None) -> TimerSpecs:
    """How the group watches timers and heartbeats."""
    try:
        return TimerSpecs(on_expiry, hang_timeout)
    except ValueError as error:
        raise click.BadParameter(str(error).removeprefix("hang_timeout: "), param_hint="--hang-timeout") from None
