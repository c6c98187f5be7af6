"""How a node comes to the store of its job: it has the store itself, where it is to, or finds it; and by which address.

The store of a job ends with the agent that has it, whose machine is that of the endpoint.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

from phalanx._base import clock
from phalanx._base.host_names import address_text, await_name, is_loopback, look_up
from phalanx._base.threads import Latch
from phalanx._rendezvous import records
from phalanx._rendezvous.endpoint import where_is
from phalanx._rendezvous.records import Job
from phalanx._rendezvous.settings import STATIC, Machines, prefix_of
from phalanx._rendezvous.store_view import StoreView
from phalanx._store.hub.addresses import HubSettings, Place, find_place, is_taken, listen
from phalanx._store.hub.hub_store import HubStore
from phalanx._store.hub.server import HubServer
from phalanx._store.store import Away, Back, Refused, Snapshot, Store, StoreEvent

PROBE = 5.0
"""Seconds that a probe may take."""

AGAIN = 1.0
"""Seconds after which a port is tried again that was in use."""

_EARLIER = " by an earlier run of this id, which ends"

OWN_FILES = 64
"""Files that an agent which has the store has open beside its connections: 47 with 8 workers."""


class Entrance(NamedTuple):
    """What a node has come to.

    Attributes:
        machines: What it was told of its job.
        store: The store, which is not open yet.
        address: By which the other machines reach this one; "": by that by which they reach the store, or by
            `Machines.master`.
        end: Ends the store, if this node has it, within so many seconds; None: it has not.
    """

    machines: Machines
    store: Store
    address: str
    end: Callable[[float], None] | None = None

    @property
    def hosts(self) -> bool | None:
        """Whether this node has the store; None: it is no node's."""
        return self.end is not None if self.machines.is_hosted else None

    def master(self, job: Job) -> tuple[str, int]:
        """Return where rank 0 of the workers listens, as it is reached from here."""
        return self.machines.master or (job.address or self.store.peer, job.port)


def come(machines: Machines, run_id: str, warn: Callable[[str], None], over: Latch | None = None) -> Entrance:
    """Have the store, if this node is to; and return how it is reached.

    A name that is not known yet (a pod's is published some time after its start) is waited for, `join_timeout` long,
    where this node cannot do without it, and the user is warned.

    Args:
        machines: How the node meets the others.
        run_id: The id of the job.
        warn: Called with a line for the user, by any thread; it must not wait.
        over: Opened when nothing is to be waited for any more.

    Raises:
        OSError: This machine cannot listen there; or this process may not have files open for so many nodes; or the
            endpoint's name was not known in time, or there is no way to it.
        ImportError: The extra is not installed.
    """
    if not machines.is_hosted:
        return Entrance(machines, _store(machines, run_id, warn), own_address(machines))
    host, port = machines.host_and_port()
    is_awaited = machines.hosts is None or (not machines.hosts and not machines.address and machines.master is None)
    if is_awaited:
        say = partial(warn, f"{host}, where the store is to be, is no name that is known here; it is waited for")
        try:
            await_name(host, machines.join_timeout, over or Latch(), say)
        except (OSError, UnicodeError) as error:
            raise _unknown(host, error) from None
    if not _is_to_have_it(machines, host):
        return Entrance(machines, _store(machines, run_id, warn), own_address(machines))
    place = _place(machines, host, port)
    end = _serve_or_find(machines, place, run_id, warn, over)
    address = machines.address or ("" if machines.master is not None else place.told)
    if end is not None:
        _say_where(machines, place, host, address, warn)
    return Entrance(machines, _hub(machines, run_id, warn, place), address, end)


def probe(machines: Machines, run_id: str) -> str:
    """Try the endpoint, and return what is there, in words: nothing is entered, and nothing stays.

    Raises ImportError: the extra is not installed.
    """
    if machines.is_hosted:
        host, port = machines.host_and_port()
        if _is_to_have_it(machines, host):
            place = _place(machines, host, port)
            try:
                for listener in listen(place):
                    listener.close()
            except OSError as error:
                if machines.backend == STATIC or not is_taken(error):
                    return f"the store cannot listen here: {error.strerror or error}"
            else:
                return f"the store would be here: it can listen at {_where(place)}"
    try:
        event, _ = _first_word(_store(machines, run_id))
    except (OSError, ValueError) as error:
        return f"{machines.where} cannot be asked: {error}"
    if isinstance(event, Away):
        return f"{machines.where} does not answer: {event.why}"
    return f"this node is not taken: {event.why}" if isinstance(event, Refused) else f"{machines.where} answers"


def _first_word(store: Store) -> tuple[StoreEvent, bool]:
    """Return what a store says first, and whether the run that it is of ends; and leave it.

    Raises OSError or ValueError: it cannot be asked.
    """
    found: SimpleQueue[StoreEvent] = SimpleQueue()
    store.open(found.put)
    store.watch(records.JOB)
    try:
        word = found.get(timeout=PROBE)
        if not isinstance(word, Back):
            return word, False
        event = found.get(timeout=PROBE)
    except Empty:
        return Away(f"no answer within {PROBE:g} s"), False
    finally:
        store.close(1.0)
    if not isinstance(event, Snapshot):
        return event, False
    view = StoreView()
    view.take(event)
    try:
        return word, view.is_ending()
    except records.DamagedError:  # this node is going to be told
        return word, False


def own_address(machines: Machines) -> str:
    """Return where this machine is reached: what was given, or its address on the way to the first endpoint.

    "": where rank 0 listens is given, so nobody asks; the host of that may not be known yet.

    Raises OSError, which names the endpoint: its host is not known, or there is no way to it.
    """
    if machines.address or machines.master is not None:
        return machines.address
    host, port = machines.host_and_port()
    try:
        family, kind, _, _, address = look_up(host, port, datagram=True)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise _unknown(host, error) from None


def _unknown(host: str, error: Exception) -> OSError:
    return OSError(f"{host!r}: {getattr(error, 'strerror', None) or error}")


def _store(machines: Machines, run_id: str, warn: Callable[[str], None] | None = None) -> Store:
    """Return the store, as it is reached by its endpoint."""
    if machines.is_hosted:
        return _hub(machines, run_id, warn)
    from phalanx._store.etcd.etcd_store import EtcdStore
    from phalanx._store.etcd.settings import EtcdSettings

    return EtcdStore(
        EtcdSettings(
            machines.endpoints, prefix_of(run_id), ttl=machines.lease_ttl, ca=machines.ca, cert=machines.cert,
            key=machines.key, user=machines.user, password=machines.password,
        )
    )  # fmt: skip


def _is_to_have_it(machines: Machines, host: str) -> bool:
    """Whether this machine is to have the store, by what it was told; else by whether the endpoint is its own."""
    return where_is(host) == "here" if machines.hosts is None else machines.hosts


def _hub(
    machines: Machines, run_id: str, warn: Callable[[str], None] | None = None, place: Place | None = None
) -> HubStore:
    """Return the store in an agent, as it is reached by its endpoint; from its own machine, by its place.

    It warns that nothing is encrypted, where others may read it.
    """
    host, port = machines.host_and_port()
    settings = HubSettings(host, port, run_id, machines.secret, ttl=machines.lease_ttl, encrypt=machines.encrypt)
    if place is not None:
        settings = settings._replace(host=place.own, port=place.port, endpoint=settings.where)
    is_exposed = machines.secret and machines.encrypt != "no" and not is_loopback(host)
    return HubStore(settings, warn if is_exposed else None)


def _place(machines: Machines, host: str, port: int) -> Place:
    """Return where the store listens on this machine."""
    if machines.bind is None:
        return find_place(host, port)
    address, at = machines.bind
    return Place(at or port, (address,) if address else ())


def _serve_or_find(
    machines: Machines, place: Place, run_id: str, warn: Callable[[str], None], over: Latch | None
) -> Callable[[float], None] | None:
    """Have the store here. Returns what ends it, within seconds; None: another agent of this machine has it.

    What else is at that port is waited for: it may be the agent of the run before, which ends. Raises OSError.
    """
    _check_open_files(machines.max_nodes)
    until, over, said = clock.now() + machines.join_timeout, over or Latch(), set[str]()
    where = address_text(place.own, place.port)
    while True:
        server = HubServer(
            place, run_id=run_id, secret=machines.secret, ttl=machines.lease_ttl, warn=warn, encrypt=machines.encrypt
        )
        try:
            server.start()
        except OSError as error:
            if not is_taken(error):
                raise
            word, ends = _first_word(_hub(machines, run_id, place=place))
            if machines.backend == STATIC and not (ends or said):  # its port is for nobody else
                raise
        else:
            return server.close
        if not ends and not isinstance(word, Away):  # it answers; or it will not have this agent, as it is going to say
            return None
        whose, why = (", and not by an agent of this job", word.why) if isinstance(word, Away) else (_EARLIER, "")
        if clock.now() + AGAIN >= until:
            raise OSError(f"{where} is in use on this machine{whose}{why and f': {why}'}")
        line = f"{where} is in use on this machine{whose}{why and f' ({why})'}; it is tried again"
        if line not in said:
            said.add(line)
            warn(line)
        if over.wait(AGAIN):  # no event tells that a port is free
            return None


def _say_where(machines: Machines, place: Place, host: str, address: str, warn: Callable[[str], None]) -> None:
    """Say where the store listens, unless the endpoint says so; and by which address this machine is reached."""
    if is_loopback(host) and machines.bind is None:
        warn(f"the store listens at {address_text(host, place.port)}, which agents of this machine alone reach")
        return
    if machines.bind is None and place.told and not place.why:
        return
    why = f"{place.why}: " if place.why else ""
    told = ""
    if machines.master is None:
        told = f"; others reach this machine by {address or 'the address by which they reach the store'}"
        told += "" if machines.address else " (--local-addr ADDRESS chooses another)"
    warn(f"{why}the store listens at {_where(place)}{told}")


def _where(place: Place) -> str:
    """Return where a store listens, in words."""
    where = " and ".join(address_text(each, place.port) for each in place.addresses)
    return where or f"all addresses of this machine, port {place.port}"


def _check_open_files(nodes: int) -> None:
    """Raises OSError: each node has a connection to the store, and this process may not have so many files open."""
    most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], nodes + OWN_FILES
    if most != resource.RLIM_INFINITY and most < needed:
        raise OSError(
            f"the agent that has the store has a connection to each of {nodes} nodes, and needs {needed} open files:"
            f" it may have {most} (ulimit -n)"
        )
