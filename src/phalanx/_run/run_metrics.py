"""What a run's agent counts and measures, as metrics in the words of Prometheus, and whether it is healthy.

Owns the names of the metrics: docs/metrics.md has the table. Nothing here is in the library's own registry: that is
the host's. `health_pages` has the paths at which all of it is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Generic, NamedTuple, TypeVar

from phalanx._base import clock, unpatched
from phalanx._base.clock import format_duration
from phalanx._events import agent_kinds, kinds
from phalanx._events.kinds import Event
from phalanx._run.attempts import STATES, TERMINAL
from phalanx._run.local_server import no_fork
from phalanx._run.status import RunStatus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from prometheus_client import Metric

INSTALL = "pip install prometheus-client"

CAUSES = ("failure", "hang", "membership", "request")
"""Of restarts, see `RestartDecided`."""

_EXITS = ("succeeded", "failed", "stopped")
_ENDING = ("STOPPING", "RESTARTING", *TERMINAL)  # states in which no progress is expected
_FRESH = 1.0  # seconds for which all scrapes share what was collected, and its bytes
_VERDICT = 0.1  # and those for which probes share a verdict
_TYPES = 4  # content types of which the bytes are kept: whoever asks chooses the version that is part of them

_allocate_lock = unpatched.module("_thread").allocate_lock

T = TypeVar("T")
Samples = Iterable[tuple[dict[str, str], float | None]]


def is_installed() -> bool:
    """Whether there is prometheus-client, without which there is no ``/metrics``. It is not loaded."""
    return find_spec("prometheus_client") is not None


class RunMetrics:
    """The metrics of a run's agent, and of its workers on this machine. An observer of the run's `EventStream`.

    Args:
        status: That of the run.

    Attributes:
        status: See the argument.
    """

    def __init__(self, status: RunStatus) -> None:
        self.status = status
        self._restarts = dict.fromkeys(CAUSES, 0)
        self._exits = dict.fromkeys(_EXITS, 0)
        self._hangs: Counter[str] = Counter({"heartbeat": 0, "expires": 0})
        self._lost = 0.0  # seconds, until the last restart was complete
        self._down: float | None = None  # since when not all workers of an attempt run; None: they do, or none has yet
        self._follows = False  # whether another attempt is going to
        self._told = 0.0  # the most that was told of it: the clock is ahead of the events, and a counter never falls
        self._cpu: dict[int, float] = {}  # likewise, by the pid of the worker: a process below it may have left
        self._paused, self._resumed = False, 0.0  # whether the workers are, and since when, or when that ended
        self._facts = _Shared(self._collect, _FRESH)
        self._why = _Shared(self._why_unhealthy, _VERDICT)
        self._encoding = _allocate_lock()
        self._encoded: tuple[object, dict[str, bytes]] = None, {}  # the facts, and what they are by content type

    def observe(self, events: list[Event]) -> None:
        """Count what has happened."""
        for event in events:
            moment = event.moment / clock.NS
            if isinstance(event, agent_kinds.RestartDecided):
                self._restarts[event.reason] += 1
                self._follows = True
            elif isinstance(event, kinds.GroupState | agent_kinds.AttemptEnded):
                self._down = self._down or moment
            elif isinstance(event, kinds.GroupRunning):
                self._lost += moment - self._down if self._down and self._follows else 0.0
                self._down, self._follows, self._paused = None, False, False
            elif isinstance(event, kinds.WorkerExited):
                self._exits[event.state] = self._exits.get(event.state, 0) + 1
            elif isinstance(event, kinds.TimerExpired):
                self._hangs["heartbeat" if event.scope == "heartbeat" else "expires"] += 1
            elif isinstance(event, kinds.GroupPaused):
                self._paused, self._resumed = event.paused, moment

    # --- whether it is healthy

    def why_unhealthy(self) -> str:
        """Return why the agent is not healthy, in one line; "": it is. Does not wait."""
        return self._why.get()

    def _why_unhealthy(self) -> str:
        state = self.status.agent()["state"]
        if state == "FAILED":
            return "the run has failed: no other attempt follows"
        return "" if state in _ENDING else self._why_stuck()

    def _why_stuck(self) -> str:
        """Return why no rank has made progress, by the heartbeats of those that are to send any; "": one has."""
        group = self.status.group()
        is_paused = self._paused or (group is not None and group.is_paused)  # from the order on, until it was followed
        report = None if group is None or not group.is_open or is_paused else group.hang_report
        timeout = None if report is None else report.hang_timeout
        if group is None or report is None or timeout is None:
            return ""
        signs, alive, now = report.signs(), group.alive, clock.now()
        if any(sign.breakpoint is not None for sign in signs.values()):
            return ""
        # Of the others, nobody expects a heartbeat.
        due = {rank: sign for rank, sign in signs.items() if rank in alive and sign.limit is not None}
        limit = max((sign.limit or 0 for sign in due.values()), default=0) / clock.NS
        if not due or now < max(limit, self._resumed + timeout):
            return ""
        local, last = max(due.items(), key=lambda one: one[1].beat or 0)
        rank, age = group.envs[local].get("RANK", str(local)), max(0.0, now - (last.beat or 0) / clock.NS)
        step = "" if last.step is None else f", at step {last.step}"
        return (
            f"no rank has made progress: the last heartbeat is {format_duration(age)} old (rank {rank}{step}), "
            f"and the hang timeout is {format_duration(timeout)}"
        )

    # --- the metrics

    def exposed(self, accept: str) -> tuple[str, bytes]:
        """Return the content type that suits an ``Accept`` header, and the metrics in it.

        Raises ImportError, which says what to install.
        """
        with no_fork:
            try:
                from prometheus_client.exposition import choose_encoder
            except ImportError as error:
                msg = f"metrics need prometheus-client ({error}): {INSTALL}"
                raise ImportError(msg) from None
        try:
            encode, kind = choose_encoder(accept)
        except (TypeError, ValueError):  # of a version that is none
            encode, kind = choose_encoder("")
        facts = self._facts.get(self.status.agent())  # a state that lasts no second is seen, too
        with self._encoding:
            of, known = self._encoded
            if of is not facts or len(known) >= _TYPES:
                known = {}
            if kind not in known:
                known[kind] = encode(_Collector(facts))
            self._encoded = facts, known
            return kind, known[kind]

    def _collect(self) -> dict[str, Any]:
        lost = self._lost + (clock.now() - self._down if self._down and self._follows else 0.0)
        self._told = max(self._told, lost)
        facts = self.status.sample()
        return facts | {
            "ranks": self._with_most_cpu(facts["ranks"]),
            "restarts_by_cause": self._restarts.copy(), "exits": self._exits.copy(), "hangs": dict(self._hangs),
            "lost": self._told, "healthy": not self.why_unhealthy(), "hang_timeout": self._hang_timeout(),
        }  # fmt: skip

    def _with_most_cpu(self, ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        used = {rank["pid"]: rank["cpu"] for rank in ranks if rank["cpu"] is not None}
        self._cpu = {pid: max(cpu, self._cpu.get(pid, 0.0)) for pid, cpu in used.items()}
        return [rank | {"cpu": self._cpu.get(rank["pid"])} for rank in ranks]

    def _hang_timeout(self) -> float | None:
        group = self.status.group()
        report = None if group is None else group.hang_report
        return None if report is None else report.hang_timeout


class _Shared(Generic[T]):
    """A value that is made anew when it is asked for, and is older than so many seconds. One thread makes it."""

    def __init__(self, make: Callable[[], T], seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self._lock = _allocate_lock()
        self._made: tuple[float, object, T] | None = None

    def get(self, of: object = None) -> T:
        """Return it. It is made anew, too, when it is asked for ``of`` something else than before."""
        with self._lock:
            if self._made is None or clock.now() - self._made[0] >= self._seconds or self._made[1] != of:
                self._made = clock.now(), of, self._make()
            return self._made[2]


class _Collector:
    """What the library encodes."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        from prometheus_client import Metric

        for family in FAMILIES:
            metric = Metric(family.name, family.help, family.kind)
            name = family.name + {"counter": "_total", "info": "_info"}.get(family.kind, "")
            for labels, value in family.samples(self._facts):
                if value is not None:
                    metric.add_sample(name, labels, value)
            yield metric


class Family(NamedTuple):
    """Metrics of one name: without the suffix that its kind has."""

    name: str
    kind: str
    help: str
    samples: Callable[[Mapping[str, Any]], Samples]


def _one(of: Callable[[Mapping[str, Any]], float | None]) -> Callable[[Mapping[str, Any]], Samples]:
    return lambda facts: [({}, of(facts))]


def _each(label: str, key: str) -> Callable[[Mapping[str, Any]], Samples]:
    return lambda facts: [({label: name}, count) for name, count in facts[key].items()]


def _ranks(of: Callable[[Mapping[str, Any]], float | None]) -> Callable[[Mapping[str, Any]], Samples]:
    return lambda facts: [
        ({"rank": str(rank["rank"]), "local_rank": str(rank["local_rank"])}, of(rank)) for rank in facts["ranks"]
    ]


def _step_time(name: str) -> Callable[[Mapping[str, Any]], Samples]:
    return _ranks(lambda rank: (rank.get("step_time") or {}).get(name))


def _info(facts: Mapping[str, Any]) -> Samples:
    from phalanx import __version__

    labels = {"run_id": facts["run_id"], "host": facts["host"], "name": facts["name"], "version": __version__}
    return [({name: _readable(value) for name, value in labels.items()}, 1)]


def _readable(text: str) -> str:
    """Return a text that UTF-8 can hold: a name may have come from bytes that are none."""
    return text.encode("utf-8", "backslashreplace").decode()


def _running(facts: Mapping[str, Any]) -> int:
    return sum(rank["state"] == "running" for rank in facts["ranks"])


FAMILIES = (
    Family("phalanx_run", "info", "The run, its machine, what it runs, and the version of Phalanx.", _info),
    Family("phalanx_up", "gauge", "1 while all workers of this machine run.",
           _one(lambda facts: facts["state"] == "RUNNING" and _running(facts) == len(facts["ranks"]))),
    Family("phalanx_healthy", "gauge", "1 while /healthz answers 200.", _one(lambda facts: facts["healthy"])),
    Family("phalanx_state", "stateset", "The state of the agent.",
           lambda facts: [({"phalanx_state": state}, facts["state"] == state) for state in STATES]),
    Family("phalanx_paused", "gauge", "1 while the workers are paused.", _one(lambda facts: facts["paused"])),
    Family("phalanx_attempt", "gauge", "The number of the attempt, from 0 on.", _one(lambda facts: facts["attempt"])),
    Family("phalanx_max_restarts", "gauge", "How many restarts there may be.",
           _one(lambda facts: facts["max_restarts"])),
    Family("phalanx_restarts", "counter", "Restarts, by cause.", _each("cause", "restarts_by_cause")),
    Family("phalanx_restart_seconds", "counter",
           "Seconds from the first failure of an attempt to all workers of the next one running.",
           _one(lambda facts: facts["lost"])),
    Family("phalanx_hangs", "counter", "Expired heartbeats and timers of ranks, by the kind of the timer.",
           _each("timer", "hangs")),
    Family("phalanx_hang_timeout_seconds", "gauge", "The hang timeout.", _one(lambda facts: facts["hang_timeout"])),
    Family("phalanx_worker_exits", "counter", "Exits of workers, by how they ended.", _each("state", "exits")),
    Family("phalanx_ranks", "gauge", "Workers of this machine.", _one(lambda facts: len(facts["ranks"]))),
    Family("phalanx_ranks_alive", "gauge", "Those of them that run.", _one(_running)),
    Family("phalanx_rank_up", "gauge", "1 while the rank runs.", _ranks(lambda rank: rank["state"] == "running")),
    Family("phalanx_rank_start_time_seconds", "gauge", "When the rank was started, in Unix time.",
           _ranks(lambda rank: rank["started"])),
    Family("phalanx_rank_heartbeat_age_seconds", "gauge", "Seconds since the last heartbeat of the rank.",
           _ranks(lambda rank: rank["beat"])),
    Family("phalanx_rank_step", "gauge", "The highest step that the rank has reported.",
           _ranks(lambda rank: rank["step"])),
    Family("phalanx_rank_step_timestamp_seconds", "gauge", "When the rank reported its last step, in Unix time.",
           _ranks(lambda rank: rank.get("step_at"))),
    Family("phalanx_rank_step_min_seconds", "gauge", "Seconds of the shortest of the latest steps.", _step_time("min")),
    Family("phalanx_rank_step_median_seconds", "gauge", "Median of the seconds of the latest steps.",
           _step_time("median")),
    Family("phalanx_rank_step_max_seconds", "gauge", "Seconds of the longest of the latest steps.", _step_time("max")),
    Family("phalanx_rank_step_mean_seconds", "gauge", "Mean of the seconds of the latest steps.", _step_time("mean")),
    Family("phalanx_rank_slow_ratio", "gauge", "Step time of a slow rank over the median of all ranks.",
           _each("rank", "slow")),
    Family("phalanx_rank_cpu_seconds", "counter", "CPU seconds of the rank and of the processes below it.",
           _ranks(lambda rank: rank["cpu"])),
    Family("phalanx_rank_memory_bytes", "gauge", "Memory of the rank and of the processes below it (PSS, or RSS).",
           _ranks(lambda rank: rank["memory"])),
    Family("phalanx_rank_threads", "gauge", "Threads of the rank and of the processes below it.",
           _ranks(lambda rank: rank["threads"])),
    Family("phalanx_rank_open_fds", "gauge", "Open descriptors of the rank and of the processes below it.",
           _ranks(lambda rank: rank.get("fds"))),
    Family("phalanx_rank_gpu_utilization_ratio", "gauge",
           "Time of GPUs that the rank and the processes below it use; of several GPUs, the sum.",
           _ranks(lambda rank: None if rank.get("gpu") is None else rank["gpu"] / 100)),
    Family("phalanx_rank_gpu_memory_bytes", "gauge", "GPU memory of the rank and of the processes below it.",
           _ranks(lambda rank: rank.get("gpu_memory"))),
)  # fmt: skip
"""All of them, in the order in which they are exposed."""
