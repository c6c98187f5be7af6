"""The ranks of a job: which node runs which, and what they are called where that matters."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence

from phalanx._base.text import name_ranks
from phalanx._rendezvous.records import Job, Member

_MOST = 1 << 20  # ranks: of more, nothing is told
_MOST_HOSTS = 4  # that a name has
_MOST_TEXT = 200  # characters of the numbers in a name


class JobRanks:
    """The ranks of a job.

    Args:
        members: The nodes, by group rank.

    Attributes:
        size: How many ranks there are; 0, if there are more than 1,048,576.

    >>> from phalanx._rendezvous.records import Member
    >>> ranks = JobRanks([Member("x", "a", 2, "trainer"), Member("y", "b", 3, "trainer")])
    >>> ranks.size, ranks.of_node("y"), ranks.of_node("z")
    (5, range(2, 5), range(0, 0))
    >>> ranks.name([3]), ranks.name([2, 3, 4]), ranks.name([0, 3, 4])
    ('rank 3 on host b', 'ranks 2-4 on host b', 'ranks 0, 3-4 on hosts a, b')
    >>> JobRanks([Member("x", "a", 1000, "trainer")]).name(range(0, 1000, 2))[-30:]
    '0, 92, 94, 96, 98, … on host a'
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._hosts = [member.host for member in members]
        self._ends = list(itertools.accumulate(member.nproc for member in members))
        self._places = {member.id: index for index, member in enumerate(members)}
        size = self._ends[-1] if self._ends else 0
        self.size = size if size <= _MOST else 0

    def of_node(self, node: str) -> range:
        """Return the ranks of a node; none, if it takes no part."""
        index = self._places.get(node, -1)
        if index < 0 or not self.size:
            return range(0)
        return range(self._ends[index - 1] if index else 0, self._ends[index])

    def name(self, ranks: Iterable[int]) -> str:
        """Return what ranks are called, with their hosts."""
        known = list(ranks)
        found = dict.fromkeys(self._hosts[bisect.bisect_right(self._ends, rank)] for rank in known)
        hosts = list(found)
        more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
        text = name_ranks(known)
        if len(text) > _MOST_TEXT:
            text = f"{text[:_MOST_TEXT].rpartition(',')[0]}, …"
        return f"{text} on host{'s' * (len(hosts) > 1)} {', '.join(hosts[:_MOST_HOSTS])}{more}"


def first_rank(job: Job, rank: int, role: str | None = None) -> int:
    """Return the rank in the job of a node's first worker; with a ``role``, its rank among the workers of that.

    >>> from phalanx._rendezvous.records import Job, Member
    >>> job = Job(0, "running", 2, 2, (Member("a", "a", 2, "reader"), Member("b", "b", 3, "trainer")))
    >>> first_rank(job, 1), first_rank(job, 1, "trainer"), first_rank(job, 2)
    (2, 0, 5)
    """
    return sum(member.nproc for member in job.members[:rank] if role is None or member.role == role)
