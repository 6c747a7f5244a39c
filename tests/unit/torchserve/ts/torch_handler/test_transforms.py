from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.torchserve.ts.torch_handler import transforms


@pytest.mark.parametrize(
    ("size", "expected"),
    [((300, 200), (384, 256)), ((200, 301), (256, 385)), ((256, 256), (256, 256)), ((257, 1000), (256, 996))],
)
def test_the_shorter_side_gets_the_size_and_the_other_is_rounded_down(size, expected):
    assert transforms.Resize(256)(Image.new("RGB", size)).size == expected


def test_an_image_of_the_size_is_left_alone():
    image = Image.new("RGB", (256, 300))
    assert transforms.Resize(256)(image) is image


def test_halving_weighs_neighbours_as_a_triangle():
    # a row of 8 pixels to 4: each new pixel has weights 1 3 3 1 over 8, and at the border 3 3 1 over 7
    row = np.array([0, 80, 160, 240, 0, 0, 0, 80], np.uint8)
    image = Image.fromarray(np.repeat(np.repeat(row[None, :, None], 8, 0), 3, 2))
    found = np.asarray(transforms.Resize(4)(image))[0, :, 0]
    expected = [(3 * 0 + 3 * 80 + 160) / 7, (80 + 480 + 720 + 0) / 8, (240 + 0 + 0 + 0) / 8, (0 + 0 + 240) / 7]
    assert found.tolist() == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("size", "corner"),
    [
        ((384, 256), (80, 16)),
        ((257, 256), (16, 16)),
        ((259, 256), (18, 16)),
        ((224, 225), (0, 0)),
        ((224, 227), (0, 2)),
    ],
)
def test_the_middle_is_cut_out_with_halves_rounded_to_even(size, corner):
    width, height = size
    columns, rows = np.meshgrid(np.arange(width) % 251, np.arange(height) % 251)
    image = Image.fromarray(np.stack([columns, rows, rows], 2).astype(np.uint8))
    cut = transforms.CenterCrop(224)(image)
    assert cut.size == (224, 224)
    assert cut.getpixel((0, 0))[:2] == corner


def test_pixels_become_channels_from_0_to_1_and_are_normalized():
    pixels = np.zeros((2, 3, 3), np.uint8)
    pixels[1, 2] = [255, 51, 0]
    found = transforms.ToTensor()(Image.fromarray(pixels))
    assert found.dtype is torch.float32
    assert found.shape == (3, 2, 3)
    assert found[:, 1, 2].tolist() == pytest.approx([1.0, 0.2, 0.0])
    assert found.sum().item() == pytest.approx(1.2)
    normal = transforms.Normalize(transforms.MEAN, transforms.STD)(found)
    assert normal[:, 1, 2].tolist() == pytest.approx([0.515 / 0.229, -0.256 / 0.224, -0.406 / 0.225])


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "LA"])
def test_images_of_other_modes_become_rgb(mode):
    image = Image.new(mode, (8, 8))
    assert transforms.to_tensor_only()(image).shape == (3, 8, 8)


def test_the_whole_pipeline_gives_what_networks_expect():
    found = transforms.image_pipeline()(Image.new("RGB", (300, 200), (255, 51, 0)))
    assert found.shape == (3, 224, 224)
    assert found[0].unique().tolist() == pytest.approx([0.515 / 0.229])


def test_torchvisions_steps_are_used_where_they_are(monkeypatch):
    module = types.ModuleType("torchvision.transforms")
    for name in ("Compose", "Resize", "CenterCrop", "ToTensor", "Normalize"):
        setattr(module, name, lambda *args, name=name, **kwargs: (name, args, kwargs))
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.transforms", module)
    name, (steps,), _ = transforms.image_pipeline()
    assert name == "Compose"
    assert steps[1:4] == [("Resize", (256,), {}), ("CenterCrop", (224,), {}), ("ToTensor", (), {})]
    assert steps[4] == ("Normalize", (), {"mean": transforms.MEAN, "std": transforms.STD})


def test_a_torchvision_for_another_torch_is_not_used(monkeypatch, caplog):
    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(transforms.importlib, "import_module", broken)
    assert isinstance(transforms.image_pipeline(), transforms.Compose)
    assert "torchvision_unusable" in caplog.text
