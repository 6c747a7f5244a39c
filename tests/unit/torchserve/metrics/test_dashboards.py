"""The queries in dashboards/ match the metrics of a server, each folder those of its own kind."""

import itertools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.serving.observe.prometheus import PrometheusObserver
from penstock.torchserve.metrics.families import SERVER_METRICS, default_config
from support.dashboards import FOLDERS, SELECTED, Dashboards

RECORDED = re.compile(r"\bpenstock:\w+:\w+")
OF_PROMETHEUS = {"instance", "job", "le"}


@pytest.fixture(params=["penstock", "torchserve"])
def dashboards(request: pytest.FixtureRequest) -> Dashboards:
    return Dashboards(request.param)


@pytest.fixture
def shown(busy: Callable[..., PrometheusObserver], one_gpu: ModuleType, dashboards: Dashboards) -> dict[str, set[str]]:
    """{sample name: label names}."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(busy().render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    if dashboards.kind == "penstock":
        return found
    for declared in (*default_config().server.values(), *default_config().models.values()):
        found[declared.name] = {*declared.dimensions, "Hostname"}
    return found


def test_every_metric_and_label_in_the_queries_exists(shown: dict[str, set[str]], dashboards: Dashboards) -> None:
    asked = 0
    for expression in dashboards.expressions():
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


def test_every_expression_has_balanced_brackets(dashboards: Dashboards) -> None:
    for expression in dashboards.expressions():
        opened: list[str] = []
        for c in re.sub(r'"[^"]*"', "", expression):
            if c in "([{":
                opened.append(c)
            elif c in ")]}":
                assert opened.pop() + c in ("()", "[]", "{}"), expression
        assert not opened, expression


def test_labels_in_texts_belong_to_the_metrics(shown: dict[str, set[str]], dashboards: Dashboards) -> None:
    def check(text: str, expression: str) -> None:
        recorded = {"model", "version"} if RECORDED.search(expression) else set()
        has = recorded.union(*(shown[name] for name, _ in SELECTED.findall(expression)))
        asked = set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+)(?: \|[^}]*)? ?\}\}", text)) - {"exported_instance"}
        assert asked <= has | OF_PROMETHEUS, (text, expression)

    for panel in dashboards.board["panels"]:
        for target in panel.get("targets", []):
            check(target["legendFormat"], target["expr"])
    for rule in dashboards.rules:
        for text in rule["annotations"].values():
            check(text, rule["expr"])


def test_the_dashboard_can_be_imported_anywhere(dashboards: Dashboards) -> None:
    assert dashboards.board["title"]
    assert "id" not in dashboards.board
    ids = [panel["id"] for panel in dashboards.board["panels"]]
    assert len(set(ids)) == len(ids)
    sources = [panel["datasource"]["uid"] for panel in dashboards.board["panels"] if panel["type"] != "row"]
    assert set(sources) == {"${datasource}"}
    variables = {variable["name"] for variable in dashboards.board["templating"]["list"]}
    used = {name for e in dashboards.expressions() for name in re.findall(r"\$(\w+)", e)} - {"labels"}
    assert used - {"__rate_interval"} <= variables
    assert variables == {"datasource", "model", "version"}


def test_no_two_panels_overlap(dashboards: Dashboards) -> None:
    def cells(at: dict[str, int]) -> set[tuple[int, int]]:
        assert at["x"] + at["w"] <= 24
        return {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}

    places = [cells(panel["gridPos"]) for panel in dashboards.board["panels"]]
    assert not any(a & b for a, b in itertools.combinations(places, 2))


def test_the_important_metrics_have_panels_and_alerts(dashboards: Dashboards) -> None:
    text = " ".join(dashboards.expressions())
    for p in ("0.5,", "0.95,", "0.99,"):
        assert f"histogram_quantile({p}" in text
    alerts: dict[str, Any] = {rule["alert"]: rule for rule in dashboards.rules}
    assert len(alerts) == len(dashboards.rules)
    assert {"PenstockWorkerDown", "PenstockQueueNearlyFull", "PenstockErrors", "PenstockSlow"} <= set(alerts)
    for rule in dashboards.rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_documentation_lists_torchserves_metrics() -> None:
    page = (FOLDERS.parent / "docs" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+, \w+) \| [^|]+ \|$", page, re.M))
    assert rows == {name: f"{kind}, {unit}" for name, (kind, unit, _) in SERVER_METRICS.items()} | {
        "HandlerTime": "gauge, ms",
        "PredictionTime": "gauge, ms",
    }


def test_each_folder_speaks_of_its_own_server(dashboards: Dashboards) -> None:
    foreign = {"penstock": r"torchserve|TorchServe|ts_log|model_log|job_queue_size", "torchserve": r"penstock serve"}
    assert not re.search(foreign[dashboards.kind], dashboards.text)


def test_a_model_that_loads_raises_no_critical_alarm(dashboards: Dashboards) -> None:
    critical = [rule for rule in dashboards.rules if rule["labels"]["severity"] == "critical"]
    assert len(critical) == 3
    for rule in critical:
        names = RECORDED.findall(rule["expr"])
        text = rule["expr"] + "".join(each["expr"] for each in dashboards.recordings if each["record"] in names)
        assert "LOADING" in text or "model_not_ready" in text, rule["alert"]


def test_every_recorded_metric_that_an_alert_reads_is_recorded(dashboards: Dashboards) -> None:
    read = {name for rule in dashboards.rules for name in RECORDED.findall(rule["expr"])}
    assert read == {rule["record"] for rule in dashboards.recordings}
