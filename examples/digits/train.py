"""Trains the digits model and writes what the package ships: `python examples/digits/train.py` (half a minute).

The data are the handwritten digits of the UCI repository as scikit-learn ships them: 1797 images of 8x8, values 0 to
16. A quarter is held out: it is saved with the weights and takes no part in training or in any choice. Sizes, rates and
epochs were chosen on a fifth of the rest; `--validate` trains without that fifth.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from penstock.cli.demo.digits import FIRST, SECOND, SIDE, WHITE, Digits, relu, taps, unroll

DATA = Path(__file__).parents[2] / "src" / "penstock" / "cli" / "demo" / "data"
SEED = 20
EPOCHS = 60
BATCH = 64
RATE = 2e-3
DECAY = 1e-4
DROP = 0.3  # dropout

Array = NDArray[np.float32]


class Convolution:
    """A 3x3 convolution, trained as its unrolled matrix; gradients are summed over equal weights."""

    def __init__(self, rng: np.random.Generator, side: int, inputs: int, outputs: int) -> None:
        self.shape = (side, inputs, outputs)
        self.row, self.column, self.weight = taps(*self.shape)
        self.kernel = (rng.standard_normal((9 * inputs, outputs)) * np.sqrt(2 / (9 * inputs))).astype(np.float32)
        self.bias = np.zeros(outputs, np.float32)

    def forward(self, x: Array) -> Array:
        self.x, self.matrix = x, unroll(self.kernel, *self.shape)
        self.y = relu(x @ self.matrix + np.tile(self.bias, self.matrix.shape[1] // len(self.bias)))
        return self.y

    def backward(self, dy: Array) -> tuple[Array, list[Array]]:
        """The gradient of the input, and the gradients of kernel and bias."""
        dy = dy * (self.y > 0)
        dmatrix = self.x.T @ dy
        dkernel = np.bincount(self.weight, dmatrix[self.row, self.column], self.kernel.size)
        dbias = dy.reshape(-1, len(self.bias)).sum(axis=0)
        return dy @ self.matrix.T, [dkernel.reshape(self.kernel.shape).astype(np.float32), dbias]


def shifted(rng: np.random.Generator, images: Array) -> Array:
    """The images, each shifted by up to one pixel and up to 10 % brighter or darker."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    # Most images stay in place: a digit fills the 8 pixels, and a shift cuts it off.
    dy, dx = rng.choice([0, 1, 2], (2, len(images)), p=[0.15, 0.7, 0.15])
    moved = [image[y : y + SIDE, x : x + SIDE] for image, y, x in zip(padded, dy, dx, strict=True)]
    scale = rng.uniform(0.9, 1.1, (len(images), 1, 1))
    return np.minimum(np.stack(moved) * scale, 1).astype(np.float32)


def train(images: Array, labels: NDArray[np.int64]) -> dict[str, Array]:
    """The weights after `EPOCHS` passes of Adam over images from 0 to 1."""
    rng = np.random.default_rng(SEED)
    first, second = Convolution(rng, *FIRST), Convolution(rng, *SECOND)
    width = unroll(second.kernel, *SECOND).shape[1]
    dense = (rng.standard_normal((width, 10)) / np.sqrt(width)).astype(np.float32)
    dense_bias = np.zeros(10, np.float32)
    weights = [first.kernel, first.bias, second.kernel, second.bias, dense, dense_bias]
    mean, square = [np.zeros_like(w) for w in weights], [np.zeros_like(w) for w in weights]
    step, steps = 0, EPOCHS * (len(images) // BATCH)
    for _ in range(EPOCHS):
        order = rng.permutation(len(images))[: len(images) // BATCH * BATCH].reshape(-1, BATCH)
        for chosen in order:
            hidden = second.forward(first.forward(shifted(rng, images[chosen]).reshape(BATCH, -1)))
            mask = (rng.random(hidden.shape) > DROP).astype(np.float32) / np.float32(1 - DROP)
            kept = hidden * mask
            scores = kept @ dense + dense_bias
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            dscores = scores / scores.sum(axis=1, keepdims=True)
            dscores[np.arange(BATCH), labels[chosen]] -= 1
            dscores /= BATCH
            back, second_gradients = second.backward((dscores @ dense.T) * mask)
            _, first_gradients = first.backward(back)
            gradients = [*first_gradients, *second_gradients, kept.T @ dscores, dscores.sum(axis=0)]
            step += 1
            rate = RATE * 0.5 * (1 + np.cos(np.pi * step / steps))
            for w, g, m, s in zip(weights, gradients, mean, square, strict=True):
                m += 0.1 * (g - m)
                s += 0.001 * (g * g - s)
                w -= rate * (m / (1 - 0.9**step) / (np.sqrt(s / (1 - 0.999**step)) + 1e-8) + DECAY * w)
    names = ("first", "first_bias", "second", "second_bias", "dense", "dense_bias")
    return dict(zip(names, weights, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--validate", action="store_true", help="try the settings on a fifth of the training images")
    validate = parser.parse_args().validate
    digits = load_digits()
    images, heldout, labels, answers = train_test_split(
        digits.images, digits.target, test_size=450, random_state=SEED, stratify=digits.target
    )
    if validate:
        images, heldout, labels, answers = train_test_split(
            images, labels, test_size=0.2, random_state=1, stratify=labels
        )
    weights = {name: w.astype(np.float16) for name, w in train((images / WHITE).astype(np.float32), labels).items()}
    model = Digits()
    model.use(weights)
    results = model.predict(list((heldout / WHITE).astype(np.float32)))
    found = np.array([result.argmax() for result in results])
    print(f"{'validation' if validate else 'held-out'}: {np.mean(found == answers):.2%} of {len(answers)} right")
    if not validate:
        np.savez_compressed(DATA / "weights.npz", **weights)
        np.savez_compressed(DATA / "heldout.npz", images=heldout.astype(np.uint8), labels=answers.astype(np.uint8))


if __name__ == "__main__":
    main()
