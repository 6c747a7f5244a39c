"""PyTorch modules: precision and optimization, and programs over arrays."""

import warnings

import numpy as np
import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.worker.main import open_model
from penstock.core.worker.spec import WorkerSpec
from penstock.core.worker.tensor_model import ANY_ROWS, Input, ProgramSettings
from penstock.errors import BadOutput, ConfigError, LoadFailed
from penstock.runtimes import torch as loaders
from penstock.runtimes import torch_files
from penstock.runtimes.torch import of_exported, of_module
from penstock.types import Item, TensorSpec
from penstock.values import tensor_specs
from support.files import scores

torch = pytest.importorskip("torch")
PLAIN = ProgramSettings()
X = np.array([[1, 2, 3, 4], [0, 0, 1, 0]], np.float32)


def near(found, expected, tolerance=1e-6):
    return np.allclose(found.float().detach().numpy(), expected, atol=tolerance)


# ---- precision and optimisation


@pytest.mark.parametrize("name", ["net.ts", "eager"])
@pytest.mark.parametrize("optimize", ["none", "optimize_for_inference"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("fp16", 1e-2), ("bf16", 4e-2)])
def test_modules_run_in_each_precision(model_files, name, optimize, precision, tolerance):
    if name == "eager":
        module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(-1))
        state = torch.load(model_files / "weights.pt")
        module.load_state_dict({k.replace("linear.", "0."): v for k, v in state.items()})
    else:
        module = torch_files.load_module(str(model_files / name))
    ready = loaders.prepare(module, precision=precision, optimize=optimize)
    dtype = loaders.dtype_of(precision)
    with torch.inference_mode():
        found = ready(torch.tensor(X, dtype=dtype))
    assert found.dtype == dtype
    assert near(found, scores(X), tolerance)


def test_a_module_that_cannot_be_scripted_is_reported():
    class Free(torch.nn.Module):
        def forward(self, x, **kwargs):
            return x

    with pytest.raises(LoadFailed, match=r"Free cannot be scripted: .*; use optimize = 'compile'"):
        loaders.prepare(Free(), optimize="optimize_for_inference")


def test_compile_takes_any_batch_size(monkeypatch, model_files):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: asked.append(options) or module)
    loaders.prepare(torch.nn.Linear(4, 3), optimize="compile")
    loaders.prepare(torch_files.load_module(str(model_files / "net.pt2")), optimize="compile")
    assert asked == [{"dynamic": True}] * 2


@pytest.mark.parametrize(
    ("sizes", "inputs", "dynamic"),
    [
        ((1, 4, 16), {"input": "FP32[-1,4]"}, False),
        ("auto", {"input": "FP32[-1,4]"}, False),
        ("any", {"input": "FP32[-1,4]"}, True),
        (None, {"input": "FP32[-1,4]"}, True),
        ((1, 4, 16), {"input": "FP32[-1,-1]"}, True),
        ((1, 4, 16), {}, True),
    ],
)
def test_compile_is_for_fixed_shapes_if_only_the_rows_vary_and_batches_have_a_few_sizes(
    monkeypatch, sizes, inputs, dynamic
):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: asked.append(options) or module)
    settings = ProgramSettings(optimize="compile", sizes=sizes, inputs=tensor_specs(inputs, "inputs"))
    loaders.of_module(torch.nn.Linear(4, 3), settings)
    assert asked == [{"dynamic": dynamic}]
    exported = loaders.of_exported(
        torch.export.export(torch.nn.Linear(4, 3), (torch.ones(2, 4),), dynamic_shapes=({0: torch.export.Dim("n")},)),
        ProgramSettings(optimize="compile", sizes=sizes),
    )
    assert exported.inputs[0].shape == (-1, 4)
    assert asked[1:] == [{"dynamic": sizes in (None, "any")}]


def test_every_size_is_compiled_at_the_load_and_none_later(monkeypatch):
    """Twelve sizes: PyTorch alone would compile eight and run the others uncompiled."""
    compiled, compile = [], torch.compile

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda module, **options: compile(module, backend=backend, **options))
    sizes = tuple(range(1, 49, 4))
    config = ModelConfig(
        target="m:m",
        optimize="compile",
        inputs={"input": "FP32[-1,4]"},
        batching=BatchingConfig(sizes=sizes),
    )
    runner, ready = open_model(WorkerSpec("m", "1", config, torch.nn.Linear(4, 3)), "cpu")
    assert ready.sizes == sizes
    assert len(compiled) == len(sizes)
    parts = []
    for rows in range(1, 46, 3):
        runner.run(0, runner.decode([Item({"input": np.ones((rows, 4), np.float32)})]), parts.append)
        assert parts[-1].results[0].body["OUTPUT__0"].shape == (rows, 3)
    assert len(compiled) == len(sizes)


@pytest.mark.parametrize(
    ("name", "keys", "error"),
    [
        ("net.ts", {"optimize": "compile"}, "found compile, which TorchScript does not support"),
        ("net.pt2", {"optimize": "optimize_for_inference"}, "which exported programs do not support"),
        ("net.pt2", {"precision": "fp16"}, "precision: found fp16, but the graph of an exported program"),
        ("net.ts", {"precision": "fp8"}, "precision: found 'fp8', expected one of fp32, fp16, bf16"),
        ("net.ts", {"optimize": "fast"}, "optimize: found 'fast', expected one of none, graph, optimize_for_inference"),
        ("net.ts", {"optimize": "graph"}, "found graph, which is for .* on a CUDA device, not for cpu; leave it out"),
    ],
)
def test_settings_that_a_kind_does_not_support_are_refused(model_files, name, keys, error):
    with pytest.raises(ConfigError, match=error):
        loaders.prepare(torch_files.load_module(str(model_files / name)), **keys)


def test_torchscript_is_loaded_without_a_warning_of_its_age(model_files):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = torch_files.load_module(str(model_files / "net.ts"))
        loaders.prepare(module, optimize="optimize_for_inference")


# ---- programs over arrays: names of inputs and outputs, datatypes, rows


def module(forward):
    return type("Own", (torch.nn.Module,), {"forward": forward})()


def exported(forward, *arguments, shapes=None, **named):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(module(forward), arguments, named, dynamic_shapes=shapes)


def test_torchscript_has_the_inputs_of_its_schema_also_by_position(model_files):
    program = of_module(torch_files.load_module(str(model_files / "net.ts")), PLAIN)
    assert program.inputs == (Input("x", alias="INPUT__0"),)
    assert program.platform == "pytorch_torchscript"
    found = program.run({"x": X})
    assert list(found) == ["OUTPUT__0"]
    assert np.allclose(found["OUTPUT__0"], scores(X))


def test_a_module_has_the_parameters_of_forward():
    program = of_module(module(lambda self, x, mask=None: x if mask is None else x * mask), PLAIN)
    assert program.inputs == (Input("x", alias="INPUT__0"), Input("mask", alias="INPUT__1", required=False))
    assert program.platform == "pytorch_eager"
    assert program.run({"x": X})["OUTPUT__0"].tolist() == X.tolist()
    assert program.run({"mask": X, "x": X})["OUTPUT__0"].tolist() == (X * X).tolist()


def test_configured_inputs_are_passed_by_name_or_in_order():
    specs = (TensorSpec("b", "FP32", (-1, 4)), TensorSpec("a", "FP32", (-1, 4)))
    named = of_module(module(lambda self, a, b: a - b), ProgramSettings(inputs=specs))
    assert named.inputs == (Input("b", "FP32", (-1, 4)), Input("a", "FP32", (-1, 4)))
    assert named.run({"a": X, "b": 0 * X})["OUTPUT__0"].tolist() == X.tolist()
    ordered = of_module(module(lambda self, *tensors: tensors[0] - tensors[1]), ProgramSettings(inputs=specs))
    assert ordered.run({"a": X, "b": 0 * X})["OUTPUT__0"].tolist() == (-X).tolist()


def test_a_forward_without_named_parameters_has_one_input():
    program = of_module(module(lambda self, *tensors: tensors), PLAIN)
    assert program.inputs == (Input("INPUT__0"),)
    assert program.run({"INPUT__0": X})["OUTPUT__0"].tolist() == X.tolist()


def test_outputs_keep_the_names_of_a_dict_and_are_numbered_in_a_tuple():
    assert list(of_module(module(lambda self, x: {"logits": x, "none": None}), PLAIN).run({"x": X})) == ["logits"]
    assert list(of_module(module(lambda self, x: (x, x)), PLAIN).run({"x": X})) == [
        "OUTPUT__0",
        "OUTPUT__1",
    ]
    with pytest.raises(BadOutput, match="output 'OUTPUT__1' of the model is a str, expected a tensor"):
        of_module(module(lambda self, x: (x, "label")), PLAIN).run({"x": X})


def test_floats_are_cast_to_the_precision_and_back_and_whole_numbers_are_not():
    seen = []

    def forward(self, x, k):
        seen.append((x.dtype, k.dtype, x.requires_grad, torch.is_inference_mode_enabled()))
        return x, k

    found = of_module(module(forward), ProgramSettings(precision="bf16")).run({"x": X, "k": np.array([1, 2])})
    assert seen == [(torch.bfloat16, torch.int64, False, True)]
    assert [str(a.dtype) for a in found.values()] == ["float32", "int64"]


def test_a_read_only_array_is_copied():
    fixed = X.copy()
    fixed.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_module(module(lambda self, x: x.add_(1)), PLAIN).run({"x": fixed})
    assert fixed.tolist() == X.tolist()


# ---- exported programs


def test_an_exported_program_declares_its_inputs_and_outputs(model_files):
    program = of_exported(torch_files.load_exported(str(model_files / "net.pt2")), PLAIN)
    assert program.inputs == (Input("x", "FP32", (-1, 4)),)
    assert [(o.datatype, o.shape) for o in program.outputs] == [("FP32", (-1, 3))]
    assert (program.rows, program.platform) == ((1, 512), "pytorch_exported")
    assert np.allclose(next(iter(program.run({"x": X}).values())), scores(X))


@pytest.mark.parametrize("least", [1, 4])
def test_an_exported_program_has_the_rows_of_its_graph(least):
    rows = torch.export.Dim("rows", min=least)
    found = of_exported(exported(lambda self, x: x + 1, torch.zeros(4, 2), shapes=[{0: rows}]), PLAIN)
    assert found.rows == (least, ANY_ROWS[1])
    fixed = of_exported(exported(lambda self, x: x + 1, torch.zeros(4, 2)), PLAIN)
    assert (fixed.rows, fixed.unbatched, fixed.inputs[0].shape) == ((4, 4), True, (4, 2))
    assert not found.unbatched


def test_an_exported_program_whose_outputs_do_not_follow_its_inputs_has_no_rows():
    rows = {0: torch.export.Dim("rows", min=2)}
    for forward, arguments, shapes in (
        (lambda self, x: x.sum(), (torch.zeros(4, 2),), [rows]),
        (lambda self, x: torch.cat([x, x]), (torch.zeros(4, 2),), [rows]),
        (lambda self, x, wait: (x, wait), (torch.zeros(5), torch.zeros(1)), None),
    ):
        program = of_exported(exported(forward, *arguments, shapes=shapes), PLAIN)
        assert program.unbatched
        found = program.run({i.name: a.numpy() for i, a in zip(program.inputs, arguments, strict=True)})
        assert len(found) == len(arguments)


def test_keywords_and_dicts_of_an_exported_program_keep_their_names():
    program = of_exported(
        exported(lambda self, a, *, k: {"sum": a + k, "k": (k,)[0]}, torch.zeros(2, 4), k=torch.zeros(2, 4)), PLAIN
    )
    assert [i.name for i in program.inputs] == ["a", "k"]
    assert program.outputs == ()
    found = program.run({"k": X, "a": X})
    assert {name: array.tolist() for name, array in found.items()} == {"sum": (2 * X).tolist(), "k": X.tolist()}


@pytest.mark.parametrize(
    ("forward", "arguments", "error"),
    [
        (lambda self, pair: pair[0] + pair[1], ((torch.zeros(2), torch.zeros(2)),), "inputs other than tensors"),
        (lambda self, x, k: x + k, (torch.zeros(2), 3), "inputs other than tensors"),
        (lambda self, x, k: x + k, (torch.zeros(2), torch.tensor(3)), "inputs other than tensors"),
        (lambda self, x: x + 1, (torch.zeros(2, dtype=torch.complex64),), "inputs other than tensors"),
    ],
)
def test_an_exported_program_without_rows_of_tensors_is_refused(forward, arguments, error):
    with pytest.raises(LoadFailed, match=error):
        of_exported(exported(forward, *arguments), PLAIN)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["net.ts", "net.pt2"])
def test_programs_run_on_the_gpu(model_files, name):
    module = loaders.prepare(torch_files.load_module(str(model_files / name), "cuda:0"), "cuda:0")
    assert near(module(torch.tensor(X, device="cuda:0")).cpu(), scores(X), 1e-4)


# ---- what networks of others take and return


def scripted(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


class Half(torch.nn.Module):
    """Takes two inputs, of which one has whole numbers."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + shift[:, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["exported", "script", "module"])
def test_a_network_of_half_precision_takes_and_returns_fp32(dtype, kind):
    net = Half().to(dtype).eval()
    example = (torch.zeros(2, 4, dtype=dtype), torch.zeros(2, dtype=torch.int64))
    if kind == "exported":
        rows = torch.export.Dim("rows", min=1, max=64)
        program = of_exported(torch.export.export(net, example, dynamic_shapes=({0: rows}, {0: rows})), PLAIN)
    else:
        program = of_module(scripted(net) if kind == "script" else net, PLAIN)
    first, second = (spec.name for spec in program.inputs)
    (found,) = program.run({first: X, second: np.array([1, 2])}).values()
    assert found.dtype == np.float32
    assert np.allclose(found, net(torch.tensor(X).to(dtype), torch.tensor([1, 2])).detach().float(), atol=1e-2)


class Pair(torch.nn.Module):
    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None):
        return x * 2, None, x


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        y = x * 2
        return y, y, x + 1


def test_an_output_that_is_none_is_left_out():
    found = of_module(Pair(), PLAIN).run({"x": X})
    assert sorted(found) == ["OUTPUT__0", "OUTPUT__2"]
    exported = of_exported(torch.export.export(Pair(), (torch.zeros(2, 4),)), PLAIN)
    assert sorted(exported.run({exported.inputs[0].name: X})) == ["OUTPUT__0", "OUTPUT__2"]


def test_an_output_that_is_returned_twice_has_two_names():
    rows = torch.export.Dim("rows", min=1, max=64)
    program = of_exported(torch.export.export(Twice(), (torch.zeros(2, 4),), dynamic_shapes=({0: rows},)), PLAIN)
    found = program.run({program.inputs[0].name: X})
    assert [spec.name for spec in program.outputs] == list(found)
    assert [np.array_equal(array, X * 2) for array in found.values()] == [True, True, False]


class Lists(torch.nn.Module):
    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(xs)


class Number(torch.nn.Module):
    def forward(self, x: torch.Tensor, times: int, more: float = 2.0) -> torch.Tensor:
        return x * times * more


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (Lists, r"`forward` needs 'xs', which is list\[torch.Tensor\]; expected tensors"),
        (lambda: scripted(Lists()), r"`forward` needs 'xs', which is List\[Tensor\]; expected tensors"),
        (lambda: scripted(Number()), "`forward` needs 'times', which is int; expected tensors"),
    ],
)
def test_a_network_that_needs_more_than_tensors_is_refused_at_load(module, told):
    with pytest.raises(LoadFailed, match=told):
        of_module(module(), PLAIN)
