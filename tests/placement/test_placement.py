"""Where workers run and within which bounds: the division of literal machines, and real workers that look around.

What a worker finds is what its first instructions see: those of a shell, a script or a function.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import resource
import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from phalanx._base import procfs
from phalanx._placement import devices, topology
from phalanx._placement import placement as placing
from phalanx._placement.topology import Topology, divide, quota_of, read, threads
from phalanx.cli.run import run
from phalanx.multiprocessing import Placement, RunProcsResult, start_processes
from tests.support import workers
from tests.support.command import Place, refused
from tests.support.helpers import wait_gone
from tests.support.workers import limits, look_around, started_script

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.helpers import Ready

METHODS = ("spawn", "forkserver", "fork")
ALLOWED = sorted(os.sched_getaffinity(0))
FIRST, LAST = ALLOWED[0], ALLOWED[-1]
BIND = f"{FIRST};{LAST}"
NICER = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)

pytestmark = pytest.mark.usefixtures("own_temporary_folder")


# --- literal machines


class Machine:
    """A /sys/devices/system with CPUs, as the kernel shows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def root(self) -> str:
        return str(self.folder)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def cores(self, *cores: tuple[int, ...], name: str = "core_cpus_list") -> None:
        for core in cores:
            for cpu in core:
                self.write(f"cpu/cpu{cpu}/topology/{name}", topology.format_list(core) + "\n")

    def nodes(self, *nodes: str) -> None:
        for number, cpus in enumerate(nodes):
            self.write(f"node/node{number}/cpulist", cpus + "\n")
        self.write("node/possible", f"0-{len(nodes) - 1}\n")

    def online(self, cpus: str) -> None:
        self.write("cpu/online", cpus + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "system")


@pytest.fixture
def one_socket(machine: Machine) -> Machine:
    """Four cores of two threads; the siblings are numbered far apart, as PCs have them."""
    machine.cores((0, 4), (1, 5), (2, 6), (3, 7))
    machine.nodes("0-7")
    machine.online("0-7")
    return machine


@pytest.fixture
def two_sockets(machine: Machine) -> Machine:
    """Two sockets of four cores of two threads, with a node each, and a third node of memory alone."""
    machine.cores(*[(core, core + 8) for core in range(8)])
    machine.nodes("0-3,8-11", "4-7,12-15", "")
    machine.online("0-15")
    return machine


def test_siblings_are_one_core(one_socket: Machine) -> None:
    found = read(range(8), one_socket.root)
    assert found.cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found.nodes == ((0, 1, 2, 3, 4, 5, 6, 7),)
    assert divide("core", 2, found) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert divide("core", 3, found) == [(0, 4), (1, 5), (2, 3, 6, 7)]
    assert divide("none", 2, found) == [found.cpus] * 2
    assert divide("numa", 2, found) == [found.cpus] * 2


def test_siblings_side_by_side_and_the_older_file_name(machine: Machine) -> None:
    machine.cores((0, 1), (2, 3), name="thread_siblings_list")
    found = read(range(4), machine.root)
    assert found.cores == ((0, 1), (2, 3))
    assert divide("core", 2, found) == [(0, 1), (2, 3)]


def test_two_sockets(two_sockets: Machine) -> None:
    found = read(range(16), two_sockets.root)
    assert found.nodes == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))  # none for memory alone
    assert divide("core", 8, found) == [(core, core + 8) for core in range(8)]
    assert divide("core", 2, found) == list(found.nodes)
    assert divide("numa", 1, found) == [found.nodes[0]]
    assert divide("numa", 2, found) == list(found.nodes)
    assert divide("numa", 5, found) == [found.nodes[0]] * 3 + [found.nodes[1]] * 2


def test_cores_go_by_node_where_numbers_do_not(machine: Machine) -> None:
    """Machines that deal out numbers in turn: even CPUs on the one socket, odd ones on the other."""
    machine.cores(*[(cpu,) for cpu in range(8)])
    machine.nodes("0,2,4,6", "1,3,5,7")
    found = read(range(8), machine.root)
    assert divide("core", 2, found) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert divide("core", 4, found) == [(0, 2), (4, 6), (1, 3), (5, 7)]


def test_nodes_of_high_numbers_and_in_their_order(machine: Machine) -> None:
    for node in (0, 2, 10):
        machine.write(f"node/node{node}/cpulist", f"{node}\n")
    assert read([0, 2, 10], machine.root).nodes == ((0,), (2,), (10,))


def test_offline_cpus_are_none(one_socket: Machine) -> None:
    one_socket.online("0-2,4-6")
    one_socket.write("cpu/offline", "3,7\n")
    found = read(range(8), one_socket.root)
    assert found.cores == ((0, 4), (1, 5), (2, 6))
    assert found.cpus == (0, 1, 2, 4, 5, 6)


def test_what_the_cpuset_forbids_is_not_there(two_sockets: Machine) -> None:
    """As in a container: /sys shows the whole machine, and the affinity says what is ours."""
    found = read([2, 3, 4, 11, 12], two_sockets.root)
    assert found.cores == ((2,), (3, 11), (4, 12))
    assert found.nodes == ((2, 3, 11), (4, 12))
    assert divide("core", 3, found) == [(2,), (3, 11), (4, 12)]
    assert read([4, 5], two_sockets.root).nodes == ((4, 5),)


@pytest.mark.parametrize("text", ["", "garbage\n", "7-3\n", "0-\n"])
def test_without_a_sys_that_says_anything(machine: Machine, text: str) -> None:
    expected = Topology((0, 1, 5), ((0,), (1,), (5,)), ((0, 1, 5),))
    assert read([5, 0, 1], machine.root) == expected
    for name in ("cpu/online", "cpu/cpu0/topology/core_cpus_list", "node/node0/cpulist"):
        machine.write(name, text)
    assert read([5, 0, 1], machine.root) == expected


def test_a_sys_that_shows_another_machine(machine: Machine) -> None:
    """As in a sandbox that makes up its files: no CPU is lost, and none is in two places."""
    machine.online("64-127")
    machine.nodes("0-1", "1-2")
    machine.write("cpu/cpu0/topology/core_cpus_list", "0-1\n")
    machine.write("cpu/cpu2/topology/core_cpus_list", "1-2\n")
    found = read(range(4), machine.root)
    assert found == Topology((0, 1, 2, 3), ((0, 1), (2,), (3,)), ((0, 1), (2,), (3,)))


def test_this_machine() -> None:
    found = read(ALLOWED)
    assert list(found.cpus) == ALLOWED
    for parts in (found.cores, found.nodes):
        assert sorted(cpu for part in parts for cpu in part) == ALLOWED


def test_fewer_cores_than_ranks_share_in_turn(one_socket: Machine) -> None:
    found = read([0, 4, 1], one_socket.root)
    assert divide("core", 5, found) == [(0, 4), (1,), (0, 4), (1,), (0, 4)]


@pytest.mark.parametrize("how", ["0-3;4-7", "list:0-3;4-7", " 0-3 ; 4,5,6-7 "])
def test_a_list_for_each_rank(one_socket: Machine, how: str) -> None:
    assert divide(how, 2, read(range(8), one_socket.root)) == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize(
    "how,message",
    [("0-3", "'0-3': 1 list for 2 ranks; expected one each"),
     ("0;1;2", "'0;1;2': 3 lists for 2 ranks; expected one each"),
     ("0-3;4-9", "'0-3;4-9': rank 1: CPU 8-9 is not among those that may be used: 0-7"),
     ("0-3;", "'0-3;': rank 1: no CPU; there are: 0-7"),
     ("", "'': rank 0: no CPU; there are: 0-7"),
     ("cores", "rank 0: 'cores' is no CPU and no range of CPUs; expected none, core, numa or a list for each rank"),
     ("0;3-1", "rank 1: '3-1' is no CPU"), ("0;1-", "rank 1: '1-' is no CPU"), ("0;-1", "rank 1: '-1' is no CPU"),
     ("0;٣", "rank 1: '٣' is no CPU"), ("0;1-99999999", "rank 1: '1-99999999' is no CPU")],
)  # fmt: skip
def test_a_list_that_does_not_fit(one_socket: Machine, how: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as error:
        divide(how, 2, read(range(8), one_socket.root))
    assert message in str(error.value)


def test_threads() -> None:
    assert threads([(0, 1, 2, 3), (4, 5)]) == [4, 2]
    assert threads([tuple(range(8))] * 3) == [2, 2, 2]
    assert threads([tuple(range(3))] * 3) == [1, 1, 1]
    assert threads([(0,)] * 3) == [1, 1, 1]
    assert threads([(0, 1, 2, 3)] * 2 + [(4, 5, 6, 7)]) == [2, 2, 4]
    assert threads([tuple(range(64))] * 4, quota=8.0) == [2, 2, 2, 2]
    assert threads([tuple(range(64))] * 4, quota=0.5) == [1, 1, 1, 1]
    assert threads([tuple(range(4))] * 2, quota=100.0) == [2, 2]


# --- the cgroup's quota


def cgroup(root: Path, name: str, **files: str) -> str:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file.replace("_", ".", 1)).write_text(text + "\n")
    return str(folder)


def test_a_quota_of_version_2(tmp_path: Path) -> None:
    leaf = cgroup(tmp_path, "pod/box", cpu_max="max 100000")
    assert quota_of([(str(tmp_path), leaf)]) is None
    cgroup(tmp_path, "pod", cpu_max="350000 100000")
    assert quota_of([(str(tmp_path), leaf)]) == 3.5
    cgroup(tmp_path, "pod/box", cpu_max="50000 100000")
    assert quota_of([(str(tmp_path), leaf)]) == 0.5
    assert quota_of([(str(tmp_path), str(tmp_path / "absent"))]) is None


def test_a_quota_of_version_1(tmp_path: Path) -> None:
    leaf = cgroup(tmp_path, "box", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    assert quota_of([(str(tmp_path), leaf)]) is None
    cgroup(tmp_path, "box", cpu_cfs_quota_us="200000")
    assert quota_of([(str(tmp_path), leaf)]) == 2.0
    assert quota_of([("/", "/"), (str(tmp_path), leaf)]) == 2.0


@pytest.mark.parametrize("text", ["", "max", "a b", "100 0", "100"])
def test_a_quota_that_makes_no_sense(tmp_path: Path, text: str) -> None:
    assert quota_of([(str(tmp_path), cgroup(tmp_path, "box", cpu_max=text))]) is None


# --- the value


def test_a_placement_is_a_value() -> None:
    one = Placement("core", 5, {"nofile": 64, "as": "8GiB"}, virtual_local_rank=True)
    assert one == Placement("core", 5, (("nofile", 64), ("as", "8GiB")), True)
    assert len({one, copy.copy(one), pickle.loads(pickle.dumps(one)), one.replace()}) == 1
    assert one.replace(rlimits={"core": 0}).rlimits == (("core", 0),)
    assert Placement().resolve(2) == ({0: None, 1: None}, "")


@pytest.mark.parametrize(
    "options,kind,message",
    [({"cpu_bind": 3}, TypeError, "cpu_bind: expected none, core, numa, or lists of CPUs as 0-3;4-7, got 3"),
     ({"nice": "5"}, TypeError, "nice: expected a whole number, got '5'"),
     ({"nice": 20}, ValueError, "nice: expected -20 to 19, got 20"),
     ({"rlimits": {"files": 3}}, ValueError, "rlimits: 'files' is no resource limit; there are as, core, cpu, data,"),
     ({"rlimits": {"nofile": -1}}, ValueError, "rlimits: nofile: expected a number, or 'unlimited', got -1"),
     ({"rlimits": {"nofile": "1k"}}, ValueError, "rlimits: nofile: expected a number, or 'unlimited', got '1k'"),
     ({"rlimits": {"as": "8Q"}}, ValueError, "rlimits: as: expected a number with or without a unit (8GiB), or"),
     ({"rlimits": {"as": 1.5}}, TypeError, "rlimits: as: expected a number, or 'unlimited', got 1.5"),
     ({"rlimits": {"as": (1, 2, 3)}}, ValueError, "rlimits: as: expected one value, or a soft and a hard one"),
     ({"rlimits": {"nofile": (9, 8)}}, ValueError, "rlimits: nofile: the soft limit 9 is above the hard limit 8"),
     ({"rlimits": {"nofile": ("unlimited", 8)}}, ValueError, "the soft limit unlimited is above the hard limit 8")],
)  # fmt: skip
def test_a_placement_that_cannot_be(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        Placement(**options)
    assert message in str(error.value)
    with pytest.raises(kind):
        Placement().replace(**options)


@pytest.fixture
def unprivileged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "has_capability", lambda _number: False)


@pytest.mark.usefixtures("unprivileged")
@pytest.mark.parametrize("value", ["unlimited", 1 << 40])
def test_a_hard_limit_that_cannot_be_raised(value: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _number: (256, 4096))
    with pytest.raises(ValueError, match="rlimits: nofile: the hard limit is 4096 here, and takes CAP_SYS_RESOURCE"):
        start_processes("x", "true", (), nprocs=1, placement=Placement(rlimits={"nofile": value}))


def test_more_open_files_than_anybody_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "has_capability", lambda _number: True)
    monkeypatch.setattr(resource, "getrlimit", lambda _number: (256, 4096))
    with pytest.raises(ValueError, match=r"rlimits: nofile: nobody may have more than \d+ \(fs.nr_open\)"):
        Placement(rlimits={"nofile": "unlimited"}).resolve(1)


@pytest.mark.usefixtures("unprivileged")
def test_a_nice_value_that_takes_a_privilege(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpriority", lambda *_: 0)
    monkeypatch.setattr(resource, "getrlimit", lambda _number: (0, 0))
    with pytest.raises(ValueError, match="nice: -5 takes CAP_SYS_NICE, or a limit 'nice' of 25"):
        Placement(nice=-5).resolve(1)
    for limit in (25, 40, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _number, limit=limit: (limit, limit))
        assert Placement(nice=-5).resolve(1) == ({0: ([], -5, [])}, "")


def test_a_capability() -> None:
    with open("/proc/self/status") as file:
        mask = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    assert [procfs.has_capability(number) for number in range(41)] == [bool(mask >> n & 1) for n in range(41)]


def test_what_start_processes_refuses() -> None:
    with pytest.raises(TypeError, match="placement: expected a Placement, got 'core'"):
        start_processes("x", "true", (), nprocs=1, placement="core")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ValueError, match="cpu_bind: '0': 1 list for 2 ranks"):
        start_processes("x", "true", (), nprocs=2, placement=Placement("0"))


def test_cores_that_are_shared_are_said() -> None:
    count = len(ALLOWED) + 1
    with (
        pytest.warns(RuntimeWarning, match=rf"cpu_bind: {count} workers share \d+ cores?$") as said,
        start_processes("x", "true", (), nprocs=count, placement=Placement("core")) as group,
    ):
        group.wait()
    assert said[0].filename == __file__


# --- what workers find


LOOK = """\
import os, sys
import resource, json
limits = [resource.getrlimit(which) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)]
print(json.dumps([sorted(os.sched_getaffinity(0)), os.nice(0), limits]))
"""
HARD_CORE = resource.getrlimit(resource.RLIMIT_CORE)[1]
WANTED = Placement(
    BIND, nice=3, rlimits={"nofile": 97, "core": (0, "unlimited" if HARD_CORE == resource.RLIM_INFINITY else HARD_CORE)}
)
FOUND = [[[cpu], NICER, [(97, 97), (0, HARD_CORE)]] for cpu in (FIRST, LAST)]


def finished(entrypoint: Callable[..., Any] | str, args: Any = (), **options: Any) -> RunProcsResult:
    with start_processes("placed", entrypoint, args, nprocs=2, **options) as group:
        result = group.wait()
    assert not result.is_failed(), [failure.message for failure in result.failures.values()]
    return result


@pytest.mark.each_python
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_functions_are_placed(method: str) -> None:
    values = finished(look_around, start_method=method, placement=WANTED).return_values
    assert values == dict(enumerate(FOUND))
    assert look_around()[0] == ALLOWED  # and we stay where we were


@pytest.mark.each_python
@pytest.mark.slow
def test_scripts_are_placed(place: Place) -> None:
    options = ("--cpu-bind", BIND, "--nice", 3, "--rlimit", "nofile=97,core=0", "--nproc-per-node", 2, "-r", 3)
    done = place.run(*options, place.write(LOOK))
    assert done.status == 0, done
    for rank, cpu in enumerate((FIRST, LAST)):
        assert json.loads(place.log(rank)) == [[cpu], NICER, [[97, 97], [0, 0]]]


@pytest.mark.long
def test_each_part_by_itself() -> None:
    plain = look_around()
    assert finished(look_around, placement=Placement()).return_values == {0: plain, 1: plain}
    assert finished(look_around, placement=Placement(nice=3)).return_values[1] == [plain[0], NICER, plain[2]]
    assert finished(look_around, placement=Placement(BIND)).return_values[0] == [[FIRST], *plain[1:]]
    core = Placement(rlimits={"core": 0})
    assert finished(look_around, placement=core).return_values[0] == [*plain[:2], [plain[2][0], (0, 0)]]


@pytest.mark.slow
def test_a_unit_and_no_limit() -> None:
    placement = Placement(rlimits={"fsize": "1.5GiB", "as": "64GiB"})
    assert finished(limits, ("FSIZE", "AS"), placement=placement).return_values[1] == ((3 << 29,) * 2, (1 << 36,) * 2)
    if resource.getrlimit(resource.RLIMIT_CPU)[1] == resource.RLIM_INFINITY:
        placement = Placement(rlimits={"cpu": (1000, "unlimited")})
        assert finished(limits, ("CPU",), placement=placement).return_values[0] == ((1000, resource.RLIM_INFINITY),)


@pytest.mark.slow
def test_few_open_files_leave_room_for_those_of_the_start(place: Place) -> None:
    """The limit comes last: neither the log files nor the import of what sets it fall under it."""
    done = place.run("--rlimit", "nofile=4", "--log-max-size", "1MB", "--no-python", "sh", "-c", "ulimit -n")
    assert done.out == "[0] 4\n", done


# --- a placed worker is a worker like any other

STATE = """\
while read -r key value; do case $key in SigBlk:|SigIgn:|Umask:) echo $key $value; esac; done < /proc/$$/status
readlink /proc/$$/cwd /proc/$$/fd/0; ls /proc/$$/fd
test $(cut -d' ' -f6 /proc/$$/stat) = $$ && echo leads a session; echo $0 "$@"; echo $GIVEN
"""


def _without(signals: int, line: str) -> str:
    rank, _, mask = line.rpartition("SigIgn: ")
    return f"{rank}SigIgn: {int(mask, 16) & ~signals:016x}" if rank else line


@pytest.mark.long
@pytest.mark.parametrize("before", ["", "trap '' HUP INT TERM USR1;"])
def test_a_placed_worker_starts_as_others_do(place: Place, before: str) -> None:
    place.env["GIVEN"] = "x"
    argv = ("--no-python", "sh", "-c", STATE.replace("$$", "$$$$"), "name", "a b")
    plain, placed = (
        place.run(*options, *argv, head=("sh", "-c", f'{before} exec "$@"', "sh")).out.splitlines()
        for options in ((), ("--cpu-bind", str(FIRST)))
    )
    # The C library keeps two signals for itself, 32 and 33. Nobody else can set them: they stay as they were inherited,
    # and posix_spawn leaves them ignored.
    own = 1 << 31 | 1 << 32
    plain, placed = ([_without(own, line) for line in lines] for lines in (plain, placed))
    assert placed == plain
    assert "[0] leads a session" in placed
    assert "[0] SigIgn: 0000000000000000" in placed


FAMILY = """
import os, sys
sys.path[:] = sys.argv[3].split(os.pathsep)
from phalanx.multiprocessing import Placement, start_processes
from tests.support.workers import lead
if __name__ == "__main__":
    method = sys.argv[1]
    placement = Placement(nice=1, rlimits={"core": 0})
    if method == "binary":
        code = "from tests.support.workers import lead; lead(__import__('sys').argv[1])"
        envs = {rank: {"PYTHONPATH": sys.argv[3]} for rank in range(2)}
        args = {rank: ("-c", code, sys.argv[2]) for rank in range(2)}
        group = start_processes("x", sys.executable, args, envs, placement=placement)
    else:
        group = start_processes("x", lead, (sys.argv[2],), nprocs=2, start_method=method, placement=placement)
    group.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["binary", *METHODS])
def test_nobody_placed_is_left_when_the_launcher_was_killed(kind: str, ready: Ready, tmp_path: Path) -> None:
    path = os.pathsep.join((workers.ROOT, os.path.join(workers.ROOT, "src"), *filter(None, sys.path)))
    with started_script(tmp_path, FAMILY, kind, ready.address, path):
        pids = ready.pids(6)
    assert not wait_gone(pids)


# --- what cannot be started is named


def starts(program: str | Callable[..., Any], method: str = "spawn", placement: Placement = WANTED) -> None:
    with start_processes("x", program, (), nprocs=2, start_method=method, placement=placement):
        pass


def test_a_failed_exec_is_named(tmp_path: Path) -> None:
    script = tmp_path / "program"
    for text, kind, words in (
        ("#!/no/such/interpreter\n", FileNotFoundError, "the interpreter that its first line names"),
        ("what is this?\n", OSError, "a script needs a first line"),
    ):
        script.write_text(text)
        script.chmod(0o755)
        with pytest.raises(kind, match=f"worker 0 was not started; starting it failed: .*{words}.*: {script}"):
            starts(str(script))


@pytest.mark.slow
@pytest.mark.parametrize("entrypoint", ["true", *METHODS])
def test_a_placement_that_fails_is_named(entrypoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was allowed when it was looked at need not be when it is done."""
    program, method = ("true", "spawn") if entrypoint == "true" else (look_around, entrypoint)
    monkeypatch.setattr(placing, "divide", lambda *_: ([(FIRST,), (1_000,)], ""))
    with pytest.raises(OSError, match=r"worker 1 was not started; binding it to CPU 1000 failed: Invalid argument$"):
        starts(program, method)
    monkeypatch.setattr(placing, "_allowed_limit", lambda *_: ("nofile", resource.RLIMIT_NOFILE, 1 << 62, 1 << 62))
    with pytest.raises(PermissionError, match=r"worker 0 was not started; setting its limit 'nofile' failed: Op"):
        starts(program, method, Placement(rlimits={"nofile": 1}))


# --- devices


def visible(count: int, envs: dict[int, dict[str, str]] | None = None) -> dict[int, Any]:
    args = dict.fromkeys(range(count), ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK"))
    placement = Placement(virtual_local_rank=True)
    with start_processes("x", workers.get_env, args, envs, start_method="fork", placement=placement) as group:
        values = group.wait().return_values
    return {rank: (value["CUDA_VISIBLE_DEVICES"], value["LOCAL_RANK"]) for rank, value in values.items()}


def test_one_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible(2) == {0: ("0", "0"), 1: ("1", "0")}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5 7")
    assert visible(2, {0: {"LOCAL_RANK": "0"}, 1: {"LOCAL_RANK": "1"}}) == {0: ("3", "0"), 1: ("5", "0")}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937,GPU-5b3a,3")
    assert visible(2) == {0: ("GPU-8932f937", "0"), 1: ("GPU-5b3a", "0")}


@pytest.mark.parametrize(
    "value,count",
    [("3", 1), ("", 0), ("-1", 0), ("4,-1,5", 1), ("4,4", 0), ("4,,5", 1), ("4 5", 1), ("GPU-a,5", 1)],
)
def test_too_few_devices(monkeypatch: pytest.MonkeyPatch, value: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    message = f"virtual_local_rank: rank {count} has no device: CUDA_VISIBLE_DEVICES={value} names {count} for 2 ranks"
    with pytest.raises(ValueError, match=message):
        visible(2)


def test_devices_that_are_given_twice() -> None:
    with pytest.raises(ValueError, match="it sets CUDA_VISIBLE_DEVICES, which envs sets for rank 1 as well"):
        visible(2, {0: {}, 1: {"CUDA_VISIBLE_DEVICES": "1"}})


# --- the command line

PRINT = ("--no-python", "sh", "-c", "echo $RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS")


def test_a_virtual_local_rank(place: Place) -> None:
    place.env["CUDA_VISIBLE_DEVICES"] = "7,5"
    done = place.run("--virtual-local-rank", "--nproc-per-node", 2, *PRINT)
    assert sorted(done.out.splitlines()) == ["[0] 0 0 7 1", "[1] 1 0 5 1"]
    done = place.run("--virtual-local-rank", "--nproc-per-node", 3, *PRINT)
    refused(done, "--virtual-local-rank: rank 2 has no device: CUDA_VISIBLE_DEVICES=7,5 names 2 for 3 ranks")


def rehearsed(*options: object) -> tuple[str, str]:
    """What `phalanx run --dry-run` prints, on stdout and on stderr."""
    done = CliRunner().invoke(run, ["--dry-run", *map(str, options), "--no-python", "true"])
    return done.stdout, done.stderr


def test_fewer_devices_than_ranks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "count_gpus", lambda: 2)
    assert "CUDA_VISIBLE_DEVICES=1" in rehearsed("--virtual-local-rank", "--nproc-per-node", 2)[0]
    err = rehearsed("--virtual-local-rank", "--nproc-per-node", 3)[1]
    assert "--virtual-local-rank: rank 2 has no device: there are 2 for 3 ranks" in err


@pytest.mark.long
def test_the_number_of_threads(place: Place) -> None:
    cpus = len(ALLOWED)
    per_rank = max(1, cpus // 2)
    quota = topology.quota()
    if quota is not None:
        per_rank = max(1, min(per_rank, int(quota / 2)))
    del place.env["OMP_NUM_THREADS"]
    done = place.run("--nproc-per-node", 2, *PRINT)
    assert sorted(done.out.splitlines()) == [f"[0] 0 0 {per_rank}", f"[1] 1 1 {per_rank}"]
    said = f"phalanx: OMP_NUM_THREADS={per_rank} for each of 2 workers ({cpus} CPU"
    assert [line.startswith(said) for line in done.err.splitlines()].count(True) == 1
    assert "; set it to choose otherwise\n" in done.err
    # one worker has the machine for itself
    alone = place.run(*PRINT)
    assert alone.out == "[0] 0 0\n"
    assert "OMP_NUM_THREADS" not in alone.err
    # and what is set stays
    place.env["OMP_NUM_THREADS"] = "11"
    done = place.run("--nproc-per-node", 2, *PRINT)
    assert sorted(done.out.splitlines()) == ["[0] 0 0 11", "[1] 1 1 11"]
    assert "OMP_NUM_THREADS" not in done.err


def test_the_number_of_threads_goes_by_what_each_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))

    def found(bind: str, nprocs: int, quota: float | None = None) -> tuple[list[str], str]:
        monkeypatch.setattr(topology, "quota", lambda: quota)
        out, err = rehearsed("--cpu-bind", bind, "--nproc-per-node", nprocs)
        return re.findall(r"OMP_NUM_THREADS=(\d+)\n", out), err

    said = "OMP_NUM_THREADS=2 for each of 4 workers (8 CPUs); set it to choose otherwise"
    alike, err = found("none", 4)
    assert alike == ["2"]
    assert said in err
    assert found("0-2;3", 2)[0] == ["3", "1"]
    assert "OMP_NUM_THREADS=1 to 3 for each of 2 workers (4 CPUs)" in found("0-2;3", 2)[1]
    assert found("none", 2, 5.5)[0] == ["2"]
    assert "(8 CPUs, of which the cgroup grants 5.5)" in found("none", 2, 5.5)[1]
    assert "(8 CPUs)" in found("none", 2, 12.0)[1]


@pytest.mark.slow
def test_shared_cores_are_said(place: Place) -> None:
    count = len(ALLOWED) + 1
    done = place.run("--cpu-bind", "core", "--nproc-per-node", count, "--no-python", "true")
    assert done.status == 0, done
    assert f"phalanx: --cpu-bind: {count} workers share " in done.err
    assert "Warning" not in done.err
