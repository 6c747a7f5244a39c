"""The vision example runs by the commands of its README, and its server answers what it should."""

import http.client
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "vision"
ROUTES = ["/predict", "/stream_predict"]
CLASSES = {
    "three.jpg": {"class_id": 3, "class_name": "three"},
    "seven.png": {"class_id": 7, "class_name": "seven"},
}


def upload(image: bytes, field: str = "file") -> tuple[bytes, str]:
    """(body, content type) as `curl -F` makes them."""
    head = f'--B\r\ncontent-disposition: form-data; name="{field}"; filename="a.jpg"\r\n\r\n'
    return head.encode() + image + b"\r\n--B--\r\n", "multipart/form-data; boundary=B"


@pytest.fixture(scope="module")
def vision(example_all: Callable[..., Any]) -> Any:
    return example_all(FOLDER, "app.py", "--port", "0")


def test_the_curl_lines_of_the_readme_answer_the_class(vision: Any) -> None:
    readme = (FOLDER / "README.md").read_text()
    lines = [line for line in readme.splitlines() if line.startswith("curl") and "three.jpg" in line]
    assert len(lines) == 2
    for line in lines:
        command = line.replace("http://127.0.0.1:5005", vision.url) + " -s -f"
        out = subprocess.run(["bash", "-c", command], cwd=FOLDER, capture_output=True, text=True, check=True).stdout
        assert out == '{"class_id":3,"class_name":"three"}\n'


@pytest.mark.parametrize("route", ROUTES)
def test_each_of_many_clients_gets_the_class_of_its_own_image(vision: Any, route: str) -> None:
    names = list(CLASSES) * 32
    with ThreadPoolExecutor(32) as pool:
        answers = pool.map(lambda name: vision.post(route, *upload((FOLDER / name).read_bytes())), names)
        assert list(answers) == [(200, CLASSES[name]) for name in names]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("image", [b"no image", b"", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_what_is_no_image_is_refused(vision: Any, route: str, image: bytes) -> None:
    status, answer = vision.post(route, *upload(image))
    assert status == 400
    assert answer["error"].startswith("found ")
    assert "image" in answer["error"] or "PNG" in answer["error"]


def test_an_image_that_is_huge_when_decoded_is_refused(vision: Any) -> None:
    cv2 = pytest.importorskip("cv2")
    import numpy as np

    image = cv2.imencode(".png", np.zeros((9000, 9000), np.uint8))[1].tobytes()
    assert vision.post("/stream_predict", *upload(image))[0] == 400


@pytest.mark.parametrize("route", ROUTES)
def test_a_form_without_the_file_is_told_what_was_found(vision: Any, route: str) -> None:
    status, answer = vision.post(route, *upload(b"...", field="image"))
    assert (status, answer["error"].partition(";")[0]) == (400, "no file in a field 'file', fields found: image")
    status, answer = vision.post(route, b"", "text/plain")
    assert (status, answer["error"].partition(";")[0]) == (400, "no file in a field 'file', fields found: none")


def test_a_file_over_16_mib_is_refused(vision: Any) -> None:
    connection = http.client.HTTPConnection(vision.url.removeprefix("http://"), timeout=30)
    connection.putrequest("POST", "/predict")
    connection.putheader("content-type", "multipart/form-data; boundary=B")
    connection.putheader("content-length", str(17 * 2**20))
    connection.endheaders()  # it is refused by its length: no byte of it has to be sent
    assert connection.getresponse().status == 413
    connection.close()


def test_ctrl_c_ends_it_without_a_word(example: Callable[..., Any]) -> None:
    server = example(FOLDER, "app.py", "--port", "0")
    assert server.post("/stream_predict", *upload((FOLDER / "seven.png").read_bytes()))[0] == 200
    assert server.interrupt() == 0
    assert "Traceback" not in server.said()


def test_densenet_says_what_it_needs_when_torchvision_is_not_there() -> None:
    code = "import sys; sys.modules['torchvision'] = None; sys.argv[1:] = ['--weights', 'densenet121']; import app"
    done = subprocess.run(
        [sys.executable, "-c", code + "; app.main()"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "--weights densenet121 needs torchvision: pip install torchvision\n"


def test_the_shipped_weights_recognise_as_many_held_out_images_as_the_readme_says() -> None:
    stated = re.findall(r"([0-9.]+) % of ([0-9]+) held-out (digits|crops)", (FOLDER / "README.md").read_text())
    done = subprocess.run(
        [sys.executable, "train.py", "--check"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"held-out: ([0-9.]+)% of ([0-9]+) (digits|crops) right", done.stdout)
    assert [f[1:] for f in found] == [s[1:] for s in stated] == [("450", "digits"), ("200", "crops")]
    for (percent, *_), (said, *_) in zip(found, stated, strict=True):
        assert float(percent) == pytest.approx(float(said), abs=0.5)
