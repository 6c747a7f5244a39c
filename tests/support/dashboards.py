"""The queries of a folder in `dashboards/`, and whether a page of metrics answers them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

FOLDERS = Path(__file__).parents[2] / "dashboards"
SELECTED = re.compile(r"\b(penstock_\w+|ts_\w+|[A-Z]\w+)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


class Dashboards:
    """The dashboard and the alert rules of one kind of server."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.text = "".join((FOLDERS / kind / name).read_text() for name in ("grafana.json", "alerts.yaml"))
        self.board: dict[str, Any] = json.loads((FOLDERS / kind / "grafana.json").read_text())
        groups = yaml.safe_load((FOLDERS / kind / "alerts.yaml").read_text())["groups"]
        every: list[dict[str, Any]] = [rule for group in groups for rule in group["rules"]]
        self.rules = [rule for rule in every if "alert" in rule]
        self.recordings = [rule for rule in every if "record" in rule]

    def expressions(self) -> Iterator[str]:
        for panel in self.board["panels"]:
            yield from (target["expr"] for target in panel.get("targets", []))
        yield from (rule["expr"] for rule in (*self.rules, *self.recordings))

    def unanswered(self, page: str) -> list[str]:
        """The parts of expressions that select no sample of the page; those of GPUs are left out."""
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        return [
            f"{name}{{{matchers}}}"
            for expression in self.expressions()
            for name, matchers in SELECTED.findall(expression)
            if not name.startswith("penstock_gpu_")
            and not any(sample.name == name and _matches(sample.labels, matchers) for sample in samples)
        ]


def _matches(labels: dict[str, str], matchers: str) -> bool:
    for name, how, wanted in _MATCHER.findall(matchers):
        found = labels.get(name, "")
        same = bool(re.fullmatch(wanted, found)) if "~" in how else found == wanted
        if not wanted.startswith("$") and same == how.startswith("!"):
            return False
    return True
