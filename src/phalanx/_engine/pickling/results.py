"""A value on its way back from a worker, which may have ended when it is looked at.

Owns its pickling. What the launcher has, it gets back by reference: what is in its main module by name, what it has
sent by value by its number. Nothing that comes back changes one of its classes. Descriptors (a connection, a socket)
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

from phalanx._base import sealed_memfd
from phalanx._engine import main_module
from phalanx._engine.pickling.passed_fds import Handle
from phalanx._engine.pickling.payload import UnpicklableError, sharing
from phalanx._engine.worker import mp_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from phalanx._engine.pickling.passed_fds import Given

_MOST = 200
"""Descriptors that a value may hold: they travel in one message."""


# --- in the worker


def pack(value: object, known: Mapping[str, object]) -> tuple[int, list[int]]:
    """Pickle a value into a new memfd. Returns that, and the descriptors that belong to it; all are the caller's.

    ``known`` is what the launcher's main module holds. Raises UnpicklableError.
    """
    memfd = sealed_memfd.new("phalanx-result")
    fds: list[int] = []
    try:
        try:
            with _collected(fds):
                _dump(value, memfd, known, fds, by_value=False)
        except Exception:  # noqa: BLE001 - whatever stands in the way by reference is tried by value
            os.ftruncate(memfd, 0)
            os.lseek(memfd, 0, os.SEEK_SET)
            _close(fds)
            if "socket" in sys.modules:
                from multiprocessing import reduction  # noqa: F401 - it knows how one travels
            with _collected(fds):
                _dump(value, memfd, known, fds, by_value=True)
        _check_number(fds)
        sealed_memfd.seal(memfd)  # the launcher takes no other: its size could change while it is read
    except BaseException as error:
        os.close(memfd)
        _close(fds)
        if not isinstance(error, Exception):
            raise
        from phalanx._engine.pickling.unpicklable import first_line, type_name

        where = _find(value, known) or f"the return value ({type_name(value)})"
        msg = f"{where} cannot be pickled: {first_line(error)}"
        raise UnpicklableError(msg) from error
    return memfd, fds


def _find(value: object, known: Mapping[str, object]) -> str:
    """Name what cannot be pickled."""
    from phalanx._engine.pickling.payload import Nowhere
    from phalanx._engine.pickling.unpicklable import find

    fds: list[int] = []

    def pickler() -> Any:
        _close(fds)  # those of the last try
        return _pickler(Nowhere(), known, fds, by_value=True)

    with _collected(fds):
        try:
            return find("the return value", value, pickler)
        finally:
            _close(fds)


def _check_number(fds: list[int]) -> None:
    if len(fds) > _MOST:
        raise UnpicklableError(f"it holds {len(fds)} descriptors; at most {_MOST} can be returned")


def _dump(value: object, memfd: int, known: Mapping[str, object], fds: list[int], *, by_value: bool) -> None:
    with open(memfd, "wb", closefd=False) as file:
        _pickler(file, known, fds, by_value=by_value).dump(value)


def _pickler(file: Any, known: Mapping[str, object], fds: list[int], *, by_value: bool) -> Any:
    def importable(obj: object) -> bool:
        return main_module.finds(obj, known)

    table = {**copyreg.dispatch_table, **sharing()}
    if "torch" in sys.modules:
        from phalanx._engine.pickling import tensors

        table |= tensors.by_value(sharing(), may_share=lambda: len(fds) < _MOST // 2, returns=True)
    if by_value:
        from phalanx._engine.pickling.by_value import make

        return make(file, table, importable=importable, sent=None)
    from phalanx._engine.pickling.picklers import plain

    return plain(file, table, importable=importable)


@contextlib.contextmanager
def _collected(fds: list[int]) -> Iterator[None]:
    """Have descriptors that this thread pickles collected, as duplicates.

    `multiprocessing` would have a thread of this process hand them out, for as long as it lives. That is
    `resource_sharer.DupFd`; nothing is pickled under its other rule, for a process that is being spawned, by which
    locks and queues could be returned: these are the launcher's only as long as whoever has made them lives.
    """
    modules = [mp_child.loaded(f"multiprocessing.{name}") for name in ("reduction", "resource_sharer")]
    before: list[tuple[Any, Any]] = [(module, module.DupFd) for module in modules if module is not None]
    me = get_ident()

    def collect(fd: int, original: Callable[[int], Any]) -> Any:
        if get_ident() != me:
            return original(fd)
        fds.append(os.dup(fd))
        return Handle(len(fds) - 1)

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


def load(data: bytes, given: Given, sent: list[object]) -> Any:
    """Unpickle what `pack` has written. ``sent`` is what went there by value. Raises what unpickling does."""
    from phalanx._engine.pickling.picklers import Unpickler

    with given:
        return Unpickler(io.BytesIO(data), sent).load()
