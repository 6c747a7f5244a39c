"""Shutdown and reload of a real server: SIGTERM under load, the lame duck phase, SIGHUP."""

import asyncio
import contextlib
import json
import random
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SOURCE = """
import time
import urllib.request
def echo(items):
    time.sleep(0.002)
    return items
"""
RATE = 250.0  # requests per second
KEPT = 12  # connections that stay open; half of the requests use one of them, the others a new connection each


class Load:
    """Requests at random times. `sent` counts those whose client was connected, `lost` has those without an answer."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.address = host, int(port)
        self.sent = self.answered = self.refused = 0
        self.lost: list[float] = []
        self.statuses: set[int] = set()
        self.signalled = time.monotonic()
        self._kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def run(self) -> None:
        """Sends until the server accepts no connection."""
        dice, tasks = random.Random(7), set()
        while not self.refused:
            tasks.add(asyncio.create_task(self._ask(dice.random() < 0.5)))
            await asyncio.sleep(dice.expovariate(RATE))
        await asyncio.gather(*tasks)
        for _, writer in self._kept:
            writer.close()

    async def _ask(self, keep: bool) -> None:
        try:
            reader, writer = await self._connection(keep)
        except OSError:
            self.refused += 1
            return
        self.sent += 1
        at = time.monotonic()
        close = "" if keep else "connection: close\r\n"
        writer.write(f"POST /predictions/echo HTTP/1.1\r\nhost: x\r\n{close}content-length: 1\r\n\r\n1".encode())
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert await reader.readexactly(1) == b"1"
        except (OSError, asyncio.IncompleteReadError):
            self.lost.append(at - self.signalled)
            return
        self.answered += 1
        self.statuses.add(int(head.split()[1]))
        if keep and "connection: close" not in head and len(self._kept) < KEPT:
            self._kept.append((reader, writer))
        else:
            writer.close()

    async def _connection(self, keep: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while keep and self._kept:
            reader, writer = self._kept.pop(0)
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(*self.address)


@pytest.mark.parametrize("lame_duck_s", [0.0, 0.5])
async def test_sigterm_at_250_requests_per_second_loses_none_that_was_sent(
    serve: Callable[..., Any], lame_duck_s: float
) -> None:
    for _ in range(3):
        server = serve(SOURCE, "echo", "--set", f"server.lame_duck_s={lame_duck_s}")
        load = Load(server.url)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(random.uniform(0.2, 0.4))
        before, load.signalled = load.sent, time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        await running
        assert load.lost == []
        assert (load.answered, load.statuses) == (load.sent, {200})
        assert time.monotonic() - load.signalled >= lame_duck_s
        assert not lame_duck_s or load.sent - before > RATE * lame_duck_s / 4
        assert (await asyncio.to_thread(server.stop, 0))[0] == 0


async def test_a_lame_duck_is_not_ready_and_answers_new_connections(serve: Callable[..., Any]) -> None:
    server = serve(SOURCE, "echo", "--set", "server.lame_duck_s=30")
    assert server.get("/readyz")[0] == 200
    server.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(10):
        while server.get("/readyz")[0] == 200:  # noqa: ASYNC110 - a request, not an event
            await asyncio.sleep(0.01)
    for path in ("/readyz", "/ping", "/v2/health/ready"):
        assert server.get(path)[0] == 503, path
    assert server.get("/healthz")[0] == 200
    assert server.get("/ping", "management")[0] == 503
    assert server.post("/predictions/echo", b"1") == (200, b"1")
    assert server.stop(signal.SIGTERM)[0] == 1  # a second signal stops at once


async def test_a_silent_connection_delays_the_end_only_shortly(serve: Callable[..., Any]) -> None:
    server = serve(SOURCE, "echo")
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    begun = time.monotonic()
    assert (await asyncio.to_thread(server.stop))[0] == 0
    assert time.monotonic() - begun < 5.0  # of 30 s
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def test_sighup_reloads_tokens_models_and_the_log_level_and_loses_no_request(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    tokens, toml, log = tmp_path / "tokens", tmp_path / "penstock.toml", tmp_path / "server.log"
    tokens.write_text("old\n")
    tokens.chmod(0o600)
    app = tmp_path / "app.py"
    app.write_text("from helper import NUMBER\n\ndef which(items):\n    return [NUMBER for _ in items]\n")
    (tmp_path / "helper.py").write_text("NUMBER = 'one'\n")
    config = '[auth]\ninference_token_file = "tokens"\n[models.which]\ntarget = "app.py:which"\n'
    toml.write_text(config + f'[logging]\nfile = "{log}"\n')
    server = serve(None, "penstock.toml")

    def ask(token: str) -> tuple[int, bytes]:
        return server.post("/predictions/which", b"1", authorization=f"Bearer {token}")

    async def said(words: str) -> None:
        async with asyncio.timeout(20):
            while words not in log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    assert (ask("old"), ask("new")[0]) == ((200, b"one"), 401)
    (tmp_path / "helper.py").write_text("NUMBER = 'the second'\n")
    tokens.write_text("old\nnew\n")
    server.process.send_signal(signal.SIGHUP)
    statuses = set()
    async with asyncio.timeout(20):
        while (answer := await asyncio.to_thread(ask, "old")) != (200, b"the second"):
            statuses.add(answer[0])
    assert statuses <= {200}
    assert ask("new") == (200, b"the second")
    await said("event=reloaded models=which/1 also=tokens,tls_files,log_level")
    server.process.send_signal(signal.SIGHUP)
    await said("event=reloaded models=none_changed also=tokens")
    (tmp_path / "helper.py").write_text("NUMBER = 'three'\n")
    toml.write_text(config + f'[logging]\nfile = "{log}"\nlevel = "warning"\n')
    server.process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(20):
        while await asyncio.to_thread(ask, "new") != (200, b"three"):
            pass
    toml.write_text("[models.which]\ntargte = 1\n")  # a wrong file changes nothing
    tokens.write_text("third\n")
    server.process.send_signal(signal.SIGHUP)
    await said("event=reload_failed")
    assert "did you mean 'target'" in log.read_text()
    assert ask("new") == (200, b"three")
    assert server.stop()[0] == 0
    assert "event=draining" not in log.read_text(), "the level is warning"


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """(certificate, key), self-signed."""
    paths = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"]
    subprocess.run([*command, "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
    return paths


def test_sighup_replaces_the_certificate_and_the_client_authority(serve: Callable[..., Any], tmp_path: Path) -> None:
    one, two = certificate(tmp_path, "one"), certificate(tmp_path, "two")
    running = [str(tmp_path / name) for name in ("cert", "key", "ca")]

    def install(pair: tuple[str, str]) -> None:
        for source, target in zip((*pair, pair[0]), running, strict=True):
            shutil.copy(source, target)

    install(one)
    sets = [f"server.tls_{key}={path}" for key, path in zip(("cert", "key", "client_ca"), running, strict=True)]
    server = serve(SOURCE, "echo", *(word for each in sets for word in ("--set", each)))
    host, port = server.url.removeprefix("https://").split(":")

    def ask(pair: tuple[str, str]) -> tuple[str, bool]:
        """(certificate of the server, whether it accepts the client)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(*pair)
        with context.wrap_socket(socket.create_connection((host, int(port)))) as client:
            shown = ssl.DER_cert_to_PEM_cert(client.getpeercert(True) or b"")
            try:
                client.sendall(b"GET /healthz HTTP/1.1\r\nconnection: close\r\n\r\n")
                return shown, client.recv(100).startswith(b"HTTP/1.1 200")
            except OSError:
                return shown, False

    first, second = (Path(pair[0]).read_text() for pair in (one, two))
    assert [ask(one), ask(two)] == [(first, True), (first, False)]
    install(two)
    server.process.send_signal(signal.SIGHUP)
    end = time.monotonic() + 10
    while (answer := ask(two)) == (first, False):
        assert time.monotonic() < end
    assert answer == (second, True)
    assert ask(one) == (second, False)


async def test_reload_follows_the_files_and_shows_what_is_wrong_with_them(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    app, helper, toml, log = (tmp_path / name for name in ("app.py", "helper.py", "penstock.toml", "server.log"))
    app.write_text("def which(items) return items\n")  # the server waits for it to change
    toml.write_text(f'[models.which]\ntarget = "app.py:which"\n[logging]\nfile = "{log}"\n')
    server = serve(None, "penstock.toml", "--reload")
    statuses = set()

    async def answered(expected: bytes) -> None:
        async with asyncio.timeout(20):
            while (answer := await asyncio.to_thread(server.post, "/predictions/which", b"1"))[1] != expected:
                statuses.add(answer[0])
                await asyncio.sleep(0.02)

    def last_error() -> str:
        with urllib.request.urlopen(f"{server.urls['metrics']}/dashboard/events", timeout=5) as stream:
            events = json.loads(stream.readline().removeprefix(b"data: "))["events"]
        return next((str(event["text"]) for event in reversed(events) if event["kind"] == "not reloaded"), "")

    async def shown(*words: str) -> None:
        async with asyncio.timeout(20):
            while not all(word in log.read_text() for word in words):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            while words[-1] not in await asyncio.to_thread(last_error):  # noqa: ASYNC110 - within a second
                await asyncio.sleep(0.02)

    assert server.post("/predictions/which", b"1")[0] == 503
    helper.write_text("NUMBER = 'one'\n")
    app.write_text("from helper import NUMBER\n\ndef which(items):\n    return [NUMBER for _ in items]\n")
    await answered(b"one")
    statuses.clear()
    helper.write_text("NUMBER = 'the second'\n")
    await answered(b"the second")
    helper.write_text("NUMBER = 'three\n")
    await shown("event=reloaded models=none_loaded", "unterminated string literal")
    helper.write_text("NUMBER = 'number 4'\n")
    await answered(b"number 4")
    before = toml.read_text()
    toml.write_text(before.replace("target", "targte"))
    await shown("event=reload_failed", "did you mean 'target'")
    app.write_text(app.read_text().replace("def which", "def other"))
    toml.write_text(before.replace(":which", ":other"))
    helper.write_text("NUMBER = 'five'\n")
    await answered(b"five")
    assert statuses == {200}
