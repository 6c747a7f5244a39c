"""Receiver: reads the answers for a client, and hands them to its books. One task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.streamer.redis.books import Books
from penstock.streamer.redis.link import Command, Link
from penstock.streamer.redis.messages import read_answers

log = logging.getLogger("penstock.broker")

BLOCK_MS = 5000
READ_MESSAGES = 256  # at once
RETRY_S = (0.02, 1.0)


class Receiver:
    """`on_lost` is called after each error of the connection: something may have been lost."""

    def __init__(self, books: Books, link: Link, replies: str, on_lost: Callable[[], None]) -> None:
        self._books = books
        self._link = link
        self._replies = replies
        self._on_lost = on_lost

    async def run(self) -> None:
        """For ever, while anything is asked. What was read is deleted with the next look, so that it is read once."""
        read: list[bytes] = []
        pause = RETRY_S[0]
        look = ("XREAD", "COUNT", READ_MESSAGES, "BLOCK", BLOCK_MS, "STREAMS", self._replies, "0-0")
        while True:
            if not self._books.entries:
                self._books.asked.clear()
                await self._books.asked.wait()
            commands: list[Command] = [("XDEL", self._replies, *read)] if read else []
            try:
                found = (await self._link.ask(*commands, look, wait_s=BLOCK_MS / 1000))[-1]
            except PenstockError as e:
                log.debug("receive_failed broker=%s error=%s", self._link.address.name, e)
                self._on_lost()
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_S[1])
                continue
            pause = RETRY_S[0]
            read = []
            for id, fields in found[0][1] if found else ():
                read.append(id)
                self._read(fields[1])

    def _read(self, message: bytes) -> None:
        try:
            answers = read_answers(message)
        except PenstockError as e:
            log.warning("answer_malformed broker=%s error=%s: its callers wait in vain", self._link.address.name, e)
            return
        for answer in answers:
            self._books.answered(answer)
