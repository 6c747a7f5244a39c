"""Conformance check of ops: `check_op(cls, items)` for a subclass of ItemOp or BatchOp."""

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from penstock.pipeline.ops.base import (
    DATA,
    KINDS,
    MAT_TYPES,
    RESULT,
    BatchOp,
    Fields,
    ItemOp,
    Op,
    make_op,
    parameters_of,
)


def check_op(
    cls: type[Op], items: Sequence[Mapping[str, Any]], *, params: Mapping[str, Any] | None = None, device: str = "cpu"
) -> list[Any]:
    """The results of items, each a dict of fields with `data`, run alone, together, and in two instances concurrently.

    Raises AssertionError for an op that lacks documentation, whose kinds, reads or writes differ from its declaration,
    that changes its input, whose results depend on other or earlier items, or that returns too many or too few.
    """
    assert items, "check_op needs at least one item"
    _check_declarations(cls)
    op = _made(cls, params, device)
    results = [_together(op, [item])[0] for item in items]
    for item, (result, fields) in zip(items, results, strict=True):
        _check_kinds(op, item, result)
        _check_fields(op, item, fields)
    written = {name for item, (_, fields) in zip(items, results, strict=True) for name in _changed(item, fields)}
    assert set(op.writes or ()) <= written, f"{cls.__name__} declares that it writes {op.writes}, but wrote {written}"
    _check_again(op, _made(cls, params, device), items, results)
    op.unload()
    return [result for result, _ in results]


def same(a: Any, b: Any) -> bool:
    """Whether two results are equal: arrays by dtype, shape and value, lists and dicts by their elements."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        alike = isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype == b.dtype
        return alike and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def _check_declarations(cls: type[Op]) -> None:
    assert issubclass(cls, ItemOp | BatchOp), f"{cls.__name__} is neither an ItemOp nor a BatchOp"
    assert cls.__doc__, f"{cls.__name__} has no docstring"
    assert {cls.takes, cls.gives} <= {*KINDS}, f"{cls.__name__}: kinds are {', '.join(KINDS)}"
    silent = [name for name, parameter in parameters_of(cls).items() if not parameter.doc]
    assert not silent, f"{cls.__name__}: its docstring has no line '- `name`: ...' for {', '.join(silent)}"


def _made(cls: type[Op], params: Mapping[str, Any] | None, device: str) -> Any:
    op = make_op(cls, params or {})
    op.load(device)
    return op


def _together(op: Any, items: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Fields]]:
    """The results of one call, each with the copy of its item's fields after the call."""
    fields = [dict(item) for item in items]
    before = copy.deepcopy([_values(item) for item in items])
    if isinstance(op, BatchOp):
        answers = op([one[DATA] for one in fields], fields)
        assert len(answers) == len(items), f"{type(op).__name__} returned {len(answers)} results for {len(items)} items"
        results = list(answers)
    else:
        results = [op(one[DATA], one) for one in fields]
    for item, then in zip(items, before, strict=True):
        assert same(_values(item), then), f"{type(op).__name__} changed its input"
    return list(zip(results, fields, strict=True))


def _values(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if isinstance(value, np.ndarray | list | dict)}


def has_kind(value: Any, kind: str) -> bool:
    """Whether a value has a kind of `Op.takes` and `Op.gives`. A list has it if all its elements have it."""
    if isinstance(value, list) and kind in ("mat", "tensor"):
        return all(has_kind(one, kind) for one in value)
    if kind == "bytes":
        return isinstance(value, bytes | bytearray | memoryview)
    if kind == "mat":
        if not isinstance(value, np.ndarray) or value.dtype.num not in MAT_TYPES:
            return False
        shape = value.shape[1:] if value.ndim == 4 and not len(value) else value.shape
        return len(shape) == 2 or (len(shape) == 3 and 1 <= shape[2] <= 4)
    return kind == "any" or (isinstance(value, np.ndarray) and value.ndim > 0)


def _check_kinds(op: Op, item: Mapping[str, Any], result: Any) -> None:
    name = type(op).__name__
    assert not isinstance(result, BaseException), f"{name} failed: {result!r}"
    assert has_kind(item[DATA], op.takes), f"{name} takes '{op.takes}': the check received {item[DATA]!r}"
    assert has_kind(result, op.gives), f"{name} declares that it gives '{op.gives}', but gave {result!r}"


def _changed(item: Mapping[str, Any], fields: Fields) -> set[str]:
    """The names of fields that are new or have another value."""
    return {name for name, value in fields.items() if name not in item or value is not item[name]} - {RESULT}


def _check_fields(op: Op, item: Mapping[str, Any], fields: Fields) -> None:
    name = type(op).__name__
    assert set(op.reads) <= set(item), f"{name} reads {op.reads}: the check received {', '.join(item)}"
    extra = _changed(item, fields) - set(op.writes or ())
    assert op.writes is None or not extra, f"{name} wrote {', '.join(sorted(extra))}, which it does not declare"


def _check_again(op: Any, other: Any, items: Sequence[Mapping[str, Any]], results: list[tuple[Any, Fields]]) -> None:
    """Checks that the results are the same together and in two concurrent instances."""
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(_together, one, list(items) * 3) for one in (op, other)]
        for again in both:
            for i, (result, fields) in enumerate(again.result()):
                found, left = results[i % len(items)]
                assert same(result, found), f"item {i % len(items)} alone gave {found!r}, with others {result!r}"
                assert left.keys() == fields.keys()
