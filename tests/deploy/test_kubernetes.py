"""The Helm chart and the kustomize base: the objects that they render to, and their containers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import RedisStreamer
from penstock.streamer.redis.metrics import QUEUE
from penstock.streamer.redis.protocol import GROUP, QueueKeys
from support.brokers import Crowd
from support.containers import Container, read_kubernetes
from support.helm import RenderError, render
from support.kubernetes import errors
from support.pods import Load, Pod, survives_sigterm

ROOT = Path(__file__).parents[2]
KUSTOMIZE = ROOT / "deploy" / "kustomize"
KEDA = {"worker": {"prefix": "up", "autoscaling": {"mode": "keda", "minReplicas": 0, "requestsPerWorker": 2_000_000}}}
NO_FILES = {"penstock.toml": None, "uppercase.py": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "queueExporter": {"enabled": True},
        "server": {"autoscaling": {"enabled": True}, "tokenSecret": "tokens", "env": [{"name": "A", "value": "b"}]},
        "imagePullSecrets": [{"name": "registry"}],
        **KEDA,
    },
    "hpa": {"worker": {"autoscaling": {"mode": "hpa", "minReplicas": 0}}, "queueExporter": {"enabled": True}},
    "keda over Prometheus": {
        "worker": {"autoscaling": {"mode": "keda", "prometheusAddress": "http://prometheus:9090"}}
    },
    "keda with its own triggers": {
        "worker": {"autoscaling": {"mode": "keda", "triggers": [{"type": "cron", "metadata": {"start": "0 8 * * *"}}]}}
    },
    "another Redis": {
        "redis": {"urlSecret": "redis"},
        "models": {"volume": {"persistentVolumeClaim": {"claimName": "models"}}},
        "worker": {"autoscaling": {"mode": "keda", "redisAddress": "redis:6379", "authentication": "redis"}},
    },
    "models in the image": {"models": {"files": NO_FILES}, "redis": {"url": "rediss+sentinel://a:1,b:2/main"}},
    "server only": {"worker": {"enabled": False}, "podDisruptionBudget": {"maxUnavailable": "25%"}},
    "worker only": {"server": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
}

Objects = list[dict[str, Any]]


@pytest.fixture
def objects() -> Callable[..., Objects]:
    pytest.importorskip("kubernetes_validate")
    return render


def find(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def names(objects: Objects) -> set[str]:
    return {f"{each['kind']}/{each['metadata']['name']}" for each in objects}


# ---- objects


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_chart_renders_objects_that_their_api_versions_accept(objects: Any, variant: str) -> None:
    found = objects(VARIANTS[variant], name="models")
    assert found
    assert {name: each for each in found for name in [each["metadata"]["name"]] if errors(each)} == {}
    check_references(found)


def check_references(objects: Objects) -> None:
    """Selectors find their pods, and autoscalers and services their targets."""
    pods = {each["metadata"]["name"]: each["spec"]["template"] for each in objects if each["kind"] == "Deployment"}
    labels = {name: pod["metadata"]["labels"].items() for name, pod in pods.items()}
    ports = {name: {p["name"] for c in pod["spec"]["containers"] for p in c["ports"]} for name, pod in pods.items()}
    maps = {each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"}
    for each in objects:
        kind, spec = each["kind"], each.get("spec", {})
        selector = spec.get("selector", {})
        wanted = selector.get("matchLabels", {} if kind == "Deployment" else selector).items()
        chosen = [name for name in pods if wanted and wanted <= labels[name]]
        if kind in ("Deployment", "PodDisruptionBudget", "Service"):
            assert len(chosen) == 1, each
        if kind == "Deployment":
            assert chosen == [each["metadata"]["name"]]
            volumes = {v["name"]: v for v in spec["template"]["spec"].get("volumes", ())}
            mounted = {m["name"] for c in spec["template"]["spec"]["containers"] for m in c.get("volumeMounts", ())}
            assert mounted == volumes.keys()
            assert {v["configMap"]["name"] for v in volumes.values() if "configMap" in v} <= maps
        if kind == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= ports[chosen[0]]
        if kind == "PodMonitor":
            assert any("metrics" in ports[name] for name in chosen)
        if "scaleTargetRef" in spec:  # otherwise each `helm upgrade` would reset the number of replicas
            assert "replicas" not in find(objects, "Deployment", spec["scaleTargetRef"]["name"])["spec"]


def test_a_wrong_field_in_any_object_is_an_error(objects: Any) -> None:
    for each in objects(VARIANTS["everything"]):
        assert errors({**each, "spce": {}})
        if "spec" in each:
            assert errors({**each, "spec": {**each["spec"], "replica": 1}})


def test_the_variants_have_what_their_values_ask_for(objects: Any) -> None:
    plain = names(objects())
    assert {"Service/penstock", "Deployment/penstock-redis", "PodDisruptionBudget/penstock-worker"} <= plain
    without = names(objects(VARIANTS["another Redis"]))
    assert not without & {"ConfigMap/penstock-models", "Deployment/penstock-redis"}
    assert names(objects(VARIANTS["server only"])) == {
        "ConfigMap/penstock-models",
        "Deployment/penstock-server",
        "Service/penstock",
        "PodDisruptionBudget/penstock-server",
    }
    hpa = find(objects(VARIANTS["hpa"]), "HorizontalPodAutoscaler", "penstock-worker")["spec"]
    assert (hpa["minReplicas"], hpa["metrics"][0]["external"]["target"]["averageValue"]) == (1, "32")
    counted, lagging = find(objects(KEDA), "ScaledObject", "penstock-worker")["spec"]["triggers"]
    assert counted["metadata"]["streamLength"] == "2000000"
    assert {"stream": "{penstock:up}:queue", "consumerGroup": "workers"}.items() <= lagging["metadata"].items()
    (query,) = find(objects(VARIANTS["keda over Prometheus"]), "ScaledObject", "penstock-worker")["spec"]["triggers"]
    assert 'penstock_redis_queue_waiting_requests{prefix=""}' in query["metadata"]["query"]


def test_pods_restart_when_their_models_change(objects: Any) -> None:
    def annotations(values: dict[str, Any]) -> list[str]:
        found = objects(values)
        pods = [find(found, "Deployment", f"penstock-{name}")["spec"]["template"] for name in ("server", "worker")]
        return [pod["metadata"]["annotations"]["penstock/models"] for pod in pods]

    before, after = annotations({}), annotations({"models": {"files": {"more.py": ""}}})
    assert not set(before) & set(after)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"sever": {}}, "additional properties 'sever' not allowed"),
        ({"server": {"replica": 2}}, "additional properties 'replica' not allowed"),
        ({"server": {"service": {"port": 0}}}, "minimum: got 0, want 1"),
        ({"server": {"targets": []}}, "minItems: got 0, want 1"),
        ({"worker": {"autoscaling": {"mode": "both"}}}, "value must be one of"),
        ({"redis": {"url": "http://redis"}}, "does not match pattern"),
        ({"redis": {"enabled": False}}, "workers need Redis"),
        (
            {"redis": {"url": "redis://r"}, "worker": {"autoscaling": {"mode": "keda"}}},
            "KEDA needs worker.autoscaling.redisAddress",
        ),
    ],
)
def test_wrong_values_are_refused(objects: Any, values: dict[str, Any], error: str) -> None:
    with pytest.raises(RenderError, match=error):
        objects(values)


# ---- kustomize


def test_the_base_of_kustomize_is_the_chart_with_its_defaults(objects: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import kustomize_base

    base = KUSTOMIZE / "base"
    found = {str(file.relative_to(base)): file.read_text() for file in base.rglob("*") if file.is_file()}
    assert found == kustomize_base.base_files(), "run python tools/kustomize_base.py"
    sys.modules.pop("kustomize_base")


def documents(folder: str, name: str) -> Objects:
    return list(yaml.safe_load_all((KUSTOMIZE / folder / name).read_text()))


@pytest.mark.parametrize("folder", ["base", "keda"])
def test_kustomizations_name_existing_files_and_objects(folder: str) -> None:
    pytest.importorskip("kubernetes_validate")
    kustomization = yaml.safe_load((KUSTOMIZE / folder / "kustomization.yaml").read_text())
    assert errors(kustomization) == []
    assert errors({**kustomization, "resorces": []})
    files = [*kustomization["resources"]]
    for generator in kustomization.get("configMapGenerator", ()):
        files += generator["files"]
    assert all((KUSTOMIZE / folder / name).is_file() for name in files)
    found = [each for name in kustomization["resources"] for each in documents(folder, name)]
    assert {each["metadata"]["name"]: errors(each) for each in found if errors(each)} == {}
    base = documents("base", "worker.yaml")
    for patch in kustomization.get("patches", ()):
        target = find(base, patch["target"]["kind"], patch["target"]["name"])
        assert all(change["path"].split("/")[2] in target["spec"] for change in json.loads(patch["patch"]))


def test_the_keda_component_has_the_triggers_of_the_chart(objects: Any) -> None:
    component = yaml.safe_load((KUSTOMIZE / "keda" / "scaledobject.yaml").read_text())["spec"]
    values = {"worker": {"autoscaling": {"mode": "keda"}}}
    assert component == find(objects(values), "ScaledObject", "penstock-worker")["spec"]


def test_the_triggers_of_the_page_are_kedas_and_name_existing_queues_and_metrics() -> None:
    page = (ROOT / "docs" / "redis.md").read_text()
    blocks = [
        yaml.safe_load(block)["triggers"] for block in re.findall(r"^```yaml\n(triggers:.*?)^```$", page, re.S | re.M)
    ]
    assert [[trigger["type"] for trigger in block] for block in blocks] == [["redis-streams"] * 2, ["prometheus"] * 2]
    scaled = yaml.safe_load((KUSTOMIZE / "keda" / "scaledobject.yaml").read_text())
    known = {family.name for _, family in QUEUE}
    for block in blocks:
        assert errors({**scaled, "spec": {**scaled["spec"], "triggers": block}}) == []
        for metadata in (trigger["metadata"] for trigger in block):
            assert metadata.get("stream", QueueKeys("PREFIX").queue) == QueueKeys("PREFIX").queue
            assert metadata.get("consumerGroup", GROUP) == GROUP
            assert set(re.findall(r"penstock_\w+", metadata.get("query", ""))) <= known


# ---- containers


@pytest.fixture
def container(image: Container, objects: Any) -> Callable[..., Container]:
    """The container of a Deployment of the chart."""

    def read(name: str, values: Mapping[str, Any] | None = None) -> Container:
        pod = find(objects(values), "Deployment", name)["spec"]["template"]["spec"]
        user = pod["securityContext"]["runAsUser"]
        (found,) = pod["containers"]
        return replace(read_kubernetes(found, image, pod.get("terminationGracePeriodSeconds", 30)), user=str(user))

    return read


@pytest.fixture
def models(tmp_path: Path, objects: Any) -> Path:
    """The volume of the chart's ConfigMap."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name, text in find(objects(), "ConfigMap", "penstock-models")["data"].items():
        (folder / name).write_text(text)
    return folder


def test_the_servers_pod_serves_the_charts_models_and_sigterm_loses_no_request(
    container: Any, models: Path, start_pod: Callable[..., Pod], tmp_path: Path
) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "token").write_text("s3cret\n")
    values = {"server": {"tokenSecret": "tokens"}}
    guarded = start_pod(container("penstock-server", values), {"/models": models, "/etc/penstock": tmp_path / "secret"})
    pod = start_pod(container("penstock-server"), {"/models": models})
    for each in (pod, guarded):
        each.wait_ready()
        assert each.probe(each.container.probes["livenessProbe"])
        assert b"penstock_workers_up" in each.request("GET", "/metrics", port=8082)[1]
    body, plain = b"hello", {"content-type": "text/plain"}
    assert guarded.request("POST", "/predictions/uppercase", body, plain)[0] == 401
    with_token = {**plain, "authorization": "Bearer s3cret"}
    assert guarded.request("POST", "/predictions/uppercase", body, with_token)[1] == b"HELLO"
    survives_sigterm(Load(pod, "/predictions/uppercase", body, b"HELLO", content_type="text/plain"))


def test_a_rolling_update_of_the_workers_loses_no_request(
    container: Any, models: Path, start_pod: Callable[..., Pod], tmp_path: Path, run_redis: Callable[..., Any]
) -> None:
    """Two old pods are replaced as the Deployment does: a new one must be ready before an old one gets SIGTERM."""
    (tmp_path / "redis").mkdir()
    redis = run_redis("--unixsocket", str(tmp_path / "redis" / "redis.sock"), "--unixsocketperm", "777")
    worker = container("penstock-worker")
    assert worker.env["PENSTOCK_REDIS"] == "redis://penstock-redis:6379"
    # the pod has another network than the test's Redis
    worker = replace(worker, env={**worker.env, "PENSTOCK_REDIS": "unix:///redis/redis.sock"})

    def ready() -> Pod:
        pod = start_pod(worker, {"/models": models, "/redis": tmp_path / "redis"})
        pod.wait_ready()
        return pod

    pods = [ready(), ready()]
    with RedisStreamer(redis.address) as streamer:
        crowd = Crowd(streamer, item=lambda n: f"a{n}", right=lambda n: f"A{n}")
        crowd.answered(50)
        for _ in range(2):
            pods.append(ready())
            old = pods.pop(0)
            old.terminate()
            assert old.wait() == 0, old.said()
            crowd.answered(50)
        crowd.stop()
    assert crowd.errors == []
    page = pods[0].request("GET", "/metrics", port=8082)[1].decode()
    assert 'penstock_redis_queue_workers{prefix=""} 2.0' in page
