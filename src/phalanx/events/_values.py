"""Events, and the JSON texts that they are as records."""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

EventMetadataValue = str | int | float | bool | None
"""What the metadata of an event may hold."""


class EventSource(str, Enum):  # noqa: UP042 - torch's is no StrEnum: its str() is "EventSource.AGENT"
    """Who tells an event."""

    AGENT = "AGENT"
    """The launcher."""
    WORKER = "WORKER"
    """A worker."""


class NodeState(str, Enum):  # noqa: UP042 - as above
    """Where a node is in its rendezvous."""

    INIT = "INIT"
    """It has not begun."""
    RUNNING = "RUNNING"
    """It has begun."""
    SUCCEEDED = "SUCCEEDED"
    """It has ended well."""
    FAILED = "FAILED"
    """It has ended with an error."""


class _Text:
    """What both kinds of events have: the way to JSON and back."""

    _CHOICE: tuple[str, type[Enum]]  # a field, and what it can be

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        """Get the event as a JSON text in one line: an object with a key for each field.

        What JSON has no form for is a number, if it is one, or a text (a path, a scalar of NumPy): it raises nothing,
        whatever the metadata hold.
        """
        own: Any = self
        values = {each.name: getattr(self, each.name) for each in fields(own)}
        try:
            return json.dumps(values, default=_plain)
        except Exception:  # noqa: BLE001 - keys that are no texts, circles, ints of thousands of digits; what a thread changes
            return json.dumps({name: _shown(value) for name, value in values.items()})

    @classmethod
    def deserialize(cls, data: str | Self) -> Self:
        """Get the event that a text from `serialize` is.

        Args:
            data: The text. An event of this class is returned as it is.

        Raises:
            TypeError: ``data`` is neither.
            ValueError: The text is no JSON object, or lacks a field, or has another one; the message says which.
        """
        if isinstance(data, cls):
            return data
        if not isinstance(data, str):
            raise TypeError(f"data: expected a JSON text or an {cls.__name__}, got {data!r}")
        try:
            found = json.loads(data)
        except RecursionError as error:
            raise ValueError("data: nested too deeply") from error
        if not isinstance(found, dict):
            raise ValueError(f"data: expected a JSON object, got {type(found).__name__}")  # noqa: TRY004 - of the text
        name, kind = cls._CHOICE
        if name not in found:
            raise ValueError(f"data: has no {name!r}")
        if not isinstance(found[name], str) or found[name] not in kind.__members__:
            raise ValueError(f"data: {name}: expected one of {', '.join(kind.__members__)}, got {found[name]!r}")
        found[name] = kind[found[name]]
        try:
            return cls(**found)
        except TypeError as error:  # one is missing, or is no field
            raise ValueError(f"data: {error}") from error


@dataclass
class Event(_Text):
    """Something that happened to a job.

    Args:
        name: What it is.
        source: Who tells it.
        timestamp: When, in whole milliseconds of Unix time; it is not filled in.
        metadata: What else there is to say: texts, numbers, booleans and None, by name.

    >>> Event("start", EventSource.AGENT, 1700000000000, {"restarts": 0}).serialize()
    '{"name": "start", "source": "AGENT", "timestamp": 1700000000000, "metadata": {"restarts": 0}}'
    """

    _CHOICE = ("source", EventSource)

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)


@dataclass
class RdzvEvent(_Text):
    """Something that happened in a rendezvous.

    Args:
        name: What it is: as a rule, a file and a function.
        run_id: The run's id.
        message: What it is, in words.
        hostname: The node's host.
        pid: The node's process.
        node_state: Where the node is.
        master_endpoint: Where the store is, if that is known.
        rank: The node's rank, if it has one.
        local_id: The node's number in its process, if it has one.
        error_trace: The traceback of an error.
    """

    _CHOICE = ("node_state", NodeState)

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""


def _plain(value: Any) -> Any:
    """Get what JSON can have in place of a value that it has no form for."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    for convert in (operator.methodcaller("item"), operator.index, float):  # a scalar of NumPy or torch has an item
        try:
            found = convert(value)
        except Exception:  # noqa: BLE001, S112 - it has none, or is an array of several; it may raise anything
            continue
        if isinstance(found, (int, float)):
            return found
    return _text(value)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a __str__ of the user's may raise anything
        return f"<{type(value).__name__}>"


def _shown(value: Any, deep: int = 1) -> Any:
    """Get a copy that JSON has a form for, in which what has none is a text."""
    try:
        return json.loads(json.dumps(value, default=_plain))
    except Exception:  # noqa: BLE001 - as above
        if isinstance(value, dict) and deep:
            return {_text(key): _shown(each, deep - 1) for key, each in [*value.items()]}
        return _text(value)
