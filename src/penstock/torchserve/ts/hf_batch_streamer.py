"""Streams the texts of a whole batch while transformers generates them."""

from collections.abc import Iterator
from typing import Any

from transformers.generation.streamers import BaseStreamer, TextIteratorStreamer


class TextIteratorStreamerBatch(BaseStreamer):
    """Pass it to `generate(streamer=...)` in a thread and iterate: each step is `[{"text": new text}]`, one per row.

    `timeout` is in seconds per step. A finished row has an empty text.
    """

    def __init__(
        self,
        tokenizer: Any,
        batch_size: int,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        self.batch_size = batch_size
        self.streamers: list[Any] = [
            TextIteratorStreamer(tokenizer, skip_prompt, timeout, **decode_kwargs) for _ in range(batch_size)
        ]
        self.streamer_iterators = [iter(streamer) for streamer in self.streamers]

    def put(self, value: Any) -> None:
        """Takes the prompt's tokens `[rows, n]`, then one token per row, `[rows]`. Raises ValueError."""
        if value.shape[0] != self.batch_size:
            raise ValueError(
                f"TextIteratorStreamerBatch: found a tensor of {tuple(value.shape)}, expected {self.batch_size} rows"
            )
        for i, streamer in enumerate(self.streamers):
            streamer.put(value[i : i + 1])

    def end(self) -> None:
        for streamer in self.streamers:
            streamer.end()

    def __iter__(self) -> Iterator[list[dict[str, str]]]:
        return self

    def __next__(self) -> list[dict[str, str]]:
        texts = [next(texts, None) for texts in self.streamer_iterators]
        if all(text is None for text in texts):
            raise StopIteration
        return [{"text": text or ""} for text in texts]
