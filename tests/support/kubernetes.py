"""Checks objects of Kubernetes: its own with its own schemas, others with those in tests/deploy/schemas."""

import json
from pathlib import Path
from typing import Any

import jsonschema

KUBERNETES = ("1.25", "1.31", "1.37")  # the oldest of the chart, one between, the newest known
SCHEMA = json.loads((Path(__file__).parents[1] / "deploy" / "schemas" / "resources.json").read_text())


def errors(document: dict[str, Any]) -> list[str]:
    """What the schemas of the object's API version refuse; unknown fields too."""
    import kubernetes_validate

    kind = f"{document['apiVersion']}/{document['kind']}"
    if kind in SCHEMA["$defs"]:
        validator = jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{kind.replace('/', '~1')}"})
        return [each.message for each in validator.iter_errors(document)]
    found = []
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as e:
            found.append(f"{version}: {e.message}")
    return found
