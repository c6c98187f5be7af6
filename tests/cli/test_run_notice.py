"""`phalanx run --notice` and `--orphan-grace`: what a stop looks like in a terminal, and what it comes to."""

from __future__ import annotations

import signal

import pytest

from tests.support.command import Place
from tests.support.helpers import Gate, Ready, alive, descendants, let_a_request_pass, wait_gone


@pytest.mark.slow
def test_a_loop_that_asks_ends_before_the_notice_does(place: Place, ready: Ready) -> None:
    script = place.write(f"""
        import os, phalanx, signal
        print([name for name in os.environ if "STOP" in name or "NOTICE" in name])  # it is no option for what it starts
        {ready.python()}
        while not phalanx.should_stop():
            signal.sigtimedwait([], 0.001)
        print("saved")
        """)
    with place.start("--nproc-per-node", 2, "--notice", "USR1:600", script) as launcher:
        pids = ready.pids(2)
        launcher.send(signal.SIGTERM)
        done = launcher.end()
    assert done.status == 128 + signal.SIGTERM
    said = "(SIGTERM 600 s from now, SIGKILL at most 30 s later; once more to kill them)"
    assert f"phalanx: SIGTERM: giving the workers notice of a stop by SIGUSR1 {said}\n" in done.err
    shown = ["['PHALANX_STOP_FLAG']", "saved"]
    assert sorted(done.out.splitlines()) == [f"[{rank}] {text}" for rank in (0, 1) for text in shown]
    assert "FAILED" not in done.err
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.slow
def test_a_second_ctrl_c_kills_at_once(place: Place, ready: Ready) -> None:
    script = place.write(f"import time\n{ready.python()}\nwhile True: time.sleep(0.1)")
    with place.start("--notice", "usr2:600", script) as launcher:
        pids = ready.pids()
        launcher.send(signal.SIGINT)
        launcher.read_until("once more to kill them)\n")
        let_a_request_pass()
        launcher.send(signal.SIGINT)
        done = launcher.end()
    assert done.status == 130
    assert "SIGKILL: killing the workers" in done.err
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_time(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"""
        import os, signal, sys, time
        def save(*_):
            {ready.python("'SIGTERM'")}
            {gate.python()}
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        {ready.python()}
        while True: time.sleep(0.1)
        """)
    with place.start("--orphan-grace", 600, script) as launcher:
        ready.wait()
        everybody = descendants(launcher.process.pid)
        launcher.process.kill()
        assert ready.wait() == ["SIGTERM"]
        gate.open()
        assert wait_gone(everybody) == set()
