"""The values on `/metrics`. Users choose names, kinds and labels; a metric that would break the page is left out.

Each omission is logged once.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Final

from penstock.serving.observe.text import Histogram, Page
from penstock.torchserve.metrics.definitions import MetricDefinition

log = logging.getLogger("penstock.torchserve")

MAX_SERIES: Final = 10_000
# TorchServe's bounds, and larger ones because its times are in ms and µs.
BOUNDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0,
    1e3, 2.5e3, 5e3, 1e4, 2.5e4, 5e4, 1e5, 2.5e5, 5e5, 1e6, 2.5e6, 5e6, 1e7,
)  # fmt: skip
_NAME: Final = re.compile(r"(?!penstock_|process_)[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"(?!__)(?!le$)[a-zA-Z_][a-zA-Z0-9_]*")
_SUFFIXES: Final = ("", "_bucket", "_count", "_sum")

Labels = tuple[tuple[str, str], ...]
Owner = tuple[str, ...]  # the model version of the values


class _Family:
    def __init__(self, definition: MetricDefinition) -> None:
        self.definition = definition
        self.series: dict[Labels, float | Histogram] = {}
        self.owners: dict[Labels, Owner] = {}


class SeriesTable:
    """Metric families by name, each with its series by labels. Used by one thread at a time."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._claimed: dict[str, str] = {}  # every name on the page -> its family
        self._series = 0
        self._refused: set[str] = set()

    def declare(self, definition: MetricDefinition) -> None:
        """Shows the family even before its first value."""
        self._family(definition)

    def change(
        self, definition: MetricDefinition, labels: Labels, values: Sequence[float], owner: Owner | None = None
    ) -> None:
        """Adds to a counter, sets a gauge to the last value, or fills a histogram. `forget` drops an owner's series."""
        family = self._families.get(definition.name) or self._family(definition)
        if family is None:
            return
        if family.definition is not definition and family.definition != definition:
            self._refuse(definition, "another metric has this name")
            return
        found = family.series.get(labels)
        if found is None and not self._admit(family, labels, owner):
            return
        if definition.kind == "histogram":
            histogram = found if isinstance(found, Histogram) else Histogram(BOUNDS)
            histogram.extend(values)
            family.series[labels] = histogram
        elif definition.kind == "counter":
            family.series[labels] = sum(values) + (found if isinstance(found, float) else 0.0)
        else:
            family.series[labels] = values[-1]

    def forget(self, owner: Owner) -> None:
        for family in self._families.values():
            for labels in [labels for labels, whose in family.owners.items() if whose == owner]:
                del family.owners[labels]
                del family.series[labels]
                self._series -= 1

    def write(self, page: Page) -> None:
        for family in self._families.values():
            d = family.definition
            page.family(d.name, d.kind, f"Torchserve prometheus {d.kind} metric with unit: {_one_line(d.unit)}")
            for labels, value in family.series.items():
                page.sample(d.name, labels, value)

    def _family(self, definition: MetricDefinition) -> _Family | None:
        names = [definition.name + suffix for suffix in (_SUFFIXES if definition.kind == "histogram" else ("",))]
        if not _NAME.fullmatch(definition.name):
            self._refuse(definition, "the name is not valid in Prometheus, or it is reserved")
            return None
        if any(name in self._claimed for name in names):
            self._refuse(definition, "another metric has this name")
            return None
        self._claimed.update(dict.fromkeys(names, definition.name))
        family = self._families[definition.name] = _Family(definition)
        return family

    def _admit(self, family: _Family, labels: Labels, owner: Owner | None) -> bool:
        """True if a new series may be added."""
        d = family.definition
        bad = next((name for name, _ in labels if not _LABEL.fullmatch(name)), None)
        if bad is not None or len({name for name, _ in labels}) < len(labels):
            self._refuse(d, f"its dimensions are not valid: {[name for name, _ in labels]}")
        elif self._series >= MAX_SERIES:
            self._refuse(d, f"there are {MAX_SERIES} series already; a dimension must not have many values")
        else:
            self._series += 1
            if owner is not None:
                family.owners[labels] = owner
            return True
        return False

    def _refuse(self, d: MetricDefinition, why: str) -> None:
        if d.name not in self._refused and len(self._refused) < MAX_SERIES:
            self._refused.add(d.name)
            log.warning("metric_refused name=%r kind=%s consequence=not_on_the_page: %s", d.name, d.kind, why)


def filter_page(page: bytes, names: Iterable[str]) -> bytes:
    """The families and samples of these names."""
    wanted = set(names)
    kept: list[str] = []
    head: list[str] = []
    whole = False
    for line in page.decode("utf-8").splitlines(keepends=True):
        if line.startswith("# HELP "):
            head, whole = [], line.split(" ", 3)[2] in wanted
        if line.startswith("#"):
            (kept if whole else head).append(line)
        elif whole or line.partition("{")[0].partition(" ")[0] in wanted:
            kept += [*head, line]
            head = []
    return "".join(kept).encode("utf-8")


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
