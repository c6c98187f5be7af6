"""Phalanx in a zip file, made by `zipapp`: what it needs besides is in the environment."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import zipapp
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import Place

pytestmark = [pytest.mark.slow, pytest.mark.each_python]

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "phalanx"
_AS_COMMAND = "from phalanx.cli import main\nif __name__ == '__main__':\n    main()\n"
_OWN = """\
import os, sys, time, phalanx
from phalanx import spawn

def work(rank):
    if rank == 1:
        raise ValueError("loss is nan")
    time.sleep(3600)

if __name__ == "__main__":
    print(phalanx.__file__)
    try:
        spawn.start_processes(work, nprocs=2, start_method=sys.argv[1])
    except spawn.ProcessRaisedException as error:
        print(error.error_index, str(error).splitlines()[-1])
"""


@pytest.fixture(scope="module")
def zipped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a file that can be run of Phalanx and a main module, once each."""

    @functools.cache
    def make(main: str) -> Path:
        folder = tmp_path_factory.mktemp("zipped")
        content = folder / "content"
        shutil.copytree(PACKAGE, content / "phalanx", ignore=shutil.ignore_patterns("__pycache__"))
        (content / "__main__.py").write_text(main, encoding="utf-8")
        file = folder / "ä file.pyz"
        zipapp.create_archive(content, file)
        return file

    return make


@pytest.mark.parametrize("options", [(), ("-m",), ("--preload", "json"), ("--run-path",)], ids="".join)
def test_the_command_runs_from_a_zip_file(
    place: Place, zipped: Callable[[str], Path], options: tuple[str, ...]
) -> None:
    file = zipped(_AS_COMMAND)
    script = place.write("""
        import os, sys
        if os.environ["RANK"] == "1":
            raise ValueError("loss is nan")
        print(sys.argv[1:])
        """)
    where = ("run", "--nproc-per-node", 2, "--settle", 60, "--log-dir", place.logs)
    done = place.program(sys.executable, file, *where, *options, "script" if "-m" in options else script, "a", "b")
    assert done.status == 1, done
    assert "[0] ['a', 'b']" in done.out
    assert "error     : ValueError: loss is nan" in done.err
    assert "phalanx/_engine" not in done.err, "a frame of ours"
    assert "phalanx: page: " in done.err, "its assets are in the zip file, too"


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_program_in_a_zip_file_starts_functions(tmp_path: Path, zipped: Callable[[str], Path], method: str) -> None:
    file = zipped(_OWN)
    done = subprocess.run(
        [sys.executable, file, method], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == f"{file}/phalanx/__init__.py\n1 ValueError: loss is nan\n", done
