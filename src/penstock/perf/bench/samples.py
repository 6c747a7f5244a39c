"""What a run of load leaves behind: one entry a request."""

from __future__ import annotations

from array import array
from typing import Final, Literal

LOST: Final = 0  # the connection ended before the answer was there
TIMED_OUT: Final = -1
REFUSED: Final = -2  # no connection to the server
WRONG: Final = -3  # a 2xx that the check did not take
UNDER_WAY: Final = -4  # not answered yet when the run was ended early: neither good nor an error


class Samples:
    """One entry a request, in the order in which they were to be sent; filled while the run goes on.

    `intended_s` from the start; `late_s`: how much later the generator came to it (0 in a closed loop); `latency_s`
    from the intended time, infinite without an answer, and of a request that timed out how long it was waited for;
    `status` of HTTP, or one of the constants above; `number` of the request in the list. `seconds`: the counted time.
    `cpu_s`: what this process took in the `busy_s` until the last was sent. `waited`: how many found no free
    connection. `starved`: how often this machine had no file or port for one more. `first_error`: status and beginning
    of the body, or what was wrong.
    `ended`: why the run was ended early, if it was: the server gone, or cancelled.
    """

    def __init__(self) -> None:
        self.intended_s: array[float] = array("d")
        self.late_s: array[float] = array("d")
        self.latency_s: array[float] = array("d")
        self.status: array[int] = array("i")
        self.number: array[int] = array("i")
        self.seconds = 0.0
        self.cpu_s = self.busy_s = 0.0
        self.waited = self.starved = 0
        self.first_error: tuple[int, bytes] | None = None
        self.ended: Literal["", "gone", "cancelled"] = ""
