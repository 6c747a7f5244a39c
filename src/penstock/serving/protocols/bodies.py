"""Bodies as values and back: JSON, text and forms, with errors that say where a body is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from penstock.errors import BadOutput, BadRequest

JSON: Final = "application/json"
MAX_FIELDS: Final = 1000  # of a form; more is an attack on the parser, not an input of a model

_BYTE = re.compile(r"byte (\d+)")


def decode_json(body: bytes | memoryview, type: Any = Any) -> Any:
    """The value of a JSON body. Raises BadRequest with the byte where it stops being JSON."""
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as exc:
        raise BadRequest(f"the JSON body has the wrong form: {exc}") from None
    except msgspec.DecodeError as exc:
        found = str(exc)
        if _BYTE.search(found) is None:  # msgspec names no byte when the input just ends
            found = f"the body ends at byte {len(body)} inside a value" if len(body) else "the body is empty (byte 0)"
        raise BadRequest(f"the body is not valid JSON: {found}") from None
    except UnicodeDecodeError:
        raise BadRequest(f"the body is not valid JSON: {_bad_utf8(body)}") from None
    except RecursionError:
        raise BadRequest("the JSON body is nested too deeply") from None


def _bad_utf8(body: bytes | memoryview) -> str:
    """Where the body stops being UTF-8; the decoder itself counts from the start of a string."""
    try:
        str(body, "utf-8")
    except UnicodeDecodeError as exc:
        return f"invalid UTF-8 (byte {exc.start})"
    return "an escape names half a character"


def split_type(content_type: str) -> tuple[str, str]:
    """Media type in lower case, and the charset ("utf-8" unless named)."""
    kind, _, params = content_type.partition(";")
    charset = "utf-8"
    for param in params.split(";"):
        name, _, value = param.partition("=")
        if name.strip().lower() == "charset":
            charset = value.strip().strip('"')
    return kind.strip().lower(), charset


def decode_text(body: bytes | memoryview, charset: str) -> str:
    """The text of a body. Raises BadRequest for an unknown charset or bytes that are not in it."""
    try:
        return str(body, charset)
    except UnicodeDecodeError as exc:
        raise BadRequest(f"the text body is not {charset}: bad byte at offset {exc.start}") from None
    except (LookupError, ValueError):
        raise BadRequest(f"unknown charset {charset[:40]!r} in the content type") from None


def decode_form(body: bytes | memoryview) -> dict[str, Any]:
    """The fields of a urlencoded body; a name that comes several times has the list of its values."""
    try:
        pairs = parse_qsl(str(body, "utf-8"), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as exc:  # UnicodeDecodeError is one
        raise BadRequest(f"the urlencoded body cannot be read: {exc}") from None
    return collect(pairs)


def collect(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Name to value; the list of values where a name comes several times."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name not in fields:
            fields[name] = value
        elif isinstance(fields[name], list):
            fields[name].append(value)
        else:
            fields[name] = [fields[name], value]
    return fields


def _hook(value: Any) -> Any:
    """Plain lists and numbers of whatever knows them: arrays and scalars of numpy, tensors, kinds of str and int."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise BadOutput(f"the model returned a value of type {type(value).__name__}, which JSON cannot hold")
    return tolist()


def _has_nan(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_nan, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_has_nan, value))
    if hasattr(value, "tolist"):
        return _has_nan(value.tolist())
    return isinstance(value, msgspec.Struct) and _has_nan(msgspec.structs.astuple(value))


def encode_json(value: Any) -> bytes:
    """The value as JSON. Raises BadOutput for NaN, infinity and for what JSON cannot hold."""
    try:
        body = msgspec.json.encode(value, enc_hook=_hook)
        # NaN becomes null in silence, so only an output that has a null somewhere is looked through
        if b"null" in body and _has_nan(value):
            raise BadOutput("the model returned NaN or infinity, which JSON cannot hold")
    except RecursionError:
        raise BadOutput("the model returned a value that is nested too deeply, or holds itself") from None
    except (TypeError, ValueError, OverflowError) as exc:
        raise BadOutput(f"the model returned a {type(value).__name__} that JSON cannot hold: {exc}") from None
    return body
