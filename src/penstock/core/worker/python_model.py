"""A model in plain Python: a function `predict(items) -> results`, a class, or an instance of one."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, cast, overload

import msgspec

from penstock.config.schema import BatchingConfig, with_options
from penstock.core.batching.ladder import Ladder
from penstock.core.wire.objects import picklable
from penstock.core.worker.item_types import ModelTypes, check_takes_items, takes_arrays
from penstock.core.worker.predict import AdmitsUnits, Asked, SequenceStates, Unit, WithAsked, asked_by, asked_of
from penstock.core.worker.step_loop import Answer as Answer
from penstock.core.worker.step_loop import StepLoop
from penstock.errors import ConfigError, LoadFailed, nearest
from penstock.types import TASKS, Graphs, Item, ModelMetadata, Task, TensorSpec
from penstock.values import tensor_specs

if TYPE_CHECKING:
    from penstock.core.worker.call_loop import CallLoop
    from penstock.core.worker.phases import Phases
    from penstock.core.worker.tensor_model import TensorModel

T = TypeVar("T")
P = ParamSpec("P")
Tensors = Mapping[str, str | TensorSpec] | Sequence[TensorSpec]  # such as {"x": "FP32[-1,64]"}
_OPTIONS = "__penstock_options__"
_SIDES = ("inputs", "outputs")
_ARRAYS = ("numpy", "torch")  # of a `predict` with declared inputs
_BATCH_HOOKS = ("preprocess", "collate", "postprocess", "warmup", "explain")
_HOOKS = (*_BATCH_HOOKS, "load", "load_preprocess", "unload", "admit", "step", "evict", "cost")


class Options(BatchingConfig, frozen=True, kw_only=True):
    """The options of `@penstock.model`, for type checkers."""

    task: Task | None = None
    inputs: Tensors = ()
    outputs: Tensors = ()
    arrays: Literal["numpy", "torch"] = "numpy"


class Decorator(Protocol[P]):
    """The type of `@penstock.model`: alone, or called with options."""

    @overload
    def __call__(self, target: T, /) -> T: ...
    @overload
    def __call__(self, *_: P.args, **options: P.kwargs) -> Callable[[T], T]: ...


def _with_options_of(_: Callable[P, Options]) -> Callable[[Callable[..., Any]], Decorator[P]]:
    return lambda function: cast(Decorator[P], function)


@_with_options_of(Options)
def model(target: Any = None, /, **options: Any) -> Any:
    """The decorated function or class, with batching options attached.

    The options are keys of `[models.NAME.batching]`, and `task`, `inputs`, `outputs` and `arrays`, which become
    attributes. They serve as defaults: the configuration wins. Raises ConfigError.
    """
    names = ("task", "arrays", *_SIDES)
    attributes = {name: value for name in names if (value := options.pop(name, None)) is not None}
    for side in _SIDES:
        tensor_specs(attributes.get(side, ()), f"@penstock.model: {side}")
    task = attributes.get("task")
    if task is not None and task not in TASKS:
        raise ConfigError(
            f"@penstock.model: task is {task!r}, expected {' or '.join(TASKS)}{nearest(str(task), TASKS)}"
        )
    with_options(BatchingConfig(), options)

    def decorate(found: Any) -> Any:
        for name, value in {_OPTIONS: options, **attributes}.items():
            setattr(found, name, value)
        return found

    return decorate if target is None else decorate(target)


def options_of(target: object) -> dict[str, Any]:
    """The options that `@penstock.model` attached to a function, class or instance."""
    return dict(getattr(target, _OPTIONS, {}))


Submit = Callable[[list[Any], list[float | None], Answer], Callable[[], None]]
Extra = str | int | Callable[[], int] | None


class Helpers(Protocol):
    """Processes that run `preprocess` of a model; see `runtimes/preprocess.py`."""

    def __call__(self, values: list[Any]) -> list[Any]:
        """The preprocessed values, in order; Unsent in place of one that failed."""

    def soon(self, values: list[Any], done: Callable[[list[Any]], None]) -> None:
        """Passes them to `done` instead, in another thread."""

    def close(self) -> None:
        """Ends the processes. Idempotent."""


class PythonModel:
    """The model behind a target. `load` instantiates a class; a function needs no loading.

    It has more than 15 attributes: the optional members of a model, looked up once.
    """

    def __init__(
        self,
        target: Any,
        options: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensors] | None = None,
        **extras: Extra,
    ) -> None:
        """`options` are constructor arguments of a class. `tensors` may have `inputs` and `outputs`, which replace the
        model's own. `extras` go to a `load` with parameters of those names; functions among them are called only
        then."""
        self._target = target
        self._options = options or {}
        self._tensors = tensors or {}
        self._extras = extras
        self._model: Any = None
        self.takes: frozenset[str] = frozenset()  # names of the extras that the loaded model uses
        self.predict: Callable[[list[Any]], Any] = self._not_loaded
        self.preprocess: Callable[[Any], Any] | None = None
        self.postprocess: Callable[[Any], Any] | None = None
        self.warmup: Callable[[], Any] | None = None
        self.explain: Callable[[list[Any]], Any] | None = None
        self.collate: Callable[[list[Any]], Any] | None = None  # makes what `predict` receives of the items
        self.helpers: Helpers | None = None  # run `preprocess` in place of this process; set before `load`
        # Members of our own models, under names that users do not have. `send_parts_to` receives the sink for partial
        # results.
        self.phases: Phases | None = None  # of a model on a device that overlaps batches
        self.send_parts_to: Callable[[Callable[[list[Any]], None]], None] | None = None
        self.finishes_apart = False  # `postprocess` may run in its own thread while the next batch is predicted
        # `submit` runs batches concurrently in the model's own threads, up to `concurrency` rows: it receives values,
        # the seconds left for each, and a callback for (place, value or exception) pairs; it returns a cancel function.
        self.submit: Submit | None = None
        self.soon: Callable[[Callable[[], None]], None] | None = None  # calls a function on its event loop
        self.concurrency = 1
        self.stepped = False  # it has `admit` and `step`
        self.loop: StepLoop | CallLoop | None = None  # runs in the main thread of a worker process
        self.states: SequenceStates | None = None  # of a model whose `predict` receives sequences
        self.asked: Asked = {}  # of requests, by `predict` or `admit`
        self.preprocess_asked: Asked = {}
        self.unbatched = False  # axis 0 is not rows
        self.ladder: Ladder | None = None  # of the sizes of its batches
        self.item_ladder: Ladder | None = None  # the same, if `predict` takes items; others pad arrays themselves
        self._takes_columns = False
        self.types = ModelTypes(None, None)

    def _not_loaded(self, items: list[Any]) -> Any:
        raise LoadFailed("predict was called before load")

    def load(self, device: str) -> None:
        """Raises LoadFailed when there is nothing to call, and the errors of the user's code."""
        target = self._target
        found = constructed(target, self._options)
        predict = getattr(found, "predict", None) or (found if callable(found) else None)
        self.stepped = all(callable(getattr(found, name, None)) for name in ("admit", "step"))
        if not callable(predict) and not self.stepped:
            raise LoadFailed(
                f"the target is a {_name(target)} without predict: give a function predict(items), or a class with a"
                " method of that name, or with admit(item) and step(states)"
            )
        self._model = found
        for hook in _HOOKS:
            if inspect.iscoroutinefunction(getattr(found, hook, None)):
                raise LoadFailed(f"'{hook}' of the model is async: only 'predict' may be")
        load_preprocess, load = getattr(found, "load_preprocess", None), getattr(found, "load", None)
        if load_preprocess is not None and self.helpers is None:
            load_preprocess()
        if load is not None:
            self.takes = frozenset(getattr(found, "__penstock_takes__", inspect.signature(load).parameters))
            load(device, **_accepted(load, self._extras))
        arrays = None if predict is None else array_model(found, predict, self._tensors, device)
        if arrays is not None:
            found = self._model = arrays
            self._tensors, predict = {}, arrays.predict
        self.predict = cast(Callable[[list[Any]], Any], predict or self._not_loaded)
        for hook in _BATCH_HOOKS:
            setattr(self, hook, getattr(found, hook, None))
        self.types = ModelTypes(found, predict)
        self._takes_columns = bool(getattr(found, "__penstock_columns__", False))
        self.phases = getattr(found, "__penstock_phases__", None)
        self.send_parts_to = getattr(found, "__penstock_send_parts_to__", None)
        self.finishes_apart = bool(getattr(found, "__penstock_finishes_apart__", False))
        self.submit = getattr(found, "__penstock_submit__", None)
        self.soon = getattr(found, "__penstock_soon__", None)
        self.concurrency = 1 if self.submit is None else int(getattr(found, "__penstock_concurrency__", 1))
        if self.collate is not None:
            self._check_collate(predict)
        if self.submit is not None:
            self.asked = getattr(found, "__penstock_asks__", {})
        elif predict is not None and not (arrays or self.stepped):
            self.asked = asked_by(predict)
            if self.asked:
                self.predict = WithAsked(predict, **dict.fromkeys(self.asked, ()))
        if self.preprocess is not None and arrays is None:
            self.preprocess_asked = asked_by(self.preprocess, batch=False)

    def _check_collate(self, predict: Any) -> None:
        """Raises LoadFailed if `predict` cannot receive what `collate` returns."""
        check_takes_items(self.collate, "collate")
        found = None
        if self.stepped or predict is None:
            found = "a model with admit and step has no whole batches"
        elif is_async(predict):
            found = "an async predict runs its batches side by side"
        elif asked := asked_by(predict):
            found = f"predict has an argument {next(iter(asked))}, which comes with items"
        if found is not None:
            raise LoadFailed(f"collate(items) makes the batch for predict(batch), but {found}: leave one of them out")

    def begin_loop(self, batching: BatchingConfig) -> None:
        """Prepares a loaded model with sequences, or one that runs several items or batches at the same time; does
        nothing to another model. Raises LoadFailed."""
        if batching.rows == "none":
            self.unbatch()
        if (hook := getattr(self._model, "__penstock_bound__", None)) is not None:
            hook(batching.max_tokens)
        if batching.max_sequences and not getattr(self._model, "__penstock_sequences__", False):
            self._begin_sequences(batching)
            return
        if self.stepped and not (batching.mode == "batch" and hasattr(self._model, "predict")):
            self._begin_steps(batching)
            return
        if batching.mode == "continuous":
            raise LoadFailed("mode = 'continuous' needs a model with admit(item) and step(states)")
        rows = batching.concurrency
        arrays = hasattr(self._model, "__penstock_arrays__") and rows != 1
        if arrays or self.submit is not None or self.collate is not None:
            if rows != "auto" and not (rows == 1 and self.collate is not None):
                raise LoadFailed("'concurrency' is for your own predict(items): this model arranges its batches itself")
            return
        check_takes_items(self.predict)
        if rows != 1 and (rows != "auto" or is_async(self.predict)):
            if batching.sizes not in (None, "any"):
                raise LoadFailed(
                    "batching.sizes: batches of an async predict run side by side: set concurrency = 1 too"
                )
            from penstock.core.worker.call_loop import AUTO_CONCURRENCY, CallLoop  # other models do not need asyncio

            self.loop = calls = CallLoop(self.predict, batching, self.send_parts_to)
            calls.alone = self.unbatched
            self.submit, self.soon = calls.submit, calls.soon
            self.concurrency = AUTO_CONCURRENCY if rows == "auto" else rows

    @property
    def takes_parameters(self) -> bool:
        """Whether `predict` receives the parameters of requests."""
        return "parameters" in self.asked.values()

    @property
    def asks_requests(self) -> bool:
        """Whether it reads the requests of its items."""
        return "request" in (*self.asked.values(), *self.preprocess_asked.values())

    def for_helper(self, value: Any, item: Item) -> Any:
        """What a helper receives for an item's value."""
        value = picklable(value)
        return Unit(value, asked_of(item, self.preprocess_asked)) if self.preprocess_asked else value

    def preprocessed(self, value: Any, item: Item) -> Any:
        """What `preprocess` makes of an item's value."""
        assert self.preprocess is not None
        return self.preprocess(value, **asked_of(item, self.preprocess_asked))

    @property
    def in_columns(self) -> bool:
        """Whether `predict` takes ranges of rows, see `columns.TensorRequest`."""
        return self._takes_columns and not (self.unbatched or self.submit is not None or self.states is not None)

    def unbatch(self) -> None:
        """Stops treating axis 0 as rows: requests and results are passed on uncut."""
        self.unbatched, self.phases = True, None
        if self.loop is not None and not isinstance(self.loop, StepLoop):
            self.loop.alone = True
        if (hook := getattr(self._model, "__penstock_unbatch__", None)) is not None:
            hook()

    def pad(self, ladder: Ladder | None) -> None:
        """Pads the batches of a loaded model to these sizes; None: to none. Raises LoadFailed for a model whose batches
        cannot be padded."""
        self.ladder, hook = ladder, getattr(self._model, "__penstock_pad__", None)
        if hook is not None:
            hook(ladder)
            return
        self.item_ladder = ladder
        if ladder is None:
            return
        if self.stepped or is_generator(self.predict):
            kind = "a step model" if self.stepped else "a streaming model"
            raise LoadFailed(f"batching.sizes: {kind} has no whole batches to pad; leave the key out")
        if self.submit is not None or self.send_parts_to is not None:
            raise LoadFailed(f"batching.sizes: {_name(self._model)} arranges its batches itself; leave the key out")

    @property
    def graphs(self) -> Graphs | None:
        """The graphs of a loaded model that captures them for its sizes."""
        return getattr(self._model, "__penstock_graphs__", None)

    @property
    def overlaps(self) -> bool:
        """Whether a batch begins before the last one is finished, by another thread; see `BatchRunner.begin`."""
        return self.finishes_apart or self.phases is not None

    def _begin_sequences(self, batching: BatchingConfig) -> None:
        if self.stepped or self.submit is not None or self.send_parts_to is not None or self.collate is not None:
            raise LoadFailed("max_sequences needs a model with predict(items, sequences)")
        if batching.concurrency not in ("auto", 1):
            raise LoadFailed("max_sequences and concurrency exclude each other: the batches of sequences run in order")
        self.states = SequenceStates(self.predict)
        self.predict = self.states.predict

    def _begin_steps(self, batching: BatchingConfig) -> None:
        model = self._model
        self.asked = asked_by(model.admit, batch=False)
        if self.asked:
            model = AdmitsUnits(model)
        steps = StepLoop(model, batching)
        self.predict = steps.predict
        if batching.mode != "batch" and steps.limits.max_active > 1:
            self.loop, self.submit, self.soon = steps, steps.submit, steps.soon
            self.concurrency = steps.limits.max_active

    def declared_options(self) -> dict[str, Any]:
        """The options of `@penstock.model`, after loading."""
        return options_of(self._model)

    def unload(self) -> None:
        self.phases = None
        unload = getattr(self._model, "unload", None)
        try:
            if unload is not None:
                unload()
        finally:
            if self.helpers is not None:
                self.helpers.close()

    def metadata(self, name: str, version: str, task: str | None = None) -> ModelMetadata:
        """The metadata that the model declares in `inputs`, `outputs`, `parameters` and, unless it is given, `task`.

        Raises LoadFailed.
        """
        platform = getattr(self._model, "platform", None)
        platform = platform if isinstance(platform, str) else "python"
        declared = getattr(self._model, "task", "")
        return ModelMetadata(
            name,
            version,
            platform,
            _declared(self._model, "inputs", self._tensors),
            _declared(self._model, "outputs", self._tensors),
            self._parameters(),
            created=int(time.time()),
            schemas=self.types.schemas(name),
            streams=self.stepped or is_generator(getattr(self._model, "predict", None) or self._model),
            task=task or (declared if isinstance(declared, str) and declared in TASKS else ""),
            takes_parameters=self.takes_parameters,
            unbatched=self.unbatched,
        )

    def _parameters(self) -> dict[str, Any]:
        parameters = getattr(self._model, "parameters", None)
        if not isinstance(parameters, dict):  # a torch module has a method of this name
            return {}
        for name, value in parameters.items():
            try:
                msgspec.json.encode(value)
                plain = isinstance(name, str)
            except Exception:
                plain = False
            if not plain:
                raise LoadFailed(
                    f"'parameters' of the model, which clients may read, must hold values that JSON can, by names;"
                    f" found {name!r}: {type(value).__name__}"
                )
        return parameters


def array_model(model: Any, predict: Any, tensors: Mapping[str, Tensors], device: str) -> TensorModel | None:
    """The model around a user's `predict` that receives arrays; None if it receives items. For `tensors` see
    PythonModel.

    Raises LoadFailed, ConfigError.
    """
    if any(hasattr(model, f"__penstock_{name}__") for name in ("submit", "unbatch")):
        key = next((side for side, given in tensors.items() if given), None)
        if key is not None:
            raise ConfigError(f"{key}: {type(model).__name__} declares its own {key}; leave the key out")
        return None
    declared = inputs = _declared(model, "inputs", tensors)
    if getattr(model, "collate", None) is not None:
        inputs = ()  # it receives what `collate` returns
    table = isinstance(tensors.get("inputs") or getattr(model, "inputs", None), Mapping)
    if not inputs or not takes_arrays(predict, [spec.name for spec in inputs], table):
        if of_torch(model):
            raise LoadFailed('arrays = "torch" needs declared inputs, and a predict with a parameter for each of them')
        if (padded := next((spec.name for spec in declared if spec.pad is not None), None)) is not None:
            raise LoadFailed(
                f"inputs.{padded}.pad: found for a model that receives items; set bucket = 'length' instead, and call"
                " penstock.pad in predict"
            )
        return None
    from penstock.core.worker.array_model import ArrayModel  # other models may not need NumPy

    return ArrayModel(model, predict, inputs, _declared(model, "outputs", tensors), device)


def of_torch(model: Any) -> bool:
    """Whether `predict` receives tensors on the device in place of NumPy arrays. Raises ConfigError."""
    kind = getattr(model, "arrays", None)
    if isinstance(kind, str) and kind not in _ARRAYS:
        raise ConfigError(f"arrays: found {kind!r}, expected {' or '.join(map(repr, _ARRAYS))}{nearest(kind, _ARRAYS)}")
    return kind == "torch"


def _declared(model: Any, side: str, tensors: Mapping[str, Tensors]) -> tuple[TensorSpec, ...]:
    return tensor_specs(tensors.get(side) or getattr(model, side, None) or (), side)


def is_async(predict: Any) -> bool:
    """Whether a function, or an object that is called like one, is a coroutine function or an async generator."""
    predict = _function_of(predict)
    return inspect.iscoroutinefunction(predict) or inspect.isasyncgenfunction(predict)


def is_generator(predict: Any) -> bool:
    """Whether a function, or an object that is called like one, is a generator, sync or async."""
    predict = _function_of(predict)
    return inspect.isgeneratorfunction(predict) or inspect.isasyncgenfunction(predict)


def _function_of(predict: Any) -> Any:
    while isinstance(predict, functools.partial):
        predict = predict.func
    return predict if inspect.isroutine(predict) else type(predict).__call__  # an object with `__call__`


def is_torch_module(found: object) -> bool:
    """Whether an object is a `torch.nn.Module`, or a class of them. Never imports torch."""
    kind = found if inspect.isclass(found) else type(found)
    return any(c.__module__ == "torch.nn.modules.module" and c.__name__ == "Module" for c in kind.__mro__)


def constructed(target: Any, options: Mapping[str, Any]) -> Any:
    """The model of a target: an instance of a class with these options, or the target itself. Raises LoadFailed."""
    _check_options(target, options)
    return target(**options) if inspect.isclass(target) else target


def _check_options(target: Any, options: Mapping[str, Any]) -> None:
    """Raises LoadFailed for an unknown or missing option of a class, and for any option of another target."""
    if not inspect.isclass(target):
        if options:
            raise LoadFailed(
                f"option '{next(iter(options))}' is given, but the target is a {_name(target)}; only a class takes any"
            )
        return
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # some classes are not written in Python
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [p.name for p in named]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in options:
            if key not in known:
                listed = f"it has {', '.join(known)}" if known else "it has none"
                raise LoadFailed(f"{_name(target)} has no option '{key}'{nearest(key, known)} ({listed})")
    missing = [p.name for p in named if p.default is p.empty and p.name not in options]
    if missing:
        raise LoadFailed(
            f"{_name(target)} needs the option '{missing[0]}'; set it in [models.NAME.options], or with --option"
        )


def _accepted(function: Callable[..., Any], extras: dict[str, Extra]) -> dict[str, str | int]:
    """The configured extras for which the user's `load` has a parameter."""
    parameters = inspect.signature(function).parameters
    asked = {k: v() if callable(v) else v for k, v in extras.items() if k in parameters}
    return {k: v for k, v in asked.items() if v is not None}


def _name(target: object) -> str:
    return f"class '{target.__name__}'" if inspect.isclass(target) else type(target).__name__
