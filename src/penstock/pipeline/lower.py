"""Lowers the ops of a node to steps: flattens expressions, and passes the node's keys to the ops that accept them."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.pipeline import filters
from penstock.pipeline.graph import NodeStep
from penstock.pipeline.notation import Expression, OpDraft, dialect, parse
from penstock.pipeline.ops.base import BatchOp, Op, check_params, make_op, parameters_of, takes_any
from penstock.pipeline.ops.catalog import canonical, class_of, find, location
from penstock.values import found

TARGET = "target"
"""The parameter that names a user's class."""

PATHS = ("model", "model_cache", "save_dir")
"""Parameters that are paths."""


def drafts_of(table: Mapping[str, Any]) -> list[OpDraft]:
    """The ops that a node's table names, `Identity` by default. Raises ConfigError."""
    if "ops" in table and "backend" in table:
        raise ConfigError("found both ops and backend, which mean the same; remove one of them")
    if "ops" in table:
        ops = table["ops"]
        if not isinstance(ops, list | tuple) or not ops:
            raise ConfigError(f'found {found(ops)}, expected a list such as ["DecodeMat", {{op = "ResizeMat", ...}}]')
        return [draft for op in ops for draft in _from_item(op)]
    backend = table.get("backend", "Identity")
    if not isinstance(backend, str):
        raise ConfigError(f"found {found(backend)}, expected an expression such as Sequential[DecodeMat,ResizeMat]")
    tree = parse(backend)
    drafts = flatten(tree)
    dialect().place(tree, drafts)
    return drafts or [OpDraft("Identity", {})]


def flatten(expression: Expression) -> list[OpDraft]:
    """The ops of an expression in order. Raises ConfigError with the position."""
    name, where = expression.name, f"at character {expression.position}"
    if (drafts := dialect().flatten(expression)) is not None:
        return drafts
    guard = filters.canonical(expression.filter)
    draft = OpDraft(name, dict(expression.params), guard)
    if not expression.args:
        return [draft]
    try:
        op = find(name)
    except ConfigError as e:
        raise ConfigError(f"{where}: {e.message}") from None
    if op.brackets:
        if any(arg.args or arg.params or arg.filter for arg in expression.args):
            raise ConfigError(f"{where}: {name} takes no ops in its brackets, but the value of '{op.brackets}'")
        draft.params[op.brackets] = ",".join(arg.name for arg in expression.args)
        return [draft]
    if op.wraps:
        draft.filter = ""
        inner = [each for arg in expression.args for each in flatten(arg)]
        return guarded([*inner, draft], guard, where)
    raise ConfigError(f"{where}: {name} takes no arguments in brackets; only Sequential, S, SyncTensor and Torch do")


def guarded(inner: list[OpDraft], guard: str, where: str) -> list[OpDraft]:
    """The ops behind one filter: the first has it, and the others run if the first does. Raises ConfigError."""
    if not inner or guard in ("", "swap"):
        return inner
    if any(draft.filter for draft in inner):
        raise ConfigError(f"{where}: a filter before brackets cannot contain other filters; write one node for each")
    inner[0].filter = guard
    for draft in inner[1:]:
        draft.filter = "then"
    return inner


def _from_item(op: Any) -> list[OpDraft]:
    if isinstance(op, str):
        return flatten(parse(op))
    if not isinstance(op, dict) or not isinstance(op.get("op"), str):
        raise ConfigError(f'found {found(op)} among the ops, expected a name or a table such as {{op = "ResizeMat"}}')
    params = {key: value for key, value in op.items() if key not in ("op", "filter")}
    inner = flatten(parse(op["op"]))
    if len(inner) != 1:
        raise ConfigError(f"op = '{op['op']}' is more than one op; write a table for each")
    return [OpDraft(inner[0].op, inner[0].params | params, filters.canonical(str(op.get("filter", inner[0].filter))))]


def has_model(drafts: Iterable[OpDraft]) -> bool:
    """Whether one of the ops processes batches. Raises ConfigError for an unknown op."""
    return any(issubclass(op_class(draft.op, draft.params), BatchOp) for draft in drafts)


def takes_size(drafts: Iterable[OpDraft]) -> bool:
    """Whether one of the ops has the parameter `max_batch`, as ops of model files do. Raises ConfigError."""
    return any("max_batch" in parameters_of(op_class(draft.op, draft.params)) for draft in drafts)


def may_use_gpu(drafts: Iterable[OpDraft]) -> bool:
    """Whether one of the ops uses a GPU if there is one. Raises ConfigError for an unknown op."""
    return takes_size(drafts) or any(op_class(draft.op, draft.params).gpu for draft in drafts)


def op_class(op: str, params: Mapping[str, Any]) -> type[Op]:
    """The class that runs an op, which may be a user's. Raises ConfigError, LoadFailed."""
    return class_of(op, params.get(TARGET))


def checked(op: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, converted to the op's types. Raises ConfigError: unknown, missing, rejected by the op."""
    cls = op_class(op, params)
    of_a_user = TARGET in params and TARGET not in parameters_of(cls)
    own = {key: value for key, value in params.items() if key != TARGET or not of_a_user}
    try:
        values = ({TARGET: params[TARGET]} if of_a_user else {}) | check_params(cls, own)
        builtin_op(op, values)
    except ConfigError as e:  # the message names the op as the user wrote it
        raise ConfigError(e.message.replace(cls.__name__, op)) from None
    return values


def builtin_op(op: str, params: Mapping[str, Any]) -> Op | None:
    """An instance of a built-in op, not loaded yet; None for a user's op. Raises ConfigError."""
    cls = op_class(op, params)
    ours = location(canonical(op)) == f"{cls.__module__}:{cls.__qualname__}"
    return make_op(cls, params) if ours else None


def parameter_name(key: str, op: str = "") -> str:
    """The parameter of a key: TorchPipe's `model::cache` is `model_cache`, and `Sleep::time` is `time` of Sleep."""
    scope, colons, name = key.partition("::")
    return name if colons and op and scope.lower() == op.lower() else key.replace("::", "_")


def steps_of(
    drafts: list[OpDraft], keys: Mapping[str, Any], free: Iterable[str], folder: str
) -> tuple[tuple[NodeStep, ...], set[str]]:
    """The steps, and the node's `keys` that they use. Each op receives the keys that match its parameters.

    `free` keys that no op names go to the ops that accept any. Raises ConfigError: an unknown op, a bad parameter.
    """
    classes = [op_class(draft.op, draft.params) for draft in drafts]
    pairs = [(draft.op, parameters_of(cls)) for draft, cls in zip(drafts, classes, strict=True)]
    taken = {key for key in keys if any(parameter_name(key, op) in known for op, known in pairs)}
    left = {key: keys[key] for key in free if key not in taken}
    steps: list[NodeStep] = []
    for draft, cls in zip(drafts, classes, strict=True):
        names = parameters_of(cls)
        own = draft.own(keys)
        params = {name: value for key, value in own.items() if (name := parameter_name(key, draft.op)) in names}
        if takes_any(cls):
            params |= left
            taken |= set(left)
        params |= {parameter_name(k) if parameter_name(k) in names else k: v for k, v in draft.params.items()}
        values = rooted(checked(draft.op, params), folder)
        guard, used = filters.completed(draft.filter or ("swap" if steps else "run"), own)
        taken |= used
        steps.append(NodeStep(canonical(draft.op), values, guard))
    return tuple(steps), taken


def rooted(values: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The parameters, with relative paths based on `folder`."""
    found = dict(values)
    for name in PATHS:
        if found.get(name):
            found[name] = each_path(found[name], lambda path: _joined(folder, path))
    target = found.get(TARGET)
    if isinstance(target, str) and target.partition(":")[0].endswith(".py"):
        found[TARGET] = _joined(folder, target)
    return found


def files_of(params: Mapping[str, Any]) -> list[str]:
    """The model files of an op."""
    found = params.get("model") or []
    return [found] if isinstance(found, str) else list(found)


def each_path(value: Any, change: Callable[[str], str]) -> Any:
    """A path, or each path of a list, changed. Other values stay."""
    if isinstance(value, list):
        return [each_path(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def _joined(folder: str, path: str) -> str:
    return os.path.normpath(os.path.join(folder, os.path.expanduser(path)))
