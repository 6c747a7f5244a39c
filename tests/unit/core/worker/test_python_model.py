from __future__ import annotations

from functools import partial

import msgspec
import pytest

from penstock.config.schema import BatchingConfig
from penstock.core.contracts import Model
from penstock.core.worker.python_model import PythonModel, model, options_of
from penstock.errors import ConfigError, LoadFailed
from penstock.types import TensorSpec


class Full:
    inputs = (TensorSpec("x", "FP32", (-1, 2)),)

    def __init__(self):
        self.calls = []

    def load(self, device, precision=None):
        self.calls.append((device, precision))

    def predict(self, items):
        return items

    def preprocess(self, item):
        return item

    def unload(self):
        self.calls.append("unload")


def test_load_receives_the_arguments_that_it_accepts():
    wrapped = PythonModel(Full, precision="fp16", optimize="compile")
    wrapped.load("cuda:1")
    assert wrapped.predict([1]) == [1]
    assert wrapped.preprocess(2) == 2
    assert wrapped.postprocess is None
    wrapped.unload()
    assert wrapped._model.calls == [("cuda:1", "fp16"), "unload"]
    assert wrapped.takes == {"device", "precision"}
    assert wrapped.metadata("m", "2").inputs == Full.inputs
    assert isinstance(wrapped, Model)


@pytest.mark.parametrize(("helpers", "calls"), [(None, ["prepared", ("cpu", None)]), (object(), [("cpu", None)])])
def test_a_class_is_prepared_by_its_helpers_or_before_it_loads(helpers, calls):
    class Prepared(Full):
        def load_preprocess(self):
            self.calls.append("prepared")

    wrapped = PythonModel(Prepared)
    wrapped.helpers = helpers
    wrapped.load("cpu")
    assert wrapped._model.calls == calls


@pytest.mark.parametrize("target", [lambda items: items[::-1], Full()], ids=["function", "instance"])
def test_functions_and_instances_are_models(target):
    wrapped = PythonModel(target)
    wrapped.load("cpu")
    assert sorted(wrapped.predict([1, 2])) == [1, 2]
    assert "optimize" not in wrapped.takes
    wrapped.unload()


@pytest.mark.parametrize("target", [5, type("Empty", (), {})])
def test_a_target_without_predict_is_named(target):
    with pytest.raises(LoadFailed, match=r"the target is a .*(int|Empty).* without predict"):
        PythonModel(target).load("cpu")


class Item(msgspec.Struct):
    x: int


class NoItems:
    def predict(self): ...


def two_needed(items, others): ...
def one_text(text: str) -> str: ...
def one_file(data: bytes) -> str: ...
def one_struct(item: Item) -> Item: ...


class OneNumber:
    def predict(self, x: float) -> float: ...


class AsyncOne:
    async def predict(self, text: str) -> str: ...


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (NoItems, r"predict does not take the items of a batch \(too many .*\): write predict\(items\)"),
        (two_needed, r"predict does not take .*missing a required argument: 'others'"),
        (one_text, r"predict takes one str, .*: write predict\(items: list\[str\]\)"),
        (one_file, r"predict takes one bytes"),
        (one_struct, r"predict takes one Item"),
        (OneNumber, r"predict takes one float"),
        (AsyncOne, r"predict takes one str"),
    ],
)
def test_a_predict_that_does_not_take_a_batch_is_refused(target, told):
    found = PythonModel(target)
    found.load("cpu")
    with pytest.raises(LoadFailed, match=told):
        found.begin_loop(BatchingConfig())


@pytest.mark.parametrize(
    "target",
    [
        lambda items: items,
        lambda *items: items,
        lambda item=None, more=(): item,
        lambda items, parameters: items,
        partial(two_needed, others=1),
        max,
    ],
)
def test_a_predict_that_may_take_a_batch_is_accepted(target):
    found = PythonModel(target)
    found.load("cpu")
    found.begin_loop(BatchingConfig())


@pytest.mark.parametrize("hook", ["load", "load_preprocess", "preprocess", "postprocess", "warmup", "unload"])
def test_a_method_that_would_never_be_awaited_is_refused(hook):
    async def never(*_):
        raise AssertionError

    with pytest.raises(LoadFailed, match=f"'{hook}' of the model is async"):
        PythonModel(type("Late", (), {"predict": lambda self, items: items, hook: never})).load("cpu")


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_declared_tensors_are_a_table_or_specs(side):
    wrapped = PythonModel(type("Table", (Full,), {side: {"x": "INT64[-1,3]"}}))
    wrapped.load("cpu")
    assert getattr(wrapped.metadata("m", "1"), side) == (TensorSpec("x", "INT64", (-1, 3)),)
    wrapped = PythonModel(type("Bad", (Full,), {side: ["x"]}))
    with pytest.raises(ConfigError, match=f"{side}: found 'x', expected a table"):
        wrapped.load("cpu") or wrapped.metadata("m", "1")


def test_the_decorator_leaves_its_target_and_keeps_options():
    @model(max_batch_size=8, slo_s=0.1)
    class Small(Full):
        pass

    @model
    def plain(items):
        return items

    assert options_of(Small) == options_of(Small()) == {"max_batch_size": 8, "slo_s": 0.1}
    assert options_of(plain) == {}
    assert plain([1]) == [1]


def test_a_loaded_model_can_override_the_options_of_its_class():
    @model(max_batch_size=8)
    class Knows:
        def load(self, device):
            self.__penstock_options__ = options_of(Knows) | {"run_timeout_s": 5.0}

        def predict(self, items):
            return items

    found = PythonModel(Knows)
    found.load("cpu")
    assert found.declared_options() == {"max_batch_size": 8, "run_timeout_s": 5.0}


@pytest.mark.parametrize(
    ("options", "told"),
    [({"max_batchsize": 8}, "did you mean 'max_batch_size'"), ({"max_batch_size": 0}, "max_batch_size")],
)
def test_the_decorator_refuses_wrong_options(options, told):
    with pytest.raises(ConfigError, match=told):
        model(**options)
    assert set(options) - {"max_batchsize"} <= set(BatchingConfig.__struct_fields__)


class Choosy:
    def __init__(self, size: int, prompt: str = "") -> None:
        self.said = (size, prompt)

    def predict(self, items):
        return items


def test_options_are_arguments_of_the_class():
    wrapped = PythonModel(Choosy, {"size": 3, "prompt": "a"})
    wrapped.load("cpu")
    assert wrapped._model.said == (3, "a")


@pytest.mark.parametrize(
    ("target", "options", "told"),
    [
        (
            Choosy,
            {"size": 3, "promt": "a"},
            "'Choosy' has no option 'promt'; did you mean 'prompt'.*size, prompt",
        ),
        (Choosy, {"prompt": "a"}, "'Choosy' needs the option 'size'"),
        (Full, {"size": 3}, "'Full' has no option 'size' .it has none"),
        (Full(), {"size": 3}, "option 'size' is given, but the target is a Full; only a class takes any"),
    ],
)
def test_options_that_the_class_has_not_are_refused(target, options, told):
    with pytest.raises(LoadFailed, match=told):
        PythonModel(target, options).load("cpu")


def loaded(parameters):
    wrapped = PythonModel(type("M", (), {"predict": lambda self, items: items, "parameters": parameters}))
    wrapped.load("cpu")
    return wrapped


@pytest.mark.parametrize("given", [{}, {"revision": "1", "sizes": [1, {"x": None}], "path": (1.5, True)}])
def test_parameters_are_visible_to_clients(given):
    assert loaded(given).metadata("m", "1").parameters == given
    assert loaded(lambda self: given).metadata("m", "1").parameters == {}


@pytest.mark.parametrize("given", [{"w": object()}, {"w": {"deep": [{1, object()}]}}, {3: "x"}])
def test_parameters_that_no_client_could_read_are_refused_by_name(given):
    with pytest.raises(LoadFailed, match=r"'parameters' of the model.* found ('w'|3): (object|dict|str)"):
        loaded(given).metadata("m", "1")


def test_expensive_values_are_computed_only_for_a_load_that_takes_them() -> None:
    class Plain:
        def load(self, device: str) -> None: ...

        def predict(self, items: list[int]) -> list[int]:
            return items

    class Threaded(Plain):
        def load(self, device: str, threads: int = 0) -> None:
            self.threads = threads

        def predict(self, items: list[int]) -> list[int]:
            return [self.threads for _ in items]

    asked: list[int] = []

    def threads() -> int:
        asked.append(3)
        return 3

    PythonModel(Plain, threads=threads).load("cpu")
    assert not asked
    model = PythonModel(Threaded, threads=threads)
    model.load("cpu")
    assert model.predict([0]) == asked == [3]
