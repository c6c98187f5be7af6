"""Where logs are when nobody says it, and who may read them."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import sys
from pathlib import Path

import pytest

from phalanx._runs.paths import default_folder, folder_for_new_runs
from phalanx.multiprocessing import DefaultLogsSpecs, Std, start_processes
from tests.support.command import Place, refused, sh

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

PHALANX = (sys.executable, "-m", "phalanx")
BOTH = "echo out; echo err >&2; exit 3"


def modes(folder: Path, *, files: bool = False) -> set[int]:
    """Permissions of a folder and of all folders in it, or of all files."""
    found = [folder, *folder.rglob("*")]
    return {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file() is files}


def with_umask(place: Place, umask: str, *argv: object) -> Path:
    """Run two ranks that write and fail, and return the run's folder."""
    head = ("sh", "-c", f'umask {umask}; exec "$@"', "sh")
    before = set(place.logs.glob("*"))
    options = ("--nproc-per-node", 2, "--duplicate-stdout-filters", "out")
    done = place.run(*options, *argv, "--no-python", "sh", "-c", BOTH, head=head)
    assert done.status == 3
    (place.folder / "said").write_text(done.err)
    (folder,) = set(place.logs.glob("*")) - before
    return folder


# --- who may read


def test_a_run_is_its_owners_alone_unless_asked(place: Place) -> None:
    folder = with_umask(place, "022")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("umask", ["022", "077"])
@pytest.mark.parametrize("options", [(), ("--log-max-size", 100), ("-r", 1)])
def test_a_run_for_colleagues(place: Place, umask: str, options: tuple[object, ...]) -> None:
    folder = with_umask(place, umask, "--log-mode", "0750", *options)
    assert modes(folder) == {0o750}
    assert modes(folder, files=True) == {0o666 & ~int(umask, 8)}
    said = (place.folder / "said").read_text()
    note = "phalanx: --log-mode 750: the umask, 077, keeps the files from the group; 027 would not"
    assert (note in said) is (umask == "077")


@pytest.mark.long
def test_a_folder_of_a_group_stays_one(place: Place) -> None:
    place.logs.mkdir()
    place.logs.chmod(0o2775)
    assert modes(with_umask(place, "022", "--log-mode", "755")) == {0o2755}
    place.logs.chmod(0o775)
    assert modes(with_umask(place, "022", "--log-mode", "2750")) == {0o2750}


def test_a_temporary_run_for_colleagues() -> None:
    specs = DefaultLogsSpecs("", redirects=Std.ALL, mode=0o755)
    with start_processes("logs", "echo", {0: ("x",)}, logs_specs=specs) as group:
        group.wait()
    assert (specs.root_log_dir, specs.run_log_dir is None) == (None, False)
    root = Path(specs.run_log_dir or "").parent
    assert root.name.startswith("phalanx_")
    assert modes(root) == {0o755}
    shutil.rmtree(root)


@pytest.mark.parametrize("text", ["rwx", "050", "", "8", "4755", "10700"])
def test_modes_that_cannot_be(place: Place, text: str) -> None:
    refused(sh(place, "echo", "--log-mode", text), "--log-mode", f"{text!r}: expected permissions of folders, like 750")
    assert not place.logs.exists()


def test_a_mode_that_is_decimal() -> None:
    with pytest.raises(ValueError, match="mode: expected permissions of folders, like 0o750"):
        DefaultLogsSpecs(mode=750)


# --- a user without a home

HOMELESS = """
import pwd, sys
def getpwuid(uid): raise KeyError(uid)
pwd.getpwuid = getpwuid
from phalanx.cli import main
main()
"""


@pytest.mark.long
@pytest.mark.parametrize("home", [None, "", "~", "here"])
def test_a_user_without_a_home(place: Place, tmp_path: Path, home: str | None) -> None:
    """No folder named ``~`` is made where one happens to be."""
    for name in ("HOME", "XDG_STATE_HOME"):
        place.env.pop(name, None)
    if home is not None:
        place.env["HOME"] = home
    temporary = tmp_path / "shelter"
    temporary.mkdir()
    place.env["TMPDIR"] = str(temporary)
    for command in ("logs", "runs", "report", "rerun", "stack"):
        asked = place.program(sys.executable, "-c", HOMELESS, command)
        assert asked.status == 2
        assert "--log-dir: there is no default place: neither HOME nor XDG_STATE_HOME is set" in asked.err
    done = place.program(sys.executable, "-c", HOMELESS, "run", "--no-python", "sh", "-c", "echo x")
    assert done.out == "[0] x\n", done
    where = temporary / f"phalanx-{os.geteuid()}"
    assert f"logs in {where}/" in done.err
    assert f"phalanx: the home folder cannot be written to; runs are kept in {where}\n" in done.err
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    assert place.program(sys.executable, "-c", HOMELESS, "logs").out == "[0] x\n"
    assert "succeeded" in place.program(sys.executable, "-c", HOMELESS, "runs").out
    assert "no run in" in place.program(sys.executable, "-c", HOMELESS, "stack").err
    assert list(place.folder.iterdir()) == []


@pytest.mark.long
def test_runs_of_both_places_are_found(place: Place, tmp_path: Path) -> None:
    """A home that could be written to, once."""
    place.env |= {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    place.env.pop("XDG_STATE_HOME", None)
    assert sh(place, "echo home", "--run-id", "home", logs=False).status == 0
    state = tmp_path / "home" / ".local" / "state"
    state.rename(tmp_path / "state")
    state.write_text("")  # nothing can be made below a file, not even by root
    assert sh(place, "echo away", "--run-id", "away", logs=False).status == 0
    assert place.program(*PHALANX, "logs").out == "[0] away\n"  # also while the home cannot be looked into
    assert "away" in place.program(*PHALANX, "runs").out
    state.unlink()
    (tmp_path / "state").rename(state)
    listed = place.program(*PHALANX, "runs").out
    assert [line.split("_")[0] for line in listed.splitlines()[1:]] == ["away", "home"]
    assert place.program(*PHALANX, "logs", "away").out == "[0] away\n"
    assert place.program(*PHALANX, "logs", "home").out == "[0] home\n"
    both = f"{state}/phalanx/runs or {tmp_path}/phalanx-{os.geteuid()}"
    assert f"no run in {both} is running" in place.program(*PHALANX, "stack").err
    assert f"no run 'none' in {both}" in place.program(*PHALANX, "logs", "none").err


@pytest.mark.long
@pytest.mark.parametrize("why", ["a file", "shut"])
def test_runs_are_found_while_the_home_is_none(place: Place, tmp_path: Path, why: str) -> None:
    """The home of a service (/dev/null), and one in which root alone has had runs."""
    home = tmp_path / "home"
    runs = home / ".local" / "state" / "phalanx" / "runs"
    place.env |= {"HOME": str(home), "TMPDIR": str(tmp_path)}
    place.env.pop("XDG_STATE_HOME", None)
    if why == "a file":
        home.write_text("")
    else:
        runs.mkdir(parents=True)
        runs.chmod(0)
    unprivileged: tuple[str, ...] = ()
    if os.geteuid() == 0 and why == "shut":  # root may list anything, but for this one capability
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv: root may list anything")
        unprivileged = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--")
    phalanx = (*unprivileged, *PHALANX)
    try:
        listed = place.program(*PHALANX, "runs")
        if os.geteuid() == 0 or why != "shut":
            assert "no runs in" in listed.out, listed
        else:
            assert listed.err == f"Error: {runs}: Permission denied\n"
        done = place.program(*phalanx, "run", "--no-python", "sh", "-c", "echo away")
        assert f"runs are kept in {tmp_path}/phalanx-{os.geteuid()}\n" in done.err, done
        assert place.program(*phalanx, "logs").out == "[0] away\n"
        assert "succeeded" in place.program(*phalanx, "runs").out
        assert "is running; the latest is" in place.program(*phalanx, "stack").err
    finally:
        if why == "shut":
            runs.chmod(0o700)


def test_a_temporary_place_of_somebody_elses_is_not_used(place: Place, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: only that can make another user's folder")
    place.env |= {"HOME": "/proc/none", "TMPDIR": str(tmp_path)}
    place.env.pop("XDG_STATE_HOME", None)
    theirs = tmp_path / "phalanx-0"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    done = sh(place, "echo x", logs=False)
    assert f"logs in {tmp_path}/phalanx_" in done.err
    assert "runs are kept in a temporary folder" in done.err
    assert list(theirs.iterdir()) == []
    assert place.program(*PHALANX, "runs").out == "no runs in /proc/none/.local/state/phalanx/runs\n"


def test_a_temporary_place_is_for_all_that_any_run_in_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    for mode, expected in ((None, 0o700), (0o750, 0o750), (None, 0o750), (0o705, 0o755)):
        place, why = folder_for_new_runs(mode)
        assert place is not None
        assert (why, stat.S_IMODE(os.stat(place).st_mode)) == ("the home folder cannot be written to", expected)


def test_a_run_for_others_in_the_temporary_place(place: Place, tmp_path: Path) -> None:
    place.env |= {"XDG_STATE_HOME": "/proc/none", "TMPDIR": str(tmp_path)}
    assert sh(place, "echo x", "--log-mode", "755", logs=False).status == 0
    assert stat.S_IMODE((tmp_path / f"phalanx-{os.geteuid()}").stat().st_mode) == 0o755


def test_the_user_database_knows_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    assert default_folder() == os.path.join(pwd.getpwuid(os.getuid()).pw_dir, ".local/state/phalanx/runs")
    monkeypatch.setenv("HOME", "/elsewhere")
    assert default_folder() == "/elsewhere/.local/state/phalanx/runs"
