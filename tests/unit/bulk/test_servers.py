from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.bulk.servers import NotACaptioner, ServersDiffer, ask, require_same
from penstock.client.endpoint import Unreachable, UntrustedCertificate
from penstock.errors import (
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    ModelNotFound,
    ModelNotReady,
    PenstockError,
    QueueFull,
    Unauthorized,
)
from penstock.serving.http.auth import make_ssl_context
from support.captioner import Answerer, FakeCaptioner, Incoming, describe, with_raw, with_status, with_wait

TLS = Path(__file__).parents[2] / "tls"
CERT, KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")


@pytest.fixture
def server() -> Iterator[FakeCaptioner]:
    with FakeCaptioner() as server:
        yield server


def metadata(change: dict[str, Any], parameters: dict[str, Any] | None = None) -> Answerer:
    """Metadata with some keys changed; None removes a parameter."""

    def answer(request: Incoming, server: FakeCaptioner) -> None:
        own = {**server.parameters, "revision": "r1", **(parameters or {})}
        whole = {
            "name": "captioner",
            "inputs": [{"name": "frames", "datatype": "UINT8", "shape": [-1, -1, -1, 3]},
                       {"name": "frame_index", "datatype": "INT64", "shape": [-1]}],
            "outputs": [{"name": "caption", "datatype": "BYTES", "shape": [-1]},
                        {"name": "frame_index", "datatype": "INT64", "shape": [-1]}],
            "parameters": {name: value for name, value in own.items() if value is not None},
            **change,
        }  # fmt: skip
        request.respond(200, msgspec.json.encode(whole))

    return answer


def test_a_captioner_describes_itself(server: FakeCaptioner):
    server.parameters.update(instances=4, max_batch_size=64, max_request_bytes=10**8, height=10, width=20, more=[1])
    info = ask(server.url, "captioner")
    assert (info.revision, info.height, info.width) == ("r1", 10, 20)
    assert (info.instances, info.max_batch_size, info.max_request_bytes) == (4, 64, 10**8)
    assert info.inputs == {"frames", "jpeg"}
    assert info.parameters["precision"] == "fp32"
    assert info.parameters["more"] == [1]
    assert info.url == server.url


def test_a_model_without_jpeg_accepts_only_frames(server: FakeCaptioner):
    server.metadata.append(metadata({}))
    assert ask(server.url, "captioner").inputs == {"frames"}


@pytest.mark.parametrize(
    "wrong",
    [
        metadata({"inputs": [{"name": "x", "datatype": "FP32"}]}),
        metadata({"inputs": [{"name": "frames", "datatype": "FP32"}, {"name": "frame_index", "datatype": "INT64"}]}),
        metadata({"inputs": [{"name": "frames", "datatype": "UINT8"}]}),
        metadata({"outputs": [{"name": "caption", "datatype": "BYTES"}]}),
        metadata({"parameters": {}}),
        metadata({"parameters": None}),
        metadata({}, {"task": "text-to-image"}),
        metadata({}, {"revision": None}),
        metadata({}, {"height": 0}),
        metadata({}, {"height": "224"}),
        metadata({}, {"width": 10**6}),
        metadata({"inputs": 3}),
        with_status(500),
        with_status(302, "Location: http://example.invalid/"),
        with_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nnot JSON!"),
        with_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{\"\xff\"}"),
        with_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + b"[" * 99999),
    ],
)  # fmt: skip
def test_a_server_that_is_not_a_captioner_is_rejected(server: FakeCaptioner, wrong: Answerer):
    server.metadata.append(wrong)
    with pytest.raises(NotACaptioner):
        ask(server.url, "captioner")


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, Unauthorized), (403, Forbidden), (404, ModelNotFound), (503, ModelNotReady), (429, QueueFull)],
)
def test_each_status_raises_its_error(server: FakeCaptioner, status: int, error: type[PenstockError]):
    server.metadata.append(with_status(status))
    with pytest.raises(error):
        ask(server.url, "captioner")


def test_a_model_that_is_loading_is_not_ready(server: FakeCaptioner):
    server.metadata.extend([describe, with_status(503)])
    with pytest.raises(ModelNotReady):
        ask(server.url, "captioner")


def test_an_absent_server_is_unreachable_at_once(server: FakeCaptioner):
    server.stop()
    with pytest.raises(Unreachable, match="refused"):
        ask(server.url, "captioner")


def test_an_absent_server_is_awaited_if_requested(server: FakeCaptioner, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.bulk.servers.RETRY_S", 0.02)
    server.stop()
    timer = threading.Timer(0.1, server.start)
    timer.start()
    assert ask(server.url, "captioner", patience_s=30.0).revision == "r1"
    timer.join()


def test_a_silent_server_times_out(server: FakeCaptioner):
    release = threading.Event()
    server.metadata.append(with_wait(release, describe))
    with pytest.raises(DeadlineExceeded):
        ask(server.url, "captioner", timeout_s=0.1)
    release.set()


def test_an_invalid_address_is_a_configuration_error():
    with pytest.raises(ConfigError):
        ask("gpu1:8080", "captioner")


def test_the_token_is_sent_and_not_shown():
    with FakeCaptioner(token="s3cret") as server:
        info = ask(server.url, "captioner", token="s3cret")
        assert "s3cret" not in repr(info)
        with pytest.raises(Unauthorized):
            ask(server.url, "captioner", token="wrong")
        with pytest.raises(Unauthorized):
            ask(server.url, "captioner")


def test_a_token_without_encryption_causes_a_warning(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING), pytest.raises(PenstockError):
        ask("http://nobody.invalid", "captioner", token="t", timeout_s=5.0)
    assert "unencrypted" in caplog.text


def test_a_private_certificate_authority_is_trusted_if_configured():
    with FakeCaptioner(tls=make_ssl_context(CERT, KEY)) as server:
        assert ask(server.url, "captioner", ca=CERT).revision == "r1"
        with pytest.raises(UntrustedCertificate):
            ask(server.url, "captioner")


def test_servers_of_one_job_must_agree(server: FakeCaptioner):
    first = ask(server.url, "captioner")
    require_same([first, first])
    server.revision = "r2"
    with pytest.raises(ServersDiffer, match=r"revision 'r1'.*'r2'"):
        require_same([first, ask(server.url, "captioner")])
    server.revision, server.parameters["height"] = "r1", 9
    with pytest.raises(ServersDiffer, match=r"height '8'.*'9'"):
        require_same([first, ask(server.url, "captioner")])


def test_a_model_name_with_a_slash_is_escaped(server: FakeCaptioner):
    seen: list[str] = []

    def look(request: Incoming, server: FakeCaptioner) -> None:
        seen.append(request.path)
        describe(request, server)

    server.metadata.extend([look, look])
    ask(server.url, "a/b c")
    assert seen == ["/v2/models/a%2Fb%20c", "/v2/models/a%2Fb%20c/ready"]
