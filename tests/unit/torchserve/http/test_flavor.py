"""The HTTP API flavor of TorchServe over real sockets, byte by byte, with a scripted backend."""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.config.schema import LimitsConfig
from penstock.errors import (
    BadOutput,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    ItemFailed,
    LoadFailed,
    ModelNotFound,
    ModelNotReady,
    OutOfMemory,
    PenstockError,
    Quarantined,
    QueueFull,
    WorkerDied,
)
from penstock.serving.http.server import HttpServer
from penstock.torchserve.config import ListenerConfig, Properties
from penstock.torchserve.http.listener import make_listener
from penstock.torchserve.protocol.api import ApiError
from penstock.types import ItemResult
from support.backend import Call, FakeBackend
from support.torchserve import FakeAdministration, KnownBackend

LIMIT_S = 10.0
FIXED = (
    b"Pragma: no-cache\r\nCache-Control: no-cache; no-store, must-revalidate, private\r\n"
    b"Expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
)
NO_WORKER = (
    "has no worker to serve inference request. Please use scale workers API to add workers. If this is a sequence "
    "inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
)
UNKNOWN = "Requested resource is not found, please refer to API document."
WRONG = "Requested method is not allowed, please refer to API document."


def plain(call: Call) -> None:
    """Echoes like a handler, without a content type."""
    call.reply(content_type="")


class Peer:
    """A running listener and its one client."""

    def __init__(self, server: HttpServer, backend: FakeBackend, administration: FakeAdministration) -> None:
        self.server = server
        self.backend = backend
        self.administration = administration

    async def connect(self, port: int) -> None:
        self.port = port
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)

    async def come_again(self) -> None:
        """Opens a connection."""
        self.writer.close()
        await self.connect(self.port)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def ask(self, method: str, target: str, body: bytes = b"", *lines: str) -> None:
        head = [f"{method} {target} HTTP/1.1", "Host: t", f"Content-Length: {len(body)}", *lines, "", ""]
        self.send("\r\n".join(head).encode("latin-1") + body)

    async def head(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), LIMIT_S)

    async def answer(self) -> tuple[bytes, bytes]:
        """(head with the id replaced, body); `id` has the id."""
        head = await self.head()
        length = re.search(rb"content-length: (\d+)\r\n", head)
        body = await asyncio.wait_for(self.reader.readexactly(int(length[1])), LIMIT_S) if length else b""
        found = re.search(rb"x-request-id: ([^\r]+)\r\n", head)
        assert found is not None
        self.id = found[1].decode()
        return head.replace(found[1], b"ID"), body

    async def rest(self) -> bytes:
        """All bytes until the listener closes."""
        return await asyncio.wait_for(self.reader.read(), LIMIT_S)


@asynccontextmanager
async def listening(
    models: dict[str, Callable[[Call], None]] | None = None,
    administration: FakeAdministration | None = None,
    limits: dict[str, Any] | None = None,
    groups: frozenset[Any] = frozenset({"inference"}),
    **keys: Any,
) -> AsyncIterator[Peer]:
    backend = KnownBackend(models or {"m": plain})
    administration = administration or FakeAdministration()
    config = ListenerConfig(groups, Properties(**keys))
    server = make_listener(backend, administration, config, LimitsConfig(**limits or {}))
    peer = Peer(server, backend, administration)
    await peer.connect((await server.start("127.0.0.1", 0))[1])
    try:
        yield peer
    finally:
        peer.writer.close()
        await server.close(1.0)


def ok(length: int, first: bytes = b"HTTP/1.1 200 \r\n", kind: bytes = b"") -> bytes:
    return b"%b%bx-request-id: ID\r\n%bconnection: keep-alive\r\ncontent-length: %d\r\n\r\n" % (
        first,
        kind,
        FIXED,
        length,
    )


def error(status: int, reason: str, kind: str, message: str) -> tuple[bytes, bytes]:
    quoted = message.replace('"', '\\"')
    body = f'{{\n  "code": {status},\n  "type": "{kind}",\n  "message": "{quoted}"\n}}\n'.encode()
    head = (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nx-request-id: ID\r\n%bconnection: close\r\n"
        b"content-length: %d\r\n\r\n"
    )
    return head % (status, reason.encode(), FIXED, len(body)), body


# ---- routes

NO_PATH = (b"url_path", b"")
NO, YES = (b"explain", b"False"), (b"explain", b"True")
PREDICTIONS = [
    ("/predictions/m", None, [NO, NO_PATH]),
    ("/predictions/m/", None, [NO, NO_PATH]),
    ("/predictions/m/1", "1", [NO, NO_PATH]),
    ("/predictions/m/1?a=1&b=2", "1", [NO, NO_PATH]),
    ("/predictions/m%2F1", "1", [NO, NO_PATH]),
    ("/predictions/%6d", None, [NO, NO_PATH]),
    ("http://some.host/predictions/m", None, [NO, NO_PATH]),
    ("/predictions/m/1/v1/chat/completions/", "1", [NO, (b"url_path", b"v1/chat/completions")]),
    ("/predictions/m/1//a//b", "1", [NO, (b"url_path", b"/a//b")]),
    ("/explanations/m", None, [YES, NO_PATH]),
    ("/explanations/m/1", "1", [YES, NO_PATH]),
    ("/explanations/m/1/a/b", "1", [YES, (b"url_path", b"a/b")]),
    ("/v1/models/m:predict", None, [NO]),
    ("/v1/models/m:explain", None, [YES]),
    ("/v2/models/m/infer", None, [NO]),
    ("/v2/models/m/explain", None, [YES]),
    ("/m/predict", None, []),
    ("/m/predict?a=1&b=%20", None, [(b":query", b"a=1&b=%20")]),
    ("/m/1/predict?a=1", "1", [(b":query", b"a=1")]),
    ("/invocations?model_name=m", None, [(b":query", b"model_name=m")]),
]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "TRACE"])
@pytest.mark.parametrize(("target", "version", "added"), PREDICTIONS)
async def test_every_inference_route_accepts_any_method_and_sets_the_handlers_headers(method, target, version, added):
    async with listening() as peer:
        seen: list[tuple[str, str | None]] = []
        submit = peer.backend.submit
        peer.backend.submit = lambda model, of, *rest, **more: seen.append((model, of)) or submit(model, of, *rest)
        for _ in range(2):  # the second time the route is known
            peer.ask(method, target, b"hello", "X-CuStOm: a b", "Content-Type: image/png")
            assert await peer.answer() == (ok(5), b"hello")
            item = peer.backend.calls[-1].item
            assert (item.codec, item.content_type, item.request_id) == ("torchserve", "image/png", peer.id)
            sent = [(b"Host", b"t"), (b"Content-Length", b"5"), (b"X-CuStOm", b"a b"), (b"Content-Type", b"image/png")]
            assert item.headers == sent + added
        assert seen == [("m", version)] * 2


@pytest.mark.parametrize(
    ("method", "target", "model"),
    [("POST", "/models/m/invoke", "m"), ("PUT", "/invocations?a=1", ""), ("POST", "/invocations", "")],
)
async def test_sagemakers_routes_name_the_model_or_leave_it_to_the_backend(method: str, target: str, model: str):
    async with listening({"m": plain, "": plain}, groups=frozenset({"inference", "management"})) as peer:
        seen: list[str] = []
        submit = peer.backend.submit
        peer.backend.submit = lambda model, *rest, **more: seen.append(model) or submit(model, *rest)
        peer.ask(method, target, b"hello")
        assert await peer.answer() == (ok(5), b"hello")
        assert seen == [model]
        peer.ask("GET", "/models/m/invoke")  # a version of this name
        assert (await peer.answer())[0].startswith(b"HTTP/1.1 404 ")


async def test_the_codec_follows_the_configuration():
    async with listening(decode_input_request=False) as peer:
        peer.ask("POST", "/predictions/m")
        await peer.answer()
        assert peer.backend.calls[0].item.codec == "torchserve_raw"


async def test_headers_set_by_the_server_override_the_clients():
    async with listening() as peer:
        peer.ask("POST", "/predictions/m", b"", "explain: True", "url_path: mine", "x-request-id: mine")
        await peer.answer()
        item = peer.backend.calls[0].item
        assert item.headers[-2:] == [NO, NO_PATH]  # the last one wins
        assert item.request_id != "mine"
        peer.ask("POST", "/predictions/m", b"", ":query: a=1")
        assert b"HTTP/1.1 400 " in await peer.rest()
        assert len(peer.backend.calls) == 1


@pytest.mark.parametrize("target", ["/ping", "/ping/", "/ping/x/y", "/ping?a"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_ping_reports_the_health_of_the_administration(method, target):
    async with listening() as peer:
        peer.ask(method, target)
        healthy = b'{\n  "status": "Healthy"\n}\n'
        kind = b"content-type: application/json\r\n"
        assert await peer.answer() == (ok(26, b"HTTP/1.1 200 OK\r\n", kind), healthy)
        peer.administration.is_healthy = False
        peer.ask(method, target)
        head, body = await peer.answer()
        assert head.startswith(b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\n")
        assert b"\r\nconnection: close\r\n" in head
        assert body == b'{\n  "status": "Unhealthy"\n}\n'
        assert await peer.rest() == b""


@pytest.mark.parametrize(
    "target",
    ["/nope", "/predictions", "/predictions/", "/explanations", "/v2", "/v2/models/m", "/v2/models/m/x",
     "/v2/models/m/versions/1/infer", "/v1/models/m", "/v1/models/m:x", "/models", "/metrics",
     "/wfpredict", "/predictions//m", "/token", "*"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_path_is_404(method, target):
    async with listening() as peer:
        peer.ask(method, target, b"x" * 100_000)  # also with a body that nobody wants
        assert await peer.answer() == error(404, "Not Found", "ResourceNotFoundException", UNKNOWN)
        assert await peer.rest() == b""


async def test_the_root_accepts_only_options():
    async with listening() as peer:
        peer.ask("GET", "/")
        assert await peer.answer() == error(405, "Method Not Allowed", "MethodNotAllowedException", WRONG)


@pytest.mark.parametrize(
    ("target", "version"),
    [
        ("/predictions/m", None),
        ("/predictions/m/1.0", "1.0"),
        ("/predictions/m/1.0/x/y", "1.0"),
        ("/explanations/m/1.0/x", "1.0"),
        ("/v1/models/m:predict", None),
        ("/v2/models/m/infer", None),
        ("/m/predict?a=1", None),
        ("/m/1.0/predict", "1.0"),
    ],
)
async def test_options_on_any_inference_route_describes_the_model(target, version):
    async with listening() as peer:
        peer.ask("OPTIONS", target)
        head, body = await peer.answer()
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'"openapi": "3.0.1"' in body
        assert peer.administration.asked == [("describe", "m", version, False)]
        assert peer.backend.calls == []
        peer.ask("OPTIONS", target.replace("m", "zz", 1) if target.startswith("/m/") else target.replace("/m", "/zz"))
        assert (await peer.answer())[0].startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize(
    ("method", "target"), [("POST", "/models/m/1/set-default"), ("PUT", "/models"), ("DELETE", "/models")]
)
async def test_a_wrong_method_is_405(method, target):
    async with listening(groups=frozenset({"management"}), enable_model_api=True) as peer:
        peer.ask(method, target)
        assert await peer.answer() == error(405, "Method Not Allowed", "MethodNotAllowedException", WRONG)


async def test_legacy_routes_hide_no_other_route():
    async with listening({"models": plain}, groups=frozenset({"inference", "management"})) as peer:
        peer.administration.names = []
        peer.ask("GET", "/models/predict")
        assert (await peer.answer())[1].count(b"Model not found: predict") == 1
        assert peer.backend.calls == []
    async with listening({"models": plain}) as peer:
        peer.ask("GET", "/models/predict", b"a")
        assert (await peer.answer())[1] == b"a"


# ---- tokens

EVERY_WAY = [target for target, _, _ in PREDICTIONS] + ["/ping", "/predictions", "/nope", "/ping/x", "/metrics"]
WRONG_TOKENS = {
    "none": [],
    "empty": ["Authorization: "],
    "no scheme": ["Authorization: right"],
    "lower case": ["Authorization: bearer right"],
    "another scheme": ["Authorization: Basic right"],
    "wrong": ["Authorization: Bearer wrong"],
    "longer": ["Authorization: Bearer right1"],
    "shorter": ["Authorization: Bearer righ"],
    "two spaces": ["Authorization: Bearer  right"],
    "that of management": ["Authorization: Bearer other"],
    "another header": ["X-Authorization: Bearer right"],
    "the last of two": ["Authorization: Bearer right", "Authorization: Bearer wrong"],
}


def keys() -> FakeAdministration:
    administration = FakeAdministration()
    administration.keys = {"inference": b"right", "management": b"other", "token": b"third"}
    return administration


@pytest.mark.parametrize("wrong", WRONG_TOKENS)
@pytest.mark.parametrize("target", EVERY_WAY)
async def test_without_the_token_nothing_is_revealed(target, wrong):
    text = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
    refused = error(400, "Bad Request", "InvalidKeyException", text)
    async with listening(administration=keys()) as peer:
        for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            peer.ask(method, target, b"hello", *WRONG_TOKENS[wrong])
            if method == "HEAD":
                assert (await peer.head()).startswith(b"HTTP/1.1 400 Bad Request\r\n")
            else:
                assert await peer.answer() == refused
            assert await peer.rest() == b""
            assert peer.backend.calls == []
            await peer.come_again()


async def test_the_token_is_checked_before_a_large_body_is_received():
    async with listening(administration=keys()) as peer:
        peer.send(b"POST /predictions/m HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")
        assert (await peer.answer())[0].startswith(b"HTTP/1.1 400 ")
        assert peer.backend.used_bytes == 0


@pytest.mark.parametrize("target", [target for target, _, _ in PREDICTIONS] + ["/ping"])
async def test_the_right_token_opens_every_route(target):
    async with listening(administration=keys()) as peer:
        for spelling in ("Authorization", "authorization", "AUTHORIZATION"):
            peer.ask("POST", target, b"a", f"{spelling}: Bearer right")
            assert (await peer.answer())[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("method", "target"), [("OPTIONS", "/"), ("GET", "/api-description")])
async def test_the_description_of_the_listener_needs_no_token(method, target):
    async with listening(administration=keys()) as peer:
        peer.ask(method, target)
        assert (await peer.answer())[0].startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_shared_listener_checks_the_token_of_each_route():
    async with listening(administration=keys(), groups=frozenset({"inference", "management", "metrics"})) as peer:
        for target, key in (("/models", "other"), ("/ping", "right")):
            peer.ask("GET", target, b"", f"Authorization: Bearer {key}")
            assert (await peer.answer())[0].startswith(b"HTTP/1.1 200 OK\r\n")
        peer.ask("GET", "/models", b"", "Authorization: Bearer right")
        assert (await peer.answer())[0].startswith(b"HTTP/1.1 400 ")


# ---- errors

ERRORS = [
    (ItemFailed("a traceback"), 503, "Service Unavailable", "InternalServerException", "Prediction failed"),
    (BadOutput("Invalid model predict output"), 503, "Service Unavailable", "InternalServerException",
     "Invalid model predict output"),
    (OutOfMemory("cuda"), 507, "Insufficient Storage", "InternalServerException", "Out of resources"),
    (Quarantined("poison"), 422, "Unprocessable Entity", "BadRequestException", "poison"),
    (WorkerDied("signal 9"), 500, "Internal Server Error", "InternalServerException", "Worker died."),
    (DeadlineExceeded("too late"), 408, "Request Timeout", "RequestTimeoutException", "too late"),
    (QueueFull("full"), 503, "Service Unavailable", "ServiceUnavailableException", f'Model "m" {NO_WORKER}'),
    (ModelNotReady("no"), 503, "Service Unavailable", "ServiceUnavailableException", f'Model "m" {NO_WORKER}'),
    (Cancelled("gone"), 503, "Service Unavailable", "ServiceUnavailableException", f'Model "m" {NO_WORKER}'),
    (ModelNotFound("gone"), 404, "Not Found", "ModelNotFoundException", "gone"),
    (Forbidden("no"), 403, "Forbidden", "IllegalArgumentException", "no"),
    (Conflict("no"), 409, "Conflict", "ConflictStatusException", "no"),
    (LoadFailed("no"), 500, "Internal Server Error", "InternalServerException", "no"),
    (PenstockError("odd"), 500, "Internal Server Error", "InternalServerException", "odd"),
    (ApiError("ConflictStatusException", "mine"), 409, "Conflict", "ConflictStatusException", "mine"),
    (ApiError("InternalServerException", "own", status=599), 599, "", "InternalServerException", "own"),
]  # fmt: skip


@pytest.mark.parametrize(("raised", "status", "reason", "kind", "text"), ERRORS, ids=lambda e: type(e).__name__)
async def test_an_error_has_torchserves_type_and_closes_the_connection(raised, status, reason, kind, text):
    async with listening({"m": lambda call: call.sink(ItemResult(error=raised))}) as peer:
        peer.ask("POST", "/predictions/m", b"a")
        assert await peer.answer() == error(status, reason, kind, text)
        assert await peer.rest() == b""
    async with listening() as peer:  # the same, raised at once
        peer.backend.refuse = raised
        peer.ask("POST", "/predictions/m", b"a")
        assert await peer.answer() == error(status, reason, kind, text)
        assert await peer.rest() == b""


async def test_no_worker_names_the_requested_version():
    async with listening() as peer:
        peer.backend.refuse = QueueFull("full")
        peer.ask("POST", "/predictions/m/1", b"a")
        expected = f'Model "m" Version 1 {NO_WORKER}'
        assert await peer.answer() == error(503, "Service Unavailable", "ServiceUnavailableException", expected)


@pytest.mark.parametrize("body", [b"", b"x" * 100_000])
async def test_unknown_models_and_unknown_versions_differ(body):
    for target, kind, text in (
        ("/predictions/zz", "ModelNotFoundException", "Model not found: zz"),
        ("/predictions/zz/1", "ModelNotFoundException", "Model not found: zz"),
        ("/v1/models/zz:predict", "ModelNotFoundException", "Model not found: zz"),
        ("/zz/predict", "ModelNotFoundException", "Model not found: zz"),
        ("/predictions/%22%20%ff", "ModelNotFoundException", 'Model not found: " \N{REPLACEMENT CHARACTER}'),
        ("/predictions/m/9", "ModelVersionNotFoundException", "Model version: 9 does not exist for model: m"),
    ):
        async with listening() as peer:
            peer.ask("POST", target, body)
            assert await peer.answer() == error(404, "Not Found", kind, text)


@pytest.mark.parametrize("data", [b"nonsense\r\n\r\n", b"GET /ping HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n\r\n"])
async def test_invalid_http_is_400(data):
    async with listening() as peer:
        peer.send(data)
        assert await peer.answer() == error(400, "Bad Request", "BadRequestException", "Invalid HTTP message.")
        assert await peer.rest() == b""


async def test_an_incomplete_request_is_408():
    async with listening(limits={"header_timeout_s": 0.05}) as peer:
        peer.send(b"GET /pi")
        head, body = await peer.answer()
        assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b'"type": "RequestTimeoutException"' in body


# ---- sizes

TOO_LARGE = (
    b"HTTP/1.1 413 Request Entity Too Large\r\nx-request-id: ID\r\n%bconnection: close\r\ncontent-length: 0\r\n\r\n"
)


@pytest.mark.parametrize(
    "sent",
    [
        b"Content-Length: 1001\r\n\r\n" + b"x" * 1001,
        b"Content-Length: 1001\r\nExpect: 100-continue\r\n\r\n",
        b"Content-Length: 99999999999999\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n",
    ],
)
@pytest.mark.parametrize("line", [b"POST /predictions/m", b"POST /models"])
async def test_a_body_over_the_limit_is_413_with_an_empty_body(line, sent):
    groups = frozenset({"inference", "management"})
    async with listening(limits={"max_body_bytes": 1000}, groups=groups, enable_model_api=True) as peer:
        peer.send(line + b" HTTP/1.1\r\n" + sent)
        assert await peer.answer() == (TOO_LARGE % FIXED, b"")
        assert await peer.rest() == b""
        assert peer.backend.calls == []
        assert peer.administration.asked == []


# ---- what a handler may set


async def test_the_handler_sets_status_reason_headers_and_content_type():
    headers = [("X-Mine", "1"), ("Cache-Control", "mine"), ("connection", "close"), ("x-request-id", "mine")]
    answers = iter(
        [
            {"body": b"a", "status": 201, "reason": "Made", "headers": headers, "content_type": "text/x"},
            {"body": b"", "status": 204, "content_type": ""},
            {"body": b"b", "reason": "Yes", "content_type": "application/json"},
            {"body": b"own", "status": 404, "reason": "", "content_type": ""},
        ]
    )
    async with listening({"m": lambda call: call.reply(**next(answers))}) as peer:
        for _ in range(4):
            peer.ask("POST", "/predictions/m", b"a")
        kind = b"X-Mine: 1\r\ncontent-type: text/x\r\n"
        assert await peer.answer() == (ok(1, b"HTTP/1.1 201 Made\r\n", kind), b"a")
        assert await peer.answer() == (ok(0, b"HTTP/1.1 204 \r\n").replace(b"content-length: 0\r\n", b""), b"")
        kind = b"content-type: application/json\r\n"
        assert await peer.answer() == (ok(1, b"HTTP/1.1 200 Yes\r\n", kind), b"b")
        head = ok(3, b"HTTP/1.1 404 \r\n").replace(b"keep-alive", b"close")
        assert await peer.answer() == (head, b"own")  # the connection ends with any error
        assert await peer.rest() == b""


@pytest.mark.parametrize("status", [599, 600, 999])
async def test_a_nonstandard_status_of_the_handler_reaches_the_client(status):
    async with listening({"m": lambda call: call.reply(b"own", "", status=status)}) as peer:
        peer.ask("POST", "/predictions/m")
        head, body = await peer.answer()
        assert (head.split(b"\r\n")[0], body) == (b"HTTP/1.1 %d " % status, b"own")
        assert peer.server.listener.counts.responses() == {status // 100: 1}


async def test_head_has_no_body():
    async with listening({"m": lambda call: call.reply(b"four", "")}) as peer:
        peer.ask("HEAD", "/predictions/m")
        assert await peer.head() == ok(4).replace(b"ID", peer.backend.calls[0].item.request_id.encode())
        peer.ask("GET", "/predictions/m")
        assert await peer.answer() == (ok(4), b"four")


# ---- streams


async def test_a_stream_has_one_chunk_per_part():
    def stream(call: Call) -> None:
        for part in (b"one", b"two"):
            call.reply(part, "", final=False, headers=[("ts_stream_next", "true")])
        call.reply(b"three", "")

    async with listening({"m": stream}) as peer:
        for _ in range(2):  # the connection is kept
            peer.ask("POST", "/predictions/m", b"a", "Accept: text/event-stream")
            head = await peer.head()
            head = re.sub(rb"x-request-id: [^\r]+", b"x-request-id: ID", head)
            assert head == (
                b"HTTP/1.1 200 \r\nx-accel-buffering: no\r\nts_stream_next: true\r\nx-request-id: ID\r\n"
                b"%bconnection: keep-alive\r\ntransfer-encoding: chunked\r\n\r\n" % FIXED
            )
            end = await asyncio.wait_for(peer.reader.readuntil(b"0\r\n\r\n"), LIMIT_S)
            assert end == b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("POST", 204), ("POST", 304), ("HEAD", 204)])
async def test_a_stream_without_a_body_keeps_the_connection_usable(method, status):
    def stream(call: Call) -> None:
        call.reply(b"one", "", final=False, status=status)
        call.reply(b"two", "", status=status)

    async with listening({"m": stream}) as peer:
        peer.ask(method, "/predictions/m")
        head = await peer.head()
        assert head.startswith(b"HTTP/1.1 %d \r\n" % status)
        assert (b"transfer-encoding" in head) == (status == 200)
        peer.ask("GET", "/ping")
        assert (await peer.head()).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_stream_that_fails_is_cut_off():
    def stream(call: Call) -> None:
        call.reply(b"one", "", final=False)
        call.sink(ItemResult(error=ItemFailed("no")))

    async with listening({"m": stream}) as peer:
        peer.ask("POST", "/predictions/m", b"a")
        assert (await peer.rest()).endswith(b"\r\n\r\n3\r\none\r\n")


# ---- connections


async def test_pipelined_requests_are_answered_in_order_each_under_its_own_id():
    calls: list[Call] = []
    async with listening({"m": calls.append}) as peer:
        for n in range(8):
            peer.ask("POST", "/predictions/m", b"%d" % n)
        peer.ask("GET", "/ping")
        while len(calls) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for call in reversed(calls):
            plain(call)
        for n in range(8):
            assert (await peer.answer())[1] == b"%d" % n
            assert peer.id == calls[n].item.request_id
        await peer.answer()
        ids = {call.item.request_id for call in calls} | {peer.id}
        assert len(ids) == 9
        assert all(str(uuid.UUID(i)) == i and uuid.UUID(i).version == 4 for i in ids)
        assert {uuid.UUID(i).variant for i in ids} == {uuid.RFC_4122}


async def test_without_tokens_on_loopback_foreign_pages_and_hosts_are_refused():
    page = "Origin: http://evil.example"
    local = {f"{group}_address": "http://127.0.0.1:8080" for group in ("inference", "management")}
    both = frozenset({"inference", "management"})
    for keys, wanted in (
        ({"disable_token_authorization": True}, [403, 200, 403]),
        ({"disable_token_authorization": True, "cors_allowed_origin": "http://evil.example"}, [200, 200, 403]),
        ({"disable_token_authorization": True, "allowed_hosts": ["t"]}, [403, 200, 200]),
        ({"disable_token_authorization": True, "inference_address": "http://0.0.0.0:8080"}, [200, 200, 200]),
        ({}, [200, 200, 200]),
    ):
        async with listening(groups=both, **{**local, **keys}) as peer:
            found = []
            for method, path, *lines in (("POST", "/predictions/m", page), ("GET", "/ping"), ("GET", "/models")):
                peer.ask(method, path, b"", *lines)
                found.append(int((await peer.answer())[0].split()[1]))
                await peer.come_again()
            assert found == wanted, keys


async def test_excess_connections_get_503():
    async with listening(limits={"max_connections": 1}) as peer:
        peer.ask("GET", "/ping")
        await peer.answer()
        port = peer.writer.get_extra_info("peername")[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert (await asyncio.wait_for(reader.read(), LIMIT_S)).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        writer.close()


async def test_cors_headers_are_on_every_response_if_configured():
    async with listening(cors_allowed_origin="*", cors_allowed_methods="GET, POST", cors_allowed_headers="X-A") as peer:
        for method, target in (("GET", "/ping"), ("POST", "/predictions/m"), ("GET", "/nope")):
            peer.ask(method, target)
            assert (
                b"Expires: Thu, 01 Jan 1970 00:00:00 UTC\r\nAccess-Control-Allow-Origin: *\r\n"
                b"Access-Control-Allow-Methods: GET, POST\r\nAccess-Control-Allow-Headers: X-A\r\n"
            ) in (await peer.answer())[0]
    async with listening(cors_allowed_origin="http://a") as peer:
        peer.ask("GET", "/ping")
        head = (await peer.answer())[0]
        assert b"Access-Control-Allow-Origin: http://a\r\n" in head
        assert b"Allow-Methods" not in head


async def test_the_route_caches_are_bounded():
    async with listening({f"m{n}": plain for n in range(1500)}) as peer:
        for n in range(1500):
            peer.ask("POST", f"/predictions/m{n}?{n}")
            peer.ask("PUT", f"/predictions/m{n}?{n}")
            await peer.answer()
            await peer.answer()
        flavor: Any = peer.server.flavor
        assert len(flavor.known) <= 1024
        assert len(flavor._others) <= 1024
