"""The life of a group, as a table. Pure: it decides, and acts on nothing. The keeper carries it out.

A group starts together, lives together and falls together: the first failure opens a short window in which peers may
leave evidence of their own, then all are asked to stop, then all are killed, and whatever any of them left behind is
swept away. A planned stop may begin with a notice, and time to save. A failure has no notice; one that comes during a
notice takes nothing of the time that the others have.

`TABLE` is the whole of it. A pair that is absent is a mistake in the keeper: `step` raises, the keeper ends, and the
guard, which takes over by the same table, kills the group.

States, events and actions are plain strings: an `enum` would cost the keeper 3 of the 10 ms in which it gets up.
"""

from __future__ import annotations

STATES = {
    "WAITING": "the keeper is up, and waits for the order to start",
    "STARTING": "the workers are being started",
    "RUNNING": "every worker is up, and none has failed",
    "SETTLING": "a worker has failed; the others may leave evidence of their own",
    "NOTICED": "a planned stop: the workers have notice of it, and some time until the death signal",
    "STOPPING": "all workers have been sent the death signal",
    "LINGERING": "every worker has ended well; processes that they left behind may go on for a while",
    "SWEEPING": "no worker is left; what they left behind has been sent SIGTERM",
    "PURGING": "what they left behind is killed, except in a worker's session while the grace period runs",
    "KILLING": "everything is killed",
    "DRAINING": "no process of the workers is left; the log writer writes what is still in its pipes",
    "ENDED": "the last message is on its way to the launcher",
    "GONE": "the keeper exits",
}

EVENTS = {
    "START": "the order to start arrives",
    "STARTED": "every worker is up",
    "START_FAILED": "a worker could not be started",
    "ONE_ENDED": "a worker ended well; others live",
    "ONE_FAILED": "a worker failed by itself; others live",
    "ONE_LEAVES": "a worker has failed by itself, and left its main function, but it has not exited",
    "ALL_SUCCEEDED": "no worker is left, and every one ended well",
    "ALL_ENDED": "no worker is left, and one at least did not end well",
    "SETTLED": "the settle window is over",
    "STOP": "the launcher orders a graceful end, within a grace period",
    "STOP_WITH_NOTICE": "the launcher orders the same, and the workers are to have notice of it before",
    "NOTICE_OVER": "the time of the notice is over",
    "KILL": "the launcher orders an end at once",
    "GRACE_OVER": "the grace period is over",
    "LINGER_OVER": "the time for what successful workers left behind is over",
    "PATIENCE_OVER": "what was left behind has had a moment (PATIENCE) to end",
    "EMPTY": "no descendant is left",
    "KILL_OVER": "a process outlives SIGKILL: it is in uninterruptible sleep, or a tracer holds it",
    "DRAINED": "the log writer has ended: the files have all that was written",
    "DRAIN_OVER": "the log writer has taken too long",
    "REPORTED": "the last message is sent, or nobody can receive it",
    "ORPHANED": "the launcher has died, and there is no orphan grace",
    "ORPHANED_WITH_GRACE": "the launcher has died, and the workers have the orphan grace",
    "HELPER_LOST": "the guard, the keeper or the log writer has died",
}

ACTIONS = {
    "START_WORKERS": "start the workers",
    "REFUSE": "start nothing, and close the descriptors that came with the order",
    "REPORT_STARTED": "report the workers' pids",
    "ARM_SETTLE": "open the settle window",
    "GIVE_NOTICE": "send the notice's signal to the live workers that handle it, and start its time",
    "SIGNAL": "send the death signal to the live workers; without an order, not to one that has failed and leaves",
    "ARM_GRACE": "start the grace period, or shorten the one that runs",
    "ARM_LINGER": "start the time for what is left behind",
    "ARM_PATIENCE": "allow what is left behind the rest of the grace period, and PATIENCE at least",
    "SWEEP": "look for what is left, and signal it as the state demands",
    "KILL": "kill every process of the group",
    "ABANDON": "note what outlives SIGKILL",
    "DRAIN": "have the log writer finish",
    "ABANDON_LOGS": "report that the log writer goes on by itself",
    "REPORT_END": "send the last message: how the group ended, and what was left",
    "LEAVE": "exit",
}

PATIENCE = 0.05
"""Seconds between SIGTERM and SIGKILL for what a worker left behind. Enough for a resource tracker, which ignores
SIGTERM, to see its worker's end and unlink the shared memory that it tracks."""

_KILL = ("KILLING", ("KILL", "SWEEP"))
_STOP = ("STOPPING", ("SIGNAL", "ARM_GRACE"))
_SWEEP = ("SWEEPING", ("ARM_PATIENCE", "SWEEP"))
_SWEEP_WITH_GRACE = ("SWEEPING", ("ARM_GRACE", "ARM_PATIENCE", "SWEEP"))
_DRAIN = ("DRAINING", ("DRAIN",))
_END = ("ENDED", ("REPORT_END",))
_GO = ("GONE", ("LEAVE",))

TABLE: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("WAITING", "START"): ("STARTING", ("START_WORKERS",)),
    ("WAITING", "STOP"): _KILL,
    ("WAITING", "KILL"): _KILL,
    ("WAITING", "ORPHANED"): _KILL,
    ("WAITING", "HELPER_LOST"): _KILL,
    ("STARTING", "STARTED"): ("RUNNING", ("REPORT_STARTED",)),
    ("STARTING", "START_FAILED"): _KILL,
    ("STARTING", "STOP"): _KILL,
    ("STARTING", "KILL"): _KILL,
    ("STARTING", "ORPHANED"): _KILL,
    ("STARTING", "ORPHANED_WITH_GRACE"): _KILL,
    ("STARTING", "HELPER_LOST"): _KILL,
    ("RUNNING", "ONE_ENDED"): ("RUNNING", ()),
    ("RUNNING", "ONE_FAILED"): ("SETTLING", ("ARM_SETTLE",)),
    ("RUNNING", "ONE_LEAVES"): ("SETTLING", ("ARM_SETTLE",)),
    ("RUNNING", "ALL_SUCCEEDED"): ("LINGERING", ("ARM_LINGER", "SWEEP")),
    ("RUNNING", "ALL_ENDED"): _SWEEP,
    ("RUNNING", "STOP"): _STOP,
    ("RUNNING", "STOP_WITH_NOTICE"): ("NOTICED", ("GIVE_NOTICE",)),
    ("RUNNING", "KILL"): _KILL,
    ("RUNNING", "ORPHANED"): _KILL,
    ("RUNNING", "ORPHANED_WITH_GRACE"): _STOP,
    ("RUNNING", "HELPER_LOST"): _KILL,
    ("SETTLING", "ONE_ENDED"): ("SETTLING", ()),
    ("SETTLING", "ONE_FAILED"): ("SETTLING", ()),
    ("SETTLING", "ALL_ENDED"): _SWEEP,
    ("SETTLING", "SETTLED"): _STOP,
    ("SETTLING", "STOP"): _STOP,
    ("SETTLING", "KILL"): _KILL,
    ("SETTLING", "ORPHANED"): _KILL,
    ("SETTLING", "ORPHANED_WITH_GRACE"): _STOP,
    ("SETTLING", "HELPER_LOST"): _KILL,
    ("NOTICED", "ONE_ENDED"): ("NOTICED", ()),
    ("NOTICED", "ONE_FAILED"): ("NOTICED", ()),
    ("NOTICED", "ALL_SUCCEEDED"): _SWEEP_WITH_GRACE,
    ("NOTICED", "ALL_ENDED"): _SWEEP_WITH_GRACE,
    ("NOTICED", "NOTICE_OVER"): _STOP,
    ("NOTICED", "STOP"): _STOP,
    ("NOTICED", "KILL"): _KILL,
    ("NOTICED", "ORPHANED"): _KILL,
    ("NOTICED", "ORPHANED_WITH_GRACE"): _STOP,
    ("NOTICED", "HELPER_LOST"): _KILL,
    ("STOPPING", "ONE_ENDED"): ("STOPPING", ()),
    ("STOPPING", "ONE_FAILED"): ("STOPPING", ()),
    ("STOPPING", "ALL_SUCCEEDED"): _SWEEP,
    ("STOPPING", "ALL_ENDED"): _SWEEP,
    ("STOPPING", "STOP"): _STOP,
    ("STOPPING", "GRACE_OVER"): _KILL,
    ("STOPPING", "KILL"): _KILL,
    ("STOPPING", "ORPHANED"): _KILL,
    ("STOPPING", "ORPHANED_WITH_GRACE"): ("STOPPING", ("ARM_GRACE",)),
    ("STOPPING", "HELPER_LOST"): _KILL,
    ("LINGERING", "EMPTY"): _DRAIN,
    ("LINGERING", "LINGER_OVER"): _SWEEP,
    ("LINGERING", "STOP"): _SWEEP_WITH_GRACE,
    ("LINGERING", "KILL"): _KILL,
    ("LINGERING", "ORPHANED"): _KILL,
    ("LINGERING", "ORPHANED_WITH_GRACE"): _SWEEP_WITH_GRACE,
    ("LINGERING", "HELPER_LOST"): _KILL,
    ("SWEEPING", "EMPTY"): _DRAIN,
    ("SWEEPING", "PATIENCE_OVER"): ("PURGING", ("SWEEP",)),
    ("SWEEPING", "STOP"): ("SWEEPING", ("ARM_GRACE",)),
    ("SWEEPING", "GRACE_OVER"): _KILL,
    ("SWEEPING", "KILL"): _KILL,
    ("SWEEPING", "ORPHANED"): _KILL,
    ("SWEEPING", "ORPHANED_WITH_GRACE"): ("SWEEPING", ("ARM_GRACE",)),
    ("SWEEPING", "HELPER_LOST"): _KILL,
    ("PURGING", "EMPTY"): _DRAIN,
    ("PURGING", "STOP"): ("PURGING", ("ARM_GRACE",)),
    ("PURGING", "GRACE_OVER"): _KILL,
    ("PURGING", "KILL"): _KILL,
    ("PURGING", "ORPHANED"): _KILL,
    ("PURGING", "ORPHANED_WITH_GRACE"): ("PURGING", ("ARM_GRACE",)),
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
    ("KILLING", "ORPHANED_WITH_GRACE"): ("KILLING", ()),
    ("KILLING", "HELPER_LOST"): ("KILLING", ()),
    ("DRAINING", "START"): ("DRAINING", ("REFUSE",)),
    ("DRAINING", "STOP"): ("DRAINING", ()),
    ("DRAINING", "KILL"): ("DRAINING", ()),
    ("DRAINING", "DRAINED"): _END,
    ("DRAINING", "DRAIN_OVER"): ("ENDED", ("ABANDON_LOGS", "REPORT_END")),
    ("DRAINING", "ORPHANED"): _GO,
    ("DRAINING", "ORPHANED_WITH_GRACE"): _GO,
    ("DRAINING", "HELPER_LOST"): ("DRAINING", ()),
    ("ENDED", "START"): ("ENDED", ("REFUSE",)),
    ("ENDED", "STOP"): ("ENDED", ()),
    ("ENDED", "KILL"): ("ENDED", ()),
    ("ENDED", "REPORTED"): _GO,
    ("ENDED", "ORPHANED"): _GO,
    ("ENDED", "ORPHANED_WITH_GRACE"): _GO,
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
        raise LookupError(f"a group that is {state} cannot see {event}") from None
