"""torchrun's options as an `argparse` parser, for tools that make their own out of it (accelerate, torchtune).

Owns torchrun's names and defaults. What the options do is the business of `phalanx run`, to which `run` passes what
differs from these defaults; so its own defaults hold for the rest.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from phalanx.cli.run import main

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


def get_args_parser() -> argparse.ArgumentParser:
    """Return a parser that knows torchrun's options, and reads ``PET_`` variables as torchrun's does.

    What it has read, `run` runs.

    >>> get_args_parser().parse_args(["--nproc-per-node", "2", "train.py", "--lr", "1"]).training_script_args
    ['--lr', '1']
    """
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
    main([*argv, "--", args.training_script, *map(str, args.training_script_args)])
