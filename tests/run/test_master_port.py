"""MASTER_PORT is reserved: whom the port of a run is refused, and that rank 0 can bind it, however it does."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from phalanx._run import master_port
from tests.support.forks import code_of_fork
from tests.support.helpers import tell
from tests.support.workers import run_script

if TYPE_CHECKING:
    from tests.support.command import Place
    from tests.support.helpers import Gate, Ready


EVERYWHERE = ((socket.AF_INET, ""), (socket.AF_INET6, "::"))
LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))

outside = pytest.mark.skipif(
    not next(master_port._numbers(), 0), reason="every port of this machine is in ip_local_port_range"
)


def listen(family: int, address: str, port: int, *, reuse: bool) -> None:
    """Do what a rank 0 does. Raises OSError."""
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        server.bind((address, port))
        server.listen()


def here(places: tuple[tuple[int, str], ...]) -> list[tuple[int, str]]:
    """Those of the addresses that this machine has."""
    found = []
    for family, address in places:
        try:
            listen(family, address, 0, reuse=False)
        except OSError:
            assert family == socket.AF_INET6
        else:
            found.append((family, address))
    return found


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Files in place of the kernel's: the range of ports that it chooses from, and those that are set aside."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is its user's alone
        Path(folder).chmod(0o755)

        def put(ephemeral: str, set_aside: str = "") -> None:
            for name, text in (("EPHEMERAL", ephemeral), ("SET_ASIDE", set_aside)):
                path = Path(folder, name)
                path.write_text(f"{text}\n")
                path.chmod(0o644)
                monkeypatch.setattr(master_port, name, str(path))

        yield put


def is_reserved(number: int) -> bool:
    """Whether any process of this network namespace has the name by which launchers reserve the port."""
    with open("/proc/net/unix", encoding="ascii", errors="replace") as file:  # others choose names, too
        return f"@phalanx-master-port-{number}" in file.read().split()


@pytest.fixture
def number(settings: Callable[[str, str], None]) -> int:
    """The one port that is outside the range. Where it is not free, `reserve` takes one of the range."""
    with master_port.reserve() as port:
        number = port.number
    settings(f"1024\t{number - 1}", f"{number + 1}-65535" if number < 65535 else "")
    return number


# --- rank 0 can bind it


@outside
@pytest.mark.parametrize("reuse", [False, True])
def test_rank_0_can_bind_it_however_it_does(*, reuse: bool) -> None:
    with master_port.reserve() as port:
        for family, address in here(EVERYWHERE + LOOPBACK):
            listen(family, address, port.number, reuse=reuse)
        if len(here(EVERYWHERE)) > 1:
            with socket.create_server(("", port.number), family=socket.AF_INET6, dualstack_ipv6=True):
                pass


def test_a_port_with_connections_in_time_wait_is_not_chosen(number: int) -> None:
    address = "127.0.0.1", number
    with socket.create_server(address) as server, socket.create_connection(address) as client:
        server.accept()[0].close()
        assert client.recv(1) == b""
    with pytest.raises(OSError, match="in use"):
        listen(socket.AF_INET, "", number, reuse=False)
    with master_port.reserve() as port:
        assert port.number != number


# --- nobody else is given it


@pytest.mark.slow
def test_ports_of_the_kernel_or_administrator_are_left_out(settings: Callable[[str, str], None]) -> None:
    for ephemeral, set_aside, first, others in (
        ("32768 60999", "", range(61000, 63536), {*range(1024, 32768), *range(63536, 65536)}),
        ("32768 60999", "61000-63000,63002-65535", [63001], range(1024, 32768)),
        ("49152 65535", "8080", [], {*range(1024, 49152)} - {8080}),
        ("1024 63000", "63003", {*range(63001, 63536)} - {63003}, range(63536, 65536)),
        ("10240 65535", "1024-9999,10001", [], {10000, *range(10002, 10240)}),
        ("40000 40001", "1024-40000,50000-65535", range(49152, 50000), range(40002, 49152)),
        ("1024 65535", "8080", [], []),
    ):
        settings(ephemeral, set_aside)
        numbers = list(master_port._numbers())
        assert set(numbers[: len(first)]) == set(first)
        assert set(numbers[len(first) :]) == set(others)
        assert len(numbers) == len(set(numbers))


@outside
def test_launchers_begin_at_random_ports_below_the_highest() -> None:
    numbers = [next(master_port._numbers(), 0) for _ in range(200)]
    assert len(set(numbers)) > 40
    assert max(numbers) + 2000 <= 65535  # programs may add to it


def test_a_port_that_somebody_has_is_not_chosen(number: int) -> None:
    for family, address in here(EVERYWHERE + LOOPBACK):
        with socket.socket(family) as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            other.bind((address, number))  # and does not listen yet
            with master_port.reserve() as port:
                assert port.number != number, address
    with master_port.reserve() as port:
        assert port.number == number
        with master_port.reserve() as other_port:
            assert other_port.number != number


@outside
@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "program"])
def test_no_process_inherits_it(ready: Ready, how: str) -> None:
    """Nor has anybody it when the launcher has let go of it."""
    with master_port.reserve() as port:
        if how == "program":
            code = f"{ready.python()}; import signal; signal.pause()"
            child = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
        elif not (child := os.fork()):
            try:
                tell(ready.address, "here")
                signal.pause()
            finally:
                os._exit(70)
        ready.wait()
        assert is_reserved(port.number)
    try:
        assert not is_reserved(port.number)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@outside
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root can become another user")
def test_what_one_user_has_reserved_another_is_not_given(number: int) -> None:
    def reserve_as_nobody() -> int:
        os.setuid(65534)
        with master_port.reserve() as port:
            return port.number

    assert code_of_fork(lambda: reserve_as_nobody() == number) == 0, "it is for everybody to have"
    with master_port.reserve() as port:
        assert port.number == number
        assert code_of_fork(lambda: reserve_as_nobody() != number) == 0


# --- where there is no port outside the range


@pytest.fixture(params=["all are in it", "no /proc", "no abstract names"])
def kernels(
    request: pytest.FixtureRequest, settings: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is one that the kernel chooses."""
    if request.param == "all are in it":
        settings("1024 65535", "")
    elif request.param == "no /proc":
        monkeypatch.setattr(master_port, "EPHEMERAL", "/proc/sys/net/ipv4/none")
    else:

        def forbidden(number: int) -> None:
            raise PermissionError(number)

        monkeypatch.setattr(master_port, "_take_name", forbidden)


@pytest.mark.usefixtures("kernels")
def test_rank_0_binds_the_port_that_a_socket_reserves() -> None:
    with master_port.reserve() as one, master_port.reserve() as two:
        assert one.number != two.number
        for family, address in here(EVERYWHERE + LOOPBACK):
            for _attempt in range(2):
                listen(family, address, one.number, reuse=True)
            with pytest.raises(OSError, match="in use"):
                listen(family, address, one.number, reuse=False)


def test_without_ipv6_there_is_a_port_all_the_same(
    settings: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = master_port._tcp_socket

    def none(family: int) -> object:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return real(family)

    monkeypatch.setattr(master_port, "_tcp_socket", none)
    for ephemeral in ("32768 60999", "1024 65535"):
        settings(ephemeral, "")
        with master_port.reserve() as port:
            assert is_reserved(port.number) == (ephemeral == "32768 60999")
            listen(socket.AF_INET, "", port.number, reuse=True)


# --- the kernel's part, in a network namespace with few ports


@pytest.fixture
def own_network() -> tuple[str, ...]:
    """What goes before a command that is to have a network of its own."""
    for prefix in (("unshare", "--net"), ("unshare", "--user", "--map-root-user", "--net")):
        with suppress(OSError):
            if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode == 0:
                return prefix
    pytest.skip("no network namespace can be made here")


FEW = """
import fcntl, json, socket, struct, subprocess, sys
from phalanx._run.master_port import reserve

def put(name, text):
    with open(f"/proc/sys/net/ipv4/{name}", "w") as file:
        file.write(text)

with socket.socket() as any_socket:  # the loopback interface is down at first: SIOCSIFFLAGS, IFF_UP
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 1))
put("ip_local_port_range", "40000 40031")
put("ip_local_reserved_ports", "1024-39999,40040-65535")  # 8 are left outside the range

held = [reserve() for _ in range(10)]
found = {"reserved": [port.number for port in held]}

def given(how):
    sockets = []
    try:
        while len(sockets) < 100:
            sockets.append(socket.socket())
            how(sockets[-1])
    except OSError:
        sockets.pop().close()
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no TIME_WAIT
        each.close()
    return ports

def bind_and_reuse(each):
    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    each.bind(("", 0))

found["bind"] = given(lambda each: each.bind(("", 0)))
found["bind_and_reuse"] = given(bind_and_reuse)
with socket.create_server(("", 1000), backlog=200) as server:
    found["connect"] = given(lambda each: each.connect(("127.0.0.1", 1000)))
try:
    while True:
        held.append(reserve())
except OSError as error:
    found["error"] = error.strerror
found["all"] = [port.number for port in held]
print(json.dumps(found), flush=True)
done = subprocess.run([sys.executable, "-m", "phalanx", "run", "--log-dir", "/dev/null", "--no-python", "true"])
for port in held:
    port.close()
sys.exit(done.returncode)
"""


@pytest.mark.long
def test_the_kernel_gives_it_to_nobody_else_though_ports_run_out(tmp_path: Path, own_network: tuple[str, ...]) -> None:
    done = run_script(tmp_path, FEW, prefix=own_network, timeout=180)
    found = json.loads(done.stdout)
    ours = set(found["reserved"])
    assert len(ours) == 10
    assert {*range(40032, 40040)} < ours < {*range(40000, 40040)}
    for how in ("bind", "bind_and_reuse", "connect"):
        assert sorted(found[how]) == sorted({*range(40000, 40032)} - ours), how
    assert sorted(found["all"]) == [*range(40000, 40040)]
    assert found["error"] == "Address already in use"
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "Error: no port for MASTER_PORT: Address already in use; --master-port takes the number of one"
    )


# --- phalanx run

BIND = """
import os, socket
port = int(os.environ["MASTER_PORT"])
with socket.socket() as server:
    server.bind(("", port))  # without SO_REUSEADDR
    server.listen()
    {ready}
    {gate}
"""


@pytest.mark.long
@outside
def test_runs_at_the_same_time_have_their_own_ports(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(BIND.format(ready=ready.python("port"), gate=gate.python()))
    with ExitStack() as running:
        launchers = [running.enter_context(place.start(script)) for _ in range(3)]
        numbers = [int(text) for text in ready.wait(3)]
        assert len(set(numbers)) == 3
        assert all(map(is_reserved, numbers))
        killed = launchers.pop()
        killed.send(signal.SIGKILL)
        killed.end()
        assert len([*filter(is_reserved, numbers)]) == 2  # nobody else keeps what a launcher had that was killed
        gate.open(2)
        for launcher in launchers:
            done = launcher.end()
            assert done.status == 0, done
    assert not any(map(is_reserved, numbers))


@pytest.mark.slow
def test_a_port_that_the_user_names_is_taken_as_it_is(place: Place) -> None:
    with master_port.reserve() as port:
        script = place.write("import os; print(os.environ['MASTER_PORT'])")
        assert place.run("--master-port", port.number, script).out == f"[0] {port.number}\n"
