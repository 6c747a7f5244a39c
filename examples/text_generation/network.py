"""Language models with a cache of keys and values: a small transformer in plain PyTorch, and causal models of
`transformers`.

Both take sequences of different lengths, padded on the left, and go on where their cache ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sentences import END, LETTERS
from torch import Tensor, nn
from torch.nn import functional

from penstock import BadRequest, ChatMessage

HERE = Path(__file__).parent
WIDTH, HEADS, LAYERS = 56, 4, 3
CONTEXT = 256  # characters of question and answer together

Cache = list[tuple[Tensor, Tensor]]  # keys and values of each layer, `[rows, heads, length, width]`


class Block(nn.Module):
    """One layer: attention and two linear maps, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows, length, _ = x.shape
        q, k, v = (
            part.view(rows, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        q, k = rotated(q, rotation), rotated(k, rotation)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(found.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x)))), (k, v)


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys with rotary positions."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Transformer(nn.Module):
    """Logits of the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        angles = torch.arange(CONTEXT)[:, None] / 1000 ** (torch.arange(WIDTH // HEADS // 2) / (WIDTH // HEADS // 2))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None = None, past: Cache | None = None
    ) -> tuple[Tensor, Cache]:
        """Logits `[rows, length, letters]` and the cache with these tokens.

        `tokens` and `positions` are `[rows, length]`; `mask` `[rows, 1, length, length of the cache with them]` has
        the places that each token sees, by default all before it.
        """
        rotation = self.cos[positions][:, None], self.sin[positions][:, None]  # type: ignore[index]
        x, present = self.embed(tokens), []
        for i, block in enumerate(self.blocks):
            x, layer = block(x, rotation, mask, None if past is None else past[i])
            present.append(layer)
        return self.norm(x) @ self.embed.weight.T, present


class CharacterModel:
    """The trained transformer. A token is a character."""

    context = CONTEXT

    def __init__(self, path: Path = HERE / "weights.pt") -> None:
        self.network = Transformer().eval()
        self.network.load_state_dict(torch.load(path, weights_only=True))
        self.ends = {LETTERS.index(END)}

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt: capital letters become small ones, and what the network does not know spaces."""
        known = (letter if letter in LETTERS else " " for letter in prompt.lower())
        return [LETTERS.index(letter) for letter in known]

    def checked(self, tokens: list[int]) -> list[int]:
        """The tokens of a client. Raises ValueError."""
        if not all(0 <= token < len(LETTERS) for token in tokens):
            raise ValueError(f"a token is a number from 0 to {len(LETTERS) - 1}")
        return list(tokens)

    def chat(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt of a chat: its last message, because the network answers single questions."""
        return messages[-1].content

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(LETTERS[token] for token in tokens)

    def logits(self, tokens: Tensor, positions: Tensor, seen: Tensor, past: Cache | None) -> tuple[Tensor, Cache]:
        """See `CausalModel.logits`."""
        length, places = tokens.shape[1], seen.shape[1]
        mask = seen[:, None, None, :]
        if length > 1:  # a token sees itself, also on the left of its row, where it has no meaning
            before = torch.ones(length, places, dtype=torch.bool).tril(places - length)
            mask = (mask & before) | torch.eye(length, dtype=torch.bool)
        logits, present = self.network(tokens, positions, mask, past)
        return logits[:, -1], present


class CausalModel:
    """A causal language model of `transformers` with its tokenizer, from a folder."""

    def __init__(self, path: str, device: str) -> None:
        import transformers

        self._transformers, self._device = transformers, device
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path).to(device).eval()
        ends = self._model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self.context = self._model.config.max_position_embeddings

    def encode(self, prompt: str) -> list[int]:
        tokens: list[int] = self._tokenizer(prompt)["input_ids"]
        return tokens

    def checked(self, tokens: list[int]) -> list[int]:
        """The tokens of a client. Raises ValueError."""
        if not all(0 <= token < self._model.config.vocab_size for token in tokens):
            raise ValueError(f"a token is a number from 0 to {self._model.config.vocab_size - 1}")
        return list(tokens)

    def chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The tokens of a chat by the template of the tokenizer. Raises BadRequest without one."""
        if not self._tokenizer.chat_template:
            raise BadRequest("this model has no chat template; use /v1/completions")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        tokens: list[int] = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def logits(self, tokens: Tensor, positions: Tensor, seen: Tensor, past: Cache | None) -> tuple[Tensor, Cache]:
        """Logits `[rows, tokens]` of the token after the last one, and the cache with these tokens.

        `tokens` and `positions` are `[rows, length]`, `seen` `[rows, length of the cache with them]`: False on the
        left of a row, where it is padded.
        """
        cache = self._transformers.DynamicCache(past)
        found: Any = self._model(
            input_ids=tokens.to(self._device),
            position_ids=positions.to(self._device),
            attention_mask=seen.long().to(self._device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return found.logits[:, -1].float().cpu(), [(layer.keys, layer.values) for layer in cache.layers]
