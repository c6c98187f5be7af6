"""What holds for the whole source: which module may import which, and what no module does."""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
MODULES = sorted(SOURCE.rglob("*.py"))
SCRIPTS = sorted(
    path
    for folder in ("src", "tests", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)

WINGS = (
    *(
        "_base",
        "_store",
        "_events",
        "_evidence",
        "_logs",
        "_stacks",
        "_timers",
        "_placement",
        "_engine",
        "_outcomes",
        "_runs",
        "_page",
        "_group",
    ),
    "_rendezvous",
)
"""The packages that hold one subject each, from the ground up."""

FACES = ("errors", "timer", "metrics", "events", "multiprocessing", "spawn", "rendezvous", "agent", "launcher", "cli")
"""The packages whose names users know, which stand on the wings, from the ground up."""

LAYERS = (*WINGS, *FACES[:6], "_run", "_serve", *FACES[6:])
"""Each may import itself and what stands before it. What carries a run uses the faces of groups and of events."""

MOST_LINES = 600
"""Of one module."""

MAY_ONLY_FALL = {
    "private modules imported": 443,
    "private attributes": 388,
    "private names patched": 200,
    "long names": 0,
}
"""What the tests do around the doors, and their names of more than 60 characters. Lower a number when it falls."""

KEPT_APART = {
    **{
        f"src/phalanx/{name}.py": set[str]()
        for name in (
            *(f"_rendezvous/{name}" for name in ("candidates", "conclusion", "entrance", "life", "membership", "node")),
            "_rendezvous/questions",
            *("_rendezvous/store_view", "_run/job_node", "_run/job_run", "_run/node_team"),
            *("_run/node_thread", "_run/node_workers", "_store/hub/server"),
            *(f"_store/etcd/{name}" for name in ("etcd_store", "session")),
            *(f"_store/hub/{name}" for name in ("connection", "hub_store", "keys", "link", "wire")),
        )
    },
    "src/phalanx/_rendezvous/evidence.py": {"msgspec"},
    "src/phalanx/_rendezvous/records.py": {"msgspec"},
    "src/phalanx/_rendezvous/stack_report.py": {"msgspec"},
    "src/phalanx/_serve/server.py": {"starlette", "uvicorn"},
    "src/phalanx/_store/etcd/api.py": {"google", "grpc"},
    "src/phalanx/_store/hub/messages.py": {"msgspec"},
    "src/phalanx/_store/store.py": {"msgspec"},
    "src/phalanx/cli/logs.py": {"click"},  # a command: loaded when it is called
}
"""Modules that load a library as they are loaded, or a module that does: so nobody else imports them on the way."""

PLACES = {
    "jinja2": {"src/phalanx/_page/page.py"},
    "markupsafe": {"src/phalanx/_page/page.py"},
    "google": {"src/phalanx/_store/etcd/api.py"},
    "grpc": {"src/phalanx/_store/etcd/api.py"},
    "msgspec": {
        f"src/phalanx/{name}.py"
        for name in (
            *("_rendezvous/evidence", "_rendezvous/records", "_rendezvous/stack_report"),
            *("_store/hub/messages", "_store/store"),
        )
    },
    "prometheus_client": {"src/phalanx/_run/run_metrics.py"},
    "re2": {"src/phalanx/_logs/search.py"},
    "starlette": {"src/phalanx/_serve/server.py"},
    "uvicorn": {"src/phalanx/_serve/server.py"},
    "rich": {f"src/phalanx/cli/{name}.py" for name in ("runs", "status", "top")},
}
"""Libraries with a use for each of a few modules, and these."""

FLOORS = [module for module in MODULES if module.relative_to(SOURCE / "phalanx").parts[0] in LAYERS]


def name_of(path: Path) -> str:
    """Where a file stands, as messages name it."""
    return str(path.relative_to(ROOT))


def layer_of(path: Path) -> str:
    """The package of a module of `FLOORS`."""
    return path.relative_to(SOURCE / "phalanx").parts[0]


class Facts(NamedTuple):
    """What the tests want to know of a module, which is parsed once for all of them."""

    imported: tuple[str, ...]
    """Names that it imports anywhere: at the top, in a function, for types alone."""
    imported_at_once: tuple[str, ...]
    """Names that it imports when it is imported."""
    called: frozenset[str]
    """What stands before the brackets of its calls, where that is a name."""
    documented: bool


@functools.cache
def facts(path: Path) -> Facts:
    """Parse a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    return Facts(
        tuple(imports(path, nodes)),
        tuple(imports(path, at_import(tree))),
        frozenset(ast.unparse(each) for each in calls if isinstance(each, ast.Name | ast.Attribute)),
        bool(ast.get_docstring(tree)),
    )


def imports(path: Path, tree: Iterable[ast.AST]) -> Iterator[str]:
    """The absolute names of what the nodes import: `from a import b` counts as `a.b`, because b may be a module."""
    package = path.relative_to(SOURCE).parts[:-1]
    for node in tree:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_name(path: Path) -> str:
    """The name by which a file of the source is imported."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


NAMES = {module_name(path) for path in MODULES}


def ours(path: Path) -> set[str]:
    """The modules of ours that a module imports anywhere: at the top, in a function, for types alone."""
    found = set()
    for name in facts(path).imported:
        module = name
        while module and module not in NAMES:
            module = module.rpartition(".")[0]
        if module not in ("", "phalanx"):
            found.add(module)
    return found - {module_name(path)}


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: no bodies of functions, no `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_import(child)


def test_imports_point_down_only() -> None:
    wrong = []
    for path in FLOORS:
        allowed = LAYERS[: LAYERS.index(layer_of(path)) + 1]
        for name in facts(path).imported:
            top, _, rest = name.partition(".")
            if top == "phalanx" and rest != "__version__" and rest.split(".")[0] not in allowed:
                wrong.append(f"{name_of(path)} imports {name}: from here only {allowed} is below")
    assert not wrong


def test_every_package_has_its_layer() -> None:
    assert {path.name for path in (SOURCE / "phalanx").iterdir() if (path / "__init__.py").exists()} == set(LAYERS)


def test_no_modules_import_each_other() -> None:
    """Not even for types alone, or in a function."""
    graph = {module_name(path): ours(path) for path in MODULES}

    def below(name: str) -> set[str]:
        seen: set[str] = set()
        rest = list(graph[name])
        while rest:
            if (other := rest.pop()) not in seen:
                seen.add(other)
                rest += graph[other]
        return seen

    assert [name for name in graph if name in below(name)] == []


def test_a_module_is_short() -> None:
    lines = {name_of(path): path.read_text(encoding="utf-8").count("\n") for path in MODULES}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


def test_names_with_an_underscore_stay_where_they_are() -> None:
    """No file of a wing has one; a face's module that has one is for that face; a module's name, for that module."""
    wrong = []
    for path in FLOORS:
        layer = layer_of(path)
        if layer not in FACES and path.name.startswith("_") and path.name != "__init__.py":
            wrong.append(name_of(path))
        for name in facts(path).imported:
            top, _, rest = name.partition(".")
            parts = rest.split(".")
            private = [part for part in parts[1:] if part.startswith("_")]
            allowed = parts[1:2] if parts[0] == layer and layer in FACES else []
            if top == "phalanx" and private not in ([], allowed):
                wrong.append(f"{name_of(path)} imports {name}")
    assert not wrong


def is_private(name: str) -> bool:
    """Whether a dotted name has a part with one underscore in front."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def reaches(tree: ast.AST) -> Iterator[str]:
    """The kinds of `MAY_ONLY_FALL` that a test module has, each as often as it has it."""
    inside: set[str] = set()  # names of what comes out of private modules
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("phalanx") and is_private(module):
                inside.update(alias.asname or alias.name for alias in names)
                yield "private modules imported"
            case ast.Attribute(value=value, attr=attr) if is_private(attr) and ast.unparse(value) not in (
                "self",
                "cls",
            ):
                yield "private attributes"
            case ast.FunctionDef(name=name) if name.startswith("test_") and len(name) > 60:
                yield "long names"
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[target, *_]):
                texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
                private = any(isinstance(text, str) and is_private(text) for text in texts)
                if private or ast.unparse(target).split(".")[0] in inside:
                    yield "private names patched"


def test_reaches_around_the_doors_only_become_fewer() -> None:
    found = Counter(dict.fromkeys(MAY_ONLY_FALL, 0))
    for path in SCRIPTS:
        if name_of(path).startswith("tests/"):
            found.update(reaches(ast.parse(path.read_text(encoding="utf-8"))))
    assert found == MAY_ONLY_FALL


def test_nothing_of_others_is_imported_before_it_is_needed() -> None:
    wrong = {}
    for path in MODULES:
        own = {"phalanx", *sys.stdlib_module_names} | KEPT_APART.get(name_of(path), set())
        if path.is_relative_to(SOURCE / "phalanx" / "cli"):
            own |= {"click"}  # the command line's own library; nothing below it may load it
        if others := {name.split(".")[0] for name in facts(path).imported_at_once} - own:
            wrong[name_of(path)] = others
    assert not wrong


def test_what_loads_others_is_itself_loaded_when_needed() -> None:
    """Nobody but those that are kept apart, too, imports one of them on the way."""
    apart = tuple(f"{module_name(ROOT / name)}." for name in KEPT_APART)
    names = [(name_of(path), name) for path in MODULES for name in facts(path).imported_at_once]
    assert not {(path, name) for path, name in names if path not in KEPT_APART and f"{name}.".startswith(apart)}


def test_a_library_of_others_is_used_in_its_place() -> None:
    names = [(name_of(path), name.split(".")[0]) for path in MODULES for name in facts(path).imported]
    assert {(path, name) for path, name in names if name in PLACES} == {
        (place, library) for library, places in PLACES.items() for place in places
    }


def test_nobody_sleeps() -> None:
    assert not [name_of(path) for path in MODULES if "time.sleep" in facts(path).called.union(facts(path).imported)]


def test_a_module_says_what_it_is() -> None:
    assert not [name_of(path) for path in MODULES if not facts(path).documented]


def test_every_ignored_finding_carries_a_code_and_a_reason() -> None:
    """Written so: `# noqa: S102 - the script is the user's` or `# type: ignore[attr]  # absent before 3.13`."""
    reasoned = re.compile(
        r"# (ruff: |flake8: )?noqa: [A-Z]+[0-9]+(, ?[A-Z]+[0-9]+)*\W+\w.{7,}|# type: ignore\[[\w, -]+\]\W+\w.{7,}"
    )
    ignored = re.compile(r"#.*(\bnoqa\b|type: *ignore)")
    wrong = []
    for path in SCRIPTS:
        text = path.read_text(encoding="utf-8")
        if not ignored.search(text):
            continue
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = [(each.start[0], each.string) for each in tokens if each.type == tokenize.COMMENT]
        unreasoned = [each for each in comments if ignored.search(each[1]) and not reasoned.search(each[1])]
        wrong += [f"{name_of(path)}:{line}: {comment}" for line, comment in unreasoned]
    assert not wrong


def test_every_rule_that_is_off_carries_a_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lint = tomllib.loads(text)["tool"]["ruff"]["lint"]
    rules = [*lint["ignore"], *(rule for rules in lint["per-file-ignores"].values() for rule in rules)]
    for rule in rules:
        assert re.search(rf'^    "{rule}", +# \w.+', text, re.MULTILINE), f"{rule} is off without a reason"


def test_what_is_said_to_run_on_each_python_does() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(test_\w+(?:\.py)?)`", "\n".join(re.findall(r"^\|.*", page, re.MULTILINE))))
    assert len(names) > 20
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name in names:
            assert re.search(r"^pytestmark = .*mark\.each_python", text, re.MULTILINE), path
            found.add(path.name)
        for name in names & set(re.findall(r"^def (test_\w+)", text, re.MULTILINE)):
            marks = re.search(rf"((?:^@.*\n(?:[ )].*\n)*)*)^def {name}\b", text, re.MULTILINE)
            assert marks is not None
            assert "mark.each_python" in marks[1], name
            found.add(name)
    assert found == names


@pytest.mark.parametrize(
    "module",
    [
        "phalanx",
        "phalanx.agent",
        "phalanx.errors",
        "phalanx.events",
        "phalanx.launcher",
        "phalanx.metrics",
        "phalanx.multiprocessing",
        "phalanx.spawn",
    ],
)
def test_an_import_loads_the_standard_library_only(module: str) -> None:
    code = (
        "import sys; before = set(sys.modules); "
        f"import {module}; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.split() == ["phalanx"]
