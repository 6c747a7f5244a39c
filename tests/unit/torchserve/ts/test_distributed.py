import sys
import types
from typing import Any

import pytest

from penstock.torchserve.ts import distributed


def test_distributed_handlers_name_the_missing_library(make_context, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "pippy", None)
    config = {"deepspeed": {}, "handler": {"model_path": "m"}, "pippy": {"input_names": [], "model_type": "x"}}
    context = make_context(config=config)
    with pytest.raises(ImportError, match="needs DeepSpeed"):
        distributed.get_ds_engine(object(), context)
    with pytest.raises(ImportError, match="needs PiPPy"):
        distributed.get_pipeline_driver(object(), 2, context)


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
        distributed.get_ds_engine("model", context)
    (tmp_path / "ds.json").touch()
    assert distributed.get_ds_engine("model", context) == "engine"
    assert asked["config"] == str(tmp_path / "ds.json")
    assert str(tmp_path / "w.bin") in (tmp_path / "c.json").read_text()
    assert "notes.md" not in (tmp_path / "c.json").read_text()
    with pytest.raises(ValueError, match="no deepspeed config in"):
        distributed.get_ds_engine("model", make_context())


def test_pippy_names_the_missing_configuration_key(make_context):
    for config, lacks in (
        ({}, "pippy: input_names"),
        ({"pippy": {"input_names": [], "model_type": "x"}}, "handler: m"),
    ):
        with pytest.raises(ValueError, match=lacks):
            distributed.get_pipeline_driver(object(), 2, make_context(config=config))


def test_a_deepspeed_process_uses_the_gpu_of_its_rank(make_context, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    handler = distributed.BaseDeepSpeedHandler()
    handler.initialize(make_context())
    assert handler.device == 3
