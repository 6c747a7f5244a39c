"""KServe's runtime for PyTorch models: the objects, and the container on a tree that was made for TorchServe."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from penstock.torchserve.grpc import STANDARD, message_class
from support.containers import Container
from support.kserve import ENVELOPES, RUNTIME, SERVICES, rendered, write_tree
from support.pods import IS_ROOT, GrpcLoad, Load, Pod, survives_sigterm

SCHEMA = json.loads((Path(__file__).parent / "schemas" / "kserve.json").read_text())
V2 = {"id": "r", "inputs": [{"name": "x", "shape": [2, 2], "datatype": "INT64", "data": [1, 2, 3, 4]}]}


def errors(document: dict[str, Any]) -> list[str]:
    kind = f"{document['apiVersion']}/{document['kind']}".replace("/", "~1")
    validator = jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{kind}"})
    return [each.message for each in validator.iter_errors(document)]


def test_the_objects_have_the_schemas_of_their_api_versions() -> None:
    assert [errors(each) for each in (RUNTIME, *SERVICES)] == [[], [], []]
    (container,) = RUNTIME["spec"]["containers"]
    for change in ({"lifecycl": {}}, {"ports": [{"containerPort": 0}]}, {"readinessProbe": {}}, {"args": "torchserve"}):
        assert len(errors({**RUNTIME, "spec": {"containers": [container | change]}})) == 1, change


def test_the_runtime_replaces_kserves_own() -> None:
    assert RUNTIME["metadata"]["name"] == "kserve-torchserve"
    assert RUNTIME["spec"]["protocolVersions"] == list(ENVELOPES)
    (container,) = RUNTIME["spec"]["containers"]
    assert container["args"] == [
        "torchserve",
        "--start",
        "--model-store=/mnt/models/model-store",
        "--ts-config=/mnt/models/config/config.properties",
    ]
    for service in SERVICES:
        assert service["spec"]["predictor"]["terminationGracePeriodSeconds"] > 5 + 30


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("models"))


def start(protocol: str, image: Container, start_pod: Callable[..., Pod], tree: Path) -> Pod:
    pod = start_pod(rendered(image, protocol), {"/mnt/models": tree})
    pod.wait_ready()
    return pod


def ask(pod: Pod, method: str, path: str, value: Any = None) -> tuple[int, Any]:
    body = None if value is None else json.dumps(value).encode()
    status, answer, _ = pod.request(method, path, body, {"content-type": "application/json"})
    return status, json.loads(answer)


def test_v1_clients_get_the_envelopes_answers_and_sigterm_loses_none(
    image: Container, start_pod: Callable[..., Pod], tree: Path
) -> None:
    pod = start("v1", image, start_pod, tree)
    assert not IS_ROOT or pod.uids() == {1000}
    assert ask(pod, "GET", "/v1/models/double") == (200, {"name": "double", "ready": True})
    assert ask(pod, "GET", "/v1/models") == (200, {"models": ["double"]})
    assert ask(pod, "POST", "/v1/models/double:predict", {"instances": [1, 2, 3]}) == (200, {"predictions": [2, 4, 6]})
    assert ask(pod, "POST", "/v1/models/double:explain", {"instances": [1]}) == (200, {"explanations": [2]})
    status, body = ask(pod, "POST", "/v1/models/single:predict", {"instances": [1]})
    assert (status, body["error"]) == (404, "Model not found: single")
    page = pod.request("GET", "/metrics", port=8082)[1]
    assert b'penstock_requests_total{model="double"' in page
    with pytest.raises(OSError, match="refused"):  # other pods cannot manage models
        pod.socket(7070)
    body = json.dumps({"instances": [1]}).encode()
    expected = b'{\n  "predictions": [\n    2\n  ]\n}'
    survives_sigterm(Load(pod, "/v1/models/double:predict", body, expected, content_type="application/json"))


def test_v2_clients_get_the_envelopes_answers_and_sigterm_loses_none(
    image: Container, start_pod: Callable[..., Pod], tree: Path
) -> None:
    pod = start("v2", image, start_pod, tree)
    assert ask(pod, "GET", "/v2/health/ready") == (200, {"ready": True})
    assert ask(pod, "GET", "/v2/models/double/ready") == (200, {"name": "double", "ready": True})
    status, answer = ask(pod, "POST", "/v2/models/double/infer", V2)
    assert (status, answer["id"], answer["model_name"]) == (200, "r", "double")
    assert answer["outputs"] == [{"name": "x", "datatype": "INT64", "data": [2, 4, 6, 8], "shape": [4]}]
    body = json.dumps(V2).encode()
    expected = pod.request("POST", "/v2/models/double/infer", body, {"content-type": "application/json"})[1]
    survives_sigterm(Load(pod, "/v2/models/double/infer", body, expected, content_type="application/json"))


def test_the_grpc_example_is_served_on_its_port_and_sigterm_loses_none(
    image: Container, start_pod: Callable[..., Pod], tree: Path
) -> None:
    grpc = pytest.importorskip("grpc")
    pod = start("grpc-v2", image, start_pod, tree)
    (port,) = pod.container.ports

    request, response = (message_class(f"inference.ModelInfer{n}") for n in ("Request", "Response"))
    inputs = [{"name": "x", "shape": [2, 2], "datatype": "INT64"}]
    raw = [b"".join(n.to_bytes(8, "little") for n in (1, 2, 3, 4))]
    message = request(model_name="double", id="r", inputs=inputs, raw_input_contents=raw).SerializeToString()
    method = f"/{STANDARD}/ModelInfer"
    with pod.forward(port) as address:
        with grpc.insecure_channel(address) as channel:
            body = channel.unary_unary(method)(message, timeout=20)
        assert list(response.FromString(body).outputs[0].contents.int64_contents) == [2, 4, 6, 8]
        survives_sigterm(GrpcLoad(pod, address, method, message, body))
