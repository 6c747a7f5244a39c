"""Users' ops in Python: `Python[pkg.mod:Class]`, and the adapters of classes and functions.

Python code holds the interpreter lock, so instances take turns. Threads help an op that spends its time in NumPy,
OpenCV or a network, and slow down one that spends it in loops. Raise `--workers` for the latter, not `instances`.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from penstock.errors import ConfigError
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import RESULT, BatchOp, Fields, ItemOp, Op, check_kinds, make_op
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
    """A decorator that sets the declarations of `penstock.pipeline.ops.base.Op` on a function or a class.

    With `batch` the op receives a list of data (and one of fields), and returns a result for each. An exception as a
    result fails that item alone. `max_rows` limits the list.
    """

    def declare(target: _Target) -> _Target:
        declared: dict[str, Any] = {"takes": takes, "gives": gives, "reads": tuple(reads)}
        declared |= {"writes": None if writes is None else tuple(writes), "batch": batch, "max_rows": max_rows}
        for name, value in declared.items():
            setattr(target, name, value)
        return target

    return declare


class Python(ItemOp):
    """A user's function or class as an op. Other parameters are its own.

    See `adapt` for the accepted targets.

    - `target`: `pkg.mod:Class`, `file.py:Class`, a function instead of a class, or a registered name.
    """

    brackets = "target"
    writes = None

    def __new__(cls, target: str, **params: Any) -> Any:
        return make_op(resolve(target), params)

    def __init__(self, target: str, **params: Any) -> None:
        """Declares the parameters. It never runs, because `__new__` returns another op."""


def resolve(target: str) -> type[Op]:
    """The op of a target. Raises ConfigError, or LoadFailed if its module raises."""
    return adapt(load_object(target), target) if ":" in target else catalog.find(target)


def adapt(target: Any, name: str = "") -> type[Op]:
    """An op for a user's target. Raises ConfigError.

    The target is one of:
    - an ItemOp or BatchOp, which is returned unchanged;
    - a class as in TorchPipe (`init(params) -> bool`, `forward(list of dicts)`, `max()`);
    - a class whose instances are callable, and whose `__init__` has the parameters;
    - a function.

    Callables receive the data, and the fields if they take two arguments, and return the result. They may write any
    field, unless `op` or a class attribute declares otherwise.
    """
    name = name or getattr(target, "__name__", repr(target))
    if inspect.isclass(target):
        if issubclass(target, ItemOp | BatchOp):
            return check_kinds(target, name)
        call = next((vars(c)["__call__"] for c in target.__mro__ if "__call__" in vars(c)), None)
        if call is not None:
            return _declared(_callable_op(target, call, name, bound=True), target, name)
        if callable(getattr(target, "forward", None)):
            return _declared(_forward_op(target), target, name)
    elif callable(target):
        return _declared(_callable_op(lambda: target, target, name), target, name)
    raise ConfigError(
        f"'{name}' is {target!r}, expected a function, a class whose instances can be called, or a class with forward()"
    )


def _declared(made: type[Op], target: Any, name: str) -> type[Op]:
    """The op with its target's declarations, name and docstring."""
    made.writes = None
    for attribute in _DECLARED:
        if hasattr(target, attribute):
            setattr(made, attribute, getattr(target, attribute))
    made.__name__ = made.__qualname__ = name.rpartition(":")[2]
    made.__doc__ = inspect.getdoc(target)
    return check_kinds(made, name)


def _takes_fields(function: Callable[..., Any], name: str, bound: bool) -> bool:
    """Whether a function takes (data, fields), and not only (data). Raises ConfigError for other parameters."""
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(f"'{name}' is asynchronous or a generator, expected a function that returns its result")
    try:
        parameters = list(inspect.signature(function).parameters.values())[int(bound) :]
    except ValueError:  # some built-in functions have no signature
        return False
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in places)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or (
        needed < 2 <= len(places) and places[1].name == "fields"
    ):
        return True
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if needed > 2 or not places or keywords:
        raise ConfigError(f"'{name}' takes {inspect.signature(function)}, expected (data) or (data, fields)")
    return needed == 2


def _callable_op(make: Callable[..., Any], function: Callable[..., Any], name: str, bound: bool = False) -> type[Op]:
    """An op that calls the object that `make` creates."""
    both = _takes_fields(function, name, bound)
    hook = make if inspect.isclass(make) else function

    def call(self: Any, data: Any, fields: Any) -> Any:
        return self.inner(data, fields) if both else self.inner(data)

    def load(self: Any, device: str) -> None:
        self.inner.load(device)

    def unload(self: Any) -> None:
        self.inner.unload()

    members: dict[str, Any] = {"__call__": call, "__init__": _initializer(make)}
    for method in (load, unload):
        if inspect.isclass(make) and callable(getattr(make, method.__name__, None)):
            members[method.__name__] = method
    if getattr(hook, "batch", False):
        return type("Batches", (BatchOp,), members | {"max_rows": getattr(hook, "max_rows", None)})
    return type("Items", (ItemOp,), members)


def _initializer(make: Callable[..., Any]) -> Callable[..., None]:
    """An `__init__` with the parameters of a class, which creates it as `inner`."""

    def init(self: Any, **params: Any) -> None:
        self.inner = make(**params)

    if inspect.isclass(make) and make.__init__ is not object.__init__:
        return functools.wraps(make.__init__)(init)

    def without_parameters(self: Any) -> None:
        self.inner = make()

    return without_parameters


def _forward_op(target: type[Any]) -> type[Op]:
    """An op from a class in TorchPipe's style."""

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
    """A value as text, which TorchPipe uses for all values."""
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)
