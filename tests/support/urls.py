"""Requests over HTTP."""

import urllib.error
import urllib.request


def fetch(request: urllib.request.Request | str, timeout_s: float = 60.0) -> tuple[int, bytes]:
    """The status and the body of the response, which may be an error."""
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
