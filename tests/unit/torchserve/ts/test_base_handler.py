import logging
import os
import sys
import textwrap
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import metrics
from penstock.errors import LoadFailed
from penstock.torchserve.ts import base_handler
from penstock.torchserve.ts.base_handler import HANDLER_METHODS, BaseHandler, MicroBatching
from penstock.torchserve.ts.testing import MockContext

pytestmark = [
    pytest.mark.usefixtures("forget_modules"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

NET = """
    import torch

    class {name}(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2, bias=False)

        def forward(self, x):
            return self.layer(x) * (2.0 if self.training else 1.0)
"""
WEIGHTS = [[1.0, 2.0], [0.0, -1.0]]
ROWS = [[1.0, 1.0], [2.0, 0.0]]
ANSWERS = [[3.0, -1.0], [2.0, 0.0]]


class Doubling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.fixture
def eager(tmp_path: Path) -> dict[str, str]:
    """The manifest's model of a module and its state dict."""
    name = f"net_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(NET.format(name="Net")))
    torch.save({"layer.weight": torch.tensor(WEIGHTS)}, tmp_path / "net.pth")
    return {"modelFile": f"{name}.py", "serializedFile": "net.pth"}


@pytest.fixture
def scripted(tmp_path: Path) -> dict[str, str]:
    torch.jit.script(Doubling()).save(str(tmp_path / "net.pt"))
    return {"serializedFile": "net.pt"}


def loaded(context: Any, handler: type[BaseHandler] = BaseHandler) -> BaseHandler:
    made = handler()
    assert not made.initialized
    made.initialize(context)
    assert made.initialized
    return made


def told() -> dict[str, float]:
    return {d.name: d.value for d in metrics.drain() or []}


# ---- loading


def test_a_module_and_its_state_dict_are_loaded_for_inference(eager, make_context, tmp_path: Path):
    (tmp_path / "index_to_name.json").write_text('{"0": "cat"}')
    context = make_context(eager)
    handler = loaded(context)
    assert handler.handle(ROWS, context) == ANSWERS
    assert not handler.model.training
    assert (handler.map_location, handler.get_device()) == ("cpu", torch.device("cpu"))
    assert handler.mapping == {"0": "cat"}
    assert handler.model_pt_path == str(tmp_path / "net.pth")
    assert told()["HandlerTime"] >= 0


def test_a_module_without_weights_is_instantiated(eager, make_context):
    del eager["serializedFile"]
    context = make_context(eager)
    assert len(loaded(context).handle(ROWS, context)) == 2


def test_torchscript_is_loaded(scripted, make_context):
    context = make_context(scripted)
    assert loaded(context).handle(ROWS, context) == [[2.0, 2.0], [4.0, 0.0]]


def test_onnx_is_loaded_as_a_session_and_can_be_called(make_context, tmp_path: Path):
    from onnx import TensorProto, helper, save

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", [x], [y])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "net.onnx")
    context = make_context({"serializedFile": "net.onnx"})
    handler = loaded(context)
    assert handler.model.run(None, {"x": np.float32(ROWS)})[0].tolist() == [[2.0, 2.0], [4.0, 0.0]]
    assert handler.handle(ROWS, context) == [[2.0, 2.0], [4.0, 0.0]]


def test_an_exported_program_is_loaded(make_context, tmp_path: Path):
    torch.export.save(torch.export.export(Doubling(), (torch.ones(2, 2),)), tmp_path / "net.pt2")
    context = make_context({"serializedFile": "net.pt2"})
    assert loaded(context).handle(ROWS, context) == [[2.0, 2.0], [4.0, 0.0]]


def test_a_library_compiled_ahead_of_time_is_loaded_if_configured(make_context, monkeypatch, tmp_path):
    monkeypatch.setattr(torch._export, "aot_load", lambda path, device: lambda x: x + (device == "cpu"))
    described = {"serializedFile": "net.so"}
    context = make_context(described, config={"pt2": {"export": {"aot_compile": True}}})
    assert loaded(context).handle(ROWS, context) == [[2.0, 2.0], [3.0, 1.0]]
    with pytest.raises(RuntimeError, match="No model weights could be loaded"):
        loaded(make_context(described))


@pytest.mark.parametrize("described", [{}, {"serializedFile": "net.bin"}, {"serializedFile": "net"}])
def test_other_file_types_are_refused(make_context, described):
    with pytest.raises(RuntimeError, match="No model weights could be loaded"):
        loaded(make_context(described))


def test_a_missing_model_file_or_two_classes_are_refused(eager, make_context, tmp_path: Path):
    with (tmp_path / eager["modelFile"]).open("a") as file:
        file.write(textwrap.dedent(NET.format(name="Other")))
    with pytest.raises(ValueError, match=r"only one class.*Net.*Other"):
        loaded(make_context(eager))
    with pytest.raises(RuntimeError, match=r"Missing the model\.py file"):
        loaded(make_context({**eager, "modelFile": "none.py"}))


class Harmless:
    """More than a tensor: a pickle that holds it runs code."""


def test_a_pickle_with_code_is_refused_unless_the_configuration_trusts_it(eager, make_context, tmp_path: Path):
    torch.save({"layer.weight": torch.tensor(WEIGHTS), "note": Harmless()}, tmp_path / "net.pth")
    with pytest.raises(LoadFailed, match='trust = "pickle"'):
        loaded(make_context(eager))
    with pytest.raises(LoadFailed, match="do not fit Net"):  # it is read, and then found to have one key too many
        loaded(make_context(eager, config={"trust": "pickle"}))


def test_the_configuration_can_select_half_precision(eager, make_context):
    context = make_context(eager, config={"precision": "bf16"})
    handler = loaded(context)
    assert handler.model.layer.weight.dtype is torch.bfloat16
    assert handler.handle(ROWS, context) == ANSWERS


@pytest.mark.parametrize(
    ("pt2", "options"),
    [
        (None, None),
        ("inductor", {"backend": "inductor"}),
        ("magic", None),
        ({"backend": "eager", "mode": "default"}, {"backend": "eager", "mode": "default"}),
        ({"compile": {"enable": True, "backend": "eager"}}, {"backend": "eager"}),
        ({"compile": {"enable": True}}, {}),
        ({"compile": {"enable": False, "backend": "eager"}}, None),
        ({"export": {"aot_compile": True}}, None),
    ],
)
def test_the_configuration_sets_the_compile_options(pt2, options):
    before = repr(pt2)
    assert base_handler.compile_options(pt2) == options
    assert repr(pt2) == before


def test_other_compile_options_than_text_and_dicts_are_refused():
    with pytest.raises(ValueError, match="pt2 should be str or dict"):
        base_handler.compile_options(["inductor"])


def test_a_model_runs_uncompiled_if_compiling_fails(eager, make_context, monkeypatch, caplog):
    asked: list[Any] = []

    def compile(model: Any, **options: Any) -> Any:
        asked.append(options)
        if len(asked) == 2:
            raise RuntimeError("no compiler here")
        return lambda x: model(x) + 1

    monkeypatch.setattr(torch, "compile", compile)
    context = make_context(eager, config={"pt2": {"compile": {"enable": True, "backend": "eager"}}})
    assert loaded(context).handle(ROWS, context) == [[4.0, 0.0], [3.0, 1.0]]
    with caplog.at_level(logging.WARNING):
        assert loaded(context).handle(ROWS, context) == ANSWERS
    assert asked == [{"backend": "eager"}] * 2
    assert "compile_failed" in caplog.text


@pytest.mark.parametrize(
    ("present", "gpu_id", "expected"),
    [
        ("cuda", 1, ("cuda", torch.device("cuda:1"))),
        ("cuda", "0", ("cuda", torch.device("cuda:0"))),
        ("cuda", None, ("cpu", torch.device("cpu"))),
        ("xpu", 2, ("xpu", torch.device("xpu:2"))),
        ("mps", 0, ("mps", torch.device("mps"))),
        ("none", 0, ("cpu", torch.device("cpu"))),
    ],
)
def test_the_device_is_the_workers_gpu_if_there_is_one(monkeypatch, present, gpu_id, expected):
    for kind, module in (("cuda", torch.cuda), ("xpu", torch.xpu), ("mps", torch.backends.mps)):
        monkeypatch.setattr(module, "is_available", lambda kind=kind: kind == present)
    assert base_handler.choose_device(gpu_id) == expected


def test_xla_is_used_if_installed(monkeypatch):
    monkeypatch.setattr(base_handler, "XLA_AVAILABLE", True)
    model = types.SimpleNamespace(xla_device=lambda: "xla:0")
    monkeypatch.setitem(sys.modules, "torch_xla", types.ModuleType("torch_xla"))
    monkeypatch.setitem(sys.modules, "torch_xla.core", types.ModuleType("torch_xla.core"))
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", model)
    assert base_handler.choose_device(None) == (None, "xla:0")


def test_float32_on_a_cuda_device_may_use_tensor_cores(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    BaseHandler()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    BaseHandler()
    assert asked == ["high"]


# ---- running


class Steps(BaseHandler):
    """Needs no model, and no torch."""

    def initialize(self, context: Any) -> None:
        self.initialized = True

    def preprocess(self, data: Any) -> Any:
        return [row["body"] for row in data]

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        return [n + 1 for n in data]

    def postprocess(self, data: Any) -> Any:
        return [str(n) for n in data]

    def describe_handle(self) -> Any:
        return {"classes": 3}

    def get_insights(self, tensor_data: Any, raw: Any, target: Any) -> Any:
        return [(tensor_data, raw, target)]


def test_the_three_steps_run_one_after_the_other(make_context):
    context = make_context()
    assert loaded(context, Steps).handle([{"body": 1}, {"body": 5}], context) == ["2", "6"]


def test_an_explanation_gets_the_preprocessed_and_raw_data_and_the_target(make_context):
    context = make_context(None, {"explain": "True"})
    handler = loaded(context, Steps)
    assert handler.handle([{"body": 1}], context) == [([1], 1, 0)]
    assert handler.handle([{"body": 1, "target": 2}], context) == [([1], 1, 2)]
    assert handler.explain


def test_the_handler_describes_itself(make_context):
    context = make_context(None, {"describe": "True"})
    assert loaded(context, Steps).handle([{"body": 1}], context) == [{"classes": 3}]
    assert BaseHandler().describe_handle() is None


def test_a_handler_may_forget_to_call_the_constructor(make_context, eager):
    class Forgetful(BaseHandler):
        def __init__(self) -> None:
            self.initialized = False

    context = make_context(eager)
    assert loaded(context, Forgetful).handle(ROWS, context) == ANSWERS


def test_step_times_are_recorded_only_with_profiling(make_context, eager):
    context = make_context(eager, config={"handler": {"profile": True}})
    loaded(context).handle(ROWS, context)
    steps = {"ts_handler_preprocess", "ts_handler_inference", "ts_handler_postprocess"}
    assert told().keys() == {"HandlerTime", *steps}
    for config in ({}, {"handler": {"profile": False}}, {"handler": None}):
        context = make_context(eager, config=config)
        loaded(context).handle(ROWS, context)
        assert told().keys() == {"HandlerTime"}


def test_torchs_profiler_writes_a_trace(make_context, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    context = make_context()
    handler = loaded(context, Steps)
    handler.profiler_args = {"activities": [torch.profiler.ProfilerActivity.CPU]}
    assert handler.handle([{"body": 1}], context) == ["2"]
    assert os.listdir(tmp_path / "pytorch_profiler" / "net")


def test_the_mock_context_runs_a_handler(eager, tmp_path: Path):
    (tmp_path / "c.yaml").write_text("handler: {profile: true}")
    context = MockContext("net.pth", str(tmp_path), eager["modelFile"], gpu_id=None, model_yaml_config_file="c.yaml")
    assert loaded(context).handle(ROWS, context) == ANSWERS
    assert {m.name for m in context.metrics.store} >= {"HandlerTime", "ts_handler_inference"}
    assert "gpu_id" not in context.system_properties


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("config", [{}, {"precision": "fp16"}, {"pt2": {"compile": {"enable": True}}}])
def test_a_model_runs_on_the_workers_gpu(eager, make_context, config):
    context = make_context(eager, config=config, gpu_id=0)
    handler = loaded(context)
    assert (handler.map_location, handler.device) == ("cuda", torch.device("cuda:0"))
    assert next(handler.model.parameters()).is_cuda
    assert handler.handle(ROWS, context) == ANSWERS


# ---- micro-batching


class Handler(BaseHandler):
    """Adds one in each step; says in which thread, and on which piece, each step worked."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = MicroBatching(self)  # type: ignore[method-assign]
        self.seen: list[tuple[str, int | None, int, str]] = []
        self.meet: threading.Barrier | None = None

    def step(self, name: str, data: list[Any]) -> list[Any]:
        self.seen.append((name, self.handle.get_micro_batch_idx(), len(data), threading.current_thread().name))
        if name == "inference" and self.meet is not None:
            self.meet.wait(10)
        return [n + 1 for n in data]

    def preprocess(self, data: Any) -> Any:
        return self.step("preprocess", [row["body"] for row in data])

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        if "bad" in data:
            raise ValueError("bad")
        return self.step("inference", data)

    def postprocess(self, data: Any) -> Any:
        return self.step("postprocess", data)

    def get_insights(self, tensor_data: Any, raw: Any, target: Any) -> Any:
        return [("why", tensor_data)]

    def describe_handle(self) -> Any:
        return "described"


class Bad:
    """What the first step makes into something that the second refuses."""

    def __add__(self, other: int) -> str:
        return "bad"


@pytest.fixture
def handler():
    made = Handler()
    yield made
    made.handle.shutdown()
    names = tuple(f"penstock-{step}" for step in HANDLER_METHODS)
    assert not [t for t in threading.enumerate() if t.name.startswith(names)]


def rows(*values: Any) -> list[dict[str, Any]]:
    return [{"body": v} for v in values]


def test_micro_batches_keep_the_order_of_the_batch(handler, make_context):
    handler.handle.micro_batch_size = 2
    handler.handle.parallelism = {"preprocess": 3, "inference": 2}
    context = make_context()
    assert handler.handle(rows(*range(5)), context) == [3, 4, 5, 6, 7]
    assert sorted(s[:3] for s in handler.seen if s[0] == "inference") == [
        ("inference", 0, 2), ("inference", 1, 2), ("inference", 2, 1),
    ]  # fmt: skip
    assert handler.context is context
    assert [d.name for d in metrics.drain() or []] == ["HandlerTime"]
    assert handler.handle.get_micro_batch_idx() is None


def test_micro_batches_of_one_step_run_concurrently(handler, make_context):
    handler.meet = threading.Barrier(3)
    handler.handle.parallelism = {"inference": 3}
    assert handler.handle(rows(1, 2, 3), make_context()) == [4, 5, 6]


def test_the_number_of_threads_may_change_between_batches(handler, make_context):
    for count in (1, 4, 2):
        handler.handle.parallelism = {"inference": count}
        handler.meet = threading.Barrier(count)
        assert handler.handle(rows(*range(8)), make_context()) == list(range(3, 11))
        assert len({thread for step, _, _, thread in handler.seen if step == "inference"}) == count
        handler.seen.clear()
    assert handler.handle.parallelism == {"preprocess": 1, "inference": 2, "postprocess": 1}
    handler.meet = None
    handler.handle.shutdown()
    assert handler.handle(rows(1), make_context()) == [4]


def test_an_error_in_a_micro_batch_fails_only_its_batch(handler, make_context):
    context = make_context()
    with pytest.raises(ValueError, match="bad"):
        handler.handle(rows(1, Bad(), 2), context)
    assert handler.handle(rows(1, 2), context) == [4, 5]


def test_explanations_and_descriptions_are_not_split(handler, make_context):
    assert handler.handle(rows(1, 2), make_context(None, {"explain": "True"})) == [("why", [2, 3])]
    assert handler.handle(rows(1), make_context(None, {"describe": "True"})) == ["described"]


@pytest.mark.parametrize("parallelism", [{"inference": 0}, {"thinking": 1}])
def test_invalid_numbers_of_threads_are_refused(handler, parallelism):
    with pytest.raises(ValueError, match="parallelism"):
        handler.handle.parallelism = parallelism
