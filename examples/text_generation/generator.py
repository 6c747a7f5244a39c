"""Text generation as a step model: every step gives one more token to each of the texts that are being written.

A request is a text, JSON such as `{"prompt": "count from two to nine:", "max_tokens": 40}`, or comes from a client of
OpenAI's API.
"""

from __future__ import annotations

from typing import Any

import torch
from network import Cache, CausalModel, CharacterModel
from torch.nn import functional

import penstock


class Request(penstock.TextRequest, kw_only=True):
    """`ignore_end` writes on after the end of an answer. Without a temperature the likeliest token is taken."""

    ignore_end: bool = False


class Text:
    """A text that is being written: its request, its tokens, and its cache while it is not in the common one."""

    def __init__(self, tokens: list[int], request: Request, room: int) -> None:
        self.tokens = tokens
        self.prompt = len(tokens)
        self.left = min(request.max_tokens or room, room)
        self.temperature = request.temperature or 0
        self.top_p = 1.0 if request.top_p is None else request.top_p
        self.ignore_end = request.ignore_end
        self.random = torch.Generator().manual_seed(request.seed or 0)
        self.stop = penstock.StopScanner(request.stop)
        self.cache: Cache | None = None
        self.cached = 0  # tokens in the cache
        self.written = ""
        self.sent = ""


class Generator:
    """Writes texts with the trained network, or with a causal model of `transformers` in the folder `path`."""

    task = "text-generation"
    max_active = 32

    def __init__(self, path: str | None = None) -> None:
        self.path = path

    def load(self, device: str) -> None:
        self.model: CharacterModel | CausalModel = (
            CharacterModel() if self.path is None else CausalModel(self.path, device)
        )
        self.together: list[Text] = []  # the rows of the common cache
        self.cache: Cache = []

    def admit(self, item: Request | str) -> Text:
        """The state of a request. Raises BadRequest."""
        request = Request(prompt=item) if isinstance(item, str) else item
        prompt = self.model.chat(request.messages) if request.messages else request.prompt
        try:
            tokens = self.model.encode(prompt) if isinstance(prompt, str) else self.model.checked(prompt)
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
            chances = likely(functional.softmax(logits / text.temperature, dim=-1), text.top_p)
            token = int(torch.multinomial(chances, 1, generator=text.random))
        else:
            token = int(logits.argmax())
        text.tokens.append(token)
        text.left -= 1
        ended = token in self.model.ends and not text.ignore_end
        written = self.model.decode(text.tokens[text.prompt : len(text.tokens) - ended])
        last = ended or not text.left
        if written.endswith("\ufffd") and not last:
            return penstock.Step()  # the next token completes the character
        part = text.stop.feed(written[len(text.written) :]) + (text.stop.end() if last else "")
        text.written = written
        text.sent += part
        if not (last or text.stop.stopped):
            return penstock.Step(part or None)
        reason: Any = "stop" if ended or text.stop.stopped else "length"
        return penstock.Step(penstock.TextPart(part, reason, text.prompt, len(text.tokens) - text.prompt), done=True)


def likely(chances: torch.Tensor, top_p: float) -> torch.Tensor:
    """The chances of the likeliest tokens, whose sum reaches `top_p`, and 0 for the others."""
    ordered, places = chances.sort(descending=True)
    ordered[ordered.cumsum(0) - ordered >= top_p] = 0
    return torch.zeros_like(chances).scatter_(0, places, ordered)


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
