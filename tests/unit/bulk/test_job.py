from __future__ import annotations

import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.bulk import spool
from penstock.bulk.endpoints import NoServer
from penstock.bulk.job import BulkJob, JobParts, RunCounters
from penstock.bulk.outputs import OutputPaths
from penstock.bulk.progress import JobSummary
from penstock.bulk.sender import Undelivered
from penstock.bulk.servers import ServerInfo, ServersDiffer
from penstock.bulk.spool import FingerprintDiffers, FolderError
from penstock.bulk.types import Chunk, Sampling, Video
from penstock.errors import ConfigError, PenstockError, Unauthorized
from support.bulk import FakeParts, FakeVideos, RecordingReporter, job_options, server_info


def videos(folder: Path, *frames: int) -> Path:
    """A folder with videos a.mp4, b.mp4 ... with these numbers of frames."""
    inside = folder / "videos"
    inside.mkdir(exist_ok=True)
    for n, count in enumerate(frames):
        FakeVideos.make(inside / f"{chr(97 + n)}.mp4", count)
    return inside


def run(folder: Path, fake: FakeParts, *inputs: Path, **changed: Any) -> JobSummary:
    return BulkJob(job_options(folder, *inputs, **changed), RecordingReporter(), fake.parts()).run()


def captions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]


def expected(source: Path, every: int = 1) -> list[dict[str, Any]]:
    return [
        {"video": str(path), "frame": n, "time": n / 10, "caption": f"{path.name} frame {n}"}
        for path in sorted(source.iterdir())
        for n in range(0, int(path.read_text().split()[0]), every)
    ]


def test_every_frame_is_captioned_once_and_in_order(tmp_path: Path) -> None:
    source = videos(tmp_path, 37, 0, 1, 200, 16)
    summary = run(tmp_path, FakeParts(), source, decoders=3)
    assert captions(tmp_path) == expected(source)
    assert (summary.exit_code, summary.complete, summary.frames, summary.new_frames) == (0, 5, 254, 254)
    assert not (tmp_path / "failures.jsonl").exists()


def test_a_file_that_the_job_did_not_write_is_never_replaced(tmp_path: Path) -> None:
    source = videos(tmp_path, 3)
    also = {"outputs": OutputPaths((tmp_path / "captions.jsonl", tmp_path / "b.csv"), vtt=tmp_path / "vtt")}
    (tmp_path / "vtt").mkdir()
    for name in ("captions.jsonl", "b.csv", "failures.jsonl", "vtt/a.vtt"):
        (tmp_path / name).write_text("precious")
        fake = FakeParts()
        with pytest.raises(FolderError, match=rf"{name}' exists, and this job did not write it: move it away"):
            run(tmp_path, fake, source, restart=True, **also)
        assert (fake.videos.read, (tmp_path / name).read_text()) == ([], "precious")
        (tmp_path / name).unlink()
    run(tmp_path, FakeParts(), source)
    run(tmp_path, FakeParts(), source, **also)  # its own file, and new ones
    assert (tmp_path / "vtt" / "a.vtt").exists()
    other = {"work": tmp_path / "other.jsonl.work", "failures": tmp_path / "f.jsonl"}
    with pytest.raises(FolderError, match=r"captions.jsonl' exists"):
        run(tmp_path, FakeParts(), source, **other)
    assert captions(tmp_path) == expected(source)
    (tmp_path / "captions.jsonl.work" / "outputs.json").unlink()  # as an earlier version left it
    run(tmp_path, FakeParts(), source)


def test_jobs_in_one_folder_keep_the_files_of_each_other(tmp_path: Path) -> None:
    source = videos(tmp_path, 3)
    damaged = {"work": tmp_path / "d.work", "outputs": OutputPaths((tmp_path / "d.csv",))}
    run(tmp_path, FakeParts(), source)
    run(tmp_path, FakeParts(), FakeVideos.make(tmp_path / "d.mp4", 3, damaged=True), **damaged)
    listed = (tmp_path / "failures.jsonl").read_bytes()
    with pytest.raises(FolderError, match=r"failures.jsonl' exists"):
        run(tmp_path, FakeParts(), source)
    assert (tmp_path / "failures.jsonl").read_bytes() == listed

    def meanwhile(chunk: Chunk) -> None:
        (tmp_path / "c.csv").write_text("precious")

    late = {
        "work": tmp_path / "c.work",
        "outputs": OutputPaths((tmp_path / "c.csv",)),
        "failures": tmp_path / "f.jsonl",
    }
    summary = run(tmp_path, FakeParts(meanwhile), source, **late)
    assert isinstance(summary.stopped, FolderError)
    assert (tmp_path / "c.csv").read_text() == "precious"
    (tmp_path / "c.csv").unlink()
    assert run(tmp_path, FakeParts(), source, **late).exit_code == 0


def test_a_second_run_sends_nothing_and_writes_the_same(tmp_path: Path) -> None:
    source = videos(tmp_path, 9, 4)
    run(tmp_path, FakeParts(), source)
    before = (tmp_path / "captions.jsonl").read_bytes()
    (tmp_path / "captions.jsonl").unlink()
    fake = FakeParts()
    summary = run(tmp_path, fake, source)
    assert fake.videos.read == []
    assert (summary.exit_code, summary.frames, summary.new_frames) == (0, 13, 0)
    assert (tmp_path / "captions.jsonl").read_bytes() == before


def test_outputs_can_be_written_again_without_server_and_inputs(tmp_path: Path) -> None:
    source = videos(tmp_path, 9, 4)
    run(tmp_path, FakeParts(), source)
    wanted = OutputPaths((tmp_path / "captions.jsonl", tmp_path / "more" / "captions.csv"))
    assert run(tmp_path, FakeParts(), servers=(), outputs=wanted).exit_code == 0
    assert len((tmp_path / "more" / "captions.csv").read_text().splitlines()) == 14
    with pytest.raises(ConfigError, match="no --server"):
        run(tmp_path, FakeParts(), source, servers=(), work=tmp_path / "other.work")


def test_a_failed_chunk_fails_its_video_after_earlier_captions_and_no_other(tmp_path: Path) -> None:
    source = videos(tmp_path, 30, 30)

    def answer(chunk: Chunk) -> PenstockError | None:
        bad = chunk.video.name.endswith("a.mp4") and 17 in chunk.frames
        return Undelivered("the server failed 8 times") if bad else None

    summary = run(tmp_path, FakeParts(answer), source)
    assert (summary.exit_code, summary.failed, summary.partial, summary.complete) == (3, 1, 1, 1)
    assert captions(tmp_path) == [row for row in expected(source) if row["frame"] < 16 or "b.mp4" in row["video"]]
    failure = json.loads((tmp_path / "failures.jsonl").read_text())
    assert failure == {
        "path": str(source / "a.mp4"), "stage": "send", "frame": 16, "error": "the server failed 8 times",
        "attempts": 1, "captions": 16,
    }  # fmt: skip
    quiet = FakeParts()
    assert run(tmp_path, quiet, source).exit_code == 3  # failed ones stay failed
    assert quiet.videos.read == []
    again = FakeParts()
    assert run(tmp_path, again, source, retry_failed=True).exit_code == 0
    assert [(Path(name).name, at and at.frame) for name, at in again.videos.read] == [("a.mp4", 15)]
    assert captions(tmp_path) == expected(source)
    assert not (tmp_path / "failures.jsonl").exists()


def test_captions_before_the_damage_are_kept_and_attempts_are_counted(tmp_path: Path) -> None:
    source = videos(tmp_path, 5)
    FakeVideos.make(source / "z.mp4", 10, damaged=True)
    assert run(tmp_path, FakeParts(), source).exit_code == 3
    assert captions(tmp_path) == expected(source)
    for attempts in (2, 3):
        assert run(tmp_path, FakeParts(), source, retry_failed=True).exit_code == 3
        failure = json.loads((tmp_path / "failures.jsonl").read_text())
        assert (failure["stage"], failure["frame"], failure["attempts"], failure["captions"]) == (
            "decode", 10, attempts, 10,
        )  # fmt: skip
    assert captions(tmp_path) == expected(source)


@pytest.mark.parametrize("error", [NoServer("nobody answers"), Unauthorized("no")])
def test_an_error_of_all_servers_stops_the_job_and_fails_no_video(tmp_path: Path, error: PenstockError) -> None:
    source = videos(tmp_path, 40, 40)
    summary = run(tmp_path, FakeParts(lambda chunk: error if 21 in chunk.frames else None), source)
    assert (summary.stopped, summary.exit_code, summary.failed, summary.unfinished) == (error, 3, 0, 2)
    assert not (tmp_path / "captions.jsonl").exists()
    assert error.message in "\n".join(summary.lines())
    assert run(tmp_path, FakeParts(), source).exit_code == 0
    assert captions(tmp_path) == expected(source)


def test_servers_that_caption_nothing_stop_the_job_before_they_fail_every_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(chunk: Chunk) -> PenstockError:
        time.sleep(0.005)  # slower than the disk: otherwise all videos fail before one is committed
        return Undelivered("it is a 500")

    monkeypatch.setattr(spool.os, "fsync", lambda file: None)
    source = tmp_path / "videos"
    source.mkdir()
    for n in range(200):
        FakeVideos.make(source / f"{n:03}.mp4", 5)
    summary = run(tmp_path, FakeParts(refuse), source)
    assert summary.exit_code == 3
    assert summary.stopped is not None
    assert "10 videos in a row failed at the servers, the last: it is a 500" in summary.stopped.message
    assert summary.failed >= 10
    assert summary.unfinished > 0
    assert run(tmp_path, FakeParts(), source, retry_failed=True).exit_code == 0
    assert captions(tmp_path) == expected(source)


def test_some_videos_that_fail_at_the_server_do_not_stop_the_others(tmp_path: Path) -> None:
    source = tmp_path / "videos"
    source.mkdir()
    for n in range(60):
        FakeVideos.make(source / f"{n:03}.mp4", 3)
    bad = FakeParts(lambda chunk: Undelivered("no") if int(Path(chunk.video.name).stem) % 3 else None)
    summary = run(tmp_path, bad, source, decoders=1)
    assert (summary.failed, summary.complete, summary.stopped) == (40, 20, None)


def test_an_interrupted_job_keeps_its_captions_and_the_next_run_continues(tmp_path: Path) -> None:
    source = videos(tmp_path, 400)
    jobs: list[BulkJob] = []
    interrupted = threading.Event()

    answered: set[int] = set()

    def answer(chunk: Chunk) -> None:
        answered.update(chunk.frames)
        if {0, 41} <= answered and not interrupted.is_set():
            jobs[0].interrupt()
            interrupted.set()
        if interrupted.is_set():
            time.sleep(0.02)  # gives the job time to react before every chunk has its result

    fake = FakeParts(answer)
    jobs.append(BulkJob(job_options(tmp_path, source), RecordingReporter(), fake.parts()))
    summary = jobs[0].run()
    assert (summary.exit_code, summary.unfinished, summary.interrupted) == (130, 1, True)
    assert 0 < summary.frames < 400
    assert not (tmp_path / "captions.jsonl").exists()
    again = FakeParts()
    assert run(tmp_path, again, source).exit_code == 0
    ((_, at),) = again.videos.read
    assert at is not None
    assert at.taken == at.frame + 1 == summary.frames
    assert captions(tmp_path) == expected(source)


def test_another_configuration_is_rejected_before_anything_is_sent(tmp_path: Path) -> None:
    source = videos(tmp_path, 5)
    run(tmp_path, FakeParts(), source)
    before = (tmp_path / "captions.jsonl").read_bytes()
    fake = FakeParts()
    with pytest.raises(FingerprintDiffers, match="every: was 1, is 2"):
        run(tmp_path, fake, source, sampling=Sampling(every=2))
    assert fake.videos.read == []
    assert (tmp_path / "captions.jsonl").read_bytes() == before
    other = {**server_info().parameters, "revision": "r2"}
    with pytest.raises(FingerprintDiffers, match='revision: was "r1", is "r2"'):
        run(tmp_path, FakeParts(parameters=other), source)
    assert run(tmp_path, FakeParts(), source, sampling=Sampling(every=2), restart=True).exit_code == 0
    assert captions(tmp_path) == expected(source, every=2)


def test_chunk_size_and_decoders_may_change_between_runs(tmp_path: Path) -> None:
    source = videos(tmp_path, 50, 3)
    fake = FakeParts(lambda chunk: NoServer("gone") if 30 in chunk.frames else None)
    run(tmp_path, fake, source, prebatch_size=3, decoders=1)
    assert run(tmp_path, FakeParts(), source, prebatch_size=7, decoders=2).exit_code == 0
    assert captions(tmp_path) == expected(source)


@given(cuts=st.lists(st.floats(0, 1), min_size=3, max_size=3), garbage=st.binary(max_size=20))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=30, deadline=None
)
def test_spools_truncated_at_any_byte_lead_to_the_same_output(
    tmp_path: Path, cuts: list[float], garbage: bytes
) -> None:
    source = videos(tmp_path, 13, 0, 22)
    run(tmp_path, FakeParts(), source)
    before = (tmp_path / "captions.jsonl").read_bytes()
    spools = sorted((tmp_path / "captions.jsonl.work" / "spool").iterdir())
    for path, cut in zip(spools, cuts, strict=True):
        data = path.read_bytes()
        path.write_bytes(data[: round(len(data) * cut)] + (garbage if cut < 1 else b""))
    assert run(tmp_path, FakeParts(), source).exit_code == 0
    assert (tmp_path / "captions.jsonl").read_bytes() == before


def test_a_changed_file_begins_anew_and_is_named(tmp_path: Path) -> None:
    source = videos(tmp_path, 6, 6)
    run(tmp_path, FakeParts(), source)
    FakeVideos.make(source / "a.mp4", 11)
    fake, listener = FakeParts(), RecordingReporter()
    assert BulkJob(job_options(tmp_path, source), listener, fake.parts()).run().exit_code == 0
    assert [Path(name).name for name, at in fake.videos.read if at is None] == ["a.mp4"]
    assert captions(tmp_path) == expected(source)
    assert any("changed" in line and "a.mp4" in line for line in listener.notes)


def test_a_file_changed_between_runs_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = videos(tmp_path, 40)
    run(tmp_path, FakeParts(lambda chunk: NoServer("gone") if 20 in chunk.frames else None), source)
    FakeVideos.make(source / "a.mp4", 41, damaged=True)
    fake = FakeParts()
    assert run(tmp_path, fake, source).failed == 1
    assert [at for _, at in fake.videos.read] == [None]
    assert [row["frame"] for row in captions(tmp_path)] == [*range(41)]
    assert "changed" in caplog.text


def test_inputs_added_later_are_written_in_the_order_of_the_inputs(tmp_path: Path) -> None:
    source = videos(tmp_path, 3, 4)
    run(tmp_path, FakeParts(), source / "b.mp4")
    fake = FakeParts()
    run(tmp_path, fake, source / "b.mp4", source / "a.mp4")
    assert [Path(name).name for name, _ in fake.videos.read] == ["a.mp4"]
    assert [Path(row["video"]).name for row in captions(tmp_path)] == ["b.mp4"] * 4 + ["a.mp4"] * 3


def test_a_full_disk_stops_the_job_and_a_later_run_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = videos(tmp_path, 60, 60)
    real, written = os.write, [0]

    def write(file: int, data: Any) -> int:
        room = 3000 - written[0]
        if room <= 0:
            raise OSError(28, "No space left on device")
        written[0] += min(len(data), room)
        return real(file, data[:room])

    monkeypatch.setattr(spool.os, "write", write)
    summary = run(tmp_path, FakeParts(), source, prebatch_size=2)
    monkeypatch.undo()
    assert (summary.exit_code, summary.failed) == (3, 0)
    assert summary.stopped is not None
    assert "No space left on device" in summary.stopped.message
    assert "what was committed before stays" in summary.stopped.message
    assert run(tmp_path, FakeParts(), source).exit_code == 0
    assert captions(tmp_path) == expected(source)


def test_a_full_disk_at_the_end_keeps_the_captions(tmp_path: Path) -> None:
    source = videos(tmp_path, 5)
    blocked = tmp_path / "blocked"

    def block(chunk: Chunk) -> None:
        blocked.write_text("a file where a folder should be, since the job began")

    summary = run(tmp_path, FakeParts(block), source, outputs=OutputPaths((blocked / "captions.jsonl",)))
    assert summary.exit_code == 3
    assert summary.stopped is not None
    assert "the captions are kept" in summary.stopped.message
    assert run(tmp_path, FakeParts(), source).exit_code == 0
    assert captions(tmp_path) == expected(source)


def test_a_clock_that_jumps_changes_no_row_and_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = videos(tmp_path, 60, 30)
    jumps = itertools.cycle((0.0, 4e9, 1e9, 1.7e9))
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    reporter = RecordingReporter()
    slow = FakeParts(lambda chunk: time.sleep(0.01))
    summary = BulkJob(job_options(tmp_path, source), reporter, slow.parts()).run()
    monkeypatch.undo()
    assert captions(tmp_path) == expected(source)
    assert 0 < summary.seconds < 30
    assert all(0 <= now.elapsed_s < 30 and now.frames_per_s >= 0 for now in reporter.shown)


def test_single_mode_waits_for_a_round_before_decoding_the_next(tmp_path: Path) -> None:
    source = videos(tmp_path, 130)
    fake = FakeParts(lambda chunk: waiting.append(len(fake.sender.sent)) if fake.sender else None)  # type: ignore[func-returns-value]
    waiting: list[int] = []
    run(tmp_path, fake, source, mode="single", memory_bytes=1 << 20)
    assert captions(tmp_path) == expected(source)
    assert max(waiting[:50]) <= 50
    assert max(waiting[:100]) <= 100
    assert fake.sender is not None
    assert all(len(frames) == 1 for _, frames in fake.sender.sent)


def test_a_thousand_small_videos_need_few_open_files(tmp_path: Path) -> None:
    source = tmp_path / "videos"
    source.mkdir()
    for n in range(1_000):
        FakeVideos.make(source / f"{n:05}.mp4", n % 3)
    most = [0]
    here = os.path.isdir("/proc/self/fd")
    others = set(threading.enumerate())  # another test may have left a hanging model's thread

    def look(chunk: Chunk) -> None:
        if here and chunk.video.name.endswith("7.mp4"):
            most[0] = max(most[0], len(os.listdir("/proc/self/fd")))

    before = len(os.listdir("/proc/self/fd")) if here else 0
    fake = FakeParts(look)
    monitored = pytest.MonkeyPatch()
    monitored.setattr(spool.os, "fsync", lambda file: None)  # a thousand syncs would measure the disk
    try:
        summary = run(tmp_path, fake, source)
    finally:
        monitored.undo()
    assert (summary.exit_code, summary.complete, summary.frames) == (0, 1_000, 999)
    assert captions(tmp_path) == expected(source)
    assert fake.videos.open_at_once <= 2
    assert most[0] - before < 16
    assert not {thread.name for thread in set(threading.enumerate()) - others if thread.name.startswith("penstock-")}


def test_an_unexpected_error_in_a_decoder_fails_only_its_video(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = videos(tmp_path, 6, 6)
    fake = FakeParts()
    (source / "a.mp4").write_text("not a number")
    summary = run(tmp_path, fake, source)
    assert (summary.failed, summary.complete, summary.exit_code) == (1, 1, 3)
    assert "ValueError" in (tmp_path / "failures.jsonl").read_text()


def test_servers_that_differ_are_rejected(tmp_path: Path) -> None:
    source = videos(tmp_path, 2)
    found = iter([server_info(), server_info(revision="r2")])
    parts = FakeParts().parts()

    def ask(*_: object, **__: object) -> ServerInfo:
        return next(found)

    with pytest.raises(ServersDiffer):
        BulkJob(
            job_options(tmp_path, source, servers=("http://a", "http://b")),
            RecordingReporter(),
            JobParts(ask, parts.read_chunks, parts.probe, parts.sender),
        ).run()


def test_progress_ends_with_the_exact_totals(tmp_path: Path) -> None:
    source = videos(tmp_path, 40, 2)
    listener = RecordingReporter()
    BulkJob(job_options(tmp_path, source), listener, FakeParts().parts()).run()
    last = listener.shown[-1]
    assert (last.frames, last.frames_total, last.videos, last.videos_total, last.failed) == (42, 42, 2, 2, 0)


def test_totals_count_unknown_videos_as_the_mean_of_the_others() -> None:
    videos = [Video(name, name, 0, 0) for name in "abcd"]
    counters = RunCounters(4)
    assert counters.expected_frames() is None
    counters.expect(videos[0], 100, known=False)
    assert counters.expected_frames() == 400
    counters.expect(videos[1], 50, known=False)
    assert counters.expected_frames() == 300
    counters.expect(videos[0], 90, known=True)
    counters.expect(videos[0], 100, known=False)  # a late prober
    for video in videos[1:]:
        counters.expect(video, 10, known=True)
    assert counters.expected_frames() == 120
