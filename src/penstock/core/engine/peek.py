"""How many rows a request has and which bucket it belongs to, before a worker decodes it."""

from __future__ import annotations

from collections.abc import Callable

from penstock.config.schema import BatchingConfig
from penstock.core.codecs import traits_of
from penstock.core.wire.slabs import Slab
from penstock.errors import BadRequest, ConfigError
from penstock.types import Item


def _peeked(item: Item) -> tuple[int, str]:
    peek = traits_of(item.codec).peek
    if peek is not None:
        found = peek(item, item.payload.view if isinstance(item.payload, Slab) else item.payload)
        if found is not None:
            return found
    return item.rows, ""


def _rows_auto(item: Item) -> int:
    return _peeked(item)[0]


def _shape(item: Item) -> str:
    return _peeked(item)[1]


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


def rows_rule(config: BatchingConfig) -> Callable[[Item], int]:
    """A function that returns the rows of an item. Raises ConfigError for an unknown rule."""
    if config.rows == "auto":
        return _rows_auto
    kind, _, name = config.rows.partition(":")
    if kind == "header" and name:
        return _rows_from_header(name.lower().encode())
    raise ConfigError(f'batching.rows must be "auto" or "header:NAME", found "{config.rows}"')


def bucket_rule(config: BatchingConfig) -> Callable[[Item], str] | None:
    """A function that returns the bucket of an item; None when all share one. Raises ConfigError."""
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
