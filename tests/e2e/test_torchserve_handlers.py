"""Handlers over TorchServe's HTTP API: return values, exceptions, partial results and crashes."""

import http.client
import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

HANDLER = """
import os, time
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import PredictionException


def fails(error):
    raise error


class Handler(BaseHandler):
    def initialize(self, context):
        self.context = context

    def handle(self, data, context):
        if context.get_request_header(0, "describe") == "True":
            return [{"about": context.model_name}]
        print("asked", list(data[0]))
        found = data[0].get("do") or data[0].get("body")
        return eval(found.decode() if isinstance(found, bytearray) else found)

    def stream(self, context):
        for step in range(3):
            send_intermediate_predict_response([f"{step} "], context.request_ids, "Intermediate", 200, context)
            end = time.monotonic() + 10
            while step == 1 and not os.path.exists(os.environ["GO"]) and time.monotonic() < end:
                time.sleep(0.01)
        return ["end"]
"""


@pytest.fixture(scope="module")
def server(torchserve_all: Any) -> Any:
    """A server whose model "m" evaluates the Python code in the request."""
    torchserve_all.add_model(HANDLER)
    torchserve_all.configure(default_response_timeout="2")
    torchserve_all.env["GO"] = str(torchserve_all.folder / "go")
    torchserve_all.start("--models", "m.mar", "--disable-token-auth")
    return torchserve_all


@contextmanager
def ask(server: Any, body: bytes, content_type: str = "text/plain") -> Iterator[http.client.HTTPResponse]:
    """The response, unread."""
    connection = http.client.HTTPConnection(urlsplit(server.url()).netloc, timeout=30)
    connection.request("POST", "/predictions/m", body, {"Content-Type": content_type})
    with closing(connection), connection.getresponse() as response:
        yield response


def error(status: int, kind: str, message: str) -> bytes:
    return json.dumps({"code": status, "type": kind, "message": message}, indent=2).encode() + b"\n"


INTERNAL = "InternalServerException"
ANSWERS = {
    "['gr\\u00fcn']": (200, "grün".encode()),
    "[{'a': [1, 'ü']}]": (200, b'{\n  "a": [\n    1,\n    "\\u00fc"\n  ]\n}'),
    "context.set_response_status(404, 'Gone') or ['own']": (404, b"own"),
    "'text'": (503, error(503, INTERNAL, "Invalid model predict output")),
    "fails(PredictionException('mine', 418))": (418, error(418, INTERNAL, "mine")),
    "fails(MemoryError())": (507, error(507, INTERNAL, "Out of resources")),
    "fails(KeyError('secret'))": (503, error(503, INTERNAL, "Prediction failed")),
}
DIED = error(500, INTERNAL, "Worker died.")


@pytest.mark.slow
def test_clients_receive_the_results_and_errors_of_handlers(server: Any) -> None:
    for text, expected in ANSWERS.items():
        with ask(server, text.encode()) as response:
            assert (response.status, response.read()) == expected, text
            assert response.getheader("connection") == ("keep-alive" if response.status < 400 else "close"), text
    with ask(server, b"context.set_response_header(0, 'X-A', '1') or ['x']") as response:
        assert (response.reason, response.getheader("X-A"), response.getheader("content-type")) == ("", "1", None)
    with ask(
        server, b"context.set_response_status(200, 'Fine') or context.set_response_content_type(0, 'a/b') or ['']"
    ) as r:
        assert (r.reason, r.getheader("content-type"), r.read()) == ("Fine", "a/b", b"")
    with ask(server, b"['x' * 7_000_000]") as response:
        assert (response.status, json.loads(response.read())["type"]) == (500, "InternalServerException")
    with ask(server, b"do=%5B1%5D", "application/x-www-form-urlencoded") as response:
        assert response.read() == b"1"
    with ask(server, b"no boundary", "multipart/form-data") as response:
        assert response.status == 400
    described = json.loads(server.fetch(server.url("Management") + "/models/m?customized=true")[1])
    assert described[0]["customizedMetadata"] == {"about": "m"}
    logged = (server.folder / "logs" / "model_log.log").read_text()
    assert logged.count("KeyError: 'secret'") == 1
    assert "asked ['do']" in logged

    for text in (b"os._exit(3)", b"time.sleep(60)"):  # dies; hangs past default_response_timeout
        with ask(server, text) as response:
            assert (response.status, response.read()) == (500, DIED)
        with ask(server, b"['again']") as response:
            assert (response.status, response.read()) == (200, b"again")


@pytest.mark.slow
def test_a_client_receives_a_part_while_the_handler_still_runs(server: Any) -> None:
    with ask(server, b"self.stream(context)") as response:
        assert (response.status, response.getheader("transfer-encoding")) == (200, "chunked")
        assert (response.getheader("ts_stream_next"), response.getheader("content-type")) == ("true", None)
        assert (response.read(2), response.read(2)) == (b"0 ", b"1 ")
        (server.folder / "go").touch()
        assert response.read() == b"2 end"
    assert os.path.exists(server.folder / "go")
