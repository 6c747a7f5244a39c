"""The networks of examples/resnet50_pipeline: exported offline, the same in ONNX, and not the same for every image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_sample_images

from penstock.runtimes.onnx import OnnxProgram, open_session
from penstock.runtimes.tensor_model import ANY_ROWS

cv2 = pytest.importorskip("cv2")
pytest.importorskip("onnxruntime")
torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture
def pixels(image_networks: tuple[Any, Any]) -> np.ndarray[Any, Any]:
    """Eight photos as the networks take them, float32 `[8, 3, 224, 224]`."""
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
