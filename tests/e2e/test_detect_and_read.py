"""examples/detect_and_read reads its pages under `penstock serve`: none, one and 300 words, as JSON and as a PNG."""

import importlib
import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
pytest.importorskip("onnxruntime")
pytest.importorskip("PIL")

EXAMPLE = Path(__file__).parents[2] / "examples" / "detect_and_read"


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[Any, Any]]:
    """The modules `pages` and `plain` of the example."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield importlib.import_module("pages"), importlib.import_module("plain")
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in ("pages", "plain", "ocr"):
            sys.modules.pop(name, None)


@pytest.fixture
def read(serve: Callable[..., Any]) -> Callable[..., bytes]:
    """The body of the server's answer to a page."""
    server = serve(None, "examples/detect_and_read/detect_and_read.toml", cwd=EXAMPLE.parents[1])

    def answer(page: bytes, content_type: str = "image/jpeg") -> bytes:
        url = f"{server.url}/predictions/detect_and_read"
        with urllib.request.urlopen(urllib.request.Request(url, page, {"content-type": content_type})) as got:
            body: bytes = got.read()
        return body

    return answer


def test_the_server_reads_what_the_plain_script_reads(modules: tuple[Any, Any], read: Callable[..., bytes]) -> None:
    pages, plain = modules
    reader = plain.Reader()
    for words, side in ((0, 480), (1, 480), (300, 1280)):
        image, truth = pages.page(7, words, side, side)
        answer = json.loads(read(data := pages.jpeg(image)))["words"]
        assert len(answer) == len(truth) == words
        assert [word["text"] for word in answer] == [word["text"] for word in reader.read(data)["words"]]
        right = {word["text"] for word in answer} & {word.text for word in truth}
        assert len(right) >= 0.9 * words

    image, _ = pages.page(5, 3)  # a form with format=png receives the page with frames
    parts = [b'name="data"; filename="p.jpg"\r\ncontent-type: image/jpeg\r\n\r\n' + pages.jpeg(image)]
    parts.append(b'name="format"\r\n\r\npng')
    body = b"".join(b"--x\r\ncontent-disposition: form-data; " + part + b"\r\n" for part in parts) + b"--x--\r\n"
    drawn = cv2.imdecode(np.frombuffer(read(body, "multipart/form-data; boundary=x"), np.uint8), cv2.IMREAD_COLOR)
    assert drawn.shape == image.shape
    assert (np.abs(drawn.astype(int) - image) > 60).any()
