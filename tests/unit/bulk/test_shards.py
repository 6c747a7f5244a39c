"""Shards: in any division, the merge writes what one machine would have written, or says what is missing."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bulk.cli import caption
from penstock.bulk.job import BulkJob
from penstock.bulk.outputs import OutputPaths
from penstock.bulk.progress import JobSummary
from penstock.bulk.shards import Shard, shard_of
from penstock.bulk.spool import WorkFolder
from penstock.errors import ConfigError, PenstockError
from support.bulk import FakeParts, FakeVideos, RecordingReporter, job_options


def paths(folder: Path) -> OutputPaths:
    return OutputPaths((folder / "c.jsonl", folder / "c.csv"), folder / "vtt", folder / "srt")


def run(source: Path, folder: Path, number: int, count: int, fake: FakeParts | None = None) -> JobSummary:
    """Runs one shard."""
    shard = Shard(number, count)
    work = shard.folder(folder / "c.jsonl")
    keys: dict[str, Any] = {"outputs": OutputPaths(()), "work": work, "failures": work / "failures.jsonl"}
    options = job_options(folder, source, shard=shard, **keys)
    return BulkJob(options, RecordingReporter(), (fake or FakeParts()).parts()).run()


def merge(folder: Path) -> JobSummary:
    options = job_options(folder, outputs=paths(folder), servers=(), work=folder / "c.jsonl.work")
    return BulkJob(options, RecordingReporter()).merge()


def written(folder: Path) -> dict[str, bytes]:
    files = [*folder.glob("c.*l"), *folder.glob("c.csv"), *folder.glob("*tt/*"), *folder.glob("failures.jsonl")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}


def make_videos(folder: Path, frames: list[int], damaged: int = -1) -> Path:
    folder.mkdir()
    for i, count in enumerate(frames):
        FakeVideos.make(folder / f"{i:02}.mp4", count, damaged=i == damaged)
    return folder


@settings(max_examples=40)
@given(
    frames=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    count=st.integers(1, 9),
    damaged=st.integers(0, 15),
    twice=st.booleans(),
)
def test_the_merge_writes_what_one_machine_writes(frames: list[int], count: int, damaged: int, twice: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        one, many = Path(name, "one"), Path(name, "many")
        one.mkdir()
        many.mkdir()
        source = make_videos(Path(name, "videos"), frames, damaged)
        whole = BulkJob(job_options(one, source, outputs=paths(one)), RecordingReporter(), FakeParts().parts()).run()
        for number in range(count, 0, -1):
            run(source, many, number, count)
        for _ in range(1 + twice):
            merged = merge(many)
            assert written(many) == written(one)
        assert (merged.videos, merged.complete, merged.failed, merged.frames, merged.exit_code) == (
            *(whole.videos, whole.complete, whole.failed, whole.frames, whole.exit_code),
        )


def shards(tmp_path: Path) -> Path:
    source = make_videos(tmp_path / "videos", [3, 4, 5, 6])
    for number in (1, 2, 3):
        run(source, tmp_path, number, 3)
    return source


def test_a_merge_says_what_does_not_fit(tmp_path: Path) -> None:
    source = shards(tmp_path)

    def refused(words: str) -> None:
        with pytest.raises(PenstockError, match=words):
            merge(tmp_path)
        assert not written(tmp_path)

    second, away = Shard(2, 3).folder(tmp_path / "c.jsonl"), tmp_path / "away"
    second.rename(away)
    refused("of 3 shards of .*, these are missing: 2")
    FakeVideos.make(source / "04.mp4", 1)
    run(source, tmp_path, 2, 3)
    refused("shard 1 of 3 and shard 2 of 3 had different lists of videos")
    shutil.rmtree(second)
    (source / "04.mp4").unlink()
    run(source, tmp_path, 2, 3, FakeParts(parameters={"model": "fake", "revision": "r2"}))
    refused('different configurations:\n  .*revision: was "r1", is "r2"')
    shutil.rmtree(second)
    run(source, tmp_path, 2, 4)
    refused("found shard 1 of 3 and shard 2 of 4")
    shutil.rmtree(Shard(2, 4).folder(tmp_path / "c.jsonl"))
    away.rename(second)
    FakeVideos.make(source / "01.mp4", 4)
    (spool,) = (second / "spool").iterdir()
    spool.write_bytes(spool.read_bytes()[:-9])
    refused("shard 2 of 3 has 1 unfinished videos: run it again")
    (second / "shard.json").write_text("{}")
    refused(r"cannot read .*shard.json.*run this shard again")
    run(source, tmp_path, 2, 3)
    with ExitStack() as opened:
        opened.callback(WorkFolder(second).close)
        refused("another job uses")
    assert merge(tmp_path).exit_code == 0
    shutil.rmtree(tmp_path / "c.jsonl.work")
    with pytest.raises(PenstockError, match="this job did not write it"):
        merge(tmp_path)


@pytest.mark.parametrize(
    ("text", "environ", "found"),
    [
        ("2/8", {}, (2, 8)),
        ("auto/8", {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "1"}, (7, 8)),
        ("auto/8", {"SLURM_ARRAY_TASK_ID": "7"}, (8, 8)),
        ("auto/8", {"JOB_COMPLETION_INDEX": "0"}, (1, 8)),
        ("0/8", {}, "found shard 0 of 8, expected 1/N to N/N"),
        ("9/8", {}, "found shard 9 of 8"),
        ("1/0", {}, "found shard 1 of 0"),
        ("2", {}, "expected for instance 2/8"),
        ("-1/3", {}, "expected for instance 2/8"),
        ("auto/8", {}, "none of SLURM_ARRAY_TASK_ID, JOB_COMPLETION_INDEX is set"),
    ],
)
def test_a_shard_is_a_number_or_the_schedulers(
    text: str, environ: dict[str, str], found: tuple[int, int] | str
) -> None:
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found):
            shard_of(text, environ)
    else:
        shard = shard_of(text, environ)
        assert (shard.number, shard.count) == found


def invoke(*words: str) -> Result:
    return CliRunner().invoke(caption, list(words))


def test_the_command_merges_and_refuses_outputs_of_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = invoke("merge", "-o", "c.jsonl", "--also", "c.csv")
    assert (done.exit_code, "4 of 4 videos complete" in done.output) == (0, True), done.output
    assert len((tmp_path / "c.csv").read_text().splitlines()) == 1 + 3 + 4 + 5 + 6
    none = invoke("merge", "-o", "other.jsonl")
    assert (none.exit_code, "there are no shards of other.jsonl" in none.output) == (2, True)
    wrong = invoke("videos", "--server", "http://a", "--shard", "1/2", "--vtt", "v")
    assert (wrong.exit_code, "give --vtt to penstock caption merge" in wrong.output) == (2, True)
    suffix = invoke("videos", "--server", "http://a", "--shard", "1/2", "-o", "c.txt")
    assert (suffix.exit_code, "the suffix of 'c.txt'" in suffix.output) == (2, True)
