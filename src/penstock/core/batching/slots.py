"""The slots of one model: which are idle, what runs on each, when each is predicted to be free."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import IntEnum

from msgspec import Struct

from penstock.core.batching.cost import Cost
from penstock.core.batching.entry import INF, Entry
from penstock.core.batching.policies.base import Running

BRIEF_S = 0.001  # what may lie on a slot that is given more than one batch ahead; a hand-over takes about 0.1 ms
HANDOVERS = 9  # of which the middle one counts: the first call of a cold worker takes a thousand times as long


class SlotState(IntEnum):
    """What a slot can take."""

    DOWN = 0
    IDLE = 1  # a concurrent slot: room for more rows
    BUSY = 2
    DYING = 3  # a batch on it came back died or lost: nothing is sent until the slot is down and up again
    RETIRING = 4  # being removed: it finishes its batches, gets nothing more, and is then forgotten


SLOT_MOVES: dict[SlotState, frozenset[SlotState]] = {
    SlotState.DOWN: frozenset({SlotState.DOWN, SlotState.IDLE}),
    SlotState.IDLE: frozenset(
        {
            SlotState.IDLE,
            SlotState.BUSY,
            SlotState.DOWN,
            SlotState.DYING,
            SlotState.RETIRING,
        }  # the last two: wide
    ),
    SlotState.BUSY: frozenset({SlotState.BUSY, SlotState.IDLE, SlotState.DYING, SlotState.RETIRING}),
    SlotState.DYING: frozenset({SlotState.DYING, SlotState.DOWN, SlotState.IDLE, SlotState.RETIRING}),
    SlotState.RETIRING: frozenset(),
}


class Slot(Struct, eq=False):
    """One instance. `batches` run in order; `last_s` is when the last one ended.

    A *wide* one, of `width` > 1, has up to so many `rows` on it at once, in batches side by side: it has no order, and
    nothing is learned of its times. It is idle as long as there is room. An `exact` batch has it alone.
    """

    number: int
    state: SlotState = SlotState.DOWN
    batches: list[Running] = []
    last_s: float = -INF
    width: int = 1
    rows: int = 0  # counted of wide ones

    @property
    def room(self) -> int:
        """Rows that may still be put on a wide slot."""
        alone = bool(self.batches) and self.batches[0].exact
        return 0 if alone else self.width - self.rows

    def move(self, to: SlotState) -> None:
        assert to in SLOT_MOVES[self.state], f"slot {self.number} cannot go from {self.state.name} to {to.name}"
        self.state = to


class Slots:
    """All slots of one Scheduler. `idle` holds the numbers of the idle ones, lowest first; `up` counts live ones."""

    def __init__(self, cost: Cost, depth: int) -> None:
        self.idle: list[int] = []
        self.up = 0
        self.running: dict[int, Running] = {}
        self._overs: deque[float] = deque(maxlen=HANDOVERS)
        self._prepared: deque[float] = deque(maxlen=HANDOVERS)
        self._cost, self._depth = cost, depth
        self._slots: dict[int, Slot] = {}

    def raise_up(self, number: int, width: int) -> None:
        slot = self._slots.setdefault(number, Slot(number, batches=[]))
        if slot.batches:
            raise ValueError(f"slot {number} came up with {len(slot.batches)} batches on it: complete them first")
        slot.width, slot.rows = width, 0
        if slot.state != SlotState.IDLE:
            self.up += 1
        self._set(slot, SlotState.IDLE)

    def take_down(self, number: int) -> None:
        slot = self._slots.get(number)
        if slot is None or slot.state in (SlotState.DOWN, SlotState.RETIRING):
            return
        if slot.batches:
            raise ValueError(
                f"slot {number} went down with {len(slot.batches)} batches still on it: complete them first"
            )
        if slot.state == SlotState.IDLE:
            self.up -= 1
        self._set(slot, SlotState.DOWN)

    def retire(self, number: int) -> None:
        """Gives the slot nothing more. It is forgotten as soon as nothing is on it; its number may then come again."""
        slot = self._slots.get(number)
        if slot is None or slot.state == SlotState.RETIRING:
            return
        if slot.state in (SlotState.IDLE, SlotState.BUSY):
            self.up -= 1
        if slot.batches:
            self._set(slot, SlotState.RETIRING)
            return
        if slot.state == SlotState.IDLE:
            self.idle.remove(number)
        del self._slots[number]

    def _set(self, slot: Slot, to: SlotState) -> None:
        if slot.state == SlotState.IDLE:
            self.idle.remove(slot.number)
        slot.move(to)
        if to == SlotState.IDLE:
            self.idle.append(slot.number)
            self.idle.sort()

    def start(self, id: int, number: int, entries: list[Entry], rows: int, now: float, exact: bool) -> Running:
        """Puts a batch on a slot, and returns it."""
        slot = self._slots[number]
        wide = slot.width > 1
        ahead = bool(slot.batches) and not wide
        begin = max(now, slot.batches[-1].end_s) if ahead else now
        cost = self._cost  # cost.t(rows) without the call: this runs for every batch
        end = begin + (cost.a + cost.b * rows if cost.ready else 0.0)
        batch = Running(id, number, entries, rows, now, end, ahead, exact, wide)
        slot.batches.append(batch)
        self.running[id] = batch
        if wide:
            slot.rows += rows
        self._rest(slot)
        return batch

    def answered(self, id: int, rows: int) -> None:
        """So many rows of a batch on a wide slot are answered, and not yet all."""
        batch = self.running[id]
        slot = self._slots[batch.slot]
        batch.rows -= rows
        slot.rows -= rows
        self._rest(slot)

    def roomiest(self, but: int = 0) -> Slot | None:
        """The idle slot for the next batch: the first, or of wide ones that with the most room `but` for so many."""
        first = self._slots[self.idle[0]]
        if first.width == 1:
            return first
        slots = sorted((self._slots[n] for n in self.idle), key=lambda s: -s.room)
        return slots[but] if but < len(slots) else None

    def empty(self, avoid: int) -> Slot | None:
        """An idle slot with nothing on it, another one than `avoid` if there is one."""
        empty = [s for n in self.idle if not (s := self._slots[n]).batches]
        return next((s for s in empty if s.number != avoid), empty[0] if empty else None)

    def _rest(self, slot: Slot) -> None:
        """A slot that lives, and stays, is idle or busy, by what is on it."""
        if slot.state in (SlotState.IDLE, SlotState.BUSY):
            idle = slot.room > 0 if slot.width > 1 else not slot.batches
            state = SlotState.IDLE if idle else SlotState.BUSY
            if state != slot.state:
                self._set(slot, state)

    def finish(self, id: int, alive: bool, run_s: float, prepare_s: float, now: float) -> tuple[Running, float]:
        """Takes a batch off its slot. Returns it and its seconds, from its turn on the slot to `now`."""
        batch = self.running.pop(id, None)
        if batch is None:
            raise ValueError(f"batch {id} is not running: every batch is completed exactly once")
        slot = self._slots[batch.slot]
        seconds = now - max(batch.start_s, slot.last_s)
        slot.batches.remove(batch)
        slot.last_s = now
        if batch.wide:
            slot.rows -= batch.rows
        elif alive:
            self._prepared.append(prepare_s)
            if slot.batches:
                slot.batches[0].end_s = now + (self._cost.t(slot.batches[0].rows) if self._cost.ready else 0.0)
            if not batch.ahead and 0 < run_s + prepare_s <= seconds:
                self._overs.append(seconds - run_s - prepare_s)
        if slot.state == SlotState.RETIRING:
            if not slot.batches:
                del self._slots[slot.number]
        elif slot.state != SlotState.DYING:
            if alive:
                self._rest(slot)
            else:
                self.up -= 1
                self._set(slot, SlotState.DYING)
        return batch, seconds

    @property
    def handover_s(self) -> float | None:
        """Learned: from dispatch to the run and back, without its preparation."""
        return _middle(self._overs) if self._overs else None

    @property
    def lead_s(self) -> float:
        """How long before its turn a batch must be sent to be ready for it: its preparation is learned, too."""
        return (self.handover_s or 0.0) + (_middle(self._prepared) if self._prepared else 0.0)

    def nearest(self, now: float, full: bool) -> Running | None:
        """The last batch of the slot that is predicted to be free first, of those that can take another one behind it.

        One ahead is room for any; for a `full` one there is more where all that runs and waits is brief, because then
        a worker would wait for each hand-over. A batch that is late by as much is not brief.
        """
        best: Running | None = None
        for slot in self._slots.values():
            if slot.state == SlotState.BUSY and slot.width == 1:
                batches, last = slot.batches, slot.batches[-1]
                brief = full and batches[0].end_s >= now - BRIEF_S and last.end_s <= now + BRIEF_S
                if len(batches) < (self._depth if brief else 2) and (best is None or last.end_s < best.end_s):
                    best = last
        return best

    def busy_s(self, now: float) -> float:
        """Predicted seconds that what runs still needs, over all slots that stay."""
        return sum(
            max(0.0, s.batches[-1].end_s - now)
            for s in self._slots.values()
            if s.batches and s.state != SlotState.RETIRING
        )


def _middle(values: Iterable[float]) -> float:
    """The median, the lower one of two."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
