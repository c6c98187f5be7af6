"""The two ends of a by-value test: a main program that sends a call, and another interpreter that makes it.

The main program is a source text run with ``python -c``, so that its ``__main__`` cannot be imported. With
``BY_VALUE=cloudpickle`` in the environment cloudpickle does it all by itself, which shows what it loses.
"""

from __future__ import annotations

import copyreg
import io
import os
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx._engine.pickling import by_value, picklers

BARE = os.environ.get("BY_VALUE") == "cloudpickle"
ROOT = Path(__file__).parents[2]
IMPORTS = "from tests.support.by_value_there import there, returned, importable_by_name\n"


def main_program(source: str, script: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``source`` as ``__main__``: from ``script`` if it is given, else from nowhere."""
    source = IMPORTS + textwrap.dedent(source)
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    how = ["-c", source]
    if script is not None:
        script.write_text(source, encoding="utf-8")
        how = [str(script)]
    return subprocess.run([sys.executable, *how], env=environ, capture_output=True, text=True, check=False)


def passes(source: str, script: Path | None = None) -> None:
    """`main_program`, which must end well."""
    done = main_program(source, script)
    assert done.returncode == 0, done.stdout + done.stderr


def _table() -> dict[Any, Any]:
    reduction = sys.modules.get("multiprocessing.reduction")
    return dict(copyreg.dispatch_table) | getattr(getattr(reduction, "ForkingPickler", None), "_extra_reducers", {})


def never(_obj: object) -> bool:
    return False


def importable_by_name(obj: object) -> bool:
    """As for a script, which the other side runs again."""
    main = sys.modules.get(getattr(obj, "__module__", ""))
    found: Any = main
    for part in getattr(obj, "__qualname__", "<none>").split("."):
        found = getattr(found, part, None)
    return found is obj


def there(function: Callable[..., Any], *args: Any, importable: Callable[[object], bool] = never) -> Any:
    """Call ``function`` in another interpreter and return what it returns, made as the launcher would have it."""
    import cloudpickle  # type: ignore[import-untyped]  # it ships no types

    file = io.BytesIO()
    sent: list[object] = []
    if BARE:
        bare = type(
            "Pickler", (cloudpickle.Pickler,), {"dispatch_table": {**cloudpickle.Pickler.dispatch_table, **_table()}}
        )
        bare(file).dump((function, args))
    else:
        pickler = by_value.make(file, _table(), importable=importable, sent=sent)
        pickler.dump((function, args))
    script = ""
    if importable is importable_by_name:
        script = getattr(sys.modules["__main__"], "__file__", "")
    child = "from tests.support.by_value_there import answer; answer()"
    done = subprocess.run(
        [sys.executable, "-c", child, script], input=file.getvalue(), capture_output=True, check=False
    )
    if done.returncode:
        raise AssertionError(done.stderr.decode())
    data = io.BytesIO(done.stdout)
    return cloudpickle.load(data) if BARE else picklers.Unpickler(data, sent).load()


def returned(value: Any) -> Any:
    """What arrives of ``value`` after it has been there and back."""
    return there(_itself, value)


def _itself(value: Any) -> Any:
    return value


def answer() -> None:
    """The other end: read the call, write the result."""
    import pickle

    script = sys.argv[1]
    importable: Callable[[object], bool] = never
    if script:
        names = runpy.run_path(script, run_name="__mp_main__")
        module = type(sys)("__mp_main__")
        vars(module).update(names)
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        importable = importable_by_name
    output = os.dup(1)
    os.dup2(2, 1)
    function, args = pickle.load(sys.stdin.buffer)
    data = _result(function(*args), importable)
    with open(output, "wb") as file:
        file.write(data)


def _result(value: Any, importable: Callable[[object], bool]) -> bytes:
    import cloudpickle

    if BARE:
        return bytes(cloudpickle.dumps(value))
    file = io.BytesIO()
    try:
        picklers.plain(file, _table(), importable=importable).dump(value)
    except Exception:  # noqa: BLE001 - as for a worker's result: what fails by reference goes by value
        file = io.BytesIO()
        by_value.make(file, _table(), importable=importable, sent=None).dump(value)
    return file.getvalue()
