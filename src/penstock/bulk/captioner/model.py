"""A model that captions images: BLIP-2, BLIP, GIT, Florence-2, Qwen-VL, SmolVLM and others of `transformers`.

A subclass names the weights: see `examples/video_captioning/app.py`. Requests of any size form one device batch and
are separated again. The receiving thread gathers, copies, resizes and normalises the pixels of a batch while the
previous one is captioned.

A request holds raw frames, JPEGs, or one image file. Images are decoded one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import numpy as np
from msgspec import Meta, Struct

from penstock.config.schema import PRECISIONS
from penstock.errors import BadRequest, ConfigError, DecodeError, LoadFailed, PenstockError, nearest
from penstock.images import decode_image
from penstock.plugins import optional_module
from penstock.types import TensorSpec
from penstock.values import convert, shorten

if TYPE_CHECKING:
    from penstock.bulk.captioner.feed import DeviceBatch, DeviceFeed
    from penstock.bulk.captioner.networks import Network

_OPTIMIZATIONS: Final = ("none", "compile")


class CaptionTokens(Struct):
    """The tokens that the network wrote for the rows of a request."""

    request: CaptionRequest
    tokens: list[list[int]]


class CaptionBatch(list[Any]):
    """A batch of requests, or errors in place of invalid ones. `on_device` holds their pixels if they fit together."""

    on_device: DeviceBatch | None = None


class TransformersCaptioner:
    """Captions frames.

    Open Inference requests hold `frames` UINT8 `[rows, height, width, 3]` RGB or `jpeg` BYTES `[rows]`, and
    `frame_index` INT64 `[rows]`, which the response repeats. /predictions takes one image file and returns
    `{"caption": ...}`.
    """

    platform = "transformers"
    inputs = (
        TensorSpec("frames", "UINT8", (-1, -1, -1, 3), optional=True),
        TensorSpec("jpeg", "BYTES", (-1,), optional=True),
        TensorSpec("frame_index", "INT64", (-1,), optional=True),
    )
    outputs = (TensorSpec("caption", "BYTES", (-1,)), TensorSpec("frame_index", "INT64", (-1,)))
    default_model: ClassVar[str | None] = None
    __penstock_finishes_apart__ = True  # tokens become texts while the next batch is captioned

    def __init__(
        self,
        model: str | None = None,
        prompt: str = "",
        max_new_tokens: int = 30,
        min_new_tokens: int = 0,
        random_weights: bool = False,
        num_beams: int | None = None,
        temperature: float = 0.0,
        top_k: int = 50,
        seed: int = 0,
        height: int | None = None,
        width: int | None = None,
    ) -> None:
        """`model` is a folder or a name on the Hugging Face Hub; `random_weights` needs only its config.json.

        Captions have `min_new_tokens` to `max_new_tokens` tokens. `NetworkOptions` describes the other options.
        Raises ConfigError.
        """
        name = model or self.default_model
        if not name or not isinstance(name, str):
            raise ConfigError(f"option model: found {model!r}, expected a folder or a name at the Hugging Face Hub")
        for option, value, least in (("max_new_tokens", max_new_tokens, 1), ("min_new_tokens", min_new_tokens, 0)):
            convert(value, Annotated[int, Meta(ge=least, le=4096)], f"option {option}")
        if min_new_tokens > max_new_tokens:
            raise ConfigError(f"option min_new_tokens: found {min_new_tokens}, more than max_new_tokens")
        convert(prompt, str, "option prompt")
        convert(num_beams, Annotated[int, Meta(ge=1, le=64)] | None, "option num_beams")
        convert(temperature, Annotated[float, Meta(ge=0, le=100)], "option temperature")
        convert(top_k, Annotated[int, Meta(ge=1, le=1024)], "option top_k")
        convert(seed, Annotated[int, Meta(ge=0, lt=2**62)], "option seed")
        if temperature and (num_beams or 1) > 1:
            raise ConfigError("options temperature and num_beams exclude each other; give one")
        for option, side in (("height", height), ("width", width)):
            convert(side, Annotated[int, Meta(ge=1, le=4096)] | None, f"option {option}")
        if (height is None) != (width is None):
            raise ConfigError("options height and width need each other")
        self._choices: dict[str, Any] = {  # of those that differ from the defaults; the revision contains them
            key: value
            for key, value, default in (
                ("beams", num_beams, None), ("temperature", temperature, 0.0), ("top_k", top_k, 50), ("seed", seed, 0),
                ("size", height and width and (height, width), None),
            )
            if value != default
        }  # fmt: skip
        self._model, self._prompt = name, prompt
        self._tokens = (min_new_tokens, max_new_tokens)
        self._random = bool(random_weights)
        self.parameters: dict[str, Any] = {}
        self.network: Network  # once it is loaded, and the feed
        self.feed: DeviceFeed

    def load(
        self, device: str, precision: str = "fp32", optimize: str = "none", trust: str = "none", threads: int = 0
    ) -> None:
        """`threads` are the network's on a CPU; 0 keeps the default. Raises LoadFailed, ConfigError."""
        convert(precision, Literal[PRECISIONS], "precision")
        convert(optimize, Literal[_OPTIMIZATIONS], "optimize")
        for library in ("torch", "transformers"):
            optional_module(library, f"a captioner needs {library}, which cannot be imported", library, LoadFailed)
        from penstock.bulk.captioner import networks
        from penstock.bulk.captioner.feed import DeviceFeed

        name, random = self._model, self._random
        bare = random and name in networks.ARCHITECTURES
        source = networks.ModelSource(name) if bare else networks.find(name, weights=not random, trust=trust)
        options = networks.NetworkOptions(
            precision=precision,
            prompt=self._prompt,
            tokens=self._tokens,
            compiled=optimize == "compile",
            random_weights=self._random,
            trust=trust,
            threads=threads,
            **self._choices,
        )
        self.network = network = networks.open_network(source, device, options)
        self.feed = DeviceFeed(network.spec, device, network.dtype)
        settings = self._settings(precision)
        others = {"min_new_tokens": self._tokens[0], "random_weights": self._random} | self._choices
        self.parameters = {"model": source.name, "revision": networks.revision(source, settings | others), **settings}

    def _settings(self, precision: str) -> dict[str, Any]:
        """The settings that clients see."""
        spec = self.network.spec
        return {
            "task": "image-to-text",
            "height": spec.height,
            "width": spec.width,
            "layout": "NHWC",
            "kernel": spec.kernel,
            "prompt": self.network.instruction,
            "max_new_tokens": self._tokens[1],
            "precision": precision,
        }

    def warmup(self) -> list[Any]:
        """One frame of noise, for which few networks write an empty caption."""
        spec = self.network.spec
        return [np.random.default_rng(0).integers(0, 256, (spec.height, spec.width, 3), np.uint8)]

    def unload(self) -> None:
        """Frees the network and its device memory."""
        del self.network, self.feed

    # ---- a batch

    def collate(self, values: list[Any]) -> CaptionBatch:
        """The batch with its pixels on the way to the device. Raises errors of the device."""
        batch = CaptionBatch(map(_request, values))
        if sum(map(_rows, batch)) <= MAX_ROWS:
            batch.on_device = self.feed(batch)
        return batch

    def predict(self, batch: CaptionBatch) -> list[Any]:
        """CaptionTokens or an error for each request."""
        if batch.on_device is not None:
            return self._caption(batch, batch.on_device)
        return [result for group in _groups(batch) for result in self._caption(group, self.feed(group))]

    def _caption(self, requests: list[Any], batch: DeviceBatch) -> list[Any]:
        numbers = _numbers(requests, batch.errors)
        tokens = batch.through(lambda pixels: self.network.tokens(pixels, numbers)) if batch.rows else []
        results: list[Any] = []
        start = 0
        for request, error in zip(requests, batch.errors, strict=True):
            if error is not None:
                results.append(error)
                continue
            results.append(CaptionTokens(request, tokens[start : start + request.rows]))
            start += request.rows
        return results

    def postprocess(self, written: CaptionTokens) -> dict[str, Any]:
        """The response to a request: tensors by name, or the caption of a single image."""
        request = written.request
        texts = self.network.texts(written.tokens)
        if request.single:
            return {"caption": texts[0]}
        answer: dict[str, Any] = {"caption": np.array(texts, object)}
        if request.frame_index is not None:
            answer["frame_index"] = request.frame_index
        return answer


def _groups(requests: list[Any]) -> Iterator[list[Any]]:
    """Consecutive requests of at most `MAX_ROWS` rows together: a body may exceed the batch it was counted for."""
    group: list[Any] = []
    for request in requests:
        if sum(map(_rows, group)) + _rows(request) > MAX_ROWS:
            yield group
            group = []
        group.append(request)
    yield group


def _numbers(requests: list[Any], errors: list[PenstockError | None]) -> list[int]:
    """The number of each frame in its video, or else in its request."""
    numbers: list[int] = []
    for request, error in zip(requests, errors, strict=True):
        if error is None:
            index = request.frame_index
            numbers += range(request.rows) if index is None else (index & MAX_NUMBER).tolist()
    return numbers


def _rows(request: Any) -> int:
    return request.rows if isinstance(request, CaptionRequest) else 0


def _request(value: Any) -> CaptionRequest | PenstockError:
    """The request, or the error that it is invalid."""
    if isinstance(value, (CaptionRequest, PenstockError)):
        return value
    try:
        return read_request(value)
    except PenstockError as e:
        return e


# ---- requests

Array = np.ndarray[Any, Any]
Bytes = bytes | memoryview

MAX_NUMBER: Final = 2**63 - 1  # of a frame: a key of the noise is unsigned
MAX_ROWS: Final = 1024  # in one batch: the largest that a warm-up tries
_NAMES: Final = ("frames", "jpeg", "frame_index")
_JPEG: Final = b"\xff\xd8\xff"


class CaptionRequest(Struct, eq=False):
    """`rows` frames, either `frames` uint8 `[rows, height, width, 3]` RGB or as many `images`.

    `single` is one unnamed image, whose response is not a tensor. `frame_index` is int64 `[rows]`.
    """

    rows: int
    frames: Array | None = None
    images: list[Bytes] | None = None
    frame_index: Array | None = None
    single: bool = False

    def pieces(self) -> Iterator[Array]:
        """Consecutive rows of one size, uint8 `[n, height, width, 3]`. Raises BadRequest with the row."""
        if self.frames is not None:
            yield self.frames
        for row, image in enumerate(self.images or ()):
            try:
                pixels = decode_image(image)
            except DecodeError as e:
                where = "" if self.single else f"input 'jpeg': row {row}: "
                raise DecodeError(where + e.message, detail=e.detail) from None
            yield pixels[np.newaxis]


def read_request(value: Any) -> CaptionRequest:
    """The request in a value: a dict of named arrays, an image file, or an array of frames. Raises BadRequest."""
    request = _read(value)
    if request.rows > MAX_ROWS:
        raise BadRequest(
            f"found {request.rows} frames at once; expected {MAX_ROWS} at most, or binary tensors, which are split"
        )
    return request


def _read(value: Any) -> CaptionRequest:
    if isinstance(value, dict):
        return _read_named(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        if not len(value):
            raise BadRequest("the body is empty; expected an image file")
        return CaptionRequest(1, images=[value if isinstance(value, memoryview) else bytes(value)], single=True)
    if isinstance(value, np.ndarray) and value.ndim == 3:
        return _frames(value[np.newaxis], single=True)
    if isinstance(value, np.ndarray) and value.ndim:
        return _frames(value)
    raise BadRequest(
        f"found a {type(value).__name__}; expected the bytes of one image, or tensors by the Open Inference Protocol"
    )


def _read_named(value: dict[Any, Any]) -> CaptionRequest:
    for name in value:
        if name not in _NAMES:
            known = ", ".join(_NAMES)
            raise BadRequest(
                f"unknown input '{shorten(str(name), 100)}'{nearest(str(name)[:100], _NAMES)} (expected: {known})"
            )
    frames, jpeg, index = (value.get(name) for name in _NAMES)
    if (frames is None) == (jpeg is None):
        found = "none" if frames is None else "both"
        raise BadRequest(f"found {found} of the inputs 'frames' and 'jpeg'; expected one of them")
    request = _frames(frames) if frames is not None else _jpegs(jpeg)
    if index is not None:
        if not isinstance(index, np.ndarray) or index.dtype != np.int64 or index.shape != (request.rows,):
            raise BadRequest(f"input 'frame_index': {_describe(index)}; expected INT64 of shape [{request.rows}]")
        request.frame_index = index.copy()  # the response outlives the request body
    return request


def _frames(frames: Any, *, single: bool = False) -> CaptionRequest:
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise BadRequest(f"input 'frames': {_describe(frames)}; expected UINT8 of shape [rows, height, width, 3]")
    if 0 in frames.shape:
        raise BadRequest(f"input 'frames': shape {list(frames.shape)} holds no pixels")
    return CaptionRequest(len(frames), frames=frames, single=single)


def _jpegs(jpeg: Any) -> CaptionRequest:
    if not isinstance(jpeg, np.ndarray) or jpeg.ndim != 1 or not len(jpeg):
        raise BadRequest(f"input 'jpeg': {_describe(jpeg)}; expected BYTES of shape [rows]")
    images = jpeg.tolist()
    for row, image in enumerate(images):
        if not isinstance(image, (bytes, memoryview)) or bytes(image[:3]) != _JPEG:
            raise BadRequest(f"input 'jpeg': row {row} is not a JPEG file; send each file's bytes in a binary tensor")
    return CaptionRequest(len(images), images=images)


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"found {value.dtype} of shape {list(value.shape)}"
    return f"found a {type(value).__name__}"
