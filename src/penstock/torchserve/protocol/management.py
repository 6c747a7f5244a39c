"""Parsers for the queries and bodies of TorchServe's management API. Pure.

As in TorchServe, the first value of a repeated parameter counts, unknown parameters are ignored, and the default
replaces a number that cannot be used; `warn` receives a line about it. Other invalid values, and text or fractions
where a JSON body has a number, raise ApiError, which states what was found and what was expected.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Final

from msgspec import Meta

from penstock.errors import BadRequest
from penstock.serving.protocols.bodies import decode_json, split_type
from penstock.torchserve.archive.manifest import RUNTIMES
from penstock.torchserve.protocol.api import ApiError, RegisterRequest, WorkflowRequest
from penstock.values import convert, found, shorten

Query = Mapping[str, list[str]]  # as urllib.parse.parse_qs gives it, blank values kept
Warn = Callable[[str], None]

MAX_INT: Final = 2**31 - 1  # the largest number that a client of TorchServe can send
PAGE_SIZE: Final = 100  # models on one page of the list: the default and the maximum
_LEAST: Final = {
    "batch_size": 1, "max_batch_delay": 0, "initial_workers": 0, "response_timeout": 1, "startup_timeout": 1,
}  # fmt: skip

_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")  # int() itself refuses more digits
_SHOWN: Final = 40  # characters of an invalid name that a message shows


def read_registration(query: Query, content_type: str, body: bytes | memoryview, warn: Warn) -> RegisterRequest:
    """The parameters of `POST /models`: from its JSON body if it has one, else from its query."""
    strict = bool(len(body)) and split_type(content_type)[0] == "application/json"
    values: Mapping[str, Any]
    values = _object(body, '{"url": "model.mar", "initial_workers": 1}') if strict else _first(query)
    given: dict[str, Any] = {name: _text(name, values.get(name)) for name in ("model_name", "handler", "runtime")}
    given["url"] = "" if values.get("url") == "" else _text("url", values.get("url"))
    given |= {name: _integer(name, values.get(name), least, warn, strict=strict) for name, least in _LEAST.items()}
    synchronous = _boolean("synchronous", values.get("synchronous"))
    s3_sse_kms = bool(_boolean("s3_sse_kms", values.get("s3_sse_kms")))
    return check_registration(RegisterRequest(**given, synchronous=synchronous, s3_sse_kms=s3_sse_kms))


def read_workflow(query: Query, content_type: str, body: bytes | memoryview, warn: Warn) -> WorkflowRequest:
    """The parameters of `POST /workflows`: from its JSON body if it has one, else from its query."""
    strict = bool(len(body)) and split_type(content_type)[0] == "application/json"
    values: Mapping[str, Any] = _object(body, '{"url": "workflow.war"}') if strict else _first(query)
    given: dict[str, Any] = {}
    for name in ("response_timeout", "startup_timeout"):
        given[name] = _integer(name, values.get(name), _LEAST[name], warn, strict=strict)
    given["url"] = "" if values.get("url") == "" else _text("url", values.get("url"))
    given["workflow_name"] = _text("workflow_name", values.get("workflow_name"))
    return WorkflowRequest(**given, s3_sse_kms=bool(_boolean("s3_sse_kms", values.get("s3_sse_kms"))))


def check_registration(registration: RegisterRequest) -> RegisterRequest:
    """The registration, unchanged. Raises ApiError if it has no URL or an unknown runtime."""
    if registration.url is None:
        raise ApiError("BadRequestException", "Parameter url is required.")
    if registration.runtime is not None and registration.runtime not in RUNTIMES:
        raise ApiError("BadRequestException", f"Invalid RuntimeType value: {registration.runtime[:_SHOWN]}")
    return registration


def read_scaling(query: Query, warn: Warn) -> dict[str, Any]:
    """The parameters of `PUT /models/{m}[/{ver}]`, as arguments of `Administrator.scale`.

    `version` serves paths without a version.
    """
    values = _first(query)
    minimum, maximum = (_integer(name, values.get(name), -MAX_INT, warn) for name in ("min_worker", "max_worker"))
    version = _text("model_version", values.get("model_version"))
    synchronous = bool(_boolean("synchronous", values.get("synchronous")))
    if minimum is not None and minimum < 0:
        raise _invalid("min_worker", minimum, f"a whole number from 0 to {MAX_INT}")
    return {"version": version, "min_worker": minimum, "max_worker": maximum, "synchronous": synchronous}


def read_page(query: Query, warn: Warn) -> tuple[int, int]:
    """(page size, index of the first model) of `GET /models`. The largest page has 100 models."""
    values = _first(query)
    limit = _integer("limit", values.get("limit"), 1, warn)
    return min(limit or PAGE_SIZE, PAGE_SIZE), _integer("next_page_token", values.get("next_page_token"), 0, warn) or 0


def read_customized(query: Query) -> bool:
    """True if `GET /models/{m}` includes the handler's own description."""
    return bool(_boolean("customized", _first(query).get("customized")))


def read_weights(body: bytes | memoryview) -> dict[str, float]:
    """{version: weight} of `PUT /models/{m}/traffic`: numbers from 0, at least one above 0."""
    example = '{"1.0": 9, "2.0": 1}'
    weights: dict[str, float] = {}
    for version, weight in _object(body, example).items():
        where = f"the weight of version '{shorten(version)}'"
        weights[version] = convert(weight, Annotated[float, Meta(ge=0, le=MAX_INT)], where, error=_bad_request)
    if not math.fsum(weights.values()) > 0.0:
        raise ApiError("BadRequestException", f"no version has a weight above 0; expected an object such as {example}")
    return weights


def unknown_parameters(query: Query, known: Iterable[str]) -> list[str]:
    """The parameters without effect, for the log: at most ten, truncated."""
    known = frozenset(known)
    return [name[:_SHOWN] for name in query if name not in known][:10]


# ---- values

_bad_request = partial(ApiError, "BadRequestException")


def _first(query: Query) -> dict[str, str]:
    return {name: values[0] for name, values in query.items() if values}


def _object(body: bytes | memoryview, example: str) -> dict[str, Any]:
    try:
        value = decode_json(body)
    except BadRequest as exc:
        raise ApiError("BadRequestException", f"{exc.message}; expected an object such as {example}") from None
    if not isinstance(value, dict):
        raise _bad_request(f"the JSON body: found {found(value)}, expected an object such as {example}")
    return value


def _text(name: str, value: Any) -> str | None:
    """The string; None if missing or empty."""
    return convert(value, str | None, name, error=_bad_request) or None


def _boolean(name: str, value: Any) -> bool | None:
    """TorchServe's rule: "true" in any case is true, every other word is false."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise _invalid(name, value, "true or false")
    return value.lower() == "true"


def _integer(name: str, value: Any, minimum: int, warn: Warn, *, strict: bool = False) -> int | None:
    """The integer; None, the default, if it is missing or cannot be used. Negative numbers are 0 if 0 is valid.

    With `strict`, raises ApiError for anything that is not a whole number of 32 bits.
    """
    if value is None:
        return None
    number = _whole(value)
    if number is not None and minimum <= number <= MAX_INT:
        return number
    expected = f"a whole number from {minimum} to {MAX_INT}"
    small = number is not None and -MAX_INT <= number < minimum
    if strict and not small:
        raise _invalid(name, value, expected)
    used = 0 if small and minimum == 0 else None
    instead = "the default" if used is None else used
    warn(f"parameter={name} found={found(value)} expected={expected} used={instead}")
    return used


def _whole(value: Any) -> int | None:
    """The integer in a JSON value or a text; None if there is none."""
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():  # from clients whose language has one number type
        return int(value)
    return None


def _invalid(name: str, value: Any, expected: str) -> ApiError:
    return _bad_request(f"{name}: found {found(value)}, expected {expected}")
