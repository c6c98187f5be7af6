"""What an etcd has told, by which it is known again when it answers after a while."""

from __future__ import annotations

from phalanx._store.etcd.session import BrokenError, Session


class History:
    """What an etcd has told of its revisions.

    Attributes:
        newest: The newest revision that it has told.
    """

    def __init__(self) -> None:
        self.newest = 0
        self._written: tuple[bytes, int] | None = None  # the latest of which a key is known that it has written

    def see(self, revision: int, key: bytes = b"") -> None:
        """Note a revision. ``key``: what it has written; empty: that is not known."""
        self.newest = max(self.newest, revision)
        if key and (self._written is None or revision > self._written[1]):
            self._written = key, revision

    async def check(self, session: Session, revision: int = 0) -> None:
        """See that an etcd, at a revision, holds what it has told. Raises BrokenError: it has lost its data.

        The revision alone does not tell that: in an etcd that began anew, others may have written as often meanwhile.
        What it has compacted since then it cannot tell, and watches then tell all there is.
        """
        if 0 < revision < self.newest:  # a watch would tell nothing until it has as many again
            raise BrokenError(f"it has lost what it held: it was at revision {self.newest}, and is before that")
        if self._written is not None and not await session.has_written(*self._written):
            key, at = self._written
            raise BrokenError(
                f"it has lost what it held: it has not written {key.decode(errors='replace')} at revision {at}"
            )
