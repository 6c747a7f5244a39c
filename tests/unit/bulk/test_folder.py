from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.bulk.fingerprint import FingerprintDiffers
from penstock.bulk.folder import FolderError, WorkFolder, key
from penstock.bulk.types import Video


def test_two_jobs_never_share_a_folder(tmp_path: Path) -> None:
    first = WorkFolder(tmp_path / "work")
    with pytest.raises(FolderError, match="another job uses"):
        WorkFolder(tmp_path / "work")
    first.close()
    WorkFolder(tmp_path / "work").close()


def test_a_disk_without_locks_is_not_taken_for_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("penstock.bulk.folder.fcntl.flock", flock)
    with pytest.raises(FolderError, match=r"cannot lock .*: No locks available; put the output"):
        WorkFolder(tmp_path / "work")


def test_another_configuration_is_refused_with_the_difference_unless_the_captions_are_discarded(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path / "work")
    folder.agree({"kernel": "fast", "fps": None}, restart=False)
    (folder.path / "spool" / "x.jsonl").write_text("captions")
    folder.agree({"kernel": "fast", "fps": None}, restart=False)
    with pytest.raises(FingerprintDiffers, match='kernel: was "fast", is "exact"') as caught:
        folder.agree({"kernel": "exact", "fps": None}, restart=False)
    assert "--restart" in caught.value.message
    assert (folder.path / "spool" / "x.jsonl").exists()
    folder.agree({"kernel": "exact", "fps": None}, restart=True)
    assert not list((folder.path / "spool").iterdir())
    assert folder.fingerprint() == {"kernel": "exact", "fps": None}
    folder.close()


def test_captions_without_a_fingerprint_are_never_taken_for_ones_own(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path / "work")
    (folder.path / "spool" / "x.jsonl").write_text("of a job that was killed while it began anew")
    folder.agree({"kernel": "fast"}, restart=False)
    assert not list((folder.path / "spool").iterdir())
    folder.close()


def test_a_damaged_fingerprint_is_never_taken_for_none(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path / "work")
    (folder.path / "job.json").write_text('{"finger')
    with pytest.raises(FolderError, match="--restart"):
        folder.agree({"kernel": "fast"}, restart=False)
    folder.agree({"kernel": "fast"}, restart=True)
    folder.close()


def test_the_list_of_videos_is_kept_also_of_paths_that_are_no_text(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path / "work")
    with pytest.raises(FolderError, match="no videos are named"):
        folder.videos()
    videos = [Video(os.fsdecode(b"a\xff\n.mp4"), "a\\xff\n.mp4", 3, 4), Video("-ü.mp4", "-ü.mp4", 0, 0)]
    folder.keep(videos)
    assert folder.videos() == videos
    assert key(videos[0]) != key(videos[1])
    folder.close()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="cannot make the work folder"):
        WorkFolder(tmp_path / "file" / "work")


def test_a_disk_that_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    folder = WorkFolder(tmp_path / "work")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FolderError, match="No space left"):
        folder.agree({"kernel": "fast"}, restart=False)
    with pytest.raises(FolderError, match="No space left"):
        folder.keep([Video("a", "a", 0, 0)])
    assert folder.fingerprint() is None
    folder.close()
