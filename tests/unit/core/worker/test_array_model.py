"""A Python model with declared tensors receives the arrays of a whole batch by name."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from penstock.config.schema import BatchingConfig
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.profile import RowsCoupled, warm_up
from penstock.core.worker.python_model import PythonModel, Tensors, model
from penstock.errors import BadOutput, BadRequest, ConfigError, ItemFailed, LoadFailed, WrongRowCount
from penstock.types import BatchPart, Item, TensorSpec

X, Y = {"x": "FP32[-1,2]"}, {"y": "FP32[-1,2]"}


def f32(*rows: Any) -> np.ndarray:
    return np.array(rows, np.float32)


def declared(predict: Any, inputs: Tensors = X, outputs: Tensors = Y, **members: Any) -> Any:
    """A class with the function as its `predict`."""
    return type("Declared", (), {"predict": predict, "inputs": inputs, "outputs": outputs, **members})


def opened(target: Any, tensors: Any = None, **batching: Any) -> BatchRunner:
    loaded = PythonModel(target, None, tensors)
    loaded.load("cpu")
    options = BatchingConfig(**{**loaded.declared_options(), **batching})
    loaded.begin_loop(options)
    return BatchRunner(loaded, loaded.metadata("m", "1"), options)


def run(target: Any, *values: Any, tensors: Any = None, **batching: Any) -> list[Any]:
    """The results of one batch; errors replace failed ones."""
    runner = opened(target, tensors, **batching)
    parts: list[BatchPart] = []
    runner.run(1, runner.decode([Item(value) for value in values]), parts.append)
    runner.close()
    return [r.error or r.body for r in parts[-1].results if r is not None]


def failure(predict: Any, *values: Any, **more: Any) -> Any:
    """The error of the last request of a batch."""
    return run(declared(predict, **more), *(values or ({"x": f32([1, 2])},)))[-1]


class Doubles:
    inputs, outputs = X, Y

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def predict(self, x):
        self.calls.append((type(x), x.dtype.name, x.shape))
        return x * 2


@model(inputs=X, outputs=Y)
def doubled(x):
    return {"y": x * 2}


@model(inputs=X, outputs=Y)
async def doubled_later(x):
    return x * 2


def scaled(x, factor):
    return x * factor


PARTIAL = functools.partial(scaled, factor=np.float32(2))
SPECS = [TensorSpec("x", "FP32", (-1, 2))], [TensorSpec("y", "FP32", (-1, 2))]
FORMS = {
    "class": Doubles,
    "instance": Doubles(),
    "decorated function": doubled,
    "coroutine": doubled_later,
    "sequences of specs": declared(lambda self, x: x * 2, *SPECS),
    "keywords": declared(lambda self, **tensors: tensors["x"] * 2),
    "keyword only": declared(lambda self, *, x: x * 2),
    "another parameter with a default": declared(lambda self, x, factor=2: x * factor),
    "decorated with specs": model(inputs=SPECS[0], outputs=SPECS[1])(lambda x: x * 2),
}


@pytest.mark.parametrize("target", FORMS.values(), ids=FORMS.keys())
def test_each_form_of_a_declared_model_receives_the_rows_of_all_requests(target: Any) -> None:
    together, single, named = run(target, {"x": f32([1, 2], [3, 4])}, [5, 6], {"x": [7, 8]})
    assert together["y"].tolist() == [[2, 4], [6, 8]]
    assert single.tolist() == [10, 12]
    assert named["y"].tolist() == [14, 16]


def test_a_batch_is_one_call_and_the_metadata_show_the_declaration() -> None:
    target = Doubles()
    runner = opened(target)
    runner.run(1, runner.decode([Item([1, 2]), Item({"x": f32([3, 4], [5, 6])})]), lambda part: None)
    assert target.calls == [(np.ndarray, "float32", (3, 2))]
    assert runner.metadata.inputs == tuple(SPECS[0])
    assert runner.metadata.outputs == tuple(SPECS[1])


def test_a_partial_function_takes_its_tensors_from_the_configuration() -> None:
    tensors = {"inputs": X, "outputs": Y}
    assert run(PARTIAL, [1, 2], tensors=tensors)[0].tolist() == [2, 4]


def test_the_configuration_replaces_what_the_model_declares() -> None:
    tensors = {"inputs": {"x": "FP32[-1,3]"}, "outputs": {"z": "FP32[-1,3]"}}
    runner = opened(declared(lambda self, x: x), tensors)
    assert runner.metadata.inputs == (TensorSpec("x", "FP32", (-1, 3)),)
    assert runner.metadata.outputs == (TensorSpec("z", "FP32", (-1, 3)),)


@pytest.mark.parametrize(
    "target",
    [
        declared(lambda self, items: items),
        declared(lambda self, requests: requests, *SPECS),
        declared(lambda self, *items: items[0], *SPECS),
        model(inputs=X)(lambda items: items),
    ],
    ids=["table", "specs, another name", "specs, no name", "function"],
)
def test_a_predict_of_items_stays_as_it_is_and_may_declare_tensors(target: Any) -> None:
    item = {"x": f32([1, 2])}
    assert run(target, item)[0] is item
    assert opened(target).metadata.inputs == tuple(SPECS[0])


def test_a_parameter_annotated_as_a_list_receives_items_even_with_the_name_of_an_input() -> None:
    def predict(self: Any, x: list[dict[str, Any]]) -> list[Any]:
        return [len(x)] * len(x)

    assert run(declared(predict), {"x": f32([1, 2])}, {"x": f32([1, 2])}) == [2, 2]


def test_an_input_whose_parameter_has_a_default_is_optional() -> None:
    def predict(self, x, bias=None):
        return x if bias is None else x + bias

    target = declared(predict, {"x": "FP32[-1,2]", "bias": "FP32[-1,1]"})
    with_bias, without = run(target, {"x": f32([1, 2]), "bias": f32([10])}, {"x": f32([1, 2])})
    assert with_bias["y"].tolist() == [[11, 12]]
    assert without["y"].tolist() == [[1, 2]]
    assert [spec.optional for spec in opened(target).metadata.inputs] == [False, True]
    spec = TensorSpec("x", "FP32", (-1,), optional=True)
    with pytest.raises(LoadFailed, match="'x' is optional: give the parameter of predict a default"):
        opened(declared(lambda self, x: x, [spec]))


def test_requests_without_any_optional_input_run_one_by_one() -> None:
    """Without inputs `predict` cannot know how many rows a call has."""
    calls: list[Any] = []

    def predict(self: Any, x: Any = None) -> Any:
        calls.append(x if x is None else len(x))
        return f32([0, 0]) if x is None else x

    found = run(declared(predict), {}, {"x": f32([1, 2])}, {}, {"x": f32([3, 4])})
    assert [each["y"].tolist() for each in found] == [[[0, 0]], [[1, 2]], [[0, 0]], [[3, 4]]]
    assert sorted(calls, key=str) == [2, None, None]


def test_requests_are_checked_one_by_one() -> None:
    found = run(Doubles, [1, 2], [1, 2, 3], {"z": [1, 2]}, {"x": f32([1, 2]).astype(np.float64)}, {"x": f32([3, 4])})
    assert found[0].tolist() == [2, 4]
    assert found[4]["y"].tolist() == [[6, 8]]
    assert [type(error) for error in found[1:4]] == [BadRequest] * 3
    assert found[3].message == "input 'x': datatype must be FP32, found FP64"


def test_outputs_may_stay_undeclared() -> None:
    named = declared(lambda self, x: {"a": x, "b": x.sum(1)}, outputs={})
    assert sorted(run(named, [1, 2])[0]) == ["a", "b"]
    assert run(declared(lambda self, x: x, outputs={}), {"x": f32([1, 2])})[0]["output_0"].tolist() == [[1, 2]]


# ---- what predict returns


@pytest.mark.parametrize(
    "result",
    [
        lambda x: x[::-1][::-1],
        lambda x: np.asfortranarray(np.tile(x, (1, 2)))[:, :2],
        lambda x: x,
        lambda x: list(x),
        lambda x: tuple(row for row in x),
        lambda x: memoryview(x),
    ],
    ids=["negative strides", "not contiguous", "the input", "list of arrays", "tuple", "buffer"],
)
def test_whatever_numpy_reads_as_an_array_is_a_result(result: Any) -> None:
    a, b = run(declared(lambda self, x: result(x)), {"x": f32([1, 2])}, {"x": f32([3, 4], [5, 6])})
    assert (a["y"].tolist(), b["y"].tolist()) == ([[1, 2]], [[3, 4], [5, 6]])


def test_a_torch_tensor_on_the_cpu_is_a_result() -> None:
    torch = pytest.importorskip("torch")

    def predict(self, x):
        return torch.from_numpy(x) * 2

    assert run(declared(predict), [1, 2])[0].tolist() == [2, 4]
    error = failure(lambda self, x: torch.from_numpy(x).requires_grad_())
    assert type(error) is BadOutput
    assert "output 'y': predict returned a Tensor that is no array" in error.message


def test_texts_are_a_result_of_bytes() -> None:
    outputs = {"y": "BYTES[-1]"}
    for texts in (["a", "b\0"], [b"a", b"b\0"], np.array(["a", "b\0"], object), np.array(["a", "bc"])):
        (found,) = run(declared(lambda self, x, texts=texts: texts, outputs=outputs), {"x": f32([1, 2], [3, 4])})
        assert found["y"].dtype == object
        assert found["y"].tolist() == list(texts)


def test_bf16_is_float32_in_numpy() -> None:
    seen = []

    def predict(self, x):
        seen.append(x.dtype.name)
        return x

    (found,) = run(declared(predict, {"x": "BF16[-1,2]"}, {"y": "BF16[-1,2]"}), {"x": f32([1, 2])})
    assert (seen, found["y"].dtype.name) == (["float32"], "float32")


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (
            lambda x: x.astype(np.float64),
            BadOutput,
            "output 'y': predict returned float64 [1, 2], but the model declares FP32 [-1, 2], which is float32:"
            " return numpy.asarray(y, 'float32'), or declare FP64",
        ),
        (lambda x: x.tolist(), BadOutput, "return numpy.asarray(y, 'float32')"),
        (lambda x: x.astype(complex), BadOutput, "predict returned complex128 [1, 2], but the model declares FP32"),
        (lambda x: x[:, :1], BadOutput, "predict returned float32 [1, 1], but the model declares FP32 [-1, 2]"),
        (lambda x: x.sum(), BadOutput, "predict returned float32 [], but"),
        (lambda x: None, BadOutput, "predict returned object [], but"),
        (lambda x: [[1, 2], [3]], BadOutput, "output 'y': predict returned a list that is no array"),
        (lambda x: {"z": x}, BadOutput, "predict returned z, but the model declares the outputs y"),
        (lambda x: {"y": x, "z": x}, BadOutput, "predict returned y, z, but the model declares the outputs y"),
        (lambda x: {}, BadOutput, "predict returned nothing, but the model declares the outputs y"),
        (lambda x: x[:0], WrongRowCount, "output 'y' has the shape [0, 2] for 1 rows"),
        (lambda x: np.tile(x, (2, 1)), WrongRowCount, "output 'y' has the shape [2, 2] for 1 rows"),
        (lambda x: 1 / 0, ItemFailed, "the model raised ZeroDivisionError"),
        (lambda x: [KeyError("no")], ItemFailed, "the model raised KeyError"),
    ],
)
def test_another_result_is_a_clear_error(result: Any, error: Any, message: str) -> None:
    found = failure(lambda self, x: result(x))
    assert type(found) is error
    assert message in found.message


def test_several_outputs_are_a_dictionary() -> None:
    outputs = {"y": "FP32[-1,2]", "n": "INT64[-1]"}
    target = declared(lambda self, x: {"n": np.arange(len(x)), "y": x}, outputs=outputs)
    assert list(run(target, [1, 2])[0]) == ["y", "n"]
    error = failure(lambda self, x: x, outputs=outputs)
    assert error.message == "predict returned a ndarray, expected a dictionary of the outputs y, n"


@pytest.mark.parametrize("form", ["raise", "in its place", "too few rows"])
def test_a_row_that_fails_fails_alone(form: str) -> None:
    def predict(self, x):
        wrong = x[:, 0] < 0
        if form == "raise" and wrong.any():
            raise ValueError("negative")
        if form == "too few rows":
            return x[~wrong]
        return [ValueError("negative") if bad else row for bad, row in zip(wrong, x, strict=True)]

    values = [{"x": f32([n, n])} for n in (1, 2, -3, 4, 5)]
    found = run(declared(predict), *values)
    error = found.pop(2)
    assert type(error) is (WrongRowCount if form == "too few rows" else ItemFailed)
    assert [row["y"].tolist() for row in found] == [[[n, n]] for n in (1, 2, 4, 5)]


def test_a_model_may_change_its_input_whether_or_not_a_request_is_alone() -> None:
    def predict(self, x):
        x += 1
        return x

    mine = f32([1, 2])
    mine.flags.writeable = False
    for count in (1, 3):
        found = run(declared(predict), *[{"x": mine}] * count)
        assert [row["y"].tolist() for row in found] == [[[2, 3]]] * count
    assert mine.tolist() == [[1, 2]]


def test_a_request_without_rows_has_outputs_without_rows() -> None:
    assert run(Doubles, {"x": np.empty((0, 2), np.float32)})[0]["y"].shape == (0, 2)


# ---- declarations


@pytest.mark.parametrize(
    ("predict", "inputs"),
    [
        (lambda self, X: X, X),
        (lambda self, x, y: x, X),
        (lambda self, x: x, {"x": "FP32[-1]", "y": "FP32[-1]"}),
        (lambda self, x, y: x, SPECS[0]),
        (lambda self: 1, X),
    ],
)
def test_parameters_that_are_not_the_inputs_are_named_with_them(predict: Any, inputs: Any) -> None:
    with pytest.raises(LoadFailed, match=r"found predict\(.*\) for the inputs x.*: give each parameter the name of an"):
        opened(declared(predict, inputs))


@pytest.mark.parametrize(
    "predict", [lambda self, x, parameters: x, lambda self, x, sequences: x, lambda self, x, parameters=None: x]
)
def test_arrays_come_without_the_parameters_and_sequences_of_requests(predict: Any) -> None:
    with pytest.raises(LoadFailed, match="an array comes without the parameters and sequences of requests"):
        opened(declared(predict))
    with pytest.raises(LoadFailed, match="max_sequences needs predict"):
        opened(Doubles, max_sequences=2)


@pytest.mark.parametrize("hook", ["preprocess", "postprocess", "explain"])
def test_hooks_for_items_are_refused(hook: str) -> None:
    with pytest.raises(LoadFailed, match=rf"predict\(x\) receives the arrays of a whole batch, but '{hook}' does not"):
        opened(declared(lambda self, x: x, **{hook: lambda self, item: item}))


def test_streams_and_calls_side_by_side_need_items() -> None:
    def parts(self, x):
        yield x

    with pytest.raises(LoadFailed, match="but it is a generator"):
        opened(declared(parts))
    with pytest.raises(LoadFailed, match=r"'concurrency' is for your own predict\(items\)"):
        opened(doubled_later, concurrency=4)


@pytest.mark.parametrize("side", ["inputs", "outputs"])
@pytest.mark.parametrize(
    "given",
    [
        {"x": "FP33[-1]"},
        {"x": "[64]"},
        {"x": "FP32[64]"},
        {"x": 5},
        "FP32[-1]",
        7,
        ["x"],
        [TensorSpec("x", "FP33", (-1,))],
        [TensorSpec("x", "FP32", (-2,))],
    ],
)
def test_a_declaration_that_cannot_be_read_shows_the_right_form(side: str, given: Any) -> None:
    right = r'(such as "FP32\[-1,3,224,224\]", with -1 for the rows|{"x": "FP32\[-1,64\]"}|TensorSpec\(.x., .FP32.)'
    with pytest.raises(ConfigError, match=rf"^@penstock.model: {side}.*found .*{right}"):
        model(**{side: given})
    with pytest.raises(ConfigError, match=rf"^{side}.*found .*{right}"):
        opened(type("Bad", (Doubles,), {side: given}))


def test_a_tensor_without_axes_is_refused() -> None:
    with pytest.raises(LoadFailed, match="'x' has no axes; expected the rows on axis 0"):
        opened(declared(lambda self, x: x, [TensorSpec("x", "FP32", ())]))


# ---- what the declaration sets


def test_open_sizes_keep_requests_of_different_shapes_apart() -> None:
    target = declared(lambda self, x: x.sum(1), {"x": "FP32[-1,-1]"}, {"y": "FP32[-1]"})
    assert opened(target).model.declared_options() == {"bucket": "shape"}
    decorated = model(max_batch_size=3)(declared(lambda self, x: x))
    assert opened(decorated).model.declared_options() == {"max_batch_size": 3}


def test_without_rows_each_request_is_a_call_of_its_own() -> None:
    @model(rows="none")
    class Sums:
        inputs, outputs = {"x": "FP32[-1]"}, {"y": "FP32[-1]"}

        def predict(self, x):
            return x.sum(keepdims=True)

    assert [found["y"].tolist() for found in run(Sums, {"x": f32(1, 2, 3)}, {"x": f32(4)})] == [[6], [4]]
    assert opened(Sums).metadata.unbatched
    fixed = declared(lambda self, x: x, [TensorSpec("x", "FP32", (3,))], [TensorSpec("y", "FP32", (3,))])
    assert opened(fixed).metadata.inputs == (TensorSpec("x", "FP32", (3,)),)
    assert opened(fixed).batching.rows == "none"


def test_the_warm_up_uses_the_declared_sizes_or_the_samples_of_the_model() -> None:
    target = Doubles()
    profile, best = warm_up(opened(target, max_batch_size="auto"), BatchingConfig(max_batch_size="auto"))
    assert best is not None
    assert {rows for rows, _ in profile} >= {2, 4}
    assert {shape[1:] for _, _, shape in target.calls} == {(2,)}
    own = type("Own", (Doubles,), {"warmup": lambda self: [[1, 2]]})()
    warm_up(opened(own), BatchingConfig(max_batch_size=1))
    assert {shape for _, _, shape in own.calls} == {(1, 2)}


def test_the_warm_up_finds_a_result_that_differs_from_the_declaration_and_rows_that_depend_on_each_other() -> None:
    with pytest.raises(LoadFailed, match=r"own warm-up items: output 'y': predict returned float64"):
        warm_up(opened(declared(lambda self, x: x.astype(float))), BatchingConfig())
    with pytest.raises(RowsCoupled):
        warm_up(opened(declared(lambda self, x: x / (1e-3 + x.sum(0)))), BatchingConfig())


def test_attributes_and_the_end_of_the_model_are_its_own() -> None:
    ended = []
    members = {"parameters": {"a": 1}, "task": "embedding", "platform": "mine", "unload": lambda self: ended.append(1)}
    runner = opened(declared(lambda self, x: x, **members))
    found = runner.metadata
    assert (found.parameters, found.task, found.platform) == ({"a": 1}, "embedding", "mine")
    runner.close()
    assert ended == [1]
