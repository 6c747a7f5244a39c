"""Tensors on the wire, in all their forms, against a real server with a real worker; and what is no tensor."""

import io
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.serving.protocols.oip_messages import HEADER_LENGTH, decode_answer, encode_arrays, encode_request

MODELS = """
    import time
    import uuid
    import numpy as np
    import penstock

    class Frames:
        inputs = [
            penstock.TensorSpec("frames", "UINT8", (-1, -1, -1, 3)),
            penstock.TensorSpec("frame_index", "INT64", (-1,), True),
        ]
        parameters = {"revision": "r1", "height": 8}

        def predict(self, items):
            found = []
            for item in items:
                frames = item["frames"]
                index = item.get("frame_index", np.arange(len(frames)))
                found.append({"caption": [f"{n} {f.max()}" for n, f in zip(index, frames)], "frame_index": index})
            return found

    def same(items):
        return [next(iter(item.values())) for item in items]

    def chance(items):
        time.sleep(0.05)
        return [uuid.uuid4().hex for _ in items]

    def parts(items):
        for n in range(2):
            yield [{"y": np.full(2, n, np.int8)} for _ in items]
"""
LIMIT = 4 * 2**20
FLAGS = [
    *("--set", f"limits.max_body_bytes={LIMIT}"),
    *("--set", "models.frames.batching.max_batch_size=4"),
    *("--set", "models.same.batching.max_batch_size=4"),
]
OCTETS = "application/octet-stream"


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(MODELS, "Frames", "same", "chance", "parts", *FLAGS)


def post(server: Any, model: str, body: bytes, **headers: Any) -> httpx.Response:
    named = {name.replace("_", "-"): str(value) for name, value in headers.items()}
    return httpx.post(f"{server.url}/v2/models/{model}/infer", content=body, headers=named, timeout=30)


def ask(server: Any, model: str, head: bytes, buffers: Any, **more: Any) -> httpx.Response:
    body = b"".join([head, *buffers])
    return post(server, model, body, inference_header_content_length=len(head), content_type=OCTETS, **more)


def answer_of(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    length = response.headers.get(HEADER_LENGTH)
    return decode_answer(response.content, None if length is None else int(length))


@pytest.mark.parametrize("side", [8, 300])  # in the message to the worker, and in shared memory
@pytest.mark.parametrize("binary", [False, True])
def test_a_prebatch_of_frames_is_cut_for_the_model_and_answered_whole(server, side, binary):
    frames = np.stack([np.full((side, side, 3), n, np.uint8) for n in range(11)])
    index = np.arange(100, 111)
    head, buffers = encode_arrays({"frames": frames, "frame_index": index}, binary_outputs=binary, id="q")
    response = ask(server, "frames", head, buffers)
    answer = answer_of(response)
    assert (response.headers["content-type"] == OCTETS) == binary
    assert [caption.decode() for caption in answer.outputs["caption"]] == [f"{100 + n} {n}" for n in range(11)]
    assert answer.outputs["frame_index"].tolist() == index.tolist()
    assert (answer.id, answer.parameters) == ("q", {"revision": "r1"})


def test_the_metadata_tell_what_a_sender_must_know(server):
    found = httpx.get(f"{server.url}/v2/models/frames").json()
    assert found["inputs"][1] == {"name": "frame_index", "datatype": "INT64", "shape": [-1], "optional": True}
    assert found["parameters"] == {
        "revision": "r1",
        "height": 8,
        "instances": 1,
        "max_batch_size": 4,
        "max_request_bytes": LIMIT,
    }
    assert "binary_tensor_data" in httpx.get(f"{server.url}/v2").json()["extensions"]


@pytest.mark.parametrize("rows", [2, 9])
def test_an_array_file_is_answered_by_json_or_by_an_array_file(server, rows):
    array = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    file = io.BytesIO()
    np.save(file, array)
    answer = answer_of(post(server, "same", file.getvalue(), content_type="application/x-npy"))
    assert answer.outputs["output_0"].tolist() == array.tolist()
    response = post(server, "same", file.getvalue(), content_type="application/x-npy", accept="application/x-npy")
    assert response.headers["content-type"] == "application/x-npy"
    assert np.array_equal(np.load(io.BytesIO(response.content)), array)


class Canary:
    """Whoever unpickles it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_is_never_loaded_however_it_comes(server, tmp_path):
    canary = tmp_path / "canary"
    file = io.BytesIO()
    np.save(file, np.array([Canary(canary)], object), allow_pickle=True)
    for body in (pickle.dumps(Canary(canary)), pickle.dumps(Canary(canary), 0), file.getvalue()):
        for kind in ("application/x-pickle", "application/python-pickle", "application/x-python-pickle; v=4"):
            assert post(server, "frames", body, content_type=kind).status_code == 415
        for kind in (OCTETS, "application/json", "application/x-npy", "text/plain", "multipart/form-data"):
            assert post(server, "frames", body, content_type=kind).status_code == 400
            for length in (1, len(body)):
                response = post(server, "frames", body, content_type=kind, inference_header_content_length=length)
                assert response.status_code == 400
        head, buffers = encode_request([("frames", "BYTES", (1,), [body])])
        inside = head.replace(b'"BYTES"', b'"OBJECT"').replace(b'"shape":[1]', b'"shape":[1,1,1,3]')
        response = ask(server, "frames", inside, buffers)
        assert response.status_code == 400
        assert "datatype must be UINT8" in response.json()["error"]
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))  # it would have sung
    assert canary.exists()


def test_a_model_that_streams_does_so_in_json(server):
    tensor = {"name": "x", "shape": [1], "datatype": "INT8", "data": [1]}
    response = post(server, "parts", json.dumps({"inputs": [tensor]}).encode())
    assert [json.loads(line)["outputs"][0]["data"] for line in response.text.splitlines()] == [[0, 0], [1, 1]]
    head, buffers = encode_arrays({"x": np.zeros(1)}, binary_outputs=True)
    response = ask(server, "parts", head, buffers)
    assert response.status_code == 400
    assert "streams" in response.json()["error"]


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_request_that_is_sent_again_is_run_once(server, size):
    def ask_once(key: str) -> str:
        headers = {"idempotency-key": f"{key}-{size}", "content-type": "text/plain"}
        response = httpx.post(f"{server.url}/predictions/chance", content=b"x" * size, headers=headers)
        assert response.status_code == 200
        return response.text

    with ThreadPoolExecutor(8) as pool:
        first = set(pool.map(ask_once, ["a"] * 8))
        other = set(pool.map(ask_once, ["b"] * 8))
    assert len(first) == len(other) == 1
    assert first != other
    assert ask_once("a") in first
