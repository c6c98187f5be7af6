"""The life of an agent, as a table. Pure: it decides, and acts on nothing. `attempts` carries it out.

An agent starts a group, waits for its end, and starts it again for as long as the restart policy allows. Whether a
failure is a RETRY or a GIVE_UP is decided by `restart_policy`. A pair that is absent is a mistake in the agent: `step`
raises.
"""

from __future__ import annotations

STATES = {
    "NEW": "nothing has been started",
    "STARTING": "a group is being started",
    "RUNNING": "the group runs",
    "WAITING": "the group has failed and is gone; the delay before the next attempt runs",
    "RESTARTING": "the group is being stopped, for another attempt to follow",
    "STOPPING": "the group is being stopped, and no other follows",
    "SUCCEEDED": "every worker of the last attempt has succeeded",
    "FAILED": "the last attempt has failed, and no other follows",
    "STOPPED": "a stop was asked for, and no worker is left",
}

TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")
"""The states in which no worker is left, and none is started any more."""

EVENTS = {
    "START": "the first attempt is asked for",
    "STARTED": "every worker is up",
    "ALL_SUCCEEDED": "the group is gone, and every worker has succeeded",
    "RETRY": "the group has failed or could not be started, none of it is left, and the policy allows another attempt",
    "GIVE_UP": "the group has failed or could not be started, and the policy allows no other attempt",
    "GONE": "the group that was to be stopped is gone",
    "DELAY_OVER": "the delay before the next attempt is over",
    "RESTART": "another attempt is asked for, though the group has not failed",
    "STOP": "an end is asked for",
}

ACTIONS = {
    "START_GROUP": "start the workers of the next attempt",
    "STOP_GROUP": "end the workers within the grace period that was asked for",
    "ARM_DELAY": "start the delay before the next attempt",
}

_START = ("STARTING", ("START_GROUP",))
_DELAY = ("WAITING", ("ARM_DELAY",))
_STOP = ("STOPPING", ("STOP_GROUP",))
_RESTART = ("RESTARTING", ("STOP_GROUP",))
_SUCCEED: tuple[str, tuple[str, ...]] = ("SUCCEEDED", ())
_FAIL: tuple[str, tuple[str, ...]] = ("FAILED", ())
_END: tuple[str, tuple[str, ...]] = ("STOPPED", ())

TABLE: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("NEW", "START"): _START,
    ("NEW", "RESTART"): ("NEW", ()),
    ("NEW", "STOP"): _END,
    ("STARTING", "STARTED"): ("RUNNING", ()),
    ("STARTING", "RETRY"): _DELAY,
    ("STARTING", "GIVE_UP"): _FAIL,
    ("STARTING", "RESTART"): _RESTART,
    ("STARTING", "STOP"): _STOP,
    ("RUNNING", "ALL_SUCCEEDED"): _SUCCEED,
    ("RUNNING", "RETRY"): _DELAY,
    ("RUNNING", "GIVE_UP"): _FAIL,
    ("RUNNING", "GONE"): _END,
    ("RUNNING", "RESTART"): _RESTART,
    ("RUNNING", "STOP"): _STOP,
    ("WAITING", "DELAY_OVER"): _START,
    ("WAITING", "RESTART"): ("WAITING", ()),
    ("WAITING", "STOP"): _END,
    ("RESTARTING", "ALL_SUCCEEDED"): _SUCCEED,
    ("RESTARTING", "GIVE_UP"): _FAIL,  # a worker has outlived SIGKILL
    ("RESTARTING", "GONE"): _START,
    ("RESTARTING", "RESTART"): ("RESTARTING", ()),
    ("RESTARTING", "STOP"): _STOP,
    ("STOPPING", "GIVE_UP"): _FAIL,  # it had failed before the stop, and no other attempt would have followed
    ("STOPPING", "GONE"): _END,
    ("STOPPING", "RESTART"): ("STOPPING", ()),
    ("STOPPING", "STOP"): _STOP,
    **{(state, request): (state, ()) for state in TERMINAL for request in ("RESTART", "STOP")},
}


def step(state: str, event: str) -> tuple[str, tuple[str, ...]]:
    """What follows when ``event`` happens to an agent in ``state``. Raises LookupError for a pair that cannot be.

    >>> step("RUNNING", "RETRY")
    ('WAITING', ('ARM_DELAY',))
    """
    try:
        return TABLE[state, event]
    except KeyError:
        msg = f"an agent that is {state} cannot see {event}"
        raise LookupError(msg) from None
