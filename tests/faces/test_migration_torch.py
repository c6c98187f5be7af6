"""The tables of docs/torchrun.md and docs/migration.md, compared with the torch that is installed, and with Phalanx.

Every name, parameter, option and variable that torch has is in a table, with one verdict, and nothing else is. What is
"same" is here, of the same kind and with the same default; what "differs" is here, too; what is "not there" is not.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import multiprocessing
import re
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from click.testing import CliRunner

from phalanx._run.worker_env import worker_env
from phalanx.cli import run as cli
from phalanx.multiprocessing import DefaultLogsSpecs, MultiprocessContext, start_processes
from tests.support import torch_names
from tests.support.torch_names import ELASTIC, Fact, all_members, parameters

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / name for name in ("torchrun.md", "migration.md")]

SAME, DIFFERS, NOT_THERE = "same", "differs", "not there"

HERE = {
    "torch.distributed.run": "phalanx.run",
    f"{ELASTIC}.multiprocessing": "phalanx.multiprocessing",
    f"{ELASTIC}.multiprocessing.errors": "phalanx.multiprocessing.errors",
    f"{ELASTIC}.timer": "phalanx.timer",
    f"{ELASTIC}.metrics": "phalanx.metrics",
    f"{ELASTIC}.events": "phalanx.events",
    f"{ELASTIC}.agent.server": "phalanx.agent",
    f"{ELASTIC}.rendezvous": "phalanx.rendezvous",
    "torch.distributed.launcher": "phalanx.launcher",
    "torch.multiprocessing": "phalanx.spawn",
}
"""What stands in for each package."""

HEADINGS = {"Options": "torchrun", "Environment variables": "variables"}
"""Headings of the pages that are no packages' names, and their sections."""

OF_TORCH = "Read by the worker's torch"
"""How rows begin that tell of variables with which launchers have nothing to do."""

VALUES = {
    "--nnodes": "1:1",
    "--log-dir": "/tmp",
    "--local-ranks-filter": "0",
    "--duplicate-stdout-filters": "a,,b",
    "--duplicate-stderr-filters": "a",
    "--master-port": "29500",
    "--shutdown-timeout": "5",
    "--local-addr": "localhost",
    "--numa-binding": "node",
    "--log-line-prefix-template": "[${rank}] ",
}
"""A value for each option whose default cannot be given on the command line."""


BY_POSITION_TOO = {(f"{ELASTIC}.multiprocessing", "start_processes(start_method)")}
"""What the signature does not show, and a test of its own does: it stands at two places, by the form of the call."""


NEEDED: dict[str, list[Any]] = {"LaunchConfig": [1, 1, 1], "RunResult": ["HEALTHY"]}
"""What a class has to be given, to look at what it is without the rest."""


class Row(NamedTuple):
    verdict: str
    text: str

    @property
    def is_newer(self) -> bool:
        """Whether it is about what the torch that is here has not yet."""
        since = re.match(r"Since torch (\d+)\.(\d+)", self.text)
        return since is not None and tuple(map(int, since.groups())) > torch_names.torch_version()


@functools.cache
def tables() -> dict[str, dict[str, Row]]:
    """The pages' rows, by section and key: ``f(x, y)`` in a first cell is two keys, ``f(x)`` and ``f(y)``."""
    found: dict[str, dict[str, Row]] = {}
    rows: dict[str, Row] = {}
    for line in (line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()):
        if line.startswith("## "):
            heading = line.removeprefix("## ").replace("`", "")
            rows = found.setdefault(HEADINGS.get(heading, heading), {})
        elif re.match(r"\| `", line):
            cells = [cell.strip() for cell in line.strip("| ").split(" | ", 2)]
            names, verdict, text = (*cells, "")[:3]
            row = Row(verdict.rstrip(" |"), text)
            for key in _keys(names):
                assert key not in rows, f"{key} is in two rows"
                rows[key] = row
    return {section: rows for section, rows in found.items() if rows}


def _keys(cell: str) -> list[str]:
    found = []
    for span in re.findall(r"`([^`]+)`", cell):
        callee, _, taken = span.partition("(")
        found += [f"{callee}({name})" for name in taken.rstrip(")").split(", ")] if taken else [span]
    return found


def is_absent(section: str, key: str) -> bool:
    """Whether a table says that it is not there, or what it belongs to."""
    row = tables()[section].get(key)
    if row is not None and row.verdict == NOT_THERE:
        return True
    parent = torch_names.everything()[section][key].parent
    return (
        bool(parent)
        and not inspect.ismodule(torch_names.everything()[section][parent].value)
        and is_absent(section, parent)
    )


def verdict(section: str, key: str) -> str:
    """What the tables say of something that torch has, with a row of its own or by that of what it belongs to."""
    fact, row = torch_names.everything()[section][key], tables()[section].get(key)
    if row is not None:
        return row.verdict
    if fact.parent and is_absent(section, fact.parent):
        return NOT_THERE
    if fact.like:
        return verdict(section, fact.like)
    return ""


def each(*verdicts: str) -> list[tuple[str, str, Fact]]:
    return [
        (section, key, fact)
        for section, facts in torch_names.everything().items()
        for key, fact in facts.items()
        if verdict(section, key) in verdicts
    ]


def look(section: str, key: str) -> Any:
    """What Phalanx has under torch's name. Of a parameter, what it is in the signature. Raises LookupError.

    What torch has in a submodule, the package may have here.
    """
    path, _, parameter = key.rstrip(")").partition("(")
    try:
        found = _walk(HERE[section], path.split("."))
    except LookupError:
        module, _, rest = path.partition(".")
        if not rest or not inspect.ismodule(torch_names.everything()[section][module].value):
            raise
        found = _walk(HERE[section], rest.split("."))
    return parameters(found)[parameter] if parameter else found


def _walk(package: str, parts: list[str]) -> Any:
    found: Any = importlib.import_module(package)
    for part in parts:
        if inspect.isclass(found):
            found = all_members(found)[part]
        elif inspect.ismodule(found) and not hasattr(found, part):
            try:
                found = importlib.import_module(f"{found.__name__}.{part}")
            except ModuleNotFoundError as error:
                raise LookupError(part) from error
        else:
            found = getattr(found, part)
    return found


def kind_of(value: Any) -> str:
    if inspect.ismodule(value):
        return "module"
    if inspect.isclass(value):
        return "class"
    return "function" if callable(value) or isinstance(value, (staticmethod, classmethod)) else "value"


def differences(section: str, key: str, fact: Fact) -> list[str]:
    """In what Phalanx's is other than torch's, as far as can be seen from outside."""
    try:
        here = look(section, key)
    except LookupError:
        return [f"{section}: {key}: is not here"]
    if fact.kind == "name":
        kinds = kind_of(fact.value), kind_of(here)
        if kinds[0] != kinds[1]:
            return [f"{section}: {key}: {kinds[0]} there, {kinds[1]} here"]
        abstract = [sorted(getattr(each, "__abstractmethods__", ())) for each in (fact.value, here)]
        return [] if abstract[0] == abstract[1] else [f"{section}: {key}: to be overridden: {abstract}"]
    found = []
    owners = torch_names.everything()[section][fact.parent].value, look(section, fact.parent)
    if len({[*parameters(owner)].index(fact.value.name) for owner in owners}) > 1:
        found.append(f"{section}: {key}: stands at another place")
    if fact.value.kind != here.kind:
        found.append(f"{section}: {key}: {fact.value.kind.description} there, {here.kind.description} here")
    if fact.value.default is not inspect.Parameter.empty and not _equal(section, key, fact.value.default, here.default):
        found.append(f"{section}: {key}: {fact.value.default!r} there, {here.default!r} here")
    if fact.value.default is inspect.Parameter.empty and here.kind is here.KEYWORD_ONLY:
        found.append(f"{section}: {key}: by keyword only")
    if (
        fact.value.default is inspect.Parameter.empty
        and here.default is not inspect.Parameter.empty
        and "left out" not in tables()[section][key].text
    ):
        found.append(f"{section}: {key}: may be left out here")
    return found


def _equal(section: str, key: str, there: Any, here: Any) -> bool:
    if isinstance(there, enum.Enum):
        return bool(there.value == here)
    if repr(there) == "<factory>":  # of a dataclass
        owner, _, name = key.rstrip(")").partition("(")
        field = {each.name: each for each in dataclasses.fields(torch_names.everything()[section][owner].value)}[name]
        factory: Any = field.default_factory
        if repr(here) == "<factory>":
            mine: Any = {each.name: each for each in dataclasses.fields(look(section, owner))}[name].default_factory
            return bool(factory() == mine())
        kind = look(section, owner)

        return bool(factory() == getattr(kind(*NEEDED.get(owner, [])), name))
    return bool(there == here)


def test_everything_is_in_a_table_and_nothing_else() -> None:
    everything, listed = torch_names.everything(), tables()
    assert list(listed) == [section for section in listed if section in everything]
    missing = [(section, key) for section, facts in everything.items() for key in facts if not verdict(section, key)]
    surplus = [
        (section, key)
        for section, rows in listed.items()
        for key, row in rows.items()
        if key not in everything[section] and not row.is_newer
    ]
    early = [(section, key) for section, rows in listed.items() for key, row in rows.items()
             if key in everything[section] and row.is_newer]  # fmt: skip
    assert (missing, surplus, early) == ([], [], [])


def test_each_row_has_one_verdict_and_says_how_or_why() -> None:
    wrong = [
        f"{section}: {key}"
        for section, rows in tables().items()
        for key, row in rows.items()
        if row.verdict not in (SAME, DIFFERS, NOT_THERE) or (row.verdict != SAME and not row.text)
    ]
    assert wrong == []


def test_names_and_parameters_that_are_the_same() -> None:
    found = [
        text
        for section, key, fact in each(SAME)
        if fact.kind in ("name", "parameter") and (section, key) not in BY_POSITION_TOO
        for text in differences(section, key, fact)
    ]
    assert found == []


def test_events_of_the_file_timer_that_are_other() -> None:
    """Each name that torch's server tells and ours does not is in the row."""
    sources = [
        inspect.getsource(importlib.import_module(name).FileTimerServer)
        for name in (f"{ELASTIC}.timer.file_based_local_timer", "phalanx.timer._servers")
    ]
    told = set(re.findall(r'_log_event\(\s*"([^"]+)"', sources[0]))
    text = tables()[f"{ELASTIC}.timer"]["FileTimerServer(log_event)"].text
    assert len(told) == 4
    assert {name for name in told if f"`{name}`" not in text} == set()
    here, there = text.split("; in torch, ")
    other = {name for name in told if f'"{name}"' not in sources[1]}
    assert other == {name for name in told if f"`{name}`" in there.partition(". ")[0]}
    assert all(f'"{name}"' in sources[1] for name in re.findall("`([^`]+)`", here))


def test_start_method_by_position(tmp_path: Path) -> None:
    forms: list[tuple[Any, ...]] = [(DefaultLogsSpecs(), None, "fork"), (str(tmp_path), "fork")]
    for form in forms:
        with start_processes("x", pow, {0: (2, 3)}, {0: {}}, *form) as group:
            assert isinstance(group, MultiprocessContext)
            assert group.start_method == "fork"
            assert group.wait().return_values == {0: 8}


def test_names_and_parameters_that_differ_are_here() -> None:
    for section, key, fact in each(DIFFERS):
        if fact.kind in ("name", "parameter"):
            look(section, key)


def test_names_and_parameters_that_are_not_there() -> None:
    found = []
    for section, key, fact in each(NOT_THERE):
        if fact.kind in ("name", "parameter"):
            try:
                found.append((section, key, look(section, key)))
            except LookupError:
                continue
    assert found == []


def _parse(*argv: str) -> click.Context:
    return cli.run.make_context("phalanx run", [*argv, __file__])


def _option(name: str) -> click.Parameter | None:
    return next((param for param in cli.run.params if name in param.opts), None)


def test_options_that_are_the_same() -> None:
    found: list[tuple[str, Any, Any]] = []
    for _, name, fact in each(SAME):
        if fact.kind == "option" and name.startswith("-") and name not in ("-h", "--help"):
            option = _option(name)
            assert isinstance(option, click.Option), name
            if option.is_flag != (fact.value.nargs == 0):
                found.append((name, fact.value.nargs, option.is_flag))
            default = _parse().params[option.name or ""]
            if default != fact.value.default:
                found.append((name, fact.value.default, default))
    assert found == []


def test_options_are_taken_as_torchrun_spells_them() -> None:
    taken = {id(fact.value): fact.value for _, _, fact in each(SAME, DIFFERS) if fact.kind == "option"}
    for action in taken.values():
        long = next((name for name in action.option_strings if name.startswith("--")), "--help").replace("_", "-")
        prints = long in ("--help", "--print-completion")  # and ends
        for name in () if prints else action.option_strings:
            value = [] if action.nargs == 0 else [VALUES.get(long, str(action.default))]
            assert _parse(name, *value).params["script"] == __file__


def test_every_option_is_there() -> None:
    assert not [name for _, name, fact in each(NOT_THERE) if fact.kind == "option"]


def test_a_shortened_option_is_answered_with_the_whole_one() -> None:
    every = {name for _, name, fact in each(SAME, DIFFERS) if fact.kind == "option"}
    for name in every - {"--help"}:
        shortened = name[:-2]
        if name.startswith("--") and len(shortened) > len("--x"):
            outcome = CliRunner().invoke(cli.run, [shortened, "1", __file__])
            assert outcome.exit_code == 2
            text = outcome.output.replace("\n", " ")
            begun = [one for one in sorted(every) if one.startswith(shortened)]
            assert any(f"'{one}'" in text for one in begun), text


def test_variables() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    read = {name for param in cli.run.params for name in (param.envvar or ())}
    found = []
    for section, name, fact in each(SAME, DIFFERS, NOT_THERE):
        if fact.kind == "variable":
            is_here = name in read or re.search(rf'"{name}"', sources) is not None
            of_torch = tables()[section][name].text.startswith(OF_TORCH)
            if is_here == (verdict(section, name) == NOT_THERE or of_torch):
                found.append(name)
    assert found == []


def test_variables_of_workers() -> None:
    here = worker_env(0, 1, role="default", run_id="x", master_addr="127.0.0.1", master_port=1)
    assert torch_names.of_workers() <= set(here)
    absent = {name for name in here if verdict("variables", name) not in (SAME, DIFFERS)}
    assert absent == set()


def test_variables_of_options_go_with_them() -> None:
    options = {fact.value.dest: verdict("torchrun", name) for _, name, fact in each(SAME, DIFFERS, NOT_THERE)
               if fact.kind == "option"}  # fmt: skip
    said = {name: verdict("variables", name) for _, name, fact in each(SAME, DIFFERS, NOT_THERE) if "PET_" in name}
    assert said == {name: options[name.removeprefix("PET_").lower()] for name in said}


def test_what_multiprocessing_exports_is_the_same_object() -> None:
    there, here = (importlib.import_module(name) for name in ("torch.multiprocessing", "phalanx.spawn"))
    names = [name for name in multiprocessing.__all__ if name in there.__all__]
    assert [name for name in names if getattr(here, name) is not getattr(there, name)] == []
    assert set(names) <= set(here.__all__)
