"""The same workflows and requests on TorchServe 0.12.0 and on Penstock have the same answers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.archives import write_mar, write_war

pytestmark = pytest.mark.peer

FUNCTIONS = """
import json, os, time

def begin(data, context):
    if data is None:
        return None
    order = bytes(next(iter(data[0].values())))
    if order == b"raise":
        raise ValueError("secret")
    if order == b"slow":
        time.sleep(2)
    if order == b"status":
        context.set_response_status(404, "nothing", 0)
    return [b"<" + order + b">"]

def a(data, context):
    if data is None:
        return None
    return [{"a": sorted(data[0]), "body": bytes(data[0]["body"]).decode()}]

def b(data, context):
    if data is None:
        return None
    return [{"b": bytes(data[0]["body"]).decode(), "header": context.get_request_header(0, "X-Test")}]

def join(data, context):
    if data is None:
        return None
    return [{"join": {k: str(type(v).__name__) + bytes(v).decode() for k, v in sorted(data[0].items())}}]

def number(data, context):
    if data is None:
        return None
    return [3]

def text(data, context):
    if data is None:
        return None
    return ["no json"]
"""
MODEL = """
def handle(data, context):
    if data is not None:
        return [b"m" + bytes(row["body"]) + b"%d" % len(data) for row in data]
"""
SPECS = {
    "chain": "models:\n  min-workers: 1\n  max-workers: 2\n  batch-size: 3\n  max-batch-delay: 10\n"
    "  m:\n    url: m.mar\n"
    "dag:\n  begin: [m]\n  m: [b]\n",
    "diamond": "models: {timeout-ms: 500, retry-attempts: 0}\ndag:\n  begin: [a, b]\n  a: [join]\n  b: [join]\n",
    "leaves": "models: {}\ndag:\n  begin: [a, b]\n",
    "numbers": "models: {}\ndag:\n  begin: [a, number]\n",
    "texts": "models: {}\ndag:\n  begin: [a, text]\n",
    "alone": "models: {}\ndag:\n  begin: []\n",
    "empty": "models: {}\ndag: {}\n",
    "nodag": "models: {}\n",
    "cycle": "models: {}\ndag:\n  begin: [a]\n  a: [b]\n  b: [a]\n",
    "self": "models: {}\ndag:\n  begin: [a]\n  a: [a]\n",
    "starts": "models: {}\ndag:\n  begin: [b]\n  a: [b]\n",
    "unknown": "models: {}\ndag:\n  begin: [nothing]\n",
    "nomar": "models:\n  m:\n    url: none.mar\ndag:\n  begin: [m]\n",
    "words": "models: {batch-size: many}\ndag:\n  begin: [a]\n",
    "broken": "models: {]\n",
}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_mar(tmp_path / "store", "m", MODEL)
    for name, spec in SPECS.items():
        write_war(tmp_path / "store", name, spec, FUNCTIONS)
    return tmp_path / "store"


def outcomes(server: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (*SPECS, "none", "../x"):
        found[f"register {name}"] = server.manage("POST", f"/workflows?url={name}.war")
    found["no url"] = server.manage("POST", "/workflows")
    found["again"] = server.manage("POST", "/workflows?url=chain.war")
    found["renamed"] = server.manage("POST", "/workflows?url=alone.war&workflow_name=other")
    found["models"] = server.manage("GET", "/models")
    for query in ("", "?limit=2", "?limit=2&next_page_token=2", "?limit=x"):
        found[f"list {query}"] = server.manage("GET", f"/workflows{query}")
    for name in ("chain", "diamond", "leaves", "none"):
        found[f"describe {name}"] = server.manage("GET", f"/workflows/{name}")
    found["put"] = server.manage("PUT", "/workflows/chain")
    found["put all"] = server.manage("PUT", "/workflows")
    for name in ("chain", "diamond", "leaves", "numbers", "texts", "alone", "unknown", "other", "none"):
        for order in (b"x", b"raise", b"slow", b"status"):
            if order == b"slow" and name != "diamond":
                continue
            found[f"predict {name} {order!r}"] = server.post(f"/wfpredict/{name}", order)
    found["long path"] = server.post("/wfpredict/alone/1.0", b"x")
    found["no name"] = server.post("/wfpredict", b"x")
    described = server.manage("GET", "/models/chain__m")[1]
    keys = ("modelName", "modelVersion", "modelUrl", "minWorkers", "maxWorkers", "batchSize", "maxBatchDelay")
    found["node"] = {key: described[0].get(key) for key in keys}, len(described[0]["workers"])
    described = server.manage("GET", "/models/chain__begin")[1]
    found["function"] = {key: described[0].get(key) for key in keys}, len(described[0]["workers"])
    found["direct"] = server.post("/predictions/chain__m", b"x")
    found["scaled"] = server.manage("PUT", "/models/chain__m?min_worker=1&max_worker=1&synchronous=true")
    found["no workers"] = server.manage("PUT", "/models/chain__m?min_worker=0&synchronous=true")
    found["predict no workers"] = server.post("/wfpredict/chain", b"x")
    found["unregister"] = server.manage("DELETE", "/workflows/chain")
    found["unregister again"] = server.manage("DELETE", "/workflows/chain")
    found["node gone"] = server.manage("GET", "/models/chain__m")
    found["registered again"] = server.manage("POST", "/workflows?url=chain.war")
    return found


SETTINGS = "enable_model_api=true\n"
TEXTS = ("register empty", "register cycle", "register self", "register starts")  # Penstock adds what it found
BETTER = {  # what TorchServe answers, and the status of Penstock
    "register nodag": (500, "NullPointerException", 400),
    "register words": (500, "ClassCastException", 400),
    "register broken": (500, "InvalidWorkflowException", 400),
    "predict numbers b'x'": (500, "InternalServerException", 200),
    "predict numbers b'status'": (500, "InternalServerException", 200),
}
SIMILAR = ("predict texts", "predict no workers")  # the same status and type


def test_the_answers_are_the_same(peer_server: Any, store: Path):
    theirs, ours = (outcomes(peer_server(owner, store, ["m=m.mar"], SETTINGS)) for owner in ("torchserve", "penstock"))
    for name, expected in theirs.items():
        found = ours[name]
        if name.startswith("predict") and expected[1].startswith(b"{"):
            expected, found = ((status, json.loads(body)) for status, body in (expected, found))
        if name in TEXTS:
            assert found[1]["message"].startswith(expected[1]["message"]), name
            found[1]["message"] = expected[1]["message"]
        if name in BETTER:
            assert (expected[0], expected[1]["type"], found[0]) == BETTER[name]
        elif name.startswith(SIMILAR) and expected[0] == 500:
            assert (found[0], found[1]["type"]) == (expected[0], expected[1]["type"]), name
        else:
            assert found == expected, name


def test_each_server_takes_the_archive_of_our_archiver(peer_server: Any, store: Path):
    work = store.parent
    (work / "spec.yaml").write_text(SPECS["chain"])
    (work / "functions.py").write_text(FUNCTIONS)
    archiver = "from penstock.torchserve.cli.archive import archive_workflow as run; run()"
    command = [sys.executable, "-c", archiver, "--workflow-name", "w"]
    command += ["--spec-file", "spec.yaml", "--handler", "functions.py", "--export-path", "store"]
    subprocess.run(command, cwd=work, check=True)
    for owner in ("torchserve", "penstock"):
        server = peer_server(owner, store, ["m=m.mar"], SETTINGS)
        assert server.manage("POST", "/workflows?url=w.war")[0] == 200
        assert json.loads(server.post("/wfpredict/w", b"x")[1])["b"] == "m<x>1"
