"""The life of a node in a job, as a table. Pure: it decides, and acts on nothing. `node` carries it out.

A node enters the job, takes part in one generation after another, and leaves when the job is over. An absent pair is a
mistake in the node: `step` raises.
"""

from __future__ import annotations

STATES = {
    "WAITING": "no worker runs here; the node waits for a generation in which it takes part",
    "RUNNING": "the workers of a generation run, or are being started",
    "STOPPING": "the workers of a generation are being ended; the node goes on",
    "DONE": "all workers here have succeeded; those of other nodes are waited for",
    "CLOSING": "the workers are being ended; the node goes on with nothing",
    "LEAVING": "no worker runs here, and none will; what the workers of all nodes have left is read",
    "LEFT": "the node has no part in the job any more",
}

EVENTS = {
    "FORMED": "the job's generation runs, and this node takes part",
    "MISSED": "the same, but the generation was ended before the node had begun",
    "FAILED": "a worker here has failed, or the workers could not be started",
    "SUCCEEDED": "the workers here are gone; all have succeeded",
    "GONE": "the workers here are gone, or none was started",
    "ENDED": "the generation that runs here has been ended, or the job has gone on without it",
    "OVER": "the job is over",
    "BARRIER": "the others have been waited for long enough",
    "LEAVE": "this node is to have no part in the job any more",
    "READ": "what the workers have left is read, or cannot be",
}

ACTIONS = {
    "START": "start the workers of the generation",
    "STOP": "end the workers within the grace period",
    "TELL": "tell the other nodes why the generation is to end",
    "ENTER": "write the node's entry: how far it is",
    "READ": "read what the workers of all nodes have left",
    "FINISH": "end",
}

TABLE: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("WAITING", "FORMED"): ("RUNNING", ("START",)),
    ("WAITING", "MISSED"): ("WAITING", ("ENTER",)),
    ("WAITING", "OVER"): ("LEAVING", ("READ",)),
    ("WAITING", "LEAVE"): ("LEFT", ("FINISH",)),
    ("RUNNING", "FAILED"): ("STOPPING", ("TELL",)),  # the group here ends its workers by itself
    ("RUNNING", "SUCCEEDED"): ("DONE", ("ENTER",)),
    ("RUNNING", "GONE"): ("WAITING", ("TELL", "ENTER")),
    ("RUNNING", "ENDED"): ("STOPPING", ("STOP",)),
    ("RUNNING", "OVER"): ("CLOSING", ("STOP",)),
    ("RUNNING", "LEAVE"): ("CLOSING", ("TELL", "STOP")),
    ("STOPPING", "FAILED"): ("STOPPING", ()),
    ("STOPPING", "SUCCEEDED"): ("WAITING", ("ENTER",)),
    ("STOPPING", "GONE"): ("WAITING", ("ENTER",)),
    ("STOPPING", "ENDED"): ("STOPPING", ()),
    ("STOPPING", "OVER"): ("CLOSING", ()),
    ("STOPPING", "LEAVE"): ("CLOSING", ("TELL",)),
    ("DONE", "ENDED"): ("WAITING", ("ENTER",)),
    ("DONE", "OVER"): ("LEAVING", ("READ",)),
    ("DONE", "BARRIER"): ("LEFT", ("FINISH",)),
    ("DONE", "LEAVE"): ("LEFT", ("FINISH",)),
    ("CLOSING", "FAILED"): ("CLOSING", ()),
    ("CLOSING", "SUCCEEDED"): ("LEAVING", ("READ",)),
    ("CLOSING", "GONE"): ("LEAVING", ("READ",)),
    ("CLOSING", "ENDED"): ("CLOSING", ()),
    ("CLOSING", "OVER"): ("CLOSING", ()),
    ("CLOSING", "LEAVE"): ("CLOSING", ()),
    ("LEAVING", "READ"): ("LEFT", ("FINISH",)),
    ("LEAVING", "LEAVE"): ("LEFT", ("FINISH",)),
    ("LEAVING", "OVER"): ("LEAVING", ()),
    **{("LEFT", event): ("LEFT", ()) for event in EVENTS},
}


def step(state: str, event: str) -> tuple[str, tuple[str, ...]]:
    """Return what follows when ``event`` happens to a node in ``state``. Raises LookupError: that cannot be.

    >>> step("RUNNING", "ENDED")
    ('STOPPING', ('STOP',))
    """
    try:
        return TABLE[state, event]
    except KeyError:
        msg = f"a node that is {state} cannot see {event}"
        raise LookupError(msg) from None
