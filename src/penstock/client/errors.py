"""Errors between a client and a server, independent of what a response means."""

from __future__ import annotations

from penstock.errors import DeadlineExceeded, PenstockError


class Unreachable(PenstockError):
    """The connection could not be opened; nothing of the request was sent."""

    code = "unreachable"
    retryable = True


class UntrustedCertificate(PenstockError):
    """The client does not trust the server's certificate for this host name."""

    code = "not_trusted"


class ConnectionLost(PenstockError):
    """The connection ended before the response was complete. The server may have run the request."""

    code = "connection_lost"
    retryable = True


class ResponseTimeout(DeadlineExceeded):
    """The server did not respond in time. It may hang, and it may have run the request."""

    code = "no_answer"
    retryable = True


class MalformedResponse(PenstockError):
    """The server did not send valid HTTP/1.1."""

    code = "malformed_answer"
    retryable = True


class ResponseTooLarge(MalformedResponse):
    """The response exceeds the caller's limit. The client closes the connection without storing it."""

    code = "answer_too_large"
