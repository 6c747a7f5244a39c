"""Which servers rest, for how long, and when none is left: what their errors say of them, not of the chunks."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from random import Random
from typing import Final

from penstock.bulk.answers import ServerFault, WrongAnswer, changed
from penstock.bulk.lane import Lane
from penstock.bulk.sending import ENDS_THE_JOB, NoServer, SendOptions
from penstock.bulk.servers import fetch
from penstock.client.errors import ConnectionLost, MalformedResponse, ResponseTimeout, Unreachable
from penstock.client.http import ClientConnection
from penstock.errors import DeadlineExceeded, ModelNotFound, ModelNotReady, PenstockError, QueueFull

log = logging.getLogger("penstock.bulk")

# the server is asked for its metadata before it gets more: one that hangs is no better than one that is not there
AWAY: Final = (Unreachable, ConnectionLost, ResponseTimeout, ModelNotFound)
LATER: Final = (Unreachable, ModelNotFound, QueueFull, ModelNotReady)  # the server's state: no try of the chunk's
AGAIN: Final = (ConnectionLost, DeadlineExceeded, ServerFault, WrongAnswer, MalformedResponse)
FAULTS: Final = 3  # in a row, before a server that fails is rested: one bad chunk is no bad server


class Health:
    """Used on the sender's loop. `pump` is called when a server may be sent chunks again, `halt` to end the job."""

    def __init__(
        self, options: SendOptions, random: Random, *, pump: Callable[[], None], halt: Callable[[PenstockError], None]
    ) -> None:
        self._options = options
        self._random = random
        self._pump = pump
        self._halt = halt
        self._probes: set[asyncio.Task[None]] = set()
        self._quiet_s: float | None = None  # since when no server answers as it should
        self._last = ""

    def works(self) -> None:
        """A server answered as it should."""
        self._quiet_s = None

    def fails(self, lane: Lane, error: PenstockError) -> None:
        """Keeps chunks from the server for a while, if the error asks for it."""
        if isinstance(error, AWAY):
            self._leave(lane, error)
            return
        if not isinstance(error, (*LATER, *AGAIN)):  # it answered: the chunk is what is wrong
            self.works()
            return
        resting = _time() < lane.resting_until_s
        lane.tries += not resting  # those in flight together tell one thing
        if isinstance(error, LATER):
            self._quiet(error)
            if error.retry_after_s is not None:
                self._rest(lane, error.retry_after_s)
            elif not resting:
                self._rest(lane, self.backoff_s(lane.tries))
        elif lane.tries >= FAULTS and not resting:
            self._rest(lane, self.backoff_s(lane.tries - FAULTS + 1))

    def backoff_s(self, tries: int) -> float:
        """Anything up to a bound that doubles with each try, so that clients do not come back together."""
        options = self._options
        return self._random.uniform(0.0, min(options.longest_backoff_s, options.backoff_s * 2.0 ** min(tries - 1, 30)))

    def close(self) -> None:
        """Asks no server any more."""
        for probe in self._probes:
            probe.cancel()

    def _rest(self, lane: Lane, pause_s: float) -> None:
        until_s = _time() + pause_s
        if until_s > lane.resting_until_s:
            lane.resting_until_s = until_s
            self._rested(lane)

    def _rested(self, lane: Lane) -> None:
        """Sends again when the rest is over; a timer of the loop may be a millisecond early."""
        left_s = lane.resting_until_s - _time()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s + 0.001, self._rested, lane)
        else:
            self._pump()

    def _leave(self, lane: Lane, error: PenstockError) -> None:
        self._quiet(error)
        if lane.away:
            return
        lane.away = True
        log.warning("server=%s gets no chunks before it answers again: %s", lane.info.url, error.message)
        probe = asyncio.ensure_future(self._probe(lane))
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)

    async def _probe(self, lane: Lane) -> None:
        """Asks a server that is away until it answers as it did before."""
        info, timeout_s = lane.info, self._options.connect_timeout_s
        for tries in itertools.count():
            if tries:
                await asyncio.sleep(self.backoff_s(tries))
            connection = ClientConnection(info.endpoint, connect_timeout_s=timeout_s)
            try:
                found = await fetch(connection, info.model, info.token, timeout_s)
            except ENDS_THE_JOB as exc:
                self._halt(exc)
                return
            except PenstockError as exc:
                self._quiet(exc)
                continue
            finally:
                connection.close()
            if found.revision != info.revision:
                self._halt(changed(info.url, info.model, info.revision, found.revision))
                return
            log.warning("server=%s answers again", info.url)
            lane.away, lane.tries = False, 0
            self.works()
            self._pump()
            return

    def _quiet(self, error: PenstockError) -> None:
        """A server has no answer; when none has any for `give_up_s`, the job ends."""
        self._last = error.message
        if self._quiet_s is None:
            self._quiet_s = _time()
            asyncio.get_running_loop().call_later(self._options.give_up_s, self._give_up, self._quiet_s)

    def _give_up(self, since_s: float) -> None:
        if self._quiet_s == since_s:
            give_up_s = self._options.give_up_s
            self._halt(NoServer(f"no server has answered for {give_up_s:g} s; the last error: {self._last}"))


def _time() -> float:
    return asyncio.get_running_loop().time()
