"""Ops that look at no pixels: they pass the data on, and write, move and drop other fields.

Their names and parameters are TorchPipe's. `Copy`, `Move`, `Add`, `AddInt` and `Remove` have theirs in brackets:
`Copy[box:first_box]`.
"""

from __future__ import annotations

import time
from typing import Any

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.base import CONTEXT, DATA, EVENT, NODE_NAME, RESULT, Fields, ItemOp

_KEPT = {DATA, RESULT, NODE_NAME, CONTEXT, EVENT}


def field(fields: Fields, name: str, op: str) -> Any:
    """The value of a field. Raises BadRequest where the item has none of this name."""
    if name not in fields:
        raise BadRequest(f"{op} found no field '{name}', only: {', '.join(sorted(map(str, fields)))}")
    return fields[name]


class Identity(ItemOp):
    """The data as it is."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        return data


class Result2Key(ItemOp):
    """The data as it is, and in the field `key`, too. `Result2Key[X]` keeps what X gave.

    - `key`: the field to write.
    """

    wraps = True
    writes = None

    def __init__(self, key: str = "key") -> None:
        self.key = key

    def __call__(self, data: Any, fields: Fields) -> Any:
        fields[self.key] = data
        return data


class Result2Other(Result2Key):
    """Result2Key, with its field under another name.

    - `other`: the field to write.
    """

    def __init__(self, other: str = "other") -> None:
        super().__init__(other)


class KeyA2KeyB(ItemOp):
    """The data as it is; the value of the field `key_a` is in the field `key_b`, too.

    - `key_a`: the field to read.
    - `key_b`: the field to write.
    """

    writes = None

    def __init__(self, key_a: str, key_b: str) -> None:
        if key_a == RESULT or key_b == DATA:
            raise ConfigError(f"key_a = '{key_a}' and key_b = '{key_b}': key_a may not be result, nor key_b data")
        self.key_a, self.key_b = key_a, key_b

    def __call__(self, data: Any, fields: Fields) -> Any:
        value = field(fields, self.key_a, "KeyA2KeyB")
        if self.key_b == RESULT:
            return value
        fields[self.key_b] = value
        return data


def pairs_of(text: str, op: str) -> list[tuple[str, str]]:
    """The pairs in `a:b,c:d`. Raises ConfigError."""
    pairs = [tuple(part.strip().split(":")) for part in text.split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise ConfigError(f"{op} found '{text}' in its brackets, expected pairs: {op}[a:b,c:d]")
    return [(first, second) for first, second in pairs]


class _Pairs(ItemOp):
    """What has pairs in its brackets. The data stays as it is.

    - `pairs`: `a:b,c:d`.
    """

    brackets = "pairs"
    writes = None

    def __init__(self, pairs: str) -> None:
        self.pairs = pairs_of(pairs, type(self).__name__)
        if any(DATA in pair for pair in self.pairs):
            raise ConfigError(f"{type(self).__name__}[{pairs}]: the field data is passed on as it is")


class Copy(_Pairs):
    """The data as it is; the values of the first fields are in the second, too: `Copy[box:first_box]`."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        for source, name in self.pairs:
            fields[name] = field(fields, source, "Copy")
        return data


class Move(_Pairs):
    """The data as it is; the values of the first fields are in the second instead: `Move[box:first_box]`."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        for source, name in self.pairs:
            value = field(fields, source, "Move")
            del fields[source]
            fields[name] = value
        return data


class Add(_Pairs):
    """The data as it is; the first fields are the second texts: `Add[stage:first]`."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        fields.update(self.pairs)
        return data


class AddInt(_Pairs):
    """The data as it is; the first fields are the second whole numbers: `AddInt[resize_h:224]`."""

    def __init__(self, pairs: str) -> None:
        super().__init__(pairs)
        try:
            self.numbers = {name: int(value) for name, value in self.pairs}
        except ValueError as e:
            raise ConfigError(f"AddInt found '{pairs}' in its brackets, expected whole numbers: AddInt[a:1]") from e

    def __call__(self, data: Any, fields: Fields) -> Any:
        fields.update(self.numbers)
        return data


class Remove(ItemOp):
    """The data as it is, without these fields: `Remove[color,box]`. Fields that are not there are no error.

    - `keys`: fields, with commas between.
    """

    brackets = "keys"

    def __init__(self, keys: tuple[str, ...]) -> None:
        if DATA in keys:
            raise ConfigError("Remove[data]: the field data is passed on as it is")
        self.keys = keys

    def __call__(self, data: Any, fields: Fields) -> Any:
        for key in self.keys:
            fields.pop(key, None)
        return data


class Keep(ItemOp):
    """The data as it is, and of the other fields only these.

    - `keep`: fields, with commas between.
    """

    def __init__(self, keep: tuple[str, ...] = ()) -> None:
        self.keys = {*keep, *_KEPT}

    def __call__(self, data: Any, fields: Fields) -> Any:
        for key in [key for key in fields if key not in self.keys]:
            del fields[key]
        return data


class Sleep(ItemOp):
    """The data as it is, after a while. Other threads run meanwhile.

    - `time`: how long, in milliseconds, as TorchPipe counts it (`Sleep::time`).
    """

    def __init__(self, time: float = 10.0) -> None:
        if not 0 <= time < float("inf"):
            raise ConfigError(f"Sleep: time = {time}, expected 0 milliseconds or more")
        self.wait_s = time / 1000

    def __call__(self, data: Any, fields: Fields) -> Any:
        time.sleep(self.wait_s)
        return data


class Raise(ItemOp):
    """Nothing: every item fails, with a RuntimeError. For trying what follows from it."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        raise RuntimeError("this op raises, as it is meant to")
