"""The JSON that TorchServe's APIs answer with: indented by two, nulls left out, a newline at the end. Pure.

Source: the answers of TorchServe 0.12.0.
"""

from __future__ import annotations

from typing import Any

import msgspec


def json_body(value: Any) -> bytes:
    """The value (plain objects, or structs) as TorchServe would write it."""
    return msgspec.json.format(msgspec.json.encode(_without_nulls(msgspec.to_builtins(value))), indent=2) + b"\n"


def json_text(value: Any) -> str:
    """The same as TorchServe's gRPC has it: text, without the newline."""
    return json_body(value)[:-1].decode()


def error_body(status: int, kind: str, message: str) -> bytes:
    """The body of every error: its status, the name of its class there, and what happened.

    Halves of characters, which a handler may have from a client's JSON, become "?".
    """
    return json_body({"code": status, "type": kind, "message": message.encode("utf-8", "replace").decode()})


def read_error(status: int, body: bytes) -> str | None:
    """The message of an `error_body` of this status, None if the body is something else."""
    try:
        found = msgspec.json.decode(body, type=_Error)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found.message if found.code == status else None


class _Error(msgspec.Struct, forbid_unknown_fields=True):
    code: int
    type: str
    message: str


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
