"""docs/metrics.md and the page say the same. Queues in Redis have their own page and test."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.serving.observe.prometheus import PrometheusObserver

PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"


def documented() -> dict[str, tuple[str, str, str]]:
    """name -> (type, labels, meaning), from the tables of the page."""
    rows: dict[str, tuple[str, str, str]] = {}
    for line in re.sub(r"\n## Queues in Redis\n.*?(?=\n## )", "", PAGE.read_text(), flags=re.S).splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            name = cells[0].strip("`")
            assert name not in rows, f"{name} has two rows"
            rows[name] = (cells[1], ", ".join(re.findall(r"`(\w+)`", cells[2])), cells[3])
    return rows


def exposed(observer: PrometheusObserver) -> dict[str, tuple[str, str, str]]:
    found: dict[str, tuple[str, str, str]] = {}
    for family in text_string_to_metric_families(observer.render().decode()):
        assert family.samples, f"{family.name} has no sample: the test must make one, to see its labels"
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = [k for k in family.samples[0].labels if k != "le"]
        found[name] = (family.type, ", ".join(labels), family.documentation)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="prometheus_client shows process_* on Linux only")
def test_every_metric_is_documented_with_type_labels_and_meaning(
    busy: Callable[..., PrometheusObserver], one_gpu: ModuleType
) -> None:
    assert documented() == exposed(busy())
