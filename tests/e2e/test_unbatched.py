"""Models whose axis 0 is not rows, behind every protocol: each caller gets the answer to its request alone."""

import io
import json
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm

onnx = pytest.importorskip("onnx")
torch = pytest.importorskip("torch")

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
SOURCE = """
    import numpy as np
    import penstock

    @penstock.model(rows="none")
    class Sums:
        inputs = [penstock.TensorSpec("x", "FP32", (-1,))]
        outputs = [penstock.TensorSpec("y", "FP32", (1,))]

        def predict(self, items):
            (item,) = items
            return [{"y": item["x"].sum()}]

    class Spread:
        "Each row minus the mean of its batch."

        def warmup(self):
            return [np.ones(2, np.float32), np.zeros(2, np.float32)]

        def predict(self, items):
            x = np.array([np.asarray(item, np.float32) for item in items])
            return list(x - x.mean(0))

    class Dropout(Spread):
        "Random, but not coupled."

        def predict(self, items):
            return [np.asarray(item, np.float32) * np.random.rand(2) for item in items]
"""
PORTS = ["--port", "0", "--set", "server.management_port=0", "--set", "server.metrics_port=0"]
HELD = ('policy="fixed"', "max_hold_s=0.05")  # callers that come together share a batch wherever they may


def write(path: Path, inputs: list[Any], outputs: list[Any], *nodes: Any) -> None:
    """A graph: inputs and outputs are (name, kind, shape), nodes (op, inputs, outputs, attributes)."""
    h = onnx.helper
    graph = h.make_graph(
        [h.make_node(op, i, o, **keys) for op, i, o, keys in nodes],
        "g",
        [h.make_tensor_value_info(*i) for i in inputs],
        [h.make_tensor_value_info(*o) for o in outputs],
        [h.make_tensor("step", FLOAT, [], [1.0])],
    )
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), str(path))


class View(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return x.view(1, -1) * 2


def write_files(folder: Path) -> None:
    x, y = ("x", FLOAT, ["n"]), ("y", FLOAT, ["n"])
    write(folder / "softmax.onnx", [x], [y], ("Softmax", ["x"], ["y"], {"axis": 0}))
    rows = [(name, FLOAT, ["n", 3]) for name in "xy"]
    write(folder / "mix.onnx", rows[:1], rows[1:], ("Softmax", ["x"], ["y"], {"axis": 0}))
    write(folder / "same.onnx", rows[:1], rows[1:], ("Softmax", ["x"], ["y"], {"axis": 1}))
    write(
        folder / "positive.onnx",
        [x],
        [("found", INT64, ["k", 1])],
        ("Relu", ["x"], ["p"], {}),
        ("NonZero", ["p"], ["z"], {}),
        ("Transpose", ["z"], ["found"], {}),
    )
    inputs = [("IN", FLOAT, [5]), ("WAIT", FLOAT, [1])]
    outputs = [("OUT", FLOAT, [5]), ("SUM", FLOAT, []), ("STEP", FLOAT, [])]
    write(
        folder / "waits.onnx",
        inputs,
        outputs,
        ("Add", ["IN", "WAIT"], ["OUT"], {}),
        ("ReduceSum", ["OUT"], ["SUM"], {"keepdims": 0}),
        ("Identity", ["step"], ["STEP"], {}),
    )
    write(folder / "scores.onnx", [("x", FLOAT, [16])], [("y", FLOAT, [16])], ("Identity", ["x"], ["y"], {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.trace(View(), torch.zeros(1, 3)).save(str(folder / "view.pt"))
    for name, rows in (("scores", "none"), ("mix", "auto")):
        keys = f'model = "{name}.onnx"\nrows = "{rows}"\nmax_batch = 16'
        (folder / f"pipe-{name}.toml").write_text(f'[only]\nbackend = "OnnxTensor"\n{keys}\n')


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("unbatched")
    write_files(folder)
    files = [f"{name}.onnx" for name in ("softmax", "mix", "same", "positive", "waits", "scores")]
    held = [
        f"--set=models.{name}.batching.{key}"
        for name in ("softmax", "mix", "same", "positive", "view", "spread", "dropout")
        for key in HELD
    ]
    more = ["--set=models.softmax.batching.max_batch_size=64", "--set=models.mix.instances=2"]
    return serve_all(
        SOURCE,
        "Sums",
        "Spread",
        "Dropout",
        *(str(folder / name) for name in (*files, "view.pt", "pipe-scores.toml", "pipe-mix.toml")),
        *held,
        *more,
        "--set=server.shared_memory=true",
        ports=PORTS,
    )


def infer(server: Any, model: str, **inputs: Any) -> dict[str, Any]:
    arrays = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    tensors = [
        {"name": name, "datatype": "FP32", "shape": list(a.shape), "data": a.ravel().tolist()}
        for name, a in arrays.items()
    ]
    status, body = server.post(f"/v2/models/{model}/infer", json.dumps({"inputs": tensors}).encode())
    assert status == 200, body
    return {o["name"]: np.reshape(o["data"], o["shape"]) for o in json.loads(body)["outputs"]}


def together(ask: Callable[[int], Any], count: int = 96) -> list[Any]:
    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(ask, range(count)))


def softmax(x: Any) -> Any:
    e = np.exp(np.asarray(x, np.float64))
    return e / e.sum(0)


def test_callers_of_a_model_that_couples_rows_get_none_of_the_others_values(server: Any) -> None:
    for i, found in enumerate(together(lambda i: infer(server, "softmax", x=[i % 7, 1, 2, 3])["y"])):
        assert np.allclose(found, softmax([i % 7, 1, 2, 3]), atol=1e-5)
    for i, found in enumerate(together(lambda i: infer(server, "mix", x=[[i % 7, 1, 2], [0, 1, i % 5]])["y"])):
        assert np.allclose(found, softmax([[i % 7, 1, 2], [0, 1, i % 5]]), atol=1e-5)
    answers = together(lambda i: server.post("/predictions/mix", json.dumps([i, 1, 2]).encode()))
    assert {(status, body) for status, body in answers} == {(200, b"[1.0,1.0,1.0]")}
    answers = together(lambda i: server.post("/predictions/spread", json.dumps([i, 1]).encode()))
    assert {(status, body) for status, body in answers} == {(200, b"[0.0,0.0]")}


def test_outputs_that_do_not_follow_the_inputs_are_the_callers_own(server: Any) -> None:
    for i, found in enumerate(together(lambda i: infer(server, "positive", x=[i % 2, 0, i % 3, 1])["found"])):
        assert found.ravel().tolist() == [k for k, v in enumerate((i % 2, 0, i % 3, 1)) if v]


def test_a_batch_of_the_wrong_number_of_rows_is_halved_and_the_size_learned(server: Any) -> None:
    answers = together(lambda i: server.post("/predictions/view", json.dumps([i, 2.0, 3.0]).encode()), 200)
    assert [(status, json.loads(body)) for status, body in answers] == [(200, [2.0 * i, 4.0, 6.0]) for i in range(200)]
    assert server.said().count("rows_miscounted model=view") == 1
    assert learned(server, "view") == 1


def learned(server: Any, model: str) -> float:
    """The ceiling that the scheduler has learned."""
    status, body = server.get(f"/models/{model}/1", "management")
    assert status == 200
    ceiling: float = json.loads(body)["batching"]["ceiling"]
    return ceiling


def test_one_warning_names_the_model_and_the_way_out(server: Any) -> None:
    said = server.said()
    for model in ("softmax", "mix", "spread"):
        assert said.count(f"rows_coupled model={model} ") == 1
    assert said.count("rows_coupled") == 3
    assert "depend on other rows" in said
    assert '"axis0"' in said


@pytest.mark.parametrize("client", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_inputs_of_any_first_sizes_and_outputs_as_they_are(server: Any, client: Any) -> None:
    with client.InferenceServerClient(
        server.urls["grpc" if client is tritonclient.grpc else "inference"].partition("://")[2]
    ) as c:
        given = {"IN": np.arange(5, dtype=np.float32), "WAIT": np.ones(1, np.float32)}
        tensors = []
        for name, array in given.items():
            tensors.append(client.InferInput(name, list(array.shape), "FP32"))
            tensors[-1].set_data_from_numpy(array)
        found = c.infer("waits", tensors)
        assert found.as_numpy("OUT").tolist() == [1, 2, 3, 4, 5]
        assert (found.as_numpy("SUM").tolist(), found.as_numpy("STEP").tolist()) == ([15], [1])
        x = client.InferInput("x", [100], "FP32")
        x.set_data_from_numpy(np.ones(100, np.float32))
        assert c.infer("sums", [x]).as_numpy("y").tolist() == [100]
        x = client.InferInput("x", [16], "FP32")
        x.set_data_from_numpy(np.arange(16, dtype=np.float32))
        best = c.infer("scores", [x], outputs=[client.InferRequestedOutput("y", class_count=3)]).as_numpy("y")
        assert [cell.split(b":")[1] for cell in best.tolist()] == [b"15", b"14", b"13"]
        region = shm.create_shared_memory_region("unbatched", "/penstock_unbatched", 64)
        try:
            shm.set_shared_memory_region(region, [np.arange(16, dtype=np.float32)])
            c.register_system_shared_memory("unbatched", "/penstock_unbatched", 64)
            x = client.InferInput("x", [16], "FP32")
            x.set_shared_memory("unbatched", 64)
            assert c.infer("scores", [x]).as_numpy("y").tolist() == list(range(16))
        finally:
            c.unregister_system_shared_memory("unbatched")
            shm.destroy_shared_memory_region(region)


def test_metadata_and_configuration_say_that_there_are_no_rows(server: Any) -> None:
    with tritonclient.http.InferenceServerClient(server.url.removeprefix("http://")) as c:
        for model, dims in (("waits", [5]), ("sums", [-1]), ("scores", [16]), ("softmax", [-1])):
            config = c.get_model_config(model)
            assert (config["max_batch_size"], config["input"][0]["dims"]) == (0, dims)
            assert "dynamic_batching" not in config
            metadata = c.get_model_metadata(model)
            assert (metadata["inputs"][0]["shape"], metadata["parameters"]["max_batch_size"]) == (dims, 0)
        assert c.get_model_config("same")["max_batch_size"] > 1
    with tritonclient.grpc.InferenceServerClient(server.urls["grpc"].removeprefix("grpc://")) as g:
        assert g.get_model_config("waits").config.max_batch_size == 0


def test_other_protocols_pass_a_request_on_uncut(server: Any) -> None:
    body = {"IN": [0, 1, 2, 3, 4], "WAIT": [1]}
    answer = {"OUT": [1, 2, 3, 4, 5], "SUM": 15.0, "STEP": 1.0}
    status, found = server.post("/predictions/waits", json.dumps(body).encode())
    assert (status, json.loads(found)) == (200, answer)
    status, found = server.post("/v1/models/waits:predict", json.dumps({"instances": [body, body]}).encode())
    assert (status, json.loads(found)) == (
        200,
        {"predictions": [{"OUT": [1, 2, 3, 4, 5], "SUM": 15.0, "STEP": 1.0}] * 2},
    )
    status, found = server.post("/v1/models/waits:predict", json.dumps({"inputs": body}).encode())
    assert (status, json.loads(found)) == (200, {"outputs": {"OUT": [1, 2, 3, 4, 5], "SUM": [15.0], "STEP": [1.0]}})
    status, found = server.post("/v2/models/sums/infer", npy(np.ones(5000, np.float32)), "application/x-npy")
    assert (status, json.loads(found)["outputs"][0]["data"]) == (200, [5000.0])
    status, found = server.post("/predictions/scores", json.dumps([1.0] * 15).encode())
    assert status == 400
    assert b"shape must be [16]" in found


def test_a_pipeline_with_such_a_model_at_its_entry_has_no_rows(server: Any) -> None:
    for i, found in enumerate(together(lambda i: infer(server, "pipe-scores", data=np.arange(16) + i))):
        assert found["result"].tolist() == (np.arange(16) + i).tolist()
    for i, found in enumerate(together(lambda i: infer(server, "pipe-mix", data=[[i % 7, 1, 2], [0, 1, i % 5]]))):
        assert np.allclose(found["result"], softmax([[i % 7, 1, 2], [0, 1, i % 5]]), atol=1e-5)


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()
