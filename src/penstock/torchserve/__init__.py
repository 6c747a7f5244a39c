"""TorchServe's APIs, archives and handlers on the core, and what its server and its workers both read: header names."""

import os
from typing import Final

SEQUENCE_HEADERS: Final = {
    "TS_REQUEST_SEQUENCE_ID": "ts_request_sequence_id",
    "TS_REQUEST_SEQUENCE_START": "ts_request_sequence_start",
    "TS_REQUEST_SEQUENCE_END": "ts_request_sequence_end",
}
"""Environment variable -> default."""


def sequence_headers() -> tuple[bytes, bytes, bytes]:
    """The names of the headers with a sequence's id, start and end."""
    id, start, end = (os.environ.get(*each).encode() for each in SEQUENCE_HEADERS.items())
    return id, start, end
