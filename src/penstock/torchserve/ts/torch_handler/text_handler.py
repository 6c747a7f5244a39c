"""What handlers of texts share: cleaning, words, and the vocabulary of the archive."""

from __future__ import annotations

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
from penstock.torchserve.ts.handler_utils.text_utils import get_tokenizer
from penstock.torchserve.ts.torch_handler.base_handler import BaseHandler
from penstock.torchserve.ts.torch_handler.contractions import CONTRACTION_MAP
from penstock.torchserve.ts.torch_handler.explaining import captum
from penstock.torchserve.ts.utils.util import CLEANUP_REGEX

_CONTRACTIONS = re.compile("|".join(map(re.escape, CONTRACTION_MAP)), re.IGNORECASE)
UNKNOWN = "<unk>"


class TextHandler(BaseHandler, ABC):
    """`source_vocab` gives the number of a word; `tokenizer` the words of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: Any = None
        self.tokenizer = get_tokenizer("basic_english")
        self.input_text: Any = None

    def initialize(self, context: Any) -> None:
        """As of BaseHandler; and the vocabulary is loaded. Raises Exception when the archive has none."""
        super().initialize(context)
        self.initialized = False
        path = self.manifest["model"].get("sourceVocab") or self.get_source_vocab_path(context)
        self.source_vocab = _vocabulary(
            torch_files.load_pickled(path, trust=self.model_yaml_config.get("trust", "none"))
        )
        self.initialized = True

    @functools.cached_property
    def lig(self) -> Any:
        """Captum's LayerIntegratedGradients of the embedding, made by the first request for an explanation."""
        return captum().LayerIntegratedGradients(self.model, self.model.embedding)

    def get_source_vocab_path(self, ctx: Any) -> str:
        """Where source_vocab.pt of the archive is. Raises Exception."""
        path = os.path.join(ctx.system_properties.get("model_dir"), "source_vocab.pt")
        if not os.path.isfile(path):
            raise Exception("Missing the source_vocab file: add source_vocab.pt to the archive (--extra-files)")
        return path

    def _expand_contractions(self, text: str) -> str:
        """The text without contractions and apostrophes; a contraction keeps its first character."""
        text = _CONTRACTIONS.sub(lambda found: found[0][0] + CONTRACTION_MAP[found[0].lower()][1:], text)
        return text.replace("'", "")

    def _remove_accented_characters(self, text: str) -> str:
        """The text in ASCII: letters without their accents, what has none left out."""
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()

    def _remove_html_tags(self, text: str) -> str:
        """The text without tags and entities of HTML."""
        return CLEANUP_REGEX.sub("", text)

    def _remove_punctuation(self, text: str) -> str:
        return text.translate(str.maketrans("", "", string.punctuation))

    def _remove_puncutation(self, *args: Any, **kwargs: Any) -> str:
        """`_remove_punctuation`, as it was spelt once."""
        return self._remove_punctuation(*args, **kwargs)

    def _tokenize(self, text: str) -> list[str]:
        return self.tokenizer(text)

    def get_word_token(self, input_tokens: Sequence[str]) -> list[str]:
        """The tokens without the sign that byte-pair encodings have for a blank."""
        return [token.replace("Ġ", "") for token in input_tokens]

    def summarize_attributions(self, attributions: Any) -> Any:
        """Attributions `[tokens, n]` as parts of one for each token, divided by the norm of the tokens' sums."""
        attributions = softmax(attributions)
        return attributions / torch.linalg.norm(attributions.sum(dim=-1))


class _Vocabulary(dict[str, int]):
    """Numbers of words, and one for every word that is not there."""

    def __missing__(self, word: str) -> int:
        return self[UNKNOWN]


def _vocabulary(found: Any) -> Any:
    """A vocabulary of {word: number}, or a list of words, with `<unk>` for the others; anything else as it is."""
    if isinstance(found, (list, tuple)):
        found = {word: number for number, word in enumerate(found)}
    return _Vocabulary(found) if isinstance(found, Mapping) and UNKNOWN in found else found


def softmax(values: Any) -> Any:
    """Softmax over the last axis of `[rows, n]`, the first of a tensor of one or three axes."""
    return torch.softmax(values, dim=0 if values.dim() in (0, 1, 3) else 1)
