"""What a node has to say of why a generation is to end, and whether that is to be written. Pure."""

from __future__ import annotations

from phalanx._rendezvous import records
from phalanx._rendezvous.records import Stop, replace
from phalanx._rendezvous.store_view import StoreView
from phalanx._store.store import JOB, Absent, Put, Transaction, Unchanged


class Stops:
    """Why generations are to end, in a node's words."""

    def __init__(self) -> None:
        self._word: Stop | None = None

    def say(self, stop: Stop) -> None:
        """Have it said why a generation is to end: what is said first of it holds."""
        self._word = self._word or stop

    @property
    def own(self) -> Stop | None:
        """What this node says of the end of the generation whose workers it has, or had; None: nothing."""
        return self._word

    def forget(self) -> None:
        """Another generation begins here."""
        self._word = None

    def due(self, view: StoreView, asked: Stop | None) -> Transaction | None:
        """Return what is to be written: once, and nothing where another has said so first. Raises DamagedError.

        ``asked``: the end of the job that somebody here wants. It is said of the next generation where this one ends
        for another reason, and nobody begins that then.
        """
        job, modified = view.job()
        if job is None or job.phase == "over":
            return None
        stop, first = self._word, view.stop(job.generation)
        if stop is None or stop.generation != job.generation or first is not None:
            self._word = stop if stop is not None and stop.generation > job.generation else None
            is_next = first is not None and first.kind != "signal"
            stop = asked and replace(asked, generation=job.generation + is_next)
        if stop is None or view.stop(stop.generation) is not None:
            return None
        key = f"{records.STOP}{stop.generation}"
        put = Put(key, records.write(stop), JOB)
        return Transaction((Absent(key), Unchanged(records.STATE, modified)), (put,))
