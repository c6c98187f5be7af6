"""The protocol: every verb has a receiver with the same fields, a meaning, and a form that travels."""

from __future__ import annotations

import inspect
import marshal
from typing import TYPE_CHECKING, Any

import pytest

from phalanx._engine import keeper_link, protocol
from phalanx._engine.keeper import fork_server, keeper
from phalanx._timers import hang_reporter

if TYPE_CHECKING:
    from collections.abc import Callable

VERBS = (*protocol.TO_KEEPER, *protocol.TO_LAUNCHER, *protocol.TO_FORK_SERVER, *protocol.FROM_FORK_SERVER)
RECEIVERS = {
    "keeper": (protocol.TO_KEEPER, keeper._ON_MESSAGE),
    "launcher": (protocol.TO_LAUNCHER, keeper_link._ON_MESSAGE),
}


def name_of(verb: Callable[..., Any]) -> str:
    return verb.__name__


def fields_of(verb: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(verb).parameters)


@pytest.mark.parametrize("who", RECEIVERS)
def test_a_receiver_has_a_method_for_each_verb_and_no_other(who: str) -> None:
    verbs, methods = RECEIVERS[who]
    assert set(methods) == {verb.__name__ for verb in verbs}


@pytest.mark.parametrize("who", RECEIVERS)
def test_a_receiver_has_the_fields_of_each_verb_in_their_order(who: str) -> None:
    verbs, methods = RECEIVERS[who]
    for verb in verbs:
        taken = [name.lstrip("_") for name in fields_of(methods[verb.__name__])[1:]]
        beside = ["fds"] if verb.__name__ in ("start", "up") else []
        if verb is not protocol.start:  # an order is kept as it came
            assert taken == fields_of(verb) + beside


def test_an_order_to_start_has_the_fields_of_its_verb() -> None:
    from phalanx._engine.keeper import start_group

    assert fields_of(start_group.Start) == [*fields_of(protocol.start), "fds"]


def test_the_fork_server_has_the_fields_of_its_verbs() -> None:
    assert fields_of(fork_server._on_preload)[2:] == fields_of(protocol.preload)
    assert fields_of(fork_server._on_fork)[3:] == fields_of(protocol.fork)


def test_the_launcher_passes_on_what_the_hang_report_takes() -> None:
    assert {*hang_reporter._REPORT, "hang", "armed", "expired"} == set(protocol.TIMER_VERBS)


@pytest.mark.parametrize("verb", VERBS, ids=name_of)
def test_a_verb_builds_the_message_of_its_name(verb: Callable[..., Any]) -> None:
    values = list(range(len(fields_of(verb))))
    assert verb(*values) == (verb.__name__, *values)
    assert verb.__doc__


@pytest.mark.parametrize(
    "record",
    [
        protocol.Spec(1, b"/bin/true", [b"true"], {b"A": b"b"}, None, None, "/x", [0], (0, 0, False), None, False),
        protocol.ExitReport(1, 256, 10**12, 2048, 0.5, "", 0, False, 15),
        protocol.Orphan(4711, -1, "sleep 600", 1.5, 9, None),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_travels_as_a_tuple(record: protocol.Record) -> None:
    packed = marshal.loads(marshal.dumps(record.pack()))  # noqa: S302 - made here
    assert packed == record.pack()
    assert type(record)(*packed).pack() == packed
