"""Shows the lines of a run whose workers are groups of their own: on the same console, by one pump, as one group's.

Owns that pump, from the first group to the end of the run.
"""

from __future__ import annotations

from phalanx._base import interrupts
from phalanx._base.latch import Latch
from phalanx._logs.display import show
from phalanx._logs.group_pump import SharedPump

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx._logs.console import ConsoleSpecs
    from phalanx._logs.display import GroupDisplay, PartDisplay
    from phalanx._logs.layout import LogsDest


class RunLines:
    """The lines of a run. Groups get it as ``run_lines``; it is closed when all of them are.

    Args:
        envs: The environment variables of all workers, by local rank.
        console: How the console shows the lines.
        on_reader_gone: See `PContext`.
    """

    def __init__(
        self,
        envs: Mapping[int, Mapping[str, str]],
        console: ConsoleSpecs,
        on_reader_gone: Callable[[str], None] | None = None,
    ) -> None:
        self._on_reader_gone = on_reader_gone
        self._envs = envs
        self._console = console
        self._shared: SharedPump | None = None
        self._display: GroupDisplay | None = None

    def part(self, logs: LogsDest, filters: Mapping[str, list[str] | None]) -> PartDisplay:
        """Return what shows the files of one group. Raises OSError, RuntimeError: no thread can be started."""
        with interrupts.deferred():
            if self._shared is None or self._display is None:
                self._shared = SharedPump(self._envs, self._console, self._on_reader_gone)
                self._display = show(self._shared.pump)
                self._display.open()
            return self._display.part(self._shared.part(logs, filters))

    def say(self, text: str) -> bool:
        """Show a line of ours among those of the workers. Returns whether that is possible."""
        display = self._display
        if display is None or not display.takes_messages():
            return False
        display.say(text)
        return True

    def close(self) -> None:
        """Show what is held for comparison, and close everything: after the groups. Idempotent."""
        if self._shared is None or self._display is None:
            return
        shown = Latch()
        self._display.finish(shown.open)
        self._display.wait(shown)
        with interrupts.deferred():
            shared, display, self._shared, self._display = self._shared, self._display, None, None
            display.close()
            shared.close()
