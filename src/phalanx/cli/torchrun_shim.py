"""``phalanx torchrun-shim``, a command whose torchrun is Phalanx; and torchrun's options as an `argparse` parser.

The command is for tools that start torchrun or call its module: what it has on its paths lies in the folder ``_shim``.
The parser is for tools that make their own out of it (accelerate, torchtune). Owns torchrun's names and defaults;
what the options do is the business of `phalanx run`, to which `run` passes what differs from these defaults.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from phalanx.cli._commands import SETTINGS, Command

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable


_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_shim")
_NOT_FOUND, _NOT_STARTED = 127, 126  # as a shell has it
PYTHON_ENV = "PHALANX_SHIM_PYTHON"
"""The environment variable with the interpreter that the shim's ``torchrun`` runs."""


@click.command(cls=Command, context_settings={**SETTINGS, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True, metavar="COMMAND")
def torchrun_shim(command: tuple[str, ...]) -> None:
    """Execute COMMAND with Phalanx in the place of torchrun, there and in all that it starts.

    \b
    phalanx torchrun-shim -- accelerate launch train.py
    phalanx torchrun-shim -- fabric run train.py --devices 2
    phalanx torchrun-shim -- ./launch.sh

    The first torchrun on PATH is phalanx run. In Pythons that have Phalanx, the modules torch.distributed.run and
    torch.distributed.launcher are those of Phalanx. Nothing is installed, and no file is changed.
    """  # noqa: D301 - the backslash is click's mark for lines to be left as they are
    torchrun = os.path.join(_FOLDER, "torchrun")
    if not os.access(torchrun, os.X_OK):
        raise click.ClickException(f"{torchrun} cannot be executed: install phalanx as files, and executable ones")
    path, modules = os.environ.get("PATH", os.defpath), os.environ.get("PYTHONPATH")
    env = {
        **os.environ,
        "PATH": os.pathsep.join((_FOLDER, path)),
        "PYTHONPATH": os.pathsep.join(filter(None, (_FOLDER, modules))),
        PYTHON_ENV: sys.executable,
    }
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        click.echo(f"phalanx torchrun-shim: {command[0]}: {error.strerror}", err=True)
        sys.exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_STARTED)


_TEXTS = {
    "nnodes": "1:1", "nproc_per_node": "1", "rdzv_backend": "static", "rdzv_endpoint": "", "rdzv_id": "none",
    "rdzv_conf": "", "start_method": "spawn", "event_log_handler": "null", "role": "default", "log_dir": None,
    "redirects": "0", "tee": "0", "local_ranks_filter": "", "master_addr": "127.0.0.1", "local_addr": None,
    "logs_specs": None, "numa_binding": None, "log_line_prefix_template": "",
    "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
}  # fmt: skip
_NUMBERS = {"max_restarts": 0, "node_rank": 0, "master_port": None, "shutdown_timeout": None}
_FLAGS = ("standalone", "module", "no_python", "run_path", "virtual_local_rank")
_LISTS = ("duplicate_stdout_filters", "duplicate_stderr_filters")
_SHORT = {"module": "-m", "redirects": "-r", "tee": "-t"}


def torchrun_name(longs: Iterable[str]) -> str:
    """Return which of the names of an option is torchrun's; "": none is."""
    known = {*_TEXTS, *_NUMBERS, "monitor_interval", *_FLAGS, *_LISTS}
    return next((name for name in longs if name.removeprefix("--").replace("-", "_") in known), "")


def get_args_parser() -> argparse.ArgumentParser:
    """Return a parser that knows torchrun's options, and reads ``PET_`` variables as torchrun's does.

    What it has read, `run` runs.

    >>> get_args_parser().parse_args(["--nproc-per-node", "2", "train.py", "--lr", "1"]).training_script_args
    ['--lr', '1']
    """
    import argparse

    parser = argparse.ArgumentParser(description="torchrun's options, for phalanx run", allow_abbrev=True)

    def add(name: str, **more: Any) -> None:
        dashed = name.replace("_", "-")
        names = [*filter(None, [_SHORT.get(name)]), f"--{dashed}", *([f"--{name}"] if dashed != name else [])]
        variable = f"PET_{name.upper()}"
        given = os.environ.get(variable)
        if given is not None:  # a default that is a text is read as if it had been typed
            more["default"] = given not in ("", "0") if name in _FLAGS else given
        parser.add_argument(*names, **more)

    for name, text in _TEXTS.items():
        add(name, default=text)
    for name, number in _NUMBERS.items():
        add(name, type=int, default=number)
    add("monitor_interval", type=float, default=0.1)
    for name in _FLAGS:
        add(name, action="store_true")
    for name in _LISTS:
        add(name, type=_listed, default=[])
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def _listed(text: str) -> list[str]:
    """Split a list at its commas; two of them are one that belongs to a text."""
    return [each.replace("\0", ",") for each in text.replace(",,", "\0").split(",")]


def run(args: argparse.Namespace) -> None:
    """Run what `get_args_parser`, or torchrun's own parser, has read: as ``phalanx run`` does, until it has succeeded.

    Args:
        args: Attributes by torchrun's names. Those that have their defaults (torchrun's, or those of ``PET_``
            variables), or no such name, are not passed on.

    Raises as `phalanx.run.main`; and SystemExit for a filter with a comma in it, and for what
    `torch.distributed.launch` adds, unless ``use_env`` is true.
    """
    if not getattr(args, "use_env", True):
        msg = (
            "torch.distributed.launch gives the script --local-rank=N, which phalanx run does not: add --use-env, and "
            "let the script read LOCAL_RANK"
        )
        raise SystemExit(msg)
    defaults: dict[str, Any] = {**_TEXTS, **_NUMBERS, "monitor_interval": 0.1}
    argv = []
    for name, value in vars(args).items():
        variable = f"PET_{name.upper()}"
        option = "--" + name.replace("_", "-")
        if name in _FLAGS:
            argv += [option] if value else []
        elif name in _LISTS:
            if any("," in each for each in value or ()):
                raise SystemExit(f"{option}: phalanx run has no filters with commas in them, got {value!r}")
            argv += [f"{option}={','.join(value)}"] if value else []
        elif name in defaults and value is not None and str(value) != os.environ.get(variable, str(defaults[name])):
            argv.append(f"{option}={value}")
    from phalanx.cli.run import main

    main([*argv, "--", args.training_script, *map(str, args.training_script_args)])
