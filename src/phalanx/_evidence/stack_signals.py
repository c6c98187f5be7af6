"""The files ``error.json.stacks`` and ``.fatal``: Python stacks, which a process writes when it gets a signal.

At a fatal signal, the interpreter writes all stacks to the latter. A live process writes stacks to the former whenever
it gets one of two signals: it *offers* its stacks when it has handlers for these signals and a header in the file that
names them. A worker loads this module before its script starts, in whatever Python the script runs (3.8 or later).
"""

from __future__ import annotations

import os

from phalanx._evidence.describe import TEXT_LIMIT, decode_dump, without_own_frames
from phalanx._evidence.error_file import ERROR_FILE_ENV, file_at, open_to_append, read_bytes

FATAL_SIGNALS = (4, 6, 7, 8, 11)
"""SIGILL, SIGABRT, SIGBUS, SIGFPE and SIGSEGV, at which the interpreter's fault handler writes stacks.

They are numbers of Linux, the same on all machines that Phalanx is tested on, because `signal` takes long to import.
"""

STACK_SIGNAL_ENV = "PHALANX_STACK_SIGNAL"
"""The environment variable that names the signal on which a worker shows its stacks."""

_STACKS_LIMIT = 16 << 20  # bytes of a stacks file that are read
_NOT_TO_BE_CAUGHT = (9, 19, *FATAL_SIGNALS)  # SIGKILL, SIGSTOP, and those of `catch_fatal_signals`
_STACKS_HEAD = b"# stacks on signals "
_STACKS_HEADER = _STACKS_HEAD + b"%d and %d, descriptor %d, process %d\n"
_SIGNALS = 64  # the highest number of a signal


def fatal_path(path: str) -> str:
    """Return the path of the file that takes the Python stacks at a fatal signal.

    >>> fatal_path("/logs/0/error.json")
    '/logs/0/error.json.fatal'
    """
    return path + ".fatal"


def catch_fatal_signals() -> bool:
    """Have the interpreter write the stacks of all threads to `fatal_path` at a fatal signal. Never raises.

    The handler can only write to an open descriptor, so the file is opened now and stays open as long as the process
    lives. It stays empty unless the process gets such a signal; the launcher removes an empty one (`remove_empty`).
    Returns whether this was done: not if the user has enabled faulthandler already.
    """
    try:
        import faulthandler

        path = os.environ.get(ERROR_FILE_ENV)
        if not path or faulthandler.is_enabled():
            return False
        faulthandler.enable(open_to_append(fatal_path(path)))
    except (OSError, ValueError, RuntimeError, ImportError):
        return False
    return True


def read_fatal_stacks(path: str) -> str:
    """Return the stacks that a fatal signal left, without our own frames; ``""`` if there are none. Never raises."""
    try:
        return without_own_frames(decode_dump(read_bytes(fatal_path(path), TEXT_LIMIT)))
    except (OSError, ValueError):
        return ""


def fatal_at(path: str) -> int | None:
    """Return when a fatal signal came that left stacks (CLOCK_MONOTONIC, nanoseconds), or None. Never raises."""
    return file_at(fatal_path(path))


def stacks_path(path: str, pid: int = 0) -> str:
    """Return the path of the file that takes the Python stacks of a live process.

    The first process of a rank that offers its stacks uses the plain name; each further one, a name with its ``pid``.

    >>> stacks_path("/logs/0/error.json"), stacks_path("/logs/0/error.json", 4242)
    ('/logs/0/error.json.stacks', '/logs/0/error.json.stacks.4242')
    """
    return f"{path}.stacks.{pid}" if pid else path + ".stacks"


def offer_stacks(path: str | None = None, number: int | None = None) -> bool:
    """Have the interpreter append its stacks to a file (`stacks_path`) at each of two signals.

    At the first signal it writes the stack of the thread that gets the signal: the main thread, unless that blocks it.
    This signal may be sent at any time. At the second it writes the stacks of all threads, and reads them while the
    threads run: frames that change meanwhile can end the process by SIGSEGV. So the second signal is for a process that
    is about to be killed.

    The file's first line names the two signals, the descriptor and the process. Each further call appends such a line,
    and the last one counts. Both handlers are in C, take no lock and do not need the GIL. Like any handler they
    interrupt system calls, which Python repeats.

    ``number`` is the first signal; 0 ends the offer. Default: ``PHALANX_STACK_SIGNAL``; if that names no usable signal,
    SIGRTMIN+18, unless this process has a handler for it already. The second signal is SIGRTMIN+19 (SIGRTMIN+18 if the
    first is SIGRTMIN+19), unless the process has a handler for it: then there is none. Returns whether this process
    offers its stacks now. Never raises.
    """
    try:
        path = path or os.environ.get(ERROR_FILE_ENV)
        return _offer(path, _asked_for() if number is None else number) if path else False
    except (OSError, ValueError, RuntimeError, ImportError, AttributeError, OverflowError):
        return False


def offers_stacks(path: str) -> bool:
    """Whether this process, not one that it is a fork of, offers its stacks. Never raises."""
    numbers, _fd, author = _offered_here(_home_of_stacks(path))
    return bool(numbers) and author == os.getpid()


def can_show_stacks(number: int) -> bool:
    """Whether `offer_stacks` accepts a number: 0, or a signal that can be caught and is not fatal.

    >>> [number for number in (-1, 0, 9, 10, 11, 52, 65) if can_show_stacks(number)]
    [0, 10, 52]
    """
    import _signal  # type: ignore[import-not-found]  # typeshed lacks the C half, which is there without an import

    return number == 0 or (number in _signal.valid_signals() and number not in _NOT_TO_BE_CAUGHT)


def last_offer(data: bytes) -> tuple[int, int, int, int]:
    """Parse the last header in the contents of a stacks file: both signals, the descriptor and the pid.

    A worker may have written anything there. A number that is no signal's becomes 0, and a header with anything but
    numbers (a negative descriptor) is read as no header: ``(0, 0, -1, 0)``.

    >>> last_offer(b"# stacks on signals 52 and 53, descriptor 5, process 4242")
    (52, 53, 5, 4242)
    >>> last_offer(b"# stacks on signals 15 and 15, descriptor -1, process 4242")
    (0, 0, -1, 0)
    """
    start = data.rfind(b"\n" + _STACKS_HEAD) + 1
    if not data.startswith(_STACKS_HEAD, start):
        return 0, 0, -1, 0
    words = data[start + len(_STACKS_HEAD) : start + 200].split(b"\n", 1)[0].replace(b",", b"").split()
    if not all(word.isdigit() and len(word) < 11 for word in words[0::2]) or len(words[0::2]) != 4:  # noqa: PLR2004 - 32 bits at the most, four in a header
        return 0, 0, -1, 0
    first, second, fd, pid = map(int, words[0::2])
    return (first if first <= _SIGNALS else 0), (second if second <= _SIGNALS else 0), fd, pid


def error_file_of(path: str, fd: int) -> str:
    """Return the error file that a stacks file belongs to, which a process has open as ``fd``; or ``""``. Never raises.

    A file is a stacks file of that process by its name, and by a header with this descriptor: the process may have
    another's stacks file open, to read it.

    >>> error_file_of("/models/model.stacks", 3)
    ''
    """
    stem, found, rest = path.rpartition(".stacks")
    try:
        return stem if found and _is_pid(rest) and last_offer(read_bytes(path, _STACKS_LIMIT))[2] == fd else ""
    except (OSError, ValueError):
        return ""


def all_stack_files(path: str) -> list[str]:
    """Return each `stacks_path` of an error file that exists. Never raises."""
    folder, name = os.path.split(path)
    head = path.removesuffix(name)  # as it is written: `folder//name`, say
    try:
        names = [head + each for each in os.listdir(folder or os.curdir)]
    except (OSError, ValueError):
        return []
    return [each for each in names if is_stacks_path(each, path)]


def is_stacks_path(name: str, path: str) -> bool:
    """Whether a path is a `stacks_path` of an error file, whatever the pid."""
    plain = stacks_path(path)
    return name.startswith(plain) and _is_pid(name[len(plain) :])


def holds_no_stack(path: str) -> bool:
    """Whether a stacks file consists of header lines alone. Raises OSError, ValueError."""
    return all(line.startswith(_STACKS_HEAD) for line in read_bytes(path, _STACKS_LIMIT).splitlines())


def _offer(error_file: str, asked: int | None) -> bool:
    import _signal
    import faulthandler

    path = _home_of_stacks(error_file)
    before, fd, _author = _offered_here(path)
    # In a fork: the signals on which the process that it is a fork of offers stacks.
    for each in before or [number for file in all_stack_files(error_file) for number in _offered_here(file)[0]]:
        if _signal.getsignal(each) in (None, 0):  # else the user has installed a handler since
            faulthandler.unregister(each)
    base = int(_signal.SIGRTMIN) + 18
    number = base if asked is None else asked
    free = number == 0 or _is_default(number)
    if number == 0 or (asked is None and not free):
        if fd >= 0:
            os.write(fd, _STACKS_HEADER % (0, 0, fd, os.getpid()))
        return False
    second = base if number == base + 1 else base + 1
    if not _is_default(second):
        second = 0
    fd = _write_header(error_file, fd, number, second)
    for each, unused, everyone in ((number, free, False), (second, True, True)):
        if each and unused:  # in a fork, faulthandler may still list it, though the kernel does not
            faulthandler.unregister(each)
        if each:
            faulthandler.register(each, fd, all_threads=everyone, chain=False)
    return True


def _asked_for() -> int | None:
    """Return the signal, or 0, that ``PHALANX_STACK_SIGNAL`` names; None if that is not usable."""
    text = os.environ.get(STACK_SIGNAL_ENV, "")
    number = int(text) if text.isdigit() and text.isascii() and len(text) <= 3 else -1  # noqa: PLR2004 - NSIG is below 1000
    return number if can_show_stacks(number) else None


def _is_pid(text: str) -> bool:
    """Whether a text is what follows ``.stacks`` in a name of ours."""
    return not text or (text[0] == "." and text[1:].isdigit())


def _home_of_stacks(path: str) -> str:
    """Return the path for the stacks of this process, plain or with its pid; ``""`` if both are others' files."""
    for each in (stacks_path(path), stacks_path(path, os.getpid())):
        try:
            if last_offer(read_bytes(each, _STACKS_LIMIT))[3] == os.getpid():
                return each
        except (FileNotFoundError, NotADirectoryError):
            return each
        except OSError:
            continue
    return ""


def _write_header(error_file: str, fd: int, number: int, second: int) -> int:
    """Append a header to the stacks file, opened first if ``fd`` is -1. Returns the descriptor. Raises OSError."""
    new = fd < 0
    if new:
        fd = _open_stacks(error_file)
    try:
        os.write(fd, _STACKS_HEADER % (number, second, fd, os.getpid()))
    except OSError:
        if new:
            os.close(fd)
        raise
    return fd


def _open_stacks(error_file: str) -> int:
    """Open the file that takes the stacks of this process. Raises OSError."""
    path = _home_of_stacks(error_file)
    try:
        return open_to_append(path, 0 if os.path.lexists(path) else os.O_EXCL)
    except FileExistsError:  # another process of the rank was faster
        return open_to_append(stacks_path(error_file, os.getpid()), os.O_EXCL)


def _offered_here(path: str) -> tuple[list[int], int, int]:
    """Return signals, descriptor and pid of the offer in a stacks file, if this process has that open; or none and -1.

    In a fork of a process that offers its stacks, the pid is that process's: the fork has its descriptor and handlers.
    """
    try:
        file = os.stat(path)
        first, second, fd, author = last_offer(read_bytes(path, _STACKS_LIMIT))
        mine = os.fstat(fd)
    except (OSError, ValueError):
        return [], -1, 0
    if (mine.st_dev, mine.st_ino) != (file.st_dev, file.st_ino):
        return [], -1, 0
    return [number for number in (first, second) if number], fd, author


def _is_default(number: int) -> bool:
    """Whether a signal has its default disposition in the kernel, which knows of handlers in C; `signal` does not."""
    fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.read(fd, 8192)
    finally:
        os.close(fd)
    masks = (int(status.partition(b"\n" + name)[2][:17], 16) for name in (b"SigIgn:", b"SigCgt:"))
    return not any(mask >> number - 1 & 1 for mask in masks)
