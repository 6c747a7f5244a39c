"""Encoders for texts of different lengths: one that costs a CPU what its tokens cost, and one that launches kernels."""

import time
from typing import Any

import torch

WIDTH, WORDS = 64, 1000
LAUNCHES_S, TOKEN_S = 4.7e-3, 0.4e-6  # BERT-base in half precision on an H200: batches of 1 to 128 rows of 32 tokens


class Encoder(torch.nn.Module):
    """The mean of the states of one layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)

    def forward(self, input_ids: Any, attention_mask: Any) -> dict[str, Any]:
        states = self.layer(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        mask = attention_mask[:, :, None]
        return {"mean": (states * mask).sum(1) / mask.sum(1)}


class Launches(torch.nn.Module):
    """Takes the time of a GPU, and no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, input_ids: Any, attention_mask: Any) -> dict[str, Any]:
        time.sleep(LAUNCHES_S + TOKEN_S * input_ids.numel())
        return {"mean": attention_mask.sum(1, keepdim=True) * self.weights}
