"""TorchServe's workflows on a running server: tokens, large bodies, killed workers, a stop and a restart."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.archives import write_mar, write_war

FUNCTIONS = """
import time

def begin(data, context):
    if data is not None:
        body = bytes(data[0]["body"])
        time.sleep(0.5 if body.startswith(b"slow") else 0.01)
        return [body]

def size(data, context):
    if data is not None:
        return [{"size": len(data[0]["body"])}]

def first(data, context):
    if data is not None:
        return [{"first": bytes(data[0]["body"])[:8].decode()}]

def merge(data, context):
    if data is not None:
        return [b'{"size": %s, "first": %s}' % (bytes(data[0]["size"]), bytes(data[0]["first"]))]
"""
SPEC = """
models:
  retry-attempts: 4
  copy: {url: copy.mar, batch-size: 8, max-batch-delay: 1}
dag:
  begin: [copy]
  copy: [size, first]
  size: [merge]
  first: [merge]
"""
COPY = """
def handle(data, context):
    if data is not None:
        return [bytes(row["body"]) for row in data]
"""


class Api:
    """A client with the server's keys."""

    def __init__(self, torchserve: Any) -> None:
        self._torchserve = torchserve

    def manage(self, method: str, path: str) -> tuple[int, Any]:
        key = self._torchserve.keys()["management"]
        url = self._torchserve.url("Management") + path
        status, body = self._torchserve.fetch(url, method=method, Authorization=f"Bearer {key}")
        return status, json.loads(body)

    def predict(self, body: bytes) -> tuple[int, Any]:
        key = self._torchserve.keys()["inference"]
        url = self._torchserve.url() + "/wfpredict/w"
        status, found = self._torchserve.fetch(
            url, body, Authorization=f"Bearer {key}", Content_Type="application/octet-stream"
        )
        return status, json.loads(found)


def expected(body: bytes) -> tuple[int, Any]:
    return 200, {"size": {"size": len(body)}, "first": {"first": body[:8].decode()}}


def test_a_workflow_survives_killed_workers_and_a_restart(torchserve: Any) -> None:
    store = torchserve.folder / "store"
    write_mar(store, "copy", COPY)
    write_war(torchserve.folder / "wars", "w", SPEC, FUNCTIONS)
    torchserve.configure(workflow_store="wars", enable_model_api="true", system_metrics_cmd="true")
    torchserve.start()
    api = Api(torchserve)
    text = "Workflow w has been registered and scaled successfully."
    assert api.manage("POST", "/workflows?url=w.war") == (200, {"status": text})
    large = b"large   " + bytes(1_000_000)
    assert api.predict(large) == expected(large)

    bodies = [f"{i:08}".encode() * (i % 3 * 20_000 + 1) for i in range(60)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(api.predict, body) for body in bodies]
        for name in ("begin", "copy", "merge"):
            (found,) = api.manage("GET", f"/models/w__{name}")[1]
            for worker in found["workers"]:
                os.kill(worker["pid"], signal.SIGKILL)
        assert not all(each.done() for each in asked)
        answers = [each.result() for each in asked]
    failed = [answer for answer in answers if answer[0] != 200]
    assert [answer for answer in answers if answer[0] == 200] == [
        expected(body) for body, answer in zip(bodies, answers, strict=True) if answer[0] == 200
    ]
    assert all((status, body["type"]) == (500, "InternalServerException") for status, body in failed), failed

    with ThreadPoolExecutor(2) as pool:
        slow = b"slow    " + bytes(100_000)
        last = pool.submit(api.predict, slow)
        time.sleep(0.1)
        assert torchserve.run("torchserve", "--stop")[0] == 0
        assert last.result() == expected(slow)  # its later nodes run after the signal
    torchserve.start("--ts-config", str(max((torchserve.folder / "logs" / "config").iterdir())))
    assert api.predict(large) == expected(large)
    assert api.manage("DELETE", "/workflows/w") == (200, {"status": 'Workflow "w" unregistered'})
    assert api.manage("GET", "/models") == (200, {"models": []})
