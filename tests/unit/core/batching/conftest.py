"""A Scheduler with a hand on its clock, and scripts of its calls and events."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from penstock.core.batching.entry import Dispatch, Entry, Event, Outcome
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.policies.fixed import Fixed
from penstock.core.batching.scheduler import Scheduler


class Bench:
    """`offer` and `poll` at the time `now`. `sent` are the batches of the last poll, `told` its other events.

    `play` runs a script of steps between bars:

    - `+1 2 rows=3 deadline_s=5`: offers requests; deadline_s and expires_s count from now.
    - `>[1 2] [3]`: a poll sends these batches and tells nothing else. `>@0.5` polls that much later. `[1 2]s1` was sent
      to slot 1, `[1 2]ahead` ahead, `[1 2]rerun` for this reason. `!timeout 1 2` behind them: these requests end.
    - `ok 1`, `died 1`, `lost 1` with fields of an Outcome (`failed=1`, `oom=4/3`, `run_s=1.5`, `after_s=2`): a batch
      ends. `=>7`: split request 7 ends with it; without `=>` none does.
    - `answer 1: 2 3`: some requests of a concurrent batch are answered.
    - `up 0`, `up 0 16`, `down 0`, `retire 0`, `back 0` (down and up again), `cancel 1`, `wait 0.5`.
    - `crowd`, `calm`: from here on the callers keep a processor busy, or do not.
    - `wake 2.0` or `wake -`: when the next poll is due; `queued 2 6`: requests and rows; `running 4`: rows.
    """

    def __init__(self, policy: BatchPolicy | None = None, *, slots: int = 1, **kwargs: Any) -> None:
        kwargs = {"max_batch_size": 4, "max_queue": 100, "max_queue_bytes": 1000} | kwargs
        self.scheduler = Scheduler(policy or Fixed(0.0), **kwargs)
        self.now = 100.0
        self.crowded = False
        self.sent: list[Dispatch] = []
        self.told: list[Event] = []
        self.batches: dict[int, Dispatch] = {}
        for slot in range(slots):
            self.scheduler.slot_up(slot, self.now)

    def offer(self, *ids: int, **fields: Any) -> None:
        for id in ids:
            self.scheduler.offer(Entry(id=id, arrival_s=self.now, **fields), self.now)

    def poll(self, after_s: float = 0.0) -> list[list[int]]:
        """The ids of each batch that is sent after so many seconds."""
        self.now += after_s
        events = self.scheduler.poll(self.now, crowded=self.crowded)
        self.sent = [e for e in events if isinstance(e, Dispatch)]
        self.told = [e for e in events if not isinstance(e, Dispatch)]
        self.batches |= {d.batch_id: d for d in self.sent}
        return [[e.id for e in d.entries] for d in self.sent]

    def complete(self, batch: int, kind: Any = "ok", after_s: float = 0.0, **fields: Any) -> list[int]:
        self.now += after_s
        return self.scheduler.complete(batch, Outcome(kind, **fields), self.now)

    def prime(self, a: float, b: float) -> None:
        self.scheduler.prime([(n, a + b * n) for n in (1, 2, 4, 8) for _ in range(3)])

    def play(self, script: str) -> None:
        for step in script.split("|"):
            verb, rest = re.match(r"\s*(\w+|\+|>)(.*)", step.replace("\n", " ")).groups()
            found = dict(re.findall(r"(\w+)=([^\s>]+)", rest))
            words = re.sub(r"\w+=[^\s>]+", "", rest).split()
            try:
                self._step(verb, rest, words, found)
            except AssertionError as e:
                raise AssertionError(f"step '{step.strip()}': {e}") from e

    def _step(self, verb: str, rest: str, words: list[str], found: dict[str, str]) -> None:
        scheduler = self.scheduler
        if verb == "+":
            fields: dict[str, Any] = {k: v if k == "bucket" else float(v) for k, v in found.items()}
            fields = {k: self.now + v if k in ("deadline_s", "expires_s") else v for k, v in fields.items()}
            fields |= {k: int(v) for k, v in fields.items() if k in ("rows", "priority", "nbytes")}
            fields |= {k: bool(v) for k, v in fields.items() if k in ("divisible", "separate")}
            self.offer(*map(int, words), **fields)
        elif verb == ">":
            reason, *ids = rest.partition("!")[2].split() or [""]
            dropped = [(reason, int(n)) for n in ids]
            later = re.search(r"@([\d.]+)", rest)
            wanted = re.findall(r"\[([\d ]+)\](\S*)", rest)
            sent = self.poll(float(later[1]) if later else 0.0)
            assert sent == [[int(n) for n in ids.split()] for ids, _ in wanted], f"{sent} were sent"
            assert [(e.reason, e.id) for e in self.told] == dropped, f"{self.told} were told"
            for (_, mark), d in zip(wanted, self.sent, strict=True):
                assert mark in ("", f"s{d.slot}", d.reason, "ahead" if d.ahead else ""), f"{d}"
        elif verb in ("ok", "died", "lost"):
            ended = [int(n) for n in re.findall(r"=>\s*([\d ]+)", rest)]
            values: dict[str, Any] = {k: float(v) for k, v in found.items() if k.endswith("_s")}
            if "failed" in found:
                values["failed"] = frozenset({int(found["failed"])})
            if "oom" in found:
                values["oom"] = tuple(map(int, found["oom"].split("/")))
            got = self.complete(int(words[0]), verb, **values)
            assert got == ended, f"{got} ended"
        elif verb == "answer":
            batch, ids = int(words[0].rstrip(":")), set(map(int, words[1:]))
            entries = [e for e in self.batches[batch].entries if e.id in ids]
            assert scheduler.answered(batch, entries, frozenset()) == []
        elif verb in ("up", "down", "retire", "back"):
            slot = int(words[0])
            if verb in ("down", "back"):
                scheduler.slot_down(slot, self.now)
            if verb in ("up", "back"):
                scheduler.slot_up(slot, self.now, *map(int, words[1:]))
            if verb == "retire":
                scheduler.slot_retired(slot, self.now)
        elif verb in ("crowd", "calm"):
            self.crowded = verb == "crowd"
        elif verb == "cancel":
            scheduler.cancel(int(words[0]), self.now)
        elif verb == "wait":
            self.now += float(words[0])
        elif verb == "wake":
            due = None if words[0] == "-" else pytest.approx(self.now + float(words[0]), abs=0.05)
            assert scheduler.wake_at == due, f"{scheduler.wake_at} at {self.now}"
        else:
            counts = {"queued": (scheduler.queued, scheduler.queued_rows), "running": (scheduler.running_rows,)}[verb]
            assert counts == tuple(map(int, words)), f"{counts}"


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return Bench
