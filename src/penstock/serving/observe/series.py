"""The metrics that users define: families by name, each with its series by labels.

Users choose names, kinds and labels. A series that would make the page invalid is left out, which is logged once for
each name. Samples of one name may have different labels.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

from penstock.serving.observe.text import Histogram, Page

log = logging.getLogger("penstock.serving")

MAX_SERIES: Final = 10_000  # a choice: users may put anything into labels, and each series stays
_NAME: Final = re.compile(r"(?!penstock_|process_)[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_SUFFIXES: Final = ("", "_bucket", "_count", "_sum")

Labels = tuple[tuple[str, str], ...]
Owner = tuple[str, ...]  # the model version of the values


class Metric(Protocol):
    """A metric as the page shows it. Metrics of one name are equal."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def help(self) -> str: ...


class _Family:
    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.names = [metric.name + suffix for suffix in (_SUFFIXES if metric.kind == "histogram" else ("",))]
        if metric.kind == "counter":  # some parsers leave out the suffix
            self.names.append(metric.name.removesuffix("_total"))
        self.declared = False
        self.series: dict[Labels, float | Histogram] = {}
        self.owners: dict[Labels, Owner] = {}


class SeriesTable:
    """Metric families by name. Histograms have the buckets `bounds`. Used by one thread at a time."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._families: dict[str, _Family] = {}
        self._claimed: dict[str, str] = {}  # every name on the page -> its family
        self._series = 0
        self._refused: set[str] = set()

    def declare(self, metric: Metric) -> None:
        """Shows the family even before its first value."""
        if (family := self._family(metric)) is not None:
            family.declared = True

    def change(self, metric: Metric, labels: Labels, values: Sequence[float], owner: Owner | None = None) -> None:
        """Adds to a counter, sets a gauge to the last value, or fills a histogram. `forget` drops an owner's series."""
        family = self._families.get(metric.name)
        if family is not None and family.metric is not metric and family.metric != metric:
            self._refuse(metric, "another metric has this name")
            return
        found = None if family is None else family.series.get(labels)
        if found is None:
            family = self._admit(metric, labels, owner)
        if family is None:
            return
        if metric.kind == "histogram":
            histogram = found if isinstance(found, Histogram) else Histogram(self._bounds)
            histogram.extend(values)
            family.series[labels] = histogram
        elif metric.kind == "counter":
            family.series[labels] = sum(values) + (found if isinstance(found, float) else 0.0)
        else:
            family.series[labels] = values[-1]

    def forget(self, owner: Owner) -> None:
        """Drops the series of an owner. A name without series can be used again, unless it was declared."""
        for name, family in list(self._families.items()):
            for labels in [labels for labels, whose in family.owners.items() if whose == owner]:
                del family.owners[labels]
                del family.series[labels]
                self._series -= 1
            if not (family.series or family.declared):
                del self._families[name]
                for each in family.names:
                    self._claimed.pop(each, None)

    def of(self, owner: Owner, prefix: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
        """(name, labels, value) of an owner's series whose names have this prefix; of a histogram, its sum."""
        for name, family in self._families.items():
            if name.startswith(prefix):
                for labels, value in family.series.items():
                    if family.owners.get(labels) == owner:
                        yield name, dict(labels), value.read()[1] if isinstance(value, Histogram) else value

    def write(self, page: Page) -> None:
        for name, family in self._families.items():
            page.family(name, family.metric.kind, family.metric.help)
            for labels, value in family.series.items():
                page.sample(name, labels, value)

    def _family(self, metric: Metric) -> _Family | None:
        if metric.name in self._families:
            return self._families[metric.name]
        family = _Family(metric)
        if not _NAME.fullmatch(metric.name):
            self._refuse(metric, "the name is not valid in Prometheus, or it is reserved")
            return None
        if any(name in self._claimed for name in family.names):
            self._refuse(metric, "another metric has this name")
            return None
        self._claimed.update(dict.fromkeys(family.names, metric.name))
        self._families[metric.name] = family
        return family

    def _admit(self, metric: Metric, labels: Labels, owner: Owner | None) -> _Family | None:
        """The family with room for a new series; None if there may be none."""
        names = [name for name, _ in labels]
        if not all(name != "le" and _LABEL.fullmatch(name) for name in names) or len(set(names)) < len(names):
            self._refuse(metric, f"its labels are not valid: {names}")
        elif self._series >= MAX_SERIES:
            self._refuse(metric, f"there are {MAX_SERIES} series already; a label must not have many values")
        elif (family := self._family(metric)) is not None:
            self._series += 1
            if owner is not None:
                family.owners[labels] = owner
            return family
        return None

    def _refuse(self, metric: Metric, why: str) -> None:
        if metric.name not in self._refused and len(self._refused) < MAX_SERIES:
            self._refused.add(metric.name)
            log.warning("metric_refused name=%r kind=%s consequence=not_on_the_page: %s", metric.name, metric.kind, why)
