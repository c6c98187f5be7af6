"""``phalanx report``: the report on a run, at any time: as text, as a page, as an archive, or as a trace.

Owns the lines on the run itself, and where a file goes. The text is `_runs.run_report`'s, the files are `_page`'s.
"""

from __future__ import annotations

import io
import os

import click

from phalanx._base.tty import is_terminal, printable
from phalanx._runs.catalog import RunDir
from phalanx._runs.run_report import report_on
from phalanx.cli._commands import SETTINGS, Command, put
from phalanx.cli._options import resolved, run_argument


@click.command(cls=Command, context_settings=SETTINGS, absent={"--json": "phalanx runs --json has the record"})
@run_argument()
@click.option("--html", is_flag=True, help="Write a page: one file that opens in any browser, without a network.")
@click.option("--bundle", is_flag=True, help="Write an archive of the page and the logs: report.tar.gz.")
@click.option("--perfetto", is_flag=True, help="Write the timeline as a trace for ui.perfetto.dev: trace.json.")
@click.option("-o", "--output", metavar="FILE",
              help="Where to write it; - is stdout. Default: report.html and so on in the run's folder.")  # fmt: skip
def report(
    run: str | None, *, log_dir: str | None, html: bool, bundle: bool, perfetto: bool, output: str | None
) -> None:
    """Show what became of RUN: the report that it has printed at its end, with all attempts.

    \b
    phalanx report                       the latest run
    phalanx report 20261120-1030
    phalanx report --html                as a page; its path is printed
    phalanx report --bundle -o run.tgz   the page and the logs, to be sent

    Of a run that still runs, or whose launcher was killed, it is what is known by now. RUN is as for phalanx logs. A
    page, an archive and a trace have no secrets of the command line and the environment, as far as names and looks tell
    them; what the ranks wrote is as they wrote it.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    chosen = [name for name, is_wanted in (("html", html), ("bundle", bundle), ("perfetto", perfetto)) if is_wanted]
    if len(chosen) > 1:
        raise click.UsageError(f"--{chosen[0]} and --{chosen[1]} exclude each other: each writes a file of its own")
    if output is not None and not chosen:
        raise click.UsageError("--output needs --html, --bundle or --perfetto: the text goes to stdout")
    if output is not None and (not output or os.path.isdir(output)):
        raise click.UsageError(f"--output: {output!r} is {'a folder' if output else 'empty'}; expected a file, or -")
    found = resolved(log_dir, run)
    if not found.is_ours and (link := found.strange_link()):
        raise click.ClickException(f"{printable(link)} is a link of another user, which is not followed")
    if chosen:
        _write(found, chosen[0], output)
    else:
        _print(found)


def _print(found: RunDir) -> None:
    text = report_on(found)
    if found.run is None and not text:
        raise click.ClickException(found.problem)
    lines = found.heading() + text.rstrip("\n").split("\n")
    if found.state == "running":
        name = found.name
        lines.append(f"phalanx stack {name} shows where its ranks are, phalanx logs -f {name} what they write")
    put("".join(f"{printable(line)}\n" for line in lines))


def _write(found: RunDir, form: str, output: str | None) -> None:
    """Write a file of a run, and print its path."""
    from phalanx._page import products

    name = {"html": products.PAGE, "bundle": products.BUNDLE, "perfetto": products.TRACE}[form]
    if output is None and not found.is_ours:
        raise click.ClickException(f"{found.name} belongs to uid {found.owner}; -o FILE writes elsewhere")
    if form == "bundle" and output == "-" and is_terminal(1):
        raise click.UsageError("--output: an archive is no text for a terminal; redirect stdout, or name a file")
    if form == "bundle":
        archive = io.BytesIO()
        products.make_bundle(found, archive, lambda text: click.echo(f"phalanx: {printable(text)}", err=True))
        data = archive.getvalue()
    else:
        data = products.make_page(found) if form == "html" else products.make_trace(found)
    if output == "-":
        try:
            click.echo(data, nl=False)
        except BrokenPipeError:  # | head
            raise
        except OSError as error:
            raise click.ClickException(f"stdout: {error.strerror}") from None
        return
    path = os.path.join(found.path, name) if output is None else output
    try:
        if output is None:
            products.write_beside(found, name, data)
        else:
            products.write_product(path, data)
    except OSError as error:
        hint = "; -o FILE writes it elsewhere" if output is None else ""
        raise click.ClickException(f"{path} cannot be written: {error.strerror}{hint}") from None
    put(f"{printable(path)}\n")
