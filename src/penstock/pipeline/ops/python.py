"""Ops that are written in Python by users: `Python[pkg.mod:Class]`, and what may stand there.

They hold Python's lock while they run their own code, so their instances take turns: threads help where the time is
spent in NumPy, OpenCV or a network, and hinder where it is spent in loops. Then raise `--workers`, not `instances`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from penstock.errors import ConfigError
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import RESULT, BatchOp, Fields, ItemOp, Op
from penstock.pipeline.ops.parameters import make_op
from penstock.plugins import load_object

_DECLARED = ("takes", "gives", "reads", "writes")
_Target = TypeVar("_Target", bound=Callable[..., Any])


def op(
    *,
    takes: str = "any",
    gives: str = "any",
    reads: Sequence[str] = (),
    writes: Sequence[str] | None = (),
    batch: bool = False,
    max_rows: int | None = None,
) -> Callable[[_Target], _Target]:
    """A decorator that declares of a function or a class what `penstock.pipeline.ops.base.Op` has as attributes.

    With `batch` it is called with a list of data (and one of fields), and returns a result for each; an exception in
    the place of one fails that item alone. `max_rows` is the most that it is called with.
    """

    def declare(target: _Target) -> _Target:
        told: dict[str, Any] = {"takes": takes, "gives": gives, "reads": tuple(reads)}
        told |= {"writes": None if writes is None else tuple(writes), "batch": batch, "max_rows": max_rows}
        for name, value in told.items():
            setattr(target, name, value)
        return target

    return declare


class Python(ItemOp):
    """What `target` names, as an op: a function, or a class whose instances are called. Other parameters are its own.

    See `adapt` for all that may stand there.

    - `target`: `pkg.mod:Class`, `file.py:Class`, a function in place of a class, or a name that is registered.
    """

    brackets = "target"
    writes = None

    def __new__(cls, target: str, **params: Any) -> Any:
        return make_op(resolve(target), params)

    def __init__(self, target: str, **params: Any) -> None:
        """Never run: `__new__` gives another op. Here for its parameters to be seen."""


def resolve(target: str) -> type[Op]:
    """The op that a target names. Raises ConfigError, or LoadFailed when its module raises."""
    return adapt(load_object(target), target) if ":" in target else catalog.find(target)


def adapt(target: Any, name: str = "") -> type[Op]:
    """An op for what a user wrote. Raises ConfigError.

    An ItemOp or BatchOp, as it is; a class as TorchPipe has them (`init(params) -> bool`, `forward(list of dicts)`,
    `max()`); a class whose instances are called, its `__init__` having the parameters; or a function. What is called
    gets the data, and the fields too if it takes two arguments, and returns the result. Unless it declares otherwise
    (`op`, or attributes of a class), it may write any field.
    """
    name = name or getattr(target, "__name__", repr(target))
    if inspect.isclass(target):
        if issubclass(target, ItemOp | BatchOp):
            return target
        call = next((vars(c)["__call__"] for c in target.__mro__ if "__call__" in vars(c)), None)
        if call is not None:
            return _declared(_called_op(target, call, name, bound=True), target, name)
        if callable(getattr(target, "forward", None)):
            return _declared(_forward_op(target), target, name)
    elif callable(target):
        return _declared(_called_op(lambda: target, target, name), target, name)
    raise ConfigError(
        f"'{name}' is {target!r}, expected a function, a class whose instances can be called, or a class with forward()"
    )


def _declared(made: type[Op], target: Any, name: str) -> type[Op]:
    """The op with what its target declares of itself, and its name and docstring."""
    made.writes = None
    for attribute in _DECLARED:
        if hasattr(target, attribute):
            setattr(made, attribute, getattr(target, attribute))
    made.__name__ = made.__qualname__ = name.rpartition(":")[2]
    made.__doc__ = inspect.getdoc(target)
    return made


def _arity(function: Callable[..., Any], name: str, bound: bool) -> int:
    """How many of (data, fields) a function takes: 1 or 2. Raises ConfigError."""
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(f"'{name}' is asynchronous or a generator, expected what returns its result")
    try:
        parameters = list(inspect.signature(function).parameters.values())[int(bound) :]
    except ValueError:  # some builtins do not tell
        return 1
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in places)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or (
        needed < 2 <= len(places) and places[1].name == "fields"
    ):
        return 2
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if needed > 2 or not places or keywords:
        raise ConfigError(f"'{name}' takes {inspect.signature(function)}, expected (data) or (data, fields)")
    return max(1, needed)


def _called_op(make: Callable[..., Any], function: Callable[..., Any], name: str, bound: bool = False) -> type[Op]:
    """An op that calls what `make` makes."""
    both = _arity(function, name, bound) == 2
    hook = make if inspect.isclass(make) else function

    class Called(ItemOp):
        inner: Any

        def __call__(self, data: Any, fields: Fields) -> Any:
            return self.inner(data, fields) if both else self.inner(data)

    class CalledInBatches(BatchOp):
        inner: Any
        max_rows = getattr(hook, "max_rows", None)

        def __call__(self, data: list[Any], fields: list[Fields]) -> Sequence[Any]:
            results: Sequence[Any] = self.inner(data, fields) if both else self.inner(data)
            return results

    made: Any = CalledInBatches if getattr(hook, "batch", False) else Called
    made.__init__ = _initialiser(make)
    for call, event in (("load", 2), ("unload", 1)):
        if inspect.isclass(make) and callable(getattr(make, call, None)):
            setattr(made, call, _delegate(call, event))
    return made  # type: ignore[no-any-return]


def _initialiser(make: Callable[..., Any]) -> Callable[..., None]:
    """An `__init__` with the parameters of a class, which makes it as `inner`."""

    def init(self: Any, **params: Any) -> None:
        self.inner = make(**params)

    if inspect.isclass(make) and make.__init__ is not object.__init__:
        return functools.wraps(make.__init__)(init)

    def bare(self: Any) -> None:
        self.inner = make()

    return bare


def _delegate(name: str, arguments: int) -> Callable[..., None]:
    def call(self: Any, *args: Any) -> None:
        getattr(self.inner, name)(*args[: arguments - 1])

    return call


def _forward_op(target: type[Any]) -> type[Op]:
    """An op from a class as TorchPipe's users write them."""

    class Forward(BatchOp):
        def __init__(self, **params: Any) -> None:
            self.inner = target()
            self.max_rows = 1
            if hasattr(self.inner, "init") and self.inner.init({k: _text(v) for k, v in params.items()}) is False:
                raise ConfigError(f"{target.__name__}.init returned False for {params}")
            if hasattr(self.inner, "max"):
                self.max_rows = max(1, int(self.inner.max()))

        def __call__(self, data: list[Any], fields: list[Fields]) -> Sequence[Any]:
            for item in fields:
                item.pop(RESULT, None)
            self.inner.forward(fields)
            return [item.get(RESULT) for item in fields]

    return Forward


def _text(value: Any) -> str:
    """A value as TorchPipe has them all, as text."""
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)
