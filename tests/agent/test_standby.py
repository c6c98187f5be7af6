"""The group of a next attempt that is made ready ahead: it is used, it breaks unnoticed, and it never stays behind.

``PHALANX_ROUNDS`` says how often the launcher is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from phalanx._agent.restart_policy import RestartPolicy
from phalanx._base import clock, procfs
from phalanx._engine.start_errors import NotReleasedError
from phalanx.cli._attempt_groups import AttemptGroups
from phalanx.cli._run_logs import RunLogs
from phalanx.multiprocessing import DefaultLogsSpecs, PContext, ScriptContext, Std, SubprocessContext
from tests.agent.test_killed import left
from tests.cli.test_run import Place
from tests.support.disks import until
from tests.support.helpers import TIMEOUT, Gate, Ready, alive

if TYPE_CHECKING:
    from typing import Any

    from tests.cli.test_run import Launcher

ROUNDS = int(os.environ.get("PHALANX_ROUNDS", "5"))
NAME = "phalanx-standby"
WORKERS = 2

SCRIPT = """
import json, os, sys
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0:
    {ready}
    code = open({gate!r}, "rb", 0).read(1)
    sys.exit(3 if code == b"x" and os.environ["RANK"] == "0" else 0)
print(json.dumps({{
    "edition": 1, "pid": os.getpid(), "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path[0],
    "env": dict(os.environ), "files": len(os.listdir("/proc/self/fd")), "comm": open("/proc/self/comm").read(),
}}))
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.env["STANDBY_TEST"] = f"{os.getpid()}-{tmp_path.name}"
    return made


def standbys(place: Place) -> set[int]:
    """The interpreters that wait."""
    mark = f"STANDBY_TEST={place.env['STANDBY_TEST']}"
    return {
        stat.pid
        for stat in procfs.processes()
        if stat.comm == NAME and stat.state != "Z" and mark.encode() in procfs.environ(stat.pid)
    }


def everyone(place: Place) -> str:
    return f"STANDBY_TEST={place.env['STANDBY_TEST']}"


def written(place: Place, ready: Ready, gate: Gate) -> str:
    return place.write(SCRIPT.format(ready=ready.python(), gate=gate.address))


def begin(place: Place, ready: Ready, *argv: object) -> Launcher:
    """Start a run, and return when its workers are up, and those of the next attempt wait."""
    launcher = place.start("--nproc-per-node", WORKERS, "--max-restarts", 2, *argv)
    try:
        ready.wait(WORKERS)
        until(lambda: len(standbys(place)) == WORKERS)
    except BaseException:
        launcher.__exit__(None, None, None)
        raise
    return launcher


def attempts(place: Place) -> list[str]:
    return sorted(path.name for path in place.logs.glob("*/attempt_*"))


def told(place: Place, attempt: int = 1) -> list[dict[str, Any]]:
    paths = sorted(place.logs.glob(f"*/attempt_{attempt}/*/stdout.log"))
    return [json.loads(path.read_text()) for path in paths]


def fail(gate: Gate) -> None:
    """Have rank 0 of the first attempt fail; the other goes on until it is stopped."""
    with open(gate.address, "wb", 0) as stream:
        stream.write(b"x" * WORKERS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["script", "module"])
def test_a_restart_takes_the_interpreters_that_wait(place: Place, ready: Ready, gate: Gate, kind: str) -> None:
    path = written(place, ready, gate)
    what = (path, "--lr", 1) if kind == "script" else ("-m", "script", "--lr", 1)
    with begin(place, ready, *what) as launcher:
        waiting = standbys(place)
        assert attempts(place) == ["attempt_0"]
        assert [*place.logs.glob("*/.*")] == []
        environs = [dict(entry.split(b"=", 1) for entry in procfs.environ(pid) if b"=" in entry) for pid in waiting]
        (port,) = {env[b"MASTER_PORT"].decode() for env in environs}
        assert {env[b"TORCHELASTIC_RESTART_COUNT"] for env in environs} == {b"1"}
        place.write((place.folder / "script.py").read_text().replace('"edition": 1', '"edition": 2'))
        fail(gate)
        done = launcher.end()
    assert done.status == 0, done
    found = told(place)
    assert {each["pid"] for each in found} == waiting
    assert {each["edition"] for each in found} == {2}
    for rank, each in enumerate(found):
        env = each["env"]
        assert each["argv"] == [path, "--lr", "1"]
        assert each["comm"] != f"{NAME}\n"
        assert "PHALANX_STANDBY" not in env
        assert (env["RANK"], env["TORCHELASTIC_RESTART_COUNT"], env["MASTER_PORT"]) == (str(rank), "1", port)
        assert env["TORCHELASTIC_ERROR_FILE"].endswith(f"/attempt_1/{rank}/error.json")
    with socket.socket() as rank_0:
        rank_0.bind(("127.0.0.1", int(port)))
    assert attempts(place) == ["attempt_0", "attempt_1"]
    assert left(everyone(place)) == set()


@pytest.mark.slow
def test_a_worker_that_has_waited_finds_what_any_worker_finds(place: Place, ready: Ready, gate: Gate) -> None:
    path = written(place, ready, gate)
    found: list[dict[str, Any]] = []
    for options in ((), ("--no-standby",)):
        place.logs = place.folder / f"logs{len(found)}"
        with place.start("--nproc-per-node", WORKERS, "--max-restarts", 2, *options, path) as launcher:
            ready.wait(WORKERS)
            if not options:
                until(lambda: len(standbys(place)) == WORKERS)
            fail(gate)
            assert launcher.end().status == 0
        each = told(place)[1]
        own = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "PHALANX_TIMERS", "PHALANX_GROUP")
        each["env"] = {name: value for name, value in each["env"].items() if name not in own}
        found.append({name: value for name, value in each.items() if name != "pid"})
    env, other = (each.pop("env") for each in found)
    assert {name: env.get(name) for name in env.keys() | other.keys() if env.get(name) != other.get(name)} == {}
    assert found[0] == found[1]


IMPORTING = """
import json, os, sys
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0:
    {ready}
    open({gate!r}, "rb", 0).read(1)
    os.makedirs({folder!r})
    for path in ({folder!r} + "/made.py", sys.path[0] + "/select.py"):
        open(path, "w").close()
    sys.exit(3)
import made, select
print(json.dumps({{"files": [select.__file__, made.__file__]}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-standby",)], ids=["standby", "none"])
def test_a_worker_that_has_waited_imports_what_any_worker_imports(
    place: Place, ready: Ready, gate: Gate, options: tuple[str, ...]
) -> None:
    """The program makes a module in its own folder, named as one that we use, and a folder of PYTHONPATH."""
    folder = str(place.folder / "made")
    place.env["PYTHONPATH"] = f"{place.env.get('PYTHONPATH', '')}:{folder}"
    path = place.write(IMPORTING.format(ready=ready.python(), gate=gate.address, folder=folder))
    with place.start("--nproc-per-node", 1, "--max-restarts", 1, *options, path) as launcher:
        ready.wait(1)
        if not options:
            until(lambda: len(standbys(place)) == 1)
        gate.open(1)
        done = launcher.end()
    assert done.status == 0, done
    assert told(place) == [{"files": [str(place.folder / "select.py"), f"{folder}/made.py"]}]


@pytest.mark.slow
def test_an_interpreter_that_waits_says_nothing_of_ctrl_c(place: Place, ready: Ready, gate: Gate) -> None:
    with begin(place, ready, "--redirects", 0, written(place, ready, gate)) as launcher:  # it writes to the launcher's
        for pid in standbys(place):
            with contextlib.suppress(ProcessLookupError):  # one that has ended takes the others with it
                os.kill(pid, signal.SIGINT)
        until(lambda: not standbys(place))
        gate.open(WORKERS)
        done = launcher.end()
    assert done.status == 0, done
    assert "KeyboardInterrupt" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize("who", ["a worker", "its keeper"])
def test_a_standby_that_dies_is_not_noticed(place: Place, ready: Ready, gate: Gate, who: str) -> None:
    with begin(place, ready, written(place, ready, gate)) as launcher:
        waiting = standbys(place)
        victim = min(waiting)
        os.kill(victim if who == "a worker" else procfs.Stat(victim).parent, signal.SIGKILL)
        until(lambda: not standbys(place))
        fail(gate)
        done = launcher.end()
    assert done.status == 0, done
    assert not {each["pid"] for each in told(place)} & waiting
    assert [line for line in done.err.splitlines() if "keeper" in line or "killed" in line] == []
    assert left(everyone(place)) == set()


@pytest.mark.long
@pytest.mark.parametrize("end", ["success", "giving up", "SIGTERM", "SIGINT"])
def test_nothing_of_a_standby_stays_behind(place: Place, ready: Ready, gate: Gate, end: str) -> None:
    options = ("--never-restart-on", 3) if end == "giving up" else ()
    with begin(place, ready, *options, written(place, ready, gate)) as launcher:
        if end == "giving up":
            fail(gate)
        elif end == "success":
            gate.open(WORKERS)
        else:
            launcher.send(signal.Signals[end])
        done = launcher.end()
    assert done.status == {"success": 0, "giving up": 3, "SIGTERM": 143, "SIGINT": 130}[end], done
    assert left(everyone(place)) == set()
    assert attempts(place) == ["attempt_0"]


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * ROUNDS)
def test_nothing_of_a_standby_outlives_a_launcher_that_is_killed(place: Place, ready: Ready, gate: Gate) -> None:
    path = written(place, ready, gate)
    for count in range(ROUNDS):
        place.logs = place.folder / f"logs{count}"
        with place.start("--nproc-per-node", WORKERS, "--max-restarts", 2, "--orphan-grace", 0, path) as launcher:
            ready.wait(WORKERS)
            most = random.randrange(WORKERS + 1)  # noqa: S311 - no secret
            until(lambda most=most: len(standbys(place)) >= most)  # type: ignore[misc]  # in the midst of its start, too
            launcher.send(signal.SIGKILL)
            launcher.end()
        assert left(everyone(place)) == set()
        assert attempts(place) == ["attempt_0"]


def test_when_another_attempt_may_follow() -> None:
    assert not RestartPolicy(0).may_follow(0)
    assert [RestartPolicy(1).may_follow(attempt) for attempt in (0, 1)] == [True, False]
    assert RestartPolicy(1, window=60).may_follow(7)
    assert RestartPolicy(0, always_on=[75]).may_follow(7)
    assert not RestartPolicy(0, window=60).may_follow(0)


@pytest.mark.parametrize(
    "chosen,has_one",
    [
        ({}, True),
        ({"standby": False}, False),
        ({"no_python": True}, False),
        ({"preload": ["json"]}, False),
        ({"run_path": "spawn"}, False),
    ],
    ids=["a script", "not wanted", "a binary", "forks", "functions"],
)
def test_who_has_a_standby(tmp_path: Path, chosen: dict[str, Any], has_one: bool) -> None:
    options: dict[str, Any] = {
        "module": False,
        "no_python": False,
        "python": "python",
        "preload": None,
        "preload_env": {},
        "port": None,
        "standby": True,
        "stdin": lambda _envs: {},
        "run_path": "",
    }
    groups = AttemptGroups("x", (), {0: {}}, RunLogs(str(tmp_path)), options={}, **(options | chosen))
    assert (groups.standby is not None) is has_one
    groups.close()


# --- a parked group in this process

PARKED = """
import os, sys
print("began", flush=True)
{ready}
sys.exit(int(sys.argv[1]))
"""


def parked(tmp_path: Path, ready: Ready, code: int = 0, **options: Any) -> tuple[PContext, PContext]:
    """A group of one attempt that has ended, and the parked one of the next."""
    script = tmp_path / "parked.py"
    script.write_text(PARKED.format(ready=ready.python()))
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), **{"redirects": Std.ALL, **options.pop("specs", {})})
    groups = []
    for attempt in range(2):
        envs = {rank: {"TORCHELASTIC_RESTART_COUNT": str(attempt)} for rank in range(WORKERS)}
        args = dict.fromkeys(envs, (str(code if attempt else 0),))  # the first says all that it has to say
        groups.append(ScriptContext("parked", str(script), args, envs, specs, **options))
    first, second = groups
    with first:
        first.start()
        assert first.wait(TIMEOUT) is not None
    ready.wait(WORKERS)
    second.park()
    return first, second


def there(group: PContext) -> bool:
    """Whether the interpreters wait."""
    return group._supervisor is not None and group._supervisor._link._waits


@pytest.mark.slow
def test_the_clock_of_a_parked_group_begins_with_its_release(tmp_path: Path, ready: Ready) -> None:
    _first, group = parked(tmp_path, ready)
    with group:
        until(lambda: there(group))
        pids = group.pids()
        assert all(alive(pid) for pid in pids.values())
        released = clock.now_ns()
        group.start()
        assert group._supervisor is not None
        assert group._supervisor.mirror.began_ns >= released
        assert group.pids() == pids
        result = group.wait(TIMEOUT)
        assert result is not None
        assert result.succeeded
        assert [Path(path).read_text() for path in group.stdouts.values()] == ["began\n"] * WORKERS
        ready.wait(WORKERS)


@pytest.mark.slow
def test_a_parked_group_that_is_released_at_once_begins_as_soon_as_it_is_there(tmp_path: Path, ready: Ready) -> None:
    _first, group = parked(tmp_path, ready, code=4)
    with group:
        group.start()
        result = group.wait(TIMEOUT)
    assert result is not None
    assert {failure.exitcode for failure in result.failures.values()} <= {4}
    assert result.failures


@pytest.mark.slow
def test_a_parked_group_that_has_ended_cannot_be_released(tmp_path: Path, ready: Ready) -> None:
    _first, group = parked(tmp_path, ready)
    until(lambda: there(group))
    os.kill(group.pids()[0], signal.SIGKILL)
    until(lambda: not group.is_open)
    with pytest.raises(NotReleasedError):
        group.start()
    group.close()
    assert [*(tmp_path / "logs").glob("*/attempt_1")] == []


@pytest.mark.slow
def test_a_parked_group_whose_folder_was_moved_is_released_in_a_new_one(tmp_path: Path, ready: Ready) -> None:
    first, group = parked(tmp_path, ready)
    with group:
        until(lambda: there(group))
        run = os.path.dirname(os.path.dirname(os.path.dirname(first.error_files[0])))
        os.rename(run, f"{run}-elsewhere")
        group.start()
        assert group.wait(TIMEOUT) is not None
    assert [Path(path).read_text() for path in group.stdouts.values()] == ["began\n"] * WORKERS


@pytest.mark.slow
def test_a_parked_group_whose_place_is_taken_cannot_be_released(tmp_path: Path, ready: Ready) -> None:
    first, group = parked(tmp_path, ready)
    until(lambda: there(group))
    pids = group.pids()
    run = os.path.dirname(os.path.dirname(os.path.dirname(first.error_files[0])))
    os.makedirs(f"{run}/attempt_1/0")
    with pytest.raises(NotReleasedError):
        group.start()
    assert not any(alive(pid) for pid in pids.values())
    group.close()


@pytest.mark.parametrize("why", ["rotated", "a binary", "the first attempt"])
def test_what_cannot_be_parked(tmp_path: Path, ready: Ready, why: str) -> None:
    if why == "rotated":
        with pytest.raises(NotReleasedError):
            parked(tmp_path, ready, specs={"max_size": 1000})
        return
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ALL)
    if why == "a binary":
        group: PContext = SubprocessContext("b", "/bin/true", {0: ()}, {0: {}}, specs)
    else:
        group = ScriptContext("s", "script.py", {0: ()}, {0: {}}, specs)
    with pytest.raises(NotReleasedError):
        group.park()
    group.close()
    assert not (tmp_path / "logs").exists()
