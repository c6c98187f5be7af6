"""Where runs are kept, and looked for, unless somebody says otherwise.

That is in the user's folder for state; and where that cannot be written to (a home that is read-only, or not there), in
a folder of the user's among the temporary ones, until those are cleaned.
"""

from __future__ import annotations

import contextlib
import os
import stat

from phalanx._base import files

_PRIVATE = 0o700


class NoPlaceError(LookupError):
    """The user has no home in which something could be kept."""


def place_of_new_runs(mode: int | None = None) -> tuple[str | None, bool]:
    """A folder in which a run can be kept, made if need be, and whether it is the temporary one. None: there is none.

    The temporary one is the user's alone, unless its runs are for others: then it has their ``mode`` as well.
    """
    with contextlib.suppress(OSError, NoPlaceError):
        place = default_place()
        os.makedirs(place, exist_ok=True)
        if os.access(place, os.W_OK):
            return place, False
    try:
        files.make_folder(place := _temporary_place(), _PRIVATE)
        if mode is not None:
            os.chmod(place, mode | stat.S_IMODE(os.stat(place).st_mode))
    except OSError:
        return None, True
    return place, True


def places() -> tuple[str, ...]:
    """The folders in which runs are looked for: those that `place_of_new_runs` gives.

    Where there is a temporary one, a default one that the user may not look into is left out.

    Raises NoPlaceError: the user has no home, and no runs among the temporary folders.
    """
    temporary = _temporary_place()
    with contextlib.suppress(OSError):
        if files.is_ours(os.lstat(temporary)):
            with contextlib.suppress(OSError, NoPlaceError):
                place = default_place()
                with contextlib.suppress(FileNotFoundError):
                    os.scandir(place).close()
                return place, temporary
            return (temporary,)
    return (default_place(),)


def _temporary_place() -> str:
    import tempfile

    return os.path.join(tempfile.gettempdir(), f"phalanx-{os.geteuid()}")


def default_place() -> str:
    """The user's folder for state (XDG base directories), which survives /tmp's cleaning. It may not exist yet.

    Raises NoPlaceError: the user has no home.

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
        msg = "there is no default place: neither HOME nor XDG_STATE_HOME is set, and the user has no home"
        raise NoPlaceError(msg)
    return home
