"""What a scheduler tells of the machines of a job, in the environment of what it starts. Reads it; connects to nothing.

Slurm tells all that is needed in each step of several nodes, the nodes by a hostlist expression: ``gpu-[001-004,7]``.
Open MPI's mpirun, and Hydra's, tell how many processes there are and which one this is, and not where rank 0 is.
Kubernetes tells an Indexed Job's pod its index, but not how many there are: its manifest sets the options' variables
(``PHALANX_NNODES``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from phalanx._base.text import how_many
from phalanx._run.worker_env import STEP, step_of

MOST_HOSTS = 65536
"""Of an expression: Slurm has no more nodes."""

_MOST_TEXT = 1 << 17
_MOST_DIGITS = 18
_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")  # a name, with brackets in it
_RANGE = re.compile(rf"([0-9]{{1,{_MOST_DIGITS}}})(?:-([0-9]{{1,{_MOST_DIGITS}}}))?")


def hosts(text: str) -> list[str]:
    """Return the names of an expression, in its order: 1 to `MOST_HOSTS`.

    Brackets hold numbers and ranges of numbers, with the first one's leading zeros. Of several brackets in a name, the
    last one counts fastest. Raises ValueError: it is none, or has more names.

    >>> hosts("n[1-3,07],gpu-[09-10]x[1-2]")
    ['n1', 'n2', 'n3', 'n07', 'gpu-09x1', 'gpu-09x2', 'gpu-10x1', 'gpu-10x2']
    """
    if len(text) > _MOST_TEXT:
        msg = f"expected a list of hosts of at most {_MOST_TEXT} characters, got {len(text)}"
        raise ValueError(msg)
    found: list[str] = []
    at = 0
    while True:
        item = _ITEM.match(text, at)
        if item is None or text[item.end() : item.end() + 1] not in ("", ","):
            raise _unreadable(text)
        found.extend(itertools.islice(_names(item[0], text), MOST_HOSTS + 1 - len(found)))
        if len(found) > MOST_HOSTS:
            raise _too_many(text)
        if item.end() == len(text):
            return found
        at = item.end() + 1


def _names(item: str, text: str) -> Iterator[str]:
    """Yield the names of what stands between two commas."""
    parts = re.split(r"\[([^\[\]]*)\]", item)  # every second one was in brackets
    groups: list[list[str]] = []
    count = 1
    for part in parts[1::2]:
        groups.append(list(itertools.islice(_numbers(part, text), MOST_HOSTS + 1)))
        count *= len(groups[-1])
        if count > MOST_HOSTS:
            raise _too_many(text)
    for numbers in itertools.product(*groups):
        yield parts[0] + "".join(itertools.chain.from_iterable(zip(numbers, parts[2::2], strict=True)))


def _numbers(group: str, text: str) -> Iterator[str]:
    """Yield the numbers of a bracket."""
    for part in group.split(","):
        found = _RANGE.fullmatch(part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise _unreadable(text)
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield f"{number:0{len(found[1])}d}"


def _too_many(text: str) -> ValueError:
    return ValueError(f"expected at most {MOST_HOSTS} hosts, and {text[:60]!r} has more")


def _unreadable(text: str) -> ValueError:
    return ValueError(f"expected a list of hosts, like n[1-3,07],gpu-[001-004], got {text[:60]!r}")


PORTS = range(63002, 65535, 2)
"""Where rank 0 of a job listens; its agent does one port further. They are above those that Linux hands out by itself
(32768 to 60999), and above the ports that sites often give to srun (60001 to 63000)."""

_MOST_NUMBER = 1 << 32
_STEP_STRIDE, _RESTART_STRIDE = 314, 1009
"""How far apart the ports of a job's steps, and of its restarts, are. Both have no factor in common with the number of
`PORTS`, so any two steps of a job have different ports, and so have two jobs whose ids are near."""


class Allocation(NamedTuple):
    """The machines of a job of several, and which of them this is.

    Attributes:
        name: Who says so: "Slurm", "Open MPI" or "Hydra".
        nodes: How many there are, 2 or more.
        node_rank: Which one this is, from 0.
        host: Where rank 0 is; "": the scheduler does not tell, and ``--master-addr`` has to.
        job: What this run of the job is called, the same on all its machines and on none of another; "": the scheduler
            tells nothing of the kind, and ``--run-id`` has to.
        port: A port of `PORTS` that follows from ``job``; 0: there is none, and ``--master-port`` has to tell.
        why: Which variables say so, for a message.
    """

    name: str
    nodes: int
    node_rank: int
    host: str
    job: str
    port: int
    why: str

    def port_of(self, run_id: str | None) -> int:
        """Return the port of a run: `port`, or for one of another name in the same step another one.

        >>> step = Allocation("Slurm", 2, 0, "n1", "slurm-7.0", 63016, "")
        >>> step.port_of(None), step.port_of("a") != step.port_of("b")
        (63016, True)
        """
        if not self.port or not run_id or run_id == self.job:
            return self.port
        import zlib

        return PORTS[(PORTS.index(self.port) + zlib.crc32(run_id.encode("utf-8", "replace"))) % len(PORTS)]

    @property
    def missing(self) -> tuple[str, ...]:
        """The options that are needed beside what the scheduler tells.

        >>> Allocation("Open MPI", 2, 0, "", "openmpi-77", 63002, "").missing
        ('--master-addr',)
        """
        options = {"--master-addr": self.host, "--run-id": self.job, "--master-port": self.port}
        return tuple(option for option, found in options.items() if not found)


def found(environ: Mapping[str, str]) -> Allocation | None:
    """Return what a scheduler tells of this job's machines.

    None: no scheduler tells of several. That is so in a Slurm batch script outside of ``srun``, in an allocation or a
    step of one node, and in a worker of a launcher in the same step: a launcher in a worker is on its own.

    Whoever starts the processes comes first: mpirun in a job of Slurm is mpirun's.

    Raises ValueError, with a sentence: several processes were started on each of several machines, or the variables
    are not of one step (``sbatch`` in a step hands its variables on to a job that is not in it).

    >>> found({}) is None
    True
    >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}
    >>> found({**step, "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[07-08]"})[:6]
    ('Slurm', 2, 1, 'n07', 'slurm-7.0', 63016)
    """
    if environ.get(STEP) and environ[STEP] == step_of(environ):
        return None
    return _open_mpi(environ) or _hydra(environ) or _slurm(environ)


def _slurm(environ: Mapping[str, str]) -> Allocation | None:
    """Return what Slurm tells in a step. Raises ValueError."""
    if not {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES"} <= environ.keys():
        return None
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", MOST_HOSTS)
    if nodes <= 1 or environ.get("SLURM_JOB_NUM_NODES") == "1":
        return None
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):  # the step's own in a step, and the job's in a batch script
        if name in environ:
            _check_not_stale(environ, name, nodes)
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks != nodes:
        raise ValueError(_several(f"step {job}.{step} of Slurm", tasks, nodes, "srun --ntasks-per-node=1"))
    rank, text = _number(environ, "SLURM_NODEID"), _needed(environ, "SLURM_STEP_NODELIST")
    try:
        names = hosts(text)
    except ValueError as error:
        msg = f"SLURM_STEP_NODELIST: {error}"
        raise ValueError(msg) from None
    if len(names) != nodes or rank >= nodes:
        msg = (
            f"SLURM_STEP_NODELIST={_short(text)} has {how_many(len(names), 'node')}, SLURM_STEP_NUM_NODES is {nodes}, "
            f"and SLURM_NODEID is {rank}: they are not of one step; {_REMEDY}"
        )
        raise ValueError(msg)
    if (here := environ.get("SLURMD_NODENAME", names[rank])) != names[rank]:
        msg = (
            f"this is node {here} (SLURMD_NODENAME), and node {rank} of SLURM_STEP_NODELIST={_short(text)} is "
            f"{names[rank]}: they are not of one step; {_REMEDY}"
        )
        raise ValueError(msg)
    restarts = _number(environ, "SLURM_RESTART_COUNT") if environ.get("SLURM_RESTART_COUNT") else 0
    return Allocation(
        "Slurm",
        nodes,
        rank,
        names[0],
        f"slurm-{job}.{step}" + (f"-restart{restarts}" if restarts else ""),
        PORTS[(job + _STEP_STRIDE * step + _RESTART_STRIDE * restarts) % len(PORTS)],
        f"SLURM_STEP_NUM_NODES={nodes}, SLURM_NODEID={rank}, SLURM_STEP_NODELIST={_short(text)}",
    )


_REMEDY = "start it with srun, or say --standalone for a run of this machine alone"


def _check_not_stale(environ: Mapping[str, str], name: str, nodes: int) -> None:
    """Refuse a step's variables in a job with another number of nodes than it can have. Raises ValueError."""
    count = _number(environ, name, MOST_HOSTS)
    if count < nodes or (name == "SLURM_NNODES" and count != nodes):
        msg = (
            f"SLURM_STEP_NUM_NODES is {nodes}, and {name} is {count}: they are not of one step (sbatch in a step hands "
            f"on that step's variables); {_REMEDY}"
        )
        raise ValueError(msg)


def _open_mpi(environ: Mapping[str, str]) -> Allocation | None:
    """Return what Open MPI's mpirun tells, version 4 or 5. Raises ValueError."""
    if not {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"} <= environ.keys():
        return None
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    job = re.sub(r"[^A-Za-z0-9.-]+", "-", job[:64])  # a run's name has no other characters
    found = _ranks(environ, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
                   "mpirun --map-by ppr:1:node")  # fmt: skip
    return found and _of_mpi("Open MPI", f"openmpi-{job}" if job else "", *found)


def _hydra(environ: Mapping[str, str]) -> Allocation | None:
    """Return what Hydra's mpiexec (of MPICH) tells. Raises ValueError.

    Other launchers set ``PMI_RANK`` and ``PMI_SIZE``, too (srun does with ``--mpi=pmi2``). Hydra tells how many there
    are on this machine.
    """
    if not {"PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"} <= environ.keys():
        return None
    found = _ranks(environ, "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "mpiexec -ppn 1")
    return found and _of_mpi("Hydra", "", *found)


def _ranks(environ: Mapping[str, str], size: str, rank: str, local: str, once: str) -> tuple[int, int, str] | None:
    """Return the number of machines, which one this is, and what says so; None: there is one. Raises ValueError."""
    nodes, own, here = _number(environ, size), _number(environ, rank), _number(environ, local)
    if nodes <= 1 or here == nodes:
        return None
    if here != 1:
        raise ValueError(_several(once.partition(" ")[0], nodes, None, once))
    if own >= nodes or nodes > MOST_HOSTS:
        msg = f"{rank} is {own}, and {size} is {nodes}: expected less than that, and {MOST_HOSTS} at most"
        raise ValueError(msg)
    return nodes, own, f"{size}={nodes}, {rank}={own}"


def _of_mpi(name: str, job: str, nodes: int, rank: int, why: str) -> Allocation:
    import zlib

    return Allocation(name, nodes, rank, "", job, PORTS[zlib.crc32(job.encode()) % len(PORTS)] if job else 0, why)


def _several(who: str, tasks: int, nodes: int | None, once: str) -> str:
    where = how_many(nodes, "node") if nodes else "several machines, and more than one on this"
    return (
        f"{who} has {tasks} processes on {where}; phalanx run is started once on each, and starts the workers itself "
        f"(--nproc-per-node): {once}. With --standalone, each process is a run of its own"
    )


def _needed(environ: Mapping[str, str], name: str) -> str:
    """Return a variable that belongs to others which are there. Raises ValueError."""
    if not environ.get(name):
        msg = f"{name} is not set, and variables beside it are; {_REMEDY}"
        raise ValueError(msg)
    return environ[name]


def _number(environ: Mapping[str, str], name: str, most: int = _MOST_NUMBER) -> int:
    """Return the number that a variable holds. Raises ValueError, which names it."""
    text = _needed(environ, name)
    if not (re.fullmatch(r"[0-9]{1,10}", text) and int(text) <= most):
        msg = f"{name}: expected a number, 0 to {most}, got {_short(text)!r}"
        raise ValueError(msg)
    return int(text)


def _short(text: str) -> str:
    """Return a text as messages show it."""
    return text if len(text) <= 60 else f"{text[:59]}…"  # noqa: PLR2004 - a line's worth
