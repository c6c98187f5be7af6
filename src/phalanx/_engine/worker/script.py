"""Runs a Python script or module just as its interpreter would, and records its failure in the error file.

A worker's command line is ``python -u .../script.py [-m] TARGET ARGS...``. ``__main__``, ``sys.argv``,
``sys.path[0]``, tracebacks and exit status are those of ``python TARGET ARGS``. A script can see two differences:
``sys.orig_argv`` names this file, and two frames of this file lie below the script's own.

This file runs by its path in whatever Python the script needs (3.8 or later), which may have no Phalanx, or another. So
it imports what it needs from the package around it, without any ``__init__``, and takes that out of ``sys.modules``.
All of it is loaded before the script starts: at its failure, the process may have changed its user and may not read our
files.
"""

from __future__ import annotations

import _frozen_importlib_external  # what `importlib.machinery` shows of it, without 0.5 ms for that
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

_by_path = not __package__  # the script may import another Phalanx, or none
if _by_path and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # our own folder, put there by the interpreter
_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class _Ours:
    """While it is entered, ``phalanx`` is the package around this file, of which no `__init__` runs.

    What this interpreter knows by that name is put back.
    """

    def __enter__(self) -> None:
        self._theirs = _take_out() if _by_path else {}
        for wing in ("", "._base", "._evidence", "._timers", "._engine", "._engine.worker") if _by_path else ():
            package = type(sys)("phalanx" + wing)
            package.__path__ = [_root + wing.replace(".", "/")]
            sys.modules["phalanx" + wing] = package

    def __exit__(self, *_: object) -> None:
        if _by_path:
            _take_out()
            sys.modules.update(self._theirs)


def _take_out() -> dict[str, Any]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "phalanx"}


with _Ours():
    from phalanx._base import linux
    from phalanx._evidence.describe import describe
    from phalanx._evidence.error_file import DEBUGPY_ENV, ERROR_FILE_ENV, POST_MORTEM_ENV
    from phalanx._evidence.recording import exit_code, note_exit, record, refused
    from phalanx._evidence.sent import DESCRIPTORS_ENV, Report
    from phalanx._evidence.stack_signals import catch_fatal_signals, offer_stacks


def main() -> None:
    """Run the program that ``sys.argv`` names, in a process that the keeper has just started."""
    linux.die_with_parent(os.getppid())
    linux.allow_ptrace()
    del sys.argv[0]
    # What stands before the interpreter (PYTHON_EXEC) may clear the environment, or close all descriptors: sudo(8).
    run(int(os.environ.pop(DESCRIPTORS_ENV, "-1")))


def run(fd: int) -> None:
    """Run the program that ``sys.argv`` names as ``__main__``. The process ends when this returns or raises.

    ``fd`` is the descriptor of the report socket, for evidence that no file takes.
    """
    report = Report(fd)
    safe_path = getattr(sys.flags, "safe_path", False)
    path = os.environ.get(ERROR_FILE_ENV)  # now: the program may change its environment
    catch_fatal_signals()
    offer_stacks()
    _install_breakpoint()
    post_mortem = os.environ.get(POST_MORTEM_ENV) == "1"
    as_module = sys.argv[0] == "-m"
    if as_module:
        del sys.argv[0]
    namespace = _new_main()
    try:
        code = _module(namespace, safe_path=safe_path) if as_module else _script(namespace, safe_path=safe_path)
        exec(code, namespace)  # noqa: S102 - the user's program
    except SystemExit as leave:
        note_exit(leave, path)
        if exit_code(leave) == 0:
            _end_heartbeats()
        report.send_leaving(exit_code(leave))
        raise
    except BaseException as error:  # noqa: BLE001 - raised again below
        failure = error
    else:
        _end_heartbeats()
        report.send_leaving(0)
        return
    # Outside the handler, because the user's excepthook must find no exception being handled.
    moment = time.monotonic_ns()
    _strip(failure)
    if not record(failure, path, left=True):
        report.send_evidence(*describe(failure), moment, refused(path))
    waits = post_mortem or os.isatty(0)  # the user's excepthook may be a debugger, then, and wait for its user
    if not waits:
        report.send_leaving(1)  # else before the hook, which may take any time
    try:
        _show(failure)
        if post_mortem:
            _debugger().post_mortem(failure)
    finally:
        if waits:
            report.send_leaving(1)
    sys.excepthook = lambda *_ignored: None
    raise failure  # the interpreter does the rest: threads, exit handlers, exit status, SIGINT for a KeyboardInterrupt


def _install_breakpoint() -> None:
    """Have `breakpoint` stop as `phalanx debug` expects it, unless the user or a debugger has chosen otherwise.

    Before that, have debugpy listen for an editor, if that is wanted.
    """
    if os.environ.get(DEBUGPY_ENV):
        _debugger().listen_for_editor()
    if sys.breakpointhook is sys.__breakpointhook__ and not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = _breakpoint
    module = sys.modules.get("pdb")
    if _is_standard(getattr(module, "__spec__", None)):
        _redirect(module.Pdb)  # type: ignore[union-attr]  # it is there
    if _frozen_importlib_external.PathFinder in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(_frozen_importlib_external.PathFinder), _PdbFinder)


def _breakpoint(*args: Any, **options: Any) -> None:
    """Stop in pdb: `sys.breakpointhook`, with the arguments of `pdb.set_trace`."""
    try:
        stop = _debugger().stop
    except (ImportError, OSError) as error:  # this process's user may not read the files
        _write("phalanx: breakpoint() reads stdin here: {}\n".format(error))
        import pdb  # noqa: T100 - what `breakpoint` means

        stop = pdb.Pdb().set_trace
    except AttributeError as error:
        _write("phalanx: breakpoint() does not stop: a pdb.py or bdb.py hides that of Python: {}\n".format(error))
        return
    stop(sys._getframe(1), *args, **options)


class _PdbFinder:
    """Finds Python's own pdb: its `set_trace`, and that of subclasses like torch's, is to stop as `breakpoint` does."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        spec = _frozen_importlib_external.PathFinder.find_spec(name, path, target) if name == "pdb" else None
        if spec is None or not _is_standard(spec):
            return None
        spec.loader = _PdbLoader(name, str(spec.origin))
        return spec


class _PdbLoader(_frozen_importlib_external.SourceFileLoader):
    def exec_module(self, module: Any) -> None:
        """See `importlib.abc.Loader`. The module shows the usual loader, which can be pickled."""
        super().exec_module(module)
        module.__loader__ = module.__spec__.loader = _frozen_importlib_external.SourceFileLoader(self.name, self.path)
        _redirect(module.Pdb)


def _is_standard(spec: Any) -> bool:
    origin = os.path.join(os.path.dirname(getattr(os, "__file__", "")), "pdb.py")
    return getattr(spec, "origin", None) == origin and type(spec.loader) is _frozen_importlib_external.SourceFileLoader


def _redirect(kind: Any) -> None:
    """Have `set_trace` of a class of pdb stop as `breakpoint` does, where it would read the null device.

    Not with commands, which may have the program go on, nor in `set_trace_async`, which does the rest itself.
    """
    set_trace = kind.set_trace

    def stop(self: Any, frame: Any = None, **options: Any) -> None:
        caller = sys._getframe(1)
        go = set_trace.__get__(self)
        if _reads_nothing(self) and not options.get("commands") and caller.f_code.co_name != "set_trace_async":
            try:
                go = _debugger().stop
            except (ImportError, OSError):  # as in `_breakpoint`
                pass
        go(frame or caller, **options)  # nothing may follow: it would be traced

    kind.set_trace = stop


def _reads_nothing(debugger: Any) -> bool:
    if hasattr(debugger, "server") or not debugger.use_rawinput:
        return False
    try:
        null = os.stat(os.devnull).st_rdev
        return debugger.stdin is sys.stdin and os.fstat(sys.stdin.fileno()).st_rdev == null
    except (AttributeError, OSError, ValueError):  # it is none of a file, or there is none
        return False


def _debugger() -> Any:
    """Import the module that stops this process in pdb, once. `remote_stop` calls it, too."""
    global _loaded  # noqa: PLW0603 - it is not in `sys.modules`
    if _loaded is None:
        with _Ours():
            from phalanx._engine.worker import breakpoints

        _loaded = breakpoints
    return _loaded


_loaded = None  # type: Any  # a comment, because a worker may run Python 3.8


def _end_heartbeats() -> None:
    """End the heartbeat timers, if the script uses any: exit handlers may take longer than they allow."""
    getattr(sys.modules.get("phalanx.timer._beats"), "rest", int)()


def _new_main() -> dict[str, Any]:
    """Make a new module ``__main__`` and return its namespace. Our functions, which are running, keep ours alive."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    namespace = vars(module)
    namespace["__builtins__"] = sys.modules["builtins"]
    if sys.version_info < (3, 15):
        namespace["__cached__"] = None
    if sys.version_info < (3, 14):  # since then a module's annotations are made when somebody asks for them
        namespace["__annotations__"] = {}
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
        binary = _frozen_importlib_external.SourcelessFileLoader("__main__", path)
        namespace.update(__file__=path, __loader__=binary)
        compiled = binary.get_code("__main__")
        assert compiled is not None
        return compiled
    source = _frozen_importlib_external.SourceFileLoader("__main__", path)
    namespace.update(__file__=path, __loader__=source)
    # Not get_code: that would read and write a cache, which no interpreter does for its script.
    data = source.get_data(path)
    try:
        return source.source_to_code(data, path)
    except SyntaxError as error:
        error.__traceback__ = None  # frames of the import system, which a plain interpreter does not show
        raise


def _module(namespace: dict[str, Any], *, safe_path: bool) -> CodeType:
    import runpy

    if not safe_path:
        sys.path.insert(0, _here())
    name, sys.argv[0] = sys.argv[0], "-m"  # as the interpreter has it while it finds the module
    _name, spec, code = _details(runpy._get_module_details, name)  # type: ignore[attr-defined]  # what ``python -m`` itself calls
    sys.argv[0] = spec.origin
    return _under(namespace, spec, code)


def _absolute(path: str) -> str:
    """Return the path as the interpreter has it for its script: absolute since 3.9, and never normalised."""
    return path if os.path.isabs(path) or sys.version_info < (3, 9) else os.path.join(_here(), path)


def _here() -> str:
    """The working directory; "" where it has been removed: what is not found there is then named in the error."""
    try:
        return os.getcwd()
    except FileNotFoundError:  # without a name
        return ""


def _details(find: Any, *names: str) -> Any:
    import runpy

    try:
        return find(*names, runpy._Error)  # type: ignore[attr-defined]  # as below
    except runpy._Error as error:  # type: ignore[attr-defined]  # typeshed hides it
        msg = "{}: {}".format(sys.executable, error)
        raise SystemExit(msg) from None  # else the report would name runpy's private exception as handled


def _under(namespace: dict[str, Any], spec: Any, code: CodeType) -> CodeType:
    namespace.update(__file__=spec.origin, __loader__=spec.loader, __package__=spec.parent, __spec__=spec)
    if "__cached__" in namespace:
        namespace["__cached__"] = spec.cached
    return code


def _is_zip(path: str) -> bool:
    """Whether `zipimport` can read a file. A zip file's directory is at its end, after anything else."""
    import zipimport

    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return False
    return True


def _strip(error: BaseException) -> None:
    """Remove this file's frames from the start of the traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    BaseException.with_traceback(error, trace)  # its class may let no attribute be set: a frozen dataclass


def _show(error: BaseException) -> None:
    """Print the traceback by `sys.excepthook`, which may raise SystemExit to choose the exit status."""
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
    except BaseException as failure:  # noqa: BLE001 - what the user's hook raises is shown as well
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
