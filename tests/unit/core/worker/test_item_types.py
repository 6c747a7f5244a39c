"""Annotations become schemas, and requests the annotated types."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import numpy as np
import pytest

from penstock.config.schema import ModelConfig
from penstock.core.engine.engine import Engine
from penstock.core.worker.item_types import ModelTypes
from penstock.errors import BadRequest
from penstock.types import Item, ItemResult, TensorSpec

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTypeCheckers

pydantic = pytest.importorskip("pydantic")


class House(msgspec.Struct):
    """A house."""

    rooms: int
    area: float = 1.0


@dataclasses.dataclass
class Flat:
    rooms: int
    area: float = 1.0


class Hut(TypedDict):
    rooms: int


class Villa(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    rooms: int
    area: float = 1.0


class Pixels(msgspec.Struct):
    cells: np.ndarray[Any, Any]


def houses(items: list[House]) -> list[Flat]: ...
def flats(items: Sequence[Flat | str]) -> Iterator[list[House | None]]: ...
async def huts(items: list[Hut]) -> AsyncIterator[list[str]]: ...
def villas(items: list[Villa]) -> list[Villa]: ...
def plain(items: list[list[float]]) -> Any: ...
def words(items: list[str]) -> Any: ...
def tables(items: list[dict[str, int | None]]) -> Any: ...
def files(items: list[bytes]) -> Any: ...
def pixels(items: list[Pixels]) -> np.ndarray[Any, Any]: ...
def unknown(items: list[OnlyForTypeCheckers]) -> list[OnlyForTypeCheckers]: ...
def odd(items: Any) -> Any: ...


odd.__annotations__ = {"items": list[[int]]}  # type: ignore[valid-type]


def bare(items): ...


class Hooks:
    def preprocess(self, item: House) -> list[float]: ...
    def predict(self, items: list[Flat]) -> list[Flat]: ...
    def postprocess(self, result: Flat) -> Hut: ...


class Steps:
    def admit(self, item: House) -> Any: ...
    def step(self, states: list[Any]) -> list[Any]: ...


class Tensors:
    inputs = (TensorSpec("x", "FP32", (-1,)),)

    def predict(self, items: list[House]) -> list[House]: ...


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/a_b.{name}"}


def in_order(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its alternatives in alphabetical order: msgspec writes them in any."""
    return {"anyOf": sorted(schema["anyOf"], key=str)} if "anyOf" in schema else schema


VILLA = Villa.model_json_schema()


@pytest.mark.parametrize(
    ("model", "item", "result"),
    [
        (houses, ref("House"), ref("Flat")),
        (flats, {"anyOf": [ref("Flat"), {"type": "string"}]}, {"anyOf": [ref("House"), {"type": "null"}]}),
        (huts, ref("Hut"), {"type": "string"}),
        (villas, VILLA, VILLA),
        (plain, {"type": "array", "items": {"type": "number"}}, {}),
        (words, {"type": "string"}, {}),
        (files, {"type": "string", "contentEncoding": "base64"}, {}),
        (Hooks(), ref("House"), ref("Hut")),
        (Steps(), ref("House"), {}),
        (Tensors(), {}, ref("House")),
        (pixels, {}, {}),
        (unknown, {}, {}),
        (odd, {}, {}),
        (bare, {}, {}),
        (sys.getsizeof, {}, {}),
        (object(), {}, {}),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_annotations_become_schemas(model: Any, item: Any, result: Any) -> None:
    types = ModelTypes(model, getattr(model, "predict", model))
    found = types.schemas("a b")
    assert (in_order(found.item), in_order(found.result)) == (item, result)
    used = {name for each in (item, result) for name in ("House", "Flat", "Hut") if name in str(each)}
    assert found.components.keys() == {f"a_b.{name}" for name in used}
    assert (types.item_type() is None) == (not item or model is files)


@pytest.mark.parametrize(
    ("model", "value", "lax", "expected"),
    [
        (houses, {"rooms": 2}, False, House(2)),
        (houses, House(3), False, House(3)),
        (houses, Flat(3, 4.0), False, House(3, 4.0)),
        (houses, {"rooms": "2", "area": "1.5"}, True, House(2, 1.5)),
        (flats, {"rooms": 2}, False, Flat(2)),
        (flats, "text", False, "text"),
        (huts, {"rooms": 2}, False, {"rooms": 2}),
        (villas, {"rooms": 2}, False, Villa(rooms=2)),
        (villas, {"rooms": "2"}, True, Villa(rooms=2)),
        (plain, [1, 2.5], False, [1.0, 2.5]),
        (plain, ["1"], True, [1.0]),
        (plain, (array := np.zeros(2)), False, array),
        (words, "text", False, "text"),
        (tables, {"a": 1, "b": None}, False, {"a": 1, "b": None}),
    ],
)
def test_items_are_converted(model: Any, value: Any, lax: bool, expected: Any) -> None:
    kind = ModelTypes(None, model).item_type()
    assert kind is not None
    assert kind.convert(value, lax) is value or kind.convert(value, lax) == expected


@pytest.mark.parametrize(
    ("model", "value", "message"),
    [
        (houses, {"rooms": "2"}, r"Expected `int`, got `str` - at `\$.rooms`"),
        (houses, {}, "missing required field `rooms`"),
        (houses, b"bytes", "Expected `object`, got `bytes`"),
        (houses, {"rooms": np.zeros(1)}, r"at `\$.rooms`"),
        (flats, 7, "Expected `str | object`, got `int`"),
        (huts, {"rooms": None}, r"at `\$.rooms`"),
        (plain, {"a": 1}, "Expected `array`, got `object`"),
        (plain, [1, None], r"Expected `float`, got `null` - at `\$\[1\]`"),
        (words, 7, "Expected `str`, got `int`"),
        (tables, {"a": "b"}, r"at `\$\[...\]`"),
        (villas, {"rooms": "two"}, r"unable to parse string as an integer - at `\$.rooms`"),
    ],
)
def test_a_wrong_field_is_named(model: Any, value: Any, message: str) -> None:
    kind = ModelTypes(None, model).item_type()
    assert kind is not None
    with pytest.raises(BadRequest, match=message) as caught:
        kind.convert(value, False)
    assert "$.item" not in str(caught.value)


async def test_requests_are_converted_and_objects_of_the_program_are_not() -> None:
    def echo(items: list[House]) -> list[str]:
        return [repr(item) for item in items]

    async with Engine() as engine:
        await engine.load("echo", ModelConfig(target="", transport="inline"), target=echo)

        async def answer(body: bytes, codec: str, content_type: str) -> ItemResult:
            found: list[ItemResult] = []
            engine.submit("echo", None, Item(body, codec, content_type), found.append)
            assert await engine.infer("echo", 7) == "7"
            return found[0]

        house = repr(House(2, 1.5)).encode()
        form = "application/x-www-form-urlencoded"
        assert (await answer(b'{"rooms": 2, "area": 1.5}', "native", "application/json")).body == house
        assert (await answer(b"rooms=2&area=1.5", "native", form)).body == house
        assert (
            house.decode() in (await answer(b'{"instances": [{"rooms": 2, "area": 1.5}]}', "kserve", "")).body.decode()
        )
        tensors = b'{"inputs": [{"name": "rooms", "datatype": "INT64", "shape": [1], "data": [1]}]}'
        for body, codec, kind in (
            (b'"2"', "native", "application/json"),
            (b"2", "native", ""),
            (tensors, "oip_json", ""),
        ):
            error = (await answer(body, codec, kind)).error
            assert isinstance(error, BadRequest)
            assert "the item does not fit" in error.message
