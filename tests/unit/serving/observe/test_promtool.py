"""Prometheus's own tool accepts the page, the rules and the queries, and the alerts fire when they should."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.contracts import BatchRecord, ModelSnapshot, ServerSnapshot
from penstock.serving.observe.history import OVERVIEW, History, Second
from penstock.serving.observe.prometheus import PrometheusObserver
from penstock.types import ModelStatus
from support.dashboards import FOLDERS, Dashboards

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool of Prometheus")
# field of a second -> title of a panel, and which of its queries
SHOWN = {
    "requests": ("Requests by model and version", 0),
    "answers": ("Requests by model and version", 1),
    "failed": ("Failures and rejections", 0),
    "rejected": ("Failures and rejections", 1),
    "p50_s": ("Latency", 0),
    "p99_s": ("Latency", 2),
    "queue": ("Requests that wait", 0),
    "oldest_s": ("Time in the queue", 3),
    "in_flight": ("Requests that wait", 2),
    "rows": ("Batch size", 0),
    "busy": ("Utilization", 0),
    "write_s": ("Stages", 3),
}
OF_BATCHES = set(Second._fields[OVERVIEW:]) - {"write_s"}  # Grafana has the stages of batches, the page of requests
STEP_S = 30
LATENCIES_S = np.linspace(0.1, 0.25, 101)[1:].tolist()  # spread over one bucket, within which Prometheus interpolates
LABELS = 'instance="a",model="m",version="1"'


def promtool(*arguments: str, given: bytes = b"") -> None:
    done = subprocess.run([str(PROMTOOL), *arguments], input=given, capture_output=True, timeout=120)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_the_page_is_well_formed(busy: Callable[..., PrometheusObserver], one_gpu: ModuleType) -> None:
    promtool("check", "metrics", given=busy().render())


@pytest.mark.parametrize("kind", ["penstock", "torchserve"])
def test_the_rules_and_the_queries_of_the_dashboard_are_valid(kind: str, tmp_path: Path) -> None:
    promtool("check", "rules", str(FOLDERS / kind / "alerts.yaml"))
    queries = [
        expression.replace("$__rate_interval", "5m").replace("$__range", "1h")
        for expression in Dashboards(kind).expressions()
    ]
    rules = [{"record": f"panel:{i}", "expr": expression} for i, expression in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(file))


def series(name: str, values: str, labels: str = LABELS) -> dict[str, str]:
    return {"series": f"{name}{{{labels}}}", "values": values}


def agrees(tmp_path: Path, given: dict[str, list[float]], step_s: int, expected: dict[str, float]) -> None:
    """Whether queries of a dashboard have these values, within 2 %, after all values of the series have come."""
    last = f"{step_s * (max(map(len, given.values())) - 1)}s"
    queries = {
        q.replace("$__rate_interval", "2m").replace("$model", ".*").replace("$version", ".*"): v
        for q, v in expected.items()
    }
    test = {
        "evaluation_interval": f"{step_s}s",
        "tests": [
            {
                "interval": f"{step_s}s",
                "input_series": [
                    {"series": name, "values": " ".join(map(str, values))} for name, values in given.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": f"sum(abs(({query}) - {value}) <= bool {0.02 * abs(value)})",
                        "eval_time": last,
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    }
                    for query, value in queries.items()
                ],
            }
        ],
    }
    file = tmp_path / "figures.yaml"
    file.write_text(yaml.safe_dump(test))
    promtool("test", "rules", str(file))


def fires(tmp_path: Path, given: list[dict[str, str]], at: str, expected: dict[str, bool]) -> None:
    """Whether each alert fires at a time; the series have a value a minute."""
    alerts = {rule["alert"]: rule for rule in Dashboards("penstock").rules}
    test = {
        "rule_files": [str(FOLDERS / "penstock" / "alerts.yaml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": given,
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
                        "eval_time": at,
                        "exp_samples": [{"labels": "{}", "value": int(fired)}],
                    }
                    for name, fired in expected.items()
                    if name in alerts
                ],
            }
        ],
    }
    assert expected.keys() <= alerts.keys()
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump(test))
    promtool("test", "rules", str(file))


def requests(failed: str, refused: str = "0x400", slow: str = "0x400") -> list[dict[str, str]]:
    """A thousand requests a minute of which so many fail or are refused, or take more than a second."""
    return [
        series("penstock_requests_total", "0+1000x400"),
        series("penstock_answers_total", failed, f'{LABELS},outcome="failed"'),
        series("penstock_rejections_total", refused, f'{LABELS},reason="queue_full"'),
        series("penstock_rejections_total", "0+500x400", f'{LABELS},reason="cancelled"'),
        series("penstock_request_seconds_count", "0+1000x400"),
        series("penstock_request_seconds_bucket", "0+1000x400" if slow == "0x400" else slow, f'{LABELS},le="1"'),
    ]


def test_a_burning_budget_alerts_at_once_and_not_after_its_cause_has_gone(tmp_path: Path) -> None:
    quiet = dict.fromkeys(("PenstockErrors", "PenstockErrorsPersist", "PenstockSlow", "PenstockSlowPersists"), False)
    fires(tmp_path, requests("0+0x400"), "6h", quiet)
    fires(tmp_path, requests("0+20x400"), "70m", {**quiet, "PenstockErrors": True, "PenstockErrorsPersist": True})
    fires(tmp_path, requests("0x400", "0+20x400"), "70m", {"PenstockErrors": True})
    fires(tmp_path, requests("0+8x400"), "6h", {"PenstockErrors": False, "PenstockErrorsPersist": True})
    fires(tmp_path, requests("0+20x70 1400+0x300"), "90m", {"PenstockErrors": False})
    fires(
        tmp_path,
        requests("0x400", slow="0+800x400"),
        "70m",
        {**quiet, "PenstockSlow": True, "PenstockSlowPersists": True},
    )
    fires(tmp_path, requests("0x400", slow="0+999x400"), "6h", quiet)


def test_a_missing_worker_alerts_unless_the_model_loads(tmp_path: Path) -> None:
    workers = [series("penstock_workers", "1x60"), series("penstock_workers_up", "0x60")]
    fires(tmp_path, workers, "5m", {"PenstockNoWorker": True, "PenstockWorkerDown": True})
    loading = series("penstock_model_state", "1x60", f'{LABELS},state="LOADING"')
    fires(tmp_path, [*workers, loading], "5m", {"PenstockNoWorker": False, "PenstockWorkerDown": False})


def test_every_figure_of_the_page_has_a_query_and_both_agree(tmp_path: Path) -> None:
    assert set(SHOWN) | OF_BATCHES == set(Second._fields)
    model = ModelSnapshot(ModelStatus("m", "1", "READY", 1, 1, 8, ("cpu",), queue=7), in_flight=19, oldest_s=0.3)
    observer, history = PrometheusObserver(lambda: ServerSnapshot([model])), History()
    series: dict[str, list[float]] = {}
    for _ in range(20):
        for _ in range(120):
            observer.on_arrival("m", "1")
        observer.on_answer("m", "1", LATENCIES_S, 4)
        history.on_answer("m", "1", LATENCIES_S, 4)
        for _ in range(20):
            observer.on_reject("m", "1", "queue_full")
        for rows in (2, 5, 8):
            observer.on_complete(BatchRecord("m", "1", 0, rows, 8, "full", False, 4.0, 4.1, [0.001] * rows, 0))
        model.busy_s += 12.0
        model.write_s += 9.6
        history.tick(ServerSnapshot([model]), observer.totals(), STEP_S)
        for family in text_string_to_metric_families(observer.render().decode()):
            for sample in family.samples:
                if sample.name.startswith("penstock_"):
                    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                    series.setdefault(f"{sample.name}{{{labels}}}", []).append(sample.value)
    now = history.now["m", "1"]._asdict()
    now["answers"] -= now["failed"]  # Grafana shows those apart
    now["write_s"] *= now["answers"]  # and the time of all responses, not the mean
    panels = {panel["title"]: panel for panel in Dashboards("penstock").board["panels"]}
    queries = {name: panels[title]["targets"][place]["expr"] for name, (title, place) in SHOWN.items()}
    agrees(tmp_path, series, STEP_S, {query: now[name] for name, query in queries.items()})
