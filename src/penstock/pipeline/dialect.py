"""Expressions of ops, and Dialect: what another notation of pipelines' files adds to the native one.

Expressions are the values of `backend`: `A[B]` is A around B, `A[B, C]` A around both, `A(k=v)[B]` gives A a parameter,
`(f)A` puts the filter f before A. White space is ignored. Positions count from 1 in the original text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from msgspec import Struct, field

from penstock.errors import ConfigError
from penstock.pipeline.keys import TomlSource
from penstock.plugins import BUILTIN, load_object

_NAME = re.compile(r"[\w.:/-]+")  # an op, or the target in its brackets: pkg.mod:Class, app/post.py:Boxes
_DEPTH = 20  # brackets; only typing errors and attacks have more


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


class Dialect(Struct, frozen=True):
    """What a dialect adds. The native notation works without any; the package of a dialect may be deleted.

    - `keys`: its known keys. `used_keys` are proposed for misspelled ones.
    - `tables`: returns the nodes' tables in the native structure; `table`: one table with native keys.
    - `flatten`: returns the ops of an expression that is more than one op, otherwise None.
    - `place`: sets the places of a `backend`'s ops, for keys with one value for each of them.
    - `fan_out`: returns the ops that are left when those which fan out have become values of the node's keys.
    - `ops`, `filters`: further ones, by name. `filter_names` has all spellings by their lower case.
    - `absent_ops`: why an op is not available, by its name in lower case.
    """

    keys: frozenset[str] = frozenset()
    used_keys: tuple[str, ...] = ()
    tables: Callable[[dict[str, dict[str, Any]], TomlSource], dict[str, dict[str, Any]]] = lambda tables, source: tables
    table: Callable[[dict[str, Any], str, TomlSource], dict[str, Any]] = lambda table, node, source: table
    flatten: Callable[[Expression], list[OpDraft] | None] = lambda expression: None
    place: Callable[[Expression, list[OpDraft]], None] = lambda expression, drafts: None
    fan_out: Callable[[list[OpDraft], dict[str, Any]], list[OpDraft]] = lambda drafts, values: drafts
    ops: Mapping[str, str] = {}
    absent_ops: Mapping[str, str] = {}
    filters: Mapping[str, Callable[..., Callable[[dict[str, Any]], str]]] = {}
    filter_names: Mapping[str, str] = {}


@cache
def dialect() -> Dialect:
    """TorchPipe's dialect, or one that adds nothing if its package is not there."""
    known = BUILTIN.get("dialect", {})
    found: Any = load_object(known["torchpipe"]) if known else Dialect()
    return found  # type: ignore[no-any-return]
