"""The responses of the web servers to errors."""

from __future__ import annotations

import logging

from penstock import BadRequest, DeadlineExceeded, ModelNotReady, PenstockError, QueueFull

STATUS: dict[type[PenstockError], int] = {BadRequest: 400, QueueFull: 503, ModelNotReady: 503, DeadlineExceeded: 504}


def error_response(error: PenstockError) -> tuple[int, str]:
    """(status, text) for an error. Details for the operator go to the log."""
    for kind, status in STATUS.items():
        if isinstance(error, kind):
            return status, error.message
    logging.error("a request failed: %s\n%s", error, error.detail)
    return 500, "the model failed on this request"
