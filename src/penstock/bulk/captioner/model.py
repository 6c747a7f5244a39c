"""A model that captions images: BLIP-2, BLIP and VisionEncoderDecoder of `transformers`.

A subclass names the weights: see `examples/video_captioning/app.py`. Requests of any size form one device batch and
are separated again. The receiving thread gathers, copies, resizes and normalises the pixels of a batch while the
previous one is captioned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import numpy as np
from msgspec import Meta, Struct

from penstock.bulk.captioner.requests import MAX_ROWS, CaptionRequest, read_request
from penstock.config.schema import PRECISIONS
from penstock.core.wire.messages import Unsent
from penstock.errors import ConfigError, PenstockError, not_installed
from penstock.types import TensorSpec
from penstock.values import convert

if TYPE_CHECKING:
    from penstock.bulk.captioner.feed import DeviceBatch, DeviceFeed
    from penstock.bulk.captioner.networks import Network

_OPTIMIZATIONS: Final = ("none", "compile")


class CaptionTokens(Struct):
    """The tokens that the network wrote for the rows of a request."""

    request: CaptionRequest
    tokens: list[list[int]]


class PreparedBatch(list[Any]):
    """A batch of requests or errors; `on_device` holds their pixels unless preparing them failed."""

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
    ) -> None:
        """`model` is a folder or a name on the Hugging Face Hub; `random_weights` needs only its config.json.

        Captions have `min_new_tokens` to `max_new_tokens` tokens. Raises ConfigError.
        """
        name = model or self.default_model
        if not name or not isinstance(name, str):
            raise ConfigError(f"option model: found {model!r}, expected a folder or a name at the Hugging Face Hub")
        for option, value, least in (("max_new_tokens", max_new_tokens, 1), ("min_new_tokens", min_new_tokens, 0)):
            convert(value, Annotated[int, Meta(ge=least, le=4096)], f"option {option}")
        if min_new_tokens > max_new_tokens:
            raise ConfigError(f"option min_new_tokens: found {min_new_tokens}, more than max_new_tokens")
        convert(prompt, str, "option prompt")
        self._model, self._prompt = name, prompt
        self._tokens = (min_new_tokens, max_new_tokens)
        self._random = bool(random_weights)
        self.parameters: dict[str, Any] = {}
        self._network: Network
        self._feed: DeviceFeed

    def load(
        self, device: str, precision: str = "fp32", optimize: str = "none", trust: str = "none", threads: int = 0
    ) -> None:
        """`threads` are the network's on a CPU; 0 keeps the default. Raises LoadFailed, ConfigError."""
        convert(precision, Literal[PRECISIONS], "precision")
        convert(optimize, Literal[_OPTIMIZATIONS], "optimize")
        try:
            from penstock.bulk.captioner.feed import DeviceFeed
            from penstock.bulk.captioner.networks import (
                ARCHITECTURES,
                ModelSource,
                NetworkOptions,
                find,
                open_network,
                revision,
            )
        except ImportError as e:
            raise not_installed("a captioner's library", "torch,transformers", e) from e
        bare = self._random and self._model in ARCHITECTURES
        source = ModelSource(self._model) if bare else find(self._model, weights=not self._random, trust=trust)
        options = NetworkOptions(
            precision=precision,
            prompt=self._prompt,
            tokens=self._tokens,
            compiled=optimize == "compile",
            random_weights=self._random,
            trust=trust,
            threads=threads,
        )
        self._network = network = open_network(source, device, options)
        self._feed = DeviceFeed(network.spec, device, network.dtype)
        settings = self._settings(precision)
        others = {"min_new_tokens": self._tokens[0], "random_weights": self._random}
        self.parameters = {"model": source.name, "revision": revision(source, settings | others), **settings}

    def _settings(self, precision: str) -> dict[str, Any]:
        """The settings that clients see."""
        spec = self._network.spec
        return {
            "task": "image-to-text",
            "height": spec.height,
            "width": spec.width,
            "layout": "NHWC",
            "kernel": spec.kernel,
            "prompt": self._prompt,
            "max_new_tokens": self._tokens[1],
            "precision": precision,
        }

    def warmup(self) -> list[Any]:
        """One frame of noise, for which few networks write an empty caption."""
        spec = self._network.spec
        return [np.random.default_rng(0).integers(0, 256, (spec.height, spec.width, 3), np.uint8)]

    def unload(self) -> None:
        """Frees the network and its device memory."""
        del self._network, self._feed

    # ---- a batch

    def __penstock_prepare__(self, values: list[Any]) -> list[Any]:
        """The batch with its pixels on the way to the device, and an error in place of an invalid request.

        Called in the receiving thread. `predict` repeats work that fails for the whole batch, and reports its error.
        """
        prepared = PreparedBatch(value if type(value) is Unsent else _request(value) for value in values)
        fits = sum(_rows(request) for request in prepared) <= MAX_ROWS
        if fits and all(isinstance(request, (CaptionRequest, PenstockError)) for request in prepared):
            try:
                prepared.on_device = self._feed(prepared)
            except Exception:
                prepared.on_device = None
        return prepared

    def predict(self, values: Sequence[Any]) -> list[Any]:
        """CaptionTokens or an error for each request; part of a prepared batch arrives as a plain list."""
        requests = values if isinstance(values, PreparedBatch) else [_request(value) for value in values]
        on_device = getattr(requests, "on_device", None)
        if on_device is not None:
            return self._caption(requests, on_device)
        return [result for group in _groups(requests) for result in self._caption(group, self._feed(group))]

    def _caption(self, requests: list[Any], batch: DeviceBatch) -> list[Any]:
        tokens = self._network.tokens(batch.take()) if batch.rows else []
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
        texts = self._network.texts(written.tokens)
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
