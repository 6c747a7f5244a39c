"""Models loaded, swapped, scaled, shared out and unloaded at random under load: no error, no mixed or wrong answer."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = """
    import time
    import numpy as np
    import penstock

    class Model:
        inputs = [penstock.TensorSpec("x", "FP32", (-1, 1))]
        outputs = [penstock.TensorSpec("y", "FP32", (-1,))]

        def predict(self, items):
            time.sleep(0.002)
            return [{"y": np.full(len(item["x"]), TAG, np.float32)} for item in items]
"""
BROKEN = """
class Model:
    def load(self, device):
        raise RuntimeError("never")

    def predict(self, items):
        return items
"""
MOST_INSTANCES = 3
ROWS = 20  # more than a batch: such a request runs in parts
BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [ROWS, 1], "data": list(range(ROWS))}]}
).encode()
BATCHING = {"max_batch_size": 8, "max_queue": 1000}


class Changes:
    """The state of the model `m` as it ought to be, and one random change of it at a time.

    `copies` has every target that a version ever had, `settled` the place of the one that has it for sure, and
    `unloads` how often it was taken away: what an answer of a version may be, is told by these three.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.instances = {"1": 1}
        self.chosen = ""  # the default, if it was set
        self.shares: dict[str, float] = {}
        self.copies = {"1": ["a"], "2": [], "3": []}
        self.settled = dict.fromkeys("123", 0)
        self.unloads = dict.fromkeys("123", 0)
        self.present = {"1"}
        self.done: list[str] = []

    async def __call__(self, manager: Any) -> None:
        """One change, and a look at what the server says afterwards."""
        kinds = [self.load, self.load_broken, self.scale, self.make_default]
        if len(self.instances) > 1:
            kinds += [self.share, self.unload, self.unload_default]
        status, method, path, body = self.random.choice(kinds)()
        self.done.append(f"{method} {path} {body}")
        manager.send(f"/models/m{path}", json.dumps(body).encode() if body else b"", method)
        answer = await manager.receive()
        assert answer.status == status, (self.done[-5:], answer)
        self.present = set(self.instances)
        self.settled = {v: max(0, len(copies) - 1) for v, copies in self.copies.items()}
        manager.send("/models/m", method="GET")
        versions = json.loads((await manager.receive()).body)["versions"]
        whole = {v["version"]: (v["instances"], v["default"], round(v["traffic"], 6)) for v in versions}
        assert whole == {v: (n, v == self.default, round(self.traffic(v), 6)) for v, n in self.instances.items()}, (
            self.done[-5:]
        )

    @property
    def default(self) -> str:
        """The version of requests that name none: the newest, unless it was set."""
        return self.chosen or max(self.instances)

    def traffic(self, version: str) -> float:
        if not self.shares:
            return float(version == self.default)
        return self.shares.get(version, 0.0) / sum(self.shares.values())

    def load(self) -> tuple[int, str, str, Any]:
        """A new version, or another copy in place of one that is there."""
        version, copy = self.random.choice("123"), self.random.choice("abc")
        self.instances.pop(version, None)
        self.instances[version] = self.random.randint(1, 2)
        self.copies[version].append(copy)
        keys = {"target": f"{copy}.py:Model", "instances": self.instances[version], "batching": BATCHING}
        return 200, "PUT", f"/{version}", keys

    def load_broken(self) -> tuple[int, str, str, Any]:
        """What does not load changes nothing, whether the version is there or not."""
        return 500, "PUT", f"/{self.random.choice('123')}", {"target": "broken.py:Model", "instances": 2}

    def scale(self) -> tuple[int, str, str, Any]:
        version = self.random.choice(list(self.instances))
        self.instances[version] = self.random.randint(1, MOST_INSTANCES)
        return 200, "PUT", f"/{version}/scale", {"instances": self.instances[version]}

    def make_default(self) -> tuple[int, str, str, Any]:
        self.chosen, self.shares = self.random.choice(list(self.instances)), {}
        return 200, "PUT", "/default", {"version": self.default}

    def share(self) -> tuple[int, str, str, Any]:
        self.shares = {v: float(self.random.randint(1, 9)) for v in self.instances}
        return 200, "PUT", "/traffic", {v: self.traffic(v) for v in self.shares}

    def unload(self, version: str = "") -> tuple[int, str, str, Any]:
        version = version or self.random.choice(list(self.instances))
        del self.instances[version]
        self.shares.pop(version, None)
        self.present.discard(version)
        self.unloads[version] += 1
        if version == self.chosen:
            self.chosen = ""
        return 200, "DELETE", f"/{version}", None

    def unload_default(self) -> tuple[int, str, str, Any]:
        return self.unload(self.default)


class Callers:
    """Clients that ask for any version, or for one, as long as `going`; and a count of what they were answered."""

    def __init__(self, server: Any, change: Changes, client: Any) -> None:
        self.server, self.change, self.client = server, change, client
        self.answers: Counter[str] = Counter()
        self.named = 0
        self.tags: set[str] = set()
        self.going = True

    async def ask_on(self) -> None:
        async with self.client(self.server) as client:
            while self.going:
                if random.random() < 0.3:
                    await self.ask_for(client, random.choice(sorted(self.change.present)))
                else:
                    answer = await client.ask("/v2/models/m/infer", BODY)
                    self.note(answer, set("abc"))

    async def ask_for(self, client: Any, version: str) -> None:
        """One request that names a version that is loaded: it may only be gone if it was unloaded meanwhile."""
        change = self.change
        since, unloads = change.settled[version], change.unloads[version]
        answer = await client.ask(f"/v2/models/m/versions/{version}/infer", BODY)
        if answer.status == 404 and change.unloads[version] > unloads:
            return
        self.named += 1
        self.note(answer, set(change.copies[version][since:]), version)

    def note(self, answer: Any, copies: set[str], version: str = "") -> None:
        if answer.status != 200:
            self.answers[f"{answer.status} {answer.body[:300]!r}"] += 1
            return
        found = json.loads(answer.body)
        data = found["outputs"][0]["data"]
        tags = {"abc"[int(tag)] for tag in data}
        self.tags |= tags
        if len(data) != ROWS or len(tags) != 1:
            self.answers[f"mixed: {data}"] += 1
        elif not tags <= copies or (version and found["model_version"] != version):
            self.answers[f"of another version: {tags}, expected {copies} of '{version}'"] += 1
        else:
            self.answers["right"] += 1


async def test_random_changes_under_load_cost_no_request_and_mix_no_answer(
    guarded: Callable[..., Any], chaos: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    for tag, name in enumerate("abc"):
        lines = SOURCE.replace("\n    ", "\n").replace("TAG", str(tag))
        (tmp_path / "store" / f"{name}.py").write_text(lines)
    (tmp_path / "store" / "broken.py").write_text(BROKEN)
    options = {"server.management": "true", "server.model_store": "store"}
    options |= {f"models.m.batching.{key}": str(value) for key, value in BATCHING.items()}
    server = guarded(None, "m=store/a.py:Model", *(w for k, v in options.items() for w in ("--set", f"{k}={v}")))
    assert server.post("/v2/models/m/infer", BODY)[0] == 200
    await asyncio.sleep(0.1)  # until its connection is closed there too
    descriptors = chaos.descriptors(server)  # with one worker

    # both seeds make every kind of change, also of a default that two others can follow
    change = Changes(seed=chaos.count(233, 2))
    callers = Callers(server, change, chaos.Client)
    clients = [asyncio.create_task(callers.ask_on()) for _ in range(8)]
    async with chaos.Client(server, "management") as manager:
        for _ in range(chaos.count(25, 200)):
            await change(manager)
            enough = callers.answers.total() + 8
            await chaos.until(lambda n=enough: callers.answers.total() >= n or any(c.done() for c in clients))
    callers.going = False
    await asyncio.gather(*clients)
    assert set(callers.answers) == {"right"}, callers.answers
    assert callers.tags == set("abc")  # or nothing could have been mixed
    assert callers.named > 20
    now = sum(change.instances.values())
    await chaos.until(lambda: len(chaos.workers(server)) == now)
    # a worker has a socket, a pidfd, the memory of its answers and the pipe of its log; a version has a timer
    descriptors += 4 * (now - 1) + len(change.instances) - 1
    await chaos.until(lambda: chaos.descriptors(server) <= descriptors, 10)
