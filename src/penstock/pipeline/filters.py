"""Filters and conditions, which decide for an item whether a node, or one of its steps, runs it.

A filter is written as its name, or with parameters: `HasKey(key=box)`. Dialects and programs add filters. A condition
(`when` of a node) is an expression on the item's fields, or names a user's predicate.
"""

import ast
import inspect
import keyword
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from penstock.errors import ConfigError, ItemFailed, LoadFailed, describe
from penstock.pipeline.notation import dialect
from penstock.pipeline.ops.base import DATA, RESULT, Fields
from penstock.plugins import load_object

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
    name, given = _name_and_params(canonical(text))
    if not is_known(name):
        return canonical(text), set()
    names = set(free) if name in _registered else set(inspect.signature(dialect().filters[name]).parameters)
    taken = (names & keys.keys()) - given.keys()
    params = given | {key: str(keys[key]) for key in sorted(taken)}
    if name not in _registered:
        _made(name, params)
    whole = f"{name}({','.join(f'{k}={v}' for k, v in params.items())})" if params else name
    if _name_and_params(whole) != (name, params):
        raise ConfigError(f"filter {name}: found {whole}, expected values without brackets and '='")
    return whole, taken


def made(text: str) -> Filter | None:
    """The filter; None for one that nodes follow themselves. Raises ConfigError for wrong parameters."""
    name, params = _name_and_params(text)
    if name in _registered:
        return _registered[name](params)
    return _made(name, params) if name in dialect().filters else None


def _name_and_params(text: str) -> tuple[str, dict[str, str]]:
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


# ---- conditions: expressions, which are pure, or a user's predicate

_GRAMMAR = ["and", "or", "not", "in", "is", "if", "else", "for", "lambda", "await", "yield", "True", "False", "None"]
LONGEST = 2000  # characters of an expression
_DEPTH = 50

_Evaluate = Callable[[Fields], Any]

_KEYWORD_FIELDS = [word for word in keyword.kwlist if word not in _GRAMMAR]
_QUOTED = r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
_QUOTED_OR_KEYWORD = re.compile(f"{_QUOTED}|\\b({'|'.join(_KEYWORD_FIELDS)})\\b")
_MARK = "__field"  # after a field's name that is a keyword of Python, such as `class`
_TARGET = re.compile(r"[\w./ -]+:[A-Za-z_][\w.]*")
_WORDS = {"true": True, "false": False, "none": None}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, other: operator.contains(other, one),
    ast.NotIn: lambda one, other: not operator.contains(other, one),
}
_OPPOSITE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq, ast.Lt, ast.Gt),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.GtE, ast.Gt, ast.Eq),
    ast.LtE: (ast.Gt,),
    ast.Gt: (ast.LtE, ast.Lt, ast.Eq),
    ast.GtE: (ast.Lt,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
"""Comparisons that cannot hold together for the same operands."""
_EXPECTED = "fields, numbers, texts, lists, comparisons, `in`, len(field), present(field), `and`, `or` and `not`"


def is_target(text: str) -> bool:
    """Whether a condition names a predicate, as in `pkg.mod:func` or `file.py:func`."""
    return _TARGET.fullmatch(text.strip()) is not None


class Condition:
    """A parsed condition. Calling it with an item's fields returns a bool.

    An expression has the grammar and the results of Python:
    - `field` and `field.sub`: a value, or None if the item does not have it. `sub` is a key of a dict or an attribute.
    - `==`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `not in`, also chained, and `and`, `or`, `not`;
    - numbers, texts, lists, `true`, `false`, `none`;
    - `len(field)`, and `present(field)`: whether the item has the field.

    A value alone is true if it is neither None, zero nor empty.
    """

    def __init__(self, text: str) -> None:
        """Parses an expression, or imports a predicate. Raises ConfigError: found, where, expected; LoadFailed."""
        self.text = text
        self._predicate = is_target(text)
        if self._predicate:
            found = load_object(text.strip())
            if not callable(found):
                raise ConfigError(f"'{text}' is {found!r}, expected a function of an item's fields that returns a bool")
            self._evaluate: _Evaluate = found
        else:
            self._evaluate = _compiled(parsed(text), text, 0)

    def __call__(self, fields: Fields) -> bool:
        """Whether the condition holds. Raises ItemFailed: what a predicate raised or returned, or what cannot compare.

        A predicate receives a copy of the fields.
        """
        try:
            found = self._evaluate(dict(fields) if self._predicate else fields)
            if not self._predicate:
                return _truth(found)
        except ItemFailed:
            raise
        except Exception as e:
            raise ItemFailed(f"the condition '{self.text}' raised {describe(e)}") from e
        if not isinstance(found, bool):
            raise ItemFailed(f"the condition '{self.text}' returned a {type(found).__name__}, expected a bool")
        return found


def check_condition(text: str) -> None:
    """Raises ConfigError for a condition that cannot be parsed, or whose predicate cannot be imported."""
    try:
        Condition(text)
    except LoadFailed as e:
        raise ConfigError(e.message) from None


def parsed(text: str) -> ast.expr:
    """The tree of an expression. Raises ConfigError: what was found, at which character, what was expected."""
    if len(text) > LONGEST:
        raise ConfigError(f"found {len(text)} characters, expected at most {LONGEST}: write a predicate in Python")
    source = _QUOTED_OR_KEYWORD.sub(lambda m: m[1] or m[2] + _MARK, " ".join(text.splitlines()).strip())
    try:
        return ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        where = f" at character {e.offset}" if isinstance(e, SyntaxError) and e.offset else ""
        raise ConfigError(f"found '{text[:200]}', which is no condition{where}: expected {_EXPECTED}") from None


def _compiled(node: ast.expr, text: str, depth: int) -> _Evaluate:
    """The function that evaluates a tree. Raises ConfigError for anything outside the grammar."""
    if depth > _DEPTH:
        raise ConfigError(f"found more than {_DEPTH} levels in '{text[:200]}': write a predicate in Python")

    def compiled(inner: ast.expr) -> _Evaluate:
        return _compiled(inner, text, depth + 1)

    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return lambda fields: value
        case ast.Name(id=name) if name.lower() in _WORDS:
            word = _WORDS[name.lower()]
            return lambda fields: word
        case ast.Name(id=name):
            field = name.removesuffix(_MARK)
            return lambda fields: fields.get(field)
        case ast.Attribute(value=inner, attr=name) if _path(node) and not name.startswith("_"):
            outer, sub = compiled(inner), name.removesuffix(_MARK)
            return lambda fields: _sub(outer(fields), sub)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            parts = [compiled(element) for element in elements]
            return lambda fields: [part(fields) for part in parts]
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            negated = compiled(inner)
            return lambda fields: not _truth(negated(fields))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return lambda fields: -number
        case ast.BoolOp(op=op, values=values):
            return _joined(isinstance(op, ast.And), [compiled(value) for value in values])
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
            tests = [_COMPARISONS[type(op)] for op in ops]
            return _compared([compiled(each) for each in (left, *others)], tests)
        case ast.Call(func=ast.Name(id="len"), args=[inner], keywords=[]):
            sized = compiled(inner)
            return lambda fields: len(sized(fields))
        case ast.Call(func=ast.Name(id="present"), args=[inner], keywords=[]) if path := _path(inner):
            return lambda fields: _present(fields, path)
    found = ast.unparse(node)[:80].replace(_MARK, "")
    raise ConfigError(f"found '{found}' at character {node.col_offset + 1} of '{text[:200]}', expected {_EXPECTED}")


def _joined(every: bool, parts: list[_Evaluate]) -> _Evaluate:
    """`and` or `or`, with Python's result: the value that decides."""

    def evaluate(fields: Fields) -> Any:
        value: Any = None
        for part in parts:
            value = part(fields)
            if _truth(value) is not every:
                break
        return value

    return evaluate


def _compared(parts: list[_Evaluate], tests: list[Callable[[Any, Any], Any]]) -> _Evaluate:
    """A chain of comparisons, which stops at the first that fails."""

    def evaluate(fields: Fields) -> bool:
        left = parts[0](fields)
        for part, test in zip(parts[1:], tests, strict=True):
            right = part(fields)
            found = test(left, right)
            if getattr(found, "shape", ()) != ():
                raise TypeError("a comparison of an array, which has many results; compare its len(), or one number")
            if not found:
                return False
            left = right
        return True

    return evaluate


def _path(node: ast.expr) -> tuple[str, ...]:
    """The names of `field.sub`, or () for another expression."""
    match node:
        case ast.Name(id=name):
            return (name.removesuffix(_MARK),)
        case ast.Attribute(value=inner, attr=name) if outer := _path(inner):
            return (*outer, name.removesuffix(_MARK))
    return ()


_MISSING = object()


def _sub(value: Any, name: str, missing: Any = None) -> Any:
    return value.get(name, missing) if isinstance(value, Mapping) else getattr(value, name, missing)


def _present(fields: Fields, path: tuple[str, ...]) -> bool:
    value: Any = fields
    for name in path:
        value = _sub(value, name, _MISSING)
    return value is not _MISSING


def _truth(value: Any) -> bool:
    """Python's truth of a value; an array is true if it has elements, or by its only number."""
    shape = getattr(value, "shape", None)
    return bool(value) if not shape else len(value) > 0


def exclusive(one: str, other: str) -> bool:
    """Whether two conditions are known never to hold together, as `x == 1` and `x == 2`, or `x` and `not x`."""
    if is_target(one) or is_target(other):
        return False
    ones, others = list(_terms(parsed(one))), list(_terms(parsed(other)))
    return any(_opposed(a, b) for a in ones for b in others)


def _terms(node: ast.expr) -> Iterator[ast.expr]:
    """The parts of a conjunction."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        for value in node.values:
            yield from _terms(value)
    else:
        yield node


def _opposed(one: ast.expr, other: ast.expr) -> bool:
    for a, b in ((one, other), (other, one)):
        if isinstance(a, ast.UnaryOp) and isinstance(a.op, ast.Not) and ast.dump(a.operand) == ast.dump(b):
            return True
    match one, other:
        case (
            ast.Compare(left=left, ops=[op], comparators=[right]),
            ast.Compare(left=left2, ops=[op2], comparators=[right2]),
        ) if ast.dump(left) == ast.dump(left2):
            if ast.dump(right) == ast.dump(right2):
                return type(op2) in _OPPOSITE[type(op)]
            return isinstance(op, ast.Eq) and isinstance(op2, ast.Eq) and _unequal(right, right2)
    return False


def _unequal(one: ast.expr, other: ast.expr) -> bool:
    return isinstance(one, ast.Constant) and isinstance(other, ast.Constant) and one.value != other.value
