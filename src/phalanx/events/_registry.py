"""The handlers that were registered, and the destinations that lead nowhere without one. Loads nothing."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging

SILENT = ("null", "dynamic_rendezvous")

registered: dict[str, logging.Handler] = {}
"""Read and changed in single steps, whichever thread does."""


def is_silent(destination: str) -> bool:
    """Whether what goes there goes nowhere."""
    return destination in SILENT and destination not in registered
