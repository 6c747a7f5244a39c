"""What can go wrong between a client and a server, below the meaning of an answer."""

from __future__ import annotations

from penstock.errors import DeadlineExceeded, PenstockError


class Unreachable(PenstockError):
    """No connection to the server: nothing of the request was sent."""

    code = "unreachable"
    retryable = True


class NotTrusted(PenstockError):
    """The server's certificate is not one that the client trusts for this name."""

    code = "not_trusted"


class ConnectionLost(PenstockError):
    """The connection ended before the whole answer was there. The request may have been run."""

    code = "connection_lost"
    retryable = True


class NoAnswer(DeadlineExceeded):
    """The server said nothing within the time: it may hang, and the request may have been run."""

    code = "no_answer"
    retryable = True


class MalformedAnswer(PenstockError):
    """What the server sent is not HTTP/1.1, or breaks its rules."""

    code = "malformed_answer"
    retryable = True


class AnswerTooLarge(MalformedAnswer):
    """The answer is larger than the caller allows. It is not held: the connection ends."""

    code = "answer_too_large"
