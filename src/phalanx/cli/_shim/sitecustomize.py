# ruff: noqa: INP001 - the interpreter imports it by this name, from a folder on its path
"""Has modules of torch found in Phalanx, in a Python within ``phalanx torchrun-shim``; then does what another would.

Every Python there imports this when it starts, also one that has no Phalanx, whose torch stays as it is.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location

_HERE = os.path.dirname(os.path.abspath(__file__))
_FILES = {
    "torch.distributed.run": "run.py",
    "torch.distributed.launcher": "launcher/__init__.py",
    "torch.distributed.launcher.api": "launcher/__init__.py",
}


class _Finder:
    """Finds modules of Phalanx by torch's names. They come from the files of Phalanx."""

    here = _HERE

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        found = PathFinder.find_spec("phalanx") if name in _FILES else None
        if found is None or found.origin is None:
            return None
        root = os.path.dirname(found.origin)
        path = os.path.join(root, _FILES[name])
        if not os.path.exists(os.path.join(root, "cli", "_shim")):  # another module of that name
            return None
        within: list[str] | None = [] if name == "torch.distributed.launcher" else None  # it has a module below it
        return spec_from_file_location(name, path, submodule_search_locations=within)


def _run_another() -> None:
    """Run the one that would have been found without this, and let it have the name."""
    paths = [os.path.abspath(path) for path in sys.path]
    behind = paths[paths.index(_HERE) + 1 :] if _HERE in paths else paths
    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if all(getattr(finder, "here", None) != _HERE for finder in sys.meta_path):  # another one, that of a shim, may run this
    sys.meta_path.insert(0, _Finder)
    _run_another()
