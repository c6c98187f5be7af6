"""What a group shows people: its workers' lines, and lines of its own among them.

Owns the group's part of the `display`, and the thread for lines that the display cannot take.
"""

from __future__ import annotations

from phalanx._base.threads import Latch, SerialExecutor
from phalanx._engine.protocol import ANSWER_WAIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._logs.display import GroupDisplay
    from phalanx._logs.pump import Pump


class GroupLines:
    """One group's lines. ``write_line`` takes lines of ours that the display cannot take, on a thread of its own."""

    def __init__(self, write_line: Callable[[str], None] | None) -> None:
        self._write_line = write_line
        self._writing = SerialExecutor("phalanx-lines")
        self._pump: Pump | None = None
        self._shown: GroupDisplay | None = None
        self._after: Latch | None = None
        self._is_over = False  # whether no line of ours has a place among the workers' any more
        self.shown = Latch()
        """Opened when all lines of the workers are shown, or when what shows them was left alone."""

    def open(self, pump: Pump | None, after: Latch | None = None) -> None:
        """Have the display show the lines of ``pump``, from `show_workers` on, and not before ``after`` opens."""
        self._pump, self._after = pump, after
        if pump is not None:
            from phalanx._logs.display import show

            self._shown = show(pump)

    def show_workers(self) -> None:
        """Begin to follow the workers' files."""
        if self._shown is not None:
            self._in_turn(self._shown.open)

    def reveal(self, rank: int) -> None:
        """Show the lines of a rank that has failed, though they were not to be shown."""
        shown = self._shown
        if shown is not None:
            self._in_turn(lambda: shown.reveal(rank))

    def say(self, text: str) -> bool:
        """Show a line among the workers'. Returns whether that is possible."""
        shown = self._shown
        if shown is None or self._is_over or not shown.takes_messages():
            return False
        self._in_turn(lambda: shown.say(text))
        return True

    def say_before(self, text: str) -> bool:
        """Show a line at once, before those that wait for their turn. Returns whether that is possible."""
        shown = self._shown
        if shown is None or self.shown or not shown.takes_messages():
            return False
        shown.say(text)
        return True

    def _in_turn(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the group is shown whose lines come first; in the thread that shows those, or here."""
        if self._after is None:
            action()
        else:
            self._after.then(action)

    def announce(self, text: str) -> None:
        """Show a line of ours, among the workers' if that is possible."""
        write_line = self._write_line
        if not self.say(f"phalanx: {text}") and write_line is not None:
            self._writing.submit(lambda: write_line(text))

    def call_after_lines(self, action: Callable[[], None], patience: float, seconds: float = 0.0) -> None:
        """Call ``action``, which may take any time, on the thread for lines of ours; here, if none can be started.

        It is called when all lines of the workers are shown, but waits no longer than ``patience`` seconds for that.
        Returns when it has returned, ``seconds`` later at most.
        """

        def act() -> None:
            if self._shown is not None:
                self.shown.wait(patience)
            action()

        if not self._writing.submit(act):
            action()
        self._writing.drain(seconds)

    def finish(self) -> None:
        """Return when all lines are shown, when the display does not answer, or when they take too long.

        Waits for the lines that the display cannot take as well, `ANSWER_WAIT` at most.
        """
        shown, self._is_over = self._shown, True
        if shown is not None:
            self._in_turn(lambda: shown.finish(self.shown.open))
            shown.wait(self.shown)
        self._writing.drain(ANSWER_WAIT)

    def close(self) -> None:
        """Show no more."""
        self._is_over = True
        if self._shown is not None:
            self._shown.close()
        elif self._pump is not None:
            self._pump.close()
