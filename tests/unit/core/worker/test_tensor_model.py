"""TensorModel checks requests of arrays and runs each batch as one call of a program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.worker.python_model import PythonModel
from penstock.core.worker.tensor_model import ANY_ROWS, Input, ProgramSettings, TensorModel, cannot_be_rows
from penstock.errors import BadRequest, LoadFailed, WrongRowCount
from penstock.types import TensorSpec


class Summing:
    """Sums the elements of each row over all inputs, as INT64, and records the shapes of its calls."""

    platform = "sums"
    unbatched = False

    def __init__(self, *inputs: Input, rows: tuple[int, int] = ANY_ROWS, outputs: int = 1) -> None:
        self.inputs = inputs
        self.outputs = tuple(TensorSpec(f"y{i}", "FP32", (-1,)) for i in range(outputs))
        self.rows = rows
        self.calls: list[dict[str, tuple[int, ...]]] = []

    def run(self, arrays):
        self.calls.append({name: array.shape for name, array in arrays.items()})
        total = sum(array.reshape(len(array), -1).sum(1) for array in arrays.values())
        return {spec.name: total + i for i, spec in enumerate(self.outputs)}


X = Input("x", "FP32", (-1, 2))
ANY = Input("x", None, None, alias="INPUT__0")


def model(*inputs: Input, **more: Any) -> tuple[TensorModel, Summing]:
    program = Summing(*inputs, **more)
    made = TensorModel(lambda settings: program, ProgramSettings())
    made.load("cpu")
    return made, program


def answers(made: TensorModel, *items: Any) -> list[Any]:
    return made.predict([made.preprocess(item) for item in items])


def f32(*values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def test_the_program_is_opened_on_the_device_with_the_settings():
    seen = []

    def open_program(settings):
        seen.append((settings.device, settings.precision))
        return Summing(X)

    found = PythonModel(TensorModel(open_program, ProgramSettings(precision="fp16")), precision="fp16")
    found.load("cuda:1")
    assert seen == [("cuda:1", "fp16")]
    assert found.takes == {"precision", "optimize", "threads"}
    with pytest.raises(LoadFailed, match="not loaded"):
        TensorModel(open_program, ProgramSettings()).preprocess([1, 2])


def test_requests_of_one_shape_run_together_and_get_their_own_rows():
    made, program = model(X)
    found = answers(made, {"x": f32([1, 2], [3, 4])}, [5, 6], {"x": [[7, 8]]}, f32(1, 1))
    assert [type(f) for f in found] == [dict, np.float32, dict, np.float32]
    assert [np.asarray(f["y0"] if isinstance(f, dict) else f).tolist() for f in found] == [[3, 7], 11, [15], 2]
    assert program.calls == [{"x": (5, 2)}]


def test_lists_with_a_row_axis_get_results_with_one():
    made, _ = model(X)
    found = answers(made, [[1, 2], [3, 4]], [[5, 6]], {"x": [5, 6]}, {"x": [[5, 6]]})
    assert [f.tolist() for f in found[:2]] == [[3, 7], [11]]
    assert (found[2]["y0"], found[3]["y0"].tolist()) == (11, [11])


def test_lists_for_an_input_of_unknown_shape_are_one_row():
    made, program = model(ANY)
    assert [f.tolist() for f in answers(made, [1, 2], [[1, 2], [3, 4]])] == [3, 10]
    assert program.calls == [{"x": (1, 2)}, {"x": (1, 2, 2)}]


def test_requests_of_different_shapes_run_apart():
    made, program = model(Input("x", "FP32", (-1, -1)))
    found = answers(made, {"x": f32([1])}, {"x": f32([1, 2])}, {"x": f32([3])})
    assert [f["y0"].tolist() for f in found] == [[1], [3], [3]]
    assert program.calls == [{"x": (2, 1)}, {"x": (1, 2)}]


def test_several_outputs_are_a_dict():
    made, _ = model(X, outputs=2)
    assert answers(made, [1, 2]) == [{"y0": 3, "y1": 4}]


def test_inputs_may_be_named_by_position_and_optional_inputs_left_out():
    made, program = model(ANY, Input("mask", alias="INPUT__1", required=False))
    assert answers(made, {"INPUT__0": f32([1, 2])}, [3, 4.5])[1] == 7.5
    assert answers(made, {"x": f32([1]), "INPUT__1": f32([2])})[0]["y0"].tolist() == [3]
    assert program.calls[-1] == {"x": (1, 1), "mask": (1, 1)}


@pytest.mark.parametrize("rows", [ANY_ROWS, (3, 4)])
def test_a_request_without_rows_gets_outputs_without_rows(rows: tuple[int, int]):
    made, program = model(X, rows=rows, outputs=2)
    empty = np.zeros((0, 2), np.float32)
    for found in answers(made, {"x": empty})[0], answers(made, {"x": f32([1, 2])}, {"x": empty})[1]:
        assert [(y.dtype, y.shape) for y in found.values()] == [(np.float32, (0,))] * 2
    assert all(call["x"][0] >= rows[0] for call in program.calls)


def test_no_texts_are_padded_with_empty_texts():
    class Lengths(Summing):
        def run(self, arrays):
            return {"y0": np.array([len(text) for text in arrays["x"].ravel()])}

    program = Lengths(Input("x", "BYTES", (-1, 1)))
    made = TensorModel(lambda settings: program, ProgramSettings())
    made.load("cpu")
    assert answers(made, {"x": np.empty((0, 1), object)})[0]["y0"].shape == (0,)


TWO = (X, Input("k", "INT64", (-1,)))


@pytest.mark.parametrize(
    ("inputs", "item", "error"),
    [
        ((X,), [1, 2, 3], r"input 'x': shape must be \[-1, 2\] \(-1 is any size\), found \[1, 3\]|found \[3\]"),
        ((X,), {"x": f32([1, 2, 3])}, r"shape must be \[-1, 2\].*found \[1, 3\]"),
        ((X,), {"x": f32(1, 2)}, r"shape must be \[-1, 2\].*found \[2\]"),
        ((X,), {"x": np.zeros((1, 2))}, "datatype must be FP32, found FP64"),
        ((X,), {"x": np.zeros((1, 2), np.complex64)}, "datatype must be FP32, found complex64"),
        ((X,), {"x": np.float32(1)}, "no rows"),
        ((X,), {"x": f32([1, 2]), "z": f32([1, 2])}, "unknown input 'z'; the model has x"),
        ((X,), {5: f32([1, 2])}, "unknown input '5'"),
        ((X,), {}, "input 'x' is missing"),
        ((ANY,), {"x": [1], "INPUT__0": [1]}, "input 'x' is given twice"),
        ((X,), [[1], [2, 3]], "ragged"),
        ((X,), ["a", "b"], "holds strings"),
        ((X,), [None, 1], "null or mixed"),
        ((X,), [1e300, 1], "outside the range of FP32"),
        ((X,), True, "booleans|no rows"),
        ((ANY,), [[1], [2, 3]], "ragged"),
        ((ANY,), ["a"], "holds strings"),
        ((ANY,), None, "null or mixed"),
        ((ANY,), {"x": np.array([b"a"], object)}, "datatype must be numeric, found object"),
        ((X,), b"\x89PNG", "found bytes; expected JSON"),
        ((X,), memoryview(b"x"), "found bytes"),
        ((X,), "text", "holds strings"),
        (TWO, [1, 2], "the model has the inputs x, k; expected an object"),
        (TWO, {"x": [1, 2]}, "input 'k' is missing; the model needs x, k"),
        (TWO, {"x": f32([1, 2]), "k": np.array([1, 2])}, "the same number of rows .axis 0., found 'x' 1, 'k' 2"),
        (TWO, {"x": [[1, 2]], "k": 1}, "the same number of rows"),
        (TWO, {"x": [1, 2], "k": 2**70}, "too large|a number that INT64 cannot|null or mixed"),
        (TWO, {"x": [1, 2], "k": 1.5}, "INT64 data holds fractions"),
    ],
)
def test_the_error_for_an_invalid_request_states_what_was_found_and_expected(inputs, item, error):
    made, program = model(*inputs)
    with pytest.raises(BadRequest, match=error):
        made.preprocess(item)
    assert program.calls == []


def test_an_output_without_rows_is_an_error():
    made, program = model(X)
    program.run = lambda arrays: {"y0": np.zeros(3)}
    with pytest.raises(WrongRowCount, match=r"output 'y0' has the shape \[3\] for 1 rows"):
        answers(made, [1, 2])
    program.run = lambda arrays: {"y0": np.float32(3)}
    with pytest.raises(WrongRowCount, match=r"the shape \[\] for 1 rows"):
        answers(made, [1, 2])


def test_calls_of_one_request_that_only_add_up_to_its_rows_are_an_error():
    made, program = model(X, rows=(1, 1))
    program.run = lambda arrays: {"y0": np.zeros(int(arrays["x"][0, 0]))}
    with pytest.raises(WrongRowCount):
        answers(made, {"x": f32([2, 0], [0, 0])})


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ([-1], [-1], False),
        ([1], [1], False),
        ([1], [-1], False),  # exporters leave sizes of outputs open
        (["rows"], ["rows", "rows"], False),
        ([16], [16], True),
        ([5, 1], [5], True),
        ([-1, 1], [-1], True),
        (["rows", -1], [-1, "rows"], False),
        ([-1], ["rows"], False),
        (["q", "k"], ["q"], True),
        (["rows"], ["found"], True),
        ([-1], [-1, 3], True),  # a constant
        ([1], [100], True),  # the best boxes
        ([-1], [None], True),  # a scalar
        ([], [1], True),
    ],
)
def test_declared_sizes_tell_whether_axis_0_can_be_rows(inputs, outputs, expected):
    assert cannot_be_rows(inputs, outputs) is expected


def test_without_rows_each_request_is_a_call_and_has_its_outputs_as_they_are():
    made, program = model(Input("x", "FP32", (5,)), Input("wait", "FP32", (1,)), Input("any", required=False))
    program.unbatched = True
    made.load("cpu")
    made.__penstock_unbatch__()
    program.run = lambda arrays: {
        "sum": arrays["x"].sum(),
        "kept": arrays["x"][arrays["x"] > 1],
        "constant": np.zeros((2, 3), np.float32),
        "any": arrays.get("any", np.zeros(0)),
    }
    assert made.__penstock_options__ == {"rows": "none"}
    x = f32(0, 1, 2, 3, 4)
    one, other = answers(made, {"x": x, "wait": f32(0)}, {"x": (x + 9).tolist(), "wait": 0.5, "any": [[1, 2]]})
    assert (one["sum"], one["kept"].tolist(), one["constant"].shape) == (10, [2, 3, 4], (2, 3))
    assert (other["sum"], len(other["kept"]), other["any"].tolist()) == (55, 5, [[1, 2]])
    with pytest.raises(BadRequest, match=r"'x': shape must be \[5\] .*found \[4\]"):
        made.preprocess({"x": x[:4], "wait": f32(0)})


@pytest.mark.parametrize(
    ("rows", "given", "calls"),
    [((1, 1), 3, [1, 1, 1]), ((4, 4), 3, [4]), ((2, 4), 7, [4, 3]), ((2, 4), 1, [2]), ((2, 4), 5, [4, 2])],
)
def test_a_program_gets_the_rows_that_it_takes(rows, given, calls):
    made, program = model(X, rows=rows)
    x = np.arange(2 * given, dtype=np.float32).reshape(given, 2)
    assert answers(made, {"x": x})[0]["y0"].tolist() == x.sum(1).tolist()
    assert [call["x"][0] for call in program.calls] == calls


@pytest.mark.parametrize(
    ("inputs", "rows", "options"),
    [
        ((X,), ANY_ROWS, {}),
        ((X,), (1, 8), {"max_batch_size": 8}),
        ((ANY,), ANY_ROWS, {"bucket": "shape"}),
        ((X, Input("t", "INT64", (-1, -1))), (2, 2), {"bucket": "shape", "max_batch_size": 2}),
    ],
)
def test_a_program_sets_its_batching_options(inputs, rows, options):
    made, _ = model(*inputs, rows=rows)
    assert made.__penstock_options__ == options


def test_known_inputs_are_declared_and_used_for_the_warm_up():
    made, _ = model(X, Input("k", "INT64", (-1,)))
    assert made.inputs == (TensorSpec("x", "FP32", (-1, 2)), TensorSpec("k", "INT64", (-1,)))
    assert (made.platform, [o.name for o in made.outputs]) == ("sums", ["y0"])
    samples = made.warmup()
    assert [{name: (a.shape, str(a.dtype)) for name, a in sample.items()} for sample in samples] == [
        {"x": ((1, 2), "float32"), "k": ((1,), "int64")}
    ] * 2
    assert (samples[0]["x"] != samples[1]["x"]).all()
    assert answers(made, samples[0])[0]["y0"].tolist() == [samples[0]["x"].sum()]
    fixed, _ = model(Input("x", "FP32", (5, 2)))
    assert fixed.inputs == (TensorSpec("x", "FP32", (-1, 2)),)
    fixed.__penstock_unbatch__()
    assert fixed.inputs == (TensorSpec("x", "FP32", (5, 2)),)
    assert fixed.warmup()[0]["x"].shape == (5, 2)
    for unknown in (ANY, Input("x", "FP32", (-1, -1)), Input("x", "BYTES", (-1, 1))):
        assert model(unknown)[0].warmup() == []
    assert model(X, ANY)[0].inputs == ()


def test_a_compiled_program_runs_once_while_it_is_loaded():
    for inputs, calls in ((X,), [1, 2]), ((ANY,), []):
        program = Summing(*inputs)
        TensorModel(lambda settings, program=program: program, ProgramSettings(optimize="compile")).load("cpu")
        assert [call["x"][0] for call in program.calls] == calls


def test_a_program_that_has_no_rows_is_not_compiled_for_several():
    program = Summing(X)
    program.run = lambda arrays: {"y0": np.zeros(0)}
    compiled = TensorModel(lambda settings: program, ProgramSettings(optimize="compile"))
    compiled.load("cpu")
    program.unbatched, program.run = True, None
    compiled.load("cpu")


def test_a_request_alone_is_padded_to_the_fewest_rows():
    made, program = model(X, rows=(4, 8))
    made.__penstock_unbatch__()
    assert [found.tolist() for found in answers(made, [1, 2], [[3, 4]] * 5)] == [3, [7] * 5]
    assert [call["x"][0] for call in program.calls] == [4, 5]


def test_strings_are_a_single_row_of_bytes():
    made, _ = model(Input("t", "BYTES", (-1,)))
    request = made.preprocess("hé")
    assert (request.single, request.arrays["t"].tolist()) == (True, ["hé".encode()])
    made.unload()
    with pytest.raises(LoadFailed):
        made.predict([request])
