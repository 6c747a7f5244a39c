"""The metrics that models count by themselves (`penstock.metrics`), gathered from their workers.

They come from users' code, so nothing of them may spoil the page for everybody: what does not fit is left out, and that
is logged once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from penstock.serving.observe.text import Histogram, Page
from penstock.types import MetricDelta

log = logging.getLogger("penstock.observe")

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
MAX_SERIES = 10_000
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

_Labels = tuple[tuple[str, str], ...]


class OwnMetrics:
    """Series by kind, name and labels; samples of one name may have different labels."""

    def __init__(self) -> None:
        self._families: dict[tuple[str, str], dict[_Labels, float | Histogram]] = {}
        self._claimed: dict[str, tuple[str, str]] = {}  # every name on the page -> its family
        self._series = 0
        self._refused: set[str] = set()

    def add(self, model: str, version: str, deltas: Sequence[MetricDelta]) -> None:
        for d in deltas:
            labels = tuple(sorted({**d.labels, "model": model, "version": version}.items()))
            series = self._families.get((d.kind, d.name), {})
            if labels in series or self._admit(d, labels):
                self._change(self._families[(d.kind, d.name)], labels, d)

    def forget(self, model: str, version: str) -> None:
        """Drops the series of a version; a name that nobody uses any more is free again, also for another kind."""
        whose = {("model", model), ("version", version)}
        for key, series in list(self._families.items()):
            for labels in [labels for labels in series if whose.issubset(labels)]:
                del series[labels]
                self._series -= 1
            if not series:
                del self._families[key]
                for name in _exposed(*key):
                    del self._claimed[name]

    @staticmethod
    def _change(series: dict[_Labels, float | Histogram], labels: _Labels, d: MetricDelta) -> None:
        found = series[labels]
        if isinstance(found, Histogram):
            found.add(d.value)
        else:
            series[labels] = d.value + (found if d.kind == "counter" else 0.0)

    def _admit(self, d: MetricDelta, labels: _Labels) -> bool:
        """Makes a new series, unless it would spoil the page."""
        key = (d.kind, d.name)
        names = _exposed(*key)
        bad = next((k for k, _ in labels if not _LABEL.fullmatch(k) or (d.kind == "timer" and k == "le")), None)
        taken = next((n for n in names if self._claimed.get(n, key) != key), None)
        if bad is not None:
            return self._refuse(d, f"a label cannot be named {bad!r}")
        if taken is not None:
            return self._refuse(d, f"{taken} is a {self._claimed[taken][0]} already")
        if self._series >= MAX_SERIES:
            return self._refuse(d, f"models have {MAX_SERIES} series already; a label with many values is no label")
        self._claimed.update(dict.fromkeys(names, key))
        self._families.setdefault(key, {})[labels] = Histogram(SECONDS) if d.kind == "timer" else 0.0
        self._series += 1
        return True

    def _refuse(self, d: MetricDelta, why: str) -> bool:
        if d.name not in self._refused and len(self._refused) < MAX_SERIES:
            self._refused.add(d.name)
            log.warning("metric_refused kind=%s name=%s: %s", d.kind, d.name, why)
        return False

    def write(self, page: Page) -> None:
        for (kind, name), series in self._families.items():
            full = _exposed(kind, name)[0]
            page.family(full, "histogram" if kind == "timer" else kind, f"{kind} of a model")
            for labels, value in series.items():
                if isinstance(value, Histogram):
                    page.histogram(full, labels, value)
                else:
                    page.sample(full, labels, value)


def _exposed(kind: str, name: str) -> list[str]:
    """The names that a metric takes on the page; the first is that of the family."""
    if kind == "counter":
        base = name.removesuffix("_total")
        return [f"{base}_total", base]
    if kind == "gauge":
        return [name]
    return [f"{name}_seconds{suffix}" for suffix in ("", "_bucket", "_count", "_sum")]
