"""The kinds of events: what they hold, and that the documentation has each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx._events import agent_kinds, kinds  # noqa: F401 - those of agents are found below `Event`

LOGS = Path(__file__).parents[2] / "docs" / "logs.md"


def all_kinds(kind: type[kinds.Event] = kinds.Event) -> Iterator[type[kinds.Event]]:
    if kind.name:
        yield kind
    for below in kind.__subclasses__():
        yield from all_kinds(below)


KINDS = sorted(all_kinds(), key=lambda kind: kind.name)


def fields_of(kind: type[kinds.Event]) -> list[str]:
    return [name for name in kind.__match_args__[3:] if name not in kind.KEPT]


def rows() -> dict[str, str]:
    """The documentation's rows of events, by name."""
    text = LOGS.read_text()
    section = text[text.index("### events.jsonl") : text.index("### phalanx runs")]
    found = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            _, names, what, _ = re.split(r"(?<!\\)\|", line)
            found.update(dict.fromkeys(re.findall(r"`([^`]+)`", names), what))
    return found


def test_each_kind_has_a_row_and_each_row_a_kind() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert {kind.name for kind in KINDS} | {"events.removed"} == set(rows())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_has_every_field(kind: type[kinds.Event]) -> None:
    row = rows()[kind.name]
    if kind is kinds.WorkerReaped:  # "the same, and ..."
        row += rows()["timer.armed"]
    assert [name for name in fields_of(kind) if f"`{name}`" not in row] == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_line_has_the_common_fields_and_those_of_the_kind(kind: type[kinds.Event]) -> None:
    values: dict[str, Any] = {name: index for index, name in enumerate(kind.__match_args__[3:])}
    event = kind(2, 5_000_000_000, **values)
    event.date(100.0)
    found = json.loads(json.dumps(event.to_object()))
    common = {"name": kind.name, "timestamp": 105.0, "monotonic_ns": 5_000_000_000, "attempt": 2}
    assert found == common | {name: values[name] for name in fields_of(kind)}
    assert list(found) == [*common, *fields_of(kind)]
