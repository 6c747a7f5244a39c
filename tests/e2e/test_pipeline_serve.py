"""`penstock serve resnet50.toml`: pipelines behind the same routes as any model."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil
import pytest

from penstock.pipeline.describe import read_loads
from penstock.pipeline.load import load_graph
from penstock.pipeline.local import LocalPipeline
from support.files import write_onnx
from support.waiting import wait_for

ROOT = Path(__file__).parents[2]
SIDE, LABELS = 8, 5
FREE_PORTS = (
    "--port",
    "0",
    "--set",
    "server.management_port=0",
    "--set",
    "server.metrics_port=0",
    "--set",
    "server.grpc_port=0",
)

LABELLER = """
instance_num = 2

[server]
drain_s = 7.0

[pipeline]
trace = true

[decode]
backend = "DecodeMat"
next = "prepare"

[prepare]
backend = "Sequential[ResizeMat,cvtColorMat,FloatMat,Mat2Tensor,SyncTensor]"
resize_h = 8
resize_w = 8
color = "rgb"
next = "net"

[net]
backend = "SyncTensor[TensorrtTensor]"
min = 1
max = 4
model = "net.onnx"
mean = "123.675, 116.28, 103.53"
std = "58.395, 57.120, 57.375"
"""

STEPS = """
import os
import threading
import time

from penstock.errors import BadRequest


def shout(data):
    return (data if isinstance(data, str) else bytes(data).decode()).upper()


class Count:
    def __init__(self, word="x"):
        self.word = word

    def __call__(self, data, fields):
        if "BAD" in data:
            raise ValueError("secret path /etc/passwd")
        if "WRONG" in data:
            raise BadRequest("found 'WRONG', expected another word")
        fields["count"] = data.count(self.word)
        fields["given"] = fields.get("given")
        return data


def nap(data):
    time.sleep(float(bytes(data)))
    return bytes(data)


def none(data):
    return None
"""

WORDS = """
[pipeline]
outputs = ["result", "count", "given"]
inputs = ["data", "given", "node_name"]

[shout]
backend = "Python[steps.py:shout]"
next = "count"

[count]
ops = [{ op = "Python", target = "steps.py:Count", word = "L" }]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pipelines")
    rng = np.random.default_rng(7)
    weight = rng.normal(0, 0.1, (LABELS, 3 * SIDE * SIDE)).astype(np.float32)
    write_flat_onnx(made / "net.onnx", weight, SIDE)
    (made / "labeller.toml").write_text(LABELLER)
    (made / "words.toml").write_text(WORDS)
    (made / "steps.py").write_text(STEPS)
    (made / "nap.toml").write_text(
        '[nap]\nbackend = "Python[steps.py:nap]"\ninstance_num = 2\n[pipeline]\nin_flight = 4\n'
    )
    (made / "none.toml").write_text('[none]\nbackend = "Python[steps.py:none]"\n')
    (made / "plain.toml").write_text('[plain]\nbackend = "Identity"\n')
    return made


def write_flat_onnx(path: Path, weight: Any, side: int) -> None:
    """The graph of `write_onnx` behind a Flatten: input `[rows, 3, side, side]`."""
    import onnx

    write_onnx(path, ["rows", weight.shape[1]], weight, np.zeros(len(weight), np.float32))
    net = onnx.load(str(path))
    net.graph.node.insert(0, onnx.helper.make_node("Flatten", ["image"], ["x"]))
    net.graph.input[0].CopyFrom(
        onnx.helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["rows", 3, side, side])
    )
    onnx.save(net, str(path))


def jpeg(seed: int) -> bytes:
    """A photo of soft spots, 60 x 80."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 255, (6, 8, 3), np.uint8)
    return cv2.imencode(".jpg", cv2.resize(small, (80, 60), interpolation=cv2.INTER_CUBIC))[1].tobytes()


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any], folder: Path) -> Any:
    return serve_all(None, "labeller.toml", "--workers", "2", "words.toml", "nap.toml", "none.toml", cwd=folder)


@pytest.fixture(scope="module")
def local(folder: Path) -> Iterator[LocalPipeline]:
    with LocalPipeline(load_graph(folder / "labeller.toml")) as pipeline:
        yield pipeline


def scores_of(local: LocalPipeline, image: bytes) -> Any:
    outcome = local.infer({"data": image})
    assert outcome.error is None
    return outcome.fields["result"]


def test_an_image_over_http_has_the_scores_that_it_has_in_process(server: Any, local: LocalPipeline) -> None:
    images = [jpeg(seed) for seed in range(40)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda image: server.post("/predictions/labeller", image, "image/jpeg"), images))
    labels = set()
    for image, (status, body) in zip(images, answers, strict=True):
        wanted = scores_of(local, image)
        assert status == 200, body
        assert np.shape(json.loads(body)) == (1, LABELS)
        assert np.allclose(json.loads(body), wanted, atol=1e-5)
        labels.add(int(np.argmax(wanted)))
    assert len(labels) > 1, "the images are told apart"
    assert server.metric("penstock_workers_up", model="labeller") == 2
    assert len(psutil.Process(server.process.pid).children()) == 8


def test_a_form_is_fields_and_octets_are_data(server: Any, local: LocalPipeline) -> None:
    image = jpeg(3)
    wanted = scores_of(local, image)
    head = b'--B\r\ncontent-disposition: form-data; name="data"; filename="a.jpg"\r\ncontent-type: image/jpeg\r\n\r\n'
    form = head + image + b"\r\n--B--\r\n"
    for body, kind in ((form, "multipart/form-data; boundary=B"), (image, "application/octet-stream")):
        status, answer = server.post("/predictions/labeller", body, kind)
        assert (status, np.allclose(json.loads(answer), wanted, atol=1e-5)) == (200, True), answer


def test_a_large_image_is_decoded_in_place(server: Any, local: LocalPipeline) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (600, 800, 3), np.uint8)
    image = cv2.imencode(".png", noise)[1].tobytes()
    assert len(image) > 2**20
    with ThreadPoolExecutor(4) as pool:
        for status, body in pool.map(lambda _: server.post("/predictions/labeller", image, "image/png"), range(12)):
            assert (status, np.allclose(json.loads(body), scores_of(local, image), atol=1e-5)) == (200, True), body
    wait_for(lambda: server.metric("penstock_pool_used_bytes") == 0)  # what a worker kept is told a little later


def test_an_undecodable_image_fails_alone_with_a_description(server: Any) -> None:
    bodies = [b"no image" if i == 7 else jpeg(i)[:300] if i == 9 else jpeg(i) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: server.post("/predictions/labeller", body, "image/jpeg"), bodies))
    assert [status for status, _ in answers] == [400 if i in (7, 9) else 200 for i in range(16)]
    told = json.loads(answers[7][1])["error"]
    assert told["code"] == "undecodable"
    text = "node 'decode', op 'DecodeMat': found 8 bytes beginning with b'no image': no known image format"
    assert told["message"].startswith(f"{text}; expected AVIF")


def test_open_inference_gives_each_row_to_an_item(server: Any, local: LocalPipeline) -> None:
    images = [jpeg(seed) for seed in (1, 2, 3)]
    data = b"".join(len(image).to_bytes(4, "little") + image for image in images)
    tensor = {"name": "data", "datatype": "BYTES", "shape": [3], "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"id": "9", "inputs": [tensor]}).encode()
    request = urllib.request.Request(
        server.url + "/v2/models/labeller/infer",
        head + data,
        {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"},
    )
    status, body = server.fetch(request)
    answer = json.loads(body)
    assert (status, answer["id"]) == (200, "9")
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("result", "FP32", [3, LABELS])
    wanted = np.concatenate([scores_of(local, image) for image in images])
    assert np.allclose(np.reshape(output["data"], (3, LABELS)), wanted, atol=1e-5)
    status, body = server.post("/v2/models/labeller/infer", json.dumps({"inputs": [
        {"name": "data", "datatype": "BYTES", "shape": [1], "data": ["no image"]}
    ]}).encode())  # fmt: skip
    assert status == 400
    status, body = server.post("/v2/models/labeller/infer", json.dumps({"inputs": [
        {"name": "data", "datatype": "BYTES", "shape": [0], "data": []}
    ]}).encode())  # fmt: skip
    (output,) = json.loads(body)["outputs"]
    assert (status, output["datatype"], output["shape"], output["data"]) == (200, "FP32", [0, LABELS], [])


def test_the_metadata_contain_the_nodes_without_paths(server: Any, folder: Path) -> None:
    status, body = server.get("/v2/models/labeller")
    told = json.loads(body)
    assert (status, told["platform"]) == (200, "penstock_pipeline")
    assert told["inputs"] == [{"name": "data", "datatype": "BYTES", "shape": [-1]}]
    assert told["outputs"] == [{"name": "result", "datatype": "FP32", "shape": [-1, LABELS]}]
    nodes = told["parameters"]["pipeline"]["nodes"]
    assert [node["name"] for node in nodes] == ["decode", "prepare", "net"]
    assert (nodes[2]["instances"], nodes[2]["max_batch"]) == (2, 4)
    assert str(folder).encode() not in body
    assert server.get("/v2/models/labeller/ready")[0] == 200
    assert server.get("/readyz")[0] == 200


def test_the_path_of_an_item_is_returned_if_the_file_requests_it(server: Any) -> None:
    request = urllib.request.Request(server.url + "/predictions/labeller", jpeg(1), {"content-type": "image/jpeg"})
    with urllib.request.urlopen(request, timeout=30) as response:
        timing = response.headers["server-timing"]
    assert [part.partition(";")[0] for part in timing.split(", ") if ";dur=" in part] == ["decode", "prepare", "net"]
    request = urllib.request.Request(
        server.url + "/predictions/words", b'{"data": "hello"}', {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.headers["server-timing"] is None


def test_node_metrics_are_on_the_metrics_page(server: Any) -> None:
    before = server.metric("pipeline_items_total", node="prepare", model="labeller")

    def measured() -> bool:  # a few times a second: they come with what is asked later
        assert server.post("/predictions/labeller", jpeg(1), "image/jpeg")[0] == 200
        return bool(server.metric("pipeline_items_total", node="prepare", model="labeller") >= before + 3)

    wait_for(measured)
    assert server.metric("pipeline_run_seconds_count", node="net", model="labeller") > 0
    loads = read_loads("", server.get("/metrics", "metrics")[1].decode(), 1.0, "labeller")
    assert loads.keys() == {"decode", "prepare", "net"}
    assert all(load.batch is not None and load.batch >= 1 and load.busy > 0 for load in loads.values())


def test_several_outputs_are_an_object_and_fields_may_be_given(server: Any) -> None:
    assert server.post("/predictions/words", b"hello", "text/plain") == (
        200,
        b'{"result":"HELLO","count":2,"given":null}',
    )
    status, body = server.post("/predictions/words", b'{"data": "all", "given": [1, {"a": 2}]}')
    assert (status, json.loads(body)) == (200, {"result": "ALL", "count": 2, "given": [1, {"a": 2}]})
    status, body = server.post("/predictions/words", b'{"data": "lull", "node_name": "count"}')
    assert (status, json.loads(body)["count"]) == (200, 0), "it began behind the node that shouts"


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b'{"given": "x"}', 400, "found no 'data' among the fields of the request"),
        (b'{"data": "x", "count": 3}', 400, "found the field 'count', which the pipeline does not take"),
        (b'{"data": "x", "node_name": "cuont"}', 400, "did you mean 'count'?"),
        (b'{"data": "x", "node_name": 3}', 400, "expected the name of a node"),
        (b'{"data": "bad"}', 500, "ValueError"),
        (b'{"data": "wrong"}', 400, "found 'WRONG', expected another word"),
        (b'{"data": ', 400, "not valid JSON"),
    ],
)
def test_unanswerable_requests_get_a_short_error(server: Any, body: bytes, status: int, told: str) -> None:
    found, answer = server.post("/predictions/words", body)
    assert (found, told in json.loads(answer)["error"]["message"]) == (status, True), answer
    assert b"passwd" not in answer
    assert b"steps.py" not in answer


def test_an_item_that_ends_without_a_result_is_an_error(server: Any) -> None:
    status, body = server.post("/predictions/none", b"x", "text/plain")
    assert (status, json.loads(body)["error"]["message"]) == (500, "the item ended at node 'none' without result")


def test_a_deadline_applies_and_a_full_pipeline_rejects_items(serve: Callable[..., Any], folder: Path) -> None:
    server = serve(None, "nap.toml", "--set=models.nap.batching.max_queue=4", cwd=folder)

    def nap(headers: dict[str, str]) -> int:
        headers = {"content-type": "application/octet-stream", **headers}
        request = urllib.request.Request(server.url + "/predictions/nap", b"0.3", headers)
        return int(server.fetch(request)[0])

    with ThreadPoolExecutor(40) as pool:
        busy = [pool.submit(nap, {}) for _ in range(4)]
        wait_for(lambda: server.metric("penstock_requests_total", model="nap") == 4)
        late = pool.submit(nap, {"x-deadline-ms": "100"})
        assert late.result() == 504, "it waited in the pipeline, behind two that ran and two that waited"
        assert [one.result() for one in busy] == [200] * 4
        found = list(pool.map(nap, [{}] * 40))
    assert set(found) == {200, 429}, found
    assert found.count(200) >= 4 + 4, "what is inside and what waits is answered"


def test_a_deadline_that_passes_while_a_node_runs_is_504_on_time_and_names_the_node(
    serve: Callable[..., Any], folder: Path
) -> None:
    server = serve(None, "nap.toml", cwd=folder)

    def nap(deadline_ms: int) -> str:
        headers = {"content-type": "application/octet-stream", "x-deadline-ms": str(deadline_ms)}
        start = time.monotonic()
        status, body = server.fetch(urllib.request.Request(server.url + "/predictions/nap", b"20", headers))
        assert (status, time.monotonic() - start < 10) == (504, True)
        return str(json.loads(body)["error"]["message"])

    with ThreadPoolExecutor(2) as pool:  # a worker that a busy machine holds up for 20 ms cannot name its node
        found = list(pool.map(nap, (1500, 2500)))
    assert "node 'nap': the deadline passed during the run" in found


def test_a_configuration_may_contain_pipelines_and_models(serve: Callable[..., Any], folder: Path) -> None:
    (folder / "penstock.toml").write_text(
        '[server]\nmanagement = true\nmodel_store = "."\n[models.a]\ntarget = "words.toml"\n'
        '[models.b]\ntarget = "nap.toml"\ntransport = "thread"\n[models.c]\ntarget = "steps.py:one"\n'
    )
    (folder / "steps.py").write_text(STEPS + "\n\ndef one(items):\n    return items\n")
    server = serve(None, "penstock.toml", cwd=folder)
    assert server.post("/predictions/a", b"x", "text/plain")[0] == 200
    assert server.post("/predictions/b", b"0", "application/octet-stream") == (200, b"0")
    assert server.post("/predictions/c", b"x", "text/plain") == (200, b"x")

    def change(method: str, body: bytes | None) -> tuple[int, bytes]:
        return server.fetch(urllib.request.Request(server.urls["management"] + "/models/d", body, method=method))  # type: ignore[no-any-return]

    assert change("PUT", json.dumps({"target": "plain.toml"}).encode())[0] == 200
    assert server.post("/predictions/d", b"x", "text/plain") == (200, b"x")
    assert change("DELETE", None)[0] == 200
    assert server.post("/predictions/d", b"x", "text/plain")[0] == 404
    (folder / "broken.toml").write_text('[a]\nbackend = "Nothing"\n')
    status, body = change("PUT", json.dumps({"target": "broken.toml"}).encode())
    assert status == 500, body
    assert server.post("/predictions/a", b"x", "text/plain")[0] == 200


def ended(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a server that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "serve", *arguments, *FREE_PORTS],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[a]\nbackend = "DecodeMatt"\n', "did you mean 'DecodeMat'"),
        ('[a]\nbackend = "OnnxTensor"\nmodel = "gone.onnx"\n', "[a] model: there is no file"),
    ],
)
def test_a_bad_file_is_reported_in_one_line_before_anything_starts(folder: Path, text: str, told: str) -> None:
    (folder / "wrong.toml").write_text(text)
    status, out, err = ended(folder, "wrong.toml")
    assert (status, out) == (2, ""), err
    assert len(err.splitlines()) == 1, err
    assert told in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("gone.toml",), "no such file"),
        (("words.toml", "--workers", "0"), "from 1"),
        (("words.toml", "--compat", "triton"), "torchpipe"),
        (("words.toml", "--option", "x=1"), "no option 'x'"),
        (("words.toml", "other=words.toml", "words=plain.toml"), "two models are named 'words'"),
    ],
)
def test_invalid_command_line_arguments_are_errors(folder: Path, arguments: tuple[str, ...], told: str) -> None:
    status, _, err = ended(folder, *arguments)
    assert status in (1, 2)
    assert told in err
    assert "Traceback" not in err


def test_ctrl_c_answers_running_requests_and_leaves_no_process(serve: Callable[..., Any], folder: Path) -> None:
    server = serve(None, "nap.toml", "--workers", "2", cwd=folder)
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert len(processes) == 2
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(server.post, "/predictions/nap", b"0.5", "application/octet-stream") for _ in range(4)]
        wait_for(lambda: server.metric("penstock_requests_total", model="nap") == 4)
        status, _, said = server.stop(signal.SIGINT)
        assert [a.result() for a in answers] == [(200, b"0.5")] * 4
    assert status == 0, said
    assert "Traceback" not in said
    assert not psutil.wait_procs(processes, timeout=10)[1]


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.S | re.M)
    return [block for name, block in found if name == language]


def test_the_pipeline_of_the_page_is_served_and_answers_its_curl_line(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    page, model = "docs/pipelines.md", "resnet50.onnx"
    toml = next(block for block in blocks(page, "toml") if model in block)
    name = toml.partition("\n")[0].removeprefix("# ")
    (tmp_path / name).write_text(toml)
    rng = np.random.default_rng(7)
    write_flat_onnx(tmp_path / model, rng.normal(0, 0.1, (LABELS, 3 * 224 * 224)).astype(np.float32), 224)
    lines = "".join(blocks(page, "")).splitlines()
    curl = next(line for line in lines if line.endswith(f"/predictions/{Path(name).stem}"))
    photo = re.search(r"@(\S+)", curl)
    assert photo is not None
    (tmp_path / photo[1]).write_bytes(jpeg(5))
    server = serve(None, name, cwd=tmp_path)
    curl = curl.replace("http://127.0.0.1:8080", server.url) + " -s -f"
    done = subprocess.run(["bash", "-c", curl], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert np.shape(json.loads(done.stdout)) == (1, LABELS)
