import dataclasses
import enum
import sys
from collections import Counter, OrderedDict, deque, namedtuple
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from penstock.errors import BadRequest
from penstock.streamer.redis.codec import MalformedMessage, decode, encode

ZONES = st.none() | st.just(UTC) | st.builds(timezone, st.timedeltas(timedelta(-1) / 2, timedelta(1) / 2))


@given(
    st.datetimes(timezones=ZONES)
    | st.times(timezones=ZONES)
    | st.dates()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.complex_numbers(allow_nan=False)
    | st.sets(st.integers(-100, 100) | st.text("ab") | st.tuples(st.booleans()))
    | st.binary().map(bytearray)
)
def test_a_value_of_the_standard_library_survives_the_round_trip(value):
    back = decode(encode({"x": [value, frozenset([1])]}))["x"]
    assert back == [value, frozenset([1])]
    assert type(back[0]) is type(value)
    assert repr(back[0]) == repr(value) or isinstance(value, set)


class Level(enum.IntEnum):
    LOW = 1


class Colour(enum.Enum):
    RED = "red"


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Box:
    corner: Point
    colour: Colour = Colour.RED
    names: list[str] = dataclasses.field(default_factory=list)
    area: int = dataclasses.field(init=False, default=3)

    def __post_init__(self):
        assert not hasattr(self, "made"), "it is made once"
        self.made = True


@dataclasses.dataclass(frozen=True, slots=True)
class Small:
    x: object


@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
        Decimal("NaN"),
        Decimal("1.10"),
        OrderedDict(b=1, a={2}),
        Counter("abb"),
        deque([1, (2,)], 5),
        Level.LOW,
        Colour.RED,
        Point(1, [Point(2, 3)]),
        Box(Point(1, 2), names=["a"]),
        Small(Small(np.float32(1))),
        {Small(1).x: UUID(int=7)},
    ],
    ids=repr,
)
def test_a_value_keeps_its_type_and_contents(value):
    back = decode(encode([value]))[0]
    assert type(back) is type(value)
    assert repr(back) == repr(value)
    assert getattr(back, "__dict__", {}).items() >= getattr(value, "__dict__", {}).items()
    assert getattr(back, "fold", 0) == getattr(value, "fold", 0)
    assert getattr(back, "maxlen", 0) == getattr(value, "maxlen", 0)


class Odd(tzinfo):
    def utcoffset(self, when):
        return timedelta(0)


@dataclasses.dataclass
class Listed(list):
    x: int = 0


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (datetime(2026, 1, 1, tzinfo=Odd()), "a tzinfo of datetime.timezone or zoneinfo.ZoneInfo"),
        (dataclasses.make_dataclass("Local", ["x"])(1), "at the top level of a module that both sides import"),
        (Listed(), "expected None, bool"),
        (type("Date", (date,), {})(2026, 1, 1), "expected None, bool"),
        (enum.Flag("Bits", "A B")(3), "at the top level of a module"),
    ],
)
def test_a_value_that_would_change_is_refused_with_advice(value, advice):
    with pytest.raises(BadRequest, match=advice):
        encode([value])


def test_a_class_of_the_main_program_is_refused(monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(Small, "__module__", "__main__")
    monkeypatch.setattr(main, "Small", Small, raising=False)
    with pytest.raises(BadRequest, match="of a module that both sides import"):
        encode(Small(1))


def _object(*parts):
    return msgspec.msgpack.encode(Ext(6, msgspec.msgpack.encode(parts)))


def _value(*parts):
    return msgspec.msgpack.encode(Ext(5, msgspec.msgpack.encode(parts)))


class Dangerous:
    def __del__(self):
        raise AssertionError("it ran")


DangerousBox = dataclasses.dataclass(Dangerous)
HERE = __name__


@pytest.mark.parametrize(
    "data",
    [
        _object("antigravity", "X", {}),
        _object("subprocess", "Popen", {"args": "id"}),
        _object(HERE, "Dangerous", {}),
        _object(HERE, "Small", {}),
        _object(HERE, "Small", {"x": 1, "__class__": 2}),
        _object(HERE, "Small", [1]),
        _object(HERE, "Point", [1]),
        _object(HERE, "Point", "xy"),
        _object(HERE, "Colour", "mro"),
        _object(HERE, "Colour", ["RED"]),
        _object("builtins", "dict", {}),
        _object("sys", "modules.clear", {}),
        _object(1, 2, 3),
        _value("eval", "1"),
        _value("bytearray", 10**12),
        _value("set", [[1]]),
        _value("UUID", b"short"),
        _value("datetime", ["2026-01-01", 0, "../../etc/passwd"]),
        _value("datetime", ["2026-01-01", 7, None]),
        _value("datetime", []),
        _value("Decimal", "one"),
    ],
    ids=range(21),
)
def test_forged_values_are_malformed_import_nothing_and_run_no_code(data):
    with pytest.raises(MalformedMessage):
        decode(data)
    assert "antigravity" not in sys.modules


def test_a_class_that_is_not_loaded_here_is_named():
    with pytest.raises(MalformedMessage, match=r"a shapes\.Box, which is not loaded here: import shapes first"):
        decode(_object("shapes", "Box", {}))
