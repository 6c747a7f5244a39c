"""Writes deploy/kustomize/base from the Helm chart with its default values.

kustomize makes the ConfigMap of the models itself, under a name that changes with the files, so that pods restart.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
BASE = ROOT / "deploy" / "kustomize" / "base"
HELM_LABELS = ("app.kubernetes.io/managed-by", "helm.sh/chart")
COMPONENTS = ("server", "worker", "redis")
sys.path.insert(0, str(ROOT / "tests"))

from support.helm import render  # noqa: E402

KUSTOMIZATION = """\
# Written by tools/kustomize_base.py from the Helm chart. Apply it with `kubectl apply -k`, or name it in an overlay.
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [{resources}]
configMapGenerator:
  - name: penstock-models
    files: [{files}]
"""


def base_files() -> dict[str, str]:
    """The text of each file, by its path in the folder."""
    documents = render()
    (models,) = [document["data"] for document in documents if document["kind"] == "ConfigMap"]
    found = {f"models/{name}": text for name, text in models.items()}
    for component in COMPONENTS:
        own = [
            _without_helm(document)
            for document in documents
            if document["kind"] != "ConfigMap"
            and document["metadata"]["labels"]["app.kubernetes.io/component"] == component
        ]
        found[f"{component}.yaml"] = yaml.safe_dump_all(own, sort_keys=False, width=120)
    resources = ", ".join(f"{component}.yaml" for component in COMPONENTS)
    found["kustomization.yaml"] = KUSTOMIZATION.format(
        resources=resources, files=", ".join(f"models/{n}" for n in models)
    )
    return found


def _without_helm(value: Any) -> Any:
    """The object without labels and annotations that only a chart needs, and without empty values but volumes."""
    if isinstance(value, dict):
        kept = {k: _without_helm(v) for k, v in value.items() if k not in (*HELM_LABELS, "penstock/models")}
        return {k: v for k, v in kept.items() if v not in ({}, []) or k == "emptyDir"}
    return [_without_helm(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    for name, text in base_files().items():
        (BASE / name).parent.mkdir(parents=True, exist_ok=True)
        (BASE / name).write_text(text)


if __name__ == "__main__":
    main()
