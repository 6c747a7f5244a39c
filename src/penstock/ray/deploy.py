"""A model as an application of Ray Serve: each replica batches its own requests with an Engine.

Serve's proxy passes HTTP requests to the ASGI application of the native routes, which runs in the replica. Handles in
Python call the methods of the replica.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from penstock.config.checks import check_model
from penstock.config.load import model_config
from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.config.targets import split_targets
from penstock.core.engine.engine import Engine
from penstock.errors import ConfigError, LoadFailed, ModelNotReady, PenstockError
from penstock.plugins import optional_module
from penstock.ray.actor import Place, enter, here
from penstock.ray.transport import check_ray
from penstock.serving.http.asgi import InferenceApp

DRAIN_S = 10.0  # Serve has waited for the responses; this is for what handles left behind
MOST_ONGOING = 256  # requests of a replica, by default; Serve's own default of 5 would be the largest batch


def deployment(
    target: Any,
    *,
    name: str | None = None,
    serve: Mapping[str, Any] | None = None,
    limits: LimitsConfig | None = None,
    tokens: Sequence[str] = (),
    **keys: Any,
) -> Any:
    """An application for `serve.run`, with one model on the routes of `penstock serve`.

    `target`: "app.py:Model", a model file, or the function, class or object itself. `keys` are keys of a model's
    section, such as `batching={"max_batch_size": 32}`; the transport is "thread", as a replica is a process of its own.
    `serve` has options of `serve.deployment`, such as `{"num_replicas": 2, "ray_actor_options": {"num_gpus": 1}}`; with
    GPUs the model is on one, unless `devices` says otherwise. `tokens` are the bearer tokens of the HTTP routes.

    A handle calls `predict(item)`, `predict_many(items)` and, with `options(stream=True)`, `stream(item)`.
    Raises ConfigError. If the model does not load, `serve.run` raises RuntimeError; `serve.status()` has the reason.
    """
    check_ray()
    library: Any = optional_module("ray.serve", "penstock.ray.deployment needs Ray Serve", "ray")
    options = {"max_ongoing_requests": MOST_ONGOING, **(serve or {})}
    if isinstance(target, str):
        _, found = split_targets((target if name is None else f"{name}={target}",))
        if not found:
            raise ConfigError(f"target '{target}' is a configuration: a deployment has one model, such as app.py:Model")
        ((name, named),) = found.items()
    else:
        name = name or str(getattr(target, "__name__", type(target).__name__)).lower()
        named = {"target": name}
    gpus = (options.get("ray_actor_options") or {}).get("num_gpus")
    config = model_config({"transport": "thread", **({"devices": ["cuda"]} if gpus else {}), **keys, **named}, name)
    if config.transport == "ray":
        raise ConfigError("transport: found 'ray', but the replicas are on the cluster: use 'thread' or 'process'")
    check_model(config, f"models.{name}.")
    given = None if isinstance(target, str) else target
    replica = library.deployment(name=name, **options)(library.ingress()(ModelReplica))
    return replica.bind(name, config, given, limits or LimitsConfig(), tuple(tokens), here())


class ModelReplica:
    """One replica: an engine with one model, on the event loop on which Serve runs it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, name: str, config: ModelConfig, target: Any, limits: LimitsConfig, tokens: tuple[str, ...], place: Place
    ) -> None:
        """Loads the model. Raises LoadFailed, with the model's traceback; TargetNotFound, ConfigError."""
        self._name, self._limits = name, limits
        self._tokens = frozenset(token.encode() for token in tokens)
        self._engine = Engine(limits)
        enter(place)
        try:
            await self._engine.load(name, config, target=target, sys_path=place.paths)
        except PenstockError as e:
            raise LoadFailed(f"{e.message}\n{e.detail}" if e.detail else e.message) from None

    def __serve_build_asgi_app__(self) -> InferenceApp:
        return InferenceApp(self._engine, self._limits, tokens=self._tokens)

    async def predict(self, item: Any, *, deadline: float | None = None, priority: int = 0) -> Any:
        """The result of the model for one item, which shares batches with others. Raises the item's error;
        DeadlineExceeded after `deadline` seconds in the queue."""
        return await self._engine.infer(self._name, item, budget_s=deadline, priority=priority)

    async def predict_many(
        self, items: Sequence[Any], *, deadline: float | None = None, priority: int = 0
    ) -> list[Any]:
        """The result for each item, in order; an exception in place of the result of an item that failed."""
        return await self._engine.infer_many(self._name, items, budget_s=deadline, priority=priority)

    async def stream(self, item: Any, *, deadline: float | None = None, priority: int = 0) -> AsyncIterator[Any]:
        """The parts of a streaming model's response. Raises the item's error."""
        async for part in self._engine.stream(self._name, item, budget_s=deadline, priority=priority):
            yield part

    def check_health(self) -> None:
        """Called by Serve. Raises ModelNotReady while no instance of the model is up."""
        if not self._engine.model_ready(self._name, None):
            raise ModelNotReady(f"model '{self._name}' has no running worker")

    async def __del__(self) -> None:
        await self._engine.close(DRAIN_S)
