"""`penstock caption --backend openai` against the stand-in of examples/vlm_captions."""

from __future__ import annotations

import base64
import csv
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.images import decode_image
from support.chat import FILE, ChatServer, answered, images_of
from support.videos import make_clip, number_of

SCHEMA = {"type": "object", "properties": {"caption": {"type": "string"}}, "required": ["caption"]}


def caption(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The job in this folder."""
    command = [sys.executable, "-m", "penstock.cli.main", "caption", *arguments, "--backend", "openai"]
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=60, text=True)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def picture(path: Path, width: int, height: int, level: int, **how: Any) -> Path:
    Image.fromarray(np.full((height, width, 3), level, np.uint8)).save(path, **how)
    return path


def pixels(url: str) -> np.ndarray[Any, Any]:
    return decode_image(base64.b64decode(url.removeprefix("data:image/jpeg;base64,")))


def shows(request: dict[str, Any]) -> Any:
    """Reads the number of the frame from its pixels."""
    return answered(f"shows {number_of(pixels(images_of(request)[0]))}")


def test_frames_of_videos_arrive_in_order_with_their_pixels(tmp_path: Path) -> None:
    for n, frames in enumerate((40, 1, 25)):
        make_clip(tmp_path / f"{n}.mp4", frames)
    with ChatServer(shows) as server:
        done = caption(tmp_path, ".", "--server", server.url, "--prompt", "{video} at {time}, {frame}: {}?")
        asked = {request["messages"][0]["content"][-1]["text"] for request in server.requests}
    assert done.returncode == 0, done.stderr
    assert [(Path(row["video"]).name, row["frame"], row["caption"]) for row in rows(tmp_path / "captions.jsonl")] == [
        (f"{n}.mp4", frame, f"shows {frame}") for n, frames in enumerate((40, 1, 25)) for frame in range(frames)
    ]
    assert "./2.mp4 at 0.96, 24: {}?" in asked
    assert "tokens: 660 of prompts, 330 of completions" in done.stderr


def test_the_frames_of_a_clip_are_one_request_and_one_row(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", 60)  # of 2.4 s

    def about(request: dict[str, Any]) -> Any:
        return answered(" ".join(str(number_of(pixels(url))) for url in images_of(request)))

    with ChatServer(about) as server:
        flags = ["--clip", "1", "--frames", "4", "--prompt", "From {time} to {end}?"]
        done = caption(tmp_path, "a.mp4", "--server", server.url, *flags)
        texts = [p["text"] for p in server.requests[0]["messages"][0]["content"] if p["type"] == "text"]
    assert done.returncode == 0, done.stderr
    assert [(row["frame"], row["time"], row["caption"]) for row in rows(tmp_path / "captions.jsonl")] == [
        (0, 0.0, "0 7 13 19"), (25, 1.0, "25 32 38 44"), (50, 2.0, "50 57"),
    ]  # fmt: skip
    assert texts == ["[0.00 s]", "[0.28 s]", "[0.52 s]", "[0.76 s]", "From 0.00 to 1.00?"]


def test_failed_clips_and_frames_alone_are_asked_again(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", 160)
    bad = {25, 75}

    def about(request: dict[str, Any]) -> Any:
        numbers = [number_of(pixels(url)) for url in images_of(request)]
        return answered("" if numbers[0] in bad else str(numbers))

    for name, flags in (("frames", ["--every", "5"]), ("clips", ["--clip", "1", "--frames", "4"])):
        where = ["a.mp4", *flags, "-o", f"{name}/c.jsonl", "--vtt", f"{name}/vtt"]
        bad = set()
        with ChatServer(about) as server:
            assert caption(tmp_path, *where, "--server", server.url).returncode == 0
        files = [tmp_path / name / "c.jsonl", tmp_path / name / "vtt" / "a.vtt"]
        undisturbed = [file.read_bytes() for file in files]
        bad = {25, 75}
        with ChatServer(about) as server:
            assert caption(tmp_path, *where, "--server", server.url, "--restart").returncode == 3
            assert sum("error" in row for row in rows(files[0])) == 2
            bad, before = {75}, len(server.requests)
            assert caption(tmp_path, *where, "--server", server.url, "--retry-failed").returncode == 3
            assert len(server.requests) - before == 2
            bad, before = set(), len(server.requests)
            again = caption(tmp_path, *where, "--server", server.url, "--retry-failed")
            assert len(server.requests) - before == 1
        assert again.returncode == 0, again.stderr
        assert [file.read_bytes() for file in files] == undisturbed


def test_a_folder_of_images_is_a_job_with_one_row_each(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    picture(folder / "a.jpg", 640, 480, 50)
    picture(folder / "b.png", 30, 20, 100)
    turned = Image.Exif()
    turned[0x0112] = 6
    picture(folder / "c.jpg", 80, 40, 150, exif=turned)
    picture(folder / "d.webp", 400, 100, 200)
    (folder / "e.jpg").write_bytes(b"\xff\xd8 no image")
    (folder / "notes.txt").write_text("none")
    seen: list[tuple[tuple[int, ...], int]] = []

    def look(request: dict[str, Any]) -> Any:
        found = pixels(images_of(request)[0])
        seen.append((found.shape[:2], round(float(found.mean()))))
        return answered(f"level {round(float(found.mean()))}")

    with ChatServer(look) as server:
        flags = ["--server", f"{server.url}/v1", "--max-pixels", "10000", "--also", "c.csv", "--price", "1,2"]
        done = caption(tmp_path, "photos", *flags)
    assert done.returncode == 3
    assert "skipped 1 files that are not images" in done.stderr
    assert f"{4 * (10 * 1 + 5 * 2) / 1e6:,.4f} at the given prices" in done.stderr
    assert sorted(seen) == [((20, 30), 100), ((50, 200), 200), ((80, 40), 150), ((86, 115), 50)]
    found = rows(tmp_path / "captions.jsonl")
    assert [(row["video"], row["caption"]) for row in found] == [
        ("photos/a.jpg", "level 50"), ("photos/b.png", "level 100"), ("photos/c.jpg", "level 150"),
        ("photos/d.webp", "level 200"),
    ]  # fmt: skip
    assert found[0] | {"caption": ""} == {
        "video": "photos/a.jpg", "frame": 0, "time": 0.0, "caption": "", "prompt_tokens": 10, "completion_tokens": 5,
    }  # fmt: skip
    assert [(row["path"], row["stage"]) for row in rows(tmp_path / "failures.jsonl")] == [("photos/e.jpg", "open")]
    with (tmp_path / "c.csv").open(newline="") as file:
        assert [row["completion_tokens"] for row in csv.DictReader(file)] == ["5"] * 4


def test_images_of_a_folder_with_videos_are_skipped_unless_named(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", 2)
    picture(tmp_path / "a.jpg", 20, 20, 10)
    with ChatServer() as server:
        assert caption(tmp_path, ".", "--server", server.url, "-o", "v.jsonl").returncode == 0
        assert caption(tmp_path, "a.jpg", "a.mp4", "--server", server.url, "-o", "both.jsonl").returncode == 0
        addresses = caption(tmp_path, "a.jpg", "--server", server.url, "-o", "file.jsonl", "--pixels", "file")
        assert images_of(server.requests[-1]) == [(tmp_path / "a.jpg").as_uri()]
    assert addresses.returncode == 0
    assert [row["video"] for row in rows(tmp_path / "v.jsonl")] == ["./a.mp4"] * 2
    assert [row["video"] for row in rows(tmp_path / "both.jsonl")] == ["a.jpg", "a.mp4", "a.mp4"]


def test_answers_fulfil_the_schema_or_are_repaired_once_or_are_error_rows(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    for n in range(4):
        picture(tmp_path / f"{n}.png", 20, 20, 50 * n)

    def answer(request: dict[str, Any]) -> Any:
        number = round(float(pixels(images_of(request)[0]).mean()) / 50)
        repaired = len(request["messages"]) == 3
        assert request["response_format"]["json_schema"]["schema"] == SCHEMA
        right = json.dumps({"caption": f"number {number}"})
        return answered(
            {0: right, 1: f"```json\n{right}\n```", 2: right if repaired else '{"caption": 5}'}.get(number, "Sure!")
        )

    with ChatServer(answer) as server:
        flags = ["--server", server.url, "--schema", "schema.json", "--also", "c.parquet"]
        done = caption(tmp_path, ".", "--extensions", "png", *flags)
        assert len(server.requests) == 6, "two repairs"
    assert done.returncode == 3
    assert "1 rows have an error: see failures.jsonl" in done.stderr
    found = rows(tmp_path / "captions.jsonl")
    assert [row["caption"] for row in found] == [*({"caption": f"number {n}"} for n in range(3)), ""]
    assert [row["prompt_tokens"] for row in found] == [10, 10, 20, 20]
    assert "not JSON" in found[3]["error"]
    with ChatServer(lambda _: answered('{"caption": "now"}')) as server:
        again = caption(tmp_path, "--retry-failed", "--server", server.url, "--schema", "schema.json")
        assert len(server.requests) == 1
    assert again.returncode == 0, again.stderr
    assert rows(tmp_path / "captions.jsonl")[3]["caption"] == {"caption": "now"}
    assert not (tmp_path / "failures.jsonl").exists()


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (answered("", "content_filter"), "refused"),
        (answered("", refusal="I will not"), "refused: I will not"),
        (answered("half a sent", "length"), "--max-tokens"),
        (answered("  "), "empty"),
        (answered("x" * 10_000_000), "exceeds"),
        ((400, {"error": {"message": "maximum context length is 5 tokens"}}, ()), "context length"),
        ((200, {"error": {"message": "content management policy", "code": "400"}}, ()), "content management"),
    ],
    ids=["filter", "refusal", "cut", "empty", "10 MB", "context", "200 with an error"],
)
def test_what_a_server_would_answer_again_is_an_error_row_and_costs_one_request(
    tmp_path: Path, response: Any, words: str
) -> None:
    make_clip(tmp_path / "a.mp4", 3)
    with ChatServer(lambda r: response if number_of(pixels(images_of(r)[0])) == 1 else None) as server:
        done = caption(tmp_path, "a.mp4", "--server", server.url)
        assert len(server.requests) == 3
    assert done.returncode == 3
    first, second, third = rows(tmp_path / "captions.jsonl")
    assert words in second["error"]
    assert second["caption"] in ("", "half a sent")
    assert "error" not in first | third
    (failed,) = rows(tmp_path / "failures.jsonl")
    assert (failed["stage"], failed["frame"], failed["captions"]) == ("caption", 1, 3)


def test_an_image_that_is_too_large_is_sent_once_more_at_half_its_size(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg", 900, 600, 50)
    picture(tmp_path / "b.jpg", 2000, 60, 50)
    with ChatServer(max_side=500) as server:
        done = caption(tmp_path, "a.jpg", "b.jpg", "--server", server.url)
        assert len(server.requests) == 4
    one, other = rows(tmp_path / "captions.jsonl")
    assert one["caption"].startswith("a picture of 450x300")
    assert "too large" in other["error"]
    assert done.stderr.count("sent again at half its size") == 1


def test_wrong_requests_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg", 20, 20, 50)
    (tmp_path / "schema.json").write_text('{"type": "objekt"}')
    (tmp_path / "text.json").write_text("[1")
    with ChatServer(token="secret") as server:
        for flags, words in (
            (["--schema", "schema.json"], "--schema is not a JSON schema: 'objekt'"),
            (["--schema", "text.json"], "not a file with a JSON object"),
            (["--request", "none.json"], "none.json"),
            (["--price", "1"], "two prices"),
            (["--prompt", "@none"], "none cannot be read"),
            ([], "401"),
        ):
            done = caption(tmp_path, "a.jpg", "--server", server.url, *flags)
            assert (done.returncode, words in done.stderr) == (2, True), (flags, done.stderr)
        (tmp_path / "token").write_text("secret")
        for flags, words in (
            (["--model", "stand-in-v"], "has no model 'stand-in-v'; did you mean 'stand-in-vl'?"),
            (["--pixels", "server-size"], "choose other --pixels"),
        ):
            done = caption(tmp_path, "a.jpg", "--server", server.url, "--token-file", "token", *flags)
            assert (done.returncode, words in done.stderr) == (2, True), (flags, done.stderr)
        assert not server.requests
    penstock = ["caption", "a.jpg", "--server", "http://127.0.0.1:1", "--prompt", "What?"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *penstock], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--backend openai" in done.stderr


def test_a_token_that_expires_ends_the_job_which_goes_on_with_another(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", 60)
    (tmp_path / "token").write_text("one")
    server = ChatServer(token="one", rate=200)

    def expire(_: dict[str, Any]) -> None:
        if len(server.requests) == 20:
            server.stand_in.args.token = "two"

    server._respond = expire
    with server:
        flags = ["a.mp4", "--server", server.url, "--token-file", "token"]
        done = caption(tmp_path, *flags)
        assert done.returncode == 3
        assert "stopped:" in done.stderr
        assert "has expired" in done.stderr
        (tmp_path / "token").write_text("two")
        again = caption(tmp_path, *flags)
        assert again.returncode == 0, again.stderr
    assert [row["frame"] for row in rows(tmp_path / "captions.jsonl")] == list(range(60))


def test_a_request_that_never_succeeds_stops_the_job(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", 300)
    with ChatServer(lambda _: (400, {"error": {"message": "this model sees no images"}}, ())) as server:
        done = caption(tmp_path, "a.mp4", "--server", server.url)
    assert done.returncode == 3
    assert "rows in a row have an error, the last:" in done.stderr
    assert "sees no images" in done.stderr


def test_a_limit_of_requests_or_of_tokens_is_kept(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", 60)
    for flags in (["--rpm", "1200"], ["--tpm", str(1200 * 40)]):  # a request takes 40 tokens: 29 + 11
        with ChatServer() as server:
            done = caption(tmp_path, "a.mp4", "--server", server.url, "-o", f"{flags[0]}.jsonl", *flags)
            stats = server.stand_in.stats()
        assert done.returncode == 0, done.stderr
        assert stats["served"] == 60
        assert stats["span_s"] > (60 - 20 - 8) / 20, "20 a second, after a burst of 20 and 8 whose cost is not known"


def test_an_engine_is_started_and_restarted_and_ends_with_the_job(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", 60)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "engine.py").write_text(f"""
import os, pathlib, runpy, sys, threading

if not os.path.exists("first"):
    pathlib.Path("first").touch()
    threading.Timer(1.5, os._exit, [9]).start()
sys.argv += ["--rate", "20"]
runpy.run_path({str(FILE)!r}, run_name="__main__")
""")
    done = caption(tmp_path, "a.mp4", "--engine", f"{sys.executable} engine.py --port {port}")
    assert done.returncode == 0, done.stderr
    assert "the engine ended with status 9; what it printed is in captions.jsonl.work/engine.log" in done.stderr
    assert [row["frame"] for row in rows(tmp_path / "captions.jsonl")] == list(range(60))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
    broken = caption(tmp_path, "a.mp4", "--engine", "no-such-engine", "-o", "b.jsonl")
    assert broken.returncode == 2
    assert "cannot start no-such-engine" in broken.stderr


def test_faults_that_pass_cost_attempts_and_no_row(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", 80)
    with ChatServer(faults=3) as server:
        done = caption(tmp_path, "a.mp4", "--server", server.url)
        answers = server.stand_in.answers
    with ChatServer(faults=3) as server:
        caption(tmp_path, "a.mp4", "--server", server.url, "-o", "again.jsonl", "--failures", "again")
    assert done.returncode == 3
    assert {"429", "500", "hang up", "200 with an error"} <= answers.keys()
    found = rows(tmp_path / "captions.jsonl")
    assert [row["frame"] for row in found] == list(range(80))
    assert sum("error" in row for row in found) == sum(answers[kind] for kind in ("refused", "cut", "empty", "long"))
    assert (tmp_path / "captions.jsonl").read_bytes() == (tmp_path / "again.jsonl").read_bytes()


def test_the_example_runs_by_its_two_commands(tmp_path: Path) -> None:
    shutil.copytree(FILE.parents[1] / "video_captioning", tmp_path / "video_captioning")
    folder = tmp_path / "vlm_captions"
    shutil.copytree(FILE.parent, folder)
    (block, *_) = re.findall(r"^```\n(.*?)^```$", (folder / "README.md").read_text(), re.S | re.M)
    make, job = block.splitlines()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = job.replace("8000", str(free.getsockname()[1]))
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in (make, f"{job} --schema scene.json"):
        done = subprocess.run(shlex.split(command), cwd=folder, capture_output=True, text=True, env=os.environ | path)
        assert done.returncode == 0, done.stderr
    found = rows(folder / "captions.jsonl")
    assert [(row["video"], row["frame"]) for row in found] == [
        (f"videos/clip-00{n}.mp4", frame) for n in range(2) for frame in (0, 30)
    ]
    assert all("480x270" in row["caption"]["caption"] for row in found)
