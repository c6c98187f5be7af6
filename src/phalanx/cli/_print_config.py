"""The options that hold, as a job file: for ``phalanx run --print-config``, and for `job.toml` in a run's folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import click
from click.core import ParameterSource

from phalanx.cli._declare import SECTIONS, WHOLE, Flag, Option, declarations, given, job_of, origin
from phalanx.cli._run_config import RunConfig

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


def as_job_file(ctx: click.Context, config: RunConfig, secrets: Iterable[str] | None = None) -> str:
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
        every = [declared for declared in declarations(RunConfig) if declared.section == heading]
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


def _said(ctx: click.Context, declared: Option[Any]) -> str:
    """Who has said it."""
    if ctx.get_parameter_source(declared.name) is ParameterSource.COMMANDLINE:
        return _LINE
    param = next(param for param in ctx.command.params if param.name == declared.name)
    return origin(ctx, param).removeprefix("in ").removesuffix(" in the environment") or "default"


def _text(ctx: click.Context, declared: Option[Any]) -> str | None:
    """Return the value as a job file has it; None: there is none."""
    if isinstance(declared, Flag):
        return str(bool(ctx.params[declared.name])).lower()
    value = given(ctx, declared)
    if value is None or ctx.params[declared.name] is None:
        return None
    if isinstance(value, (tuple, list)):
        return _list(value)
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
