"""The queries in dashboards/torchserve match the metrics of a server."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from penstock.serving.observe.prometheus import PrometheusObserver
from penstock.torchserve.metrics.definitions import SERVER_METRICS, default_config

FOLDER = Path(__file__).parents[4] / "dashboards" / "torchserve"
SELECTED = re.compile(r"\b(penstock_\w+|ts_\w+|[A-Z]\w+)\b(?:\{([^}]*)\})?")
OF_PROMETHEUS = {"instance", "job", "le"}

BOARD = json.loads((FOLDER / "grafana.json").read_text())
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    for panel in BOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (rule["expr"] for rule in RULES)


@pytest.fixture
def shown(busy: Callable[..., PrometheusObserver], one_gpu: ModuleType) -> dict[str, set[str]]:
    """{sample name: label names}."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(busy().render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    for declared in (*default_config().server.values(), *default_config().models.values()):
        found[declared.name] = {*declared.dimensions, "Hostname"}
    return found


def test_every_metric_and_label_in_the_queries_exists(shown: dict[str, set[str]]) -> None:
    asked = 0
    for expression in expressions():
        labels: set[str] = set()
        for name, selector in SELECTED.findall(expression):
            assert name in shown, expression
            chosen = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector))
            assert chosen <= shown[name] | OF_PROMETHEUS, expression
            labels |= shown[name]
            asked += 1
        for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
            assert {label.strip() for label in grouped.split(",")} <= labels | OF_PROMETHEUS, expression
    assert asked > 40


def test_every_expression_has_balanced_brackets() -> None:
    for expression in expressions():
        opened: list[str] = []
        for c in re.sub(r'"[^"]*"', "", expression):
            if c in "([{":
                opened.append(c)
            elif c in ")]}":
                assert opened.pop() + c in ("()", "[]", "{}"), expression
        assert not opened, expression


def test_labels_in_texts_belong_to_the_metrics(shown: dict[str, set[str]]) -> None:
    def check(text: str, expression: str) -> None:
        has = set().union(*(shown[name] for name, _ in SELECTED.findall(expression)))
        asked = set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+)(?: \|[^}]*)? ?\}\}", text)) - {"exported_instance"}
        assert asked <= has | OF_PROMETHEUS, (text, expression)

    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            check(target["legendFormat"], target["expr"])
    for rule in RULES:
        for text in rule["annotations"].values():
            check(text, rule["expr"])


def test_the_dashboard_can_be_imported_anywhere() -> None:
    assert BOARD["title"]
    assert "id" not in BOARD
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    sources = [panel["datasource"]["uid"] for panel in BOARD["panels"] if panel["type"] != "row"]
    assert set(sources) == {"${datasource}"}
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}
    used = {name for e in expressions() for name in re.findall(r"\$(\w+)", e)} - {"labels"}
    assert used - {"__rate_interval"} <= variables
    assert variables == {"datasource", "model", "version"}


def test_no_two_panels_overlap() -> None:
    def cells(at: dict[str, int]) -> set[tuple[int, int]]:
        assert at["x"] + at["w"] <= 24
        return {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}

    places = [cells(panel["gridPos"]) for panel in BOARD["panels"]]
    assert not any(a & b for a, b in itertools.combinations(places, 2))


def test_the_important_metrics_have_panels_and_alerts() -> None:
    text = " ".join(expressions())
    for p in ("0.5,", "0.95,", "0.99,"):
        assert f"histogram_quantile({p}" in text
    alerts: dict[str, Any] = {rule["alert"]: rule for rule in RULES}
    assert len(alerts) == len(RULES)
    assert {"PenstockWorkerDown", "PenstockQueueNearlyFull", "PenstockErrors", "PenstockSlow"} <= set(alerts)
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_documentation_lists_torchserves_metrics() -> None:
    page = (FOLDER.parents[1] / "docs" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+, \w+) \| [^|]+ \|$", page, re.M))
    assert rows == {name: f"{kind}, {unit}" for name, (kind, unit, _) in SERVER_METRICS.items()} | {
        "HandlerTime": "gauge, ms",
        "PredictionTime": "gauge, ms",
    }
