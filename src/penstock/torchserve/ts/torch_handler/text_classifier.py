"""The built-in handler `text_classifier`. It takes batches of one."""

from __future__ import annotations

from typing import Any

import torch

from penstock.torchserve.ts.handler_utils.text_utils import ngrams_iterator
from penstock.torchserve.ts.torch_handler.explaining import captum, target_of
from penstock.torchserve.ts.torch_handler.text_handler import TextHandler, softmax
from penstock.torchserve.ts.utils.util import map_class_to_label


class TextClassifier(TextHandler):
    """The batch's first text to {label: probability}; the model takes `(words [n], offsets [1])`, as EmbeddingBag."""

    ngrams = 2

    def preprocess(self, data: Any) -> Any:
        """(numbers of the words and of their n-grams `[n]`, words) of the first request's text."""
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
        """[{"words": the text's words, "importances": what their numbers added to the score of class `target`}]."""
        numbers, words = text_preprocess
        reference = captum().TokenReferenceBase().generate_reference(numbers.shape[0], device=self.device).squeeze(0)
        attributions = self.lig.attribute(
            numbers,
            reference,
            additional_forward_args=torch.tensor([0], device=self.device),
            return_convergence_delta=False,
            target=target_of(target),
        )
        importances = self.summarize_attributions(attributions).tolist()
        return [{"importances": importances, "words": self.get_word_token(words)}]
