"""The BERT infilling model of all servers in this folder.

The first model imports torch and transformers, this module does not: a web server that passes its requests to worker
processes needs neither.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock import BadRequest, ManagedModel

SMALL = str(Path(__file__).parent / "weights")  # written by train.py
MASK = "[MASK]"


class TextInfillingModel:
    """A masked language model: `SMALL`, or the name or folder of any BERT for transformers."""

    def __init__(self, model: str = SMALL) -> None:
        # Set before torch is loaded. One thread by default: a web server in the same process needs the other cores.
        # Worker processes set their own number.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import torch
        from transformers import BertForMaskedLM, BertTokenizer

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = BertTokenizer.from_pretrained(model)
        self.bert = BertForMaskedLM.from_pretrained(model).float().eval().to(self.device)
        self.longest = self.bert.config.max_position_embeddings

    def predict(self, texts: list[str]) -> list[str | BadRequest]:
        """The word for each text's `[MASK]` (several are joined by spaces), or the text's error."""
        answers: list[Any] = [self._encode(text) for text in texts]
        good = [i for i, ids in enumerate(answers) if not isinstance(ids, BadRequest)]
        for i, words in zip(good, self._fill([answers[i] for i in good]), strict=True):
            answers[i] = words
        return answers

    def _encode(self, text: str) -> list[int] | BadRequest:
        # No padding or truncation: the tokenizer would store them as state, and threads share it.
        ids: list[int] = self.tokenizer(text)["input_ids"]
        if self.tokenizer.mask_token_id not in ids:
            return BadRequest(f"the text has no {MASK}; write {MASK} in the place of the word to be filled in")
        if len(ids) > self.longest:
            return BadRequest(f"the text has {len(ids)} tokens, the model takes {self.longest} at most")
        return ids

    def _fill(self, encoded: list[list[int]]) -> list[str]:
        """The words for the masks in each list of tokens."""
        import torch

        if not encoded:
            return []
        width = max(map(len, encoded))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in encoded])
        masked = ids == self.tokenizer.mask_token_id
        owners = masked.nonzero()[:, 0].tolist()
        ids = ids.to(self.device)
        with torch.inference_mode():
            hidden = self.bert.bert(ids, attention_mask=ids != pad).last_hidden_state
            scores = self.bert.cls(hidden[masked.to(self.device)])  # masks only: this matrix is most of the work
        tokens = self.tokenizer.convert_ids_to_tokens(scores.argmax(dim=-1).tolist())
        words: list[list[str]] = [[] for _ in encoded]
        for owner, token in zip(owners, tokens, strict=True):
            words[owner].append(token)
        return [" ".join(found) for found in words]


class ManagedBertModel(ManagedModel):
    """The same model in a worker process of its own."""

    def init_model(self, model: str = SMALL) -> None:
        self.model = TextInfillingModel(model)

    def predict(self, batch: list[str]) -> list[str | BadRequest]:
        return self.model.predict(batch)
