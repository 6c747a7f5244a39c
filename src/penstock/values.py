"""Values from loose text, and values in words: "found X, expected Y" is written here. Pure."""

import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
from msgspec import ValidationError, inspect

from penstock.errors import ConfigError, PenstockError, nearest
from penstock.types import DTYPES, TensorSpec

_WORDS: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
TIME_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SIZE_UNITS = {"B": 1} | {f"{k}B": 1000**n for n, k in enumerate("KMGT", 1)}
SIZE_UNITS |= {f"{k}iB": 1024**n for n, k in enumerate("KMGT", 1)}
_QUANTITY: Final = re.compile(r"(\d{0,100}\.?\d{1,100}(?:e[-+]?\d{1,2})?) ?([A-Za-z%]*)", re.ASCII)
_LARGEST: Final = {"FP16": 65504.0, "BF16": 3.3895314e38, "FP32": 3.4028235e38}
_TENSOR: Final = re.compile(r"([A-Z0-9]+)\s*\[\s*-1((?:\s*,\s*(?:-1|[0-9]{1,9}))*)\s*\]")
_SPLIT: Final = re.compile(r"[,\s]+")
_ELEMENT: Final = re.compile(r"at `\$\[(\d+)\]`")  # in a message of msgspec


def bare(kind: Any) -> Any:
    """The type without its annotations."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


# ---- reading


def prepare(*kinds: Any) -> None:
    """Lets msgspec analyse these types. A module does so for those that several threads read, because msgspec 0.22
    crashes when two threads are the first to use a type; one thread imports."""
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)


def convert(
    value: Any, kind: Any, where: str = "", *, loose: bool = False, error: Callable[[str], PenstockError] = ConfigError
) -> Any:
    """The value as a type that msgspec knows. Raises `error`: where, found, expected; also for infinity and NaN.

    With `loose`, text may stand for numbers ("224"), for booleans ("on") and for tuples ("0.5, 0.25"), as in TOML files
    for TorchPipe; any class is a type, and a number without bounds may be infinite or NaN.
    """
    element = None
    try:
        read = _loosened(value, kind) if loose else msgspec.convert(value, kind)
        numbers = read if isinstance(read, tuple) else (read,)
        if (loose and kind is bare(kind)) or all(math.isfinite(n) for n in numbers if isinstance(n, float)):
            return read
    except ValidationError as invalid:
        element = _ELEMENT.search(str(invalid))
    if element and isinstance(value, list | tuple):
        value, where = value[int(element[1])], f"{where}[{element[1]}]"
    choices = get_args(bare(kind)) if get_origin(bare(kind)) is Literal and isinstance(value, str) else ()
    hint = nearest(value, map(str, choices)) if choices else ""
    raise error(f"{where}{': ' if where else ''}found {found(value)}, expected {expected(kind)}{hint}")


def quantity(text: str, units: Mapping[str, float]) -> float | None:
    """The number of a text such as "40GiB" or "1.5 ms", times its unit; None without a number or with another unit."""
    match = _QUANTITY.fullmatch(text.strip())
    return float(match[1]) * units[match[2]] if match and match[2] in units else None


def tensor_specs(given: Any, where: str) -> tuple[TensorSpec, ...]:
    """The tensors of a table such as `image = "FP32[-1,3,224,224]"`, or of a sequence of TensorSpec, in order. `where`
    is the key of the declaration, for messages.

    Raises ConfigError.
    """
    datatypes = f"datatypes are {', '.join(DTYPES)}"
    specs: list[TensorSpec] = []
    for name, text in given.items() if isinstance(given, Mapping) else ():
        if isinstance(text, TensorSpec):
            specs += tensor_specs((text,), where)
            continue
        match = _TENSOR.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or match[1] not in DTYPES:
            raise ConfigError(
                f"{where}.{name}: found {shorten(repr(text))}, expected a datatype and a shape such as"
                f' "FP32[-1,3,224,224]", with -1 for the rows first; {datatypes}'
            )
        specs.append(TensorSpec(str(name), match[1], (-1, *(int(n) for n in match[2].split(",")[1:]))))
    if isinstance(given, Mapping):
        return tuple(specs)
    for spec in given if isinstance(given, Iterable) else (given,):
        if not isinstance(spec, TensorSpec):
            raise ConfigError(
                f'{where}: found {shorten(repr(spec))}, expected a table such as {{"x": "FP32[-1,64]"}}, or a sequence'
                " of penstock.TensorSpec"
            )
        if spec.datatype not in DTYPES or not all(isinstance(n, int) and n >= -1 for n in spec.shape):
            raise ConfigError(
                f"{where}: found {spec}, expected for instance TensorSpec('x', 'FP32', (-1, 64)), with -1 for the rows"
                f" first; {datatypes}"
            )
        if spec.name in {other.name for other in specs}:
            raise ConfigError(f"{where}: found '{spec.name}' twice; expected a name of its own for each tensor")
        check_pad(spec, f"{where}.{spec.name}")
        specs.append(spec)
    return tuple(specs)


def check_pad(spec: TensorSpec, where: str) -> None:
    """Raises ConfigError for a value that the datatype does not have, and for a shape without one axis to pad."""
    pad, kind, bits = spec.pad, spec.datatype.rstrip("0123456789"), spec.datatype.lstrip("BFINPTU")
    number = isinstance(pad, int | float) and not isinstance(pad, bool)
    if pad is None:
        return
    if spec.shape[1:].count(-1) != 1:
        raise ConfigError(
            f"{where}.pad: found for the shape {list(spec.shape)}, expected one free axis beside the rows, as in"
            " [-1, -1]"
        )
    if kind in ("INT", "UINT"):
        least, most = (0, 2 ** int(bits) - 1) if kind == "UINT" else (-(2 ** (int(bits) - 1)), 2 ** (int(bits) - 1) - 1)
        fits = number and isinstance(pad, int) and least <= pad <= most
        wanted = f"a whole number from {least} to {most}"
    elif kind in ("FP", "BF"):
        most = _LARGEST.get(spec.datatype, sys.float_info.max)
        fits = number and (abs(pad) <= most or pad in (math.inf, -math.inf))  # type: ignore[arg-type]
        wanted = f"a number that {spec.datatype} has"
    else:
        fits, wanted = (isinstance(pad, bool), "true or false") if kind == "BOOL" else (isinstance(pad, str), "a text")
    if not fits:
        raise ConfigError(f"{where}.pad: found {found(pad)} for {spec.datatype}, expected {wanted}")


def _loosened(value: Any, kind: Any) -> Any:
    plain = bare(kind)
    origin, args = get_origin(plain), get_args(plain)
    text = value.strip() if isinstance(value, str) else value
    if plain is Any:
        return value
    if origin in (Union, types.UnionType):
        for arm in args:
            with suppress(ValidationError):
                return _loosened(value, arm)
    elif origin is Literal:
        word = text.lower() if isinstance(text, str) else text
        if word in args:
            return word
    elif origin is tuple:
        if isinstance(text, str):
            text = [part for part in _SPLIT.split(text) if part]
        elif isinstance(text, int | float) and not isinstance(text, bool):
            text = [text]
        if isinstance(text, list | tuple):
            return tuple(_loosened(part, args[0]) for part in text)
    elif plain is bool:
        if (word := str(text).lower()) in _WORDS:
            return _WORDS[word]
    elif plain is str:
        if isinstance(text, str | int | float):
            return str(text)
    elif plain in (int, float):
        with suppress(TypeError, ValueError, OverflowError):
            number = float("true" if isinstance(text, bool) else text)
            if plain is float or number.is_integer():
                return msgspec.convert(plain(number), kind)
    elif isinstance(value, origin or plain):
        return value
    raise ValidationError


# ---- words


def found(value: Any) -> str:
    """The value in TOML notation, or its type and size."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() if value.bit_length() > 128:
            return "a huge number"
        case int() | float():
            return f"{value}"
        case str():
            return f"the string {value!r}" if len(value) <= 60 else f"a string of {len(value)} characters"
        case list() | tuple():
            return f"a list of {len(value)}"
        case dict():
            return "a table"
        case None:
            return "nothing"
    return f"a {type(value).__name__} ({shorten(str(value))})"


def shorten(text: str, most: int = 60) -> str:
    """At most that many characters of the text; "..." stands for what is left out."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def printable(text: str, instead: str = " ") -> str:
    """The text on one line, without characters that a terminal obeys or XML cannot hold."""
    return text if text.isprintable() else "".join(c if c.isprintable() else instead for c in text)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines of text whose cells stand in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def expected(kind: Any) -> str:
    """The values of a type, such as "a whole number from 0 to 65535"; `Meta(title=...)` has other words for it."""
    try:
        return _words(inspect.type_info(kind))
    except TypeError:  # a union with a class, as a parameter of an op may have it
        return " or ".join(expected(arm) for arm in get_args(kind)) or str(getattr(kind, "__name__", kind))


def _words(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata():
            return (info.extra_json_schema or {}).get("title") or _words(info.type)
        case inspect.UnionType():
            # None is an absent key: TOML has no notation for it.
            return " or ".join(_words(t) for t in info.types if not isinstance(t, inspect.NoneType))
        case inspect.LiteralType():
            return " or ".join(f'"{value}"' if isinstance(value, str) else f"{value}" for value in info.values)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number" + _bounds(info)
        case inspect.FloatType():
            return "a number" + _bounds(info)
        case inspect.VarTupleType() | inspect.ListType():
            least = f" of {info.min_length} or more" if info.min_length else ""
            each = "" if isinstance(info.item_type, inspect.AnyType) else f", each {_words(info.item_type)}"
            return f"a list{least}{each}"
        case inspect.DictType() | inspect.StructType():
            return "a table"
        case inspect.CustomType():
            return f"a {info.cls.__name__}"
    return "a string"


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    most = "" if info.le is None else f" to {info.le:.16g}"
    if info.ge is not None:
        return f" from {info.ge:g}{most}"
    return "" if info.gt is None else f" above {info.gt:g}" + (f", up{most}" if most else "")
