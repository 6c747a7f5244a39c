"""Filters decide for an item whether a node, or one of its steps, runs it. Dialects and programs add them.

A filter is written as its name, or with parameters: `HasKey(key=box)`.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.pipeline.dialect import dialect
from penstock.pipeline.ops.base import DATA, RESULT, Fields

Filter = Callable[[Fields], str]
"""Takes a copy of an item's fields, which it may change for the node, and returns one of OUTCOMES."""

OUTCOMES = ("run", "skip", "serial_skip", "subgraph_skip", "break", "error")
"""The item runs; passes the node unchanged, or all nodes of its chain, or of its sub-graph; ends here; or fails.

At a step, the item leaves the node for every outcome between "skip" and "error".
"""


def swap(fields: Fields) -> str:
    """Makes the previous result the data. Without a result the item ends."""
    if fields.get(RESULT) is None:
        return "break"
    fields[DATA] = fields.pop(RESULT)
    return "run"


_NODES_OWN = {"run": "run", "swap": "swap", "or": "or"}  # which nodes follow themselves
_registered: dict[str, Callable[[dict[str, str]], Filter]] = {}


def register(name: str, make: Callable[[dict[str, str]], Filter]) -> None:
    """Registers a filter in this process, replacing any other of the name. Each node makes its own, with its keys."""
    _registered[name] = make


def canonical(text: str) -> str:
    """The listed spelling of a built-in filter. Other names stay."""
    name, bracket, params = text.partition("(")
    if name not in _registered:
        name = {**_NODES_OWN, **dialect().filter_names}.get(name.lower(), name)
    return name + bracket + params


def is_known(text: str) -> bool:
    """Whether a filter of this name is built in or registered."""
    return (name := text.partition("(")[0]) in _registered or name in dialect().filters


def may_skip_others(text: str) -> bool:
    """Whether a node's filter may also skip nodes after it."""
    return text in ("serial_skip", "subgraph_skip") or text.partition("(")[0] in _registered


def completed(text: str, keys: Mapping[str, Any], free: Iterable[str] = ()) -> tuple[str, set[str]]:
    """The filter with those of a node's keys that are its parameters, and their names.

    A registered filter takes all `free` keys. Raises ConfigError: missing, unknown or wrong parameters.
    """
    name, given = _parsed(canonical(text))
    if not is_known(name):
        return canonical(text), set()
    names = set(free) if name in _registered else set(inspect.signature(dialect().filters[name]).parameters)
    taken = (names & keys.keys()) - given.keys()
    params = given | {key: str(keys[key]) for key in sorted(taken)}
    if name not in _registered:
        _made(name, params)
    whole = f"{name}({','.join(f'{k}={v}' for k, v in params.items())})" if params else name
    if _parsed(whole) != (name, params):
        raise ConfigError(f"filter {name}: found {whole}, expected values without brackets and '='")
    return whole, taken


def made(text: str) -> Filter | None:
    """The filter; None for one that nodes follow themselves. Raises ConfigError for wrong parameters."""
    name, params = _parsed(text)
    if name in _registered:
        return _registered[name](params)
    return _made(name, params) if name in dialect().filters else None


def _parsed(text: str) -> tuple[str, dict[str, str]]:
    """The name and the parameters. A part without "=" continues the previous value, as in `least=1,2`."""
    name, _, rest = text.partition("(")
    params: dict[str, str] = {}
    for part in rest.removesuffix(")").split(",") if rest else ():
        key, equals, value = part.partition("=")
        if equals or not params:
            params[key.strip()] = value.strip()
        else:
            params[next(reversed(params))] += f",{part}"
    return name.strip(), params


def _made(name: str, params: Mapping[str, str]) -> Filter:
    known = inspect.signature(dialect().filters[name]).parameters
    if params.keys() - known.keys() or any(p.default is p.empty and key not in params for key, p in known.items()):
        listed, expected = ", ".join(params) or "no parameters", " and ".join(known) or "none"
        raise ConfigError(f"filter {name}: found {listed}, expected {expected}")
    return dialect().filters[name](**params)
