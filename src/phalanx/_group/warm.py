"""Warm starts: a fork server imports modules once, and the workers of groups are forks that have them already.

Owns the choice of the fork server that a group uses. `forkserver` imports and forks.
"""

from __future__ import annotations

import os
from _thread import allocate_lock
from contextvars import ContextVar

from phalanx._base import interpreter
from phalanx._engine import main_module
from phalanx._engine.main_module import search_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextvars import Token
    from typing import Self

    from phalanx._engine.forkserver import ForkServer

_current: ContextVar[Warm | None] = ContextVar("phalanx_warm", default=None)


class Warm:
    """Keeps a process that has imported ``preload``. Workers are forks of it, and need no imports of their own.

    It is a context manager. Inside, the workers of groups that this thread (or task: it is a context variable) starts
    with ``start_method="forkserver"`` are forks of that process. A group that is started elsewhere can be given it as
    ``warm=``. Each group has a keeper of its own, and goes on if this is closed first.

    A fork has whatever the imports have made, so preload only modules that define things. No `weakref.finalize` of
    theirs is called, in no worker that runs a function nor after all of them: that of a temporary folder would remove
    it from under the other forks. A module that has started threads or CUDA is refused. Workers have the launcher's
    environment, working directory and umask of the moment of their start; their resource limits and CPU affinity are
    those of the moment when this was entered.

    Args:
        preload: The names of modules to import, in order. ``"__main__"`` has the main module run again there, as
            ``__mp_main__``, and not in each worker.
        path: Folders in which they are looked for, before those of `sys.path`.
        flags: Options of the interpreter; default: this one's.
        env: Environment variables for the imports, on top of the caller's: OMP_NUM_THREADS, say, which a library reads
            as it is loaded.

    Raises:
        TypeError, ValueError: ``preload`` is no list of modules' names; or the main module cannot be run again.

    >>> from phalanx.multiprocessing import start_processes, warm
    >>> with warm(preload=["json"]):
    ...     for _ in range(2):
    ...         with start_processes("squares", pow, {0: (2, 2), 1: (3, 2)}, start_method="forkserver") as group:
    ...             group.wait().return_values
    {0: 4, 1: 9}
    {0: 4, 1: 9}
    """

    def __init__(
        self,
        preload: Iterable[str] = (),
        *,
        path: Sequence[str] = (),
        flags: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.preload = check_preload(preload)
        self._main = main_module.source()
        if "__main__" in self.preload and self._main is None:
            raise ValueError("preload: __main__ cannot be run again: it is a prompt, a notebook, -c or a package's own")
        self._path = list(path)
        self._flags = flags
        self._env = dict(env or {})
        self._fork_server: ForkServer | None = None
        self._token: Token[Warm | None] | None = None
        self._one = allocate_lock()
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether it has been entered, and not been left."""
        return self._is_open

    def __enter__(self) -> Self:
        """Import. Raises PreloadError with the traceback, when one of the modules cannot be."""
        if self.is_open:
            raise RuntimeError("warm: it has been entered already")
        self.begin()
        try:
            self.wait()
        except BaseException:
            self.close()
            raise
        self._is_open = True
        self._token = _current.set(self)
        return self

    def __exit__(self, *_error: object) -> None:
        token, self._token = self._token, None
        try:
            if token is not None:
                _current.reset(token)
        except ValueError:  # left in another context than it was entered in: there, it never was the current one
            pass
        finally:
            self.close()

    def begin(self) -> None:
        """Start to import, if that has not been started; also when the process has been killed since."""
        from phalanx._engine.forkserver import ForkServer

        main_module.check_guard()
        with self._one:  # of several threads that start groups, one replaces the process
            if self._fork_server is not None and not self._fork_server.usable:
                self._let_go()
            if self._fork_server is None:
                flags = interpreter.flags() if self._flags is None else self._flags
                fork_server = ForkServer(self.preload, [*self._path, *search_path()], flags, self._env, self._main)
                try:
                    fork_server.start()
                except BaseException:
                    fork_server.close()
                    raise
                self._fork_server = fork_server

    @property
    def is_ready(self) -> bool:
        """Whether the process has imported all, as far as `wait` has seen, and is there."""
        fork_server = self._fork_server
        return fork_server is not None and fork_server.is_ready and fork_server.usable

    def wait(self, seconds: float | None = None) -> ForkServer:
        """Return when all is imported. Raises PreloadError; also after ``seconds`` (None: there is no limit)."""
        fork_server = self._fork_server
        if fork_server is None:
            raise RuntimeError("warm: it has been closed meanwhile")
        fork_server.wait(seconds)
        return fork_server

    def close(self) -> None:
        """End the process. It may be called again."""
        self._is_open = False
        self._let_go()

    def _let_go(self) -> None:
        fork_server, self._fork_server = self._fork_server, None
        if fork_server is not None:
            fork_server.close()

    def __repr__(self) -> str:
        return f"<Warm, {', '.join(self.preload) or 'nothing'} preloaded, {'open' if self.is_open else 'closed'}>"


def choose(
    preload: Iterable[str] | None, warm: object, envs: Mapping[int, Mapping[str, str]]
) -> tuple[Warm | None, bool]:
    """Return the warm process for a group of forks, or None; and whether it is the group's own.

    Raises TypeError or ValueError if ``warm`` is not an open one, or lacks a module of ``preload``.
    """
    modules = check_preload(preload or ())
    if warm is not None:
        if not isinstance(warm, Warm):
            raise TypeError(f"warm: expected an entered warm, got {warm!r}")
        if not warm.is_open:
            raise ValueError("warm: it is not open; start the group inside its with statement")
        missing = [name for name in modules if name not in warm.preload]
        if missing:
            msg = f"preload: {', '.join(missing)} is not among what warm has: {', '.join(warm.preload) or 'nothing'}"
            raise ValueError(msg)
        return warm, False
    current = _current.get()
    if current is not None and current.is_open and set(modules) <= set(current.preload):
        return current, False
    return (Warm(modules, env=shared(envs)), True) if modules else (None, False)


def shared(envs: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
    """The environment variables that have the same value for all ranks.

    >>> shared({0: {"RANK": "0", "OMP_NUM_THREADS": "2"}, 1: {"RANK": "1", "OMP_NUM_THREADS": "2"}})
    {'OMP_NUM_THREADS': '2'}
    """
    first, *others = envs.values()
    return {name: value for name, value in first.items() if all(env.get(name) == value for env in others)}


def check_preload(preload: Iterable[object]) -> tuple[str, ...]:
    """Return the names of modules as a tuple. Raises TypeError, ValueError."""
    if isinstance(preload, (str, bytes)) or not hasattr(preload, "__iter__"):
        like = f"; like [{preload!r}]" if isinstance(preload, str) else ""
        raise TypeError(f"preload: expected a list of modules' names, got {preload!r}{like}")
    names = []
    for name in preload:
        if not isinstance(name, str):
            raise TypeError(f"preload: expected a list of modules' names; it holds {name!r}")
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"preload: {name!r} is not the name of a module")
        names.append(name)
    return tuple(names)


def path_of(script: str, *, module: bool) -> list[str]:
    """The first entry of `sys.path` for a script, or for a module: where it finds its neighbours."""
    return [os.getcwd() if module else os.path.dirname(os.path.realpath(script))]
