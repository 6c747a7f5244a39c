"""Triton's extensions over HTTP, used by tritonclient's HTTP clients, sync and asyncio, as they are."""

import asyncio
import gzip
import http.client
import inspect
import json
import re
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as triton_messages
import tritonclient.http as triton
from google.protobuf.json_format import ParseDict
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.http import aio
from tritonclient.utils import InferenceServerException

from penstock.serving.protocols.oip_protobuf import open_inference

SOURCE = """
    import numpy as np
    import penstock

    def echo(items):
        return items

    class Typed:
        inputs = [penstock.TensorSpec("x", "FP32", (-1, 2)), penstock.TensorSpec("t", "BYTES", (-1, 1), optional=True)]
        outputs = [penstock.TensorSpec("y", "FP32", (-1, 2))]
        parameters = {"classes": 2}

        def predict(self, items):
            return [{"y": item["x"] * 2} for item in items]

    def fails(items):
        raise ValueError("no")

    @penstock.model(max_sequences=4)
    class Totals:
        def predict(self, items, sequences):
            return items

    def parts(items):
        yield items

    def told(items, parameters):
        return [{"told": np.array([str(sorted(found.items()))], object)} for found in parameters]

    async def told_async(items, *, parameters):
        return told(items, parameters)

    @penstock.model(max_sequences=4)
    def told_sequences(items, sequences, parameters):
        return told(items, [{**found, "sequence": int(s.id)} for found, s in zip(parameters, sequences)])

    def waits(items):
        import time
        time.sleep(0.5)
        return items

    class Classes:
        inputs = {"x": "FP32[-1,4]"}
        outputs = {"y": "FP32[-1,4]", "z": "FP32[-1,4]"}

        def predict(self, x):
            return {"y": x, "z": -x}

    def scores(items):
        return [{"y": item["x"], "t": np.array([b"a"], object)} for item in items]
"""
CONFIG = """
[server]
triton_metrics = true
management = true
model_store = "store"

[models.echo]
target = "app.py:echo"
transport = "thread"

[models.typed]
target = "app.py:Typed"
transport = "thread"
batching = { max_batch_size = 8, max_hold_s = 0.002 }

[models.typed2]
target = "app.py:Typed"
transport = "thread"
name = "typed"
version = "2"

[models.totals]
target = "app.py:Totals"
transport = "thread"

[models.parts]
target = "app.py:parts"
transport = "thread"

[models.fails]
target = "app.py:fails"
transport = "thread"

[models.told]
target = "app.py:told"
transport = "thread"

[models.told_async]
target = "app.py:told_async"

[models.told_sequences]
target = "app.py:told_sequences"
transport = "thread"

[models.waits]
target = "app.py:waits"
transport = "thread"

[models.strict]
target = "app.py:echo"
transport = "thread"
strict_parameters = true

[models.scores]
target = "app.py:scores"
transport = "thread"

[models.classes]
target = "app.py:Classes"
transport = "thread"
labels = { y = "labels.txt" }
"""
ONE = np.array([[1, 2]], np.float32)
WAIT = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}'


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("config")
    (folder / "penstock.toml").write_text(CONFIG)
    (folder / "store").mkdir()
    (folder / "labels.txt").write_bytes(b"cat\ndog: a:b\r\n\n")
    (folder / "store" / "other.onnx").write_bytes(b"no model")
    (folder / "store" / "twice.pt").write_bytes(b"")
    (folder / "store" / "twice.onnx").write_bytes(b"")
    (folder / "store" / "extra.py").write_text("def echo(items):\n    return items\n")
    (folder / "app.py").write_text(inspect.cleandoc(SOURCE))
    return serve_all(None, "penstock.toml", cwd=folder)


def address(server: Any) -> str:
    url: str = server.url
    return url.removeprefix("http://")


class AioClient:
    """The asyncio client with the calls of the other one."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = self._run(self._open(address))

    async def _open(self, address: str) -> Any:
        return aio.InferenceServerClient(address)

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return (lambda *a, **k: self._run(found(*a, **k))) if inspect.iscoroutinefunction(found) else found

    def close(self) -> None:
        self._run(self._client.close())
        self._loop.close()


@pytest.fixture(params=["http", "aio"])
def client(server: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    found = triton.InferenceServerClient(address(server)) if request.param == "http" else AioClient(address(server))
    yield found
    found.close()


def tensor(name: str, array: Any, datatype: str = "FP32", binary: bool = True) -> Any:
    found = triton.InferInput(name, array.shape, datatype)
    found.set_data_from_numpy(array, binary_data=binary)
    return found


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as raised:
        call()
    return raised.value.status(), raised.value.message()


# ---- health, metadata and configuration


def test_health_and_metadata(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("typed", "2")
    assert "model_repository" in client.get_server_metadata()["extensions"]
    assert client.get_model_metadata("typed", "1")["versions"] == ["1"]


def test_a_model_configuration_has_tritons_form(client):
    config = client.get_model_config("typed", "1")
    assert config["max_batch_size"] == 8
    assert config["input"] == [
        {"name": "x", "data_type": "TYPE_FP32", "dims": [2], "optional": False},
        {"name": "t", "data_type": "TYPE_STRING", "dims": [1], "optional": True},
    ]
    assert config["output"] == [{"name": "y", "data_type": "TYPE_FP32", "dims": [2], "label_filename": ""}]
    assert config["instance_group"] == [{"name": "typed_0", "count": 1, "kind": "KIND_CPU"}]
    assert config["version_policy"] == {"specific": {"versions": [1, 2]}}
    assert config["parameters"] == {"classes": {"string_value": "2"}}
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 2000
    assert config["dynamic_batching"]["priority_levels"] == 3
    assert not config["model_transaction_policy"]["decoupled"]
    assert client.get_model_config("parts")["model_transaction_policy"]["decoupled"]
    sequences = client.get_model_config("totals")["sequence_batching"]
    assert sequences["oldest"]["max_candidate_sequences"] == 4


def test_the_neutral_forms_are_tritons_messages(client):
    ours = open_inference().message
    for model in ("typed", "totals", "parts"):
        config = client.get_model_config(model)
        for message in (ours("inference.ModelConfigResponse"), triton_messages.ModelConfigResponse):
            assert ParseDict({"config": config}, message()).config.name == model
    statistics = client.get_inference_statistics()
    index = {"models": client.get_model_repository_index()}
    for kind, body in (("ModelStatisticsResponse", statistics), ("RepositoryIndexResponse", index)):
        for message in (ours(f"inference.{kind}"), getattr(triton_messages, kind)):
            ParseDict(body, message())


def test_an_unknown_model_has_tritons_error_form(server, client):
    missing = "model 'absent' is not found"
    for call in (client.get_model_config, client.get_model_metadata):
        assert refused(lambda call=call: call("absent")) == ("404", missing)
    for call in (client.get_inference_statistics, client.get_trace_settings):
        assert refused(lambda call=call: call("absent")) == ("400", missing)
    assert refused(lambda: client.get_inference_statistics("typed", "9"))[0] == "400"
    assert "version '9' of model 'typed' is not found" in refused(lambda: client.get_model_config("typed", "9"))[1]
    assert json.loads(server.get("/v2/models/absent/config")[1]) == {"error": missing}


# ---- statistics


def test_statistics_count_requests_rows_and_batches(client):
    model = "typed"

    def read() -> dict[str, Any]:
        found = client.get_inference_statistics(model, "2")["model_stats"]
        assert [(each["name"], each["version"]) for each in found] == [(model, "2")]
        return found[0]

    before = read()
    started_ms = time.time() * 1e3
    two = np.ones((2, 2), np.float32)
    for array in (ONE, two, two):
        client.infer(model, [tensor("x", array)], model_version="2")
    after = read()
    assert after["inference_count"] - before["inference_count"] == 5
    assert after["execution_count"] - before["execution_count"] == 3
    assert after["last_inference"] >= started_ms - 1
    for part in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        old, new = before["inference_stats"][part], after["inference_stats"][part]
        assert new["count"] - old["count"] == 3
        assert new["ns"] > old["ns"]
    sizes = {each["batch_size"]: each for each in after["batch_stats"]}
    assert sizes[2]["compute_infer"]["count"] == 2 + {
        each["batch_size"]: each["compute_infer"]["count"] for each in before["batch_stats"]
    }.get(2, 0)
    times = [after["inference_stats"][part]["ns"] for part in ("queue", "compute_infer")]
    assert sum(times) <= after["inference_stats"]["success"]["ns"]


def test_failures_count_apart(client):
    def counts() -> tuple[int, int]:
        found = client.get_inference_statistics("fails")["model_stats"][0]["inference_stats"]
        return found["success"]["count"], found["fail"]["count"]

    before = counts()
    refused(lambda: client.infer("fails", [tensor("x", ONE)]))
    assert counts() == (before[0], before[1] + 1)


def nv_metrics(server: Any, model: str, version: str) -> dict[str, float]:
    """The samples of a version on the metrics page, by name, to which the parser adds `_total`, and by reason."""
    page = server.get("/metrics", "metrics")[1].decode()
    return {
        family.name.removeprefix("nv_inference_") + sample.labels.get("reason", ""): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if family.name.startswith("nv_inference_")
        and (sample.labels["model"], sample.labels["version"]) == (model, version)
    }


def test_what_cannot_be_decoded_is_no_inference_and_metrics_are_the_statistics(server, client):
    def read() -> tuple[dict[str, Any], dict[str, float]]:
        return client.get_inference_statistics("typed", "2")["model_stats"][0], nv_metrics(server, "typed", "2")

    _, before = read()
    client.infer("typed", [tensor("x", np.ones((3, 2), np.float32))], model_version="2")
    wrong = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}'
    for body in (b"{", b'{"inputs": []}', wrong):
        assert server.post("/v2/models/typed/versions/2/infer", body)[0] == 400
    statistics, after = read()
    grown = {name: after[name] - before[name] for name in after if "duration" not in name}
    assert grown == {
        "request_success": 1,
        "count": 3,
        "exec_count": 1,
        "request_failureREJECTED": 0,
        "request_failureCANCELED": 0,
        "request_failureBACKEND": 0,
        "request_failureOTHER": 3,
        "pending_request_count": 0,
    }
    stats = statistics["inference_stats"]
    assert (after["count"], after["exec_count"]) == (statistics["inference_count"], statistics["execution_count"])
    assert sum(each["compute_infer"]["count"] for each in statistics["batch_stats"]) == after["exec_count"]
    for part, name in (("success", "request"), ("queue", "queue"), ("compute_infer", "compute_infer")):
        assert stats[part]["count"] == after["request_success"]
        assert after[f"{name}_duration_us"] == pytest.approx(stats[part]["ns"] / 1e3, abs=1)
    assert sum(value for name, value in after.items() if "failure" in name) == stats["fail"]["count"]


def test_a_model_that_fails_is_a_failure_of_the_backend(server, client):
    before = nv_metrics(server, "fails", "1")
    refused(lambda: client.infer("fails", [tensor("x", ONE)]))
    after = nv_metrics(server, "fails", "1")
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert grown == {"request_failureBACKEND": 1, "exec_count": 1}


def test_the_mean_time_in_the_queue_is_what_triggers_read(server, client):
    """While one request runs, the next waits: half a second, also if it was sent to the worker ahead."""
    before = nv_metrics(server, "waits", "1")
    with ThreadPoolExecutor(2) as two:
        list(two.map(lambda _: server.post("/v2/models/waits/infer", WAIT), range(2)))
    after = nv_metrics(server, "waits", "1")
    done = after["request_success"] - before["request_success"]
    waited_us = after["queue_duration_us"] - before["queue_duration_us"]
    ran_us = after["compute_infer_duration_us"] - before["compute_infer_duration_us"]
    whole_us = after["request_duration_us"] - before["request_duration_us"]
    assert done == 2
    assert ran_us >= 1e6
    assert 0.8 * whole_us <= waited_us + ran_us <= whole_us


def test_statistics_list_every_version(client):
    found = {(each["name"], each["version"]) for each in client.get_inference_statistics()["model_stats"]}
    assert {("typed", "1"), ("typed", "2"), ("echo", "1")} <= found


# ---- requests


SCORES = np.array([[[0.5, 3], [-1, 3]], [[np.nan, -2], [7, 0.25]]], np.float32)


@pytest.mark.parametrize("binary", [False, True])
def test_a_classification_has_the_largest_values_of_each_row(client, binary):
    best = triton.InferRequestedOutput("y", binary_data=binary, class_count=3)
    found = client.infer("scores", [tensor("x", SCORES)], outputs=[best]).as_numpy("y")
    assert [[cell if isinstance(cell, str) else cell.decode() for cell in row] for row in found.tolist()] == [
        ["3.000000:1", "3.000000:3", "0.500000:0"],
        ["7.000000:2", "0.250000:3", "-2.000000:1"],
    ]
    all_of_them = triton.InferRequestedOutput("y", class_count=100)
    counts = np.array([[3, 200, 200]], np.uint8)
    found = client.infer("scores", [tensor("x", counts, "UINT8")], outputs=[all_of_them]).as_numpy("y")
    assert found.tolist() == [[b"200:1", b"200:2", b"3:0"]]


@pytest.mark.parametrize("binary", [False, True])
def test_a_classification_has_the_labels_of_its_output(client, binary):
    """Lines are labels as they are; the answer has none for a class without one, and for an output without a file."""
    outputs = [triton.InferRequestedOutput(name, binary_data=binary, class_count=9) for name in "yz"]
    x = np.array([[0.1, 3, 0.1, -1], [4, 1, 2, 3]], np.float32)
    found = client.infer("classes", [tensor("x", x)], outputs=outputs)
    assert [[str(cell) if isinstance(cell, str) else cell.decode() for cell in row] for row in found.as_numpy("y")] == [
        ["3.000000:1:dog: a:b\r", "0.100000:0:cat", "0.100000:2", "-1.000000:3"],
        ["4.000000:0:cat", "3.000000:3", "2.000000:2", "1.000000:1:dog: a:b\r"],
    ]
    first = found.as_numpy("z")[0][0]
    assert first in ("1.000000:3", b"1.000000:3")
    declared = {each["name"]: each["label_filename"] for each in client.get_model_config("classes")["output"]}
    assert declared == {"y": "labels.txt", "z": ""}


def test_a_classification_of_text_is_refused(client):
    best = triton.InferRequestedOutput("t", class_count=1)
    status, message = refused(lambda: client.infer("scores", [tensor("x", ONE)], outputs=[best]))
    assert (status, message) == ("400", "output 't': classification needs numbers, found BYTES")


@pytest.mark.parametrize("binary", [False, True])
def test_a_timeout_ends_a_request_that_waits(client, binary):
    status, message = refused(lambda: client.infer("waits", [tensor("x", ONE, binary=binary)], timeout=1))
    assert status == "503"
    assert message.startswith("the request expired in the queue after 1 us")
    assert (
        client.infer("waits", [tensor("x", ONE, binary=binary)], timeout=20_000_000, priority=1).as_numpy("x")
        is not None
    )


@pytest.mark.parametrize("outputs", [False, True])
def test_a_timeout_of_large_json_ends_a_request_that_waits(client, outputs):
    large = [tensor("x", np.zeros((1, 60_000), np.float32), binary=False)]
    wanted = [triton.InferRequestedOutput("x", binary_data=False)] if outputs else None
    status, message = refused(lambda: client.infer("waits", large, outputs=wanted, timeout=1))
    assert status == "503"
    assert message.startswith("the request expired in the queue after 1 us")
    assert client.infer("waits", large, outputs=wanted, timeout=20_000_000, priority=1).as_numpy("x").shape[1] == 60_000


@pytest.mark.parametrize("binary", [False, True])
def test_parameters_that_nothing_reads_are_ignored(client, binary):
    given = [tensor("x", ONE, binary=binary)]
    answer = client.infer("echo", given, sequence_id=5, sequence_start=True, parameters={"mine": 1})
    assert answer.as_numpy("x").tolist() == ONE.tolist()
    status, message = refused(lambda: client.infer("strict", given, parameters={"mine": 1}))
    assert (status, message[:33]) == ("400", "parameter 'mine' is not supported")
    status, message = refused(lambda: client.infer("strict", given, sequence_id=5, sequence_start=True))
    assert (status, message[:40]) == ("400", "parameter 'sequence_id' is not supported")


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("model", ["told", "told_async"])
def test_parameters_reach_a_model_that_takes_them(client, model, binary):
    given = {"colour": "red", "n": 3, "x": 0.5, "flag": True}
    answer = client.infer(model, [tensor("x", ONE, binary=binary)], parameters=given, priority=1)
    assert answer.as_numpy("told").tolist() == [str(sorted(given.items())).encode()]
    assert client.infer(model, [tensor("x", ONE)]).as_numpy("told").tolist() == [b"[]"]


@pytest.mark.parametrize("answered", [None, "gzip", "deflate"])
@pytest.mark.parametrize("sent", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [False, True])
def test_requests_and_responses_are_compressed(client, binary, sent, answered):
    packed = {"request_compression_algorithm": sent, "response_compression_algorithm": answered}
    for array in (np.arange(40, dtype=np.float32).reshape(2, 20), np.ones((3, 60_000), np.float32)):
        wanted = [triton.InferRequestedOutput("x", binary_data=binary)]
        found = client.infer("echo", [tensor("x", array, binary=binary)], outputs=wanted, **packed)
        assert np.array_equal(found.as_numpy("x"), array)
    answer = client.infer("told_async", [tensor("x", ONE, binary=binary)], parameters={"n": 3}, **packed)
    assert answer.as_numpy("told").tolist() == [b"[('n', 3)]"]


@pytest.mark.parametrize("answered", ["gzip", "deflate"])
def test_a_compressed_response_names_its_coding(server, answered):
    body, length = triton.InferenceServerClient.generate_request_body([tensor("x", np.ones((2, 300), np.float32))])
    wanted = {"Accept-Encoding": answered, "Inference-Header-Content-Length": str(length)}
    with closing(http.client.HTTPConnection(address(server))) as connection:
        connection.request("POST", "/v2/models/echo/infer", body, wanted)
        response = connection.getresponse()
        packed = response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    assert (headers["content-encoding"], headers["vary"]) == (answered, "Accept-Encoding")
    assert len(packed) == int(headers["content-length"]) < 300
    size = int(headers["inference-header-content-length"])
    found = triton.InferenceServerClient.parse_response_body(packed, header_length=size, content_encoding=answered)
    assert found.as_numpy("x").shape == (2, 300)


def test_a_bad_coding_is_refused_and_harms_nobody(server, client):
    def status(body: bytes, coding: str, model: str = "echo") -> tuple[int, str]:
        found, answer = server.post(f"/v2/models/{model}/infer", body, content_encoding=coding)
        return found, json.loads(answer)["error"]

    bomb = gzip.compress(bytes(100 * 2**20))
    for model in ("echo", "told_async"):
        code, text = status(bomb, "gzip", model)
        assert (code, text.partition(";")[0]) == (413, "unpacked, the body has more than 200 times its size")
        assert status(bomb[:-9], "gzip", model)[0] == 413
    truncated = zlib.compress(json.dumps({"inputs": []}).encode())[:-5]
    assert status(truncated, "deflate") == (400, "the deflate stream of the body is truncated: it ends after 17 bytes")
    assert status(b"{}", "gzip")[0] == 400
    expected = "found Content-Encoding 'br', expected gzip, deflate or identity"
    assert status(b"{}", "br") == (415, expected)
    found = client.infer("echo", [tensor("x", ONE)], request_compression_algorithm="gzip")
    assert np.array_equal(found.as_numpy("x"), ONE)


def test_parameters_reach_a_model_with_sequences(client):
    sequence = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
    answer = client.infer("told_sequences", [tensor("x", ONE)], parameters={"a": 1}, **sequence)
    assert answer.as_numpy("told").tolist() == [b"[('a', 1), ('sequence', 7)]"]


@pytest.mark.parametrize("parameters", [{"timeout": -1}, {"priority": "high"}, {"timeout": 1.5}])
@pytest.mark.parametrize("model", ["echo", "told"])
def test_a_wrong_timeout_or_priority_is_refused(server, model, parameters):
    head = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}], "parameters": parameters}
    status, body = server.post(f"/v2/models/{model}/infer", json.dumps(head).encode())
    assert (status, "Expected `int`" in json.loads(body)["error"]) == (400, True)


# ---- repository


def index_of(client: Any) -> dict[tuple[str, str], tuple[str, str]]:
    return {(m["name"], m["version"]): (m["state"], m["reason"]) for m in client.get_model_repository_index()}


def test_the_repository_loads_and_unloads(client):
    index = index_of(client)
    assert index["typed", "2"] == ("READY", "")
    assert index["other", ""] == ("UNAVAILABLE", "not loaded")
    client.unload_model("typed", unload_dependents=True)
    assert index_of(client)["typed", "2"] == ("UNAVAILABLE", "not loaded")
    assert not client.is_model_ready("typed")
    client.load_model("typed")
    assert index_of(client)["typed", "1"] == ("READY", "")
    assert client.get_model_config("typed", "1")["max_batch_size"] == 8
    client.load_model("typed", config=json.dumps({"transport": "thread", "batching": {"max_batch_size": 4}}))
    assert client.get_model_config("typed", "1")["max_batch_size"] == 4
    client.load_model("typed")
    assert client.get_model_config("typed", "1")["max_batch_size"] == 8


def test_unloading_what_is_not_loaded_changes_nothing(server, client):
    index = index_of(client)
    for name in ("absent", "other", "x" * 1000):
        client.unload_model(name)
    for name in ("a%2Fb", "..%2Fx"):
        assert server.post(f"/v2/repository/models/{name}/unload", b"") == (200, b"")
    assert index_of(client) == index


def test_tritons_configuration_changes_what_it_names(client):
    def config() -> Any:
        return client.get_model_config("scores")

    before = config()
    client.load_model("scores", config=json.dumps(before))
    assert config() == before
    queue = {"default_timeout_microseconds": "2000000", "max_queue_size": 7}
    dynamic = {"max_queue_delay_microseconds": 100, "priority_levels": 2, "default_queue_policy": queue}
    changes = {"max_batch_size": "16", "instance_group": [{"count": 2}], "dynamic_batching": dynamic}
    client.load_model("scores", config=json.dumps({**before, **changes}))
    after = config()
    assert (after["max_batch_size"], after["instance_group"][0]["count"]) == (16, 2)
    found = after["dynamic_batching"]
    assert (found["max_queue_delay_microseconds"], found["priority_levels"]) == (100, 2)
    assert found["default_queue_policy"]["max_queue_size"] == 7
    assert found["default_queue_policy"]["default_timeout_microseconds"] == 2_000_000
    client.load_model("scores", config='{"instance_group": [{"kind": "KIND_CPU"}, {"kind": "KIND_CPU"}]}')
    assert (config()["max_batch_size"], config()["instance_group"][0]["count"]) == (16, 2)
    client.load_model("scores", config='{"max_batch_size": 0}')
    assert config()["max_batch_size"] == 0
    client.load_model("scores")
    assert config() == before


def test_a_file_of_the_store_is_loaded_by_a_configuration(client):
    client.load_model("fresh", config=json.dumps({"target": "extra.py:echo", "transport": "thread"}))
    assert client.is_model_ready("fresh")
    client.unload_model("fresh")
    assert ("fresh", "1") not in index_of(client)


def test_the_index_can_list_ready_models_only(server):
    body = server.post("/v2/repository/index", b'{"ready": true}')[1]
    assert {model["state"] for model in json.loads(body)} == {"READY"}


BAD_LOADS = {
    "absent": ({}, 404, "the repository has no model 'absent'"),
    "twice": ({}, 409, "the files twice.onnx, twice.pt have this name"),
    "other": ({}, 500, "model 'other' version '1' could not be loaded"),
    "files": ({"file:1/m.onnx": "AAAA", "config": "{}"}, 400, "parameter 'file:1/m.onnx' is not supported"),
    "unknown": ({"colour": "x"}, 400, "parameter 'colour' is not supported"),
    "not json": ({"config": "["}, 400, "parameter 'config' must be a JSON object"),
    "no text": ({"config": 1}, 400, "parameter 'config' must be a JSON object"),
    "backend": ({"config": '{"backend": "onnxruntime"}'}, 400, "parameter 'config': Object contains unknown field `b"),
    "mixed keys": ({"config": '{"instances": 1, "max_batch_size": 1}'}, 400, "request: models.echo: unknown key 'max_"),
    "ordering": ({"config": '{"dynamic_batching": {"preserve_ordering": true}}'}, 400, "parameter 'config': dynamic_b"),
    "preferred": ({"config": '{"dynamic_batching": {"preferred_batch_size": [3]}}'}, 400, "parameter 'config': dynam"),
    "another name": ({"config": '{"name": "typed"}'}, 400, "parameter 'config': name is not 'echo'"),
    "huge": ({"config": '{"max_batch_size": 99999999999999999999}'}, 400, "request: models.echo.batching.max_batch_"),
    "negative": ({"config": '{"max_batch_size": -3}'}, 400, "parameter 'config': Expected `int` >= 0 - at `$.max_b"),
    "many": ({"config": '{"instance_group": [{"count": 5000}]}'}, 400, "parameter 'config': Expected `int` <= 4096"),
    "a GPU": ({"config": '{"instance_group": [{"kind": "KIND_GPU", "gpus": [99]}]}'}, 400, "devices: found cuda:99"),
    "no object": ({"config": '{"dynamic_batching": 3}'}, 400, "parameter 'config': Expected `object | null`"),
    "a number": ({"config": "5"}, 400, "parameter 'config' must be a JSON object"),
    "outside": ({"config": '{"target": "../app.py:echo"}'}, 403, "target: it is neither one"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LOADS)
def test_a_bad_load_is_refused(server, name):
    parameters, status, text = BAD_LOADS[name]
    known = ("absent", "twice", "other", "files", "unknown")
    model = name if name in known else "new" if name == "outside" else "echo"
    path = f"/v2/repository/models/{model}/load"
    found, body = server.post(path, json.dumps({"parameters": parameters}).encode())
    message = json.loads(body)["error"]
    assert (found, message[: len(text)]) == (status, text), message
    assert "/tmp" not in message


def test_bodies_that_are_no_objects_are_refused(server):
    for path in ("repository/index", "repository/models/echo/load", "logging", "trace/setting"):
        status, body = server.post(f"/v2/{path}", b"[1]")
        assert status == 400
        assert json.loads(body)["error"].startswith("the body must be a JSON object")
    assert server.post("/v2/repository/models/echo/load", b'{"parameters": [1]}')[0] == 400
    assert server.get("/v2/repository/index")[0] == 405


# ---- settings


def test_log_settings_change_the_level(client):
    base = client.get_log_settings()
    assert base == {
        "log_file": "", "log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0,
        "log_format": "default",
    }  # fmt: skip
    assert client.update_log_settings({"log_info": False})["log_warning"] is True
    assert client.get_log_settings()["log_info"] is False
    assert client.update_log_settings({"log_info": True, "log_verbose_level": 1})["log_verbose_level"] == 1
    assert client.update_log_settings({"log_verbose_level": 0}) == base


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"log_file": "/tmp/x"}, "log setting 'log_file' cannot be changed while the server runs; set logging.file"),
        ({"log_format": "ISO8601"}, "log setting 'log_format' cannot be changed"),
        ({"log_infos": True}, "unknown log setting 'log_infos'; did you mean 'log_info'?"),
        ({"log_info": 1}, "log setting 'log_info' must be true or false, found 1"),
        ({"log_verbose_level": -1}, "log setting 'log_verbose_level' must be a whole number from 0"),
        ({"log_error": False}, "a log level includes all that are more severe"),
        ({"log_warning": False}, "a log level includes all that are more severe"),
    ],
)
def test_a_log_setting_that_cannot_be_is_refused(client, settings, text):
    status, message = refused(lambda: client.update_log_settings(settings))
    assert (status, message[: len(text)]) == ("400", text)
    assert client.get_log_settings()["log_info"] is True


def test_traces_are_off_and_stay_off(client):
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.get_trace_settings("echo")["trace_level"] == ["OFF"]
    assert client.update_trace_settings(settings={"trace_level": ["OFF"], "trace_rate": None})["trace_rate"] == "1000"
    status, message = refused(lambda: client.update_trace_settings("echo", {"trace_level": ["TIMESTAMPS"]}))
    assert (status, message) == (
        "400", "trace setting 'trace_level': this server has no traces; it has metrics and statistics"
    )  # fmt: skip
    assert refused(lambda: client.update_trace_settings(settings={"colour": "x"}))[0] == "400"


# ---- permissions


def test_changes_need_the_word_of_the_configuration(serve):
    server = serve(SOURCE, "echo", "--set", "models.echo.transport=thread")
    for path, body in (
        ("/v2/repository/models/echo/load", b"{}"),
        ("/v2/repository/models/echo/unload", b"{}"),
        ("/v2/logging", b'{"log_info": false}'),
    ):
        status, answer = server.post(path, body)
        assert (status, json.loads(answer)["error"]) == (
            403, "changing models is off: set management = true in [server]"
        )  # fmt: skip
    assert server.get("/v2/logging")[0] == 200


def test_changes_need_the_management_token(serve, tmp_path):
    (tmp_path / "manage").write_text("m\n")
    (tmp_path / "infer").write_text("i\n")
    settings = ["server.management=true", "models.echo.transport=thread"]
    settings += ["auth.management_token_file=manage", "auth.inference_token_file=infer"]
    server = serve(SOURCE, "echo", *(word for each in settings for word in ("--set", each)))
    for token, changed, read in ((None, 401, 401), ("i", 401, 200), ("m", 200, 401)):
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        assert server.post("/v2/repository/models/echo/load", b"{}", **headers)[0] == changed
        assert server.get("/v2/logging", **headers)[0] == changed
        assert server.get("/v2/models/echo/config", **headers)[0] == read
        assert server.post("/v2/repository/index", b"", **headers)[0] == read
    page = {"origin": "http://evil.example", "host": "evil.example", "authorization": "Bearer m"}
    assert server.post("/v2/repository/models/echo/load", b"{}", **page)[0] == 403


def test_a_public_address_needs_a_token_for_changes(serve):
    server = serve(
        SOURCE, "echo", "--host", "0.0.0.0", "--insecure", "--set", "server.management=true",
        "--set", "models.echo.transport=thread",
    )  # fmt: skip
    url = server.urls["inference"].replace("0.0.0.0", "127.0.0.1")
    server.urls["inference"] = url
    status, body = server.post("/v2/repository/models/echo/unload", b"{}")
    assert (status, json.loads(body)["error"]) == (
        403, "on a public address this call needs a token: set auth.management_token_file"
    )  # fmt: skip


# ---- the documented table


def test_the_page_lists_every_call_of_the_clients():
    page = (Path(__file__).parents[2] / "docs" / "open-inference.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    for kind in (triton.InferenceServerClient, aio.InferenceServerClient):
        calls = {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}
        assert calls - {"register_plugin", "unregister_plugin", "plugin"} <= listed
