"""A model in plain Python: a function `predict(items) -> results`, a class, or an instance of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, overload

import msgspec

from penstock.config.schema import BatchingConfig, with_options
from penstock.errors import LoadFailed, nearest
from penstock.types import ModelMetadata, TensorSpec

T = TypeVar("T")
_OPTIONS = "__penstock_options__"
_HOOKS = ("load", "preprocess", "postprocess", "warmup", "unload")


@overload
def model(target: T, /) -> T: ...
@overload
def model(**options: Any) -> Callable[[T], T]: ...
def model(target: Any = None, /, **options: Any) -> Any:
    """The decorated function or class, unchanged but for its batching options.

    The options are the keys of `[models.NAME.batching]`, and defaults to them: configuration wins.
    Raises ConfigError.
    """
    with_options(BatchingConfig(), options)

    def decorate(found: T) -> T:
        setattr(found, _OPTIONS, options)
        return found

    return decorate if target is None else decorate(target)


def options_of(target: object) -> dict[str, Any]:
    """What `@penstock.model` said of a function, class or instance."""
    return dict(getattr(target, _OPTIONS, {}))


Answer = Callable[[list[tuple[int, Any]]], None]
Submit = Callable[[list[Any], list[float | None], Answer], Callable[[], None]]
Extra = str | int | Callable[[], int] | None


class PythonModel:
    """Makes a model of what a target names. `load` instantiates a class; a function is loaded already."""

    def __init__(self, target: Any, options: Mapping[str, Any] | None = None, **extras: Extra) -> None:
        """`options` are arguments of a class; `extras` are for a `load` that has parameters of those names, and found
        out only then if they are functions."""
        self._target = target
        self._options = options or {}
        self._extras = extras
        self._model: Any = None
        self.takes: frozenset[str] = frozenset()  # names of extras that the loaded model has a use for
        self.predict: Callable[[list[Any]], Any] = self._not_loaded
        self.preprocess: Callable[[Any], Any] | None = None
        self.postprocess: Callable[[Any], Any] | None = None
        self.warmup: Callable[[], Any] | None = None
        # Of our own models, under names that no user's has. Makes of a batch's items a list that knows more, in the
        # thread that receives them; and hears where parts of results go that are sent while a call runs.
        self.prepare: Callable[[list[Any]], list[Any]] | None = None
        self.send_parts_to: Callable[[Callable[[list[Any]], None]], None] | None = None
        self.finishes_apart = False  # `postprocess` may run in a thread of its own, while the next batch is predicted
        # Works on batches side by side in threads of its own, `concurrency` rows at most: gets values, the seconds that
        # each has left, and what takes (place, value or exception) pairs from any thread, each place once; gives back
        # what ends the work.
        self.submit: Submit | None = None
        self.soon: Callable[[Callable[[], None]], None] | None = None  # calls something at the next turn of its loop
        self.concurrency = 1

    def _not_loaded(self, items: list[Any]) -> Any:
        raise LoadFailed("predict was called before load")

    def load(self, device: str) -> None:
        """Raises LoadFailed when there is nothing to call; else what the user's code raises."""
        target = self._target
        _check_options(target, self._options)
        found = target(**self._options) if inspect.isclass(target) else target
        predict = getattr(found, "predict", None) or (found if callable(found) else None)
        if not callable(predict):
            raise LoadFailed(
                f"the target is a {_name(target)} without predict: "
                "give a function predict(items), or a class with a method of that name"
            )
        self._model = found
        for hook in _HOOKS:
            if inspect.iscoroutinefunction(getattr(found, hook, None)):
                raise LoadFailed(f"'{hook}' of the model is async: of its methods only 'predict' may be")
        load = getattr(found, "load", None)
        if load is not None:
            self.takes = frozenset(getattr(found, "__penstock_takes__", inspect.signature(load).parameters))
            load(device, **_accepted(load, self._extras))
        self.predict = cast(Callable[[list[Any]], Any], predict)
        for hook in ("preprocess", "postprocess", "warmup"):
            setattr(self, hook, getattr(found, hook, None))
        self.prepare = getattr(found, "__penstock_prepare__", None)
        self.send_parts_to = getattr(found, "__penstock_send_parts_to__", None)
        self.finishes_apart = bool(getattr(found, "__penstock_finishes_apart__", False))
        self.submit = getattr(found, "__penstock_submit__", None)
        self.soon = getattr(found, "__penstock_soon__", None)
        self.concurrency = 1 if self.submit is None else int(getattr(found, "__penstock_concurrency__", 1))

    def said(self) -> dict[str, Any]:
        """The options of `@penstock.model`; a model of ours may know better once it is loaded."""
        return options_of(self._model)

    def unload(self) -> None:
        """Calls the model's own `unload`, when it has one."""
        unload = getattr(self._model, "unload", None)
        if unload is not None:
            unload()

    def metadata(self, name: str, version: str) -> ModelMetadata:
        """What the model declares of itself in `inputs`, `outputs` and `parameters`. Raises LoadFailed."""
        platform = getattr(self._model, "platform", None)
        platform = platform if isinstance(platform, str) else "python"
        return ModelMetadata(
            name, version, platform, self._declared("inputs"), self._declared("outputs"), self._parameters()
        )

    def _declared(self, side: str) -> tuple[TensorSpec, ...]:
        specs = tuple(getattr(self._model, side, None) or ())
        if not all(isinstance(spec, TensorSpec) for spec in specs):
            raise LoadFailed(f"'{side}' of the model must hold penstock.TensorSpec, found {specs!r}")
        return specs

    def _parameters(self) -> dict[str, Any]:
        parameters = getattr(self._model, "parameters", None)
        if not isinstance(parameters, dict):  # that of a torch module is a method
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


def is_torch_module(found: object) -> bool:
    """Whether an object is a `torch.nn.Module`, or a class of them. Never imports torch."""
    kind = found if inspect.isclass(found) else type(found)
    return any(c.__module__ == "torch.nn.modules.module" and c.__name__ == "Module" for c in kind.__mro__)


def _check_options(target: Any, options: Mapping[str, Any]) -> None:
    """Raises LoadFailed for an option that the class does not take, or lacks; and for any of what is no class."""
    if not inspect.isclass(target):
        if options:
            raise LoadFailed(
                f"option '{next(iter(options))}' is given, but the target is a {_name(target)}; only a class takes any"
            )
        return
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # of some classes that are not written in Python
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
    """Those of the configured extras that the user's `load` has a parameter for."""
    parameters = inspect.signature(function).parameters
    asked = {k: v() if callable(v) else v for k, v in extras.items() if k in parameters}
    return {k: v for k, v in asked.items() if v is not None}


def _name(target: object) -> str:
    return f"class '{target.__name__}'" if inspect.isclass(target) else type(target).__name__
