"""The program's main module: where it comes from in the launcher, and how workers run it again.

Owns whether ``__main__`` can be run again, which of its functions and classes are found there by name, and the run,
under the name ``__mp_main__`` as in `multiprocessing` (its documentation: "Safe importing of main module"); and the
import path that workers get. Imported when the program imports Phalanx: the working directory of that moment is part of
the path. Knows nothing of pickles and processes.
"""

from __future__ import annotations

import os
import sys

from phalanx._base.unpatched import loaded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import CodeType, FrameType, ModuleType
    from typing import Any

Source = tuple[str, str]
"""Where a main module comes from: ``("path", file)``, or ``("name", module)`` if it was run by ``-m``."""

NAMES = ("__main__", "__mp_main__")
"""What the main module is called, in the program and in the workers; in a worker it has both names."""

_AGAIN = "A worker runs %s again, as __mp_main__"
_STARTS = "starts processes"

_running: Source | None = None  # while it is run again
_run: Source | None = None  # once it has been


class UnguardedMainError(RuntimeError):
    """The main module starts processes, or exits, whenever it is run, also when a worker runs it again."""

    __module__ = "phalanx.multiprocessing"


def source() -> Source | None:
    """Where this program's main module comes from; None if it cannot be run again.

    It cannot at an interactive prompt and in a notebook, which add to it; for ``-c`` and stdin, of which there is no
    file; and for the ``__main__`` of a package, a folder or a zip file, which is a program without a guard.
    """
    main = sys.modules.get("__main__")
    if main is None or hasattr(sys, "ps1") or _runs_in_marimo():
        return None
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return None if name == "__main__" or name.endswith(".__main__") else ("name", name)
    path = getattr(main, "__file__", None)
    if not isinstance(path, str):
        return None
    if not os.path.isabs(path):
        process = sys.modules.get("multiprocessing.process")
        path = os.path.join(getattr(process, "ORIGINAL_DIR", None) or os.getcwd(), path)
    path = os.path.normpath(path)
    return ("path", path) if os.path.isfile(path) else None  # not /dev/fd/63


def _runs_in_marimo() -> bool:
    """Whether this is a cell of marimo's, whose names are not those of the file: in its editor, or `python file`."""
    meta = getattr(sys.modules.get("marimo"), "app_meta", None)
    return meta is not None and getattr(meta(), "mode", None) is not None


def finds(obj: object, names: Mapping[str, object] | None = None) -> bool:
    """Whether a function or class of the main module is found there by its qualified name.

    Args:
        obj: Anything.
        names: The names in the main module; default: those it has now.
    """
    if names is None:
        main = sys.modules.get("__main__")
        names = {} if main is None else vars(main)
    try:
        if obj.__module__ not in NAMES:
            return False
        name = getattr(obj, "__qualname__", None) or obj.__name__  # type: ignore[attr-defined]  # of a type variable
        first, *rest = name.split(".")
        found = names[first]
        for part in rest:
            found = getattr(found, part)
    except Exception:  # noqa: BLE001 - an object may do anything when it is asked
        return False
    return found is obj


def run_again(main: Source) -> None:
    """Run a main module as ``__mp_main__``, unless this process has done so, and have it be ``__main__`` as well.

    Raises UnguardedMainError when it starts processes or exits, and whatever it raises.
    """
    global _running, _run  # noqa: PLW0603 - there is one main module
    if _run == main:
        return
    module = type(sys)("__mp_main__")
    try:
        code = _by_name(module, main[1]) if main[0] == "name" else _by_path(module, main[1])
        # Before it runs: what it defines may be looked up by its module, as `dataclasses` does.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        _running = main
        argv0, sys.argv[:1] = sys.argv[:1], [getattr(module, "__file__", None) or main[1]]  # as `runpy` has it
        try:
            exec(code, vars(module))  # noqa: S102 - the user's program
        finally:
            sys.argv[:1] = argv0
    except SystemExit as leave:
        raise UnguardedMainError(_unguarded(module, main, f"exits ({leave!r})", _line_of(module, leave))) from None
    except UnguardedMainError:
        raise
    except Exception as error:
        if _refused_by_multiprocessing(error):
            raise UnguardedMainError(_unguarded(module, main, _STARTS, _line_of(module, error))) from None
        error.add_note(f"{_AGAIN % main[1]}.")
        raise
    finally:
        _running = None
    _run = main


def check_guard() -> None:
    """Raise UnguardedMainError if the main module is being run again: it must not start processes then."""
    if _running is not None:
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - it has no other name
        while frame is not None and not (
            frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>"
        ):
            frame = frame.f_back
        module = sys.modules.get("__mp_main__")
        raise UnguardedMainError(_unguarded(module, _running, _STARTS, 0 if frame is None else frame.f_lineno))


def absent(error: AttributeError) -> str:
    """The explanation of a name that a main module, run again, does not have; "" for any other error.

    >>> absent(AttributeError("'int' object has no attribute 'x'"))
    ''
    """
    if _run is None or "__mp_main__" not in str(error):
        return ""
    return (
        f"{_AGAIN % _run[1]}, and finds its functions and classes there by their names. This one must be defined at the"
        ' top level, not below `if __name__ == "__main__":`. Or send it by value: main="value".'
    )


def says_it_all(error: BaseException) -> bool:
    """Whether the error's text is enough: its traceback has frames of this package only."""
    return isinstance(error, UnguardedMainError) or any(_AGAIN[:13] in note for note in getattr(error, "__notes__", ()))


def _refused_by_multiprocessing(error: Exception) -> bool:
    """Whether `multiprocessing` raised it, because the main module starts processes as it is run again."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = None if trace is None else trace.tb_frame.f_code
    return code is not None and code.co_name == "_check_not_importing_main"


def _by_name(module: ModuleType, name: str) -> CodeType:
    from importlib.util import find_spec

    spec = find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    code = spec.loader.get_code(name)  # type: ignore[union-attr]  # what was run by -m has one that has it
    vars(module).update(__file__=spec.origin, __loader__=spec.loader, __package__=spec.parent, __spec__=spec)
    _set_cached(module, spec.cached)
    return code  # type: ignore[no-any-return]  # as above


def _set_cached(module: ModuleType, path: str | None) -> None:
    if sys.version_info < (3, 15):  # a module has no such name any more
        vars(module)["__cached__"] = path


def _by_path(module: ModuleType, path: str) -> CodeType:
    vars(module).update(__file__=path, __package__="")
    _set_cached(module, None)
    if path.endswith(".pyc"):
        from importlib.machinery import SourcelessFileLoader

        code = SourcelessFileLoader("__mp_main__", path).get_code("__mp_main__")
        assert code is not None
        return code
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _line_of(module: ModuleType, error: BaseException) -> int:
    """The line of the main module that an exception passed through; 0: none."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is not vars(module):
        trace = trace.tb_next
    return 0 if trace is None else trace.tb_lineno


def _unguarded(module: object, main: Source, verb: str, line: int) -> str:
    import linecache

    path = getattr(module, "__file__", None) or main[1]
    statement = linecache.getline(path, line).strip() if line else ""
    try:
        compile(statement or "(", path, "exec")
    except SyntaxError:  # it goes on in the next line, or is not known
        statement = f"{statement} ..." if statement else "main()"
    where = f"{path}, line {line}," if line else path
    return (
        f"{where} {verb} whenever the file is run, and a worker runs it again to find its functions. Let only the main"
        f' program do so:\n\n    if __name__ == "__main__":\n        {statement}\n'
    )


def search_path() -> list[str]:
    """Return `sys.path`, with the working directory as an absolute path in place of an empty entry.

    Before it come earlier working directories, since modules may have been imported from there: the one in which
    `multiprocessing` was imported, and the one in which this module was. Entries that are no strings (a
    `pathlib.Path`) are left out: the import system ignores them, here and in a worker.
    """
    entries: list[Any] = list(sys.path)
    process = loaded("multiprocessing.process")
    original = None if process is None else process.ORIGINAL_DIR
    here = list(dict.fromkeys(filter(None, (original, _initial_directory, _working_directory()))))
    return [name for entry in entries if isinstance(entry, str) for name in (["".join(entry)] if entry else here)]


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been removed: nothing can be imported from there
        return ""


_initial_directory = _working_directory()


def run_path(script: str, *args: str) -> None:
    """Run a script as ``__main__`` in this interpreter: its ``sys.argv`` is as given, and ``sys.path`` as it is."""
    import runpy

    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
