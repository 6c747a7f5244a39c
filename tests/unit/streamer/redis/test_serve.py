import asyncio
import itertools
import threading

import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.errors import LoadFailed
from penstock.streamer.redis.serve import QueueOptions, serve_queue


class SlowFirst:
    """The first instance loads once `gate` is set."""

    def __init__(self):
        self.gate = threading.Event()
        self.loads = itertools.count()

    def load(self, device):
        if not next(self.loads):
            assert self.gate.wait(20)

    def predict(self, items):
        return [2 * x for x in items]


class Broken:
    def load(self, device):
        raise ValueError("no weights")

    def predict(self, items):
        return items


def served(model, redis_server, stop, instances=1):
    config = ModelConfig(target="", transport="thread", instances=instances, batching=BatchingConfig())
    return asyncio.create_task(serve_queue(config, model, QueueOptions(redis_server.address), stop=stop))


async def test_the_first_instance_that_is_ready_serves_while_others_load(asker, redis_server):
    model, stop = SlowFirst(), asyncio.Event()
    serving = served(model, redis_server, stop, instances=2)
    assert await asker().ask([1, 2]) == [2, 4]
    model.gate.set()
    assert await asker().ask([3]) == [6]
    stop.set()
    await asyncio.wait_for(serving, 20)


async def test_a_model_that_no_instance_can_load_is_an_error(redis_server):
    with pytest.raises(LoadFailed, match="no weights"):
        await asyncio.wait_for(served(Broken(), redis_server, asyncio.Event(), instances=2), 20)
