"""Job files: the options of `phalanx run` in a file, with the script, its arguments and variables for its workers.

Owns the reading of the file, the types in it, and the line of each key. What a value means is the option's business:
see `phalanx.cli._declare`. Loaded only for ``-f``.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from string import Template
from types import MappingProxyType
from typing import Any, NoReturn

import click

from phalanx._base import files
from phalanx._run.worker_env import worker_env
from phalanx.cli._commands import meant
from phalanx.cli._declare import LEFT_OUT, Declared, Option, declarations

MOST_BYTES = 1 << 20
"""The size that a job file may have."""

_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a string", list: "a list of strings",
    dict: "a table of variables, below [env]",
}  # fmt: skip
_KINDS: dict[type, str] = {list: "a list", dict: "a table"}
_MOST = 1 << 63  # TOML's integers have 64 bits
_LOCAL_RANK = "local_rank"  # of which the script's name can have the number of
_FREE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}  # of which workers get what is set
_OURS = {"TORCHELASTIC_ERROR_FILE", "PHALANX_GROUP", "PHALANX_TIMERS", "PHALANX_STOP_FLAG"}
_PIECE = re.compile(
    r'''"""(?:\\.|[^"\\]|"(?!""))*"{3,5}|\'\'\'(?:[^\']|\'(?!\'\'))*\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\''''
    r"""|\#[^\n]*|\n|[\[{]|[\]}]|[^"'\#\n\[\]{}]+""",
    re.DOTALL,
)
"""What a valid file is made of, as far as it says where statements end."""


class JobFile:
    """A job file that was read. Raises click.UsageError: what is wrong, with the line.

    ``kind``: the class of the options. ``absent``: what to say of options that are not there, by their long names.
    """

    def __init__(self, path: str, text: str, kind: type[Declared], absent: Mapping[str, str]) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        """The values of options by the names of their declarations, as click has them from a command line."""
        self.script: str | None = None
        self.args: tuple[str, ...] = ()
        self.env: dict[str, str] = {}
        self.left_out: list[str] = []
        """Variables of which the values were left out when the file was made. They are in the environment."""
        self._text = text
        self._keys: dict[str, str] = {}
        self._absent = absent
        self._known = {
            name.lstrip("-"): declared for declared in declarations(kind) for name in declared.longs
        }  # fmt: skip
        try:
            document = tomllib.loads(text)
        except RecursionError:
            self._refuse("values are nested too deep")
        except ValueError as error:
            self._refuse(_of_toml(str(error), text))
        for key, value in document.items():
            self._take(key, value)
        if "args" in document and "script" not in document:
            self._fail(("args",), 'there is no script that they are for; add script = "train.py"')
        named = re.findall(rf"^{re.escape(LEFT_OUT)}(\w+)$", text, re.MULTILINE)
        self.left_out = [name for name in named if name not in self.env]
        if missing := [name for name in self.left_out if name not in os.environ]:
            self._refuse(f"there was a secret in {' and in '.join(missing)}, which is left out: set it again")

    def where(self, *path: str) -> str:
        """Return the path and the line of an option, by the name of its declaration; or of another key, by its path."""
        name, *rest = path
        return self._at(self._keys.get(name, name), *rest)

    def _take(self, key: str, value: Any) -> None:
        name = key.replace("_", "-")
        if key == "script":
            script = self._checked(("script",), value, (str,))
            self.script = self._path("script", script, {_LOCAL_RANK: f"${{{_LOCAL_RANK}}}"})
        elif key == "args":
            self.args = tuple(self._strings(("args",), self._checked(("args",), value, (list,))))
        elif key == "env":
            for variable, text in self._checked(("env",), value, (dict,)).items():
                self.env[variable] = self._variable(variable, text)
        elif name in self._known:
            self._take_option(key, self._known[name], value)
        elif value is not False or f"--{name}" not in self._absent:  # the files of older runs have every flag
            self._refuse_key(key, value)

    def _take_option(self, key: str, declared: Option, value: Any) -> None:
        if declared.name in self._keys:
            first = self._keys[declared.name]
            self._fail((key,), f"it is {first} ({self._at(first)}) again; leave one of them out")
        self._checked((key,), value, declared.written)
        if isinstance(value, list):
            value = self._strings((key,), value)
        self._keys[declared.name] = key
        value = declared.given(value)
        if declared.paths:
            value = declared.with_paths(value, functools.partial(self._path, key))
        self.values[declared.name] = value

    def _path(self, key: str, text: str, kept: Mapping[str, str] = MappingProxyType({})) -> str:
        """Return a path with the home folder for a ``~`` at its start, and the values of variables for their names."""
        head = text.partition("/")[0] if text.startswith("~") else ""
        if head and (home := os.path.expanduser(head)) == head:
            why = f"there is no user {head[1:]!r}" if head != "~" else "there is no home folder"
            self._fail((key,), f"{text!r}: {why}; ./{head} is a file of that name")
        try:
            rest = Template(text[len(head) :]).substitute({**os.environ, **kept})
        except KeyError as error:
            self._fail((key,), f"{text!r}: the variable {error.args[0]} is not set; $$ stands for the character $")
        except ValueError:
            self._fail((key,), f"{text!r}: a $ in it begins no variable; $$ stands for the character itself")
        return home + rest if head else rest

    def _checked(self, path: tuple[str, ...], value: Any, kinds: tuple[type, ...]) -> Any:
        """Return a value of one of these types."""
        if type(value) not in kinds:
            right = " or ".join(_WORDS[kind] for kind in kinds if not (kind is int and float in kinds))
            self._fail(path, f"expected {right}, found {_shown(value)}")
        if isinstance(value, str) and "\0" in value:
            self._fail(path, "a null character cannot be part of it")
        if isinstance(value, int) and not -_MOST <= value < _MOST:
            self._fail(path, "the number is too large")
        return value

    def _strings(self, path: tuple[str, ...], values: list[Any]) -> list[str]:
        for value in values:
            if type(value) not in (str, int, float):
                self._fail(path, f"expected a list of strings, found {_shown(value)} in it")
            self._checked(path, value, (str, int, float))
        return [str(value) for value in values]

    def _variable(self, name: str, value: Any) -> str:
        """Return the value of a variable for the workers."""
        path = ("env", name)
        if name.replace("_", "-") in self._known and name.islower():
            self._fail(path, "it is an option, not a variable; put it above [env]")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            self._fail(path, "it is no name of a variable: letters, digits and _")
        made = worker_env(0, 1, role="", run_id="", master_addr="", master_port=0)
        if name in _OURS or name in made.keys() - _FREE:
            option = name.lower().replace("_", "-")
            hint = f"; the option {option} says which" if name.startswith("MASTER_") else ""
            self._fail(path, f"each worker gets its own from phalanx run{hint}")
        return str(self._checked(path, value, (str, int, float)))

    def _refuse_key(self, key: str, value: Any) -> NoReturn:
        name = f"--{key.replace('_', '-')}"
        if name in self._absent:
            self._fail((key,), self._absent[name])
        if name in ("--job-file", "--dry-run", "--print-config"):
            self._fail((key,), "it is for the command line alone")
        if isinstance(value, dict):
            self._fail((key,), "there is no such table; options stand at the top, and variables below [env]")
        hint = meant(key.replace("_", "-"), [*self._known, "script", "args", "env"])
        self._fail((key,), f"there is no such option{hint}")

    def _at(self, *path: str) -> str:
        line = self._lines.get(path)
        return self.path if line is None else f"{self.path}, line {line}"

    def _fail(self, path: tuple[str, ...], why: str) -> NoReturn:
        raise click.UsageError(f"{self._at(*path)}: {'.'.join(path)}: {why}")

    def _refuse(self, why: str) -> NoReturn:
        raise click.UsageError(f"{self.path}{why if why.startswith(', line') else f': {why}'}") from None

    @functools.cached_property
    def _lines(self) -> dict[tuple[str, ...], int]:
        """The line in which each key stands first."""
        found: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        for line, statement in statements(self._text):
            named = [*_paths(tomllib.loads(statement))]
            if statement.startswith("["):
                table = max(named, key=len)
                named = [table[: count + 1] for count in range(len(table))]
            else:
                named = [(*table, *path) for path in named]
            for path in named:
                found.setdefault(path, line)
        return found


def read(path: str, kind: type[Declared], absent: Mapping[str, str]) -> JobFile:
    """Read a job file. Raises click.UsageError that says what is wrong, and in which line."""
    try:
        data = files.read(path, MOST_BYTES + 1, links=files.ANY_LINK)
    except files.UnfitError as error:
        raise click.UsageError(f"{path}: {error.strerror}; a job file is a regular file") from None
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{path or repr(path)}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MOST_BYTES:
        raise click.UsageError(f"{path}: a job file has {MOST_BYTES:,} bytes at most")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        msg = f"{path}, line {line}: expected UTF-8, found the byte 0x{data[error.start]:02x}"
        raise click.UsageError(msg) from None
    return JobFile(path, text.replace("\r\n", "\n"), kind, absent)


def statements(text: str) -> Iterator[tuple[int, str]]:
    r"""Yield the statements of a valid TOML document, each with the number of its first line.

    >>> list(statements("# a job\na = [\n1]\n\n[env]\nb = '#'"))
    [(2, 'a = [\n1]'), (5, '[env]'), (6, "b = '#'")]
    """
    line, first, depth, parts = 1, 1, 0, list[str]()
    for found in _PIECE.finditer(text):
        piece = found[0]
        if piece == "\n" and not depth:
            if parts:
                yield first, "".join(parts).strip()
            parts = []
        elif parts or not (piece.isspace() or piece.startswith("#")):
            first = first if parts else line
            parts.append(piece)
            depth += (piece in "[{") - (piece in "]}")
        line += piece.count("\n")
    if parts:
        yield first, "".join(parts).strip()


def _paths(table: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the keys of a table, and those of the tables in it."""
    for key, value in table.items():
        yield (key,)
        for inner in [value, *(value if isinstance(value, list) else [])]:
            if isinstance(inner, dict):
                yield from ((key, *path) for path in _paths(inner))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return str(value) if abs(value) < _MOST else "a number"
    if isinstance(value, str):
        return repr(value if len(value) < 60 else f"{value[:60]}...")  # noqa: PLR2004 - enough to be recognised
    return _KINDS.get(type(value), "a date or a time")


def _of_toml(error: str, text: str) -> str:
    """Turn what the parser says into ``, line N: what``."""
    what, _, where = error.partition(" (at ")
    found = re.fullmatch(r"line (\d+), column (\d+)\)", where)
    line = found[0].removesuffix(")") if found else f"line {text.rstrip().count(chr(10)) + 1}"
    return f", {line}: {what[0].lower()}{what[1:]}"
