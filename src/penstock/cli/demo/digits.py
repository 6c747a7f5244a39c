"""The demo model: recognises the handwritten digit in an 8x8 image. Trained by `examples/digits/train.py`.

The network has two convolutions and a dense layer. A convolution is a matrix product whose matrix repeats a few
weights. `unroll` writes out that matrix once, at load, and a forward pass becomes three matrix products over the whole
batch. Reading the matrices costs the same for one image as for sixty-four: that is why batching pays.
"""

import os
from importlib import resources, util
from typing import Any

import numpy as np
from numpy.typing import NDArray

import penstock
from penstock.plugins import optional_module
from penstock.types import TensorSpec

Array = NDArray[np.float32]

SIDE = 8
WHITE = 16.0  # brightest pixel in the data set; 255 in a PNG
FIRST = (SIDE, 1, 24)  # image side, input and output channels of a 3x3 convolution without padding
SECOND = (SIDE - 2, 24, 48)
MAX_PIXELS = 2**24  # OpenCV refuses larger images, which a small body could expand to


Indices = NDArray[np.intp]


def taps(side: int, inputs: int, outputs: int) -> tuple[Indices, Indices, Indices]:
    """The positions of a 3x3 kernel's weights in the unrolled matrix: (row, column, weight), one entry per use."""
    places = side - 2
    y, x, dy, dx, i, o = np.meshgrid(*map(np.arange, (places, places, 3, 3, inputs, outputs)), indexing="ij")
    row = ((y + dy) * side + x + dx) * inputs + i
    column = (y * places + x) * outputs + o
    weight = ((dy * 3 + dx) * inputs + i) * outputs + o
    return row.ravel(), column.ravel(), weight.ravel()


def unroll(kernel: Array, side: int, inputs: int, outputs: int) -> Array:
    """`[side * side * inputs, (side - 2) ** 2 * outputs]`: the convolution by `kernel [9 * inputs, outputs]`."""
    row, column, weight = taps(side, inputs, outputs)
    matrix = np.zeros((side**2 * inputs, (side - 2) ** 2 * outputs), np.float32)
    matrix[row, column] = kernel.ravel()[weight]
    return matrix


def relu(values: Array) -> Array:
    """`values` with negative entries set to 0 in place."""
    return np.maximum(values, 0, out=values)


def data(name: str) -> dict[str, NDArray[Any]]:
    """The arrays of a data file: "weights.npz", or "heldout.npz" with `images [n, 8, 8]` and `labels [n]`."""
    with resources.files("penstock.cli.demo").joinpath("data", name).open("rb") as file, np.load(file) as arrays:
        return dict(arrays)


@penstock.model(max_batch_size=64)
class Digits:
    """Takes a PNG or JPEG, a JSON 8x8 list of 0 to 16, or Open Inference "image"; returns digit and probability."""

    inputs = (TensorSpec("image", "FP32", (-1, SIDE, SIDE)),)
    outputs = (TensorSpec("digit", "INT64", (-1,)), TensorSpec("probability", "FP32", (-1, 10)))

    def load(self, device: str) -> None:
        """Reads the weights that the package ships. The model always runs on the CPU."""
        self.use(data("weights.npz"))

    def use(self, weights: dict[str, NDArray[Any]]) -> None:
        """Sets `weights`, stored as float16, and unrolls the convolutions."""
        weights = {name: array.astype(np.float32) for name, array in weights.items()}
        self.first = unroll(weights["first"], *FIRST)
        self.first_bias = np.tile(weights["first_bias"], self.first.shape[1] // FIRST[2])
        self.second = unroll(weights["second"], *SECOND)
        self.second_bias = np.tile(weights["second_bias"], self.second.shape[1] // SECOND[2])
        self.dense, self.dense_bias = weights["dense"], weights["dense_bias"]

    def preprocess(self, item: Any) -> Array:
        """Pixels from 0 to 1: `[8, 8]`, or `[rows, 8, 8]` for an Open Inference request. Raises BadRequest."""
        if isinstance(item, (bytes, bytearray, memoryview)):
            return decode(item)
        pixels = item.get("image") if isinstance(item, dict) else item if isinstance(item, list) else None
        if pixels is None:
            raise penstock.BadRequest(f"found {_named(item)}; expected a PNG or JPEG, or a JSON 8x8 list of 0 to 16")
        try:
            image = np.asarray(pixels, np.float32)
        except (TypeError, ValueError):
            raise penstock.BadRequest("found a list that is not 8x8 numbers; expected 8 lists of 8 numbers") from None
        shape = (SIDE, SIDE) if isinstance(item, list) else (len(image) if image.ndim else 0, SIDE, SIDE)
        if image.shape != shape:
            want = "[8, 8]" if isinstance(item, list) else "[rows, 8, 8]"
            raise penstock.BadRequest(f"found numbers of shape {list(image.shape)}, expected {want}")
        if not ((image >= 0) & (image <= WHITE)).all():  # false for NaN too
            raise penstock.BadRequest(f"found pixels from {image.min():g} to {image.max():g}, expected 0 to 16")
        return image / np.float32(WHITE)

    def predict(self, items: list[Array]) -> list[Array]:
        """The probabilities of the ten digits: `[10]` for an item `[8, 8]`, `[rows, 10]` for `[rows, 8, 8]`."""
        rows = [item.size // SIDE**2 for item in items]
        batch = np.concatenate([item.reshape(-1, SIDE**2) for item in items])
        hidden = relu(relu(batch @ self.first + self.first_bias) @ self.second + self.second_bias)
        scores = hidden @ self.dense + self.dense_bias
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        parts = np.split(scores, np.cumsum(rows)[:-1])
        return [part[0] if item.ndim == 2 else part for item, part in zip(items, parts, strict=True)]

    def postprocess(self, result: Array) -> dict[str, Any]:
        """`{"digit": 7, "probability": 0.99}`, or two arrays for an Open Inference request."""
        if result.ndim == 1:
            digit = int(result.argmax())
            return {"digit": digit, "probability": round(float(result[digit]), 4)}
        return {"digit": result.argmax(axis=1).astype(np.int64), "probability": result}

    def warmup(self) -> list[Any]:
        """One held-out image as decoded JSON."""
        return [data("heldout.npz")["images"][0].tolist()]


def decode(body: bytes | bytearray | memoryview) -> Array:
    """`[8, 8]`, from 0 to 1, of a PNG or JPEG, white on black; scales other sizes. Raises BadRequest."""
    cv2 = opencv()
    start = bytes(body[:8])
    if not start.startswith((b"\x89PNG", b"\xff\xd8\xff")):
        raise penstock.BadRequest(f"found {len(body)} bytes that begin with {start!r}, expected a PNG or JPEG")
    try:
        image = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_GRAYSCALE)
    except cv2.error:
        image = None
    if image is None:
        raise penstock.BadRequest(
            f"found a PNG or JPEG of {len(body)} bytes that is broken or above {MAX_PIXELS} pixels"
        )
    if image.shape != (SIDE, SIDE):
        image = cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    pixels: Array = image.astype(np.float32) / np.float32(255)
    return pixels


def encode(image: NDArray[Any]) -> bytes:
    """A PNG of the image `[8, 8]` with values from 0 to 16."""
    cv2 = opencv()
    _, png = cv2.imencode(".png", np.rint(image * (255 / WHITE)).astype(np.uint8))
    encoded: bytes = png.tobytes()
    return encoded


def has_opencv() -> bool:
    """Whether PNG and JPEG can be decoded here."""
    return util.find_spec("cv2") is not None


def opencv() -> Any:
    """The module cv2. If it is not installed, raises PenstockError that names the extra."""
    os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))
    need = "images need OpenCV, which is not installed; JSON input works without it"
    return optional_module("cv2", need, "image", penstock.PenstockError)


def _named(item: Any) -> str:
    return f"a table with the keys {sorted(item)}" if isinstance(item, dict) else f"a {type(item).__name__}"
