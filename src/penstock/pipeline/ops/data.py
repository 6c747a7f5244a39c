"""Ops that pass the data on unchanged, and write, move or remove other fields.

Their names and parameters are TorchPipe's. `Copy`, `Move`, `Add`, `AddInt` and `Remove` have theirs in brackets:
`Copy[box:first_box]`.
"""

import time
from typing import Any

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.base import CONTEXT, DATA, EVENT, NODE_NAME, RESULT, Fields, ItemOp


def field(fields: Fields, name: str, op: str) -> Any:
    """The value of a field. Raises BadRequest if the item does not have it."""
    if name not in fields:
        raise BadRequest(f"{op} found no field '{name}', only: {', '.join(sorted(map(str, fields)))}")
    return fields[name]


class Identity(ItemOp):
    """The unchanged data."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        return data


class Result2Key(ItemOp):
    """The unchanged data, also stored in the field `key`. `Result2Key[X]` stores the result of X.

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
    """Result2Key with another parameter name.

    - `other`: the field to write.
    """

    def __init__(self, other: str = "other") -> None:
        super().__init__(other)


class KeyA2KeyB(ItemOp):
    """The unchanged data. Copies the field `key_a` to the field `key_b`.

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


class _Pairs(ItemOp):
    """An op with pairs in its brackets.

    - `pairs`: `a:b,c:d`.
    """

    brackets = "pairs"
    writes = None

    def __init__(self, pairs: str) -> None:
        op = type(self).__name__
        split = [part.strip().split(":") for part in pairs.split(",")]
        if any(len(pair) != 2 or not all(pair) for pair in split):
            raise ConfigError(f"{op} found '{pairs}' in its brackets, expected pairs: {op}[a:b,c:d]")
        if any(DATA in pair for pair in split):
            raise ConfigError(f"{op}[{pairs}]: the field data cannot be changed")
        self.pairs = [(first, second) for first, second in split]


class Copy(_Pairs):
    """The unchanged data. Copies the first field of each pair to the second: `Copy[box:first_box]`."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        for source, name in self.pairs:
            fields[name] = field(fields, source, "Copy")
        return data


class Move(_Pairs):
    """The unchanged data. Renames the first field of each pair to the second: `Move[box:first_box]`."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        for source, name in self.pairs:
            field(fields, source, "Move")
            fields[name] = fields.pop(source)
        return data


class Add(_Pairs):
    """The unchanged data. Sets the first field of each pair to the second text: `Add[stage:first]`."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        fields.update(self.pairs)
        return data


class AddInt(_Pairs):
    """The unchanged data. Sets the first field of each pair to the second whole number: `AddInt[resize_h:224]`."""

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
    """The unchanged data, without these fields: `Remove[color,box]`. Missing fields are not an error.

    - `keys`: fields, separated by commas.
    """

    brackets = "keys"

    def __init__(self, keys: tuple[str, ...]) -> None:
        if DATA in keys:
            raise ConfigError("Remove[data]: the field data cannot be changed")
        self.keys = keys

    def __call__(self, data: Any, fields: Fields) -> Any:
        for key in self.keys:
            fields.pop(key, None)
        return data


class Keep(ItemOp):
    """The unchanged data. Removes all other fields except these.

    - `keep`: fields, separated by commas.
    """

    def __init__(self, keep: tuple[str, ...] = ()) -> None:
        self.keys = {*keep, DATA, RESULT, NODE_NAME, CONTEXT, EVENT}

    def __call__(self, data: Any, fields: Fields) -> Any:
        for key in [key for key in fields if key not in self.keys]:
            del fields[key]
        return data


class CopySplit(ItemOp):
    """A list with the data several times, for tests of fan-outs.

    - `split_size`: the length of the list.
    """

    def __init__(self, split_size: int = 1) -> None:
        if not 1 <= split_size <= 1024:
            raise ConfigError(f"CopySplit: split_size = {split_size}, expected 1 to 1024")
        self.count = split_size

    def __call__(self, data: Any, fields: Fields) -> Any:
        return [data] * self.count


class Sleep(ItemOp):
    """The unchanged data, after a delay that does not block other threads.

    - `time`: milliseconds, as in TorchPipe (`Sleep::time`).
    """

    def __init__(self, time: float = 10.0) -> None:
        if not 0 <= time < float("inf"):
            raise ConfigError(f"Sleep: time = {time}, expected 0 milliseconds or more")
        self.wait_s = time / 1000

    def __call__(self, data: Any, fields: Fields) -> Any:
        time.sleep(self.wait_s)
        return data


class Raise(ItemOp):
    """No result: every item fails with a RuntimeError. For tests of error handling."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        raise RuntimeError("this op always raises")
