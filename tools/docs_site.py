"""The MkDocs hook of the documentation site; `mkdocs.yml` loads it and `make docs` runs it.

- Generates two pages from the code: `cli.md` from the commands, `http.md` from the tables of routes and errors.
- Adds CONTRIBUTING.md, SECURITY.md and CHANGELOG.md from the root of the repository.
- Rewrites links that leave `docs/`, so that the same page works on the site and in the repository.
- Writes `llms.txt`, and the Markdown of each page next to its HTML.
"""

import inspect
import logging
import posixpath
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
from mkdocs.structure.files import File

from penstock.errors import PenstockError
from penstock.serving.protocols.route import Template

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {name: name.lower() for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")}
LINK = re.compile(r"\]\((?!https?:|#|mailto:|data:)([^)#\s]+)(#[^)\s]*)?\)")
DIRECTIVE = re.compile(r"^::: ([\w.]+)\n(?:    .*\n|\n)*", re.M)

_markdown: dict[str, str] = {}
_log = logging.getLogger("mkdocs.hooks.penstock")


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages and the pages from the root of the repository."""
    _markdown.clear()
    pages = {"cli.md": cli_page(), "http.md": http_page()}
    pages |= {page: (ROOT / name).read_text() for name, page in ROOT_PAGES.items() if (ROOT / name).exists()}
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with links that work on the site. A link to a file that does not exist is a warning."""
    source = page.file.src_uri
    at_root = source in ROOT_PAGES.values()

    def site_link(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        target = posixpath.normpath(posixpath.join("" if at_root else f"docs/{posixpath.dirname(source)}", path))
        page_of = ROOT_PAGES.get(target) or target.removeprefix("docs/") * target.startswith("docs/")
        if page_of and files.get_file_from_path(page_of) is not None:
            return f"]({posixpath.relpath(page_of, posixpath.dirname(source) or '.')}{anchor})"
        if not (ROOT / target).exists():
            _log.warning("%s links to %s, which does not exist", source, path)
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"]({config.extra['repository']}/{kind}/main/{target}{anchor})"

    _markdown[source] = LINK.sub(site_link, markdown)
    return _markdown[source]


def on_post_build(config: Any) -> None:
    """Writes `llms.txt`, and each page's Markdown next to its HTML."""
    site = Path(config.site_dir)
    for source, text in _markdown.items():
        path = site / source
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(DIRECTIVE.sub(lambda match: api_entry(match[1]), text))
    (site / "llms.txt").write_text("\n".join(llms(config)) + "\n")


def llms(config: Any) -> Iterator[str]:
    """The lines of `llms.txt`: every page by section, with its title and its first sentence."""
    yield f"# {config.site_name}\n\n> {config.site_description}"

    def links(nav: Any) -> Iterator[str]:
        for entry in nav if isinstance(nav, list) else [nav]:
            if isinstance(entry, dict):
                for value in entry.values():
                    yield from links(value)
            else:
                text = _markdown[entry]
                yield f"- [{title_of(text, entry)}]({entry}): {summary_of(text)}"

    for section in config.nav:
        for title, nav in section.items() if isinstance(section, dict) else [("Start", section)]:
            yield f"\n## {title}\n"
            yield from links(nav)


def title_of(text: str, path: str) -> str:
    """The first heading of a page."""
    found = re.search(r"^# (.+)$", text, re.M)
    return found[1] if found else path


def summary_of(text: str) -> str:
    """The first sentence below the heading of a page."""
    body = re.sub(r"\A.*?^# .+?$|^```.*?^```$", "", text, flags=re.S | re.M)
    paragraph = next((p for p in re.split(r"\n\s*\n", body.strip()) if p[0] not in "#|<:-"), "")
    plain = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=\.)\s", plain, maxsplit=1)[0].rstrip(":")


def api_entry(path: str) -> str:
    """The signature and docstring of an object, as Markdown."""
    module, _, name = path.rpartition(".")
    found: Any = getattr(import_module(module), name)
    lines = [f"### `{name}{_signature(found)}`\n\n{inspect.getdoc(found) or ''}\n"]
    functions = () if inspect.isfunction(found) else inspect.getmembers(found, inspect.isfunction)
    for attribute, member in functions:
        if not attribute.startswith("_") and member.__doc__:
            lines.append(f"- `{attribute}{_signature(member)}`: {inspect.getdoc(member)}\n")
    return "\n".join(lines) + "\n"


def _signature(found: Any) -> str:
    try:
        quoted = str(inspect.signature(found))
    except (TypeError, ValueError, NameError):  # a struct may name types that only a type checker imports
        return ""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", quoted)


def cli_page() -> str:
    """Every command of `penstock` with its options, from the commands themselves."""
    from penstock.bulk.cli import merge as caption_merge
    from penstock.cli.main import main

    lines = ["# Command line\n\nThis page is generated from the commands; `penstock COMMAND --help` prints the same.\n"]
    context = click.Context(main, info_name="penstock")
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        if not command.hidden:
            lines += _command(command, click.Context(command, context, info_name=name), level=2)
            if name == "caption":
                lines += _command(
                    caption_merge, click.Context(caption_merge, context, info_name="caption merge"), level=3
                )
    return "\n".join(lines)


def _command(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"\n{'#' * level} `{context.command_path}`\n\n```\n{context.command_path} {usage}\n```\n"
    yield inspect.cleandoc(command.help or "").replace("\b\n", "").replace("<", "&lt;") + "\n"
    options = [p for p in command.get_params(context) if isinstance(p, click.Option) and not p.hidden]
    if len(options) > 1:
        yield "| option | meaning |\n|---|---|"
    for option in options:
        record = option.get_help_record(context)
        if record and len(options) > 1:
            flag, meaning = (" ".join(part.split()).replace("|", "\\|") for part in record)
            yield f"| `{flag}` | {meaning.replace('<', '&lt;').replace('*', '&#42;')} |"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from _command(inner, click.Context(inner, context, info_name=name), level + 1)


HTTP_HEAD = """\
# HTTP API

This page is generated from the tables of routes. `GET /openapi.json` on a running server describes the same routes
for the models that it has loaded. [Quickstart](quickstart.md) shows requests and results, [Wire
format](wire-format.md) tensors in binary, [TorchServe compatibility](torchserve-compatibility.md) the routes of
`torchserve`.

The headers `x-deadline-ms`, `x-priority`, `x-request-id`, `idempotency-key` and `authorization: Bearer TOKEN` apply
to every inference route.

## Inference (port 8080)

| method | path | purpose |
|---|---|---|
"""
HTTP_MANAGEMENT = """
## Management (port 8081)

Routes that change something need `[server] management = true`; see [Changing models](management.md).

| method | path | purpose |
|---|---|---|
"""
HTTP_METRICS = """
## Metrics (port 8082)

| method | path | purpose |
|---|---|---|
"""
HTTP_ERRORS = """
## Errors

The body of an error is `{"error": {"code": CODE, "message": MESSAGE}}`; under `/v2` it is `{"error": MESSAGE}`, as
the Open Inference Protocol demands.

| status | code | retry may help | meaning |
|---|---|---|---|
"""


def http_page() -> str:
    """The routes of the native server and the statuses of its errors."""
    from penstock.serving.http.admin import management_routes, metrics_routes
    from penstock.serving.http.responses import STATUS
    from penstock.serving.http.server import inference_table

    def lines(routes: Iterable[Template]) -> list[str]:
        return [f"| {', '.join(sorted(t.allowed() - {'HEAD'}))} | `{t.path}` | {t.summary} |\n" for t in routes]

    errors = sorted(
        {(status, error.code, "yes" if error.retryable else "no", _meaning(error)) for error, status in STATUS.items()}
    )
    rows = [f"| {status} | `{code}` | {retry} | {meaning} |\n" for status, code, retry, meaning in errors]
    management, metrics = management_routes(Mock(), None), metrics_routes(Mock(), Mock())
    tables = [
        HTTP_HEAD,
        *lines(inference_table(bool).templates),
        HTTP_MANAGEMENT,
        *lines(management),
        HTTP_METRICS,
        *lines(metrics),
    ]
    return "".join([*tables, HTTP_ERRORS, *rows])


def _meaning(error: type[PenstockError]) -> str:
    if error is PenstockError:
        return "The model failed on this item, or the server has a defect; the log has the details."
    return (error.__doc__ or "").splitlines()[0]
