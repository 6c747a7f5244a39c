"""The search space: parameters with their values, and candidate settings, which give each parameter one value. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from msgspec import Struct, structs

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.errors import ConfigError, nearest
from penstock.values import convert

Value = bool | int | float | str

KEYS: Final = {
    "batch": "batching.max_batch_size",
    "instances": "instances",
    "precision": "precision",
    "optimize": "optimize",
    "sizes": "batching.sizes",
    "hold": "batching.max_hold_s",
    "device": "devices",
    "threads": "threads",
    "policy": "batching.policy",
}  # parameter -> key of `[models.NAME]`; any other parameter is such a key itself
_ORDER: Final = tuple(KEYS)
_NOT_TUNABLE: Final = (
    "target", "name", "version", "traffic", "batching", "restart", "inputs", "outputs", "env", "options", "trust",
    "priority",
)  # fmt: skip
_RANGE: Final = re.compile(r"(\d{1,15})\.\.(\d{1,15})(?:/(\d{1,15}))?", re.ASCII)
_EXAMPLE: Final = 'expected for instance "batch=1..32,instances=1..16,precision=fp32,fp16"'
BASELINE: Final = "baseline"  # the text of settings that change nothing
MOST: Final = 20_000  # settings of one space: a search visits each of them, and measuring more is hopeless


def _place(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


class CandidateSettings(Struct, frozen=True):
    """One value for each parameter, in a fixed order, so equal settings have equal texts. Empty: the baseline."""

    items: tuple[tuple[str, Value], ...] = ()

    @property
    def text(self) -> str:
        """The form in tables, which `parse_settings` reads: "batch=8,instances=2"."""
        return ",".join(f"{name}={shown(value)}" for name, value in self.items)

    def __str__(self) -> str:
        return self.text or BASELINE

    def get(self, name: str, default: Value | None = None) -> Value | None:
        """The parameter's value, or the default if these settings leave it unchanged."""
        return next((value for key, value in self.items if key == name), default)

    def whole(self, name: str, default: Value | None = None) -> int | None:
        """The parameter's value if it is a number, as `batch` and `instances` are; None if it is left to the app."""
        value = self.get(name, default)
        return value if isinstance(value, int) else None

    def put(self, **values: Value) -> CandidateSettings:
        """A copy with these values."""
        return settings_of(dict(self.items) | values)


UNCHANGED: Final = CandidateSettings()


def settings_of(values: dict[str, Value]) -> CandidateSettings:
    return CandidateSettings(tuple(sorted(values.items(), key=lambda item: _place(item[0]))))


def shown(value: Value) -> str:
    """A value in the form that is read again: 0.005 and not 5e-3, 8 and not 8.0, true and not True."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return str(value)


class TunedParameter(Struct, frozen=True):
    """A parameter and the values to try."""

    name: str
    values: tuple[Value, ...]

    @property
    def ordered(self) -> bool:
        """Whether the values are ordered, so only adjacent ones are neighbours."""
        return all(not isinstance(value, str) for value in self.values)


class SearchSpace(Struct, frozen=True):
    """All settings that a search may try."""

    parameters: tuple[TunedParameter, ...]

    @property
    def text(self) -> str:
        """The form that `parse_space` reads, with ranges written out."""
        return ",".join(f"{p.name}={','.join(map(shown, p.values))}" for p in self.parameters)

    def values(self, name: str) -> tuple[Value, ...]:
        """The values of a parameter; none if the space does not have it."""
        return next((p.values for p in self.parameters if p.name == name), ())

    def __len__(self) -> int:
        return math.prod(len(p.values) for p in self.parameters)

    def __iter__(self) -> Iterator[CandidateSettings]:
        """All settings, cheapest first."""
        names = [p.name for p in self.parameters]
        every = itertools.product(*(p.values for p in self.parameters))
        yield from sorted((settings_of(dict(zip(names, values, strict=True))) for values in every), key=self.cost)

    def __contains__(self, settings: object) -> bool:
        return (
            isinstance(settings, CandidateSettings)
            and len(settings.items) == len(self.parameters)
            and all(settings.get(p.name) in p.values for p in self.parameters)
        )

    def cost(self, settings: CandidateSettings) -> tuple[float, ...]:
        """A sort key: cheaper settings come first. Instances weigh most, then the batch size, then threads; for any
        other parameter a value that the space names earlier is cheaper. "auto" counts as the largest number."""
        first = ("instances", "batch", "threads")
        numbers = [_number(settings.get(name, 0)) for name in first]
        rest = [(settings.get(p.name), p.values) for p in self.parameters if p.name not in first]
        return (*numbers, *(float(values.index(value)) if value in values else -1.0 for value, values in rest))

    def neighbours(self, settings: CandidateSettings) -> list[CandidateSettings]:
        """Settings that differ in one parameter: by one step if its values are ordered, else by any value. Also one
        step more of `batch` with one less of `instances` and vice versa, because one can compensate for the other."""
        steps = {p.name: self._steps(p, settings) for p in self.parameters}
        near = [settings.put(**{name: other}) for name, others in steps.items() for other in others]
        for batch, instances in itertools.product(steps.get("batch", []), steps.get("instances", [])):
            more = _number(batch) > _number(settings.get("batch"))
            fewer = _number(instances) < _number(settings.get("instances"))
            if more == fewer:
                near.append(settings.put(batch=batch, instances=instances))
        return near

    def _steps(self, parameter: TunedParameter, settings: CandidateSettings) -> list[Value]:
        """The values next to the parameter's value."""
        value = settings.get(parameter.name)
        values = sorted(parameter.values, key=_number) if parameter.ordered else list(parameter.values)
        if not parameter.ordered or value not in values:
            return [other for other in values if other != value]
        at = values.index(value)
        return [*values[at + 1 : at + 2], *values[max(0, at - 1) : at]]


def _number(value: Value | None) -> float:
    return float("inf") if value is None or isinstance(value, str) else float(value)


def parse_space(text: str) -> SearchSpace:
    """The space of a text such as "batch=1..32,instances=1,2,4,precision=fp32,fp16". Raises ConfigError.

    Each parameter is NAME=VALUES. A range of whole numbers has both ends and the powers of two between them; 1..32/4
    has steps of 4.
    """
    found: dict[str, list[Value]] = {}
    name = ""
    for piece in text.split(","):
        if "=" in piece:
            name, _, piece = (part.strip() for part in piece.partition("="))
            _check_name(name)
            if name in found:
                raise ConfigError(f"space: '{name}' appears twice; name all its values at once")
            found[name] = []
        if not name:
            raise ConfigError(f"space: '{text}' names no parameter; {_EXAMPLE}")
        found[name] += _values(name, piece.strip())
    names = sorted(found, key=_place)
    space = SearchSpace(tuple(TunedParameter(name, tuple(dict.fromkeys(found[name]))) for name in names))
    if len(space) > MOST:
        raise ConfigError(f"space: {len(space):,} settings; expected at most {MOST:,}: name fewer values")
    return space


def parse_settings(text: str) -> CandidateSettings:
    """Settings from their `text`, one value per parameter; "" and "baseline" change nothing. Raises ConfigError."""
    if text in ("", BASELINE):
        return UNCHANGED
    space = parse_space(text)
    if many := [p.name for p in space.parameters if len(p.values) > 1]:
        raise ConfigError(f"settings '{text}': '{many[0]}' has several values; expected one")
    return next(iter(space))


def _check_name(name: str) -> None:
    keys = [*ModelConfig.__struct_fields__, *(f"batching.{key}" for key in BatchingConfig.__struct_fields__)]
    tunable = [key for key in keys if key.split(".")[-1] not in _NOT_TUNABLE]
    known = [*_ORDER, *(key for key in tunable if key not in KEYS.values())]
    if name in known or (name.startswith("options.") and name != "options."):
        return
    if short := next((short for short, key in KEYS.items() if key == name), None):
        raise ConfigError(f"space: '{name}' is called '{short}' here")
    hint = nearest(name, known) or f" Known: {', '.join(_ORDER)}, or a key of [models.NAME] such as batching.slo_s"
    raise ConfigError(f"space: there is no parameter '{name}'{hint}")


def _values(name: str, text: str) -> list[Value]:
    if not text:
        raise ConfigError(f"space: '{name}' has an empty value; {_EXAMPLE}")
    if re.fullmatch("[0-9]+-[0-9]+", text) and not name.startswith("options."):
        raise ConfigError(f"space: '{name}={text}' is no value; write a range as {text.replace('-', '..')}")
    values = _range(name, text) if ".." in text else [_read(text)]
    for value in values:
        _check_value(name, value)
    return list(values)


def _read(text: str) -> Value:
    """A value as in TOML; anything but a number, true or false is a string without quotes."""
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


def _check_value(name: str, value: Value) -> None:
    """Raises ConfigError if the configuration does not accept the value."""
    if name.startswith("options."):
        return
    if name == "sizes" and value not in ("any", "auto"):
        raise ConfigError(f"space: sizes: found {value}, expected any or auto; a list belongs into the configuration")
    table, _, key = KEYS.get(name, name).rpartition(".")
    kind = {f.name: f.type for f in structs.fields(BatchingConfig if table else ModelConfig)}[key]
    convert((value,) if key == "devices" else value, kind, f"space: {name}")
