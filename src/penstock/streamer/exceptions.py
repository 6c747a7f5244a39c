"""The errors that callers of a streamer receive: the model's own exception if its class is available, or Penstock's."""

from __future__ import annotations

from types import FunctionType
from typing import Any, NoReturn

from penstock.core.wire.exceptions import OwnException, RemoteException
from penstock.errors import PenstockError
from penstock.plugins import loaded_class


class WorkerTraceback(Exception):
    """The cause of an error raised in a worker. Its text is the worker's traceback."""

    def __str__(self) -> str:
        return f"in the worker\n{self.args[0]}"


def error_for_caller(error: Exception) -> Exception:
    """What one caller gets for `error`: a copy of the model's own exception with its causes, or else of `error` with
    the text of that exception. The last cause is the worker's traceback, or `error` if there is none.

    The text stays in this process, so it needs no redaction, unlike errors sent over HTTP.
    """
    if not isinstance(error, PenstockError):
        return error
    cause = WorkerTraceback(error.detail.rstrip()) if "Traceback (most recent" in error.detail else None
    copy = None if error.original is None else _restored(error.original, cause or error)
    if copy is None:
        copy = type(error)(_message(error), retry_after_s=error.retry_after_s, detail=error.detail)
        copy.__cause__ = cause
    return copy


def raise_for_caller(error: Exception) -> NoReturn:
    """Raises `error_for_caller(error)`."""
    copy = error_for_caller(error)
    raise copy from copy.__cause__


def _message(error: PenstockError) -> str:
    message, last = error.message, _last_line(error.detail)
    kind = message.rpartition(" ")[2]
    if last.partition(":")[0].rpartition(".")[2] == kind:  # "the model raised ValueError"
        return message.removesuffix(kind) + last
    return f"{message}: {last}" if last and last not in message and message not in last else message


def _last_line(detail: str) -> str:
    """The text after the last frame of a traceback, such as `ValueError: too long`; any other text unchanged."""
    lines = detail.rstrip().split("\n")
    last_frame = max((i for i, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return "\n".join(lines[last_frame + 1 :])


def _restored(original: OwnException | RemoteException, root: Exception) -> Exception | None:
    """A new exception like `original`, so that no two callers raise the same object, with `root` as its last cause.
    None if its class is not available here."""
    try:
        cause: Any = root
        for parts in reversed(original.chain() or [_plain_parts(original.plain())]):
            copy = _rebuilt(*parts) if isinstance(parts, tuple) else parts
            copy.__cause__, cause = cause, copy
        return cause if isinstance(cause, Exception) else None
    except Exception:
        return original.error if isinstance(original, OwnException) else None


def _plain_parts(original: RemoteException) -> tuple[type, tuple[Any, ...], None]:
    """Raises TypeError unless the class is an exception that is loaded here and whose own code need not run."""
    found = loaded_class(original.module, original.name)
    refused = (PenstockError, StopIteration, StopAsyncIteration)  # sent by code; not to be raised in a coroutine
    if found is None or not issubclass(found, Exception) or issubclass(found, refused):
        raise TypeError(f"no exception {original.module}:{original.name}")
    if isinstance(found.__new__, FunctionType):
        raise TypeError("the class would run its own code")
    return found, tuple(original.args), None


def _rebuilt(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any] | None) -> Exception:
    """The exception as it was. Its own `__init__`, which may take other arguments, is not called again."""
    error = kind.__new__(kind, *args)
    if isinstance(kind.__init__, FunctionType):
        error.args = args
    else:
        kind.__init__(error, *args)
    error.__dict__.update(state or {})
    return error
