"""The options of how lines are shown, which `phalanx run` and `phalanx logs` have in common, and what they say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from phalanx._base.tty import use_colour
from phalanx._logs.prefixes import TEMPLATE_ENV, template_of_environment
from phalanx.cli._declare import CONSOLE, Declared, Flag, Many, Maybe, Option
from phalanx.cli._options import Count, read_ranks
from phalanx.multiprocessing import ConsoleSpecs


class ConsoleOptions(Declared, section=CONSOLE):
    """How lines are shown."""

    ranks = Many(read_ranks, "--rank", metavar="RANK,...", sentence="Global ranks whose output is shown, like 0,4-7.")
    grep = Many(
        lambda text: [text],
        metavar="REGEX",
        sentence="Show only lines in which this regular expression (or another --grep's) is found.",
    )
    exclude = Many(
        lambda text: [text], metavar="REGEX", sentence="Show no line in which this is found. Can be repeated."
    )
    ignore_case = Flag("-i", sentence="Have --grep and --exclude take large letters for small.")
    after_context = Count(
        "-A", least=0, sentence="Show N lines of the same rank and stream after each that --grep finds."
    )
    before_context = Count("-B", least=0, sentence="Show N before it.")
    context = Count("-C", least=0, sentence="Show N before and after it.")
    fold = Flag(sentence="Show lines that are equal across ranks once, as [0-7] ...")
    timestamps = Flag(sentence="Put the time before each line, ISO 8601 with milliseconds.")
    elapsed = Flag(sentence="Put the seconds since the start before each line.")
    log_format = Option(
        str,
        kind=click.Choice(["text", "json"]),
        default="text",
        sentence="json: one JSON object a line, with time, rank, stream and text.",
    )
    log_line_prefix_template = Maybe(
        str,
        metavar="TEXT",
        torchrun="--log-line-prefix-template",
        sentence="What stands before each line: ${role_name} ${rank} ${local_rank} ${hostname} ${time}.",
    )
    color = Option(
        str,
        kind=click.Choice(["auto", "always", "never"]),
        default="auto",
        sentence="Colours. auto: not with NO_COLOR, else with FORCE_COLOR, else on a terminal.",
    )
    raw = Flag(sentence="Send a terminal what it would obey (titles, moves of the cursor), instead of showing it.")


def colours_of_workers(console: ConsoleSpecs, env: Mapping[str, str]) -> dict[str, str]:
    """Return what has workers, which write to files, use colours: nothing unless the console has them for all lines.

    ``env`` are variables that all workers get; one that the user has set, there or for us, stays as it is.
    """
    chosen = (os.environ.get(name) or env.get(name) for name in ("NO_COLOR", "FORCE_COLOR", "PYTHON_COLORS"))
    if any(chosen) or console.format != "text" or not all(use_colour(each, console.color) for each in (1, 2)):
        return {}
    # rich takes FORCE_COLOR for a terminal, on which it draws its bars again and again, unless the other says no.
    return {"FORCE_COLOR": "1", "TTY_INTERACTIVE": os.environ.get("TTY_INTERACTIVE", "0")}


def console_specs(chosen: ConsoleOptions, **more: Any) -> ConsoleSpecs:
    """What the console options say. Raises UsageError."""
    if chosen.timestamps and chosen.elapsed:
        raise click.UsageError("--timestamps and --elapsed exclude each other")
    try:
        template = chosen.log_line_prefix_template
        return ConsoleSpecs(
            ranks=chosen.ranks, grep=chosen.grep, exclude=chosen.exclude, ignore_case=chosen.ignore_case,
            before=(chosen.context or 0) if chosen.before_context is None else chosen.before_context,
            after=(chosen.context or 0) if chosen.after_context is None else chosen.after_context,
            fold=chosen.fold, timestamps="iso" if chosen.timestamps else "elapsed" if chosen.elapsed else None,
            format=chosen.log_format, template=template_of_environment() if template is None else template,
            raw=chosen.raw, color=chosen.color, **more,
        )  # fmt: skip
    except ValueError as error:
        named = {
            "format:": "--log-format:",
            "template:": "--log-line-prefix-template:",
            "fold, format:": "--fold:",
            "before:": "--before-context:" if chosen.before_context else "--context:",
            "after:": "--after-context:" if chosen.after_context else "--context:",
            "ignore_case:": "--ignore-case:",
        }
        text = str(error)
        head = next((name for name in named if text.startswith(name)), "")
        text = named[head] + text[len(head) :] if head else text if text.startswith(TEMPLATE_ENV) else f"--{text}"
        raise click.UsageError(text) from None
