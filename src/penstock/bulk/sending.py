"""What the sender is told, what it tells, and how it may end."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from penstock.bulk.answers import RevisionChanged
from penstock.bulk.servers import ServerInfo
from penstock.bulk.window import AimdWindow, FixedWindow, Rounds, Window
from penstock.client.errors import UntrustedCertificate
from penstock.errors import Forbidden, PenstockError, Unauthorized

Mode = Literal["stream-prebatch", "stream-single", "single"]

STREAM_SINGLE: Final = 500  # requests in flight, and
SINGLE_ROUND: Final = 50  # requests a round, as in the published clients


class NoServer(PenstockError):
    """No server has answered for as long as the job waits for one. The job ends."""

    code = "no_server"


class NotSent(PenstockError):
    """The sender was closed before the chunk was answered: it is to be sent by the next run."""

    code = "not_sent"


class Undelivered(PenstockError):
    """A chunk has no captions after `attempts` tries, the last of which ended in `cause`."""

    code = "undelivered"

    def __init__(
        self,
        message: str,
        *,
        attempts: int = 1,
        cause: PenstockError | None = None,
        retry_after_s: float | None = None,
        detail: str = "",
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, detail=detail)
        self.attempts = attempts
        self.cause = cause


class SendOptions(Struct, frozen=True, kw_only=True):
    """`rows` is the size of a whole chunk, if known; `attempts` bounds the failed tries of one."""

    mode: Mode = "stream-prebatch"
    fingerprint: str = ""
    rows: int | None = None
    attempts: int = 8
    give_up_s: float = 600.0
    request_timeout_s: float = 300.0
    connect_timeout_s: float = 10.0
    max_response_bytes: int = 4 * 2**20  # 8 KiB for each of 512 captions
    backoff_s: float = 0.5
    longest_backoff_s: float = 30.0


class ServerStats(Struct, frozen=True):
    """`state` is "up", "rests" or "away"."""

    url: str
    state: str
    in_flight: int
    window: int
    answered: int
    retries: int


class SendStats(Struct, frozen=True):
    """Since the start: `answered` chunks, `retries` of chunks, `sent_bytes` of bodies. Now: the rest."""

    in_flight: int
    window: int
    waiting: int
    answered: int
    retries: int
    sent_bytes: int
    servers: tuple[ServerStats, ...]


def window_for(mode: Mode, info: ServerInfo, rows: int | None) -> Window:
    """How the mode of a job sends to one server.

    Two batches and one chunk for each instance keep it busy: one that runs, one that waits, one under way.
    """
    if mode == "stream-single":
        return FixedWindow(STREAM_SINGLE)
    if mode == "single":
        return Rounds(SINGLE_ROUND)
    a_batch = max(1, (info.max_batch_size or 1) // rows) if rows else 1
    return AimdWindow(2 * info.instances * a_batch + 1)


def undelivered(cause: PenstockError, attempts: int) -> Undelivered:
    """The error of a chunk by that of its last try."""
    after = f" ({attempts} attempts)" if attempts > 1 else ""
    return Undelivered(cause.message + after, attempts=attempts, cause=cause, detail=cause.detail)


ENDS_THE_JOB: Final = (RevisionChanged, Unauthorized, Forbidden, UntrustedCertificate, NoServer)
"""Errors after which the sender answers every chunk that still waits, and every further one, with the same."""
