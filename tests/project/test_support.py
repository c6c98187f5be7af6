"""What the other tests stand on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.support.helpers import Gate, Ready, alive, descendants, meanwhile, pass_gate, tell, wait_gone


def test_a_worker_says_that_it_is_ready_and_passes_the_gate(ready: Ready, gate: Gate) -> None:
    code = f"{ready.python()}; {gate.python()}; {ready.python(repr('through'))}"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        assert ready.pids() == [process.pid]
        assert alive(process.pid)
        gate.open()
        assert ready.wait() == ["through"]
        assert wait_gone([process.pid]) == set()
    assert not alive(process.pid)


def test_functions_meet_the_test_too(ready: Ready, gate: Gate) -> None:
    gate.open(2)
    pass_gate(gate.address)
    pass_gate(gate.address)
    tell(ready.address, "one")
    tell(ready.address, "two")
    assert ready.wait(2) == ["one", "two"]


def test_a_message_that_does_not_come_is_an_error(ready: Ready) -> None:
    tell(ready.address, "one")
    with pytest.raises(AssertionError, match=r"1 of 2 messages within 0.01 s: \['one'\]"):
        ready.wait(2, timeout=0.01)


def test_a_zombie_is_not_alive_and_has_gone() -> None:
    process = subprocess.Popen(["true"])
    assert wait_gone([process.pid]) == set()
    assert not alive(process.pid)
    assert process.pid in descendants(os.getpid())
    process.wait()
    assert process.pid not in descendants(os.getpid())


def test_who_stays_is_returned_when_the_time_is_over() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        assert wait_gone([process.pid], timeout=0.01) == {process.pid}
        process.kill()


def test_descendants_are_found_through_every_generation(ready: Ready) -> None:
    inner = f"{ready.python()}; import signal; signal.pause()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        [grandchild] = ready.pids()
        assert descendants(process.pid) == {grandchild}
        assert {process.pid, grandchild} <= descendants(os.getpid())
        os.kill(grandchild, 9)


def test_a_block_that_fails_does_not_wait_for_its_thread() -> None:
    waits = threading.Event()
    with pytest.raises(KeyError), meanwhile(waits.wait):
        raise KeyError
    with pytest.raises(ZeroDivisionError), meanwhile(divmod, 1, 0):
        waits.set()
    with meanwhile(divmod, 1, 0) as error:
        assert isinstance(error(), ZeroDivisionError)
