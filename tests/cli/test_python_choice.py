"""Which interpreter runs the script: that of the tool, and a word when another may be meant."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.command import RUN, Place
from tests.support.helpers import PYTHON


def environment(folder: Path) -> Path:
    """A virtual environment, as far as it can be told from outside."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\n")
    return folder


def said(place: Place, *options: str) -> str:
    done = place.run("--dry-run", *options)
    assert done.status == 0
    return "".join(line for line in done.err.splitlines(keepends=True) if "workers run" in line)


@pytest.mark.slow
def test_another_environment_is_active(place: Place, tmp_path: Path) -> None:
    other = environment(tmp_path / "other")
    script = place.write("")
    place.env["VIRTUAL_ENV"] = str(other)
    choice = f"PYTHON_EXEC={other}/bin/python"
    sentence = (
        f"phalanx: workers run {sys.executable}, and VIRTUAL_ENV is {other}: if they are to run that, "
        f"set {choice}, or install phalanx there\n"
    )
    assert sentence in place.run(script).err
    assert said(place, "-m", "this") == sentence
    assert said(place, "--no-python", "true") == ""
    for python, shown in ("", sentence), (sys.executable, ""):
        place.env["PYTHON_EXEC"] = python
        assert said(place, script) == shown


@pytest.mark.parametrize("step", ["os.closerange(3, 256)", "os.environ.pop('PHALANX_DESCRIPTORS')"])
def test_what_stands_before_the_interpreter_may_close_and_clear(place: Place, step: str) -> None:
    """As sudo(8) does."""
    argv = "[sys.executable, *sys.argv[1:]]"
    program = place.write(f"import os, sys\n{step}\nos.execv(sys.executable, {argv})\n", "program.py")
    wrapper = place.folder / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec {PYTHON} {program} "$@"\n')
    wrapper.chmod(0o755)
    place.env["PYTHON_EXEC"] = str(wrapper)
    done = place.run(place.write("print('fine')"))
    assert (done.status, done.out) == (0, "[0] fine\n"), done.err


@pytest.mark.slow
@pytest.mark.parametrize("name", [".venv", "venv"])
def test_another_environment_is_beside_the_script(place: Place, name: str) -> None:
    other = environment(place.folder / "project" / name)
    script = place.write("", "project/train.py")
    assert f", and beside the script is {other}: " in said(place, script)
    if name == "venv":
        return
    place.env["CONDA_PREFIX"] = str(other.parent)  # the base, that holds anything but ours
    assert f", and beside the script is {other}: " in said(place, script)
    for variable in ("CONDA_PREFIX", "VIRTUAL_ENV"):
        place.env[variable] = sys.prefix  # ours was activated
        assert said(place, script) == ""
        del place.env[variable]
    module = place.program("sh", "-c", 'cd project && "$@"', "sh", *RUN, "--log-dir", place.logs, "-m", "train")
    assert f", and beside the script is {other}: " in module.err


@pytest.mark.long
def test_what_is_no_other_environment(place: Place, tmp_path: Path) -> None:
    script = place.write("")
    for text in (sys.prefix, str(tmp_path / "gone"), ""):
        place.env["VIRTUAL_ENV"] = text
        assert said(place, script) == ""
    program = environment(place.folder / "venv")
    (program / "pyvenv.cfg").unlink()
    del place.env["VIRTUAL_ENV"]
    assert said(place, script) == ""
    link = tmp_path / "link"
    link.symlink_to(sys.prefix)
    place.env["VIRTUAL_ENV"] = str(link)
    assert said(place, script) == ""
    place.env["VIRTUAL_ENV"] = sys.prefix
    command = (f"{link}/bin/{Path(sys.executable).name}", *RUN[1:], "--log-dir", place.logs, script)
    assert "workers run" not in place.program(*command).err
