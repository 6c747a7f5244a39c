from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from penstock.bulk.options import JobPlan
from penstock.bulk.reading import DecoderThreads
from penstock.bulk.types import Chunk, Pixels, Video
from penstock.bulk.writer import CaptionWriter
from penstock.errors import PenstockError
from support.bulk import FakeVideos, RecordingListener

BLOCK_BYTES = 4 * 48  # four frames


class Kept:
    """A sender that only collects chunks."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def send(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)

    def until(self, count: int) -> None:
        end = time.monotonic() + 10
        while len(self.chunks) < count:
            assert time.monotonic() < end
            time.sleep(0.002)


class Fixture(RecordingListener):
    """Decoder threads over fake videos with a running writer, and what both report."""

    def __init__(self, folder: Path, *frames: int, blocks: int = 100, chunk: int = 4, **more: Any) -> None:
        super().__init__()
        self.fake, self.sender = FakeVideos(), Kept()
        self.writer = CaptionWriter(self)
        videos = []
        for n, count in enumerate(frames):
            path = FakeVideos.make(folder / f"{n}.mp4", count)
            videos.append(Video(str(path), path.name, 1, 1))
        plan = JobPlan(
            pixels=Pixels(height=4, width=4), chunk_size=chunk, frame_bytes=48, pool_bytes=blocks * BLOCK_BYTES,
            block_bytes=BLOCK_BYTES, threads=1, **{"decoders": 1, **more},
        )  # fmt: skip
        self.decoders = DecoderThreads(
            videos,
            lambda video: folder / f"{video.name}.spool",
            plan,
            self.fake.read_chunks,
            self.writer,
            self,
        )
        self.writer.start()
        self.decoders.start(self.sender)

    def answer(self, chunk: Chunk, error: PenstockError | None = None) -> None:
        answer = error or [str(n) for n in chunk.frames]
        self.decoders.chunk_done()
        self.writer.chunk_done(chunk, answer)

    def close(self) -> None:
        self.decoders.close()
        self.writer.close()


def test_decoders_wait_for_memory_and_end_with_the_job(tmp_path: Path) -> None:
    made = Fixture(tmp_path, 400, blocks=3)
    made.sender.until(3)
    time.sleep(0.02)
    assert len(made.sender.chunks) == 3
    made.answer(made.sender.chunks[0])
    made.sender.until(4)
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 2
    assert not made.ends


def test_an_unanswered_round_does_not_block_the_end_of_the_job(tmp_path: Path) -> None:
    made = Fixture(tmp_path, 120, chunk=1, rounds=True)
    made.sender.until(50)
    time.sleep(0.02)
    assert len(made.sender.chunks) == 50
    for chunk in made.sender.chunks[:49]:
        made.answer(chunk)
    time.sleep(0.02)
    assert len(made.sender.chunks) == 50
    made.answer(made.sender.chunks[49])
    made.sender.until(100)
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 2


def test_a_round_that_does_not_fit_into_memory_is_sent_before_it_is_full(tmp_path: Path) -> None:
    made = Fixture(tmp_path, 120, chunk=1, blocks=20, rounds=True)
    made.sender.until(19)
    time.sleep(0.02)
    assert len(made.sender.chunks) <= 20
    done = 0
    end = time.monotonic() + 10
    while not made.ends:
        assert time.monotonic() < end
        while done < len(made.sender.chunks):
            made.answer(made.sender.chunks[done])
            done += 1
        time.sleep(0.001)
    made.close()
    assert made.ends["0.mp4"].rows == 120


def test_a_failed_video_is_read_no_further(tmp_path: Path) -> None:
    made = Fixture(tmp_path, 4000, 8, blocks=2)
    made.sender.until(1)
    made.answer(made.sender.chunks[0], PenstockError("no"))
    done = 1
    end = time.monotonic() + 10
    while "1.mp4" not in made.ends:
        assert time.monotonic() < end
        while done < len(made.sender.chunks):
            made.answer(made.sender.chunks[done])
            done += 1
        time.sleep(0.001)
    made.close()
    assert made.ends["0.mp4"].end == "failed"
    assert made.ends["1.mp4"].end == "complete"
    assert len([c for c in made.sender.chunks if c.video.name == "0.mp4"]) < 500
    assert made.decoders.pool.free_blocks == made.decoders.pool.blocks


def test_each_decoder_reads_one_video_at_a_time(tmp_path: Path) -> None:
    made = Fixture(tmp_path, *[80] * 6, decoders=3, blocks=3)
    made.sender.until(3)
    end = time.monotonic() + 10
    while made.fake.open_at_once < 3:
        assert time.monotonic() < end
        time.sleep(0.002)
    time.sleep(0.02)
    assert {name for name, _ in made.fake.read} == {"0.mp4", "1.mp4", "2.mp4"}
    made.close()


def test_an_unexpected_error_of_a_decoder_thread_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path) -> None:
        raise RuntimeError("of no kind that is known")

    monkeypatch.setattr("penstock.bulk.reading.spool.scan", fail)
    made = Fixture(tmp_path, 8)
    end = time.monotonic() + 10
    while not made.errors:
        assert time.monotonic() < end
        time.sleep(0.002)
    made.close()
    assert "RuntimeError" in made.errors[0].message


def test_a_spool_that_cannot_be_read_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "0.mp4.spool").mkdir()
    made = Fixture(tmp_path, 8)
    end = time.monotonic() + 10
    while not made.errors:
        assert time.monotonic() < end
        time.sleep(0.002)
    made.close()
    assert "cannot read" in made.errors[0].message
