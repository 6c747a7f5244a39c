"""How a payload is asked of a target, and which answers are good ones."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.perf.bench.load import Check, http_request
from penstock.perf.bench.payload import Payload
from penstock.perf.bench.target import Target


def request_of(target: Target, payload: Payload) -> bytes:
    """The whole HTTP message. Raises ConfigError for a token that no header can carry."""
    headers = {"Content-Type": payload.content_type, **payload.headers}
    if target.token is not None:
        if not target.token.isascii() or not target.token.isprintable():
            raise ConfigError("the token holds a character that no header can carry")
        headers["Authorization"] = f"Bearer {target.token}"
    return http_request(target.endpoint, "POST", payload.path or target.path, headers, payload.body)


def check_of(target: Target) -> Check | None:
    """What an answer of 2xx must hold to be a good one; None where its status tells, and bodies need no look."""
    return _has_outputs if target.protocol == "oip" else None


def _has_outputs(number: int, status: int, body: bytes) -> bool:
    """Some servers of the Open Inference Protocol answer 200 with {"error": ...}."""
    return b'"outputs"' in body
