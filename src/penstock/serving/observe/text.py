"""The Prometheus text format, and the histogram type.

A scrape blocks the event loop, and prometheus_client takes four times as long for fifty models.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

_FOLD = 4096
_SPECIAL = re.compile(r'[\\"\n]')
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
_SAMPLE = re.compile(r'^([A-Za-z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?[ ]+([^\s#]+)', re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MODEL = ("model", "model_name", "ModelName")  # Penstock's label, TorchServe's, and that of its older metrics

Labels = Sequence[tuple[str, str]]


class Family(Struct, frozen=True):
    """One metric: exposed name, kind ("counter", "gauge" or "histogram"), label names and help text."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


@cache
def _layout(bounds: tuple[float, ...]) -> tuple[NDArray[np.float64], list[str]]:
    """The upper bounds of the buckets, and the names of all; histograms share them."""
    return np.asarray(bounds, dtype=np.float64), [*(f"{b:g}" for b in bounds), "+Inf"]


class Histogram:
    """Counts of values by bucket. New values are buffered and counted in bulk, at the latest by `read`.

    `exemplars`: what OpenMetrics shows behind a bucket, by its place.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._names = _layout(tuple(bounds))
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0
        self._new: list[float] = []
        self.exemplars: dict[int, str] = {}

    def extend(self, values: Sequence[float]) -> None:
        self._new.extend(values)
        if len(self._new) >= _FOLD:
            self._fold()

    def add(self, value: float) -> None:
        self.extend((value,))

    def exemplify(self, value: float, trace: str, time_s: float) -> None:
        """Makes a traced value, which was added too, the exemplar of its bucket."""
        place = int(np.searchsorted(self._bounds, value, side="left"))
        self.exemplars[place] = f' # {{trace_id="{trace}"}} {value!r} {time_s:.3f}'

    def _fold(self) -> None:
        values, self._new = np.asarray(self._new, dtype=np.float64), []
        buckets = np.searchsorted(self._bounds, values, side="left")  # Prometheus: a bucket holds values <= its bound
        self._counts += np.bincount(buckets, minlength=len(self._counts))
        self._sum += float(values.sum())

    def read(self) -> tuple[list[tuple[str, int]], float]:
        """(cumulative (bound, count) pairs, sum)."""
        if self._new:
            self._fold()
        return list(zip(self._names, np.cumsum(self._counts).tolist(), strict=True)), self._sum


class Page:
    """A page under construction. The samples of a family must follow the family directly.

    `end` follows the last label: Prometheus's client for Java writes a comma there, and `le="1.0"` for the bound 1.
    `openmetrics`: in that format, which has exemplars, but without its last line.
    """

    def __init__(self, end: str = "", openmetrics: bool = False) -> None:
        self._lines: list[str] = []
        self._end, self._openmetrics = end, openmetrics

    def family(self, name: str, kind: str, help: str) -> None:
        if self._openmetrics and kind == "counter":
            name = name.removesuffix("_total")
        self._lines.append(f"# HELP {name} {help}\n# TYPE {name} {kind}\n")

    def sample(self, name: str, labels: Labels, value: float | Histogram) -> None:
        if isinstance(value, Histogram):
            self._histogram(name, labels, value)
            return
        shown = f"{name}{{{joined(labels)}{self._end}}}" if labels else name
        self._lines.append(f"{shown} {number(value)}\n")

    def _histogram(self, name: str, labels: Labels, values: Histogram) -> None:
        counts, total = values.read()
        if self._end or self._openmetrics:
            counts = [(number(float(bound)), count) for bound, count in counts]
        text = joined(labels)
        prefix = f"{name}_bucket{{{text}," if text else f"{name}_bucket{{"
        braces = f"{{{text}{self._end}}}" if text else ""
        behind = values.exemplars if self._openmetrics else {}
        self._lines += [
            f'{prefix}le="{bound}"{self._end}}} {count}{behind.get(place, "")}\n'
            for place, (bound, count) in enumerate(counts)
        ]
        self._lines.append(f"{name}_count{braces} {counts[-1][1]}\n{name}_sum{braces} {number(total)}\n")

    def write(self, family: Family, samples: Iterable[tuple[Sequence[str], float | Histogram]]) -> None:
        """Writes a family; each sample has one value per label of the family, in the same order."""
        self.family(family.name, family.kind, family.help)
        for values, value in samples:
            self.sample(family.name, list(zip(family.labels, values, strict=True)), value)

    def encode(self) -> bytes:
        return "".join(self._lines).encode("utf-8", "backslashreplace")


def joined(labels: Labels) -> str:
    """`a="1",b="2"`, escaped."""
    return ",".join([f'{name}="{_SPECIAL.sub(lambda m: _ESCAPES[m[0]], value)}"' for name, value in labels])


def number(value: float) -> str:
    """The value in Prometheus's notation."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def samples(text: str, model: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of each sample for `model`, or for all models if that is "", and of those without one."""
    for name, given, value in _SAMPLE.findall(text):
        labels = dict(_LABEL.findall(given))
        if model and next((labels[key] for key in _MODEL if key in labels), model) != model:
            continue
        with suppress(ValueError):
            yield name, labels, float(value)
