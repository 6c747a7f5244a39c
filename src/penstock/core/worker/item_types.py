"""The types of a model's items and results, from its annotations: JSON schemas, and the conversion of requests."""

import collections.abc
import dataclasses
import inspect
import re
import threading
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec

from penstock.errors import BadRequest, LoadFailed
from penstock.types import ModelSchemas

T = TypeVar("T")

_BATCHES: Final = {list, collections.abc.Sequence, collections.abc.Iterable}  # how `predict` may annotate a batch
_STREAMS: Final = {
    collections.abc.Iterator,
    collections.abc.Generator,
    collections.abc.AsyncIterator,
    collections.abc.AsyncGenerator,
}
_SCALARS: Final = (str, int, float, bool, bytes, bytearray)
_PLAIN: Final = {str, int, float, bool, list, dict, type(None), Any, typing.Union, types.UnionType}
_OF_REQUESTS: Final = ("parameters", "requests", "sequences")  # further arguments of a `predict` of items
_REF: Final = "#/components/schemas/"
_NAME: Final = re.compile(r"[^A-Za-z0-9._-]")
_first_use = threading.Lock()  # msgspec 0.22 crashes when two threads convert to a type for the first time at once


class ItemType:
    """A type with a JSON form to which items are converted; see `has_fields`."""

    def __init__(self, kind: Any) -> None:
        self._kind, self._plain = kind, is_plain(kind)
        self._class = kind if inspect.isclass(kind) and not typing.is_typeddict(kind) else None
        self._validate = _adapter(kind).validate_python if _of_pydantic(kind) else None
        if self._validate is None:
            # msgspec analyses a type such as dict[str, int] in each call, but the fields of a struct once
            self._holder = msgspec.defstruct("Holder", [("item", kind)])
            with _first_use, suppress(msgspec.ValidationError):
                msgspec.convert({"item": None}, self._holder)

    def subclass(self, base: type[T]) -> type[T] | None:
        """The first class below `base` in the type."""
        return next((kind for kind in (self._kind, *typing.get_args(self._kind)) if _is_below(kind, base)), None)

    def convert(self, value: Any, lax: bool) -> Any:
        """The item; with `lax`, text may stand for a number, as in a form. Raises BadRequest with the wrong field."""
        if (self._class is not None and isinstance(value, self._class)) or (self._plain and type(value) not in _PLAIN):
            return value  # it has the type, or came by a protocol of arrays or texts
        try:
            if self._validate is not None:
                return self._validate(value)
            holder: Any = msgspec.convert({"item": value}, self._holder, strict=not lax, from_attributes=True)
            return holder.item
        except msgspec.ValidationError as e:
            found = str(e).replace(" - at `$.item`", "").replace("- at `$.item", "- at `$")
        except ValueError as e:  # of pydantic
            found = _first_error(e)
        raise BadRequest(f"the item does not fit: {found}")


class ModelTypes:
    """The types of one item and one result, by the annotations of a model's methods; Any without annotations."""

    def __init__(self, model: Any, predict: Any) -> None:
        first = getattr(model, "preprocess", None) or getattr(model, "admit", None)
        takes = getattr(model, "collate", None) or predict
        self._item = _argument(first) if first else _element(_argument(takes), _BATCHES)
        if getattr(model, "inputs", None):  # it receives arrays
            self._item = Any
        last = getattr(model, "postprocess", None)
        given = hints_of(last or predict).get("return", Any)
        self._result = given if last else _element(_element(given, _STREAMS, given), _BATCHES)

    def item_type(self) -> ItemType | None:
        """None if items stay as they are: their type says nothing, or has no JSON form."""
        typed = is_plain(self._item) or has_fields(self._item)
        return ItemType(self._item) if typed and _schema(self._item, "")[0] else None

    def schemas(self, model: str) -> ModelSchemas:
        """The JSON schemas; `model` is a prefix of the names of their components."""
        prefix = _NAME.sub("_", model)
        item, components = _schema(self._item, prefix)
        result, more = _schema(self._result, prefix, mode="serialization")
        return ModelSchemas(item, result, {**components, **more})


def check_takes_items(predict: Any, name: str = "predict") -> None:
    """Raises LoadFailed if a function cannot be called with a list of items, or declares that it takes one item."""
    try:
        inspect.signature(predict).bind([])
    except TypeError as e:
        raise LoadFailed(f"{name} does not take the items of a batch ({e}): write {name}(items)") from None
    except ValueError:  # some functions are not written in Python
        return
    kind = _argument(predict)
    if kind in _SCALARS or is_struct(kind):
        right = f"{name}(items: list[{kind.__name__}])"
        raise LoadFailed(f"{name} takes one {kind.__name__}, but it gets all items of a batch: write {right} -> list")


def takes_arrays(predict: Any, inputs: Sequence[str], table: bool) -> bool:
    """Whether `predict` receives the arrays of a batch, by the names of the inputs, and not a list of items.

    It does if a parameter has the name of an input and the first one is not annotated as a list. `table`: the inputs
    were declared in a table, where any other name than `items` is a mistake. Raises LoadFailed.
    """
    try:
        signature = inspect.signature(predict)
    except (TypeError, ValueError):  # some functions are not written in Python
        return False
    parameters = signature.parameters.values()
    kind, kinds = _argument(predict), {p.kind for p in parameters}
    if any((typing.get_origin(kind) or kind) is each for each in _BATCHES):
        return False
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    meant = not named.keys().isdisjoint(inputs) or kinds == {inspect.Parameter.VAR_KEYWORD}
    if not meant and (not table or next(iter(named), "") == "items"):
        return False
    lacks = inspect.Parameter.VAR_KEYWORD not in kinds and not named.keys() >= set(inputs)
    extra = [n for n, p in named.items() if n not in inputs and (p.default is p.empty or n in _OF_REQUESTS)]
    if meant and not lacks and not extra:
        return True
    only = "; an array comes without the parameters and sequences of requests" if set(_OF_REQUESTS) & set(extra) else ""
    raise LoadFailed(
        f"found predict{signature} for the inputs {', '.join(inputs)}: give each parameter the name of an input, to"
        f" receive the arrays of a batch, or write predict(items), to receive a list of its requests{only}"
    )


def is_struct(kind: Any) -> bool:
    """Whether a type is a struct, a dataclass, a TypedDict or a pydantic model."""
    known = inspect.isclass(kind) and (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind))
    return known or typing.is_typeddict(kind) or hasattr(kind, "__pydantic_validator__")


def is_plain(kind: Any) -> bool:
    """Whether a type is one of JSON's, such as `dict[str, list[int]]`."""
    known = any((typing.get_origin(kind) or kind) is plain for plain in _PLAIN)  # an annotation may have no hash
    return known and all(map(is_plain, typing.get_args(kind)))


def has_fields(kind: Any) -> bool:
    """Whether a type is, or holds, a struct, a dataclass, a TypedDict or a pydantic model."""
    return is_struct(kind) or any(map(has_fields, typing.get_args(kind)))


def _is_below(kind: Any, base: type) -> bool:
    return inspect.isclass(kind) and issubclass(kind, base)


def _of_pydantic(kind: Any) -> bool:
    return hasattr(kind, "__pydantic_validator__") or any(map(_of_pydantic, typing.get_args(kind)))


def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter  # only models that use it load it

    return TypeAdapter(kind)


def _schema(kind: Any, prefix: str, mode: str = "validation") -> tuple[dict[str, Any], dict[str, Any]]:
    """(schema, components by name); both are empty for a type without a JSON form."""
    if kind is Any:
        return {}, {}
    try:
        if _of_pydantic(kind):
            schema = _adapter(kind).json_schema(ref_template=f"{_REF}{prefix}.{{model}}", mode=mode)
            components = schema.pop("$defs", {})
        else:
            (schema,), components = msgspec.json.schema_components((kind,), ref_template=f"{_REF}{prefix}.{{name}}")
    except Exception:
        return {}, {}
    return schema, {f"{prefix}.{name}": each for name, each in components.items()}


def hints_of(function: Any) -> dict[str, Any]:
    """The annotations of a function or a callable object; none if they name what only a type checker imports."""
    try:
        return typing.get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
    except Exception:
        return {}


def _argument(function: Any) -> Any:
    try:
        name = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return Any
    return hints_of(function).get(name, Any)


def _element(kind: Any, containers: set[Any], other: Any = Any) -> Any:
    """The first parameter of a generic type such as `list[T]`; `other` for any other type."""
    arguments = typing.get_args(kind)
    return arguments[0] if arguments and typing.get_origin(kind) in containers else other


def _first_error(error: Any) -> str:
    """The first error of a pydantic ValidationError, as msgspec writes one."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    return f"{first['msg']} - at `${path}`"
