"""Trains both networks on generated pages, and writes detector.onnx, recogniser.onnx and letters.txt.

`python train.py` takes about eight minutes on two cores. `--minutes 3` stops earlier; the next call goes on where it
stopped. `--check` measures the files on pages that took no part in training.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import ocr
import pages
import torch
from networks import Detector, Recogniser
from torch import nn

HERE = Path(__file__).parent
STATE = HERE / "training.pt"
MEAN, STD = np.float32([123.675, 116.28, 103.53]), np.float32([58.395, 57.12, 57.375])  # as PaddleOCR's detector
STEPS = {"detector": 350, "recogniser": 1200}
SIDE = 256  # of the detector's pictures in training
SEED = 3


def shrunken(corners: np.ndarray, unclip: float = 1.5) -> np.ndarray:
    """The corners of the box that `unclip` grows to these corners."""
    across, down = corners[1] - corners[0], corners[3] - corners[0]
    width, height = float(np.hypot(*across)), float(np.hypot(*down))
    low, high = 0.0, min(width, height) / 2
    for _ in range(30):
        distance = (low + high) / 2
        inner = (width - 2 * distance, height - 2 * distance)
        grown = unclip * inner[0] * inner[1] / (2 * sum(inner)) if min(inner) > 0 else 0
        low, high = (distance, high) if grown > distance else (low, distance)
    x, y = across / width * low, down / height * low
    return np.float32([corners[0] + x + y, corners[1] - x + y, corners[2] - x - y, corners[3] + x - y])


def detector_batches(rng: np.random.Generator, rows: int = 8) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pictures and the shrunken boxes in them, `[rows, 1, SIDE / 2, SIDE / 2]`."""
    while True:
        pictures, targets = [], []
        for _ in range(rows):
            image, words = pages.page(int(rng.integers(1_000_000)), int(rng.integers(9)), SIDE, SIDE)
            target = np.zeros((SIDE // 2, SIDE // 2), np.uint8)
            for word in words:
                fixed = ((shrunken(word.corners) / 2 - 0.25) * 16).astype(np.int32)
                cv2.fillConvexPoly(target, fixed, 1, shift=4)
            pictures.append((image - MEAN) / STD)
            targets.append(target[None])
        yield torch.from_numpy(np.stack(pictures).transpose(0, 3, 1, 2)), torch.from_numpy(np.stack(targets)).float()


def detector_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy, and the part of the boxes that is missed or too much."""
    found = torch.sigmoid(logits)
    dice = 1 - (2 * (found * target).sum() + 1) / (found.sum() + target.sum() + 1)
    return nn.functional.binary_cross_entropy_with_logits(logits, target) + dice


def recogniser_batches(rng: np.random.Generator, rows: int = 48) -> Iterator[tuple[torch.Tensor, list[str]]]:
    """Lines of one width, cut out about as the detector does, and their texts."""
    lines: dict[int, list[tuple[np.ndarray, str]]] = {}
    while True:
        image, words = pages.page(int(rng.integers(1_000_000)), 30)
        for word in words:
            for _ in range(2):
                high = np.hypot(*(word.corners[3] - word.corners[0]))
                moved = word.corners + rng.normal(0, 0.03 * high, (4, 2)) + rng.normal(0, 0.05 * high, 2)
                line = ocr.line_of(image, np.float32(moved))
                kept = lines.setdefault(line.shape[3], [])
                kept.append((line, word.text))
                if len(kept) == rows:
                    yield torch.from_numpy(np.concatenate([line for line, _ in kept])), [text for _, text in kept]
                    kept.clear()


def recogniser_loss(logits: torch.Tensor, texts: list[str]) -> torch.Tensor:
    """The usual loss of texts whose letters have no positions."""
    target = torch.tensor([1 + pages.LETTERS.index(letter) for text in texts for letter in text])
    rows, steps, _ = logits.shape
    return nn.functional.ctc_loss(
        logits.log_softmax(2).transpose(0, 1), target, torch.full((rows,), steps),
        torch.tensor([len(text) for text in texts]), zero_infinity=True,
    )  # fmt: skip


TASKS = {"detector": (detector_batches, detector_loss), "recogniser": (recogniser_batches, recogniser_loss)}


def train(name: str, network: nn.Module, state: dict, end: float) -> bool:
    """Trains a network until it is done or the time is over. Whether it is done."""
    batches, loss_of = TASKS[name]
    steps = STEPS[name]
    optimiser = torch.optim.AdamW(network.parameters(), 4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps + 1)
    if name in state:
        for part, saved in zip((network, optimiser, schedule), state[name], strict=True):
            part.load_state_dict(saved)
    done, losses = schedule.last_epoch, []
    network.train()
    for pictures, target in batches(np.random.default_rng((SEED, done))):
        if done >= steps or time.monotonic() > end:
            break
        loss = loss_of(network.logits(pictures), target)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        optimiser.step()
        schedule.step()
        done += 1
        losses.append(loss.item())
        if done % 100 == 0:
            print(f"{name}: step {done} of {steps}, loss {np.mean(losses[-100:]):.3f}", flush=True)
    state[name] = [part.state_dict() for part in (network, optimiser, schedule)]
    torch.save(state, STATE)
    return done >= steps


def export(name: str, network: nn.Module, example: torch.Tensor, sides: dict[int, str], out: dict[int, str]) -> None:
    """Writes a network whose rows and `sides` are free."""
    with warnings.catch_warnings():
        # the older exporter needs no further package, but warns about its age
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.onnx.export(
            network.eval(), (example,), HERE / f"{name}.onnx", input_names=["x"], output_names=["y"],
            dynamic_axes={"x": {0: "rows", **sides}, "y": {0: "rows", **out}}, opset_version=17, dynamo=False,
        )  # fmt: skip


def check(count: int = 100) -> None:
    """Prints the accuracy of the written files."""
    import plain

    reader, right, found, real = plain.Reader(), 0, 0, 0
    overlaps = []
    for data, words in pages.some(count):
        answer = reader.read(data)["words"]
        found, real = found + len(answer), real + len(words)
        for word in words:
            matches = [(overlap(word.corners, np.float32(one["box"])), one["text"]) for one in answer]
            best, text = max(matches, default=(0.0, ""))
            overlaps.append(best)
            right += best >= 0.5 and text == word.text
    hits = sum(best >= 0.5 for best in overlaps)
    print(f"{count} pages, {real} words: recall {hits / real:.1%}, precision {hits / found:.1%} at an overlap of 0.5")
    print(f"mean overlap {np.mean(overlaps):.3f}; read without an error: {right / real:.1%}")


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """The common area of two convex quadrangles over that of both."""
    common, _ = cv2.intersectConvexConvex(a, b)
    return common / (cv2.contourArea(a) + cv2.contourArea(b) - common + 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        return check()
    end = time.monotonic() + 60 * given.minutes
    torch.manual_seed(SEED)
    state = torch.load(STATE, weights_only=True) if STATE.exists() else {}
    networks = {"detector": Detector(), "recogniser": Recogniser(len(pages.LETTERS))}
    if not all(train(name, network, state, end) for name, network in networks.items()):
        return print("not done: call it again")
    (HERE / "letters.txt").write_text("\n".join(pages.LETTERS) + "\n")
    export("detector", networks["detector"], torch.zeros(2, 3, 64, 96), {2: "h", 3: "w"}, {2: "h2", 3: "w2"})
    export("recogniser", networks["recogniser"], torch.zeros(2, 3, 48, 64), {3: "w"}, {1: "steps"})
    STATE.unlink()
    check()


if __name__ == "__main__":
    main()
