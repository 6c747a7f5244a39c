"""Python types beyond msgpack's, for the codec of a broker: their names in a message, and their plain forms. Pure.

An object of a class (a dataclass, a named tuple, an enum) is sent as the class's name and its contents. The receiver
uses a class only if its program has imported it: a message imports nothing, and runs no code of the class.
"""

import dataclasses
import enum
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from penstock.plugins import FILE_MODULE, loaded_class


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
