"""What the events of an agent and of its workers consist of, with the names that torch's have. Posts nothing."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "torchelastic.worker.status"
_MS = 1000


class WorkerFacts(NamedTuple):
    """A worker, for its event."""

    id: str
    global_rank: int
    local_rank: int
    role_rank: int
    role_world_size: int
    exit_code: int | None = None
    pid: int | None = None


def metadata(
    state: str,
    *,
    run_id: str,
    role: str,
    entry_point: str,
    backend: str,
    group_rank: int | None,
    group_world_size: int | None,
    total: float,
    restarts: int,
    worker: WorkerFacts | None = None,
    raw_error: str | None = None,
    duration: float | None = None,
) -> dict[str, Any]:
    """Return the metadata of the event ``NAME.state``: of the agent, or of a ``worker``.

    Args:
        state: What has become of it, like "START".
        run_id: The id of the run.
        role: What the workers are called.
        entry_point: What they run.
        backend: The name of the rendezvous' kind.
        group_rank: The machine's rank.
        group_world_size: How many machines there are.
        total: Seconds since the agent's start.
        restarts: How many restarts there were.
        worker: The worker; None: the event is the agent's.
        raw_error: What went wrong.
        duration: Seconds that a step of the agent took.
    """
    more: dict[str, Any] = {"group_world_size": group_world_size, "entry_point": os.path.basename(entry_point)}
    if worker is not None:
        more |= {
            "local_rank": [worker.local_rank],
            "role_rank": [worker.role_rank],
            "role_world_size": [worker.role_world_size],
            "exit_code": [worker.exit_code],
            "worker_pid": [worker.pid],
        }
    return {
        "run_id": run_id,
        "global_rank": None if worker is None else worker.global_rank,
        "group_rank": group_rank,
        "worker_id": None if worker is None else worker.id,
        "role": role,
        "hostname": os.uname().nodename,
        "state": state,
        "total_run_time": int(total),
        "rdzv_backend": backend,
        "raw_error": raw_error,
        "metadata": json.dumps(more),
        "agent_restarts": restarts,
        "duration_ms": None if duration is None else duration * _MS,
    }
