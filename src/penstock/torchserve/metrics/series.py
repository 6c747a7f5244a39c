"""The values of metrics as `/metrics` shows them: the names, kinds and labels are those of other people.

Nothing of them may spoil the page for everybody: what does not fit is left out, and that is logged once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Final

from penstock.serving.observe.text import Histogram, Page
from penstock.torchserve.metrics.declared import Declared

log = logging.getLogger("penstock.observe")

MAX_SERIES: Final = 10_000
# Those of TorchServe's histograms, and larger ones: its times are in ms and µs.
BOUNDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0,
    1e3, 2.5e3, 5e3, 1e4, 2.5e4, 5e4, 1e5, 2.5e5, 5e5, 1e6, 2.5e6, 5e6, 1e7,
)  # fmt: skip
_NAME: Final = re.compile(r"(?!penstock_|process_)[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"(?!__)(?!le$)[a-zA-Z_][a-zA-Z0-9_]*")
_SUFFIXES: Final = ("", "_bucket", "_count", "_sum")

Labels = tuple[tuple[str, str], ...]
Owner = tuple[str, ...]  # whose values these are: of a model version, or what the server tells of one


class _Family:
    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        self.series: dict[Labels, float | Histogram] = {}
        self.owners: dict[Labels, Owner] = {}


class SeriesTable:
    """Families by name, each with its series by labels. Used by one thread at a time."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._claimed: dict[str, str] = {}  # every name on the page -> its family
        self._series = 0
        self._refused: set[str] = set()

    def declare(self, declared: Declared) -> None:
        """Shows the family also while it has no values."""
        self._family(declared)

    def change(self, declared: Declared, labels: Labels, values: Sequence[float], owner: Owner | None = None) -> None:
        """Adds to a counter, sets a gauge to the last value, counts in a histogram. A series with an owner goes with
        it."""
        family = self._families.get(declared.name) or self._family(declared)
        if family is None:
            return
        if family.declared is not declared and family.declared != declared:
            self._refuse(declared, "another metric has this name")
            return
        found = family.series.get(labels)
        if found is None and not self._admit(family, labels, owner):
            return
        if declared.kind == "histogram":
            self._histogram(family, labels, found).extend(values)
        elif declared.kind == "counter":
            family.series[labels] = sum(values) + (found if isinstance(found, float) else 0.0)
        else:
            family.series[labels] = values[-1]

    @staticmethod
    def _histogram(family: _Family, labels: Labels, found: float | Histogram | None) -> Histogram:
        if not isinstance(found, Histogram):
            found = family.series[labels] = Histogram(BOUNDS)
        return found

    def forget(self, owner: Owner) -> None:
        """Drops the series of an owner."""
        for family in self._families.values():
            for labels in [labels for labels, whose in family.owners.items() if whose == owner]:
                del family.owners[labels]
                del family.series[labels]
                self._series -= 1

    def write(self, page: Page) -> None:
        for family in self._families.values():
            d = family.declared
            page.family(d.name, d.kind, f"A {d.kind} of the TorchServe API, unit: {_one_line(d.unit)}")
            for labels, value in family.series.items():
                if isinstance(value, Histogram):
                    page.histogram(d.name, labels, value)
                else:
                    page.sample(d.name, labels, value)

    def _family(self, declared: Declared) -> _Family | None:
        names = [declared.name + suffix for suffix in (_SUFFIXES if declared.kind == "histogram" else ("",))]
        if not _NAME.fullmatch(declared.name):
            self._refuse(declared, "Prometheus does not take this name, or it is reserved")
            return None
        if any(name in self._claimed for name in names):
            self._refuse(declared, "another metric has this name")
            return None
        self._claimed.update(dict.fromkeys(names, declared.name))
        family = self._families[declared.name] = _Family(declared)
        return family

    def _admit(self, family: _Family, labels: Labels, owner: Owner | None) -> bool:
        """Whether a new series may be made."""
        d = family.declared
        bad = next((name for name, _ in labels if not _LABEL.fullmatch(name)), None)
        if bad is not None or len({name for name, _ in labels}) < len(labels):
            self._refuse(d, f"its dimensions cannot be {[name for name, _ in labels]}")
        elif self._series >= MAX_SERIES:
            self._refuse(d, f"there are {MAX_SERIES} series already; a dimension with many values is none")
        else:
            self._series += 1
            if owner is not None:
                family.owners[labels] = owner
            return True
        return False

    def _refuse(self, d: Declared, why: str) -> None:
        if d.name not in self._refused and len(self._refused) < MAX_SERIES:
            self._refused.add(d.name)
            log.warning("metric_refused name=%r kind=%s consequence=not_on_the_page: %s", d.name, d.kind, why)


def only(page: bytes, names: Iterable[str]) -> bytes:
    """Of a page, the families of these names, and the single samples of them."""
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
