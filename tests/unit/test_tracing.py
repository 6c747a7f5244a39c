"""Traces in this process: who is traced, and that the spans of batches and requests refer to each other."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock import ThreadedStreamer, metrics, tracing
from penstock.client.calls import read_options
from penstock.core.engine.tracing import RequestTracer
from penstock.errors import ConfigError, PenstockError
from penstock.pipeline.load import load_graph
from penstock.pipeline.local import LocalPipeline
from penstock.tracing import SpanRecord, Tracer, child_of, parse, traceparent_of
from penstock.types import Item, ItemResult, Trace
from support.clock import VirtualClock
from support.spans import check_links

hexes = st.text("0123456789abcdef")
ids = st.tuples(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1))
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


@pytest.fixture
def traced() -> Iterator[Callable[[], list[ReadableSpan]]]:
    """Traces every request; the function returns the spans so far."""
    exporter = InMemorySpanExporter()
    tracing.start(exporter=exporter, ratio=1.0, max_per_s=10_000)

    def spans() -> list[ReadableSpan]:
        tracing.flush()
        return list(exporter.get_finished_spans())

    yield spans
    tracing.stop()


# ---- who is traced


@given(ids, st.integers(0, 255))
def test_a_valid_traceparent_is_read_as_it_was_written(pair: tuple[int, int], flags: int) -> None:
    trace, span = f"{pair[0]:032x}", f"{pair[1]:016x}"
    assert parse(f"00-{trace}-{span}-{flags:02x}") == (Trace(trace, span), flags % 2 == 1)
    assert parse(f"cc-{trace}-{span}-{flags:02x}-later") == (Trace(trace, span), flags % 2 == 1)
    child = child_of(Trace(trace, span))
    assert (child.id, child.parent) == (trace, span)
    assert parse(traceparent_of(child)) == (Trace(trace, child.span), True)


@given(st.one_of(st.text(max_size=70), st.builds("-".join, st.lists(hexes, max_size=6))))
def test_what_is_no_traceparent_is_refused(text: str) -> None:
    parts = text.split("-")
    valid = [len(part) for part in parts[:4]] == [2, 32, 16, 2] and parts[0] != "ff" and int(parts[1] or "0", 16)
    assert (parse(text) is not None) <= bool(valid)
    for bad in (
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"{PARENT[:36]}{'0' * 16}-01",
        f"ff{PARENT[2:]}01",
        f"{PARENT}01-x",
        f"{PARENT}01\n",
        PARENT.upper() + "01",
    ):
        assert parse(bad) is None, bad


def test_the_caller_decides_and_else_the_ratio() -> None:
    nobody, everybody = Tracer(lambda record: None, 0.0, 1e9), Tracer(lambda record: None, 1.0, 1e9)
    followed = nobody.sample(PARENT + "01")
    assert followed is not None
    assert (followed.id, followed.parent) == (PARENT[3:35], PARENT[36:52])
    assert everybody.sample(PARENT + "00") is None
    assert nobody.sample("") is nobody.sample("nonsense") is None
    root = everybody.sample("nonsense")
    assert root is not None
    assert root.parent == ""
    some = Tracer(lambda record: None, 0.25, 1e9)
    assert 350 < sum(some.sample("") is not None for _ in range(2000)) < 650


def test_at_most_max_per_s_requests_are_traced_in_a_second() -> None:
    clock = VirtualClock()
    tracer = Tracer(lambda record: None, 1.0, 20.0, clock)
    found = []
    for _ in range(1000):  # ten seconds
        found.append(tracer.sample(PARENT + "01") is not None)
        clock.advance(0.01)
    assert sum(found[:100]) == pytest.approx(39, abs=2)  # a burst of one second's worth, and its refill
    assert sum(found[500:600]) == pytest.approx(20, abs=2)


def test_tracing_that_is_on_or_has_no_meaning_is_an_error(traced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="on already"):
        tracing.start()
    tracing.stop()
    with pytest.raises(ValueError, match="ratio"):
        tracing.start(ratio=1.5)
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match="pip install"):
        tracing.start()
    assert tracing.tracer is None


def test_ids_do_not_follow_the_seed_of_a_model_and_differ_in_forked_processes() -> None:
    drawn = []
    for _ in range(2):
        random.seed(42)
        drawn.append(child_of(None))
    read, write = os.pipe()
    if not (pid := os.fork()):
        os.write(write, traceparent_of(child_of(None)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    drawn += [Trace(*os.read(read, 100).decode().split("-")[1:3]), child_of(None)]
    for end in (read, write):
        os.close(end)
    assert len({each.id for each in drawn}) == len({each.span for each in drawn}) == 4


def test_a_program_that_ends_without_stop_exports_its_last_spans(tmp_path: Path) -> None:
    program = """
        from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
        from penstock import ThreadedStreamer, tracing

        class Printer(SpanExporter):
            def export(self, spans):
                print(*(span.name for span in spans), sep="\\n", flush=True)
                return SpanExportResult.SUCCESS

        tracing.start(exporter=Printer(), ratio=1.0)
        with ThreadedStreamer(lambda items: items, 8) as streamer:
            streamer.predict([1])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert any(line.startswith("request ") for line in done.stdout.splitlines())


# ---- spans


def test_calls_of_a_streamer_are_linked_to_their_batches(traced: Callable[[], list[ReadableSpan]]) -> None:
    provider = TracerProvider()
    with ThreadedStreamer(lambda items: [x * 2 for x in items], 8) as streamer:
        with provider.get_tracer("app").start_as_current_span("work") as work, ThreadPoolExecutor(4) as pool:
            assert streamer.predict([1, 2, 3]) == [2, 4, 6]
            parent = work.get_span_context()
            assert list(pool.map(lambda x: streamer.predict([x]), range(8))) == [[2 * x] for x in range(8)]
        with pytest.raises(TypeError):
            streamer.predict([None])
    batches, requests = check_links(traced(), "request")
    assert len(requests) == 10
    inside = [span for span in requests if span.parent is not None]
    assert [(span.context.trace_id, span.parent and span.parent.span_id) for span in inside] == [
        (parent.trace_id, parent.span_id)
    ]
    assert sum(batch.attributes["penstock.batch.rows"] for batch in batches) == 12
    queues = [span for span in traced() if span.name == "queue"]
    for request in requests:
        (queue,) = (span for span in queues if span.parent and span.parent.span_id == request.context.span_id)
        starts, ends = (request.start_time, queue.start_time), (queue.end_time, request.end_time)
        assert abs(starts[1] - starts[0]) < 1e6, "nanoseconds"
        assert starts[1] <= ends[0] <= ends[1] + 1000


def test_items_of_a_pipeline_are_linked_to_the_batches_of_its_nodes(
    traced: Callable[[], list[ReadableSpan]], tmp_path: Any
) -> None:
    (tmp_path / "ops.py").write_text("def plus(n):\n    return n + 1\n")
    file = tmp_path / "two.toml"
    file.write_text('[a]\nops = ["Python[ops.py:plus]"]\nnext = "b"\n[b]\nops = ["Python[ops.py:plus]"]\n')
    with LocalPipeline(load_graph(str(file))) as pipeline:
        outcomes = pipeline.infer_many([{"data": n} for n in range(5)])
    assert [outcome.fields["result"] for outcome in outcomes] == [2, 3, 4, 5, 6]
    _, nodes = check_links(traced(), "node")
    assert sorted(span.name for span in nodes) == ["node a"] * 5 + ["node b"] * 5
    (whole,) = (span for span in traced() if span.name.startswith("pipeline"))
    assert {span.parent and span.parent.span_id for span in nodes} == {whole.context.span_id}


@pytest.mark.parametrize(("variables", "name"), [({}, "penstock"), ({"OTEL_SERVICE_NAME": "mine"}, "mine")])
def test_the_service_has_the_name_of_the_variable_if_there_is_one(
    variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    exporter = InMemorySpanExporter()
    tracing.start(exporter=exporter, ratio=1.0)
    try:
        assert tracing.tracer is not None
        tracing.tracer.emit(SpanRecord("x", child_of(None), 1.0, 2.0))
        tracing.flush()
    finally:
        tracing.stop()
    (span,) = exporter.get_finished_spans()
    assert span.resource.attributes["service.name"] == name


def test_a_clock_that_is_set_changes_no_length_and_a_long_text_is_cut(
    traced: Callable[[], list[ReadableSpan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    item, answers = Item(None), list[ItemResult]()
    sink = tracing.traced("call", tracing.CLIENT, item, answers.append)
    monkeypatch.setattr("time.time", lambda: 1e9)  # many years ago
    sink(ItemResult(error=PenstockError("x" * 10**6)))
    monkeypatch.undo()
    assert tracing.tracer is not None
    tracing.tracer.emit(SpanRecord("long", child_of(None), 1.0, 2.0, {"url.path": "/" + "y" * 10**6, "n": 3}))
    call, long = sorted(traced(), key=lambda span: span.name)
    assert 0 <= call.end_time - call.start_time < 10e9
    assert len(call.status.description) == 1000
    assert (len(long.attributes["url.path"]), long.attributes["n"]) == (1000, 3)
    assert len(answers) == 1


def test_spans_of_a_worker_process_travel_with_its_metrics() -> None:
    metrics.drain()
    found: list[SpanRecord] = []
    record = SpanRecord("x", child_of(None), 1.0, 2.0, {"a": "ü", "n": 3}, [child_of(None)], "bad", 4)
    try:
        tracing.relay()
        assert tracing.tracer is not None
        tracing.tracer.emit(record)
        RequestTracer(Tracer(found.append)).on_model_metrics("m", "1", 0, metrics.drain() or [])
    finally:
        tracing.tracer = None
    assert found == [record]


def test_a_client_passes_the_current_span_on_unless_the_caller_names_another() -> None:
    assert read_options({}, 1.0).headers == []
    with TracerProvider().get_tracer("app").start_as_current_span("work") as span:
        context = span.get_span_context()
        ((name, value),) = read_options({}, 1.0).headers
        assert (name, value) == (
            "traceparent",
            f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}",
        )
        own = {"Traceparent": PARENT + "00"}
        assert read_options({"headers": own}, 1.0).headers == list(own.items())


@pytest.mark.parametrize("broken", ["fails", "raises"])
def test_lost_spans_are_reported_once_and_stop_nothing(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            if broken == "raises":
                raise OSError("no route")
            return SpanExportResult.FAILURE

    tracing.start(exporter=Broken(), ratio=1.0)
    try:
        with caplog.at_level(logging.WARNING), ThreadedStreamer(lambda items: items, 8) as streamer:
            for _ in range(3):
                assert streamer.predict([1]) == [1]
                tracing.flush()
    finally:
        tracing.stop()
    (line,) = (record.getMessage() for record in caplog.records if "traces_lost" in record.getMessage())
    assert "endpoint=Broken" in line
