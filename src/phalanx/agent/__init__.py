"""Agents start the workers of one machine, and start them again: names of ``torch.distributed.elastic.agent.server``.

`LocalElasticAgent` runs a function or a program in processes of this machine. `SimpleElasticAgent` is the base of
agents whose workers are of another kind.

>>> from phalanx.multiprocessing import DefaultLogsSpecs
>>> spec = WorkerSpec("greeter", 2, None, entrypoint=str.upper, args=("hello",), max_restarts=2)
>>> result = LocalElasticAgent(spec, DefaultLogsSpecs()).run()
>>> result.state.value, result.return_values
('SUCCEEDED', {0: 'HELLO', 1: 'HELLO'})
"""

from __future__ import annotations

from phalanx._group.restart_policy import RestartPolicy
from phalanx._run.services import ENABLE_FILE_TIMER_ENV as TORCHELASTIC_ENABLE_FILE_TIMER
from phalanx._run.services import TIMER_FILE_ENV as TORCHELASTIC_TIMER_FILE
from phalanx.agent._local import LocalElasticAgent
from phalanx.agent._simple import ElasticAgent, SimpleElasticAgent
from phalanx.agent._spec import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_TIMER_FILE",
    "ElasticAgent",
    "LocalElasticAgent",
    "RestartPolicy",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]
