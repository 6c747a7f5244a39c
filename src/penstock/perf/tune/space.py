"""What may be turned: knobs with their values, and settings, which give each knob one. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from msgspec import Struct, ValidationError, convert, structs

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.config.toml import expected
from penstock.errors import ConfigError, nearest

Value = bool | int | float | str

KEYS: Final = {
    "batch": "batching.max_batch_size",
    "instances": "instances",
    "precision": "precision",
    "optimize": "optimize",
    "hold": "batching.max_hold_s",
    "device": "devices",
    "threads": "threads",
    "policy": "batching.policy",
}  # knob -> key of `[models.NAME]`; all other knobs are such keys themselves
_ORDER: Final = tuple(KEYS)
_NOT_KNOBS: Final = (
    "target",
    "name",
    "version",
    "traffic",
    "batching",
    "inputs",
    "env",
    "options",
    "trust",
    "priority",
)
_RANGE: Final = re.compile(r"(\d{1,15})\.\.(\d{1,15})(?:/(\d{1,15}))?", re.ASCII)
_EXAMPLE: Final = 'expected for instance "batch=1..32,instances=1..16,precision=fp32,fp16"'
MOST: Final = 20_000  # settings of one space: nobody can measure more, and each is looked at


def _place(knob: str) -> tuple[int, str]:
    return (_ORDER.index(knob) if knob in _ORDER else len(_ORDER), knob)


class Settings(Struct, frozen=True):
    """One value for each knob, in a fixed order: equal settings have equal texts. Empty: all is as the app has it."""

    items: tuple[tuple[str, Value], ...] = ()

    @property
    def text(self) -> str:
        """As tables and `parse_settings` have it: "batch=8,instances=2"."""
        return ",".join(f"{name}={shown(value)}" for name, value in self.items)

    def __str__(self) -> str:
        return self.text or "as it is"

    def get(self, knob: str, default: Value | None = None) -> Value | None:
        """The knob's value; the default when it is not turned."""
        return next((value for name, value in self.items if name == knob), default)

    def put(self, **knobs: Value) -> Settings:
        """The same with these knobs turned."""
        return settings(dict(self.items) | knobs)

    def turned(self, knob: str, value: Value) -> Settings:
        """The same with this knob turned; for names that are no words of Python."""
        return settings(dict(self.items) | {knob: value})

    def only(self, *knobs: str) -> Settings:
        """These knobs alone."""
        return Settings(tuple(item for item in self.items if item[0] in knobs))


def settings(values: dict[str, Value]) -> Settings:
    """Settings of these values, in their order."""
    return Settings(tuple(sorted(values.items(), key=lambda item: _place(item[0]))))


def shown(value: Value) -> str:
    """A value as it is written and can be read again: 0.005 and not 5e-3, 8 and not 8.0, true and not True."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return str(value)


class Knob(Struct, frozen=True):
    """One thing that may be turned, and to what."""

    name: str
    values: tuple[Value, ...]

    @property
    def ordered(self) -> bool:
        """Whether the values lie on a line, so that only those beside each other are neighbours."""
        return all(not isinstance(value, str) for value in self.values)


class Space(Struct, frozen=True):
    """All settings that may be tried."""

    knobs: tuple[Knob, ...]

    @property
    def text(self) -> str:
        """As `parse_space` reads it, ranges written out."""
        return ",".join(f"{knob.name}={','.join(map(shown, knob.values))}" for knob in self.knobs)

    def __len__(self) -> int:
        n = 1
        for knob in self.knobs:
            n *= len(knob.values)
        return n

    def __iter__(self) -> Iterator[Settings]:
        """Every setting, cheaper ones first."""
        names = [knob.name for knob in self.knobs]
        every = itertools.product(*(knob.values for knob in self.knobs))
        yield from sorted((settings(dict(zip(names, values, strict=True))) for values in every), key=self.cost)

    def __contains__(self, found: object) -> bool:
        return (
            isinstance(found, Settings)
            and len(found.items) == len(self.knobs)
            and all(found.get(knob.name) in knob.values for knob in self.knobs)
        )

    def cost(self, found: Settings) -> tuple[float, ...]:
        """What can be compared: the smaller, the cheaper. Instances weigh most, then the size of batches, then threads;
        of other knobs a value is the cheaper the earlier it was named. "auto" is the dearest number."""
        first = ("instances", "batch", "threads")
        numbers = [_number(found.get(name, 0)) for name in first]
        rest = [self._index(knob, found) for knob in self.knobs if knob.name not in first]
        return (*numbers, *rest)

    def _index(self, knob: Knob, found: Settings) -> float:
        value = found.get(knob.name)
        return float(knob.values.index(value)) if value in knob.values else -1.0

    def neighbours(self, found: Settings) -> list[Settings]:
        """Settings that differ in one knob: by one step where values lie on a line, else by any. Also those with one
        step more of `batch` and one less of `instances`, or the other way round: the one can stand in for the other."""
        steps = {knob.name: self._steps(knob, found) for knob in self.knobs}
        near = [found.turned(name, other) for name, others in steps.items() for other in others]
        for batch, instances in itertools.product(steps.get("batch", []), steps.get("instances", [])):
            more, fewer = (
                _number(batch) > _number(found.get("batch")),
                _number(instances) < _number(found.get("instances")),
            )
            if more == fewer:
                near.append(found.put(batch=batch, instances=instances))
        return near

    def _steps(self, knob: Knob, found: Settings) -> list[Value]:
        """The values beside that of the knob."""
        value = found.get(knob.name)
        values = sorted(knob.values, key=_number) if knob.ordered else list(knob.values)
        if not knob.ordered or value not in values:
            return [other for other in values if other != value]
        at = values.index(value)
        return [*values[at + 1 : at + 2], *values[max(0, at - 1) : at]]


def _number(value: Value | None) -> float:
    return float("inf") if value is None or isinstance(value, str) else float(value)


def parse_space(text: str) -> Space:
    """The space that a text such as "batch=1..32,instances=1,2,4,precision=fp32,fp16" tells. Raises ConfigError.

    Each knob is NAME=VALUES. A range of whole numbers goes by powers of two, with both ends; 1..32/4 by steps of 4.
    """
    found: dict[str, list[Value]] = {}
    name = ""
    for piece in text.split(","):
        if "=" in piece:
            name, _, piece = (part.strip() for part in piece.partition("="))
            _check_name(name)
            if name in found:
                raise ConfigError(f"space: '{name}' is there twice; name all its values at once")
            found[name] = []
        if not name:
            raise ConfigError(f"space: '{text}' names no knob; {_EXAMPLE}")
        found[name] += _values(name, piece.strip())
    space = Space(tuple(Knob(name, tuple(dict.fromkeys(found[name]))) for name in sorted(found, key=_place)))
    if len(space) > MOST:
        raise ConfigError(f"space: {len(space):,} settings; expected at most {MOST:,}: name fewer values")
    return space


def parse_settings(text: str) -> Settings:
    """Settings as their `text` has them, one value a knob; "" and "as it is" turn nothing. Raises ConfigError."""
    if text in ("", str(Settings())):
        return Settings()
    space = parse_space(text)
    if many := [knob.name for knob in space.knobs if len(knob.values) > 1]:
        raise ConfigError(f"settings '{text}': '{many[0]}' has several values; expected one")
    return next(iter(space))


def _check_name(name: str) -> None:
    models, batching = ModelConfig.__struct_fields__, BatchingConfig.__struct_fields__
    keys = [key for key in (*models, *(f"batching.{key}" for key in batching)) if key.split(".")[-1] not in _NOT_KNOBS]
    known = [*_ORDER, *(key for key in keys if key not in KEYS.values())]
    if name in known or (name.startswith("options.") and name != "options."):
        return
    if knob := next((knob for knob, key in KEYS.items() if key == name), None):
        raise ConfigError(f"space: '{name}' is called '{knob}' here")
    hint = nearest(name, known) or f" Known: {', '.join(_ORDER)}, or a key of [models.NAME] such as batching.slo_s"
    raise ConfigError(f"space: there is no knob '{name}'{hint}")


def _values(name: str, text: str) -> list[Value]:
    if not text:
        raise ConfigError(f"space: '{name}' has an empty value; {_EXAMPLE}")
    if ".." in text:
        return [_checked(name, value) for value in _range(name, text)]
    return [_checked(name, _read(text))]


def _read(text: str) -> Value:
    """A value as in TOML; what is no number, true or false is a text without quotes."""
    if text in ("true", "false"):
        return text == "true"
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    return text


def _range(name: str, text: str) -> list[int]:
    whole = _RANGE.fullmatch(text)
    if whole is None:
        raise ConfigError(f"space: '{name}={text}' is no range; expected whole numbers such as 1..32, or 1..32/4")
    first, last, step = int(whole[1]), int(whole[2]), int(whole[3] or 1)
    if first > last:
        raise ConfigError(f"space: '{name}={text}' runs backwards; expected {last}..{first}")
    if whole[3] is None:
        return sorted({first, last} | {2**k for k in range(last.bit_length()) if first < 2**k < last})
    if not step:
        raise ConfigError(f"space: '{name}={text}' has steps of 0; expected 1 or more")
    if (many := (last - first) // step + 1) > MOST:
        raise ConfigError(f"space: '{name}={text}' has {many:,} values; expected at most {MOST:,} settings in all")
    return list(range(first, last + 1, step))


def _checked(name: str, value: Value) -> Value:
    """`value`, if the configuration takes it."""
    if name.startswith("options."):
        return value
    table, _, key = KEYS.get(name, name).rpartition(".")
    kind = {f.name: f.type for f in structs.fields(BatchingConfig if table else ModelConfig)}[key]
    try:
        convert((value,) if key == "devices" else value, kind)
    except ValidationError:
        raise ConfigError(f"space: {name}={shown(value)}: expected {expected(kind)}") from None
    return value
