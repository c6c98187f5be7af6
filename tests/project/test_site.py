"""The documentation site: every public name has a docstring and an entry, and every page a place.

`make docs` builds the site; what only the built pages can tell (links, anchors, entries) fails there.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.multiprocessing import start_processes
from tests.support import workers
from tests.support.helpers import Gate, Ready

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"

MODULES = [
    "phalanx",
    "phalanx.agent",
    "phalanx.errors",
    "phalanx.events",
    "phalanx.launcher",
    "phalanx.metrics",
    "phalanx.multiprocessing",
    "phalanx.multiprocessing.errors",
    "phalanx.multiprocessing.redirects",
    "phalanx.multiprocessing.tail_log",
    "phalanx.rendezvous",
    "phalanx.spawn",
    "phalanx.timer",
    "phalanx.timer.debug_info_logging",
]

IN_PASSING = {"self", "cls"}
"""Parameters that no docstring explains."""


def exported(module: str) -> list[str]:
    names = set(importlib.import_module(module).__all__)
    return sorted(names - (set(multiprocessing.__all__) if module == "phalanx.spawn" else set()))


def public() -> Iterator[tuple[str, Any]]:
    """Each public function and class, by the name under which a module exports it."""
    for module in MODULES:
        for name in exported(module):
            value = getattr(importlib.import_module(module), name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{module}.{name}", value


def functions() -> Iterator[tuple[str, Any, str]]:
    """Each public function, method and constructor, with the text that explains its parameters."""
    for path, value in public():
        if inspect.isfunction(value):
            yield path, value, inspect.getdoc(value) or ""
            continue
        about = inspect.getdoc(value) or ""
        if "__init__" in vars(value) and not issubclass(value, BaseException):
            yield f"{path}()", value.__init__, about
        for name, member in vars(value).items():
            function = getattr(member, "__func__", member)
            if not name.startswith("_") and inspect.isfunction(function):
                yield f"{path}.{name}", function, f"{inspect.getdoc(getattr(value, name)) or ''}"


PUBLIC = dict(public())
FUNCTIONS = {path: (function, text) for path, function, text in functions()}


@pytest.mark.parametrize("path", PUBLIC)
def test_a_public_name_has_a_docstring_of_its_own(path: str) -> None:
    value = PUBLIC[path]
    assert value.__doc__, path
    if inspect.isclass(value):
        for name, member in vars(value).items():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if not name.startswith("_") and inspect.isfunction(function):
                assert function.__doc__, f"{path}.{name}"


@pytest.mark.parametrize("path", FUNCTIONS)
def test_a_docstring_names_every_parameter(path: str) -> None:
    """In its `Args:`, or in the text; where it refers to the function that it stands for, that one does."""
    function, text = FUNCTIONS[path]
    if re.search(r"^See `[\w.]+`", text):
        return
    for name in inspect.signature(function).parameters:
        if not name.startswith("_") and name not in IN_PASSING:
            assert re.search(rf"\b{name}\b", text), f"{path}: {name}"


def test_the_reference_has_every_public_name() -> None:
    """As an entry that is made from the docstring, or as the name of one that is at home in another module."""
    text = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    named = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    named |= set(re.findall(r'(?:\{ #|<a id=")([\w.]+)', text))
    assert {f"{module}.{name}" for module in MODULES for name in exported(module)} - named == set()
    for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE):
        module, _, member = name.rpartition(".")
        assert name in MODULES or module == "" or hasattr(importlib.import_module(module), member), name


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/-]+\.md\b", config.partition("\nnav:\n")[2].partition("\nvalidation:")[0]))
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert pages <= listed
    outside = {"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md"}
    assert outside <= listed
    assert outside == {page for page in listed - pages if (ROOT / page).exists()}


def test_files_that_pages_name_are_there() -> None:
    """Paths in the pages for those who change the code."""
    if not (ROOT / "src" / "phalanx" / "_engine").exists():
        pytest.skip("the wings are not there yet")
    pages = [ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"`((?:src|tests|tools|examples)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
    section = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Where things are\n")[2]
    for row in section.partition("\n## ")[0].splitlines():
        for path in re.findall(r"\| `([a-z_]\S*?)`", row):
            found = ROOT / "src" / "phalanx" / path
            assert found.exists() or found.with_suffix(".py").exists(), f"architecture.md: {path}"


def test_a_worker_that_is_killed_is_the_root_cause(ready: Ready, gate: Gate) -> None:
    with start_processes("w", workers.announce, (ready.address, gate.address), nprocs=2) as group:
        ready.wait(2)  # both workers are up, and wait at the gate
        os.kill(group.pids()[1], signal.SIGKILL)
        result = group.wait()
    assert result.root_cause is not None
    assert (result.root_cause.local_rank, result.root_cause.exitcode) == (1, -signal.SIGKILL)


def test_the_test_that_contributors_are_shown_is_the_one_above() -> None:
    shown = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert inspect.getsource(test_a_worker_that_is_killed_is_the_root_cause) in shown
