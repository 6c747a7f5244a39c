"""What the responses of a model must contain: a check of each response under load, and the comparison of two responses.

JSON is compared value by value: numbers may differ by the tolerance, relative to the larger of the expected value and
1. Two whole numbers may differ by the tolerance itself, because they are labels and counts: 281 is not nearly 282.
Everything else must be equal, including list lengths and bytes that are not JSON.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from penstock.errors import ConfigError
from penstock.values import shorten

TOLERANCE: Final = 0.01
JSON_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_STEP: Final = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_PATH: Final = re.compile(r"(\[\d+\]|[^.\[\]]+)(\[\d+\]|\.[^.\[\]]+)*")
_MISSING: Final = object()


class Expectation:
    """The check of `--expect`: a file with the response, a line of a .jsonl for each request, or PATH=VALUE.

    Counts nothing itself; `first` describes the first response that differs.
    """

    def __init__(self, text: str, requests: int) -> None:
        """Raises ConfigError for a missing file, a wrong number of lines, or neither a file nor PATH=VALUE."""
        self._path, self._wanted = _parsed(text)
        if len(self._wanted) not in (1, requests):
            raise ConfigError(
                f"--expect {text}: found {len(self._wanted)} lines, expected 1, or one for each of {requests} requests"
            )
        self._good: dict[int, bytes] = {}  # most models repeat themselves to the byte
        self.first = ""

    def __call__(self, number: int, status: int, body: bytes) -> bool:
        """Whether a response to request `number` is the expected one. Errors of the server are not counted here."""
        if not 200 <= status < 300 or self._good.get(number) == body:
            return True
        wanted = self._wanted[number % len(self._wanted)]
        found = body if isinstance(wanted, bytes) else _at(body, self._path)
        if found is _MISSING:
            size, where = float("inf"), f"the response has no '{self._path}': {body[:200].decode(errors='replace')}"
        else:
            size, where = difference(wanted, found, self._path)
        if size <= TOLERANCE:
            self._good[number] = body
        elif not self.first:
            self.first = f"to request {number + 1}, {where}"
        return size <= TOLERANCE


def _parsed(text: str) -> tuple[str, Sequence[Any]]:
    """(the path in the response, the expected values). Raises ConfigError."""
    file = Path(text)
    path, equals, value = text.partition("=")
    if not file.is_file():
        if not equals or not _PATH.fullmatch(path):
            raise ConfigError(f"--expect {text}: no such file, nor PATH=VALUE such as label=cat or scores[0]=0.9")
        try:
            return path, [msgspec.json.decode(value)]
        except JSON_ERRORS:
            return path, [value]
    try:
        content = file.read_bytes()
        if file.suffix == ".jsonl":
            return "", [msgspec.json.decode(line) for line in content.splitlines() if line.strip()]
        return "", [msgspec.json.decode(content) if file.suffix == ".json" else content]
    except OSError as error:
        raise ConfigError(f"--expect {text}: cannot be read: {error.strerror}") from None
    except JSON_ERRORS as error:
        raise ConfigError(f"--expect {text}: not JSON: {error}") from None


def _at(body: bytes, path: str) -> Any:
    """The value at a path such as `outputs[0].data` of a JSON body."""
    try:
        value = msgspec.json.decode(body)
        for step in _STEP.finditer(path):
            value = value[int(step[1]) if step[1] else step[2]]
    except (*JSON_ERRORS, KeyError, IndexError, TypeError):
        return _MISSING
    return value


def difference(expected: Any, found: Any, where: str = "") -> tuple[float, str]:
    """(the largest difference on the scale of the tolerance, its place in words); infinite if it is not numeric."""
    if _are_numbers([expected], [found]):
        return _of_numbers([expected], [found], where, "")
    if isinstance(expected, dict) and isinstance(found, dict):
        missing = [key for key in (*expected, *found) if key not in expected or key not in found]
        if missing:
            return float("inf"), f"{where or 'the response'}: only one of the two has '{missing[0]}'"
        pairs = [(f"{where}.{key}".lstrip("."), expected[key], found[key]) for key in expected]
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return float("inf"), f"{where or 'the response'}: found {len(found)} elements, expected {len(expected)}"
        if _are_numbers(expected, found):
            return _of_numbers(expected, found, where, "[]")
        pairs = [(f"{where}[{i}]", e, f) for i, (e, f) in enumerate(zip(expected, found, strict=True))]
    elif type(expected) is type(found) and expected == found:
        return 0.0, ""
    else:
        return float("inf"), f"{where or 'the response'}: found {_shown(found)}, expected {_shown(expected)}"
    return max((difference(e, f, at) for at, e, f in pairs), key=lambda d: d[0], default=(0.0, ""))


def _are_numbers(expected: list[Any], found: list[Any]) -> bool:
    """Whether both lists hold only numbers that one rule covers: integers in both, or floats throughout one of them."""
    kinds = set(map(type, expected)), set(map(type, found))
    return bool(expected) and ({float} in kinds or kinds == ({int}, {int})) and kinds[0] | kinds[1] <= {int, float}


def _of_numbers(expected: list[Any], found: list[Any], where: str, brackets: str) -> tuple[float, str]:
    """The largest difference of two lists that `_are_numbers` accepts; integers may have any size."""
    if type(expected[0]) is type(found[0]) is int:
        away = [abs(f - e) for e, f in zip(expected, found, strict=True)]
        at = away.index(max(away))
        size = float(min(away[at], 2**1000))
    else:
        a, b = np.array([_as_float(e) for e in expected]), np.array([_as_float(f) for f in found])
        with np.errstate(invalid="ignore", over="ignore"):
            sizes = np.abs(b - a) / np.maximum(1.0, np.abs(a))
        sizes = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.where(np.isnan(sizes), np.inf, sizes))
        at = int(sizes.argmax())
        size = float(sizes[at])
    place = f"{where}[{at}]" if brackets else where
    return size, f"{place or 'the response'}: found {_shown(found[at])}, expected {_shown(expected[at])}"


def _as_float(number: float) -> float:
    """The number as a float; infinity for an integer that is too large."""
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def _shown(value: Any) -> str:
    return shorten(f"{value:g}" if isinstance(value, float) else repr(value))
