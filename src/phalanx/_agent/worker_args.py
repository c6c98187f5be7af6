"""Puts the local rank in place of ``${local_rank}`` in the arguments of workers, as torchrun does."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


def with_local_rank(args: Iterable[Any], rank: int) -> tuple[Any, ...]:
    """Return the arguments of one worker: in strings, its local rank replaces ``${local_rank}`` and ``$local_rank``.

    ``$$`` becomes ``$``. Other names, and a ``$`` that nothing follows, stay: see `string.Template.safe_substitute`.

    >>> with_local_rank(("--device", "cuda:${local_rank}", "$$5", "${HOME}", 4), 1)
    ('--device', 'cuda:1', '$5', '${HOME}', 4)
    """
    args = tuple(args)
    if not any(isinstance(value, str) and "$" in value for value in args):
        return args
    from string import Template

    return tuple(
        Template(value).safe_substitute(local_rank=rank) if isinstance(value, str) and "$" in value else value
        for value in args
    )
