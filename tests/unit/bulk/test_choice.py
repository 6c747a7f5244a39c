"""The choice of frames, from video files to the rows on disk, and over interruptions at any byte."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.bulk import decode, spool
from penstock.bulk.decode import BlockPool, LastHash, read_chunks
from penstock.bulk.frames import FrameReader
from penstock.bulk.job import BulkJob, JobParts
from penstock.bulk.progress import JobSummary
from penstock.bulk.types import Answer, Chunk, Pixels, Position, ReadPlan, Sampling, Video
from penstock.bulk.video import probe
from penstock.errors import ConfigError
from support.bulk import FakeSender, RecordingReporter, job_options, server_info
from support.videos import make_clip, number_of

COUNT, HELD = 60, 6  # frames, and how many of them show the same picture
SIDE = 60


def shown(chunk: Chunk) -> list[str]:
    """The numbers that the frames show: what a captioner would write."""
    assert isinstance(chunk.pixels, np.ndarray)
    return [f"shows {number_of(pixels)}" for pixels in chunk.pixels]


def run(
    folder: Path, clip: Path, sampling: Sampling, answer: Callable[[Chunk], Any] = shown, **changed: Any
) -> JobSummary:
    """A whole job with real decoders and a server that reads the numbers."""
    parts = JobParts(
        ask=lambda *_, **__: server_info(height=SIDE, width=SIDE),
        read_chunks=read_chunks,
        probe=probe,
        sender=lambda servers, options, answered: FakeSender(answered, answer),
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


def scenes(folder: Path, *lengths: int) -> Path:
    """A clip of scenes of so many frames, each a colour of its own with some motion."""
    pictures = []
    for number, length in enumerate(lengths):
        for frame in range(length):
            pixels = np.full((96, 160, 3), (40 * number % 256, 200 - 30 * number, 90 * number % 256), np.uint8)
            pixels[40:56, frame * 2 : frame * 2 + 16] = 255
            pictures.append(pixels)
    path = folder / "scenes.mp4"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=25, options={"g": "250", "bf": "3"})
        stream.width, stream.height, stream.pix_fmt = 160, 96, "yuv420p"
        for number, pixels in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 25)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def chosen(clip: Path, sampling: Sampling, resume: Position | None = None, **plan: Any) -> list[Chunk]:
    made = ReadPlan(sampling=sampling, pixels=Pixels(height=SIDE, width=SIDE), **{"chunk_size": 4, **plan})
    pool = BlockPool(1 << 20, 4 * SIDE * SIDE * 3)
    chunks = []
    for chunk in read_chunks(Video(str(clip), clip.name, 0, 0), made, pool, resume):
        chunk.block.release()
        chunks.append(chunk)
    return chunks


def frames_of(chunks: list[Chunk]) -> list[int]:
    return [frame for chunk in chunks for frame in chunk.frames]


def test_each_scene_gives_its_first_frame(tmp_path: Path) -> None:
    pytest.importorskip("scenedetect", reason="PySceneDetect is not here: make test")
    path = scenes(tmp_path, 30, 40, 20, 5, 35)
    whole = chosen(path, Sampling(scene=27.0))
    assert frames_of(whole) == [0, 30, 70, 90], "the scene of 5 frames is too short for another after it"
    for chunk in whole:
        for frame, pts in zip(chunk.frames, chunk.pts, strict=True):
            taken = frames_of(whole).index(frame) + 1
            rest = chosen(path, Sampling(scene=27.0), Position(frame, pts, taken))
            assert frames_of(rest) == frames_of(whole)[taken:]
    assert frames_of(chosen(path, Sampling(scene=27.0, max_frames=2))) == [0, 30]
    assert frames_of(chosen(path, Sampling(scene=27.0, start_s=1.6))) == [40, 70, 90]
    assert frames_of(chosen(path, Sampling(scene=255.0))) == [0]
    assert frames_of(chosen(make_clip(tmp_path / "one.mp4", 1), Sampling(scene=27.0))) == [0]


def test_without_pyscenedetect_the_job_says_how_to_install_it(
    tmp_path: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scenedetect", None)
    with pytest.raises(ConfigError, match="--scene needs PySceneDetect"):
        run(tmp_path, clip, Sampling(scene=27.0))
    assert not (tmp_path / "captions.jsonl").exists()


def test_without_torchcodec_the_job_says_how_to_install_it(
    tmp_path: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(ConfigError, match="--decoder torchcodec needs torchcodec and FFmpeg"):
        run(tmp_path, clip, Sampling(), decoder="torchcodec")


@pytest.mark.parametrize("times", [range(100), [n + n // 3 + 40 * (n > 50) for n in range(100)]])
def test_a_chunk_has_the_frames_of_a_clip_if_a_caption_is_for_all(tmp_path: Path, times: Any) -> None:
    path = make_clip(tmp_path / "a.mp4", times)
    sampling = Sampling(fps=3.0, clip_frames=3)  # clips of a second
    whole = chosen(path, sampling, by_clip=True, chunk_size=3)
    assert frames_of(whole) == frames_of(chosen(path, sampling))
    for chunk in whole:
        assert chunk.clip is not None
        start_s, end_s = chunk.clip
        assert end_s - start_s == pytest.approx(1.0)
        assert all(start_s - 1e-6 <= time_s < end_s for time_s in chunk.times_s)
        assert [sample.frame for sample in chunk.captioned] == chunk.frames[:1]
    assert len({chunk.clip for chunk in whole}) == len(whole)
    for place, chunk in enumerate(whole):
        rest = chosen(path, sampling, Position(chunk.frames[0], chunk.pts[0], place + 1), by_clip=True, chunk_size=3)
        assert [one.frames for one in rest] == [one.frames for one in whole[place + 1 :]]


def test_a_clip_that_does_not_fit_into_memory_fails_its_video(clip: Path) -> None:
    frame_bytes = SIDE * SIDE * 3
    plan = ReadPlan(
        sampling=Sampling(fps=4.0, clip_frames=4), pixels=Pixels(height=SIDE, width=SIDE), chunk_size=4, by_clip=True
    )
    reading = read_chunks(Video(str(clip), clip.name, 0, 0), plan, BlockPool(3 * frame_bytes, frame_bytes))
    with pytest.raises(StopIteration) as end:
        next(reading)
    assert "a clip of 4 frames of 60x60 takes 43200 bytes, more than the 32400" in end.value.value.error.message


MODES = {
    "every frame": Sampling(),
    "clips": Sampling(fps=4.0, clip_frames=2),
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


@pytest.mark.parametrize("mode", MODES)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(bad=st.sets(st.integers(0, COUNT - 1)), again=st.sets(st.integers(0, COUNT - 1)), share=st.floats(0, 1))
def test_rows_with_an_error_alone_are_asked_again_whatever_interrupts_it(
    tmp_path: Path, clip: Path, uninterrupted: Any, mode: str, bad: set[int], again: set[int], share: float
) -> None:
    output, _, similar = uninterrupted(mode)
    asked: list[int] = []

    def answer(chunk: Chunk) -> list[Answer]:
        asked.extend(chunk.frames)
        captions = zip(chunk.frames, shown(chunk), strict=True)
        return [Answer(error="no") if frame in bad else Answer(text) for frame, text in captions]

    def attempt(failing: set[int], **flags: Any) -> JobSummary:
        nonlocal bad
        bad = failing
        asked.clear()
        return run(tmp_path, clip, MODES[mode], answer, **flags)

    first = attempt(bad, restart=True)
    captioned, failing = set(asked), bad & set(asked)
    before = spool_of(tmp_path).stat().st_size
    second = attempt(bad & again, retry_failed=True)
    assert sorted(asked) == sorted(failing)
    assert bool(second.errors) == bool(captioned & bad)
    assert (second.frames, second.seen, second.similar) == (first.frames, first.seen, similar)
    whole = spool_of(tmp_path).read_bytes()
    spool_of(tmp_path).write_bytes(whole[: before + round(share * (len(whole) - before))])
    attempt(set())
    assert not asked
    last = attempt(set(), retry_failed=True)
    assert (last.errors, last.similar, last.seen) == (0, similar, first.seen)
    assert set(asked) <= failing
    assert (tmp_path / "captions.jsonl").read_bytes() == output


def test_a_failed_video_goes_on_after_carried_captions(tmp_path: Path, clip: Path, uninterrupted: Any) -> None:
    output, whole, _ = uninterrupted("carried")
    run(tmp_path, clip, MODES["carried"], restart=True)
    (tmp_path / "captions.jsonl").unlink()
    lines = whole.splitlines(keepends=True)
    place = next(n for n in range(2, len(lines)) if b'"carried"' in lines[n] and b'"carried"' in lines[n + 1])
    failed = spool.SpoolEnd("failed", place, place, 1, "send", place, "no", [], similar=place - 1)
    spool_of(tmp_path).write_bytes(b"".join(lines[: place + 1]) + spool.line_of(failed))
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
