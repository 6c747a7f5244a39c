"""The built-in handlers of images and texts, and their base classes.

The steps from an image to a tensor are torchvision's transforms, or the same arithmetic if torchvision is not
installed.
"""

import base64
import functools
import importlib
import logging
import os
import re
import string
import unicodedata
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from penstock.errors import describe
from penstock.images import flat, opened
from penstock.runtimes import torch_files
from penstock.torchserve.ts import util
from penstock.torchserve.ts.base_handler import BaseHandler, captum, target_class

log = logging.getLogger("penstock.model")

MEAN: Final = (0.485, 0.456, 0.406)  # of ImageNet's training images, red, green, blue
STD: Final = (0.229, 0.224, 0.225)
_MEAN, _STD = (torch.tensor(values).reshape(-1, 1, 1) for values in (MEAN, STD))


def resized(image: Any, size: int) -> Any:
    """A PIL image whose shorter side has `size` pixels; the other is rounded down. Bilinear with antialiasing."""
    from PIL.Image import Resampling

    width, height = image.size
    shape = (size, int(size * height / width)) if width <= height else (int(size * width / height), size)
    return image if shape == image.size else image.resize(shape, Resampling.BILINEAR)


def centre_of(image: Any, size: int) -> Any:
    """The middle `size` x `size` pixels of a PIL image of at least this size. Halves round to even."""
    left, top = (round((side - size) / 2) for side in image.size)
    return image.crop((left, top, left + size, top + size))


def to_tensor(image: Any) -> torch.Tensor:
    """An RGB image as float32 `[3, height, width]` from 0 to 1."""
    pixels = np.array(image, dtype=np.uint8)
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous().to(torch.float32).div(255)


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    """`(x - MEAN) / STD` for each channel of a float32 `[3, height, width]`."""
    return (pixels - _MEAN) / _STD


def _torchvision() -> Any:
    """torchvision's transforms; None if they cannot be used."""
    try:
        return importlib.import_module("torchvision.transforms")
    except ImportError:
        pass
    except RuntimeError as e:  # built for another torch
        log.warning("torchvision_unusable error=%s: images are prepared without it", describe(e))
    return None


def image_pipeline() -> Callable[[Any], torch.Tensor]:
    """The transform that networks trained on ImageNet expect, to float32 `[3, 224, 224]`."""
    if (steps := _torchvision()) is None:
        return lambda image: normalized(to_tensor(centre_of(resized(flat(image), 256), 224)))
    scaled = [flat, steps.Resize(256), steps.CenterCrop(224), steps.ToTensor(), steps.Normalize(mean=MEAN, std=STD)]
    pipeline: Callable[[Any], torch.Tensor] = steps.Compose(scaled)
    return pipeline


def to_tensor_only() -> Callable[[Any], torch.Tensor]:
    """The transform of the whole image to float32 `[3, height, width]` from 0 to 1."""
    if (steps := _torchvision()) is None:
        return lambda image: to_tensor(flat(image))
    pipeline: Callable[[Any], torch.Tensor] = steps.Compose([flat, steps.ToTensor()])
    return pipeline


class VisionHandler(BaseHandler, ABC):
    """Base of image handlers. A subclass sets `image_processing`, which turns a PIL image into a tensor.

    The image is upright, and its mode is L, LA, RGB or RGBA.
    """

    image_processing: Any

    def initialize(self, context: Any) -> None:
        """Loads the model. PIL refuses images of too many pixels, unless limit_max_image_pixels is false."""
        super().initialize(context)
        if not context.system_properties.get("limit_max_image_pixels"):
            util.require("PIL.Image", "images need Pillow: pip install pillow").MAX_IMAGE_PIXELS = None

    @functools.cached_property
    def ig(self) -> Any:
        """Captum's IntegratedGradients of the model, created by the first request for an explanation."""
        return captum().IntegratedGradients(self.model)

    @util.timed
    def preprocess(self, data: Any) -> Any:
        """The images of the batch as one tensor on the device.

        A request's field "data" or body is an image file, as bytes or in base64, or nested numbers.
        """
        images = []
        for row in data:
            image = row.get("data") or row.get("body")
            if isinstance(image, str):
                image = base64.b64decode(image)
            if isinstance(image, (bytes, bytearray)):
                images.append(self.image_processing(opened(bytes(image))))
            else:
                images.append(torch.FloatTensor(image))
        return torch.stack(images).to(self.device)

    def get_insights(self, tensor_data: Any, _: Any, target: Any = 0) -> Any:
        """The contribution of each input number to the score of class `target`, in the shape of the input."""
        return self.ig.attribute(tensor_data, target=target_class(target), n_steps=15).tolist()


class ImageClassifier(VisionHandler):
    """{label: probability} of each image's `topk` most probable classes."""

    topk = 5
    image_processing = staticmethod(image_pipeline())

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    @util.timed
    def postprocess(self, data: Any) -> Any:
        """`data` are the model's scores, `[rows, classes]`."""
        probabilities, classes = torch.topk(torch.softmax(data, dim=1), self.topk, dim=1)
        return util.map_class_to_label(probabilities.tolist(), self.mapping, classes.tolist())


class ImageSegmenter(VisionHandler):
    """The class of each pixel and its probability, `[height][width][class, probability]`."""

    image_processing = staticmethod(image_pipeline())

    def postprocess(self, data: Any) -> Any:
        """`data["out"]` are the model's scores, `[rows, classes, height, width]`."""
        best = torch.max(torch.softmax(data["out"], dim=1), dim=1)
        return torch.stack([best.indices.to(best.values.dtype), best.values], dim=3).tolist()


class ObjectDetector(VisionHandler):
    """{label: [x1, y1, x2, y2], "score": s} for each object in an image that scores at least `threshold`."""

    image_processing = staticmethod(to_tensor_only())
    threshold = 0.5

    def postprocess(self, data: Any) -> Any:
        """`data` holds one dict per image: `boxes` `[n, 4]`, `labels` `[n]` and `scores` `[n]`."""
        return [self._objects(found) for found in data]

    def _objects(self, found: Any) -> list[dict[str, Any]]:
        kept = found["scores"] >= self.threshold
        boxes, labels, scores = (found[key][kept].tolist() for key in ("boxes", "labels", "scores"))
        return [
            util.map_class_to_label([[box]], self.mapping, [[label]])[0] | {"score": score}
            for box, label, score in zip(boxes, labels, scores, strict=True)
        ]


# ---- texts

_CONTRACTIONS = re.compile("|".join(map(re.escape, util.CONTRACTION_MAP)), re.IGNORECASE)
UNKNOWN = "<unk>"


class TextHandler(BaseHandler, ABC):
    """Base of text handlers. `source_vocab` maps words to numbers; `tokenizer` splits a text into words."""

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: Any = None
        self.tokenizer = util.get_tokenizer("basic_english")
        self.input_text: Any = None

    def initialize(self, context: Any) -> None:
        """Loads the model and the vocabulary. Raises Exception if the archive has no vocabulary."""
        super().initialize(context)
        self.initialized = False
        path = self.manifest["model"].get("sourceVocab") or self.get_source_vocab_path(context)
        self.source_vocab = _vocabulary(
            torch_files.load_pickled(path, trust=self.model_yaml_config.get("trust", "none"))
        )
        self.initialized = True

    @functools.cached_property
    def lig(self) -> Any:
        """Captum's LayerIntegratedGradients of the embedding, created by the first request for an explanation."""
        return captum().LayerIntegratedGradients(self.model, self.model.embedding)

    def get_source_vocab_path(self, ctx: Any) -> str:
        """The path of the archive's source_vocab.pt. Raises Exception."""
        path = os.path.join(ctx.system_properties.get("model_dir"), "source_vocab.pt")
        if not os.path.isfile(path):
            raise Exception("Missing the source_vocab file: add source_vocab.pt to the archive (--extra-files)")
        return path

    def _expand_contractions(self, text: str) -> str:
        """The text without contractions and apostrophes; a contraction keeps its first character."""
        text = _CONTRACTIONS.sub(lambda found: found[0][0] + util.CONTRACTION_MAP[found[0].lower()][1:], text)
        return text.replace("'", "")

    def _remove_accented_characters(self, text: str) -> str:
        """The text in ASCII: letters without accents, other characters omitted."""
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()

    def _remove_html_tags(self, text: str) -> str:
        return util.CLEANUP_REGEX.sub("", text)

    def _remove_punctuation(self, text: str) -> str:
        return text.translate(str.maketrans("", "", string.punctuation))

    def _remove_puncutation(self, *args: Any, **kwargs: Any) -> str:
        """`_remove_punctuation` under TorchServe's former, misspelled name."""
        return self._remove_punctuation(*args, **kwargs)

    def _tokenize(self, text: str) -> list[str]:
        return self.tokenizer(text)

    def get_word_token(self, input_tokens: Sequence[str]) -> list[str]:
        """The tokens without the character that byte-pair encodings use for a space."""
        return [token.replace("Ġ", "") for token in input_tokens]

    def summarize_attributions(self, attributions: Any) -> Any:
        """The softmax of attributions `[tokens, n]`, divided by the norm of the tokens' sums."""
        attributions = softmax(attributions)
        return attributions / torch.linalg.norm(attributions.sum(dim=-1))


class TextClassifier(TextHandler):
    """{label: probability} for the batch's first text: it needs a batch size of 1.

    The model takes `(words [n], offsets [1])`, like EmbeddingBag.
    """

    ngrams = 2

    def preprocess(self, data: Any) -> Any:
        """(numbers of the words and their n-grams `[n]`, words) of the first request's text."""
        text = data[0].get("data") or data[0].get("body")
        if isinstance(text, (bytes, bytearray)):
            text = text.decode("utf-8")
        text = self._expand_contractions(self._remove_html_tags(text).lower())
        words = self._tokenize(self._remove_punctuation(self._remove_accented_characters(text)))
        numbers = [self.source_vocab[word] for word in util.ngrams_iterator(words, self.ngrams)]
        return torch.as_tensor(numbers, device=self.device), words

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        numbers, _ = data
        return super().inference(numbers, torch.as_tensor([0], device=self.device))

    def postprocess(self, data: Any) -> Any:
        """`data` are the model's scores, `[rows, classes]`."""
        return util.map_class_to_label(softmax(data).tolist(), self.mapping)

    def get_insights(self, text_preprocess: Any, _: Any, target: Any = 0) -> Any:
        """[{"words": the text's words, "importances": their contribution to the score of class `target`}]."""
        numbers, words = text_preprocess
        reference = captum().TokenReferenceBase().generate_reference(numbers.shape[0], device=self.device).squeeze(0)
        attributions = self.lig.attribute(
            numbers,
            reference,
            additional_forward_args=torch.tensor([0], device=self.device),
            return_convergence_delta=False,
            target=target_class(target),
        )
        importances = self.summarize_attributions(attributions).tolist()
        return [{"importances": importances, "words": self.get_word_token(words)}]


class _Vocabulary(dict[str, int]):
    """Numbers of words; unknown words share one."""

    def __missing__(self, word: str) -> int:
        return self[UNKNOWN]


def _vocabulary(found: Any) -> Any:
    """The vocabulary from {word: number} or a list of words, with `<unk>` for unknown words; other types unchanged."""
    if isinstance(found, (list, tuple)):
        found = {word: number for number, word in enumerate(found)}
    return _Vocabulary(found) if isinstance(found, Mapping) and UNKNOWN in found else found


def softmax(values: Any) -> Any:
    """Softmax over the last axis of `[rows, n]`, over the first axis of a tensor of one or three dimensions."""
    return torch.softmax(values, dim=0 if values.dim() in (0, 1, 3) else 1)
