"""`phalanx serve` over HTTP: what it answers, to whom, and what strangers, hostile folders and its end do to it."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import resource
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from tests.support.command import Launcher, Place, refused
from tests.support.helpers import TIMEOUT, Gate, Ready, wait_gone
from tests.support.served import SERVE, Answer, Served, served

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_temporary_folder")]

OWN = "only-for-this-test_0123456789"
NOBODY = 65534
SAYS = "phalanx: serves the runs in"
COOKIE = re.compile(r"(phalanx-\d+)=([^;]+); HttpOnly; Path=/; SameSite=strict")


def run_of(place: Place) -> Path:
    (folder,) = (path for path in place.logs.iterdir() if path.is_dir())
    return folder


def succeed(place: Place, text: str = "hello") -> Path:
    """A run that has ended."""
    done = place.run("--nproc-per-node", 2, "-r", 3, "--no-python", "sh", "-c", f"echo {text}")
    assert done.status == 0, done
    return run_of(place)


def refuse(place: Place, *options: object, through: tuple[str, ...] = ()) -> Launcher:
    return Launcher([*through, *SERVE, *map(str, options)], cwd=place.folder, env=place.env)


def by_shell(line: str) -> tuple[str, ...]:
    """Start it by a line of a shell, in which it is "$@"."""
    return "sh", "-c", line, "sh"


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other end closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError), connection:
        while part := connection.recv(1 << 16):
            data += part
    return data


def problems(one: Served) -> list[str]:
    """End it. What it has said on stderr besides what it says to everybody."""
    one.launcher.send(signal.SIGTERM)
    return [line for line in one.launcher.end().err.splitlines() if not line.startswith(SAYS)]


def changes_to(one: Served, name: str, text: str) -> Answer:
    """The page once it has a text, which a stream of its events has said."""
    with one.events(f"/runs/{name}/events") as stream:
        version = stream.next()
        while True:
            answer = one.ask(f"/runs/{name}")
            if text in answer.text:
                return answer
            while version is not None and version <= answer.version:
                version = stream.next()
            assert version is not None


def test_a_page_changes_with_its_run(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"""
        print("first of all", flush=True)
        {ready.python("1")}
        {gate.python()}
        print("second to none", flush=True)
        {ready.python("2")}
        {gate.python()}
        raise ValueError("at last")
        """)
    with served(place) as one, one.events("/events") as listed:
        assert listed.next() is not None
        assert "first of all" not in one.ask("/").text
        with place.start("--nproc-per-node", 1, "-r", 3, script) as launcher:
            ready.wait(1)
            assert listed.next() is not None
            name = run_of(place).name
            while name not in (page := one.ask("/").text):
                assert listed.next() is not None
            assert f'href="/runs/{name}"' in page
            answer = changes_to(one, name, "first of all")
            assert "second to none" not in answer.text
            gate.open()
            ready.wait(1)
            assert changes_to(one, name, "second to none").version > answer.version
            gate.open()
            assert launcher.end().status == 1
            text = changes_to(one, name, "The run has ended").text
            assert "at last" in text
        while "at last" not in one.ask("/").text:
            assert listed.next() is not None


def test_all_that_watch_have_one_page(place: Place) -> None:
    name = succeed(place).name
    with served(place) as one:
        first = one.ask(f"/runs/{name}")
        streams = [one.events(f"/runs/{name}/events") for _ in range(4)]
        assert [stream.next() for stream in streams] == [first.version] * 4
        (place.logs / name / "report.txt").write_text("written again")
        (changed,) = {stream.next() for stream in streams}
        assert changed is not None
        assert changed > first.version
        pages = {one.ask(f"/runs/{name}").body for _ in range(4)}
        assert len(pages) == 1  # the moment at which it was made is in it
        for stream in streams:
            stream.__exit__()


def test_who_has_the_token_is_let_in(place: Place) -> None:
    name = succeed(place).name
    with served(place, "--allow-control") as one:
        token = one.token
        assert len(token) >= 22  # of 64 characters: 128 bits
        page = one.ask(f"/runs/{name}")
        assert page.status == 200
        assert token not in page.text + one.ask("/").text
        for path in ("/", f"/runs/{name}", f"/runs/{name}/events", "/events", f"/runs/{name}/control", "/nowhere"):
            for given in ("", "Bearer", f"Bearer {token}x", f"Basic {token}", f"Bearer {token[:-1]}", "Bearer é"):
                assert one.ask(path, Authorization=given).status == 401
            for cookie in ("", f"phalanx={token}", f"phalanx-{one.port}={token[1:]}"):
                answer = one.ask(path, Authorization="", Cookie=cookie)
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert answer.text == (
                    "This takes the token of this server: open the address that phalanx serve has printed, or send "
                    "'Authorization: Bearer TOKEN'.\n"
                )
        answer = one.ask(f"/runs/{name}?token={token}", Authorization="")
        assert (answer.status, answer.headers["Location"]) == (303, f"/runs/{name}")
        found = COOKIE.fullmatch(answer.headers["Set-Cookie"])
        assert found is not None
        assert found[1] == f"phalanx-{one.port}"
        assert one.ask(f"/runs/{name}", Authorization="", Cookie=f"{found[1]}={found[2]}").body == page.body
        elsewhere = one.ask(f"//elsewhere/x\\y?token={token}", Authorization="")
        assert elsewhere.headers["Location"] == "/elsewhere/x%5Cy"
        forwarded = one.ask(f"/?token={token}", Authorization="", Host="localhost:9000")  # by ssh -L
        assert forwarded.headers["Set-Cookie"].startswith("phalanx-9000=")
        argv = Path(f"/proc/{one.launcher.process.pid}/cmdline").read_bytes()
        one.launcher.send(signal.SIGTERM)
        done = one.launcher.end()
    assert token.encode() not in argv
    assert token not in done.out + done.err


def test_a_token_of_ones_own_is_not_printed(place: Place) -> None:
    place.env["PHALANX_SERVE_TOKEN"] = OWN
    with served(place) as one:
        assert one.token == ""
        assert one.ask("/").status == 401
        one.token = OWN
        assert one.ask("/").status == 200
    for wrong in ("short", "a b" * 8, "x" * 300):
        place.env["PHALANX_SERVE_TOKEN"] = wrong
        with refuse(place) as launcher:
            refused(done := launcher.end(), "PHALANX_SERVE_TOKEN: expected 16 to 256 letters, digits")
        assert wrong not in done.err


def test_without_a_token_it_answers_by_its_own_name_alone(place: Place) -> None:
    with served(place, "--no-token") as one:
        assert one.token == ""
        for host in ("127.0.0.1", "localhost", "LOCALHOST:1", "[::1]:9", "127.5.5.5:80"):
            assert one.ask("/", Host=host).status == 200
        for host in ("evil.example", "", "[", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1", "x:y"):
            answer = one.ask("/", Host=host)
            assert answer.status == 421, host
            assert "This server has no token" in answer.text


@pytest.mark.parametrize(
    "options,status,words",
    [
        (("--no-token", "--host", "::"), 2, "--no-token: :: is no loopback address"),
        (("--no-token", "--allow-control"), 2, "--allow-control and --no-token exclude each other"),
        (("--host", "no such host"), 1, "--host: 'no such host' is no address of this machine"),
        (("--host", "192.0.2.1"), 1, "it cannot listen at 192.0.2.1 port 0: Cannot assign requested address"),
        (("--port", "65536"), 2, "'65536': expected a whole number, 0 to 65535"),
        (("nowhere",), 1, "nowhere: there is no such folder"),
        (("script.py",), 2, "'script.py' is a file"),
    ],
)
def test_it_refuses(place: Place, options: tuple[str, ...], status: int, words: str) -> None:
    place.write("")
    with refuse(place, "--port", 0, *options) as launcher:
        done = launcher.end()
    assert (done.status, done.out) == (status, "")
    assert words in " ".join(done.err.split())


def test_one_run_and_a_port_that_is_taken_are_refused(place: Place) -> None:
    folder = succeed(place)
    with refuse(place, folder) as launcher:
        refused(launcher.end(), "is the folder of one run; phalanx serve", str(place.logs))
    with served(place) as one, refuse(place, place.logs, "--port", one.port) as launcher:
        done = launcher.end()
        assert done.status == 1
        assert f"another program has port {one.port}" in done.err
        assert "--port N takes another one" in done.err


@pytest.mark.parametrize("library", ["starlette", "uvicorn"])
def test_without_its_libraries_it_is_refused(place: Place, library: str) -> None:
    place.write("raise ImportError('planted', name='starlette')", f"{library}.py")
    place.env["PYTHONPATH"] = os.pathsep.join([str(place.folder), os.environ.get("PYTHONPATH", "")])
    with refuse(place, "--port", 0) as launcher:
        done = launcher.end()
    assert done.status == 1
    words = "this takes starlette and uvicorn, which cannot be imported here (planted): python -m pip install"
    assert words in " ".join(done.err.split())


def test_each_answer_says_what_a_browser_may_do(place: Place) -> None:
    name = succeed(place).name
    with served(place, "--allow-control") as one:
        paths = ("/", f"/runs/{name}", "/nowhere", "/runs/none", f"/runs/{name}/events")
        answers = [one.ask(path, "HEAD") for path in paths]
        answers += [one.ask(path, Authorization="") for path in paths]
        answers += [one.ask(path) for path in paths[:-1]]
        answers += [one.ask("/", "PUT"), one.ask(f"/runs/{name}/control"), one.ask(f"/?token={one.token}")]
        for answer in answers:
            headers = answer.headers
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Cache-Control"] == "no-store"
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'")
            assert "frame-ancestors 'none'" in policy
            assert "Server" not in headers
        page = one.ask(f"/runs/{name}")
        policy = page.headers["Content-Security-Policy"]
        assert "connect-src 'self'" in policy
        meta = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page.text)
        assert meta is not None
        for part in re.findall(r"sha256-[^&]+", meta[1]):
            assert f"'{part}'" in policy
        assert not re.search(r"unsafe|https?:|\*", policy)
        small = one.ask(f"/runs/{name}", Accept_Encoding="gzip")
        assert small.headers["Content-Encoding"] == "gzip"
        assert len(small.body) < len(page.body) / 2


def test_names_that_are_no_runs_are_not_found(place: Place) -> None:
    folder = succeed(place)
    place.write("{}", "run.json")  # the folder above is no run of this server, whatever is in it
    (place.logs / "link").symlink_to(folder)
    (place.logs / "other").mkdir()
    (place.logs / ".phalanx-removed-x" / "attempt_0").mkdir(parents=True)
    names = [
        *(
            "",
            "..",
            "%2e%2e",
            ".",
            "none",
            "link",
            "other",
            ".phalanx-removed-x",
            folder.name[:-1],
            f"{folder.name}%00",
        ),
        *(f"..%2f{place.logs.name}%2f{folder.name}", f"../{place.logs.name}/{folder.name}", "a" * 10_000, "%ff%fe"),
        *(f"{folder.name}/", f"{folder.name}/run.json", f"{folder.name}/attempt_0", "\\..\\", "%0d%0aX-Evil: 1"),
    ]
    with served(place, "--allow-control") as one:
        for name in names:
            for path in (f"/runs/{name}", f"/runs/{name}/events"):
                answer = one.ask(path.replace(" ", "%20"))
                assert answer.status == 404, path
                assert "Evil" not in str(answer.headers)
        assert one.ask(f"/runs/{folder.name}").status == 200


def test_it_only_watches(place: Place) -> None:
    name = succeed(place).name
    with served(place) as one:
        headers = {"X_Phalanx": "1", "Content_Type": "application/json", "Origin": one.origin}
        assert one.ask(f"/runs/{name}/control", "POST", '{"do": "stop"}', **headers).status == 404
        assert "/control" not in one.ask(f"/runs/{name}").text
        assert one.ask(f"/runs/{name}", "POST", "x").status == 405


@pytest.fixture
def running(place: Place, ready: Ready) -> Iterator[str]:
    """The name of a run whose ranks wait."""
    script = place.write(f"""
        import signal
        {ready.python("1")}
        signal.pause()
        """)
    with place.start("--nproc-per-node", 2, "-r", 3, "--max-restarts", 0, script) as launcher:
        ready.wait(2)
        yield run_of(place).name
        launcher.send(signal.SIGTERM)
        launcher.end()


def test_a_page_acts_on_its_run(place: Place, running: str, ready: Ready) -> None:
    with served(place, "--allow-control") as one:
        assert f"/runs/{running}/control" in one.ask(f"/runs/{running}").text
        assert one.control(running, "pause") == (200, True, "2 workers paused.")
        assert one.control(running, "resume") == (200, True, "2 workers continued.")
        status, ok, text = one.control(running, "resume")
        assert (status, ok) == (409, False)
        assert "its workers are not paused" in text
        status, ok, text = one.control(running, "stack")
        assert (status, ok) == (200, True), text
        assert "script.py" in text
        assert one.control(running, "restart")[:2] == (200, True)
        ready.wait(2)
        asked = one.control(running, "stop")
        assert asked[:2] == (200, True), asked
        pid = one.launcher.process.pid
        assert f"pid {pid}" in changes_to(one, running, "The run has ended").text
        status, ok, text = one.control(running, "stop")
        assert (status, ok) == (409, False)
        assert "has ended (stopped)" in text
    report = (place.logs / running / "report.txt").read_text()
    assert f"phalanx stop (user {user()}, pid {pid})" in report


def user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def test_what_only_a_page_of_its_own_can_send_is_done(place: Place, running: str) -> None:
    record = place.logs / running / "run.json"
    with served(place, "--allow-control") as one:
        cookie = f"phalanx-{one.port}={one.token}"
        for wrong in (
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Origin": "http://["},
            {"Origin": f"http://127.0.0.1:{one.port + 1}"},
            {"X_Phalanx": "0"},
            {"Content_Type": "text/plain"},
            {"Content_Type": "application/x-www-form-urlencoded"},
        ):
            for who in ({}, {"Authorization": "", "Cookie": cookie}):
                status, ok, _text = one.control(running, "stop", **wrong, **who)
                assert (status, ok) == (403, False), wrong
        assert one.control(running, "stop", Origin="null", Host="")[0] == 403
        headers = {"X_Phalanx": "1", "Content_Type": "application/json"}
        path = f"/runs/{running}/control"
        without = one.ask(path, "POST", '{"do": "stop"}', Authorization="", Cookie=cookie, **headers)
        assert without.status == 403  # no Origin, and a cookie alone
        for body, status in (
            ("", 400),
            ("[", 400),
            ("[]", 400),
            ('{"do": "delete"}', 400),
            ('{"do": ["stop"]}', 400),
            ("[" * 900, 400),
            ("x" * 2000, 413),
        ):
            answer = one.ask(path, "POST", body, Origin=one.origin, **headers)
            assert (answer.status, json.loads(answer.text)["ok"]) == (status, False), body
        for name in ("none", "..%2f", running[:-1]):
            assert (
                one.ask(f"/runs/{name}/control", "POST", '{"do": "stop"}', Origin=one.origin, **headers).status == 404
            )
        assert json.loads(record.read_text())["state"] == "running"
        assert one.ask(path, "POST", '{"do": "pause"}', **headers).status == 200  # a program, with the token
        assert problems(one) == []


def test_the_one_that_watches_too_much_is_told(place: Place) -> None:
    name = succeed(place).name
    with served(place) as one:
        streams = [one.events(f"/runs/{name}/events") for _ in range(64)]
        assert all(stream.next() for stream in streams)
        answer = one.ask("/events")
        assert answer.status == 503
        assert answer.text.startswith("64 pages are open that watch this server")
        assert one.ask(f"/runs/{name}").status == 200
        streams.pop().__exit__()
        while (stream := one.events("/events")).answer.status != 200:
            stream.__exit__()
        assert stream.next() is not None
        for each in (stream, *streams):
            each.__exit__()


def test_a_run_that_is_removed_ends_its_stream(place: Place) -> None:
    folder = succeed(place)
    with served(place) as one, one.events(f"/runs/{folder.name}/events") as stream:
        assert one.ask(f"/runs/{folder.name}").status == 200
        stream.next()
        shutil.rmtree(folder)
        while stream.next() is not None:
            pass
        assert one.ask(f"/runs/{folder.name}").status == 404
        assert one.ask(f"/runs/{folder.name}/events").status == 404
        assert one.ask("/").status == 200


def test_a_link_in_the_place_of_a_run_is_not_followed(place: Place) -> None:
    folder = succeed(place)
    link = place.logs / "link"
    link.symlink_to("elsewhere")
    with served(place) as one, one.events(f"/runs/{folder.name}/events") as stream:
        assert one.ask(f"/runs/{folder.name}").status == 200
        stream.next()
        folder.rename(place.logs / "elsewhere")
        link.rename(folder)
        while stream.next() is not None:
            pass
        assert one.ask(f"/runs/{folder.name}").status == 404
        assert one.ask("/runs/elsewhere").status == 200


def test_folders_that_are_damaged_have_pages(place: Place) -> None:
    folder = succeed(place, "'</script><script>x</script>'")
    for name in ("torn", "empty", "deep"):
        shutil.copytree(folder, place.logs / name)
    (place.logs / "torn" / "run.json").write_bytes(os.urandom(999))
    (place.logs / "empty" / "run.json").unlink()
    (place.logs / "deep" / "samples.jsonl").write_bytes(b"[" * 100_000 + b"\n")
    (place.logs / "deep" / "attempt_1").write_text("a file")
    (place.logs / "deep" / f"attempt_{'9' * 200}").mkdir()
    os.mkfifo(place.logs / "deep" / "attempt_0" / "2")
    evil = "<b onclick='x'>\u202e\x1b[31m\"&%2e #?"
    (place.logs / evil / "attempt_0").mkdir(parents=True)
    os.mkdir(os.fsencode(place.logs) + b"/bad \xff")
    os.mkdir(os.fsencode(place.logs) + b"/bad \xff/attempt_0")
    with served(place) as one, one.events("/events") as listed:
        assert listed.next() is not None
        assert one.ask("/runs/bad%20%FF").status == 200
        forwarded = one.ask(f"/runs/bad%20%FF?token={one.token}", Authorization="")
        assert (forwarded.status, forwarded.headers["Location"]) == (303, "/runs/bad%20%FF")
        page = one.ask("/")
        assert page.status == 200
        assert "<b onclick" not in page.text
        assert not {"\u202e", "\x1b"} & set(page.text)
        assert f'href="/runs/{quote(evil)}"' in page.text
        assert one.ask(f"/runs/{quote(evil)}").status == 200
        for name in ("torn", "empty", "deep", folder.name):
            assert f'href="/runs/{name}"' in page.text
            answer = one.ask(f"/runs/{name}")
            assert answer.status == 200, answer
            assert "<script>x" not in answer.text
            with one.events(f"/runs/{name}/events") as stream:
                assert stream.next() == answer.version


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user has to be there")
def test_a_link_of_another_user_is_not_followed(place: Place) -> None:
    folder = succeed(place)
    os.chown(folder, NOBODY, NOBODY)
    with served(place) as one:
        assert one.ask(f"/runs/{folder.name}").status == 200
        shutil.rmtree(folder / "attempt_0")
        (folder / "attempt_0").symlink_to("/etc")
        os.chown(folder / "attempt_0", NOBODY, NOBODY, follow_symlinks=False)
        while (answer := one.ask(f"/runs/{folder.name}")).status == 200:
            pass
        assert (answer.status, answer.text) == (
            403,
            f"{folder / 'attempt_0'} is a link of another user, which is not followed.\n",
        )


def test_strangers_at_its_port_keep_nobody_out(place: Place) -> None:
    name = succeed(place).name
    requests = (
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01" + os.urandom(500),
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(64),
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFF\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"GET http://elsewhere/ HTTP/1.1\r\nHost: [\r\nCookie: \xff=\x01; ;=;\r\n\r\n",
        b"GET /%ff%00?token=%ff&token HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n",
    )
    with served(place) as one, one.events(f"/runs/{name}/events") as stream:
        assert stream.next() is not None
        held: list[socket.socket] = []
        for number in range(600):  # more than it keeps
            held.append(one.connect())
            with contextlib.suppress(OSError):  # it was closed
                held[-1].sendall(requests[number % len(requests)])
            if number % 100 == 50:
                assert one.ask(f"/runs/{name}").status == 200
        assert len(os.listdir(f"/proc/{one.launcher.process.pid}/fd")) < 450
        assert one.ask("/").status == 200
        (place.logs / name / "report.txt").write_text("written again")
        assert stream.next() is not None
        for connection in held:
            connection.close()
        assert problems(one) == []
        assert one.launcher.process.returncode == -signal.SIGTERM


def test_strangers_keep_nobody_out_where_few_files_may_be_open(place: Place) -> None:
    name = succeed(place).name
    with served(place, through=by_shell('ulimit -n 192; exec "$@"')) as one:
        held = []
        for number in range(600):
            held.append(one.connect())
            if number % 100 == 50:
                assert one.ask(f"/runs/{name}").status == 200
        assert one.ask("/").status == 200
        assert problems(one) == []
        for connection in held:
            connection.close()
    with refuse(place, place.logs, through=by_shell('ulimit -n 100; exec "$@"')) as launcher:
        done = launcher.end()
    assert (done.status, done.out) == (1, "")
    assert "this takes 128 open files: it may have 100 (ulimit -n)" in done.err


@pytest.mark.parametrize("options", [(), ("--no-token",)])
def test_the_one_who_is_not_let_in_has_one_answer(place: Place, options: tuple[str, ...]) -> None:
    """Else it could ask on, and hold a connection by taking none of the answers."""
    with served(place, *options) as one:
        connection = one.connect()
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        answers = read_all(connection)
        assert answers.count(b"HTTP/1.1 4") == 1
        assert b"connection: close" in answers.lower()


def test_what_is_no_http_is_not_told(place: Place) -> None:
    """A stranger writes nothing to the console; nor does whoever has the token."""
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    with served(place) as one:
        for known in (b"", f"Authorization: Bearer {one.token}\r\n".encode()):
            connection = one.connect()
            connection.sendall(chunked + known + b"\r\nno chunk\r\n")
            assert read_all(connection).startswith(b"HTTP/1.1 400 ")
            connection = one.connect()
            connection.sendall(chunked + known + b"\r\n")
            assert connection.recv(8) == b"HTTP/1.1"  # it is answered
            with contextlib.suppress(ConnectionError):  # it was closed
                connection.sendall(b"no chunk\r\n")
            read_all(connection)
            connection = one.connect()
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + known + b"\r\nno request\r\n\r\n")
            read_all(connection)
        assert one.ask("/").status == 200
        assert problems(one) == []


def test_what_goes_wrong_again_and_again_is_told_once(place: Place) -> None:
    with served(place) as one:
        pid = one.launcher.process.pid
        assert one.ask("/").status == 200
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        most = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 2
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, limits[1]))
        connections = [one.connect() for _ in range(40)]
        told = one.launcher.read_until("out of system resource")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert one.ask("/").status == 200
        for connection in connections:
            connection.close()
        assert (
            told.splitlines()[-1] == "phalanx: socket.accept() out of system resource: [Errno 24] Too many open files"
        )
        assert problems(one) == []


def test_the_head_of_a_stream_ends(place: Place) -> None:
    with served(place) as one:
        connection = one.connect()
        known = f"Host: x\r\nAuthorization: Bearer {one.token}\r\n"
        ask = f"HEAD /events HTTP/1.1\r\n{known}\r\nGET /nowhere HTTP/1.1\r\n{known}Connection: close\r\n\r\n"
        connection.sendall(ask.encode())
        head, _, rest = read_all(connection).partition(b"\r\n\r\n")
        assert b"text/event-stream" in head
        assert rest.startswith(b"HTTP/1.1 404 ")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
def test_all_addresses_are_those_of_ipv4_too(place: Place) -> None:
    with served(place, "--host", "::") as one:
        for host in ("127.0.0.1", "::1"):
            one.host = host
            assert one.ask("/").status == 200


def test_without_stdout_there_is_no_address_and_it_is_refused(place: Place) -> None:
    with refuse(place, "--port", 0, through=by_shell('exec "$@" >&-')) as launcher:
        done = launcher.end()
    assert done.status == 1
    assert "stdout is closed, to which the address is written; or set PHALANX_SERVE_TOKEN" in done.err


@pytest.mark.long
def test_a_connection_that_does_nothing_is_closed(place: Place) -> None:
    with served(place) as one:
        connections = [one.connect() for _ in range(3)]
        connections[1].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        connections[2].sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        for connection in connections:
            connection.settimeout(4 * TIMEOUT)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(1 << 16):
                    pass
            connection.close()
        assert one.ask("/").status == 200


@pytest.mark.parametrize("number,status", [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_it_with_its_streams(place: Place, number: signal.Signals, status: int) -> None:
    name = succeed(place).name
    with served(place) as one:
        streams = [one.events(path) for path in ("/events", f"/runs/{name}/events") for _ in range(3)]
        assert all(stream.next() for stream in streams)
        strangers = [one.connect() for _ in range(3)]
        unread = one.connect()
        unread.sendall(
            f"GET /runs/{name} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {one.token}\r\n\r\n".encode() * 20
        )
        one.launcher.send(number)
        assert one.launcher.end().status == status
        for stream in streams:
            stream.__exit__()
        for connection in (*strangers, unread):
            connection.close()


def test_what_is_asked_for_ends_with_the_server(place: Place, running: str) -> None:
    """The command that looks at stacks, too."""
    with served(place, "--allow-control") as one:
        headers = "Host: x\r\nX-Phalanx: 1\r\nContent-Type: application/json\r\nContent-Length: 15\r\n"
        asked = one.connect()
        line = f"POST /runs/{running}/control HTTP/1.1\r\nAuthorization: Bearer {one.token}\r\n{headers}\r\n"
        asked.sendall(line.encode() + b'{"do": "stack"}')
        children = Path(f"/proc/{one.launcher.process.pid}/task/{one.launcher.process.pid}/children")
        while not (pids := [int(pid) for pid in children.read_text().split()]):
            pass
        one.launcher.send(signal.SIGTERM)
        one.launcher.end()
        asked.close()
        assert not wait_gone(pids)


def test_the_whole_help_is_there_without_the_libraries(place: Place) -> None:
    place.write("raise ImportError('planted')", "starlette.py")
    place.env["PYTHONPATH"] = os.pathsep.join([str(place.folder), os.environ.get("PYTHONPATH", "")])
    done = place.program(sys.executable, "-m", "phalanx", "serve", "--help")
    assert done.status == 0
    assert "ssh -L 8766:127.0.0.1:8766" in done.out
