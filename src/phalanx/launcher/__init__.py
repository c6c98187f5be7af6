"""Runs a function or a program on every worker of a job, with restarts: the names of ``torch.distributed.launcher``.

`phalanx.agent` runs it: on one machine; or on each of several, which have the same config, by a
`phalanx.rendezvous.ManyMachinesRendezvous`.

>>> from phalanx.launcher import LaunchConfig, elastic_launch
>>> config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0")
>>> elastic_launch(config, pow)(2, 5)
{0: 32, 1: 32}
"""

from __future__ import annotations

from phalanx.launcher._launch import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
