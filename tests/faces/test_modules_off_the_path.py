"""Functions and classes that a worker cannot import go by value: those of modules that were loaded without the path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.each_python]


def _run(folder: Path, *argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, argv)),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text), encoding="utf-8")
    return path


def test_pytest_that_imports_by_importlib(tmp_path: Path) -> None:
    _write(
        tmp_path / "project" / "deep" / "test_it.py",
        """
        from phalanx.multiprocessing import start_processes

        FACTOR = 3

        class Thing:
            def __init__(self, value):
                self.value = value

        def scaled(thing):
            return Thing(FACTOR * thing.value)

        def test_it():
            with start_processes("g", scaled, {0: (Thing(1),), 1: (Thing(2),)}, {0: {}, 1: {}}) as group:
                values = group.wait(60).return_values
            assert [(type(each), each.value) for each in values.values()] == [(Thing, 3), (Thing, 6)]
        """,
    )
    start = "import sys, pytest; sys.path.remove(''); sys.exit(pytest.main())"  # as the command `pytest` has it
    done = _run(tmp_path / "project", sys.executable, "-c", start, "--import-mode=importlib", "-p", "no:cacheprovider")
    assert "1 passed" in done.stdout, done.stdout


def test_a_module_that_was_loaded_from_its_file(tmp_path: Path) -> None:
    _write(tmp_path / "plugins" / "plugin.py", "FACTOR = 3\ndef scaled(number): return FACTOR * number\n")
    # On the path is another module of that name.
    _write(tmp_path / "plugin.py", "raise RuntimeError('the wrong one')\n")
    program = _write(
        tmp_path / "program.py",
        """
        from importlib.util import module_from_spec, spec_from_file_location
        import sys
        from phalanx.multiprocessing import start_processes

        def load(name):
            spec = spec_from_file_location(name, f"plugins/{name}.py")
            sys.modules[name] = module = module_from_spec(spec)
            spec.loader.exec_module(module)
            return module

        if __name__ == "__main__":
            scaled = load("plugin").scaled
            with start_processes("g", scaled, {0: (2,)}, {0: {}}) as group:
                print(group.wait(60).return_values)
        """,
    )
    done = _run(tmp_path, sys.executable, program)
    assert done.stdout == "{0: 6}\n", done


@pytest.mark.parametrize("of_a_namespace", [False, True])
def test_a_module_of_a_folder_that_was_left_goes_by_name(tmp_path: Path, of_a_namespace: bool) -> None:
    name = "package.here" if of_a_namespace else "here"
    _write(tmp_path / f"{name.replace('.', '/')}.py", "import sys\ndef found(): return __name__ in sys.modules\n")
    code = f"""
        import os
        from phalanx.multiprocessing import start_processes
        from {name} import found
        if __name__ == "__main__":
            os.chdir("/")
            with start_processes("g", found, {{0: ()}}, {{0: {{}}}}) as group:
                print(group.wait(60).return_values)
        """
    done = _run(tmp_path, sys.executable, "-c", dedent(code))
    assert done.stdout == "{0: True}\n", done


def test_a_module_that_a_worker_cannot_import_is_named(tmp_path: Path) -> None:
    _write(tmp_path / "away" / "tail.py", "def half(number): return number / 2\n")
    program = _write(
        tmp_path / "program.py",
        """
        import sys
        from phalanx.multiprocessing import DefaultLogsSpecs, start_processes

        if __name__ == "__main__":
            logs = DefaultLogsSpecs(log_dir="logs")
            sys.path.insert(0, "away")
            import tail
            sys.path.remove("away")
            with start_processes("g", lambda: tail.half(2), {0: ()}, {0: {}}, logs_specs=logs) as group:
                print(group.wait(60).failures[0].message)
        """,
    )
    done = _run(tmp_path, sys.executable, program)
    assert "No module named 'tail'" in done.stdout
    text = " ".join(done.stderr.split())
    assert "need the module 'tail', which this worker does not find on its path, the launcher's sys.path." in text
    assert "(PYTHONPATH), or send the module by value: cloudpickle.register_pickle_by_value(module)." in text
