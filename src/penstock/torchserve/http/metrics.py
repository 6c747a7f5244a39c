"""The route of the metrics listener."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from penstock.serving.http.template import HttpRequest
from penstock.torchserve.http.actions import Action
from penstock.torchserve.protocol.openapi import METRICS, Operation, Parameter
from penstock.types import ItemResult

Scrape = Callable[[list[str]], Awaitable[bytes]]  # names of metrics, none for all, -> Prometheus text 0.0.4

OPERATION: Final = Operation(
    "GET",
    "/metrics",
    "metrics",
    "Gives the metrics in the Prometheus text format.",
    (Parameter("name[]", "Name of a metric to give; may stand several times, by default all are given"),),
    answers=((200, "The metrics", "metrics"),),
)


def metrics_action(scrape: Scrape) -> Action:
    """`/metrics[?name[]=a&name[]=b]`, which never needs a token."""

    async def serve(request: HttpRequest) -> ItemResult:
        return ItemResult(body=await scrape(request.query.get("name[]", [])), content_type=METRICS)

    return Action(OPERATION, serve, any_method=True)
