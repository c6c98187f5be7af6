"""How whole lines are written: as text with a prefix for people, or as JSON Lines for machines."""

from __future__ import annotations

from collections.abc import Callable

from phalanx._base.tty import escape_json
from phalanx._logs.line_state import Source


class Text:
    """Lines for people: each after its prefix."""

    def render(self, source: Source, block: bytes, time: Callable[[], float]) -> tuple[bytes | memoryview, ...]:
        """Return whole lines as text. ``time`` returns when they were seen (seconds since the epoch)."""
        prefix = source.label(time)
        if not prefix:
            return (block,)
        # `replace` adds one prefix too many, after the last line end; slicing a memoryview drops it without a copy.
        text = memoryview(block.replace(b"\n", b"\n" + prefix))
        return prefix, text[: -len(prefix)]


class Json:
    r"""Lines for machines: JSON objects (RFC 8259), one a line, with ``time``, ``rank``, ``stream`` and ``text``.

    ``time`` is when the line was seen, ISO 8601 with the local offset. Bytes that are no UTF-8 stand in ``text`` as
    ``\xff`` would in Python. ``host``, if given, comes first. A line that is too long to be held comes in parts:
    ``partial`` is true in all but the last of them, ``continued`` in all but the first.
    """

    def __init__(self, host: str = "") -> None:
        self._host = host

    def render(self, source: Source, block: bytes, time: Callable[[], float]) -> tuple[bytes | memoryview, ...]:
        """Return whole lines as JSON objects. ``time`` returns when they were seen (seconds since the epoch)."""
        import json
        from datetime import datetime

        moment = datetime.fromtimestamp(time()).astimezone()
        host = {"host": self._host} if self._host else {}
        seen = moment.isoformat(timespec="milliseconds")
        fields = {**host, "time": seen, "rank": source.rank, "stream": source.stream, **source.line.marks}
        head = json.dumps(fields)[:-1] + ', "text": '
        encode = json.JSONEncoder(ensure_ascii=False).encode
        lines = block.replace(b"\r\n", b"\n")[:-1].decode("utf-8", "backslashreplace").split("\n")
        return (escape_json("".join([f"{head}{encode(line)}}}\n" for line in lines])).encode(),)
