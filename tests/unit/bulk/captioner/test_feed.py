"""Pixels as a network takes them: gathered, resized and normalised like the published processors."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.bulk.captioner.feed import DeviceFeed, ImageSpec
from penstock.bulk.captioner.model import CaptionRequest
from penstock.errors import BadRequest

MEAN, STD = (0.48, 0.45, 0.40), (0.26, 0.25, 0.27)
LOOKS = ImageSpec(24, 36, MEAN, STD, "bicubic")


def frames(count: int, height: int = 24, width: int = 36, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), np.uint8)


def feed(looks: ImageSpec = LOOKS, dtype: torch.dtype = torch.float32) -> DeviceFeed:
    return DeviceFeed(looks, "cpu", dtype)


def request(pixels: np.ndarray) -> CaptionRequest:
    return CaptionRequest(len(pixels), frames=pixels)


def levels(pixels: torch.Tensor, looks: ImageSpec = LOOKS) -> np.ndarray:
    """The normalised pixels converted back to uint8 `[rows, height, width, 3]`."""
    mean, std = np.array(looks.mean), np.array(looks.std)
    return np.rint((pixels.permute(0, 2, 3, 1).double().numpy() * std + mean) * 255).astype(int)


def test_frames_are_normalised_like_the_published_processor() -> None:
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    pixels = frames(5)
    processor = BlipImageProcessorPil(size={"height": 24, "width": 36}, image_mean=MEAN, image_std=STD)
    expected = processor(list(pixels), return_tensors="pt")["pixel_values"]
    found = feed()([request(pixels)]).take()
    assert found.shape == (5, 3, 24, 36)
    assert torch.allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(("kernel", "resample"), [("bicubic", Image.BICUBIC), ("bilinear", Image.BILINEAR)])
@pytest.mark.parametrize("size", [(48, 72), (270, 480), (1, 1), (17, 301), (10, 12), (24, 35)])
def test_frames_of_another_size_are_resized_like_pillow(kernel: str, resample: int, size: tuple[int, int]) -> None:
    looks = ImageSpec(24, 36, MEAN, STD, kernel)
    pixels = frames(3, *size)
    found = levels(feed(looks)([request(pixels)]).take(), looks)
    expected = np.stack([np.asarray(Image.fromarray(p).resize((36, 24), resample)) for p in pixels])
    assert np.abs(found - expected).max() <= 1


def test_large_frames_are_resized_in_parts_and_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bulk.captioner.feed.RESIZE_BYTES", 2 * 48 * 72 * 3)
    pixels = frames(7, 48, 72)
    together = feed()([request(pixels)]).take()
    assert torch.equal(together, torch.cat([feed()([request(p[np.newaxis])]).take() for p in pixels]))


def test_requests_keep_their_order_and_failed_ones_take_no_rows() -> None:
    class Damaged(CaptionRequest):
        def pieces(self):
            yield frames(1, 48, 72)
            yield frames(1)
            raise BadRequest("row 2 is damaged")

    first, last = frames(2, 60, 60, seed=1), frames(3, seed=2)
    refused = BadRequest("refused before")
    fed = feed()([request(first), Damaged(4), refused, request(last)])
    assert fed.rows == 5
    assert [str(e) if e else None for e in fed.errors] == [None, "row 2 is damaged", "refused before", None]
    assert torch.equal(fed.take(), torch.cat([feed()([request(p)]).take() for p in (first, last)]))


def test_no_valid_request_gives_an_empty_batch() -> None:
    fed = feed()([BadRequest("refused before")])
    assert (fed.rows, len(fed.take())) == (0, 0)


def test_a_batch_is_not_overwritten_by_the_next_one() -> None:
    used = feed()
    first = used([request(frames(4))])
    before = first.take().clone()
    used([request(frames(4, seed=1))])
    assert torch.equal(first.take(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    pixels = request(frames(2))
    assert torch.equal(feed(dtype=dtype)([pixels]).take(), feed()([pixels]).take().to(dtype))


def test_threads_may_feed_concurrently() -> None:
    used = feed()
    expected = [feed()([request(frames(3, seed=i))]).take() for i in range(8)]
    wrong: list[int] = []

    def run(i: int) -> None:
        for _ in range(20):
            if not torch.equal(used([request(frames(3, seed=i))]).take(), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gets_the_same_pixels_in_consecutive_batches() -> None:
    used = DeviceFeed(LOOKS, "cuda:0", torch.float32)
    batches = [[request(frames(40, seed=i)), request(frames(3, 60, 44, seed=i))] for i in range(12)]
    fed = [used(batch) for batch in batches]
    for batch, found in zip(batches, fed, strict=True):
        expected = feed()(batch).take()
        assert torch.allclose(found.take()[:40].cpu(), expected[:40], atol=1e-5)
        assert np.abs(levels(found.take().cpu()) - levels(expected)).max() <= 1
