from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.bulk.folder import (
    FingerprintDiffers,
    FolderError,
    WorkFolder,
    differences,
    fingerprint,
    fingerprint_digest,
    spool_key,
)
from penstock.bulk.types import Pixels, Sampling, Video


def test_two_jobs_never_share_a_folder(tmp_path: Path) -> None:
    first = WorkFolder(tmp_path / "work")
    with pytest.raises(FolderError, match="another job uses"):
        WorkFolder(tmp_path / "work")
    first.close()
    WorkFolder(tmp_path / "work").close()


def test_a_disk_without_locks_is_not_mistaken_for_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("penstock.bulk.folder.fcntl.flock", flock)
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
