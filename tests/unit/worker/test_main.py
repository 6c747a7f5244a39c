from __future__ import annotations

import logging

import pytest

from penstock.config.schema import ModelConfig
from penstock.errors import BadRequest
from penstock.types import Item
from penstock.worker.main import open_model
from penstock.worker.spec import WorkerSpec


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
