"""The folders in which runs are kept and looked for by default.

That is a folder below the user's state folder; or, if that cannot be written to (a home that is read-only, full or
missing), a temporary folder of the user's, until somebody cleans /tmp.
"""

from __future__ import annotations

import contextlib
import os
import stat

from phalanx._base import disk, files

_PRIVATE = 0o700


class NoHomeError(LookupError):
    """The user has no home folder."""


def folder_for_new_runs(mode: int | None = None, *, make: bool = True) -> tuple[str | None, str]:
    """Return a folder in which a run can be kept, and, if it is the temporary one, why. None if there is none.

    The folder is made if it is missing, unless ``make`` is false. ``mode``: see `temporary_folder`.
    """
    why, folder = "the home folder cannot be written to", ""
    try:
        folder = default_folder()
        if not make and can_be_made(folder):
            return folder, ""
        if make:
            os.makedirs(folder, exist_ok=True)
            if os.access(folder, os.W_OK):
                disk.check(folder)
                return folder, ""
    except NoHomeError:
        pass
    except OSError as error:
        if disk.is_full(error.errno):
            why = disk.in_words(error, folder)
    return temporary_folder(mode) if make else _temporary_folder(), why


def temporary_folder(mode: int | None = None) -> str | None:
    """Make the temporary folder for runs, with mode 0o700 and the bits of ``mode``. None if that cannot be."""
    try:
        files.make_folder(folder := _temporary_folder(), _PRIVATE)
        if mode is not None:
            os.chmod(folder, mode | stat.S_IMODE(os.stat(folder).st_mode))
    except OSError:
        return None
    return folder


def can_be_made(folder: str) -> bool:
    """Whether a folder is there and can be written to, or could be made. Makes none."""
    while not os.path.lexists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def search_folders() -> tuple[str, ...]:
    """Return the folders in which runs are looked for: those that `folder_for_new_runs` returns.

    If the temporary one exists, a default one that the user may not list is left out.

    Raises NoHomeError: the user has no home, and no runs among the temporary folders.
    """
    temporary = _temporary_folder()
    with contextlib.suppress(OSError):
        if files.is_ours(os.lstat(temporary)):
            with contextlib.suppress(OSError, NoHomeError):
                folder = default_folder()
                with contextlib.suppress(FileNotFoundError):
                    os.scandir(folder).close()
                return folder, temporary
            return (temporary,)
    return (default_folder(),)


def _temporary_folder() -> str:
    import tempfile

    return os.path.join(tempfile.gettempdir(), f"phalanx-{os.geteuid()}")


def default_folder() -> str:
    """Return ``phalanx/runs`` in the user's state folder (XDG base directories). It may not exist yet.

    Raises NoHomeError: the user has no home.

    >>> default_folder().endswith("/phalanx/runs")
    True
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the standard says to ignore a relative path
        state = os.path.join(_home(), ".local", "state")
    return os.path.join(state, "phalanx", "runs")


def _home() -> str:
    home = os.environ.get("HOME", "")
    if os.path.isabs(home):
        return home
    import pwd

    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # the uid has no entry, as often in a container
        home = ""
    if not os.path.isabs(home):
        msg = "there is no default place: neither HOME nor XDG_STATE_HOME is set, and the user has no home"
        raise NoHomeError(msg)
    return home
