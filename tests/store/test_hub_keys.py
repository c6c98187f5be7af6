"""What the store in rank 0's agent decides: its keys, leases, watches, frames and handshake, without a connection."""

from __future__ import annotations

import pytest

from phalanx._store.hub import messages, wire
from phalanx._store.hub.addresses import HubSettings
from phalanx._store.hub.keys import JOB_LEASE, Change, Keys, Leases, Watches
from phalanx._store.hub.wire import AgentSide, RefusedError, StoreSide, TurnedAwayError
from phalanx._store.store import JOB, OWN, Absent, Created, Delete, Entry, Lease, Put, Transaction, Unchanged

A, B = b"a" * 16, b"b" * 16


def put(key: str, value: bytes = b"", lease: Lease = JOB) -> Put:
    return Put(key, value, lease)


def make(keys: Keys, *writes: Put | Delete, given: tuple[Absent | Unchanged | Created, ...] = ()) -> bool:
    return keys.make(A, Transaction(given, writes))[0]


def test_a_key_has_a_history() -> None:
    keys = Keys(100)
    assert keys.make(A, Transaction((), (put("k", b"1"), put("l")))) == (
        True,
        Change(101, (Entry("k", b"1", 101, 101), Entry("l", b"", 101, 101)), ()),
    )
    assert keys.make(A, Transaction((), (put("k", b"2"),))) == (True, Change(102, (Entry("k", b"2", 101, 102),), ()))
    assert keys.make(A, Transaction((), (Delete("k"),))) == (True, Change(103, (), ("k",)))
    assert keys.make(A, Transaction((), (put("k", b"3"),))) == (True, Change(104, (Entry("k", b"3", 104, 104),), ()))
    assert keys.below("") == (Entry("k", b"3", 104, 104), Entry("l", b"", 101, 101))
    assert keys.revision == 104


def test_what_changes_nothing_makes_no_revision() -> None:
    keys = Keys(7)
    assert keys.make(A, Transaction((), ())) == (True, None)
    assert keys.make(A, Transaction((), (Delete("k"),))) == (True, None)
    assert keys.make(A, Transaction((), (put("k"), Delete("k")))) == (True, None)
    assert keys.make(A, Transaction((Created("k", 7),), (put("k"),))) == (False, None)
    assert (keys.end_lease(A), keys.revision, keys.below("")) == (None, 7, ())


def test_a_key_that_is_written_twice_at_once_is_told_once() -> None:
    keys = Keys()
    assert keys.make(A, Transaction((), (put("k", b"1"), put("k", b"2")))) == (
        True, Change(1, (Entry("k", b"2", 1, 1),), ()),
    )  # fmt: skip
    assert keys.make(A, Transaction((), (Delete("k"), put("k", b"3")))) == (
        True, Change(2, (Entry("k", b"3", 2, 2),), ()),
    )  # fmt: skip
    assert keys.make(A, Transaction((), (put("k", b"4"), Delete("k")))) == (True, Change(3, (), ("k",)))


@pytest.mark.parametrize(
    "condition, holds",
    [
        (Absent("k"), False),
        (Absent("l"), True),
        (Unchanged("k", 2), True),
        (Unchanged("k", 1), False),
        (Unchanged("l", 0), True),
        (Unchanged("l", 2), False),
        (Created("k", 1), True),
        (Created("k", 2), False),
        (Created("l", 0), True),
        (Created("l", 1), False),
    ],
)
def test_conditions(condition: Absent | Unchanged | Created, *, holds: bool) -> None:
    keys = Keys()
    assert make(keys, put("k"))
    assert make(keys, put("k"))
    assert make(keys, put("new"), given=(Absent("m"), condition)) is holds
    assert bool(keys.below("new")) is holds


def test_keys_go_with_their_lease_in_one_revision() -> None:
    keys = Keys()
    keys.make(A, Transaction((), (put("1", lease=OWN), put("2", lease=OWN), put("3"))))
    keys.make(B, Transaction((), (put("4", lease=OWN), put("5"))))
    keys.make(B, Transaction((), (put("2", lease=OWN), put("3", lease=OWN))))  # they are B's from now on
    keys.make(A, Transaction((), (put("5"),)))
    assert keys.end_lease(A) == Change(5, (), ("1",))
    assert keys.end_lease(A) is None
    assert keys.end_lease(B) == Change(6, (), ("4", "2", "3"))
    assert keys.end_lease(JOB_LEASE) == Change(7, (), ("5",))
    assert keys.below("") == ()


def test_who_is_told_what() -> None:
    watches: Watches[str] = Watches()
    for prefix, watcher in (("", "all"), ("job/", "one"), ("job/", "two"), ("nodes/", "one"), ("job/s", "gone")):
        watches.add(prefix, watcher)
    watches.remove("gone")
    watches.remove("nobody", "job/")
    change = Change(3, (Entry("job/a", b"", 1, 3), Entry("x", b"", 3, 3)), ("job/b", "y"))
    below = Change(3, (Entry("job/a", b"", 1, 3),), ("job/b",))
    assert list(watches.to_tell(change)) == [("", change, ("all",)), ("job/", below, ("one", "two"))]


def test_a_lease_ends_a_ttl_after_its_agent_was_heard_of() -> None:
    leases = Leases(10)
    leases.hear(A, 0.0)
    leases.hear(B, 1.0)
    assert [leases.next_look(0.0), leases.look(2.0), leases.next_look(8.5)] == [2.0, [], 10.0]
    assert (leases.look(9.999), leases.look(10.0)) == ([], [A])
    leases.end(A)
    assert (A in leases, len(leases), leases.next_look(10.0), leases.look(11.0)) == (False, 1, 11.0, [B])


def test_a_store_that_was_stopped_loses_nobody() -> None:
    leases = Leases(10)
    leases.hear(A, 0.0)
    assert leases.next_look(8.0) == 10.0
    assert leases.look(12.5) == []  # more than a fifth of the ttl too late
    assert leases.next_look(12.5) == 14.5
    assert (leases.look(14.5), leases.next_look(22.0), leases.look(22.5)) == ([], 22.5, [A])


SETTINGS = HubSettings("h", 1, "run", b"secret", 5)


def shake(agent: HubSettings, store: StoreSide) -> bool:
    """Let an agent greet a store. Returns whether each has the other's seals."""
    side = AgentSide(agent, b"")
    answer, theirs, encrypts = store.challenge(side.hello())
    body, ours = side.enter(answer)
    assert encrypts == side.encrypts
    is_same = theirs.cipher == ours.cipher
    assert is_same == (theirs.agent(body) == ours.agent(body)) == (theirs.store(b"x") == ours.store(b"x"))
    return is_same


def test_the_handshake() -> None:
    assert shake(SETTINGS, StoreSide("run", b"secret"))
    assert shake(SETTINGS._replace(secret=b""), StoreSide("run", b""))
    assert not shake(SETTINGS, StoreSide("run", b"other"))
    assert not shake(SETTINGS, StoreSide("run", b""))
    other = StoreSide("r" * 5000, b"")
    with pytest.raises(TurnedAwayError, match="it is of the job 'run'; the one here is 'rrr"):
        shake(SETTINGS, other)
    assert shake(SETTINGS._replace(run_id="r" * 5000, secret=b""), other)
    assert len(AgentSide(SETTINGS._replace(run_id="\N{SNOWMAN}" * 5000), b"").hello()) <= messages.MOST_HELLO
    assert shake(SETTINGS._replace(run_id="\udcff"), StoreSide("\udcff", b"secret"))


def test_another_version_of_the_protocol() -> None:
    store = StoreSide("run", b"")
    hello = messages.write(messages.Hello(7, wire.run_hash("run"), "run", bytes(32)))
    with pytest.raises(TurnedAwayError) as caught:
        store.challenge(hello)
    assert str(caught.value) == f"it speaks version 7 of the store's protocol; the one here is {messages.VERSION}"
    assert messages.read_answer(store.refusal(caught.value)) == messages.Refusal("version", messages.VERSION, "run")
    refusal = messages.write(messages.Refusal("version", 7, "run"))
    with pytest.raises(RefusedError, match="h:1 speaks version 7 of the store's protocol; this agent speaks version 5"):
        AgentSide(SETTINGS, b"").enter(refusal)


def test_no_greeting_is_like_another() -> None:
    hellos = {AgentSide(SETTINGS, b"").hello() for _ in range(20)}
    store = StoreSide("run", b"")
    assert len(hellos) == len({store.challenge(hello)[0] for hello in hellos}) == 20


def test_a_seal_depends_on_all_that_was_said() -> None:
    said = (b"secret", 1, b"r" * 32, b"a" * 32, b"s" * 32)
    changed = [(b"", 1), (b"secret", 2), (b"secret", 1, b"R" * 32), (*said[:3], b"A" * 32), (*said[:4], b"S" * 32)]
    variants = [said, *((*each, *said[len(each) :]) for each in changed)]
    can = [{"can": True}, {"do": True}, {"can": True, "do": True}]  # what each end can: nobody on the way changes that
    made = [wire.connection_keys(*each) for each in variants] + [wire.connection_keys(*said, **each) for each in can]  # type: ignore[arg-type]  # their types are mixed
    seals = [seal for each in made for seal in (each.agent, each.store)]
    assert len({seal(b"x") for seal in seals} | {seal(b"x") for seal in seals}) == 4 * len(made)
    assert len({each.cipher for each in made}) == len(made)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x92\xa5watch\x01",
        b"\x93\xa5watch\x01\xa1\xff",
        b"\x93\xa5watch\x01" + b"\xda\x07\xd0" + b"x" * 2000,
        b"\x94\xa6submit\xff\x90\x90",
        b"\x91" * 5000,
        messages.write(messages.Beat()) + b"x",
        messages.write(messages.Left()),
    ],
)
def test_what_is_no_request(body: bytes) -> None:
    with pytest.raises(messages.DamagedError):
        messages.read_request(body)


def test_a_transaction_travels_as_it_is() -> None:
    given = (Absent("a"), Unchanged("b", 3), Created("c", 2))
    transaction = Transaction(given, (Put("d", b"\xff\0", OWN), Put("e", b"", JOB), Delete("f")))
    read = messages.read_request(messages.write(messages.Submit(3, transaction)))
    assert isinstance(read, messages.Submit)
    assert (read.number, read.transaction) == (3, transaction)
