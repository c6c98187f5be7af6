"""What the import costs, and whom it brings along."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

from benchmarks.case import FLOOR, PHALANX, TORCH, Case, Sample, Target
from benchmarks.group import LIBRARY

# A name that does the work is asked for, so that a module which loads its contents lazily gains nothing here.
_NAMES = {PHALANX: "start_processes", TORCH: "start_processes", FLOOR: "Popen"}
_TIMES = {PHALANX: 15, TORCH: 3, FLOOR: 15}

# Modules that were there before (what site brought in) are not the doing of the import.
_SNIPPET = """
import sys
from time import perf_counter
before = set(sys.modules)
began = perf_counter()
from {module} import {name}
took = perf_counter() - began
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
ours = sys.stdlib_module_names | {{"__mp_main__", {module!r}.partition(".")[0]}}
import json
print(json.dumps([took * 1e3, sorted(new - ours)]))
"""


def _once(contender: str) -> tuple[float, list[str]]:
    snippet = _SNIPPET.format(module=LIBRARY.get(contender, "subprocess"), name=_NAMES[contender])
    done = subprocess.run([sys.executable, "-c", snippet], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    took, others = json.loads(done.stdout)
    return took, others


def _measure(contender: str) -> Sample:
    _once(contender)
    runs = [_once(contender) for _ in range(_TIMES[contender])]
    others = runs[0][1]
    note = f"third-party modules imported: {', '.join(others) or 'none'}"
    return Sample({"import": [took for took, _ in runs], "third-party": [len(others)]}, (note,))


CASE = Case(
    name="import",
    measures="the import of the library in a fresh interpreter; the floor is import subprocess",
    units={"import": "ms", "third-party": "modules"},
    targets=(Target("import", "<=", 3, of=FLOOR), Target("third-party", "<=", 0, worst=True)),
    contenders={name: partial(_measure, name) for name in (PHALANX, TORCH, FLOOR)},
    rounds=3,
    peer_rounds=1,
    warm_up=False,
)
