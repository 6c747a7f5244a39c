"""An embedding model for OpenAI's /v1/embeddings: hashed letters without weights, or an encoder of `transformers`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np

import penstock

DIMENSIONS = 512


class Hashed:
    """Counts the words of a text and their groups of three letters in buckets, which a hash selects.

    Texts with the same words, or words of the same stem, get similar vectors. The sign of each bucket comes from the
    hash too, so that collisions cancel out (Weinberger et al., "Feature Hashing for Large Scale Multitask Learning").
    """

    def encode(self, requests: Sequence[penstock.EmbeddingRequest]) -> list[Any]:
        return [self.vector(request) for request in requests]

    def vector(self, request: penstock.EmbeddingRequest) -> Any:
        if not isinstance(request.input, str):
            return penstock.BadRequest("parameter 'input' has tokens, expected a text: this model has no tokens")
        words = request.input.lower().split()
        features = Counter(words)
        for word in words:
            features.update(f" {word} "[at : at + 3] for at in range(len(word)))
        size = request.dimensions or DIMENSIONS
        vector = np.zeros(size, np.float32)
        for feature, count in features.items():
            found = crc32(feature.encode())
            vector[found % size] += (1 if found >> 31 else -1) * np.sqrt(count)
        return penstock.Embedding(vector / max(1e-9, float(np.linalg.norm(vector))), len(words))


class Encoder:
    """An encoder from a folder with its tokenizer: the mean of the last layer's states, of length 1."""

    def __init__(self, path: str, device: str) -> None:
        import torch
        import transformers

        self.torch, self.device = torch, device
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model = transformers.AutoModel.from_pretrained(path).to(device).eval()
        self.most = min(self.tokenizer.model_max_length, self.model.config.max_position_embeddings)

    def encode(self, requests: Sequence[penstock.EmbeddingRequest]) -> list[Any]:
        """One forward pass for all texts, which are padded to the longest."""
        torch = self.torch
        found = [self.tokens(request) for request in requests]
        rows = [tokens for tokens in found if isinstance(tokens, list)]
        if not rows:
            return found
        padded = (penstock.pad(part, 0) for part in (rows, [[1] * len(row) for row in rows]))
        ids, mask = (torch.from_numpy(part).to(self.device) for part in padded)
        with torch.inference_mode():
            states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state.float() * mask[:, :, None]
        means = torch.nn.functional.normalize(states.sum(1), dim=1).cpu().numpy()
        vectors = iter(means)
        return [penstock.Embedding(next(vectors), len(t)) if isinstance(t, list) else t for t in found]

    def tokens(self, request: penstock.EmbeddingRequest) -> Any:
        """The tokens of an input, or the error for it."""
        size = self.model.config.hidden_size
        if request.dimensions not in (None, size):
            return penstock.BadRequest(f"parameter 'dimensions' is {request.dimensions}, expected {size}")
        tokens = self.tokenizer(request.input)["input_ids"] if isinstance(request.input, str) else request.input
        if not 1 <= len(tokens) <= self.most or not all(0 <= t < self.model.config.vocab_size for t in tokens):
            return penstock.BadRequest(f"found {len(tokens)} tokens, expected 1 to {self.most} of the vocabulary")
        return tokens


@penstock.model(bucket="length")
class Embedder:
    """Embeds texts with hashed letters, or with the encoder in the folder `path`."""

    task = "embedding"

    def __init__(self, path: str | None = None) -> None:
        self.path = path

    def load(self, device: str) -> None:
        self.model: Hashed | Encoder = Hashed() if self.path is None else Encoder(self.path, device)

    def predict(self, items: list[penstock.EmbeddingRequest]) -> list[penstock.Embedding]:
        return self.model.encode(items)
