from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.core.contracts import ModelSnapshot, ServerSnapshot
from penstock.errors import ModelNotFound, QueueFull
from penstock.serving.http.dashboard import MODELS, VIEWERS, Dashboard
from penstock.serving.observe.history import History, Totals
from penstock.serving.protocols.route import Route, Template
from penstock.types import ItemResult, ModelStatus

ALL = Route(Template("/", ""))


def model(name: str, instances: int = 1) -> ModelSnapshot:
    return ModelSnapshot(ModelStatus(name, "1", "READY", instances, instances, 8, ("cpu",)))


class Server:
    """A dashboard over models that a test changes."""

    def __init__(self, *names: str) -> None:
        self.models = [model(name) for name in names]
        self.totals: dict[tuple[str, str], Totals] = {}
        self.dashboard = Dashboard(History(), lambda: ServerSnapshot(self.models), lambda: self.totals)

    def view(self, route: Route = ALL) -> list[Any]:
        """What a new viewer receives from now on."""
        views: list[Any] = []

        def sink(result: ItemResult) -> None:
            text = bytes(result.body).decode()
            if text:
                views.append(json.loads(text.removeprefix("data: ")))

        self.dashboard.subscribe(route, sink)
        return views


def test_ten_thousand_models_are_shown_in_part_and_the_busiest_among_them() -> None:
    server = Server(*(f"m{i}" for i in range(10_000)))
    server.totals = {("m9999", "1"): Totals(5, 5)}
    server.dashboard.tick()
    (view,) = server.view()
    assert (len(view["models"]), view["model_count"]) == (MODELS, 10_000)
    assert "m9999" in {shown["name"] for shown in view["models"]}


def test_a_viewer_of_one_model_receives_that_one_in_detail_until_it_is_unloaded() -> None:
    server = Server("a", "b")
    views, others = server.view(Route(Template("/", ""), "b", "1")), server.view()
    server.dashboard.tick()
    server.models = [model("a")]
    server.dashboard.tick()
    assert [[shown["name"] for shown in view["models"]] for view in views] == [["b"], ["b"], []]
    assert views[1]["detail"]["restarts"] == 0
    assert views[2]["detail"] is None
    assert [len(view["models"]) for view in others] == [2, 2, 1]
    assert all("detail" not in view for view in others)
    with pytest.raises(ModelNotFound, match="no version '1' of a model 'b'"):
        server.view(Route(Template("/", ""), "b", "1"))


def test_every_event_is_sent_once() -> None:
    server = Server("a")
    server.dashboard.tick()
    server.dashboard._history.on_worker("a", "1", 0, "died")
    views = server.view()
    server.models = [model("a", 3)]
    server.dashboard.tick()
    server.dashboard.tick()
    kinds = [event["kind"] for view in views for event in view["events"]]
    assert kinds == ["died", "scaled"]
    assert [event["kind"] for event in server.view()[0]["events"]] == kinds


def test_viewers_are_bounded() -> None:
    server = Server("a")
    for _ in range(VIEWERS):
        server.view()
    with pytest.raises(QueueFull, match=f"{VIEWERS} viewers"):
        server.view()
