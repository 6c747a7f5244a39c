"""Tensors in shared memory, which tritonclient registers over HTTP and gRPC."""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

SOURCE = """
    import penstock

    class Twice:
        inputs = [penstock.TensorSpec("x", "FP32", (-1, 4))]
        outputs = [penstock.TensorSpec("y", "FP32", (-1, 4))]

        def predict(self, items):
            return [{"y": item["x"] * 2} for item in items]

    class Gated(Twice):
        def predict(self, items):
            import os, time
            open("started", "w").close()
            while not os.path.exists("gate"):
                time.sleep(0.005)
            return super().predict(items)

    class Words:
        def predict(self, items):
            return [{"y": item["x"]} for item in items]
"""
PORTS = ["--port", "0", "--set", "server.management_port=0", "--set", "server.metrics_port=0"]
TRANSPORT = ["--set", "models.words.transport=thread"]
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
CLIENTS = [tritonclient.http, tritonclient.grpc]


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(SOURCE, "Twice", "Gated", "Words", *TRANSPORT, "--set", "server.shared_memory=true", ports=PORTS)


@pytest.fixture(params=CLIENTS, ids=["http", "grpc"])
def module(request: Any) -> Any:
    return request.param


def connect(module: ModuleType, server: Any) -> Any:
    url = server.urls["grpc" if module is tritonclient.grpc else "inference"]
    return module.InferenceServerClient(url.partition("://")[2])


@pytest.fixture
def client(module: ModuleType, server: Any) -> Iterator[Any]:
    with connect(module, server) as found:
        yield found


class Segment:
    """A shared memory object of 4 KiB, registered as a region."""

    def __init__(self, client: Any) -> None:
        self.name, self.key = uuid.uuid4().hex, f"/{uuid.uuid4().hex}"
        self.handle = shm.create_shared_memory_region(self.name, self.key, 4096)
        self._client = client
        client.register_system_shared_memory(self.name, self.key, 4096)

    def close(self) -> None:
        self._client.unregister_system_shared_memory(self.name)
        if os.path.exists(f"/dev/shm{self.key}"):
            shm.destroy_shared_memory_region(self.handle)


@pytest.fixture
def segment(client: Any) -> Iterator[Segment]:
    found = Segment(client)
    yield found
    found.close()


def given(module: ModuleType, segment: Segment, size: int = 32, offset: int = 0, shape: Any = (2, 4)) -> Any:
    found = module.InferInput("x", list(shape), "FP32")
    found.set_shared_memory(segment.name, size, offset)
    return found


def wanted(module: ModuleType, segment: Segment, size: int = 32, offset: int = 1024) -> Any:
    found = module.InferRequestedOutput("y")
    found.set_shared_memory(segment.name, size, offset)
    return found


MISSING = ("404", "NOT_FOUND")


def refused(call: Callable[[], Any], http: str = "400", grpc: str = "INVALID_ARGUMENT") -> str:
    with pytest.raises(InferenceServerException) as raised:
        call()
    assert raised.value.status() in (http, f"StatusCode.{grpc}")
    message: str = raised.value.message()
    return message


def test_inputs_and_outputs_pass_through_the_region(module, client, segment):
    shm.set_shared_memory_region(segment.handle, [ROWS])
    os.unlink(f"/dev/shm{segment.key}")  # the name is not needed any more
    answer = client.infer("twice", [given(module, segment)], outputs=[wanted(module, segment)])
    output = answer.get_output("y")
    # as Triton: its C++ client reads binary_data_size in any parameters that it finds
    assert not (output.parameters if module is tritonclient.grpc else "parameters" in output)
    found = shm.get_contents_as_numpy(segment.handle, np.float32, [2, 4], 1024)
    np.testing.assert_array_equal(found, ROWS * 2)
    plain = client.infer("twice", [given(module, segment, 16, 16, (1, 4))])
    np.testing.assert_array_equal(plain.as_numpy("y"), ROWS[1:] * 2)


def test_bytes_pass_through_the_region(module, client, segment):
    words = np.array([b"a", b"\xff\x00"], object)
    shm.set_shared_memory_region(segment.handle, [serialize_byte_tensor(words)])
    x = module.InferInput("x", [2], "BYTES")
    x.set_shared_memory(segment.name, 4 + 1 + 4 + 2)
    client.infer("words", [x], outputs=[wanted(module, segment, 100)])
    found = shm.get_contents_as_numpy(segment.handle, np.object_, [2], 1024)
    np.testing.assert_array_equal(found, words)


def test_regions_are_listed(module, client, segment):
    found = client.get_system_shared_memory_status(segment.name)
    region = found.regions[segment.name] if module is tritonclient.grpc else found[0]
    value = (lambda key: getattr(region, key)) if module is tritonclient.grpc else region.__getitem__
    assert (value("name"), value("key"), value("offset"), value("byte_size")) == (segment.name, segment.key, 0, 4096)
    again = partial(client.register_system_shared_memory, segment.name, segment.key, 1)
    assert "registered already" in refused(again, "400", "ALREADY_EXISTS")
    client.unregister_system_shared_memory(segment.name)
    assert "no region" in refused(partial(client.get_system_shared_memory_status, segment.name), *MISSING)
    client.register_system_shared_memory(segment.name, segment.key, 4096)


def test_a_place_outside_the_region_is_refused(module, client, segment):
    for offset in (4080, 2**40):
        outside = [given(module, segment, 32, offset)]
        assert "are not inside the region" in refused(partial(client.infer, "twice", outside))
    assert "but shape and datatype need 32" in refused(lambda: client.infer("twice", [given(module, segment, 16)]))
    assert "are not inside the region" in refused(
        lambda: client.infer("twice", [given(module, segment)], outputs=[wanted(module, segment, 32, 4090)])
    )
    assert "it has 32 bytes" in refused(
        lambda: client.infer("twice", [given(module, segment)], outputs=[wanted(module, segment, 8)])
    )


def test_a_region_that_is_gone_or_shorter_fails_its_requests_only(module, client, segment, server):
    os.truncate(f"/dev/shm{segment.key}", 16)
    assert "is shorter than" in refused(lambda: client.infer("twice", [given(module, segment)]))
    shared = [wanted(module, segment)]
    x = module.InferInput("x", [2, 4], "FP32")
    x.set_data_from_numpy(ROWS)
    assert "is shorter than" in refused(lambda: client.infer("twice", [x], outputs=shared))
    os.truncate(f"/dev/shm{segment.key}", 4096)
    client.unregister_system_shared_memory(segment.name)
    assert "no region" in refused(partial(client.infer, "twice", [given(module, segment)]), *MISSING)
    np.testing.assert_array_equal(client.infer("twice", [x]).as_numpy("y"), ROWS * 2)
    assert server.metric("penstock_worker_events_total", state="died") == 0
    client.register_system_shared_memory(segment.name, segment.key, 4096)


def test_a_region_in_use_stays_until_the_answer(module, client, segment, server):
    folder = Path(f"/proc/{server.process.pid}/cwd")
    shm.set_shared_memory_region(segment.handle, [ROWS])

    def infer() -> None:
        with connect(module, server) as own:  # gevent keeps a client in the thread that made it
            own.infer("gated", [given(module, segment)], outputs=[wanted(module, segment)])

    with ThreadPoolExecutor() as pool:
        running = pool.submit(infer)
        try:
            while not (folder / "started").exists():
                time.sleep(0.01)
            for name in (segment.name, ""):
                unregister = partial(client.unregister_system_shared_memory, name)
                assert f"requests in progress use {segment.name}" in refused(unregister, "409", "ABORTED")
        finally:
            (folder / "gate").touch()
        running.result()
    found = shm.get_contents_as_numpy(segment.handle, np.float32, [2, 4], 1024)
    np.testing.assert_array_equal(found, ROWS * 2)
    client.unregister_system_shared_memory(segment.name)
    assert "no region" in refused(partial(client.get_system_shared_memory_status, segment.name), *MISSING)
    for file in ("started", "gate"):
        (folder / file).unlink()


@pytest.mark.parametrize("key", ["", "/", "..", "/..", "../etc/passwd", "/a/b", "/absent-object", "a" * 300, "a\0b"])
def test_a_key_that_leads_elsewhere_is_refused(server, key):
    with connect(tritonclient.grpc, server) as client:
        message = refused(lambda: client.register_system_shared_memory("r", key, 1))
    assert "must be the name" in message or "cannot be opened" in message


def test_what_is_no_object_of_this_size_is_refused(server, tmp_path):
    link = f"/dev/shm/{uuid.uuid4().hex}"
    os.symlink("/etc/passwd", link)
    try:
        with connect(tritonclient.grpc, server) as client:
            assert "cannot be opened" in refused(
                lambda: client.register_system_shared_memory("r", os.path.basename(link), 1)
            )
    finally:
        os.unlink(link)
    with open(link, "wb") as file:
        file.write(bytes(10))
    try:
        with connect(tritonclient.http, server) as client:
            for offset, size in ((0, 11), (5, 6), (2**62, 2**62)):
                register = partial(client.register_system_shared_memory, "r", os.path.basename(link), size, offset)
                assert "are not inside" in refused(register)
            assert "at least 0 and 1" in refused(
                lambda: client.register_system_shared_memory("r", os.path.basename(link), 0)
            )
    finally:
        os.unlink(link)


def test_cuda_memory_is_refused_and_shared_memory_is_off_by_default(serve, server):
    with connect(tritonclient.http, server) as client:
        assert client.get_cuda_shared_memory_status() == []
        client.unregister_cuda_shared_memory()
        assert "CUDA shared memory is not supported" in refused(
            lambda: client.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 64)
        )
    off = serve(SOURCE, "Words", *TRANSPORT)
    with connect(tritonclient.http, off) as client, pytest.raises(InferenceServerException) as raised:
        client.register_system_shared_memory("r", "/r", 1)
    assert (raised.value.status(), raised.value.message()) == (
        "403", "shared memory is off: set shared_memory = true in [server]"
    )  # fmt: skip
