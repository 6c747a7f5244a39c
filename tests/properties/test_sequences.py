"""Sequences: requests of one sequence run in order, one at a time, on one slot; every request ends exactly once.

A worker's own states take part: whatever a request waits for, it finds what the requests before it left.
"""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.batching.entry import INF, Dispatch, Entry, Outcome
from penstock.core.batching.policies.fixed import Fixed
from penstock.core.batching.scheduler import Scheduler
from penstock.core.batching.sequences import SequenceLimits
from penstock.core.worker.predict import SequenceStates
from penstock.errors import ModelNotReady, QueueFull, SequenceLost, SequenceNotFound
from penstock.types import SequenceRequest

MOST, IDLE_S, BACKLOG, SLOTS = 2, 10.0, 3, 2
REFUSALS = (ModelNotReady, QueueFull, SequenceLost, SequenceNotFound)

offers = st.tuples(
    st.just("offer"), st.integers(0, 5), st.sampled_from("snsnnnneb"), st.sampled_from((INF, INF, INF, 1.0))
)
steps = st.lists(
    st.one_of(
        *[offers] * 4,
        st.tuples(st.just("cancel"), st.integers(0, 99)),
        st.tuples(st.sampled_from(("answer", "answer", "fail", "die", "lose", "retire", "up")), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.sampled_from((0.1, 1.5, IDLE_S - 1, IDLE_S - 0.01, IDLE_S, IDLE_S + 0.1))),
    ),
    min_size=30,
    max_size=90,
)


class Script:
    """Plays steps on a scheduler; `began` is the slot of each sequence in progress, as its callers know it."""

    def __init__(self) -> None:
        limits = SequenceLimits(MOST, IDLE_S, BACKLOG)
        self.scheduler: Any = Scheduler(
            Fixed.of(_greedy()), max_batch_size=4, max_queue=100, max_queue_bytes=1000, sequences=limits
        )
        self.now = 0.0
        self.requests: dict[int, Entry] = {}
        self.open: set[int] = set()  # accepted, and not ended
        self.running: dict[int, Dispatch] = {}
        self.down = {0, 1}
        self.ran: dict[int, list[int]] = {}  # ids that ran, for each beginning of a sequence, in order
        self.accepted: dict[int, list[int]] = {}
        self.slots: dict[int, set[int]] = {}
        self.life: dict[int, int] = {}  # request -> the request that began its sequence
        self.begun: dict[str, int] = {}
        self.states: dict[int, SequenceStates] = {}
        self.left: dict[int, list[int]] = {}  # ids that ran with success, for each beginning: the state there must be
        for slot in range(SLOTS):
            self.up(slot)

    def up(self, slot: int) -> None:
        if slot in self.down:
            self.down.discard(slot)
            self.scheduler.slot_up(slot, self.now)
            self.states[slot] = SequenceStates(_seen)

    def offer(self, name: int, kind: str, deadline_s: float) -> None:
        id = len(self.requests) + 1
        request = SequenceRequest(str(name), kind in "sb", kind in "eb")
        entry = Entry(id, arrival_s=self.now, deadline_s=self.now + deadline_s, expires_s=INF, sequence=request)
        self.requests[id] = entry
        try:
            self.scheduler.offer(entry, self.now)
        except REFUSALS:
            return
        if request.start:
            self.begun[request.id] = id
        self.life[id] = self.begun[request.id]
        behind = [i for i in self.open if self.requests[i].sequence.id == request.id]
        assert len(behind) <= BACKLOG, "the backlog has no bound"
        self.accepted.setdefault(self.life[id], []).append(id)
        self.open.add(id)

    def ended(self, id: int) -> None:
        assert id in self.open, f"request {id} ended twice"
        self.open.discard(id)

    def cancel(self, pick: int) -> None:
        waiting = sorted(self.open - {e.id for d in self.running.values() for e in d.entries})
        if waiting:
            id = waiting[pick % len(waiting)]
            assert self.scheduler.cancel(id, self.now)
            self.ended(id)

    def finish(self, slot: int, kind: str, failed: bool = False) -> None:
        for batch in [d for d in self.running.values() if d.slot == slot]:
            del self.running[batch.batch_id]
            ids = frozenset(e.id for e in batch.entries)
            if kind == "ok":
                self.run(slot, batch, failed)
            outcome: Any = Outcome(kind, failed=ids if failed else frozenset())  # type: ignore[arg-type]
            self.scheduler.complete(batch.batch_id, outcome, self.now)
            if kind == "ok":
                for id in ids:
                    self.ended(id)

    def run(self, slot: int, batch: Dispatch, failed: bool) -> None:
        """What the worker does."""
        states, asked = self.states[slot], [e.sequence for e in batch.entries]
        states.drop(batch.ended)
        for request in asked:
            states.check(request)
        units = states.units([e.id for e in batch.entries], asked)
        for e, found in zip(batch.entries, states.predict(units), strict=True):
            left = self.left.setdefault(self.life[e.id], [])
            assert found == [*left, e.id], f"request {e.id} found another state than its sequence left"
            if not failed:
                left.append(e.id)
        if not failed:
            states.keep(units)
        assert len(states) <= MOST, "states of ended sequences stay"

    def poll(self) -> None:
        for event in self.scheduler.poll(self.now):
            if not isinstance(event, Dispatch):
                self.ended(event.id)
                continue
            assert event.slot not in self.down
            self.running[event.batch_id] = event
            for e in event.entries:
                life = self.life[e.id]
                self.slots.setdefault(life, set()).add(event.slot)
                self.ran.setdefault(life, []).append(e.id)
        busy = [e.id for d in self.running.values() for e in d.entries]
        names = [self.requests[id].sequence.id for id in busy]
        assert len(set(names)) == len(names), "two requests of a sequence run at the same time"
        assert self.scheduler.queued == len(self.open) - len(busy)
        places, placed = MOST * (SLOTS - len(self.down)), len(self.scheduler.sequences)
        assert placed <= places
        waits = any(self.requests[id].slot < 0 for id in self.open)
        assert not waits or placed == places, "a start waits beside a free place"
        assert not waits or self.scheduler.wake_at is None or self.scheduler.wake_at > self.now

    def play(self, step: tuple[Any, ...]) -> None:
        kind, *given = step
        if kind == "offer":
            self.offer(*given)
        elif kind == "cancel":
            self.cancel(given[0])
        elif kind == "wait":
            self.now += given[0]
        else:
            slot = given[0] % SLOTS
            if kind in ("answer", "fail"):
                self.finish(slot, "ok", kind == "fail")
            elif kind == "up":
                self.up(slot)
            elif slot not in self.down:
                if kind == "retire":  # it answers what it has
                    self.scheduler.slot_retired(slot, self.now)
                    self.down.add(slot)
                    self.poll()
                    self.finish(slot, "ok")
                else:
                    self.finish(slot, "died" if kind == "die" else "lost")
                    self.scheduler.slot_down(slot, self.now)
                self.down.add(slot)
        self.poll()


def _seen(items: list[int], sequences: list[SequenceRequest]) -> list[list[int]]:
    for item, sequence in zip(items, sequences, strict=True):
        sequence.state = [*(sequence.state or []), item]
    return [s.state for s in sequences]


def _greedy() -> Any:
    from penstock.config.schema import BatchingConfig

    return BatchingConfig(max_hold_s=0.0)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_requests_of_a_sequence_run_in_order_on_one_slot_and_end_once(steps: list[tuple[Any, ...]]) -> None:
    script = Script()
    for step in steps:
        script.play(step)
    for _ in range(200):
        for slot in range(SLOTS):
            script.play(("answer", slot))
        if script.open and not script.running and len(script.down) < SLOTS:
            assert script.scheduler.wake_at is not None, "nothing wakes a start that waits for idle sequences"
            script.play(("wait", script.scheduler.wake_at - script.now))
    for slot in range(SLOTS):
        script.play(("up", slot))
        script.play(("answer", slot))
    assert not script.open, "requests without an end"
    for id in {i for ids in script.accepted.values() for i in ids}:
        name, end = script.requests[id].sequence.id, script.requests[id].sequence.end
        assert not end or script.begun[name] != script.life[id] or name not in script.scheduler.sequences
    for life, ran in script.ran.items():
        order = script.accepted[life]
        assert ran == sorted(ran, key=order.index), "out of order"
        assert len(script.slots[life]) == 1, "a sequence changed its slot"
        assert ran[0] == life, "a sequence ran without its start"
    script.now += IDLE_S + 1
    for name in range(MOST * SLOTS):  # idle sequences leave their places
        script.offer(100 + name, "s", INF)
    if not script.down:
        assert len(script.open) == MOST * SLOTS
    for slot in range(SLOTS):
        script.play(("answer", slot))  # its batch says which sequences ended
