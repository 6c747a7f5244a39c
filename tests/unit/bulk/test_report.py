from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.bulk import spool
from penstock.bulk.outputs import OutputError
from penstock.bulk.report import Summary, write_failures
from penstock.bulk.spool import End
from penstock.bulk.types import Row, Video
from penstock.errors import PenstockError


def test_exit_codes_tell_what_became_of_the_job() -> None:
    assert Summary(videos=2, complete=2).exit_code == 0
    assert Summary(videos=2, complete=1, failed=1).exit_code == 3
    assert Summary(videos=2, complete=1).exit_code == 3
    assert Summary(videos=2, complete=2, stopped=PenstockError("the disk")).exit_code == 3
    assert Summary(videos=2, complete=1, failed=1, interrupted=True).exit_code == 130


def test_the_sums_say_what_to_do_next() -> None:
    done = Summary(videos=3, complete=1, failed=1, partial=1, frames=1234, new_frames=100, seconds=4.0)
    done.failures, done.outputs = "failures.jsonl", ("captions.jsonl",)
    said = "\n".join(done.lines())
    for part in ("1 of 3 videos complete", "1,234 captions", "25.0 frames/s", "failures.jsonl", "--retry-failed"):
        assert part in said
    assert "1 videos are not finished: the same command goes on" in said
    fields = json.loads(json.dumps(done.fields()))
    assert (fields["unfinished"], fields["stopped"], fields["exit_code"]) == (1, None, 3)


def test_failures_are_listed_in_the_order_of_the_videos_and_an_old_list_goes(tmp_path: Path) -> None:
    videos = [Video(name, name, 1, 2) for name in ("b", "a\n", "changed", "new")]
    spools = [(video, tmp_path / f"{n}.spool") for n, video in enumerate(videos)]
    end = End("failed", 1, 5, 2, "decode", 5, "broken")
    for video, path in spools[:3]:
        of = video if video.name != "changed" else Video("changed", "changed", 9, 9)
        row = spool.row_line(0, Row(0, 0.0, None, "x"))
        spool.append(path, spool.head_line(of) + row + spool.end_line(end), anew=True)
    path = tmp_path / "failures.jsonl"
    assert write_failures(path, spools)
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert [failure["path"] for failure in told] == ["b", "a\n"]
    assert told[0] == {"path": "b", "stage": "decode", "frame": 5, "error": "broken", "attempts": 2, "captions": 1}
    assert not write_failures(path, spools[3:])
    assert not path.exists()


def test_a_list_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        write_failures(tmp_path, [])  # a folder
