from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bulk.endpoints import MAX_WINDOW, AimdWindow, RoundWindow, Window

STEPS = st.lists(
    st.tuples(st.sampled_from(["send", "answered", "refused", "lost"]), st.integers(0, 50), st.floats(0.001, 1.0)),
    max_size=400,
)


@given(STEPS, st.integers(1, 100))
def test_a_window_stays_within_its_bounds(steps: list[tuple[str, int, float]], start: int):
    window, now, sent = AimdWindow(start), 0.0, []
    for what, which, pause in steps:
        now += pause
        if what == "send":
            if window.room() > 0:
                window.sent(now)
                sent.append(now)
        elif sent:
            sent_s = sent.pop(which % len(sent))
            before = window.size
            if what == "answered":
                window.answered(sent_s, now, 8)
                assert abs(window.size - before) <= 1
            elif what == "refused":
                window.refused(sent_s, now)
                assert window.size in (before, max(1, before // 2))
            else:
                window.lost()
                assert window.size == before
        assert 1 <= window.size <= MAX_WINDOW
        assert window.in_flight == len(sent)
        assert window.room() == max(0, window.size - len(sent))


@given(STEPS, st.integers(1, 20))
def test_a_round_starts_only_after_the_previous_one_ended(steps: list[tuple[str, int, float]], size: int):
    window, started = RoundWindow(size), 0
    for what, _, _ in steps:
        if what == "send":
            if window.room() > 0:
                started = started + 1 if window.in_flight else 1 if started == size else started + 1
                window.sent(0.0)
        elif window.in_flight:
            {"answered": lambda: window.answered(0.0, 1.0, 1), "refused": lambda: window.refused(0.0, 1.0)}.get(
                what, window.lost
            )()
            if not window.in_flight:
                started = 0
        assert started <= size
        assert window.room() == size - started


def test_refusals_of_one_round_trip_halve_once():
    window = AimdWindow(16)
    for _ in range(10):
        window.sent(0.0)
    for _ in range(4):
        window.refused(0.0, 1.0)
    assert window.size == 8
    window.sent(2.0)
    window.refused(2.0, 3.0)
    assert window.size == 4


def test_a_refused_size_is_not_retried_at_once():
    window, now, refusals = AimdWindow(16), 0.0, 0
    for _ in range(300):  # a server with room for twelve that answers each in a second
        while window.room() > 0:
            window.sent(now)
        sent, now = window.in_flight, now + 1.0
        for number in range(sent):
            if number < 12:
                window.answered(now - 1.0, now, 8)
            else:
                window.refused(now - 1.0, now)
                refusals += 1
    assert window.size >= 6
    assert refusals <= 15


def test_a_fixed_window_keeps_its_size():
    window = Window(500)
    window.sent(0.0)
    window.sent(0.0)
    window.refused(0.0, 1.0)
    assert (window.size, window.in_flight, window.room()) == (500, 1, 499)


def run(window: Window, seconds: float, *, batch: int, fixed_s: float, row_s: float, way_s: float, rows: int) -> float:
    """Rows per second over the second half of the time, for a server that runs one batch at a time.

    A batch takes what waits, at most `batch` rows; requests travel `way_s` in all.
    """
    now, free_s, order = 0.0, 0.0, 0
    events: list[tuple[float, int, str, list[float]]] = [(0.0, 0, "turn", [])]
    queue: list[float] = []  # send times of the waiting requests
    half = 0
    while events and now < seconds:
        now, _, what, those = heapq.heappop(events)
        if what == "answered":
            for sent_s in those:
                window.answered(sent_s, now, rows)
                half += rows if now > seconds / 2 else 0
        while window.room() > 0:
            window.sent(now)
            order += 1
            heapq.heappush(events, (now + way_s / 2, order, "arrived", [now]))
        if what == "arrived":
            queue += those
        if queue and now >= free_s:
            taken, queue = queue[: max(1, batch // rows)], queue[max(1, batch // rows) :]
            free_s = now + fixed_s + row_s * rows * len(taken)
            order += 2
            heapq.heappush(events, (free_s, order - 1, "turn", []))
            heapq.heappush(events, (free_s + way_s / 2, order, "answered", taken))
    return half / (seconds / 2)


@pytest.mark.parametrize(("rows", "start"), [(8, 17), (16, 9), (16, 3), (32, 3), (64, 3), (64, 1)])
@pytest.mark.parametrize("way_s", [0.0005, 0.02, 0.2])
def test_a_window_grows_until_a_batching_server_is_busy(rows: int, start: int, way_s: float):
    server = {"batch": 64, "fixed_s": 0.01, "row_s": 0.001, "way_s": way_s, "rows": rows}
    window = AimdWindow(start)
    found = run(window, 120.0, **server)
    best = run(Window(MAX_WINDOW), 120.0, **server)
    assert found >= 0.9 * best, (found, best, window.size)
    assert window.size < MAX_WINDOW or way_s == 0.2


def test_a_window_does_not_lengthen_a_long_queue():
    window = AimdWindow(3)
    run(window, 600.0, batch=32, fixed_s=0.01, row_s=0.001, way_s=0.0005, rows=32)
    assert window.size <= 6


def test_a_window_that_is_not_full_does_not_grow():
    window = AimdWindow(4)
    for second in range(200):
        window.sent(second)
        window.answered(second, second + 0.1, 8)
    assert window.size == 4


class Queue:
    """A server that runs `slots` requests at a time, each for a second, and shows what waits."""

    def __init__(self, slots: int) -> None:
        self.slots, self.now = slots, 0.0
        self.running: list[tuple[float, float]] = []
        self.waiting: list[float] = []

    def step(self, window: Window) -> None:
        while window.room() > 0:
            window.sent(self.now)
            self.waiting.append(self.now)
        while self.waiting and len(self.running) < self.slots:
            heapq.heappush(self.running, (self.now + 1.0, self.waiting.pop(0)))
        self.now, sent_s = heapq.heappop(self.running)
        window.answered(sent_s, self.now, 1)


@pytest.mark.parametrize("slots", [1, 3, 16, 100, 256])
def test_a_window_that_sees_the_queue_fills_the_server_and_little_more(slots: int) -> None:
    window, server, read_s = AimdWindow(8, 512, step=8), Queue(slots), 0.0
    while server.now < 60:
        server.step(window)
        if server.now >= read_s + 0.5:
            window.queue_is(len(server.waiting))
            read_s = server.now
    assert slots <= window.size <= slots + max(2, slots // 3)


@pytest.mark.parametrize("slots", [1, 16, 100])
def test_a_window_without_a_view_of_the_queue_doubles_until_that_gains_nothing(slots: int) -> None:
    window, server = AimdWindow(8, 512, step=8), Queue(slots)
    while server.now < 60:
        server.step(window)
    assert min(slots, 8) <= window.size <= max(16, 3 * slots)
