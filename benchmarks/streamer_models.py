"""The models of `streamer.py`, and the library that streams them: the same code for both. BENCH_SPEC names them.

Imports only libraries that the environment of service_streamer has too; BERT's libraries are borrowed
(BENCH_PACKAGES).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SPEC = json.loads(os.environ["BENCH_SPEC"])
LIBRARY = importlib.import_module(SPEC["library"])

Predict = Callable[[list[Any]], list[Any]]


class Card:
    """A device that runs one call at a time, for a fixed time plus a time per item; answers are sizes of items.

    Waiting items occupy its memory, as on a GPU: beyond `room` items it runs out of memory.
    """

    def __init__(self, call_s: float, item_s: float, room: float = float("inf")) -> None:
        self._call_s, self._item_s, self._room = call_s, item_s, room
        self._turn, self._count = threading.Lock(), threading.Lock()
        self._held = 0

    def predict(self, batch: list[Any]) -> list[int]:
        with self._memory(len(batch)), self._turn:
            time.sleep(self._call_s + self._item_s * len(batch))
        return [len(item) for item in batch]

    @contextlib.contextmanager
    def _memory(self, items: int) -> Any:
        with self._count:
            if self._held + items > self._room:
                raise RuntimeError(f"out of memory: {self._held} items are held, and {items} more came")
            self._held += items
        try:
            yield
        finally:
            with self._count:
                self._held -= items


def busy(batch: list[Any]) -> list[Any]:
    """Holds the interpreter for 4 ms a call, as a model's own Python code does."""
    end = time.perf_counter() + 0.004
    while time.perf_counter() < end:
        pass
    return batch


def matmul() -> Predict:
    """Two dense layers of 1024 on the CPU, with the number of threads in the environment; rows of float32."""
    import numpy

    numbers = numpy.random.default_rng(1)
    first, second = (numbers.standard_normal((1024, 1024)).astype(numpy.float32) for _ in range(2))

    def predict(batch: list[Any]) -> list[Any]:
        return list((numpy.maximum(numpy.stack(batch) @ first, 0) @ second).argmax(axis=1))

    return predict


def bert() -> Predict:
    """The BERT of `examples/bert_infilling`, whose imports of penstock resolve to the measured library."""
    sys.path += [str(HERE.parent / "examples" / "bert_infilling"), *json.loads(os.environ["BENCH_PACKAGES"])]
    if SPEC["library"] != "penstock":
        sys.modules["penstock"] = types.SimpleNamespace(ManagedModel=LIBRARY.ManagedModel, BadRequest=ValueError)
    from bert_model import TextInfillingModel

    predict: Predict = TextInfillingModel().predict
    return predict


def bert_base() -> Predict:
    """The architecture of BERT-base with random weights, on the first GPU; sentences of 16 tokens.

    A dry run has a small one on the CPU instead.
    """
    sys.path += json.loads(os.environ["BENCH_PACKAGES"])
    import torch
    import transformers

    torch.manual_seed(1)
    device, dtype, config = "cuda", torch.float16, transformers.BertConfig()
    if SPEC.get("dry"):
        device, dtype = "cpu", torch.float32
        small: Any = {"vocab_size": 2000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.BertConfig(**small, intermediate_size=64)
    net = transformers.BertForMaskedLM(config).to(device, dtype).eval()

    def predict(batch: list[str]) -> list[int]:
        rows = [[101, *(1000 + ord(c) for c in text[:14].ljust(14)), 102] for text in batch]
        with torch.inference_mode():
            tokens = torch.tensor(rows).to(device)
            found: list[int] = net(tokens).logits[:, 7].argmax(dim=1).tolist()
        return found

    return predict


MODELS: dict[str, Callable[[], Predict]] = {
    "no-op": lambda: lambda batch: batch,
    "busy": lambda: busy,
    "accelerator": lambda: importlib.import_module("models").accelerator,
    "first number": lambda: lambda batch: [float(array[0]) for array in batch],
    "device": lambda: Card(0.077, 0.00116).predict,
    # a quarter of the published times: 17.2/s one by one; 62/s, if that was 85 % of what full batches of 64 can do
    "vision": lambda: Card(0.011, 0.00325, room=64).predict,
    "matmul": matmul,
    "bert": bert,
    "bert_base": bert_base,
}


class Model(LIBRARY.ManagedModel):
    """The model that BENCH_SPEC names. A file next to the log announces each additional worker."""

    def init_model(self, *args: Any, **kwargs: Any) -> None:
        self.model = MODELS[SPEC["model"]]()
        Path(os.environ["TMPDIR"], f"ready-{uuid.uuid4().hex}").touch()

    def predict(self, batch: list[Any]) -> list[Any]:
        return self.model(batch)
