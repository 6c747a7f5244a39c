"""The Helm chart and the kustomize base: the objects that they render to, and their containers."""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import RedisStreamer
from penstock.bulk.cli import caption
from penstock.streamer.redis.metrics import QUEUE
from penstock.streamer.redis.protocol import GROUP, QueueKeys
from support.brokers import Crowd
from support.containers import Container, read_kubernetes
from support.helm import RenderError, render
from support.kubernetes import errors
from support.pods import Load, Pod, survives_sigterm

ROOT = Path(__file__).parents[2]
TLS = ROOT / "tests" / "tls"
KUSTOMIZE = ROOT / "deploy" / "kustomize"


def merged(*values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all: tables by key, lists one after the other."""
    found: dict[str, Any] = {}
    for key, value in ((key, each[key]) for each in values for key in each):
        if isinstance(value, Mapping):
            value = merged(found.get(key, {}), value)
        elif isinstance(value, list):
            value = [*found.get(key, ()), *value]
        found[key] = value
    return found


KEDA = {"worker": {"prefix": "up", "autoscaling": {"mode": "keda", "minReplicas": 0, "requestsPerWorker": 2_000_000}}}
SCALED = {"resources": {"requests": {"cpu": 2}}, "autoscaling": {"enabled": True, "queueWaitSeconds": 0.1}}
NO_FILES = {"penstock.toml": None, "uppercase.py": None}
SCRATCH = {"name": "scratch", "emptyDir": {}}
PODS: dict[str, dict[str, Any]] = {  # values that servers and workers have alike
    "init containers": {"initContainers": [{"name": "fetch", "image": "fetch", "command": ["fetch"]}]},
    "extra volumes": {"extraVolumes": [SCRATCH], "extraVolumeMounts": [{"name": "scratch", "mountPath": "/tmp"}]},
    "GPUs": {
        "gpu": {"count": 2, "runtimeClassName": "nvidia", "nodeSelector": {"gpu": "h100"}},
        "resources": {"limits": {"memory": "8Gi"}},
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
    },
    "scheduling": {
        "priorityClassName": "high",
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
        ],
    },
    "labels": {"podLabels": {"team": "vision", "app.kubernetes.io/name": "other"}, "podAnnotations": {"a": "b"}},
    "environment": {
        "env": [{"name": "HOME", "value": "/home"}, {"name": "A", "value": "b"}],
        "envFrom": [{"secretRef": {"name": "settings"}}],
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"server": values, "worker": values} for name, values in PODS.items()},
    "TLS": {"server": {"tls": {"secret": "certificate"}}},
    "headless": {"server": {"service": {"headless": True, "annotations": {"a": "b"}}}},
    "scaled servers": {"server": SCALED},
    "service account": {"serviceAccount": {"create": True, "annotations": {"role": "reader"}}},
    "users": {
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": 2000},
        "redis": {"podSecurityContext": {"runAsUser": None, "runAsGroup": None}},
    },
    "writable root": {"securityContext": {"readOnlyRootFilesystem": False}, "tmpSize": "1Gi", "shmSize": ""},
    "network policy": {
        "networkPolicy": {
            "enabled": True,
            "callers": [{"podSelector": {"matchLabels": {"role": "caller"}}}],
            "redisClients": [{"namespaceSelector": {"matchLabels": {"name": "keda"}}}],
            "egress": [{"ports": [{"port": 53, "protocol": "UDP"}]}],
        }
    },
    "disruption": {"podDisruptionBudget": {"maxUnavailable": "25%"}},
    "service monitor": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "alerts": {"prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}},
    "dashboard": {"dashboard": {"enabled": True, "annotations": {"folder": "models"}}},
    "queue exporter": {"queueExporter": {"enabled": True}},
    "pull secrets": {"imagePullSecrets": [{"name": "registry"}]},
    "captions": {"caption": {"enabled": True, **PODS["extra volumes"], "servers": ["https://penstock"]}},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "queueExporter": {"enabled": True},
        "server": {"tokenSecret": "tokens", "env": [{"name": "A", "value": "b"}], **SCALED},
        "imagePullSecrets": [{"name": "registry"}],
        **KEDA,
    },
    "hpa": {
        "worker": {"autoscaling": {"mode": "hpa", "minReplicas": 0, "queueWaitSeconds": 0.5}},
        "queueExporter": {"enabled": True},
    },
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
    "servers scaled by KEDA": {
        "server": {
            "autoscaling": {
                "enabled": True, "mode": "keda", "queueWaitSeconds": 0.1, "behavior": {"scaleDown": {}},
                "prometheusAddress": "http://prometheus:9090",
            }
        }
    },
    "workers scaled by their queue's wait": {
        "worker": {
            "autoscaling": {"mode": "keda", "queueWaitSeconds": 0.5, "prometheusAddress": "http://prometheus:9090"}
        }
    },
    **OPTIONS,
    "all options": merged(*OPTIONS.values()),
}  # fmt: skip

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
        kind, spec, name = each["kind"], each.get("spec", {}), each["metadata"]["name"]
        selector = spec.get("selector", {})
        selector = spec.get("podSelector", selector)  # of a NetworkPolicy
        wanted = selector.get("matchLabels", {} if kind == "Deployment" else selector).items()
        chosen = [name for name in pods if wanted and wanted <= labels[name]]
        if kind in ("Deployment", "NetworkPolicy", "PodDisruptionBudget") or (
            kind == "Service" and "metrics" not in name
        ):
            assert len(chosen) == 1, each
        if kind == "Deployment":
            assert chosen == [name]
            pod = spec["template"]["spec"]
            volumes = {v["name"]: v for v in pod.get("volumes", ())}
            (mounts,) = [c.get("volumeMounts", ()) for c in pod["containers"]]
            assert sorted(m["name"] for m in mounts) == sorted(volumes)
            assert len({m["mountPath"] for m in mounts}) == len(mounts)
            (variables,) = [c.get("env", ()) for c in pod["containers"]]
            assert len({v["name"] for v in variables}) == len(variables)
            account = pod.get("serviceAccountName")
            assert account is None or find(objects, "ServiceAccount", account)
            assert {v["configMap"]["name"] for v in volumes.values() if "configMap" in v} <= maps
        if kind == "Service":
            assert chosen if name.endswith("-metrics") else len(chosen) == 1, each
            assert {port["targetPort"] for port in spec["ports"]} <= set().union(*(ports[name] for name in chosen))
        if kind == "NetworkPolicy":
            assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == ports[chosen[0]]
        if kind == "PodMonitor":
            assert any("metrics" in ports[name] for name in chosen)
        if kind == "ServiceMonitor":
            (service,) = [s for s in objects if s["kind"] == "Service" and wanted <= s["metadata"]["labels"].items()]
            assert {e["port"] for e in spec["endpoints"]} == {port["name"] for port in service["spec"]["ports"]}
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


@pytest.mark.parametrize("component", ["server", "worker"])
def test_pods_have_what_their_values_ask_for(objects: Any, component: str) -> None:
    def pod(option: str) -> tuple[dict[str, Any], dict[str, Any]]:
        found = find(objects(OPTIONS.get(option, {})), "Deployment", f"penstock-{component}")["spec"]["template"]
        return found, found["spec"]["containers"][0]

    plain, container = pod("defaults")
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert plain["spec"]["automountServiceAccountToken"] is False
    assert {"name": "HOME", "value": "/tmp"} in container["env"]
    places = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert places == {"models": "/models", "tmp": "/tmp", "shm": "/dev/shm"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in plain["spec"]["volumes"]
    assert "nvidia.com/gpu" not in json.dumps(plain)

    assert pod("init containers")[0]["spec"]["initContainers"] == PODS["init containers"]["initContainers"]
    assert {"name": "scratch", "mountPath": "/tmp"} in pod("extra volumes")[1]["volumeMounts"]
    spec, container = pod("GPUs")[0]["spec"], pod("GPUs")[1]
    assert container["resources"] == {"limits": {"memory": "8Gi", "nvidia.com/gpu": 2}}
    assert (spec["runtimeClassName"], spec["nodeSelector"]) == ("nvidia", {"zone": "a", "gpu": "h100"})
    assert [each["key"] for each in spec["tolerations"]] == ["spot", "nvidia.com/gpu"]
    spec = pod("scheduling")[0]["spec"]
    assert (spec["priorityClassName"], spec["affinity"]) == ("high", {"nodeAffinity": {}})
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == component
    labels = pod("labels")[0]["metadata"]["labels"]
    assert (labels["team"], labels["app.kubernetes.io/name"]) == ("vision", "penstock")
    container = pod("environment")[1]
    assert container["env"][-2:] == PODS["environment"]["env"]
    assert container["envFrom"] == PODS["environment"]["envFrom"]
    assert pod("service account")[0]["spec"]["serviceAccountName"] == "penstock"
    user = pod("users")[0]["spec"]["securityContext"]
    assert (user.keys() & {"runAsUser", "runAsGroup"}, user["fsGroup"]) == (set(), 2000)
    redis = find(objects(OPTIONS["users"]), "Deployment", "penstock-redis")["spec"]["template"]["spec"]
    assert redis["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    written, container = pod("writable root")
    assert {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}} in written["spec"]["volumes"]
    assert "HOME" not in json.dumps(container["env"])
    assert "shm" not in json.dumps(written)


def test_the_job_of_captions_has_a_shard_in_each_pod(objects: Any) -> None:
    values = {"caption": {"enabled": True, **PODS["extra volumes"], "args": ["--every", "2s"]}}
    job = find(objects(values), "Job", "penstock-caption")["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)
    (container,) = job["template"]["spec"]["containers"]
    assert container["args"][:2] == ["penstock", "caption"]
    flags = caption.make_context("caption", container["args"][2:]).params
    assert (flags["shard"], str(flags["output"]), flags["every"]) == ("auto/4", "/data/captions.jsonl", 2.0)
    assert (flags["servers"], flags["inputs"]) == (("http://penstock:80",), ("/data/videos",))
    assert {"name": "scratch", "mountPath": "/tmp"} in container["volumeMounts"]
    with pytest.raises(RenderError, match=r"caption\.servers is empty"):
        objects({**values, "server": {"enabled": False}})


def test_the_alerts_and_the_dashboard_are_those_of_the_folder(objects: Any) -> None:
    folder = ROOT / "dashboards" / "penstock"
    rules = find(objects(OPTIONS["alerts"]), "PrometheusRule", "penstock")
    assert rules["spec"] == yaml.safe_load((folder / "alerts.yaml").read_text())
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    board = find(objects(OPTIONS["dashboard"]), "ConfigMap", "penstock-dashboard")
    assert board["data"] == {"penstock.json": (folder / "grafana.json").read_text()}
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_prometheus_reads_servers_with_tls_over_https(objects: Any) -> None:
    for kind in ("podMonitor", "serviceMonitor"):
        monitor = find(
            objects(merged(OPTIONS["TLS"], {kind: {"enabled": True}})), kind[0].upper() + kind[1:], "penstock"
        )
        ((endpoint,),) = [value for key, value in monitor["spec"].items() if key.lower().endswith("endpoints")]
        (relabeling,) = endpoint["relabelings"]
        assert (relabeling["regex"], relabeling["targetLabel"], relabeling["replacement"]) == (
            "server", "__scheme__", "https",
        )  # fmt: skip
        assert endpoint["tlsConfig"] == {"insecureSkipVerify": True}


def test_network_policies_admit_callers_and_clients_of_redis(objects: Any) -> None:
    found = objects(OPTIONS["network policy"])
    calls, metrics = find(found, "NetworkPolicy", "penstock-server")["spec"]["ingress"]
    assert calls["from"] == OPTIONS["network policy"]["networkPolicy"]["callers"]
    assert metrics == {"ports": [{"port": "metrics"}], "from": []}
    (redis,) = find(found, "NetworkPolicy", "penstock-redis")["spec"]["ingress"]
    peers = [each.get("podSelector", {}).get("matchLabels", {}) for each in redis["from"]]
    assert [each.get("app.kubernetes.io/component") for each in peers] == ["worker", "queue", None]


def test_autoscalers_hold_the_wait_in_the_queue(objects: Any) -> None:
    cpu, wait = find(objects(OPTIONS["scaled servers"]), "HorizontalPodAutoscaler", "penstock-server")["spec"][
        "metrics"
    ]
    assert (cpu["resource"]["name"], wait["pods"]["metric"]["name"]) == ("cpu", "penstock_queue_wait_seconds")
    assert wait["pods"]["target"] == {"type": "AverageValue", "averageValue": "0.1"}
    found = find(objects(VARIANTS["servers scaled by KEDA"]), "ScaledObject", "penstock-server")["spec"]
    (trigger,) = found["triggers"]
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("Value", "0.1")
    assert 'penstock_queue_seconds_sum{namespace="default",pod=~"penstock-server-.*"}' in trigger["metadata"]["query"]
    found = find(objects(VARIANTS["workers scaled by their queue's wait"]), "ScaledObject", "penstock-worker")["spec"]
    page = (ROOT / "docs" / "redis.md").read_text()
    assert [each["metadata"]["query"].replace('""', '"PREFIX"') in page for each in found["triggers"]] == [True, True]
    _, wait = find(objects(VARIANTS["hpa"]), "HorizontalPodAutoscaler", "penstock-worker")["spec"]["metrics"]
    assert wait["external"]["metric"]["name"] == "penstock_redis_queue_wait_seconds"
    assert wait["external"]["target"] == {"type": "Value", "value": "0.5"}


def test_the_rules_of_the_page_for_prometheus_adapter_make_the_autoscalers_metrics(objects: Any) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    (block,) = re.findall(r"^```yaml\n(# values of prometheus-adapter.*?)^```$", page, re.S | re.M)
    rules = yaml.safe_load(block)["rules"]
    names = {"custom": ["server", "penstock-server", "pods"], "external": ["worker", "penstock-worker", "external"]}
    for kind, (option, deployment, metric) in names.items():
        values = {"server": OPTIONS["scaled servers"], "worker": VARIANTS["hpa"]}[option]
        metrics = find(objects(values), "HorizontalPodAutoscaler", deployment)["spec"]["metrics"]
        asked = {each[metric]["metric"]["name"] for each in metrics if metric in each}
        assert {rule["name"].get("as") for rule in rules[kind]} == asked


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
        (
            {"worker": {"autoscaling": {"mode": "keda", "queueWaitSeconds": 1}}},
            "worker.autoscaling.queueWaitSeconds: KEDA reads the wait from Prometheus: set prometheusAddress",
        ),
        (
            {"worker": {"autoscaling": {"mode": "hpa", "minReplicas": 9}}},
            "worker.autoscaling: minReplicas is 9, above maxReplicas, 8",
        ),
        (
            {"server": {"autoscaling": {"enabled": True, "minReplicas": 5}}},
            "server.autoscaling: minReplicas is 5, above maxReplicas, 4",
        ),
        (
            {"server": {"autoscaling": {"enabled": True}}},
            "the use of cpu is a share of what pods request: set server.resources.requests.cpu",
        ),
        (
            {"server": {"autoscaling": {"enabled": True, "metrics": []}}},
            "metrics is empty and queueWaitSeconds is 0: set one of them",
        ),
        (
            {"server": {"autoscaling": {"enabled": True, "mode": "keda", "queueWaitSeconds": 1}}},
            "KEDA needs queueWaitSeconds and prometheusAddress, or triggers",
        ),
        (
            {"worker": {"gpu": {"count": 1}, "resources": {"limits": {"nvidia.com/gpu": 1}}}},
            "worker.gpu.count and worker.resources.limits both set nvidia.com/gpu: keep one of them",
        ),
        (
            {"server": {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}},
            'server.extraVolumes: the chart has a volume "tmp" of its own; choose another name',
        ),
        (
            {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}},
            "podMonitor and serviceMonitor would read each pod twice: enable one of them",
        ),
        ({"server": {"gpu": {"resource": "gpu"}}}, "does not match pattern"),
        ({"shmSize": "much"}, "does not match pattern"),
        ({"server": {"topologySpreadConstraints": [{"maxSkew": 1}]}}, "missing properties"),
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
def start(image: Container, objects: Any, start_pod: Callable[..., Pod], tmp_path: Path) -> Callable[..., Pod]:
    """Starts the pod of a Deployment of the chart. `folders` are its volumes by name, besides empty ones."""

    def run(name: str, values: Mapping[str, Any], **folders: Path) -> Pod:
        pod = find(objects(values), "Deployment", name)["spec"]["template"]["spec"]
        (found,) = pod["containers"]
        container = read_kubernetes(found, image, pod["terminationGracePeriodSeconds"])
        for volume in pod["volumes"]:
            if "emptyDir" in volume and volume["name"] not in folders:
                folders[volume["name"]] = Path(tempfile.mkdtemp(dir=tmp_path))
                folders[volume["name"]].chmod(0o777)
        mounts = {each["mountPath"]: folders[each["name"]] for each in found["volumeMounts"]}
        return start_pod(replace(container, user=str(pod["securityContext"]["runAsUser"])), mounts)

    return run


@pytest.fixture
def models(tmp_path: Path, objects: Any) -> Path:
    """The volume of the chart's ConfigMap."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name, text in find(objects(), "ConfigMap", "penstock-models")["data"].items():
        (folder / name).write_text(text)
    return folder


def test_the_servers_pod_serves_the_charts_models_and_sigterm_loses_no_request(
    start: Callable[..., Pod], models: Path, tmp_path: Path
) -> None:
    """Also with tokens and TLS. The pods can write nothing but their volumes."""
    secret, certificate = tmp_path / "secret", tmp_path / "certificate"
    secret.mkdir()
    (secret / "token").write_text("s3cret\n")
    certificate.mkdir()
    shutil.copy(TLS / "cert.pem", certificate / "tls.crt")
    shutil.copy(TLS / "key.pem", certificate / "tls.key")
    guarded = {"server": {"tokenSecret": "tokens", "tls": {"secret": "certificate"}}}
    safe = start("penstock-server", guarded, models=models, token=secret, tls=certificate)
    pod = start("penstock-server", {}, models=models)
    for each, tls in ((pod, False), (safe, True)):
        each.wait_ready()
        assert each.probe(each.container.probes["livenessProbe"])
        assert b"penstock_workers_up" in each.request("GET", "/metrics", port=8082, tls=tls)[1]
        assert each.run("touch", "/home/file").returncode == 1
        assert each.run("touch", "/tmp/file").returncode == 0
    body, plain = b"hello", {"content-type": "text/plain"}
    assert safe.request("POST", "/predictions/uppercase", body, plain, tls=True)[0] == 401
    with_token = {**plain, "authorization": "Bearer s3cret"}
    assert safe.request("POST", "/predictions/uppercase", body, with_token, tls=True)[1] == b"HELLO"
    survives_sigterm(Load(pod, "/predictions/uppercase", body, b"HELLO", content_type="text/plain"))


def test_a_rolling_update_of_the_workers_loses_no_request(
    start: Callable[..., Pod], models: Path, tmp_path: Path, run_redis: Callable[..., Any]
) -> None:
    """Two old pods are replaced as the Deployment does: a new one must be ready before an old one gets SIGTERM."""
    socket = tmp_path / "redis"
    socket.mkdir()
    redis = run_redis("--unixsocket", str(socket / "redis.sock"), "--unixsocketperm", "777")
    values = {  # the pod has another network than the test's Redis
        "worker": {
            "env": [{"name": "PENSTOCK_REDIS", "value": "unix:///redis/redis.sock"}],
            "extraVolumes": [{"name": "redis", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "redis", "mountPath": "/redis"}],
        }
    }

    def ready() -> Pod:
        pod = start("penstock-worker", values, models=models, redis=socket)
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
