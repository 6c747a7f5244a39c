"""The built-in handler `text_classifier`, and the base class of text handlers."""

import functools
import os
import re
import string
import unicodedata
from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.runtimes import torch as torch_files
from penstock.torchserve.ts.base_handler import BaseHandler, captum, target_class
from penstock.torchserve.ts.util import (
    CLEANUP_REGEX,
    CONTRACTION_MAP,
    get_tokenizer,
    map_class_to_label,
    ngrams_iterator,
)

_CONTRACTIONS = re.compile("|".join(map(re.escape, CONTRACTION_MAP)), re.IGNORECASE)
UNKNOWN = "<unk>"


class TextHandler(BaseHandler, ABC):
    """Base of text handlers. `source_vocab` maps words to numbers; `tokenizer` splits a text into words."""

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: Any = None
        self.tokenizer = get_tokenizer("basic_english")
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
        text = _CONTRACTIONS.sub(lambda found: found[0][0] + CONTRACTION_MAP[found[0].lower()][1:], text)
        return text.replace("'", "")

    def _remove_accented_characters(self, text: str) -> str:
        """The text in ASCII: letters without accents, other characters omitted."""
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()

    def _remove_html_tags(self, text: str) -> str:
        return CLEANUP_REGEX.sub("", text)

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
        numbers = [self.source_vocab[word] for word in ngrams_iterator(words, self.ngrams)]
        return torch.as_tensor(numbers, device=self.device), words

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        numbers, _ = data
        return super().inference(numbers, torch.as_tensor([0], device=self.device))

    def postprocess(self, data: Any) -> Any:
        """`data` are the model's scores, `[rows, classes]`."""
        return map_class_to_label(softmax(data).tolist(), self.mapping)

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
