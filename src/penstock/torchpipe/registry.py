"""A program's own backends: classes with `init(config)`, `forward(list of dicts)` and optionally `max()`."""

import inspect
from enum import Enum
from typing import Any

from penstock.errors import ItemFailed, describe
from penstock.pipeline import filters
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.python import adapt
from penstock.torchpipe.boundary import is_rows, to_array, to_tensor


class Status(Enum):
    """The decision of a filter."""

    Run = 0
    Continue = 0
    Skip = 1
    SerialSkip = 2
    SubGraphSkip = 3
    Break = 4
    Error = 5


def register_backend(cls: Any, register_name: str | None = None) -> Any:
    """Registers a class as `Python[NAME]` and as `NAME`, and returns it. Raises ConfigError.

    Call `register_backend(cls, "NAME")`, or use it as a decorator with or without a name. If the program has imported
    torch, `forward` receives tensors and may return them; otherwise it receives arrays.
    """
    if isinstance(cls, str):
        return lambda decorated: register_backend(decorated, cls)
    name = register_name or cls.__name__
    plain = inspect.isclass(cls) and callable(getattr(cls, "forward", None))
    catalog.register(name, adapt(_with_tensors(cls) if plain else cls, name))
    return cls


def _with_tensors(cls: Any) -> type[Any]:
    """A wrapper class that takes and returns arrays."""

    class WithTensors:
        def __init__(self) -> None:
            self._inner = cls()
            if hasattr(self._inner, "max"):
                self.max = self._inner.max

        def init(self, config: dict[str, str]) -> Any:
            return self._inner.init(config) if hasattr(self._inner, "init") else None

        def forward(self, items: list[dict[str, Any]]) -> None:
            arrays = [{name: value for name, value in fields.items() if is_rows(value)} for fields in items]
            tensors = [{name: to_tensor(value) for name, value in found.items()} for found in arrays]
            for fields, found in zip(items, tensors, strict=True):
                fields.update(found)
            self._inner.forward(items)
            for fields, given, found in zip(items, arrays, tensors, strict=True):
                for name, value in fields.items():
                    unchanged = name in found and found[name] is value
                    fields[name] = given[name] if unchanged else to_array(value)

    WithTensors.__name__ = WithTensors.__qualname__ = cls.__name__
    WithTensors.__doc__ = cls.__doc__
    return WithTensors


def register_filter(cls: Any, register_name: str | None = None) -> Any:
    """Registers a filter's class, with the calls of `register_backend`, for `filter = "NAME"` of a node.

    Its `forward` receives the fields of an item and returns a Status. It may change the fields, for instance make the
    previous `result` the `data`, which only `swap` does by itself.
    """
    if isinstance(cls, str):
        return lambda decorated: register_filter(decorated, cls)
    name = register_name or cls.__name__
    filters.register(name, lambda config: _filter(cls, name, config))
    return cls


def _filter(cls: Any, name: str, config: dict[str, str]) -> filters.Filter:
    inner = cls()
    if hasattr(inner, "init"):
        inner.init(config, *[None] * (len(inspect.signature(inner.init).parameters) - 1))

    def decide(fields: dict[str, Any]) -> str:
        try:
            status = inner.forward(fields)
        except Exception as e:
            raise ItemFailed(f"the filter '{name}' raised {describe(e)}") from e
        if not isinstance(status, Status):
            raise ItemFailed(f"the filter '{name}' returned {status!r}, expected a Status such as Status.Run")
        return filters.OUTCOMES[status.value]

    return decide


def list_backends(kind: str = "Backend") -> list[str]:
    """The names of all ops, including this program's."""
    return catalog.names()


def is_registered(name: str) -> bool:
    """Whether there is an op of this name."""
    return name.lower() in {known.lower() for known in catalog.names()}
