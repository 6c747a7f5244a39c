"""The BERT example runs by the commands of its README, and its servers answer what they should."""

import os
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "bert_infilling"
BIRTHDAY = "Happy birthday to [MASK]."
KNOWN = {
    BIRTHDAY: "you",
    "Once upon a [MASK].": "time",
    "Paris is the capital of [MASK].": "france",
    "The day after Monday is [MASK].": "tuesday",
    "The opposite of hot is [MASK].": "cold",
    "Xanthippe says that the cow [MASK].": "moos",
}


def form(*texts: str) -> bytes:
    return urllib.parse.urlencode([("s", text) for text in texts]).encode()


def check_answers(server: Any, route: str) -> None:
    """What every server of the folder must do on a route: answer, also many at once, and say what is wrong."""
    assert server.post(route, form(BIRTHDAY)) == (200, ["you"])
    assert server.post(route, form(*KNOWN)) == (200, list(KNOWN.values()))
    with ThreadPoolExecutor(32) as pool:
        texts = [*KNOWN, "no blank here"] * 8
        for text, (status, answer) in zip(
            texts, pool.map(lambda text: server.post(route, form(text)), texts), strict=True
        ):
            if text in KNOWN:
                assert (status, answer) == (200, [KNOWN[text]])
            else:
                assert status == 400
                assert answer["error"].startswith("the text has no [MASK]")
    status, answer = server.post(route, form("[MASK] " * 80))
    assert status == 400
    assert answer["error"] == "the text has 82 tokens, the model takes 64 at most"
    status, answer = server.post(route, b"")
    assert status in (400, 422)  # FastAPI's own word for a missing field is 422
    assert "s" in str(answer)


def test_flask_answers_naive_and_streamed_requests_and_the_curl_lines_of_the_readme(
    example: Callable[..., Any],
) -> None:
    server = example(FOLDER, "flask_example.py", "--port", "0")
    check_answers(server, "/naive")
    check_answers(server, "/stream")
    assert server.get("/naive?" + form(BIRTHDAY).decode()) == (200, ["you"])
    readme = (FOLDER / "README.md").read_text()
    lines = [line for line in readme.splitlines() if line.startswith("curl")]
    assert len(lines) == 2
    for line in lines:
        command = line.replace("http://127.0.0.1:5005", server.url) + " -s -f"
        out = subprocess.run(["bash", "-c", command], cwd=FOLDER, capture_output=True, text=True, check=True).stdout
        assert out == '["you"]\n'
    assert server.interrupt() == 0
    assert "Traceback" not in server.said()


def test_fastapi_answers_naive_and_streamed_requests(example: Callable[..., Any]) -> None:
    server = example(FOLDER, "fastapi_example.py", "--port", "0")
    check_answers(server, "/naive")
    check_answers(server, "/stream")
    assert server.interrupt() == 0
    assert "Traceback" not in server.said()


def test_gevent_answers_from_a_worker_process_and_does_not_load_torch_itself(example: Callable[..., Any]) -> None:
    server = example(FOLDER, "flask_multigpu_example.py", "--port", "0")
    check_answers(server, "/stream")
    libraries = Path(f"/proc/{server.process.pid}/maps")
    if libraries.exists():
        assert "libtorch" not in libraries.read_text()
    assert server.interrupt() == 0
    assert "Traceback" not in server.said()


def test_the_futures_get_the_words_of_the_plain_loop() -> None:
    command = [sys.executable, "future_example.py", "--texts", "256"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Happy birthday to [MASK]. -> you" in done.stdout
    assert "same words: True" in done.stdout


def test_redis_answers_from_a_worker_that_the_web_server_does_not_know(
    redis_server: Any, example: Callable[..., Any]
) -> None:
    env = {"REDIS": f"redis://{redis_server.address}"}
    worker = example(FOLDER, "redis_streamer_gunicorn.py", env=env, url=False)
    server = example(
        FOLDER, "-m", "gunicorn", "redis_streamer_gunicorn:app", "-b", "127.0.0.1:0", "-k", "gevent",
        "--workers", "2", env=env,
    )  # fmt: skip
    check_answers(server, "/stream")
    assert server.interrupt() == 0  # any gunicorn with gevent says SystemExit here
    assert worker.interrupt() == 0
    assert "Traceback" not in worker.said()


def test_the_shipped_weights_know_as_many_held_out_words_as_the_readme_says() -> None:
    stated = re.search(r"([0-9.]+) % of ([0-9,]+) held-out", (FOLDER / "README.md").read_text())
    assert stated is not None
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "train.py", "--check"], cwd=FOLDER, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"held-out: ([0-9.]+)% of ([0-9]+) words right", done.stdout)
    assert found is not None, done.stdout
    assert found[2] == stated[2].replace(",", "")
    assert float(found[1]) == pytest.approx(float(stated[1]), abs=0.3)
