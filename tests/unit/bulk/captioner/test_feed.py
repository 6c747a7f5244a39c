"""Pixels as a network takes them: gathered, resized and normalised like the published processors."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.bulk.captioner.feed import DeviceFeed, ImageSpec, resized_by_torch
from penstock.bulk.captioner.model import CaptionRequest
from penstock.errors import BadRequest
from support.simulated_device import SimulatedDevice

MEAN, STD = (0.48, 0.45, 0.40), (0.26, 0.25, 0.27)
LOOKS = ImageSpec(24, 36, MEAN, STD, "bicubic")


def frames(count: int, height: int = 24, width: int = 36, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), np.uint8)


def feed(looks: ImageSpec = LOOKS, dtype: torch.dtype = torch.float32) -> DeviceFeed:
    return DeviceFeed(looks, "cpu", dtype)


def same(pixels: torch.Tensor) -> torch.Tensor:
    """A network that gives its pixels."""
    return pixels.clone()


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
    found = feed()([request(pixels)]).through(same)
    assert found.shape == (5, 3, 24, 36)
    assert torch.allclose(found, expected, atol=2e-6)


KERNELS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
SIDES = st.one_of(st.integers(1, 90), st.sampled_from([12, 18, 24, 36, 48, 72, 240, 301]))


def drawn(pattern: str, height: int, width: int, seed: int) -> np.ndarray:
    """Two frames with noise, hard edges, stripes, or a ramp."""
    if pattern == "noise":
        return frames(2, height, width, seed)
    if pattern == "edges":
        return frames(2, height, width, seed) // 128 * 255
    y, x = np.indices((height, width))
    lines = (x + y * (seed % 3)) // (1 + seed % 4) % 2 * 255 if pattern == "stripes" else (x * 3 + y * seed) % 256
    return np.broadcast_to(lines.astype(np.uint8)[..., np.newaxis], (2, height, width, 3)).copy()


def pillow(pixels: np.ndarray, spec: ImageSpec) -> np.ndarray:
    size = (spec.width, spec.height)
    return np.stack([np.asarray(Image.fromarray(p).resize(size, KERNELS[spec.kernel])) for p in pixels]).astype(int)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(KERNELS)), st.sampled_from(["noise", "edges", "stripes", "ramp"]), SIDES, SIDES,
    st.integers(0, 9),
)  # fmt: skip
def test_frames_of_another_size_are_resized_like_pillow(
    kernel: str, pattern: str, height: int, width: int, seed: int
) -> None:
    spec = ImageSpec(24, 36, MEAN, STD, kernel)
    pixels = drawn(pattern, height, width, seed)
    assert (levels(feed(spec)([request(pixels)]).through(same), spec) == pillow(pixels, spec)).all()
    if kernel == "bicubic":  # its overshoots must not be clipped
        pixels = pixels // 2 + 64
    found = resized_by_torch(torch.from_numpy(pixels), spec).numpy()  # as on a GPU
    assert np.abs(found - pillow(pixels, spec)).max() <= 1


def simulated(dtype: torch.dtype = torch.float32) -> DeviceFeed:
    return DeviceFeed(LOOKS, "cpu", dtype, SimulatedDevice(copy_s=1e-3, launch_s=0.0, kernels_s=lambda rows: 0.0))


@pytest.mark.parametrize("part_bytes", [2 * 48 * 72 * 3, 1, 2**30])
def test_a_device_gets_the_same_pixels_in_consecutive_batches(monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    """Large frames are resized there, in parts of so many bytes."""
    monkeypatch.setattr("penstock.bulk.captioner.feed.RESIZE_BYTES", part_bytes)
    used = simulated()
    soft = [frames(7, 48, 72, seed=i) // 2 + 64 for i in range(3)]
    batches = [[request(frames(4, seed=i)), BadRequest("no"), request(soft[i])] for i in range(3)]
    fed = [used(batch) for batch in batches]
    for batch, found in zip(batches, fed, strict=True):
        expected = feed()(batch)
        assert (found.rows, found.errors[1]) == (11, batch[1])
        assert np.abs(levels(found.through(same)) - levels(expected.through(same))).max() <= 1
        assert torch.equal(found.through(same)[:4], expected.through(same)[:4])


def test_the_next_batch_is_copied_while_a_network_runs() -> None:
    device = SimulatedDevice(copy_s=1e-3, launch_s=0.0, kernels_s=lambda rows: 0.0)
    used = DeviceFeed(LOOKS, "cpu", torch.float32, device)
    first = used([request(frames(4))])

    def network(pixels: torch.Tensor) -> int:
        used([request(frames(4))])
        return len(pixels)

    assert first.through(network) == 4
    assert [queue for queue, _, _ in device.spans] == ["in", "in", "kernels"]


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
    assert torch.equal(fed.through(same), torch.cat([feed()([request(p)]).through(same) for p in (first, last)]))


def test_no_valid_request_gives_an_empty_batch() -> None:
    fed = feed()([BadRequest("refused before")])
    assert (fed.rows, len(fed.through(same))) == (0, 0)


def test_a_batch_is_not_overwritten_by_the_next_one() -> None:
    used = feed()
    first = used([request(frames(4))])
    before = first.through(same).clone()
    used([request(frames(4, seed=1))])
    assert torch.equal(first.through(same), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    pixels = request(frames(2))
    assert torch.equal(feed(dtype=dtype)([pixels]).through(same), feed()([pixels]).through(same).to(dtype))


def test_threads_may_feed_concurrently() -> None:
    used = feed()
    expected = [feed()([request(frames(3, seed=i))]).through(same) for i in range(8)]
    wrong: list[int] = []

    def run(i: int) -> None:
        for _ in range(20):
            if not torch.equal(used([request(frames(3, seed=i))]).through(same), expected[i]):
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
    batches = [[request(frames(40, seed=i)), request(frames(3, 60, 44, seed=i) // 2 + 64)] for i in range(12)]
    fed = [used(batch) for batch in batches]
    for batch, found in zip(batches, fed, strict=True):
        expected, pixels = feed()(batch).through(same), found.through(same).cpu()
        assert torch.allclose(pixels[:40], expected[:40], atol=1e-5)
        assert np.abs(levels(pixels) - levels(expected)).max() <= 1
