"""Clients and proxies that others wrote send requests to a real server: what each makes of the standard is an input."""

import base64
import json
import os
import random
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

import penstock

HERE = Path(__file__).parent
PATIENCE_S = 60.0
PORTS = ["--port", "0", "--set", "server.management_port=0", "--set", "server.metrics_port=0"]
SOURCE = """
    def turn(items):
        return [turned(item) for item in items]

    def turned(item):
        if isinstance(item, str):
            return item[::-1]
        if isinstance(item, (bytes, memoryview)):
            return bytes(item)[::-1]
        if item == "fail":
            raise ValueError
        return {"got": item}

    def fails(items):
        raise ValueError("no")

    def tensors(items):
        return items

    def gated(items):
        import os, time
        yield ["first"] * len(items)
        while not os.path.exists(items[0]):
            time.sleep(0.01)
        yield [{"last": True}] * len(items)
"""
LARGE = random.Random(0).randbytes(200_000)
NUMBERS = list(range(30_000))  # 170 KB of JSON


class Case(NamedTuple):
    """A request, and the status and body of its answer; None: any body."""

    name: str
    path: str
    status: int
    body: bytes = b""
    answer: bytes | None = None
    content_type: str = "application/json"
    method: str = "POST"


JSON = b'{"a":1,"b":["\xc3\xa4"]}'
CASES = [
    Case("json", "/predictions/turn", 200, JSON, b'{"got":%b}' % JSON),
    Case("text", "/predictions/turn", 200, b"hello", b"olleh", "text/plain"),
    Case("bytes", "/predictions/turn", 200, bytes(range(256)), bytes(reversed(range(256))), "application/octet-stream"),
    Case("large bytes", "/predictions/turn", 200, LARGE, LARGE[::-1], "application/octet-stream"),
    Case("large json", "/predictions/turn", 200, json.dumps(NUMBERS).encode(), json.dumps({"got": NUMBERS}).encode()),
    Case("no json", "/predictions/turn", 400, b'{"a":'),
    Case("a model that raises", "/predictions/fails", 500, b"1"),
    Case("an unknown model", "/predictions/nobody", 404, b"x" * 100_000, content_type="text/plain"),
    Case("a wrong method", "/predictions/turn", 405, method="GET"),
    Case("health", "/readyz", 200, method="GET"),
    Case("text after all that", "/predictions/turn", 200, b"again", b"niaga", "text/plain"),
]


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(SOURCE, "turn", "fails", "tensors", "gated", ports=PORTS)


@pytest.fixture(scope="module")
def socket_server(serve_all: Callable[..., Any], folder: Path) -> Any:
    """A server that listens on a Unix socket."""
    ports = [*PORTS[2:], "--host", f"unix:{folder}/penstock.sock", "--set", "server.grpc_port=0"]
    return serve_all(SOURCE, "turn", "fails", "tensors", "gated", ports=ports)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clients")


def program(name: str) -> str:
    """The path of a program; skips the test without it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def ran(*command: object) -> str:
    """The output of a program that must succeed."""
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{command[0]}: {done.stderr}\n{done.stdout}"
    return done.stdout


def written(folder: Path, url: str, cases: list[Case]) -> Path:
    """A file of requests: method, address, type and body in Base64, one request a line."""
    path = folder / "requests"
    lines = [f"{c.method} {url}{c.path} {c.content_type} {base64.b64encode(c.body).decode()}\n" for c in cases]
    path.write_text("".join(lines))
    return path


def check(cases: list[Case], answers: list[tuple[int, bytes]]) -> None:
    """All answers are right; the names of those that are not are in the message."""
    wrong = []
    for case, (status, body) in zip(cases, answers, strict=True):
        same = case.answer is None or body == case.answer
        if case.content_type == "application/json" and case.answer is not None and not same:
            same = bool(body) and json.loads(body) == json.loads(case.answer)
        if status != case.status or not same:
            wrong.append((case.name, status, body[:100]))
    assert not wrong


def read(output: str) -> list[tuple[int, bytes]]:
    """The answers that a program printed: status, and body in Base64."""
    pairs = [line.split(" ", 1) for line in output.splitlines()]
    return [(int(status), base64.b64decode(body)) for status, body in pairs]


# ---- programs


@pytest.fixture(scope="module")
def jdk(folder: Path) -> Callable[..., str]:
    """Runs Requests.java, which is compiled once."""
    ran(program("javac"), "-d", folder, HERE / "Requests.java")
    quick = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]  # it runs for a second
    return lambda *arguments: ran(program("java"), *quick, "-cp", folder, "Requests", *arguments)


@pytest.mark.parametrize("bodies", ["whole", "chunked"])
@pytest.mark.parametrize("version", ["default", "1.1"])
def test_a_client_of_the_jdk(server: Any, folder: Path, jdk: Callable[..., str], version: str, bodies: str) -> None:
    path = written(folder, server.url, 2 * CASES)
    check(2 * CASES, read(jdk(version, bodies, path)))


@pytest.mark.parametrize("bodies", ["whole", "chunked"])
def test_fetch_of_node(server: Any, folder: Path, bodies: str) -> None:
    path = written(folder, server.url, 2 * CASES)
    check(2 * CASES, read(ran(program("node"), HERE / "requests.mjs", bodies, path)))


def curl(folder: Path, url: str, cases: list[Case], *options: str) -> list[tuple[int, bytes]]:
    """The answers to curl, which sends all of them over one connection if it can."""
    command: list[object] = [program("curl")]
    for number, case in enumerate(cases):
        sent, got = folder / f"sent{number}", folder / f"got{number}"
        sent.write_bytes(case.body)
        applied = () if case.method == "GET" and options == CURLS["chunked"] else options
        command += ["--next", "-sS", "--max-time", "20", *applied, "-X", case.method, "-w", "%{http_code}\n"]
        command += ["-o", got, "-H", f"content-type: {case.content_type}", url + case.path]
        if case.method != "GET":
            command += ["--data-binary", f"@{sent}"]
    statuses = ran(command[0], *command[2:]).split()
    return [(int(status), (folder / f"got{number}").read_bytes()) for number, status in enumerate(statuses)]


CURLS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "http2": ("--http2",),
    "http1.0": ("--http1.0",),
    "chunked": ("-H", "transfer-encoding: chunked"),
    "waits for 100": ("-H", "expect: 100-continue"),
    "offers tls": ("-H", "connection: upgrade", "-H", "upgrade: TLS/1.0"),
    "closes": ("-H", "connection: close"),
    "packed answers": ("--compressed",),
}


@pytest.mark.parametrize("options", CURLS.values(), ids=CURLS)
def test_curl(server: Any, folder: Path, options: tuple[str, ...]) -> None:
    check(CASES, curl(folder, server.url, CASES, *options))


# ---- a proxy

PROXY = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
{user}
events {{ worker_connections 768; }}
http {{
    sendfile on; tcp_nopush on; gzip on;
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {upstream}
    upstream kept {{ server {address}; keepalive 4; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://{address}; }}
        location /kept/ {{ proxy_pass http://kept/; proxy_http_version 1.1; proxy_set_header Connection ""; }}
        location /upgrades/ {{
            proxy_pass http://{address}/; proxy_http_version 1.1;
            proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection "upgrade";
        }}
        {location}
        location /socket/ {{ proxy_pass http://unix:{folder}/penstock.sock:/; }}
        location /unbuffered/ {{
            proxy_pass http://kept/; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_request_buffering off; proxy_buffering off;
        }}
    }}
}}
"""


PLACES = ["", "/kept", "/upgrades", "/unbuffered", "/socket", "/ml"]


def documented(address: str) -> dict[str, str]:
    """The two blocks that the page on proxies shows for nginx."""
    page = (HERE.parents[1] / "docs" / "proxy.md").read_text()
    upstream = re.search(r"(?s)upstream penstock \{.*?\n\}", page)
    location = re.search(r"(?s)    location /ml/ \{.*?\n    \}", page)
    assert upstream is not None
    assert location is not None
    return {"upstream": upstream[0].replace("127.0.0.1:8080", address), "location": location[0]}


@pytest.fixture(scope="module")
def nginx(server: Any, socket_server: Any, folder: Path) -> Iterator[str]:
    """The address of nginx with its stock settings in front of the servers."""
    command = program("nginx")
    with socket.socket() as held:  # keeps the port for nginx, which may bind it too
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        config = folder / "nginx.conf"
        user = "user root;" if os.geteuid() == 0 else ""
        address = server.url.removeprefix("http://")
        config.write_text(PROXY.format(folder=folder, address=address, port=port, user=user, **documented(address)))
        process = subprocess.Popen([command, "-p", folder, "-c", config], stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            end = time.monotonic() + PATIENCE_S
            while True:
                try:
                    with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                        break
                except OSError:
                    assert process.poll() is None, (folder / "error.log").read_text()
                    assert time.monotonic() < end
                    time.sleep(0.02)
            yield url
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def test_a_client_calls_a_unix_socket(socket_server: Any) -> None:
    assert socket_server.url.startswith("unix:/")
    with penstock.Client(socket_server.url) as client:
        assert client.predict("turn", "abc") == "cba"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["plain", "http2", "chunked"])
def test_curl_through_nginx(nginx: str, folder: Path, place: str, kind: str) -> None:
    check(CASES, curl(folder, nginx + place, CASES, *CURLS[kind]))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("accept", ["text/event-stream", "*/*"])
def test_a_stream_passes_nginx_part_by_part(nginx: str, tmp_path: Path, place: str, accept: str) -> None:
    gate = tmp_path / "gate"
    headers = {"content-type": "text/plain", "accept": accept}
    request = urllib.request.Request(f"{nginx}{place}/predictions/gated", str(gate).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert b"first" in answer.read1()  # the second part does not exist yet
        gate.touch()
        assert b'{"last":true}' in answer.read()


@pytest.mark.parametrize("place", ["", "/kept", "/upgrades", "/unbuffered"])
def test_fetch_of_node_through_nginx(nginx: str, folder: Path, place: str) -> None:
    path = written(folder, nginx + place, CASES)
    check(CASES, read(ran(program("node"), HERE / "requests.mjs", "whole", path)))


def test_a_client_of_the_jdk_through_nginx(nginx: str, folder: Path, jdk: Callable[..., str]) -> None:
    path = written(folder, f"{nginx}/upgrades", CASES)
    check(CASES, read(jdk("default", "whole", path)))


# ---- gRPC and load


def infer(model: str, data: bytes) -> Any:
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="UINT8", shape=[1, len(data)])
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[data])


@pytest.fixture
def call(server: Any) -> Iterator[Any]:
    """A method of a channel of grpcio, as bytes: nobody's generated code comes between."""
    with grpc.insecure_channel(server.urls["grpc"].removeprefix("grpc://")) as channel:
        yield channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")


def test_grpcio(call: Any) -> None:
    for data in (b"\1", bytes(range(256)), LARGE):
        found = pb.ModelInferResponse.FromString(call(infer("tensors", data).SerializeToString(), timeout=PATIENCE_S))
        assert found.raw_output_contents[0] == data
    for model, code in (("nobody", grpc.StatusCode.NOT_FOUND), ("fails", grpc.StatusCode.INTERNAL)):
        with pytest.raises(grpc.RpcError) as error:
            call(infer(model, b"\1").SerializeToString(), timeout=PATIENCE_S)
        assert error.value.code() == code
    calls = [call.future(infer("tensors", bytes([n])).SerializeToString(), timeout=PATIENCE_S) for n in range(200)]
    found = [pb.ModelInferResponse.FromString(each.result()).raw_output_contents[0] for each in calls]
    assert found == [bytes([n]) for n in range(200)]


def counts(said: str) -> tuple[int, int, int]:
    """(answered, with 2xx, failed or timed out) of a run of h2load."""
    done, bad, errors, late = re.search(
        r"(\d+) done, \d+ succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", said
    ).groups()  # type: ignore[union-attr]
    fine = re.search(r"status codes: (\d+) 2xx", said)
    assert fine is not None, said
    return int(done), int(fine[1]), int(bad) + int(errors) + int(late)


@pytest.mark.parametrize("data", [b"hello", LARGE[:100_000]], ids=["small", "large"])
def test_h2load_with_http_1(server: Any, folder: Path, data: bytes) -> None:
    (folder / "message").write_bytes(data)
    options = ["--h1", "-n", "300", "-c", "4", "-d", folder / "message", "-H", "content-type: application/octet-stream"]
    assert counts(ran(program("h2load"), *options, f"{server.url}/predictions/turn")) == (300, 300, 0)


@pytest.mark.parametrize("data", [b"\1\2\3", LARGE[:100_000]], ids=["small", "large"])
def test_h2load_with_grpc(server: Any, folder: Path, data: bytes) -> None:
    message = infer("tensors", data).SerializeToString()
    (folder / "message").write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
    headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    url = server.urls["grpc"].replace("grpc://", "http://") + "/inference.GRPCInferenceService/ModelInfer"
    options = ["-n", "300", "-c", "4", "-m", "10", "-d", folder / "message", *headers]
    assert counts(ran(program("h2load"), *options, url)) == (300, 300, 0)
