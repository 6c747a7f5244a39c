"""Encodes Python values for a broker: msgpack, with arrays as raw memory. Pickle only where the program allows it.

A value may be None, bool, int of 64 bits, float, str, bytes, list, tuple, dict, a NumPy array or scalar, a torch tensor
on the CPU, a type of the table `_NAMED`, or these nested. Each keeps its type; any other type, such as a subclass, is
refused.

An object of a class (a dataclass, a named tuple, an enum) is sent as the name of the class and its contents. The
receiver uses a class only if its program has imported it: a message imports nothing, and runs no code of the class.
"""

import dataclasses
import enum
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from penstock.core.contracts import Codec
from penstock.errors import BadOutput, BadRequest, describe
from penstock.plugins import FILE_MODULE, loaded_class
from penstock.types import Item, ItemResult


class Unsupported(Exception):
    """A value cannot be sent; the text is the advice."""


# ---- values of the standard library


def _pack_moment(value: Any) -> list[Any]:
    """`value`: a datetime or a time."""
    zone = value.tzinfo
    if type(zone) is timezone:
        offset = zone.utcoffset(None)
        sent: Any = (offset.days * 86400 + offset.seconds) * 10**6 + offset.microseconds
    elif zone is None or (type(zone) is ZoneInfo and zone.key is not None):
        sent = None if zone is None else zone.key
    else:
        raise Unsupported("give it a tzinfo of datetime.timezone or zoneinfo.ZoneInfo")
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, sent]


def _moment(kind: Any) -> Callable[[list[Any]], Any]:
    def unpack(parts: list[Any]) -> Any:
        text, fold, sent = parts
        zone: Any = timezone(timedelta(microseconds=sent)) if isinstance(sent, int) else sent and ZoneInfo(sent)
        return kind.fromisoformat(text).replace(tzinfo=zone, fold=fold)

    return unpack


# by name in a message: the type, its plain form, and the value of a plain form
_NAMED: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "bytearray": (bytearray, bytes, lambda data: bytearray(memoryview(data))),  # no number, which would be a size
    "complex": (complex, lambda c: [c.real, c.imag], lambda parts: complex(*parts)),
    "Decimal": (Decimal, str, Decimal),
    "UUID": (UUID, lambda u: u.bytes, lambda data: UUID(bytes=data)),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, _pack_moment, _moment(time)),
    "datetime": (datetime, _pack_moment, _moment(datetime)),
    "timedelta": (timedelta, lambda d: [d.days, d.seconds, d.microseconds], lambda parts: timedelta(*parts)),
    "OrderedDict": (OrderedDict, lambda d: [list(pair) for pair in d.items()], OrderedDict),
    "Counter": (Counter, dict, Counter),
    "deque": (deque, lambda d: [list(d), d.maxlen], lambda parts: deque(*parts)),
}
_NAMES = {kind: name for name, (kind, _, _) in _NAMED.items()}


def pack_named(value: Any) -> list[Any] | None:
    """[name, plain form] of a value of one of these types, not of a subclass; None for any other."""
    name = _NAMES.get(type(value))
    return None if name is None else [name, _NAMED[name][1](value)]


def unpack_named(name: str, plain: Any) -> Any:
    """Raises KeyError, and what the type raises for a wrong form."""
    return _NAMED[name][2](plain)


# ---- objects of classes


def pack_object(value: Any) -> list[Any] | None:
    """[module, class, contents] of a dataclass, a named tuple or an enum; None for any other object."""
    kind = type(value)
    contents: Any
    if isinstance(value, enum.Enum):
        contents = value.name
    elif isinstance(value, tuple) and hasattr(kind, "_fields"):
        contents = None if getattr(value, "__dict__", None) else list(value)
    elif dataclasses.is_dataclass(kind) and _is_plain(kind):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(kind) if hasattr(value, f.name)}
        contents = {**getattr(value, "__dict__", {}), **fields}
    else:
        return None
    if loaded_class(kind.__module__, kind.__qualname__) is not kind or _is_main(kind.__module__):
        raise Unsupported("define its class at the top level of a module that both sides import")
    found = [kind.__module__, kind.__qualname__, contents]
    _check(kind, contents)
    return found


def unpack_object(module: str, name: str, contents: Any) -> Any:
    """Raises ValueError if the class is not loaded here or does not fit."""
    kind: Any = loaded_class(module, name)
    if kind is None:
        raise ValueError(f"a {module}.{name}, which is not loaded here: import {module} first")
    _check(kind, contents)
    if issubclass(kind, enum.Enum):
        return kind._member_map_[contents]
    if issubclass(kind, tuple):
        return tuple.__new__(kind, contents)
    made = object.__new__(kind)
    for field, value in contents.items():
        object.__setattr__(made, field, value)
    return made


def _check(kind: Any, contents: Any) -> None:
    """Raises ValueError unless `contents` are contents of this class."""
    if issubclass(kind, enum.Enum):
        fits = isinstance(contents, str) and contents in kind._member_map_
    elif issubclass(kind, tuple):
        fits = isinstance(contents, list) and len(getattr(kind, "_fields", ())) == len(contents)
    elif dataclasses.is_dataclass(kind) and _is_plain(kind):
        names = {field.name for field in dataclasses.fields(kind)}
        fits = isinstance(contents, dict) and names <= contents.keys()
        fits = fits and all(isinstance(key, str) and not key.startswith("__") for key in contents)
    else:
        fits = False
    if not fits:
        raise ValueError(f"contents that do not fit {kind.__module__}.{kind.__qualname__}")


def _is_plain(kind: Any) -> bool:
    """Whether objects of the class consist of their attributes, and run no code when they are freed."""
    if hasattr(kind, "__del__"):
        return False
    try:
        object.__new__(kind)
    except TypeError:  # a subclass of dict, for instance
        return False
    return True


def _is_main(module: str) -> bool:
    """Whether the module is the main program, which is another one for the receiver."""
    return module in ("__main__", "__mp_main__") or module.startswith(FILE_MODULE)


MAX_DEPTH = 64
_TUPLE, _ARRAY, _SCALAR, _TENSOR, _VALUE, _OBJECT, _PICKLE = range(1, 8)
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_DTYPE = re.compile(r"[<>|=][biufcSUmM][0-9]{1,9}(\[[0-9a-zA-Z]{1,8}\])?")
_TENSOR_DTYPE = re.compile(r"(b|u?i|f|bf|complex|float|bool|bfloat|u?int)[0-9]{0,3}(_[a-z0-9]{1,12})?")
_LENGTH = struct.Struct("<H")


class MalformedMessage(BadRequest, code="malformed"):
    """The bytes were not produced by `encode`: another program wrote them, or they are damaged."""


def encode(value: Any, allow_pickle: bool = False) -> bytes:
    """The bytes of a value. Raises BadRequest, which names the type, for an unsupported value, unless it can and may
    be pickled."""
    try:
        return _encoder.encode(_pack(value, 0, _pickled if allow_pickle else _refused))
    except (OverflowError, UnicodeEncodeError, RecursionError, ValueError) as e:
        if allow_pickle:
            return _encoder.encode(_pickled(value, describe(e)))
        raise BadRequest(f"the value cannot be sent over the broker: {describe(e)}") from None


def decode(data: bytes | bytearray | memoryview, allow_pickle: bool = False) -> Any:
    """The value in the bytes, which it does not share memory with. Raises MalformedMessage."""
    try:
        return _DECODERS[allow_pickle].decode(data)
    except Exception as e:  # from msgpack, from NumPy, or from an unhashable dict key
        raise MalformedMessage(f"the message cannot be read: {describe(e)}") from None


class BrokerCodec(Codec):
    """The codec of requests from a broker. It runs in the model's worker."""

    allow_pickle = False

    def __init__(self, model: str, version: str) -> None:
        self.model = model
        self.version = version

    def decode(self, item: Item) -> tuple[Any, None]:
        """The value that the caller sent. Raises MalformedMessage."""
        return decode(item.payload, self.allow_pickle), None

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """Raises BadOutput for an unsupported result."""
        try:
            return ItemResult(body=encode(value, self.allow_pickle))
        except BadRequest as e:
            raise BadOutput(f"the model's answer cannot be sent: {e.message}") from None

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """The one response, or a list of them. Requests of a broker have one row and are never split."""
        if len(parts) == 1:
            return parts[0]
        values = [decode(part.body, self.allow_pickle) for part in parts]
        return ItemResult(body=encode(values, self.allow_pickle))


class PicklingCodec(BrokerCodec):
    """A BrokerCodec that also reads and writes pickles, for brokers whose clients are all trusted."""

    allow_pickle = True


Refuse = Callable[[Any, str], Any]  # raises BadRequest for a value with this advice, or returns another form


def _refused(value: Any, advice: str) -> Any:
    kind = type(value)
    raise BadRequest(f"a {kind.__module__}.{kind.__qualname__} cannot be sent over the broker: {advice}")


def _pickled(value: Any, advice: str) -> Any:
    try:
        from penstock.streamer.redis import pickles  # only a program that trusts its broker

        return Ext(_PICKLE, pickles.dumps(value))
    except Exception as e:
        return _refused(value, f"pickling it raised {describe(e)}")


def _pack(value: Any, depth: int, refuse: Refuse) -> Any:
    """`value` in types that msgpack preserves: an extension replaces any other type, or `refuse` does."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth >= MAX_DEPTH:
        raise BadRequest(f"the value is nested deeper than {MAX_DEPTH} levels")
    if kind is list:
        return value if _PLAIN.issuperset(map(type, value)) else [_pack(v, depth + 1, refuse) for v in value]
    if kind is dict:
        if not _PLAIN.issuperset(map(type, value)):
            wrong = next(type(key).__name__ for key in value if type(key) not in _PLAIN)
            return refuse(value, f"found a {wrong} as key, expected str or int")
        return {k: _pack(v, depth + 1, refuse) for k, v in value.items()}
    if kind is np.ndarray or kind is np.memmap:
        return Ext(_ARRAY, _pack_array(value)) if _sendable(value) else refuse(value, _dtype_advice(value))
    if isinstance(value, np.generic):
        array = np.asarray(value)
        return Ext(_SCALAR, _pack_array(array)) if _sendable(array) else refuse(value, _dtype_advice(array))
    if kind is tuple:
        return Ext(_TUPLE, _encoder.encode([_pack(v, depth + 1, refuse) for v in value]))
    torch = sys.modules.get("torch")
    if torch is not None and kind is torch.Tensor:
        return Ext(_TENSOR, _pack_tensor(value))
    try:
        found, code = pack_named(value), _VALUE
        if found is None:
            found, code = pack_object(value), _OBJECT
    except (Unsupported, ValueError) as e:
        return refuse(value, str(e))
    return refuse(value, _ADVICE) if found is None else Ext(code, _encoder.encode(_pack(found, depth + 1, refuse)))


_ADVICE = (
    "expected None, bool, int, float, str, bytes, list, tuple, dict, set, a date or time, Decimal, UUID, a dataclass, a"
    " named tuple, an enum, a NumPy array or a torch tensor; convert it, or set allow_pickle on both sides"
)


def _dtype_advice(array: np.ndarray[Any, Any]) -> str:
    return f"found dtype {array.dtype}, expected numbers or text"


def _sendable(array: np.ndarray[Any, Any]) -> bool:
    return bool(_DTYPE.fullmatch(array.dtype.str) and array.dtype.itemsize)


def _pack_array(array: np.ndarray[Any, Any]) -> bytes:
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


class _Decoder:
    """Reads values; pickles only if `allow_pickle`."""

    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self.decode = msgspec.msgpack.Decoder(ext_hook=self._unpack).decode
        self._list = msgspec.msgpack.Decoder(list, ext_hook=self._unpack).decode

    def _unpack(self, code: int, data: memoryview) -> Any:
        if code == _TUPLE:
            return tuple(self._list(data))
        if code == _ARRAY:
            return _unpack_array(data)
        if code == _SCALAR:
            return _unpack_array(data)[()]
        if code == _TENSOR:
            return _unpack_tensor(data)
        if code == _VALUE:
            return unpack_named(*self._list(data))
        if code == _OBJECT:
            return unpack_object(*self._list(data))
        if code == _PICKLE and self._allow_pickle:
            from penstock.streamer.redis import pickles  # only a program that trusts its broker

            return pickles.loads(data)
        raise ValueError("a pickle: only allow_pickle accepts it" if code == _PICKLE else f"an extension {code}")


_encoder = msgspec.msgpack.Encoder()
_DECODERS = (_Decoder(False), _Decoder(True))
_head_decoder = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...]])
