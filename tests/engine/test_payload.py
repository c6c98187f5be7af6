"""Large arguments: one copy for all workers, read-only unless asked otherwise, and equal to what was sent."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx._engine.pickling.call_pickler import LARGE, pack
from phalanx.multiprocessing import start_processes
from tests.support import payload_workers as does
from tests.support.helpers import Gate, Ready
from tests.support.payload_workers import Box, Pager

METHODS = ("spawn", "forkserver", "fork")
SENT = ("spawn", "forkserver")
"""Methods whose arguments are pickled."""

MIB = 1 << 20
REFUSED = "assignment destination is read-only"


@pytest.fixture(autouse=True)
def _logs_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(method: str, function: Callable[..., Any], *args: Any, nprocs: int = 2, **options: Any) -> list[Any]:
    """What each rank returned, all of which must succeed."""
    with start_processes("large", function, args, nprocs=nprocs, start_method=method, **options) as group:
        result = group.wait()
    assert not result.is_failed(), result.failures
    return [result.return_values[rank] for rank in range(nprocs)]


def some(size: int = 2 * MIB, kind: Any = np.uint8) -> np.ndarray[Any, Any]:
    return np.random.default_rng(size).integers(0, 100, size).astype(kind)


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def square() -> np.ndarray[Any, Any]:
    return some(2 * MIB, np.float64).reshape(1024, 2048)


def records() -> np.ndarray[Any, Any]:
    made = np.zeros(MIB, dtype=[("name", "S4"), ("value", "<f8"), ("inner", "<i4", (2,))])
    made["value"] = np.arange(MIB)
    return made


ARRAYS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "of bytes": some,
    "of floats": lambda: some(MIB, np.float64),
    "of big-endian numbers": lambda: some(MIB, ">i4"),
    "of complex numbers": lambda: some(MIB, np.complex128),
    "of booleans": lambda: some(2 * MIB, np.bool_),
    "of dates": lambda: some(MIB).astype("M8[D]"),
    "of texts": lambda: some(MIB).astype("U3"),
    "of records": records,
    "of objects": lambda: np.array([{"n": n} for n in range(1000)] * 10, dtype=object),
    "empty": lambda: np.empty((0, 3)),
    "of no dimension": lambda: np.array(3.5),
    "of just the size": lambda: some(LARGE),
    "one byte below": lambda: some(LARGE - 1),
    "one byte above": lambda: some(LARGE + 1),
    "in two dimensions": square,
    "in Fortran's order": lambda: np.asfortranarray(square()),
    "transposed": lambda: square().T,
    "every second column": lambda: square()[:, ::2],
    "backwards": lambda: some()[::-1],
    "a slice": lambda: some(4 * MIB)[MIB:-MIB],
    "broadcast": lambda: np.broadcast_to(np.arange(1024.0), (1024, 1024)),
    "read-only": lambda: read_only(some()),
    "read-only slice": lambda: read_only(some(4 * MIB))[MIB:-MIB],
    "a field of records": lambda: records()["value"],
}


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """They live no longer than these tests: every fork of this process would have them."""
    return {name: make() for name, make in ARRAYS.items()}


def one_each(function: Callable[..., Any], arguments: list[tuple[Any, ...]], **options: Any) -> dict[str, Any]:
    """What ranks returned that were forks of one process, and each had arguments of its own."""
    options |= {"start_method": "forkserver", "preload": ["numpy"]}
    with start_processes("large", function, dict(enumerate(arguments)), **options) as group:
        result = group.wait()
    assert result.succeeded, result.root_cause
    return {name: result.return_values[rank] for rank, name in enumerate(ARRAYS)}


@pytest.fixture(scope="module", params=[False, True], ids=["read-only", "writable"])
def arrived(request: pytest.FixtureRequest, arrays: dict[str, np.ndarray[Any, Any]]) -> tuple[bool, dict[str, Any]]:
    """Whether arguments may be written to, and what workers found of each array."""
    return request.param, one_each(does.describe, [(array,) for array in arrays.values()], writable=request.param)


@pytest.mark.each_python
@pytest.mark.slow
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_arrives_as_it_was(
    name: str, arrived: tuple[bool, dict[str, Any]], arrays: dict[str, np.ndarray[Any, Any]]
) -> None:
    array, (writable, all_found) = arrays[name], arrived
    [found] = all_found[name]
    # What plain pickle makes of it, with a buffer beside, is what a worker has.
    buffers: list[Any] = []
    data = pickle.dumps(array, 5, buffer_callback=buffers.append)
    [expected] = does.describe(pickle.loads(data, buffers=[bytearray(buffer.raw()) for buffer in buffers]))
    shared = bool(buffers) and buffers[0].raw().nbytes >= LARGE
    copied = bool(buffers) and not shared
    if shared and not writable:
        expected = (*expected[:4], False, expected[5])
    assert (*found[:4], found[5]) == (*expected[:4], expected[5])
    assert found[4] == expected[4] or copied


@pytest.mark.long
@pytest.mark.each_python
@pytest.mark.parametrize("start_method", SENT)
def test_large_arrays_are_shared_and_read_only(start_method: str) -> None:
    arrays = [some(), some(3 * MIB, np.float32), some(1000)]
    found = run(start_method, does.places, arrays, nprocs=3)
    assert found[0] == found[1] == found[2]
    first, second, small = found[0]
    assert first == second != ""
    assert small == ""
    assert run(start_method, does.write_to, arrays) == [[REFUSED, REFUSED, "written"]] * 2


@pytest.mark.each_python
def test_arrays_of_a_fork_are_copied_when_they_are_written_to() -> None:
    arrays = [some(), some(1000)]
    before = does.describe(arrays)
    assert run("fork", does.write_to, arrays) == [["written"] * 2] * 2
    assert does.describe(arrays) == before


@pytest.mark.slow
def test_writable_arrays_are_each_workers_own(method: str, ready: Ready, gate: Gate) -> None:
    array = some(MIB, np.float64)
    last = array[-1]
    arguments = (array, ready.address, gate.address)
    with start_processes("own", does.write_own, arguments, nprocs=3, start_method=method, writable=True) as group:
        ready.wait(3)  # all have written
        gate.open(3)
        result = group.wait()
    assert all(pid == value for pid, value in result.return_values.values())
    assert len(result.return_values) == 3
    assert array[-1] == last


@pytest.mark.long
def test_a_read_only_array_is_a_writable_copy_in_workers() -> None:
    assert run("spawn", does.write_to, read_only(some()), some(), writable=True) == [[REFUSED, "written"]] * 2


# --- where arrays may be


def in_a_box(array: Any) -> Any:
    return Box([{"deep": (array,)}])


@pytest.mark.long
def test_arrays_inside_of_other_things_are_shared_as_well() -> None:
    array = some()
    nested = [[1, {"a": [array]}], in_a_box(some(3 * MIB))]
    [places, _other] = run("forkserver", does.places, nested)
    assert len(places) == 2
    assert "" not in places
    assert run("spawn", does.describe, nested)[0] == [(*facts[:4], False, facts[5]) for facts in does.describe(nested)]


@pytest.mark.long
def test_arrays_that_belong_to_the_function_are_shared_as_well() -> None:
    array = some()

    def closure() -> list[str]:
        return does.places(array)

    default = lambda it=array: does.places(it)  # noqa: E731 - one of the ways in which people write it
    partial = functools.partial(does.places, array)
    for function in (closure, default, partial, does.Pages(array)):
        one, two = run("spawn", function)
        assert one == two != [""]
        assert one[0]


@pytest.mark.long
def test_arrays_of_the_function_and_of_each_rank_are_told_apart() -> None:
    own = {rank: (some(2 * MIB + rank), some(MIB, np.float64)) for rank in range(3)}
    base = some(5 * MIB)
    function = functools.partial(does.describe, base)
    with start_processes("own", function, own, start_method="spawn") as group:
        result = group.wait()
    for rank, arguments in own.items():
        # That of the function is each worker's own to write to.
        expected = [(*facts[:4], number == 0, facts[5]) for number, facts in enumerate(does.describe(base, *arguments))]
        assert result.return_values[rank] == expected


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["function", "value"])
def test_what_is_no_argument_is_each_workers_own_to_write_to(sent: str) -> None:
    """A method's object, or the arguments that a partial function holds."""
    counter = does.Counter(MIB)
    method = counter.add if sent == "function" else functools.partial(does.Counter.add, counter)
    with start_processes("own", method, nprocs=2, start_method="spawn") as group:
        result = group.wait()
    assert result.return_values == {0: 1.0, 1: 1.0}
    assert counter.array[0] == 0


@pytest.mark.each_python
@pytest.mark.parametrize("make", [some, lambda: bytearray(MIB)], ids=["array", "bytes"])
def test_the_same_large_object_twice_is_one(make: Callable[[], Any]) -> None:
    large = make()
    assert run("spawn", lambda one, two: one is two, large, large) == [True, True]


# --- bytes


@pytest.mark.each_python
@pytest.mark.slow
def test_bytes_arrive_as_they_were(method: str) -> None:
    kinds, sizes = (bytes, bytearray), (0, 1000, MIB - 1, MIB, 3 * MIB + 1)
    sent = [kind(os.urandom(size)) for kind in kinds for size in sizes]
    found = run(method, does.give_back, *sent, sent)
    assert found == [(*sent, sent)] * 2
    for values in found:
        assert [type(value) for value in values[:-1]] == [type(value) for value in sent]


@pytest.mark.slow
def test_bytearrays_may_be_written_to() -> None:
    def write(data: bytearray) -> bytes:
        data[0] = 1
        data += b"more"
        return bytes(data[-4:])

    data = bytearray(2 * MIB)
    assert run("spawn", write, data) == [b"more"] * 2
    assert data[0] == 0


@pytest.mark.long
@pytest.mark.each_python
def test_objects_with_buffers_of_their_own() -> None:
    def length(pager: Pager) -> tuple[int, int]:
        view = memoryview(pager.data)
        return len(view), view[5]

    data = bytes(range(256)) * (2 * MIB // 256)
    assert run("spawn", length, Pager(data)) == [(2 * MIB, 5)] * 2
    assert run("spawn", length, Pager(data[:1000])) == [(1000, 5)] * 2


# --- how much of it there is


def packed(arguments: dict[int, tuple[Any, ...]], **options: Any) -> int:
    """The bytes that the payload of a call takes."""
    memfd = pack(does.places, arguments, **options).memfd
    try:
        return os.fstat(memfd).st_blocks * 512
    finally:
        os.close(memfd)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [some, lambda n: read_only(some(n)), lambda n: some(n).tobytes(), bytearray],
                         ids=["array", "read-only array", "bytes", "bytearray"])  # fmt: skip
@pytest.mark.each_python
def test_what_several_ranks_have_is_there_once(kind: Callable[[int], Any]) -> None:
    large = kind(8 * MIB)
    one = packed({0: (large,)})
    assert 8 * MIB <= one < 8.2 * MIB
    shared = (large, 3)
    assert packed(dict.fromkeys(range(8), shared)) < 8.2 * MIB
    assert packed({rank: (large, rank) for rank in range(8)}) < 8.2 * MIB
    assert packed({rank: (large, rank, kind(2 * MIB)) for rank in range(8)}) < 8.2 * MIB + 8 * 2 * MIB


@pytest.mark.slow
def test_views_of_one_array_are_there_each(method: str) -> None:
    base = some(8 * MIB)
    views = [base[: 4 * MIB], base[4 * MIB :], base[: 4 * MIB]]
    [found, _other] = run(method, does.describe, views)
    writeable = method == "fork"
    assert found == [(*facts[:4], writeable, facts[5]) for facts in does.describe(views)]


def pss_kb(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))


@pytest.mark.long
@pytest.mark.parametrize("start_method", SENT)
def test_four_workers_hold_one_copy(start_method: str, ready: Ready, gate: Gate) -> None:
    array = np.ones(8 * MIB)  # 64 MB
    options: dict[str, Any] = {"preload": ["numpy"]} if start_method == "forkserver" else {}
    arguments = (array, ready.address, gate.address)
    before = pss_kb(os.getpid())
    with start_processes(
        "pss", does.touch_and_stay, arguments, nprocs=4, start_method=start_method, **options
    ) as group:
        pids = ready.pids(4)
        grown = pss_kb(os.getpid()) - before + sum(map(pss_kb, pids))
        gate.open(4)
        result = group.wait()
    assert set(result.return_values.values()) == {8.0 * MIB}
    print(f"64 MB to 4 workers, {start_method}: PSS grew by {grown / 1000:.0f} MB")  # noqa: T201 - shown with -rP
    assert grown * 1024 < 1.3 * array.nbytes + 4 * 40e6  # and what each needs for itself
    assert grown * 1024 < 3.5 * array.nbytes


@pytest.mark.slow
def test_many_arrays_take_few_descriptors() -> None:
    arrays = [np.zeros(MIB, np.uint8) for _ in range(40)]
    many, none = run("forkserver", does.descriptors, arrays, nprocs=1), run("forkserver", does.descriptors, nprocs=1)
    assert many[0] - none[0] == 1


@pytest.mark.slow
def test_what_several_ranks_have_is_one_descriptor() -> None:
    pipes = [multiprocessing.Pipe() for _ in range(10)]
    for arguments in (dict.fromkeys(range(8), (pipes,)), {rank: (rank, pipes) for rank in range(8)}):
        packed = pack(print, arguments)
        packed.close()
        assert len(set(packed.fds)) == len(packed.fds) <= 21
        assert all(len(set(which)) >= 20 for which in packed.fd_indices.values())
    own = {rank: (pipes[rank][0], pipes[9][1]) for rank in range(3)}
    with start_processes("own", does.send_all, own, start_method="spawn") as group:
        result = group.wait()
    assert result.succeeded, result.root_cause
    for rank in range(3):
        assert pipes[rank][1].recv() == "own"
    assert [pipes[9][0].recv() for _ in range(3)] == ["common"] * 3


@pytest.mark.long
def test_the_launcher_keeps_nothing() -> None:
    for start_method in METHODS:
        run(start_method, does.places, some(), some().tobytes())
        gc.collect()
        assert does.memfds() == ""


@pytest.mark.slow
def test_a_worker_keeps_what_the_launcher_has_let_go_of(method: str, ready: Ready, gate: Gate) -> None:
    array = some(4 * MIB)
    expected = does.digest(array)
    arguments = (array, ready.address, gate.address)
    with start_processes("later", does.use_later, arguments, nprocs=2, start_method=method) as group:
        ready.wait(2)
        array[:] = 0  # nor does it see what the launcher makes of it since
        del array, arguments
        group.args.clear()
        gc.collect()
        assert does.memfds() == ""
        gate.open(2)
        result = group.wait()
    assert result.return_values == {0: expected, 1: expected}


@pytest.mark.slow
@pytest.mark.parametrize("method", SENT)
@pytest.mark.parametrize("writable", [False, True])
def test_no_worker_can_change_what_another_reads(method: str, writable: bool) -> None:
    """Not by the file itself either, whatever its flags say of the array."""
    for said in run(method, does.overwrite, some(2 * MIB), writable=writable):
        assert said == ["refused"] * 4


# --- the way back


@pytest.fixture(scope="module")
def come_back(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """What workers returned that had each array."""
    return one_each(does.give_back, [(array, "and more") for array in arrays.values()])


@pytest.mark.each_python
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "broadcast"])
def test_arrays_come_back(name: str, come_back: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    found, text = come_back[name]
    assert text == "and more"
    np.testing.assert_array_equal(found, arrays[name])
    assert found.dtype == arrays[name].dtype


@pytest.mark.long
def test_large_results_in_everything(method: str) -> None:
    def make(n: int) -> Any:
        return {"a": Box([np.full(n, 3.0)]), "b": bytes(n)}

    for found in run(method, make, 2 * MIB):
        np.testing.assert_array_equal(found["a"].inside[0], np.full(2 * MIB, 3.0))
        found["a"].inside[0][0] = 1  # it is the launcher's own
        assert found["b"] == bytes(2 * MIB)
