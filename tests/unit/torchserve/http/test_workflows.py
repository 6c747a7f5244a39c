"""The routes of TorchServe's workflow management API: the calls to the workflows and the responses."""

import json

import pytest

from penstock.torchserve.protocol.api import WorkflowRequest

MANAGEMENT = frozenset({"management"})
JSON = "Content-Type: application/json"


@pytest.mark.parametrize(
    ("target", "lines", "body"),
    [
        ("/workflows?url=w.war&workflow_name=x&response_timeout=5", (), b""),
        (
            "/workflows",
            (JSON,),
            json.dumps({"url": "w.war", "workflow_name": "x", "response_timeout": 5}).encode(),
        ),
    ],
)
async def test_a_workflow_is_registered_by_query_or_body(site, administration, target, lines, body):
    async with site(MANAGEMENT) as ask:
        reply = await ask("POST", target, *lines, body=body)
    assert (reply.status, reply.json()) == (200, {"status": "done"})
    assert administration.asked == [("register", WorkflowRequest(url="w.war", workflow_name="x", response_timeout=5))]


async def test_workflows_are_listed_described_and_unregistered(site, administration):
    async with site(MANAGEMENT) as ask:
        assert (await ask("GET", "/workflows?limit=3")).json() == {
            "workflows": [{"workflowName": "w", "workflowUrl": "w.war"}]
        }
        assert (await ask("GET", "/workflows/w")).json() == [{"workflowName": "w"}]
        assert (await ask("DELETE", "/workflows/w")).json() == {"status": "done"}
        missing = await ask("GET", "/workflows/x")
    assert administration.asked == [("unregister", "w")]
    assert missing.json() == {"code": 404, "type": "WorkflowNotFoundException", "message": "Workflow not found: x"}


@pytest.mark.parametrize(("method", "target"), [("POST", "/workflows?url=w.war"), ("DELETE", "/workflows/w")])
async def test_changes_need_the_model_api_and_the_management_key(site, administration, method, target):
    async with site(MANAGEMENT, enable_model_api=False) as ask:
        assert (await ask(method, target)).status == 405
    administration.keys = {"management": b"secret", "inference": b"other", "token": b"third"}
    async with site(MANAGEMENT) as ask:
        assert (await ask(method, target, "Authorization: Bearer other")).status == 400
        assert administration.asked == []
        assert (await ask(method, target, "Authorization: Bearer secret")).status == 200


async def test_a_prediction_goes_to_the_workflow_with_the_inference_key(site, administration):
    administration.keys = {"management": b"secret", "inference": b"other", "token": b"third"}
    async with site() as ask:
        ask.backend.models["/w"] = lambda call: call.reply(b"{}", "application/json")
        for target in ("/wfpredict/w", "/wfpredict/w/1.0"):
            assert (await ask("POST", target, body=b"x" * 100_000)).status == 400
            reply = await ask("POST", target, "Authorization: Bearer other", body=b"x" * 100_000)
            assert (reply.status, reply.body) == (200, b"{}")
            assert (await ask("POST", "/predictions/%2Fw", "Authorization: Bearer other")).status == 404
            assert (await ask("OPTIONS", target, "Authorization: Bearer other")).status == 405
    assert [name for call in ask.backend.calls for name, _ in call.item.headers if name == b"explain"] == []
