"""Renders a Helm chart with Go's own template engine, which py-go-template brings along with Sprig's functions.

What Helm adds is done here: the values' defaults and schema, and the objects Release and Chart. `include`, `tpl`,
`lookup` and `.Files` are missing, so the chart does without them. A key that no value defines is an error, as with
`helm lint --strict`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "penstock"
# the library ends its process after an error, and prints the reason
_RENDER = """
import json, pathlib, sys
import go_template
values = json.load(sys.stdin)
for name in sys.argv[1:]:
    print("---", flush=True)
    print(go_template.render(pathlib.Path(name), values).decode(), flush=True)
"""


class RenderError(Exception):
    """The values do not fit the schema, or a template failed."""


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """As Helm merges values: tables by key, and all else replaced; None removes a key."""
    found = deepcopy(dict(base))
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if both else value
    return {key: value for key, value in found.items() if value is not None}


def render(folder: Path, values: Mapping[str, Any] | None = None, *, name: str = "penstock") -> list[dict[str, Any]]:
    """The objects of a release. `folder` is for intermediate files. Raises RenderError."""
    pytest.importorskip("go_template")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    found = merged(yaml.safe_load((CHART / "values.yaml").read_text()), values or {})
    try:
        jsonschema.validate(found, json.loads((CHART / "values.schema.json").read_text()))
    except jsonschema.ValidationError as e:
        raise RenderError(f"{e.json_path}: {e.message}") from None
    root = {
        "Values": found,
        "Release": {"Name": name, "Namespace": "default", "Service": "Helm"},
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
    }
    helpers = "".join(file.read_text() for file in sorted((CHART / "templates").glob("_*.tpl")))
    files = []
    for template in sorted((CHART / "templates").glob("*.yaml")):
        files.append(folder / template.name)
        files[-1].write_text(helpers + template.read_text())
    command = [sys.executable, "-c", _RENDER, *map(str, files)]
    done = subprocess.run(command, input=json.dumps(root), capture_output=True, text=True)
    if done.returncode:
        raise RenderError(done.stdout.rpartition("---")[2] + done.stderr)
    return [document for document in yaml.safe_load_all(done.stdout) if document]
