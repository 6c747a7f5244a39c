"""Redis streamers and workers in programs: the command, TLS, Unix sockets, gevent, shutdown."""

import asyncio
import contextlib
import gc
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock import RedisStreamer, tracing
from penstock.errors import BrokerUnavailable, ConfigError, PenstockError
from penstock.streamer.redis.connection import RedisConnection, parse_address
from support.collector import Collector
from support.redis_nodes import wait_for
from support.urls import fetch

APP = """
    from penstock import ManagedModel, model

    @model(max_batch_size=4)
    def sizes(items):
        return [len(items)] * len(items)

    class Upper(ManagedModel):
        def init_model(self):
            self.model = str.upper

        def predict(self, batch):
            return [self.model(x) for x in batch]
"""


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `penstock worker app.py:TARGET --redis BROKER ...`; returns when it serves."""
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    processes: list[subprocess.Popen[str]] = []

    def start(target: str, broker: str, *options: str, stderr: Any = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "penstock.cli.main", "worker", f"app.py:{target}", "--redis", broker, *options]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=stderr, text=True)
        processes.append(process)
        assert process.stdout is not None
        while f"app.py:{target} serves" not in (line := process.stdout.readline()):
            assert "metrics at http" in line
            process.metrics = line.split()[-1]
        return process

    yield start
    for process in processes:
        process.terminate()
        process.communicate(timeout=30)
        assert process.returncode == 0


def test_a_managed_model_is_served_by_the_command(work: Any, redis_server: Any) -> None:
    work("Upper", redis_server.address, "--workers", "2", "--prefix", "up")
    with RedisStreamer(redis_server.address, "up") as streamer:
        assert streamer.predict(["a", "b"]) == ["A", "B"]


def test_flags_override_the_options_of_a_model(work: Any, redis_server: Any) -> None:
    work("sizes", redis_server.address)
    work("sizes", redis_server.address, "--prefix", "two", "--max-batch-size", "2", "--set", "batching.max_hold_s=0")
    with RedisStreamer(redis_server.address) as streamer:
        assert max(streamer.predict(range(20))) == 4
    with RedisStreamer(redis_server.address, "two") as streamer:
        assert max(streamer.predict(range(20))) == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["app.py:absent"], "has no 'absent'"),
        (["penstock.toml"], "a worker serves one model"),
        (["app.py:Upper", "--set", "batching.max_bath_size=3"], "did you mean"),
        (["app.py:Upper", "--redis", "http://host"], "expected host:port"),
    ],
)
def test_a_worker_that_cannot_start_reports_the_reason(tmp_path: Path, arguments: list[str], error: str) -> None:
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    command = [sys.executable, "-m", "penstock.cli.main", "worker", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert error in done.stderr


def test_the_broker_may_listen_on_a_unix_socket(work: Any, run_redis: Any, tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    run_redis("--unixsocket", str(path), "--requirepass", "secret")
    broker = f"unix://:secret@{path}?db=2"
    work("Upper", broker)
    with RedisStreamer(broker) as streamer:
        assert streamer.predict(["a"]) == ["A"]
        assert "secret" not in str(streamer.statistics())


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, Path]:
    """The files of a new authority, and of a server and a client that it has signed."""

    def openssl(*words: object) -> None:
        subprocess.run(["openssl", *map(str, words)], cwd=tmp_path, check=True, capture_output=True)

    new = ["req", "-newkey", "rsa:2048", "-nodes", "-batch"]
    openssl(*new, "-x509", "-days", "2", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    (tmp_path / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name in ("server", "client"):
        openssl(*new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signer = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", *signer, "-out", f"{name}.pem")
    return {name: tmp_path / name for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")}


@pytest.mark.parametrize("kind", ["rediss", "rediss+cluster"])
def test_the_broker_may_use_tls_and_both_sides_check_certificates(
    work: Any, run_redis: Any, redis_server: Any, certificates: dict[str, Path], kind: str
) -> None:
    port = redis_server.port  # another one's, which is free once it has ended
    redis_server.kill()
    files = {
        "--tls-ca-cert-file": "ca.pem", "--tls-cert-file": "server.pem", "--tls-key-file": "server.key",
    }  # fmt: skip
    options = [word for option, name in files.items() for word in (option, str(certificates[name]))]
    clustered = kind == "rediss+cluster"
    redis = run_redis("--tls-port", str(port), *options, *(["--cluster-enabled", "yes"] if clustered else []))
    if clustered:
        redis.ask.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        wait_for(lambda: redis.ask.execute_command("CLUSTER INFO")["cluster_state"] == "ok", "the cluster is up")
    trust = f"{kind}://localhost:{port}?ssl_ca_certs={certificates['ca.pem']}"
    broker = f"{trust}&ssl_certfile={certificates['client.pem']}&ssl_keyfile={certificates['client.key']}"
    work("Upper", broker)
    with RedisStreamer(broker) as streamer:
        assert streamer.predict(["a"]) == ["A"]
    for address in (f"{kind}://localhost:{port}", trust):  # an unknown authority; a client without a certificate
        with RedisStreamer(address) as streamer, pytest.raises(BrokerUnavailable, match="cannot be reached"):
            streamer.predict(["a"])


def test_an_encrypted_key_without_its_password_is_an_error_of_the_address(certificates: dict[str, Path]) -> None:
    key = certificates["client.key"]
    locked = key.with_name("locked.key")
    subprocess.run(["openssl", "pkey", "-in", key, "-aes128", "-passout", "pass:one", "-out", locked], check=True)
    broker = f"rediss://localhost:1?ssl_certfile={certificates['client.pem']}&ssl_keyfile={locked}"
    ways = f"the key {locked} is encrypted: .* ssl_password, or decrypt it with openssl pkey -in {locked} -out"
    with RedisStreamer(broker) as streamer, pytest.raises(ConfigError, match=ways):
        streamer.predict(["a"])


@pytest.fixture
def held_port() -> Iterator[Callable[[], int]]:
    """Ports that only a program with SO_REUSEADDR can take, as Redis does."""
    with contextlib.ExitStack() as held:

        def hold() -> int:
            sock = held.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
            port: int = sock.getsockname()[1]
            return port

        yield hold


def test_sentinels_and_servers_may_have_tls_and_passwords_of_their_own(
    work: Any, run_redis: Any, certificates: dict[str, Path], held_port: Callable[[], int], tmp_path: Path
) -> None:
    files = {
        "tls-ca-cert-file": certificates["ca.pem"],
        "tls-cert-file": certificates["server.pem"],
        "tls-key-file": certificates["server.key"],
    }
    server, sentinel = held_port(), held_port()
    tls = [word for key, file in files.items() for word in (f"--{key}", str(file))]
    run_redis("--tls-port", str(server), *tls, "--requirepass", "one")

    def configure(port: int) -> Path:
        lines = [f"port {port}", f"tls-port {sentinel}", "tls-replication yes", "bind 127.0.0.1", "requirepass two"]
        lines += [f"{key} {file}" for key, file in files.items()]
        lines += [f"sentinel monitor main 127.0.0.1 {server} 1", "sentinel auth-pass main one"]
        (tmp_path / "sentinel.conf").write_text("\n".join([*lines, ""]))
        return tmp_path / "sentinel.conf"

    run_redis("--sentinel", "--dir", str(tmp_path), config=configure)
    keys = f"ssl_certfile={certificates['client.pem']}&ssl_keyfile={certificates['client.key']}"
    keys += f"&ssl_ca_certs={certificates['ca.pem']}"
    broker = f"rediss+sentinel://:one@127.0.0.1:{sentinel}/main?sentinel_password=two&{keys}"
    work("Upper", broker)
    with RedisStreamer(broker) as streamer:
        assert streamer.predict(["a"]) == ["A"]
        assert "one" not in str(streamer.statistics())
    for wrong in (broker.replace("=two", "=tw0"), broker.replace(":one", ":0ne")):
        with RedisStreamer(wrong) as streamer, pytest.raises(ConfigError, match="refuses the user or password"):
            streamer.predict(["a"])
    unknown = broker.replace("/main", "/other")
    with RedisStreamer(unknown) as streamer, pytest.raises(BrokerUnavailable, match="knows the master 'other'"):
        streamer.predict(["a"])


def test_a_broker_that_ends_no_tls_session_leaves_no_connection_behind(certificates: dict[str, Path]) -> None:
    """It answers with an error and then reads nothing, so that the client's goodbye gets no answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates["server.pem"], certificates["server.key"])
    held = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = context.wrap_socket(listening.accept()[0], server_side=True)
                    held.append(connection)
                    connection.recv(2**16)
                    connection.sendall(b"-ERR no\r\n" * 8)

        threading.Thread(target=serve, daemon=True).start()
        port = listening.getsockname()[1]
        for kind, login in (("", ""), ("", ":password@"), ("+sentinel", ""), ("+cluster", "")):
            service = "/main" if kind == "+sentinel" else ""
            url = f"rediss{kind}://{login}127.0.0.1:{port}{service}?ssl_ca_certs={certificates['ca.pem']}"
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(ask_in_vain(url))
            gc.collect()  # an unclosed connection is named here
        listening.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


async def ask_in_vain(url: str) -> None:
    connection = RedisConnection(parse_address(url), "key")
    with pytest.raises(PenstockError):
        await connection.ask(("PING",))
    await connection.close()


def page_of(url: str, token: str = "") -> tuple[int, str]:
    status, body = fetch(urllib.request.Request(url, headers={"authorization": f"Bearer {token}"}))
    return status, body.decode() if status == 200 else ""


def test_a_worker_serves_its_metrics_and_health(work: Any, redis_server: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    (tmp_path / "token").chmod(0o600)
    public = ["--metrics-host", "0.0.0.0", "--metrics-port", "0", "--metrics-token-file", str(tmp_path / "token")]
    process = work("Upper", redis_server.address, "--prefix", "up", *public)
    url = process.metrics.replace("0.0.0.0", "127.0.0.1")
    with RedisStreamer(redis_server.address, "up") as streamer:
        assert streamer.predict(["a", "b"]) == ["A", "B"]
    assert page_of(url)[0] == 401
    status, page = page_of(url, "s3cret")
    assert status == 200
    for line in (
        'penstock_answers_total{model="upper",version="1",outcome="ok"} 2',
        'penstock_redis_requests_total{prefix="up",event="answered"} 2.0',
        'penstock_redis_queue_workers{prefix="up"} 1.0',
        'penstock_redis_up{prefix="up"} 1.0',
    ):
        assert line in page
    for path in ("/healthz", "/readyz"):
        assert page_of(url.replace("/metrics", path))[0] == 200
    assert page_of(url.replace("/metrics", "/v2/models"))[0] == 404


def test_the_queue_command_shows_what_waits_while_no_worker_runs(redis_server: Any) -> None:
    redis_server.ask.xadd("{penstock:up}:queue", {"h": "", "p": ""})
    command = [sys.executable, "-m", "penstock.cli.main", "queue", "--redis", redis_server.address, "--prefix", "up"]
    done = subprocess.run([*command, "--prefix", "none"], capture_output=True, text=True, timeout=30, check=True)
    first, second = map(json.loads, done.stdout.splitlines())
    assert first.pop("wait_s") < 30
    assert first == {"prefix": "up", "waiting": 1, "running": 0, "workers": 0, "dead_letters": 0}
    assert second["waiting"] == 0

    process = subprocess.Popen([*command, "--metrics-port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        assert 'penstock_redis_queue_waiting_requests{prefix="up"} 1.0' in page_of(url)[1]
        assert page_of(url.replace("/metrics", "/healthz"))[0] == 200
        redis_server.kill()
        assert 'penstock_redis_up{prefix="up"} 0.0' in page_of(url)[1]
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 0
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot be reached" in done.stderr


def test_a_public_metrics_address_without_a_token_is_refused(redis_server: Any) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "queue", "--redis", redis_server.address]
    public = ["--metrics-port", "0", "--metrics-host", "0.0.0.0"]
    done = subprocess.run([*command, *public], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "which other machines can reach" in done.stderr


def test_greenlets_call_concurrently(work: Any, redis_server: Any) -> None:
    pytest.importorskip("gevent")
    work("sizes", redis_server.address)
    program = f"""
        from gevent import monkey
        monkey.patch_all()
        import gevent
        from penstock import RedisStreamer
        streamer = RedisStreamer("{redis_server.address}")
        asked = [gevent.spawn(streamer.predict, [n]) for n in range(40)]
        gevent.joinall(asked, timeout=20)
        print(max(a.value[0] for a in asked))
        streamer.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=40, env=os.environ
    )
    assert done.stdout.strip() == "4", done.stderr


def test_a_program_that_ends_with_work_in_flight_does_not_hang(redis_server: Any) -> None:
    program = f"""
        from penstock import RedisStreamer
        streamer = RedisStreamer("{redis_server.address}")
        futures = [streamer.submit([n]) for n in range(10)]
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    assert redis_server.ask.xlen("{penstock:}:queue") == 0


def test_the_programs_of_the_page_run(redis_server: Any, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "redis.md").read_text().replace("localhost:6379", redis_server.address)
    for name, text in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", page, re.S | re.M):
        (tmp_path / name).write_text(text)
    command = re.search(r"^penstock worker (.*) --devices", page, re.M)
    assert command is not None
    worker = subprocess.Popen([sys.executable, "-m", "penstock.cli.main", "worker", *command[1].split()], cwd=tmp_path)
    try:
        done = subprocess.run([sys.executable, "ask.py"], cwd=tmp_path, capture_output=True, text=True, timeout=40)
    finally:
        worker.terminate()
        worker.wait(30)
    assert done.stdout == "[2.0, 4.0]\n", done.stderr


def test_sigterm_ends_a_script_that_serves_one_model_after_another(tmp_path: Path, redis_server: Any) -> None:
    program = f"""
        from penstock import run_redis_workers_forever

        def echo(batch):
            return batch

        if __name__ == "__main__":
            for prefix in ("one", "two"):
                print(prefix, flush=True)
                run_redis_workers_forever(echo, 4, redis_broker="{redis_server.address}", prefix=prefix)
    """
    (tmp_path / "workers.py").write_text(textwrap.dedent(program))
    process = subprocess.Popen([sys.executable, "workers.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    with RedisStreamer(redis_server.address, "one") as streamer:
        assert streamer.predict([1]) == [1]
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == ("one\n", 0)


def test_the_readiness_of_a_worker_follows_its_broker(work: Any, run_redis: Any) -> None:
    broker = run_redis()
    worker = work("sizes", broker.address, "--metrics-port", "0", "--log-format", "json")
    ready = worker.metrics.replace("/metrics", "/readyz")
    wait_for(lambda: fetch(ready)[0] == 200, "the worker is ready")
    broker.kill()
    wait_for(lambda: fetch(ready)[0] == 503, "the broker is away")
    broker.start()
    wait_for(lambda: fetch(ready)[0] == 200, "the broker is back")


def test_a_request_is_traced_through_the_broker_and_the_worker_s_log_has_keys(
    work: Any, redis_server: Any, tmp_path: Path
) -> None:
    exporter = InMemorySpanExporter()
    with Collector() as collector, (tmp_path / "log").open("w") as log:
        options = ("--log-format", "json", "--trace-endpoint", collector.url)
        worker = work("sizes", redis_server.address, *options, stderr=log)
        tracing.start(exporter=exporter, ratio=1.0)
        try:
            with RedisStreamer(redis_server.address) as streamer:
                assert streamer.predict(["a"]) == [1]
            tracing.flush()
        finally:
            tracing.stop()
        worker.terminate()
        worker.wait(30)
    (sent,) = exporter.get_finished_spans()
    (request,) = (span for span in collector.spans if span.name.startswith("request "))
    assert (request.trace, request.parent) == (f"{sent.context.trace_id:032x}", f"{sent.context.span_id:016x}")
    (batch,) = (span for span in collector.spans if (request.trace, request.span) in span.links)
    assert batch.name.startswith("batch ")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert "worker_ready" in [line.get("event") for line in lines]
