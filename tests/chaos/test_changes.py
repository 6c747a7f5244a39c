"""Models loaded, swapped, scaled, shared out and unloaded at random under load: no error, no mixed answer."""

from __future__ import annotations

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
MOST_INSTANCES = 3
BATCHING = {"max_batch_size": 8, "max_queue": 1000}


class Changes:
    """The state of the model `m` as it ought to be, and one random change of it at a time."""

    def __init__(self, server: Any, seed: int) -> None:
        self.random = random.Random(seed)
        self.server = server
        self.instances = {"1": 1}
        self.default = "1"
        self.shares: dict[str, float] = {}
        self.done: list[str] = []

    async def __call__(self, manager: Any) -> None:
        kinds = [self.load, self.scale, self.make_default]
        if len(self.instances) > 1:
            kinds += [self.share, self.unload]
        method, path, body = self.random.choice(kinds)()
        self.done.append(f"{method} {path} {body}")
        manager.send(f"/models/m{path}", json.dumps(body).encode() if body else b"", method)
        answer = await manager.receive()
        assert answer.status == 200, (self.done[-5:], answer)
        versions = {v["version"]: v["instances"] for v in json.loads(answer.body)["versions"]}
        assert versions == self.instances, self.done[-5:]

    def load(self) -> tuple[str, str, Any]:
        """A new version, or another copy in place of one that is there."""
        version = self.random.choice("123")
        self.instances[version] = self.random.randint(1, 2)
        target = f"{self.random.choice(('a', 'b', 'c'))}.py:Model"
        keys = {"target": target, "instances": self.instances[version], "batching": BATCHING}
        return "PUT", f"/{version}", keys

    def scale(self) -> tuple[str, str, Any]:
        version = self.random.choice(list(self.instances))
        self.instances[version] = self.random.randint(1, MOST_INSTANCES)
        return "PUT", f"/{version}/scale", {"instances": self.instances[version]}

    def make_default(self) -> tuple[str, str, Any]:
        self.default, self.shares = self.random.choice(list(self.instances)), {}
        return "PUT", "/default", {"version": self.default}

    def share(self) -> tuple[str, str, Any]:
        self.shares = {v: float(self.random.randint(1, 9)) for v in self.instances}
        return "PUT", "/traffic", {v: s / sum(self.shares.values()) for v, s in self.shares.items()}

    def unload(self) -> tuple[str, str, Any]:
        version = self.random.choice(list(self.instances))
        del self.instances[version]
        return "DELETE", f"/{version}", None


async def test_random_changes_under_load_cost_no_request_and_mix_no_answer(
    guarded: Callable[..., Any], chaos: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    for tag, name in enumerate("abc"):
        lines = SOURCE.replace("\n    ", "\n").replace("TAG", str(tag))
        (tmp_path / "store" / f"{name}.py").write_text(lines)
    options = {"server.management": "true", "server.model_store": "store"}
    options |= {f"models.m.batching.{key}": str(value) for key, value in BATCHING.items()}
    server = guarded(None, "m=store/a.py:Model", *(w for k, v in options.items() for w in ("--set", f"{k}={v}")))
    rows = 20  # more than a batch: such a request runs in parts
    body = json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [rows, 1], "data": list(range(rows))}]}
    ).encode()
    answers: Counter[str] = Counter()
    tags: set[float] = set()
    going = True

    async def ask_on() -> None:
        async with chaos.Client(server) as client:
            while going:
                answer = await client.ask("/v2/models/m/infer", body)
                if answer.status != 200:
                    answers[f"{answer.status} {answer.body[:300]!r}"] += 1
                    continue
                data = json.loads(answer.body)["outputs"][0]["data"]
                whole = len(data) == rows and len(set(data)) == 1
                tags.update(data)
                answers["whole" if whole else f"mixed: {data}"] += 1

    descriptors = 0
    change = Changes(server, seed=chaos.count(1, 2))
    clients = [asyncio.create_task(ask_on()) for _ in range(8)]
    async with chaos.Client(server, "management") as manager:
        for i in range(chaos.count(20, 200)):
            await change(manager)
            seen = answers.total()
            await chaos.until(lambda seen=seen: answers.total() >= seen + 8 or any(c.done() for c in clients))
            if i == 3:
                descriptors = chaos.descriptors(server)
    going = False
    await asyncio.gather(*clients)
    assert set(answers) == {"whole"}, answers
    assert tags == {0, 1, 2}  # or nothing could have been mixed
    await chaos.until(lambda: len(chaos.workers(server)) == sum(change.instances.values()))
    # two for each worker, its socket and its pidfd, of at most three versions; the clients have gone meanwhile
    assert chaos.descriptors(server) <= descriptors + 2 * 3 * MOST_INSTANCES
