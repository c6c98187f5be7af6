"""Make the environment that holds nox and uv, and run sessions of noxfile.py in it: what the Makefile's targets call.

    python3 tools/bootstrap.py SESSION... [-- ARGUMENTS]

Any Python from 3.11 on that has the modules `venv` and `ensurepip` is enough. The environment is `.nox/X.Y/tool`. It is
made again when the interpreter or the folder's place has changed, together with the sessions' environments beside it,
for they name both; and brought up to date when constraints.txt has changed. Else nothing is done.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - this is what says so
    sys.exit(
        f"error: {sys.executable} is Python {sys.version_info[0]}.{sys.version_info[1]}: "
        "Phalanx needs 3.11 or later (PYTHON=/path/to/python picks another)"
    )

try:
    import ensurepip
    import venv
except ImportError:
    sys.exit(f"error: {sys.executable} has no venv (on Debian and Ubuntu: apt install python3-venv)")

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".nox" / f"{sys.version_info[0]}.{sys.version_info[1]}"
TOOL = ENVIRONMENTS / "tool"


def has(stamp: Path, text: str) -> bool:
    """Whether a stamp says that text."""
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == text


def make() -> None:
    """Make the environment, or bring it up to date."""
    base, pins = TOOL / "stamp-base", TOOL / "stamp-pins"
    python = getattr(sys, "_base_executable", sys.executable)
    interpreter = f"{sys.version}\n{python}\n{ROOT}\npip {ensurepip.version()}\n"
    wanted = hashlib.sha256((ROOT / "constraints.txt").read_bytes()).hexdigest()
    if has(base, interpreter) and has(pins, wanted):
        return
    print(f"== {TOOL.relative_to(ROOT)}: nox and uv are installed", file=sys.stderr, flush=True)
    if not has(base, interpreter):
        for path in ENVIRONMENTS.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        venv.create(TOOL, with_pip=True)
        base.write_text(interpreter, encoding="utf-8")
    pip = [str(TOOL / "bin" / "python"), "-m", "pip", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--constraint", str(ROOT / "constraints.txt"), "nox", "uv"], check=True)
    pins.write_text(wanted, encoding="utf-8")


def main() -> None:
    """Make the environment, and become tools/sessions.py in it."""
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    (ENVIRONMENTS.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    with open(ENVIRONMENTS / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once: the second waits
        try:
            make()
        except subprocess.CalledProcessError as error:
            sys.exit(f"error: nox and uv could not be installed in {TOOL} (exit status {error.returncode})")
    python = str(TOOL / "bin" / "python")
    os.execv(python, [python, str(ROOT / "tools" / "sessions.py"), *sys.argv[1:]])


if __name__ == "__main__":
    main()
