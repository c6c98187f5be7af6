"""The rendezvous of a job on many machines: `_run.node_thread`, with the names of torch."""

from __future__ import annotations

import threading
from typing import Any

from phalanx._base.host_names import is_no_machine
from phalanx._base.text import seconds
from phalanx._group.restart_policy import RestartPolicy
from phalanx._rendezvous import rdzv_conf, settings
from phalanx._rendezvous.endpoint import BACKENDS, split_endpoint
from phalanx._rendezvous.settings import DEFAULT_PORTS, ETCD_PORT, STATIC, Machines
from phalanx._store.etcd import INSTALL
from phalanx.errors import ChildFailedError
from phalanx.rendezvous._handler import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._outcomes.result import RunProcsResult
    from phalanx._run.node_thread import NodeThread, Part
    from phalanx._run.node_workers import NodeWorkers
    from phalanx._timers.hang_reporter import HangReporter

_ENDLESS = RestartPolicy(2**31 - 1)
"""What the job holds to where each agent counts its own restarts: another generation follows each failure."""


class ManyMachinesRendezvous(RendezvousHandler):
    """Brings the agents of several machines together, as ``phalanx run`` does: see the guide to many machines.

    It enters the job with the first `next_rendezvous`, and is a node of it until `shutdown`, carried by a thread of its
    own. The thread sets no signal handler, and hears at once when the generation that runs is ended: by a failure
    elsewhere, by a machine that is lost, by one that comes or goes. In a fork of the process it takes no part.

    All methods may be called by any thread, `next_rendezvous` by one at a time.

    Args:
        params: Where and how: the backends are "static" (``config`` has the ``rank`` of this machine), "c10d", "etcd",
            "etcd-v2" and "etcd-v3". ``config`` may have the settings of ``--rdzv-conf``, and ``rejoin_delay``,
            ``exclude_after``, ``exit_barrier_timeout``, ``keep`` and ``insecure``, as the options of that name. The
            job's secret is ``PHALANX_JOB_SECRET`` of the environment.
        nproc: How many workers this machine runs, 1 to 1,048,576: what the others are told.
        role: What they are called, in 2,000 characters at most.
        policy: When a failure is followed by another generation, for all machines together; those of a job are given
            the same one. None: always, for as long as the agents want it.
        grace: Seconds (>= 0) in which workers end; a machine that takes a minute longer is not waited for.
        insecure: Let the agent of this machine have the store without a secret, for all who reach its port.
        warn: Called with a line on who is missing, or on a store that does not answer; and if this machine has it, on
            where it listens, and on who is turned away. By any thread; it must not wait. None: the logger
            ``phalanx.rendezvous`` warns.

    Raises:
        ValueError: What is wrong with which parameter.

    >>> from phalanx.rendezvous import RendezvousParameters
    >>> params = RendezvousParameters("static", "127.0.0.1:29500", "job", 2, 2, rank=0)
    >>> handler = ManyMachinesRendezvous(params)
    >>> handler.get_backend(), handler.num_nodes_waiting(), handler.shutdown()
    ('static', 0, True)
    """

    def __init__(
        self,
        params: RendezvousParameters,
        *,
        nproc: int = 1,
        role: str = "default",
        policy: RestartPolicy | None = None,
        grace: float = 30.0,
        insecure: bool = False,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        from phalanx._run.node_thread import NodeThread  # which loads what agents of one machine do without

        machines = machines_of(params, insecure=insecure)
        _check(nproc, role)
        self._params = params
        self._run_id = params.run_id or "none"
        self._policy = policy
        self._one = threading.Lock()  # held by the thread that waits in `next_rendezvous`
        self._node = NodeThread(
            self._run_id, warn or _log, machines, nproc, role, policy or _ENDLESS,
            seconds("grace", grace, endless=False),
        )  # fmt: skip

    # --- the names of torch

    def get_backend(self) -> str:
        """Return the name of the backend, as it was given."""
        return self._params.backend

    def get_run_id(self) -> str:
        """Return the id that was given; of several machines, "none" is one as well."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Enter the job, and wait for a generation that this machine takes part in; return who it is.

        Called again, it says that the workers here are gone, and waits for the next generation. If nobody has ended the
        one before, that is a failure of theirs: all machines restart. `tell_failure` says it earlier, and more of it.

        Returns:
            ``store`` is None: what the agents share is theirs. The port is free on the machine of rank 0.

        Raises:
            RendezvousClosedError: The job is over; or this handler was closed or shut down.
            RendezvousConnectionError: The store was not there in time, or will not have this machine; or the job will
                not. The message says why.
            RendezvousGracefulExitError: The job is over, and has not needed this machine.
            RendezvousStateError: What the store holds cannot be read; or this process is a fork of that which has
                entered.
            RendezvousTimeoutError: Too few machines came within ``join_timeout``.
            RuntimeError: Another thread is waiting in it; or no thread can be started.
        """
        node = self._node
        if node.is_elsewhere:
            msg = "this process is a fork of the one that takes part in the job: it makes a handler of its own"
            raise RendezvousStateError(msg)
        if not self._one.acquire(blocking=False):
            raise RuntimeError("another thread waits for the next rendezvous")
        try:
            if node.is_closing and not node.has_entered:
                raise RendezvousClosedError(self._closed())
            part = node.next_part()
        finally:
            self._one.release()
        if part is None:
            raise self._failure(node)
        job = part.job
        return RendezvousInfo(None, part.rank, len(job.members), RendezvousStoreInfo(*node.master(job)))

    def is_closed(self) -> bool:
        """Return whether no other generation comes: the job is over, or is to end, or was left."""
        return self._node.is_elsewhere or self._node.is_closing

    def set_closed(self) -> None:
        """End the job, on all machines: it is entered for that, if it has not been. Returns at once."""
        node = self._node
        if not node.is_elsewhere and not node.has_ended:
            node.ask_end("the rendezvous was closed")

    def num_nodes_waiting(self) -> int:
        """Return 1 once the generation that runs here has been ended, by whomever; or 0. It does not ask the store.

        The workers are to be ended, and `next_rendezvous` to be called. Machines that have come end the generation
        ``rejoin_delay`` seconds later (30, unless ``config`` says otherwise), if there is room for them.
        """
        part = self._part()
        return int(part is not None and bool(part.ended))

    def shutdown(self) -> bool:
        """Leave the job, which goes on without this machine if it can, and give everything back.

        No worker is left here. If they have succeeded, say so first: `tell_success`. Else the generation ends that has
        run here, for all.

        Returns:
            Whether it went well: False: an error has ended this handler's part before. Takes less than a second, as a
            rule; and a minute at most, where the store does not answer.
        """
        return self._node.is_elsewhere or self._node.leave("its agent has shut down")

    # --- ours

    @property
    def generation(self) -> int:
        """The number of the generation that this machine takes part in, from 0 on; -1: none yet."""
        part = self._part()
        return -1 if part is None else part.job.generation

    @property
    def members(self) -> tuple[tuple[str, int, str], ...]:
        """Who takes part in it, by rank: the machine's name, how many workers it runs, and what they are called."""
        part = self._part()
        return () if part is None else tuple((each.host, each.nproc, each.role) for each in part.job.members)

    @property
    def why_ended(self) -> str:
        """Why the generation that runs here has been ended, in one line; "": nobody has said."""
        part = self._part()
        return "" if part is None else part.why

    @property
    def why_restarted(self) -> tuple[str, float, bool, str]:
        """Why this generation follows another one, in one line; after how many seconds; whether that is counted.

        And the ``reason``, see `RestartDecided`.
        """
        part = self._part()
        if part is None or not part.job.ends:
            return "", 0.0, False, "membership"
        from phalanx._rendezvous.conclusion import reason_of, told

        last = part.job.ends[-1]
        return told(last), part.job.delay, last.failed, reason_of(last)

    def ending(self) -> tuple[str, int, str] | None:
        """Return how this machine's part in the job has ended, as ``phalanx run`` records it; None: it has not.

        That is "succeeded", "failed" or "stopped", the exit code, and the cause in one line.
        """
        finish = None if self._node.is_elsewhere else self._node.finish
        if finish is None:
            return None
        from phalanx._rendezvous.conclusion import conclude

        end = conclude(finish)
        return end.state if end.state in ("succeeded", "stopped") else "failed", end.code, end.cause

    @property
    def failed_here(self) -> bool:
        """Whether `tell_failure` has told of a worker of the generation that runs here, or ran last."""
        part = self._part()
        return part is not None and part.failure is not None

    def tell_failure(
        self, error: str, *, rank: int | None = None, exitcode: int | None = None, is_hang: bool = False
    ) -> None:
        """Say that a worker here has failed: the other machines hear of it at once, and end theirs.

        Call `next_rendezvous` when no worker is left here. Nothing happens where none can run. It may be told again:
        of the generation that has ended, what was told last is kept.

        Args:
            error: What has happened; of several lines, the first.
            rank: The worker's global rank, 0 and up; None: it is about none.
            exitcode: Its exit code, negative for a signal; None: not known.
            is_hang: Whether a timer has found it: the other machines write where their workers are, before these end.

        Raises:
            ValueError: The rank or the exit code has more than 31 bits.
        """
        most = settings.MOST_CODE - 1
        settings.check_number(rank or 0, 0, most, "rank")
        settings.check_number(exitcode or 0, -most, most, "exitcode")
        if not self._node.is_elsewhere:
            self._node.tell_failure(error, rank, exitcode, is_hang=is_hang)

    def tell_outcomes(self, result: RunProcsResult, *, log_dir: str = "", hangs: HangReporter | None = None) -> None:
        """Say what became of the workers here, none of which is left: the `report` of all machines has it.

        To be called before `next_rendezvous`, or `tell_success`. What is told last counts.

        Args:
            result: How they ended, by local rank.
            log_dir: Where their logs are on this machine; "": nowhere.
            hangs: What `phalanx.multiprocessing.PContext.hang_report` is of their group.
        """
        if not self._node.is_elsewhere:
            from phalanx._rendezvous.evidence import Left

            self._node.tell_left(Left(result, log_dir, hangs))

    def report(self, name: str) -> ChildFailedError | None:
        """Make the report on the job: the same on all machines, whichever it was whose workers have failed.

        Args:
            name: What was run.

        Returns:
            None: the job has not failed, or its end is not known here; or no machine has told of a failure, see
            `tell_outcomes`.
        """
        finish = None if self._node.is_elsewhere else self._node.finish
        job = None if finish is None or finish.state != "failed" else finish.job
        if finish is None or job is None:
            return None
        from phalanx._rendezvous.conclusion import earlier_attempts
        from phalanx._rendezvous.evidence import JobEvidence

        left = JobEvidence(finish.evidence, None if job.verdict is None else job.verdict.stop, job.members)
        if not left.failures:
            return None
        return ChildFailedError(
            name, left.failures, outcomes=left.outcomes, log_dir=left.log_dir, lost=left.lost,
            earlier=earlier_attempts(job, has_failed=True), gave_up=finish.why,
        )  # fmt: skip

    def tell_success(self, *, wait: bool = True) -> bool | None:
        """Say that all workers here have succeeded and are gone, and wait for those of the other machines.

        Args:
            wait: False: return at once; call it again when `when_ended` tells something.

        Returns:
            True: the job has succeeded; or the others have been waited for long enough, ``exit_barrier_timeout``.
            False: it has not: call `next_rendezvous`, which waits for the next generation or says what else has become
            of the job. None: it is not known yet.
        """
        return not self._node.is_elsewhere and self._node.tell_success(wait=wait)

    def announce(
        self,
        *,
        nproc: int | None = None,
        role: str | None = None,
        policy: RestartPolicy | None = None,
        grace: float | None = None,
        barrier: float | None = None,
        owner: NodeWorkers | None = None,
    ) -> None:
        """Say what the constructor was not told, as an agent does that was given a handler. None: it stays as it is.

        Args:
            nproc: See the constructor, as of the next three.
            role: Likewise.
            policy: Likewise.
            grace: Likewise.
            barrier: Seconds (>= 0) that this machine waits at its end for the others.
            owner: What the job asks of whoever has the workers. Its ``expect(seconds)`` is called now and then while
                some may run here: they are to end, unless it is called again within that time, for this process is
                stopped then, and the job goes on without it. Its ``answer(...)`` says where they are, for
                ``phalanx stack`` on any machine. By any thread; none of it may wait, or raise.

        Raises:
            RuntimeError: The job has been entered.
            ValueError: What the others would not read, see the constructor.
        """
        _check(1 if nproc is None else nproc, role or "")
        node = self._node
        if node.has_entered:
            raise RuntimeError("what a machine has is told before it enters the job: before the first next_rendezvous")
        node.nproc = node.nproc if nproc is None else nproc
        node.role = node.role if role is None else role
        self._policy = self._policy if policy is None else policy
        node.policy = self._policy or _ENDLESS
        node.grace = node.grace if grace is None else grace
        if barrier is not None:
            node.machines = node.machines._replace(barrier=barrier)
        node.owner = owner or node.owner

    def when_ended(self, call: Callable[[], object]) -> None:
        """Have ``call`` called as soon as the generation that runs here is ended; at once, if it has been.

        By any thread; it must not wait. It is called once for each generation that ends, and once more when this
        machine's part in the job has ended.
        """
        if not self._node.is_elsewhere:
            self._node.when_ended(call)

    def _part(self) -> Part | None:
        return None if self._node.is_elsewhere else self._node.part

    def _closed(self) -> str:
        return f"the rendezvous of run {self._run_id!r} is closed"

    def _failure(self, node: NodeThread) -> RendezvousError:
        """Return what is raised where there is no other generation."""
        where, finish, error = node.machines.where, node.finish, node.error
        if error is not None:
            extra = f"; {INSTALL}" if isinstance(error, ImportError) else ""
            is_away = isinstance(error, ImportError | OSError)
            made = (RendezvousConnectionError if is_away else RendezvousStateError)(
                f"{self._params.backend}: {error}{extra}"
            )
            made.__cause__ = error
            return made
        if finish is None:
            return RendezvousClosedError(self._closed())
        state, why, verdict = finish.state, finish.why, None if finish.job is None else finish.job.verdict
        if state == "unreachable" or (state == "unknown" and node.away):
            return RendezvousConnectionError(f"{where} has not answered in time: {node.away}")
        if state == "failed" and (self._policy is None or verdict is None or verdict.stop is None):
            return RendezvousTimeoutError(f"too few machines have come: {why}")
        if state in ("succeeded", "stopped") and node.is_spare:
            return RendezvousGracefulExitError(f"the job has {state} without this machine")
        known: dict[str, tuple[type[RendezvousError], str]] = {
            "unknown": (
                RendezvousClosedError,
                f"how the job ends is not known here: {why or 'it has ended without this machine'}",
            ),
            "refused": (RendezvousConnectionError, f"this machine is not taken: {why}"),
            "damaged": (RendezvousStateError, f"what {where} holds of the job cannot be read: {why}"),
            "left": (RendezvousClosedError, f"{self._closed()}: this machine has left the job: {why}"),
            "timeout": (RendezvousTimeoutError, f"nobody has decided in time who takes part ({where})"),
        }
        over = f"the job is over: {', '.join(filter(None, (state, why, node.why(verdict))))}"
        kind, text = known.get(state, (RendezvousClosedError, over))
        return kind(text)


def _check(nproc: int, role: str) -> None:
    """Refuse what the other machines would not read. Raises ValueError."""
    settings.check_number(nproc, 1, settings.MOST_WORKERS, "nproc")
    settings.check_text(role, settings.MOST_LINE, "role")


def _log(line: str) -> None:
    from logging import getLogger

    getLogger("phalanx.rendezvous").warning("%s", line)


_WORDS = "the backend", "secret_file of the config", "insecure=True"


def machines_of(params: RendezvousParameters, *, insecure: bool = False) -> Machines:
    """Return how this machine meets the others. Raises ValueError, which names the parameter."""
    if params.backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {params.backend!r}")
    settings.check_text(params.run_id, settings.MOST_RUN_ID, "run_id")  # beyond these, the others would not read it
    settings.check_text(params.local_addr or "", settings.MOST_ADDRESS, "local_addr")
    settings.check_number(params.max_nodes, 1, settings.MOST_NODES, "max_nodes")
    conf = {name: str(value) for name, value in params.config.items() if value is not None}
    params.get_as_bool("is_host")  # that it is yes or no
    if params.backend == STATIC and params.min_nodes == params.max_nodes and "rank" not in conf:
        msg = f"rank: expected the rank of this machine, 0 to {params.max_nodes - 1}, in the config; it is not there"
        raise ValueError(msg)
    more: dict[str, Any] = {"exclude_after": params.get_as_int("exclude_after", 0) or 0}
    if more["exclude_after"] < 0:
        raise ValueError(f"exclude_after: expected a whole number, 0 or more, got {more['exclude_after']}")
    for name, named in (("rejoin_delay", "rejoin_delay"), ("exit_barrier_timeout", "barrier")):
        if name in conf:
            more[named] = rdzv_conf.seconds(name, conf[name])
    rank = params.get_as_int("rank") if params.backend == STATIC else None
    endpoints = tuple(_endpoint(part, params.backend) for part in params.endpoint.split(",") if part.strip())
    given = rdzv_conf.Given(
        params.backend, (params.min_nodes, params.max_nodes), endpoints, params.run_id, conf, rank,
        params.local_addr or "", insecure=insecure or bool(params.get_as_bool("insecure")),
        keep=bool(params.get_as_bool("keep")), words=_WORDS, more=more,
    )  # fmt: skip
    return rdzv_conf.machines_of(given)


def _endpoint(text: str, backend: str) -> tuple[str, int]:
    try:
        host, port = split_endpoint(text)
    except ValueError as error:
        raise ValueError(f"endpoint: {error}") from None
    if not host or set(host) & set(" \t/@") or is_no_machine(host):
        like = f"host:{DEFAULT_PORTS.get(backend, ETCD_PORT)}"
        msg = f"endpoint: expected the name or the address of a machine and a port, like {like}, got {text!r}"
        raise ValueError(msg)
    return host, port
