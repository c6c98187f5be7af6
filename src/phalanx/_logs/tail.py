"""The last lines of a log file."""

from __future__ import annotations

from phalanx._logs.lines import settled
from phalanx._logs.rotated import last_bytes, rotated_files

TAIL_LINES = 20
"""Lines that are shown of a failed rank."""

_LAST_BYTES = 16 * 1024  # in which they are looked for


def last_lines(path: str, *, rotates: bool = False) -> bytes:
    """Return the last 20 lines of a log, and of its rotated files if it ``rotates``: whole lines."""
    data, cut = b"", False
    for name in (path, *reversed(rotated_files(path) if rotates else [])):
        most = _LAST_BYTES - len(data)
        try:
            size, end = last_bytes(name, most)
        except OSError:  # removed, or no regular file: a pipe, say, in a user's layout
            continue
        data = end + data
        cut = size > most
        if cut or data.count(b"\n") > TAIL_LINES:
            break
    if not data:
        return b""
    lines = settled(data.rstrip(b"\n")).split(b"\n")
    if cut and len(lines) > 1:  # the first of them may lack its beginning
        del lines[0]
    return b"\n".join(lines[-TAIL_LINES:]) + b"\n"
