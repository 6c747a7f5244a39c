from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import ModelSnapshot, ServerSnapshot
from penstock.errors import BadRequest, ModelNotFound, QueueFull
from penstock.serving.http.context import STREAM_BACKLOG
from penstock.serving.http.dashboard import EFFECTS, FRESH_S, MODELS, VIEWERS, Dashboard
from penstock.serving.http.server import HttpServer, NativeFlavor
from penstock.serving.observe.causes import Effect, Outlook, Scenario
from penstock.serving.observe.history import History, Totals
from penstock.serving.observe.readings import Work
from penstock.serving.protocols.route import HttpRequest, Route, Template
from penstock.types import ItemResult, ModelStatus
from support.backend import FakeBackend

ALL = Route(Template("/", ""))


def model(name: str, instances: int = 1) -> ModelSnapshot:
    return ModelSnapshot(ModelStatus(name, "1", "READY", instances, instances, 8, ("cpu",)))


class Server:
    """A dashboard over models that a test changes."""

    def __init__(self, *names: str) -> None:
        self.models = [model(name) for name in names]
        self.totals: dict[tuple[str, str], Totals] = {}
        self.work: dict[tuple[str, str], Work] = {}
        self.simulated: list[Scenario] = []
        self.now_s = 0.0
        self.dashboard = Dashboard(
            History(),
            lambda: ServerSnapshot(self.models),
            lambda: self.totals,
            work=lambda: self.work,
            clock=lambda: self.now_s,
            simulate=self.simulate,
        )

    def simulate(self, scenario: Scenario) -> Effect:
        self.simulated.append(scenario)
        return Effect(1.25, Outlook(10, None, 1.0), Outlook(20.0, 0.1, 0.5))

    def tick(self) -> None:
        """The next second, in which the one instance of model "a" runs ten full batches of eight rows, and 48 wait."""
        self.now_s += 1.0
        for each in self.models:
            each.busy_s = self.now_s
            each.arrived_rows = round(80 * self.now_s)
            each.in_flight, each.scheduler = 56, {"a_s": 0.09, "b_s": 0.001, "fitted": True, "ready": True}
            count = 80 * self.now_s
            self.work[each.key] = Work(count, count, batches=count / 8, rows=count, run_s=0.1 * count / 8)
        self.dashboard.tick()

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


async def ask(server: Server, instances: str, name: str = "a") -> Any:
    """The response of the route that simulates."""
    route = next(each for each in server.dashboard.routes(lambda: False) if "effects" in each.path)
    assert route.serve is not None
    names = {"model": name, "version": "1", "instances": instances}
    return json.loads((await route.serve(HttpRequest("GET", "", {}, [], "", b"", names))).body)


async def test_the_gain_of_a_change_is_the_simulated_one_and_unknown_before() -> None:
    server = Server("a")
    views = server.view()
    for _ in range(3):
        server.tick()
    gains = lambda: {each["cause"]: each["gain"] for each in views[-1]["verdict"]["causes"]}  # noqa: E731
    assert gains() == {"batch limit": None, "too few instances": None}
    await server.dashboard._simulate_findings()
    server.tick()
    assert gains() == {"batch limit": 1.25, "too few instances": None}
    assert "for about 1.2 times the requests" in views[-1]["verdict"]["text"]
    (scenario,) = server.simulated
    assert (scenario.now.max_batch_size, scenario.then.max_batch_size, scenario.then.instances) == (8, 16, 1)
    assert (scenario.in_flight, scenario.rate, scenario.now.row_s) == (56, pytest.approx(80.0), 0.001)
    for _ in range(3):
        await server.dashboard._simulate_findings()
    assert [each.then.instances for each in server.simulated] == [1, 2], "each once"
    server.now_s += FRESH_S
    server.tick()
    assert gains()["batch limit"] == 1.25, "the last one, until there is another"
    await server.dashboard._simulate_findings()
    assert len(server.simulated) == 3


async def test_the_effect_of_more_instances_is_simulated_once_and_unknown_without_a_cost() -> None:
    server = Server("a", "b")
    assert await ask(server, "2") is None, "no second has passed"
    for _ in range(3):
        server.tick()
    found = await ask(server, "2")
    assert (found["gain"], found["then"]["p99_s"]) == (1.25, 0.1)
    await asyncio.gather(*(ask(server, "2") for _ in range(5)))
    assert [each.then.instances for each in server.simulated] == [2]
    assert await ask(server, "2", "nothing") is None
    server.models[0].scheduler = {}
    server.dashboard.tick()
    assert await ask(server, "3") is None, "the cost of a batch is not known"
    for wrong in ("0", "1000", "-1", "x", ""):
        with pytest.raises(BadRequest, match="expected a whole number from 1 to 999"):
            await ask(server, wrong)


async def test_simulations_are_bounded() -> None:
    server = Server("a")
    for _ in range(3):
        server.tick()
    for instances in range(1, EFFECTS + 50):
        await ask(server, str(instances))
    assert len(server.dashboard._effects) == EFFECTS
    async with server.dashboard._simulating:
        waiting = [asyncio.create_task(ask(server, "900")) for _ in range(VIEWERS)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="simulations wait already"):
            await ask(server, "900")
    await asyncio.gather(*waiting)


def test_a_clock_that_is_set_moves_no_second_and_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("a")
    views = server.view()
    for wall_s in (1e9, 2e9, 5e8):
        monkeypatch.setattr("time.time", lambda wall_s=wall_s: wall_s)
        server.tick()
        server.dashboard._history.on_worker("a", "1", 0, "died")
    assert [len(view["models"][0]["seconds"]) for view in views[1:]] == [1, 1, 1]
    assert all(0 <= view["up_s"] < 60 and all(e["up_s"] <= view["up_s"] for e in view["events"]) for view in views)


async def test_a_viewer_that_stops_reading_is_dropped_and_the_others_miss_nothing(
    wait_until: Callable[..., Any],
) -> None:
    server = Server(*(f"m{i}" for i in range(200)))
    limits = LimitsConfig(write_buffer_bytes=2**14)
    http = HttpServer(FakeBackend(), limits, flavor=NativeFlavor(templates=server.dashboard.routes(lambda: False)))
    port = (await http.start("127.0.0.1", 0))[1]
    streams = [await asyncio.open_connection("127.0.0.1", port, limit=2**25) for _ in range(2)]
    for _, writer in streams:
        writer.write(b"GET /dashboard/events HTTP/1.1\r\nhost: x\r\n\r\n")
    (reader, writer), (_, stuck) = streams
    stuck.transport.pause_reading()
    await wait_until(lambda: len(server.dashboard._viewers) == 2)
    received = 0

    async def read() -> None:
        nonlocal received
        async for line in reader:
            received += line.startswith(b"data: {")

    reading = asyncio.create_task(read())
    ticks = most = 0
    while len(server.dashboard._viewers) == 2:
        server.dashboard.tick()
        ticks += 1
        view_bytes = len(server.dashboard._event(server.dashboard._view(None, 1, ())))
        await wait_until(lambda ticks=ticks: received == ticks + 1)
        most = max(most, *(each.unread for each in http.listener.connections), 0)
        assert ticks < 1000
    assert most <= STREAM_BACKLOG * limits.write_buffer_bytes + view_bytes
    server.dashboard.tick()
    await wait_until(lambda: received == ticks + 2)
    reading.cancel()
    for each in (writer, stuck):
        each.transport.abort()
    await http.close(0.1)
