"""Old faults, which are planted back into a copy of the source. The injector has to notice each of them.

Each fault changes a few lines. If these are not in the source any more, planting fails, and somebody has to find out
which lines would make the fault today.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault: in ``file``, the first ``old`` after the first ``after`` is replaced by ``new``."""

    file: str
    after: str
    old: str
    new: str
    seeds: tuple[int, ...]  # seeds that find it
    symptom: str  # words of what the checker says then


PLANTED = {
    "the guard obeys the order to start though the keeper is lost": Planted(
        "_engine/keeper/keeper.py",
        "def take_over(",
        '        self._see("HELPER_LOST")',
        "        from phalanx._base import procfs\n"
        "        if procfs.children(os.getpid()):\n"
        '            self._see("HELPER_LOST")\n'
        "        self._last_message = ()\n"
        "        it = self._connection\n"
        "        it._guard, it._launcher = [os.pidfd_open(os.getpid()) for _ in range(2)]\n"
        "        ",
        (3360, 6218, 7216),
        "after the keeper was killed",
    ),
    "the guard does not take over from a keeper that was killed": Planted(
        "_engine/keeper/guard.py", "status = _outlive(", "if status:", "if False:", (1212, 2127, 5136), "survivors"
    ),
    "the keeper goes on without its launcher": Planted(
        "_engine/keeper/keeper.py",
        "def _on_orphaned(",
        'self._see("ORPHANED")',
        "pass",
        (3122, 3676, 4399),
        "survivors",
    ),
    "exits are seen in the order of the start": Planted(
        "_base/loop.py",
        "def once(",
        "for fd, events in ready:",
        "for fd, events in sorted(ready):",
        (17003, 34225, 45861),
        "the root cause is rank",
    ),
    "the log writer drops what is in its pipes when it is told to finish": Planted(
        "_engine/keeper/log_writer.py",
        "def _turn(self",
        "        try:",
        '        if self._complete or __import__("select").select((self._channel.fileno(),), (), (), 0)[0]:\n'
        "            return False\n"
        "        try:",
        (3809, 7784, 11645),
        "that were written",
    ),
    "a result for which there is no descriptor is dropped": Planted(
        "_engine/mirror.py",
        "elif packet.cut",
        "said.result = channels.Truncated(packet.letter)",
        "pass",
        (3722, 4035, 14228),
        "returned None",
    ),
}


def plant(name: str, source: Path, folder: Path) -> Path:
    """Copy the package from ``source`` into ``folder``, with a fault. Returns ``folder``. Raises AssertionError."""
    fault = PLANTED[name]
    shutil.copytree(source / "phalanx", folder / "phalanx")
    path = folder / "phalanx" / fault.file
    text = path.read_text(encoding="utf-8")
    head, after, rest = text.partition(fault.after)
    assert after, f"{name}: there is no {fault.after!r} in {fault.file}"
    before, old, behind = rest.partition(fault.old)
    assert old, f"{name}: after {fault.after!r} there is no {fault.old!r} in {fault.file}"
    path.write_text(head + after + before + fault.new + behind, encoding="utf-8")
    compile(path.read_text(encoding="utf-8"), path, "exec")
    return folder
