"""What the Makefile's targets run, as sessions of nox: `make help` lists the targets, `nox --list` the sessions.

Each session has an environment of its own, with the tree in it as an editable installation and the rest at the versions
that constraints.txt pins (`make constraints` renews them). uv installs: a second, where pip takes half a minute.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nox
from python_discovery import get_interpreter

SUPPORTED = ("3.11", "3.12", "3.13", "3.14", "3.15")
TYPED = ("src", "tests", "examples", "benchmarks", "tools", "noxfile.py")
SOURCES = (*TYPED, "docs")  # ruff looks at the Python in pages, too

TORCH = "torch==2.13.0"
TORCH_PYTHON = "3.11"
"""Where a wheel of it is likeliest to be found."""
TORCH_TOOLS = ("accelerate==1.15.0", "lightning-fabric==2.6.6", "lightning-utilities==0.15.3")
"""Tools that call torchrun's module. Not in constraints.txt: they ask for torch, whose builds can be huge."""

FLOOR_TESTS = (
    "test_command_line",  # click
    "test_run",  # click
    "test_by_value",  # cloudpickle
    "test_search",  # re2
    "test_records",  # msgspec
    "test_runs",  # rich
    "test_stack_command",  # py-spy
    "test_products",  # jinja2
    "cli/test_metrics",  # prometheus-client
    "test_serve",  # starlette, uvicorn
)
"""The tests of what the dependencies do for Phalanx, by their files, wherever under `tests` those stand."""

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ("quick", "lint")
os.environ["NOX_ENABLE_STALENESS_CHECK"] = "1"  # another interpreter of that version: the environment is made again
if Path("/etc/ssl/certs/ca-certificates.crt").exists():
    os.environ.setdefault("UV_SYSTEM_CERTS", "1")  # as pip does: there are indexes with a certificate of their own

CONSTRAINTS = ("--constraints", "constraints.txt", "--build-constraints", "constraints.txt")


def install(session: nox.Session, *groups: str) -> None:
    """Bring the environment up to date: the tree, and the dependency groups."""
    session.install(*CONSTRAINTS, "--requirements", "requirements.txt", *(f"--group={group}" for group in groups))


def run_tests(session: nox.Session, *arguments: str) -> None:
    """Run pytest with these arguments, then those of the command line, which may choose tests that are not here."""
    session.run(
        "python",
        "-m",
        "pytest",
        *arguments,
        *session.posargs,
        # The tests start thousands of interpreters: none is to compile what another one has compiled.
        env={"PYTHONDONTWRITEBYTECODE": None},
        success_codes=[0, 5] if session.posargs else [0],
        interrupt_timeout=10,
    )


@nox.session
def demo(session: nox.Session) -> None:
    """Train on the handwritten digits with 4 ranks."""
    install(session)
    session.run("phalanx", "run", "--nproc-per-node", "4", "examples/digits.py")


@nox.session
def quick(session: nox.Session) -> None:
    """The tests that take next to no time, on the Python at hand, two at a time."""
    install(session, "test")
    run_tests(session, "-n", "2", "-m", "not torch and not long and not slow")


@nox.session
def tests(session: nox.Session) -> None:
    """The tests on the Python at hand, without those that take long or need torch."""
    install(session, "test")
    if not session.posargs:
        session.log("left to `make matrix`: Slurm, long cuts of the network, thousands of seeds, torch, other Pythons")
    run_tests(session, "-n", "4", "-m", "not torch and not long")  # four: a good part of it is waiting


@nox.session(name="long")
def take_long(session: nox.Session) -> None:
    """The tests that take long, but for those with torch, on the Python at hand."""
    install(session, "test")
    run_tests(session, "-m", "long and not torch")


@nox.session(python=SUPPORTED)
def pythons(session: nox.Session) -> None:
    """The tests of what differs between Pythons, on each that is here."""
    install(session, "test")
    run_tests(session, "-m", "each_python and not torch")


@nox.session(
    name="torch", python=None if os.environ.get("PYTHON") or not get_interpreter(TORCH_PYTHON) else TORCH_PYTHON
)
def beside_torch(session: nox.Session) -> None:
    """The tests that need torch."""
    install(session, "test")
    install_torch(session)
    run_tests(session, "-n", "2", "-m", "torch")


def install_torch(session: nox.Session) -> None:
    """Install torch for the compatibility tests, if a build for the CPU can be had here.

    A build for CUDA is left alone: it is huge, and cannot be imported without gigabytes more. So the metadata is asked
    first, and torch and the tools are installed without their dependencies; of those the group `torch` has the few that
    they need. It is pip that is asked, not uv: pip's configuration names the folder or index that has builds for the
    CPU. Whoever names a version (``TORCH=2.15.0``) gets it, with all that it asks for.
    """
    named = os.environ.get("TORCH", "")
    if named == "no":
        return session.warn("torch tests are skipped: TORCH=no")
    python = f"{session.virtualenv.bin}/python"
    wanted = f"torch=={named}" if named else TORCH
    there = f"import importlib.metadata as m, sys; sys.exit('torch==' + m.version('torch').split('+')[0] != {wanted!r})"
    if subprocess.run([python, "-c", there], check=False, stderr=subprocess.DEVNULL).returncode == 0:
        return None
    if named:
        session.install(*CONSTRAINTS, "--group=torch", wanted)
        return session.install("--no-deps", *TORCH_TOOLS)
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        python,
        "install",
        "-qq",
        "--retries=1",
    )
    ask = ("--dry-run", "--report=-", "--no-deps", "--only-binary=:all:", TORCH)
    asked = subprocess.run([*pip, *ask], check=False, capture_output=True, text=True)
    if asked.returncode or re.search(r'"(nvidia|cuda)-', asked.stdout):
        return session.warn(f"torch tests are skipped: no build of {TORCH} for this Python and the CPU can be had here")
    session.install(*CONSTRAINTS, "--group=torch")
    session.install("--no-deps", json.loads(asked.stdout)["install"][0]["download_info"]["url"])
    if subprocess.run([python, "-c", "import torch"], check=False).returncode:
        session.run_install("uv", "pip", "uninstall", "torch")
        return session.warn(f"torch tests are skipped: the {TORCH} that is here cannot be imported")
    return session.install("--no-deps", *TORCH_TOOLS)


@nox.session
def floors(session: nox.Session) -> None:
    """The tests of what the dependencies do, with the lowest versions that pyproject.toml allows."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    extras = ("re2", "metrics", "web")
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    direct = {re.split(r"[^\w-]", line)[0] for line in lines}
    pins = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    # Not in create_tmp(), which would make its folder the tests' TMPDIR.
    others = Path(session.cache_dir, "floors-constraints.txt")
    others.write_text("\n".join(pin for pin in pins if pin.partition("==")[0] not in direct), encoding="utf-8")
    lowest = ("--resolution", "lowest-direct", "--constraints", str(others), *CONSTRAINTS[2:])
    named = (f"--extra={extra}" for extra in extras)
    session.install(*lowest, "--requirements", "pyproject.toml", *named, "--group=floors")
    session.install("--no-deps", *CONSTRAINTS[2:], "--requirements", "requirements.txt")
    files = [str(path) for name in FLOOR_TESTS for path in Path("tests").rglob(f"{name}.py")]
    if len(files) != len(FLOOR_TESTS):
        session.error(f"of {', '.join(FLOOR_TESTS)} there are only {', '.join(files)}")
    session.run("uv", "pip", "freeze", external=True)
    session.run("python", "-m", "pytest", "-m", "not torch", *files, env={"PYTHONDONTWRITEBYTECODE": None})


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy and shellcheck; or the steps of these that are named."""
    install(session, "test", "lint")
    steps = {
        "ruff-check": ("ruff", "check", *SOURCES),
        # A rule of ruff's preview: a file that is opened without an encoding warns under PYTHONWARNDEFAULTENCODING.
        "ruff-encodings": ("ruff", "check", "--preview", "--select=PLW1514", "src"),
        "ruff-format": ("ruff", "format", "--check", *SOURCES),
        "mypy": ("mypy", *TYPED),
        "shellcheck": ("shellcheck", "--enable=all", "--severity=style", *shell_scripts()),
    }
    for name in session.posargs or steps:
        session.run(*steps[name])


def shell_scripts() -> list[str]:
    """The files of the tree that a shell runs, by their first lines.

    Without `__pycache__`: the tests run at the same time, and interpreters write and rename files there.
    """
    found = []
    for folder, folders, files in os.walk("."):
        folders[:] = [name for name in folders if (not name.startswith(".") or name == ".ci") and name != "__pycache__"]
        for name in files:
            path = Path(folder, name)
            with path.open("rb") as file:
                if re.match(rb"#!.*\b(ba|da|k)?sh\b", file.read(64)):
                    found.append(str(path))
    return found


@nox.session(name="format")
def rewrite(session: nox.Session) -> None:
    """Let ruff rewrite what it can."""
    install(session, "lint")
    session.run("ruff", "check", "--fix", *SOURCES, success_codes=[0, 1])
    session.run("ruff", "format", *SOURCES)


@nox.session
def hooks(session: nox.Session) -> None:
    """Let git run what `make lint` runs, before each commit."""
    session.install(*CONSTRAINTS, "--group=hooks")
    session.run("pre-commit", *(session.posargs or ["install"]))


@nox.session
def package(session: nox.Session) -> None:
    """Build wheel and sdist, look at what is in them, and use the wheel on each Python, where nothing else is."""
    session.install(*CONSTRAINTS, "--group=package")
    with tempfile.TemporaryDirectory() as place:
        python = f"{place}/empty/bin/python"
        program = str(Path("tools/package.py").resolve())
        build = ("uv", "build", *CONSTRAINTS[2:], "--out-dir")
        session.run(*build, f"{place}/dist")  # the sdist, and the wheel from it
        session.run(*build, f"{place}/direct", "--wheel")
        session.run("python", "-I", program, "contents", f"{place}/dist", f"{place}/direct")
        wheels = [str(path) for path in Path(place, "dist").glob("*.whl")]  # none while sessions are only installed
        session.run("twine", "check", "--strict", *wheels, *map(str, Path(place, "dist").glob("*.tar.gz")))
        session.run("check-wheel-contents", *wheels)
        pythons = [f"{session.virtualenv.bin}/python"]
        if not os.environ.get("PYTHON"):
            others = {version: get_interpreter(version) for version in SUPPORTED}
            others.pop(f"{sys.version_info.major}.{sys.version_info.minor}", None)
            pythons += [found.executable for found in others.values() if found is not None]
        for path in pythons:
            session.run("uv", "venv", "--clear", "--python", path, f"{place}/empty")
            session.run("uv", "pip", "install", "--python", python, *CONSTRAINTS[:2], *wheels)
            with session.chdir(place):
                session.run(python, "-I", program, "use", external=True)
                session.run("python", "-I", program, "types", python)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation's site; what is wrong with it fails."""
    if not Path("mkdocs.yml").exists():
        session.skip("there is no mkdocs.yml")
    install(session, "docs")
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def transcripts(session: nox.Session) -> None:
    """Run the documentation's transcripts anew."""
    install(session, "test")
    session.run("python", "tools/transcripts.py", *session.posargs)


@nox.session
def stress(session: nox.Session) -> None:
    """The fault injector, see tests/injector; and a hundred jobs of many machines to which things happen at random."""
    install(session, "test")
    session.run("python", "-m", "tests.injector", *session.posargs)
    session.run("python", "-m", "tests.support.shaken_jobs", "0", "100")


@nox.session
def bench(session: nox.Session) -> None:
    """The benchmarks."""
    install(session, "bench")
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def constraints(session: nox.Session) -> None:
    """Pin the newest versions that are to be had."""
    groups = nox.project.load_toml("pyproject.toml")["dependency-groups"]
    session.run(
        *("uv", "pip", "compile", "--quiet", "--upgrade", "--universal", "--python-version", SUPPORTED[0]),
        *("--custom-compile-command", "make constraints", "--annotation-style", "line", "-o", "constraints.txt"),
        *("--all-extras", *(f"--group={group}" for group in groups), "pyproject.toml"),
    )
