"""The public names, parameters, options and environment variables of the modules of torch that Phalanx stands in for.

They are found by looking at the installed torch: what its modules export, the signatures of what can be called, the
attributes that constructors set, the parser of torchrun, and the sources, for variables.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import logging
import re
import textwrap
import typing
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ELASTIC = "torch.distributed.elastic"

MODULES = {
    "torch.distributed.run": ("", []),
    f"{ELASTIC}.multiprocessing.errors": ("", ["error_handler", "handlers"]),
    f"{ELASTIC}.multiprocessing": (
        "",
        ["api", "redirects", "tail_log", "subprocess_handler", "subprocess_handler.handlers",
         "subprocess_handler.subprocess_handler"],
    ),
    f"{ELASTIC}.timer": ("", ["api", "local_timer", "file_based_local_timer", "debug_info_logging"]),
    f"{ELASTIC}.metrics": ("", ["api"]),
    f"{ELASTIC}.events": ("", ["api", "handlers"]),
    f"{ELASTIC}.agent.server": ("", ["api", "local_elastic_agent", "health_check_server"]),
    f"{ELASTIC}.rendezvous": ("", ["api", "dynamic_rendezvous", "registry", "utils"]),
    "torch.distributed.launcher": ("api", []),
    "torch.multiprocessing": ("spawn", ["pool", "queue", "reductions"]),
}  # fmt: skip
"""Packages: the submodule whose names count as the package's own, and those that are listed beside them."""

OUTSIDE = {
    "torch.multiprocessing": ["pool", "queue", "reductions"],  # about tensors
    f"{ELASTIC}.rendezvous": ["dynamic_rendezvous", "registry", "utils"],  # about many machines
    f"{ELASTIC}.agent.server": ["health_check_server"],
}
"""Submodules that are listed, but not what is in them."""

SOURCES = [
    "distributed/run.py",
    "distributed/argparse_util.py",
    "distributed/rendezvous.py",
    "distributed/launcher/**/*.py",
    "distributed/elastic/**/*.py",
    "multiprocessing/**/*.py",
    "numa/**/*.py",
]
"""What torchrun, its agent, its workers when they join a process group, and these modules consist of."""


class Fact(NamedTuple):
    """One thing that torch has: "name", "parameter", "option" or "variable"; ``value`` is what it is there."""

    kind: str
    value: Any = None
    parent: str = ""
    like: str = ""
    """The key of the same thing in a base class, whose row says it all."""


def members(kind: type) -> dict[str, Any]:
    """The public methods, properties and attributes that a class itself defines, or sets in its methods."""
    found: dict[str, Any] = dict.fromkeys(inspect.get_annotations(kind))
    for method in filter(inspect.isfunction, vars(kind).values()):
        if not inspect.unwrap(method).__code__.co_filename.startswith("<"):  # made for a dataclass
            found |= dict.fromkeys(_set_by(method))
    found |= {name: inspect.getattr_static(kind, name) for name in vars(kind)}
    return {name: value for name, value in found.items() if not name.startswith("_")}


def _set_by(method: Any) -> list[str]:
    """The attributes of ``self`` that a method sets."""
    return [
        node.attr
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method))))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    ]


def all_members(kind: type) -> dict[str, Any]:
    """Those of its base classes as well, as far as they are written in Python and not of the standard library."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.split(".")[0] in ("torch", "phalanx"):
            found |= members(base)
    return found


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a function, method or class, without ``self``, and with those that go to a base class."""
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    if inspect.isclass(function) and issubclass(function, BaseException) and "__init__" not in vars(function):
        return {}
    if typing.get_origin(function) is not None:  # the name of a type
        return {}
    found = dict(inspect.signature(function).parameters)
    if inspect.isfunction(function) and next(iter(found), "") in ("self", "cls"):
        del found[next(iter(found))]
    if inspect.isclass(function) and any(each.kind is each.VAR_KEYWORD for each in found.values()):
        inherited = parameters(function.__mro__[1])  # to which the rest goes
        found |= {name: each.replace(kind=each.KEYWORD_ONLY) for name, each in inherited.items() if name not in found}
    return found


def names_of(module: Any) -> list[str]:
    """What a module exports: its ``__all__``; else what it defines, or takes from its submodules, but for loggers."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    found = []
    todo: list[ast.stmt] = list(ast.parse(inspect.getsource(module)).body)
    while todo:
        node = todo.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [target.id for target in targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.ImportFrom) and node.level:
            found += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.If):
            todo = [*node.body, *node.orelse, *todo]
    return [
        name
        for name in dict.fromkeys(found)
        if not name.startswith("_") and not isinstance(getattr(module, name, logging.root), logging.Logger)
    ]


def facts_of(package: str, elsewhere: dict[int, str]) -> dict[str, Fact]:
    """What a package has, by keys like ``f``, ``f(x)``, ``C(x)``, ``C.method(x)``, ``C.attribute``, ``module.f``.

    What is in one of the packages that were looked at before, by identity, is a name here, and no more.
    """
    own, submodules = MODULES[package]
    module = importlib.import_module(package)
    found: dict[str, Fact] = {}
    homes: dict[int, str] = {}
    standard = set(importlib.import_module("multiprocessing").__all__) if own else set()
    exported = {name: getattr(module, name) for name in names_of(module) if name not in standard}
    if own:
        module = importlib.import_module(f"{package}.{own}")
        exported |= {name: getattr(module, name) for name in names_of(module)}
    homes |= {id(value): name for name, value in exported.items()}
    for name, value in exported.items():
        found |= {name: Fact("name", value)} if id(value) in elsewhere else _facts(name, value, "", homes)
    for sub in submodules:
        found[sub] = Fact("name", inspect, sub.rpartition(".")[0])
        if sub in OUTSIDE.get(package, ()):
            continue
        inner = importlib.import_module(f"{package}.{sub}")
        for name in names_of(inner):
            value = getattr(inner, name)
            if not callable(value) or id(value) not in homes:
                homes[id(value)] = f"{sub}.{name}"
                found |= _facts(f"{sub}.{name}", value, sub, homes)
    elsewhere |= homes
    return found


def _facts(key: str, value: Any, parent: str, homes: dict[int, str]) -> dict[str, Fact]:
    found = {key: Fact("name", value, parent)}
    if not inspect.isclass(value):
        if callable(value):
            found |= {f"{key}({name})": Fact("parameter", each, key) for name, each in parameters(value).items()}
        return found
    bases = [(homes[id(base)], base) for base in value.__mro__[1:] if id(base) in homes]
    constructor = parameters(value) if "__init__" in vars(value) and not issubclass(value, enum.Enum) else {}
    alike = next((home for home, base in bases if _same(constructor, parameters(base))), "")
    for name, each in constructor.items():
        found[f"{key}({name})"] = Fact("parameter", each, key, f"{alike}({name})" if alike else "")
    for name, member in members(value).items():
        path = f"{key}.{name}"
        there = [(home, all_members(base)[name]) for home, base in bases if name in all_members(base)]
        takes = _takes(member)
        alike = next((f"{home}.{name}" for home, other in there if _same(takes, _takes(other))), "")
        found[path] = Fact("name", member, key, alike)
        for part, each in takes.items():
            found[f"{path}({part})"] = Fact("parameter", each, path, f"{alike}({part})" if alike else "")
    return found


def _takes(member: Any) -> dict[str, inspect.Parameter]:
    is_method = inspect.isfunction(member) or isinstance(member, (staticmethod, classmethod))
    return parameters(member) if is_method else {}


def _same(one: dict[str, inspect.Parameter], other: dict[str, inspect.Parameter]) -> bool:
    return [(name, each.default) for name, each in one.items()] == [(n, each.default) for n, each in other.items()]


def options() -> dict[str, Fact]:
    """The options of torchrun, as they are spelled with dashes; and its two arguments, by their names."""
    found: dict[str, Fact] = {}
    for action in importlib.import_module("torch.distributed.run").get_args_parser()._actions:
        names = action.option_strings or [action.dest]
        spelled = {name.replace("_", "-") if name.startswith("-") else name for name in names}
        found |= {name: Fact("option", action) for name in spelled}
    return found


def variables() -> dict[str, Fact]:
    """The environment variables that the sources ask for, or put into the environment of workers."""
    found = {
        f"PET_{action.dest.upper()}"
        for action in {id(fact.value): fact.value for fact in options().values()}.values()
        if "argparse_util" in type(action).__module__
    }
    torch = Path(inspect.getfile(importlib.import_module("torch"))).parent
    for pattern in SOURCES:
        for path in torch.glob(pattern):
            found |= _variables(ast.parse(path.read_text(encoding="utf-8")))
    return {name: Fact("variable") for name in sorted(found)}


def of_workers() -> set[str]:
    """The variables that torchrun's agent puts into the environment of every worker, in so many words."""
    agent = importlib.import_module(f"{ELASTIC}.agent.server.local_elastic_agent")
    dicts = [node for node in ast.walk(ast.parse(inspect.getsource(agent))) if isinstance(node, ast.Dict)]
    keys = {key.value for node in dicts for key in node.keys if isinstance(key, ast.Constant)}
    return {key for key in keys if isinstance(key, str) and key.isupper()}


def _variables(source: ast.Module) -> set[str]:
    constants = {
        target.id: node.value.value
        for node in ast.walk(source)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: list[ast.expr | None] = [
        ast.Constant(text) for text in constants.values() if str(text).startswith(("TORCH_", "TORCHELASTIC_"))
    ]
    for node in ast.walk(source):
        if isinstance(node, ast.Call) and "env" in ast.unparse(node.func):
            found += node.args[:1]
        elif isinstance(node, ast.Subscript) and "env" in ast.unparse(node.value):
            found.append(node.slice)
        elif isinstance(node, ast.Dict):
            found += node.keys
    texts = [
        node.value if isinstance(node, ast.Constant) else constants.get(node.id) if isinstance(node, ast.Name) else None
        for node in found
    ]
    return {text for text in texts if isinstance(text, str) and re.fullmatch(r"[A-Z][A-Z0-9_]{3,}", text)}


@functools.cache
def torch_version() -> tuple[int, ...]:
    """The first two numbers of that of the torch that is here: (2, 13)."""
    return tuple(map(int, metadata.version("torch").split(".")[:2]))


@functools.cache
def everything() -> dict[str, dict[str, Fact]]:
    """What torch has, by section: "torchrun", "variables", and each package."""
    found = {"torchrun": options(), "variables": variables()}
    elsewhere: dict[int, str] = {}
    for package in MODULES:
        found[package] = facts_of(package, elsewhere)
    return found
