"""Parses dumps of stacks: threads and frames, the frame that tells where a process is, and many ranks' in one line.

Owns the format that `faulthandler` writes; touches no process. A dump may hold anything: nothing here raises.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from phalanx._base.frozen import Value
from phalanx._base.text import name_ranks
from phalanx._evidence.describe import OWN_FOLDERS, is_own_file

NO_STACK = "# no Python stack: "
"""How the text of a process begins that has shown no stack. The reason follows on the same line."""

GONE = "it has exited"
"""The reason of a process that has exited."""

EXITED = f"{NO_STACK}{GONE}\n"
"""The text of such a process."""

MAIN_ALONE = "one thread alone, the main thread as a rule"
"""How the line above a dump of one thread begins. Why the others are missing follows in brackets."""

_HEAD = re.compile(r"(?:(Current thread|Thread) 0x([0-9a-fA-F]{1,16})\b.*|Stack )\(most recent call first\):\s*")
_IN_A_STATE = "# it is "  # how the dump begins of a process that was stopped, or in uninterruptible sleep
_FRAME = re.compile(r'  File (?:"(.*)"|\?\?\?), line (\d{1,10}|\?\?\?) in (.*)')
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64|32)?/python\d[\d.]*t?/|^<frozen |^\?\?\?$")
_COMMUNICATION = re.compile(r"/(?:site|dist)-packages/torch/(?:distributed/|autograd/graph\.py$)")
_DISPATCH = re.compile(r"/(?:site|dist)-packages/torch/(?:_ops\.py$|_library/)")  # by which torch calls an operator
# What starts workers. The rest of the engine may be called by the user's program, and so have its frames below.
_STARTERS = tuple(os.path.join(folder, "_engine", name, "") for folder in OWN_FOLDERS for name in ("keeper", "worker"))
_CALLED = "mp_child.py"  # the one file there that may be, too: it requests the resource tracker for the program
_IMPORTED = "<module>"  # the frame of a file that is being imported, as by a program that starts a group of its own
_PACKAGES = re.compile(r".*/(?:(?:site|dist)-packages|lib(?:64|32)?/python\d[\d.]*t?)/")
_SHOWN = 4  # locations that `sum_up_locations` names one by one


class Frame(Value):
    """One call: the file as the interpreter has it, the line (0 where it is not known), the function's bare name."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        """The function and its location, in short.

        >>> str(Frame("/home/me/train.py", 41, "all_reduce")), str(Frame("train.py", 3, "<module>"))
        ('all_reduce (train.py:41)', 'train.py:3')
        """
        location = f"{os.path.basename(self.path)}:{self.line}" if self.line else os.path.basename(self.path)
        return location if self.function == "<module>" else f"{self.function} ({location})"


class Halted(Value):
    """Where a process is that is stopped or sleeps uninterruptibly: the frame, and that state, in words."""

    frame: Frame
    state: str

    def __str__(self) -> str:
        return f"{self.frame}, {self.state}"


class Ended(Value):
    """That a rank has ended, and how, in words."""

    how: str


class Thread(Value):
    """One thread: its `threading.get_ident` (0: not known), whether it took the signal, its frames, innermost first."""

    ident: int
    current: bool
    frames: tuple[Frame, ...]


Location = Frame | Halted | Ended | str
"""Where a rank is; a str: why that is not known, in words."""

NOTHING = ""
"""The location of a rank of which nothing is known, not even why."""


def parse(text: str) -> list[Thread]:
    r"""List the threads of a dump, in its order: the main thread comes last. Lines of no dump are passed over.

    >>> parse('Current thread 0x01 (most recent call first):\n  File "t.py", line 4 in wait\n')
    [Thread(ident=1, current=True, frames=(Frame(path='t.py', line=4, function='wait'),))]
    >>> parse("no dump")
    []
    """
    found: list[tuple[int, bool, list[Frame]]] = []
    open_ = False
    for line in text.split("\n"):
        head = _HEAD.fullmatch(line)
        if head is not None:
            found.append((int(head[2] or "0", 16), head[1] != "Thread", []))
            open_ = True
            continue
        frame = _FRAME.fullmatch(line) if open_ else None
        if frame is not None:
            number = 0 if frame[2] == "???" else int(frame[2])
            found[-1][2].append(Frame("???" if frame[1] is None else frame[1], number, frame[3]))
        elif not line.startswith("  "):  # "  ..." and "  <no Python frame>" are the thread's own; an empty line ends it
            open_ = False
    return [Thread(ident, current, tuple(frames)) for ident, current, frames in found]


def top(threads: Sequence[Thread], ident: int = 0) -> Frame | None:
    """Find the frame that tells where a process is: the innermost of the user's own code, or simply the innermost.

    Of the thread ``ident``; by default, or where there is no such, of the main thread. None if there is none.
    """
    frames = program_frames(_frames_of(threads, ident))
    return next((frame for frame in frames if not is_library(frame)), frames[0] if frames else None)


def waits_for_peers(text: str, ident: int = 0) -> bool:
    r"""Whether a process waits for other ranks, as far as its frames tell: the innermost is of torch's communication.

    Or of its backward pass, in which DistributedDataParallel communicates. Frames by which torch calls an operator, as
    functional collectives are, do not count. ``ident`` is as for `top`.

    >>> file = "/x/site-packages/torch/distributed/distributed_c10d.py"
    >>> waits_for_peers(f'Thread 0x01 (most recent call first):\n  File "{file}", line 5356 in barrier\n')
    True
    >>> waits_for_peers("")
    False
    """
    paths = (frame.path for frame in _frames_of(parse(text), ident))
    return _COMMUNICATION.search(next((path for path in paths if not _DISPATCH.search(path)), "")) is not None


def _frames_of(threads: Sequence[Thread], ident: int) -> Sequence[Frame]:
    """The frames of one thread, which is chosen as by `top`."""
    if not threads:
        return ()
    return next((one for one in threads if one.ident == ident), threads[-1]).frames if ident else threads[-1].frames


def program_frames(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Cut off the outermost frames by which Phalanx has started the user's program; unless there are no others."""
    for index, frame in enumerate(frames):
        if index and is_starter(frame):
            return frames[:index]
    return frames


def is_starter(frame: Frame) -> bool:
    """Whether a frame is one by which Phalanx starts and ends a worker's program."""
    called = os.path.basename(frame.path) == _CALLED or frame.function == _IMPORTED
    return not called and frame.path.startswith(_STARTERS)


def location(text: str, ident: int = 0) -> Location:
    r"""Find where a process is, as `top` does, by its dump; or why it has shown none, in words.

    >>> location('Thread 0x01 (most recent call first):\n  File "t.py", line 4 in wait\n', 2)
    'the thread that hangs is not among those that could be read'
    """
    threads = parse(text)
    first = text.partition("\n")[0]
    if ident and threads and not is_of_unnamed_thread(text) and all(thread.ident != ident for thread in threads):
        return "the thread that hangs is not among those that could be read"
    frame = top(threads, ident)
    if frame is None:
        why = first.removeprefix(NO_STACK) if first.startswith(NO_STACK) else "there is none"
        return Ended("") if why == GONE else why
    return Halted(frame, first.removeprefix(_IN_A_STATE)) if first.startswith(_IN_A_STATE) else frame


def is_of_unnamed_thread(text: str) -> bool:
    """Whether a dump is of one thread without an id: the main thread, as a rule."""
    threads = parse(text) if MAIN_ALONE in text.partition("\n")[0] else ()
    return len(threads) == 1 and not threads[0].ident


def sum_up_locations(
    locations: Mapping[int, Location],
    hung: int | None = None,
    name: Callable[[Iterable[int]], str] = name_ranks,
) -> str:
    """Describe in one line where the ranks of a group are: those at one location together, the most first.

    ``hung`` is the rank that hangs: it is always named. ``name`` returns what ranks are called: that of a job on many
    machines says the host, too.

    >>> reduce, read = Frame("t.py", 41, "reduce"), Frame("t.py", 17, "read")
    >>> sum_up_locations({0: reduce, 1: reduce, 2: reduce, 3: read}, 3)
    '3 of 4 ranks wait in reduce (t.py:41); rank 3 is in read (t.py:17)'
    >>> sum_up_locations({0: reduce, 1: reduce})
    'both ranks are in reduce (t.py:41)'
    >>> sum_up_locations({0: reduce, 1: "it offers none"})
    'rank 0 is in reduce (t.py:41); rank 1 shows no Python stack (it offers none)'
    """
    together: dict[Location, list[int]] = {}
    for rank in sorted(locations):
        together.setdefault(locations[rank], []).append(rank)
    groups = sorted(together.items(), key=lambda item: (not _is_known(item[0]), -len(item[1]), item[1][0]))
    if hung is not None:  # those that wait first, and then the rank that they wait for
        groups.sort(key=lambda item: hung in item[1] and len(item[1]) == 1)
    shown = groups if len(groups) <= _SHOWN + 1 else groups[:_SHOWN]
    # A rank that has ended is always named: it may be the one that the others wait for. So may one that is not known.
    rest = [group for group in groups if group not in shown]
    named_too = [group for group in rest if hung in group[1] or isinstance(group[0], Ended) or group[0] == NOTHING]
    size = len(locations)
    parts = [_describe(where, ranks, size, hung, name, first=index == 0) for index, (where, ranks) in enumerate(shown)]
    parts += [_describe(where, ranks, size, hung, name, first=False) for where, ranks in named_too]
    others = [rank for group in rest if group not in named_too for rank in group[1]]
    if others:
        parts.append(f"{name(others)} {'are' if len(others) > 1 else 'is'} elsewhere")
    return "; ".join(parts)


def outliers(locations: Mapping[int, Location], waiting: Callable[[int], bool] | None = None) -> set[int]:
    r"""Find the ranks that are elsewhere than most: those that the others wait for, as far as one can tell.

    Most are more than half of all, and are known to be at one location: ranks that could not be read share none. Where
    that finds none, and some ranks are ``waiting`` for others, it is those of known location that are not.

    >>> reduce, read = Frame("t.py", 41, "reduce"), Frame("t.py", 17, "read")
    >>> outliers({0: reduce, 1: reduce, 2: reduce, 3: read}), outliers({0: reduce, 1: read})
    ({3}, set())
    >>> outliers({0: reduce, 1: reduce, 2: reduce, 3: "it offers none"}), outliers({0: read, 1: "none", 2: "none"})
    ({3}, set())
    >>> outliers({0: reduce, 1: read}, {0: True, 1: False}.__getitem__)
    {1}
    """
    together: dict[Location, list[int]] = {}
    for rank, where in locations.items():
        if _is_known(where):
            together.setdefault(where, []).append(rank)
    most = max(together.values(), key=len, default=[])
    if 2 * len(most) > len(locations) and len(most) < len(locations):
        return set(locations).difference(most)
    known = {rank for ranks in together.values() for rank in ranks}
    busy = {rank for rank in known if waiting is not None and not waiting(rank)}
    return busy if busy != known else set()


def group_equal(texts: Mapping[int, str], key: Callable[[str], object]) -> list[tuple[list[int], str]]:
    """Group ranks whose texts are equal by ``key``; each group with the text of its first, in the order of ranks."""
    groups: dict[object, tuple[list[int], str]] = {}
    for rank, text in sorted(texts.items()):
        groups.setdefault(key(text), ([], text))[0].append(rank)
    return list(groups.values())


def alike(text: str) -> object:
    """Return what makes ranks one group for `group_equal`: the same stacks, whatever the threads' idents are."""
    threads = parse(text)
    if not threads or native_part(text):
        return text
    first = text.partition("\n")[0]
    state = first if first.startswith("# ") else ""
    return state, tuple(tuple(program_frames(thread.frames)) for thread in threads)


def describe(name: str, text: str, cwd: str) -> list[tuple[str, str]]:
    """Return the lines by which the stacks of a group of ranks are shown, each with its kind.

    Args:
        name: What the ranks are called.
        text: The dump of one of them.
        cwd: The folder that paths are shown from.

    Returns:
        Kinds and lines: "heading", the name; "state", what is above the dump; "thread"; "library" and "text", frames.
    """
    threads = parse(text)
    first, _, rest = text.partition("\n")
    if not threads:
        said = first.removeprefix("# ")
        return [("heading", f"{name}: {said}"), *(("text", f"  {line}") for line in rest.splitlines())]
    lines = [("heading", f"{name}:")]
    if first.startswith("# "):
        lines.append(("state", f"  {first.removeprefix('# ')}"))
    *others, main = threads
    if others:
        lines.append(("thread", "  main thread:"))
    lines += _frame_lines(main.frames, cwd)
    groups: dict[tuple[Frame, ...], list[Thread]] = {}
    for thread in others:
        groups.setdefault(thread.frames, []).append(thread)
    for equal in groups.values():
        many = len(equal) > 1
        heads = f"{len(equal)} threads, alike:" if many else f"thread {equal[0].ident:#x}:"
        lines += [("thread", f"  {heads}"), *_frame_lines(equal[0].frames, cwd)]
    native = native_part(text)
    if native:
        lines += [("thread", "  native frames (py-spy):"), *(("text", f"    {line}") for line in native.splitlines())]
    return lines


def _frame_lines(frames: Sequence[Frame], cwd: str) -> list[tuple[str, str]]:
    shown = program_frames(frames)
    rows = [(frame.function, f"{_short(frame.path, cwd)}:{frame.line or '?'}", frame) for frame in shown]
    width = max((len(function) for function, _, _ in rows), default=0)
    if not rows:
        return [("text", "    (no Python frame)")]
    return [
        ("library" if is_library(frame) else "text", f"    {function.ljust(width)}  {place}")
        for function, place, frame in rows
    ]


def _short(path: str, cwd: str) -> str:
    """Shorten a path to that from the run's folder, or from where packages are."""
    library = _PACKAGES.match(path)
    if library:
        return path[library.end() :]
    root = os.path.join(cwd, "")
    return path.removeprefix(root) if cwd else path


def native_part(text: str) -> str:
    """Return the frames of C code that stand below a dump; "": there are none."""
    return text.partition("\nnative frames (py-spy):\n")[2]


def is_library(frame: Frame) -> bool:
    """Whether a frame is the standard library's, an installed package's, or ours."""
    return is_own_file(frame.path) or _LIBRARY.search(frame.path) is not None


def _is_known(where: Location) -> bool:
    return isinstance(where, (Frame, Halted))


def _describe(
    where: Location,
    ranks: list[int],
    size: int,
    hung: int | None,
    name: Callable[[Iterable[int]], str],
    *,
    first: bool,
) -> str:
    many = len(ranks) > 1
    if isinstance(where, Ended):
        return f"{name(ranks)} {'have' if many else 'has'} ended" + (f" ({where.how})" if where.how else "")
    if where == NOTHING:
        return f"nothing is known of {f'{len(ranks)} ranks ({name(ranks)})' if many else name(ranks)}"
    if isinstance(where, str):
        return f"{name(ranks)} show{'s' * (not many)} no Python stack ({where})"
    if not many:
        return f"{name(ranks)} is in {where}"
    every = "both ranks" if size == 2 else f"all {size} ranks"  # noqa: PLR2004 - so one says
    who = every if len(ranks) == size else f"{len(ranks)} of {size} ranks" if first else name(ranks)
    if hung is not None and hung in ranks:
        return f"{who}, {name([hung])} among them, are in {where}" if len(ranks) < size else f"{who} are in {where}"
    return f"{who} {'are' if hung is None else 'wait'} in {where}"
