"""Turns: in every order of the two threads' steps, each batch is taken once and nobody waits while one is there."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from penstock.core.transports import turns as module
from penstock.core.transports.turns import Turns
from support.interleavings import Flag, Lock, Queue, Run, explore

LONG, BRIEF, STREAM, NOTICE = "long", "brief", "stream", "notice"
END = (-1, "end")  # of the socket


@pytest.mark.parametrize(
    ("kinds", "lone"),
    [
        ((LONG, BRIEF, BRIEF), False),
        ((BRIEF, LONG, LONG), False),
        ((BRIEF, STREAM, NOTICE), False),
        ((BRIEF, NOTICE), False),
        ((BRIEF, BRIEF), True),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, tuple) else "lone" if given else "burst",
)
def test_every_batch_is_taken_in_any_order_of_steps(
    kinds: Sequence[str], lone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All messages have arrived at the start, or, from a `lone` client, each after the batch before it was taken. The
    socket ends when all batches are taken: whoever should listen then must learn it."""
    batches = [(i, kind) for i, kind in enumerate(kinds) if kind != NOTICE]

    def make(run: Run) -> list[Callable[[], object]]:
        for name, primitive in (("Event", Flag), ("Lock", Lock), ("SimpleQueue", Queue)):
            monkeypatch.setattr(module, name, partial(primitive, run))
        left = [*enumerate(kinds), END]
        put: list[int] = []
        taken: list[tuple[int, str]] = []
        receiving: list[bool] = []

        def arrived() -> bool:
            return taken == batches if left == [END] else not lone or len(put) == len(taken)

        def receive() -> bool | None:
            assert not receiving, "both threads receive"
            receiving.append(True)
            run.wait(arrived)
            number, kind = left[0]
            if left != [END]:  # the end of a socket stays
                left.pop(0)
            run.wait(lambda: True)  # decoding
            if (number, kind) in batches:
                put.append(number)
                turns.put((number, kind))
            run.wait(lambda: True)
            receiving.clear()
            return None if number < 0 else kind != NOTICE

        turns: Turns[tuple[int, str]] = Turns(receive)

        def main() -> None:
            while (work := turns.next()) is not None:
                taken.append(work)
                run.wait(lambda: True)
                if not turns.brief and not lone:  # this batch may take long, so the next one is decoded meanwhile
                    run.wait(lambda: len(put) == len(batches) or len(put) > len(taken))
                if work[1] == STREAM:
                    turns.give()
                    run.wait(lambda: NOTICE not in dict(left).values())  # the notice ends the stream
                turns.brief = work[1] == BRIEF
            assert taken == batches

        def read() -> None:
            turns.read()
            turns.put(None)

        return [main, read]

    explore([module], make, changes=2)
