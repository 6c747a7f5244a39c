from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from penstock.torchserve.ts.handler_utils import utils
from penstock.torchserve.ts.handler_utils.distributed import deepspeed, pt_pippy
from penstock.torchserve.ts.protocol import otf_message_handler
from penstock.torchserve.ts.torch_handler.distributed.base_deepspeed_handler import BaseDeepSpeedHandler


class Socket:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def sendall(self, parts: Any) -> None:
        self.sent.append(parts)


def test_a_part_goes_to_the_requests_that_are_named(make_context):
    context = make_context(None, {}, {})
    context.cl_socket = Socket()
    utils.send_intermediate_predict_response(["a", "b"], context.request_ids, "on its way", 200, context)
    utils.send_intermediate_predict_response({1: "c"}, {1: "id-1"}, "on its way", 200, context)
    first, second = context.cl_socket.sent
    assert (first.values, first.more, first.code) == ({0: "a", 1: "b"}, True, 200)
    assert second.values == {1: "c"}
    assert first.context is context


def test_the_old_place_has_the_same_function():
    assert otf_message_handler.send_intermediate_predict_response is utils.send_intermediate_predict_response


def test_only_the_first_process_of_a_model_of_many_sends(make_context, monkeypatch):
    context = make_context()
    context.cl_socket = Socket()
    monkeypatch.setenv("LOCAL_RANK", "1")
    utils.send_intermediate_predict_response(["a"], context.request_ids, "", 200, context)
    assert context.cl_socket.sent == []


def test_a_class_is_imported_by_its_name():
    assert utils.import_class("collections.OrderedDict").__name__ == "OrderedDict"
    assert utils.import_class("abc.Mapping", "collections").__name__ == "Mapping"
    assert utils.import_class("Counter", "collections").__name__ == "Counter"
    for name in ("", "Counter", "collections.Nothing"):
        with pytest.raises(ImportError):
            utils.import_class(name)


def test_handlers_of_large_models_name_the_library_that_is_missing(make_context, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "pippy", None)
    config = {"deepspeed": {}, "handler": {"model_path": "m"}, "pippy": {"input_names": [], "model_type": "x"}}
    context = make_context(config=config)
    with pytest.raises(ImportError, match="needs DeepSpeed"):
        deepspeed.get_ds_engine(object(), context)
    with pytest.raises(ImportError, match="needs PiPPy"):
        pt_pippy.get_pipeline_driver(object(), 2, context)


def test_deepspeed_gets_its_configuration_and_the_checkpoints(make_context, monkeypatch, tmp_path):
    asked: dict[str, Any] = {}
    module = types.ModuleType("deepspeed")
    module.init_inference = lambda model, **options: asked.update(options) or "engine"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    (tmp_path / "w.bin").touch()
    (tmp_path / "notes.md").touch()
    settings: dict[str, Any] = {"config": "ds.json", "checkpoint": "c.json"}
    context = make_context(config={"deepspeed": settings, "handler": {"model_path": str(tmp_path)}})
    with pytest.raises(ValueError, match=r"no deepspeed config file .*ds\.json"):
        deepspeed.get_ds_engine("model", context)
    (tmp_path / "ds.json").touch()
    assert deepspeed.get_ds_engine("model", context) == "engine"
    assert asked["config"] == str(tmp_path / "ds.json")
    assert str(tmp_path / "w.bin") in (tmp_path / "c.json").read_text()
    assert "notes.md" not in (tmp_path / "c.json").read_text()
    with pytest.raises(ValueError, match="no deepspeed config in"):
        deepspeed.get_ds_engine("model", make_context())


def test_pippy_says_what_the_configuration_lacks(make_context):
    for config, lacks in (
        ({}, "pippy: input_names"),
        ({"pippy": {"input_names": [], "model_type": "x"}}, "handler: m"),
    ):
        with pytest.raises(ValueError, match=lacks):
            pt_pippy.get_pipeline_driver(object(), 2, make_context(config=config))


def test_a_process_of_a_deepspeed_model_has_the_gpu_of_its_rank(make_context, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    handler = BaseDeepSpeedHandler()
    handler.initialize(make_context())
    assert handler.device == 3
