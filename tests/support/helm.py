"""Renders and lints our Helm chart with Helm's own engine, as `helm template` and `helm lint --strict` do.

It runs in a process of its own: the runtime of Go starts threads, and a process with threads must not fork.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "penstock"
_HELM = """
import json, sys
import helm_python
path, name, values = json.load(sys.stdin)
try:
    with helm_python.Chart.load(path) as chart:
        files = chart.render(values, name=name, namespace="default")
except helm_python.HelmError as e:
    sys.exit(str(e))
report = helm_python.lint(path, values, strict=True)
json.dump([files, [each["error"] for each in report["messages"] if each["severity"] > 1]], sys.stdout)
"""


class RenderError(Exception):
    """The values do not fit the schema, or a template failed."""


def render(values: Mapping[str, Any] | None = None, *, name: str = "penstock") -> list[dict[str, Any]]:
    """The objects of a release of this name. Raises RenderError."""
    files, warnings = _helm(name, json.dumps(values or {}))
    assert warnings == []
    return [document for text in files.values() for document in yaml.safe_load_all(text) if document]


@cache
def _helm(name: str, values: str) -> tuple[dict[str, str], list[str]]:
    """The text of each template, and what the linter warns of."""
    pytest.importorskip("helm_python")
    given = json.dumps([str(CHART), name, json.loads(values)])
    done = subprocess.run([sys.executable, "-c", _HELM], input=given, capture_output=True, text=True)
    if done.returncode:
        raise RenderError(done.stderr)
    files, warnings = json.loads(done.stdout)
    return files, warnings
