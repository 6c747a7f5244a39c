"""Encodes Python values for a broker: msgpack, with arrays as raw memory. Never pickle. Pure.

A value may be None, bool, int of 64 bits, float, str, bytes, list, tuple, dict, a NumPy array or scalar, a torch tensor
on the CPU, or these nested. Every type survives the round trip; a subclass (an enum, a named tuple, an ordered dict)
becomes its plain base.
"""

import math
import re
import struct
import sys
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from penstock.core.contracts import Codec
from penstock.errors import BadOutput, BadRequest, describe
from penstock.types import Item, ItemResult

MAX_DEPTH = 64
_TUPLE, _ARRAY, _SCALAR, _TENSOR = 1, 2, 3, 4
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_BASES: tuple[Any, ...] = (list, int, float, str, bytes)  # bool cannot be subclassed
_DTYPE = re.compile(r"[<>|=][biufcSUmM][0-9]{1,9}(\[[0-9a-zA-Z]{1,8}\])?")
_TENSOR_DTYPE = re.compile(r"(b|u?i|f|bf|complex|float|bool|bfloat|u?int)[0-9]{0,3}(_[a-z0-9]{1,12})?")
_LENGTH = struct.Struct("<H")


class MalformedMessage(BadRequest):
    """The bytes were not produced by `encode`: another program wrote them, or they are damaged."""

    code = "malformed"


def encode(value: Any) -> bytes:
    """The bytes of a value. Raises BadRequest, which names the type, for an unsupported value."""
    try:
        return _encoder.encode(_pack(value, 0))
    except (OverflowError, UnicodeEncodeError, RecursionError, ValueError) as e:
        raise BadRequest(f"the value cannot be sent over the broker: {describe(e)}") from None


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The value in the bytes, which it does not share memory with. Raises MalformedMessage."""
    try:
        return _decoder.decode(data)
    except Exception as e:  # from msgpack, from NumPy, or from an unhashable dict key
        raise MalformedMessage(f"the message cannot be read: {describe(e)}") from None


class BrokerCodec(Codec):
    """The codec of requests from a broker. It runs in the model's worker."""

    def __init__(self, model: str, version: str) -> None:
        self.model = model
        self.version = version

    def decode(self, item: Item) -> tuple[Any, None]:
        """The value that the caller sent. Raises MalformedMessage."""
        return decode(item.payload), None

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """Raises BadOutput for an unsupported result."""
        try:
            return ItemResult(body=encode(value))
        except BadRequest as e:
            raise BadOutput(f"the model's answer cannot be sent: {e.message}") from None

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """The one answer, or a list of them. Requests of a broker have one row and are never split."""
        return parts[0] if len(parts) == 1 else ItemResult(body=encode([decode(part.body) for part in parts]))


def _pack(value: Any, depth: int) -> Any:
    """`value` in types that msgpack preserves: an extension replaces any other type, or it is refused."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth >= MAX_DEPTH:
        raise BadRequest(f"the value is nested deeper than {MAX_DEPTH} levels")
    if kind is list:
        return value if _PLAIN.issuperset(map(type, value)) else [_pack(v, depth + 1) for v in value]
    if isinstance(value, np.ndarray):
        return Ext(_ARRAY, _pack_array(value))
    if isinstance(value, np.generic):
        return Ext(_SCALAR, _pack_array(np.asarray(value)))
    if isinstance(value, tuple):
        return Ext(_TUPLE, _encoder.encode([_pack(v, depth + 1) for v in value]))
    if isinstance(value, dict):
        return {_pack_key(k): _pack(v, depth + 1) for k, v in value.items()}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return Ext(_TENSOR, _pack_tensor(value))
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    for base in _BASES:
        if isinstance(value, base):
            return _pack(base(value), depth)
    raise BadRequest(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent over the broker: expected None, bool, int, float, "
        "str, bytes, list, tuple, dict, a NumPy array or a torch tensor"
    )


def _pack_key(key: Any) -> Any:
    if type(key) in _PLAIN:
        return key
    if isinstance(key, (str, int)):
        return str(key) if isinstance(key, str) else int(key)
    raise BadRequest(f"a dict with a {type(key).__name__} as key cannot be sent over the broker: expected str or int")


def _pack_array(array: np.ndarray[Any, Any]) -> bytes:
    if not _DTYPE.fullmatch(array.dtype.str) or not array.dtype.itemsize:
        raise BadRequest(f"an array of dtype {array.dtype} cannot be sent over the broker: expected numbers or text")
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return _pack_raw(array.dtype.str, array.shape, flat.data)


def _pack_tensor(tensor: Any) -> bytes:
    import torch  # already loaded: the value is a tensor

    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise BadRequest(
            f"a tensor on '{tensor.device}' with layout {tensor.layout} cannot be sent over the broker: "
            "give tensor.cpu()"
        )
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _pack_raw(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.data)


def _pack_raw(dtype: str, shape: tuple[int, ...], raw: memoryview) -> bytes:
    head = msgspec.msgpack.encode((dtype, shape))
    return b"".join((_LENGTH.pack(len(head)), head, raw))


def _unpack_raw(data: memoryview) -> tuple[str, tuple[int, ...], bytearray]:
    (length,) = _LENGTH.unpack_from(data)
    dtype, shape = _head_decoder.decode(data[2 : 2 + length])
    if len(shape) > 32 or any(n < 0 for n in shape):
        raise ValueError(f"a shape of {len(shape)} axes")
    return dtype, shape, bytearray(data[2 + length :])


def _unpack_array(data: memoryview) -> np.ndarray[Any, Any]:
    name, shape, raw = _unpack_raw(data)
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"a dtype {name!r}")
    dtype = np.dtype(name)
    if not dtype.itemsize or math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes for an array {shape} of {name}")
    return np.frombuffer(raw, dtype).reshape(shape)


def _unpack_tensor(data: memoryview) -> Any:
    name, shape, raw = _unpack_raw(data)
    try:
        import torch
    except ImportError:
        raise ValueError("a torch tensor, and torch is not installed here") from None
    dtype = getattr(torch, name, None) if _TENSOR_DTYPE.fullmatch(name) else None
    if not isinstance(dtype, torch.dtype) or math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes for a tensor {shape} of {name!r}")
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _unpack(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(_list_decoder.decode(data))
    if code == _ARRAY:
        return _unpack_array(data)
    if code == _SCALAR:
        return _unpack_array(data)[()]
    if code == _TENSOR:
        return _unpack_tensor(data)
    raise ValueError(f"an extension {code}")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ext_hook=_unpack)
_list_decoder = msgspec.msgpack.Decoder(list, ext_hook=_unpack)
_head_decoder = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...]])
