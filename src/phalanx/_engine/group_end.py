"""The end of a group in the launcher: its steps, of which each is tried, and what they need, which is loaded before."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def guarded(step: Callable[[], object]) -> None:
    """Do one of several steps: a failed one must not keep the others from being tried."""
    try:
        step()
    except Exception as error:  # noqa: BLE001 - see above
        from phalanx._base.stderr import mention

        mention(f"phalanx: at the end of a group: {error!r}")


def load_for_end() -> None:
    """Import what the end needs: a disk may not answer then."""
    from phalanx._base import stderr  # noqa: F401 - see above
    from phalanx._engine import leftovers  # noqa: F401 - see above
