"""Text generation as a step model: every step gives one more token to each of the texts that are being written.

A request is a text, or JSON such as `{"prompt": "count from two to nine:", "max_new_tokens": 40}`.
"""

from __future__ import annotations

from typing import Any

import torch
from network import Cache, CausalModel, CharacterModel
from torch.nn import functional

import penstock

KEYS = {"prompt": str, "max_new_tokens": int, "temperature": (int, float), "seed": int, "ignore_end": bool}


class Text:
    """A text that is being written: its request, its tokens, and its cache while it is not in the common one."""

    def __init__(self, tokens: list[int], request: dict[str, Any], room: int) -> None:
        self.tokens = tokens
        self.prompt = len(tokens)
        self.left = min(request.get("max_new_tokens", room), room)
        self.temperature = float(request.get("temperature", 0))
        self.ignore_end = request.get("ignore_end", False)
        self.random = torch.Generator().manual_seed(request.get("seed", 0))
        self.cache: Cache | None = None
        self.cached = 0  # tokens in the cache
        self.sent = ""


class Generator:
    """Writes texts with the trained network, or with a causal model of `transformers` in the folder `path`."""

    max_active = 32

    def __init__(self, path: str | None = None) -> None:
        self.path = path

    def load(self, device: str) -> None:
        self.model: CharacterModel | CausalModel = (
            CharacterModel() if self.path is None else CausalModel(self.path, device)
        )
        self.together: list[Text] = []  # the rows of the common cache
        self.cache: Cache = []

    def admit(self, item: Any) -> Text:
        """The state of a request. Raises BadRequest."""
        request = checked(item)
        try:
            tokens = self.model.encode(request["prompt"])
        except ValueError as e:
            raise penstock.BadRequest(str(e)) from None
        room = self.model.context - len(tokens)
        if not tokens or room < 1:
            raise penstock.BadRequest(f"found a prompt of {len(tokens)} tokens, expected 1 to {self.model.context - 1}")
        return Text(tokens, request, room)

    @torch.inference_mode()
    def step(self, states: list[Text]) -> list[penstock.Step]:
        """One more token for each text. Texts that begin read their prompts, the others go on from the cache."""
        new = [text for text in states if len(text.tokens) == text.prompt]
        old = [text for text in states if len(text.tokens) > text.prompt]
        logits: dict[Text, torch.Tensor] = {}
        caches: list[tuple[list[Text], Cache]] = []
        for texts in (old, new):
            if texts:
                past = self.joined(old) if texts is old else None
                found, cache = self.model.logits(*padded(texts, past), past)
                logits.update(zip(texts, found, strict=True))
                caches.append((texts, cache))
        # nothing has changed so far: after an error the step can be repeated with fewer texts
        for texts, cache in caches:
            for text in texts:
                text.cached = len(text.tokens)
            if texts is old:
                self.together, self.cache = texts, cache
            else:
                separate(texts, cache)
        return [self.written(text, logits[text]) for text in states]

    def evict(self, state: Text) -> None:
        state.cache = None
        if self.together == [state]:
            self.together, self.cache = [], []

    def joined(self, texts: list[Text]) -> Cache:
        """The common cache of these texts, padded on the left."""
        if texts != self.together:
            separate(self.together, self.cache)
            self.together, self.cache = texts, join([text.cache or [] for text in texts])
        return self.cache

    def written(self, text: Text, logits: torch.Tensor) -> penstock.Step:
        if text.temperature > 0:
            chances = functional.softmax(logits / text.temperature, dim=-1)
            token = int(torch.multinomial(chances, 1, generator=text.random))
        else:
            token = int(logits.argmax())
        text.tokens.append(token)
        text.left -= 1
        ended = token in self.model.ends and not text.ignore_end
        written = self.model.decode(text.tokens[text.prompt : len(text.tokens) - ended])
        part = written[len(text.sent) :]
        done = ended or not text.left
        if part.endswith("\ufffd") and not done:
            return penstock.Step()  # the next token completes the character
        text.sent = written
        return penstock.Step(part or None, done)


def checked(item: Any) -> dict[str, Any]:
    """The request as a dictionary. Raises BadRequest."""
    request = {"prompt": item} if isinstance(item, str) else item
    if not isinstance(request, dict) or "prompt" not in request:
        raise penstock.BadRequest(f"found a {type(item).__name__}, expected a text, or an object with a prompt")
    for key, value in request.items():
        if key not in KEYS:
            raise penstock.BadRequest(f"found the key {key!r}, expected {', '.join(KEYS)}")
        if not isinstance(value, KEYS[key]) or (isinstance(value, bool) and key != "ignore_end"):  # type: ignore[arg-type]
            raise penstock.BadRequest(f"found a {type(value).__name__} as {key}")
    if request.get("max_new_tokens", 1) < 1:
        raise penstock.BadRequest("max_new_tokens must be at least 1")
    return request


def padded(texts: list[Text], past: Cache | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new tokens of the texts, their positions, and the places of the cache with them that are seen."""
    new = [text.tokens if past is None else text.tokens[-1:] for text in texts]
    length = max(map(len, new))
    places = length + (past[0][0].shape[2] if past else 0)
    first = torch.tensor([places - len(text.tokens) for text in texts])[:, None]  # place of each text's first token
    tokens = torch.tensor([[0] * (length - len(row)) + row for row in new])
    positions = (torch.arange(places - length, places) - first).clamp(min=0)
    return tokens, positions, torch.arange(places) >= first


def separate(texts: list[Text], cache: Cache) -> None:
    """Gives each text its own part of a common cache."""
    for row, text in enumerate(texts):
        own = slice(-text.cached, None)
        text.cache = [(k[row : row + 1, :, own], v[row : row + 1, :, own]) for k, v in cache]


def join(caches: list[Cache]) -> Cache:
    """One cache with a row for each of these, padded on the left."""
    length = max(cache[0][0].shape[2] for cache in caches)

    def together(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([functional.pad(part, (0, 0, length - part.shape[2], 0)) for part in parts])

    return [
        (together([cache[i][0] for cache in caches]), together([cache[i][1] for cache in caches]))
        for i in range(len(caches[0]))
    ]
