"""Look at built packages from outside the tree: what is in them, and whether the installed wheel works.

- `package.py contents DIST DIRECT`: the sdist and the wheel in DIST, and the wheel in DIRECT;
- `package.py use`, run by an environment's Python: the package that is installed there;
- `package.py types PYTHON`, run where mypy is: the types of the package in that Python's environment.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent

MANUAL = "share/man/man1/phalanx.1"

SCRIPT = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
"""

PROGRAM = """
from phalanx.multiprocessing import start_processes

def work(number: int) -> int:
    return number + 1

if __name__ == "__main__":
    with start_processes("work", work, (41,), nprocs=2) as group:
        print(group.wait().return_values)
"""

CLIENT = """
from typing import assert_type

from phalanx import timer
from phalanx.multiprocessing import PContext, start_processes

assert_type(start_processes("name", print, nprocs=2), PContext)
start_processes("name", print, nprocs="two")  # type: ignore[arg-type]
with timer.expires(after=1.0):
    pass
"""
"""A program whose types are right only if those of phalanx are seen: strict mypy reports an `ignore` for which there is
no error, and a package that has no types."""


def contents(dist: str, direct: str) -> None:
    """Compare wheel and sdist with the tree, and the wheel made from the sdist with the one made from the tree."""
    (wheel,) = Path(dist).glob("*.whl")
    (sdist,) = Path(dist).glob("*.tar.gz")
    (other,) = Path(direct).glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(other) as two:
        wheel_files = {name: one.read(name) for name in one.namelist()}
        assert wheel_files == {name: two.read(name) for name in two.namelist()}, "the sdist makes another wheel"
    source = {
        str(path.relative_to(ROOT / "src")): path.read_bytes()
        for path in (ROOT / "src" / "phalanx").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts  # where other interpreters write meanwhile
    }
    assert "phalanx/py.typed" in source
    metadata = {name for name in wheel_files if name.split("/")[0].endswith(".dist-info")}
    shared = {name for name in wheel_files if name.split("/")[0].endswith(".data")}
    assert {name.partition("/")[2] for name in shared} == {f"data/{MANUAL}"}
    others = {name: data for name, data in wheel_files.items() if name not in metadata | shared}
    assert others == source, "not the tree's source"
    assert {name.partition("/")[2] for name in metadata} == {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE",
    }  # fmt: skip
    with tarfile.open(sdist) as archive:
        sdist_files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    tops = {name.partition("/")[0] for name in sdist_files}
    needed = {"CHANGELOG.md", "LICENSE", "Makefile", "README.md", "constraints.txt", "noxfile.py", "pyproject.toml"}
    needed |= {"requirements.txt", "benchmarks", "docs", "examples", "src", "tests", "tools"}
    assert needed <= tops, f"the sdist lacks {needed - tops}"
    hidden = {name for name in tops if name.startswith(".")} - {".gitignore"}
    assert not hidden, f"the sdist has {hidden}"
    assert {f"src/{name}" for name in source} <= sdist_files
    print(f"{wheel.name}: {len(wheel_files)} files; {sdist.name}: {len(sdist_files)} files")


def called(*command: str) -> str:
    """What a command prints, which succeeds."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command} failed with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def use() -> None:
    """Use the installed package: its command, each public module, a group of functions."""
    import phalanx

    place = Path(phalanx.__file__).parent
    assert place.parent == Path(sysconfig.get_path("purelib")), f"phalanx is that of {place}"
    assert (place / "py.typed").is_file()
    command = str(Path(sysconfig.get_path("scripts"), "phalanx"))
    version = phalanx.__version__
    assert version in called(command, "--version")
    assert version in called(sys.executable, "-m", "phalanx", "--version")
    assert f"phalanx {version}" in Path(sysconfig.get_path("data"), MANUAL).read_text(encoding="utf-8")
    for words in ([], ["run"], ["logs"], ["runs"], ["report"], ["rerun"], ["stack"], ["torchrun-shim"]):
        assert "Usage: phalanx" in called(command, *words, "--help")
    modules = [
        module.name
        for module in pkgutil.walk_packages(phalanx.__path__, "phalanx.")
        if not any(part.startswith("_") for part in module.name.split("."))
    ]
    for name in modules:
        imported = importlib.import_module(name)
        for public in getattr(imported, "__all__", ()):
            getattr(imported, public)
    with tempfile.TemporaryDirectory() as folder:
        script, program = Path(folder, "script.py"), Path(folder, "program.py")
        script.write_text(SCRIPT, encoding="utf-8")
        program.write_text(PROGRAM, encoding="utf-8")
        printed = called(command, "run", "--nproc-per-node", "2", "--log-dir", f"{folder}/logs", str(script))
        assert "rank 0 of 2" in printed, printed
        assert "rank 1 of 2" in printed, printed
        page = f"{folder}/page.html"
        called(command, "report", "--log-dir", f"{folder}/logs", "--html", "-o", page)
        assert "rank 1 of 2" in Path(page).read_text(encoding="utf-8")
        printed = called(sys.executable, str(program))
        assert printed == "{0: 42, 1: 42}\n", printed
    print(f"phalanx {version} of {place}: command, script, page and group work; imported: {' '.join(modules)}")


def types(python: str) -> None:
    """Let mypy check a client program."""
    with tempfile.TemporaryDirectory() as folder:
        client = Path(folder, "client.py")
        client.write_text(CLIENT, encoding="utf-8")
        mypy = (
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--python-executable",
            python,
            "--cache-dir",
            f"{folder}/cache",
        )
        print(called(*mypy, str(client)), end="")


if __name__ == "__main__":
    COMMANDS: dict[str, Callable[..., None]] = {"contents": contents, "use": use, "types": types}
    COMMANDS[sys.argv[1]](*sys.argv[2:])
