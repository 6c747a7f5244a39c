"""What runs inside a worker."""

from __future__ import annotations

import inspect
from typing import Any, Final, Protocol, runtime_checkable

from penstock.errors import LoadFailed, describe

PRECISIONS: Final = ("fp32", "fp16", "bf16")
OPTIMIZATIONS: Final = ("none", "optimize_for_inference", "compile")


@runtime_checkable
class Model(Protocol):
    """One loaded model. All calls are made in one thread, the worker's.

    Optional members: `preprocess(item)`, `postprocess(result)` (once an item), `warmup()` (may give back sample items),
    `inputs` and `outputs` (sequences of TensorSpec), `parameters` (see ModelMetadata).
    """

    def load(self, device: str) -> None:
        """Called once, before anything else. `device` is "cpu", "cuda:0" ..."""
        ...

    def predict(self, items: list[Any]) -> Any:
        """The results, aligned with `items`: a list, a tuple or an array; an exception in place of a result fails that
        item alone. May be a coroutine function, or a generator (sync or async) that yields lists of parts."""
        ...

    def unload(self) -> None:
        """Called once, when the worker ends in order."""
        ...


def is_module(found: object) -> bool:
    """Whether an object is a `torch.nn.Module`, or a class of them. Loads no torch: what is one has loaded it."""
    kind = found if inspect.isclass(found) else type(found)
    return any(c.__module__ == "torch.nn.modules.module" and c.__name__ == "Module" for c in kind.__mro__)


def not_installed(what: str, extra: str, error: ImportError) -> LoadFailed:
    """That a package cannot be imported, and which extra brings it."""
    return LoadFailed(f"{what} cannot be imported ({describe(error)}): pip install 'penstock[{extra}]'")
