"""Trains the small captioner and writes `captioner/`: `python train.py` (about 12 minutes on one core).

A second process draws each training picture, and it is used once. Seed, number of steps and library versions
determine the weights, not the speed of the machine. `--evaluate` tests the shipped weights on pictures outside the
training set: stills and H.264 clips, with the kernel "fast" (area average while decoding, the default of
`penstock caption`) and with "exact" (antialiased bicubic).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import av
import numpy as np
import simplejpeg
import torch
from make_videos import make_clip
from network import (
    END,
    IMAGE,
    LONGEST,
    QUERIES,
    SIDE,
    START,
    VOCABULARY,
    WEIGHTS,
    WIDTH,
    new_network,
    new_tokenizer,
    save,
)
from scenes import caption, draw, number_of, sample
from torch.nn import functional
from transformers import Blip2ForConditionalGeneration

SEED = 11
STEPS = 3400
BATCH = 64
GROUP = 16
RATE = 1.5e-3
#: The caption words that vary between pictures.
SLOTS = (1, 2, 3, 6, 7, 8, 11, 12, 14)
HELD_OUT = 1_000_000


class Lessons(torch.utils.data.Dataset):
    """Step -> (uint8 [64, 64, 64, 3], words [64, length]); its pictures depend on seed and step only."""

    def __init__(self, seed: int, steps: int) -> None:
        self.seed, self.steps = seed, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = np.random.default_rng([self.seed, step])
        torch.set_num_threads(1)
        pixels, captions = [], []
        for _ in range(BATCH // GROUP):
            scenes = [sample(random) for _ in range(GROUP)]
            captions += [caption(scene) for scene in scenes]
            height = int(random.choice([96, 136, 180, 270], p=[0.25, 0.25, 0.25, 0.25]))
            width = height * 16 // 9 // 2 * 2
            frames = [av.VideoFrame.from_ndarray(draw(scene, width, height), format="rgb24") for scene in scenes]
            if random.random() < 0.6:
                frames = through_h264(frames, quality=int(random.integers(18, 31)))
            kernel = str(random.choice(["exact", "AREA", "BICUBIC"]))
            pixels += [spoilt(reduced(frame, kernel), random) for frame in frames]
        return torch.from_numpy(np.stack(pixels)), encoded(captions)


def through_h264(frames: list[av.VideoFrame], quality: int) -> list[av.VideoFrame]:
    """The frames after encoding with x264 at this CRF and decoding."""
    first = frames[0]
    coder = av.CodecContext.create("libx264", "w")
    coder.width, coder.height, coder.pix_fmt, coder.framerate = first.width, first.height, "yuv420p", 30
    coder.options = {"crf": str(quality), "preset": "ultrafast"}
    coder.thread_count = 1
    player = av.CodecContext.create("h264", "r")
    player.thread_count = 1
    packets = [packet for frame in [*frames, None] for packet in coder.encode(frame)]
    return [frame for packet in [*packets, None] for frame in player.decode(packet)]


def reduced(frame: av.VideoFrame, kernel: str) -> np.ndarray:
    """uint8 [64, 64, 3] of a frame: "exact" scales like the published processor, otherwise swscale's kernel does."""
    if kernel != "exact":
        small = frame.reformat(SIDE, SIDE, "yuv420p", interpolation=kernel) if frame.format.name == "rgb24" else frame
        return small.reformat(SIDE, SIDE, "rgb24", interpolation=kernel).to_ndarray()
    pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)[None]
    small = functional.interpolate(pixels, (SIDE, SIDE), mode="bicubic", antialias=True, align_corners=False)
    return small[0].permute(1, 2, 0).contiguous().numpy()


def spoilt(pixels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The pixels with a little noise, another brightness, and in one case of four JPEG compression."""
    noise = random.normal(int(random.integers(-6, 7)), random.uniform(0, 4), pixels.shape)
    pixels = np.clip(pixels + noise, 0, 255).astype(np.uint8)
    if random.random() < 0.25:
        jpeg = simplejpeg.encode_jpeg(pixels, quality=int(random.integers(75, 96)), colorsubsampling="420")
        pixels = simplejpeg.decode_jpeg(jpeg)
    return pixels


def encoded(captions: list[str]) -> torch.Tensor:
    """int64 [captions, length]: placeholders for the image tokens, then the words."""
    return torch.tensor([[IMAGE] * QUERIES + [START, *(VOCABULARY[w] for w in c.split()), END] for c in captions])


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """float32 [frames, 3, height, width] from -1 to 1, like the output of the preprocessor in `captioner/`."""
    return pixels.permute(0, 3, 1, 2).float().div(127.5).sub(1)


def train(steps: int, folder: Path) -> Blip2ForConditionalGeneration:
    """The trained network, written to `folder` every 500 steps.

    For four fifths of the run, a helper head requires query j to know slot j of the caption. Without it the language
    model learns the form of captions and ignores the picture.
    """
    network = new_network(SEED).train()
    helper = torch.nn.Linear(WIDTH, len(VOCABULARY))
    parameters = [*network.parameters(), *helper.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    lessons = torch.utils.data.DataLoader(Lessons(SEED, steps), batch_size=None, num_workers=1, prefetch_factor=8)
    slots = torch.tensor([QUERIES + 1 + slot for slot in SLOTS])
    began = time.monotonic()
    for step, (pixels, ids) in enumerate(lessons):
        done = step / steps
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 100) * (0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * done)))
        labels = ids.clone()
        labels[:, : QUERIES + 1] = -100
        output = network(
            pixel_values=normalised(pixels), input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels
        )
        known = helper(output.qformer_outputs.last_hidden_state[:, : len(SLOTS)])
        help_loss = functional.cross_entropy(known.flatten(0, 1), ids[:, slots].flatten())
        (output.loss + max(0, 1 - done / 0.8) * help_loss).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if (step + 1) % 100 == 0:
            took_s, used_s = time.monotonic() - began, time.process_time()
            losses = f"loss {output.loss.item():.4f}, helper's {help_loss.item():.4f}"
            print(f"step {step + 1} of {steps}: {losses}, {took_s:.0f} s, {used_s:.0f} s of CPU", flush=True)
        if (step + 1) % 500 == 0 or step + 1 == steps:
            save(network, folder)
    return network.eval()


def captions_of(network: Blip2ForConditionalGeneration, pixels: np.ndarray) -> Iterator[str]:
    """The caption of each of `pixels`, uint8 [frames, 64, 64, 3]."""
    tokenizer = new_tokenizer()
    for start in range(0, len(pixels), BATCH):
        batch = normalised(torch.from_numpy(pixels[start : start + BATCH]))
        with torch.inference_mode():
            ids = network.generate(pixel_values=batch, max_new_tokens=LONGEST, do_sample=False)
        yield from (text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True))


def held_out(count: int) -> Iterator[tuple[str, dict[str, np.ndarray], list[str]]]:
    """(name, kernel -> pixels, captions) of pictures outside the training set."""
    random = np.random.default_rng([SEED, HELD_OUT])
    for size in ((480, 270), (1280, 720)):
        scenes = [sample(random) for _ in range(count)]
        drawn = (av.VideoFrame.from_ndarray(draw(scene, *size), format="rgb24") for scene in scenes)
        as_decoded = (frame.reformat(format="yuv420p") for frame in drawn)
        yield f"stills {size[1]}p", _both(as_decoded), [caption(scene) for scene in scenes]
        with TemporaryDirectory() as folder:
            path = Path(folder) / "clip.mp4"
            captions = make_clip(path, count, size, seed=HELD_OUT)
            with av.open(str(path)) as container:
                pixels = _both(container.decode(video=0))
        yield f"H.264 {size[1]}p", pixels, captions


def _both(frames: Iterable[av.VideoFrame]) -> dict[str, np.ndarray]:
    pairs = [(reduced(frame, "exact"), reduced(frame, "AREA")) for frame in frames]
    return {"exact": np.stack([exact for exact, _ in pairs]), "fast": np.stack([area for _, area in pairs])}


def score(network: Blip2ForConditionalGeneration, pixels: np.ndarray, truth: list[str]) -> tuple[float, float]:
    """The share of correct numbers, and of correct whole captions."""
    pairs = list(zip(captions_of(network, pixels), truth, strict=True))
    numbers = sum(number_of(found) == number_of(right) for found, right in pairs)
    return numbers / len(pairs), sum(found == right for found, right in pairs) / len(pairs)


def evaluate(folder: Path, count: int) -> None:
    """Prints the scores of the network in `folder`."""
    network = Blip2ForConditionalGeneration.from_pretrained(folder).eval()
    for name, by_kernel, truth in held_out(count):
        for kernel, pixels in by_kernel.items():
            numbers, whole = score(network, pixels, truth)
            print(f"{name}, {kernel}: {numbers:.2%} of {count} numbers right, {whole:.2%} of the captions whole")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", action="store_true", help="train nothing, ask the weights")
    parser.add_argument("--folder", type=Path, default=WEIGHTS, help="the captioner's")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--count", type=int, default=1000, help="of held-out pictures of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.evaluate:
        train(options.steps, options.folder)
    evaluate(options.folder, options.count)


if __name__ == "__main__":
    main()
