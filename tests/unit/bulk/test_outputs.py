from __future__ import annotations

import csv
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.bulk import outputs, spool
from penstock.bulk.outputs import OutputError, OutputPaths, cue_text, subtitle_names, write_failures
from penstock.bulk.spool import FolderError, SpoolEnd, WorkFolder
from penstock.bulk.types import CaptionRow, Video

CAPTIONS = ["a dog", "a dog", 'a "cat", and\ta <b>dog</b> & co --> there', "", "Käse 狗"]


def spooled(folder: Path, name: str, rows: list[CaptionRow], seen: int = 0, end: bool = True) -> tuple[Video, Path]:
    video = Video(name, name, 1, 2)
    path = folder / f"{abs(hash(name))}.spool"
    lines = [spool.head_line(video), *(spool.line_of(replace(row, row=n)) for n, row in enumerate(rows))]
    spool.append(
        path, b"".join(lines + ([spool.line_of(SpoolEnd("complete", len(rows), seen))] if end else [])), overwrite=True
    )
    return video, path


@pytest.fixture
def spools(tmp_path: Path) -> list[tuple[Video, Path]]:
    """Two videos with five rows each, two per second, and one without; the second name has a newline."""
    rows = [CaptionRow(n * 15, n / 2, None, caption) for n, caption in enumerate(CAPTIONS)]
    return [
        spooled(tmp_path, "in/a.mp4", rows, 75),
        spooled(tmp_path, "in/-b\nü.mp4", rows, 75),
        spooled(tmp_path, "in/none.mp4", []),
    ]


def expected() -> list[dict[str, Any]]:
    return [
        {"video": name, "frame": n * 15, "time": n / 2, "caption": caption}
        for name in ("in/a.mp4", "in/-b\nü.mp4")
        for n, caption in enumerate(CAPTIONS)
    ]


def test_every_format_can_be_read_back(tmp_path: Path, spools: list[tuple[Video, Path]]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    files = tuple(tmp_path / "out" / f"c{suffix}" for suffix in (".jsonl", ".csv", ".parquet"))
    outputs.write_outputs(OutputPaths(files), spools)
    assert [json.loads(line) for line in files[0].read_text().splitlines()] == expected()
    with files[1].open(newline="") as file:
        read = [{**row, "frame": int(row["frame"]), "time": float(row["time"])} for row in csv.DictReader(file)]
    assert read == expected()
    table = parquet.read_table(files[2])
    assert table.to_pylist() == expected()
    assert [str(field.type) for field in table.schema] == ["string", "int64", "double", "string"]


def test_only_answers_that_fulfil_a_schema_are_values(tmp_path: Path) -> None:
    answers = ['{"a":[1]}', "a dog\nsays: {", "5"]
    spools = [spooled(tmp_path, "a", [CaptionRow(n, 0.0, None, text) for n, text in enumerate(answers)])]
    path = tmp_path / "c.jsonl"

    def read(request: dict[str, Any]) -> list[Any]:
        outputs.write_outputs(OutputPaths((path,)), spools, request)
        return [json.loads(line)["caption"] for line in path.read_text().splitlines()]

    assert read({"response_format": {"type": "json_object"}}) == answers  # which nothing has checked
    spools = [spooled(tmp_path, "a", [CaptionRow(0, 0.0, None, answers[0])])]
    assert read({"schema": {"type": "object"}}) == [{"a": [1]}]


def test_parquet_of_many_rows_is_written_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(outputs, "GROUP_ROWS", 4)
    rows = [CaptionRow(n, n / 10, None, str(n)) for n in range(10)]
    outputs.write_outputs(
        OutputPaths((tmp_path / "c.parquet",)), [spooled(tmp_path, "a", rows), spooled(tmp_path, "b", rows)]
    )
    file = parquet.ParquetFile(tmp_path / "c.parquet")
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [4, 4, 4, 4, 4]
    assert [row["caption"] for row in file.read().to_pylist()] == [str(n) for n in range(10)] * 2


def test_no_captions_make_files_without_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    outputs.write_outputs(OutputPaths((tmp_path / "c.jsonl", tmp_path / "c.parquet")), [spooled(tmp_path, "a", [])])
    assert (tmp_path / "c.jsonl").read_bytes() == b""
    assert parquet.read_table(tmp_path / "c.parquet").num_rows == 0


def test_webvtt_merges_equal_neighbours_and_escapes(tmp_path: Path, spools: list[tuple[Video, Path]]) -> None:
    outputs.write_outputs(OutputPaths((), vtt=tmp_path / "vtt"), spools)
    assert sorted(path.name for path in (tmp_path / "vtt").iterdir()) == ["-b\nü.vtt", "a.vtt"]
    assert (tmp_path / "vtt" / "a.vtt").read_text() == (
        "WEBVTT\n\n"
        "00:00:00.000 --> 00:00:01.000\na dog\n\n"
        '00:00:01.000 --> 00:00:01.500\na "cat", and a &lt;b&gt;dog&lt;/b&gt; &amp; co --&gt; there\n\n'
        "00:00:02.000 --> 00:00:02.500\nKäse 狗\n\n"
    )


def test_srt_has_numbers_and_commas_and_no_entities(tmp_path: Path, spools: list[tuple[Video, Path]]) -> None:
    outputs.write_outputs(OutputPaths((), srt=tmp_path / "srt"), spools)
    cues = (tmp_path / "srt" / "a.srt").read_text().split("\n\n")
    assert cues[0] == "1\n00:00:00,000 --> 00:00:01,000\na dog"
    assert [cue.partition("\n")[0] for cue in cues] == ["1", "2", "3", ""]
    assert cues[1].endswith('\na "cat", and a <b>dog</b> & co --> there')
    assert sorted(path.name for path in (tmp_path / "srt").iterdir()) == ["-b\nü.srt", "a.srt"]


def cues_of(folder: Path, rows: list[CaptionRow], seen: int) -> list[str]:
    outputs.write_outputs(OutputPaths((), vtt=folder), [spooled(folder, "a.mp4", rows, seen)])
    return re.findall(r".* --> .*", (folder / "a.vtt").read_text())


def test_the_last_cue_ends_with_the_video_or_lasts_as_long_as_the_previous_one(tmp_path: Path) -> None:
    two = [CaptionRow(0, 0.0, None, "x"), CaptionRow(100, 10.0, None, "y")]
    assert cues_of(tmp_path, two, seen=130)[-1] == "00:00:10.000 --> 00:00:13.000"
    assert cues_of(tmp_path, two, seen=500)[-1] == "00:00:10.000 --> 00:00:20.000"
    assert cues_of(tmp_path, two, seen=0)[-1] == "00:00:10.000 --> 00:00:20.000"
    assert cues_of(tmp_path, two[:1], seen=1) == ["00:00:00.000 --> 00:00:02.000"]
    late = [CaptionRow(10**6, 100 * 3600 + 61.0015, None, "x")]
    assert cues_of(tmp_path, late, seen=0) == ["100:01:01.002 --> 100:01:03.002"]
    same = [CaptionRow(0, 5.0, None, "x"), CaptionRow(1, 5.0, None, "y")]
    assert cues_of(tmp_path, same, seen=0) == ["00:00:05.000 --> 00:00:05.001", "00:00:05.000 --> 00:00:05.001"]


@given(st.text())
def test_no_caption_breaks_its_cue(caption: str) -> None:
    line = cue_text(caption, markup=True)
    for kind in (line, cue_text(caption, markup=False)):
        assert "\n" not in kind
        assert "\r" not in kind
    assert "-->" not in line
    assert "<" not in line
    assert line.replace("&amp;", "").replace("&lt;", "").replace("&gt;", "").count("&") == 0


def test_videos_with_the_same_name_get_separate_subtitles() -> None:
    videos = [Video(name, name, 0, 0) for name in ("x/a.mp4", "y/a.mkv", "y/A.mov", "y/b.mp4", "z/" + "ü" * 300)]
    names = subtitle_names(videos)
    assert len({name.casefold() for name in names.values()}) == 5
    assert names["y/b.mp4"] == "b"
    assert names["x/a.mp4"].startswith("a-")
    assert names == subtitle_names(videos[::-1])  # whatever the order
    assert all(len(name.encode()) < 240 for name in names.values())


def test_an_output_replaces_an_older_one_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("old")
    broken = spooled(tmp_path, "a", [CaptionRow(0, 0.0, None, "x")])
    good, bad = broken[1].read_bytes().split(b"\n", 1)
    broken[1].write_bytes(good + b'\n{"row":\n' + bad)
    with pytest.raises(spool.SpoolError):
        outputs.write_outputs(OutputPaths((path,), vtt=tmp_path / "vtt"), [broken])
    assert path.read_text() == "old"
    assert sorted(p.name for p in tmp_path.rglob("*")) == sorted(["c.jsonl", broken[1].name])


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["c.txt"], "suffix of"),
        (["c.vtt"], "--vtt"),
        (["c.jsonl", "./c.jsonl"], "need different paths"),
        (["folder.jsonl"], "is a folder"),
        (["failures.jsonl"], "need different paths"),
        (["file.csv/below/c.csv"], "allows no new files"),
        (["closed/below/c.csv"], "'closed' allows no new files"),
    ],
)
def test_impossible_outputs_are_rejected_before_anything_is_captioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "closed").mkdir()
    (tmp_path / "file.csv").touch()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and real(path, mode))
    with pytest.raises(OutputError, match=words):
        outputs.check_outputs(OutputPaths(tuple(map(Path, files))), Path("failures.jsonl"))


def test_outputs_may_go_into_folders_that_do_not_exist_yet(tmp_path: Path) -> None:
    outputs.check_outputs(
        OutputPaths((tmp_path / "a" / "b" / "c.csv",), vtt=tmp_path / "vtt"), tmp_path / "a" / "failures.jsonl"
    )
    assert not list(tmp_path.iterdir())


def test_parquet_without_pyarrow_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(OutputError, match=r"pip install 'pyarrow"):
        outputs.check_outputs(OutputPaths((Path("c.parquet"),)), Path("failures.jsonl"))


def test_unfinished_videos_are_in_no_output(tmp_path: Path) -> None:
    row = [CaptionRow(0, 0.0, None, "x")]
    outputs.write_outputs(
        OutputPaths((tmp_path / "c.jsonl",)), [spooled(tmp_path, "a", row, end=False), spooled(tmp_path, "b", row)]
    )
    assert [json.loads(line)["video"] for line in (tmp_path / "c.jsonl").read_text().splitlines()] == ["b"]


def test_failures_are_listed_in_order_and_an_old_list_is_removed(tmp_path: Path) -> None:
    videos = [Video(name, name, 1, 2) for name in ("b", "a\n", "changed", "new")]
    spools = [(video, tmp_path / f"{n}.spool") for n, video in enumerate(videos)]
    end = SpoolEnd("failed", 1, 5, 2, "decode", 5, "broken")
    for video, path in spools[:3]:
        of = video if video.name != "changed" else Video("changed", "changed", 9, 9)
        row = spool.line_of(CaptionRow(0, 0.0, None, "x"))
        spool.append(path, spool.head_line(of) + row + spool.line_of(end), overwrite=True)
    path, folder, other = tmp_path / "failures.jsonl", WorkFolder(tmp_path / "a.work"), WorkFolder(tmp_path / "b.work")
    assert write_failures(path, spools, folder)
    listed = [json.loads(line) for line in path.read_text().splitlines()]
    assert [failure["path"] for failure in listed] == ["b", "a\n"]
    assert listed[0] == {"path": "b", "stage": "decode", "frame": 5, "error": "broken", "attempts": 2, "captions": 1}
    assert not write_failures(path, [], other)
    assert path.exists(), "another job's list stays"
    with pytest.raises(FolderError, match="this job did not write it"):
        write_failures(path, spools, other)
    assert not write_failures(path, spools[3:], folder)
    assert not path.exists()
    assert write_failures(path, spools, other)
    assert not write_failures(path, [], folder)
    assert path.exists(), "the first job has none any more"


def test_a_failures_list_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    failed = spooled(tmp_path, "a", [], end=False)
    spool.append(failed[1], spool.line_of(SpoolEnd("failed", 0)))
    with pytest.raises(OutputError, match="cannot write"):
        write_failures(tmp_path / "file" / "failures.jsonl", [failed], WorkFolder(tmp_path / "a.work"))
