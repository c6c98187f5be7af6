"""What is read of a scheduler's environment: environments that Slurm 22.05, Open MPI 4.1 and MPICH 4.0 made.

Each was printed by `env` in what they started on three nodes; only the lines that say where one is are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx._run import worker_env
from phalanx._run.scheduler import MOST_HOSTS, PORTS, Allocation, found, hosts

Environment = dict[str, str]


def env(text: str) -> Environment:
    """An environment from what `env` printed."""
    return dict(word.split("=", 1) for word in text.split())


BATCH = env("""
    SLURMD_NODENAME=n1 SLURM_JOB_ID=2 SLURM_JOB_NODELIST=n[1-3] SLURM_JOB_NUM_NODES=3 SLURM_LOCALID=0 SLURM_NNODES=3
    SLURM_NODEID=0 SLURM_NODELIST=n[1-3] SLURM_NTASKS=3 SLURM_NTASKS_PER_NODE=1 SLURM_PROCID=0
    SLURM_TASKS_PER_NODE=1(x3) SLURM_TASK_PID=6758
""")
"""Of a script of three nodes, `sbatch -N3 --ntasks-per-node=1`."""

STEP = env("""
    SLURMD_NODENAME=n2 SLURM_JOB_ID=2 SLURM_JOB_NODELIST=n[1-3] SLURM_JOB_NUM_NODES=3
    SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 SLURM_LOCALID=0 SLURM_NNODES=3 SLURM_NODEID=1 SLURM_NODELIST=n[1-3]
    SLURM_NTASKS=3 SLURM_NTASKS_PER_NODE=1 SLURM_PROCID=1 SLURM_STEPID=0 SLURM_STEP_ID=0
    SLURM_STEP_LAUNCHER_PORT=39165 SLURM_STEP_NODELIST=n[1-3] SLURM_STEP_NUM_NODES=3 SLURM_STEP_NUM_TASKS=3
    SLURM_STEP_TASKS_PER_NODE=1(x3) SLURM_TASKS_PER_NODE=1(x3) SLURM_TASK_PID=6797
""")
"""Of the second node in `srun` of that script."""

PART = {**STEP, "SLURMD_NODENAME": "n3", "SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_STEPID": "3",
        "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "n[2-3]", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_TASKS_PER_NODE": "1(x2)"}  # fmt: skip
"""Of the second node in `srun -N2 -n2 -r1` of that script: a step of its second and third node."""

ALONE = {**STEP, "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_STEP_ID": "2",
         "SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1",
         "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "1"}  # fmt: skip
"""Of `srun -N1 -n1 -r1` of that script."""

SEVERAL = env("""
    SLURMD_NODENAME=n1 SLURM_JOB_ID=3 SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=3 SLURM_NNODES=2 SLURM_NODEID=0
    SLURM_NODELIST=n[1-2] SLURM_NTASKS=5 SLURM_PROCID=3 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2]
    SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=5 SLURM_STEP_TASKS_PER_NODE=4,1
""")
"""Of the fourth task in `srun -N2 -n5`."""

ARBITRARY = env("""
    SLURMD_NODENAME=n3 SLURM_JOB_ID=22 SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2 SLURM_NODEID=1 SLURM_PROCID=0
    SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1,3] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2
""")
"""Of the first task in `srun -N2 -n2 -m arbitrary` with a file of hosts that begins with n3: the second node."""

HETEROGENEOUS = env("""
    SLURMD_NODENAME=n3 SLURM_HET_SIZE=2 SLURM_JOB_ID=6 SLURM_JOB_ID_HET_GROUP_0=6 SLURM_JOB_ID_HET_GROUP_1=7
    SLURM_JOB_NUM_NODES=3 SLURM_NNODES=3 SLURM_NODEID=2 SLURM_PROCID=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-3]
    SLURM_STEP_NUM_NODES=3 SLURM_STEP_NUM_TASKS=3
""")
"""Of the last node in `srun --het-group=0,1` of `salloc -N1 : -N2`."""

STALE = {"SLURM_STEPID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "2",
         "SLURM_STEP_NUM_TASKS": "2"}  # fmt: skip
"""What a batch script has of the step of two nodes in which `sbatch` was called."""

MPIRUN = env("""
    OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_NODE_RANK=0 OMPI_COMM_WORLD_RANK=1
    OMPI_COMM_WORLD_SIZE=3 OMPI_MCA_ess_base_jobid=785842177 PMIX_NAMESPACE=785842177 PMIX_RANK=1
""")
"""Of the second process in `mpirun --map-by ppr:1:node` on three nodes."""

MPIEXEC = env("""
    MPI_LOCALNRANKS=1 MPI_LOCALRANKID=0 PMI_FD=6 PMI_RANK=1 PMI_SIZE=3
""")
"""Of the second process in `mpiexec -ppn 1 -n 3` of Hydra."""


def test_a_step_of_slurm() -> None:
    allocation = found(STEP)
    assert allocation == Allocation(
        "Slurm", 3, 1, "n1", "slurm-2.0", PORTS[2], "SLURM_STEP_NUM_NODES=3, SLURM_NODEID=1, SLURM_STEP_NODELIST=n[1-3]"
    )
    assert allocation is not None
    assert allocation.missing == ()


@pytest.mark.parametrize(
    "environ,expected",
    [(PART, (2, 1, "n2")), (ARBITRARY, (2, 1, "n1")), (HETEROGENEOUS, (3, 2, "n1"))],
    ids=["part of a job", "arbitrary order", "heterogeneous"],
)
def test_steps_whose_nodes_are_not_simply_the_jobs(environ: Environment, expected: tuple[int, int, str]) -> None:
    allocation = found(environ)
    assert allocation is not None
    assert (allocation.nodes, allocation.node_rank, allocation.host) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,
        ALONE,
        {**SEVERAL, "SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1"},
        {**BATCH, **STALE, "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1"},
        {**STEP, "PHALANX_STEP": "slurm-2.0", "TORCHELASTIC_RUN_ID": "night7"},
        {**MPIRUN, "PHALANX_STEP": "openmpi-785842177"},
        {**MPIEXEC, "PHALANX_STEP": "hydra-1-3"},
        {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
        {"PMI_RANK": "1", "PMI_SIZE": "3"},
        {"JOB_COMPLETION_INDEX": "1"},
    ],
    ids=[
        *("nothing", "batch script", "step of one node", "several tasks on one node", "one node, from within a step"),
        *("worker", "worker of mpirun", "worker of mpiexec", "mpirun on one node", "another PMI", "Kubernetes"),
    ],
)
def test_one_machine(environ: Environment) -> None:
    assert found(environ) is None


def test_a_requeued_job_another_step_and_another_job_differ() -> None:
    runs = [
        found(STEP | changes)
        for changes in (
            {},
            {"SLURM_RESTART_COUNT": "0"},
            {"SLURM_RESTART_COUNT": "1"},
            {"SLURM_STEP_ID": "1"},
            {"SLURM_JOB_ID": "3"},
        )
    ]
    assert len({run.job for run in runs if run}) == len({run.port for run in runs if run}) == 4
    assert runs[2] is not None
    assert runs[2].job == "slurm-2.0-restart1"


def test_a_worker_of_another_run_is_in_this_job() -> None:
    """One that resubmits its job hands its own run's id on."""
    for step in ("slurm-1.0", "slurm-2.1"):
        assert found({**STEP, "TORCHELASTIC_RUN_ID": "slurm-1.0", "PHALANX_STEP": step}) == found(STEP)


def test_a_worker_finds_the_step_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_env.STEP not in worker_env.worker_env(0, 1, role="", run_id="", master_addr="", master_port=0)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    env = worker_env.worker_env(0, 1, role="", run_id="night7", master_addr="", master_port=0)
    assert found(STEP | env) is None


@pytest.mark.parametrize(
    "environ,sentence",
    [
        (SEVERAL, "step 3.0 of Slurm has 5 processes on 2 nodes; .*: srun --ntasks-per-node=1. With --standalone, "),
        ({**BATCH, **STALE}, "SLURM_STEP_NUM_NODES is 2, and SLURM_NNODES is 3: they are not of one step .*--standalo"),
        ({**BATCH, **STALE, "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURMD_NODENAME": "n3"},
         r"this is node n3 \(SLURMD_NODENAME\), and node 0 of SLURM_STEP_NODELIST=n\[1-2\] is n1"),
        ({**STEP, "SLURM_STEP_NODELIST": "n[1-2]"}, "has 2 nodes, SLURM_STEP_NUM_NODES is 3, and SLURM_NODEID is 1"),
        ({**STEP, "SLURM_NODEID": "3"}, "has 3 nodes, SLURM_STEP_NUM_NODES is 3, and SLURM_NODEID is 3"),
        ({**STEP, "SLURM_STEP_NODELIST": "n[1-"}, r"SLURM_STEP_NODELIST: expected a list of hosts, .*, got 'n\[1-'"),
        ({**STEP, "SLURM_NODEID": "-1"}, "SLURM_NODEID: expected a number, 0 to [0-9]+, got '-1'"),
        ({**STEP, "SLURM_STEP_NUM_NODES": "9" * 5000}, "SLURM_STEP_NUM_NODES: expected a number, .*, got '9{59}…'"),
        ({name: text for name, text in STEP.items() if name != "SLURM_NODEID"}, "SLURM_NODEID is not set"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "mpirun has 3 processes on .*: mpirun --map-by ppr:1:node"),
        ({**MPIEXEC, "MPI_LOCALNRANKS": "2"}, "mpiexec has 3 processes on .*: mpiexec -ppn 1"),
        ({**MPIEXEC, "PMI_RANK": "3"}, "PMI_RANK is 3, and PMI_SIZE is 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_a_sentence(environ: Environment, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        found(environ)


def test_what_mpirun_does_not_tell() -> None:
    first, again = found(MPIRUN), found({**MPIRUN, "OMPI_COMM_WORLD_RANK": "0"})
    assert first is not None
    assert again is not None
    assert (first.nodes, first.node_rank, again.node_rank, first.job) == (3, 1, 0, "openmpi-785842177")
    assert first.missing == ("--master-addr",)
    assert first.port == again.port
    assert first.port in PORTS


def test_what_mpiexec_does_not_tell() -> None:
    allocation = found(MPIEXEC)
    assert allocation is not None
    assert allocation[:6] == ("Hydra", 3, 1, "", "", 0)
    assert allocation.missing == ("--master-addr", "--run-id", "--master-port")


def test_mpirun_in_a_job_of_slurm_is_mpiruns() -> None:
    """It starts its own agents as a step: one task a node, however many processes it starts itself."""
    assert found({**STEP, **MPIRUN}) == found(MPIRUN)
    with pytest.raises(ValueError, match="mpiexec -ppn 1"):
        found({**PART, **MPIEXEC, "MPI_LOCALNRANKS": "2", "PMI_SIZE": "4"})


def test_steps_of_a_job_and_near_jobs_have_their_own_ports() -> None:
    def port(job: int, step: int = 0, restarts: int = 0) -> int:
        ids = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_RESTART_COUNT": str(restarts)}
        allocation = found(STEP | ids)
        assert allocation is not None
        return allocation.port

    for ports in ([port(7, step) for step in range(400)], [port(7, 0, again) for again in range(400)],
                  [port(job) for job in range(4_000_000, 4_000_400)]):  # fmt: skip
        assert len(set(ports)) == len(ports)
        assert set(ports) <= set(PORTS)


NAMES = st.sampled_from(["n", "gpu-", "rack1-", "x", "a.b-c", "c2n"])
NUMBERS = st.integers(0, 200).map(str) | st.integers(0, 200).map(lambda number: f"{number:04d}")


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A bracket, and the numbers in it."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        first, more = draw(NUMBERS), draw(st.integers(0, 5))
        texts.append(f"{first}-{int(first) + more}" if more else first)
        numbers += [f"{int(first) + step:0{len(first)}d}" for step in range(more + 1)]
    return f"[{','.join(texts)}]", numbers


@st.composite
def items(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A name with brackets, and the names that it stands for: as Slurm has it, nothing follows the last bracket."""
    parts: list[tuple[str, list[str]]] = []
    for _ in range(draw(st.integers(0, 2))):
        name = draw(NAMES)
        parts += [(name, [name]), draw(ranges())]
    if not parts:
        name = draw(NAMES)
        parts = [(name, [name])]
    return "".join(text for text, _ in parts), [
        "".join(each) for each in itertools.product(*(names for _, names in parts))
    ]


LISTS = st.lists(items(), min_size=1, max_size=4)


@settings(max_examples=40)
@given(LISTS)
def test_a_list_of_hosts_stands_for_its_names(parts: Sequence[tuple[str, list[str]]]) -> None:
    assert hosts(",".join(text for text, _ in parts)) == [name for _, names in parts for name in names]


@pytest.mark.long
@given(st.text(alphabet="n[]-,019x ", max_size=30) | st.text(max_size=10))
def test_any_text_is_a_list_of_hosts_or_refused(text: str) -> None:
    try:
        names = hosts(text)
    except ValueError:
        return
    assert names
    assert not any(set(name) & set("[], ") for name in names)


@pytest.mark.parametrize(
    "text",
    ["", "a,,b", "a,", "n[3-1]", "n[]", "n[1-3", "n1]", "n[a]", "n[1-]", "a b", "[[1]]", f"n[1-{MOST_HOSTS + 1}]",
     "n" + "[0-99]" * 20_000, f"n[0-{'9' * 30}]", "x" * (1 << 18)],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_what_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected .* hosts"):
        hosts(text)


def test_as_many_hosts_as_there_can_be() -> None:
    half = math.isqrt(MOST_HOSTS)
    assert len(hosts(f"n[1-{half}]x[1-{half}]")) == MOST_HOSTS


def test_the_names_that_slurm_shows() -> None:
    """What `scontrol show hostnames` printed."""
    assert hosts("n[1-3,07],gpu-[001-002]x[1-2]") == [
        *("n1", "n2", "n3", "n07", "gpu-001x1", "gpu-001x2", "gpu-002x1", "gpu-002x2")
    ]
    assert hosts("n[9-11],m[09-10],login") == ["n9", "n10", "n11", "m09", "m10", "login"]
    assert hosts("n[1-2][3-4],n[99-0100],n[001-02]") == ["n13", "n14", "n23", "n24", "n99", "n100", "n001", "n002"]
