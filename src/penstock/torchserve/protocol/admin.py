"""What the queries and bodies of TorchServe's management API say. Pure.

Of a parameter that comes several times the first one counts, as in TorchServe; one that is not known is not looked at.
Whatever is wrong raises ApiError, with what was found and what is expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import Struct

from penstock.errors import BadRequest
from penstock.serving.protocols.bodies import decode_json, split_type
from penstock.torchserve.protocol.api import ApiError, Registration

Query = Mapping[str, list[str]]  # as urllib.parse.parse_qs gives it, blank values kept

MOST: Final = 2**31 - 1  # the largest number that a client of TorchServe can have said
PAGE: Final = 100  # models of one page of the list, by default and at most
RUNTIMES: Final = ("python", "python3", "LSP")

_WHOLE = re.compile(r"[+-]?[0-9]{1,4000}")  # int() itself refuses more digits
_SHOWN: Final = 40  # characters of a wrong value


class Scaling(Struct, frozen=True):
    """What `PUT /models/{m}[/{ver}]` asks for; None: not said. `version` is for a path without one."""

    min_worker: int | None = None
    max_worker: int | None = None
    version: str | None = None
    synchronous: bool = False


def read_registration(query: Query, content_type: str, body: bytes | memoryview) -> Registration:
    """What `POST /models` asks for: its JSON body, if it has one, else its query."""
    values: Mapping[str, Any]
    if len(body) and split_type(content_type)[0] == "application/json":
        values = _object(body, '{"url": "model.mar", "initial_workers": 1}')
    else:
        values = _first(query)
    get = values.get
    registration = Registration(
        url=_text("url", get("url")),
        model_name=_text("model_name", get("model_name")),
        handler=_text("handler", get("handler")),
        runtime=_text("runtime", get("runtime")),
        batch_size=_whole("batch_size", get("batch_size"), 1),
        max_batch_delay=_whole("max_batch_delay", get("max_batch_delay"), 0),
        initial_workers=_whole("initial_workers", get("initial_workers"), 0),
        synchronous=_switch("synchronous", get("synchronous")),
        response_timeout=_whole("response_timeout", get("response_timeout"), 1),
        startup_timeout=_whole("startup_timeout", get("startup_timeout"), 1),
        s3_sse_kms=bool(_switch("s3_sse_kms", get("s3_sse_kms"))),
    )
    return check_registration(registration)


def check_registration(registration: Registration) -> Registration:
    """The registration itself. Raises ApiError if it names no archive, or a runtime that there is not."""
    if not registration.url:
        raise ApiError("BadRequestException", "Parameter url is required.")
    if registration.runtime is not None and registration.runtime not in RUNTIMES:
        raise ApiError("BadRequestException", f"Invalid RuntimeType value: {registration.runtime[:_SHOWN]}")
    return registration


def read_scaling(query: Query) -> Scaling:
    """What `PUT /models/{m}[/{ver}]` asks for."""
    values = _first(query)
    scaling = Scaling(
        _whole("min_worker", values.get("min_worker"), 0),
        _whole("max_worker", values.get("max_worker"), 0),
        _text("model_version", values.get("model_version")),
        bool(_switch("synchronous", values.get("synchronous"))),
    )
    least = 1 if scaling.min_worker is None else scaling.min_worker
    if scaling.max_worker is not None and scaling.max_worker < least:
        raise ApiError("BadRequestException", "max_worker cannot be less than min_worker.")
    return scaling


def read_page(query: Query) -> tuple[int, int]:
    """(models of a page, index of its first) of `GET /models`; a limit out of 1..100 is 100, a token below 0 is 0."""
    values = _first(query)
    limit = _number("limit", values.get("limit", str(PAGE)))
    token = _number("next_page_token", values.get("next_page_token", "0"))
    return limit if 1 <= limit <= PAGE else PAGE, min(max(token, 0), MOST)


def read_customized(query: Query) -> bool:
    """Whether `GET /models/{m}` asks the handler, too."""
    return bool(_switch("customized", _first(query).get("customized")))


def read_weights(body: bytes | memoryview) -> dict[str, float]:
    """version -> weight of `PUT /models/{m}/traffic`: numbers from 0, at least one of them above 0."""
    example = '{"1.0": 9, "2.0": 1}'
    weights: dict[str, float] = {}
    for version, weight in _object(body, example).items():
        right = isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 <= weight <= MOST
        if not right:
            raise ApiError(
                "BadRequestException",
                f"the weight of version {_cut(version)} is {_cut(weight)}, expected a number from 0 to {MOST}",
            )
        weights[version] = float(weight)
    if not math.fsum(weights.values()) > 0.0:
        raise ApiError("BadRequestException", f"no version has a weight above 0; expected for instance {example}")
    return weights


def unknown(query: Query, known: Iterable[str]) -> list[str]:
    """The parameters that have no effect, for the log; at most ten, cut to a sane length."""
    known = frozenset(known)
    return [name[:_SHOWN] for name in query if name not in known][:10]


# ---- values


def _first(query: Query) -> dict[str, str]:
    return {name: values[0] for name, values in query.items() if values}


def _object(body: bytes | memoryview, example: str) -> dict[str, Any]:
    try:
        found = decode_json(body)
    except BadRequest as exc:
        raise ApiError("BadRequestException", f"{exc.message}; expected for instance {example}") from None
    if not isinstance(found, dict):
        raise ApiError(
            "BadRequestException", f"the JSON body is {_cut(found)}, expected an object, for instance {example}"
        )
    return found


def _text(name: str, value: Any) -> str | None:
    """The text; None if it is not said, or empty."""
    if value is not None and not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value or None


def _switch(name: str, value: Any) -> bool | None:
    """TorchServe's rule: the word "true", in any case, is true, and every other word false."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise _wrong(name, value, "true or false")
    return value.lower() == "true"


def _whole(name: str, value: Any, least: int) -> int | None:
    """The number; None if it is not said."""
    if value is None:
        return None
    number = _number(name, value, least)
    if not least <= number <= MOST:
        raise _wrong(name, value, f"a whole number from {least} to {MOST}")
    return number


def _number(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():  # JSON of a client that has one kind of numbers
        return int(value)
    raise _wrong(name, value, f"a whole number from {least} to {MOST}")


def _wrong(name: str, value: Any, expected: str) -> ApiError:
    return ApiError("BadRequestException", f"{name} is {_cut(value)}, expected {expected}")


def _cut(value: Any) -> str:
    """The value as it stands in a message: a text in quotes, anything else by its kind or number, never long."""
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")
    if isinstance(value, (bool, type(None))):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 128):
        return repr(value)
    return {int: "a huge number", list: "a list", dict: "an object"}.get(type(value), type(value).__name__)
