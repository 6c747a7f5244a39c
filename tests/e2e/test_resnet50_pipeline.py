"""examples/resnet50_pipeline runs by the commands of its README, with its smallest network, and both servers agree."""

import importlib
import json
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.worker.tensor_model import ANY_ROWS
from penstock.pipeline.check import check_structure
from penstock.pipeline.load import load_graph, parse_graph
from penstock.pipeline.local import LocalPipeline
from penstock.pipeline.notation import TomlSource
from penstock.runtimes.onnx import OnnxProgram, open_session
from support.waiting import wait_for

pytest.importorskip("cv2")
pytest.importorskip("onnxruntime")
pytest.importorskip("thriftpy2")
pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "resnet50_pipeline"
ENV = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checked-out example, and its images."""
    made = tmp_path_factory.mktemp("example") / "resnet50_pipeline"
    shutil.copytree(EXAMPLE, made, ignore=shutil.ignore_patterns("*.onnx", "*.trt*", "images", "__pycache__"))
    subprocess.run([sys.executable, "make_images.py", "--count", "12"], cwd=made, check=True)
    return made


@pytest.fixture(scope="module")
def pipeline(folder: Path, example_all: Callable[..., Any]) -> int:
    """The port of `python main_pipeline.py`, which writes its model at this first start."""
    flags = ("--port", "0", "--set", "server.port=0")
    running = example_all(folder, "main_pipeline.py", "--model", "small", *flags, env=ENV)
    found = re.search(r"thrift://127\.0\.0\.1:(\d+)", running.said())
    assert found is not None
    return int(found[1])


@pytest.fixture(scope="module")
def naive(folder: Path, pipeline: int, example_all: Callable[..., Any]) -> int:
    """The port of `python main_naive.py`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    running = example_all(folder, "main_naive.py", "--model", "small", "--port", str(port), env=ENV, url=False)
    wait_for(lambda: f"thrift://127.0.0.1:{port}" in running.said(), process=running.process, said=running.said)
    return port


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Any]:
    """The module `client_qps` of the example."""
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("client_qps")
    finally:
        sys.path.remove(str(folder))
        for name in ("client_qps", "service", "service_thrift"):
            sys.modules.pop(name, None)


def test_the_readme_says_the_two_commands() -> None:
    lines = [line.strip().split("  ")[0] for line in (EXAMPLE / "README.md").read_text().splitlines()]
    assert "python main_pipeline.py" in lines
    assert "python client_qps.py" in lines


def test_processes_give_the_tensors_of_threads(folder: Path) -> None:
    text = (folder / "processes.toml").read_text()
    start, _ = text.split("[resnet50]")
    assert 'processes = "auto"' in start
    prepare = start.replace('next = "resnet50"', "")
    images = [path.read_bytes() for path in sorted((folder / "images").iterdir())]
    results = []
    for how in ("processes = 2", "instances = 2"):
        graph = parse_graph(tomllib.loads(prepare.replace('processes = "auto"', how)), name="t", folder=str(folder))
        with LocalPipeline(graph) as running:
            results.append([o.fields["result"] for o in running.infer_many([{"data": image} for image in images])])
    assert all((one == other).all() for one, other in zip(*results, strict=True))
    check_structure(load_graph(folder / "processes.toml"), TomlSource("processes.toml"))


def test_the_client_prints_the_rate_the_latencies_and_the_server_usage(folder: Path, pipeline: int) -> None:
    command = [sys.executable, "client_qps.py", "--port", str(pipeline), "--request_client", "3"]
    done = subprocess.run(
        [*command, "--total_number", "60", "--request_batch", "2"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "requests   60, 0 failed" in done.stdout
    assert re.search(r"^QPS +\d", done.stdout, re.M)
    assert re.search(r"^TP50/90/99 [\d.]+ / [\d.]+ / [\d.]+ ms, worst [\d.]+ ms$", done.stdout, re.M)
    assert re.search(r"^server +\d+ % CPU, [\d.]+ ms a request, \d+ MB$", done.stdout, re.M)


@pytest.mark.parametrize("server", ["pipeline", "naive"])
def test_each_image_is_sent_once_by_default(folder: Path, server: str, request: Any) -> None:
    port = request.getfixturevalue(server)
    command = [sys.executable, "client_qps.py", "--port", str(port), "--request_client", "5", "--total_number", "0"]
    done = subprocess.run([*command, "--json"], cwd=folder, capture_output=True, text=True)
    figures = json.loads(done.stdout)
    assert (figures["requests"], figures["errors"]) == (12, 0)
    assert 0 < figures["tp50_ms"] <= figures["tp99_ms"] <= figures["worst_ms"]
    assert figures["cpu_ms_a_request"] > 0


def test_both_servers_give_the_same_answer_for_every_image(
    folder: Path, pipeline: int, naive: int, client: Any
) -> None:
    one, other = client.connect("127.0.0.1", pipeline), client.connect("127.0.0.1", naive)
    labels = set()
    for file in sorted((folder / "images").iterdir()):
        params = client.InferenceParams(uuid=file.name, data=file.read_bytes())
        here, there = one.infer_batch(params), other.infer_batch(params)
        assert here.label == there.label
        assert here.score == pytest.approx(there.score, rel=1e-3)
        labels.add(here.label)
    assert len(labels) > 1
    one.close()
    other.close()


def test_an_image_that_cannot_be_decoded_is_refused_alone(pipeline: int, client: Any, folder: Path) -> None:
    from thriftpy2.thrift import TApplicationException

    one = client.connect("127.0.0.1", pipeline)
    data = (folder / "images" / "0000.jpg").read_bytes()
    with pytest.raises(TApplicationException, match=r"^undecodable: .*JPEG"):
        one.infer_batch(client.InferenceParams(uuid="cut", data=data[: len(data) // 2]))
    assert one.infer_batch(client.InferenceParams(uuid="whole", data=data)).label
    one.close()


# ---- its networks


cv2 = pytest.importorskip("cv2")
pytest.importorskip("onnxruntime")
torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture
def pixels(image_networks: tuple[Any, Any]) -> np.ndarray[Any, Any]:
    """Eight photos as the networks take them, float32 `[8, 3, 224, 224]`."""
    from sklearn.datasets import load_sample_images

    networks, _ = image_networks
    photos = [
        cv2.resize(image[20 * k : 200 + 40 * k, 30 * k : 220 + 60 * k], (networks.SIDE, networks.SIDE))
        for image in load_sample_images().images
        for k in range(4)
    ]
    normal = (np.stack(photos) - np.array(networks.MEAN)) / np.array(networks.STD)
    return normal.transpose(0, 3, 1, 2).astype(np.float32)


def test_mobilenet_is_the_same_in_onnx_and_sees_its_images(
    image_networks: tuple[Any, Any], mobilenet: Path, pixels: np.ndarray[Any, Any]
) -> None:
    networks, _ = image_networks
    assert [file.name for file in mobilenet.parent.iterdir()] == ["mobilenet.onnx"]
    program = OnnxProgram(open_session(str(mobilenet)))
    assert [(i.name, i.datatype, i.shape) for i in program.inputs] == [("input", "FP32", (-1, 3, 224, 224))]
    assert [(o.name, o.datatype) for o in program.outputs] == [("output", "FP32")]
    assert program.rows == ANY_ROWS
    logits = program.run({"input": pixels})["output"]
    with torch.inference_mode():
        expected = networks.mobilenet()(torch.from_numpy(pixels)).numpy()
    assert logits.shape == (8, networks.CLASSES)
    assert np.allclose(logits, expected, atol=2e-3)
    assert np.allclose(logits[:1], program.run({"input": pixels[:1]})["output"], atol=1e-3)
    assert 0.5 < logits.std(axis=0).mean() < 10  # a network of plain random weights has about 0.001 here
    assert len(set(logits.argmax(1))) >= 4
