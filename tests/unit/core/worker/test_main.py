from __future__ import annotations

import logging

import pytest

from penstock import metrics
from penstock.config.schema import ModelConfig
from penstock.core.worker.main import open_model
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import BadRequest, LoadOutOfMemory
from penstock.types import Item


@pytest.fixture
def parser_logger():
    logger = logging.getLogger("python_multipart")
    before = logger.level
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.setLevel(before)


def test_a_malformed_form_is_not_worth_a_line_above_debug(parser_logger, caplog):
    runner, _ = open_model(WorkerSpec("m", "1", ModelConfig(target="m:m"), lambda items: items), "cpu")
    decoded = runner.decode([Item(b"junk", "native", "multipart/form-data; boundary=XX")])
    assert type(decoded.errors[0]) is BadRequest
    assert caplog.records == []


class Told:
    def __init__(self, prompt: str = "") -> None:
        self.prompt = prompt

    def load(self, device, precision, threads, trust):
        self.said = (device, precision, threads, trust, self.prompt)

    def predict(self, items):
        return [self.said for _ in items]


def test_a_class_receives_its_options_and_load_its_named_keys():
    config = ModelConfig(target="m:m", options={"prompt": "a"}, precision="bf16", threads=3, trust="pickle")
    runner, _ = open_model(WorkerSpec("m", "1", config, Told), "cpu")
    parts = []
    runner.run(0, runner.decode([Item(0)]), parts.append)
    assert parts[-1].results[0].body == ("cpu", "bf16", 3, "pickle", "a")


class Counting:
    def load(self, device):
        metrics.counter("loads", 2)

    def example(self):
        return 1

    def predict(self, items):
        metrics.counter("batches")
        return items


def test_metrics_of_the_load_are_reported_without_a_batch_and_those_of_the_warm_up_are_not():
    spec = WorkerSpec("m", "1", ModelConfig(target="m:m"), Counting)
    metrics.drain()  # what models in threads of other tests have left
    assert [(d.name, d.value) for d in open_model(spec, "cpu")[1].metrics] == [("loads", 2)]


def test_a_load_without_enough_memory_is_reported_as_such():
    class Big:
        def load(self, device):
            raise MemoryError

        def predict(self, items):
            return items

    with pytest.raises(LoadOutOfMemory, match="loading 'm' raised MemoryError"):
        open_model(WorkerSpec("m", "1", ModelConfig(target="m:m"), Big), "cpu")
