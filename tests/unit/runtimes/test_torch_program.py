"""PyTorch modules as programs over arrays: names of inputs and outputs, datatypes, rows."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from penstock.errors import BadOutput, LoadFailed
from penstock.runtimes import torch as loaders
from penstock.runtimes.tensor_model import ANY_ROWS, Input, ProgramSettings
from penstock.runtimes.torch import of_exported, of_module
from penstock.types import TensorSpec
from support.files import scores

torch = pytest.importorskip("torch")
PLAIN = ProgramSettings()
X = np.array([[1, 2, 3, 4], [0, 0, 1, 0]], np.float32)


def module(forward):
    return type("Own", (torch.nn.Module,), {"forward": forward})()


def exported(forward, *arguments, shapes=None, **named):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(module(forward), arguments, named, dynamic_shapes=shapes)


def test_torchscript_has_the_inputs_of_its_schema_also_by_position(model_files):
    program = of_module(loaders.load_module(str(model_files / "net.ts")), PLAIN)
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
    program = of_exported(loaders.load_exported(str(model_files / "net.pt2")), PLAIN)
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
