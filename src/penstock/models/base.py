"""What runs inside a worker."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from penstock.errors import LoadFailed, describe


@runtime_checkable
class Model(Protocol):
    """One loaded model. All calls are made in one thread, the worker's.

    Optional members: `preprocess(item)`, `postprocess(result)` (once an item), `warmup()` (may give back sample items),
    `inputs` and `outputs` (sequences of TensorSpec).
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


def not_installed(what: str, extra: str, error: ImportError) -> LoadFailed:
    """That a package cannot be imported, and which extra brings it."""
    return LoadFailed(f"{what} cannot be imported ({describe(error)}): pip install 'penstock[{extra}]'")
