"""The command `torchserve`: start and stop, files and listeners."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.waiting import wait_for

HANDLER = """
import os, sys, time

def handle(data, context):
    if data is None:
        print("loaded, torch" if "torch" in sys.modules else "loaded")
        return None
    folder = bytes(data[0].get("body") or b"").decode()
    if folder:
        open(os.path.join(folder, "begun"), "w").close()
        while not os.path.exists(os.path.join(folder, "go")):
            time.sleep(0.01)
    return ["answer"] * len(data)
"""
CONFIG = {
    "model_store": ".",
    "load_models": "echo.mar",
    "disable_token_authorization": "true",
    "disable_system_metrics": "true",
}
START_S = 60.0


@pytest.fixture
def store(torchserve: Any) -> Callable[..., Path]:
    """Writes an archive, and a config.properties with these keys, to the folder."""

    def write(handler: str = HANDLER, **keys: str) -> Path:
        folder: Path = torchserve.folder
        (folder / "echo.py").write_text(handler)
        arguments = ("--model-name", "echo", "--version", "1.0", "--handler", "echo.py", "--force")
        status, said = torchserve.run("torch-model-archiver", *arguments)
        assert status == 0, said
        torchserve.configure(**{**CONFIG, **keys})
        return folder

    return write


@pytest.fixture
def foreground(torchserve: Any) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `torchserve --foreground`; killed at the end."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, ready: str = "Model server started") -> subprocess.Popen[bytes]:
        command = [Path(sys.executable).with_name("torchserve"), "--foreground", *arguments]
        out = torchserve.folder / "said.txt"
        with out.open("wb") as log:
            running.append(subprocess.Popen(command, cwd=torchserve.folder, env=torchserve.env, stdout=log, stderr=log))
        wait_for(lambda: ready in out.read_text(), START_S, process=running[-1], said=out.read_text)
        return running[-1]

    yield start
    for each in running:
        each.kill()
        each.wait()


def listening(text: str) -> str:
    """The address of the inference listener in the output."""
    return text.rpartition("Inference API bind to: ")[2].split()[0]


def post(url: str, body: bytes) -> tuple[int, bytes]:
    request = urllib.request.Request(url + "/predictions/echo", body, {"content-type": "application/octet-stream"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.status, answer.read()


def begin(url: str, folder: Path) -> tuple[threading.Thread, list[tuple[int, bytes]]]:
    """Starts a request that runs until the file "go" exists; returns its thread and its answers."""
    answers: list[tuple[int, bytes]] = []
    thread = threading.Thread(target=lambda: answers.append(post(url, str(folder).encode())))
    thread.start()
    wait_for(lambda: (folder / "begun").exists())
    return thread, answers


def test_a_server_starts_in_the_background_serves_and_stops(torchserve: Any, store: Callable[..., Path]) -> None:
    folder = store(access_log="true")
    torchserve.start("--ts-config", "config.properties")
    assert torchserve.fetch(torchserve.url() + "/predictions/echo", b"") == (200, b"answer")
    assert torchserve.fetch(torchserve.url() + "/ping")[0] == 200
    assert {path.name for path in (folder / "logs").glob("*.log")} == {
        f"{name}.log" for name in ("access_log", "ts_log", "ts_metrics", "model_log", "model_metrics")
    }
    assert "MODEL_LOG - loaded\n" in (folder / "logs" / "model_log.log").read_text(), "no torch in the worker"
    assert "W-9000-echo_1.0-stdout MODEL_LOG - loaded" in torchserve.said(), "and on stdout"

    status, said = torchserve.run("torchserve", "--start", "--ts-config", "config.properties")
    logged = re.compile("_METRICS - |HTTP/1.1")  # the running server may print these at any time
    assert (status, [line for line in said.splitlines() if not logged.search(line)]) == (
        1,
        ["TorchServe is already running, please use torchserve --stop to stop TorchServe."],
    )
    (pid,) = torchserve.pids()
    server = psutil.Process(pid)
    resident = [each.memory_info().rss for each in (server, *server.children(recursive=True))]
    assert len(resident) == 2
    assert sum(resident) < 150 * 2**20
    status, said = torchserve.run("torchserve", "--stop")
    assert (status, said.splitlines()[-2:]) == (0, ["Torchserve stopped.", "TorchServe has stopped."])
    status, said = torchserve.run("torchserve", "--stop")
    assert (status, sorted(said.splitlines())[1]) == (0, "TorchServe is not currently running.")
    assert not (folder / "key_file.json").exists()
    lines = (folder / "logs" / "access_log.log").read_text().splitlines()
    assert len([line for line in lines if '"POST /predictions/echo HTTP/1.1" 200' in line]) == 1
    assert all(len(line) <= 200 for line in lines)


def test_without_a_file_the_last_state_is_restored(torchserve: Any, store: Callable[..., Path]) -> None:
    folder = store()
    torchserve.start("--ts-config", "config.properties")
    url = torchserve.url("Management") + "/models/echo?min_worker=2&synchronous=true"
    request = urllib.request.Request(url, method="PUT")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert json.load(answer)["status"] == "Workers scaled to 2 for model: echo"
    torchserve.run("torchserve", "--stop")
    (folder / "config.properties").unlink()
    torchserve.start()
    described = json.loads(torchserve.fetch(torchserve.url("Management") + "/models/echo")[1])
    assert len(described[0]["workers"]) == 2
    torchserve.run("torchserve", "--stop")
    status, said = torchserve.run("torchserve", "--start", "--ncs")
    assert (status, said) == (1, "Missing mandatory parameter --model-store\n")


def test_a_signal_drains_in_the_foreground(
    torchserve: Any, store: Callable[..., Path], foreground: Callable[..., subprocess.Popen[bytes]]
) -> None:
    folder = store()
    process = foreground("--ts-config", "config.properties", "--ncs")
    assert torchserve.pids() == [process.pid]
    thread, answers = begin(listening((folder / "said.txt").read_text()), folder)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: "event=draining" in (folder / "said.txt").read_text())
    (folder / "go").touch()
    thread.join()
    assert answers == [(200, b"answer")]
    assert process.wait(START_S) == 0
    assert not torchserve.pids()
    assert not (folder / "logs" / "config").exists(), "--ncs"


def test_sighup_loads_changed_archives_again(torchserve: Any) -> None:
    def handler(word: str) -> str:
        return f"def handle(data, context):\n    return ['{word}'] * len(data or ())\n"

    torchserve.add_model(handler("one"))
    torchserve.configure(disable_token_authorization="true")
    torchserve.start("--ts-config", "config.properties", "--models", "m.mar")
    url = torchserve.url() + "/predictions/m"
    assert torchserve.fetch(url, b"") == (200, b"one")
    torchserve.add_model(handler("two"))
    os.kill(torchserve.pids()[0], signal.SIGHUP)
    torchserve.wait_for("event=reloaded model=m")
    assert torchserve.fetch(url, b"") == (200, b"two")
    torchserve.add_model("raise OSError")
    os.kill(torchserve.pids()[0], signal.SIGHUP)
    torchserve.wait_for("change_failed")
    assert torchserve.fetch(url, b"") == (200, b"two"), "an archive that does not load changes nothing"
    torchserve.run("torchserve", "--stop")


def test_a_second_signal_ends_at_once(
    torchserve: Any, store: Callable[..., Path], foreground: Callable[..., subprocess.Popen[bytes]]
) -> None:
    folder = store()
    process = foreground("--ts-config", "config.properties")
    url = listening((folder / "said.txt").read_text())
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request("POST", "/predictions/echo", str(folder).encode())
    wait_for(lambda: (folder / "begun").exists())
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "event=draining" in (folder / "said.txt").read_text())
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(START_S) == 1
    connection.close()
    assert not torchserve.pids(), "what is left of it is in nobody's way"


def test_a_port_in_use_is_reported_with_its_key(torchserve: Any, store: Callable[..., Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        folder = store(management_address=f"http://127.0.0.1:{port}")
        (folder / "key_file.json").write_text("{}")
        status, said = torchserve.run("torchserve", "--foreground", "--ts-config", "config.properties")
    assert status == 1
    assert f"cannot listen on 127.0.0.1:{port}: the port is in use; choose another with management_address" in said
    assert "Model server started" not in said
    assert not list((folder / "logs").glob("config/*")), "what never served is not restored"
    assert (folder / "key_file.json").read_text() == "{}", "the keys of the server that has the port"


def test_a_model_whose_archive_is_being_opened_is_not_unknown(torchserve: Any, store: Callable[..., Path]) -> None:
    archive = (store() / "echo.mar").read_bytes()
    asked, go = threading.Event(), threading.Event()

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            go.wait(START_S)
            self.send_response(200)
            self.send_header("content-length", str(len(archive)))
            self.end_headers()
            self.wfile.write(archive)

        def log_message(self, *arguments: object) -> None:
            pass

    (torchserve.folder / "echo.mar").unlink()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            source = f"http://127.0.0.1:{server.server_address[1]}/echo.mar"
            torchserve.configure(**{**CONFIG, "load_models": source, "allowed_urls": "http://127.0.0.1:.*"})
            torchserve.start("--ts-config", "config.properties", wait=False)
            torchserve.wait_for("Management gRPC API bind to")
            assert asked.wait(START_S)
            url, management = torchserve.url(), torchserve.url("Management")
            for found in (f"{url}/predictions/echo", f"{url}/predictions/echo/1.0", f"{url}/invocations"):
                status, body = torchserve.fetch(found, b"")
                assert (status, json.loads(body)["type"]) == (503, "ServiceUnavailableException"), found
                assert b"opening 1 more of its archives" in body
            assert torchserve.fetch(f"{url}/wfpredict/w", b"")[0] == 503
            assert torchserve.fetch(f"{management}/models/echo")[0] == 503
            assert torchserve.fetch(f"{url}/ping")[0] == 500
        finally:
            go.set()
            torchserve.wait_for("Model server started")
            server.shutdown()
            thread.join()
    assert torchserve.fetch(f"{url}/predictions/echo", b"") == (200, b"answer")
    assert torchserve.fetch(f"{url}/predictions/other", b"")[0] == 404
    assert torchserve.fetch(f"{url}/wfpredict/w", b"")[0] == 404


def test_a_broken_model_does_not_affect_the_others_and_a_missing_one_ends_the_start(
    torchserve: Any, store: Callable[..., Path]
) -> None:
    folder = store(load_models="broken.mar,other=echo.mar")
    (folder / "broken.mar").write_text("no zip")
    torchserve.start("--ts-config", "config.properties")
    assert "Failed to load model: broken.mar" in torchserve.said()
    assert torchserve.fetch(torchserve.url() + "/predictions/other", b"") == (200, b"answer")
    torchserve.run("torchserve", "--stop")
    status, said = torchserve.run(
        "torchserve", "--foreground", "--ts-config", "config.properties", "--models", "none.mar", "other=echo.mar"
    )
    assert status == 1
    assert "load_models: found no none.mar in " in said


def test_https_without_a_certificate_generates_one(torchserve: Any, store: Callable[..., Path]) -> None:
    folder = store(inference_address="https://127.0.0.1:0")
    torchserve.start("--ts-config", "config.properties")
    assert torchserve.said().count("event=self_signed_certificate") == 1
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(torchserve.url() + "/ping", context=context, timeout=30) as answer:
        assert answer.status == 200
    assert torchserve.fetch(torchserve.url("Management") + "/models")[0] == 200, "the others stay as they are"
    assert list((folder / "tmp").glob("penstock-tls-*"))
    torchserve.run("torchserve", "--stop")
    assert not list((folder / "tmp").glob("penstock-tls-*")), "the key is removed"


def test_one_unix_socket_serves_all_apis(torchserve: Any, store: Callable[..., Path]) -> None:
    keys = dict.fromkeys(("inference_address", "management_address", "metrics_address"), "unix:s")
    folder = store(**keys)
    torchserve.start("--ts-config", "config.properties")
    before = os.getcwd()
    os.chdir(folder)  # the path of a socket has 107 bytes at most
    try:
        for path in (b"/ping", b"/models", b"/metrics"):
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(30)
                client.connect("s")
                client.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n")
                assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
    finally:
        os.chdir(before)
    torchserve.run("torchserve", "--stop")
    assert not (folder / "s").exists()
