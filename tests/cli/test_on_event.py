"""Commands that run when something happens to a run."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from phalanx._events import agent_kinds, kinds
from phalanx._events.stream import EventStream
from phalanx._run.event_commands import MOST, EventCommands
from tests.support.command import LIMIT, Place
from tests.support.disks import small, until
from tests.support.helpers import wait_gone

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

FAILS = """
    import os, sys
    sys.exit(3 * (os.environ["RANK"] == "1"))
    """
FAILS_ONCE = """
    import os, sys
    sys.exit(3 * (os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "10"))
    """
HANGS = """
    import os, threading
    from phalanx import timer
    timer.beat()
    while True:
        threading.Event().wait(None if os.environ["RANK"] == "1" else 0.02)
        timer.beat()
    """
WAITS = """
    import threading
    threading.Event().wait()
    """
WHAT = '"$PHALANX_EVENT/$PHALANX_EVENT_RANK/$PHALANX_EVENT_ATTEMPT/$PHALANX_EVENT_CAUSE"'


class Pages:
    """A folder that commands write into: what they were told, and what they read."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.command = (
            f"cd {folder}; echo {WHAT} >> events; cat > $PHALANX_EVENT.part; mv $PHALANX_EVENT.part $PHALANX_EVENT"
        )

    @property
    def events(self) -> list[str]:
        return (self.folder / "events").read_text().splitlines()

    def read(self, event: str) -> str:
        return (self.folder / event).read_text()


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    return Pages(tmp_path / "pages of a run")


def on_event(pages: Pages, events: str) -> tuple[str, str, str]:
    return "--on-event", events, pages.command.replace(str(pages.folder), shlex.quote(str(pages.folder)))


ALL = "started,hung,straggler,restarted,failed,stopped,succeeded"


def run_folder(place: Place) -> Path:
    (path,) = place.logs.glob("*/run.json")
    return path.parent


# --- what happens


def test_commands_of_a_failure_have_report_page_and_order(place: Place, pages: Pages) -> None:
    log = shlex.quote(str(pages.folder / "order"))
    commands = [("failed", f"echo 1 >> {log}"), ("started,failed", f"echo 2 $PHALANX_EVENT >> {log}")]
    commands += [("failed", 'cp "$PHALANX_EVENT_RUN_DIR/report.html" mailed')]
    more = [word for pair in commands for word in ("--on-event", *pair)]
    done = place.run("--nproc-per-node", 2, *on_event(pages, ALL), *more, place.write(FAILS))
    assert done.status == 3
    assert pages.events == ["started//0/", "failed//0/rank 1: exited with code 3; no error was recorded"]
    again = place.program(sys.executable, "-m", "phalanx", "report", run_folder(place))
    assert pages.read("failed") == again.out
    assert "Root Cause" in again.out
    assert "on-event:" not in done.err
    assert (pages.folder / "order").read_text() == "2 started\n1\n2 failed\n"
    page = run_folder(place) / "report.html"
    assert (place.folder / "mailed").read_bytes() == page.read_bytes(), "it is complete"
    assert done.err.splitlines()[-1] == f"phalanx: page: {page}"


def test_a_restart_and_what_a_command_finds_of_it(place: Place, pages: Pages) -> None:
    place.env["PHALANX_JOB_SECRET"] = "0123456789abcdef"  # noqa: S105 - of nobody
    finds = ("--on-event", "succeeded", f"env > {shlex.quote(str(pages.folder / 'env'))}")
    options = ("--nproc-per-node", 2, "--max-restarts", 1, "--run-id", "night", *finds)
    done = place.run(*options, *on_event(pages, "restarted, SUCCEEDED,failed"), place.write(FAILS_ONCE))
    assert done.status == 0, done
    cause = "attempt 0: rank 1, exited with code 3; no error was recorded"
    assert pages.events == [f"restarted//1/{cause}", "succeeded//1/"]
    name = run_folder(place).name
    assert pages.read("restarted").splitlines()[:2] == [f"{name}: attempt 1 begins", f"  cause     : {cause}"]
    assert pages.read("succeeded").startswith(f"{name}: succeeded after ")
    env = dict(line.split("=", 1) for line in pages.read("env").splitlines() if "=" in line)
    assert not env["PHALANX_JOB_SECRET"]
    assert env["PHALANX_EVENT_RUN_ID"] == "night"
    assert env["PHALANX_EVENT_RUN_DIR"] == str(run_folder(place))
    assert env["PHALANX_EVENT_HOST"] == os.uname().nodename
    assert "PHALANX_RUN_ID" not in env


@pytest.mark.parametrize("steps, ended", [("kill", "failed"), ("report", "stopped")])
def test_one_hang_is_one_event_however_often_it_is_reported(place: Place, pages: Pages, steps: str, ended: str) -> None:
    options = ("--nproc-per-node", 2, "--hang-timeout", 0.5, "--on-expiry", steps)
    with place.start(*options, *on_event(pages, "hung,failed,stopped"), place.write(HANGS)) as launcher:
        if steps == "report":
            for _ in range(3):
                launcher.read_until("rank 1: no heartbeat for 0.5 s")
            launcher.send(signal.SIGTERM)
        launcher.end()
    cause = "Hang: no heartbeat for 0.5 s"
    assert [event.partition(" (")[0] for event in pages.events] == [
        f"hung/1/0/{cause}", f"{ended}//0/{'SIGTERM' if steps == 'report' else f'rank 1: {cause}'}"
    ]  # fmt: skip
    lines = pages.read("hung").splitlines()
    assert lines[0] == f"{run_folder(place).name}: rank 1 (host {os.uname().nodename}): hangs"
    assert f"  logs      : {run_folder(place)}" in lines


def test_a_stop(place: Place, pages: Pages) -> None:
    with place.start(*on_event(pages, "started,stopped"), place.write(WAITS)) as launcher:
        until((pages.folder / "started").exists)
        launcher.send(signal.SIGINT)
        assert launcher.end().status == 130
    assert pages.events == ["started//0/", "stopped//0/SIGINT"]


def test_a_command_stops_its_run(place: Place) -> None:
    command = f'{shlex.quote(sys.executable)} -P -m phalanx stop "$PHALANX_EVENT_RUN_DIR"'
    done = place.run("--on-event", "started", command, place.write(WAITS))
    assert done.status == 143
    assert "--on-event" not in done.err
    folder = run_folder(place)
    assert f"\n{folder.name}: its end waits for this command of --on-event\n" in (folder / "on-event.log").read_text()


def test_a_run_whose_workers_cannot_be_started_has_failed(place: Place, pages: Pages) -> None:
    script = place.write(WAITS)
    done = place.run("--node-check", "exit 4", *on_event(pages, "failed"), script)
    assert done.status == 1
    assert pages.events == ["failed//0/--node-check: exit code 4"]
    assert "--node-check: exit code 4" in pages.read("failed")


def test_without_logs_there_is_a_report_all_the_same(place: Place, pages: Pages) -> None:
    options = ("--nproc-per-node", 2, "--log-dir", "/dev/null", *on_event(pages, "failed"))
    done = place.run(*options, place.write(FAILS), logs=False)
    assert done.status == 3
    assert "Root Cause" in pages.read("failed")
    assert "cause     : rank 1: exited with code 3" in pages.read("failed")


def test_the_report_is_printed_before_a_command_that_fails(place: Place) -> None:
    go_on = place.folder / "go on"
    os.mkfifo(go_on)
    command = f"read line < {shlex.quote(str(go_on))}; echo out; echo no route >&2; exit 7"
    with place.start("--nproc-per-node", 2, "--on-event", "failed", command, place.write(FAILS)) as launcher:
        launcher.read_until("\nrank 0: ")
        with go_on.open("w") as file:
            file.write("\n")
        done = launcher.end()
    assert done.status == 3
    log = run_folder(place) / "on-event.log"
    lines = [line for line in done.err.splitlines() if "--on-event" in line]
    assert lines == [f"phalanx: --on-event failed: exit code 7: no route; its output is in {log}"]
    head, *output = log.read_text().splitlines()
    assert re.fullmatch(r"== failed: read line < .*, [\d-]+ [\d:]+: exit code 7: no route", head)
    assert output == ["out", "no route"]


# --- what is told by the events alone


@pytest.fixture
def stream() -> Iterator[EventStream]:
    made = EventStream()
    yield made
    made.close()


def watched(stream: EventStream, *commands: tuple[str, str], **options: Any) -> EventCommands:
    options = {"is_job": False, "is_first": True, "ends_hangs": True} | options
    made = EventCommands([(names.split(","), each) for names, each in commands], run_id="night", **options)
    stream.subscribe(EventCommands.NAME, made)
    return made


def end(stream: EventStream, watch: EventCommands) -> None:
    cause = "rank 1: exited with code 3"
    stream.emit(agent_kinds.RunEnded, 0, time.monotonic_ns(), state="failed", exitcode=1, cause=cause)
    assert stream.drain(LIMIT) == []
    watch.begin_end()
    watch.close(LIMIT)


def begin_attempt(stream: EventStream, number: int, group_rank: int) -> None:
    stream.emit(
        agent_kinds.AgentStatus, number, time.monotonic_ns(), status="RENDEZVOUS", seconds=0.0, restarts=number,
        group_rank=group_rank, group_world_size=3, workers=(),
    )  # fmt: skip


def stop_job(stream: EventStream, kind: str, group_rank: int) -> None:
    facts = {"reason": kind, "host": "h2", "group_rank": group_rank, "rank": 5, "cause": "why"}
    stream.emit(agent_kinds.JobStopping, 0, time.monotonic_ns(), **facts)


def expire(stream: EventStream, kind: type[kinds.TimerEvent] = kinds.TimerExpired, rank: int = 0) -> None:
    stream.emit(kind, 0, time.monotonic_ns(), rank=rank, pid=7, scope="step", place="", overdue=0.0, what="Hang: step")


def test_a_straggler(stream: EventStream, pages: Pages) -> None:
    watch = watched(stream, ("straggler", on_event(pages, "")[2]))
    stream.emit(agent_kinds.RankSlow, 2, time.monotonic_ns(), rank=5, host="b", ratio=1.8, seconds=600.0)
    end(stream, watch)
    assert pages.events == ["straggler/5/2/1.8 x the median step for 10m00s"]
    assert pages.read("straggler").startswith("night: rank 5 (host b): slow\n  cause     : 1.8 x the median step")


def test_a_second_hang_is_an_event_and_two_timers_of_one_are_not(stream: EventStream, pages: Pages) -> None:
    watch = watched(stream, ("hung", on_event(pages, "")[2]), ends_hangs=False)
    expire(stream)
    expire(stream, rank=1)
    expire(stream, kinds.TimerLeft)
    expire(stream, rank=1)
    expire(stream, kinds.TimerLeft, rank=1)
    expire(stream, rank=1)
    end(stream, watch)
    assert pages.events == ["hung/0/0/Hang: step", "hung/1/0/Hang: step"]


@pytest.mark.parametrize(
    "group_rank, happens, told",
    [
        (0, [("failure", 1)], ["failed"]),
        (1, [("failure", 0)], []),
        (2, [("failure", 2)], []),
        (1, [("lost", 0)], ["failed"]),
        (2, [("lost", 0)], []),
        (0, [("lost", 1)], ["failed"]),
        (1, [("lost", 2)], []),
        (0, [], ["failed"]),  # the store does not answer any more: nobody knows who is left
        (1, [], ["failed"]),
        (2, [], []),
        (1, [("left", 1)], ["failed"]),  # this machine leaves the job, as the store does not answer
        (2, [("left", 2)], []),
        (1, [("left", 0)], []),
        (1, [("hang", 1)], ["hung"]),
        (0, [("hang", 1)], ["failed"]),
        (None, [], ["failed"]),  # the job has never begun
        (None, [], []),
    ],
)
def test_one_machine_of_a_job_speaks_for_it(
    stream: EventStream, pages: Pages, group_rank: int | None, happens: list[tuple[str, int]], told: list[str]
) -> None:
    watch = watched(
        stream, ("hung,failed", on_event(pages, "")[2]), is_job=True, is_first=group_rank is None and bool(told)
    )
    if group_rank is not None:
        begin_attempt(stream, 0, group_rank)
        expire(stream)  # many ranks hang at a time, and the job says which was the first
    for kind, place in happens:
        stop_job(stream, kind, place)
    end(stream, watch)
    assert [event.partition("/")[0] for event in (pages.events if told else [])] == told
    assert told or not (pages.folder / "events").exists()


def test_the_next_first_machine_tells_of_the_restart(stream: EventStream, pages: Pages) -> None:
    watch = watched(stream, ("restarted", on_event(pages, "")[2]), is_job=True, is_first=False)
    begin_attempt(stream, 0, 1)
    stop_job(stream, "lost", 0)
    stream.emit(
        agent_kinds.RestartDecided, 0, time.monotonic_ns(), delay=0.0, counted=False, cause="host a is lost", step=None,
        why="", reason="membership",
    )  # fmt: skip
    begin_attempt(stream, 1, 0)
    end(stream, watch)
    assert pages.events == ["restarted//1/host a is lost"]


# --- bounds


def pid_of(path: Path) -> int:
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


IGNORES = "trap '' TERM; setsid sh -c 'trap \"\" TERM; echo $$ > pid; while :; do sleep 1; done' & cd .; wait"


@pytest.mark.parametrize(
    "command, said",
    [
        ("exec sleep 1000", "it has not ended within 0.3s"),
        (IGNORES, "it has not ended within 0.3s"),
        ("no-such-program", "exit code 127: sh: .*no-such-program: not found"),
        ("kill -9 $$", "ended by SIGKILL"),
        ("(", "exit code 2: .*[Ss]yntax error.*"),
        (r"printf 'a\033[31mb\rc\0d\342\200\256' >&2; exit 1", r"exit code 1: .*"),
    ],
)
def test_a_command_that_goes_wrong_is_told_in_a_line(
    stream: EventStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    times = {"longest": 0.3, "grace": 0.1} if "0.3s" in said else {}
    watch, lines = watched(stream, ("failed", command), **times), list[str]()
    watch.warn = lines.append
    end(stream, watch)
    (line,) = lines
    assert re.fullmatch(f"--on-event failed: {said}", line), line
    assert line.isprintable() or "\033[" in line
    if command == IGNORES and (tmp_path / "pid").exists():
        wait_gone([pid_of(tmp_path / "pid")])


def test_one_that_reads_nothing_and_leaves_a_child_is_well(
    stream: EventStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `mail` does, which leaves the delivery to a process in the background."""
    monkeypatch.chdir(tmp_path)
    watch, lines = watched(stream, ("failed", "exec <&-; (sleep 0.2; echo sent > later) & exit 0")), list[str]()
    watch.warn = lines.append
    watch.report = "x" * (1 << 20)  # more than a pipe holds
    end(stream, watch)
    assert lines == []
    assert (tmp_path / "later").read_text() == "sent\n"


def test_those_that_find_no_room_are_counted(
    stream: EventStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    waits = "echo >> hung; until test -e go; do sleep 0.01; done"
    watch, lines = watched(stream, ("hung", waits), ("failed", "echo >> failed")), list[str]()
    watch.warn = lines.append
    expire(stream)
    until((tmp_path / "hung").exists)
    for _ in range(MOST + 3):
        expire(stream, kinds.TimerLeft)
        expire(stream)
    assert stream.drain(LIMIT) == []
    assert lines == ["--on-event: a command is not run: 16 wait already"]
    (tmp_path / "go").touch()
    end(stream, watch)
    assert lines[1:] == ["--on-event: 3 commands in all were not run"]
    assert (tmp_path / "failed").read_text() == "\n"
    assert len((tmp_path / "hung").read_text()) == MOST + 1


def test_the_end_waits_so_long_for_earlier_ones(
    stream: EventStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    both = ("hung", "echo >> hung; exec sleep 1000"), ("failed", "echo >> failed")
    watch, lines = watched(stream, *both, last=1.0), list[str]()
    watch.warn = lines.append
    expire(stream)
    until((tmp_path / "hung").exists)
    for _ in range(3):
        expire(stream, kinds.TimerLeft)
        expire(stream)
    assert stream.drain(LIMIT) == []
    end(stream, watch)
    assert lines == [
        "--on-event hung: it was killed: the run has ended 1.0s ago",
        "--on-event: a command is not run: the run has ended 1.0s ago",
        "--on-event: 3 commands in all were not run",
    ]
    assert (tmp_path / "failed").exists()
    assert (tmp_path / "hung").read_text() == "\n"


def test_a_signal_ends_the_wait_and_the_exit_code_stays(place: Place) -> None:
    command = "echo $$ > pid; (setsid sleep 1000 &) ; exec sleep 1000"
    with place.start("--nproc-per-node", 2, "--on-event", "failed", command, place.write(FAILS)) as launcher:
        pid = pid_of(place.folder / "pid")
        launcher.send(signal.SIGINT)
        done = launcher.end()
    assert done.status == 3
    assert re.search(r"\nphalanx: --on-event failed: it was killed: a signal has come; its output is in .*\n", done.err)
    wait_gone([pid])


def test_a_signal_as_the_last_commands_begin_ends_the_wait(place: Place) -> None:
    options = ["run", "--log-dir", str(place.logs), "--nproc-per-node", "2"]
    code = dedent(f"""
        import signal, sys
        from phalanx._run.event_commands import EventCommands
        from phalanx.cli import main

        signals = [signal.SIGINT]

        def begin_end(commands, begin=EventCommands.begin_end):
            while signals:
                signal.raise_signal(signals.pop())
            begin(commands)

        EventCommands.begin_end = begin_end
        sys.argv = ["phalanx", *{options!r}, "--on-event", "failed", "exec sleep 1000", {place.write(FAILS)!r}]
        main()
        """)
    done = place.program(sys.executable, "-c", code)
    assert done.status == 3
    assert re.search(r"\nphalanx: --on-event.*: a signal has come.*\n$", done.err)


def test_a_signal_to_the_run_while_a_command_runs_stops_the_run(place: Place) -> None:
    command = "echo $$ > pid; exec sleep 1000"
    with place.start("--on-event", "started", command, place.write(WAITS)) as launcher:
        pid = pid_of(place.folder / "pid")
        launcher.send(signal.SIGTERM)
        launcher.read_until("SIGTERM: stopping the workers")
        until(lambda: is_recorded(place, "stopped"))

        def has_ended() -> bool:  # the first ones may be too close to the one before, and the same request
            launcher.send(signal.SIGTERM)
            return launcher.process.poll() is not None

        until(has_ended)
        done = launcher.end()
    assert done.status == 143
    wait_gone([pid])


def is_recorded(place: Place, state: str) -> bool:
    return re.search(rf'"state": ?"{state}"', (run_folder(place) / "run.json").read_text()) is not None


def test_no_command_outlives_a_launcher_that_is_killed(place: Place) -> None:
    place.env["TMPDIR"] = str(place.folder)  # nobody is left to remove what the command wrote
    command = "setsid sh -c 'trap \"\" TERM; echo $$ > other; exec sleep 1000' & echo $$ > pid; wait"
    with place.start("--on-event", "started", command, place.write(WAITS)) as launcher:
        pids = [pid_of(place.folder / name) for name in ("pid", "other")]
        launcher.send(signal.SIGKILL)
        launcher.end()
    wait_gone(pids)


def test_what_a_command_leaves_behind_is_ended(place: Place) -> None:
    leaves = "setsid sh -c 'echo $$ > pid; exec sleep 1000' & until test -s pid; do sleep 0.01; done; exit 1"
    done = place.run(
        "--on-event", "succeeded", leaves, "--on-event", "started", "yes | head -c 4000000", place.write("")
    )
    assert done.status == 0
    wait_gone([pid_of(place.folder / "pid")])
    assert "left behind" not in done.err
    log = (run_folder(place) / "on-event.log").read_text()
    assert "phalanx: ended what was left behind: pid " in log
    assert len(log) < 150_000


def test_a_file_of_outputs_that_is_full_is_told(stream: EventStream, tmp_path: Path) -> None:
    log = tmp_path / "on-event.log"
    log.write_bytes(b"x" * (1 << 20))
    watch, lines = watched(stream, ("failed", "echo x; exit 1")), list[str]()
    watch.warn = lines.append
    stream.emit(kinds.GroupStarting, 0, time.monotonic_ns(), nprocs=1, folder=str(tmp_path))
    end(stream, watch)
    assert lines == [f"--on-event failed: exit code 1: x; its output is not kept: {log} has 1.0 MiB"]
    assert log.stat().st_size == 1 << 20


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_is_reported(place: Place, pages: Pages, tmp_path: Path) -> None:
    """Of the logs, and of temporary files."""
    with small(tmp_path, kib=1024, inodes=200) as disk:
        place.env |= {"TMPDIR": str(disk), "DISK": str(disk)}
        script = place.write("""
            import os, sys
            try:
                with open(os.environ["DISK"] + "/filler", "wb", buffering=0) as file:
                    while True:
                        file.write(b"x" * 4096)
            except OSError as error:
                sys.exit(str(error))
            """)
        done = place.run("--log-dir", disk / "logs", *on_event(pages, "failed"), script, logs=False)
        assert done.status == 1
        assert pages.events == ["failed//0/rank 0: exited with code 1; no error was recorded"]
        assert "No space left on device" in pages.read("failed")


def test_workers_go_on_while_a_command_stands_still(place: Place) -> None:
    script = place.write("""
        import os
        open("done" + os.environ["RANK"], "w").close()
        """)
    command = "echo $$ > pid; exec sleep 1000"
    with place.start("--nproc-per-node", 2, "--on-event", "started", command, script) as launcher:
        until((place.folder / "done0").exists)
        until((place.folder / "done1").exists)
        pid = pid_of(place.folder / "pid")
        until(lambda: is_recorded(place, "succeeded"))
        launcher.send(signal.SIGINT)
        assert launcher.end().status == 0
    wait_gone([pid])


# --- where it is given


def test_a_job_file_and_the_environment_have_it(place: Place, pages: Pages) -> None:
    quoted, script, job = on_event(pages, "")[2], place.write(""), place.folder / "job.toml"
    config = place.run("--on-event", "succeeded,failed", quoted, "--print-config", script)
    job.write_text(config.out)
    assert place.run("-f", job).status == 0
    assert pages.events == ["succeeded//0/"]
    place.env["PHALANX_ON_EVENT"] = f"succeeded {quoted}\nfailed exit 1"
    assert place.run(script).status == 0
    assert len(pages.events) == 2
