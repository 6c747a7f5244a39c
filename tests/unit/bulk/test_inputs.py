"""The videos of a job's inputs: order, duplicates, names, skipped and rejected files."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import av
import pytest

from penstock.bulk.video import OTHER_SUFFIXES, InputError, expand, valid_text
from support.videos import make_clip, make_sound


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def touch(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"x")


def paths(*inputs: str, stdin: bytes | None = None, from0: bool = False) -> list[str]:
    found, _ = expand(inputs, stdin=None if stdin is None else io.BytesIO(stdin), from0=from0)
    return [video.path for video in found]


def test_inputs_keep_their_order_and_a_folders_files_are_sorted(here: Path) -> None:
    touch("z.mp4", "clips/b.mp4", "clips/a/2.mkv", "clips/a/10.mkv", "clips/c.webm")
    assert paths("z.mp4", "clips") == ["z.mp4", "clips/a/10.mkv", "clips/a/2.mkv", "clips/b.mp4", "clips/c.webm"]


def test_a_video_has_its_size_and_time(here: Path) -> None:
    touch("a.mp4")
    os.utime("a.mp4", ns=(5, 7))
    ((video,), _) = expand(["a.mp4"])
    assert (video.bytes, video.mtime_ns, video.name) == (1, 7, "a.mp4")


def test_other_files_of_a_folder_are_skipped_and_counted(here: Path) -> None:
    touch("clips/a.mp4", "clips/notes.txt", "clips/a.jpg", "clips/README", "clips/data.unknown", "clips/.hidden.mp4")
    make_clip(here / "clip.mp4", 2).rename("clips/recording")
    found, notes = expand(["clips"])
    assert [video.path for video in found] == ["clips/a.mp4", "clips/recording"]
    assert notes.skipped == 4


def test_every_kind_of_file_that_ffmpeg_knows_may_be_a_video(here: Path) -> None:
    known = {f".{name}" for kind in av.formats_available for name in extensions_of(kind)}
    skipped = known & OTHER_SUFFIXES  # sound, text, and pictures in a container for films
    assert skipped <= set([".aac", ".avif", ".flac", ".heic", ".heif", ".mp3", ".nfo", ".opus", ".sub", ".txt", ".vtt"])
    make_clip(here / "film.ogg", 2, codec="libvpx")
    make_clip(here / "moving.gif", 2, codec="gif", pix_fmt="rgb8")
    make_sound(here / "song.m4a").rename("song.ogg")
    assert paths(".") == ["./film.ogg", "./moving.gif"]


def extensions_of(kind: str) -> set[str]:
    try:
        return set(av.ContainerFormat(kind, "r").extensions)
    except ValueError:  # it can only be written
        return set()


def test_extensions_select_the_files_of_folders_and_patterns(here: Path) -> None:
    touch("a.mp4", "b.MKV", "c.dat", "x/d.dat", "x/e.txt")
    selected = frozenset({".dat", ".mkv"})
    found, notes = expand(["."], extensions=selected)
    assert [video.path for video in found] == ["./b.MKV", "./c.dat", "./x/d.dat"]
    assert notes.skipped == 2
    assert [video.path for video in expand(["x/*", "a.mp4"], extensions=selected)[0]] == ["x/d.dat", "a.mp4"]


def test_an_explicitly_named_file_is_taken_whatever_its_suffix(here: Path) -> None:
    touch("notes.txt")
    assert paths("notes.txt") == ["notes.txt"]


def test_the_same_file_is_taken_once_with_a_note(here: Path) -> None:
    touch("a.mp4")
    os.symlink("a.mp4", "b.mp4")
    found, notes = expand(["a.mp4", "a.mp4", "b.mp4", "."])
    assert [video.path for video in found] == ["a.mp4"]
    assert notes.duplicates == ["a.mp4", "b.mp4", "./a.mp4", "./b.mp4"]


def test_files_with_one_inode_on_a_network_disk_stay_separate(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch("clips/a.mp4", "clips/b.mp4")
    Path("clips/b.mp4").write_bytes(b"another")
    real = os.stat

    def one_inode(path: Any, **options: Any) -> os.stat_result:
        found = list(real(path, **options))
        if str(path).endswith(".mp4"):
            found[1] = 7
        return os.stat_result(found)

    monkeypatch.setattr(os, "stat", one_inode)
    assert paths("clips") == ["clips/a.mp4", "clips/b.mp4"]


def test_a_growing_file_that_is_named_twice_is_taken_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch("a.mp4")
    real = os.stat

    def growing(path: Any, **options: Any) -> os.stat_result:
        with open("a.mp4", "ab") as file:
            file.write(b"x")
        return real(path, **options)

    monkeypatch.setattr(os, "stat", growing)
    assert paths("a.mp4", "a.mp4") == ["a.mp4"]


def test_a_loop_of_links_ends(here: Path) -> None:
    touch("clips/a/1.mp4")
    os.symlink("..", "clips/a/up")
    os.symlink("circle", "clips/circle")
    assert paths("clips") == ["clips/a/1.mp4"]
    assert paths("clips/**/*.mp4") == ["clips/a/1.mp4"]
    assert paths("**") == ["clips/a/1.mp4"]


def test_patterns_match_files_and_folders(here: Path) -> None:
    touch("a1.mp4", "a2.mp4", "b.mp4", "x/a3.mp4", "x/y/a4.mp4", "x/y/a5.txt", "x/y/b.mp4", ".trash/a6.mp4")
    assert paths("a*.mp4") == ["a1.mp4", "a2.mp4"]
    assert paths("*/a?.mp4") == ["x/a3.mp4"]
    assert paths("**/a*.mp4") == ["a1.mp4", "a2.mp4", "x/a3.mp4", "x/y/a4.mp4"]
    assert paths("x/**/[ab].mp4") == ["x/y/b.mp4"]
    assert paths("x/**") == ["x/a3.mp4", "x/y/a4.mp4", "x/y/b.mp4"]
    assert paths("x/*") == ["x/a3.mp4", "x/y/a4.mp4", "x/y/b.mp4"]  # a matching folder is read completely
    assert paths(str(here / "**" / "y")) == [str(here / "x/y/a4.mp4"), str(here / "x/y/b.mp4")]


def test_an_existing_file_that_looks_like_a_pattern_is_a_file(here: Path) -> None:
    touch("[1] a*.mp4", "1.mp4")
    assert paths("[1] a*.mp4") == ["[1] a*.mp4"]


def test_a_list_on_standard_input_is_split_at_lines_or_nuls(here: Path) -> None:
    touch("a.mp4", "new\nline.mp4", "clips/b.mp4", "*.mp4")
    assert paths("-", stdin=b"a.mp4\r\n\nclips\n*.mp4\n") == ["a.mp4", "clips/b.mp4", "*.mp4"]
    assert paths("-", stdin=b"new\nline.mp4\0a.mp4", from0=True) == ["new\nline.mp4", "a.mp4"]


def test_a_listed_file_that_vanished_becomes_a_video_that_fails(here: Path) -> None:
    ((video,), _) = expand(["-"], stdin=io.BytesIO(b"gone.mp4\n"))
    assert (video.path, video.bytes, video.mtime_ns) == ("gone.mp4", 0, 0)


def test_a_broken_link_named_like_a_video_becomes_a_video_that_fails(here: Path) -> None:
    os.makedirs("clips")
    os.symlink("gone", "clips/a.mp4")
    os.symlink("gone", "clips/latest")
    found, notes = expand(["clips"])
    assert [(video.path, video.bytes) for video in found] == [("clips/a.mp4", 0)]
    assert notes.skipped == 1


@pytest.mark.parametrize("missing", ["gone.mp4", "gone*.mp4", "**/gone.mp4", "-leading.mp4", "-"])
def test_an_input_without_files_is_rejected(here: Path, missing: str) -> None:
    with pytest.raises(InputError, match=r"no file|there is none"):
        expand([missing])


def test_names_may_contain_any_character(here: Path) -> None:
    names = ["-dash.mp4", "ümlaut ☃ 映像.mp4", "new\nline.mp4", 'quo"te.mp4']
    touch(*names)
    found, _ = expand(names)
    assert [video.name for video in found] == names


def test_names_that_are_not_valid_text_become_unique_text(here: Path) -> None:
    try:
        for raw in (b"a\xff.mp4", b"a\xfe.mp4"):
            Path(os.fsdecode(raw)).write_bytes(b"")
    except OSError:
        pytest.skip("this file system takes only text as names")
    touch(r"a\xff.mp4")
    found, _ = expand(["."])
    names = [video.name for video in found]
    assert len(set(names)) == 3
    assert names[0] == r"./a\xff.mp4"
    for name in names:
        name.encode()
    assert valid_text(os.fsdecode(b"a\xff")).startswith(r"a\xff#")


def test_an_unreadable_folder_becomes_a_video_that_fails(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch("clips/a.mp4", "clips/closed/b.mp4")
    listdir = os.listdir

    def guarded(path: str) -> list[str]:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", guarded)
    assert paths("clips") == ["clips/a.mp4", "clips/closed"]
