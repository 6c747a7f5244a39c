"""The contract of ops: `check_op(cls, items)` for a class made from ItemOp or BatchOp."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from penstock.pipeline.ops.base import DATA, RESULT, BatchOp, Fields, ItemOp, Op
from penstock.pipeline.ops.parameters import make_op, parameters_of

KINDS = ("any", "bytes", "mat", "tensor")


def check_op(
    cls: type[Op], items: Sequence[Mapping[str, Any]], *, params: Mapping[str, Any] | None = None, device: str = "cpu"
) -> list[Any]:
    """Runs items, each a dict of fields with `data`, alone and together, and in two instances at once. Their results.

    Raises AssertionError: an op without words, or whose kinds, reads and writes are not as declared; that changes what
    it was given, whose answer depends on others or on what it did before, or that gives more or fewer than it got.
    """
    assert items, "check_op needs at least one item"
    _check_words(cls)
    op = _made(cls, params, device)
    results = [_alone(op, item) for item in items]
    for item, (result, fields) in zip(items, results, strict=True):
        _check_kinds(op, item, result)
        _check_fields(op, item, fields)
    written = {name for item, (_, fields) in zip(items, results, strict=True) for name in _changed(item, fields)}
    assert set(op.writes or ()) <= written, f"{cls.__name__} says that it writes {op.writes}, and wrote {written}"
    _check_again(op, _made(cls, params, device), items, results)
    op.unload()
    return [result for result, _ in results]


def same(a: Any, b: Any) -> bool:
    """Whether two results are the same: arrays by type, shape and value, lists and dicts by what is in them."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        alike = isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype == b.dtype
        return alike and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def _check_words(cls: type[Op]) -> None:
    assert issubclass(cls, ItemOp | BatchOp), f"{cls.__name__} is neither an ItemOp nor a BatchOp"
    assert cls.__doc__, f"{cls.__name__} has no docstring"
    assert {cls.takes, cls.gives} <= {*KINDS}, f"{cls.__name__}: kinds are {', '.join(KINDS)}"
    silent = [name for name, parameter in parameters_of(cls).items() if not parameter.doc]
    assert not silent, f"{cls.__name__}: no line '- `name`: ...' of its docstring tells of {', '.join(silent)}"


def _made(cls: type[Op], params: Mapping[str, Any] | None, device: str) -> Any:
    op = make_op(cls, params or {})
    op.load(device)
    return op


def _alone(op: Any, item: Mapping[str, Any]) -> tuple[Any, Fields]:
    """The result of one item and what became of its fields, which are a copy."""
    return _together(op, [item])[0]


def _together(op: Any, items: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Fields]]:
    fields = [dict(item) for item in items]
    before = copy.deepcopy([_values(item) for item in items])
    if isinstance(op, BatchOp):
        answers = op([one[DATA] for one in fields], fields)
        assert len(answers) == len(items), f"{type(op).__name__} gave {len(answers)} results for {len(items)} items"
        results = list(answers)
    else:
        results = [op(one[DATA], one) for one in fields]
    for item, then in zip(items, before, strict=True):
        assert same(_values(item), then), f"{type(op).__name__} changed what it was given"
    return list(zip(results, fields, strict=True))


def _values(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if isinstance(value, np.ndarray | list | dict)}


def has_kind(value: Any, kind: str) -> bool:
    """Whether a value is of a kind that `Op.takes` and `Op.gives` speak of; a list, if all of it is."""
    if isinstance(value, list) and kind in ("mat", "tensor"):
        return all(has_kind(one, kind) for one in value)
    if kind == "bytes":
        return isinstance(value, bytes | bytearray | memoryview)
    if kind == "mat":
        image = isinstance(value, np.ndarray) and value.dtype.name in ("uint8", "float32")
        return image and (value.ndim == 2 or (value.ndim == 3 and 1 <= value.shape[2] <= 4))
    return kind == "any" or (isinstance(value, np.ndarray) and value.ndim > 0)


def _check_kinds(op: Op, item: Mapping[str, Any], result: Any) -> None:
    name = type(op).__name__
    assert not isinstance(result, BaseException), f"{name} failed: {result!r}"
    assert has_kind(item[DATA], op.takes), f"{name} takes '{op.takes}': the check was given {item[DATA]!r}"
    assert has_kind(result, op.gives), f"{name} says that it gives '{op.gives}', and gave {result!r}"


def _changed(item: Mapping[str, Any], fields: Fields) -> set[str]:
    """Names of fields that are new or have another value."""
    return {name for name, value in fields.items() if name not in item or value is not item[name]} - {RESULT}


def _check_fields(op: Op, item: Mapping[str, Any], fields: Fields) -> None:
    name = type(op).__name__
    assert set(op.reads) <= set(item), f"{name} reads {op.reads}: the check was given {', '.join(item)}"
    extra = _changed(item, fields) - set(op.writes or ())
    assert op.writes is None or not extra, f"{name} wrote {', '.join(sorted(extra))}, which it does not declare"


def _check_again(op: Any, other: Any, items: Sequence[Mapping[str, Any]], results: list[tuple[Any, Fields]]) -> None:
    """The same answers again, together, and in two instances at once."""
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(_together, one, list(items) * 3) for one in (op, other)]
        for again in both:
            for i, (result, fields) in enumerate(again.result()):
                found, left = results[i % len(items)]
                assert same(result, found), f"item {i % len(items)} alone gave {found!r}, among others {result!r}"
                assert left.keys() == fields.keys()
