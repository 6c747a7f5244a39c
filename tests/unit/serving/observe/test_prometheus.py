from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from types import ModuleType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from penstock import tracing
from penstock.core.contracts import BatchRecord, ModelSnapshot, Observer, ServerSnapshot
from penstock.core.engine.calls import overriding
from penstock.serving.observe.prometheus import MAX_GONE, PrometheusObserver
from penstock.serving.observe.recorders import BatchRecords
from penstock.serving.triton.statistics import ModelStatistics
from penstock.types import Item, MetricDelta, ModelStatus, Trace

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(observer: PrometheusObserver) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(observer.render().decode()):
        for s in family.samples:
            key = (s.name, tuple(sorted(s.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = s.value
    return found


M = (("model", "m"), ("version", "1"))


def with_label(name: str, value: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((*M, (name, value))))


def test_batches_requests_and_rejections_are_counted(busy: Callable[..., PrometheusObserver]) -> None:
    found = samples(busy())
    assert found["penstock_requests_total", M] == 6
    assert found["penstock_answers_total", with_label("outcome", "ok")] == 4
    assert found["penstock_answers_total", with_label("outcome", "failed")] == 1
    assert found["penstock_batches_total", with_label("outcome", "ok")] == 1
    assert found["penstock_batches_ahead_total", M] == 1
    assert found["penstock_batch_rows_sum", M] == 5
    assert found["penstock_batch_rows_count", M] == 1
    assert found["penstock_batch_fill_ratio_sum", M] == 5 / 64
    assert found["penstock_batch_fill_ratio_bucket", with_label("le", "0.1")] == 1
    assert found["penstock_request_seconds_count", M] == 5
    assert found["penstock_request_seconds_sum", M] == pytest.approx(1.0)
    assert found["penstock_rejections_total", with_label("reason", "queue_full")] == 1
    assert found["penstock_item_failures_total", with_label("code", "item_failed")] == 1
    assert found["penstock_worker_events_total", with_label("state", "died")] == 1


def test_a_batch_of_a_dead_worker_is_timed_and_a_lost_batch_only_counted(
    record: Callable[..., BatchRecord],
) -> None:
    observer = PrometheusObserver()
    observer.on_complete(record(outcome="died", seconds=0.5))
    observer.on_complete(record(outcome="lost"))
    found = samples(observer)
    assert found["penstock_batches_total", with_label("outcome", "died")] == 1
    assert found["penstock_batches_total", with_label("outcome", "lost")] == 1
    assert found["penstock_run_seconds_sum", M] == 0.5
    assert found["penstock_batch_rows_count", M] == 1
    assert found["penstock_request_seconds_count", M] == 0


def test_reported_stages_of_a_batch_are_timed(record: Callable[..., BatchRecord]) -> None:
    observer = PrometheusObserver()
    observer.on_complete(record(stages_s=(0.25, 2.0, 0.5)))
    observer.on_complete(record(stages_s=(0.25, 1.0, 0.0)))
    observer.on_complete(record())
    found = samples(observer)
    sums = [found[f"penstock_{stage}_seconds_sum", M] for stage in ("preprocess", "predict", "postprocess")]
    assert sums == [0.5, 3.0, 0.5]
    assert found["penstock_predict_seconds_count", M] == 2
    assert found["penstock_run_seconds_count", M] == 3


def test_the_page_shows_the_current_state(busy: Callable[..., PrometheusObserver]) -> None:
    found = samples(busy())
    assert found["penstock_requests_in_flight", M] == 7
    assert found["penstock_queue_requests", M] == 3
    assert found["penstock_queue_rows", M] == 5
    assert found["penstock_queue_bytes", M] == 50
    assert found["penstock_queue_limit_rows", M] == 100
    assert found["penstock_workers", M] == 2
    assert found["penstock_workers_up", M] == 1
    assert found["penstock_preprocess_processes", M] == 2
    assert found["penstock_model_state", with_label("state", "READY")] == 1
    assert found["penstock_model_state", with_label("state", "FAILED")] == 0
    assert found["penstock_cost_fixed_seconds", M] == 0.005
    assert found["penstock_cost_row_seconds", M] == 0.0002
    assert found["penstock_holds_total", with_label("kind", "regroup")] == 3
    assert found["penstock_held_seconds_total", M] == 1.5
    assert found["penstock_pool_used_bytes", ()] == 4096
    assert found["penstock_pool_capacity_bytes", ()] == 8192
    assert found["penstock_http_connections", ()] == 9
    assert found["penstock_http_connections_refused_total", ()] == 1
    assert found["penstock_http_requests_total", (("status", "4xx"),)] == 3
    assert found["penstock_http_requests_total", (("status", "unready"),)] == 0


@pytest.mark.parametrize("told", [{}, {"ready": True, "fitted": False, "a_s": 0.0, "b_s": 0.01}])
def test_a_model_that_has_learned_nothing_claims_no_cost(
    reading: Callable[..., ServerSnapshot], told: dict[str, object]
) -> None:
    found = samples(PrometheusObserver(lambda: reading(scheduler=told, http=False)))
    assert found["penstock_queue_requests", M] == 3
    names = {name for name, _ in found}
    assert not names & {"penstock_cost_fixed_seconds", "penstock_cost_row_seconds"}
    assert "penstock_http_connections" not in names


def test_a_worker_after_a_death_counts_as_a_restart_but_the_first_does_not() -> None:
    observer = PrometheusObserver()
    for slot, state in ((0, "ready"), (1, "ready")):
        observer.on_worker("m", "1", slot, state)
    assert samples(observer)["penstock_worker_restarts_total", M] == 0
    for slot, state in ((0, "died"), (0, "failed"), (0, "ready"), (1, "died")):
        observer.on_worker("m", "1", slot, state)
    assert samples(observer)["penstock_worker_restarts_total", M] == 1


@pytest.mark.parametrize(
    "states",
    [
        ("failed", "ready"),  # it did not load at once: nothing had run that could be restarted
        ("ready", "died", "removed", "ready"),  # the number went to another instance
        ("ready", "died", "unload", "ready"),
    ],
)
def test_a_worker_in_a_slot_without_a_death_is_not_a_restart(states: tuple[str, ...]) -> None:
    observer = PrometheusObserver()
    for state in states:
        if state == "unload":
            observer.on_unload("m", "1")
        else:
            observer.on_worker("m", "1", 0, state)
    assert samples(observer)["penstock_worker_restarts_total", M] == 0


def versions_shown(observer: PrometheusObserver) -> set[str]:
    return {dict(labels)["version"] for name, labels in samples(observer) if name == "penstock_requests_total"}


def test_unloaded_versions_are_bounded_and_live_ones_are_kept() -> None:
    observer = PrometheusObserver()
    observer.on_arrival("m", "live")
    for version in range(MAX_GONE + 5):
        observer.on_arrival("m", str(version))
        observer.on_unload("m", str(version))
    assert versions_shown(observer) == {"live"} | {str(v) for v in range(5, MAX_GONE + 5)}


def test_a_reloaded_version_continues_its_counters() -> None:
    observer = PrometheusObserver()
    observer.on_arrival("m", "1")
    observer.on_unload("m", "1")
    observer.on_worker("m", "1", 0, "ready")
    observer.on_arrival("m", "1")
    for version in range(2, MAX_GONE + 3):
        observer.on_arrival("m", str(version))
        observer.on_unload("m", str(version))
    assert samples(observer)["penstock_requests_total", M] == 2


def test_a_models_own_metrics_go_with_it() -> None:
    observer = PrometheusObserver()
    observer.on_model_metrics("m", "1", 0, [MetricDelta("counter", "own", 1.0)])
    assert samples(observer)["own_total", M] == 1
    observer.on_unload("m", "1")
    assert ("own_total", M) not in samples(observer)


@given(st.text(), st.text(), st.text())
@example('a"b\\', "1\n2", '\\n{},="')
@example("\r\x85\u2028", "", " ")
@example("half \ud800", "1", "x")
def test_odd_names_and_labels_come_back_as_they_were(model: str, version: str, label: str) -> None:
    def read() -> ServerSnapshot:
        status = ModelStatus(model, version, "READY", 1, 1, 1, ())
        return ServerSnapshot([ModelSnapshot(status, scheduler={"holds_by_kind": {label: 1}})])

    observer = PrometheusObserver(read)
    observer.on_reject(model, version, label)
    observer.on_complete(BatchRecord(model, version, 0, 1, 1, "", False, 0.1, 0.1, [0.1], 0))
    observer.on_model_metrics(model, version, 0, [MetricDelta("counter", "own", 1.0, {"x": label})])
    model, version, label = (t.encode("utf-8", "backslashreplace").decode() for t in (model, version, label))
    if any("\ud800" <= c <= "\udfff" for c in model + version + label):
        return
    found = samples(observer)
    key = (("model", model), ("version", version))
    assert found["penstock_rejections_total", tuple(sorted((*key, ("reason", label))))] == 1
    assert found["penstock_holds_total", tuple(sorted((*key, ("kind", label))))] == 1
    assert found["penstock_batch_rows_count", key] == 1
    assert found["own_total", tuple(sorted((*key, ("x", label))))] == 1


@pytest.mark.parametrize("make", [PrometheusObserver, ModelStatistics])
def test_the_batches_of_a_server_that_nobody_asks_are_not_kept(make: Callable[[], Observer]) -> None:
    observer, model = make(), f"kept by {make}"
    for _ in range(1000):
        observer.on_answer(model, "1", [0.1], 0)
        observer.on_complete(BatchRecord(model, "1", 0, 1, 1, "", False, 0.1, 0.1, [0.1], 0))
    assert sum(type(o) is BatchRecord and o.model == model for o in gc.get_objects()) < 100


async def test_a_hanging_gpu_delays_only_the_page(
    one_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, busy: Callable[..., PrometheusObserver]
) -> None:
    ill = threading.Event()
    monkeypatch.setattr(one_gpu, "nvmlDeviceGetMemoryInfo", lambda handle: ill.wait(10))
    page = asyncio.ensure_future(busy().scrape())
    for _ in range(10):
        await asyncio.sleep(0.001)
    assert not page.done()
    ill.set()
    assert b"penstock_requests_total" in (await page)[0]


def test_only_observers_that_listen_are_called_for_each_request() -> None:
    metrics, records = PrometheusObserver(), BatchRecords()
    assert overriding([metrics, records], "on_arrival") == [metrics]
    assert overriding([metrics, records], "on_complete") == [metrics, records]


async def test_scrapes_at_the_same_time_share_a_page_that_is_not_older_than_any_of_them() -> None:
    observer = PrometheusObserver()
    reads = 0

    def read() -> ServerSnapshot:
        nonlocal reads
        reads += 1
        observer.on_arrival("m", "1")
        return ServerSnapshot()

    observer.read = read
    first = [asyncio.ensure_future(observer.scrape()) for _ in range(50)]
    while not reads:  # noqa: ASYNC110
        await asyncio.sleep(0)
    later = [asyncio.ensure_future(observer.scrape()) for _ in range(50)]
    cancelled = later.pop()
    await asyncio.sleep(0)
    cancelled.cancel()
    for scrapes, arrived in ((first, 1), (later, 2)):
        for page, _ in await asyncio.gather(*scrapes):
            assert b'penstock_requests_total{model="m",version="1"} %d\n' % arrived in page
    assert reads == 2


async def test_openmetrics_with_exemplars_is_served_while_requests_are_traced_and_only_to_who_accepts_it(
    busy: Callable[..., PrometheusObserver], one_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer, wants = busy(), b"application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2"
    trace = Trace("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    observer.on_traced_end("m", "1", Item(b"", trace=trace), 10.0, 10.2, "ok")
    assert (await observer.scrape(wants))[1].startswith("text/plain")
    monkeypatch.setattr(tracing, "tracer", tracing.Tracer(print))
    assert (await observer.scrape(b"*/*"))[1].startswith("text/plain")
    page, kind = await observer.scrape(wants)
    assert kind.startswith("application/openmetrics-text")
    found = {family.name: family for family in openmetrics(page.decode())}
    plain = text_string_to_metric_families((await observer.scrape())[0].decode())
    assert found.keys() == {family.name for family in plain}
    buckets = found["penstock_request_seconds"].samples
    (exemplar,) = [(s.labels["le"], s.exemplar) for s in buckets if s.exemplar is not None]
    assert exemplar[0] == "0.25"
    assert (exemplar[1].labels, exemplar[1].value) == ({"trace_id": trace.id}, pytest.approx(0.2))
