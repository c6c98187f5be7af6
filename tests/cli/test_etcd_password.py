"""The password of an etcd's user, from the environment: agents log in with it, and nobody else finds it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

if importlib.util.find_spec("grpc") is None:
    pytest.skip("the extra `etcd` is not installed", allow_module_level=True)

from pathlib import Path

from tests.store.test_etcd import SECRET, want_passwords
from tests.support.etcd import Etcd

pytestmark = pytest.mark.long

SHOW = "import os; print('found', repr(os.environ['PHALANX_ETCD_PASSWORD']))"


def test_agents_log_in_with_the_password_of_the_environment(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    with Etcd() as etcd:
        want_passwords(etcd)
        meeting = ["--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.endpoints, "--run-id", "job"]
        command = [sys.executable, "-m", "phalanx", "run", "--nnodes", "2", *meeting, "--rdzv-conf", "user=root"]
        env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PHALANX_ETCD_PASSWORD": SECRET}
        agents = [
            subprocess.Popen(
                [*command, str(script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for _ in range(2)
        ]
        said = [agent.communicate(timeout=100)[0] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], said
        wrong = subprocess.run(
            [*command, str(script)],
            env={**env, "PHALANX_ETCD_PASSWORD": SECRET[1:]},
            check=False,
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert wrong.returncode == 1
    assert f"this node is not taken: etcd at {etcd.endpoints} refuses the user 'root': " in wrong.stderr
    assert all("found ''" in text for text in said)
    kept = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) > 4  # records, events and logs
    assert not any(SECRET[1:] in text for text in [*said, *kept, wrong.stdout, wrong.stderr])
