"""Nodes of a Ray cluster that come and go under load: every caller is answered exactly once."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # sockets that Ray leaves open
]

SOURCE = """
    import time

    def echo(items):
        time.sleep(0.02)
        return items
"""


class Nodes:
    """Two nodes of a cluster, each with room for one worker of the server."""

    def __init__(self, cluster: Any, resource: str) -> None:
        self._cluster, self._resource = cluster, resource
        self.all = [self._add() for _ in range(2)]

    def _add(self) -> Any:
        return self._cluster.add_node(num_cpus=0, resources={self._resource: 1})

    async def lose_one(self) -> None:
        """Kills a node and all of its workers."""
        victim = self.all.pop(0)
        await asyncio.to_thread(self._cluster.remove_node, victim, allow_graceful=False)

    async def join(self) -> None:
        self.all.append(await asyncio.to_thread(self._add))

    def arguments(self, model: str) -> list[str]:
        address, resources = self._cluster.address, f"{{{self._resource} = 1}}"
        keys = [
            'transport="ray"',
            "instances=2",
            f'ray.address="{address}"',
            "ray.num_cpus=0",
            f"ray.resources={resources}",
        ]
        return [each for key in keys for each in ("--set", f"models.{model}.{key}")]


@pytest.mark.parametrize("idempotent", [True, False])
async def test_nodes_that_leave_and_join_under_load_lose_no_caller(
    idempotent: bool, ray_cluster: Any, guarded: Callable[..., Any], chaos: SimpleNamespace
) -> None:
    nodes = Nodes(ray_cluster, f"place_{idempotent}".lower())
    key = f"models.echo.batching.idempotent={str(idempotent).lower()}"
    server = guarded(SOURCE, "echo", "--set", key, *nodes.arguments("echo"))
    await chaos.until(lambda: server.metric("penstock_workers_up") == 2)
    losses = chaos.count(1, 10)
    async with chaos.Crowd(server, "echo", 16) as crowd:
        for loss in range(1, losses + 1):
            await crowd.answered(100)
            await nodes.lose_one()
            await chaos.until(lambda loss=loss: server.metric("penstock_worker_events_total", state="died") == loss)
            await crowd.answered(100)  # by the other worker
            await nodes.join()
            await chaos.until(lambda: server.metric("penstock_workers_up") == 2)
        await crowd.answered(100)
    assert crowd.wrong == []
    assert not crowd.unanswered
    assert crowd.statuses.total() == len(crowd.asked)
    assert set(crowd.statuses) <= ({200} if idempotent else {200, 503})
