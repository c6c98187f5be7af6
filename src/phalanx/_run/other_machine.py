"""What is to be typed on another machine of a job: what was typed here, but for what is about this machine alone."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_NODE_RANK, _LOCAL_ADDR, _CONF = "--node-rank", "--local-addr", "--rdzv-conf"
_CONF_OF_ONE_MACHINE = ("is_host", "bind")
_PREFIXES = ("PHALANX", "PET")


class CommandLine(NamedTuple):
    """What was typed here.

    Attributes:
        head: The command and its options.
        program: The script and its arguments; empty: they are in a job file.
        variables: Names of variables that are options, too.
    """

    head: list[str]
    program: list[str]
    variables: list[str]

    def on_other(self, rank: int) -> str:
        """Return what is to be typed on a machine of that node rank; -1: the ranks are not given.

        >>> here = CommandLine(["phalanx", "run", "--nnodes=2", "--node-rank", "0"], ["x.py", "--node-rank", "7"], [])
        >>> here.on_other(1)
        'phalanx run --nnodes=2 --node-rank 1 x.py --node-rank 7'
        >>> CommandLine(["phalanx", "run", "--rdzv-conf=is_host=yes", "--local-addr", "a"], ["x"], []).on_other(1)
        'phalanx run --node-rank=1 x'
        """
        head: list[str] = []
        words = iter(self.head)
        for word in words:
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            if name not in (_NODE_RANK, _LOCAL_ADDR, _CONF):
                head.append(word)
                continue
            value = _value_there(name, value if equals else next(words, ""), rank)
            if value:
                head += [f"{name}={value}"] if equals else [name, value]
        if rank >= 0 and not any(word.partition("=")[0] == _NODE_RANK for word in head):
            head.insert(2 if head[1:2] == ["run"] else 1, f"{_NODE_RANK}={rank}")
        return shlex.join([*head, *self.program])


def _value_there(name: str, value: str, rank: int) -> str:
    """Return the value of an option on a machine of that node rank; "": it is left out."""
    if name == _LOCAL_ADDR:
        return ""
    if name == _NODE_RANK:
        return str(rank) if rank >= 0 else value
    return ",".join(part for part in value.split(",") if part.partition("=")[0].strip() not in _CONF_OF_ONE_MACHINE)


def command_line(
    argv: list[str], program: list[str], environ: Mapping[str, str], options: Iterable[str]
) -> CommandLine:
    """Return what was typed, in its parts.

    Args:
        argv: The whole command line.
        program: The script and its arguments, as they are run.
        environ: The environment.
        options: The names of all options, with underscores.

    >>> command_line(["phalanx", "run", "x", "1"], ["x", "1"], {"PET_NNODES": "2", "PET_HOME": "/"}, ["nnodes"])
    CommandLine(head=['phalanx', 'run'], program=['x', '1'], variables=['PET_NNODES'])
    """
    is_typed = argv[len(argv) - len(program) :] == program
    known = {f"{prefix}_{name.upper()}" for prefix in _PREFIXES for name in options}
    head = argv[: len(argv) - len(program)] if is_typed else argv
    return CommandLine(head, program if is_typed else [], sorted(known.intersection(environ)))
