"""RequestSender and receive_replies: the two tasks that exchange a client's requests and replies with the broker."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from penstock.backoff import Backoff
from penstock.errors import BrokerUnavailable, ConfigError, PenstockError
from penstock.streamer.redis.connection import Command, RedisConnection
from penstock.streamer.redis.protocol import (
    MAX_BUDGET_MS,
    MISSING,
    SUBMIT,
    VERSION,
    QueueKeys,
    RequestHeader,
    dump,
    load_replies,
)
from penstock.streamer.redis.requests import Group, PendingRequests, queue_full

log = logging.getLogger("penstock.broker")

LOOKUP_ENTRIES = 1000  # per command or script
SESSION_S = 60  # how long the broker remembers a silent client
READ_BLOCK_MS = 5000
READ_MESSAGES = 256  # per read
RETRY_S = (0.02, 1.0)  # shortest and longest pause before another attempt to connect


class RequestSender:
    """`connection` is the sender's own, `other` belongs to the receiver.

    A lost connection is retried for `patience_s` before callers receive the error; if the first attempt to connect
    fails, they receive it at once.
    """

    def __init__(
        self,
        requests: PendingRequests,
        connection: RedisConnection,
        other: RedisConnection,
        keys: QueueKeys,
        client: str,
        patience_s: float,
    ) -> None:
        self.queue_length = 0  # at the last submission
        self.check_session = False  # whether to ask the broker if it still knows this client
        self._requests = requests
        self._connection, self._other = connection, other
        self._queue, self._replies, self._sent = keys.queue, keys.replies(client), keys.sent(client)
        self._client = client
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._submissions = 0
        self._connects = 0  # at the last check of the session
        self._lost_at: float | None = None

    async def run(self) -> None:
        """Does the work that is due, for ever."""
        requests = self._requests
        while True:
            await requests.work_due.wait()
            requests.work_due.clear()
            while requests.unsent or requests.lost or requests.abandoned or self.check_session:
                try:
                    await self._step()
                except PenstockError as e:
                    await self._handle_failure(e)
                else:
                    self._lost_at = None

    async def _step(self) -> None:
        requests = self._requests
        if self.check_session:
            await self._recover_lost()
        if requests.abandoned:
            ids, requests.abandoned = requests.abandoned[:LOOKUP_ENTRIES], requests.abandoned[LOOKUP_ENTRIES:]
            await self._connection.ask(("XDEL", self._queue, *ids))
        if requests.lost or requests.unsent:
            await self._submit(requests.next_submission())

    async def _submit(self, groups: list[Group]) -> None:
        """Adds the entries to the queue, or answers their callers with the error."""
        if not groups:
            return
        arguments = self._arguments(groups)
        while True:
            try:
                length, oldest_ms, *outcomes = await self._connection.run(SUBMIT, (self._queue, self._sent), arguments)
                break
            except PenstockError as e:
                if type(e) is not BrokerUnavailable or not await self._wait_to_reconnect():
                    for group in groups:
                        group[0].call.fail(e)
                    raise
                if not any(entry.number in self._requests.entries for group in groups for entry in group):
                    return
        self.queue_length = length
        for group, outcome in zip(groups, outcomes, strict=True):
            if isinstance(outcome, int):
                self._requests.counts["refused"] += outcome
                found = f"{length} of {self._requests.max_queue} items wait or run"
                group[0].call.fail(queue_full(f"the queue is full ({found})", oldest_ms / 1000))
                continue
            for entry, id in zip(group, outcome, strict=True):
                entry.id = id
                if entry.number not in self._requests.entries:  # abandoned meanwhile
                    self._requests.abandoned.append(id)

    def _arguments(self, groups: list[Group]) -> list[Any]:
        self._submissions += 1
        arguments: list[Any] = [self._submissions, SESSION_S, self._requests.max_queue]
        now = self._loop.time()
        for group in groups:
            call = group[0].call
            budget_ms = min(max(int((call.ends_s - now) * 1000), 0), MAX_BUDGET_MS)
            arguments.append(len(group))
            for entry in group:
                header = RequestHeader(VERSION, self._client, entry.number, budget_ms, call.priority, call.due)
                arguments += (dump(header), entry.payload)
        return arguments

    async def _wait_to_reconnect(self) -> bool:
        """After a connection error: pauses and returns True, or returns False if `patience_s` is over."""
        now = self._loop.time()
        if self._lost_at is None:
            self._lost_at = now
        if not self._connection.connects or now - self._lost_at > self._patience_s:
            return False
        await asyncio.sleep(min(RETRY_S[1], max(RETRY_S[0], (now - self._lost_at) / 2)))
        return True

    async def _handle_failure(self, error: PenstockError) -> None:
        if type(error) is BrokerUnavailable and await self._wait_to_reconnect():
            return
        if isinstance(error, ConfigError) or type(error) is BrokerUnavailable:
            log.warning(
                "broker_failed broker=%s error=%s: callers get this error", self._connection.address.name, error
            )
            self.check_session = False
            self._requests.fail_all(error)

    async def _recover_lost(self) -> None:
        """After the broker forgot this client, or a reconnect: queues entries that vanished without an answer."""
        self.check_session = False
        (known,) = await self._connection.ask(("EXPIRE", self._sent, SESSION_S))
        connects = self._connection.connects + self._other.connects
        if known and connects == self._connects:
            return
        entries = {entry.id: entry for entry in self._requests.entries.values() if entry.id is not None}
        ids = list(entries)
        missing: list[bytes] = []
        for i in range(0, len(ids), LOOKUP_ENTRIES):
            missing += await self._connection.run(MISSING, (self._queue,), ids[i : i + LOOKUP_ENTRIES])
        # one script removes an entry and writes its reply: a missing entry's reply is there by now, or never will be
        messages, _ = await self._connection.ask(
            ("XRANGE", self._replies, "-", "+"), ("SET", self._sent, "[0]", "EX", SESSION_S)
        )
        for _, fields in messages:
            for reply in load_replies(fields[1]):
                self._requests.receive(reply)
        self._connects = connects
        lost = [entries[id] for id in missing if entries[id].number in self._requests.entries]
        if lost:
            name = self._connection.address.name
            log.warning("sent_again broker=%s requests=%d: the broker lost them", name, len(lost))
            self._requests.resend(lost)


async def receive_replies(
    requests: PendingRequests, connection: RedisConnection, stream: str, on_error: Callable[[], None]
) -> None:
    """Reads replies from `stream` while requests are unanswered, for ever. Each read deletes the messages of the one
    before. `on_error` is called after each connection error, which may have lost requests."""
    done: list[bytes] = []
    backoff = Backoff(*RETRY_S)
    read = ("XREAD", "COUNT", READ_MESSAGES, "BLOCK", READ_BLOCK_MS, "STREAMS", stream, "0-0")
    while True:
        if not requests.entries:
            requests.unanswered.clear()
            await requests.unanswered.wait()
        commands: list[Command] = [("XDEL", stream, *done)] if done else []
        try:
            found = (await connection.ask(*commands, read, wait_s=READ_BLOCK_MS / 1000))[-1]
        except PenstockError as e:
            log.debug("receive_failed broker=%s error=%s", connection.address.name, e)
            on_error()
            await asyncio.sleep(backoff.next_s())
            continue
        backoff.reset()
        done = []
        for id, fields in found[0][1] if found else ():
            done.append(id)
            try:
                replies = load_replies(fields[1])
            except PenstockError as e:
                name = connection.address.name
                log.warning("answer_malformed broker=%s error=%s: its callers wait until their deadline", name, e)
                continue
            for reply in replies:
                requests.receive(reply)
