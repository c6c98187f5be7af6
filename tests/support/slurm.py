"""A Slurm of one's own: munged, slurmctld, and a slurmd on each of several hosts, in a folder that is removed.

The hosts are network namespaces, see `hosts`; their names are those of Slurm's nodes, h1 and up. Each of slurmctld and
the slurmds is the first process of a pid namespace, with which all ends that it has started: a slurmstepd leaves its
parent.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import pytest

from tests.support import hosts as hosts_of
from tests.support.etcd import MEMORY
from tests.support.helpers import descendants, wait_gone
from tests.support.hosts import Hosts

SOON = 30.0
"""Seconds that Slurm may take to be there; spent only where it does not come."""

KILL_WAIT = 5
"""Seconds between SIGTERM and SIGKILL of what is cancelled."""

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
PACKAGES = "munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins"
"""Debian's, which have all that is needed."""

APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""What a command begins with that is to be the first of a pid namespace, and to be killed with its parent."""

CONFIG = """
ClusterName=t
SlurmctldHost=h1({first})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmdPort={node_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=10000
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=10
KillWait={kill_wait}
MessageTimeout=10
TCPTimeout=5
SlurmdParameters=config_overrides
{nodes}
PartitionName=p Nodes=h[1-{count}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def check() -> None:
    """Skip a test where there can be no Slurm."""
    hosts_of.check()
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        pytest.skip(f"Slurm is not installed: no {', '.join(missing)} (Debian: apt-get install {PACKAGES})")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Slurm:
    """A controller on the first of some hosts, and a node on each. A context manager.

    Args:
        hosts: The hosts.
        count: How many of them are nodes.
    """

    def __init__(self, hosts: Hosts, count: int) -> None:
        self.hosts = hosts
        self.numbers = range(1, count + 1)
        self._folder = Path(tempfile.mkdtemp(prefix="phalanx-slurm-", dir=MEMORY))
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def env(self) -> dict[str, str]:
        """What a command of Slurm needs in its environment; what another Slurm has put there is left out."""
        rest = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "PMI"))}
        return {**rest, "SLURM_CONF": str(self._folder / "slurm.conf")}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self) -> None:
        folder = self._folder
        folder.chmod(0o755)  # munged wants all folders on the way to its socket to be passable for everybody
        for name in ("munge", "state", *(f"spool.h{number}" for number in self.numbers)):
            (folder / name).mkdir(mode=0o711)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        lines = [f"{self.hosts.address(number)} h{number}\n" for number in self.numbers]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "slurm.conf").write_text(
            CONFIG.format(
                folder=folder,
                first=self.hosts.address(1),
                port=_free_port(),
                node_port=_free_port(),
                kill_wait=KILL_WAIT,
                count=len(self.numbers),
                nodes="\n".join(
                    f"NodeName=h{number} NodeAddr={self.hosts.address(number)} CPUs=8 RealMemory=4000 State=UNKNOWN"
                    for number in self.numbers
                ),
            )
        )
        munge = folder / "munge"
        self._daemon(
            [], "munged", "--foreground", f"--key-file={key}", f"--socket={munge}/socket", f"--pid-file={munge}/pid",
            f"--log-file={munge}/log", f"--seed-file={munge}/seed", "--num-threads=2",
        )  # fmt: skip
        self._wait_for((munge / "socket").exists)
        config = str(folder / "slurm.conf")
        self._daemon([*self.on(1), *APART], "slurmctld", "-D", "-f", config)
        for number in self.numbers:
            self._daemon([*self.on(number), *APART], "slurmd", "-D", "-f", config, "-N", f"h{number}")
        ready = " ".join(["idle"] * len(self.numbers))
        self._wait_for(lambda: " ".join(self.command("sinfo", "-h", "-N", "-o", "%T").split()) == ready)

    def on(self, number: int) -> list[str]:
        """What a command begins with that is run on a host: one that knows the others by their names."""
        mount = f'mount --bind "{self._folder}/hosts" /etc/hosts && exec "$@"'  # in the host's own mount namespace
        return [*self.hosts.on(number), "sh", "-c", mount, "sh"]

    def _daemon(self, prefix: Sequence[str], *command: str) -> None:
        with (self._folder / f"{command[0]}.{len(self._daemons)}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen([*prefix, *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.env)
            )

    def _wait_for(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + SOON
        while not is_so():
            said = [path.read_text(errors="replace")[-2000:] for path in self._folder.glob("*.out")]
            assert time.monotonic() < until, said
            assert all(daemon.poll() is None for daemon in self._daemons), said
            time.sleep(0.05)

    def command(self, *words: str) -> str:
        """Run a command of Slurm on the first host, and return what it printed; "" if it failed."""
        done = subprocess.run([*self.on(1), *words], check=False, capture_output=True, text=True, env=self.env)
        return done.stdout if done.returncode == 0 else ""

    def close(self) -> None:
        """End all daemons: what they have started ends with them."""
        below = [pid for daemon in self._daemons for pid in descendants(daemon.pid)]
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()
        assert not wait_gone(below)
        shutil.rmtree(self._folder)
