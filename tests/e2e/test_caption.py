"""`penstock caption` from files to files, against a real server whose captioner reads the numbers in frames."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.bulk.cli import caption
from support.captioner import FakeCaptioner
from support.chat import ChatServer
from support.videos import make_clip

SOURCE = """
    import sys

    import penstock

    sys.path.append("TESTS")
    from support.videos import number_of

    class Captioner:
        inputs = [
            penstock.TensorSpec("frames", "UINT8", (-1, -1, -1, 3), optional=True),
            penstock.TensorSpec("jpeg", "BYTES", (-1,), optional=True),
            penstock.TensorSpec("frame_index", "INT64", (-1,), optional=True),
        ]
        outputs = [penstock.TensorSpec("caption", "BYTES", (-1,)), penstock.TensorSpec("frame_index", "INT64", (-1,))]
        parameters = {
            "task": "image-to-text", "model": "reader", "revision": "r1", "height": 48, "width": 80, "prompt": "",
            "max_new_tokens": 4, "precision": "fp32",
        }

        def frames(self, item):
            if "frames" in item:
                return item["frames"]
            import cv2
            import numpy as np

            return [cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR_RGB) for jpeg in item["jpeg"]]

        def predict(self, items):
            return [
                {"caption": [f"shows {number_of(f)}" for f in self.frames(item)], "frame_index": item["frame_index"]}
                for item in items
            ]
""".replace("TESTS", str(Path(__file__).parents[1]))


@pytest.fixture(scope="module")
def url(serve_all: Callable[..., Any]) -> str:
    found: str = serve_all(SOURCE, "Captioner", "--instances", "2").url
    return found


def penstock(folder: Path, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "penstock.cli.main", "caption", *arguments]
    return subprocess.run(command, cwd=folder, input=given, capture_output=True, timeout=60)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--kernel", "exact"],
        ["--pixels", "source", "--memory", "1Mi"],
        ["--pixels", "jpeg"],
        ["--mode", "single"],
        ["--mode", "stream-single"],
        ["--mode", "single", "--pixels", "source", "--memory", "200k"],
        ["--prebatch-size", "7", "--decoders", "3"],
        ["--memory", "50k"],
    ],
    ids=lambda flags: " ".join(flags) or "defaults",
)
def test_every_way_of_sending_captions_every_frame_once_in_order(tmp_path: Path, url: str, flags: list[str]) -> None:
    for n, frames in enumerate((40, 1, 75)):
        make_clip(tmp_path / f"{n}.mp4", frames)
    done = penstock(tmp_path, ".", "--server", url, *flags)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "captions.jsonl")
    assert [(Path(row["video"]).name, row["frame"], row["caption"]) for row in found] == [
        (f"{n}.mp4", frame, f"shows {frame}") for n, frames in enumerate((40, 1, 75)) for frame in range(frames)
    ]
    assert [row["time"] for row in found[:40]] == [pytest.approx(n / 25, abs=1e-6) for n in range(40)]


def test_names_of_any_kind_reach_every_output(tmp_path: Path, url: str) -> None:
    names = ["-o.mp4", "zwei\nZeilen.mp4", "ünïcödé 狗.mp4", 'a "quoted", name.mp4', "'; rm -rf.mp4"]
    for name in names:
        make_clip(tmp_path / name, 6)
    raw = os.fsencode(tmp_path) + b"/not\xfftext.mp4"
    os.rename(make_clip(tmp_path / "x.mp4", 6), raw)
    listed = b"\0".join([*(os.fsencode(name) for name in names), b"not\xfftext.mp4"])
    outputs = ["--also", "c.csv", "--also", "c.parquet", "--vtt", "vtt", "--srt", "srt"]
    done = penstock(tmp_path, "-", "--from0", "--server", url, *outputs, given=listed)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "captions.jsonl")
    assert [row["video"] for row in found[::6]][:5] == names
    assert [row["caption"] for row in found] == [f"shows {n}" for n in range(6)] * 6
    assert "xff" in found[-1]["video"]
    with (tmp_path / "c.csv").open(newline="") as file:
        assert [row["video"] for row in csv.DictReader(file)] == [row["video"] for row in found]
    assert len(list((tmp_path / "vtt").iterdir())) == len(list((tmp_path / "srt").iterdir())) == 6


def damaged(path: Path) -> Path:
    """A clip of 80 frames with a hole in the middle."""
    data = bytearray(make_clip(path, 80, options={"g": "10", "bf": "0"}).read_bytes())
    data[len(data) // 2 : len(data) // 2 + 4000] = bytes(4000)
    path.write_bytes(data)
    return path


def test_a_damaged_video_is_captioned_around_its_gaps(tmp_path: Path, url: str) -> None:
    make_clip(tmp_path / "a.mp4", 30)
    damaged(tmp_path / "d.ts")
    done = penstock(tmp_path, ".", "--server", url, "--progress", "none")
    assert done.returncode == 3, done.stderr
    assert b"2 of 2 videos complete" in done.stderr
    assert b"1 damaged, captioned except for gaps: see failures.jsonl" in done.stderr
    (report,) = rows(tmp_path / "failures.jsonl")
    lost = {n for gap in report["gaps"] for n in range(gap["frame"], gap["frame"] + gap["frames"])}
    traces = {n for gap in report["gaps"] for n in range(gap["frame"], gap["clean"])}
    assert 0 < len(lost) < 40
    found = [row for row in rows(tmp_path / "captions.jsonl") if row["video"].endswith("d.ts")]
    assert [row["frame"] for row in found] == [n for n in range(80) if n not in lost]
    assert report["captions"] == len(found)
    assert all(row["caption"] == f"shows {row['frame']}" for row in found if row["frame"] not in traces)
    assert all(row["time"] == pytest.approx(row["frame"] / 25, abs=1e-4) for row in found)


def test_a_broken_video_is_reported_and_the_rest_finish(tmp_path: Path, url: str) -> None:
    make_clip(tmp_path / "a.mp4", 30)
    make_clip(tmp_path / "c.mp4", 30)
    (tmp_path / "b.mp4").write_bytes(b"no video at all")
    damaged(tmp_path / "d.ts")
    done = penstock(tmp_path, ".", "--server", url, "--on-damage", "stop", "--vtt", "vtt", "-q")
    assert done.returncode == 3, done.stderr
    assert b"--retry-failed" in done.stderr
    failures = {Path(row["path"]).name: row for row in rows(tmp_path / "failures.jsonl")}
    assert set(failures) == {"b.mp4", "d.ts"}
    assert (failures["b.mp4"]["stage"], failures["b.mp4"]["captions"], failures["b.mp4"]["attempts"]) == ("open", 0, 1)
    assert sorted(path.name for path in (tmp_path / "vtt").iterdir()) == ["a.vtt", "c.vtt", "d.vtt"]
    kept = failures["d.ts"]["captions"]
    assert 0 < kept < 80
    found = rows(tmp_path / "captions.jsonl")
    assert [row["frame"] for row in found] == [*range(30), *range(30), *range(kept)]
    assert all(row["caption"] == f"shows {row['frame']}" for row in found)
    make_clip(tmp_path / "b.mp4", 5)
    again = penstock(tmp_path, "--server", url, "--retry-failed", "--on-damage", "stop")
    assert again.returncode == 3
    assert [Path(row["path"]).name for row in rows(tmp_path / "failures.jsonl")] == ["d.ts"]
    assert rows(tmp_path / "failures.jsonl")[0]["attempts"] == 2
    assert len(rows(tmp_path / "captions.jsonl")) == 65 + kept
    onwards = penstock(tmp_path, "--server", url, "--retry-failed")
    assert b"1 damaged" in onwards.stderr
    assert len(rows(tmp_path / "captions.jsonl")) > 65 + kept + 20


def test_sampling_takes_the_requested_frames(tmp_path: Path, url: str) -> None:
    make_clip(tmp_path / "a.mp4", 100, options={"g": "30", "sc_threshold": "0"})
    for output, flags, frames in (
        ("every", ["--every", "10"], [*range(0, 100, 10)]),
        ("seconds", ["--every", "0.4s"], [*range(0, 100, 10)]),
        ("keyframes", ["--keyframes"], [0, 30, 60, 90]),
        ("clips", ["--clip", "2", "--frames", "5"], [*range(0, 100, 10)]),
        ("carried", ["--every", "20", "--dedupe", "0", "--carry-captions"], [*range(0, 100, 20)]),
        ("fps", ["--fps", "2.5"], [*range(0, 100, 10)]),
        ("part", ["--start", "1", "--end", "0:02", "--every", "5"], [25, 30, 35, 40, 45]),
        ("most", ["--max-frames", "3", "--every", "40"], [0, 40, 80]),
    ):
        done = penstock(tmp_path, "a.mp4", "--server", url, "-o", f"{output}.jsonl", *flags)
        assert done.returncode == 0, done.stderr
        assert [(row["frame"], row["caption"]) for row in rows(tmp_path / f"{output}.jsonl")] == [
            (n, f"shows {n}") for n in frames
        ]


def test_a_dry_run_lists_the_work_and_does_nothing(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", 50)
    (tmp_path / "b.mp4").write_bytes(b"no video")
    with FakeCaptioner() as server:
        done = penstock(tmp_path, ".", "--server", server.url, "--every", "5", "--dry-run")
        assert server.seen == []
    said = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    for part in (
        "a.mp4: about 10 of 50 frames, 160x96 h264, 0:02",
        "2 videos, 1 of them cannot be opened",
        "about 10 frames to caption, as server-size of 8x8, 4 a request",
        f"about {10 * 8 * 8 * 3:,} bytes on the wire",
        "revision r1",
    ):
        assert part in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mp4", "b.mp4"]


def test_json_progress_is_json_and_quiet_prints_nothing(tmp_path: Path, url: str) -> None:
    make_clip(tmp_path / "a.mp4", 20)
    done = penstock(tmp_path, "a.mp4", "--server", url, "--progress", "json")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert lines[-1]["summary"]["frames"] == 20
    assert lines[-1]["summary"]["exit_code"] == done.returncode == 0
    assert any(line.get("frames") == 20 for line in lines)
    quiet = penstock(tmp_path, "a.mp4", "--server", url, "-q")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, b"", b"")


def test_two_servers_share_the_work(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", 200)
    with FakeCaptioner() as one, FakeCaptioner() as other:
        done = penstock(tmp_path, "a.mp4", "--server", one.url, "--server", other.url, "--prebatch-size", "2")
        assert done.returncode == 0, done.stderr
        assert len(one.seen) + len(other.seen) == 100
        assert min(len(one.seen), len(other.seen)) > 10
    assert [row["caption"] for row in rows(tmp_path / "captions.jsonl")] == [f"frame {n}" for n in range(200)]


def test_two_jobs_into_one_output_are_rejected(tmp_path: Path) -> None:
    from penstock.bulk.spool import WorkFolder

    make_clip(tmp_path / "a.mp4", 5)
    held = WorkFolder(tmp_path / "captions.jsonl.work")
    done = penstock(tmp_path, "a.mp4", "--server", "http://127.0.0.1:1")
    held.close()
    assert done.returncode == 2
    assert b"another job uses" in done.stderr


def test_the_commands_of_the_page_run_and_every_flag_is_documented(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "bulk.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.S | re.M)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("penstock caption ")]
    (tmp_path / "videos").mkdir()
    make_clip(tmp_path / "videos" / "a.mp4", 5)
    with FakeCaptioner() as server, ChatServer() as chat:
        for command in commands:
            command = command.replace("http://127.0.0.1:8080", server.url).replace("http://127.0.0.1:8000", chat.url)
            done = penstock(tmp_path, *shlex.split(command, comments=True)[2:])
            assert done.returncode == 0, (command, done.stderr)
    assert len(commands) == 6
    assert len(rows(tmp_path / "captions.jsonl")) == 5
    assert (tmp_path / "captions.parquet").exists()
    assert (tmp_path / "subtitles" / "a.vtt").exists()
    flags = {option for parameter in caption.params for option in parameter.opts if option.startswith("--")}
    missing = {flag for flag in flags if f"{flag}`" not in page and f"{flag} " not in page}
    assert missing <= {"--output", "--quiet"}  # documented by their short names
    assert set(re.findall(r"`(--[a-z0-9-]+)", page)) <= flags


def test_the_captioner_of_the_page_captions_a_video(tmp_path: Path, serve: Callable[..., Any]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "captioners.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(source.splitlines()) <= 40
    server = serve(source, "Captioner")
    make_clip(tmp_path / "a.mp4", 30)
    done = penstock(tmp_path, "a.mp4", "--server", server.url)
    assert done.returncode == 0, done.stderr
    assert {row["caption"] for row in rows(tmp_path / "captions.jsonl")} <= {"a dim frame", "a light frame"}
    assert len(rows(tmp_path / "captions.jsonl")) == 30
