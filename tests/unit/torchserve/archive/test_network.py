from __future__ import annotations

import contextlib
import hashlib
import http.server
import ipaddress
import socket
import ssl
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ArchiveError
from penstock.torchserve.archive import ArchiveExists, DownloadFailed, UrlForbidden
from penstock.torchserve.archive.network import download
from penstock.torchserve.archive.store import ModelStore

TLS = Path(__file__).parents[3] / "tls"
ANYWHERE = ["http(s)?://.*"]


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers each path by its entry in the server's `answers`: bytes, or (status, headers, body)."""

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
        answer = self.server.answers.get(self.path, (404, {}, b""))  # type: ignore[attr-defined]
        status, headers, body = answer if isinstance(answer, tuple) else (200, {}, answer)
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class FileServer:
    def __init__(self, tls: bool = False) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        vars(self._server).update(answers=self.answers, asked=self.asked)
        self.port = self._server.server_address[1]
        self.url = f"{'https' if tls else 'http'}://localhost:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[FileServer]:
    found = FileServer()
    yield found
    found.close()


def fetch(url: str, target: Path, allowed: list[str] | None = None, **how: Any) -> None:
    download(url, target, ["http(s)?://localhost:.*"] if allowed is None else allowed, **{"max_bytes": 10_000, **how})


def test_a_file_is_downloaded_completely(server: FileServer, tmp_path: Path):
    server.answers["/a/m.mar?x=1"] = b"weights" * 1000
    fetch(f"{server.url}/a/m.mar?x=1", tmp_path / "m.mar")
    assert (tmp_path / "m.mar").read_bytes() == b"weights" * 1000
    assert [p.name for p in tmp_path.iterdir()] == ["m.mar"]
    assert server.asked[0][1]["Host"] == f"localhost:{server.port}"


def test_a_body_without_a_length_is_read_to_its_end(server: FileServer, tmp_path: Path):
    server.answers["/m.mar"] = (200, {"Content-Length": ""}, b"abc")
    fetch(f"{server.url}/m.mar", tmp_path / "m.mar")
    assert (tmp_path / "m.mar").read_bytes() == b"abc"


def test_a_tls_certificate_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = FileServer(tls=True)
    try:
        server.answers["/m.mar"] = b"abc"
        with pytest.raises(DownloadFailed) as e:
            fetch(f"{server.url}/m.mar", tmp_path / "m.mar")
        assert "CERTIFICATE_VERIFY_FAILED" in e.value.detail
        trusting = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
        monkeypatch.setattr("ssl.create_default_context", lambda: trusting)
        fetch(f"{server.url}/m.mar", tmp_path / "m.mar")
        assert (tmp_path / "m.mar").read_bytes() == b"abc"
    finally:
        server.close()


def test_the_digest_is_checked(server: FileServer, tmp_path: Path):
    server.answers["/m.mar"] = b"abc"
    with pytest.raises(DownloadFailed) as e:
        fetch(f"{server.url}/m.mar", tmp_path / "m.mar", sha256="0" * 64)
    assert "SHA-256" in e.value.detail
    fetch(f"{server.url}/m.mar", tmp_path / "m.mar", sha256=hashlib.sha256(b"abc").hexdigest().upper())


ANSWERS = {
    "redirect": ((302, {"Location": "/ok.mar"}, b""), "answers 302; redirects are not followed"),
    "redirect 308": ((308, {"Location": "http://127.0.0.1/"}, b""), "answers 308"),
    "not found": ((404, {}, b"no"), "answers 404"),
    "no content": ((204, {}, b""), "answers 204"),
    "too long": (b"1" * 10_001, "has 10001 bytes; at most 10000"),
    "too long, not said": ((200, {"Content-Length": ""}, b"1" * 10_001), "more than 10000 bytes"),
    "a lie": ((200, {"Content-Length": "100"}, b"1"), "ended after 1 of 100 bytes"),
    "endless head": ((200, {"X": "1" * 70_000}, b"1"), "got more than 65536 bytes"),
}


@pytest.mark.parametrize(("answer", "why"), ANSWERS.values(), ids=ANSWERS)
def test_a_bad_response_leaves_no_file(server: FileServer, tmp_path: Path, answer: Any, why: str):
    server.answers |= {"/m.mar": answer, "/ok.mar": b"1"}
    with pytest.raises(DownloadFailed) as e:
        fetch(f"{server.url}/m.mar", tmp_path / "m.mar")
    assert e.value.message == f"Failed to download archive from: {server.url}/m.mar"
    assert why in e.value.detail
    assert list(tmp_path.iterdir()) == []
    assert len(server.asked) == 1


def test_a_silent_server_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.torchserve.archive.network.TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://localhost:{silent.getsockname()[1]}/m.mar"
        with pytest.raises(DownloadFailed, match="Failed to download archive") as e:
            fetch(url, tmp_path / "m.mar")
    assert "timed out" in e.value.detail


def test_a_slow_server_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.torchserve.archive.network.TIMEOUT_S", 0.1)
    stop = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            while not stop.wait(0.01):
                connection.sendall(b"H")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        dripping = threading.Thread(target=drip, args=(listener,))
        dripping.start()
        with pytest.raises(DownloadFailed):
            fetch(f"http://localhost:{listener.getsockname()[1]}/m.mar", tmp_path / "m.mar")
        stop.set()
        dripping.join()


def test_a_refused_connection_is_a_failed_download(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    with pytest.raises(DownloadFailed):
        fetch(f"http://localhost:{port}/m.mar", tmp_path / "m.mar")


@pytest.mark.parametrize("url", ["http://me:secret@localhost:1/m.mar", "http:///m.mar", "http://localhost:99999/m.mar"])
def test_an_invalid_url_is_a_failed_download(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with pytest.raises(DownloadFailed):
        fetch(url, tmp_path / "m.mar", ANYWHERE)
    assert "secret" not in caplog.text


PRIVATE = (
    "127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "::1", "::", "fe80::1", "fc00::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "ff02::1",
)  # fmt: skip


def resolved(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Lets every name be at these addresses; yields the names that were asked for."""
    asked: list[str] = []

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(0, 0, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr("penstock.torchserve.archive.network.socket.getaddrinfo", look_up)
    return asked


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_refused(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    resolved(monkeypatch, "93.184.216.34", address)
    monkeypatch.setattr(
        "penstock.torchserve.archive.network.socket.create_connection", lambda *_, **__: pytest.fail("connected")
    )
    url = "http://models.example/m.mar"
    with pytest.raises(UrlForbidden) as e:
        fetch(url, tmp_path / "m.mar", ANYWHERE)
    assert e.value.message == f"Given URL {url} does not match any allowed URL(s)"
    assert str(ipaddress.ip_address(address)) in e.value.detail


@pytest.mark.parametrize(
    "allowed", ["http://.*", "http://local.ost/.*", "http://other/.*|http://.*", "http://localhostx/.*|.*"]
)
def test_a_wildcard_does_not_allow_a_private_host(allowed: str, tmp_path: Path):
    with pytest.raises(UrlForbidden):
        fetch("http://localhost/m.mar", tmp_path / "m.mar", [allowed])


def test_the_connection_goes_to_the_checked_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = resolved(monkeypatch, "93.184.216.34", "93.184.216.35")
    connected = []

    def connect(address: Any, timeout: float) -> socket.socket:
        connected.append(address)
        raise ConnectionRefusedError("no network in a test")

    monkeypatch.setattr("penstock.torchserve.archive.network.socket.create_connection", connect)
    with pytest.raises(DownloadFailed):
        fetch("https://models.example:8443/m.mar", tmp_path / "m.mar", ANYWHERE)
    assert (asked, connected) == (["models.example"], [("93.184.216.34", 8443), ("93.184.216.35", 8443)])


def test_a_file_that_appears_meanwhile_is_not_overwritten(server: FileServer, tmp_path: Path):
    server.answers["/m.mar"] = b"new"
    (tmp_path / "m.mar").write_bytes(b"old")
    with pytest.raises(ArchiveExists, match=r"Model file already exists m\.mar"):
        fetch(f"{server.url}/m.mar", tmp_path / "m.mar")
    assert (tmp_path / "m.mar").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.mar"]


def test_a_store_opens_and_forgets_its_downloads(server: FileServer, archives: Any, tmp_path: Path):
    server.answers["/x/m.mar"] = archives.mar().read_bytes()
    server.answers["/bad.mar"] = b"no archive"
    folder = tmp_path / "store"
    folder.mkdir()
    store = ModelStore(folder, allowed_urls=[rf"http://localhost:{server.port}/.*"], cache=tmp_path / "cache")
    url = f"{server.url}/x/m.mar"
    with contextlib.closing(store.open(url)) as opened:
        assert opened.archive.manifest.model_name == "m"
        assert store.names() == ["m.mar"]
        with pytest.raises(ArchiveExists):
            store.open(url)
        store.forget(url)
    with pytest.raises(ArchiveError, match="damaged"):
        store.open(f"{server.url}/bad.mar")
    assert list(folder.iterdir()) == []
    assert [path for path, _ in server.asked] == ["/x/m.mar", "/bad.mar"]


def test_signing_without_botocore_names_the_package_to_install(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "botocore", None)
    with pytest.raises(DownloadFailed) as e:
        fetch(f"{server.url}/m.mar", tmp_path / "m.mar", sign_s3=True)
    assert "pip install botocore" in e.value.detail
    assert server.asked == []


def fake_botocore(monkeypatch: pytest.MonkeyPatch, region: str | None) -> None:
    """The four names of botocore that are used, where it is not installed."""

    class Session:
        def get_credentials(self) -> str:
            return "credentials"

        def get_config_variable(self, name: str) -> str | None:
            return region if name == "region" else None

    class Request:
        def __init__(self, method: str, url: str) -> None:
            self.headers = {"X-Signed": f"{method} {url}"}

    class Auth:
        def __init__(self, credentials: str, service: str, region: str) -> None:
            self._words = f" {credentials} {service} {region}"

        def add_auth(self, request: Request) -> None:
            request.headers["X-Signed"] += self._words

    for name, members in {
        "botocore": {},
        "botocore.session": {"get_session": Session},
        "botocore.awsrequest": {"AWSRequest": Request},
        "botocore.auth": {"S3SigV4Auth": Auth},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)


def test_a_signed_request_has_botocores_headers(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_botocore(monkeypatch, "eu-west-1")
    server.answers["/m.mar"] = b"abc"
    url = f"{server.url}/m.mar"
    fetch(url, tmp_path / "m.mar", sign_s3=True)
    assert server.asked[0][1]["X-Signed"] == f"GET {url} credentials s3 eu-west-1"


def test_signing_without_a_region_names_the_variable_to_set(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake_botocore(monkeypatch, None)
    with pytest.raises(DownloadFailed) as e:
        fetch(f"{server.url}/m.mar", tmp_path / "m.mar", sign_s3=True)
    assert "AWS_DEFAULT_REGION" in e.value.detail
