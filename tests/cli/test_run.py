"""`phalanx run` as a person or a script uses it: real processes, their consoles, files, signals and exit codes."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from phalanx._placement import devices
from phalanx.cli.run import main
from phalanx.cli.run import run as command
from phalanx.errors import ChildFailedError
from tests.support.command import VARIABLES, Launcher, Place, terminal
from tests.support.helpers import Gate, Ready, alive, let_a_request_pass, wait_gone

# --- what a worker finds


@pytest.mark.slow
def test_workers_find_their_environment_and_meet(place: Place) -> None:
    script = place.write(f"""
        import json, os, socket, sys
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if os.environ["RANK"] == "0":
            with socket.create_server(address) as server:
                for _ in range(2):
                    server.accept()[0].close()
        else:
            while True:
                try: socket.create_connection(address).close()
                except ConnectionRefusedError: continue
                break
        print(json.dumps({{name: os.environ.get(name) for name in {VARIABLES!r}}}))
        print(repr(sys.stdin.read()), os.getcwd(), os.getsid(0) == os.getpid())
        """)
    done = place.run("--nproc-per-node", 3, "--run-id", "night", "--role", "trainer", "-r", 3, script)
    assert done.status == 0, done
    for rank in range(3):
        found, where = place.log(rank).splitlines()
        env = json.loads(found)
        assert where == f"'' {place.folder} True"
        port, error_file = env.pop("MASTER_PORT"), env.pop("TORCHELASTIC_ERROR_FILE")
        assert port == json.loads(place.log(0).splitlines()[0])["MASTER_PORT"]
        assert 0 < int(port) < 65536
        assert Path(error_file).match(f"*/night_*/attempt_0/{rank}/error.json")
        assert env == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "trainer",
            "ROLE_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": "night",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }


@pytest.mark.slow
def test_a_master_and_settings_of_nccl_are_those_the_user_names(place: Place) -> None:
    place.env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    names = "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    script = place.write(f"import os; print(*(os.environ[name] for name in {names}))")
    for more, port in (("--master-port", 29500), "29500"), ((), r"[1-9]\d*"):
        done = place.run("--master-addr", "node7.invalid", *more, script)
        assert re.fullmatch(rf"\[0\] node7\.invalid {port} 3\n", done.out)


# --- how many workers


def test_the_number_of_workers_by_name(place: Place) -> None:
    script = place.write("import os; print(os.environ['WORLD_SIZE'])")
    cpus = sorted(os.sched_getaffinity(0))
    done = place.run("--nproc_per_node", "cpu", script, head=("taskset", "-c", str(cpus[0])))
    assert done.out == "[0] 1\n"
    place.env |= dict.fromkeys((f"{maker}_VISIBLE_DEVICES" for maker in MAKERS), "")
    assert place.run("--nproc-per-node", "auto", script).out.count(f"] {len(cpus)}\n") == len(cpus)


NODES, PROC, WSL = "dev/nvidia{}", "proc/driver/nvidia/gpus/0000:{:02x}:00.0/x", "usr/lib/wsl/lib/"


def machine(root: Path, *simds: int, nodes: int = 0, proc: int = 0, library: str = "") -> str:
    """A root folder with devices of AMD (by their units), of NVIDIA, or of WSL2."""
    names = ["dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia-uvm-tools", "dev/nvidia-caps/nvidia-cap1", "dev/null"]
    names += [NODES.format(number) for number in range(nodes)] + [PROC.format(number) for number in range(proc)]
    names += ["dev/dxg", f"{WSL}{library}"] if library else []
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    for number, simd in enumerate(simds):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count {0 if simd else 16}\nsimd_count {simd}\nmem_banks_count 1\n")
    return str(root)


FOUR = {"nodes": 4, "proc": 4}
MAKERS = ("CUDA", "ROCR", "HIP")


@pytest.mark.parametrize(
    "devices_there,simds,visible,count",
    [
        ({}, (), {}, 0),
        ({}, (), {"CUDA": "0,1"}, 0),  # a variable makes no device
        ({"nodes": 12, "proc": 12}, (), {}, 12),
        ({"proc": 8}, (), {}, 8),  # drivers that show no nodes
        ({"nodes": 1, "proc": 8}, (), {}, 1),  # in a container, /proc shows the host's
        ({}, (0, 0, 304, 304, 1216), {}, 3),
        ({}, (0, *[304] * 4), {"CUDA": "0"}, 1),
        ({}, (0, *[304] * 4), {"CUDA": "0", "ROCR": "0,1"}, 2),
        ({}, (0, *[304] * 4), {"CUDA": "0", "ROCR": "0,1", "HIP": "0,1,2"}, 3),
        *((FOUR, (), {"CUDA": text}, count) for text, count in [
            ("", 0), ("0", 1), (" 0 , 2 ", 2), ("-1", 0), ("NoDevFiles", 0), ("0,-1,2", 1), ("GPU-8932f937", 1),
            ("MIG-GPU-1/1/0,MIG-GPU-1/2/0", 2), ("0,1,2,3,4,5", 4), ("4", 0), ("3,4,0", 1), ("0,0", 0), ("0,,1", 1),
            ("GPU-a,0", 1), ("0 1", 1), ("0,GPU-a", 1)]),
        *(({"library": name}, (), {}, 1) for name in ("libcuda.so.1", "libnvidia-ml.so.1")),  # under WSL
        ({"library": "libother.so"}, (), {}, 0),  # of another maker, under WSL
    ],
)  # fmt: skip
def test_devices_are_counted_without_a_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices_there: dict[str, Any], simds: tuple[int, ...],
    visible: dict[str, str], count: int,
) -> None:  # fmt: skip
    for maker in MAKERS:
        monkeypatch.delenv(f"{maker}_VISIBLE_DEVICES", raising=False)
    for maker, text in visible.items():
        monkeypatch.setenv(f"{maker}_VISIBLE_DEVICES", text)
    assert devices.count_gpus(machine(tmp_path, *simds, **devices_there)) == count


VISIBLE = [
    "", " ", "0", "1", "7,3", "0,1", " 0 , 2 ", "\t0\n,1", "-1", "0,-1,2", "-0", "NoDevFiles", "0,NoDevFiles,1",
    "0,0", "0,1,0", "0,-1,0", "0,0,-1", "0,,1", ",", ",0", "0,", "0 1", "0 1,2", "1gpu2,2ampere", "+1", "1,+1", "0x1",
    "01", "1,01", "1.5", "1-2", "0;1", "4", "3,4,0", "GPU-a", "GPU-a,GPU-b", "GPU-a,GPU-a", "GPU-a,0", "0,GPU-a",
    "GPU-a,MIG-b", " GPU-a", "GPU-a, GPU-b", "GPU-a,,GPU-b", "gpu-a", "GPU-", "MIG-GPU-1/1/0,MIG-GPU-1/2/0",
    "MIG-a,MIG-a", "MIG-a,GPU-b", "MIG-a,1", "all", "none", "void", "99999999999999999999",
]  # fmt: skip


@pytest.mark.parametrize("value", VISIBLE)
@pytest.mark.torch
def test_visible_devices_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    cuda: Any = importlib.import_module("torch.cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert devices.visible(value) == list(map(str, cuda._parse_visible_devices()))


# --- options


def parsed(*argv: str) -> dict[str, Any]:
    return command.make_context("run", list(argv)).params


def test_the_grace_by_the_names_that_torchrun_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed("--shutdown-timeout", "5", "script.py")["grace"] == 5
    for number, name in enumerate(["TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT", "PET_GRACE"]):
        monkeypatch.setenv(name, str(number))  # each goes before those above
        assert parsed("script.py")["grace"] == number


@pytest.mark.parametrize("what", ["--dry-run", "--print-config"])
def test_a_program_gets_what_is_printed_as_text(what: str, place: Place) -> None:
    script = place.write("")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main([what, "--role", "größer", str(script)])
    assert "größer" in out.getvalue()


def test_the_command_line_from_python(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    logs = ("--log-dir", "/dev/null")
    main([*logs, str(place.write("print('hello')"))])
    assert capfd.readouterr().out == "hello\n"
    with pytest.raises(ChildFailedError) as failed:
        main([*logs, "--nproc-per-node", "2", str(place.write("import os; os.environ['RANK'] == '0' or exit(3)"))])
    assert {rank: failure.exitcode for rank, failure in failed.value.failures.items()} == {1: 3}
    assert "FAILED" in capfd.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main([*logs, "no_such.py"])
    assert ended.value.code == 2


@pytest.mark.torch
def test_the_command_line_from_python_is_as_torchs(place: Place) -> None:
    # Of the second rank, so that nobody is stopped for it before it has exited itself.
    place.write("import os, sys; sys.exit(int(sys.argv[1]) if os.environ['RANK'] == '1' else 0)", "ends.py")
    script = place.write("""
        import sys
        try:
            if sys.argv[1] == "torch":
                from torch.distributed.run import main
            else:
                from phalanx.run import main
            print(main(["--log-dir", sys.argv[1], "--nproc-per-node", "2", "ends.py", sys.argv[2]]))
        except Exception as error:
            print(type(error).__name__, sorted({failure.exitcode for failure in error.failures.values()}))
        """)
    for code, said in (("0", "None\n"), ("3", "ChildFailedError [3]\n")):
        for which in ("torch", "phalanx"):
            done = place.program(sys.executable, script, which, code)
            assert (done.status, done.out) == (0, said), (which, done)


@pytest.mark.parametrize(
    "typed,expected",
    [
        ("S --role 9 -m --help -r 3 --no_python", "--role 9 -m --help -r 3 --no_python"),
        ("S -- a -- b", "a -- b"),
        ("S a -- b", "a -- b"),
        ("S --", ""),
        ("-- S -- --help", "-- --help"),
        ("-m -- train -- x", "-- x"),
        ("--no-python ./sys.sh -- -x", "-x"),
    ],
)
def test_the_script_gets_what_follows_but_one_separator(
    place: Place, monkeypatch: pytest.MonkeyPatch, typed: str, expected: str
) -> None:
    """As torchrun's parser does it: `test_torchrun_options_torch` runs that."""
    monkeypatch.chdir(place.folder)
    script = place.write("", "train.py")
    os.chmod(place.write("#!/bin/sh\n", "sys.sh"), 0o700)
    argv = ("--dry-run", "--log-format", "json", *(script if word == "S" else word for word in typed.split()))
    (rank,) = map(json.loads, CliRunner().invoke(command, argv).output.splitlines())
    found = [word for word in rank["argv"] if word in (script, "train", "./sys.sh") or word.endswith("/sys.sh")]
    assert rank["argv"][rank["argv"].index(found[-1]) + 1 :] == expected.split()


@pytest.mark.slow
def test_a_module_and_a_binary_are_run(place: Place) -> None:
    place.write("", "package/__init__.py")
    place.write("import sys; print(__name__, __package__, sys.argv[1:])", "package/job.py")
    assert place.run("-m", "package.job", "-x").out == "[0] __main__ package ['-x']\n"
    done = place.run("--no-python", "sh", "-c", 'echo "$RANK said $1" >&2; exit 3', "sh", "-x")
    assert done.status == 3
    assert "[0] 0 said -x\n" in done.err
    assert "last lines of stderr:\n    0 said -x\n" in done.err
    done = place.run("--no-python", "absent-binary")
    assert (done.status, "Traceback" in done.err) == (1, False)
    assert "absent-binary" in done.err
    assert place.env["PATH"] in done.err


# --- consoles and files

SPEAK = """
    import os, sys
    rank = os.environ["RANK"]
    sys.stdout.write(f"out {rank}\\n")
    sys.stderr.write(f"err {rank}\\n")
    """
BOTH = ("stderr.log", "stdout.log")


class Streams(NamedTuple):
    out: set[str]
    err: set[str]
    files: tuple[tuple[str, ...], tuple[str, ...]]


def prefixed(what: str, *ranks: int) -> set[str]:
    return {f"[{rank}] {what} {rank}" for rank in ranks}


def raw(what: str, *ranks: int) -> set[str]:
    return {f"{what} {rank}" for rank in ranks}


@pytest.mark.parametrize(
    "argv,expected",
    [
        ("", Streams(prefixed("out", 0, 1), prefixed("err", 0, 1), (BOTH, BOTH))),
        ("-r 0", Streams(raw("out", 0, 1), raw("err", 0, 1), ((), ()))),
        ("-r 1", Streams(set(), raw("err", 0, 1), (("stdout.log",), ("stdout.log",)))),
        ("-t 2", Streams(raw("out", 0, 1), prefixed("err", 0, 1), (("stderr.log",), ("stderr.log",)))),
        ("-r 1 -t 2", Streams(set(), prefixed("err", 0, 1), (BOTH, BOTH))),
        ("-r 0:3,1:0", Streams(raw("out", 1), raw("err", 1), (BOTH, ()))),
        ("--local-ranks-filter 1", Streams(prefixed("out", 1), prefixed("err", 1), (BOTH, BOTH))),
        ("-r 0 --local-ranks-filter 0", Streams(raw("out", 0), raw("err", 0), ((), ()))),
    ],
)
def test_where_output_goes(place: Place, argv: str, expected: Streams) -> None:
    done = place.run("--nproc-per-node", 2, *argv.split(), place.write(SPEAK))
    assert done.status == 0
    assert set(done.out.splitlines()) == expected.out
    assert {line for line in done.err.splitlines() if not line.startswith("phalanx: ")} == expected.err
    for rank, names in enumerate(expected.files):
        (folder,) = place.logs.glob(f"*/attempt_0/{rank}")
        assert tuple(sorted(path.name for path in folder.iterdir())) == names
        for name in names:
            assert (folder / name).read_text() == f"{name[3:6]} {rank}\n"


def test_the_run_directory_is_said_once_and_first(place: Place) -> None:
    done = place.run("--run-id", "a/b", "--nproc-per-node", 2, place.write(SPEAK))
    first, *rest = done.err.splitlines()
    (folder,) = place.logs.iterdir()
    assert first == f"phalanx: 2 workers, logs in {folder}"
    assert folder.name.startswith("a_b_")
    assert sorted(rest) == ["[0] err 0", "[1] err 1"]


# --- terminals


def test_a_terminal_that_nobody_reads_holds_up_nobody(place: Place, ready: Ready, gate: Gate) -> None:
    done = f"for _ in range(2_000): print('x' * 50)\n{ready.python()}\n"
    succeeding = place.write(done, "succeeding.py")
    failing = place.write(f"{done}raise SystemExit(3)", "failing.py")
    waiting = place.write(f"{done}{gate.python()}", "waiting.py")
    with contextlib.ExitStack() as stack:

        def start(script: str, **settings: Any) -> Launcher:
            _ours, theirs = stack.enter_context(terminal())
            return stack.enter_context(place.start(script, stdout=theirs, **{"stderr": theirs, **settings}))

        launchers = [start(succeeding, stderr=subprocess.PIPE), start(succeeding), start(failing), start(waiting)]
        pids = ready.pids(4)
        launchers[3].send(signal.SIGTERM)
        assert not wait_gone(pids)
        ends = [launcher.end() for launcher in launchers]
    assert [end.status for end in ends] == [0, 0, 3, 143]
    assert re.search(r"phalanx: … [\d,]+ more lines in \S+/0/stdout.log", ends[0].err)
    assert [path.stat().st_size for path in place.logs.glob("*/attempt_0/0/stdout.log")] == [51 * 2_000] * 4


@pytest.mark.slow
def test_closed_streams_of_the_launcher(place: Place) -> None:
    closed = ("sh", "-c", 'exec "$@" >&- 2>&-', "sh")
    assert place.run(place.write(f"{SPEAK}\n    raise SystemExit(255)"), head=closed) == (255, "", "")
    assert place.log(0) == "out 0\n"
    assert place.run("-r", 0, place.write("raise SystemExit(3)"), head=closed) == (3, "", "")


# --- the end


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_root_cause(place: Place) -> None:
    pids, watched = place.folder / "pids", place.folder / "watched"
    os.mkfifo(pids)
    os.mkfifo(watched)
    script = place.write(f"""
        import os, select, sys
        if os.environ["RANK"] == "1":
            open({str(pids)!r}, "w").write(str(os.getpid()))
            open({str(watched)!r}).read()
            sys.exit(9)
        fd = os.pidfd_open(int(open({str(pids)!r}).read()))
        open({str(watched)!r}, "w").close()
        select.select([fd], [], [])
        sys.exit(5)
        """)
    done = place.run("--nproc-per-node", 2, script)
    assert done.status == 9
    assert "exitcode  : 9" in done.err.partition("Root Cause")[2].partition("Other Failures")[0]


SAVE = """
    import os, pathlib, signal
    try:
        {ready}
        {gate}
    except KeyboardInterrupt:
        pathlib.Path("saved-" + os.environ["RANK"]).touch()
        print("saved")
        raise SystemExit(0)
    """


@pytest.mark.slow
def test_the_first_interrupt_lets_workers_finish(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(SAVE.format(ready=ready.python(), gate=gate.python()))
    with place.start("--nproc-per-node", 2, script) as launcher:
        workers = ready.pids(2)
        launcher.send(signal.SIGINT)
        done = launcher.end()
    assert done.status == 130
    assert "SIGINT: stopping the workers (at most 30 s; once more to kill them)" in done.err
    assert "Traceback" not in done.err
    assert sorted(done.out.splitlines()) == ["[0] saved", "[1] saved"]
    assert {path.name for path in place.folder.glob("saved-*")} == {"saved-0", "saved-1"}
    assert not wait_gone(workers, 0)


FAILED_BEFORE = """
    import os, signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    {ready}
    if os.environ["RANK"] == "0":
        {gate}
        raise ValueError("loss is nan")
    while True: signal.pause()
    """


@pytest.mark.slow
def test_an_interrupt_hides_no_failure_that_came_before(place: Place, ready: Ready, gate: Gate) -> None:
    told = ready.python("os.environ['RANK'] + ' ' + str(os.getpid())")
    script = place.write(FAILED_BEFORE.format(ready=told, gate=gate.python()))
    with place.start("--nproc-per-node", 2, script) as launcher:
        pids = dict(said.split() for said in ready.wait(2))
        gate.open()
        assert not wait_gone([int(pids["0"])])
        launcher.send(signal.SIGINT)
        launcher.read_until("SIGINT: stopping")
        let_a_request_pass()
        launcher.send(signal.SIGINT)
        done = launcher.end()
    assert done.status == 1
    assert "rank      : 0 (local_rank: 0)" in done.err
    assert "error     : ValueError: loss is nan" in done.err
    assert "rank 1: stopped by us (SIGKILL)" in done.err


STUBBORN = """
    import os, signal, subprocess, sys, time
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(signal.Signals[name], lambda number, frame: print("not yet"))
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    {ready}
    while True: time.sleep(0.1)
    """


@pytest.mark.slow
def test_the_second_interrupt_kills_and_more_do_no_harm(place: Place, ready: Ready) -> None:
    script = place.write(STUBBORN.format(ready=ready.python("f'{os.getpid()} {child.pid}'")))
    with place.start(script) as launcher:
        pids = [int(pid) for pid in ready.wait()[0].split()]
        launcher.send(signal.SIGINT)
        launcher.read_until("stopping the workers")
        let_a_request_pass()
        for _ in range(5):
            launcher.send(signal.SIGINT)
        start = time.monotonic()
        done = launcher.end()
        assert time.monotonic() - start < 10
    assert done.status == 130
    assert "SIGKILL: killing the workers" in done.err
    assert "Traceback" not in done.err
    assert "Aborted" not in done.err
    assert not [pid for pid in pids if alive(pid)]


SAVES = """
    import signal, sys, time
    def save(number, frame):
        time.sleep(0.6)
        print("saved")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    {ready}
    while True: time.sleep(0.1)
    """


@pytest.mark.slow
@pytest.mark.parametrize("head", [(), ("timeout", "600")])
def test_two_signals_within_a_moment_are_one(place: Place, ready: Ready, head: tuple[str, ...]) -> None:
    """As from timeout(1), which signals its command, and then the whole process group, itself included."""
    script = place.write(SAVES.format(ready=ready.python()))
    with place.start("--nproc-per-node", 2, script, head=head) as launcher:
        ready.wait(2)
        launcher.send(signal.SIGTERM)
        if not head:
            time.sleep(0.06)
            launcher.send(signal.SIGTERM)
        done = launcher.end()
    assert head or done.status == 143
    assert sorted(done.out.splitlines()) == ["[0] saved", "[1] saved"]
    assert "SIGKILL" not in done.err


@pytest.mark.slow
def test_under_nohup_a_hangup_changes_nothing(place: Place, ready: Ready, gate: Gate) -> None:
    text = ready.python("__import__('signal').getsignal(1) == __import__('signal').SIG_DFL")
    script = place.write(f"{text}\n{gate.python()}\nprint('done')")
    with place.start(script, head=("sh", "-c", 'trap "" HUP; exec "$@"', "sh")) as launcher:
        assert ready.wait() == ["True"]
        launcher.send(signal.SIGHUP)
        gate.open()
        done = launcher.end()
    assert done[:2] == (0, "[0] done\n")
    assert "SIGHUP" not in done.err


# --- the command


@pytest.mark.slow
def test_the_ways_to_call_it(place: Place) -> None:
    script = place.write("print('x')")
    beside = Path(sys.executable).with_name("phalanx")
    ways: list[list[str]] = [[sys.executable, "-m", name] for name in ("phalanx.cli.run", "phalanx.run")]
    for way in [*ways, *([[str(beside), "run"]] if beside.exists() else [])]:
        done = place.program(*way, "--log-dir", place.logs, script)
        assert done[:2] == (0, "[0] x\n"), done
        assert "Warning" not in done.err


LOADED_LATER = [
    *("cloudpickle", "asyncio", "multiprocessing.context", "torch", "numpy", "tomllib", "decimal", "http"),
    *("http.server", "importlib.util", "jinja2", "prometheus_client", "statistics", "phalanx._page"),
    *("phalanx.cli._job_file", "phalanx.cli._dry_run", "phalanx._run.event_commands", "phalanx._run.services"),
    *("phalanx._run.run_metrics",),
]
"""What a run loads for an option alone that it does not have."""


@pytest.mark.slow
def test_nothing_that_a_run_does_not_need_is_imported(place: Place) -> None:
    script = place.write(f"""
        import glob, time
        while not glob.glob({str(place.logs)!r} + "/*/samples.jsonl"):
            time.sleep(0.01)
        """)
    program = place.write(
        f"""
        import sys
        before = set(sys.modules)
        from phalanx.cli.run import main
        main(["--sample", "0.01", "--log-dir", {str(place.logs)!r}, {script!r}])
        print(*sorted((set(sys.modules) - before) & {{*{LOADED_LATER}}}))
        """,
        "program.py",
    )
    assert place.program(sys.executable, program)[:2] == (0, "\n")


@pytest.mark.slow
def test_a_fatal_signals_stack_has_the_names_of_files(place: Place) -> None:
    """The interpreter's own fault handler escapes what is not ASCII."""
    script = place.write("import ctypes\n\ndef step():\n    ctypes.string_at(0)\n\nstep()\n", "für/日本.py")
    done = place.run(script)
    assert done.status == 128 + signal.SIGSEGV
    assert f'File "{script}", line 4 in step' in done.err
    assert "/_engine/" not in done.err.partition("logs")[0]


# --- where helpers cannot be had

FORBIDDEN = """
import errno, os, sys
from tests.logs.test_rotation import forbid
forbid(int(sys.argv[1]), errno.EPERM)
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are this machine's")
@pytest.mark.parametrize(
    "number,expected",
    [
        (434, "pidfd_open(2) is refused here"),
        (289, "the group's keeper was not started: Operation not permitted: signalfd(2)"),
        (157, "the group's keeper was not started: Operation not permitted: prctl(36, 1)"),
    ],
    ids=["pidfd_open", "signalfd", "prctl"],
)
def test_a_call_of_the_system_that_is_forbidden_is_named(place: Place, number: int, expected: str) -> None:
    head = (sys.executable, "-c", FORBIDDEN, str(number))
    place.env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = place.run("--no-python", "true", head=head)
    assert done.status == 1
    (line,) = (line for line in done.err.splitlines() if not line.startswith("phalanx: 1 worker"))
    assert expected in line
    for path in place.logs.glob("*/run.json"):
        assert json.loads(path.read_text())["state"] == "failed"


@pytest.mark.slow
def test_helpers_that_end_at_once_fail_the_run_in_one_line(place: Place) -> None:
    program = "import multiprocessing as mp; mp.set_executable('/bin/false'); from phalanx.cli import main; main()"
    done = place.program(sys.executable, "-c", program, "run", "--log-dir", place.logs, "--no-python", "true")
    assert done.status == 1
    (line,) = (line for line in done.err.splitlines() if not line.startswith("phalanx: 1 worker"))
    assert line.startswith("phalanx: Error: the group's keeper")
    (path,) = place.logs.glob("*/run.json")
    record = json.loads(path.read_text())
    assert (record["state"], record["exit_code"]) == ("failed", 1)
    assert record["cause"] in line


@pytest.mark.slow
@pytest.mark.each_python
def test_nothing_of_ours_opens_a_file_without_an_encoding(place: Place) -> None:
    place.env |= {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONWARNINGS": "error"}
    script = place.write("import os, sys; print(os.getpid()); sys.exit(int(os.environ['RANK']) * 3)")
    options = "--nproc-per-node 2 --cpu-bind core --log-max-size 1K --rlimit nofile=512 --max-restarts 1"
    done = place.run(*options.split(), script)
    assert (done.status, "EncodingWarning" in done.err) == (3, False), done
    run = str(next(place.logs.iterdir()))
    for argv in (("runs", "--log-dir", place.logs), ("report", run), ("logs", run)):
        done = place.program(sys.executable, "-m", "phalanx", *argv)
        assert (done.status, "Warning" in done.err) == (0, False), done
