from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.contracts import ModelSnapshot, ServerSnapshot
from penstock.serving.observe.history import (
    EVENTS,
    KEPT,
    MODELS,
    OVERVIEW,
    STEP,
    STEPS,
    History,
    Second,
    StageTotals,
    Totals,
    merged,
)
from penstock.serving.observe.verdict import verdict
from penstock.types import ModelStatus


def snapshot(name: str = "m", **changed: object) -> ModelSnapshot:
    keys = {"state": "READY", "instances": 1, "ready_instances": 1, "max_batch_size": 8, "devices": ("cpu",)}
    slo_s = changed.pop("slo_s", None)
    return ModelSnapshot(ModelStatus(name, "1", **(keys | changed)), slo_s=slo_s)  # type: ignore[arg-type]


KEY = ("m", "1")


def test_a_second_has_the_differences_of_the_counters_and_the_percentiles_of_its_latencies() -> None:
    history = History()
    model = snapshot()
    history.tick(ServerSnapshot([model]), {KEY: Totals(10, 8, 1, 2, 3, 6.0)}, 1.0)
    model.busy_s = 1.0
    history.on_answer("m", "1", [0.1] * 98 + [0.5] * 2, 0)
    history.tick(ServerSnapshot([model]), {KEY: Totals(30, 20, 5, 4, 5, 16.0)}, 2.0)
    now = history.now[KEY]
    assert (now.requests, now.answers, now.failed, now.rejected) == (10, 6, 2, 1)
    assert (now.rows, now.busy) == (5, 0.5)
    assert (now.p50_s, now.p99_s) == pytest.approx((0.1, 0.5))


def test_counters_that_begin_anew_give_no_negative_rate() -> None:
    history = History()
    for arrived in (100, 3):
        history.tick(ServerSnapshot([snapshot()]), {KEY: Totals(arrived)}, 1.0)
    assert history.now[KEY].requests == 0


def test_the_last_seconds_are_kept_in_bounded_memory() -> None:
    history = History()
    for second in range(KEPT + 100):
        history.tick(ServerSnapshot([snapshot(queue=second)]), {KEY: Totals(second * 7)}, 1.0)
    kept = history.last(KEY, 10**6)
    assert len(kept) == KEPT
    assert [s.queue for s in kept[-2:]] == [KEPT + 98, KEPT + 99]
    assert kept[-1].requests == 7


def test_an_hour_is_kept_in_steps_and_in_bounded_memory() -> None:
    history = History()
    for second in range(1, STEP * (STEPS + 3) + 5):
        history.tick(ServerSnapshot([snapshot(queue=second)]), {KEY: Totals(second)}, 1.0)
    steps = history.hour(KEY)
    assert len(steps) == STEPS
    assert [step.queue for step in steps[-2:]] == [STEP * (STEPS + 2), STEP * (STEPS + 3)]
    assert steps[-1].requests == 1
    assert history.step_age == 4


def test_the_mean_time_of_a_request_falls_into_its_parts() -> None:
    history = History()
    history.tick(ServerSnapshot([snapshot()]), {KEY: Totals(1, 1)}, 1.0)
    stages = StageTotals(4.0, 1.0, 0.1, 0.2, 0.8, 0.3, 0.4)
    history.tick(ServerSnapshot([snapshot()]), {KEY: Totals(6, 6, 1, stages=stages)}, 1.0)
    parts = history.now[KEY][OVERVIEW:]
    assert sum(parts) == pytest.approx(4.0 / 4), "of the four that were answered without an error"
    assert parts == pytest.approx((0.25, 0.3, 0.025, 0.05, 0.2, 0.075, 0.1, 0.0))


def test_the_time_of_writing_counts_for_the_next_answers() -> None:
    history = History()
    for answers, write_s in ((1, 0.0), (1, 2.0), (1, 5.0), (3, 6.0), (4, 6.0)):
        model = snapshot()
        model.write_s = write_s
        history.tick(ServerSnapshot([model]), {KEY: Totals(answers, answers)}, 1.0)
    assert [second.write_s for second in history.last(KEY, 5)] == pytest.approx([0.0, 0.0, 0.0, 3.0, 0.0])


def test_changes_of_instances_and_routes_are_events_and_loads_are_not() -> None:
    history = History()
    both = [snapshot(), snapshot("n", default=False, traffic=0.0)]
    history.tick(ServerSnapshot(both), {}, 1.0)
    history.tick(ServerSnapshot(both), {}, 1.0)
    assert not history.events
    history.tick(ServerSnapshot([snapshot(instances=3, traffic=0.25), snapshot("n", traffic=1.0)]), {}, 1.0)
    assert [(event.model, event.kind, event.text) for event in history.events] == [
        ("m", "scaled", "from 1 to 3 instances"),
        ("m", "traffic", "from 100% to 25%"),
        ("n", "default", "for requests without a version"),
    ]


def test_events_have_times_of_a_clock_that_is_never_set(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    history = History(clock=lambda: now[0])
    now[0] += 7.0
    monkeypatch.setattr("time.time", lambda: 0.0)
    history.on_worker("m", "1", 0, "died")
    assert (history.events[-1].up_s, history.up_s) == (7.0, 7.0)


def test_idle_models_and_old_events_are_dropped() -> None:
    history = History()
    models = [snapshot(f"m{i}") for i in range(MODELS + 10)]
    for i, _ in enumerate(models):
        history.tick(ServerSnapshot(models), {(f"m{i}", "1"): Totals(1)}, 1.0)
    assert not history.last(("m0", "1"), 5)
    assert history.last((f"m{MODELS}", "1"), 5)
    for slot in range(EVENTS + 5):
        history.on_worker("m", "1", slot, "died")
    assert (len(history.events), history.event_count) == (EVENTS, EVENTS + 5)


rows = st.builds(Second, *[st.floats(0, 1e6, width=32)] * len(Second._fields))


@given(st.lists(rows, min_size=1, max_size=20))
def test_one_row_for_several_lies_between_them_and_hides_no_peak(seconds: list[Second]) -> None:
    one = merged(seconds)
    for place, (name, value) in enumerate(one._asdict().items()):
        if place >= OVERVIEW and not any(second.answers for second in seconds):
            assert value == 0, "without answers there is no time of a request"
            continue
        values = [getattr(second, name) for second in seconds]
        assert min(values) - 1e-3 <= value <= max(values) + 1e-3 * max(values)
    assert one.p99_s == max(second.p99_s for second in seconds)


@pytest.mark.parametrize(
    ("model", "second", "word"),
    [
        (snapshot(state="FAILED"), Second(), "failed"),
        (snapshot(state="LOADING"), Second(), "loading"),
        (snapshot(instances=2), Second(), "restarting"),
        (snapshot(), Second(requests=100, answers=100, failed=2), "errors"),
        (snapshot(), Second(requests=100, rejected=50), "refusing"),
        (snapshot(slo_s=0.1), Second(requests=10, answers=10, p99_s=0.2, busy=1.0), "computing"),
        (snapshot(), Second(requests=10, answers=10, oldest_s=2.0, busy=0.2), "waiting"),
        (snapshot(), Second(requests=1000, answers=1000, failed=1, p99_s=0.9, busy=1.0), "healthy"),
        (snapshot(), Second(), "healthy"),
    ],
)
def test_the_verdict_is_one_word(model: ModelSnapshot, second: Second, word: str) -> None:
    found = verdict([snapshot("well"), model], {KEY: [second] * 10})
    assert (found.word, found.model) == (word, "" if word == "healthy" else "m")


def test_no_model_is_a_verdict_and_a_short_peak_is_none() -> None:
    assert verdict([], {}).word == "empty"
    calm = Second(requests=100, answers=100)
    peak = Second(requests=100, answers=100, failed=5)
    assert verdict([snapshot()], {KEY: [*[calm] * 9, peak]}).word == "healthy"
