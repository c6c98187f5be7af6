"""What mkdocs and griffe cannot do for the documentation site by themselves. See `mkdocs.yml`.

Owns five things: pages that stand outside of `docs/` (README.md and others) become pages of the site, and all links
between pages are written as the repository's host wants them; names of the public interface in code style lead to their
entries in the reference; signatures show values where the code has private names; the search works without a server;
and a build fails in which a public name has no docstring or no entry, or a page loads something from the network.

Refuses to know what the pages say.
"""

from __future__ import annotations

import functools
import html
import importlib
import inspect
import multiprocessing
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import griffe
from markdown import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
LOG = get_plugin_logger("site")

OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
"""Pages that people look for at their usual places in the repository, and what they are called in the site."""

MODULES = (
    "phalanx.errors",
    "phalanx.multiprocessing",
    "phalanx.metrics",
    "phalanx.events",
    "phalanx.launcher",
    "phalanx.run",
    "phalanx.timer",
    "phalanx.timer.debug_info_logging",
    "phalanx.spawn",
    "phalanx.multiprocessing.redirects",
    "phalanx.multiprocessing.tail_log",
    "phalanx.multiprocessing.errors",
    "phalanx",
)
"""The public modules. A name that several of them export is looked up in the first one."""

COMMANDS = "<!-- the commands and their options -->"
"""Where the reference of the command line goes, in its page."""

LINK = re.compile(r"\[((?:[^\]\[]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)\s#]+)([^)\s]*)\)")
CONTENTS = re.compile(r"^(?:- \[[^\]]+\]\(#[^)]*\)\n){3,}\n", re.MULTILINE)  # the site shows one beside each page
CELL_CODE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="https?:[^"]+|<link\b[^>]*\bhref="https?:[^"]+|url\(["']?https?:"""
)
PRIVATE = re.compile(r"_?[A-Z][A-Z0-9_]*")
DOCTEST = re.compile(r"^>>> (?:.+\n)+", re.MULTILINE)


# --- pages ------------------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in `docs/`."""
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 - mkdocs names them
    """Turn links between files of the repository into links between pages."""
    here = page.file.src_uri
    home = next((path for path, name in OUTSIDE.items() if name == here), f"docs/{here}")

    def lead(found: re.Match[str]) -> str:
        text, path, anchor = found.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(home), path))
        if target not in OUTSIDE and not target.startswith("docs/") and (ROOT / target).exists():
            return text  # a file of the repository that is no page
        there = OUTSIDE.get(target, target.removeprefix("docs/"))
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{anchor})"

    markdown = CONTENTS.sub("", markdown)
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, "\n".join(commands()))
    # In the code of a table's cell, the repository's host wants `\|`, which Python's Markdown shows as it stands.
    markdown = CELL_CODE.sub(lambda found: found[0].replace("\\|", "|"), markdown)
    return LINK.sub(lead, markdown)


# --- the command line -------------------------------------------------------------------------------------------------


def commands() -> Iterator[str]:
    """A table of options for each command."""
    import click

    from phalanx.cli._commands import cli

    def walk(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
        yield name, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for child in command.list_commands(context):
                found = command.get_command(context, child)
                if found is not None and not found.hidden:
                    yield from walk(found, f"{name} {child}")

    for name, command in walk(cli, "phalanx"):
        context = click.Context(command, info_name=name)
        options = [param for param in command.get_params(context) if isinstance(param, click.Option)]
        yield f"\n## {name}\n"
        for paragraph in inspect.cleandoc(command.help or "").partition("\f")[0].split("\n\n"):
            as_it_stands = paragraph.startswith("\b\n")
            yield f"```sh\n{inspect.cleandoc(paragraph[2:])}\n```\n" if as_it_stands else f"{paragraph}\n"
        yield "| option | |\n| --- | --- |"
        for option in options:
            record = option.get_help_record(context)
            if record is not None:
                spelled, text = record
                yield f"| `{spelled}` | {html.escape(text).replace('|', '&#124;')} |"


# --- the public interface ---------------------------------------------------------------------------------------------


def exported(module: str) -> list[str]:
    """What a public module exports: not what is the standard library's."""
    names: list[str] = importlib.import_module(module).__all__
    theirs = set(multiprocessing.__all__) if module == "phalanx.spawn" else set()
    return [name for name in names if name not in theirs]


@functools.cache
def entries() -> dict[str, str]:
    """Each name as it can stand in a text, and the identifier of its entry."""
    found: dict[str, str] = {}
    for module in MODULES:
        for name in exported(module):
            value = getattr(importlib.import_module(module), name)
            home = home_of(name, value) or module
            found[f"{module}.{name}"] = f"{home}.{name}"
            found.setdefault(f"{module.removeprefix('phalanx.')}.{name}", f"{home}.{name}")
            if not name[0].islower() or name in ("start_processes", "tail_logfile", "to_map"):
                found.setdefault(name, f"{home}.{name}")
            if inspect.isclass(value):
                fields = described(value)
                for member in members(value):
                    entry = f"{home}.{name}" if member in fields else f"{home}.{name}.{member}"
                    found[f"{module}.{name}.{member}"] = entry
                    found.setdefault(f"{name}.{member}", entry)
    found |= {module: module for module in MODULES if "." in module}
    return found


def home_of(name: str, value: object) -> str:
    """The first public module that exports a name with this value; "" for none."""
    return next((each for each in MODULES if getattr(importlib.import_module(each), name, None) is value), "")


def members(cls: type) -> list[str]:
    """The public names that a class, or a private base of its own, defines; what its instances are given included."""
    ours = [each for each in cls.__mro__ if each.__module__.startswith("phalanx")]
    theirs = {base for each in ours if each is not cls and home_of(each.__name__, each) for base in each.__mro__}
    own = [each for each in ours if each not in theirs]
    names = {name for each in own for name in [*vars(each), *_source()[each.__module__][each.__qualname__].members]}
    return sorted(name for name in names if not name.startswith("_"))


@functools.cache
def _source() -> dict[str, Any]:
    """The modules of the package by their names, as griffe reads them."""
    found: dict[str, Any] = {}

    def walk(module: Any) -> None:
        found[module.path] = module
        for each in module.modules.values():
            if not each.is_alias:
                walk(each)

    walk(griffe.load("phalanx", search_paths=[ROOT / "src"]))
    return found


def described(cls: type) -> set[str]:
    """The fields and attributes that a class's own docstring describes."""
    sections = griffe.Docstring(inspect.getdoc(cls) or "").parse("google", warnings=False)
    found = [
        each for section in sections if section.kind.value in ("parameters", "attributes") for each in section.value
    ]
    return {each.name for each in found}


class _Links(Treeprocessor):  # type: ignore[misc]  # mypy does not follow markdown
    """Makes a link of each piece of code that is a public name."""

    def run(self, root: ET.Element) -> None:
        """See Markdown's `Treeprocessor`."""
        for parent in root.iter():
            if parent.tag in ("a", "autoref", "pre", "h1", "h2", "h3", "h4", "h5", "h6"):
                continue
            for index, child in enumerate(parent):
                text = "" if child.tag != "code" or len(child) else str(child.text or "")
                identifier = entries().get(text.removesuffix("()"))
                if identifier is None or "id" in parent.attrib:
                    continue
                link = ET.Element("autoref", {"identifier": identifier, "optional": ""})
                link.tail, child.tail = child.tail, None
                parent[index] = link
                link.append(child)


class _LinksExtension(Extension):  # type: ignore[misc]  # mypy does not follow markdown
    def extendMarkdown(self, md: Any) -> None:  # noqa: N802 - Markdown's name
        md.treeprocessors.register(_Links(md), "public_names", 5)


def on_config(config: Any) -> Any:
    """Add the Markdown extension: here, because it is no package's."""
    config.markdown_extensions.append(_LinksExtension())
    return config


class Docstrings(griffe.Extension):  # type: ignore[misc]  # mypy does not follow griffe
    """Gives docstrings the form of pages, and shows values in signatures in place of private names.

    A constant's value is looked up. What stands for "not given" has no value of its own: a docstring says in a form of
    the call what is taken then (`name=value`, in an indented block).
    """

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:  # noqa: ARG002 - griffe passes more
        """See griffe's `Extension`."""
        if obj.is_alias:
            return
        text = obj.docstring.value if obj.docstring else ""
        if obj.is_function:
            for parameter in obj.parameters:
                default = "" if parameter.default is None else str(parameter.default)
                if PRIVATE.fullmatch(default):
                    parameter.default = _value(default, parameter.name, text, obj.module.path)
        if obj.docstring:
            text = DOCTEST.sub(r"```pycon\n\g<0>```\n", f"{text}\n")
            obj.docstring.value = re.sub(r"::\n\n(?=    )", ":\n\n", text).rstrip("\n")


def _value(default: str, name: str, docstring: str, module: str) -> str:
    value = getattr(importlib.import_module(module), default)
    if type(value) is not object:
        return repr(value)
    said = (re.search(rf"\b{name}=(\(\)|[^,()]+)", line) for line in re.findall(r"(?m)^    .*$", docstring))
    return next((found[1] for found in said if found), default)


# --- what fails the build ---------------------------------------------------------------------------------------------


def on_env(env: Any, config: Any, files: Any) -> None:  # noqa: ARG001 - mkdocs names them
    """Say which public names have no entry in the reference, or no docstring."""
    there: set[str] = set()
    for file in files.documentation_pages():
        if file.src_uri.startswith("reference/"):
            there |= set(re.findall(r'\bid="([^"]+)"', file.page.content or ""))
            for name in re.findall(r">(_[A-Z][A-Z0-9_]*)<", file.page.content or ""):
                LOG.warning("%s: a signature shows %s", file.src_uri, name)
    for module in MODULES:
        for name in exported(module):
            value = getattr(importlib.import_module(module), name)
            explained = value.__doc__ if inspect.isfunction(value) else _source()[module][name].docstring
            if not name.startswith("__") and not explained:
                LOG.warning("%s.%s has no docstring", module, name)
            wanted = [f"{module}.{name}"]
            if inspect.isclass(value) and entries()[f"{module}.{name}"] == wanted[0]:
                wanted += [f"{wanted[0]}.{member}" for member in members(value) if member not in described(value)]
            for identifier in wanted:
                if identifier not in there:
                    LOG.warning("%s has no entry in docs/reference", identifier)


def on_post_build(config: Any) -> None:
    """Have the search work without a server, and say what a page would load from the network."""
    folder = Path(config.site_dir)
    index = (folder / "search" / "search_index.json").read_text(encoding="utf-8")
    # From file://, a page may not fetch JSON; it may load a script. The theme looks for it there.
    (folder / "search" / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")
    for page in [*folder.rglob("*.html"), *folder.rglob("*.css")]:
        for loaded in LOADED.findall(page.read_text(encoding="utf-8")):
            LOG.warning("%s loads from the network: %s", page.relative_to(folder), loaded)
