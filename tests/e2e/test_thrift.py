"""`penstock serve` with a Thrift listener, called by thriftpy2's own client."""

import io
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import thriftpy2
from thriftpy2.protocol import TBinaryProtocolFactory, TCyBinaryProtocolFactory
from thriftpy2.rpc import make_client
from thriftpy2.thrift import TApplicationException
from thriftpy2.transport import (
    TBufferedTransportFactory,
    TCyBufferedTransportFactory,
    TCyFramedTransportFactory,
    TFramedTransportFactory,
)

IDL = """
struct InferenceParams { 1: required string uuid, 2: required binary data }
struct InferenceResult { 1: required string label, 2: required double score }
service InferenceService { void ping(), InferenceResult infer_batch(1: InferenceParams params) }
"""
SERVICE = thriftpy2.load_fp(io.StringIO(IDL), "service_thrift")

MODEL = """
    import time
    import numpy as np
    import penstock

    @penstock.model(max_batch_size=8)
    def sizes(items):
        found = []
        for item in items:
            if item == b"bad":
                found.append(ValueError("secret path /etc/passwd"))
            elif item == b"label":
                found.append({"label": "cat", "score": 0.5})
            elif item == b"slow":
                time.sleep(2)
                found.append({"label": "slow", "score": 1})
            else:
                scores = np.zeros((1, 100_001), np.float32)
                scores[0, len(item)] = 20
                found.append(scores)
        return found
"""


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(MODEL, "sizes=app.py:sizes", "--set", "server.thrift_port=0")


def port_of(server: Any) -> int:
    scheme, _, address = server.urls["thrift"].partition("://")
    assert scheme == "thrift"
    return int(address.rpartition(":")[2])


def client_of(
    server: Any, transport: Any = TCyBufferedTransportFactory, protocol: Any = TCyBinaryProtocolFactory
) -> Any:
    return make_client(
        SERVICE.InferenceService,
        "127.0.0.1",
        port_of(server),
        proto_factory=protocol(),
        trans_factory=transport(),
        timeout=30_000,
    )


def infer(client: Any, data: bytes, uuid: str = "1") -> Any:
    return client.infer_batch(SERVICE.InferenceParams(uuid=uuid, data=data))


@pytest.mark.parametrize(
    ("transport", "protocol"),
    [
        (TCyBufferedTransportFactory, TCyBinaryProtocolFactory),
        (TBufferedTransportFactory, TBinaryProtocolFactory),
        (TCyFramedTransportFactory, TCyBinaryProtocolFactory),
        (TFramedTransportFactory, TBinaryProtocolFactory),
    ],
)
def test_clients_of_each_transport_get_the_label_and_the_score(server: Any, transport: Any, protocol: Any) -> None:
    client = client_of(server, transport, protocol)
    assert client.ping() is None
    for size in (0, 7, 100_000):
        result = infer(client, b"x" * size)
        assert result.label == str(size)
        assert result.score == pytest.approx(1.0, abs=1e-3)
    assert infer(client, b"label").label == "cat"
    client.close()


def test_each_of_many_clients_gets_its_own_answers(server: Any) -> None:
    def calls(number: int) -> None:
        client = client_of(server)
        for n in range(20):
            assert infer(client, b"x" * (100 * number + n)).label == str(100 * number + n)
        client.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(calls, range(16)))


def test_an_error_is_an_exception_without_secrets_and_keeps_the_connection(server: Any) -> None:
    client = client_of(server)
    with pytest.raises(TApplicationException, match=r"^item_failed: ") as info:
        infer(client, b"bad")
    assert info.value.type == TApplicationException.INTERNAL_ERROR
    assert infer(client, b"xyz").label == "3"
    client.close()


def test_requests_over_thrift_are_counted_as_others_are(server: Any) -> None:
    before = server.metric("penstock_requests_total", model="sizes")
    client = client_of(server)
    for _ in range(5):
        infer(client, b"x")
    client.close()
    assert server.metric("penstock_requests_total", model="sizes") == before + 5


def test_a_running_call_is_answered_when_the_server_shuts_down(serve: Callable[..., Any]) -> None:
    server = serve(MODEL, "sizes=app.py:sizes", "--set", "server.thrift_port=0")
    client = client_of(server)
    client.ping()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(infer(client, b"slow").label))
    thread.start()
    while not server.metric("penstock_requests_in_flight", model="sizes"):
        assert thread.is_alive(), "it was answered before anybody saw it run"
    server.process.send_signal(signal.SIGTERM)
    thread.join()
    assert found == ["slow"]
    assert server.process.wait(30) == 0
    client.close()
