"""A model that captions images: `transformers`' BLIP-2, BLIP and VisionEncoderDecoder behind requests of frames.

A class of one's own names the weights: see `examples/video_captioning/app.py`. Requests of any sizes become one device
batch, and are taken apart again. The thread that receives a batch gathers, copies, resizes and normalises its pixels
while the one before it is captioned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from msgspec import Struct

from penstock.bulk.captioner.requests import MOST_ROWS, Request, read_request
from penstock.config.schema import PRECISIONS
from penstock.core.wire.messages import Unsent
from penstock.errors import ConfigError, PenstockError, not_installed
from penstock.types import TensorSpec

if TYPE_CHECKING:
    from penstock.bulk.captioner.feed import Fed, Feed
    from penstock.bulk.captioner.networks import Network

_OPTIMIZATIONS: Final = ("none", "compile")


class Captioned(Struct):
    """What the network wrote for the rows of a request, not yet as text."""

    request: Request
    tokens: list[list[int]]


class Prepared(list[Any]):
    """A batch of requests; of those that could be read the pixels lie on the device, or will."""

    fed: Fed | None = None


class TransformersCaptioner:
    """Captions of frames. Open Inference: `frames` UINT8 `[rows, height, width, 3]` RGB or `jpeg` BYTES `[rows]`, and
    `frame_index` INT64 `[rows]`, which comes back; /predictions: one image file, answered with `{"caption": ...}`."""

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
        """`model` is a folder or a name at the Hugging Face Hub; `random_weights` needs no more of it than its
        config.json. Captions have `min_new_tokens` to `max_new_tokens` tokens. Raises ConfigError.
        """
        wanted = model or self.default_model
        if not wanted or not isinstance(wanted, str):
            raise ConfigError(f"option model: found {model!r}, expected a folder or a name at the Hugging Face Hub")
        for name, value, least in (("max_new_tokens", max_new_tokens, 1), ("min_new_tokens", min_new_tokens, 0)):
            if type(value) is not int or not least <= value <= 4096:
                raise ConfigError(f"option {name}: found {value!r}, expected a whole number from {least} to 4096")
        if min_new_tokens > max_new_tokens:
            raise ConfigError(f"option min_new_tokens: found {min_new_tokens}, more than max_new_tokens")
        if not isinstance(prompt, str):
            raise ConfigError(f"option prompt: found {prompt!r}, expected a text")
        self._model, self._prompt = wanted, prompt
        self._tokens = (min_new_tokens, max_new_tokens)
        self._random = bool(random_weights)
        self.parameters: dict[str, Any] = {}
        self._network: Network
        self._feed: Feed

    def load(
        self, device: str, precision: str = "fp32", optimize: str = "none", trust: str = "none", threads: int = 0
    ) -> None:
        """`threads`: of the network on a CPU; 0 leaves them as they are. Raises LoadFailed, ConfigError."""
        if precision not in PRECISIONS:
            raise ConfigError(f"precision: found '{precision}', expected one of {', '.join(PRECISIONS)}")
        if optimize not in _OPTIMIZATIONS:
            raise ConfigError(f"optimize: found '{optimize}', expected one of {', '.join(_OPTIMIZATIONS)}")
        try:
            from penstock.bulk.captioner.feed import Feed
            from penstock.bulk.captioner.files import Source, find, revision
            from penstock.bulk.captioner.networks import ARCHITECTURES, open_network
        except ImportError as e:
            raise not_installed("a captioner's library", "torch,transformers", e) from e
        bare = self._random and self._model in ARCHITECTURES
        source = Source(self._model) if bare else find(self._model, weights=not self._random, trust=trust)
        self._network = network = open_network(
            source,
            device,
            precision=precision,
            prompt=self._prompt,
            tokens=self._tokens,
            compiled=optimize == "compile",
            random_weights=self._random,
            trust=trust,
            threads=threads,
        )
        self._feed = Feed(network.looks, device, network.dtype)
        settings = self._told(precision)
        others = {"min_new_tokens": self._tokens[0], "random_weights": self._random}
        self.parameters = {"model": source.name, "revision": revision(source, settings | others), **settings}

    def _told(self, precision: str) -> dict[str, Any]:
        """What clients may know of the way in which the network is used."""
        looks = self._network.looks
        return {
            "task": "image-to-text",
            "height": looks.height,
            "width": looks.width,
            "layout": "NHWC",
            "kernel": looks.kernel,
            "prompt": self._prompt,
            "max_new_tokens": self._tokens[1],
            "precision": precision,
        }

    def warmup(self) -> list[Any]:
        """One frame of noise: few networks have nothing to say of it."""
        looks = self._network.looks
        return [np.random.default_rng(0).integers(0, 256, (looks.height, looks.width, 3), np.uint8)]

    def unload(self) -> None:
        """Lets the network go, and the memory of the device with it."""
        del self._network, self._feed

    # ---- a batch

    def __penstock_prepare__(self, values: list[Any]) -> list[Any]:
        """The batch with its pixels under way; what cannot be read is an error in its place. Called in the thread that
        receives, so what befalls the whole batch is left for `predict` to meet again."""
        prepared = Prepared(value if type(value) is Unsent else _request(value) for value in values)
        fits = sum(_rows(request) for request in prepared) <= MOST_ROWS
        if fits and all(isinstance(request, (Request, PenstockError)) for request in prepared):
            try:
                prepared.fed = self._feed(prepared)
            except Exception:
                prepared.fed = None
        return prepared

    def predict(self, values: Sequence[Any]) -> list[Any]:
        """Captioned, or an error, for each; part of a batch comes as a list of its requests."""
        requests = values if isinstance(values, Prepared) else [_request(value) for value in values]
        fed = getattr(requests, "fed", None)
        if fed is not None:
            return self._captioned(requests, fed)
        return [found for group in _groups(requests) for found in self._captioned(group, self._feed(group))]

    def _captioned(self, requests: list[Any], fed: Fed) -> list[Any]:
        tokens = self._network.tokens(fed.take()) if fed.rows else []
        found: list[Any] = []
        start = 0
        for request, error in zip(requests, fed.errors, strict=True):
            if error is not None:
                found.append(error)
                continue
            found.append(Captioned(request, tokens[start : start + request.rows]))
            start += request.rows
        return found

    def postprocess(self, captioned: Captioned) -> dict[str, Any]:
        """The answer to a request: tensors by their names, or the caption of a single image."""
        request = captioned.request
        texts = self._network.texts(captioned.tokens)
        if request.single:
            return {"caption": texts[0]}
        answer: dict[str, Any] = {"caption": np.array(texts, object)}
        if request.frame_index is not None:
            answer["frame_index"] = request.frame_index
        return answer


def _groups(requests: list[Any]) -> Iterator[list[Any]]:
    """Neighbours of together no more rows than run at once: a body may hold more than its batch was made for."""
    group: list[Any] = []
    for request in requests:
        if sum(map(_rows, group)) + _rows(request) > MOST_ROWS:
            yield group
            group = []
        group.append(request)
    yield group


def _rows(request: Any) -> int:
    return request.rows if isinstance(request, Request) else 0


def _request(value: Any) -> Request | PenstockError:
    """The request, or why it is none."""
    if isinstance(value, (Request, PenstockError)):
        return value
    try:
        return read_request(value)
    except PenstockError as e:
        return e
