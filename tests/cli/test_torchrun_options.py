"""Options and variables that came from torchrun, as a person uses them: what they do, and how slips are answered."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.request
from typing import Any

import pytest

from phalanx.agent import LocalElasticAgent, WorkerSpec
from phalanx.cli import run as cli
from phalanx.multiprocessing import DefaultLogsSpecs
from phalanx.timer import FileTimerServer
from tests.support import agent_workers
from tests.support.command import Place
from tests.support.helpers import Ready

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

NAMES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_SIGNALS_TO_HANDLE")
SHOW = f"""
    import json, os
    print(json.dumps([os.environ.get(name) for name in {NAMES!r}]))
    """


# --- one machine


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, address, fixed, run_id",
    [
        (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"], "127.0.0.1", "", ""),
        (["--rdzv-backend=c10d", "--rdzv-endpoint", f"{socket.gethostname()}:29499", "--rdzv-id=5"], None, "", "5"),
        (["--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1", "--rdzv-conf=a=b"], "127.0.0.1", "", ""),
        (["--rdzv-endpoint=127.0.0.1:29498", "--master-port=29498"], "127.0.0.1", "29498", ""),
        (["--rdzv-endpoint=[::ffff:127.0.0.1]:29498"], "::ffff:127.0.0.1", "29498", ""),
        (["--local-addr=127.0.0.7", "--master-addr=elsewhere"], "elsewhere", "", ""),
        (["--local-addr=127.0.0.7", "--rdzv-endpoint=127.0.0.8:29498"], "127.0.0.8", "29498", ""),
        (["--rdzv-id=x", "--run-id=x"], "127.0.0.1", "", "x"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_where_workers_meet(place: Place, options: list[str], address: str | None, fixed: str, run_id: str) -> None:
    done = place.run(*options, "-r", 1, place.write(SHOW))
    assert done.status == 0, done
    found = json.loads(place.log(0))
    assert found[0] == (address or "127.0.0.1")
    assert found[1] == fixed if fixed else 1024 <= int(found[1]) < 65536
    assert found[2] == run_id if run_id else re.fullmatch(r"\d{8}-\d{6}", found[2])
    assert "without effect" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, said",
    [
        (["--standalone", "--rdzv-endpoint=other:4", "--rdzv-id=5"], "beside --standalone: --rdzv-endpoint, --rdzv-id"),
        (["--standalone", "--insecure", "--keep"], "beside --standalone: --keep"),
        (
            ["--rdzv-endpoint=localhost:29498", "--master-port=5", "--master-addr=other"],
            "beside --rdzv-endpoint localhost:29498: --master-addr, --master-port",
        ),
    ],
)
def test_options_without_effect_are_named(place: Place, options: list[str], said: str) -> None:
    done = place.run(*options, "--no-python", "true")
    assert done.status == 0, done
    assert f"phalanx: without effect {said}\n" in done.err


@pytest.mark.slow
def test_a_host_that_a_scheduler_has_said_is_believed(place: Place) -> None:
    """It may be what a proxy, or a name that is published later, has."""
    place.env |= {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "192.0.2.1,n2", "PHALANX_JOB_SECRET": "0123456789abcdef",
    }  # fmt: skip
    with place.start("--no-python", "true") as launcher:
        launcher.read_until("192.0.2.1 is no address of this machine: the store listens at all addresses of this")
        launcher.read_until("more: 1 of 2 nodes has come: 0 (")
        launcher.send(signal.SIGINT)
        done = launcher.end()
    assert done.status == 130
    assert "on the machine of node 1" not in done.err, "Slurm starts what is missing"


# --- signals


@pytest.mark.slow
def test_the_signals_that_stop_a_run(place: Place, ready: Ready) -> None:
    script = place.write(f"""
        import os, signal
        print(os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"], flush=True)
        {ready.python()}
        signal.pause()
        """)
    place.env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGNONE"  # which the option replaces
    with place.start("--signals-to-handle", "SIGTERM,usr1", "-r", 1, script) as launcher:
        ready.wait()
        launcher.send(signal.SIGUSR1)
        done = launcher.end()
    assert done.status == 128 + signal.SIGUSR1
    assert "SIGUSR1: stopping the workers" in done.err
    assert place.log(0) == "SIGTERM,SIGUSR1\n"
    with place.start("--signals-to-handle", "none", script) as launcher:
        ready.wait()
        launcher.send(signal.SIGTERM)
        assert launcher.end().status == -signal.SIGTERM


def test_the_program_has_its_signals_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    cli.main(["--log-dir", str(place.logs), "--signals-to-handle", "SIGUSR2", "--no-python", "true"])
    assert {number: signal.getsignal(number) for number in before} == before
    assert os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGUSR1"


# --- --run-path


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_script_by_its_path(place: Place, method: str) -> None:
    place.write("""
        import json, os, sys
        from multiprocessing import Process
        def child():
            print("child", flush=True)
        if __name__ == "__main__":
            print(json.dumps([sys.argv, __file__, sys.modules["__main__"].__dict__ is globals()]), flush=True)
            process = Process(target=child)
            process.start()
            process.join()
            print("no end of line", end="")
            sys.exit(int(sys.argv[1]))
        """)
    options = ("--run-path", "--start-method", method, "-r", 1)
    assert place.run(*options, "script.py", "3").status == 3
    first, *rest = place.log(0).splitlines()
    assert json.loads(first) == [["script.py", "3"], "script.py", True]
    assert rest == ["child", "no end of line"]


@pytest.mark.slow
def test_a_script_by_its_path_that_fails(place: Place) -> None:
    script = place.write("""
        def fail():
            raise ValueError("bad batch")
        fail()
        """)
    done = place.run("--run-path", "--max-restarts", 1, "--start-method", "forkserver", "--preload", "json", script)
    assert done.status == 1
    assert "attempt 0 failed" in done.err
    assert "error     : ValueError: bad batch" in done.err
    block = done.err[done.err.index("traceback") :]
    assert f'File "{script}", line 3, in fail' in block
    assert "phalanx" not in block.partition("logs  ")[0]


@pytest.mark.slow
def test_a_script_by_its_path_that_is_not_started(place: Place) -> None:
    place.write("")
    options = (
        "--dry-run",
        "--run-path",
        "-m",
        "--no-python",
        "--start-method",
        "fork",
    )  # the path goes before the rest
    done = place.run(*options, "script.py", "a${local_rank}", "--x")
    assert done.status == 0, done
    said = "  command      script.py a0 --x\n               (by runpy.run_path, in a worker that fork starts)"
    assert said in done.out
    assert not place.logs.exists()


# --- what the environment asks for


@pytest.mark.long
def test_a_timer_server_for_the_workers(place: Place) -> None:
    script = place.write("""
        import os, signal
        from phalanx.timer import FileTimerClient, configure, expires
        configure(FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
        print(os.environ["TORCHELASTIC_TIMER_FILE"], flush=True)
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            with expires(after=0.05, scope="the step"):
                while True:  # the signal that asks for its stack ends a pause
                    signal.pause()
        """)
    pipe = place.folder / "timers"
    place.env |= {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(pipe)}
    done = place.run("--nproc-per-node", 2, "--max-restarts", 1, "-r", 1, script)
    assert done.status == 0, done
    assert "attempt 0 failed" in done.err
    assert "rank 1, Hang: 'the step' was not left in time" in done.err
    assert place.log(0) == f"{pipe}\n"
    assert not pipe.exists()


@pytest.mark.slow
def test_a_timer_file_that_is_taken_or_cannot_be(place: Place) -> None:
    script = place.write("import os; print(os.environ['TORCHELASTIC_TIMER_FILE'])")
    for path in ("script.py", "no/timers"):
        pipe = place.folder / path
        place.env |= {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(pipe)}
        done = place.run(script)
        assert (done.status, "Traceback" in done.err) == (1, False)
        assert f"Error: TORCHELASTIC_TIMER_FILE: {pipe}: " in done.err
        assert not place.logs.exists()
    pipe = place.folder / "timers"
    place.env["TORCHELASTIC_TIMER_FILE"] = str(pipe)
    server = FileTimerServer(str(pipe), "another")
    server.start()
    try:
        done = place.run("-r", 1, script)
    finally:
        server.stop()
    assert done.status == 0, done
    assert re.fullmatch(rf"{pipe}\.\d+\n", place.log(0)), "each has its own"
    assert [path.name for path in place.folder.glob("timers*")] == []


@pytest.mark.slow
def test_a_run_says_how_it_is(place: Place, ready: Ready, port: int) -> None:
    script = place.write(f"""
        import os, signal, sys
        print(repr(os.environ["TORCHELASTIC_HEALTH_CHECK_PORT"]))
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(1)
        {ready.python()}
        signal.pause()
        """)
    place.env["TORCHELASTIC_HEALTH_CHECK_PORT"] = str(port)
    with socket.create_server(("127.0.0.1", port)):
        done = place.run(script)
    assert done.status == 1
    assert f"Error: TORCHELASTIC_HEALTH_CHECK_PORT: 127.0.0.1:{port}: Address already in use\n" in done.err
    assert not place.logs.exists()
    with place.start("--run-id", "night", "--max-restarts", 1, "-r", 1, script) as launcher:
        ready.wait()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz") as answer:
            found: dict[str, Any] = json.load(answer)
        assert found.pop("since") > 0
        # A worker may be faster than the note that all of them are up.
        assert found.pop("state") in ("STARTING", "RUNNING")
        assert found == {"run_id": "night", "max_restarts": 1, "pid": launcher.process.pid, "attempt": 1}
        launcher.send(signal.SIGTERM)
        launcher.end()
    assert place.log(0) == "''\n"


@pytest.mark.slow
def test_an_agent_says_how_it_is(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", str(port))
    spec = WorkerSpec("trainer", 1, None, entrypoint=agent_workers.ask_health, args=(port,))
    answers = LocalElasticAgent(spec, DefaultLogsSpecs()).run().return_values
    found = json.loads(answers[0])
    assert (found["pid"], found["attempt"]) == (os.getpid(), 0)
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "x")
    with pytest.raises(ValueError, match="TORCHELASTIC_HEALTH_CHECK_PORT: expected a port"):
        LocalElasticAgent(spec, DefaultLogsSpecs()).run()


@pytest.mark.long
def test_the_log_is_shown_from_a_level_on(place: Place) -> None:
    place.env |= {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "LOGLEVEL": "info"}
    done = place.run("--no-python", "-r", 1, "sh", "-c", "echo $LOGLEVEL")
    assert "phalanx: INFO: phalanx.timer: timer server: started at " in done.err
    assert place.log(0) == "info\n"
    for level in ("WARNING", "loud", ""):
        place.env["LOGLEVEL"] = level
        assert "INFO" not in place.run("--no-python", "true").err


# --- plugins

PLUGIN = """
    import logging, os, time
    from phalanx.multiprocessing import LogsDest, LogsSpecs, Std

    class Mine(LogsSpecs):
        def reify(self, envs):
            assert (self._redirects, self._tee, self._local_ranks_filter) == (Std.OUT, Std.NONE, {0})
            folder = os.path.join(self.root_log_dir, envs[0]["TORCHELASTIC_RUN_ID"])
            os.makedirs(folder, exist_ok=True)
            names = {kind: {rank: f"{folder}/{rank}.{kind}" for rank in envs} for kind in ("out", "error")}
            return LogsDest(names["out"], dict.fromkeys(envs, ""), error_files=names["error"])

    class Foreign:
        def __init__(self, log_dir, redirects, tee, local_ranks_filter):
            self.mine = Mine(log_dir, redirects, tee, local_ranks_filter)
        def reify(self, envs):
            class Dest:
                stdouts, stderrs, tee_stdouts, tee_stderrs, error_files = {}, {}, {}, {}, {}
            found = self.mine.reify(envs)
            for name in ("stdouts", "stderrs", "error_files"):
                setattr(Dest, name, getattr(found, name))
            return Dest

    class Short(Mine):
        def reify(self, envs):
            return LogsDest({0: ""}, {0: ""}, error_files={0: "/dev/null"})

    class Fails(Mine):
        def reify(self, envs):
            raise OSError("the disk is full")

    class Narrow:
        def __init__(self, log_dir):
            pass

    class Empty:
        def __init__(self, **given):
            pass

    number = 5

    class Stuck(logging.Handler):  # holds no lock, which the exit would wait for
        def handle(self, record):
            time.sleep(600)

    class Handler(logging.StreamHandler):
        def emit(self, record):
            with open("told", "a") as file:
                file.write(record.getMessage() + chr(10))
    """


def install(place: Place) -> None:
    """Have a distribution with entry points on the path."""
    place.write(PLUGIN, "plugin.py")
    place.write("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n", "plugin-1.0.dist-info/METADATA")
    names = ("mine = plugin:Mine", "short = plugin:Short", "fails = plugin:Fails", "no = plugin:No",
             "narrow = plugin:Narrow", "empty = plugin:Empty", "number = plugin:number")  # fmt: skip
    points = "\n".join(["[torchrun.logs_specs]", *names, "[phalanx.logs_specs]", "foreign = plugin:Foreign"])
    points += "\n[phalanx.event_handlers]\nmine = plugin:Handler\nno = plugin:No\nstuck = plugin:Stuck\n"
    place.write(points, "plugin-1.0.dist-info/entry_points.txt")
    place.env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(place.folder), place.env.get("PYTHONPATH"))))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine", "foreign"])
def test_logs_of_a_plugin(place: Place, name: str) -> None:
    install(place)
    script = place.write("""
        import os
        print("hello")
        if os.environ["RANK"] == "1":
            raise ValueError("bad")
        """)
    options = ("-r", 1, "--local-ranks-filter", 0, "--run-id", "night", "--nproc-per-node", 2, "--settle", 30)
    done = place.run("--logs-specs", name, *options, script)
    assert done.status == 1
    folder = place.logs / "night"
    assert {path.name: path.read_text() for path in folder.glob("*.out")} == {"0.out": "hello\n", "1.out": "hello\n"}
    assert json.loads((folder / "1.error").read_text())["message"]["message"] == "ValueError: bad"
    assert f"error_file: {folder}/1.error" in done.err
    assert "Traceback" in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, status, words",
    [
        ("short", 1, "Short.reify: stdouts has no file for local rank 1"),
        ("fails", 1, "the disk is full"),
        ("no", 2, "plugin:No: AttributeError: "),
        ("narrow", 2, "TypeError: "),
        ("empty", 2, "expected a subclass of phalanx.multiprocessing.LogsSpecs"),
        ("number", 2, "plugin:number: expected a class, got 5"),
    ],
)
def test_logs_of_a_plugin_that_is_wrong(place: Place, name: str, status: int, words: str) -> None:
    install(place)
    done = place.run("--logs-specs", name, "--nproc-per-node", 2, "--no-python", "touch", "started")
    assert done.status == status
    assert f"Error: --logs-specs {name}: " in done.err
    assert words in done.err
    assert "Traceback" not in done.err
    assert not (place.folder / "started").exists()


@pytest.mark.long
def test_events_go_to_a_plugin(place: Place) -> None:
    install(place)
    script = place.write("""
        import os, sys
        sys.exit(os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
        """)
    options = ("--event-log-handler", "mine", "--run-id", "night", "--role", "trainer", "--max-restarts", 1)
    assert place.run(*options, "--nproc-per-node", 2, script).status == 0
    told = [json.loads(line) for line in (place.folder / "told").read_text().splitlines()]
    begin = ["AGENT RENDEZVOUS", "AGENT ASSIGN_WORKER_RANKS", "WORKER START", "WORKER START"]
    end = ["WORKER SUCCEEDED", "WORKER SUCCEEDED", "AGENT SUCCEEDED"]
    assert [f"{one['source']} {one['metadata']['state']}" for one in told] == [*begin, *begin, *end]
    last = told[-2]["metadata"]
    assert (last["run_id"], last["role"], last["global_rank"], last["agent_restarts"]) == ("night", "trainer", 1, 1)
    assert int(last["worker_id"]) > 0
    assert json.loads(last["metadata"])["entry_point"] == "script.py"


@pytest.mark.long
def test_events_that_a_handler_does_not_take_are_lost_aloud(place: Place) -> None:
    install(place)
    done = place.run("--event-log-handler", "stuck", "--no-python", "true")
    assert (done.status, done.err.count("\n")) == (0, 2), done
    assert done.err.endswith("phalanx: phalanx-status has not taken all events of this run within 5 s of its end\n")


@pytest.mark.long
def test_events_of_a_failure_and_of_a_stop(place: Place, ready: Ready) -> None:
    install(place)
    script = place.write(f"""
        import signal, sys
        if len(sys.argv) > 1:
            raise ValueError("bad")
        {ready.python()}
        signal.pause()
        """)

    def told() -> list[tuple[str, Any]]:
        path = place.folder / "told"
        lines = path.read_text().splitlines()
        path.unlink()
        return [(one["metadata"]["state"], one["metadata"]["raw_error"]) for one in map(json.loads, lines)]

    assert place.run("--event-log-handler", "mine", script, "fail").status == 1
    *_, worker, agent = told()
    assert worker[0] == "FAILED"
    assert json.loads(worker[1])["message"]["message"] == "ValueError: bad"
    assert agent == ("SUCCEEDED", None)
    with place.start("--event-log-handler", "mine", script) as launcher:
        ready.wait()
        launcher.send(signal.SIGTERM)
        launcher.end()
    assert told()[-1] == ("FAILED", "stopped")
    loses = place.write("import os, signal; os.kill(os.getppid(), signal.SIGKILL); signal.pause()", "loses.py")
    assert place.run("--event-log-handler", "mine", "--nproc-per-node", 2, loses).status == 1
    assert [state for state, _ in told()][-3:] == ["TERMINATED", "TERMINATED", "SUCCEEDED"], "their keeper was lost"
    assert place.run("--event-log-handler", "mine", "--no-python", "no-such-program").status != 0
    assert told()[-1][0] == "FAILED"
