"""The terminal of a rank: who is attached to it, what each receives, and who types. Runs in the log writer.

Owns the Unix socket beside the rank's log file, the frames that go through it, and the bounds on those who connect:
none of them holds up the worker, its log, or another one. `phalanx.cli.attach` is the other end. Loaded only where a
rank has a terminal.

A frame is a letter, the number of bytes that follow (4 bytes, the highest first), and these. From a client:

- ``A``: it attaches, to watch; with its rows and columns (2 bytes each), to type as soon as nobody else does.
- ``K``: what is typed. ``S``: rows and columns have changed. Both count once it types.

To a client:

- ``O``: what the program has written: first the end of what it wrote before, see `REPLAY`.
- ``R``: who types: a pid; 0: nobody; that of the client itself: it does. Also the answer to ``A``.
- ``H``: no process has the terminal open, for now. ``E``: the end, and why.

Of a client that reads slowly, what it has not read is replaced by the end of what the program wrote; one that has read
nothing for `READS_WITHIN` seconds by then loses its connection, and so does one that sends anything else.
"""

from __future__ import annotations

import os
import re
import select
import socket
import struct

from phalanx._base.channels import by_folder, peer
from phalanx._base.loop import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx._base.loop import Loop

SOCKET = "terminal.sock"
"""The name of the socket, in the folder of the rank's log file."""

LONGEST_FRAME = 64 << 10
"""Bytes of a frame."""

REPLAY = 64 << 10
"""Bytes of what the program wrote last that a client receives first."""

READS_WITHIN = 10.0
"""Seconds in which a client that has fallen behind must read something."""

SIZE = struct.Struct(">HH")
"""Rows and columns."""

_HEAD = struct.Struct(">cI")
_MOST_CLIENTS = 32
_MOST_UNREAD = 1 << 20  # bytes that a client has not read
_MOST_TYPED = 64 << 10  # bytes that the program has not read
_ATTACHES_WITHIN = 5.0
_LEAVES_WITHIN = 5.0  # seconds in which a client reads why it has to leave
_PAUSE = 1.0  # seconds in which nobody is accepted, after descriptors have run out
_MODE = 0o600
_ROOT = 0

_QUESTION = re.compile(
    rb"\x05|\033Z|\033\[(?:\??[0-9;]*n|[>=]?[0-9;]*c|\??[0-9;]*\$p|\?u|>[0-9;]*q|[01]?x|[12]\$w|\?[0-9;]*S"
    rb"|(?:1[1-9]|2[01])(?:;[0-9;]*)?t)|\033\][^\a\033]{0,99};\?[^\a\033]{0,99}(?:\a|\033\\)"
    rb"|\033P[$+]q[^\033]{0,999}\033\\"
)
"""What a terminal answers: it would type that for a second time."""

_LOW = {1, 9, 47, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1015, 1016, 1047, 1049, 2004}
_HIGH = {7, 25}
"""Modes of a terminal (DECSET) that programs change, by how they are otherwise."""

_CHANGE = re.compile(rb"\033(?:\[([<=>?]?)([0-9;]{0,64})( ?[hlmnqu])|([=>c]))")
_PART = re.compile(rb"\033(?:\[[<=>?]?[0-9;]{0,64} ?)?\Z")
_MOST_PUSHED = 16


def frame(kind: bytes, data: bytes = b"") -> bytes:
    r"""Return a frame as it is sent.

    >>> frame(b"K", b"ls")
    b'K\x00\x00\x00\x02ls'
    """
    return _HEAD.pack(kind, len(data)) + data


class Frames:
    """Cuts what comes through a socket into frames.

    >>> list(Frames().feed(frame(b"K", b"ls") + b"S"))
    [(b'K', b'ls')]
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Return the frames that are complete. Raises ValueError for one that is too long."""
        self._rest += data
        while len(self._rest) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(self._rest)
            if size > LONGEST_FRAME:
                raise ValueError("too long")
            end = _HEAD.size + size
            if len(self._rest) < end:
                return
            data, self._rest = self._rest[_HEAD.size : end], self._rest[end:]
            yield kind, data


class Modes:
    r"""Follows how a program changes the modes of its terminal, in what it writes.

    >>> modes = Modes()
    >>> modes.follow(b"\033[?1049h\033[?25l\033[>4;2m text \033[?25h")
    >>> modes.changed
    b'\x1b[?1049h\x1b[>4;2m'
    >>> modes.restored
    b'\x1b[>4m\x1b[?1049l'
    """

    def __init__(self) -> None:
        self._changed: dict[bytes, tuple[bytes, bytes]] = {}  # what has changed each, and what restores it
        self._pushed: list[bytes] = []  # kitty's reports of keys, of which each screen has a stack
        self._part = b""

    @property
    def changed(self) -> bytes:
        """What changes a terminal's modes as the program has done."""
        return b"".join([*(change for change, _ in self._changed.values()), *self._pushed])

    @property
    def restored(self) -> bytes:
        """What restores them; ``b""``: none is changed."""
        pops = b"\033[<%du" % len(self._pushed) if self._pushed else b""
        return b"".join([pops, *(restores for _, restores in reversed(self._changed.values())), pops])

    def follow(self, data: bytes) -> None:
        """Read what the program writes next."""
        data = self._part + data
        for match in _CHANGE.finditer(data):
            self._note(match[0], match[1] or b"", match[2] or b"", match[3] or match[4])
        part = _PART.search(data, max(0, len(data) - 80))
        self._part = part[0] if part else b""

    def _note(self, all_of_it: bytes, mark: bytes, numbers: bytes, final: bytes) -> None:
        values = [int(number) for number in numbers.split(b";") if number]
        if mark == b"?" and final in b"hl":
            for number in values:
                if number in _LOW | _HIGH:
                    change, restores = (b"\033[?%d%c" % (number, letter) for letter in (final, b"hl"[final == b"h"]))
                    self._set(b"?%d" % number, change, restores, (final == b"h") == (number in _LOW))
        elif mark == b">" and final in b"mn" and values[:1] == [4]:  # modifyOtherKeys of xterm
            self._set(b"m", all_of_it, b"\033[>4m", final == b"m" and any(values[1:]))
        elif not mark and final == b" q":
            self._set(final, all_of_it, b"\033[0 q", any(values))
        elif final == b"u" and mark == b"<":
            del self._pushed[-(values[0] if values else 1) :]
        elif final == b"u" and mark and mark in b"=>" and len(self._pushed) < _MOST_PUSHED:
            self._pushed.append(all_of_it)
        elif all_of_it == b"\033c":
            self._changed.clear()
            self._pushed.clear()
        elif all_of_it in (b"\033=", b"\033>"):
            self._set(b"=", all_of_it, b"\033>", all_of_it == b"\033=")

    def _set(self, key: bytes, change: bytes, restores: bytes, is_changed: bool) -> None:  # noqa: FBT001 - as above
        self._changed.pop(key, None)
        if is_changed:
            self._changed[key] = change, restores


class _Client:
    """One that has connected.

    Attributes:
        size: Its rows and columns, if it is to type.
        is_behind: Whether it has not read what it was sent, and gets the end of all once it has.
    """

    def __init__(self, link: socket.socket, pid: int) -> None:
        self.link, self.pid = link, pid
        self.frames = Frames()
        self.is_attached = self.is_behind = self.leaves = False
        self.size: tuple[int, int] | None = None
        self.unread: list[bytes] = []
        self.count = 0  # bytes of them
        self.sent = 0  # bytes, in all
        self.events = READ

    def skip(self) -> None:
        """Drop what it has not read, but for the frame that has begun: the first of them."""
        del self.unread[1:]
        self.count = sum(map(len, self.unread))


class Terminal:
    """Serves one terminal, from its start to `close`.

    Args:
        loop: On which it lives.
        log: The path of the rank's log file.
        master: Our end of the terminal, which does not block.
        fill: Called when something can be read from it. It calls `show` and `rest`.
    """

    def __init__(self, loop: Loop, log: str, master: int, fill: Callable[[], None]) -> None:
        self._loop, self._master, self._fill = loop, master, fill
        self._path = os.path.join(os.path.dirname(log), SOCKET)
        self._recent = bytearray()
        self._modes = Modes()  # before that
        self._typed = b""  # and not taken by the program yet
        self._rests = self._is_over = False
        self._clients: dict[int, _Client] = {}
        self._typist: _Client | None = None
        self._listener: socket.socket | None = None
        loop.watch(master, self._ready)
        try:
            self._listen()
        except OSError:  # the file system takes no sockets, or no descriptor is left: nobody can attach
            self._forget_listener()

    @property
    def is_attached(self) -> bool:
        """Whether anybody is connected."""
        return bool(self._clients)

    def show(self, data: bytes) -> None:
        """Send clients what the program has written. ``b""``: nothing."""
        if not data:
            return
        if self._rests:  # a process has opened it again
            self._rests = False
            self._watch_master()
            self._choose()
        self._recent += data
        if len(self._recent) > 2 * REPLAY:
            self._cut()
        for client in [client for client in self._clients.values() if client.is_attached]:
            self._send_output(client, data)

    def rest(self) -> None:
        """No process has the terminal open. One whose controlling terminal it is may open it again (/dev/tty).

        Our end stays open until the group's end: if it was closed, the kernel would send that process SIGHUP.
        """
        if self._rests:
            return
        self._rests, self._typed = True, b""
        self._loop.change(self._master, READ | select.EPOLLET)  # EPOLLHUP lasts: once is enough
        for client in list(self._clients.values()):
            if client.is_attached:
                self._send(client, b"H")

    def close(self) -> None:
        """Accept nobody any more, and send the clients the end. Our end of the terminal is closed."""
        self._is_over = True
        if self._listener is not None:
            try:
                os.unlink(self._path)
            except OSError:  # somebody has removed it
                pass
            self._forget_listener()
        for client in list(self._clients.values()):
            self._end(client, "")

    # --- the terminal

    def _ready(self, events: int) -> None:
        if events & ~WRITE:
            self._fill()
        if events & WRITE and self._typed and not self._is_over:
            self._type()

    def _type(self) -> None:
        try:
            self._typed = self._typed[os.write(self._master, self._typed) :]
        except BlockingIOError:
            pass
        except OSError:  # no process has it open
            self._typed = b""
        self._watch_master()
        if self._typist is not None and len(self._typed) < _MOST_TYPED:
            self._watch(self._typist)

    def _watch_master(self) -> None:
        if not self._rests and not self._is_over:
            self._loop.change(self._master, READ | WRITE if self._typed else READ)

    def _resize(self, size: tuple[int, int], *, redraws: bool = False) -> None:
        """Set the size. To have the program draw again, which is sent SIGWINCH for a change only, set another first."""
        from termios import error, tcgetwinsize, tcsetwinsize

        try:
            if redraws and tcgetwinsize(self._master) == size:
                tcsetwinsize(self._master, (size[0], size[1] + 1))
            tcsetwinsize(self._master, size)
        except (OSError, error):
            return

    # --- the clients

    def _listen(self) -> None:
        self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        os.fchmod(listener.fileno(), _MODE)  # before: that of the file is made of it
        by_folder(self._path, listener.bind)
        listener.listen(_MOST_CLIENTS)
        self._loop.watch(listener.fileno(), self._accept)

    def _forget_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.forget(listener.fileno())
            listener.close()

    def _accept(self, _events: int) -> None:
        listener = self._listener
        assert listener is not None
        try:
            link, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            self._loop.change(listener.fileno(), 0)
            self._loop.after(_PAUSE, self._accept_again)
            return
        link.setblocking(False)
        pid, uid = peer(link)
        if uid not in (os.geteuid(), _ROOT):
            link.close()
            return
        client = _Client(link, pid)
        try:
            self._loop.watch(link.fileno(), lambda events: self._on_client(client, events))
        except OSError:  # no memory, or /proc/sys/fs/epoll/max_user_watches
            link.close()
            return
        self._clients[link.fileno()] = client
        if len(self._clients) > _MOST_CLIENTS:
            self._end(client, f"{_MOST_CLIENTS} are attached to it already")
        else:
            self._loop.after(_ATTACHES_WITHIN, lambda: None if client.is_attached else self._drop(client))

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.change(self._listener.fileno(), READ)

    def _on_client(self, client: _Client, events: int) -> None:
        try:
            if events & WRITE:
                self._flush(client)
            if events & READ and client.events & READ:
                self._receive(client)
            elif events & ~(READ | WRITE):  # it has gone
                self._drop(client)
        except Exception:  # noqa: BLE001 - a mistake of ours costs a connection, and not the group
            self._drop(client)

    def _receive(self, client: _Client) -> None:
        try:
            data = client.link.recv(LONGEST_FRAME)
            if not data:
                raise ConnectionResetError
            for kind, rest in client.frames.feed(data):
                if not client.leaves:
                    self._handle(client, kind, rest)
        except BlockingIOError:
            return
        except (OSError, ValueError, struct.error):
            self._drop(client)
            return
        if client is self._typist and len(self._typed) >= _MOST_TYPED:
            self._watch(client)

    def _handle(self, client: _Client, kind: bytes, data: bytes) -> None:
        """Do what a client asks for. Raises ValueError, struct.error: it is wrong."""
        if kind == b"A" and not client.is_attached:
            client.size = SIZE.unpack(data) if data else None
            client.is_attached = True
            if not self._choose():
                self._send_role(client)
            self._send_output(client, self._screen())
            if self._rests:
                self._send(client, b"H")
        elif kind == b"S" and client.size is not None:
            client.size = SIZE.unpack(data)
            if client is self._typist:
                self._resize(client.size)
        elif kind == b"K" and client.size is not None:
            if client is self._typist and not self._rests:  # else it has not read yet that somebody else types
                self._typed += data
                self._type()
        else:
            raise ValueError(kind)

    def _screen(self) -> bytes:
        """What was written last, without its questions, behind the modes that were changed before."""
        self._cut()
        return self._modes.changed + _QUESTION.sub(b"", self._recent)

    def _cut(self) -> None:
        """Keep what was written last: from the beginning of a line on, or of a sequence, if there is more than that."""
        start = len(self._recent) - REPLAY
        if start > 0:
            line = self._recent.find(b"\n", start, start + REPLAY // 2) + 1
            start = line or max(start, self._recent.find(b"\033", start))
            self._modes.follow(bytes(self._recent[:start]))
            del self._recent[:start]

    def _choose(self) -> bool:
        """Have the first of those type who want to, if nobody does. Returns whether that has changed."""
        if self._typist is not None or self._rests or self._is_over:
            return False
        candidates = (each for each in self._clients.values() if each.size is not None and not each.leaves)
        typist = self._typist = next(candidates, None)
        if typist is None:
            return False
        self._send_roles()
        if typist.size is not None and typist is self._typist:  # else it has gone just now
            self._resize(typist.size, redraws=True)
        return True

    def _send_roles(self) -> None:
        if self._rests or self._is_over:
            return
        for client in list(self._clients.values()):
            if client.is_attached:
                self._send_role(client)

    def _send_role(self, client: _Client) -> None:
        self._send(client, b"R", b"%d" % (0 if self._typist is None else self._typist.pid))

    def _send_output(self, client: _Client, data: bytes) -> None:
        if client.is_behind or client.leaves:
            return
        if client.count > _MOST_UNREAD:
            client.skip()
            client.is_behind = True
            sent = client.sent
            self._loop.after(READS_WITHIN, lambda: self._drop(client) if client.sent == sent else None)
            return
        for start in range(0, len(data), LONGEST_FRAME):
            self._send(client, b"O", data[start : start + LONGEST_FRAME])

    def _send(self, client: _Client, kind: bytes, data: bytes = b"") -> None:
        if not client.leaves:
            client.unread.append(frame(kind, data))
            client.count += _HEAD.size + len(data)
            if len(client.unread) == 1:
                self._flush(client)

    def _flush(self, client: _Client) -> None:
        try:
            while client.unread:
                sent = client.link.send(client.unread[0], socket.MSG_NOSIGNAL)
                client.count -= sent
                client.sent += sent
                if sent < len(client.unread[0]):
                    client.unread[0] = client.unread[0][sent:]
                else:
                    del client.unread[0]
                if not client.unread and client.is_behind:
                    client.is_behind = False
                    self._send_output(client, self._screen())
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        if client.leaves and not client.unread:
            self._drop(client)
        else:
            self._watch(client)

    def _end(self, client: _Client, why: str) -> None:
        """Send a client the end, and close the connection once it has read that."""
        if client.is_behind:  # it has read nothing for long
            client.is_behind = False
            client.skip()
        self._send(client, b"E", why.encode())
        client.leaves = True
        self._loop.after(_LEAVES_WITHIN, lambda: self._drop(client))
        self._flush(client)

    def _watch(self, client: _Client) -> None:
        held = client is self._typist and len(self._typed) >= _MOST_TYPED
        events = (0 if held else READ) | (WRITE if client.unread else 0)
        if events != client.events and client.link.fileno() in self._clients:
            client.events = events
            self._loop.change(client.link.fileno(), events)

    def _drop(self, client: _Client) -> None:
        number = client.link.fileno()
        if self._clients.get(number) is not client:
            return
        del self._clients[number]
        self._loop.forget(number)
        client.link.close()
        client.leaves = True
        if client is self._typist:
            self._typist = None
            if not self._choose():
                self._send_roles()
