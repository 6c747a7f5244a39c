"""Lowers the ops of a node to steps: parses expressions, and passes the node's keys to the ops that accept them.

Expressions are the values of `backend`: `A[B]` is A around B, `A[B, C]` A around both, `A(k=v)[B]` gives A a parameter,
`(f)A` puts the filter f before A. White space is ignored. Positions count from 1 in the original text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct, field

from penstock.errors import ConfigError
from penstock.pipeline import filters
from penstock.pipeline.graph import NodeStep
from penstock.pipeline.ops.base import BatchOp, Op
from penstock.pipeline.ops.catalog import ALIASES, BUILTIN, canonical, class_of, find
from penstock.pipeline.ops.parameters import check_params, make_op, parameters_of, takes_any
from penstock.values import found

_NAME = re.compile(r"[\w.:/-]+")  # an op, or the target in its brackets: pkg.mod:Class, app/post.py:Boxes
_DEPTH = 20

SEQUENCES = {"sequential", "s", "sequentialv0", "s_v0"}
SCOPES = {
    *("synctensor", "tensorsync", "torch", "streamguard"),  # each op manages its own streams
    *("parallel", "range", "fakeinstance", "max"),  # the node forms batches that its ops can run
    *("eventloop", "ring", "syncring", "pipelinereviser", "ensureinputhasevent"),  # nodes always run concurrently
}
"""TorchPipe's wrappers that have no effect."""

FAN_OUT, *CALLS = FAN_OUTS = ("mapreduce", "jump", "jumpv0")
"""TorchPipe's ops that take items through another sub-graph, in lower case. The first splits them."""

TARGET = "target"
"""The parameter that names a user's class."""

PATHS = ("model", "model_cache", "save_dir")
"""Parameters that are paths."""


class Expression(Struct, frozen=True):
    """One name with its filter, parameters and arguments. `filter` is empty if there is none."""

    name: str
    args: tuple[Expression, ...] = ()
    params: dict[str, str] = field(default_factory=dict)
    filter: str = ""
    position: int = 1


def parse(text: str) -> Expression:
    """The tree of an expression. Raises ConfigError: what was found, at which character, what was expected."""
    return _Parser(text).whole()


def text_of(expression: Expression) -> str:
    """The expression as text again, without white space."""
    guard = f"({expression.filter})" if expression.filter else ""
    params = ",".join(f"{key}={value}" for key, value in expression.params.items())
    args = ",".join(map(text_of, expression.args))
    return f"{guard}{expression.name}{f'({params})' if params else ''}{f'[{args}]' if args else ''}"


class _Parser:
    def __init__(self, text: str) -> None:
        places = [(c, i) for i, c in enumerate(text, 1) if not c.isspace()]
        self._source = text
        self._text = "".join(c for c, _ in places)
        self._places = [i for _, i in places] + [len(text) + 1]
        self._at = 0

    def whole(self) -> Expression:
        found = self._expression(0)
        if self._at < len(self._text):
            raise self._error("the end")
        return found

    def _expression(self, depth: int) -> Expression:
        if depth > _DEPTH:
            raise self._error(f"brackets at most {_DEPTH} deep")
        position = self._places[self._at]
        guard = ""
        if self._next("("):
            guard = self._name("the name of a filter")
            self._expect(")", "')' after the filter")
        name = self._name("a name")
        params = self._params() if self._next("(") else {}
        args: list[Expression] = []
        if self._next("["):
            args.append(self._expression(depth + 1))
            while self._next(","):
                args.append(self._expression(depth + 1))
            self._expect("]", "',' or ']'")
        return Expression(name, tuple(args), params, guard, position)

    def _params(self) -> dict[str, str]:
        """`k=v, k=v)`. A part without "=" continues the previous value, as in `mean=1,2,3`."""
        end = self._text.find(")", self._at)
        if end < 0:
            self._at = len(self._text)
            raise self._error("')' after the parameters")
        params: dict[str, str] = {}
        key = ""
        for part in self._text[self._at : end].split(","):
            name, equals, value = part.partition("=")
            if equals and name in params:
                raise self._error(f"'{name}' once")
            if not (name if equals else key):
                raise self._error("a parameter such as resize_h=224")
            key, params[name if equals else key] = (name, value) if equals else (key, f"{params[key]},{part}")
            self._at += len(part) + 1
        return params

    def _name(self, expected: str) -> str:
        match = _NAME.match(self._text, self._at)
        if match is None:
            raise self._error(expected)
        self._at = match.end()
        return match[0]

    def _next(self, char: str) -> bool:
        if not self._text.startswith(char, self._at):
            return False
        self._at += 1
        return True

    def _expect(self, char: str, expected: str) -> None:
        if not self._next(char):
            raise self._error(expected)

    def _error(self, expected: str) -> ConfigError:
        found = f"'{self._text[self._at]}'" if self._at < len(self._text) else "the end"
        where = f"at character {self._places[self._at]} of '{self._source[:200]}'"
        return ConfigError(f"{where}: found {found}, expected {expected}")


class OpDraft(Struct):
    """An op before the node's keys are added: its own parameters, and the filter before it.

    Keys may have one value for each of the `places` in a sequence, as in `color = "rgb|bgr"`; the op is in `place`.
    """

    op: str
    params: dict[str, Any]
    filter: str = ""
    place: int = 0
    places: int = 1

    def own(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """The keys with the values for this op."""
        found = {}
        for key, value in keys.items():
            parts = value.split("|") if isinstance(value, str) and self.places > 1 else []
            if len(parts) != self.places:
                found[key] = value
            elif part := parts[self.place].strip():
                found[key] = part
        return found


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
    while tree.name.lower() in SCOPES and len(tree.args) == 1:
        tree = tree.args[0]
    places = [place for place, arg in enumerate(tree.args) for _ in flatten(arg)]
    if tree.name.lower() in SEQUENCES and len(places) == len(drafts):
        for draft, place in zip(drafts, places, strict=True):
            draft.place, draft.places = place, len(tree.args)
    return drafts or [OpDraft("Identity", {})]


def flatten(expression: Expression) -> list[OpDraft]:
    """The ops of an expression in order, without sequences and scopes. Raises ConfigError with the position."""
    name, where = expression.name, f"at character {expression.position}"
    guard = filters.canonical(expression.filter)
    if name.lower() in SEQUENCES | SCOPES:
        if expression.params:
            raise ConfigError(f"{where}: {name} takes no parameters; write them as keys of the node")
        inner = [draft for arg in expression.args for draft in flatten(arg)]
        return _guarded(inner, guard, where)
    if branch := filters.BRANCHES.get(name.lower()):
        return _branches(branch, expression)
    draft = OpDraft(name, dict(expression.params), guard)
    if name.lower() in FAN_OUTS and len(expression.args) <= 1:
        draft.params.update(("body", arg.name) for arg in expression.args)
        return [draft]
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
        return _guarded([*inner, draft], guard, where)
    raise ConfigError(f"{where}: {name} takes nothing in brackets; Sequential, S, SyncTensor and Torch do")


def _branches(guard: str, expression: Expression) -> list[OpDraft]:
    """`HasKey[A, B]`: A for the items that the filter `HasKey` lets run, B (none: Identity) for the others."""
    if not 1 <= len(expression.args) <= 2:
        raise ConfigError(f"at character {expression.position}: {guard} takes one or two ops in brackets")
    params = ",".join(f"{key}={value}" for key, value in expression.params.items())
    drafts = [OpDraft("Identity", {}, filters.canonical(expression.filter))]
    for arg, name in zip(expression.args, (f"{guard}({params})" if params else guard, "else"), strict=False):
        drafts += _guarded(flatten(arg) or [OpDraft("Identity", {})], name, f"at character {arg.position}")
    return drafts


def _guarded(inner: list[OpDraft], guard: str, where: str) -> list[OpDraft]:
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
    name = canonical(op)
    ours = BUILTIN.get(ALIASES.get(name, name)) == f"{cls.__module__}:{cls.__qualname__}"
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
