"""Scheduler: which entries become which batch, when, on which slot. A pure state machine; time is an argument.

`waiting.py` holds the waiting requests, `slots.py` the running batches, and the policy decides sizes, times and drops.
The scheduler adds the bounds, the turn (`poll`), sending ahead, re-runs after a worker's death, and the ceiling learned
from out-of-memory. It reads no clock and uses no randomness: the same calls give the same events.
"""

from penstock.core.batching.cost import Cost, StairCost
from penstock.core.batching.entry import INF, Dispatch, Entry, EntryState, Event, Expire, Outcome, Shed
from penstock.core.batching.ladder import Ladder
from penstock.core.batching.lengths import LengthClasses, RowCost, mixed, name_of
from penstock.core.batching.policies.base import BatchPolicy, Choice, Drop, SlotBatch, Take, View, WaitUntil
from penstock.core.batching.queues import Bucket
from penstock.core.batching.sequences import SequenceLimits, SequenceTable
from penstock.core.batching.slots import BRIEF_S, Slots
from penstock.core.batching.waiting import WaitingQueue
from penstock.errors import BadRequest, PayloadTooLarge, QueueFull

# choices, unless a measurement is named
CEILING_S = 600.0
"""How long an out-of-memory error lowers the batch size; other processes on the device come and go."""
LAST_SLOT_S = 5.0
"""How long, at most, requests that were in a death leave the last slot to others that wait: most workers restart in
that time, and a second death would leave no slot. With a short `horizon_s` it is an eighth of that."""
SUSPICION_PATIENCES = 16
"""For so many times that patience, about a minute, after a request died alone for the second time, a death is probably
the work of another one. What was in it waits for the slot that died, up to twice the patience, and spares the rest."""
RESERVED_PART = 8
"""One row in this many of the queue is reserved for the most urgent class, so that a bulk job cannot fill it all."""
LONG_LEADS = 200
"""A run is long from so many leads on. The pause behind it is then at most 1 % of the slot's time, because it takes
about two leads: measured with 64 rows, 2 ms after a run of 200 ms, and 0.4 ms if the next batch was sent ahead."""
EARLY_LEADS = 32
"""How many leads before the end of a run a full batch without bulk rows is sent ahead: the slot has no pause if the run
ends a third earlier than predicted. An urgent request waits so much longer, at the usual lead of 0.3 ms for 10 ms."""

LOOKS = 8
"""So many times, while a full batch of rows arrives, a batch of several lengths is looked for behind a running one."""


class Scheduler:
    """Schedules the requests of one model version.

    `max_queue` counts rows; a slot holds up to `depth` batches. A request's place in the order of service is its
    arrival + `horizon_s` + `priority[class]` (the last value also covers higher classes), or its deadline if earlier.
    Batches are padded to the `sizes`, the last of which is `max_batch_size`; without them they keep any size. With
    `lengths` the cost, `max_tokens` and the ceiling count tokens: rows x the longest row of a batch.
    It has more than 15 attributes because it is one state machine: splitting them would hide which event changes what.
    Each keyword argument is one option of a model.
    """

    def __init__(
        self,
        policy: BatchPolicy,
        *,
        max_batch_size: int,
        max_queue: int,
        max_queue_bytes: int,
        depth: int = 1,
        idempotent: bool = True,
        priority: tuple[float, ...] = (0.0,),
        horizon_s: float = 30.0,
        sequences: SequenceLimits | None = None,
        sizes: tuple[int, ...] = (),
        lengths: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        if not horizon_s < INF or not priority or max_batch_size < 1:
            raise ValueError("expected a finite horizon_s, at least one priority class and max_batch_size >= 1")
        self._policy = policy
        self._ladder = Ladder(sizes) if sizes else None
        self._lengths = LengthClasses(max_tokens, self._ladder) if lengths else None
        self._cost = Cost() if self._ladder is None or lengths else StairCost(self._ladder)
        self._slots = Slots(self._cost, depth)
        self.sequences = None if sequences is None else SequenceTable(sequences)
        self._queue = WaitingQueue(max_batch_size, self.sequences, self._lengths)
        self._view = View(Bucket(""), self._cost, max_rows=max_batch_size, ladder=self._ladder)
        self._max_queue, self._max_queue_bytes = max_queue, max_queue_bytes
        self._depth, self._idempotent = depth, idempotent
        self._killer_s = -INF  # when a request last died alone for the second time
        self._spared_s = INF  # until when what was in a death waits for its slot while another is idle
        self._patience_s = min(LAST_SLOT_S, horizon_s / 8)
        self._budgets = [horizon_s + extra for extra in priority]
        self.max_batch_size = max_batch_size  # after an out-of-memory error, batches are smaller for a while
        self._ceiling: int | None = None
        self._ceiling_end_s = INF
        self.running_rows = 0  # of the batches on slots
        self.arrived_rows = self.arrived_bytes = 0  # since the start, with refused ones
        self._sent_rows = self._padded_rows = 0  # with a ladder or lengths, since the start
        self._sent_tokens = self._padded_tokens = 0  # with lengths
        self.concurrent = False  # whether slots take batches concurrently
        self._batch_id = 0
        self._held_since_s = INF
        self._holds, self._held_s = 0, 0.0
        self._wake_s, self._wake_rows = INF, 0
        # the batch behind which one was looked for in vain, and until when and how many rows none is looked for again
        self._seen = (-1, INF, 0)
        self.wake_at: float | None = None  # set by `poll`: when to poll again without an event; None: not before one

    # ---- queries

    @property
    def queued(self) -> int:
        """Number of requests that wait, at least in part."""
        return len(self._queue.waiting)

    @property
    def oldest_arrival_s(self) -> float:
        """When the request that waits longest came; INF if none waits."""
        return next((entry.arrival_s for entry in self._queue.waiting.values()), INF)

    @property
    def queued_rows(self) -> int:
        return self._queue.rows

    @property
    def urgent(self) -> bool:
        """Whether a request with a deadline has come since the last `poll`."""
        return bool(self._queue.dirty)

    @property
    def up(self) -> int:
        """Number of slots that are up and stay."""
        return self._slots.up

    @property
    def queued_bytes(self) -> int:
        return self._queue.nbytes

    @property
    def running(self) -> int:
        """Number of batches on slots."""
        return len(self._slots.running)

    def worked_s(self, now: float) -> float:
        """Seconds in which slots had a batch, summed over all slots since the start."""
        return self._slots.worked_s(now)

    def next_end(self) -> tuple[float, int]:
        """(predicted end of the batch that ends first, its rows); (INF, 0) while nothing runs."""
        return min([(batch.end_s, batch.rows) for batch in self._slots.running.values()], default=(INF, 0))

    def ahead_at(self) -> float:
        """From when a full batch is sent behind the one that is predicted to end first; INF while nothing runs."""
        return self.next_end()[0] - EARLY_LEADS * self._slots.lead_s

    def seconds(self, rows: int) -> float:
        """Predicted seconds of a batch, with lengths of a mean one; 0 before anything was learned."""
        return self._cost.t(rows * self._mean_length) if self._cost.ready else 0.0

    @property
    def _mean_length(self) -> float:
        """Tokens of a row that was sent, with padding; 1 without lengths."""
        return (self._sent_tokens + self._padded_tokens) / self._sent_rows if self._sent_tokens else 1.0

    @property
    def inert_arrivals(self) -> int:
        """How many requests of one row, of the first class and without a deadline, may arrive after a `poll` without
        causing an event before `wake_at`. They may be more than there is `room` for."""
        queue, full = self._queue, self._view.max_rows
        if self._lengths is not None:
            return full if self._depth == 1 and not self._slots.idle else 0
        if len(queue.buckets) > 1 or self.sequences is not None:
            return 0
        bucket = next(iter(queue.buckets.values()), None)
        if bucket is None:  # the first row sets the time for a batch that is sent ahead
            rows = full - 1 if self._depth == 1 and not self._slots.idle else 0
        elif bucket.low or bucket.finite:  # urgent rows would overtake others, and more rows make others late
            return 0
        else:
            rows = full if queue.rows >= full else self._wake_rows - 1 - queue.rows
        return max(0, rows)

    @property
    def room(self) -> int:
        """Half of the rows that may still be queued, so that no refusal comes late; 0 if half of the bytes wait."""
        queue = self._queue
        if queue.nbytes > self._max_queue_bytes // 2:
            return 0
        return max(0, (self._max_queue - self._max_queue // RESERVED_PART - queue.rows) // 2)

    @property
    def max_queue(self) -> int:
        """The most rows that may wait. Lowering it drops nothing: requests are refused until there is room."""
        return self._max_queue

    @max_queue.setter
    def max_queue(self, rows: int) -> None:
        if rows < 1:
            raise ValueError(f"max_queue must be at least 1, found {rows}")
        self._max_queue = rows

    def killers(self, now: float) -> bool:
        """Whether a death is probably the work of a request, see SUSPICION_PATIENCES."""
        return now < self._killer_s + SUSPICION_PATIENCES * self._patience_s

    def prime(self, samples: list[tuple[int, float]]) -> None:
        """Learns from (rows, seconds) of warm-up runs, with lengths from (tokens, seconds)."""
        for rows, seconds in samples:
            self._cost.add(rows, seconds)

    def drain_s(self) -> float | None:
        """Predicted seconds until every waiting request has run; None while there is no prediction."""
        slots, full = self._slots.up, self._queue.max_rows
        if not self._cost.ready or not slots:
            return None
        if self._lengths is not None:
            full = max(1, min(full, int(self._lengths.tokens / self._mean_length)))
            return self._queue.rows / full * self.seconds(full) / slots
        return self._queue.rows / full * self._cost.t(full) / slots

    def explain(self) -> dict[str, object]:
        """Why batches have their sizes: the learned cost, holds, the ceiling, and the policy's own keys."""
        cost = self._cost
        return {
            "a_s": cost.a,
            "b_s": cost.b * self._mean_length,
            "upper_ratio": cost.ratio,
            "ready": cost.ready,
            "fitted": cost.fitted,
            "points": [(work / self._mean_length, seconds, weight) for work, seconds, weight in cost.points],
            "handover_s": self._slots.handover_s,
            "max_batch_size": self.max_batch_size,
            "ceiling": self._ceiling,
            "slots": self._slots.up,
            "holds": self._holds,
            "held_s": self._held_s,
            **({} if self.sequences is None else {"sequences": len(self.sequences)}),
            **({} if self._ladder is None or self._lengths is not None else self._ladder_explained()),
            **({} if self._lengths is None else self._lengths_explained()),
            **self._policy.explain(),
        }

    def _ladder_explained(self) -> dict[str, object]:
        """The predicted seconds of each size, and the rows that were sent and added as padding since the start."""
        assert self._ladder is not None
        return {
            "sizes_s": {str(size): self.seconds(size) for size in self._ladder.sizes},
            "sent_rows": self._sent_rows,
            "padded_rows": self._padded_rows,
        }

    def _lengths_explained(self) -> dict[str, object]:
        """The bound of tokens, and the tokens that were sent, and added as padding, since the start."""
        assert self._lengths is not None
        return {
            "max_tokens": self._lengths.tokens,
            "sent_rows": self._sent_rows,
            "padded_rows": self._padded_rows,
            "token_s": self._cost.b,
            "sent_tokens": self._sent_tokens,
            "padded_tokens": self._padded_tokens,
        }

    # ---- events

    def offer(self, entry: Entry, now: float) -> None:
        """Queues a request. Raises QueueFull at once; BadRequest, PayloadTooLarge if it could never be queued."""
        queue = self._queue
        rows, priority, budgets = entry.rows, entry.priority, self._budgets
        max_rows, max_bytes = self._max_queue, self._max_queue_bytes
        self.arrived_rows += rows
        self.arrived_bytes += entry.nbytes
        if priority:
            max_rows, max_bytes = max_rows - max_rows // RESERVED_PART, max_bytes - max_bytes // RESERVED_PART
        if rows < 1 or queue.rows + rows > max_rows or queue.nbytes + entry.nbytes > max_bytes:
            self._refuse(entry, max_rows, max_bytes)
        if self._lengths is not None:
            self._lengths.check(entry.length)
            entry.bucket = name_of(entry.bucket, self._lengths.up(entry.length))
        if self.sequences is not None:
            if rows > 1:
                raise BadRequest(f"a request of a sequence has one row, found {rows}: send a request for each")
            room = 2 * (queue.rows + rows) <= max_rows and 2 * (queue.nbytes + entry.nbytes) <= max_bytes
            self.sequences.enter(entry, now, room)
        v = entry.arrival_s + entry.behind_s + budgets[priority if priority < len(budgets) else -1]
        entry.vdeadline_s = v if v < entry.deadline_s else entry.deadline_s
        queue.add(entry)
        self._policy.on_arrival(entry, now)

    def _refuse(self, entry: Entry, max_rows: int, max_bytes: int) -> None:
        rows, queue = entry.rows, self._queue
        if rows < 1:
            raise BadRequest(f"the request has {rows} rows, expected at least 1")
        if rows > max_rows:
            raise BadRequest(
                f"the request has {rows} rows, more than the queue may hold ({max_rows}): send it in pieces"
            )
        if entry.nbytes > max_bytes:
            raise PayloadTooLarge(f"the request has {entry.nbytes} bytes, more than the queue may hold ({max_bytes})")
        full = f"{queue.rows} of {max_rows} rows, {queue.nbytes} of {max_bytes} bytes"
        raise QueueFull(f"the queue is full ({full} wait): try again later", retry_after_s=self.drain_s())

    def cancel(self, id: int, now: float) -> bool:
        """True: the request waited and is removed; no event follows. False: at least a piece of it runs and ends later
        (waiting pieces are removed), or the request is unknown."""
        return self._queue.cancel(id)

    def slot_up(self, slot: int, now: float, concurrency: int = 1) -> None:
        """The slot takes batches: one after the other, or up to `concurrency` rows concurrently if that is above 1."""
        self.concurrent = concurrency > 1
        if self.sequences is not None:
            self.sequences.slot_up(slot)
        self._slots.raise_up(slot, concurrency)

    def slot_down(self, slot: int, now: float) -> None:
        """The slot died. Its batches were completed before, as died or lost."""
        self._slots.take_down(slot)
        self._lose_sequences(slot)

    def slot_retired(self, slot: int, now: float) -> None:
        """The slot is being removed: it finishes its batches and gets no more. Once it is empty its number may be
        reused."""
        self._slots.retire(slot)
        self._lose_sequences(slot)

    def _lose_sequences(self, slot: int) -> None:
        if self.sequences is not None:
            self._queue.lose_sequences(self.sequences.lose(slot))

    def answered(self, batch_id: int, entries: list[Entry], failed: frozenset[int]) -> list[int]:
        """Some entries of a batch on a concurrent slot are answered. Returns the ids of the split requests that ended
        with them."""
        rows = sum([e.rows for e in entries])
        self._slots.answered(batch_id, rows)
        self.running_rows -= rows
        return self._queue.answered(entries, failed)

    def streams(self, entry: Entry) -> None:
        """The first part of a response came from a concurrent slot."""
        self._queue.streams(entry)

    def complete(self, batch_id: int, outcome: Outcome, now: float) -> list[int]:
        """A batch ended. Returns the ids of the split requests that ended with it: all pieces answered, one failed, or
        the caller left. A split request ends only when no piece of it runs. `poll` reports requests that a death
        ends; entries of separate items that it ends are DONE, and the caller answers them."""
        answered = outcome.kind == "ok"
        if self.sequences is not None:
            self.sequences.now_s = now
        batch, seconds = self._slots.finish(batch_id, answered, outcome.run_s, outcome.prepare_s, now)
        if outcome.on_device:
            seconds = outcome.run_s  # without the copies: they overlap other batches
        entries = [e for e in batch.entries if e.state == EntryState.RUNNING] if batch.concurrent else batch.entries
        if outcome.oom is not None:
            self._shrink(outcome.oom, now)
        if answered:
            if not batch.concurrent:
                # after out-of-memory it ran in pieces, and a bad request may have claimed any length: no samples
                if outcome.oom is None and not (outcome.failed and self._lengths is not None):
                    self._cost.add(batch.work, seconds)
                self._see()
                batch.run_s = outcome.run_s
                self._policy.on_complete(batch, seconds, self._view, now)
            self.running_rows -= batch.rows
            return self._queue.answered(entries, outcome.failed)
        self.running_rows -= batch.rows
        died = outcome.kind == "died"
        before = [e.deaths for e in entries]
        again, ended = self._queue.lose(entries, died, self._idempotent)
        if died:
            if not again and len(before) == 1 and before[0]:
                self._killer_s = now
            for e in again:
                e.died_on, e.died_s = batch.slot, now
        if again:
            self._queue.put_back(again, died or batch.exact, 1 if died else self._queue.max_rows)
        return ended

    # ---- the turn

    def poll(self, now: float, ahead: bool = True, crowded: bool = False) -> list[Event]:
        """The events due now; a second call at the same time returns none. Sets `wake_at`. `ahead`: a batch may be sent
        behind a running one. `crowded`: see `View`."""
        queue = self._queue
        self._view.crowded = crowded
        quiet = not (queue.waiting or queue.events or queue.dirty)
        if quiet and self._held_since_s == INF == self._ceiling_end_s:
            self.wake_at = None
            return []
        if now >= self._ceiling_end_s:
            self._ceiling, self._ceiling_end_s = None, INF
            self._resize()
        if now >= queue.expiries.earliest_s:
            queue.expire(now)
        if queue.dirty:
            self._prune(now)
        while queue.waiting and self._place(now, ahead):
            pass
        if not queue.waiting:
            self._wake_s = INF
        if self._held_since_s < INF and not (self._slots.idle and queue.waiting):
            self._held_s += now - self._held_since_s
            self._held_since_s = INF
        wake = min(self._wake_s, self._spared_s, queue.expiries.next()) if queue.waiting else INF
        self.wake_at = wake if wake < INF else None
        events, queue.events = queue.events, []
        return events

    def _see(self) -> None:
        view = self._view
        view.slots = self._slots.up
        view.inside_rows = self._queue.rows + self.running_rows

    def _ask(self, bucket: Bucket, idle: int, now: float) -> Choice:
        """The policy's choice for a bucket. Carries out a Drop, after which the queue has changed."""
        view = self._view
        self._see()
        view.bucket, view.idle = bucket, idle
        if self._lengths is not None:
            view.max_rows = self._queue.most(bucket.length)
            view.cost = RowCost(self._cost, bucket.length, self._ladder)
            if bucket.finite:
                waiting = sum([b.rows * b.length for b in self._queue.buckets.values()])
                view.share = min(1.0, bucket.rows * bucket.length / waiting)
        view.held_s = self._held_since_s if self._held_since_s < now else now
        if bucket.finite:
            view.busy_s = self._slots.busy_s(now)
        choice = self._policy.select(view, now)
        if len(bucket.parts) > 1 and bucket.finite:
            first = bucket.entries[0]
            if type(choice) is Drop or (type(choice) is Take and first.deadline_s < choice.until_s):
                # other lengths make it late: it goes, or is dropped, with those of its own
                return self._ask(self._queue.buckets[first.bucket], idle, now)
        if type(choice) is Drop:
            for entry in choice.entries:
                if entry.state == EntryState.WAITING:  # else purged a moment ago with another piece of its request
                    expired = choice.reason == "expired"
                    self._queue.drop(entry, Expire(entry.id, "expired") if expired else Shed(entry.id, "overload"))
        return choice

    def _prune(self, now: float) -> None:
        """Lets the policy drop late requests from buckets that got a deadline, also while all slots are busy."""
        dirty, self._queue.dirty = self._queue.dirty, {}
        for name in dirty:
            while (bucket := self._queue.buckets.get(name)) is not None:
                if type(self._ask(bucket, 0, now)) is not Drop:
                    break

    def _place(self, now: float, ahead: bool) -> bool:
        """Sends one batch or drops entries; True: call again."""
        queue, idle = self._queue, self._slots.idle
        self._wake_s, self._wake_rows, self._spared_s = INF, self._view.max_rows, INF
        if self.sequences is not None:
            return self._place_sequence(now)
        if not idle:
            return ahead and self._depth > 1 and not queue.reruns and self._send_ahead(now)
        skip, spared = 0, False  # `skip`: idle slots to leave alone
        if queue.reruns:
            lost = queue.reruns[0]
            exact = any(running.exact for running in self._slots.running.values())
            risky = exact or (self._slots.last and now < lost.died_s + self._patience_s)
            until_s = lost.died_s + 2 * self._patience_s
            spared = self.killers(now) and lost.died_on not in idle and now < until_s
            self._spared_s = until_s if spared else INF
            # while others wait, one slot at a time is at risk
            if not spared and not (risky and queue.buckets) and self._rerun(now):
                return True
            skip = int(not (spared or risky))
        bucket = self._next()
        if bucket is None:
            return False
        choice = self._ask(bucket, len(idle), now)
        if type(choice) is WaitUntil:
            if queue.reruns and not spared and self._rerun(now):
                return True
            choice = self._hold(choice, self._view.bucket, now)
        bucket = self._view.bucket
        if type(choice) is not Take:
            return type(choice) is Drop
        slot = self._slots.least_loaded(skip)
        rows = choice.rows
        if slot is not None and slot.concurrency > 1:
            first = bucket.first(choice.until_s)
            rows = min(rows, slot.room)
            if slot.batches and first is not None and first.rows > rows:
                slot = None  # wait for room: it must not be overtaken for ever
        if slot is None:
            return False
        self._dispatch(slot.number, queue.take(bucket, rows, choice.until_s, choice.fill), choice.reason, now)
        return True

    def _next(self) -> Bucket | None:
        """What the next batch is made of: the bucket with the head of the queue, and other lengths that join it."""
        queue, buckets = self._queue, self._queue.buckets
        if len(buckets) == 1:
            return next(iter(buckets.values()))
        bucket = queue.head()
        if (lengths := self._lengths) is None or bucket is None:
            return bucket
        return mixed(bucket, buckets.values(), self._cost, lambda length: lengths.most(length, queue.max_rows))

    def _place_sequence(self, now: float) -> bool:
        """`_place` for a model with sequences: each bucket has a slot of its own."""
        assert self.sequences is not None
        self._queue.place_sequences(now)
        self._wake_s = self.sequences.frees_s
        for bucket in sorted(self._queue.buckets.values(), key=lambda b: (b.keys[0], b.entries[0].seq)):
            if bucket.slot in self._slots.idle:
                choice = self._ask(bucket, 1, now)
                if type(choice) is Take:
                    entries = self._queue.take(bucket, choice.rows, choice.until_s, False)
                    self._dispatch(bucket.slot, entries, choice.reason, now)
                if type(choice) in (Take, Drop):
                    return True
                if type(choice) is WaitUntil:
                    wake_s = self._wake_s
                    self._hold(choice, bucket, now)
                    self._wake_s = min(wake_s, choice.t)
        return False

    def _rerun(self, now: float) -> bool:
        """Runs requests that were in a death alone on an empty slot, to find out which one kills it. False: no slot is
        empty; then the least loaded slot gets nothing until it is, unless another already runs such a batch."""
        queue = self._queue
        slot = self._slots.empty(queue.reruns[0].died_on, again=self.killers(now))
        if slot is None:
            return False
        entries = queue.take_rerun(slot.concurrency if slot.concurrency > 1 else queue.max_rows)
        self._dispatch(slot.number, entries, "rerun", now, exact=True)
        return True

    def _hold(self, wait: WaitUntil, held: Bucket, now: float) -> Choice:
        """Records a hold. Returns the choice for another bucket that has a full batch and need not wait."""
        assert wait.t > now, f"a policy must wait for a later time than now, found {wait.t} at {now}"
        self._wake_s, self._wake_rows = wait.t, wait.rows
        if self._held_since_s == INF:
            self._held_since_s = now
            self._holds += 1
        queue = self._queue
        if self._lengths is not None or queue.rows - held.rows >= queue.max_rows:
            for bucket in queue.buckets.values():
                if bucket.name not in held.parts and bucket.rows >= queue.most(bucket.length):
                    return self._ask(bucket, len(self._slots.idle), now)
        return None

    def _send_ahead(self, now: float) -> bool:
        """Sends a batch behind a running one: a full batch, several behind short ones, or any batch if the running one
        ends so soon that the slot would otherwise wait. A full batch with rows of a lower class waits for that moment
        too, because a more urgent request may still take their place.

        What is sent cannot be taken back: nothing overtakes it, and it does not expire, however long the running batch
        lasts. It spares the slot the learned lead, once. So nothing is sent ahead behind a long run, beside which the
        lead is small, nor before both are known: what has not started is then always still in the queue.
        """
        if not self._cost.ready or (near := self._slots.nearest(now, True)) is None:
            return False
        if self._lengths is not None and not self._brief(near, now):
            # a batch of several lengths takes longer to find than others: not when none would be sent, nor for each row
            early_s, (seen, until_s, rows) = near.end_s - EARLY_LEADS * self._slots.lead_s, self._seen
            if now < early_s or (near.id == seen and now < until_s and self._queue.rows < rows):
                self._wake_s = early_s if now < early_s else until_s
                return False
        seen = near.id
        bucket = self._next()
        if bucket is None:
            return False
        view, lead_s, full = self._view, self._slots.lead_s, self._queue.most(bucket.length)
        near = self._slots.nearest(now, bucket.rows >= full)
        if near is None or not (self._brief(near, now) or self._cost.t(near.work) <= LONG_LEADS * lead_s):
            return False
        soon_s = near.end_s - lead_s
        soon = soon_s <= now
        view.ahead, view.ahead_s, view.ahead_rows = True, max(0.0, near.end_s - now), near.rows
        choice = self._ask(bucket, 1, now)
        view.ahead, view.ahead_s, view.ahead_rows = False, 0.0, 0
        bucket, full = view.bucket, view.max_rows
        if type(choice) is Take and (soon or (choice.full and self._keeps_place(bucket, near, now))):
            entries = self._queue.take(bucket, choice.rows, choice.until_s, choice.fill)
            self._dispatch(near.slot, entries, choice.reason, now)
            return True
        if soon:
            self._wake_rows = 0  # it is held, and more rows may change that
        else:
            early_s = near.end_s - EARLY_LEADS * lead_s
            self._wake_s = early_s if now < early_s and bucket.rows >= full else soon_s
            if type(choice) is not Drop:
                self._seen = (seen, self._wake_s, self._queue.rows + self._queue.max_rows // LOOKS)
        return type(choice) is Drop

    def _brief(self, near: SlotBatch, now: float) -> bool:
        return self._depth > 2 and near.end_s <= now + BRIEF_S and self._cost.t(near.work) <= BRIEF_S

    def _keeps_place(self, bucket: Bucket, near: SlotBatch, now: float) -> bool:
        """Whether a full batch can go now: no later arrival should replace its rows, or the slot ends too soon."""
        if self._brief(near, now):
            return True
        urgent = len(bucket.entries) - bucket.low
        early = now >= near.end_s - EARLY_LEADS * self._slots.lead_s
        return early and (not bucket.low or urgent >= self._view.max_rows)

    def _dispatch(self, slot: int, entries: list[Entry], reason: str, now: float, exact: bool = False) -> None:
        self._batch_id += 1
        rows = sum([e.rows for e in entries])
        padded = rows if self._ladder is None else self._ladder.up(rows)
        work = rows if self._lengths is None else padded * self._longest(entries)
        batch = self._slots.start(self._batch_id, slot, entries, rows, work, now, exact)
        self.running_rows += rows
        padding: float | None = None
        if self._ladder is not None or self._lengths is not None:
            self._sent_rows += rows
            self._padded_rows += padded - rows
            padding = (padded - rows) / padded
        if self._lengths is not None:
            tokens = sum([e.rows * e.length for e in entries])
            self._sent_tokens += tokens
            self._padded_tokens += work - tokens
            padding = (work - tokens) / work if work else 0.0
        ended = () if self.sequences is None else self.sequences.dispatched(slot, entries)
        both = batch.ahead, batch.concurrent
        self._queue.events.append(Dispatch(batch.id, slot, entries, rows, reason, *both, ended, padding))

    def _longest(self, entries: list[Entry]) -> int:
        """The length to which a batch is padded: with `sizes` a class, so that few shapes occur."""
        assert self._lengths is not None
        longest = max(1, max([e.length for e in entries]))
        return longest if self._ladder is None else self._lengths.up(longest)

    # ---- the ceiling

    def _shrink(self, oom: tuple[int, int], now: float) -> None:
        """Lowers the ceiling. `oom` is (fewest rows that ran out of memory, most rows that ran), or tokens."""
        bad, good = oom
        ceiling = max(1, good if good >= 0.8 * bad else (good + bad) // 2)
        if (
            self._ladder is not None and self._lengths is None
        ):  # batches between two sizes need the memory of the larger one
            ceiling = self._ladder.down(ceiling) or self._ladder.sizes[0]
        self._ceiling = ceiling if self._ceiling is None else min(ceiling, self._ceiling)
        self._ceiling_end_s = now + CEILING_S
        self._resize()

    def _resize(self) -> None:
        rows = self.max_batch_size
        if (lengths := self._lengths) is not None:
            lengths.tokens = min(lengths.max_tokens, self._ceiling or lengths.max_tokens)
        elif self._ceiling is not None:
            rows = min(rows, self._ceiling)
        self._view.max_rows = rows
        self._queue.resize(rows)
