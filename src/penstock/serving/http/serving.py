"""Runs the function of a route: the whole request in, one answer out, whatever the function does."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

from penstock.errors import PenstockError
from penstock.serving.http.exchange import Exchange
from penstock.serving.http.template import HttpRequest, Route
from penstock.types import ItemResult

log = logging.getLogger("penstock.frontends")

Serve = Callable[[HttpRequest], Awaitable[ItemResult]]


async def serve(function: Serve, request: HttpRequest, exchange: Exchange) -> None:
    """Hands the answer to the exchange, which drops it when its client has gone."""
    try:
        result = await function(request)
    except PenstockError as error:
        exchange.fail(error.with_traceback(None))
    except Exception:
        log.exception("event=bug where=route path=%r consequence=answered_500", request.path[:200])
        exchange.fail(PenstockError("internal error"))
    else:
        exchange.on_result(result)


def read_query(raw: bytes) -> dict[str, list[str]]:
    """Every key of a raw query with its values, in their order; what is not UTF-8 is replaced."""
    return parse_qs(raw.decode("latin-1"), keep_blank_values=True, errors="replace")


def read_request(exchange: Exchange, route: Route) -> HttpRequest:
    """What the function is asked. The exchange's body is taken, and a Buffer given back."""
    return HttpRequest(
        exchange.method.decode("ascii"),
        exchange.target.decode("latin-1"),
        read_query(exchange.target.partition(b"#")[0].partition(b"?")[2]),
        exchange.headers,
        exchange.content_type,
        _plain_body(exchange),
        route.names,
    )


def _plain_body(exchange: Exchange) -> bytes:
    payload: Any = exchange.payload
    exchange.payload = b""
    if isinstance(payload, bytes):
        return payload
    body = bytes(payload.view)
    payload.release()
    return body
