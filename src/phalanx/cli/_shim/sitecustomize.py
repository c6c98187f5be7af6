# ruff: noqa: INP001 - the interpreter imports it by this name, from a folder on its path
"""Has modules of torch found in Phalanx, in a Python within ``phalanx torchrun-shim``; then does what another would.

Every Python there imports this when it starts, also one that has no Phalanx, whose torch stays as it is.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_HERE = os.path.dirname(os.path.abspath(__file__))
_FILES = {
    "torch.distributed.run": "run.py",
    "torch.distributed.launcher": "launcher/__init__.py",
    "torch.distributed.launcher.api": "launcher/__init__.py",
}


class _Finder:
    """Finds modules of Phalanx by torch's names. They come from the files of Phalanx."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if name not in _FILES:
            return None
        found = PathFinder.find_spec("phalanx")
        if found is None or found.origin is None:
            return None
        path = os.path.join(os.path.dirname(found.origin), _FILES[name])
        within: list[str] | None = [] if name == "torch.distributed.launcher" else None  # it has a module below it
        return spec_from_file_location(name, path, submodule_search_locations=within)


sys.meta_path.insert(0, _Finder)


def _run_another() -> None:
    """Run the one that would have been found without this."""
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != _HERE])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


_run_another()
