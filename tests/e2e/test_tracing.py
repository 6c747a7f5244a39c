"""Traces of a real server, in a collector: HTTP, gRPC, pipelines, logs, and collectors that do not work."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from penstock import Client
from penstock.torchserve.grpc import message_class
from support.archives import write_war
from support.collector import Collector, Received, linked
from support.waiting import wait_for

SOURCE = """
import logging
import numpy as np
import penstock

@penstock.model(max_batch_size=8)
def echo(items):
    logging.getLogger("mine").info("ran %d", len(items))
    if "bad" in items:
        raise ValueError("bad")
    return items

def told(items, requests):
    return [request.traceparent for request in requests]

class Typed:
    inputs = [penstock.TensorSpec("x", "FP32", (-1, 2))]
    outputs = [penstock.TensorSpec("y", "FP32", (-1, 2))]

    def predict(self, items):
        return [{"y": item["x"] * 2} for item in items]
"""
PORTS = ["--port", "0", "--set", "server.management_port=0", "--set", "server.metrics_port=0"]
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def settings(collector: Collector | str, ratio: float = 0.0) -> list[str]:
    url = collector if isinstance(collector, str) else collector.url
    return ["--set", f"tracing.endpoint={url}", "--set", f"tracing.ratio={ratio}"]


def received(server: Any, collector: Collector) -> list[Received]:
    """All spans; the end of the server sends the last ones."""
    assert server.stop()[0] == 0
    return collector.spans


def test_requests_over_http_and_grpc_are_linked_to_their_batches(
    serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    log = tmp_path / "log.json"
    with Collector() as collector:
        logging = ["--set", f"logging.file={log}", "--set", "logging.format=json"]
        server = serve(SOURCE, "echo", "told", "Typed", *settings(collector), *logging, ports=PORTS)
        assert server.post("/predictions/echo", b'"untraced"')[0] == 200
        with ThreadPoolExecutor(4) as pool:
            sent = list(pool.map(lambda n: server.post("/predictions/echo", b"%d" % n, traceparent=PARENT), range(6)))
        assert [status for status, _ in sent] == [200] * 6
        assert server.post("/predictions/echo", b'"bad"', traceparent=PARENT, x_request_id="r-1")[0] == 500
        assert server.post("/predictions/echo", b"1", traceparent=PARENT[:-1] + "0")[0] == 200
        assert server.post("/predictions/told", b"1") == (200, b"")
        seen = server.post("/predictions/told", b"1", traceparent=PARENT)[1].decode()
        client = triton.InferenceServerClient(server.urls["grpc"].removeprefix("grpc://"))
        tensor = triton.InferInput("x", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 2), np.float32))
        client.infer("typed", [tensor], headers={"traceparent": PARENT})
        client.close()
        spans = received(server, collector)
    echoes = [s for s in spans if s.name == "request echo"]
    assert len(echoes) == 7
    assert {(s.trace, s.parent) for s in echoes} == {(TRACE, PARENT[36:52])}
    assert {s.attributes["url.path"] for s in echoes} == {"/predictions/echo"}
    for request in echoes:
        batch = linked(spans, request)
        assert batch.attributes["penstock.batch.limit_rows"] == 8
        stages = [s.name for s in spans if s.parent == batch.span]
        assert sorted(stages) == ["postprocess echo", "predict echo", "preprocess echo"]
        (queue,) = (s for s in spans if s.name == "queue" and s.parent == request.span)
        assert request.start_s == pytest.approx(queue.start_s, abs=1e-3)
        assert queue.start_s - 1e-6 <= queue.end_s <= request.end_s + 1e-6
        assert request.end_s - request.start_s < 30
    (failed,) = (s for s in echoes if s.error)
    assert (failed.error, failed.attributes["penstock.request_id"]) == ("failed", "r-1")
    (told,) = (s for s in spans if s.name == "request told")
    assert seen == f"00-{TRACE}-{told.span}-01", "a model continues the trace of its request"
    (typed,) = (s for s in spans if s.name == "request typed")
    assert linked(spans, typed).attributes["penstock.batch.rows"] == 1
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (line,) = (line for line in lines if "event=request_failed" in line["message"])
    assert (line["trace_id"], line["span_id"]) == (TRACE, failed.span)
    mine = [line.get("trace_id", "") for line in lines if line["logger"] == "mine"]
    assert mine.count("") == 2  # without a trace, and with one that is not sampled
    assert set(",".join(mine).split(",")) == {"", TRACE}


def test_nodes_of_a_served_pipeline_are_linked_to_their_batches(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text("def plus(data):\n    return data + b'!'\n")
    (tmp_path / "two.toml").write_text(
        '[a]\nops = ["Python[ops.py:plus]"]\nnext = "b"\nprocesses = 1\n[b]\nops = ["Python[ops.py:plus]"]\n'
    )
    with Collector() as collector:
        server = serve("", "two.toml", *settings(collector, 1.0))
        status, body = server.post("/predictions/two", b"x", "application/octet-stream")
        assert (status, body) == (200, b"x!!")
        time.sleep(0.5)  # a worker with concurrent batches reports ten times a second
        spans = received(server, collector)
    (request,) = (s for s in spans if s.name == "request two")
    for name in ("a", "b"):
        (node,) = (s for s in spans if s.name == f"node {name}")
        assert (node.trace, node.parent) == (request.trace, request.span)
        linked(spans, node)


def test_the_client_of_penstock_passes_its_span_on(serve: Callable[..., Any]) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    with Collector() as collector:
        server = serve(SOURCE, "echo", *settings(collector))
        with TracerProvider().get_tracer("app").start_as_current_span("work") as span, Client(server.url) as client:
            assert client.predict("echo", "x") == "x"
            parent = span.get_span_context()
        spans = received(server, collector)
    (request,) = (s for s in spans if s.name == "request echo")
    assert (request.trace, request.parent) == (f"{parent.trace_id:032x}", f"{parent.span_id:016x}")


HANDLER = """
def handle(data, context):
    if data is None:
        return None
    values = [bytes(row.get("body") or row.get("data")) for row in data]
    if b"bad" in values:
        raise ValueError("bad")
    return values
"""
ENDS = """
def begin(data, context):
    return None if data is None else [bytes(row["body"]) for row in data]

def end(data, context):
    return None if data is None else [bytes(row["body"]) + b"!" for row in data]
"""


def test_requests_to_torchserve_are_linked_to_their_batches(torchserve: Any) -> None:
    torchserve.add_model(HANDLER, config="batchSize: 8\nmaxBatchDelay: 20\n")
    write_war(torchserve.folder / "store", "w", "models: {m: {url: m.mar}}\ndag: {begin: [m], m: [end]}\n", ENDS)
    with Collector() as collector:
        keys = {"load_models": "m.mar", "disable_token_authorization": "true", "enable_model_api": "true"}
        torchserve.configure(**keys, tracing_endpoint=collector.url, tracing_ratio="0")
        torchserve.start("--ts-config", "config.properties")
        url = torchserve.url()
        status, said = torchserve.fetch(torchserve.url("Management") + "/workflows?url=w.war", method="POST")
        assert status == 200, said

        def post(body: bytes, path: str = "/predictions/m", traceparent: str = PARENT) -> int:
            headers = {"content_type": "application/octet-stream", "traceparent": traceparent}
            found: int = torchserve.fetch(url + path, body, **headers)[0]
            return found

        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(post, [b"%d" % n for n in range(6)])) == {200}
        assert post(b"bad") == 503
        assert post(b"x", traceparent=PARENT[:-1] + "0") == 200
        assert post(b"untraced", traceparent="") == 200
        assert post(b"x", "/wfpredict/w") == 200
        assert post(b"x", "/wfpredict/w", PARENT[:-1] + "0") == 200
        (address,) = re.findall(r"Inference gRPC API bind to: grpc://(\S+)", torchserve.said())
        with grpc.insecure_channel(address) as channel:
            name = "org.pytorch.serve.grpc.inference"
            predict = channel.unary_unary(
                f"/{name}.InferenceAPIsService/Predictions",
                request_serializer=message_class(f"{name}.PredictionsRequest").SerializeToString,
                response_deserializer=message_class(f"{name}.PredictionResponse").FromString,
            )
            request = message_class(f"{name}.PredictionsRequest")(model_name="m", input={"data": b"g"})
            assert predict(request, metadata=[("traceparent", PARENT)], timeout=60).prediction == b"g"
        assert torchserve.run("torchserve", "--stop")[0] == 0
        spans = collector.spans
    requests = [s for s in spans if s.name == "request m"]
    assert len(requests) == 8
    assert {(s.trace, s.parent) for s in requests} == {(TRACE, PARENT[36:52])}
    paths = sorted(s.attributes["url.path"] for s in requests)
    assert paths == [f"/{name}.InferenceAPIsService/Predictions"] + ["/predictions/m"] * 7
    for each in requests:
        batch = linked(spans, each)
        assert batch.attributes["penstock.batch.limit_rows"] == 8
        assert {"predict m"} <= {s.name for s in spans if s.parent == batch.span}
        assert [s.name for s in spans if s.parent == each.span and s.name == "queue"] == ["queue"]
    (failed,) = (s for s in requests if s.error)
    assert f"trace_id={TRACE} span_id={failed.span}" in torchserve.said(), "the line of its failure"
    (flow,) = (s for s in spans if s.name.startswith("workflow "))
    assert (flow.name, flow.trace, flow.parent) == ("workflow w", TRACE, PARENT[36:52])
    nodes = [s for s in spans if s.parent == flow.span]
    assert sorted(s.name for s in nodes) == ["request w__begin", "request w__end", "request w__m"]
    for each in nodes:
        linked(spans, each)
    assert len([s for s in spans if s.name.startswith("request ")]) == 11, "and none of an unsampled caller"


def test_a_collector_that_is_down_costs_torchserve_neither_requests_nor_the_end(torchserve: Any) -> None:
    torchserve.add_model(HANDLER)
    torchserve.env["OTEL_BSP_SCHEDULE_DELAY"] = "100"
    keys = {"load_models": "m.mar", "disable_token_authorization": "true"}
    torchserve.configure(**keys, tracing_endpoint="http://127.0.0.1:1/v1/traces", tracing_ratio="1")
    torchserve.start("--ts-config", "config.properties")
    for _ in range(20):
        found = torchserve.fetch(torchserve.url() + "/predictions/m", b"x", content_type="application/octet-stream")
        assert found == (200, b"x")
    began = time.monotonic()
    assert torchserve.run("torchserve", "--stop")[0] == 0
    assert time.monotonic() - began < 20
    assert torchserve.said().count("event=traces_lost") <= 1
    assert "Traceback" not in torchserve.said()


@pytest.mark.parametrize("kind", ["down", "answers 500", "slow"])
def test_a_collector_that_does_not_work_costs_neither_requests_nor_the_end(
    kind: str, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with Collector(500 if kind == "answers 500" else 200, 20.0 if kind == "slow" else 0.0) as collector:
        url = "http://127.0.0.1:1/v1/traces" if kind == "down" else collector.url
        server = serve(SOURCE, "echo", *settings(url, 1.0))
        latest = 0.0
        for _ in range(50):
            began = time.monotonic()
            assert server.post("/predictions/echo", b"1")[0] == 200
            latest = max(latest, time.monotonic() - began)
            time.sleep(0.01)
        assert latest < 5
        wait_for(lambda: kind != "answers 500" or "event=traces_lost" in server.said())
        began = time.monotonic()
        status, _, said = server.stop()
        assert status == 0
        assert time.monotonic() - began < 10
    assert said.count("event=traces_lost") <= 1
    assert (said.count("event=traces_lost") == 1) >= (kind == "answers 500")
    assert "Traceback" not in said
