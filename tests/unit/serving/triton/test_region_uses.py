"""A region of shared memory that a request in flight names stays registered."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import Conflict, ModelNotFound
from penstock.serving.protocols.oip_protobuf import open_inference, set_parameters
from penstock.serving.triton.region_uses import regions_of
from penstock.serving.triton.settings import SharedMemory
from penstock.types import Item, ItemResult
from support.backend import FakeBackend

NAMES = ["r", 'quo"te', "é" * 100, "\0"]


def in_json(*names: str, codec: str = "oip_json") -> Item:
    tensors = [{"name": "x", "parameters": {"shared_memory_region": name}} for name in names]
    return Item(json.dumps({"inputs": tensors[:1], "outputs": tensors[1:]}).encode(), codec)


def in_message(*names: str) -> Item:
    message = open_inference().message("inference.ModelInferRequest")()
    for k, name in enumerate(names):
        tensor = (message.outputs if k else message.inputs).add(name="x")
        set_parameters(tensor.parameters, {"shared_memory_byte_size": 8, "shared_memory_region": name})
    return Item(message.SerializeToString(), "oip_grpc")


@pytest.mark.parametrize("request_of", [in_json, in_message])
def test_the_regions_of_inputs_and_outputs_are_found_in_every_form(request_of: Any) -> None:
    assert regions_of(request_of(*NAMES)) == NAMES
    assert regions_of(request_of()) == []


@pytest.mark.parametrize(
    "item",
    [
        Item(b'{"shared_memory_region": "\xff"}', "oip_json"),
        Item(b'{"shared_memory_region": "\\q"}', "oip_json"),
        Item(b'{"shared_memory_region": 5}', "oip_json"),
        Item(b"\x14shared_memory_region\x12\x03\x1a\x01\xff", "oip_grpc"),
        Item(b"\x14shared_memory_region\x12", "oip_grpc"),
        Item({"shared_memory_region": "r"}, "object"),
    ],
)
def test_a_request_that_the_worker_will_refuse_names_no_region(item: Item) -> None:
    assert list(regions_of(item)) == []


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    """Shared memory with the regions "r" and "other"."""
    key, found = uuid.uuid4().hex, SharedMemory(True, 2**20)
    with open(f"/dev/shm/{key}", "wb") as file:
        file.write(bytes(64))
    for name in ("r", "other"):
        found.register(name, key, 0, 64)
    os.unlink(f"/dev/shm/{key}")
    yield found
    found.close()


def names(memory: SharedMemory) -> list[str]:
    return [region["name"] for region in memory.status("")]


async def test_a_region_in_use_is_unregistered_only_after_the_answer(memory: SharedMemory) -> None:
    backend = FakeBackend({"m": lambda call: None})
    counted = memory.count_uses(backend)
    seen: list[Any] = []

    def sink(result: ItemResult) -> None:
        if result.final:
            memory.unregister("r")  # a client with its answer may do so at once
        seen.append(result)

    counted.submit("m", None, in_json("r", "r", "unknown"), sink)
    call = backend.calls[0]
    with pytest.raises(Conflict, match="requests in progress use r"):
        memory.unregister("r")
    with pytest.raises(Conflict, match="requests in progress use r"):
        memory.unregister("")  # the others go
    assert names(memory) == ["r"]
    call.sink(ItemResult(b"part", final=False))
    with pytest.raises(Conflict):
        memory.unregister("r")
    call.sink(ItemResult(b"end"))
    assert [result.body for result in seen] == [b"part", b"end"]
    assert names(memory) == []


async def test_a_request_that_is_abandoned_or_refused_uses_nothing(memory: SharedMemory) -> None:
    counted = memory.count_uses(FakeBackend({"m": lambda call: None}))
    with pytest.raises(ModelNotFound):
        counted.submit("absent", None, in_message("r"), lambda result: None)
    ticket = counted.submit("m", None, in_message("r"), lambda result: None)
    with pytest.raises(Conflict):
        memory.unregister("r")
    ticket.cancel()
    memory.unregister("r")
    assert names(memory) == ["other"]


def test_a_server_without_shared_memory_counts_nothing() -> None:
    backend = FakeBackend()
    assert SharedMemory(False, 1).count_uses(backend) is backend
