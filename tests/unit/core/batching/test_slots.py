"""With any number of slots, the one for a batch sent ahead is the one that a look at each of them finds."""

from random import Random

import pytest

from penstock.core.batching.cost import Cost
from penstock.core.batching.entry import Entry
from penstock.core.batching.policies.base import SlotBatch
from penstock.core.batching.slots import BRIEF_S, Slots, SlotState


def found_by_looking(slots: Slots, depth: int, now: float, full: bool) -> SlotBatch | None:
    """`Slots.nearest` by its definition; of equal ends the slot that came first."""
    best: SlotBatch | None = None
    for slot in slots._slots.values():
        if slot.state == SlotState.BUSY and slot.concurrency == 1:
            first, last = slot.batches[0], slot.batches[-1]
            brief = full and first.end_s >= now - BRIEF_S and last.end_s <= now + BRIEF_S
            if len(slot.batches) < (depth if brief else 2) and (best is None or last.end_s < best.end_s):
                best = last
    return best


class RandomSlots:
    """Slots in a random life: batches start and end, slots come, die and retire, some of them concurrent."""

    def __init__(self, seed: int, depth: int) -> None:
        self.rng, self.depth, self.now, self.batch = Random(seed), depth, 0.0, 0
        self.cost = Cost()
        for rows in (1, 2, 4, 8) * 4:  # 0.25 ms to 2 ms: about BRIEF_S
            self.cost.add(rows, rows * BRIEF_S / 4)
        self.slots = Slots(self.cost, depth)
        self.up: dict[int, int] = {}  # slot -> concurrency
        self.worked_s = 0.0

    def step(self) -> None:
        passed_s = self.rng.choice((0.0, 0.0, BRIEF_S / 4, BRIEF_S))
        self.now += passed_s
        self.worked_s += passed_s * len({batch.slot for batch in self.slots.running.values()})
        move = self.rng.choice((self.start, self.start, self.start, self.end, self.end, self.end, self.raise_up))
        if self.rng.random() < 0.05:
            move = self.leave
        move()

    def start(self) -> None:
        slots = [self.slots._slots[n] for n, k in self.up.items()]
        ready = [s for s in slots if (s.room > 0 if s.concurrency > 1 else len(s.batches) < self.depth)]
        if ready:
            self.batch += 1
            slot, rows = self.rng.choice(ready), self.rng.choice((1, 1, 2, 8))
            rows = min(rows, slot.room) if slot.concurrency > 1 else rows
            self.slots.start(self.batch, slot.number, [Entry(self.batch)], rows, rows, self.now, False)

    def end(self) -> None:
        if self.slots.running:
            batch = self.rng.choice(list(self.slots.running.values()))
            if not batch.concurrent:  # a slot ends its batches in order
                batch = next(b for b in self.slots.running.values() if b.slot == batch.slot)
            self.slots.finish(batch.id, True, 0.0, 0.0, self.now)

    def raise_up(self) -> None:
        number = self.rng.randrange(12)
        if number not in self.slots._slots:
            self.up[number] = self.rng.choice((1, 1, 1, 4))
            self.slots.raise_up(number, self.up[number])

    def leave(self) -> None:
        if self.up:
            number = self.rng.choice(list(self.up))
            del self.up[number]
            if self.rng.random() < 0.5:
                self.slots.retire(number)
                return
            concurrency = self.slots._slots[number].concurrency
            for batch in [b for b in self.slots.running.values() if b.slot == number]:
                self.slots.finish(batch.id, False, 0.0, 0.0, self.now)
            self.slots.take_down(number)
            if self.rng.random() < 0.8:
                self.up[number] = concurrency
                self.slots.raise_up(number, concurrency)


@pytest.mark.parametrize("depth", [2, 3, 8])
def test_the_slot_for_a_batch_ahead_is_the_one_that_a_look_at_all_slots_finds(depth: int) -> None:
    found = brief = 0
    for seed in range(30):
        life = RandomSlots(seed, depth)
        for _ in range(400):
            life.step()
            for full in (False, True):
                nearest = life.slots.nearest(life.now, full)
                assert nearest is found_by_looking(life.slots, depth, life.now, full)
                if nearest is not None:
                    found += 1
                    brief += len(life.slots._slots[nearest.slot].batches) > 1
            assert life.slots.idle == sorted(n for n, slot in life.slots._slots.items() if slot.state == SlotState.IDLE)
    assert found > 5000
    assert bool(brief) is (depth > 2), "only a deeper queue takes a second batch ahead"


def test_the_time_of_work_counts_batches_that_overlap_on_a_slot_once() -> None:
    for seed in range(30):
        life = RandomSlots(seed, 3)
        for _ in range(400):
            life.step()
            assert life.slots.worked_s(life.now) == pytest.approx(life.worked_s)
        assert life.worked_s > 0
