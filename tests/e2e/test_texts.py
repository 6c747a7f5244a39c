"""Texts of different lengths behind a real server share batches, and each gets its own rows back."""

import os
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock

pytest.importorskip("torch")
SOURCE = """
    import time

    import torch

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words = torch.nn.Embedding(50, 6)

        def forward(self, ids, mask):
            time.sleep(0.02)  # others arrive meanwhile
            states = self.words(ids) * mask[:, :, None]
            means = states.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
            return {"states": states, "means": means, "calls": torch.full((len(ids),), len(ids))}
"""
INPUT = '{datatype = "INT64", shape = [-1, -1], pad = 0}'


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("texts")
    (folder / "net.py").write_text(textwrap.dedent(SOURCE))
    ports = ["--port", "0", "--set=server.management_port=0", "--set=server.metrics_port=0"]
    keys = [f"--set=models.net.inputs.{name}={INPUT}" for name in ("ids", "mask")]
    return serve_all(None, f"net={folder / 'net.py'}:Encoder", *keys, ports=ports)


def test_texts_of_all_lengths_share_batches_and_keep_their_own_rows(server: Any) -> None:
    random = np.random.default_rng(0)
    texts = [random.integers(1, 50, (1 + k % 2, 1 + 3 * k)) for k in range(24)]
    with penstock.Client(server.url) as client, ThreadPoolExecutor(24) as threads:

        def infer(ids: Any) -> Any:
            return client.infer("net", {"ids": ids, "mask": np.ones_like(ids)}).outputs

        alone = [infer(ids) for ids in texts[:6]]
        for _ in range(2):
            together = list(threads.map(infer, texts))
    assert [found["states"].shape for found in together] == [(*ids.shape, 6) for ids in texts]
    for one, many in zip(alone, together, strict=False):
        assert np.allclose(one["states"], many["states"])
        assert np.allclose(one["means"], many["means"], atol=1e-6)
    assert max(found["calls"][0] for found in together) > 4


def test_inputs_of_one_text_must_have_one_length(server: Any) -> None:
    with (
        penstock.Client(server.url) as client,
        pytest.raises(penstock.BadRequest, match="must all have the same length"),
    ):
        client.infer("net", {"ids": np.ones((1, 3), int), "mask": np.ones((1, 4), int)})


@penstock.model(bucket="length", max_tokens=64)
def padded(items: list[Any]) -> list[Any]:
    """The sum of each item, and the shape of its batch."""
    rows = penstock.pad(items, 0)
    time.sleep(0.002)
    return [(int(row.sum()), *rows.shape) for row in rows]


@pytest.mark.parametrize("kind", ["thread", "process", "shared"])
def test_items_of_a_python_model_share_batches_of_at_most_max_tokens(kind: str) -> None:
    items = [[1] * (1 + 3 * k % 40) for k in range(60)]
    if kind == "thread":
        streamer: Any = penstock.ThreadedStreamer(padded, batch_size=16)
    else:
        more = {"shared": f"texts-{os.getpid()}"} if kind == "shared" else {}
        streamer = penstock.Streamer(padded, batch_size=16, **more)
    with streamer, ThreadPoolExecutor(20) as threads:
        found = [one for (one,) in threads.map(lambda item: streamer.predict([item]), items)]
        assert [each[0] for each in found] == list(map(len, items))
        assert all(rows * longest <= 64 for _, rows, longest in found)
        with pytest.raises(penstock.BadRequest, match=r"has a length of 65, more than batching\.max_tokens"):
            streamer.predict([[1] * 65])
        if kind != "shared":  # of its pickle its server knows the size
            with pytest.raises(penstock.BadRequest, match="an item is a int, which has no length"):
                streamer.predict([5])
        assert [each[0] for each in streamer.predict(items[:9])] == list(map(len, items[:9]))
        assert max(rows for _, rows, _ in found) > 1
