"""`TimerSpecs`: what follows when a timer of a group expires. Checks and reads it; `escalation` carries it out."""

from __future__ import annotations

from phalanx._base.frozen import Value
from phalanx._base.text import parse_duration, seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

STEPS = ("report", "dump", "terminate", "kill")
"""What can follow an expiry, in this order: a line, the stacks of all ranks in files, SIGTERM, SIGKILL."""


class TimerSpecs(Value):
    """How a group watches its workers: what follows when a timer expires, and whether heartbeats are expected.

    Args:
        on_expiry: What follows, in order: ``"report"`` (a line on the console, and an event), ``"dump"`` (the stacks of
            all ranks into ``<rank>/stacks-<n>.txt``), ``"terminate"`` (SIGTERM) and ``"kill"`` (SIGKILL). A
            string, ``"report,dump:5,terminate:10,kill:1m"``, or a sequence of names and of pairs (name, seconds): the
            delay of a step counts from the step before, that of the first from the deadline. Each step but ``report``
            takes the stacks first, unless a step before has taken them. A worker that leaves the block between
            two steps is let go. When the last step is ``report`` or ``dump``, the timer is armed again, for as long as
            it was. Default: ``"kill"``, at once.
        hang_timeout: Seconds (> 0) after a rank's last `beat` when it counts as hung, or None. The first beat arms it;
            an `expires` block that may take longer extends it, and its end counts as a beat.
        on_event: Called with each event, a dict: ``name`` (``timer.armed``, ``timer.breakpoint``, ``timer.expired``,
            ``timer.left``, ``worker.reaped`` or ``request.refused``), ``rank``, ``pid``, ``scope``, ``place``,
            ``overdue`` in seconds, ``timestamp`` (Unix time) and ``monotonic_ns``. On a thread of its own, in order: it
            holds up nobody, but the end of the group waits for it, 5 s at most. The first exception that it raises is
            logged.

    Raises:
        TypeError, ValueError: What is wrong with which argument.

    >>> TimerSpecs(on_expiry="report, kill:30").on_expiry
    (('report', 0.0), ('kill', 30.0))
    >>> TimerSpecs(on_expiry="kill, report")
    Traceback (most recent call last):
    ValueError: on_expiry: 'report' comes after 'kill'; the order is report, dump, terminate, kill, each at most once
    """

    on_expiry: tuple[tuple[str, float], ...]
    hang_timeout: float | None
    on_event: Callable[[dict[str, Any]], None] | None

    def __init__(
        self,
        on_expiry: str | Sequence[str | tuple[str, float]] = "kill",
        hang_timeout: float | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        if hang_timeout is not None:
            hang_timeout = seconds("hang_timeout", hang_timeout, zero=False, endless=False)
        listener: Any = on_event
        if listener is not None and not callable(listener):
            msg = f"on_event: expected a function of one dict, got {on_event!r}"
            raise TypeError(msg)
        self._store(on_expiry=read_steps(on_expiry), hang_timeout=hang_timeout, on_event=on_event)


def read_steps(value: str | Sequence[str | tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """Parse ``on_expiry`` into names and delays in seconds. Raises TypeError, ValueError.

    >>> read_steps("dump")
    (('dump', 0.0),)
    >>> read_steps(["report", ("terminate", 2.5)])
    (('report', 0.0), ('terminate', 2.5))
    """
    parts: list[Any] = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)
    steps: list[tuple[str, float]] = []
    for part in parts:
        name, delay = _step(part)
        if name not in STEPS:
            msg = f"on_expiry: {name!r} is no step; expected {', '.join(STEPS)}, each with :TIME if it is to wait"
            raise ValueError(msg)
        if steps and STEPS.index(name) <= STEPS.index(steps[-1][0]):
            msg = (
                f"on_expiry: {name!r} comes after {steps[-1][0]!r}; the order is {', '.join(STEPS)}, each at most once"
            )
            raise ValueError(msg)
        steps.append((name, delay))
    if not steps:
        msg = f"on_expiry: expected at least one of {', '.join(STEPS)}"
        raise ValueError(msg)
    return tuple(steps)


def _step(part: Any) -> tuple[str, float]:
    if isinstance(part, str):
        name, colon, text = (word.strip() for word in part.partition(":"))
        try:
            delay: Any = parse_duration(text) if colon else 0.0
        except ValueError as error:
            msg = f"on_expiry: {part!r}: {error}"
            raise ValueError(msg) from None
    elif isinstance(part, (tuple, list)) and len(part) == 2 and isinstance(part[0], str):  # noqa: PLR2004 - a name and its delay
        name, delay = part
    else:
        msg = f"on_expiry: expected names, or pairs of a name and seconds, got {part!r}"
        raise TypeError(msg)
    return str(name), seconds("on_expiry", delay, endless=False)
