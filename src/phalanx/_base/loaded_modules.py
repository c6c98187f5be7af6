"""Modules of which something is needed only if the program has imported them."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def loaded(name: str) -> Any:
    """Return a module if it is in `sys.modules`, else None. If another thread is importing it, wait for the end."""
    if name not in sys.modules:
        return None
    from importlib import import_module

    return import_module(name)
