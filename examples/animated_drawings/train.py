"""Trains the detector on generated drawings and writes weights.safetensors: `python train.py`.

This takes about ten minutes on one core with bfloat16 instructions (AMX); the same seed gives the same drawings.
`--check` only prints the mean average precision of the shipped weights on held-out drawings.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import cv2
import numpy as np
import torch
from drawings import Drawing, draw, jpeg, pictures
from network import REACH, STRIDE, FigureNet
from numpy.typing import NDArray
from pictures import SIDE, decoded, figures, fitted, on_picture, silhouette, tightened
from safetensors.torch import load_file, save_file
from score import Found, precision
from torch import Tensor
from torch.nn import functional

WEIGHTS = Path(__file__).parent / "weights.safetensors"
SEED = 8
HELD_OUT = 20261121  # the seed of drawings that training never generates
STEPS = 1200
BATCH = 16
RATE = 3e-3
SMALL_SIDE, SMALL_PART = 224, 0.6  # the first part of training uses smaller pictures, which halves the work

Images = NDArray[np.uint8]


class Batch:
    """Pictures and the network's target output. The figures of all pictures are one list; `of` holds their pictures."""

    def __init__(self, random: np.random.Generator, side: int) -> None:
        grid = side // STRIDE
        images, heat = np.empty((BATCH, side, side, 3), np.uint8), np.zeros((BATCH, 2, grid, grid), np.float32)
        of, boxes, masks = [], [], []
        for row in range(BATCH):
            drawing = _drawn(random, side)
            images[row] = fitted(drawing.pixels, side)
            scale = side / max(drawing.pixels.shape)
            for label, box, mask in zip(drawing.labels, drawing.boxes * scale, drawing.masks, strict=True):
                heat[row, label] = np.maximum(heat[row, label], _bump(box, grid))
                square = fitted(np.repeat(mask[..., None].astype(np.uint8) * 255, 3, axis=2), side)[..., 0]
                square[round(mask.shape[0] * scale) :] = 0
                square[:, round(mask.shape[1] * scale) :] = 0
                of.append(row)
                boxes.append(box)
                masks.append(cv2.resize(square, (side // 4, side // 4), interpolation=cv2.INTER_AREA))
        self.images, self.heat = torch.from_numpy(images), torch.from_numpy(heat)
        self.of = torch.tensor(of, dtype=torch.long)
        self.boxes = torch.from_numpy(np.array(boxes, np.float32).reshape(-1, 4))
        self.masks = torch.from_numpy(np.array(masks, np.float32).reshape(-1, side // 4, side // 4)) / 255


def _drawn(random: np.random.Generator, side: int) -> Drawing:
    """A drawing of any shape, up to 1.5 times the size of the network's input."""
    longest = int(side * random.uniform(1.0, 1.5))
    other = int(longest * random.uniform(0.6, 1.0))
    return draw(random, *((longest, other) if random.random() < 0.5 else (other, longest)))


def _bump(box: NDArray[np.float64], grid: int) -> NDArray[np.float32]:
    """One at the box's centre, falling to zero around it, more slowly for a larger box."""
    places = np.arange(grid)
    middle = np.minimum(grid - 1, (box[:2] + box[2:]) / 2 // STRIDE)
    wide = np.maximum(0.6, (box[2:] - box[:2]) / STRIDE * 0.09)
    across, down = (np.exp(-((places - m) ** 2) / (2 * w * w)) for m, w in zip(middle, wide, strict=True))
    return (down[:, None] * across[None, :]).astype(np.float32)


# ---- losses


def loss(network: FigureNet, batch: Batch) -> Tensor:
    """The sum of the losses of centres, sides and masks."""
    with torch.autocast("cpu", torch.bfloat16):
        maps = network.maps(batch.images)
    logits, sides, mixes, shared = (found.float() for found in maps)
    total = _loss_of_places(logits, batch.heat)
    if len(batch.of) == 0:
        return total
    middles = (batch.boxes[:, :2] + batch.boxes[:, 2:]) / 2
    grid = logits.shape[2]
    own = (middles / STRIDE).long().clamp(0, grid - 1)
    for dx, dy in (
        (0, 0),
        (1, 0),
        (-1, 0),
        (0, 1),
        (0, -1),
    ):  # the neighbours learn it too, because the peak may be there
        x, y = (own[:, 0] + dx).clamp(0, grid - 1), (own[:, 1] + dy).clamp(0, grid - 1)
        share = 0.6 if dx == dy == 0 else 0.1
        at = torch.stack([x, y, x, y], 1) * STRIDE + STRIDE / 2
        found = at + sides[batch.of, :, y, x] * REACH * torch.tensor([-1.0, -1.0, 1.0, 1.0])
        masks = torch.einsum("nk,nkhw->nhw", mixes[batch.of, :, y, x], shared[batch.of])
        total = total + share * (_loss_of_sides(found, batch.boxes) + 1.5 * _loss_of_masks(masks, batch))
    return total


def _loss_of_places(logits: Tensor, heat: Tensor) -> Tensor:
    """Focal loss: cells near a centre count less as background, and easy cells hardly count."""
    likely = logits.sigmoid()
    middles = heat == 1
    yes = functional.logsigmoid(logits) * (1 - likely) ** 2 * middles
    no = functional.logsigmoid(-logits) * likely**2 * (1 - heat) ** 4 * ~middles
    return -(yes.sum() + no.sum()) / middles.sum().clamp(min=1)


def _loss_of_sides(found: Tensor, boxes: Tensor) -> Tensor:
    low, high = torch.maximum(found[:, :2], boxes[:, :2]), torch.minimum(found[:, 2:], boxes[:, 2:])
    both = (high - low).clamp(min=0).prod(1)
    areas = [(b[:, 2:] - b[:, :2]).clamp(min=0).prod(1) for b in (found, boxes)]
    union = areas[0] + areas[1] - both
    sizes = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)
    return (1 - both / union.clamp(min=1)).mean() + functional.smooth_l1_loss(found / sizes, boxes / sizes, beta=0.02)


def _loss_of_masks(logits: Tensor, batch: Batch) -> Tensor:
    """The mask loss within the box and one cell around it; the rest of a mask is never used."""
    places = torch.arange(logits.shape[1]) * 4 + 2
    left, top, right, bottom = (edge[:, None] for edge in batch.boxes.unbind(1))
    inside = ((places > top - 4) & (places < bottom + 4))[:, :, None]
    inside = (inside & ((places > left - 4) & (places < right + 4))[:, None, :]).float()
    each = functional.binary_cross_entropy_with_logits(logits, batch.masks, reduction="none") * inside
    likely = logits.sigmoid() * inside
    common = 2 * (likely * batch.masks).sum((1, 2)) / (likely.sum((1, 2)) + batch.masks.sum((1, 2)) + 1)
    return (each.sum((1, 2)) / inside.sum((1, 2))).mean() + 0.5 * (1 - common).mean()


def train(steps: int) -> FigureNet:
    """A network after `steps` batches."""
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    network = FigureNet().train().to(memory_format=torch.channels_last)
    optimiser = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps, pct_start=0.15)
    began, lately = time.process_time(), 0.0
    for step in range(1, steps + 1):
        wrong = loss(network, Batch(random, SMALL_SIDE if step < SMALL_PART * steps else SIDE))
        optimiser.zero_grad()
        wrong.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        optimiser.step()
        schedule.step()
        lately += wrong.item()
        if step % 50 == 0:
            print(f"step {step}: loss {lately / 50:.3f}, {time.process_time() - began:.0f} s of CPU time", flush=True)
            lately = 0.0
    return network.eval()


# ---- evaluation


def report(network: FigureNet, count: int) -> None:
    """Prints the mean average precision on `count` held-out drawings, encoded as JPEG."""
    drawings = pictures(count, HELD_OUT)
    boxes, masks = [], []
    for drawing in drawings:
        shape = drawing.pixels.shape[:2]
        with torch.inference_mode():
            output = network(torch.from_numpy(fitted(decoded(jpeg(drawing))))[None])
        scores, classes, found, cells = (part[0].numpy() for part in output)
        kept = figures(scores, found, least=0.01)
        edges = on_picture(shape, tightened(found[kept], cells[kept]))
        boxes.append(Found(scores[kept], classes[kept], edges))
        masks.append(
            Found(scores[kept], classes[kept], [_whole(shape, cells[k], b) for k, b in zip(kept, edges, strict=True)])
        )
    for name, all_found, truth in (
        ("boxes", boxes, [d.boxes for d in drawings]),
        ("masks", masks, [d.masks for d in drawings]),
    ):
        print(f"{name}: {precision(all_found, [d.labels for d in drawings], truth)} of {count} held-out drawings")


def _whole(shape: tuple[int, int], mask: NDArray[np.uint8], box: NDArray[np.float64]) -> NDArray[np.bool_]:
    """The silhouette as a mask of the whole picture."""
    part = silhouette(shape, mask, box)
    whole = np.zeros(shape, np.bool_)
    left, top = int(box[0]), int(box[1])
    whole[top : top + part.shape[0], left : left + part.shape[1]] = part[: shape[0] - top, : shape[1] - left]
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only test the shipped weights")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="file for the weights")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--count", type=int, default=200, help="number of held-out drawings")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.check:
        state = train(options.steps).state_dict()
        kept = {name: w.half() if w.is_floating_point() else w for name, w in state.items()}
        save_file({name: w.contiguous() for name, w in kept.items()}, options.weights)
    network = FigureNet()
    network.load_state_dict(load_file(options.weights))
    report(network.eval(), options.count)


if __name__ == "__main__":
    main()
