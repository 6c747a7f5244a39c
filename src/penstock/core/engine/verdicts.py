"""What a request that is not run, or not to its end, is told and counted as."""

from __future__ import annotations

from penstock.core.batching.entry import Expire, Fail, Shed
from penstock.errors import DeadlineExceeded, PenstockError, WorkerDied


def error_of(verdict: Expire | Shed | Fail, timeout_s: float) -> PenstockError:
    """What its caller gets; `timeout_s` is how long it might have waited."""
    if isinstance(verdict, Fail):
        return WorkerDied("the worker that ran this request died, and it is not run again")
    if isinstance(verdict, Shed):
        return DeadlineExceeded("overload: the request could not be answered before its deadline")
    if verdict.reason == "timeout":
        return DeadlineExceeded(f"the request waited timeout_s={timeout_s:g} in the queue")
    return DeadlineExceeded("the deadline passed, or could not be met, before the request was run")


def reason_of(error: Exception) -> str:
    """The reason under which a refusal is counted: the scheduler's word where it has one, else the error's code."""
    if isinstance(error, DeadlineExceeded):
        return "expired"
    return error.code if isinstance(error, PenstockError) else PenstockError.code
