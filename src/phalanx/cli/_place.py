"""Where runs are kept, unless somebody says otherwise."""

from __future__ import annotations

import os


def default_place() -> str:
    """The user's folder for state (XDG base directories), which survives /tmp's cleaning. It may not exist yet.

    >>> default_place().endswith("/phalanx/runs")
    True
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # then the standard wants it ignored
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "phalanx", "runs")
