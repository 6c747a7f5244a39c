"""TorchPipe's published tutorial: its calls, and its TOML with another model path."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock.torchpipe as torchpipe
from penstock.torchpipe import TASK_DATA_KEY, TASK_RESULT_KEY, pipe

cv2 = pytest.importorskip("cv2")
onnxruntime = pytest.importorskip("onnxruntime")
torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")

TOML = """
batching_timeout = 5
instance_num = 8
precision = "fp16"

[cpu_decoder]
backend = "DecodeMat"
next = "cpu_posdecoder"

[cpu_posdecoder]
backend = "Sequential[ResizeMat,cvtColorMat,Mat2Tensor,SyncTensor]"

resize_h = 224
resize_w = 224

color = "rgb"

next = "resnet50"

[resnet50]
backend = "SyncTensor[TensorrtTensor]"
min = 1
max = 4
instance_num = 4
model = "/you/model/path/resnet50.onnx"

mean="123.675, 116.28, 103.53" # 255*"0.485, 0.456, 0.406"
std="58.395, 57.120, 57.375" # 255*"0.229, 0.224, 0.225"

"model::cache"="/you/model/path/resnet50.trt" # or resnet50.trt.encrypted
"""


class Handler:
    """The service's handler: a label and its probability for an encoded image, (None, None) for other bytes."""

    def __init__(self) -> None:
        config = torchpipe.parse_toml("resnet50.toml")
        self.classification_engine = pipe(config)
        self.softmax = torch.nn.Softmax(dim=-1)

    def infer(self, data: bytes) -> tuple[int | None, float | None, dict[str, Any]]:
        bin_data = {TASK_DATA_KEY: data, "node_name": "cpu_decoder"}
        self.classification_engine(bin_data)
        if TASK_RESULT_KEY not in bin_data.keys():  # noqa: SIM118 - as it is published
            return None, None, bin_data
        dis = self.softmax(bin_data[TASK_RESULT_KEY])
        maxprob, label_index = torch.max(dis, 1)
        return label_index.item(), maxprob.item(), bin_data


class Naive:
    """The service without a pipeline: Python, and one session that one caller uses at a time."""

    def __init__(self, model: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self.lock = threading.Lock()

    def logits(self, data: bytes) -> np.ndarray[Any, Any]:
        """`[1, 1000]` float32."""
        img = cv2.imdecode(np.asarray(bytearray(data), dtype="uint8"), flags=cv2.IMREAD_COLOR)
        img = cv2.cvtColor(cv2.resize(img, (224, 224)), cv2.COLOR_BGR2RGB)
        scaled = img.astype(np.float32) / 255
        normal = (scaled - np.float32([0.485, 0.456, 0.406])) / np.float32([0.229, 0.224, 0.225])
        with self.lock:
            return np.asarray(self.session.run(None, {"input": normal.transpose(2, 0, 1)[None]})[0])


@pytest.fixture
def folder(mobilenet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the tutorial's resnet50.toml, whose file is a smaller network of the same kind."""
    (tmp_path / "resnet50.onnx").symlink_to(mobilenet)
    (tmp_path / "resnet50.toml").write_text(re.sub("/you/model/path", str(tmp_path), TOML))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def photos() -> list[bytes]:
    """Twelve JPEGs, cut out of two photos in different sizes."""
    from sklearn.datasets import load_sample_images

    found = []
    for image in load_sample_images().images:
        for k in range(6):
            part = image[10 * k : 200 + 35 * k, 20 * k : 260 + 60 * k, ::-1]
            found.append(cv2.imencode(".jpg", part, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes())
    return found


def test_the_tutorials_service_agrees_with_the_naive_one(folder: Path, photos: list[bytes]) -> None:
    naive, handler = Naive(folder / "resnet50.onnx"), Handler()
    with ThreadPoolExecutor(10) as clients:
        answers = list(clients.map(handler.infer, photos * 2))
    for data, (label, score, bin_data) in zip(photos * 2, answers, strict=True):
        expected = naive.logits(data)
        result = bin_data[TASK_RESULT_KEY]
        assert isinstance(result, torch.Tensor)
        assert result.shape == (1, 1000)
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
        assert label == int(expected.argmax())
        assert score == pytest.approx(float(torch.softmax(torch.from_numpy(expected), -1).max()), rel=1e-3)
        assert bin_data[TASK_DATA_KEY] is data
        assert bin_data["node_name"] == "cpu_decoder"
    assert len({label for label, _, _ in answers}) > 1, "else the network tells no image from another"


def test_the_tutorials_check_finds_invalid_images(folder: Path, photos: list[bytes]) -> None:
    handler = Handler()
    for broken in (b"", b"no image", photos[0][: len(photos[0]) // 2]):
        label, _, bin_data = handler.infer(broken)
        assert label is None
        assert TASK_RESULT_KEY not in bin_data
    assert handler.infer(photos[0])[0] is not None
