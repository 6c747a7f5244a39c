"""Log records of a worker as lines of its output, so that the server's log has them in order with the prints."""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.types import Item

MARK: Final = b"\x1epenstock "  # precedes a record in the output
RECORD_BYTES: Final = 64 * 2**10  # of the longest record
_MAX_TEXT: Final = 8 * 2**10  # characters; JSON needs at most six bytes for each
_MAX_IDS: Final = 16


class _Running(threading.local):
    items: Sequence[Item] = ()


running: Final = _Running()
"""The items of the batch that this thread runs; reset after it, because items hold memory."""


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            ids = [item.request_id for item in running.items if item.request_id]
            traces = [item.trace.id for item in running.items if item.trace is not None]
            text = self.format(record)
            if len(text) > _MAX_TEXT:  # the end of a traceback names the error
                text = f"{text[: _MAX_TEXT // 2]} ... {text[-_MAX_TEXT // 2 :]}"
            both = [",".join(each[:_MAX_IDS]) for each in (ids, traces)]
            fields = (record.levelno, record.name, *both, text.encode(errors="replace").decode())
            if sys.stdout is not None:
                sys.stdout.flush()
            os.write(2, MARK + msgspec.json.encode(fields) + b"\n")
        except Exception:
            self.handleError(record)


def forward(level: str) -> None:
    """Sends all records from this level on to the server."""
    root = logging.getLogger()
    root.addHandler(_Forward())
    root.setLevel(level.upper())


def read(line: bytes) -> tuple[int, str, str, str, str]:
    """(level, logger, request ids, trace ids, text) of a line after its mark. Raises msgspec.DecodeError."""
    return msgspec.json.decode(line, type=tuple[int, str, str, str, str])
