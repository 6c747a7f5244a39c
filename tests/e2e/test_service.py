"""The running server as its operator sees it: guards, start and end, many models, workers that come and go."""

import http.client
import json
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

TLS = Path(__file__).parents[1] / "tls"
TOKEN = "open-sesame-0123456789"
MODELS = """
    import os
    import time
    from pathlib import Path
    import penstock

    def echo(items):
        return items

    def slow(items):
        time.sleep(0.1)
        return items

    def stuck(items):
        time.sleep(60)

    def dies(items):
        os._exit(3)

    class Sums:
        inputs = [penstock.TensorSpec("it's x", "FP32", (-1, 2))]

        def predict(self, items):
            return [item["it's x"].sum(axis=1) for item in items]

    class Second:
        def load(self, device):
            try:
                Path("first").touch(exist_ok=False)
            except FileExistsError:
                raise RuntimeError("only one of us can be")

        def predict(self, items):
            return items
"""


def curl_line(server: Any) -> str:
    for _ in range(12):
        line: str = server.process.stdout.readline().strip()
        if line.startswith("curl"):
            return line
    raise AssertionError("the banner has no curl line")


def test_tls_and_tokens_together_guard_every_listener_and_the_curl_line_works(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "a token's file").write_text(f"# ours\n\n{TOKEN}\n")
    flags = ["--tls-cert", str(TLS / "cert.pem"), "--tls-key", str(TLS / "key.pem"), "--token-file", "a token's file"]
    server = serve(MODELS, "Sums", *flags)
    trusting = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    trusting.check_hostname = False
    for listener, path in (("inference", "/v2/models/sums"), ("management", "/models"), ("metrics", "/metrics")):
        url = server.urls[listener] + path
        assert url.startswith("https://")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, context=trusting, timeout=10)
        with refused.value:
            assert refused.value.code == 401
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, context=trusting, timeout=10) as answer:
            assert answer.status == 200
    line = curl_line(server)
    assert TOKEN not in line
    done = subprocess.run(["bash", "-c", line + " -s -S -f"], capture_output=True, check=False)
    assert done.returncode == 0, (line, done.stderr)
    assert json.loads(done.stdout)["outputs"][0]["data"] == [0.0]


def test_the_whole_end_takes_no_longer_than_drain_s(serve: Callable[..., Any]) -> None:
    server = serve(MODELS, "stuck", "--set", "server.drain_s=2")
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.request("POST", "/predictions/stuck", b"x")
    while server.metric("penstock_requests_total") < 1:
        pass
    start = time.monotonic()
    status, _, _ = server.stop()
    connection.close()
    assert status == 0
    assert time.monotonic() - start < 3.8  # each of listener and engine may wait for 2 s, but not one after the other


def test_what_waits_when_the_end_comes_is_answered_and_what_comes_later_is_whole_or_not_taken(
    serve: Callable[..., Any],
) -> None:
    server = serve(MODELS, "slow", "--set", "models.slow.batching.max_batch_size=2")
    host = server.url.removeprefix("http://")
    asked: list[float] = []  # when, of each request
    answered: list[float] = []  # when it was asked, of each answer
    wrong: list[object] = []

    def client(i: int) -> None:
        connection = http.client.HTTPConnection(host, timeout=10)
        try:
            while True:
                at = time.monotonic()
                asked.append(at)
                connection.request("POST", "/predictions/slow", b"[%d]" % i, {"content-type": "application/json"})
                answer = connection.getresponse()
                body = answer.read()
                if (answer.status, body) != (200, b"[%d]" % i):
                    wrong.append((answer.status, body))
                answered.append(at)
                if answer.will_close:
                    return
        except http.client.IncompleteRead as e:
            wrong.append(e)
        except (http.client.RemoteDisconnected, ConnectionError):
            return  # it crossed with the end of an idle connection: not read, as `asked` and `answered` prove
        finally:
            connection.close()

    with ThreadPoolExecutor(16) as pool:
        clients = [pool.submit(client, i) for i in range(16)]
        while server.metric("penstock_answers_total") < 8:
            time.sleep(0.01)
        time.sleep(0.15)
        signalled = time.monotonic()
        answers = len(answered)
        server.process.send_signal(signal.SIGTERM)
        for c in clients:
            c.result(20)
    assert server.stop(0)[0] == 0
    assert wrong == []
    early = {at for at in asked if at < signalled - 0.1}
    assert len(early) - answers > 8, "nobody waited"
    assert early <= set(answered)


def test_sixty_models_are_served_behind_a_banner_of_twelve_lines(serve: Callable[..., Any], tmp_path: Path) -> None:
    lines = [f'[models."m.{i}"]\ntarget = "app.py:echo"\ntransport = "inline"\n' for i in range(60)]
    (tmp_path / "many.toml").write_text("".join(lines))
    server = serve(MODELS, "many.toml")
    assert server.post("/predictions/m.59", b"[1]") == (200, b"[1]")
    assert len(json.loads(server.get("/models", "management")[1])["models"]) == 60
    paths = json.loads(server.get("/openapi.json")[1])["paths"]
    assert "/predictions/m.0" in paths
    status, out, _ = server.stop()
    assert status == 0
    assert len(out.splitlines()) <= 12


def test_one_instance_that_does_not_load_leaves_the_others_to_answer(serve: Callable[..., Any]) -> None:
    server = serve(MODELS, "Second", "--instances", "3")
    assert server.post("/predictions/second", b"[1]") == (200, b"[1]")
    assert server.get("/readyz")[0] == 200
    version = json.loads(server.get("/models/second", "management")[1])["versions"][0]
    assert (version["state"], version["instances"], version["ready_instances"]) == ("READY", 3, 1)
    status, _, err = server.stop()
    assert status == 0
    assert "only one of us can be" in err


def test_a_model_that_dies_on_every_batch_answers_all_and_the_server_lives(serve: Callable[..., Any]) -> None:
    server = serve(MODELS, "dies", "echo")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda number: server.post("/predictions/dies", b"[%d]" % number), range(4)))
    assert {status for status, _ in answers} == {503}
    assert server.post("/predictions/echo", b"[1]") == (200, b"[1]")
    assert server.get("/healthz")[0] == 200
    assert server.stop()[0] == 0


def test_a_signal_while_models_load_ends_at_once(tmp_path: Path, serve: Callable[..., Any]) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\nclass Slow:\n"
        "    def load(self, device):\n        Path('loading').touch()\n        time.sleep(60)\n"
        "    def predict(self, items):\n        return items\n"
    )
    from_conftest = serve(MODELS, "echo").process.args  # the command line that starts a server
    command = [a if a != "app.py:echo" else "slow.py:Slow" for a in from_conftest]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "loading").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in err


def test_a_host_that_cannot_be_bound_is_named_with_its_key(serve: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match=r"192\.0\.2\.1.*server\.host"):
        serve(MODELS, "echo", "--host", "192.0.2.1", "--insecure")


def test_a_model_that_does_not_load_is_told_once_with_its_traceback(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "first").touch()
    with pytest.raises(RuntimeError, match="only one of us can be") as told:
        serve(MODELS, "Second")
    assert str(told.value).count("\nRuntimeError: only one of us can be") == 1
    assert "exit 1" in str(told.value)
