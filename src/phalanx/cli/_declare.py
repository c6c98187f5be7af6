"""How an option is declared: once, with all that is to be known of it.

A class of options (a `Declared`) has a declaration for each as an attribute. Here the command line (`click_options`)
and a job file of the options that hold (`as_job_file`) are made from it; elsewhere what reads job files, and the tables
of the documentation.
"""

from __future__ import annotations

import os
import re
from typing import Any

import click
from click.core import ParameterSource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from typing import Protocol

    from phalanx._run.config import RunConfig

    class Job(Protocol):
        """A job file that was read: see `phalanx.cli._job_file`."""

        values: dict[str, Any]

        script: str | None
        args: tuple[str, ...]
        env: dict[str, str]
        left_out: list[str]

        def where(self, *path: str) -> str: ...


WORKERS, RESTARTS, LOGS, CONSOLE = "Workers", "Restarts", "Log files", "What the console shows"
TIMERS, END, PLACEMENT, MACHINES = "Timers", "The end", "Placement", "Machines"
SECTIONS = (WORKERS, RESTARTS, LOGS, CONSOLE, TIMERS, END, PLACEMENT, MACHINES)
"""The headings of the help, in its order."""

TEXT, WHOLE, NUMBER, LIST = (str,), (int,), (int, float), (list, str, int)
"""Types that a value can have in a job file."""

_JOB, _GIVEN, _ALONE = "phalanx.cli.job", "phalanx.cli.given", "phalanx.cli.alone"


class Option:
    """The declaration of an option with a value. Its long name is that of the attribute, with dashes.

    Args:
        read: Returns the value, given what click's ``kind`` makes of the text. Raises ValueError.
        names: Its further names on the command line: a letter, another long name.
        section: The heading below which the help has it; "": it is not shown; None: that of the class.
        sentence: What the help says.
        default: The text that holds where none is given.
        kind: What click makes of the text, and completes it with; None: a string.
        metavar: What stands for the value in the help.
        variables: Environment variables that are read where neither ``PHALANX_NAME`` nor ``PET_NAME`` is set.
        written: The types that a value can have in a job file; None: lists where ``metavar`` is one, else texts.
        shows_default: Whether the help names the default, if there is one.
        paths: Of what is a path in it, the names of settings (``ca=FILE``); "": the value itself is one. A job file can
            have ``~`` and variables there.
    """

    name = ""

    def __init__(
        self,
        read: Callable[[Any], Any],
        *names: str,
        sentence: str,
        default: str | None,
        section: str | None = None,
        kind: click.ParamType[Any] | None = None,
        metavar: str | None = None,
        variables: Sequence[str] = (),
        written: tuple[type, ...] | None = None,
        shows_default: bool = True,
        paths: Collection[str] = (),
    ) -> None:
        self.read = read
        self.names = names
        self.section = section
        self.sentence = sentence
        self.default = default
        self.kind = kind
        self.metavar = metavar
        self.further = variables
        self.written = written or (LIST if (metavar or "").endswith(",...") else TEXT)
        self.shows_default = shows_default and bool(default)
        self.paths = paths

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @property
    def long(self) -> str:
        """The name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def longs(self) -> list[str]:
        """All its long names."""
        return [self.long, *(name for name in self.names if name.startswith("--"))]

    @property
    def variables(self) -> list[str]:
        """The environment variables that set it: one that stands before another is heeded first."""
        upper = self.name.upper()
        return [f"PHALANX_{upper}", f"PET_{upper}", *self.further]

    def default_value(self) -> Any:
        """Return the value that holds where none is given."""
        return None if self.default is None else self.read(self.default)

    def given(self, written: Any) -> Any:
        """Return a job file's value as the command line would have it."""
        return ",".join(map(str, written)) if isinstance(written, list) else str(written)

    def with_paths(self, text: str, change: Callable[[str], str]) -> str:
        """Return a text of the option with the paths in it changed."""
        if not self.paths or "" in self.paths:
            return change(text) if self.paths else text
        parts = ([word.strip() for word in part.partition("=")] for part in text.split(","))
        return ",".join(f"{name}{is_}{change(value) if name in self.paths else value}" for name, is_, value in parts)

    def settings(self) -> dict[str, Any]:
        """What click is told beside what all options have in common."""
        return {"default": self.default, "show_default": self.shows_default, "type": self.kind or click.STRING}


class Maybe(Option):
    """The declaration of an option without a default: its value can be None."""

    def __init__(self, read: Callable[[Any], Any], *names: str, sentence: str, **settings: Any) -> None:
        super().__init__(read, *names, sentence=sentence, default=None, **settings)


class Flag(Option):
    """The declaration of an option without a value."""

    def __init__(self, *names: str, sentence: str, **settings: Any) -> None:
        super().__init__(bool, *names, sentence=sentence, default=None, written=(bool,), **settings)

    def default_value(self) -> bool:
        """See `Option`."""
        return False

    def given(self, written: Any) -> Any:
        """See `Option`."""
        return written

    def settings(self) -> dict[str, Any]:
        """See `Option`."""
        return {"is_flag": True}


class Many(Option):
    """The declaration of an option that can be given again, and adds to what was selected before.

    ``read`` returns what one text selects; the value is a list of all of it, each once.
    """

    def __init__(self, read: Callable[[Any], Iterable[Any]], *names: str, sentence: str, **settings: Any) -> None:
        self._read_one = read
        super().__init__(
            self._read_all, *names, sentence=sentence, default=None, kind=_Each(), written=LIST, **settings
        )

    def _read_all(self, texts: Sequence[Any]) -> list[Any] | None:
        found = [self._read_one(text) for text in texts]
        return [*dict.fromkeys(item for items in found for item in items)] if found else None

    def given(self, written: Any) -> Any:
        """See `Option`."""
        return tuple(map(str, written if isinstance(written, list) else [written]))

    def settings(self) -> dict[str, Any]:
        """See `Option`."""
        return {"multiple": True, "type": self.kind}


class Pairs(Many):
    """The declaration of an option with two values, that can be given again.

    In a job file and in the environment, each pair is one text, with a space between the two. ``read`` returns what one
    pair selects.
    """

    def given(self, written: Any) -> Any:
        """See `Option`."""
        return tuple(_pair(text) for text in super().given(written))

    def settings(self) -> dict[str, Any]:
        """See `Option`."""
        return {"multiple": True, "nargs": 2, "type": _EachPair()}


class _EachPair(click.types.StringParamType):
    """One of two values; in the environment, a pair a line."""

    def split_envvar_value(self, rv: str) -> list[str]:
        """See `click.ParamType`."""
        return [part for line in rv.split("\n") if line for part in _pair(line)]


def _pair(text: str) -> tuple[str, str]:
    first, _, second = text.strip().partition(" ")
    return first, second.strip()


class _Each(click.types.StringParamType):
    """The value of an option that can be given again; in the environment, one a line: patterns have spaces in them."""

    def split_envvar_value(self, rv: str) -> list[str]:
        """See `click.ParamType`."""
        return [line for line in rv.split("\n") if line]


class Declared:
    """The base of classes of options.

    Args of a class:
        section: The heading below which the help has those of its options that name none.
    """

    def __init_subclass__(cls, section: str = "") -> None:
        for declared in vars(cls).values():
            if isinstance(declared, Option) and declared.section is None:
                declared.section = section


def declarations(kind: type[Declared]) -> list[Option]:
    """List the declarations of a class, those of its bases first, as the bases stand in its header."""
    bases = (base for base in kind.__bases__ if issubclass(base, Declared))
    found = {declared.name: declared for base in bases for declared in declarations(base)}
    found |= {name: value for name, value in vars(kind).items() if isinstance(value, Option)}
    return list(found.values())


def sections(kind: type[Declared]) -> list[tuple[str, list[str]]]:
    """Return the sections of the help: a heading, and the long names below it."""
    every = declarations(kind)
    named = [(heading, [each.long for each in every if each.section == heading]) for heading in SECTIONS]
    return [(heading, names) for heading, names in named if names]


def click_options(kind: type[Declared]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of a class. The command takes their values as keyword arguments."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for declared in reversed(declarations(kind)):
            command = click.option(
                *(name for name in declared.names if not name.startswith("--")),
                *declared.longs,
                declared.name,
                cls=_Param,
                envvar=declared.variables,
                show_envvar=False,
                metavar=declared.metavar,
                hidden=not declared.section,
                help=declared.sentence,
                callback=reading(declared.read),
                **declared.settings(),
            )(command)
        return command

    return decorate


def reading(read: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that reads an option's value, if there is one, and says in click's way what is wrong with it."""

    def callback(_ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else read(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


class _Param(click.Option):
    """An option whose value a job file can set: the command line goes before it, and it before the environment."""

    def consume_value(self, ctx: click.Context, opts: Any) -> Any:
        """See `click.Parameter`."""
        value, source = super().consume_value(ctx, opts)
        job: Job | None = ctx.meta.get(_JOB)
        name = self.name or ""
        if job is not None and source is not ParameterSource.COMMANDLINE and name in job.values:
            value, source = job.values[name], ParameterSource.DEFAULT_MAP
        ctx.meta.setdefault(_GIVEN, {})[name] = value
        return value, source

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """See `click.Parameter`."""
        return None if ctx.meta.get(_ALONE) else super().value_from_envvar(ctx)

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """See `click.Parameter`."""
        value = super().resolve_envvar_value(ctx)
        if (self.name or "").endswith("_port") and str(value).startswith("tcp://"):  # of a service `phalanx-master`:
            return None  # so Kubernetes has it
        return value


def ignore_environment(ctx: click.Context) -> None:
    """Have the options that are read from now on heed no environment variable."""
    ctx.meta[_ALONE] = True


def set_job(ctx: click.Context, job: Job) -> None:
    """Have the options that are read from now on heed a job file."""
    ctx.meta[_JOB] = job


def job_of(ctx: click.Context) -> Job | None:
    """Return the job file that the options heed."""
    found: Job | None = ctx.meta.get(_JOB)
    return found


def given(ctx: click.Context, declared: Option) -> Any:
    """Return what click had of an option before it was read: a text, a flag's bool, or a tuple of texts."""
    if ctx.get_parameter_source(declared.name) is ParameterSource.DEFAULT:
        return declared.default
    return ctx.meta[_GIVEN][declared.name]


def typed(ctx: click.Context) -> set[str]:
    """Return the names of the options that stand on the command line, and not in a job file or the environment."""
    names = (param.name or "" for param in ctx.command.params)
    return {name for name in names if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def origin(ctx: click.Context, param: click.Parameter) -> str:
    """Where the value of an option that nobody has typed comes from; "": it was typed, or is the default."""
    source = ctx.get_parameter_source(param.name or "")
    job = job_of(ctx)
    if source is ParameterSource.DEFAULT_MAP and job is not None:
        return f"in {job.where(param.name or '')}"
    if source is not ParameterSource.ENVIRONMENT:
        return ""
    names: Iterator[str] = (name for name in param.envvar or () if os.environ.get(name))
    return f"{next(names)} in the environment"


LEFT_OUT = "# left out, a secret: "
"""What stands before the name of a variable in a job file that was made without its value."""

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_WIDTH = 40
_LINE = "command line"
_SECRET = re.compile(
    r"SECRET|PASSW(?:OR)?D|PASSPHRASE|(?:^|_)(?:API|AUTH)?(?:TOKEN|KEYS?|CREDENTIALS?)(?:_|$)|_(?:PWD|PASS|PAT)$",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"_(?:FILE|PATH|DIR)$", re.IGNORECASE)  # it says where one is
_PASSWORD_IN_URL = re.compile(r"://[^/?#\s:@]*:[^/?#\s@]+@")


def quoted_path(path: str) -> str:
    """Return a path as a job file has it, where ``~`` and ``$`` have a meaning.

    >>> quoted_path("~/a$b"), quoted_path("worker_${local_rank}.py")
    ('./~/a$$b', 'worker_${local_rank}.py')
    """
    text = path.replace("$", "$$").replace("$${local_rank}", "${local_rank}")
    return f"./{text}" if text.startswith("~") else text


def is_secret(name: str, text: str = "") -> bool:
    """Whether a variable's value is a secret, by its name; or has one, as a URL with a password.

    >>> [name for name in ("HF_TOKEN", "PGPASSWORD", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY") if not is_secret(name)]
    []
    >>> [name for name in ("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PWD", "TLS_KEY_FILE") if is_secret(name)]
    []
    >>> is_secret("STORE", "redis://:hunter2@store:6379/0"), is_secret("STORE", "http://store:80/a@b")
    (True, False)
    """
    is_named = _SECRET.search(name) and not _NO_SECRET.search(name)
    return bool(is_named or _PASSWORD_IN_URL.search(text))


def as_job_file(
    ctx: click.Context, kind: type[Declared], config: RunConfig, secrets: Iterable[str] | None = None
) -> str:
    """Return a job file that says what the options say, and in comments who has said it. Raises UsageError.

    ``secrets``: None: all is there. Else variables of ``[env]`` that are secrets are left out, and a comment names each
    of them, and these. So it does in any case with those that the job file itself has left out.
    """
    lines = ["# What phalanx run was asked for: phalanx run -f FILE reads it.", ""]
    job = job_of(ctx)
    typed = job is None or ctx.params["script"] is not None
    for key, said in (("script", _string(quoted_path(config.script))), ("args", _list(config.args))):
        lines.append(_commented(f"{key} = {said}", _LINE if typed or job is None else job.where(key)))
    for heading in (*SECTIONS, ""):
        every = [declared for declared in declarations(kind) if declared.section == heading]
        lines += ["", f"# {heading or 'Accepted, without effect'}"]
        unset = []
        for declared in every:
            if (text := _text(ctx, declared)) is None:
                unset.append(declared.long[2:])
            else:
                lines.append(_commented(f"{declared.long[2:]} = {text}", _said(ctx, declared)))
        lines += [f"# not set: {', '.join(unset)}"] if unset else []
    hidden = [] if secrets is None else [name for name, text in config.env.items() if is_secret(name, text)]
    shown = {name: text for name, text in config.env.items() if name not in hidden}
    before = [] if job is None else job.left_out
    if left := dict.fromkeys([*(secrets or []), *hidden, *before]):
        lines += ["", *(f"{LEFT_OUT}{name}" for name in left)]
    if shown and job is not None:
        lines += ["", "[env]", *(_commented(f"{name} = {_string(text)}", job.where("env", name))
                                 for name, text in shown.items())]  # fmt: skip
    return "\n".join(lines) + "\n"


def _said(ctx: click.Context, declared: Option) -> str:
    """Who has said it."""
    if ctx.get_parameter_source(declared.name) is ParameterSource.COMMANDLINE:
        return _LINE
    param = next(param for param in ctx.command.params if param.name == declared.name)
    return origin(ctx, param).removeprefix("in ").removesuffix(" in the environment") or "default"


def _text(ctx: click.Context, declared: Option) -> str | None:
    """Return the value as a job file has it; None: there is none."""
    if isinstance(declared, Flag):
        return str(bool(ctx.params[declared.name])).lower()
    value = given(ctx, declared)
    if value is None or ctx.params[declared.name] is None:
        return None
    if isinstance(value, (tuple, list)):
        return _list(each if isinstance(each, str) else " ".join(each) for each in value)
    if int in declared.written and (declared.written == WHOLE or re.fullmatch(r"0|-?[1-9]\d{0,17}", value)):
        return str(int(value))
    if float in declared.written and (str not in declared.written or re.fullmatch(r"\d{1,9}\.\d{1,9}", value)):
        return repr(float(value))
    return _string(declared.with_paths(value, quoted_path))


def _list(values: Iterable[str]) -> str:
    return f"[{', '.join(map(_string, values))}]"


def _string(text: str) -> str:
    """Write a string of TOML. Raises UsageError for one that no job file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        msg = f"--print-config: {text!r} is not UTF-8, and no job file can hold it"
        raise click.UsageError(msg) from None
    escaped = "".join(
        _ESCAPES.get(char) or (char if char >= " " and char != "\x7f" else f"\\u{ord(char):04x}") for char in text
    )
    return f'"{escaped}"'


def _commented(text: str, said: str) -> str:
    printed = "".join(char if char.isprintable() else "?" for char in said)  # a path can have any characters
    return f"{text:<{_WIDTH}} # {printed}"
