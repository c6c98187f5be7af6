"""Where runs are kept, unless somebody says otherwise."""

from __future__ import annotations

import os

import click


def default_place() -> str:
    """The user's folder for state (XDG base directories), which survives /tmp's cleaning. It may not exist yet.

    Raises UsageError: the user has no home.

    >>> default_place().endswith("/phalanx/runs")
    True
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # then the standard wants it ignored
        state = os.path.join(_home(), ".local", "state")
    return os.path.join(state, "phalanx", "runs")


def _home() -> str:
    home = os.environ.get("HOME", "")
    if os.path.isabs(home):
        return home
    import pwd

    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container's user, mostly
        home = ""
    if not os.path.isabs(home):
        msg = "--log-dir: there is no default place: neither HOME nor XDG_STATE_HOME is set, and the user has no home"
        raise click.UsageError(msg)
    return home
