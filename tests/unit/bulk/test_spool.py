"""Spools and their work folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.bulk import spool
from penstock.bulk.spool import (
    FingerprintDiffers,
    FolderError,
    SpoolEnd,
    SpoolError,
    WorkFolder,
    differences,
    fingerprint,
    fingerprint_digest,
    spool_key,
)
from penstock.bulk.types import CaptionRow, Gap, Pixels, Position, Sampling, Video

VIDEO = Video("a/b.mp4", "a/b.mp4", 123, 456)
CAPTIONS = ["a dog", "zwei Hunde – ünd 狗", 'a "quote"\nand a line', "", "\u2028"]


def row(number: int) -> CaptionRow:
    pts = None if number == 2 else number * 300
    return CaptionRow(number * 3, number * 0.1, pts, CAPTIONS[number % len(CAPTIONS)], row=number)


def lines(rows: int, end: SpoolEnd | None = None) -> bytes:
    head = [spool.head_line(VIDEO)]
    return b"".join(head + [spool.line_of(row(n)) for n in range(rows)] + ([spool.line_of(end)] if end else []))


def written(folder: Path, data: bytes) -> Path:
    path = folder / "spool.jsonl"
    path.write_bytes(data)
    return path


def test_rows_can_be_read_back(tmp_path: Path) -> None:
    path = written(tmp_path, lines(7, SpoolEnd("complete", 7, 20)))
    assert list(spool.rows(path)) == [row(n) for n in range(7)]
    found = spool.scan(path)
    assert found is not None
    assert (found.rows, found.last, found.end) == (7, Position(18, 1800, 7), SpoolEnd("complete", 7, 20))
    assert found.is_of(VIDEO)
    assert not found.is_of(Video(VIDEO.path, VIDEO.name, 123, 457))


@given(size=st.integers(0, len(lines(6, SpoolEnd("complete", 6, 18)))), garbage=st.binary(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=300)
def test_a_spool_truncated_anywhere_continues_to_the_same_bytes(tmp_path: Path, size: int, garbage: bytes) -> None:
    whole = lines(6, SpoolEnd("complete", 6, 18))
    path = written(tmp_path, whole[:size] + garbage)
    found = spool.scan(path)
    if found is None or found.bytes > len(whole) or path.read_bytes()[: found.bytes] != whole[: found.bytes]:
        # either the garbage happens to form a line, or the head is incomplete
        assert found is None
        spool.append(path, whole, overwrite=True)
    else:
        spool.truncate(path, found.bytes)
        rest = [spool.line_of(row(n)) for n in range(found.rows, 6)]
        end = [spool.line_of(SpoolEnd("complete", 6, 18))] if found.end is None else []
        spool.append(path, b"".join(rest + end))
        if found.rows and found.end is None:
            assert found.last == Position(row(found.rows - 1).frame, row(found.rows - 1).pts, found.rows)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "line",
    [
        spool.line_of(row(4)),  # a gap
        spool.line_of(row(2)),  # a repeat
        spool.line_of(CaptionRow(6, 0.1, None, "x", row=3)),  # an earlier frame
        b'{"row":3,"frame":9,"time":0.3,"pts":null,"capt\n',
        b'{"row":3,"frame":9,"time":0.3,"pts":null,"caption":"x","more":1}\n',
        b'{"row":"3","frame":9,"time":0.3,"pts":null,"caption":"x"}\n',
        b'{"end":"complete","rows":4}\n',
        b'{"end":"perhaps","rows":3}\n',
        b"\0" * 100 + b"\n",
        b"\xff\xfe\n",
        spool.line_of(row(3))[:-1],
    ],
)
def test_an_invalid_line_and_all_after_it_count_as_never_written(tmp_path: Path, line: bytes) -> None:
    good = lines(3)
    path = written(tmp_path, good + line + spool.line_of(row(3)))
    found = spool.scan(path)
    assert found is not None
    assert (found.rows, found.bytes, found.end) == (3, len(good), None)


@pytest.mark.parametrize("data", [b"", b"\n", b'{"video":"x"}\n', lines(0)[:-1], b"\0\0\0\0\n", b"no json\n"])
def test_a_spool_without_a_complete_head_is_empty(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path, data)
    assert spool.scan(path) is None
    assert spool.read_end(path) is None


def test_a_missing_spool_is_empty(tmp_path: Path) -> None:
    assert spool.scan(tmp_path / "none") is None
    assert spool.read_end(tmp_path / "none") is None


def test_read_end_returns_the_end_of_a_finished_video(tmp_path: Path) -> None:
    end = SpoolEnd("failed", 5000, 9, 2, "decode", 7, "broken")
    path = written(tmp_path, lines(5000, end))
    found = spool.read_end(path)
    assert found is not None
    assert (found.rows, found.end, found.attempts, found.last) == (5000, end, 2, None)
    long = replace(end, gaps=[Gap(n, 1, "Invalid data found when processing input", n + 9) for n in range(3000)])
    found = spool.read_end(written(tmp_path, lines(5, replace(long, rows=5))))
    assert found is not None
    assert found.gaps == long.gaps
    assert spool.read_end(written(tmp_path, lines(5000))) is None
    assert spool.read_end(written(tmp_path, lines(3, end)[:-1])) is None


def test_rows_after_a_failed_end_belong_to_another_attempt(tmp_path: Path) -> None:
    data = lines(2, SpoolEnd("failed", 2, 6, 3, "send", 6, "away")) + spool.line_of(row(2))
    found = spool.scan(written(tmp_path, data))
    assert found is not None
    assert (found.rows, found.end, found.attempts) == (3, None, 3)
    again = data + spool.line_of(SpoolEnd("complete", 3, 9))
    assert len(list(spool.rows(written(tmp_path, again)))) == 3


def test_a_write_error_has_path_and_reason(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="No such file"):
        spool.append(tmp_path / "no" / "folder", b"x")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_lines_are_synced_before_they_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spool"
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(path.read_bytes()))
    spool.append(path, b"head\n", overwrite=True)
    spool.append(path, b"row\n")
    assert synced == [b"head\n", b"head\nrow\n"]


def test_a_full_disk_is_reported() -> None:
    with pytest.raises(SpoolError, match="No space left"):
        spool.append(Path("/dev/full"), b"x" * 10)


def test_a_damaged_spool_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, lines(1) + b'{"row":1,"fr\n')
    with pytest.raises(SpoolError, match="--restart"):
        list(spool.rows(path))


def test_two_jobs_never_share_a_folder(tmp_path: Path) -> None:
    first = WorkFolder(tmp_path / "work")
    with pytest.raises(FolderError, match="another job uses"):
        WorkFolder(tmp_path / "work")
    first.close()
    WorkFolder(tmp_path / "work").close()


def test_a_disk_without_locks_is_not_mistaken_for_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("penstock.bulk.spool.fcntl.flock", flock)
    with pytest.raises(FolderError, match=r"cannot lock .*: No locks available; put the output"):
        WorkFolder(tmp_path / "work")


def test_another_configuration_is_rejected_with_the_difference_unless_restarted(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path / "work")
    folder.require({"kernel": "fast", "fps": None}, restart=False)
    (folder.path / "spool" / "x.jsonl").write_text("captions")
    folder.require({"kernel": "fast", "fps": None}, restart=False)
    with pytest.raises(FingerprintDiffers, match='kernel: was "fast", is "exact"') as caught:
        folder.require({"kernel": "exact", "fps": None}, restart=False)
    assert "--restart" in caught.value.message
    assert (folder.path / "spool" / "x.jsonl").exists()
    folder.require({"kernel": "exact", "fps": None}, restart=True)
    assert not list((folder.path / "spool").iterdir())
    assert folder.fingerprint() == {"kernel": "exact", "fps": None}
    folder.close()


def test_captions_without_a_fingerprint_are_discarded(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path / "work")
    (folder.path / "spool" / "x.jsonl").write_text("of a job that was killed while it began anew")
    folder.require({"kernel": "fast"}, restart=False)
    assert not list((folder.path / "spool").iterdir())
    folder.close()


def test_a_damaged_fingerprint_does_not_count_as_missing(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path / "work")
    (folder.path / "job.json").write_text('{"finger')
    with pytest.raises(FolderError, match="--restart"):
        folder.require({"kernel": "fast"}, restart=False)
    folder.require({"kernel": "fast"}, restart=True)
    folder.close()


def test_the_list_of_videos_keeps_paths_that_are_not_valid_text(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path / "work")
    with pytest.raises(FolderError, match="no videos are named"):
        folder.videos()
    videos = [Video(os.fsdecode(b"a\xff\n.mp4"), "a\\xff\n.mp4", 3, 4), Video("-ü.mp4", "-ü.mp4", 0, 0)]
    folder.save_videos(videos)
    assert folder.videos() == videos
    assert spool_key(videos[0]) != spool_key(videos[1])
    folder.close()


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="cannot make the work folder"):
        WorkFolder(tmp_path / "file" / "work")


def test_a_failing_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    folder = WorkFolder(tmp_path / "work")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FolderError, match="No space left"):
        folder.require({"kernel": "fast"}, restart=False)
    with pytest.raises(FolderError, match="No space left"):
        folder.save_videos([Video("a", "a", 0, 0)])
    assert folder.fingerprint() is None
    folder.close()


MODEL = {"model": "blip", "revision": "r1", "prompt": "", "max_new_tokens": 30, "precision": "bf16"}


def test_a_setting_that_changes_captions_changes_the_fingerprint_and_is_named() -> None:
    was = fingerprint(MODEL, Sampling(), Pixels(height=4, width=4))
    changes = {
        "revision": fingerprint(MODEL | {"revision": "r2"}, Sampling(), Pixels(height=4, width=4)),
        "prompt": fingerprint(MODEL | {"prompt": "a photo"}, Sampling(), Pixels(height=4, width=4)),
        "every": fingerprint(MODEL, Sampling(every=2), Pixels(height=4, width=4)),
        "fps": fingerprint(MODEL, Sampling(fps=1.5), Pixels(height=4, width=4)),
        "kernel": fingerprint(MODEL, Sampling(), Pixels(kernel="exact", height=4, width=4)),
        "pixels": fingerprint(MODEL, Sampling(), Pixels("jpeg", height=4, width=4)),
        "width": fingerprint(MODEL, Sampling(), Pixels(height=4, width=5)),
    }
    for field, now in changes.items():
        assert [line.partition(":")[0] for line in differences(was, now)] == [field]
        assert fingerprint_digest(now) != fingerprint_digest(was)
    assert differences(was, changes["kernel"]) == ['kernel: was "fast", is "exact"']
    assert differences(was, changes["fps"]) == ["fps: was not set, is 1.5"]


def test_a_setting_that_changes_no_caption_keeps_the_fingerprint() -> None:
    one = fingerprint(MODEL, Sampling(), Pixels(height=4, width=4))
    assert fingerprint(MODEL | {"instances": 8, "max_batch_size": 64}, Sampling(), Pixels(height=4, width=4)) == one
    fast, exact = (fingerprint(MODEL, Sampling(), Pixels("source", kernel)) for kernel in ("fast", "exact"))
    assert fast == exact  # the client scales nothing


def test_a_removed_field_is_a_difference() -> None:
    assert differences({"a": 1, "old": 2}, {"a": 1}) == ["old: was 2, is not set"]
