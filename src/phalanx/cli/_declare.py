"""How an option is declared: once, with all that is to be known of it.

A class of options (a `Declared`) has a declaration for each. Of the class, the attribute is the declaration; of an
instance, the typed value. The command line is made from it here (`click_options`); the help's sections, job files and
the tables of the documentation are made from it elsewhere.
"""

from __future__ import annotations

import os
from typing import Generic, TypeVar, overload

import click
from click.core import ParameterSource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from typing import Any, Protocol, Self

    class Job(Protocol):
        """A job file that was read: see `phalanx.cli._job_file`."""

        values: dict[str, Any]

        script: str | None
        args: tuple[str, ...]
        env: dict[str, str]
        left_out: list[str]

        def where(self, *path: str) -> str: ...


T = TypeVar("T")

WORKERS, RESTARTS, LOGS, CONSOLE = "Workers", "Restarts", "Log files", "What the console shows"
TIMERS, END, PLACEMENT, MACHINES = "Timers", "The end", "Placement", "Machines"
SECTIONS = (WORKERS, RESTARTS, LOGS, CONSOLE, TIMERS, END, PLACEMENT, MACHINES)
"""The headings of the help, in its order."""

TEXT, WHOLE, NUMBER, LIST = (str,), (int,), (int, float), (list, str, int)
"""Types that a value can have in a job file."""

_JOB, _GIVEN, _ALONE = "phalanx.cli.job", "phalanx.cli.given", "phalanx.cli.alone"


class Option(Generic[T]):
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
        torchrun: Its name in torchrun; "": torchrun has none.
        written: The types that a value can have in a job file.
        shows_default: Whether the help names the default, if there is one.
        paths: Of what is a path in it, the names of settings (``ca=FILE``); "": the value itself is one. A job file can
            have ``~`` and variables there.
    """

    name = ""

    def __init__(
        self,
        read: Callable[[Any], T],
        *names: str,
        sentence: str,
        default: str | None,
        section: str | None = None,
        kind: click.ParamType[Any] | None = None,
        metavar: str | None = None,
        variables: Sequence[str] = (),
        torchrun: str = "",
        written: tuple[type, ...] = TEXT,
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
        self.torchrun = torchrun
        self.written = written
        self.shows_default = shows_default and bool(default)
        self.paths = paths

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Self | T:
        """Return the declaration. The value is in the instance, where Python finds it first."""
        if instance is None:
            return self
        raise AttributeError(self.name)

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


class Maybe(Option[T | None]):
    """The declaration of an option without a default: its value can be None."""

    def __init__(self, read: Callable[[Any], T], *names: str, sentence: str, **settings: Any) -> None:
        super().__init__(read, *names, sentence=sentence, default=None, **settings)


class Flag(Option[bool]):
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


class Many(Option[list[T] | None]):
    """The declaration of an option that can be given again, and adds to what was selected before.

    ``read`` returns what one text selects; the value is a list of all of it, each once.
    """

    def __init__(self, read: Callable[[str], Iterable[T]], *names: str, sentence: str, **settings: Any) -> None:
        self._read_one = read
        super().__init__(
            self._read_all, *names, sentence=sentence, default=None, kind=_Each(), written=LIST, **settings
        )

    def _read_all(self, texts: Sequence[str]) -> list[T] | None:
        found = [self._read_one(text) for text in texts]
        return [*dict.fromkeys(item for items in found for item in items)] if found else None

    def given(self, written: Any) -> Any:
        """See `Option`."""
        return tuple(map(str, written if isinstance(written, list) else [written]))

    def settings(self) -> dict[str, Any]:
        """See `Option`."""
        return {"multiple": True, "type": self.kind}


class _Each(click.types.StringParamType):
    """The value of an option that can be given again; in the environment, one a line: patterns have spaces in them."""

    def split_envvar_value(self, rv: str) -> list[str]:
        """See `click.ParamType`."""
        return [line for line in rv.split("\n") if line]


class Declared:
    """The base of classes of options. An instance is frozen, and has a value for each option.

    Args of a class:
        section: The heading below which the help has those of its options that name none.
    """

    def __init_subclass__(cls, section: str = "") -> None:
        for declared in vars(cls).values():
            if isinstance(declared, Option) and declared.section is None:
                declared.section = section

    def __init__(self, **values: object) -> None:
        names = [declared.name for declared in declarations(type(self))]
        if sorted(values) != sorted(names):
            raise TypeError(f"{type(self).__name__}: expected {', '.join(names)}; got {', '.join(values)}")
        vars(self).update((name, values[name]) for name in names)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name!r} cannot be set")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]  # values can be lists

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def declarations(kind: type[Declared]) -> list[Option[Any]]:
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


def given(ctx: click.Context, declared: Option[Any]) -> Any:
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
