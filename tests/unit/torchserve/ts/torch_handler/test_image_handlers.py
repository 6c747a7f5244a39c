from __future__ import annotations

import base64
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.torchserve.ts.torch_handler.image_classifier import ImageClassifier
from penstock.torchserve.ts.torch_handler.image_segmenter import ImageSegmenter
from penstock.torchserve.ts.torch_handler.object_detector import ObjectDetector
from penstock.torchserve.ts.torch_handler.transforms import MEAN, STD

pytestmark = [
    pytest.mark.usefixtures("forget_modules"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


class Means(torch.nn.Module):
    """Scores of six classes: the means of the channels, and 0, -1, -2."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = x.mean(dim=[2, 3])
        return torch.cat([means, torch.tensor([[0.0, -1.0, -2.0]]).repeat(x.shape[0], 1)], dim=1)


class Halves(torch.nn.Module):
    """Class 1 on the left half of an image and class 0 on the right one, both with a score of 2 to 0."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        left = torch.zeros(x.shape[0], 224, 224)
        left[:, :, :112] = 2.0
        return {"out": torch.stack([2.0 - left, left], 1)}


class Boxes(torch.nn.Module):
    """Three objects an image, of falling scores."""

    def forward(self, x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        height, width = float(x.shape[2]), float(x.shape[3])
        boxes = torch.tensor([[0.0, 0.0, width, height], [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
        found = {"boxes": boxes, "labels": torch.tensor([1, 2, 1]), "scores": torch.tensor([0.75, 0.5, 0.25])}
        return [found for _ in range(x.shape[0])]


@pytest.fixture
def load(tmp_path: Path, make_context):
    """A handler with a scripted model, and its context."""

    def load(handler: type, model: torch.nn.Module, *headers: Any, **more: Any) -> tuple[Any, Any]:
        torch.jit.script(model).save(str(tmp_path / "net.pt"))
        context = make_context({"serializedFile": "net.pt"}, *headers, **more)
        made = handler()
        made.initialize(context)
        return made, context

    return load


def expected_probabilities(color: tuple[int, int, int]) -> list[float]:
    scores = [(c / 255 - m) / s for c, m, s in zip(color, MEAN, STD, strict=True)] + [0.0, -1.0, -2.0]
    total = sum(map(math.exp, scores))
    return [math.exp(score) / total for score in scores]


def test_the_classifier_answers_the_five_most_probable_classes(load, picture):
    handler, context = load(ImageClassifier, Means())
    (answer,) = handler.handle([{"data": picture(color=(10, 200, 30))}], context)
    probabilities = expected_probabilities((10, 200, 30))
    best = sorted(range(6), key=lambda i: -probabilities[i])[:5]
    assert list(answer) == [str(i) for i in best]
    assert list(answer.values()) == pytest.approx([probabilities[i] for i in best], rel=1e-4)


def test_the_classifier_takes_bytes_base64_and_numbers_in_one_batch(load, picture, tmp_path: Path):
    (tmp_path / "index_to_name.json").write_text('{"0":"r","1":["n1","g"],"2":"b","3":"x","4":"y","5":"z"}')
    handler, context = load(ImageClassifier, Means())
    handler.set_max_result_classes(1)
    numbers = np.zeros((3, 224, 224))
    numbers[0] = 9
    image = picture(color=(0, 250, 0))
    batch = [{"body": image}, {"data": base64.b64encode(image).decode(), "body": b"no"}, {"body": numbers.tolist()}]
    answers = handler.handle(batch, context)
    assert handler.get_max_result_classes() == 1
    assert [list(a) for a in answers] == [["g"], ["g"], ["r"]]
    assert answers[0] == answers[1]


def test_a_derived_classifier_may_have_its_own_preparation(load, picture):
    class Grey(ImageClassifier):
        topk = 2

        def image_processing(self, image: Any) -> torch.Tensor:
            assert image.mode == "L"
            return torch.full((3, 4, 4), float(image.getpixel((0, 0))))

    handler, context = load(Grey, Means())
    (answer,) = handler.handle([{"body": picture(mode="L", color=3)}], context)
    assert list(answer.values()) == pytest.approx([1 / (3 + math.exp(-3) + math.exp(-4) + math.exp(-5))] * 2)


def test_the_classifier_explains_by_integrated_gradients(load, picture):
    handler, context = load(ImageClassifier, Means(), {"explain": "True"})
    image = picture((224 * 2, 224 * 2), (255, 0, 0))
    # the score of a channel is its mean: each of its pixels adds value / (224 * 224), the other channels nothing
    for target, place in ((0, 0), (bytearray(b"1"), 1), ("2", 2)):
        (found,) = handler.handle([{"data": image, "target": target}], context)
        sums = np.array(found).sum(axis=(1, 2))
        expected = [0.0, 0.0, 0.0]
        expected[place] = ((1.0 if place == 0 else 0.0) - MEAN[place]) / STD[place]
        assert sums.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_an_explanation_without_captum_names_the_extra(load, picture, monkeypatch):
    handler, context = load(ImageClassifier, Means(), {"explain": "True"})
    monkeypatch.setitem(sys.modules, "captum", None)
    with pytest.raises(ImportError, match=r"penstock\[explain\]"):
        handler.handle([{"data": picture()}], context)


def test_a_handler_may_bring_its_own_explainer(load, picture):
    class Own(ImageClassifier):
        def initialize(self, context: Any) -> None:
            super().initialize(context)
            self.ig = type("Zero", (), {"attribute": lambda self, x, **_: x * 0})()

    handler, context = load(Own, Means(), {"explain": "True"})
    assert np.array(handler.handle([{"data": picture()}], context)).sum() == 0


def test_without_pillow_the_error_says_what_to_install(load, picture, monkeypatch):
    handler, context = load(ImageClassifier, Means())
    image = picture()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="pip install pillow"):
        handler.handle([{"data": image}], context)


def test_what_is_no_image_fails(load):
    handler, context = load(ImageClassifier, Means())
    with pytest.raises(OSError, match="cannot identify image file"):
        handler.handle([{"data": bytearray(b"no image")}], context)


def test_images_of_too_many_pixels_are_refused_unless_the_configuration_allows_them(load, picture, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    image = picture((30, 30))
    handler, context = load(ImageClassifier, Means(), limit_max_image_pixels=True)
    with pytest.raises(Image.DecompressionBombError):
        handler.handle([{"data": image}], context)
    handler, context = load(ImageClassifier, Means(), limit_max_image_pixels=False)
    assert len(handler.handle([{"data": image}], context)) == 1
    assert Image.MAX_IMAGE_PIXELS is None


def test_the_segmenter_answers_class_and_probability_of_each_pixel(load, picture):
    handler, context = load(ImageSegmenter, Halves())
    answers = handler.handle([{"data": picture()}, {"body": picture()}], context)
    found = np.array(answers)
    assert found.shape == (2, 224, 224, 2)
    assert found[0, 0, 0, 0] == 1
    assert found[1, 223, 223, 0] == 0
    assert found[..., 1] == pytest.approx(1 / (1 + math.exp(-2)))


def test_the_detector_answers_what_scores_high_enough(load, picture, tmp_path: Path):
    handler, context = load(ObjectDetector, Boxes())
    assert handler.handle([{"data": picture((40, 20))}], context) == [
        [{"1": [0.0, 0.0, 40.0, 20.0], "score": 0.75}, {"2": [1.0, 2.0, 3.0, 4.0], "score": 0.5}]
    ]
    (tmp_path / "index_to_name.json").write_text('{"1":"cat","2":"dog"}')
    handler, context = load(ObjectDetector, Boxes())
    handler.threshold = 0.6
    two = handler.handle([{"data": picture((8, 8))}] * 2, context)
    assert two == [[{"cat": [0.0, 0.0, 8.0, 8.0], "score": 0.75}]] * 2
