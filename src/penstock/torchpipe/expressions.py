"""TorchPipe's expressions, and its keys that change a node's `backend` or its instances. Pure.

Sequences, scopes, branches and calls of sub-graphs are expressions around ops. The keys are rewritten before others.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.pipeline import filters
from penstock.pipeline.lower import flatten, guarded
from penstock.pipeline.notation import Expression, OpDraft, TomlSource, parse, text_of
from penstock.torchpipe.ops import BRANCHES
from penstock.values import found

SEQUENCES = {"sequential", "s", "sequentialv0", "s_v0"}
SCOPES = {
    *("synctensor", "tensorsync", "torch", "streamguard"),  # each op manages its own streams
    *("parallel", "range", "fakeinstance", "max"),  # the node forms batches that its ops can run
    *("eventloop", "ring", "syncring", "pipelinereviser", "ensureinputhasevent"),  # nodes always run concurrently
}
"""Wrappers that have no effect."""

FAN_OUT, *CALLS = FAN_OUTS = ("mapreduce", "jump", "jumpv0")
"""Ops that take items through another sub-graph, in lower case. The first splits them."""

# ---- ops of an expression


def flattened(expression: Expression) -> list[OpDraft] | None:
    """The ops of a sequence, a scope, a branch or a call; None for another expression. See `Dialect.flatten`."""
    name, where = expression.name.lower(), f"at character {expression.position}"
    guard = filters.canonical(expression.filter)
    if name in SEQUENCES | SCOPES:
        if expression.params:
            raise ConfigError(f"{where}: {expression.name} takes no parameters; write them as keys of the node")
        return guarded([draft for arg in expression.args for draft in flatten(arg)], guard, where)
    if name in BRANCHES:
        return _branches(BRANCHES[name], expression)
    if name in FAN_OUTS and len(expression.args) <= 1:
        body = {"body": expression.args[0].name} if expression.args else {}
        return [OpDraft(expression.name, expression.params | body, guard)]
    return None


def _branches(guard: str, expression: Expression) -> list[OpDraft]:
    """`HasKey[A, B]`: A for the items that the filter `HasKey` lets run, B (none: Identity) for the others."""
    if not 1 <= len(expression.args) <= 2:
        raise ConfigError(f"at character {expression.position}: {guard} takes one or two ops in brackets")
    params = ",".join(f"{key}={value}" for key, value in expression.params.items())
    drafts = [OpDraft("Identity", {}, filters.canonical(expression.filter))]
    for arg, name in zip(expression.args, (f"{guard}({params})" if params else guard, "else"), strict=False):
        drafts += guarded(flatten(arg) or [OpDraft("Identity", {})], name, f"at character {arg.position}")
    return drafts


def inner(tree: Expression) -> Expression:
    """The expression without scopes around it."""
    while tree.name.lower() in SCOPES and len(tree.args) == 1:
        tree = tree.args[0]
    return tree


def set_places(tree: Expression, drafts: list[OpDraft]) -> None:
    """Sets the places of the ops of a sequence. See `Dialect.place`."""
    tree = inner(tree)
    places = [place for place, arg in enumerate(tree.args) for _ in flatten(arg)]
    if tree.name.lower() in SEQUENCES and len(places) == len(drafts):
        for draft, place in zip(drafts, places, strict=True):
            draft.place, draft.places = place, len(tree.args)


def without_calls(drafts: list[OpDraft], values: dict[str, Any]) -> list[OpDraft]:
    """The ops without MapReduce and Jump, which must be the last and become `values` of keys. Raises ConfigError."""
    calls = [draft for draft in drafts if draft.op.lower() in FAN_OUTS]
    if not calls:
        return drafts
    op, params = calls[0].op, calls[0].params
    if calls[0] is not drafts[-1]:
        raise ConfigError(f"{op} must be the last op of its node; write the ops after it in the next node")
    if calls[0].filter not in ("", "swap", "run"):
        raise ConfigError(f"{op} cannot have the filter '{calls[0].filter}' here; write it as a node with a filter")
    if values.setdefault("body", params.get("body")) != params.get("body", values["body"]) or not values["body"]:
        raise ConfigError(f"{op} needs 'jump', the node where the items begin, once")
    if op.lower() == FAN_OUT:
        values.setdefault("each", "data")
    else:
        values.pop("each", None), values.pop("gather", None)
    return drafts[:-1] or [OpDraft("Identity", {})]


# ---- keys around a backend

ENGINES = ("PipelineV3", "BaselineSchedule", "Schedule", "ScheduleV3", "SortSchedule", "ScoreSchedule", "Batching")
"""TorchPipe's schedulers. All of them mean the only scheduler here."""

OF_MAIN = (
    *("List", "Register", "InstancesRegister", "BackgroundThread", "Reflect", "BackendProxy", "IoC", "IoCV0", "DI"),
    *("DI_v0", "Batching", "InstanceDispatcher", "SharedInstancesState", "Aspect", "Block", "Forward", "DagDispatcher"),
)
"""The parts of the present branch's usual scheduler, which its entry points spell out."""

ENGINE_KEYS = ("Interpreter::backend", "scheduler")
ENTRY_KEYS = ("node_entrypoint", "entrypoint")
POST_KEYS = ("batch_process", "postprocessor", "post_processor")
PRE_KEYS = ("preprocessor", "pre_processor")
NO_STEP = ("", "split", "cpu", "SingleConcatPreprocess", "MultipleConcatPreprocess")
"""Values of the keys around a model that name what every model op does: rows are joined, and split again."""

EXACT_KEYS = ("precision::fp32", "precision::output::fp32", "force_layer_norm_pattern_fp32")

_OF_THE_BORROWER = ("next", "map", "inputs", "filter", "when", "else", "or", "node_name", "batching_timeout")
_OF_CALLS = ("jump", "split", "merge", "body", "each", "gather", "max_fanout", "on_item_error")
_ANY_CASE = frozenset(name.lower() for name in (*ENGINES, *OF_MAIN))
_NUMBER = re.compile(r"[0-9]{1,4}")
_PART = re.compile(r"[\w.{}]+")


def with_backend(table: Mapping[str, Any], node: str, source: TomlSource) -> dict[str, Any]:
    """The table with `backend` in place of the keys that select engines, or ops around it. Raises ConfigError."""
    left = dict(table)
    for key, value in table.items():
        outer, colons, name = key.rpartition("::")
        if key in ENTRY_KEYS:
            if others := [part for part in _parts(str(left.pop(key)), node) if part.lower() not in _ANY_CASE]:
                raise source.error(
                    node,
                    key,
                    f"found {', '.join(others)}, expected only parts of the usual scheduler ({', '.join(OF_MAIN)}):"
                    " write next, filter, or a Python backend",
                )
        elif key in ENGINE_KEYS or (colons and name == "backend" and outer in ENGINES):
            if rest := _without_engines(str(left.pop(key))):
                if "backend" in left:
                    raise source.error(node, key, f"found {found(value)}, but the node also has a backend: write one")
                left["backend"] = rest
        elif colons and name == "backend" and str(table.get("backend", "")).lower() == outer.lower():
            left["backend"] = f"{outer}[{left.pop(key)}]"
    return _of_the_model(_around(left, node, source), node, source)


def _around(table: dict[str, Any], node: str, source: TomlSource) -> dict[str, Any]:
    """The table with ops before and after the model as parts of `backend`."""
    for key in (*PRE_KEYS, *POST_KEYS):
        op = str(table.pop(key, ""))
        if op in NO_STEP:
            continue
        if "backend" not in table:
            raise source.error(node, key, "needs 'backend' in the same table, because it becomes one of its ops")
        backend = str(table["backend"])  # as every key that is a text
        pair = (op, backend) if key in PRE_KEYS else (backend, op)
        table["backend"] = f"Sequential[{','.join(pair)}]"
    return table


def _of_the_model(table: dict[str, Any], node: str, source: TomlSource) -> dict[str, Any]:
    """The table without `model_type`, and with a precision that is exact enough for each layer."""
    kind = table.pop("model_type", "")
    files = table.get("model", [])
    if kind and not all(file.endswith(kind) for file in ([files] if isinstance(files, str) else files)):
        raise source.error(
            node, "model_type", f"found {found(kind)} for {found(files)}, expected a model file with that extension"
        )
    if any(str(table.pop(key, 0)) not in ("0", "", "False") for key in EXACT_KEYS):
        if table.get("precision", "fp32") != "fp32":
            source.warn(node, "precision", "is fp32, because some layers need it and a node has one precision")
        table["precision"] = "fp32"
    return table


def _without_engines(expression: str) -> str:
    """The backend inside schedulers: `PipelineV3[A]` is A, and `Schedule` is nothing."""
    text = "".join(expression.split())
    if text.lower() in _ANY_CASE:
        return ""
    head, bracket, inner = text.partition("[")
    return _without_engines(inner[:-1]) if bracket and head.lower() in _ANY_CASE and inner.endswith("]") else text


def _parts(expression: str, node: str) -> list[str]:
    """The names in an entry point, without the names of the node and of its backend."""
    own = (f"node.{node}", "node.{node_name}", "{node_name}", "backend")
    return [part for part in _PART.findall(re.sub(r"\([^()]*\)", "", expression)) if part not in own]


# ---- instances of several nodes


def with_instances(tables: Mapping[str, dict[str, Any]], source: TomlSource) -> dict[str, dict[str, Any]]:
    """The tables of nodes, where each has the instances of its own group.

    `instances_grp = "1;0,2"` divides the instances of a node into groups, of which the node runs the one with the
    number `active_instances_grp`. A node with `borrow_from` runs another group. Raises ConfigError.
    """
    whole = {}
    for node, table in tables.items():
        donor = table.get("borrow_from")
        if donor is None:
            whole[node] = dict(table)
            continue
        if not isinstance(donor, str) or donor not in tables or "borrow_from" in tables[donor]:
            known = ", ".join(name for name, other in tables.items() if "borrow_from" not in other)
            raise source.error(node, "borrow_from", f"found {found(donor)}, expected a node with instances: {known}")
        kept = {key: value for key, value in tables[donor].items() if key not in _OF_THE_BORROWER}
        own = {key: value for key, value in table.items() if key in (*_OF_THE_BORROWER, "active_instances_grp")}
        whole[node] = {**kept, **own}
    return {node: _of_group(table, node, source) for node, table in whole.items()}


def _of_group(table: dict[str, Any], node: str, source: TomlSource) -> dict[str, Any]:
    active = table.pop("active_instances_grp", 0)
    given = table.pop("instances_grp", None)
    if given is None:
        return table
    groups = [group.split(",") for group in str(given).split(";")]
    count = str(table.get("instance_num", 1))
    members = [member.strip() for group in groups for member in group]
    if not all(map(_NUMBER.fullmatch, (*members, count))) or len({*members}) < len(members):
        raise source.error(node, "instances_grp", f'found {found(given)}, expected each instance once, such as "1;0,2"')
    if any(int(member) >= int(count) for member in members):
        raise source.error(
            node, "instances_grp", f"found {found(given)}, expected instances from 0 to {int(count) - 1}"
        )
    if not _NUMBER.fullmatch(str(active)) or int(active) >= len(groups):
        raise source.error(
            node, "active_instances_grp", f"found {found(active)}, expected a group from 0 to {len(groups) - 1}"
        )
    mine = [int(member) for member in groups[int(active)]]
    for key in ("max", "min"):
        values = str(table.get(key, "")).split(";")
        if len(values) > 1:
            table[key] = ";".join(values[min(i, len(values) - 1)] for i in mine)
    table["instance_num"] = len(mine)
    return table


# ---- calls of other sub-graphs inside a sequence


def with_calls(tables: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tables, with a node of its own for each part of a sequence that ends with MapReduce or Jump.

    `[a] backend = "S[X,Jump[b],Y]"` becomes `[a]` with X and Jump[b], and `[a-2]` with Y.
    """
    whole: dict[str, dict[str, Any]] = {}
    ends: dict[str, str] = {}  # the node with the result of a divided one
    for node, table in tables.items():
        parts = _parts_of(table.get("backend"))
        names = [node, *(f"{node}-{place}" for place in range(2, len(parts) + 1))]
        if len(parts) < 2 or tables.keys() & names[1:]:
            whole[node] = table
            continue
        ends[node] = names[-1]
        steps = [step for part in parts for step in part]
        for name, part, after in zip(names, parts, [*names[1:], table.get("next")], strict=True):
            own = [i for i, step in enumerate(steps) if any(step is each for each in part)]
            keys = {key: _values_at(key, value, own, steps) for key, value in table.items() if _goes(key, part)}
            if name != node:
                keys = {key: value for key, value in keys.items() if key not in _OF_THE_BORROWER}
            whole[name] = keys | {"backend": f"S[{','.join(map(text_of, part))}]", "next": after}
            if after is None:
                del whole[name]["next"]
    return {name: _renamed(table, ends) for name, table in whole.items()}


def _parts_of(backend: Any) -> list[list[Expression]]:
    """The steps of a sequence, divided after each call. Empty for other expressions, and for wrong ones."""
    try:
        tree = parse(backend) if isinstance(backend, str) else Expression("")
    except ConfigError:  # reported when the node is read
        return []
    tree = inner(tree)
    parts: list[list[Expression]] = [[]]
    for step in tree.args if tree.name.lower() in SEQUENCES else ():
        if any(map(_is_call, parts[-1])) and (step.args or step.name.lower() not in SCOPES):
            parts.append([])
        parts[-1].append(step)
    return parts


def _is_call(step: Expression) -> bool:
    return step.name.lower() in FAN_OUTS


def _goes(key: str, part: Sequence[Expression]) -> bool:
    """Whether a key of the whole node belongs to a part."""
    calls = [_is_call(step) for step in part if step.args or step.name.lower() not in SCOPES]
    return any(calls) if key in _OF_CALLS else key in _OF_THE_BORROWER or not all(calls)


def _values_at(key: str, value: Any, own: Sequence[int], steps: Sequence[Expression]) -> Any:
    """The values for some of the steps, if the key has one for each step: of a call only its own."""
    values = value.split("|") if isinstance(value, str) else []
    if len(values) != len(steps):
        return value
    return "|".join(values[i] for i in own if key not in _OF_CALLS or _is_call(steps[i]))


def _renamed(table: dict[str, Any], ends: Mapping[str, str]) -> dict[str, Any]:
    """The table with the last part of a divided node as the source of fields."""
    if not isinstance(table.get("map"), str):
        return table
    return table | {"map": re.sub(r"[\w-]+(?=\s*\[)", lambda name: ends.get(name[0], name[0]), table["map"])}
