"""Errors of pipelines as TorchPipe's programs catch them: each is a RuntimeError too."""

from __future__ import annotations

from typing import Any

from penstock.errors import BadRequest, PenstockError


class NoData(BadRequest, IndexError):
    """An item without the field `data`."""


class NoSuchNode(BadRequest, IndexError):
    """An item for a node that is not there, or for none where it must say one."""


def as_runtime_error(error: PenstockError) -> PenstockError:
    """The error, of a class that is its own and RuntimeError, with its detail as a note. Pickled, it is of its own."""
    if isinstance(error, RuntimeError):
        return error
    cls = type(error)
    both = _BOTH.get(cls) or _BOTH.setdefault(cls, _made(cls))
    made = both(error.message, retry_after_s=error.retry_after_s, detail=error.detail)
    if error.detail:  # where it happened: shown where nobody catches it
        made.add_note(error.detail)
    return made


def _made(cls: type[PenstockError]) -> type[PenstockError]:
    def reduce(self: PenstockError) -> Any:
        return _plain, (cls, self.message, self.retry_after_s, self.detail)

    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce__": reduce}
    return type(cls.__name__, (cls, RuntimeError), names)


def _plain(cls: type[PenstockError], message: str, retry_after_s: float | None, detail: str) -> PenstockError:
    return cls(message, retry_after_s=retry_after_s, detail=detail)


_BOTH: dict[type[PenstockError], type[PenstockError]] = {}
