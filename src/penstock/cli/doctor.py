"""`penstock doctor`: the dashboard as text, for a terminal or a script."""

import http.client
import socket
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any, Final

import click
import msgspec

from penstock.client.endpoint import Endpoint, Unreachable, parse_url, read_token, tls_context
from penstock.config.targets import errors_end_the_command
from penstock.errors import ConfigError, PenstockError
from penstock.values import columns, printable

DEFAULT: Final = "http://127.0.0.1:8082"
SILENT_S: Final = 10.0  # a server sends something each second
LOOKS: Final = 6  # views, one a second: processes are read while somebody looks
SHOWN_EVENTS: Final = 5
UNWELL: Final = 3  # exit status; any command that fails has 1 or 2
HEADS: Final = (
    "MODEL", "VERSION", "STATE", "UP", "REQ/S", "P50", "P99", "TARGET", "QUEUE", "OLDEST", "ROWS", "BUSY", "ERR/S",
    "MEMORY",
)  # fmt: skip
CLEAR: Final = "\x1b[H\x1b[2J"


@click.command()
@click.argument("url", default=DEFAULT)
@click.option("--watch", is_flag=True, help="Show the server again each second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text, an object a line.")
@click.option("--token-file", type=click.Path(), help="File with the listener's token; or set PENSTOCK_TOKEN.")
@click.option("--ca", type=click.Path(), help="PEM file of the authority that issued the server's certificate.")
def doctor(url: str, watch: bool, as_json: bool, token_file: str | None, ca: str | None) -> None:
    """Say how a server is, what limits it and what to change, and show its models.

    URL is the metrics listener, by default http://127.0.0.1:8082. The exit status is 0 if all is well, 3 if not, and 1
    if the server cannot be asked.
    """
    with errors_end_the_command():
        status, looks = 0, 1 if watch else LOOKS
        endpoint = parse_url(url, tls_context(ca) if ca else None)
        with closing(views(endpoint, read_token(token_file))) as stream, _known(endpoint):
            for view in islice(stream, looks - 1, None):
                status = 0 if view["verdict"]["level"] == "ok" else UNWELL
                shown = msgspec.json.encode(view).decode() if as_json else report(view, endpoint.url)
                click.echo((CLEAR if watch and not as_json and sys.stdout.isatty() else "") + shown)
                if not watch:
                    break
    sys.exit(status)


@contextmanager
def _known(endpoint: Endpoint) -> Iterator[None]:
    """Raises PenstockError in place of what a view of another version raises."""
    try:
        yield
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as e:
        text = f"{endpoint.url} sends what this version does not know: {e!r}; use the penstock of the server"
        raise PenstockError(text) from None


def views(endpoint: Endpoint, token: str | None) -> Generator[dict[str, Any], None, None]:
    """What the dashboard of a server shows, whole at first and then once a second. Each model has `now`, its last
    second by the names of `history.Second`. Raises ConfigError, Unreachable."""
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=SILENT_S)
    if endpoint.tls is not None:
        connection = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=SILENT_S, context=endpoint.tls)
    with closing(connection):
        try:
            if endpoint.socket:
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(SILENT_S)
                connection.sock.connect(endpoint.socket)
            headers = {"authorization": f"Bearer {token}"} if token else {}
            connection.request("GET", f"{endpoint.prefix}/dashboard/events", headers=headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as e:
            raise Unreachable(f"{endpoint.url} does not answer: {e}") from None
        if answer.status == 401:
            raise ConfigError(f"{endpoint.url} requires a token: give --token-file, or set PENSTOCK_TOKEN")
        if answer.status != 200 or answer.headers.get_content_type() != "text/event-stream":
            found = f"status {answer.status} and {answer.headers.get_content_type()}"
            raise ConfigError(
                f"{endpoint.url} answers with {found}, expected the metrics listener of penstock serve, by default at"
                f" {DEFAULT}, with server.dashboard"
            )
        yield from _read(answer, endpoint)


def _read(answer: http.client.HTTPResponse, endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    fields: list[str] = []
    events: list[Any] = []  # a view has those since the last one
    try:
        while line := answer.readline():
            if not line.startswith(b"data: "):
                continue
            view = msgspec.json.decode(line.removeprefix(b"data: "))
            fields = view.get("fields", fields)
            view["events"] = events = [*events, *view["events"]][-SHOWN_EVENTS:]
            for model in view["models"]:
                second = (model["seconds"] or [[0.0] * len(fields)])[-1]
                model["now"] = dict(zip(fields, second, strict=False))
            yield view
    except (OSError, http.client.HTTPException) as e:
        raise Unreachable(f"{endpoint.url} was lost: {e}") from None
    raise Unreachable(f"{endpoint.url} has ended")


def report(view: dict[str, Any], url: str) -> str:
    """The verdict, a table of the models, and the last events, as lines of text."""
    verdict = view["verdict"]
    rows = [HEADS, *map(_row, view["models"])]
    lines = [f"{url}  {verdict['word'].upper()}: {verdict['text']}", ""]
    lines += columns(rows)
    if more := view["model_count"] - len(view["models"]):
        lines.append(f"... and {more} models with fewer requests")
    lines += [f"{e['model']} {e['version']}: {e['kind']} {e['text']}".rstrip() for e in view["events"]]
    for found in verdict.get("causes", ()):
        gain = "unknown" if found["gain"] is None else f"about {found['gain']:.1f} times the requests a second"
        lines += ["", f"{found['cause']}, model {found['model']} {found['version']}"]
        lines += [f"  evidence  {found['evidence']} ({found['metric']})", f"  change    {found['change']}"]
        lines += [f"  gain      {gain}"]
    return "\n".join(printable(line, "?") for line in lines)


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    now = model["now"]
    return (
        printable(model["name"], "?"),
        printable(model["version"], "?"),
        model["state"],
        f"{model['up']}/{model['instances']}",
        f"{now['requests']:.0f}",
        _seconds(now["p50_s"]),
        _seconds(now["p99_s"]),
        _seconds(model["slo_s"] or 0.0),
        f"{now['queue']:.0f}",
        _seconds(now["oldest_s"]),
        f"{now['rows']:.1f}/{model['batch']}",
        f"{min(1.0, now['busy'] / max(1, model['up'])):.0%}",
        f"{now['failed'] + now['rejected']:.1f}",
        f"{model['memory_bytes'] / 2**20:.0f} MiB",
    )


def _seconds(seconds: float) -> str:
    return "-" if not seconds else f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
