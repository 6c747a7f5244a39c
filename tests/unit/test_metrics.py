import threading

import numpy as np
import pytest

from penstock import metrics


@pytest.fixture(autouse=True)
def nothing_pending():
    metrics.drain()


def drained():
    return [(d.kind, d.name, d.value, d.labels) for d in metrics.drain() or []]


def test_counters_add_up_and_gauges_keep_the_last_value():
    metrics.counter("faces", 2, kind="a")
    metrics.counter("faces", 3, kind="a")
    metrics.counter("faces", kind="b")
    metrics.gauge("fill", 5)
    metrics.gauge("fill", 4)
    assert sorted(drained()) == [
        ("counter", "faces", 1, {"kind": "b"}),
        ("counter", "faces", 5, {"kind": "a"}),
        ("gauge", "fill", 4, {}),
    ]
    assert metrics.drain() is None


def test_a_timer_measures_a_block_that_raises():
    with metrics.timer("step"):
        pass
    with pytest.raises(KeyError), metrics.timer("step"):
        raise KeyError
    found = drained()
    assert [name for _, name, _, _ in found] == ["step", "step"]
    assert all(0 <= seconds < 1 for _, _, seconds, _ in found)


def test_a_counter_cannot_go_down():
    with pytest.raises(ValueError, match="use a gauge"):
        metrics.counter("faces", -1)


def test_a_counter_refuses_a_value_that_is_not_a_number():
    with pytest.raises(ValueError, match="use a gauge"):
        metrics.counter("faces", float("nan"))
    with pytest.raises(ValueError, match="could not convert"):
        metrics.gauge("fill", "full")
    assert drained() == []


def test_numpy_numbers_and_any_text_are_converted():
    metrics.gauge("fill", np.float32(0.5), file="\udcff")
    ((_, _, value, labels),) = drained()
    assert type(value) is float
    assert labels == {"file": "\\udcff"}


def test_changes_between_two_batches_are_bounded():
    for i in range(metrics.MAX_SERIES + 10):
        metrics.counter("request", id=i)
    assert len(drained()) == metrics.MAX_SERIES


def test_threads_lose_nothing():
    def count():
        for _ in range(1000):
            metrics.counter("n")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drained() == [("counter", "n", 4000, {})]


def test_models_in_threads_of_their_own_do_not_mix():
    heard = {}

    def work(name):
        metrics.own_registry()
        metrics.counter(name)
        heard[name] = [d.name for d in metrics.drain() or []]

    for name in ("a", "b"):
        thread = threading.Thread(target=work, args=(name,))
        thread.start()
        thread.join()
    assert heard == {"a": ["a"], "b": ["b"]}


@pytest.mark.parametrize("name", ["", "a b", "1st", "größe", "penstock_requests", "process_open_fds"])
def test_a_name_that_would_spoil_the_page_is_refused(name):
    with pytest.raises(ValueError, match="cannot be named"):
        metrics.counter(name)


def test_records_keep_name_unit_and_request_and_are_not_added_up():
    metrics.record("counter", "Déjà vu.%", 1, {"Level": "Model", "n": 3}, "Count", "a-b")
    metrics.record("counter", "Déjà vu.%", np.float32(2), {}, "Count")
    first, second = metrics.drain() or []
    assert (first.name, first.value, first.labels) == ("Déjà vu.%", 1.0, {"Level": "Model", "n": "3"})
    assert (first.unit, first.request_id) == ("Count", "a-b")
    assert type(second.value) is float
    assert metrics.drain() is None


def test_a_record_without_a_number_is_refused():
    with pytest.raises(ValueError, match="could not convert"):
        metrics.record("gauge", "fill", "full", {})  # type: ignore[arg-type]
    assert metrics.drain() is None


def test_records_between_two_batches_are_bounded():
    for _ in range(metrics.MAX_TIMINGS + 5):
        metrics.record("histogram", "h", 1, {})
    assert len(metrics.drain() or []) == metrics.MAX_TIMINGS


def test_a_thread_can_report_through_other_threads():
    told = []

    def work():
        metrics.own_registry()
        metrics.count_for_all()
        metrics.counter("faces", 2)
        metrics.timings("step", [0.1, 0.2], node="a")
        told.append(metrics.drain())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert told == [None]
    assert drained() == [
        ("counter", "faces", 2, {}),
        ("timer", "step", 0.1, {"node": "a"}),
        ("timer", "step", 0.2, {"node": "a"}),
    ]


def test_a_thread_without_its_own_registry_uses_the_shared_one():
    metrics.count_for_all()
    metrics.counter("faces", 2)
    assert drained() == [("counter", "faces", 2, {})]


def test_undrained_timings_are_bounded():
    metrics.timings("step", [0.1] * (metrics.MAX_TIMINGS + 5))
    metrics.timings("step", [0.1] * 5)
    assert len(drained()) == metrics.MAX_TIMINGS
