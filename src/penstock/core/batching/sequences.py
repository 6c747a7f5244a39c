"""SequenceTable: which slot holds the state of each sequence, and which of its requests is next.

The table alone decides when a sequence ends. A worker keeps every state until a batch names its sequence as ended, so
that a request that waits long, in the queue or on its way, still finds the state.
"""

from collections import deque

from msgspec import Struct, field

from penstock.core.batching.entry import Entry
from penstock.errors import BadRequest, Conflict, ModelNotReady, QueueFull, SequenceLost, SequenceNotFound

MAX_LOST = 10_000


class SequenceLimits(Struct, frozen=True):
    """At most `max_sequences` in progress on each slot, each with up to `backlog` requests behind its next one. A
    sequence without requests for `idle_s` ends, and a request that comes `timeout_s` after the first one finds none."""

    max_sequences: int
    idle_s: float
    backlog: int
    timeout_s: float | None = None


class _Sequence(Struct, eq=False):
    """A sequence in progress. `head` waits in a bucket or runs; `line` waits behind it. `streams` run beside them.
    `sent`: its worker knows it."""

    id: str
    slot: int
    begun_s: float
    used_s: float
    head: Entry | None = None
    line: deque[Entry] = field(default_factory=deque)
    streams: list[Entry] = field(default_factory=list)
    ending: bool = False  # the last request has arrived
    sent: bool = False


class SequenceTable:
    """The sequences in progress of one Scheduler. Pure, like the scheduler.

    Each sequence stays on the slot on which it began: the slot with the fewest sequences. Only the first request of a
    sequence waits in a bucket, so that its requests run in the order of their arrival, one at a time.
    """

    def __init__(self, limits: SequenceLimits) -> None:
        self._limits = limits
        self._sequences: dict[str, _Sequence] = {}  # in the order of last use
        self._slots: dict[int, int] = {}  # live slot -> sequences
        self._lost: dict[str, float] = {}  # id -> when it was lost with its slot
        self._ended: dict[int, list[str]] = {}  # live slot -> sequences whose states its worker can drop
        self.now_s = 0.0  # of the last event

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, id: str) -> bool:
        return id in self._sequences

    # ---- requests

    def enter(self, entry: Entry, now: float) -> None:
        """Assigns a new request to a slot. Raises BadRequest, Conflict, ModelNotReady, QueueFull, SequenceLost,
        SequenceNotFound; then nothing has changed."""
        self.now_s = now
        self._end_idle()
        asked, limits = entry.sequence, self._limits
        if asked is None:
            raise BadRequest(
                "the model answers sequences: send x-sequence-id, and x-sequence-start with its first request"
            )
        name = f"sequence '{asked.id[:100]}'"
        found = self._sequences.get(asked.id)
        if found is not None and limits.timeout_s is not None and found.begun_s + limits.timeout_s <= now:
            self.end(asked.id)
            found = self._sequences.get(asked.id)
        if asked.start and found is not None:
            raise Conflict(f"{name} is in progress: end it first, or use another id")
        if asked.start is not False and found is None:
            found = self._begin(asked.id)
        elif found is None:
            if asked.id in self._lost:
                raise SequenceLost(f"the instance with the state of {name} is gone: begin it again")
            ends = f"it never began, has ended, took too long, or had no request for {limits.idle_s:g} s"
            raise SequenceNotFound(f"{name} is not in progress: {ends}; the first request needs x-sequence-start")
        elif found.ending:
            raise Conflict(f"{name} ends with an earlier request: begin it again after that one is answered")
        elif len(found.line) >= limits.backlog:
            raise QueueFull(f"{len(found.line)} requests of {name} wait, as many as may: send the next one later")
        entry.slot, entry.bucket = found.slot, f"{entry.bucket}@{found.slot}"
        found.ending = asked.end
        self._use(found)
        if found.head is None:
            found.head = entry
        else:
            entry.held = True
            found.line.append(entry)

    def _begin(self, id: str) -> _Sequence:
        if not self._slots:
            raise ModelNotReady("no instance is up for a new sequence", retry_after_s=1.0)
        slot = min(self._slots, key=self._slots.__getitem__)
        if self._slots[slot] >= self._limits.max_sequences:
            full = f"{len(self._sequences)} sequences are in progress, {self._limits.max_sequences} on each instance"
            raise QueueFull(f"{full}: begin another one when one has ended", retry_after_s=1.0)
        self._slots[slot] += 1
        self._lost.pop(id, None)
        self._sequences[id] = found = _Sequence(id, slot, self.now_s, self.now_s)
        return found

    def ended(self, entry: Entry, answered: bool) -> tuple[Entry | None, list[Entry]]:
        """A request ended. Returns the request that is next, and those that are lost because the first one of their
        sequence failed or was not answered, and left no state."""
        asked = entry.sequence
        found = None if asked is None else self._sequences.get(asked.id)
        if asked is None or found is None:
            return None, []
        if entry.held:
            found.line.remove(entry)
        elif entry in found.streams:
            found.streams.remove(entry)
        elif found.head is not entry:  # of an earlier sequence with this id
            return None, []
        else:
            found.head = None
        self._use(found)
        if found.head is not None:
            return None, []
        if asked.start and not answered:
            self._forget(found)
            return None, list(found.line)
        if found.line:
            return self._advance(found), []
        if found.ending and not found.streams:
            self._forget(found)
        return None, []

    def streams(self, entry: Entry) -> Entry | None:
        """The response of a request has begun on a concurrent slot: returns the next one, which may join it."""
        found = self._sequences.get("" if entry.sequence is None else entry.sequence.id)
        if found is None or found.head is not entry:
            return None
        found.streams.append(entry)
        return self._advance(found)

    def _advance(self, found: _Sequence) -> Entry | None:
        found.head = head = found.line.popleft() if found.line else None
        if head is not None:
            head.held = False
        return head

    def end(self, id: str) -> None:
        """Ends a sequence after the requests that have arrived."""
        found = self._sequences.get(id)
        if found is not None:
            found.ending = True
            if found.head is None and not found.streams:
                self._forget(found)

    # ---- slots

    def dispatched(self, slot: int, entries: list[Entry]) -> tuple[str, ...]:
        """These requests run now. Returns the sequences that ended on the slot since its last batch."""
        for e in entries:
            assert e.sequence is not None
            self._sequences[e.sequence.id].sent = True
        ended, self._ended[slot] = tuple(self._ended[slot]), []
        return ended

    def slot_up(self, slot: int) -> None:
        self._slots[slot], self._ended[slot] = 0, []

    def lose(self, slot: int) -> list[Entry]:
        """The slot is gone, with its sequences. Returns their requests, of which some may run."""
        self._slots.pop(slot, None)
        self._ended.pop(slot, None)
        lost = [s for s in self._sequences.values() if s.slot == slot]
        for sequence in lost:
            del self._sequences[sequence.id]
            self._lost[sequence.id] = self.now_s
        for id in list(self._lost)[: max(0, len(self._lost) - MAX_LOST)]:
            del self._lost[id]
        return [e for s in lost for e in (s.head, *s.line) if e is not None]

    # ---- ends

    def _use(self, sequence: _Sequence) -> None:
        sequence.used_s = self.now_s
        self._sequences[sequence.id] = self._sequences.pop(sequence.id)

    def _forget(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.id]
        self._slots[sequence.slot] -= 1
        if sequence.sent:
            self._ended[sequence.slot].append(sequence.id)

    def _end_idle(self) -> None:
        before_s, idle = self.now_s - self._limits.idle_s, []
        for sequence in self._sequences.values():
            if sequence.used_s > before_s:
                break
            if sequence.head is None and not sequence.streams:
                idle.append(sequence)
        for sequence in idle:
            self._forget(sequence)
        for id, lost_s in list(self._lost.items()):
            if lost_s > before_s:
                break
            del self._lost[id]
