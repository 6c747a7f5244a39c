"""The choice of frames, from video files to the rows on disk, and over interruptions at any byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.bulk import decode, spool
from penstock.bulk.decode import LastHash, read_chunks
from penstock.bulk.frames import FrameReader
from penstock.bulk.job import BulkJob, JobParts
from penstock.bulk.progress import JobSummary
from penstock.bulk.types import Chunk, Sampling
from penstock.bulk.video import probe
from support.bulk import FakeSender, RecordingReporter, job_options, server_info
from support.videos import make_clip, number_of

COUNT, HELD = 60, 6  # frames, and how many of them show the same picture
SIDE = 60


def shown(chunk: Chunk) -> list[str]:
    """The numbers that the frames show: what a captioner would write."""
    assert isinstance(chunk.pixels, np.ndarray)
    return [f"shows {number_of(pixels)}" for pixels in chunk.pixels]


def run(folder: Path, clip: Path, sampling: Sampling, **changed: Any) -> JobSummary:
    """A whole job with real decoders and a server that reads the numbers."""
    parts = JobParts(
        ask=lambda *_, **__: server_info(height=SIDE, width=SIDE),
        read_chunks=read_chunks,
        probe=probe,
        sender=lambda servers, options, answered: FakeSender(answered, shown),  # type: ignore[arg-type, return-value]
    )
    options = job_options(folder, clip, sampling=sampling, memory_bytes=1 << 20, **changed)
    return BulkJob(options, RecordingReporter(), parts).run()


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held")
    return make_clip(folder / "a.mp4", COUNT, held=HELD, options={"g": "15", "bf": "3", "sc_threshold": "0"})


NEAR_DUPLICATES = Sampling(dedupe=1)


def test_near_duplicates_are_skipped_and_counted(tmp_path: Path, clip: Path) -> None:
    summary = run(tmp_path, clip, NEAR_DUPLICATES)
    found = rows(tmp_path)
    firsts = [row for row in found if row["frame"] % HELD == 0]
    assert found == firsts
    assert all(row["caption"] == f"shows {row['frame'] // HELD}" for row in found)
    assert (summary.frames, summary.seen, summary.similar) == (len(found), COUNT, COUNT - len(found))
    assert f"{len(found)} captions of 60 frames, {COUNT - len(found)} near-duplicates" in summary.lines()[0]


def test_captions_are_carried_to_near_duplicates_on_request(tmp_path: Path, clip: Path) -> None:
    summary = run(tmp_path, clip, Sampling(dedupe=1, carry=True))
    found = rows(tmp_path)
    assert [row["frame"] for row in found] == list(range(COUNT))
    assert [row["time"] for row in found] == pytest.approx([n / 25 for n in range(COUNT)])
    captions = [row["caption"] for row in found]
    assert captions[::HELD] == [captions[n] for n in range(HELD - 1, COUNT, HELD)]
    assert summary.frames == COUNT
    assert 0 < summary.similar < COUNT


MODES = {
    "near-duplicates": NEAR_DUPLICATES,
    "carried": Sampling(dedupe=1, carry=True),
    "every other, carried": Sampling(every=2, dedupe=1, carry=True, start_s=0.3),
    "at most five": Sampling(dedupe=1, carry=True, max_frames=5),
    "keyframes": Sampling(keyframes=True),
    "keyframes without near-duplicates": Sampling(keyframes=True, dedupe=30, carry=True),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, clip: Path) -> Callable[[str], tuple[bytes, bytes, int]]:
    """The output, the spool, and the number of near-duplicates of a mode, made once."""
    made: dict[str, tuple[bytes, bytes, int]] = {}

    def get(mode: str) -> tuple[bytes, bytes, int]:
        if mode not in made:
            folder = tmp_path_factory.mktemp("whole")
            similar = run(folder, clip, MODES[mode]).similar
            made[mode] = (folder / "captions.jsonl").read_bytes(), spool_of(folder).read_bytes(), similar
        return made[mode]

    return get


def spool_of(folder: Path) -> Path:
    (found,) = (folder / "captions.jsonl.work" / "spool").iterdir()
    return found


@pytest.mark.parametrize("mode", MODES)
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(share=st.floats(0, 1))
def test_a_job_killed_at_any_byte_writes_the_same_output(
    tmp_path: Path, clip: Path, uninterrupted: Any, mode: str, share: float
) -> None:
    output, whole, similar = uninterrupted(mode)
    run(tmp_path, clip, MODES[mode], restart=True)
    (tmp_path / "captions.jsonl").unlink()
    spool_of(tmp_path).write_bytes(whole[: round(share * len(whole))])
    summary = run(tmp_path, clip, MODES[mode])
    assert (tmp_path / "captions.jsonl").read_bytes() == output
    assert spool_of(tmp_path).read_bytes() == whole
    assert summary.similar == similar


def test_a_failed_video_goes_on_after_carried_captions(tmp_path: Path, clip: Path, uninterrupted: Any) -> None:
    output, whole, _ = uninterrupted("carried")
    run(tmp_path, clip, MODES["carried"], restart=True)
    (tmp_path / "captions.jsonl").unlink()
    lines = whole.splitlines(keepends=True)
    place = next(n for n in range(2, len(lines)) if b'"carried"' in lines[n] and b'"carried"' in lines[n + 1])
    failed = spool.SpoolEnd("failed", place, place, 1, "send", place, "no", [], similar=place - 1)
    spool_of(tmp_path).write_bytes(b"".join(lines[: place + 1]) + spool.end_line(failed))
    summary = run(tmp_path, clip, MODES["carried"], retry_failed=True)
    assert (tmp_path / "captions.jsonl").read_bytes() == output
    assert summary.exit_code == 0


def test_a_scene_that_never_changes_is_captioned_again(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_SIMILAR", 10)
    last = LastHash(255)
    kept = [frame.number for frame in FrameReader(str(clip)).frames() if not last.resembles(frame.picture)]
    assert kept == list(range(0, COUNT, 11))


def test_a_tolerance_of_all_bits_keeps_the_first_frame(tmp_path: Path, clip: Path) -> None:
    assert run(tmp_path, clip, Sampling(dedupe=255)).frames == 1
