"""`penstock doctor` beside real servers."""

import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.doctor import UNWELL, report
from penstock.serving.observe.history import Second

SOURCE = """
    def echo(items):
        return items

    def fails(items):
        raise ValueError("always")
"""


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(SOURCE, "echo", "fails")


def test_a_healthy_server_is_0_and_one_with_errors_is_not(server: Any) -> None:
    found = doctor(server.urls["metrics"])
    assert (found.returncode, found.stderr) == (0, "")
    verdict, _, heads, echo, fails, *events = found.stdout.splitlines()
    assert verdict.startswith(f"{server.urls['metrics']}  HEALTHY: All 2 models answer")
    assert heads.split()[:4] == ["MODEL", "VERSION", "STATE", "UP"]
    assert (echo.split()[:4], fails.split()[0]) == (["echo", "1", "READY", "1/1"], "fails")
    assert any(event.startswith("echo 1: ready") for event in events)
    over = threading.Event()

    def send() -> None:
        while not over.is_set():
            server.post("/predictions/fails", b"1")

    thread = threading.Thread(target=send)
    thread.start()
    try:
        for _ in range(60):
            found = doctor(server.urls["metrics"], "--json")
            if found.returncode == UNWELL:
                break
            time.sleep(0.5)
    finally:
        over.set()
        thread.join()
    view = json.loads(found.stdout)
    assert (view["verdict"]["word"], view["verdict"]["model"]) == ("errors", "fails")
    assert view["models"][1]["now"]["failed"] > 0


def test_watch_goes_on_until_it_is_interrupted(server: Any) -> None:
    command = [sys.executable, "-m", "penstock", "doctor", server.urls["metrics"], "--watch", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        views = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.send_signal(signal.SIGINT)
    assert [len(view["models"]) for view in views] == [2, 2, 2]
    assert views[0]["now_s"] < views[1]["now_s"] < views[2]["now_s"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1", "does not answer"),
        ("127.0.0.1:8082", "is not a valid address|expected http://HOST"),
        ("inference", "answers with status 404 and application/json, expected the metrics listener"),
    ],
)
def test_what_is_no_metrics_listener_is_said(server: Any, url: str, said: str) -> None:
    found = doctor(server.urls.get(url, url))
    assert found.returncode in (1, 2)
    assert any(part in found.stderr for part in said.split("|")), found.stderr


def test_it_gives_a_token(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    server = serve(SOURCE, "app.py:echo", "--set", f"auth.metrics_token_file={tmp_path / 'token'}")
    assert "requires a token: give --token-file" in doctor(server.urls["metrics"]).stderr
    assert doctor(server.urls["metrics"], "--token-file", str(tmp_path / "token")).returncode == 0


def test_it_asks_over_a_unix_socket(serve: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    serve(SOURCE, "app.py:echo", "--set", f"server.metrics_host=unix:{path}")
    assert doctor(f"unix:{path}").returncode == 0


def test_names_cannot_command_the_terminal() -> None:
    now = dict.fromkeys(("requests", "p50_s", "p99_s", "queue", "oldest_s", "rows", "busy", "failed", "rejected"), 0.0)
    hostile = "\x1b[31m\nx"
    model = {"name": hostile, "version": "1", "state": "READY", "up": 1, "instances": 1, "batch": 8}
    cause = {"cause": "batch limit", "model": hostile, "version": hostile, "evidence": hostile, "change": hostile}
    view = {
        "verdict": {"word": "batch limit", "text": hostile, "causes": [cause | {"gain": 1.5, "metric": "m"}]},
        "models": [model | {"now": now, "slo_s": None, "memory_bytes": 0}],
        "model_count": 1,
        "events": [{"model": hostile, "version": "1", "kind": "died", "text": ""}],
    }
    text = report(view, "http://x")
    assert "\x1b" not in text
    assert len(text.splitlines()) == 10
    assert text.endswith("gain      about 1.5 times the requests a second")


class _OtherServer(http.server.BaseHTTPRequestHandler):
    """A dashboard stream of another version: `view` is its event."""

    view: Any = None

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for _ in range(10):
            self.wfile.write(b"data: %s\n\n" % json.dumps(self.view).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("view", "said"),
    [
        ([1], "sends what this version does not know"),
        ({"verdict": {"level": "ok"}}, "sends what this version does not know"),
        ({"verdict": {"level": "ok", "word": "x", "text": "y"}, "models": [{"seconds": [[1]]}]}, "does not know"),
        (None, ""),
    ],
)
def test_a_newer_version_is_shown_or_refused_in_one_line(view: Any, said: str) -> None:
    model = {"name": "m", "version": "1", "state": "NEW", "up": 1, "instances": 1, "batch": 8, "slo_s": None}
    fields = [*Second._fields, "new"]
    model |= {"memory_bytes": 0, "seconds": [[1.0] * len(fields)], "new": 1}
    verdict = {"level": "ok", "word": "new", "text": "all new", "more": 1}
    newer = {"verdict": verdict, "models": [model], "model_count": 1, "events": [], "fields": fields}
    _OtherServer.view = newer if view is None else view
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _OtherServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        found = doctor(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()
    assert said in found.stderr
    assert "Traceback" not in found.stderr
    assert found.returncode == (1 if said else 0)
