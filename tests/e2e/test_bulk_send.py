"""The bulk sender against the real server: pixels arrive, captions return, rejections are handled."""

import threading
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.bulk.sender import ChunkSender, Undelivered
from penstock.bulk.servers import NotACaptioner, ask
from penstock.bulk.types import Chunk, SendOptions, Video
from penstock.errors import ModelNotFound, PayloadTooLarge, PenstockError, Unauthorized

TLS = Path(__file__).parents[1] / "tls"
SOURCE = """
    import time
    import zlib

    import penstock

    @penstock.model(max_batch_size=8)
    class Captioner:
        inputs = [
            penstock.TensorSpec("frames", "UINT8", (-1, -1, -1, 3), optional=True),
            penstock.TensorSpec("jpeg", "BYTES", (-1,), optional=True),
            penstock.TensorSpec("frame_index", "INT64", (-1,), optional=True),
        ]
        outputs = [penstock.TensorSpec("caption", "BYTES", (-1,)), penstock.TensorSpec("frame_index", "INT64", (-1,))]
        parameters = {"task": "image-to-text", "revision": "r1", "height": 32, "width": 32}

        def predict(self, items):
            time.sleep(0.002)
            return [self.caption(item) for item in items]

        def caption(self, item):
            pixels = item["frames"] if "frames" in item else item["jpeg"]
            numbers = item["frame_index"]
            sums = [zlib.crc32(bytes(row)) for row in pixels]
            return {"caption": [f"{n} {s}" for n, s in zip(numbers, sums)], "frame_index": numbers}

    def other(items):
        return items
"""


def chunk(number: int, rows: int, size: int = 32, jpeg: bool = False) -> Chunk:
    """A chunk of random pixels or JPEG bytes."""
    frames = list(range(number * rows, (number + 1) * rows))
    pixels: Any = np.random.default_rng(number).integers(0, 256, (rows, size, size, 3), np.uint8)
    if jpeg:
        pixels = [bytes(row)[: 10 + n] for n, row in enumerate(pixels)]
    return Chunk(Video("a", "a", 1, 1), number, pixels, frames, [0.0] * rows, [None] * rows, NoBlock())


class NoBlock:
    def release(self) -> None:
        pass


def captions(url: str, chunks: list[Chunk], token: str | None = None, ca: str | None = None, **options: Any) -> Any:
    """(the result of each chunk, the sender's stats)"""
    info = ask(url, "captioner", token=token, ca=ca)
    answers: dict[int, list[str] | PenstockError] = {}
    whole = threading.Event()

    def answered(chunk: Chunk, outcome: list[str] | PenstockError) -> None:
        answers[chunk.number] = outcome
        if len(answers) == len(chunks):
            whole.set()

    sender = ChunkSender(
        [info], SendOptions(**{"backoff_s": 0.02, "fingerprint": uuid.uuid4().hex, **options}), answered, seed=1
    )
    sender.start()
    for one in chunks:
        sender.send(one)
    there = whole.wait(60)
    stats = sender.stats()
    sender.close(1.0)
    assert there, stats
    return [answers[one.number] for one in chunks], stats


def expected(one: Chunk) -> list[str]:
    return [f"{n} {zlib.crc32(bytes(row))}" for n, row in zip(one.frames, one.pixels, strict=True)]


@pytest.fixture(scope="module")
def url(serve_all: Callable[..., Any]) -> str:
    server: str = serve_all(SOURCE, "captioner=app.py:Captioner", "other=app.py:other", "--instances", "2").url
    return server


@pytest.mark.parametrize("jpeg", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 32), (4, 32), (8, 200), (24, 96)])
def test_every_frame_arrives_unchanged_and_gets_its_own_caption(url: str, rows: int, size: int, jpeg: bool):
    chunks = [chunk(number, rows, size, jpeg) for number in range(12)]
    answers, stats = captions(url, chunks)
    assert answers == [expected(one) for one in chunks]
    assert stats.retries == 0


def test_the_server_reports_its_instances_and_limits(url: str):
    info = ask(url, "captioner")
    assert info.instances == 2
    assert info.max_batch_size == 8
    assert info.max_request_bytes is not None
    assert info.max_request_bytes > 2**20
    assert (info.revision, info.height, info.width) == ("r1", 32, 32)


def test_a_model_that_is_not_a_captioner_is_rejected(url: str):
    with pytest.raises(NotACaptioner):
        ask(url, "other")
    with pytest.raises(ModelNotFound):
        ask(url, "nobody")


def test_an_overflowing_queue_loses_no_chunk_and_narrows_the_window(serve: Callable[..., Any]):
    server = serve(SOURCE, "captioner=app.py:Captioner", "--set", "models.captioner.batching.max_queue=8")
    chunks = [chunk(number, 4) for number in range(20)]
    answers, stats = captions(server.url, chunks, rows=1)  # a window for chunks of one row: too wide for four
    assert answers == [expected(one) for one in chunks]
    assert stats.retries > 0
    assert stats.window < 17


def test_a_chunk_over_the_servers_limit_fails_alone(serve: Callable[..., Any]):
    server = serve(SOURCE, "captioner=app.py:Captioner", "--set", "limits.max_body_bytes=2000000")
    chunks = [chunk(0, 4), chunk(1, 8, 1000), chunk(2, 4)]
    answers, _ = captions(server.url, chunks)
    assert answers[0] == expected(chunks[0])
    assert answers[2] == expected(chunks[2])
    assert isinstance(answers[1], Undelivered)
    assert isinstance(answers[1].__cause__, PayloadTooLarge)


def test_a_token_and_tls_keep_others_out(serve: Callable[..., Any], tmp_path: Path):
    cert, key = str(TLS / "cert.pem"), str(TLS / "key.pem")
    (tmp_path / "tokens").write_text("s3cret\n")
    flags = ["--tls-cert", cert, "--tls-key", key, "--token-file", str(tmp_path / "tokens")]
    server = serve(SOURCE, "captioner=app.py:Captioner", *flags)
    url = server.url.replace("http:", "https:").replace("127.0.0.1", "localhost")
    chunks = [chunk(number, 8, 200) for number in range(6)]
    answers, _ = captions(url, chunks, token="s3cret", ca=cert)
    assert answers == [expected(one) for one in chunks]
    with pytest.raises(Unauthorized):
        ask(url, "captioner", token="guess", ca=cert)
