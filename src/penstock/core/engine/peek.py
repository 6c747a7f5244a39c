"""What the front process may know of a request before its body is decoded: rows and bucket, told by two config keys."""

from __future__ import annotations

from collections.abc import Callable

from penstock.config.schema import BatchingConfig
from penstock.core.wire.slabs import Slab
from penstock.errors import BadRequest, ConfigError
from penstock.serving.protocols import oip_npy
from penstock.serving.protocols.oip_binary import peek_head
from penstock.serving.protocols.oip_json import PEEK_BYTES, peek_rows, peek_shape
from penstock.types import Item


def _body(item: Item) -> bytes | memoryview:
    body: bytes | memoryview = item.payload.view if isinstance(item.payload, Slab) else item.payload
    return body


def _head(item: Item) -> bytes | memoryview:
    """The JSON of an Open Inference request; empty where it is longer than the front process has time for."""
    if item.codec == "oip_binary":
        return peek_head(_body(item), item.headers)
    if item.codec != "oip_json" or isinstance(item.payload, Slab) or len(item.payload) > PEEK_BYTES:
        return b""
    return _body(item)


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
    if not item.codec.startswith("oip"):
        return item.rows
    if item.codec == "oip_npy":
        return oip_npy.peek(_body(item))[0]
    head = _head(item)
    return peek_rows(head, len(_body(item))) if len(head) else item.rows


def _shape(item: Item) -> str:
    return oip_npy.peek(_body(item))[1] if item.codec == "oip_npy" else peek_shape(_head(item))


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
