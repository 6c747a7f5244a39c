"""Turns: in every order of the two threads' steps, each batch is taken once and nobody waits while one is there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.interleaving import Interleaving, schedules

from penstock.core.transports import turns as module
from penstock.core.transports.turns import Turns

LONG, BRIEF, STREAM, NOTICE, END = "long", "brief", "stream", "notice", "end"


def play(messages: Sequence[str], lone: bool, schedule: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> int:
    """One order of the threads for these messages. All of them have arrived at the start, or, from a `lone` client,
    each after the batch before it was taken. Returns the number of steps."""
    run = Interleaving(module, schedule)
    for name, primitive in run.primitives().items():
        monkeypatch.setattr(module, name, primitive)
    batches = [(i, kind) for i, kind in enumerate(messages) if kind not in (NOTICE, END)]
    left, put, taken, receiving, ended = list(enumerate(messages)), [], [], [], []

    def receive() -> bool | None:
        assert not receiving, "both threads receive"
        receiving.append(True)
        run.wait(lambda: bool(left) and (not lone or len(put) == len(taken)), "message")
        number, kind = left[0]
        if kind != END:  # the end of a socket stays
            left.pop(0)
        run.step()  # decoding
        if kind not in (NOTICE, END):
            put.append(number)
            turns.put((number, kind))
        run.step()
        receiving.clear()
        return None if kind == END else kind != NOTICE

    turns: Turns[tuple[int, str]] = Turns(receive)

    def main() -> None:
        while (work := turns.next()) is not None:
            taken.append(work)
            run.step()
            if not turns.brief and not lone:  # this batch may take long, so the next one is decoded meanwhile
                run.wait(
                    lambda: len(put) == len(batches) or len(put) > len(taken), "the next batch"
                )  # decoded meanwhile
            if work[1] == STREAM:
                turns.give()
                run.wait(lambda: NOTICE not in dict(left).values(), "the notice that ends the stream")
            turns.brief = work[1] == BRIEF
        ended.append("main")

    def read() -> None:
        turns.read()
        turns.put(None)
        ended.append("reader")

    run.run(main=main, read=read)
    assert taken == batches, f"{schedule}: taken {taken}, threads wait for {run.waiting}"
    if END in messages:
        assert sorted(ended) == ["main", "reader"], f"{schedule}: threads wait for {run.waiting}"
    else:
        assert "message" in run.waiting.values(), f"{schedule}: nobody listens: {run.waiting}"
    return run.steps


@pytest.mark.parametrize(
    ("messages", "lone"),
    [
        ((LONG, BRIEF, BRIEF, BRIEF), False),
        ((BRIEF, LONG, LONG, BRIEF), False),
        ((BRIEF, BRIEF, STREAM, NOTICE), False),
        ((BRIEF, NOTICE, END), False),
        ((BRIEF, BRIEF, BRIEF), True),
        ((BRIEF, STREAM, NOTICE, END), True),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, tuple) else "lone" if given else "burst",
)
def test_every_batch_is_taken_in_any_order_of_steps(
    messages: Sequence[str], lone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = sum(1 for _ in schedules(lambda schedule: play(messages, lone, schedule, monkeypatch), preemptions=2))
    assert count > 500, "the module's lines were not steps"
