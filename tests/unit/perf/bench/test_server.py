import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from penstock.client.endpoint import ConnectionLost, Endpoint, MalformedResponse, ResponseTimeout, Unreachable
from penstock.perf.bench.server import check_reachable, fetch
from penstock.perf.bench.target import find_listeners, listening_process

Says = Callable[[bytes], Endpoint]


@pytest.fixture
def says() -> Iterator[Says]:
    """`says(answer)` starts a server that answers each request with these bytes and closes; b"-": never.

    After b"..." it goes on with dots, for ever.
    """
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []
    held: list[socket.socket] = []

    def answer(listener: socket.socket, data: bytes) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if data == b"-":
                held.append(connection)
                continue
            with connection:
                connection.recv(4096)
                connection.sendall(data)
                while data.endswith(b"..."):
                    try:
                        connection.sendall(b".")
                    except OSError:
                        break

    def make(data: bytes) -> Endpoint:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        threads.append(threading.Thread(target=answer, args=(listener, data)))
        threads[-1].start()
        return Endpoint("127.0.0.1", listener.getsockname()[1])

    yield make
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join()
    for connection in held:
        connection.close()


def http(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def test_fetch_returns_responses_of_any_status(says: Says) -> None:
    assert fetch(says(http(b'{"a": 1}')), "GET", "/x").json() == {"a": 1}
    response = fetch(says(http(b"not JSON", b"503 Busy")), "POST", "/x", b"{}")
    assert (response.status, response.ok, response.json(), response.text) == (503, False, None, "not JSON")


def test_failed_requests_have_distinct_errors(says: Says) -> None:
    with pytest.raises(ConnectionLost):
        fetch(says(b""), "GET", "/")
    with pytest.raises(MalformedResponse):
        fetch(says(b"220 mail.example ESMTP\r\n"), "GET", "/")
    with pytest.raises(ResponseTimeout, match=r"within 0\.05 s"):
        fetch(says(b"-"), "GET", "/", timeout_s=0.05)
    with pytest.raises(ResponseTimeout, match=r"within 0\.05 s"):
        fetch(says(b"HTTP/1.1 200 OK\r\n\r\n..."), "GET", "/", timeout_s=0.05)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        unused = Endpoint("127.0.0.1", free.getsockname()[1])
        for look in (lambda: fetch(unused, "GET", "/"), lambda: check_reachable(unused)):
            with pytest.raises(Unreachable, match="cannot connect"):
                look()
    with pytest.raises(Unreachable, match="is not a valid host name"):
        check_reachable(Endpoint("a..b", 80))


def test_a_server_and_its_other_listeners_are_found_by_port(says: Says) -> None:
    here = says(http(b"{}", b"404 Not Found"))
    metrics = says(http(b"# HELP\npenstock_build_info 1\n"))
    management = says(http(b'{"models":[]}'))
    assert listening_process(here.port) == os.getpid()
    assert find_listeners(here, os.getpid(), None) == (metrics, management)
