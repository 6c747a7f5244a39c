"""The routes of the Open Inference Protocol over REST."""

from __future__ import annotations

import pytest

from penstock import __version__

INFERENCE = frozenset({"inference"})
ROUTES = (
    ("/v2", 200, {"name": "Torchserve", "version": __version__, "extenstion": ["kserve", "kubeflow"]}),
    ("/v2/health/live", 200, {"live": True}),
    ("/v2/health/ready", 200, {"ready": True}),
    ("/v2/models/m/versions/1", 501, {"error": "Model versioning is not yet supported."}),
    ("/v2/models/m/versions/1/infer", 501, {"error": "Model versioning is not yet supported."}),
)


@pytest.mark.parametrize(("target", "status", "value"), ROUTES)
async def test_the_protocol_answers_as_on_the_wire(site, target, status, value):
    async with site(INFERENCE) as ask:
        for method in ("GET", "POST"):
            reply = await ask(method, target)
            assert (reply.status, reply.json()) == (status, value)


@pytest.mark.parametrize("target", [target for target, _, _ in ROUTES])
async def test_without_the_switch_nothing_is_there(site, target):
    async with site(INFERENCE, open_inference=False) as ask:
        assert (await ask("GET", target)).status == 404
    async with site(frozenset({"management"})) as ask:
        assert (await ask("GET", target)).status == 404
