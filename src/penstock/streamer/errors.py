"""Errors as the program that made the streamer gets them: with the text and the traceback of the worker."""

from __future__ import annotations

from typing import NoReturn

from penstock.errors import PenstockError


class WorkerTraceback(Exception):
    """The cause of an error that was raised in a worker: its text is the traceback there."""

    def __str__(self) -> str:
        return f"in the worker\n{self.args[0]}"


def told(error: Exception) -> Exception:
    """The same error, made for one caller: its message has the text of the model's own, its cause the traceback.

    Nothing of it leaves the process by itself, so the text need not be kept back as it is over HTTP.
    """
    if not isinstance(error, PenstockError):
        return error
    message, said = error.message, _said(error.detail)
    kind = message.rpartition(" ")[2]
    if said.partition(":")[0].rpartition(".")[2] == kind:  # "the model raised ValueError"
        message = message.removesuffix(kind) + said
    elif said and said not in message and message not in said:
        message = f"{message}: {said}"
    mine = type(error)(message, retry_after_s=error.retry_after_s, detail=error.detail)
    if error.detail.startswith("Traceback"):
        mine.__cause__ = WorkerTraceback(error.detail.rstrip())
    return mine


def tell(error: Exception) -> NoReturn:
    """Raises it as `told`."""
    mine = told(error)
    raise mine from mine.__cause__


def _said(detail: str) -> str:
    """What a traceback says at its end, `ValueError: too long`; another text as it is."""
    lines = detail.rstrip().split("\n")
    last_frame = max((i for i, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return "\n".join(lines[last_frame + 1 :])
