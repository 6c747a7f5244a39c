"""The slots of one model: which are idle, what runs on each, and when each is predicted to be free."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from enum import IntEnum

from msgspec import Struct

from penstock.core.batching.cost import Cost
from penstock.core.batching.entry import INF, Entry
from penstock.core.batching.policies.base import SlotBatch

BRIEF_S = 0.001  # a slot with at most this much work may get more batches ahead; a hand-over takes about 0.1 ms
HANDOVERS = 9  # samples for the median: the first call of a cold worker takes a thousand times as long


class SlotState(IntEnum):
    """What a slot can take."""

    DOWN = 0
    IDLE = 1  # a concurrent slot: room for more rows
    BUSY = 2
    DYING = 3  # a batch on it came back died or lost: nothing is sent until the slot is down and up again
    RETIRING = 4  # being removed: it finishes its batches, gets nothing more, and is then forgotten


SLOT_MOVES: dict[SlotState, frozenset[SlotState]] = {
    SlotState.DOWN: frozenset({SlotState.DOWN, SlotState.IDLE}),
    SlotState.IDLE: frozenset(SlotState),  # DYING and RETIRING only if concurrent
    SlotState.BUSY: frozenset({SlotState.BUSY, SlotState.IDLE, SlotState.DYING, SlotState.RETIRING}),
    SlotState.DYING: frozenset({SlotState.DYING, SlotState.DOWN, SlotState.IDLE, SlotState.RETIRING}),
    SlotState.RETIRING: frozenset(),
}


# a look-up in the class would take longer than the comparison, several times for each batch
_IDLE, _BUSY, _DYING, _RETIRING = SlotState.IDLE, SlotState.BUSY, SlotState.DYING, SlotState.RETIRING


class Slot(Struct, eq=False):
    """One instance. `batches` run in order; `last_s` is when the last one ended.

    A *concurrent* slot (`concurrency` > 1) runs batches of up to `concurrency` rows in total at the same time. They end
    in any order, so nothing is learned from their times. It is idle while it has room. An `exact` batch runs alone.
    `order` counts the slots in the order in which they came; `place` is its key in `Slots._behind`, if it is there.
    """

    number: int
    order: int = 0
    state: SlotState = SlotState.DOWN
    batches: list[SlotBatch] = []
    last_s: float = -INF
    concurrency: int = 1
    rows: int = 0  # only counted on concurrent slots
    place: tuple[float, int, int] | None = None

    @property
    def room(self) -> int:
        """Rows that a concurrent slot can still take."""
        alone = bool(self.batches) and self.batches[0].exact
        return 0 if alone else self.concurrency - self.rows


class Slots:
    """All slots of one Scheduler. `idle` lists the numbers of idle slots in ascending order; `up` counts live ones.

    With hundreds of slots no event may look at each of them, so the busy ones that can take a batch behind another are
    kept in the order in which they end.
    """

    def __init__(self, cost: Cost, depth: int) -> None:
        self.idle: list[int] = []
        self.up = 0
        self.running: dict[int, SlotBatch] = {}
        self._overs: deque[float] = deque(maxlen=HANDOVERS)
        self._prepared: deque[float] = deque(maxlen=HANDOVERS)
        self._cost, self._depth = cost, depth
        self._line = type(cost) is Cost
        self._slots: dict[int, Slot] = {}
        self._came = 0
        self._worked_s = 0.0  # of the batches that have ended
        # (end, order, number), ascending: busy slots with one batch, and with more; `nearest` has the rule
        self._behind: tuple[list[tuple[float, int, int]], ...] = ([], [])

    def raise_up(self, number: int, concurrency: int) -> None:
        slot = self._slots.get(number)
        if slot is None:
            self._came += 1
            slot = self._slots[number] = Slot(number, self._came, batches=[])
        if slot.batches:
            raise ValueError(f"slot {number} came up with {len(slot.batches)} batches on it: complete them first")
        slot.concurrency, slot.rows = concurrency, 0
        if slot.state != SlotState.IDLE:
            self.up += 1
        self._set(slot, SlotState.IDLE)

    def take_down(self, number: int) -> None:
        slot = self._slots.get(number)
        if slot is None or slot.state in (SlotState.DOWN, SlotState.RETIRING):
            return
        if slot.batches:
            raise ValueError(f"slot {number} went down with {len(slot.batches)} batches on it: complete them first")
        if slot.state == SlotState.IDLE:
            self.up -= 1
        self._set(slot, SlotState.DOWN)

    def retire(self, number: int) -> None:
        """Gives the slot nothing more and forgets it once it is empty; then its number may be reused."""
        slot = self._slots.get(number)
        if slot is None or slot.state == SlotState.RETIRING:
            return
        if slot.state in (SlotState.IDLE, SlotState.BUSY):
            self.up -= 1
        if slot.batches:
            self._set(slot, SlotState.RETIRING)
            self._queue_up(slot)
            return
        if slot.state == SlotState.IDLE:
            self.idle.remove(number)
        del self._slots[number]

    def _set(self, slot: Slot, to: SlotState) -> None:
        if slot.state == _IDLE:
            self.idle.remove(slot.number)
        assert to in SLOT_MOVES[slot.state], f"slot {slot.number} cannot go from {slot.state.name} to {to.name}"
        slot.state = to
        if to == _IDLE:
            insort(self.idle, slot.number)

    def _queue_up(self, slot: Slot) -> None:
        """Puts the slot in its place among those that can take a batch behind another, or takes it out."""
        if slot.place is not None:
            for places in self._behind:
                at = bisect_left(places, slot.place)
                if at < len(places) and places[at] == slot.place:
                    del places[at]
            slot.place = None
        if slot.state == _BUSY and slot.concurrency == 1 and (count := len(slot.batches)) < self._depth:
            slot.place = (slot.batches[-1].end_s, slot.order, slot.number)
            insort(self._behind[count > 1], slot.place)

    def start(
        self, id: int, number: int, entries: list[Entry], rows: int, work: int, now: float, exact: bool
    ) -> SlotBatch:
        slot = self._slots[number]
        concurrent = slot.concurrency > 1
        ahead = bool(slot.batches) and not concurrent
        begin = max(now, slot.batches[-1].end_s) if ahead else now
        cost = self._cost
        if not cost.ready:
            end = begin
        elif self._line:  # cost.t(work) without the call: this runs for every batch
            end = begin + cost.a + cost.b * work
        else:
            end = begin + cost.t(work)
        batch = SlotBatch(id, number, entries, rows, now, end, ahead, exact, concurrent, work)
        slot.batches.append(batch)
        self.running[id] = batch
        if concurrent:
            slot.rows += rows
        self._rest(slot)
        self._queue_up(slot)
        return batch

    def answered(self, id: int, rows: int) -> None:
        """`rows` of a batch on a concurrent slot are answered."""
        batch = self.running[id]
        slot = self._slots[batch.slot]
        batch.rows -= rows
        slot.rows -= rows
        self._rest(slot)

    def least_loaded(self, skip: int = 0) -> Slot | None:
        """The idle slot for the next batch: the first, or the concurrent one with the most room after `skip` others."""
        first = self._slots[self.idle[0]]
        if first.concurrency == 1:
            return first
        slots = sorted((self._slots[n] for n in self.idle), key=lambda s: -s.room)
        return slots[skip] if skip < len(slots) else None

    @property
    def last(self) -> bool:
        """Whether only one slot is up and others will come back."""
        return self.up == 1 < len(self._slots)

    def empty(self, number: int, again: bool) -> Slot | None:
        """An empty idle slot: preferably not `number`, or with `again` preferably that one."""
        empty = [s for n in self.idle if not (s := self._slots[n]).batches]
        return next((s for s in empty if (s.number == number) == again), empty[0] if empty else None)

    def _rest(self, slot: Slot) -> None:
        """Sets a live slot that stays to idle or busy."""
        if slot.state == _IDLE or slot.state == _BUSY:
            idle = slot.room > 0 if slot.concurrency > 1 else not slot.batches
            if idle != (slot.state == _IDLE):
                self._set(slot, _IDLE if idle else _BUSY)

    def finish(self, id: int, alive: bool, run_s: float, prepare_s: float, now: float) -> tuple[SlotBatch, float]:
        """Takes a batch off its slot. Returns it and its seconds, counted from its turn on the slot."""
        batch = self.running.pop(id, None)
        if batch is None:
            raise ValueError(f"batch {id} is not running: every batch is completed exactly once")
        slot = self._slots[batch.slot]
        seconds = now - max(batch.start_s, slot.last_s)
        self._worked_s += now - max(slot.batches[0].start_s, slot.last_s)  # batches that overlap count once
        slot.batches.remove(batch)
        slot.last_s = now
        if batch.concurrent:
            slot.rows -= batch.rows
        elif alive:
            self._prepared.append(prepare_s)
            if slot.batches:
                slot.batches[0].end_s = now + (self._cost.t(slot.batches[0].work) if self._cost.ready else 0.0)
            if not batch.ahead and 0 < run_s + prepare_s <= seconds:
                self._overs.append(seconds - run_s - prepare_s)
        if slot.state == _RETIRING:
            if not slot.batches:
                del self._slots[slot.number]
        elif slot.state != _DYING:
            if alive:
                self._rest(slot)
            else:
                self.up -= 1
                self._set(slot, SlotState.DYING)
        self._queue_up(slot)
        return batch, seconds

    @property
    def handover_s(self) -> float | None:
        """Learned time of a hand-over: from dispatch to the run and back, without preparation."""
        return _middle(self._overs) if self._overs else None

    @property
    def lead_s(self) -> float:
        """How long before its turn a batch must be sent to be ready, with its learned preparation time."""
        return (self.handover_s or 0.0) + (_middle(self._prepared) if self._prepared else 0.0)

    def nearest(self, now: float, full: bool) -> SlotBatch | None:
        """The last batch on the slot that is predicted to be free first and can take another batch behind it.

        Every slot takes one batch ahead. It takes more `full` batches if all its work is short, because its worker
        would otherwise wait for each hand-over. A late batch does not count as short.
        """
        ones, more = self._behind
        best = ones[0] if ones else None
        for place in more if full else ():
            if place[0] > now + BRIEF_S or (best is not None and place >= best):
                break
            if self._slots[place[2]].batches[0].end_s >= now - BRIEF_S:
                best = place
        return None if best is None else self._slots[best[2]].batches[-1]

    def worked_s(self, now: float) -> float:
        """Seconds in which slots had a batch, summed over all slots since the start."""
        running = (s for s in self._slots.values() if s.batches)
        return self._worked_s + sum(max(0.0, now - max(s.batches[0].start_s, s.last_s)) for s in running)

    def busy_s(self, now: float) -> float:
        """Predicted seconds that the running batches still need, over all slots that stay."""
        return sum(
            max(0.0, s.batches[-1].end_s - now)
            for s in self._slots.values()
            if s.batches and s.state != SlotState.RETIRING
        )


def _middle(values: Iterable[float]) -> float:
    """The median, the lower one of two."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
