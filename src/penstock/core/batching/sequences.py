"""SequenceTable: which slot holds the state of each sequence, and which of its requests is next.

The table alone decides when a sequence ends. A worker keeps every state until a batch names its sequence as ended, so
that a request that waits long, in the queue or on its way, still finds the state.

As in Triton, a start begins its sequence anew, whatever the client did before: it may have died before the end. It runs
behind the requests that have arrived, in the place of the old sequence. A start that finds every place taken waits for
one in the queue, whose bounds and time-outs hold for it: places become free without the client, so a refusal would only
make it poll. Such requests fill half of the queue at most, because places become free by requests in the other half. A
request that begins a sequence only if it must (`start` None, as TorchServe's) is refused instead, as there.
"""

from collections import deque

from msgspec import Struct, field

from penstock.core.batching.entry import INF, Entry
from penstock.errors import BadRequest, ModelNotReady, QueueFull, SequenceLost, SequenceNotFound

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
    `slot` is -1, and `head` in no bucket, while it waits for a place. `sent`: its worker knows it."""

    id: str
    begun_s: float
    used_s: float
    head: Entry | None = None
    line: deque[Entry] = field(default_factory=deque)
    streams: list[Entry] = field(default_factory=list)
    slot: int = -1
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
        self._unplaced: dict[str, _Sequence] = {}  # those without a slot, in the order of arrival
        self._slots: dict[int, int] = {}  # live slot -> sequences
        self._lost: dict[str, float] = {}  # id -> when it was lost with its slot
        self._ended: dict[int, list[str]] = {}  # live slot -> sequences whose states its worker can drop
        self.now_s = 0.0  # of the last event

    def __len__(self) -> int:
        return len(self._sequences) - len(self._unplaced)

    def __contains__(self, id: str) -> bool:
        return id in self._sequences

    # ---- requests

    def enter(self, entry: Entry, now: float, room: bool = True) -> None:
        """Assigns a new request to a sequence. `room`: it may wait for a place. Raises BadRequest, ModelNotReady,
        QueueFull, SequenceLost, SequenceNotFound; then nothing has changed."""
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
        if asked.start is False and (found is None or found.ending):
            if found is None and asked.id in self._lost:
                raise SequenceLost(f"the instance with the state of {name} is gone: begin it again")
            ends = f"it never began, has ended, took too long, or had no request for {limits.idle_s:g} s"
            raise SequenceNotFound(f"{name} is not in progress: {ends}; the first request needs x-sequence-start")
        if found is None and not self._slots:
            raise ModelNotReady("no instance is up for a new sequence", retry_after_s=1.0)
        waits = found.slot < 0 if found else bool(self._unplaced) or self._free() < 0
        if waits and (not room or asked.start is None):
            full = f"{len(self)} sequences are in progress, {limits.max_sequences} on each instance, and "
            raise QueueFull(f"{full}{len(self._unplaced)} wait for a place: try again later", retry_after_s=1.0)
        if found is None:
            found = self._begin(asked.id)
        elif len(found.line) >= limits.backlog:
            raise QueueFull(f"{len(found.line)} requests of {name} wait, as many as may: send the next one later")
        elif asked.start or found.ending:
            asked.start, found.begun_s = True, now
        found.ending = asked.end
        self._use(found)
        entry.held = found.slot < 0 or found.head is not None
        if found.head is None:
            found.head = entry
        else:
            found.line.append(entry)
        if found.slot >= 0:
            self._bind(entry, found.slot)

    def _free(self) -> int:
        """The slot with the fewest sequences; -1 if every place is taken."""
        slot = min(self._slots, key=self._slots.__getitem__, default=-1)
        return slot if slot >= 0 and self._slots[slot] < self._limits.max_sequences else -1

    def _begin(self, id: str) -> _Sequence:
        self._lost.pop(id, None)
        self._sequences[id] = found = _Sequence(id, self.now_s, self.now_s)
        self._unplaced[id] = found
        if len(self._unplaced) == 1:
            self._place(found)
        return found

    def _bind(self, entry: Entry, slot: int) -> None:
        entry.slot, entry.bucket = slot, f"{entry.bucket}@{slot}"

    def _place(self, found: _Sequence) -> bool:
        """Gives a sequence a place; False: none is free."""
        slot = self._free()
        if slot < 0:
            return False
        self._slots[slot] += 1
        del self._unplaced[found.id]
        found.slot = slot
        for entry in (found.head, *found.line):
            if entry is not None:
                self._bind(entry, slot)
        return True

    def placed(self, now: float) -> list[Entry]:
        """Gives free places to the sequences that wait for one. Returns their first requests, which now wait in a
        bucket."""
        if not self._unplaced:
            return []
        self.now_s = now
        self._end_idle()
        heads = []
        for found in list(self._unplaced.values()):
            if not self._place(found):
                break
            assert found.head is not None, "a sequence without requests waits for a place"
            found.head.held = False
            heads.append(found.head)
        return heads

    @property
    def frees_s(self) -> float:
        """When an idle sequence ends and leaves its place to one that waits for it; INF if none waits."""
        idle = (s.used_s for s in self._sequences.values() if s.head is None and not s.streams)
        return next(idle, INF) + self._limits.idle_s if self._unplaced else INF

    def ended(self, entry: Entry, answered: bool) -> tuple[Entry | None, list[Entry]]:
        """A request ended. Returns the request that is next, and those that are lost because the start before them
        failed or was not answered, and left no state."""
        asked = entry.sequence
        found = None if asked is None else self._sequences.get(asked.id)
        if asked is None or found is None:
            return None, []
        at, lost = 0, []  # `at`: where its followers begin in the line
        if found.head is entry:
            found.head = None
        elif entry in found.streams:
            found.streams.remove(entry)
            answered = True  # in part: its followers may have joined it
        elif entry in found.line:
            at = found.line.index(entry)
            del found.line[at]
        else:  # lost with its start, or of an earlier sequence with this id
            return None, []
        self._use(found)
        if asked.start and not answered:
            while at < len(found.line) and (next_asked := found.line[at].sequence) and not next_asked.start:
                lost.append(found.line[at])
                del found.line[at]
            found.ending = found.ending or at == len(found.line)  # what began before it has ended, too
        if found.head is None and found.line:
            return self._advance(found), lost
        if found.head is None and found.ending and not found.streams:
            self._forget(found)
        return None, lost

    def streams(self, entry: Entry) -> Entry | None:
        """The response of a request has begun on a concurrent slot: returns the next one, which may join it."""
        found = self._sequences.get("" if entry.sequence is None else entry.sequence.id)
        if found is None or found.head is not entry:
            return None
        found.streams.append(entry)
        return self._advance(found)

    def _advance(self, found: _Sequence) -> Entry | None:
        found.head = head = found.line.popleft() if found.line else None
        if head is None or found.slot < 0:
            return None
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
        if self._unplaced.pop(sequence.id, None) is None:
            self._slots[sequence.slot] -= 1
        if sequence.sent:
            self._ended[sequence.slot].append(sequence.id)

    def _end_idle(self) -> None:
        idle_s, idle = self._limits.idle_s, []
        for sequence in self._sequences.values():
            if sequence.used_s + idle_s > self.now_s:
                break
            if sequence.head is None and not sequence.streams:
                idle.append(sequence)
        for sequence in idle:
            self._forget(sequence)
        for id, lost_s in list(self._lost.items()):
            if lost_s + idle_s > self.now_s:
                break
            del self._lost[id]
