"""What the front process may know of a request before its body is decoded: rows and bucket, told by two config keys."""

from __future__ import annotations

from collections.abc import Callable

from penstock.config.schema import BatchingConfig
from penstock.errors import BadRequest, ConfigError
from penstock.protocols import oip_json
from penstock.types import Item
from penstock.wire.slabs import Slab

PEEK_BYTES = 64 * 1024  # larger bodies are not looked into: the front process has better things to do


def _header(item: Item, name: bytes) -> bytes | None:
    for key, value in item.headers or ():
        if key.lower() == name:
            return value
    return None


def _rows_from_header(name: bytes) -> Callable[[Item], int]:
    def rows(item: Item) -> int:
        value = _header(item, name)
        if value is None:
            return item.rows
        if not value.isdigit() or int(value) < 1:
            raise BadRequest(f"header {name.decode()} must be a whole number of rows from 1, found {value!r}")
        return int(value)

    return rows


def _rows_auto(item: Item) -> int:
    if item.codec != "oip_json" or isinstance(item.payload, Slab) or len(item.payload) > PEEK_BYTES:
        return item.rows
    return oip_json.peek_rows(item.payload)


def _shape(item: Item) -> str:
    if item.codec != "oip_json" or isinstance(item.payload, Slab) or len(item.payload) > PEEK_BYTES:
        return ""
    return oip_json.peek_shape(item.payload)


def rows_rule(config: BatchingConfig) -> Callable[[Item], int]:
    """A function that tells the rows of an item. Raises ConfigError for an unknown rule."""
    if config.rows == "auto":
        return _rows_auto
    kind, _, name = config.rows.partition(":")
    if kind == "header" and name:
        return _rows_from_header(name.lower().encode())
    raise ConfigError(f'batching.rows must be "auto" or "header:NAME", found "{config.rows}"')


def bucket_rule(config: BatchingConfig) -> Callable[[Item], str] | None:
    """A function that tells the bucket of an item; None when all share one. Raises ConfigError for an unknown rule."""
    kind, _, name = config.bucket.partition(":")
    if config.bucket == "none":
        return None
    if config.bucket == "shape":
        return _shape
    if config.bucket == "content-type":
        return lambda item: item.content_type
    if kind == "header" and name:
        key = name.lower().encode()
        return lambda item: (_header(item, key) or b"").decode("latin-1")
    raise ConfigError(
        f'batching.bucket must be "none", "shape", "content-type" or "header:NAME", found "{config.bucket}"'
    )
