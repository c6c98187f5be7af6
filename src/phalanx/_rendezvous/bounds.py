"""How long what a node is told may be, so that its records are read by the others: see `records`, which holds to it."""

from __future__ import annotations

MOST_LINE = 2000
"""Characters of a text in one line: an error, or what workers are called."""

MOST_RUN_ID = 1000
"""Characters of a job's id: it is in every key, and a store's keys are no place for more."""

MOST_ADDRESS = 255
"""Characters of the name or the address of a machine: those of DNS are no longer."""

MOST_NODES = 1 << 16
MOST_WORKERS = 1 << 20
"""Of one node."""

MOST_CODE = 1 << 31
"""Ranks, and exit codes without their signs, are less."""


def text(what: str, most: int, name: str = "") -> str:
    """Return a text that is not too long. Raises ValueError, which begins with the ``name``.

    >>> text("x" * 11, 10, "role")
    Traceback (most recent call last):
    ValueError: role: expected 10 characters or less, got 11
    """
    if len(what) > most:
        msg = f"{name and f'{name}: '}expected {most} characters or less, got {len(what)}"
        raise ValueError(msg)
    return what


def number(what: int, least: int, most: int, name: str) -> None:
    """Refuse a number that is out of bounds. Raises ValueError, which begins with the ``name``.

    >>> number(0, 1, 5, "nproc")
    Traceback (most recent call last):
    ValueError: nproc: expected a whole number, 1 to 5, got 0
    """
    if not least <= what <= most:
        msg = f"{name}: expected a whole number, {least} to {most}, got {what!r}"
        raise ValueError(msg)
