"""Opens, reads and replaces files that another user or process may have put in their place.

A worker may replace its log, its error file and whatever lies beside them by anything, at any moment: a FIFO, a device,
a socket, a folder, a link. It may have another uid than its launcher. And log folders may be shared with other users.
So no open here blocks (O_NONBLOCK), or makes a terminal the controlling one (O_NOCTTY); and only regular files are
read, by fstat(2) of the very descriptor, and no more of them than the caller allows.

**Links.** `NO_LINKS`: none is followed; for names that only Phalanx chooses. `OWN_LINKS`: a link is followed only if it
belongs to this process's effective uid or to root, and so does each that it leads to: then it leads only where its
maker could go. Links of /dev count too, whose owner may have no uid in a user namespace. That is for logs and error
files, whose paths can be the user's (a layout of their own, or an error file at /dev/stderr). `ANY_LINK` is for paths
that the caller of a public function has given.

**Folders.** Only the last name of a path is checked, because what stands above it cannot be swapped: a name can be
taken from a folder only by the owner of the folder and, unless the folder is sticky, by those who may write to it
(rename(2), unlink(2)). The folder that the caller gives for the logs may be anybody's, and its owner is trusted.
Folders below are made by us with mkdir(2), which follows no link; one that exists already counts only if it is no link
and is ours (`is_ours`). Where others may write, they are made before anything starts (`is_shared`). A user who may
write to a folder that is not sticky is trusted by whoever has set that mode.

Hard links to files of others are the kernel's to refuse (fs.protected_hardlinks, which is on wherever systemd is).

Workers load this file by its path, in Python 3.8 and later; keepers import it as they start. So it imports next to
nothing.
"""

from __future__ import annotations

import errno
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Container
else:
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

NO_LINKS, OWN_LINKS, ANY_LINK = 0, 1, 2
"""Which links are followed, see above."""

ROOT = 0
"""The uid that is trusted beside our own."""

_ALWAYS = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_HOPS = 40  # links that lead to links, as many as the kernel follows (path_resolution(7))
_CHUNK = 1 << 20
LINK = "a link"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: LINK,
}


class UnfitError(OSError):
    """The file at a path may not be opened. ``strerror`` is why, and ``filename`` the path."""


def is_ours(found: os.stat_result) -> bool:
    """Whether a file belongs to us (the effective uid) or to root."""
    return found.st_uid in (os.geteuid(), ROOT)


def is_shared(found: os.stat_result) -> bool:
    """Whether other users than us and root may create or rename files in a folder."""
    return not is_ours(found) or bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def kind(mode: int) -> str:
    """Name the type of a file by its mode: "a FIFO"; "" for a regular one."""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a file of no known kind")


def is_regular(fd: int) -> bool:
    """Whether an open file is a regular one. Raises OSError."""
    return stat.S_ISREG(os.fstat(fd).st_mode)


def opened(
    path: str, flags: int = os.O_RDONLY, mode: int = 0o666, *, links: int = NO_LINKS, regular: bool = True
) -> int:
    """Open a file without ever blocking. Returns the descriptor, which is close-on-exec and non-blocking.

    Args:
        path: The file.
        flags: As of open(2); O_NONBLOCK, O_CLOEXEC, O_NOCTTY are added, and O_NOFOLLOW unless ``links`` are followed.
        mode: The mode of a file that is created, before the umask.
        links: Which links are followed at the end of the path.
        regular: Whether it has to be a regular file.

    Raises:
        UnfitError: It is no regular file, a link that is not followed, a socket, or a FIFO that nobody reads.
        OSError: open(2) has failed.
    """
    fd = _open(path, flags | _ALWAYS, mode, links)
    if regular:
        try:
            found = os.fstat(fd)
        except BaseException:
            os.close(fd)
            raise
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise UnfitError(errno.EINVAL, "it is not a regular file, but " + kind(found.st_mode), path)
    return fd


def opened_log(path: str) -> int:
    """Open a file to append what a worker writes; it is created if need be. Returns the descriptor, which blocks.

    In a layout of the user's own it may be a terminal, or a FIFO that is read. Raises UnfitError, OSError.
    """
    fd = opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, links=OWN_LINKS, regular=False)
    try:
        os.set_blocking(fd, True)  # the worker has it as its stdout
    except BaseException:
        os.close(fd)
        raise
    return fd


def read(
    path: str, limit: int, offset: int = 0, *, links: int = NO_LINKS, owners: Container[int] | None = None
) -> bytes:
    """Read at most ``limit`` bytes of a regular file, from ``offset`` on. Raises OSError, UnfitError.

    ``owners``: the uids that may own the file; for any other UnfitError is raised. None: any may.
    """
    fd = opened(path, links=links)
    try:
        if owners is not None and (owner := os.fstat(fd).st_uid) not in owners:
            raise UnfitError(errno.EPERM, f"it belongs to uid {owner}", path)
        return pread(fd, limit, offset)
    finally:
        os.close(fd)


def pread(fd: int, limit: int, offset: int = 0) -> bytes:
    """Read at most ``limit`` bytes of an open file, from ``offset`` on. Raises OSError."""
    chunks = []
    while limit > 0:
        chunk = os.pread(fd, min(limit, _CHUNK), offset)
        if not chunk:
            break
        chunks.append(chunk)
        limit -= len(chunk)
        offset += len(chunk)
    return b"".join(chunks)


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``, in as many calls as it takes. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def replace(path: str, temporary: str, data: bytes) -> None:
    """Write ``data`` to ``path`` atomically (rename(2)), by way of ``temporary``, a path in the same folder.

    A link at ``path`` is replaced, not followed. Raises OSError, with nothing left over: FileExistsError if
    ``temporary`` exists.
    """
    from os import replace as put  # no caller does without the whole module

    fd = opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        try:
            write_all(fd, data)
        finally:
            os.close(fd)
        put(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def target(path: str) -> str:
    """Find the path that links of ours lead to; ``path`` itself if it is no link, or not ours. Raises OSError."""
    for _ in range(_HOPS):
        try:
            found, onward = _link(path)
        except FileNotFoundError:
            return path
        if not onward or not _is_followed(path, found) or is_of_kernel(found):
            return path
        path = onward
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def make_folder(path: str, mode: int = 0o777) -> bool:
    """Make a folder, with what the umask leaves of ``mode``. Returns False if it existed, and is ours.

    Raises UnfitError: another kind of file is there, or a folder of another user; OSError.
    """
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode) and is_ours(found):
            return False
        what = kind(found.st_mode) or "a file"
        msg = f"{what} of uid {found.st_uid} is there; a folder of our own was to be made"
        raise UnfitError(errno.EEXIST, msg, path) from None
    return True


def _open(path: str, flags: int, mode: int, links: int) -> int:
    try:
        return os.open(path, flags | (0 if links == ANY_LINK else os.O_NOFOLLOW), mode)
    except OSError as error:
        if error.errno == errno.ELOOP and links != ANY_LINK:
            return _follow(path, flags, mode, links)
        if error.errno == errno.ENXIO:
            raise UnfitError(errno.ENXIO, "it is a socket, or a FIFO that nobody reads", path) from None
        raise


def _follow(path: str, flags: int, mode: int, links: int) -> int:
    """Open the target of a link, link by link: each is held open while it is checked, so that none can be swapped."""
    name = path
    for _ in range(_HOPS):
        found, onward = _link(path)
        if onward:
            if links == NO_LINKS:
                raise UnfitError(errno.ELOOP, "it is a link, which is not followed here", name)
            if not _is_followed(path, found):
                msg = f"it leads over a link of uid {found.st_uid}, which is not followed"
                raise UnfitError(errno.ELOOP, msg, name)
            if is_of_kernel(found):  # /proc/self/fd/2, to which /dev/stderr leads: its text is no path
                return os.open(path, flags, mode)
            path = onward
        try:
            return os.open(path, flags | os.O_NOFOLLOW, mode)
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise UnfitError(errno.ENXIO, "it is a socket, or a FIFO that nobody reads", name) from None
            if error.errno != errno.ELOOP:
                raise
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)


def _link(path: str) -> tuple[os.stat_result, str]:
    """Read the status of a link, and the path to which it leads; "" for a file that is no link. Raises OSError."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISLNK(found.st_mode):
            return found, ""
        onward = os.readlink("", dir_fd=fd)
    finally:
        os.close(fd)
    if not onward.startswith("/"):
        onward = path[: path.rfind("/") + 1] + onward
    return found, onward


def _is_followed(path: str, found: os.stat_result) -> bool:
    """Whether a link counts as ours: it is, or it is one of /dev (/dev/stdout), of the same owner as /dev.

    In a user namespace that has no uid for root, that is the overflow uid (user_namespaces(7)).
    """
    if is_ours(found):
        return True
    try:
        folder, dev = os.stat(path[: path.rfind("/") + 1] or "."), os.stat("/dev")
    except OSError:
        return False
    is_dev = (folder.st_dev, folder.st_ino) == (dev.st_dev, dev.st_ino)
    return is_dev and found.st_uid == dev.st_uid and not dev.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_of_kernel(found: os.stat_result) -> bool:
    """Whether a file is one of /proc, where only the kernel creates files."""
    try:
        return found.st_dev == os.stat("/proc/self/").st_dev
    except OSError:
        return False
