"""Expressions: what `backend = "..."` says, as a tree. Pure: text in, values out.

`A[B]` is A around B, `A[B, C]` A around both, `A(k=v)[B]` gives A a parameter, `(f)A` puts the filter f before A.
Spaces mean nothing. Positions are of the text as it was written, 1 for its first character.
"""

from __future__ import annotations

import re

from msgspec import Struct, field

from penstock.errors import ConfigError

_NAME = re.compile(r"[\w.:/-]+")  # of an op, or of what an op is told in brackets: pkg.mod:Class, app/post.py:Boxes
_DEPTH = 20


class Expression(Struct, frozen=True):
    """One name with what stands before, in and behind it. `filter` is empty where none is written."""

    name: str
    args: tuple[Expression, ...] = ()
    params: dict[str, str] = field(default_factory=dict)
    filter: str = ""
    position: int = 1


def parse(text: str) -> Expression:
    """The tree of an expression. Raises ConfigError: what was found, at which character, what was expected."""
    return _Parser(text).whole()


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
        guard = self._guard() if self._next("(") else ""
        name = self._name("a name")
        params = self._params() if self._next("(") else {}
        args: list[Expression] = []
        if self._next("["):
            args.append(self._expression(depth + 1))
            while self._next(","):
                args.append(self._expression(depth + 1))
            self._expect("]", "',' or ']'")
        return Expression(name, tuple(args), params, guard, position)

    def _guard(self) -> str:
        name = self._name("the name of a filter")
        self._expect(")", "')' after the filter")
        return name

    def _params(self) -> dict[str, str]:
        """`k=v, k=v)`; a part without "=" goes on with the value before it, as in `mean=1,2,3`."""
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
