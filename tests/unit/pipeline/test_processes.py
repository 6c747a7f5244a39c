"""Nodes in worker processes: what crosses, what fails alone, and what ends a process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.wire.lending import Lender, find
from penstock.core.wire.messages import MessageWriter
from penstock.errors import ConfigError, LoadFailed
from penstock.pipeline import filters
from penstock.pipeline.check import check
from penstock.pipeline.graph import NodeStep
from penstock.pipeline.load import parse_graph
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import ItemOp

OPS = """
import os
import signal
import threading
import time

import numpy as np

lock = threading.Lock()
seen = []


def pid(data):
    return os.getpid()


def image(data):
    return np.full((300, 400, 3), data, np.uint8)


def invert(data):
    data ^= 255
    return data


def reshape(data):
    data.shape = (400, 300, 3)
    return data


def twice(data):
    return data if data.flags.writeable else None


def where(data):
    return os.getpid(), int(data[0, 0, 0]), data.shape


def keep(data):
    seen.append(data)
    return [int(each[0, 0, 0]) for each in seen]


def owns(data):
    with lock, open(__file__) as file:
        return len(file.readline())


class Marks:
    def __call__(self, data, fields):
        fields["mark"] = data
        return bytes(data[:3])


def lose(data):
    return {"it": lock} if data == "lock" else data


class Beside:
    def __call__(self, data, fields):
        fields["why"] = lock
        return 1


def die(data):
    match data:
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(60)
        case "raise":
            raise ValueError("this one")
    return data
"""


class Doubled(ItemOp):
    """A registered op at the top level of a module."""

    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        return data * 2


@pytest.fixture
def op(tmp_path: Path) -> Callable[[str], NodeStep]:
    file = tmp_path / "ops.py"
    file.write_text(OPS)
    return lambda name: NodeStep("Python", {"target": f"{file}:{name}"})


def lender_of(s: Any, name: str, slot: int = 0) -> Lender:
    """The memory of a process's results."""
    found: Lender = s.runner.node(name).engine.handle.instances._transport._places[slot]._lender
    return found


TWO = {"processes": 2, "instances": 2}
ONE = {"processes": 1, "instances": 1}


async def test_arrays_reach_the_next_node_in_shared_memory(stage, op) -> None:
    s = await stage({"a": (op("image"), "b", TWO), "b": (op("where"), "c", ONE), "c": "Identity"})
    outcome = await s.put(7)
    pid, value, shape = outcome.fields["result"]
    assert (value, shape) == (7, (300, 400, 3))
    assert pid != os.getpid()
    s = await stage({"a": (op("image"), TWO)})
    results = await s.results(*range(12))
    assert [int(image[5, 5, 1]) for image in results] == list(range(12))
    assert all(image.flags.writeable for image in results)
    assert lender_of(s, "a", 0).lent + lender_of(s, "a", 1).lent == 12, "they are not copies"
    del results, s.last
    gc.collect()
    assert lender_of(s, "a", 0).lent + lender_of(s, "a", 1).lent == 0


async def test_memory_that_users_keep_never_blocks_the_node(stage, op, monkeypatch) -> None:
    monkeypatch.setattr("penstock.pipeline.engine.REPLY_BYTES", 2 * 2**20)
    s = await stage({"a": (op("image"), ONE)})
    kept = [image for i in range(8) for image in await s.results(i, i + 100)]  # 8.6 MB of a region of 2 MiB
    assert [int(image[9, 9, 2]) for image in kept] == [v for i in range(8) for v in (i, i + 100)]


async def test_an_array_larger_than_the_shared_memory_crosses_all_the_same(stage, op, monkeypatch) -> None:
    monkeypatch.setattr("penstock.pipeline.engine.REPLY_BYTES", 2**17)
    monkeypatch.setattr("penstock.pipeline.runner.POOL_BYTES", 2**17)
    s = await stage({"a": (op("image"), "b", ONE), "b": (op("invert"), ONE)})
    (image,) = await s.results(5)
    assert (image == 250).all()


async def test_ops_change_arrays_in_place_as_in_threads(stage, op) -> None:
    s = await stage({"a": (op("image"), "b", ONE), "b": (op("invert"), "c", ONE), "c": op("invert")})
    (image,) = await s.results(5)
    assert (image == 5).all()
    s = await stage({"a": (op("image"), "b", ONE), "b": (op("reshape"), ONE)})
    assert (await s.results(5))[0].shape == (400, 300, 3)
    s = await stage({"a": (op("image"), "b c", ONE), "b": ("Identity", ONE), "c": (op("invert"), ONE)})
    assert await s.results(5) == ["item_failed"], "several nodes have it, so it is read-only"


async def test_fields_that_no_op_changes_are_the_same_objects(stage, op) -> None:
    s = await stage({"a": (op("Marks"), "b", ONE), "b": ("Identity", TWO)})
    data = bytes(100_000)
    own = np.arange(10)
    own.setflags(write=False)
    outcome = await s.send({"data": data, "own": own, "small": [1, 2]})
    assert outcome.error is None
    assert outcome.fields["mark"] is data
    assert outcome.fields["own"] is own
    assert (outcome.fields["result"], outcome.fields["small"]) == (bytes(3), [1, 2])
    outcome = await s.send({"data": memoryview(data), "own": own})
    assert outcome.fields["result"] == bytes(3)


async def test_an_op_may_keep_its_inputs(stage, op) -> None:
    s = await stage({"a": (op("image"), "b", ONE), "b": (op("keep"), ONE)})
    for i in range(8):
        assert await s.results(i) == [list(range(i + 1))]


async def test_a_process_reads_the_results_of_another_where_they_are(stage, op, monkeypatch) -> None:
    nodes = {"a": ("image", "b"), "b": ("invert", "c"), "c": ("twice", "d"), "d": ("where", "")}
    s = await stage({name: (op(what), after, ONE) for name, (what, after) in nodes.items()})
    copied: list[int] = []
    put = MessageWriter.put
    monkeypatch.setattr(MessageWriter, "put", lambda self, data: copied.append(len(data)) or put(self, data))
    for i in range(50):
        outcome = await s.put(i)
        assert outcome.fields["result"][1:] == (255 - i, (300, 400, 3))
        assert (outcome.fields["data"][9] == 255 - i).all()
    assert max(copied, default=0) < 10_000
    del outcome
    outcomes = await asyncio.gather(*map(s.put, range(4)))
    assert [lender_of(s, name).lent for name in nodes] == [4, 0, 0, 0], "no process has copied what it only passed on"
    assert [int(o.fields["data"][0, 0, 0]) for o in outcomes] == [255, 254, 253, 252]


async def test_results_outlive_their_process(stage, op) -> None:
    s = await stage({"a": (op("image"), "b", ONE), "b": (op("keep"), ONE)})
    outcomes = [await s.put(i) for i in range(3)]
    lender = lender_of(s, "a")
    for pid in s.runner.node("a").engine.handle.instances.pids().values():
        os.kill(pid, signal.SIGKILL)
    assert await s.results(3) == [[0, 1, 2, 3]]
    assert [int(outcome.fields["data"][0, 0, 0]) for outcome in outcomes] == [0, 1, 2]
    assert lender_of(s, "a") is not lender
    assert find(outcomes[0].fields["data"]) is not None
    for pid in s.runner.node("b").engine.handle.instances.pids().values():
        os.kill(pid, signal.SIGKILL)
    assert await s.results(4) == [[4]]
    del outcomes
    gc.collect()
    assert lender.lent == 0
    assert not lender._fds, "nothing refers to its memory, so its descriptor is closed"


async def test_ops_may_hold_locks_and_files(stage, op) -> None:
    s = await stage({"a": (op("owns"), TWO)})
    assert await s.results(1, 2) == [1, 1]


async def test_what_cannot_be_pickled_fails_alone_and_is_named(stage, op) -> None:
    s = await stage({"a": (op("lose"), "b"), "b": ("Identity", TWO)})
    lock, fine = await asyncio.gather(s.put("lock"), s.put("fine"))
    assert fine.fields["result"] == "fine"
    assert str(lock.error) == "node 'b': field 'result' is a dict that cannot be pickled for the worker"
    s = await stage({"a": (op("Beside"), TWO)})
    outcome = await s.put(1)
    assert str(outcome.error) == "node 'a': field 'why' is a lock that cannot be pickled"


async def test_one_process_per_instance_takes_items_and_the_order_is_kept(stage, op) -> None:
    s = await stage({"a": (op("die"), "b", {**TWO, "max_batch": 1}), "b": (op("pid"), {**TWO, "max_batch": 1})})
    pids = await s.results(*range(10))
    assert len(set(pids)) == 2
    assert os.getpid() not in pids


@pytest.mark.parametrize("poison", ["exit", "kill"])
async def test_an_item_that_ends_its_process_fails_alone(stage, op, poison: str) -> None:
    s = await stage({"a": ("Identity", "b"), "b": (op("die"), "c", {**TWO, "max_batch": 4}), "c": ("Identity", ONE)})
    found = await s.results("1", "2", poison, "3", "raise", "4")
    assert found == ["1", "2", "worker_died", "3", "item_failed", "4"]
    assert await s.results("5") == ["5"]


async def test_a_process_that_hangs_is_replaced(stage, op) -> None:
    s = await stage({"a": (op("die"), "", {**ONE, "run_timeout_s": 0.3, "max_batch": 1})})
    outcome, after = await asyncio.gather(s.put("hang"), s.put("1"))
    assert str(outcome.error) == "node 'a': the run exceeded run_timeout_s=0.3, and its worker was replaced"
    assert after.fields["result"] == "1"


async def test_processes_that_are_killed_lose_no_item(stage, op) -> None:
    s = await stage({"a": (op("die"), "b", TWO), "b": (op("image"), {**TWO, "queue": 100})})
    instances = s.runner.node("a").engine.handle.instances
    waiting = [asyncio.ensure_future(s.results(*range(4))) for _ in range(20)]
    for pid in instances.pids().values():
        os.kill(pid, signal.SIGKILL)
    for found in await asyncio.gather(*waiting):
        assert [int(image[0, 0, 0]) for image in found] == list(range(4))


async def test_registered_ops_reach_the_process(stage, make_graph, monkeypatch) -> None:
    catalog.register("Doubled", Doubled)
    s = await stage({"a": ("Doubled", TWO)})
    assert await s.results(1, 2) == [2, 4]

    class Local(ItemOp):
        pass

    catalog.register("Local", Local)
    graph = make_graph({"a": ("Local", TWO)})
    with pytest.raises(ConfigError, match=r"\[a\] processes: the op Local is a class in a function, which other"):
        check(graph)
    with pytest.raises(LoadFailed, match="cannot be sent to a worker process"):
        await stage(graph)
    monkeypatch.setitem(filters._registered, "here", lambda params: lambda fields: "run")
    with pytest.raises(ConfigError, match="processes: the filter here is registered in this program, which other"):
        check(make_graph({"a": (NodeStep("Identity", {}, "here"), TWO)}))


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"processes": 0}, "processes: found 0, expected a whole number from 1 to 1024"),
        ({"processes": -2}, "processes: found -2, expected a whole number from 1 to 1024"),
        ({"processes": 1025}, "processes: found 1025, expected a whole number from 1 to 1024"),
        ({"processes": 2, "instances": 3}, "processes: found 2 with instances = 3: each process is one instance"),
        ({"processes": 2, "device": "cuda"}, "processes: found 2 with device = cuda: processes run on the CPU"),
        ({"processes": 2, "device": "auto"}, "processes: found 2 with device = auto: processes run on the CPU"),
    ],
)
def test_a_wrong_number_of_processes_is_an_error(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_graph({"a": {"backend": "Identity", **keys}}, name="t", folder=".")
    assert str(caught.value).startswith(f"t: [a] {text}")


def test_processes_are_the_instances_of_a_node_and_no_default_of_all() -> None:
    graph = parse_graph({"a": {"backend": "Identity", "processes": 3}}, name="t", folder=".")
    assert (graph.nodes["a"].instances, graph.nodes["a"].processes) == (3, 3)
    graph = parse_graph({"instances": 8, "a": {"backend": "Identity", "processes": "3"}}, name="t", folder=".")
    assert (graph.nodes["a"].instances, graph.nodes["a"].processes) == (3, 3)
    with pytest.raises(ConfigError, match="processes: belongs to one node"):
        parse_graph({"processes": 2, "a": {"backend": "Identity"}}, name="t", folder=".")
