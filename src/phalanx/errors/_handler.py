"""`record` and `ErrorHandler`: how a worker's own code records its failures in its error file.

A launcher that is itself a worker passes on the error file of the worker that failed first. The format and the writing
belong to `phalanx._evidence`.
"""

from __future__ import annotations

import functools
import os
import sys

from phalanx._evidence import recording
from phalanx._evidence.error_file import ERROR_FILE_ENV, file_identity, read_error_file, timer_detail, write_json
from phalanx._outcomes.failure import NOT_AVAILABLE

TYPE_CHECKING = False
if not TYPE_CHECKING:

    def overload(fn):  # noqa: ANN001, ANN202 (typing takes 3 ms to import, and its overload is for type checkers)
        return fn


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from types import TracebackType
    from typing import Any, ParamSpec, Protocol, TypeVar, overload

    P = ParamSpec("P")
    R = TypeVar("R")

    class Decorator(Protocol):
        """What `record` is without a function."""

        @overload
        def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R | None]]: ...
        @overload
        def __call__(self, fn: Callable[P, R]) -> Callable[P, R | None]: ...


_COROUTINE = 0x80  # CO_COROUTINE of a code object's flags: set by "async def"


class ErrorHandler:
    """Writes the error file of this process. Override its methods, and pass it to `record`, to do that differently."""

    _fn_name: str | None = None

    def _get_error_file_path(self) -> str | None:
        """Return the path to write to: the value of ``TORCHELASTIC_ERROR_FILE``; None for nowhere."""
        return os.environ.get(ERROR_FILE_ENV)

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        """Keep the qualified name of the recorded function as ``_fn_name``. Called before `initialize`.

        Args:
            fn_name: The name; None for a callable that has none, like a `functools.partial`.
        """
        self._fn_name = fn_name

    def initialize(self) -> None:
        """Have the interpreter print its stacks to stderr at a fatal signal. Called before the recorded function.

        If `faulthandler` is enabled already, nothing changes: in a worker it writes to a file beside the error file.
        If there is no stderr to print to, a UserWarning is issued.
        """
        import faulthandler

        if not faulthandler.is_enabled():
            try:
                faulthandler.enable(all_threads=True)
            except Exception as error:  # noqa: BLE001 - a stderr that is closed, or no file, or an object of the user's
                import warnings

                msg = f"no stack will be printed on a fatal signal: {type(error).__name__}: {error}"
                warnings.warn(msg, stacklevel=2)

    def record_exception(self, e: BaseException) -> None:
        """Write `e` to the file that `_get_error_file_path` names; without one, do nothing.

        A failure to write is ignored. A later exception replaces an earlier one; an exception that is recorded twice
        keeps its first moment.

        Args:
            e: The exception. Its traceback is recorded whole.

        Raises:
            Exception: Only what an overridden `_get_error_file_path` raises.
        """
        if path := self._get_error_file_path():
            recording.record(e, path)

    def record_success(self) -> None:
        """Do nothing. Called when the recorded function has returned; what an override raises is raised to its caller.

        Not called after a `SystemExit`, of whatever code.
        """

    def override_error_code_in_rootcause_data(
        self,
        rootcause_error_file: str,
        rootcause_error: dict[str, Any],
        error_code: int = 0,
    ) -> None:
        """Put `error_code` as ``errorCode`` into error file data, in place.

        Args:
            rootcause_error_file: Where the data came from, for the warning if they have no place for a code.
            rootcause_error: Error file data.
            error_code: The exit code to put in.
        """
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            import logging

            logger = logging.getLogger(__name__)
            logger.warning("%s has no place for the error code %d", rootcause_error_file, error_code)

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy another process's error file to ours, as a worker does that is the launcher of the failed process.

        The copy goes to the path that `_get_error_file_path` returns, has ``error_code`` in it, and replaces what is
        there. Without such a path nothing is done.

        Args:
            rootcause_error_file: The file to pass on.
            error_code: An exit code to put into it; 0 for none.

        Raises:
            FileNotFoundError: `rootcause_error_file` does not exist.
            ValueError: `rootcause_error_file` is no error file; the message says why.
            OSError: Our error file could not be written.
        """
        data, problem = read_error_file(rootcause_error_file)
        if problem == "missing":
            import errno

            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), rootcause_error_file)
        if data is None:
            raise ValueError(f"{rootcause_error_file}: {problem}")
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, data, error_code)
        if own := self._get_error_file_path():
            write_json(own, data)


def get_error_handler() -> ErrorHandler:
    """Return a new handler of the kind that `record` uses by default."""
    return ErrorHandler()


@overload
def record(fn: None = None, error_handler: ErrorHandler | None = None) -> Decorator: ...


@overload
def record(
    fn: Callable[P, Coroutine[Any, Any, R]],
    error_handler: ErrorHandler | None = None,
) -> Callable[P, Coroutine[Any, Any, R | None]]: ...


@overload
def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]: ...


def record(fn: Callable[P, R] | None = None, error_handler: ErrorHandler | None = None) -> Any:
    """Decorate the main function of a worker so that its failure leaves an error file.

    - An exception is recorded, and raised again. Its traceback shows the function, not this decorator.
    - `SystemExit` with code 0 or None becomes a return of None. Any other is raised again, with no error file.
    - `KeyboardInterrupt` and `asyncio.CancelledError` are raised again, with no error file: the end was intended.
    - For a `ChildFailedError`, ours or torch's, the root cause's error file is copied to this process's; if there is
      none, the `ChildFailedError` itself is recorded. It is raised again.

    Scripts that ``phalanx run`` starts need no decorator. A coroutine function (``async def``) is recorded while it is
    awaited. A generator function is not: calling it runs none of its code.

    Args:
        fn: The function. Without it, as in ``@record()``, a decorator is returned.
        error_handler: Writes the error file. Default: `get_error_handler()`.

    Returns:
        The decorated function, with the name, signature and docstring of `fn`.

    >>> @record
    ... def main():
    ...     raise SystemExit(0)
    >>> main()
    """
    handler = error_handler or get_error_handler()
    if fn is None:
        return functools.partial(record, error_handler=handler)
    if getattr(getattr(fn, "__code__", None), "co_flags", 0) & _COROUTINE:
        coroutine: Callable[P, Awaitable[Any]] = fn  # type: ignore[assignment]  # the flag above says so

        @functools.wraps(fn)
        async def recorded_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
            with _Recording(handler, fn):
                return await coroutine(*args, **kwargs)

        return recorded_coroutine

    @functools.wraps(fn)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        with _Recording(handler, fn):
            return fn(*args, **kwargs)
        return None

    return recorded


def _nothing(*_: Any) -> None:
    """Stand in for a method that a handler lacks."""


class _Recording:
    """The context in which `record` runs a function."""

    def __init__(self, handler: ErrorHandler, fn: Callable[..., Any]) -> None:
        self._handler = handler
        self._name: str | None = getattr(fn, "__qualname__", None)

    def __enter__(self) -> None:
        # A handler that was written for an older torch, and stands on none of ours, has neither this nor the next.
        getattr(self._handler, "set_entrypoint_fn_name", _nothing)(self._name)
        self._handler.initialize()

    def __exit__(self, kind: object, exc: BaseException | None, trace: TracebackType | None) -> bool:
        if exc is None:
            getattr(self._handler, "record_success", _nothing)()
            return False
        if isinstance(exc, SystemExit):
            return exc.code is None or exc.code == 0
        cancelled = getattr(sys.modules.get("asyncio"), "CancelledError", GeneratorExit)  # not loaded: not raised
        if isinstance(exc, (KeyboardInterrupt, GeneratorExit, cancelled)):
            return False
        if trace is not None:
            # The first entry is the wrapper's frame. The class may let no attribute be set: a frozen dataclass.
            BaseException.with_traceback(exc, trace.tb_next)
        try:
            if not self._passed_on(exc):
                self._handler.record_exception(exc)
        except Exception:  # of an overridden handler: it must not replace the failure
            import logging

            logging.getLogger(__name__).warning("the error handler failed", exc_info=True)
        return False

    def _passed_on(self, exc: BaseException) -> bool:
        """Copy the root cause's error file to ours, if an exception is a `ChildFailedError`. Returns whether it did."""
        try:
            _, failure = type(exc).get_first_failure(exc)  # type: ignore[attr-defined]  # it may have none
            error_file, exitcode = os.fspath(failure.error_file), int(failure.exitcode)
        except Exception:  # noqa: BLE001 - it has no such method, or one of another kind
            return False
        # For the reader, the path of a damaged error file, in our own, is of more use than a copy of it.
        if error_file == NOT_AVAILABLE or getattr(failure, "unreadable", ""):
            return False
        own = getattr(self._handler, "_get_error_file_path", ErrorHandler()._get_error_file_path)()  # noqa: SLF001 - as `ErrorHandler` has it
        if own and timer_detail(own):
            return False  # the expired timer is the cause, and stays in our error file
        before = file_identity(own) if own else None
        try:
            self._handler.dump_error_file(error_file, exitcode)
        except (OSError, ValueError):  # gone or damaged in the meantime
            return False
        if own and file_identity(own) != before:
            recording.mark_as_recorded(exc, own)
        return True
