"""What a machine runs before it takes part in a job of many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from phalanx.cli import _node_check
from phalanx.cli._node_check import pass_check, run_check

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "command, why",
    [
        ("true", None),
        ("echo fine; echo GPU 3 is broken >&2; exit 4", "exit code 4: GPU 3 is broken"),
        ("echo the disk is full; exit 1", "exit code 1: the disk is full"),
        ("kill -9 $$", "ended by SIGKILL"),
        ("no-such-program", "exit code 127: sh: 1: no-such-program: not found"),
    ],
)
def test_a_check(command: str, why: str | None) -> None:
    found = run_check(command)
    assert found == why or (why is not None and found is not None and found.endswith("no-such-program: not found"))


def test_a_check_does_not_find_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_JOB_SECRET", "0123456789abcdef")
    assert run_check('test -z "$PHALANX_JOB_SECRET"') is None


def test_a_check_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_node_check, "LONGEST", 0.2)
    assert run_check("sleep 1000") == "it has not ended within 0.2s"


def test_it_is_tried_again_after_longer_and_longer_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_node_check, "_FIRST", 0.02)
    command = f"echo >> {tmp_path}/tries; test $(wc -l < {tmp_path}/tries) = 3"
    assert pass_check(command, 60.0, lambda: 0.0) == ""
    said = capfd.readouterr().err
    assert said.count("exit code 1; this machine takes no part, and is checked again in 0.0") == 2
    assert pass_check("exit 2", 0.0) == "this machine has failed its check once: exit code 2"
