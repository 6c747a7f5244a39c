"""Codecs by name: what a codec declares about its format, and codecs made for one model."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from msgspec import Struct

from penstock.core.contracts import Codec
from penstock.plugins import resolve
from penstock.types import Item, ModelMetadata, SequenceRequest

OBJECT: Final = "object"
"""The name of the codec of in-process callers: payloads are Python objects, and nothing is decoded."""

Peek = Callable[[Item, "bytes | memoryview"], "tuple[int, str] | None"]
PeekSequence = Callable[[Item, "bytes | memoryview"], "SequenceRequest | None"]


class CodecTraits(Struct, frozen=True):
    """What a codec declares; see `Codec`."""

    divisible: bool = False
    reads_headers: bool = False
    peek: Peek | None = None
    peek_sequence: PeekSequence = Codec.peek_sequence


@cache
def traits_of(name: str) -> CodecTraits:
    """The declarations of a codec. Raises ConfigError for an unknown name."""
    if name == OBJECT:
        return CodecTraits()
    found: Any = resolve("codec", name)
    peek = getattr(found, "peek", Codec.peek)
    return CodecTraits(
        bool(getattr(found, "divisible", False)),
        bool(getattr(found, "reads_headers", False)),
        None if peek is Codec.peek else peek,
        getattr(found, "peek_sequence", Codec.peek_sequence),
    )


class ModelCodecs:
    """The codecs of one model, each made at its first use. `extras` are for constructors with parameters of these
    names."""

    def __init__(self, metadata: ModelMetadata, **extras: Any) -> None:
        self._metadata = metadata
        self._extras = {"metadata": metadata, **extras}
        self._made: dict[str, Codec] = {}

    def get(self, name: str) -> Codec:
        """Raises ConfigError for an unknown name."""
        codec = self._made.get(name)
        if codec is None:
            make = resolve("codec", name)
            taken = inspect.signature(make).parameters.keys() & self._extras.keys()
            m = self._metadata
            codec = self._made[name] = make(m.name, m.version, **{key: self._extras[key] for key in taken})
        return codec
