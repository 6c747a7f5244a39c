from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.core.contracts import Observer
from penstock.torchserve.admin.startup import load_startup
from penstock.torchserve.protocol.api import ApiError, RegisterRequest


class LabelObserver(Observer):
    """Records the version label of each components request."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def on_served(
        self, model: str, version: str, labels: Sequence[str], waits_s: Sequence[float], latencies_s: Sequence[float]
    ) -> None:
        self.labels += labels


async def test_requests_are_counted_by_the_requested_version(server: Any) -> None:
    components = server.open(disable_token_authorization=True)
    observer = LabelObserver()
    server.engine._observers = (observer,)
    server.archive("m")
    await components.administrator.register(RegisterRequest(url="m.mar", initial_workers=1))
    for version in (None, "1.0", None):
        assert await server.ask("m", version) == "1.0 hi"
    for model, version in (("nobody", None), ("m", "9")):
        with pytest.raises(ApiError):
            await server.ask(model, version)
    assert components.backend.take_requests() == {("m", "default"): 2, ("m", "1.0"): 1}
    assert observer.labels == ["default", "1.0", "default"]


async def test_a_request_without_a_model_goes_to_the_only_one_of_the_start(server: Any) -> None:
    server.archive("m")
    components = server.open(disable_token_authorization=True, load_models=["m.mar"], default_workers_per_model=1)
    with pytest.raises(ApiError, match=r"Parameter model_name is required\."):
        await server.ask("")
    await load_startup(components)
    server.archive("other")
    await components.administrator.register(RegisterRequest(url="other.mar", initial_workers=1))
    assert await server.ask("") == "1.0 hi"
    assert components.backend.model_ready("", None)
    assert components.backend.take_requests() == {("m", "default"): 1}
