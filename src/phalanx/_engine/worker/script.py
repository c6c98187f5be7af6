"""Runs a Python script or module just as its interpreter would, and leaves evidence when it fails.

A worker's command line is ``python -u .../script.py [-m] TARGET ARGS...``. Owns the likeness: ``__main__``,
``sys.argv``, ``sys.path[0]``, tracebacks and exit status are those of ``python TARGET ARGS``. What a script could tell:
``sys.orig_argv`` names this file, and two frames of this file lie below the script's own. Like `evidence`, it
is loaded by its path, in whatever Python the user runs (3.8 or later), and imports nothing of Phalanx but three modules
of `_base` and `_evidence`, by their paths.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any


def main() -> None:
    """Become the program that ``sys.argv`` names."""
    here = os.path.dirname(os.path.abspath(__file__))
    safe_path = getattr(sys.flags, "safe_path", False)
    if not safe_path:
        del sys.path[0]  # our own folder, put there by the interpreter
    evidence = _load_ours(os.path.dirname(os.path.dirname(here)))
    del sys.argv[0]
    run(evidence)


def run(evidence: ModuleType) -> None:
    """Become the program that ``sys.argv`` names, in a process that has nothing else to do."""
    safe_path = getattr(sys.flags, "safe_path", False)
    error_file = os.environ.get(evidence.ERROR_FILE_ENV)  # now: the program may change its environment
    evidence.catch_fatal_signals()
    evidence.offer_stacks()
    as_module = sys.argv[0] == "-m"
    if as_module:
        del sys.argv[0]
    namespace = _new_main()
    try:
        code = _module(namespace, safe_path=safe_path) if as_module else _script(namespace, safe_path=safe_path)
        exec(code, namespace)  # noqa: S102 - the user's program
    except SystemExit as leave:
        evidence.note_exit(leave, error_file)
        if evidence.exit_code(leave) == 0:
            _rest()
        raise
    except BaseException as error:  # noqa: BLE001 - raised again below
        failure = error
    else:
        _rest()
        return
    # Out of the handler: a hook of the user's must find no exception being handled.
    _strip(failure)
    evidence.record(failure, error_file, left=True)
    _show(failure)
    sys.excepthook = lambda *_ignored: None
    raise failure  # the interpreter does the rest: threads, exit handlers, exit status, SIGINT for a KeyboardInterrupt


def _rest() -> None:
    """Say that no heartbeat is to be expected any more: exit handlers may take long. Who uses none has none to end."""
    getattr(sys.modules.get("phalanx.timer._expires"), "rest", int)()


def _load_ours(root: str) -> ModuleType:
    """Load `evidence` from below ``root``, our package, and have the kernel kill us when our keeper dies."""
    names = ("linux", "files", "evidence")
    folders = [os.path.join(root, wing) for wing in ("_base", "_evidence")]
    sys.path[:0] = folders
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        import evidence  # type: ignore[import-not-found]  # in its wing, while that is on the path
        import linux  # type: ignore[import-not-found]  # as above

        linux.die_with_parent(os.getppid())
        linux.allow_ptrace()
    finally:
        for folder in folders:
            sys.path.remove(folder)
        for name in names:  # the user's modules may be called so, too
            sys.modules.pop(name, None)
        sys.modules.update(kept)
    return evidence  # type: ignore[no-any-return]  # as above


def _new_main() -> dict[str, Any]:
    """A fresh ``__main__``. Ours lives on in the functions that are running."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    namespace = vars(module)
    namespace.update(__builtins__=sys.modules["builtins"], __annotations__={}, __cached__=None)
    return namespace


def _script(namespace: dict[str, Any], *, safe_path: bool) -> CodeType:
    target = sys.argv[0]
    if not os.path.isfile(target) or _is_zip(target):
        import runpy

        sys.path.insert(0, _absolute(target))
        _name, spec, code = _details(runpy._get_main_module_details)  # type: ignore[attr-defined]  # what ``python FOLDER`` itself calls
        return _under(namespace, spec, code)
    path = _absolute(target)
    if not safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
    if target.endswith(".pyc"):
        from importlib.machinery import SourcelessFileLoader

        binary = SourcelessFileLoader("__main__", path)
        namespace.update(__file__=path, __loader__=binary)
        compiled = binary.get_code("__main__")
        assert compiled is not None
        return compiled
    from importlib.machinery import SourceFileLoader

    source = SourceFileLoader("__main__", path)
    namespace.update(__file__=path, __loader__=source)
    # Not get_code: that would read and write a cache, which no interpreter does for its script.
    data = source.get_data(path)
    try:
        return source.source_to_code(data, path)
    except SyntaxError as error:
        error.__traceback__ = None  # the import system's frames, which the interpreter has not either
        raise


def _module(namespace: dict[str, Any], *, safe_path: bool) -> CodeType:
    import runpy

    if not safe_path:
        sys.path.insert(0, os.getcwd())
    name, sys.argv[0] = sys.argv[0], "-m"  # as the interpreter has it while it looks
    _name, spec, code = _details(runpy._get_module_details, name)  # type: ignore[attr-defined]  # what ``python -m`` itself calls
    sys.argv[0] = spec.origin
    return _under(namespace, spec, code)


def _absolute(path: str) -> str:
    """Find what the interpreter makes of its script's path: absolute since 3.9, but never normalised."""
    return os.path.join(os.getcwd(), path) if sys.version_info >= (3, 9) else path


def _details(find: Any, *names: str) -> Any:
    import runpy

    try:
        return find(*names, runpy._Error)  # type: ignore[attr-defined]  # as below
    except runpy._Error as error:  # type: ignore[attr-defined]  # typeshed hides it
        sys.exit("{}: {}".format(sys.executable, error))


def _under(namespace: dict[str, Any], spec: Any, code: CodeType) -> CodeType:
    namespace.update(
        __file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader, __package__=spec.parent, __spec__=spec
    )
    return code


def _is_zip(path: str) -> bool:
    """Ask whom the interpreter asks: a zip file's directory is at its end, and anything may stand in front."""
    import zipimport

    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return False
    return True


def _strip(error: BaseException) -> None:
    """Take our own frames off the top of the traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace


def _show(error: BaseException) -> None:
    """Print the traceback the way the user wants it printed. A hook may raise SystemExit, to choose the exit status."""
    details = type(error), error, error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = details
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        _write("sys.excepthook is missing\n")
        hook = sys.__excepthook__
    try:
        hook(*details)
    except SystemExit:
        raise
    except BaseException as failure:  # noqa: BLE001 - the hook is the user's, and what it raises is shown as well
        _strip(failure)
        _write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        _write("\nOriginal exception was:\n")
        sys.__excepthook__(*details)


def _write(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(text)


if __name__ == "__main__":
    main()
