"""The life of a group, as a table. Pure: it decides, and touches nothing. The keeper carries it out.

A group starts together, lives together and falls together: the first failure opens a short window in which peers
may leave evidence of their own, then all are asked to stop, then all are killed, and whatever any of them left behind
is swept away. `TABLE` is the whole of it; a pair that is absent is a mistake in the keeper, and an error: the keeper
ends by it, and the guard, which takes over by the same table, kills the group.

States, events and actions are plain strings: an `enum` would cost the keeper 3 of the 10 ms in which it gets up.
"""

from __future__ import annotations

STATES = {
    "WAITING": "the keeper is up, and has not been told what to start",
    "STARTING": "the workers are being started",
    "RUNNING": "every worker is up, and none has failed",
    "SETTLING": "one has failed; the others may leave evidence of their own",
    "STOPPING": "all have been asked to end",
    "LINGERING": "every worker has ended well; what they left behind may go on for a while",
    "SWEEPING": "no worker is left; what they left behind has been asked to end",
    "PURGING": "what they left behind is killed, unless it is in a worker's session and has some of the grace left",
    "KILLING": "everything is killed",
    "DRAINING": "no process of the workers is left; what they wrote last is on its way into rotated log files",
    "ENDED": "the last word is on its way to the launcher",
    "GONE": "the keeper leaves",
}

EVENTS = {
    "START": "the launcher says what is to be started",
    "STARTED": "every worker is up",
    "START_FAILED": "a worker could not be started",
    "ONE_ENDED": "a worker ended well, or the group does not fall together; others live",
    "ONE_FAILED": "a worker failed by itself, others live, and the group falls together",
    "ALL_SUCCEEDED": "no worker is left, and every one ended well",
    "ALL_ENDED": "no worker is left, and one at least did not end well",
    "SETTLED": "the settle window is over",
    "STOP": "the launcher asks for a graceful end, within a grace period",
    "KILL": "the launcher asks for an end at once",
    "GRACE_OVER": "the grace period is over",
    "LINGER_OVER": "the time of what successful workers left behind is over",
    "PATIENCE_OVER": "what was left behind has had a moment to end",
    "EMPTY": "no descendant is left",
    "KILL_OVER": "something outlives SIGKILL: it sits in uninterruptible sleep, or a tracer holds it",
    "DRAINED": "the log files have all that was written",
    "DRAIN_OVER": "a log file could not be written for too long",
    "TOLD": "the last word is sent, or there is nobody to be told",
    "ORPHANED": "the launcher is gone",
    "HELPER_LOST": "guard, keeper or log writer has died",
}

ACTIONS = {
    "BEGIN": "start the workers",
    "REFUSE": "start nothing, and close the descriptors that came for it",
    "TELL_STARTED": "say which processes the workers are",
    "ARM_SETTLE": "open the settle window",
    "SIGNAL": "send the death signal to the live workers",
    "ARM_GRACE": "start the grace period, or shorten the one that runs",
    "ARM_LINGER": "allow what is left behind its time",
    "ARM_REST": "allow what is left behind the rest of the grace period, and a moment at least",
    "LOOK": "look for what is left, and treat it as the state demands",
    "KILL": "kill every process of the group",
    "ABANDON": "note what outlives SIGKILL",
    "DRAIN": "have the log writer finish",
    "LEAVE_LOGS": "note that the log writer goes on by itself",
    "SAY_LAST": "say the last word: how it ended, and what was left",
    "LEAVE": "leave",
}

PATIENCE = 0.05
"""Seconds between SIGTERM and SIGKILL for what a worker left behind. Enough for a resource tracker, which ignores
SIGTERM, to see its worker's end and unlink the shared memory that it tracks."""

KILL_WAIT = 10.0
"""Seconds that a SIGKILL is given. A process that outlives it sits in uninterruptible sleep, and is abandoned."""

DRAIN_WAIT = 10.0
"""Seconds that the log writer is given for what is still in its pipes when no worker is left. After that it goes on by
itself: a disk that does not answer holds up nobody else."""

_KILL = ("KILLING", ("KILL", "LOOK"))
_STOP = ("STOPPING", ("SIGNAL", "ARM_GRACE"))
_SWEEP = ("SWEEPING", ("ARM_REST", "LOOK"))
_DRAIN = ("DRAINING", ("DRAIN",))
_END = ("ENDED", ("SAY_LAST",))
_GO = ("GONE", ("LEAVE",))

TABLE: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("WAITING", "START"): ("STARTING", ("BEGIN",)),
    ("WAITING", "STOP"): _KILL,
    ("WAITING", "KILL"): _KILL,
    ("WAITING", "ORPHANED"): _KILL,
    ("WAITING", "HELPER_LOST"): _KILL,
    ("STARTING", "STARTED"): ("RUNNING", ("TELL_STARTED",)),
    ("STARTING", "START_FAILED"): _KILL,
    ("STARTING", "STOP"): _KILL,
    ("STARTING", "KILL"): _KILL,
    ("STARTING", "ORPHANED"): _KILL,
    ("STARTING", "HELPER_LOST"): _KILL,
    ("RUNNING", "ONE_ENDED"): ("RUNNING", ()),
    ("RUNNING", "ONE_FAILED"): ("SETTLING", ("ARM_SETTLE",)),
    ("RUNNING", "ALL_SUCCEEDED"): ("LINGERING", ("ARM_LINGER", "LOOK")),
    ("RUNNING", "ALL_ENDED"): _SWEEP,
    ("RUNNING", "STOP"): _STOP,
    ("RUNNING", "KILL"): _KILL,
    ("RUNNING", "ORPHANED"): _KILL,
    ("RUNNING", "HELPER_LOST"): _KILL,
    ("SETTLING", "ONE_ENDED"): ("SETTLING", ()),
    ("SETTLING", "ONE_FAILED"): ("SETTLING", ()),
    ("SETTLING", "ALL_ENDED"): _SWEEP,
    ("SETTLING", "SETTLED"): _STOP,
    ("SETTLING", "STOP"): _STOP,
    ("SETTLING", "KILL"): _KILL,
    ("SETTLING", "ORPHANED"): _KILL,
    ("SETTLING", "HELPER_LOST"): _KILL,
    ("STOPPING", "ONE_ENDED"): ("STOPPING", ()),
    ("STOPPING", "ONE_FAILED"): ("STOPPING", ()),
    ("STOPPING", "ALL_SUCCEEDED"): _SWEEP,
    ("STOPPING", "ALL_ENDED"): _SWEEP,
    ("STOPPING", "STOP"): _STOP,
    ("STOPPING", "GRACE_OVER"): _KILL,
    ("STOPPING", "KILL"): _KILL,
    ("STOPPING", "ORPHANED"): _KILL,
    ("STOPPING", "HELPER_LOST"): _KILL,
    ("LINGERING", "EMPTY"): _DRAIN,
    ("LINGERING", "LINGER_OVER"): _SWEEP,
    ("LINGERING", "STOP"): ("SWEEPING", ("ARM_GRACE", "ARM_REST", "LOOK")),
    ("LINGERING", "KILL"): _KILL,
    ("LINGERING", "ORPHANED"): _KILL,
    ("LINGERING", "HELPER_LOST"): _KILL,
    ("SWEEPING", "EMPTY"): _DRAIN,
    ("SWEEPING", "PATIENCE_OVER"): ("PURGING", ("LOOK",)),
    ("SWEEPING", "STOP"): ("SWEEPING", ("ARM_GRACE",)),
    ("SWEEPING", "GRACE_OVER"): _KILL,
    ("SWEEPING", "KILL"): _KILL,
    ("SWEEPING", "ORPHANED"): _KILL,
    ("SWEEPING", "HELPER_LOST"): _KILL,
    ("PURGING", "EMPTY"): _DRAIN,
    ("PURGING", "STOP"): ("PURGING", ("ARM_GRACE",)),
    ("PURGING", "GRACE_OVER"): _KILL,
    ("PURGING", "KILL"): _KILL,
    ("PURGING", "ORPHANED"): _KILL,
    ("PURGING", "HELPER_LOST"): _KILL,
    ("KILLING", "START"): ("KILLING", ("REFUSE",)),
    ("KILLING", "ONE_ENDED"): ("KILLING", ()),
    ("KILLING", "ONE_FAILED"): ("KILLING", ()),
    ("KILLING", "ALL_SUCCEEDED"): ("KILLING", ()),
    ("KILLING", "ALL_ENDED"): ("KILLING", ()),
    ("KILLING", "STOP"): ("KILLING", ()),
    ("KILLING", "KILL"): ("KILLING", ()),
    ("KILLING", "EMPTY"): _DRAIN,
    ("KILLING", "KILL_OVER"): ("DRAINING", ("ABANDON", "DRAIN")),
    ("KILLING", "ORPHANED"): ("KILLING", ()),
    ("KILLING", "HELPER_LOST"): ("KILLING", ()),
    ("DRAINING", "START"): ("DRAINING", ("REFUSE",)),
    ("DRAINING", "STOP"): ("DRAINING", ()),
    ("DRAINING", "KILL"): ("DRAINING", ()),
    ("DRAINING", "DRAINED"): _END,
    ("DRAINING", "DRAIN_OVER"): ("ENDED", ("LEAVE_LOGS", "SAY_LAST")),
    ("DRAINING", "ORPHANED"): _GO,
    ("DRAINING", "HELPER_LOST"): ("DRAINING", ()),
    ("ENDED", "START"): ("ENDED", ("REFUSE",)),
    ("ENDED", "STOP"): ("ENDED", ()),
    ("ENDED", "KILL"): ("ENDED", ()),
    ("ENDED", "TOLD"): _GO,
    ("ENDED", "ORPHANED"): _GO,
    ("ENDED", "HELPER_LOST"): ("ENDED", ()),
}


def step(state: str, event: str) -> tuple[str, tuple[str, ...]]:
    """What follows when ``event`` happens to a group in ``state``. Raises LookupError for a pair that cannot be.

    >>> step("RUNNING", "ONE_FAILED")
    ('SETTLING', ('ARM_SETTLE',))
    """
    try:
        return TABLE[state, event]
    except KeyError:
        msg = f"a group that is {state} cannot see {event}"
        raise LookupError(msg) from None
