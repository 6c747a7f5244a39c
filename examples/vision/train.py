"""Trains the small network and writes weights.safetensors: `python train.py` (a minute or two, one core).

The digits are the UCI repository's 1797 images of 8x8 in scikit-learn's version; a quarter is held out. "No digit"
images are crops of scikit-learn's two photographs, whose right thirds are held out. No held-out pixel takes part in
training or in any choice: `--validate` compares settings on a fifth of the training digits and on the middle thirds of
the photographs. `--check` only tests the shipped weights.
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

import cv2
import numpy as np
import torch
from model import NAMES, WEIGHTS, ImageModel, SmallCNN, small_input
from numpy.typing import NDArray
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn import functional

from penstock import decode_image

SEED = 5
EPOCHS = 40
BATCH = 64
RATE = 2e-3
OTHER = len(NAMES) - 1

Pixels = NDArray[np.uint8]


def drawn(rng: np.random.Generator, digit: NDArray[np.float64], side: int) -> Pixels:
    """A picture `[side, side, 3]` of a digit `[8, 8]` from 0 to 16, with random ink, paper and margin."""
    digit = np.pad(digit, int(rng.integers(0, 5)))
    paper, ink = rng.uniform(0, 255, 3), rng.uniform(0, 255, 3)
    while abs(paper.mean() - ink.mean()) < 60:
        paper, ink = rng.uniform(0, 255, 3), rng.uniform(0, 255, 3)
    amount = np.clip(cv2.resize(digit / 16, (side, side), interpolation=cv2.INTER_CUBIC), 0, 1)[..., None]
    noise = rng.normal(0, rng.uniform(0, 8), (side, side, 1))
    return np.clip(paper + (ink - paper) * amount + noise, 0, 255).astype(np.uint8)


def moved(rng: np.random.Generator, digit: NDArray[np.float64]) -> NDArray[np.float64]:
    """The digit rotated by up to 12 degrees, scaled by 0.85 to 1.1, shifted by up to half a pixel."""
    matrix = cv2.getRotationMatrix2D((3.5, 3.5), rng.uniform(-12, 12), rng.uniform(0.85, 1.1))
    matrix[:, 2] += rng.uniform(-0.5, 0.5, 2)
    return cv2.warpAffine(digit, matrix, (8, 8), flags=cv2.INTER_CUBIC)


def cut(rng: np.random.Generator, photo: Pixels) -> Pixels:
    """A random square of a photograph, at least 16 pixels wide."""
    height, width = photo.shape[:2]
    side = int(np.exp(rng.uniform(np.log(16), np.log(min(height, width)))))
    y, x = rng.integers(0, height - side + 1), rng.integers(0, width - side + 1)
    return photo[y : y + side, x : x + side]


def columns(start: int, stop: int) -> list[Pixels]:
    """The thirds from `start` to `stop` of both photographs, counted from the left."""
    folder = files("sklearn.datasets.images")
    photos = [decode_image((folder / name).read_bytes(), "bgr") for name in ("china.jpg", "flower.jpg")]
    return [np.ascontiguousarray(p[:, p.shape[1] * start // 3 : p.shape[1] * stop // 3]) for p in photos]


def sample(
    rng: np.random.Generator, digits: NDArray[np.float64], labels: NDArray[np.int64], photos: list[Pixels], turn: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, classes): each digit once, and one crop per eight digits."""
    pixels = [drawn(rng, moved(rng, d) if turn else d, int(rng.integers(16, 64))) for d in digits]
    others = [cut(rng, photos[i % len(photos)]) for i in range(len(digits) // 8)]
    inputs = torch.stack([small_input(p) for p in [*pixels, *others]])
    return inputs, torch.tensor([*labels.tolist(), *[OTHER] * len(others)])


def train(digits: NDArray[np.float64], labels: NDArray[np.int64], photos: list[Pixels]) -> SmallCNN:
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    network = SmallCNN().train()
    optimiser = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.01)
    steps = EPOCHS * -(-(len(digits) + len(digits) // 8) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    for epoch in range(EPOCHS):
        inputs, classes = sample(rng, digits, labels, photos, turn=True)
        total = 0.0
        for chosen in torch.randperm(len(inputs)).split(BATCH):
            loss = functional.cross_entropy(network(inputs[chosen]), classes[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.item() * len(chosen)
        print(f"epoch {epoch + 1}: loss {total / len(inputs):.4f}", flush=True)
    return network.eval()


def report(
    name: str, model: ImageModel, digits: NDArray[np.float64], labels: NDArray[np.int64], photos: list[Pixels]
) -> None:
    """Prints the share of recognised images, sent to the model as files."""
    rng = np.random.default_rng(SEED)
    sent = {"digits": [(drawn(rng, d, 64), int(n)) for d, n in zip(digits, labels, strict=True)],
             "crops": [(cut(rng, photos[i % len(photos)]), OTHER) for i in range(200)]}  # fmt: skip
    for kind, examples in sent.items():
        answers = model.batch_prediction([cv2.imencode(".png", pixels)[1].tobytes() for pixels, _ in examples])
        right = sum(answer["class_id"] == n for answer, (_, n) in zip(answers, examples, strict=True))
        print(f"{name}: {right / len(examples):.2%} of {len(examples)} {kind} right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only test the shipped weights")
    parser.add_argument("--validate", action="store_true", help="try the settings without the held-out images")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="file for the weights")
    options = parser.parse_args()
    data = load_digits()
    digits, asked, labels, answers = train_test_split(
        data.images, data.target, test_size=450, random_state=SEED, stratify=data.target
    )
    photos, asked_photos = columns(0, 2), columns(2, 3)
    if options.validate:
        digits, asked, labels, answers = train_test_split(
            digits, labels, test_size=0.2, random_state=1, stratify=labels
        )
        photos, asked_photos = columns(0, 1), columns(1, 2)
    if not options.check:
        network = train(digits, labels, photos)
        save_file(network.half().state_dict(), options.weights)
    name = "validation" if options.validate else "held-out"
    report(name, ImageModel(str(options.weights)), asked, answers, asked_photos)


if __name__ == "__main__":
    main()
