"""Images as bytes behind a real server: pixels over HTTP and gRPC, normalised by the worker, against NumPy."""

import json
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

pytest.importorskip("torch")
SOURCE = """
    import torch

    class Net(torch.nn.Module):
        def forward(self, image):
            assert image.dtype == torch.float32 and image.shape[1:] == (3, 6, 5)
            return {"means": image.view(len(image), 3, -1).mean(2), "first": image[:, :, 0, 0]}
"""
MEAN, STD = np.array([123.675, 116.28, 103.53]), np.array([58.395, 57.12, 57.375])
TABLE = (
    f"""{{datatype = "UINT8", shape = [-1, 6, 5, -1], layout = "NHWC", mean = {MEAN.tolist()}, std = {STD.tolist()}}}"""
)


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("pixels")
    (folder / "net.py").write_text(textwrap.dedent(SOURCE))
    ports = ["--port", "0", "--set=server.management_port=0", "--set=server.metrics_port=0"]
    target = f"net={folder / 'net.py'}:Net"
    return serve_all(None, target, f"--set=models.net.inputs.image={TABLE}", ports=ports)


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Any) -> Iterator[tuple[Any, Any]]:
    """(a client of Triton, its module)."""
    of = {"http": tritonclient.http, "grpc": tritonclient.grpc}[request.param]
    url = server.url if request.param == "http" else server.urls["grpc"]
    with closing(of.InferenceServerClient(url.partition("://")[2])) as client:
        yield client, of


def tensor(of: Any, array: Any, datatype: str) -> Any:
    found = of.InferInput("image", list(array.shape), datatype)
    found.set_data_from_numpy(array)
    return found


@pytest.mark.parametrize("rows", [1, 3])
def test_pixels_are_normalised_as_by_numpy(client: tuple[Any, Any], rows: int) -> None:
    images = np.random.default_rng(rows).integers(0, 256, (rows, 6, 5, 3), np.uint8)
    found = client[0].infer("net", [tensor(client[1], images, "UINT8")])
    floats = (images - MEAN) / STD
    assert np.allclose(found.as_numpy("first"), floats[:, 0, 0], atol=1e-6)
    assert np.allclose(found.as_numpy("means"), floats.mean((1, 2)), atol=1e-6)


def test_other_datatypes_and_shapes_are_refused(client: tuple[Any, Any]) -> None:
    for array, datatype, told in (
        (np.zeros((1, 6, 5, 3), np.float32), "FP32", "datatype must be UINT8, found '?FP32"),
        (np.zeros((1, 3, 6, 5), np.uint8), "UINT8", r"shape must be \[-1, 6, 5, 3\] .*, found \[1, 3, 6, 5\]"),
        (np.zeros((6, 5, 3), np.uint8), "UINT8", r"found \[6, 5, 3\]"),
    ):
        with pytest.raises(InferenceServerException, match=told):
            client[0].infer("net", [tensor(client[1], array, datatype)])


def test_clients_see_pixels(server: Any) -> None:
    assert json.loads(server.get("/v2/models/net")[1])["inputs"] == [
        {"name": "image", "datatype": "UINT8", "shape": [-1, 6, 5, 3]}
    ]
    (image,) = json.loads(server.get("/v2/models/net/config")[1])["input"]
    assert (image["data_type"], image["dims"]) == ("TYPE_UINT8", [6, 5, 3])
    row = np.full((6, 5, 3), 7)
    status, body = server.post("/predictions/net", json.dumps(row.tolist()).encode())
    assert status == 200
    assert np.allclose(json.loads(body)["first"], (7 - MEAN) / STD, atol=1e-6)
