"""A client of the Debug Adapter Protocol, as an editor is one: it launches a program under debugpy, with its children.

Each debugged process is a session of its own: the adapter announces a child by the event ``debugpyAttach``, and the
client connects to it once more.
"""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from tests.support.helpers import TIMEOUT


class Debugger:
    """Debugs a program, and every Python that it starts, with a breakpoint in ``file`` at ``line``.

    Args:
        arguments: What stands behind the interpreter: a script or ``-m MODULE``, and its arguments.
        file: Where the breakpoint is.
        line: Its line, from 1 on.
        **launch: More for the request ``launch``.
    """

    def __init__(self, arguments: Sequence[str], file: Path, line: int, **launch: Any) -> None:
        self.file, self.line = str(file), line
        self.processes: list[int] = []
        """The pids of all that was debugged."""
        self._exit_code: int | None = None
        self._stops: queue.Queue[tuple[Session, int]] = queue.Queue()
        self._over = threading.Event()
        self._sockets: list[socket.socket] = []
        self._adapter = subprocess.Popen(
            [sys.executable, "-m", "debugpy.adapter"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._adapter.stdin is not None
        assert self._adapter.stdout is not None
        module = arguments[0] == "-m"
        what = {"module" if module else "program": arguments[module], "args": list(arguments[1 + module :])}
        request = {"console": "internalConsole", "python": sys.executable, **what, **launch}
        self._main = Session(self, self._adapter.stdout, self._adapter.stdin)
        self._sessions = [self._main]
        self._main.begin("launch", request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._main.ask("disconnect", terminateDebuggee=True)
        for sock in self._sockets:
            sock.shutdown(socket.SHUT_RDWR)
        for session in self._sessions:
            session.close()
        try:
            self._adapter.wait(TIMEOUT)
        finally:
            self._adapter.kill()
            self._adapter.wait()
            for session in self._sessions:
                session.thread.join()
            for sock in self._sockets:
                sock.close()

    @property
    def adapter(self) -> int:
        """The adapter's pid."""
        return self._adapter.pid

    def stop(self, *, goes_on: bool = True) -> dict[str, str]:
        """Wait for the next stop at the breakpoint, and let it go on. Returns the local variables of that frame."""
        session, thread = self._stops.get(timeout=TIMEOUT)
        frame = session.ask("stackTrace", threadId=thread)["stackFrames"][0]
        assert (frame["source"]["path"], frame["line"]) == (self.file, self.line)
        scope = session.ask("scopes", frameId=frame["id"])["scopes"][0]["variablesReference"]
        found = {one["name"]: one["value"] for one in session.ask("variables", variablesReference=scope)["variables"]}
        if goes_on:
            session.request("continue", threadId=thread)
        return found

    def wait(self) -> int:
        """Wait until the program has ended. Returns its exit code."""
        assert self._over.wait(TIMEOUT)
        assert self._exit_code is not None
        return self._exit_code

    def on_event(self, session: Session, event: str, body: dict[str, Any]) -> None:
        """Do as an editor does."""
        if event == "initialized":
            session.request("setBreakpoints", source={"path": self.file}, breakpoints=[{"line": self.line}])
            session.request("configurationDone")
        elif event == "process":
            self.processes.append(body["systemProcessId"])
        elif event == "stopped":
            self._stops.put((session, body["threadId"]))
        elif event == "debugpyAttach":
            sock = socket.create_connection((body["connect"]["host"], body["connect"]["port"]))
            self._sockets.append(sock)
            child = Session(self, sock.makefile("rb"), sock.makefile("wb"))
            self._sessions.append(child)
            child.begin("attach", body)
        elif session is self._main and event == "exited":
            self._exit_code = body["exitCode"]
        elif session is self._main and event == "terminated":
            self._over.set()


class Session:
    """A connection to an adapter, whose events `on_event` of ``debugger`` handles."""

    def __init__(self, debugger: Any, received: IO[bytes], sent: IO[bytes]) -> None:
        self._debugger, self._received, self._sent = debugger, received, sent
        self._one = threading.Lock()
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._serial = 0
        self.thread = threading.Thread(target=self._receive)
        self.thread.start()

    def begin(self, how: str, arguments: dict[str, Any]) -> None:
        self.request("initialize", adapterID="debugpy", pathFormat="path")
        self.request(how, **arguments)

    def request(self, command: str, **arguments: Any) -> queue.Queue[dict[str, Any]]:
        """Send a request. Its answer arrives in the queue."""
        with self._one:
            self._serial += 1
            answer = self._answers[self._serial] = queue.Queue()
            message = {"seq": self._serial, "type": "request", "command": command, "arguments": arguments}
            body = json.dumps(message).encode()
            with suppress(OSError, ValueError):  # its end has come
                self._sent.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
                self._sent.flush()
        return answer

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request, and return its answer."""
        answer = self.request(command, **arguments).get(timeout=TIMEOUT)
        assert answer["success"], answer
        return dict(answer.get("body", ()))

    def close(self) -> None:
        """Send nothing more. The adapter ends with the first session."""
        with suppress(OSError):
            self._sent.close()

    def _receive(self) -> None:
        with self._received, suppress(OSError):  # a session whose process was killed
            while line := self._received.readline():
                self._received.readline()
                message = json.loads(self._received.read(int(line.partition(b":")[2])))
                if message["type"] == "response":
                    self._answers[message["request_seq"]].put(message)
                elif message["type"] == "event":
                    self._debugger.on_event(self, message["event"], message.get("body") or {})
