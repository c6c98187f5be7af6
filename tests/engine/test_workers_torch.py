"""Function workers beside torch: its tensors as arguments, as globals and as return values, under each start method.

One script does it all, once for each method but "spawn", where every worker takes two seconds to import torch: that is
for the tutorial among the programs (``test_programs.py``).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.workers import ROOT, run_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

SCRIPT = """
import contextlib, json, os, sys, tempfile, warnings
warnings.simplefilter("ignore")  # what torch says of sparse tensors
import torch
import torch.multiprocessing
from phalanx.multiprocessing import start_processes, warm

METHOD, STRATEGY = sys.argv[1:]
tempfile.tempdir = os.path.dirname(os.path.abspath(__file__))
torch.multiprocessing.set_sharing_strategy(STRATEGY)
torch.set_float32_matmul_precision("high")
torch.set_num_threads(1)

def start(function, *args, nprocs=2, **options):
    with start_processes("workers", function, args, nprocs=nprocs, start_method=METHOD, **options) as group:
        return group.wait()

def run(function, *args, **options):
    result = start(function, *args, **options)
    assert result.succeeded, result.root_cause.traceback
    return list(result.return_values.values())

class Net(torch.nn.Linear):
    pass

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, n): return float(n)

small, large, net = torch.zeros(3), torch.zeros(1 << 20), Net(1, 1, bias=False)
torch.nn.init.zeros_(net.weight)
array = large.numpy()

def work(shared, model):
    found = {"settings": [torch.get_float32_matmul_precision(), torch.multiprocessing.get_sharing_strategy(),
                          torch.get_num_threads(), torch.multiprocessing.get_start_method()]}
    with torch.no_grad():
        for each in (small, large, net.weight, shared, model.weight):
            each += 1
    found["globals"] = [small[0].item(), large[0].item(), net.weight.item(), array.flags.writeable]
    whole = torch.arange(6.0).reshape(2, 3)
    found["returned"] = (whole, whole[0], torch.nn.Parameter(torch.ones(2)), net, torch.zeros(0),
                         torch.ones(3, dtype=torch.bool), large, torch.arange(3).to_sparse(),
                         torch.zeros(2, device="meta"))
    found["shared"] = shared, torch.zeros(2).share_memory_(), [torch.zeros(1).share_memory_() for _ in range(150)]
    return found

def save_and_load(path):
    torch.save(net, path)
    batches = torch.utils.data.DataLoader(Numbers(), batch_size=3, num_workers=2)
    return type(torch.load(path, weights_only=False)) is Net, [batch.tolist() for batch in batches]

def refused():
    return (torch.ones(2, requires_grad=True) * 2).sum()

def closure(shared):
    mine = torch.zeros(2)
    def inner():
        mine.add_(1)
        shared.add_(1)
        return mine[0].item(), small[0].item()
    return inner

def look(found):
    whole, row, parameter, model, empty, flags, big, sparse, nothing = found["returned"]
    row += 100  # it is the same memory
    return {"settings": found["settings"], "globals": found["globals"], "whole": whole.tolist(),
            "parameter": [type(parameter) is torch.nn.Parameter, parameter.requires_grad], "empty": len(empty),
            "net": type(model) is Net and model.weight.item(), "flags": flags.tolist(), "big": big[:2].tolist(),
            "resized": whole.resize_(50).shape[0], "sparse": sparse.to_dense().tolist(), "meta": nothing.device.type}

def files_of_torch():
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]

class Made:
    def __getstate__(self):
        return [torch.full((size,), float(n)) for n in range(4) for size in (3, 1 << 20)]
    def __setstate__(self, tensors):
        self.tensors = tensors
    def look(self):
        return [(len(each), each.min().item(), each.max().item()) for each in self.tensors]

made = Made()
expected = [(size, float(n), float(n)) for n in range(4) for size in (3, 1 << 20)]

def odd():
    whole = torch.arange(4.0)
    return [
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.empty(1 << 40, device="meta"),
        torch.UntypedStorage(1 << 40, device="meta"),
        whole[1:].untyped_storage(),
        whole.bfloat16(),
        torch.nn.Buffer(whole),
        whole.expand(2, 4),
        torch.quantize_per_tensor(whole, 0.5, 3, torch.quint8),
        torch.quantize_per_channel(whole[None], torch.tensor([0.5]), torch.tensor([1]), 0, torch.qint8),
    ]

odds = odd()[:-2]  # what torch says of the others as they arrive would be an error

def look_at_all(given):
    warnings.simplefilter("ignore")  # by value, the top of the script does not hold
    made_here = METHOD == "fork" or (made.look() == expected if hasattr(made, "tensors") else "not sent")
    return made_here, repr(odds), odd(), given and given.look()

ours, mine = torch.zeros(3), torch.zeros(1)

def refer():
    mine.add_(1)
    return net, ours

def train(rank, given, model, view, function):
    same = function() == (model, given)
    given[rank] += 1
    if rank:
        view[0] += 1
    with torch.no_grad():
        model.weight += 1
    return same, mine.item()

def main():
    told = {}
    shared, model = torch.zeros(1).share_memory_(), Net(1, 1, bias=False).share_memory()
    torch.nn.init.zeros_(model.weight)
    before = set(files_of_torch())
    for way in ("import", "value"):
        found, _ = run(work, shared, model, main=way)
        told[way] = look(found)
        same, other, many = found["shared"]
        same += 1
        told[way]["shared"] = [shared.item(), model.weight.item(), other.is_shared(), len(many)]
        told[way]["same"] = same.data_ptr() == shared.data_ptr()
        del found, same, other, many
    told["left"] = sorted(set(files_of_torch()) - before) if STRATEGY == "file_descriptor" else []
    told["launcher"] = [small[0].item(), large[0].item(), net.weight.item()]
    tensor = torch.zeros(1).share_memory_()
    told["closure"] = [run(closure(tensor)), tensor.item()]
    told["saved"] = run(save_and_load, __file__ + ".pt", nprocs=1)[0]
    told["loaded"] = type(torch.load(__file__ + ".pt", weights_only=False)) is Net
    told["refused"] = start(refused, nprocs=1).root_cause.message
    if METHOD == "forkserver":
        args = {0: (tensor, model), 1: (tensor, model)}  # a tuple for each, with the same tensors
        for _ in range(2):
            with start_processes("again", work, args, start_method=METHOD) as group:
                assert group.wait().succeeded, group.wait().root_cause
        for way in ("import", "value"):
            sendable = made if STRATEGY == "file_descriptor" else None  # what is in a file goes with whoever made it
            (here, shown, back, given), = run(look_at_all, sendable, nprocs=1, main=way)
            told["odd " + way] = [here, shown == repr(odds), repr(back) == repr(odd()), given in (expected, None)]
        for _ in range(2):
            args = {rank: (rank, ours, net, ours[2:], refer) for rank in range(2)}
            with start_processes("train", train, args, start_method=METHOD, main="value") as group:
                told["both"] = group.wait().return_values
        told["both"] = [told["both"], ours.tolist(), net.weight.item(), mine.item()]
    told["again"] = [tensor.item(), model.weight.item()]
    print(json.dumps(told))

if __name__ == "__main__":
    with warm(preload=["torch"]) if METHOD == "forkserver" else contextlib.nullcontext():
        main()
"""

RUNS = [("forkserver", "file_descriptor"), ("forkserver", "file_system"), ("fork", "file_descriptor")]


@pytest.mark.parametrize("method, strategy", RUNS)
def test_tensors_of_workers_are_as_under_torch(method: str, strategy: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # of a short name, for the sockets that torch leaves there
        env = {"PYTHONWARNINGS": "ignore", "TMPDIR": folder}
        done = run_script(Path(folder), SCRIPT, method, strategy, timeout=180, env=env)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    by_name = strategy == "file_system"  # which only holds where the top of the script does
    for way, ranks in (("import", 2), ("value", 4)):
        found = told[way]
        assert found["whole"] == [[100.0, 101.0, 102.0], [3.0, 4.0, 5.0]]
        assert found["parameter"] == [True, True]
        assert (found["empty"], found["net"], found["flags"], found["big"]) == (0, 1.0, [True] * 3, [1.0, 1.0])
        assert (found["resized"], found["sparse"], found["meta"]) == (50, [0, 1, 2], "meta")
        assert found["globals"] == [1.0, 1.0, 1.0, True]
        changes = ranks + (1 if way == "import" or by_name else 2)
        assert found["shared"] == [changes, ranks, not by_name or way == "value", 150]
        assert found["same"] == (method != "fork" and not (by_name and way == "value"))  # a fork maps it once more
        if way == "import" or method == "fork":  # by value, the top of the script does not hold
            assert found["settings"] == ["high", strategy, 1, method]
        if method == "forkserver":  # conjugated, quantized, on no device; and those that nobody holds any more
            assert told[f"odd {way}"] == ["not sent" if way == "import" else True, True, True, True]
    assert told["launcher"] == [0.0, 0.0, 0.0]
    assert "Cowardly refusing to serialize non-leaf tensor" in told["refused"]
    assert told["closure"] == [[[1.0, 0.0]] * 2, 2.0]  # copies, but of shared memory
    assert told["again"] == ([6.0, 8.0] if method == "forkserver" else [2.0, 4.0])
    assert (told["saved"], told["loaded"]) == ([True, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]], True)
    assert told["left"] == []  # in files
    if method == "forkserver":  # an argument is shared though code by value refers to it
        assert told["both"] == [{"0": [True, 1.0], "1": [True, 1.0]}, [2.0, 2.0, 2.0], 4.0, 0.0]


# --- What torch makes of arguments and results that need a decision, and what we make of them: docs/compatibility.md


PROGRAM = """
import json, sys

def f(*args):
    if args and args[-1] == "boom":
        raise ValueError("boom")
    return args

def group(args):
    context = m.start_processes("x", f, args, {rank: {} for rank in args}, m.DefaultLogsSpecs(), start_method="fork")
    try:
        result = context.wait()
        return [sorted(result.return_values.items()), sorted(result.failures)]
    finally:
        context.close()

def note(call):
    try:
        return call()
    except Exception as error:
        return [type(error).__name__, str(error)]

if __name__ == "__main__":
    if sys.argv[1] == "torch":
        import torch.distributed.elastic.multiprocessing as m
        import torch.multiprocessing as mp
    else:
        import phalanx.multiprocessing as m
        import phalanx.spawn as mp
    print(json.dumps({
        "no ranks": note(lambda: group({})),
        "a string": note(lambda: group({0: "ab"})),
        "a list": note(lambda: group({0: ["ab"]})),
        "no arguments": note(lambda: group({0: ()})),
        "one fails": note(lambda: group({0: ("ok",), 1: ("boom",)})),
        "spawn none": note(lambda: mp.spawn(f, nprocs=0)),
        "spawn a string": note(lambda: mp.spawn(f, args="ab")),
    }))
"""


def said(which: str, folder: Path) -> dict[str, Any]:
    path = folder / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, str(path), which]
    env = {"PYTHONPATH": f"{ROOT}/src", "TMPDIR": str(folder)}  # of a group that failed, logs are kept there
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=folder, env=env)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_there_and_here(tmp_path: Path) -> None:
    there, here = said("torch", tmp_path), said("phalanx", tmp_path)
    same = {"a list": [[[0, ["ab"]]], []], "no arguments": [[[0, []]], []]}
    assert {name: there[name] for name in same} == {name: here[name] for name in same} == same
    assert there["no ranks"] == [[], []]
    assert here["no ranks"] == ["ValueError", "nprocs: expected at least 1 process, got 0"]
    assert there["spawn none"] is None
    assert here["spawn none"] == ["ValueError", "nprocs: expected at least 1 process, got 0"]
    assert there["a string"] == [[[0, ["a", "b"]]], []]
    assert here["a string"] == ["TypeError", "args: rank 0: expected a tuple of arguments, got 'ab'"]
    assert there["spawn a string"] is None
    assert here["spawn a string"] == ["TypeError", "args: expected a tuple of arguments, got 'ab'"]
    assert there["one fails"] == [[], [1]]
    assert here["one fails"] in ([[[0, ["ok"]]], [1]], [[], [1]])  # a rank may be stopped before it has returned
