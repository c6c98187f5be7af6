"""Pickles the value that a worker returns, and unpickles it in the launcher, perhaps after the worker has ended.

Objects that the launcher has are written as references: those of its main module by name, those that it sent by value
by their number. Nothing that comes back changes one of the launcher's classes. Descriptors (a connection, a socket)
travel beside the pickle; tensors are copied, unless they are in shared memory.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import os
import sys
from _thread import get_ident
from functools import partial

from phalanx._base import linux
from phalanx._base.unpatched import loaded
from phalanx._engine import main_module
from phalanx._engine.pickling.payload import FdHandle
from phalanx._engine.pickling.picklers import Nowhere, Unpickler, plain, sharing_reducers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from phalanx._engine.pickling.payload import ReceivedFds

_MAX_FDS = 200  # descriptors that a value may hold: they travel in one message


# --- in the worker


def pack(value: object, known: Mapping[str, object]) -> tuple[int, list[int]]:
    """Pickle a value into a new memfd. Returns the memfd and the value's descriptors; the caller owns all of them.

    ``known`` is what the launcher's main module holds. Raises UnpicklableError.
    """
    memfd = linux.memory_file("phalanx-result")
    fds: list[int] = []
    try:
        try:
            with _collected(fds):
                _dump(value, memfd, known, fds, by_value=False)
        except Exception:  # noqa: BLE001 - whatever cannot go by reference is tried by value
            os.ftruncate(memfd, 0)
            os.lseek(memfd, 0, os.SEEK_SET)
            _close(fds)
            with _collected(fds):
                _dump(value, memfd, known, fds, by_value=True)
        if len(fds) > _MAX_FDS:
            raise ValueError(f"it holds {len(fds)} descriptors; at most {_MAX_FDS} can be returned")  # noqa: TRY301 - as the others
        linux.seal(memfd)  # the launcher refuses an unsealed one: its size could change during the reading
    except BaseException as error:
        os.close(memfd)
        _close(fds)
        if not isinstance(error, Exception):
            raise
        from phalanx._engine.pickling.unpicklable import UnpicklableError, first_line, type_name

        where = _find(value, known) or f"the return value ({type_name(value)})"
        raise UnpicklableError(f"{where} cannot be pickled: {first_line(error)}") from error
    return memfd, fds


def _find(value: object, known: Mapping[str, object]) -> str:
    """Name what cannot be pickled."""
    from phalanx._engine.pickling.unpicklable import Search

    fds: list[int] = []

    def pickler() -> Any:
        _close(fds)  # those of the last attempt
        return _pickler(Nowhere(), known, fds, by_value=True)

    with _collected(fds):
        try:
            return Search(pickler).find("the return value", value)
        finally:
            _close(fds)


def _dump(value: object, memfd: int, known: Mapping[str, object], fds: list[int], *, by_value: bool) -> None:
    with open(memfd, "wb", closefd=False) as file:
        _pickler(file, known, fds, by_value=by_value).dump(value)


def _pickler(file: Any, known: Mapping[str, object], fds: list[int], *, by_value: bool) -> Any:
    def importable(obj: object) -> bool:
        return main_module.finds(obj, known)

    table = {**copyreg.dispatch_table, **sharing_reducers()}
    if "torch" in sys.modules:
        from phalanx._engine.pickling import tensors

        table |= tensors.copying_reducers(sharing_reducers(), may_share=lambda: len(fds) < _MAX_FDS // 2, returns=True)
    if by_value:
        from phalanx._engine.pickling.by_value import make

        return make(file, table, importable=importable, sent=None)
    return plain(file, table, importable=importable)


@contextlib.contextmanager
def _collected(fds: list[int]) -> Iterator[None]:
    """Collect duplicates of the descriptors that this thread pickles, by replacing `DupFd` in `multiprocessing`.

    Its own (`resource_sharer.DupFd`) starts a thread that sends them to whoever connects, while this process lives.
    The rule for a process that is being spawned is not used: locks and queues could be returned by it, and these are
    of use to the launcher only while the process lives that has made them.
    """
    modules = [loaded(f"multiprocessing.{name}") for name in ("reduction", "resource_sharer")]
    before: list[tuple[Any, Any]] = [(module, module.DupFd) for module in modules if module is not None]
    me = get_ident()

    def collect(fd: int, original: Callable[[int], Any]) -> Any:
        if get_ident() != me:
            return original(fd)
        fds.append(os.dup(fd))
        return FdHandle(len(fds) - 1)

    for module, original in before:
        module.DupFd = partial(collect, original=original)
    try:
        yield
    finally:
        for module, original in before:
            module.DupFd = original


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


# --- in the launcher


def load(data: bytes, fds: ReceivedFds, sent: list[object]) -> Any:
    """Unpickle a value that `pack` has written. ``sent`` is `Packed.sent`. Raises what unpickling raises."""
    with fds:
        return Unpickler(io.BytesIO(data), sent).load()
