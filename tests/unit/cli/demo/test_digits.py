"""The model recognises digits, every input format gives the same answer, and errors describe a wrong body."""

import sys
from importlib import resources
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.cli.demo.digits import FIRST, WHITE, Digits, data, decode, encode, unroll
from penstock.errors import BadRequest, PenstockError

Heldout = dict[str, NDArray[Any]]


def answer(model: Digits, item: Any) -> dict[str, Any]:
    return model.postprocess(model.predict([model.preprocess(item)])[0])


def test_the_held_out_images_are_recognised_as_png(digits: Digits, heldout: Heldout) -> None:
    results = digits.predict([digits.preprocess(encode(image)) for image in heldout["images"]])
    found = [digits.postprocess(result)["digit"] for result in results]
    assert len(found) == 450
    assert np.mean(np.array(found) == heldout["labels"]) >= 0.975


def test_the_package_ships_less_than_300_kb() -> None:
    files = resources.files("penstock.cli.demo").joinpath("data").iterdir()
    assert sum(len(file.read_bytes()) for file in files) < 300_000


def test_no_held_out_image_is_a_training_image(heldout: Heldout) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    every = sorted(image.astype(np.uint8).tobytes() for image in datasets.load_digits().images)
    held = {image.tobytes() for image in heldout["images"]}
    assert len(held) == 450
    assert sum(image in held for image in every) == 450, "no held-out image occurs twice in the data set"


@pytest.mark.parametrize("rows", [1, 2, 64, 100])
def test_a_batch_gives_each_item_its_own_answer(digits: Digits, heldout: Heldout, rows: int) -> None:
    items = [digits.preprocess(image.tolist()) for image in heldout["images"][:rows]]
    alone = np.stack([digits.predict([item])[0] for item in items])
    np.testing.assert_allclose(np.stack(digits.predict(items)), alone, atol=1e-5)


def test_png_json_and_tensor_give_the_same_digit(digits: Digits, heldout: Heldout) -> None:
    image = heldout["images"][3]
    png, json = answer(digits, encode(image)), answer(digits, image.tolist())
    tensor = answer(digits, {"image": image[None].astype(np.float32)})
    assert set(png) == {"digit", "probability"}
    assert png["digit"] == json["digit"] == tensor["digit"][0] == heldout["labels"][3]
    assert png["probability"] == pytest.approx(json["probability"], abs=0.02)
    assert json["probability"] == pytest.approx(float(tensor["probability"].max()), abs=1e-4)


def test_tensors_and_images_share_a_batch(digits: Digits, heldout: Heldout) -> None:
    images = heldout["images"].astype(np.float32)
    items = [digits.preprocess(v) for v in (images[0].tolist(), {"image": images[1:4]}, images[4].tolist())]
    one, three, last = map(digits.postprocess, digits.predict(items))
    assert [one["digit"], *three["digit"], last["digit"]] == heldout["labels"][:5].tolist()
    assert (three["digit"].dtype, three["digit"].shape) == (np.int64, (3,))
    assert (three["probability"].dtype, three["probability"].shape) == (np.float32, (3, 10))
    np.testing.assert_allclose(three["probability"].sum(axis=1), 1, atol=1e-5)


def test_a_large_image_is_scaled_and_a_view_of_memory_is_read(digits: Digits, heldout: Heldout) -> None:
    large = cv2.resize((heldout["images"][0] * 15.9375).astype(np.uint8), (80, 80), interpolation=cv2.INTER_NEAREST)
    for suffix in (".png", ".jpg"):
        body = cv2.imencode(suffix, large)[1].tobytes()
        assert answer(digits, memoryview(body).toreadonly())["digit"] == heldout["labels"][0]


def test_a_png_holds_the_pixels_that_were_encoded(heldout: Heldout) -> None:
    np.testing.assert_allclose(decode(encode(heldout["images"][0])) * WHITE, heldout["images"][0], atol=0.05)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (b"", "found 0 bytes that begin with b''"),
        (b"GIF89a...", "found 9 bytes that begin with b'GIF89a..', expected a PNG or JPEG"),
        (b"\x89PNG\r\n\x1a\n", "found a PNG or JPEG of 8 bytes that is broken"),
        (encode(np.zeros((8, 8)))[:40], "found a PNG or JPEG of 40 bytes that is broken"),
        ("seven", "found a str"),
        (None, "found a NoneType"),
        (7, "found a int"),
        ({"img": 1}, r"found a table with the keys \['img'\]"),
        ([], r"found numbers of shape \[0\], expected \[8, 8\]"),
        ([[0] * 8] * 7, r"found numbers of shape \[7, 8\], expected \[8, 8\]"),
        ([[0] * 8] * 7 + [[0] * 7], "not 8x8 numbers"),
        ([["a"] * 8] * 8, "not 8x8 numbers"),
        ([[None] * 8] * 8, "found pixels from nan"),
        ([[17] * 8] * 8, "found pixels from 17 to 17, expected 0 to 16"),
        ([[-1] * 8] * 8, "found pixels from -1 to -1, expected 0 to 16"),
        ({"image": np.float32(1)}, r"found numbers of shape \[\], expected \[rows, 8, 8\]"),
        ({"image": np.zeros((2, 64), np.float32)}, r"found numbers of shape \[2, 64\], expected \[rows, 8, 8\]"),
        ({"image": np.full((1, 8, 8), np.nan, np.float32)}, "found pixels from nan"),
    ],
)
def test_the_error_for_a_wrong_body_describes_it(digits: Digits, item: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        digits.preprocess(item)


def test_an_image_that_would_fill_the_memory_is_refused(digits: Digits) -> None:
    bomb = bytearray(encode(np.zeros((8, 8))))
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2
    with pytest.raises(BadRequest, match="broken or above"):
        digits.preprocess(bytes(bomb))


def test_no_rows_give_no_digits(digits: Digits) -> None:
    result = answer(digits, {"image": np.zeros((0, 8, 8), np.float32)})
    assert result["digit"].shape == (0,)


def test_without_opencv_images_name_the_extra_and_json_works(
    digits: Digits, heldout: Heldout, monkeypatch: pytest.MonkeyPatch
) -> None:
    png = encode(heldout["images"][0])
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(PenstockError, match=r"pip install 'opencv-python-headless"):
        digits.preprocess(png)
    assert answer(digits, heldout["images"][0].tolist())["digit"] == heldout["labels"][0]


def test_the_warm_up_items_run(digits: Digits) -> None:
    items = digits.warmup()
    assert len(items) >= 1
    assert len(digits.predict([digits.preprocess(item) for item in items])) == len(items)


def test_an_unrolled_convolution_is_the_convolution() -> None:
    rng = np.random.default_rng(0)
    kernel, image = rng.random((9 * 2, 3), np.float32), rng.random((6, 6, 2), np.float32)
    found = (image.ravel() @ unroll(kernel, 6, 2, 3)).reshape(4, 4, 3)
    windows = np.lib.stride_tricks.sliding_window_view(image, (3, 3), axis=(0, 1))
    wanted = np.einsum("yxiab,abio->yxo", windows, kernel.reshape(3, 3, 2, 3))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_the_weights_contain_no_pickle() -> None:
    weights = data("weights.npz")  # np.load refuses pickles
    assert weights["first"].shape == (9 * FIRST[1], FIRST[2])
    assert all(np.isfinite(array).all() for array in weights.values())


def test_the_onnx_file_of_the_example_is_the_same_network(digits: Digits, heldout: Heldout) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pixels = heldout["images"].astype(np.float32) / np.float32(WHITE)
    session = runtime.InferenceSession(Path(__file__).parents[4] / "examples" / "digits" / "digits.onnx")
    (found,) = session.run(None, {"image": pixels[:, None].repeat(3, axis=1)})
    np.testing.assert_allclose(found, np.stack(digits.predict(list(pixels))), atol=1e-5)
