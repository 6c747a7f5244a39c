"""The statistics and the metrics of Triton and of Penstock after the same requests, which both run one by one."""

import http.client
import json
import queue
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from support.triton_servers import Addresses, CannotBeMade, triton

pytestmark = pytest.mark.peer
NO_PARTS = {"nv_pinned_memory_pool_total_bytes", "nv_pinned_memory_pool_used_bytes"}  # stated in docs/metrics.md


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, serve_triton_models: Callable[..., Addresses]
) -> Iterator[tuple[Addresses, Addresses]]:
    """Triton and Penstock, after the requests."""
    try:
        with triton(tmp_path_factory.mktemp("triton")) as theirs:
            ours = serve_triton_models()
            for each in (theirs, ours):
                send(each)
            yield theirs, ours
    except CannotBeMade as error:
        pytest.skip(str(error))


def tensor(kind: Any, name: str, rows: list[list[Any]], datatype: str) -> Any:
    found = kind.InferInput(name, [len(rows), len(rows[0])], datatype)
    found.set_data_from_numpy(np.array(rows, np.float32 if datatype == "FP32" else np.int32))
    return found


def send(server: Addresses) -> None:
    """Good requests, requests that cannot be decoded, streams and a sequence."""
    client = tritonclient.http.InferenceServerClient(server.http)
    row = [1.0, 2.0, 3.0, 4.0]
    for rows in (1, 3, 3):
        client.infer("mlp", [tensor(tritonclient.http, "x", [row] * rows, "FP32")])
    for wrong in (
        [tensor(tritonclient.http, "x", [row[:3]], "FP32")],
        [tensor(tritonclient.http, "z", [row], "FP32")],
        [tensor(tritonclient.http, "x", [[1, 2, 3, 4]], "INT32")],
    ):
        with pytest.raises(InferenceServerException):
            client.infer("mlp", wrong)
    for i in range(3):
        x = tensor(tritonclient.http, "x", [[i]], "INT32")
        client.infer("totals", [x], sequence_id=7, sequence_start=i == 0, sequence_end=i == 2)
    client.close()
    responses: queue.Queue[Any] = queue.Queue()
    stream = tritonclient.grpc.InferenceServerClient(server.grpc)
    stream.start_stream(lambda result, error: responses.put(error or result))
    for count in (3, 1):
        n = tensor(tritonclient.grpc, "n", [[count]], "INT32")
        stream.async_stream_infer("count", [n], enable_empty_final_response=True)
        while True:
            response = responses.get(timeout=30).get_response()
            if response.parameters["triton_final_response"].bool_param:
                break
    stream.close()


def get(address: str, path: str) -> str:
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def counts(value: Any) -> Any:
    """The statistics without times, and without the requests that Triton does not count as failed."""
    if isinstance(value, dict):
        return {key: counts(each) for key, each in value.items() if key not in ("ns", "last_inference", "fail")}
    return [counts(each) for each in value] if isinstance(value, list) else value


def families(server: Addresses) -> dict[str, Metric]:
    return {
        family.name: family
        for family in text_string_to_metric_families(get(server.metrics, "/metrics"))
        if family.name.startswith("nv_")
    }


@pytest.mark.parametrize("model", ["mlp", "totals", "count"])
def test_both_count_the_same_requests(both: tuple[Addresses, Addresses], model: str) -> None:
    theirs, ours = (json.loads(get(each.http, f"/v2/models/{model}/stats"))["model_stats"][0] for each in both)
    assert counts(theirs) == counts(ours)
    assert theirs["execution_count"] > 0
    for each in (theirs, ours):
        stats = each["inference_stats"]
        parts = ("queue", "compute_input", "compute_infer", "compute_output")
        assert sum(stats[part]["ns"] for part in parts) <= stats["success"]["ns"]
        assert each["last_inference"] > 0


def test_both_have_the_same_metrics(both: tuple[Addresses, Addresses]) -> None:
    def shown(server: Addresses) -> dict[str, Any]:
        return {
            name: (family.type, family.documentation, sorted({tuple(sorted(s.labels)) for s in family.samples}))
            for name, family in families(server).items()
            if name not in NO_PARTS
        }

    theirs, ours = map(shown, both)
    assert {name: found for name, found in ours.items() if not name.startswith(("nv_gpu_", "nv_energy"))} == theirs


@pytest.mark.parametrize("name", ["request_success", "count", "exec_count", "pending_request_count"])
def test_both_metrics_have_the_same_numbers(both: tuple[Addresses, Addresses], name: str) -> None:
    theirs, ours = (
        {s.labels["model"]: s.value for s in families(each)[f"nv_inference_{name}"].samples if s.value} for each in both
    )
    assert theirs == ours
    assert bool(theirs) == (name != "pending_request_count")
