import asyncio
import json
import zipfile
from typing import Any

import pytest

from penstock.torchserve.admin.files import last_snapshot
from penstock.torchserve.admin.startup import load_startup
from penstock.torchserve.archive.store import ModelStore
from penstock.torchserve.config import load_properties
from penstock.torchserve.protocol.api import ApiError, RegisterRequest, WorkflowRequest
from support.archives import write_war

ServerSetup = Any  # see conftest.py

FUNCTIONS = """
import time

def begin(data, context):
    if data is not None:
        order = bytes(data[0]["body"])
        if order == b"raise":
            raise ValueError("secret")
        if order == b"wait":
            time.sleep(0.5)
        return [b"<" + order + b">"]

def end(data, context):
    if data is not None:
        return [bytes(data[0]["body"]) + b"!"]
"""
CHAIN = "models:\n  max-workers: 2\n  m: {url: m.mar}\ndag:\n  begin: [m]\n  m: [end]\n"
MODEL = """
def handle(data, context):
    if data is not None:
        return [b"m" + bytes(row["body"]) for row in data]
"""


async def opened(server: ServerSetup, **properties: Any) -> Any:
    """The workflows of a new server whose store has the model m and the workflow w."""
    server.archive("m", code=MODEL)
    write_war(server.store, "w", CHAIN, FUNCTIONS)
    return server.open(**properties).administrator.workflows


async def refusal(change: Any) -> tuple[int, str, str]:
    with pytest.raises(ApiError) as found:
        await change
    return found.value.status, found.value.kind, found.value.message


async def test_a_workflow_is_registered_asked_described_and_removed(server: ServerSetup) -> None:
    workflows = await opened(server)
    done = await workflows.register(WorkflowRequest(url="w.war"))
    assert (done.status, done.message) == (200, "Workflow w has been registered and scaled successfully.")
    assert await server.ask("/w") == "m<hi>!"
    administrator = server.components.administrator
    assert administrator.models() == [("w__m", "m.mar")]
    (m,), (begin,) = [await administrator.describe(name, None) for name in ("w__m", "w__begin")]
    assert (m["modelUrl"], m["minWorkers"], m["maxWorkers"], len(m["workers"])) == ("m.mar", 2, 2, 2)
    assert (begin["modelUrl"], begin["batchSize"], begin["maxBatchDelay"]) == (None, 1, 0)
    assert workflows.describe("w")["workflowDag"] == "{begin=[m], m=[end]}"
    assert workflows.listed() == [("w", "w.war")]
    assert server.components.backend.model_ready("/w", None)
    assert await refusal(workflows.register(WorkflowRequest(url="w.war"))) == (
        409,
        "ConflictStatusException",
        "Workflow w is already registered.",
    )
    assert (await workflows.unregister("w")).message == 'Workflow "w" unregistered'
    assert administrator.models() == []
    assert not list((server.folder / "cache").glob("[0-9a-f]*"))
    assert await refusal(workflows.unregister("w")) == (404, "WorkflowNotFoundException", "Workflow not found: w")
    with pytest.raises(ApiError, match="Workflow not found: w"):
        await server.ask("/w")


async def test_one_bad_request_fails_alone(server: ServerSetup) -> None:
    workflows = await opened(server)
    await workflows.register(WorkflowRequest(url="w.war"))
    good, bad = await asyncio.gather(server.result("/w"), server.result("/w", body=b"raise"))
    assert (good.body, bad.error.status, bad.error.message) == (b"m<hi>!", 500, "Error executing begin")


async def test_a_failed_node_removes_the_others_and_frees_the_name(server: ServerSetup) -> None:
    workflows = await opened(server)
    spec = "models: {m: {url: m.mar}, n: {url: none.mar}}\ndag: {m: [n, nothing]}\n"
    write_war(server.store, "x", spec, FUNCTIONS)
    status, kind, message = await refusal(workflows.register(WorkflowRequest(url="x.war")))
    assert (status, kind) == (500, "WorkflowException")
    assert message.startswith("Workflow x has failed to register. Failures: [")
    assert "Workflow Node x__n failed to register. Details: Model not found at: none.mar" in message
    assert "Failed to start workers for model x__nothing version: 1.0" in message
    assert list(server.components.administrator.models()) == []
    write_war(server.store, "x", CHAIN, FUNCTIONS)
    assert (await workflows.register(WorkflowRequest(url="x.war"))).status == 200


async def test_a_node_never_replaces_a_registered_model(server: ServerSetup) -> None:
    workflows = await opened(server)
    administrator = server.components.administrator
    await administrator.register(RegisterRequest(url="m.mar", model_name="w__m", initial_workers=1))
    message = (await refusal(workflows.register(WorkflowRequest(url="w.war"))))[2]
    assert "Model version 1.0 is already registered for model w__m" in message
    assert await server.ask("w__m") == "mhi"


BAD = [
    (WorkflowRequest(), 400, "Parameter url is required."),
    (WorkflowRequest(url="none.war"), 404, "Workflow not found in workflow store: none.war"),
    (WorkflowRequest(url="../w.war"), 404, "Relative path is not allowed in url: ../w.war"),
    (WorkflowRequest(url="m.mar"), 400, "Missing Workflow entry in manifest file."),
    (WorkflowRequest(url="w.war", workflow_name="a/b"), 400, "the model's name is 'a/b'"),
    (WorkflowRequest(url="cycle.war"), 400, "Not a valid DAG: a -> b -> a"),
    (WorkflowRequest(url="empty.war"), 400, 'empty.war: WAR-INF/MANIFEST.json has no object "model", or "workflow"'),
    (WorkflowRequest(url="outside.war"), 400, "no path may climb with '..'"),
]


async def test_a_bad_archive_is_refused_and_leaves_nothing(server: ServerSetup) -> None:
    workflows = await opened(server)
    write_war(server.store, "cycle", "dag: {begin: [a], a: [b], b: [a]}\n", FUNCTIONS)
    for name, member in (("empty", "WAR-INF/MANIFEST.json"), ("outside", "../x")):
        with zipfile.ZipFile(server.store / f"{name}.war", "w") as war:
            war.writestr(member, "{}")
    for request, status, words in BAD:
        found = await refusal(workflows.register(request))
        assert found[0] == status, found
        assert words in found[2]
    assert workflows.listed() == []
    assert not list((server.folder / "cache").glob("[0-9a-f]*"))


async def test_a_workflow_is_no_model(server: ServerSetup) -> None:
    await opened(server)
    found = await refusal(server.components.administrator.register(RegisterRequest(url="w.war")))
    assert found == (400, "InvalidModelException", "w.war is a workflow: register it with POST /workflows")


async def test_the_workflow_store_may_be_a_folder_of_its_own(server: ServerSetup) -> None:
    server.archive("m", code=MODEL)
    write_war(server.folder / "wars", "w", CHAIN, FUNCTIONS)
    workflows = server.open(workflow_store=str(server.folder / "wars")).administrator.workflows
    await workflows.register(WorkflowRequest(url="w.war"))
    assert await server.ask("/w") == "m<hi>!"


async def test_unregistering_answers_the_requests_in_flight(server: ServerSetup) -> None:
    workflows = await opened(server)
    await workflows.register(WorkflowRequest(url="w.war"))
    asked = asyncio.create_task(server.ask("/w", body=b"wait"))
    await asyncio.sleep(0)
    await workflows.unregister("w")
    assert await asked == "m<wait>!"


async def test_a_snapshot_restores_workflows_with_their_scaled_nodes(server: ServerSetup) -> None:
    workflows = await opened(server, enable_model_api=True)
    await workflows.register(WorkflowRequest(url="w.war", workflow_name="other"))
    administrator = server.components.administrator
    await load_startup(server.components)
    await administrator.scale("other__m", None, min_worker=1, max_worker=3, synchronous=True)
    file = last_snapshot(server.folder / "logs")
    await server.close()
    properties = load_properties(str(file), env={}, flags={})
    snapshot = properties.model_snapshot
    assert snapshot is not None
    assert (snapshot["models"], snapshot["modelCount"]) == ({}, 0)
    expected = {"begin": [1, 1], "m": [1, 3], "end": [1, 1]}
    assert snapshot["workflows"] == {"other": {"url": "w.war", "workers": expected}}
    administrator = server.open(model_snapshot=json.loads(json.dumps(snapshot))).administrator
    loading = asyncio.create_task(load_startup(server.components))
    await server.until(lambda: bool(administrator.models()))
    assert not administrator.healthy()
    assert await loading == 0
    assert administrator.healthy()
    assert await server.ask("/other") == "m<hi>!"
    (m,) = await server.components.administrator.describe("other__m", None)
    assert (m["minWorkers"], m["maxWorkers"], len(m["workers"]), m["loadedAtStartup"]) == (1, 3, 1, True)


@pytest.mark.parametrize("states", [{"w": 3}, {"w": {}}, {"w": {"url": "none.war"}}, {"w": {"url": 4, "workers": []}}])
async def test_a_snapshot_with_a_wrong_workflow_serves_the_rest(server: ServerSetup, states: Any) -> None:
    server.archive("m", code=MODEL)
    models = {"m": {"1.0": {"marName": "m.mar", "minWorkers": 1}}}
    server.open(model_snapshot={"models": models, "workflows": states})
    assert await load_startup(server.components) == 1
    assert await server.ask("m") == "mhi"


async def test_a_snapshot_restores_downloaded_archives_from_the_store(
    server: ServerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.archive("m", code=MODEL)
    write_war(server.store, "w", CHAIN.replace("m.mar", "https://models.example.com/m.mar"), FUNCTIONS)
    with monkeypatch.context() as patch:  # as if the downloads had just been made
        patch.setattr(ModelStore, "locate", lambda store, url, **_: store.root / url.rpartition("/")[2])
        workflows = server.open(snapshots=True).administrator.workflows
        await workflows.register(WorkflowRequest(url="https://models.example.com/w.war"))
    states = workflows.states()
    await server.close()
    server.open(model_snapshot={"workflows": states})
    assert await load_startup(server.components) == 0
    assert await server.ask("/w") == "m<hi>!"


async def test_a_restored_node_whose_workers_fail_stays_registered(server: ServerSetup) -> None:
    server.archive("m", code="raise OSError")
    write_war(server.store, "w", CHAIN, FUNCTIONS)
    workers = {name: [1, 1] for name in ("begin", "m", "end")}
    components = server.open(model_snapshot={"workflows": {"w": {"url": "w.war", "workers": workers}}})
    assert await load_startup(server.components) == 0
    assert components.administrator.workflows.listed() == [("w", "w.war")]
    assert not server.components.backend.model_ready("/w", None)
    assert not server.components.administrator.healthy()
