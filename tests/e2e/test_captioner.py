"""The example's captioner behind `penstock serve app.py`: two workers, frames of several sizes, images."""

import io
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.serving.protocols.oip_messages import InferResponse, decode_answer, encode_request

EXAMPLE = Path(__file__).parents[2] / "examples" / "video_captioning"
COUNT = 40

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def scenes() -> Iterator[Any]:
    """The example's module of this name."""
    before = sys.modules.pop("scenes", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        import scenes

        yield scenes
    del sys.modules["scenes"]
    if before is not None:
        sys.modules["scenes"] = before


@pytest.fixture(scope="module")
def server(example_all: Callable[..., Any]) -> Any:
    ports = [f"--set=server.{name}_port=0" for name in ("management", "metrics")]
    command = ["-c", "from penstock.cli.main import main; main()", "serve", "app.py", "--port", "0", *ports]
    running = example_all(EXAMPLE, *command, "--instances", "2", "--max-batch-size", "16", env={"OMP_NUM_THREADS": "1"})
    return running


@pytest.fixture(scope="module")
def shown(scenes: Any) -> tuple[np.ndarray, list[str]]:
    """Pictures at the network's size, and their captions."""
    random = np.random.default_rng(77)
    found = [scenes.sample(random) for _ in range(COUNT)]
    return np.stack([small(scenes.draw(scene, 480, 270)) for scene in found]), [scenes.caption(s) for s in found]


def small(pixels: np.ndarray) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).resize((64, 64), Image.BICUBIC))


def ask(url: str, inputs: list[Any]) -> InferResponse:
    """The response to an Open Inference request with these binary inputs."""
    head, buffers = encode_request(inputs)
    body = b"".join([head, *map(bytes, buffers)])
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    request = urllib.request.Request(f"{url}/v2/models/captioner/infer", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        length = response.headers.get("Inference-Header-Content-Length")
        return decode_answer(response.read(), None if length is None else int(length))


def texts(answer: InferResponse) -> list[str]:
    return [cell if isinstance(cell, str) else cell.decode() for cell in answer.outputs["caption"].tolist()]


def frames_input(pixels: np.ndarray) -> tuple[str, str, tuple[int, ...], memoryview]:
    return ("frames", "UINT8", pixels.shape, memoryview(np.ascontiguousarray(pixels)).cast("B"))


def index_input(index: list[int]) -> tuple[str, str, tuple[int, ...], memoryview]:
    return ("frame_index", "INT64", (len(index),), memoryview(np.array(index)).cast("B"))


def right(found: list[str], expected: list[str]) -> int:
    return sum(a == b for a, b in zip(found, expected, strict=True))


def test_frames_larger_than_a_batch_are_captioned_in_order(server: Any, shown: tuple[np.ndarray, list[str]]) -> None:
    pixels, expected = shown
    index = list(range(100, 100 + COUNT))
    answer = ask(server.url, [frames_input(pixels), index_input(index)])
    assert answer.outputs["frame_index"].tolist() == index
    assert right(texts(answer), expected) >= COUNT - 2


def test_jpegs_and_frames_of_their_own_size_are_resized_by_the_server(
    server: Any, scenes: Any, shown: tuple[np.ndarray, list[str]]
) -> None:
    import simplejpeg

    random = np.random.default_rng(77)
    pictures = np.stack([scenes.draw(scenes.sample(random), 480, 270) for _ in range(8)])
    expected = shown[1][:8]
    raw = ask(server.url, [frames_input(pictures)])
    assert right(texts(raw), expected) >= 7
    assert texts(raw) == texts(ask(server.url, [frames_input(shown[0][:8])])), "the server's kernel is Pillow's"
    jpegs = [simplejpeg.encode_jpeg(picture, quality=90) for picture in pictures]
    assert right(texts(ask(server.url, [("jpeg", "BYTES", (8,), jpegs)])), expected) >= 7


def test_the_revision_is_in_the_metadata_and_in_every_response(
    server: Any, shown: tuple[np.ndarray, list[str]]
) -> None:
    status, metadata = server.get("/v2/models/captioner")
    assert status == 200
    parameters = metadata["parameters"]
    assert (parameters["task"], parameters["model"]) == ("image-to-text", "captioner")
    assert (parameters["height"], parameters["width"], parameters["instances"]) == (64, 64, 2)
    answer = ask(server.url, [frames_input(shown[0][:1])])
    assert answer.parameters["revision"] == parameters["revision"]


def test_single_images_and_chunks_share_batches(server: Any, shown: tuple[np.ndarray, list[str]]) -> None:
    from PIL import Image

    pixels, expected = shown

    def image(i: int) -> str:
        file = io.BytesIO()
        Image.fromarray(pixels[i]).save(file, "PNG")
        status, answer = server.post("/predictions/captioner", file.getvalue(), "image/png")
        assert status == 200
        return str(answer["caption"])

    def chunk(i: int) -> list[str]:
        return texts(ask(server.url, [frames_input(pixels[i : i + 5]), index_input(list(range(5)))]))

    with ThreadPoolExecutor(12) as pool:
        singles = [pool.submit(image, i) for i in range(16)]
        chunks = [pool.submit(chunk, i) for i in range(0, COUNT, 5)]
        assert right([f.result() for f in singles], expected[:16]) >= 15
        assert right([text for f in chunks for text in f.result()], expected) >= COUNT - 2


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            [("jpeg", "BYTES", (2,), [b"\xff\xd8\xff nothing", b"\xff\xd8\xff nothing"])],
            "row 0: found a JPEG that is broken",
        ),
        ([index_input([1])], "found none of the inputs 'frames' and 'jpeg'"),
        ([("frames", "UINT8", (1, 2, 2, 4), bytes(16))], "shape must be"),
        ([("frames", "UINT8", (1, 0, 2, 3), b"")], "holds no pixels"),
    ],
)
def test_an_invalid_request_is_a_400_with_the_reason(server: Any, inputs: list[Any], message: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(server.url, inputs)
    with caught.value as answer:
        assert answer.code == 400
        assert message in json.load(answer)["error"]


def test_a_body_that_is_not_an_image_is_rejected(server: Any) -> None:
    status, answer = server.post("/predictions/captioner", b"\x80\x04\x95 a pickle", "application/octet-stream")
    assert status == 400
    assert answer["error"]["message"].startswith(
        "found 12 bytes beginning with b'\\x80\\x04\\x95 a pi': no known image"
    )
