"""Files that somebody else may have put where they are. Owns how such a file is opened, read and replaced.

A worker may replace its log, its error file and whatever lies beside them by anything, at any moment: a FIFO, a device,
a socket, a folder, a link. It may have another uid than its launcher. And log folders may be shared with other users.
So nothing is opened here that could block (O_NONBLOCK), become a controlling terminal (O_NOCTTY), or have no end: what
is read is a regular file, by fstat(2) of the very descriptor, and no more of it than the caller has said.

**Links.** `NO_LINKS`: none is followed; so it is for names that only Phalanx gives out. `OWN_LINKS`: a link is followed
only if it belongs to this process's effective uid or to root, and so is each that it leads to: it cannot lead where
who has made it could not go himself. So are those of /dev, whose owner may have no uid in a user namespace. That is for
logs and error files, whose paths can be a user's own (in a layout of his, or an error file at /dev/stderr). `ANY_LINK`
is for what the caller of a public function has named.

**Folders.** Only the last name of a path is looked at, because what stands above it cannot be swapped: a name can be
taken from a folder only by the owner of the folder and, unless the folder is sticky, by those who may write to it
(rename(2), unlink(2)). What the caller names as the place of the logs may be anything, and its owner is trusted with
it. Folders below are made by us with mkdir(2), which follows no link; one that is there already counts only if it is no
link and is ours (`is_ours`). Where others may write, they are made before anything starts (`is_shared`). Who may write
to a folder that is not sticky is trusted by who has given it that mode.

Hard links to files of others are the kernel's to refuse (fs.protected_hardlinks, which is on wherever systemd is).

Like `evidence` it is loaded by its path, in Python 3.8 and later; and by keepers. So it imports next to nothing.
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
    """What stands at a path may not be opened there. ``strerror`` says what it is, and ``filename`` where."""


def is_ours(found: os.stat_result) -> bool:
    """Whether a file belongs to us (the effective uid) or to root."""
    return found.st_uid in (os.geteuid(), ROOT)


def is_shared(found: os.stat_result) -> bool:
    """Whether others than us and root may give a name in a folder to something of theirs."""
    return not is_ours(found) or bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def kind(mode: int) -> str:
    """What a file is that is no regular one: "a FIFO"; ``""`` for a regular one."""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a file of no known kind")


def is_regular(fd: int) -> bool:
    """Whether an open file is a regular one. Raises OSError."""
    return stat.S_ISREG(os.fstat(fd).st_mode)


def opened(
    path: str, flags: int = os.O_RDONLY, mode: int = 0o666, *, links: int = NO_LINKS, regular: bool = True
) -> int:
    """Open a file without ever waiting for anybody. Returns the descriptor, which is close-on-exec and non-blocking.

    Args:
        path: The file.
        flags: As of open(2); O_NONBLOCK, O_CLOEXEC, O_NOCTTY are added, and O_NOFOLLOW unless ``links`` are followed.
        mode: Of a file that is made.
        links: Which links are followed at the end of the path.
        regular: Whether it has to be a regular file.

    Raises:
        UnfitError: It is no regular file, a link that is not followed, a socket, or a FIFO that nobody reads.
        OSError: As open(2).
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
    """Open a file for what a worker writes, at its end; it is made if need be. Returns the descriptor, which blocks.

    A layout of the user's own may name a terminal, or a FIFO that is read. Raises UnfitError, OSError.
    """
    fd = opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, links=OWN_LINKS, regular=False)
    try:
        os.set_blocking(fd, True)  # the worker has it as its stdout
    except BaseException:
        os.close(fd)
        raise
    return fd


def contents(
    path: str, limit: int, offset: int = 0, *, links: int = NO_LINKS, owners: Container[int] | None = None
) -> bytes:
    """At most ``limit`` bytes of a regular file, from ``offset`` on. Raises OSError, UnfitError.

    ``owners``: the uids whose file counts; any other's raises UnfitError. None: anybody's does.
    """
    fd = opened(path, links=links)
    try:
        if owners is not None and (owner := os.fstat(fd).st_uid) not in owners:
            raise UnfitError(errno.EPERM, f"it belongs to uid {owner}", path)
        return pread(fd, limit, offset)
    finally:
        os.close(fd)


def pread(fd: int, limit: int, offset: int = 0) -> bytes:
    """At most ``limit`` bytes of an open file, from ``offset`` on. Raises OSError."""
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
    """Write all of it. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def replace(path: str, temporary: str, data: bytes) -> None:
    """Put a file in the place of ``path`` in one step, by way of ``temporary``, a name beside it.

    A link there is replaced, not followed. Raises OSError, with nothing left over: FileExistsError if ``temporary`` is
    there.
    """
    from os import replace as put  # whoever replaces files has the whole module

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
    """The path that links of ours lead to; ``path`` itself if it is none, or not ours. Raises OSError."""
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
    """Make a folder, with what the umask leaves of ``mode``. Returns False if it was there, and is ours.

    Raises UnfitError: something else is there, or a folder of somebody else's; OSError.
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
    """Open what a link leads to, link by link: each is held while it is looked at, so that none can be swapped."""
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
    """Whose a link is, and the path to which it leads; ``""`` for what is no link. Raises OSError."""
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
    """Whether a link counts as ours: it is, or it is one of /dev (/dev/stdout), made by who has made /dev.

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
    """Whether a file is one of /proc, where nobody but the kernel makes any."""
    try:
        return found.st_dev == os.stat("/proc/self/").st_dev
    except OSError:
        return False
