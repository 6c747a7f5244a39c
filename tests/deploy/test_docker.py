"""The image of deploy/docker: what it contains, its default command, and the services of docker-compose.yml.

`REHEARSE=full` also builds the image's virtual environment from package indexes: a minute.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from support.containers import Container, read_compose, read_dockerfile
from support.kserve import write_archive
from support.pods import Load, Pod, survives_sigterm

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
COMPOSE = yaml.safe_load((FOLDER / "docker-compose.yml").read_text())
MAX_BYTES = 300 * 10**6  # of all wheels, without torch
MAX_INSTALLED_BYTES = 500 * 2**20
HANDLER = """
    import time

    def handle(data, context):
        time.sleep(0.01)
        return data and [bytes(row["body"]).upper() for row in data]
"""


def arguments() -> dict[str, str]:
    """The default values of the build arguments."""
    return dict(re.findall(r"^ARG (\w+)=(.*)$", (FOLDER / "Dockerfile").read_text(), re.M))


# ---- the image


@pytest.mark.parametrize("base", ["ubuntu:24.04", "nvidia/cuda:12.9.1-base-ubuntu24.04"])
def test_the_image_runs_as_a_user_without_rights_and_reaps(base: str) -> None:
    image = read_dockerfile(FOLDER / "Dockerfile", ROOT, BASE=base)
    assert image.uid == 1000
    assert image.entrypoint == ("tini", "--")
    assert image.venvs == ("/opt/penstock",)
    assert image.env["PATH"].startswith("/opt/penstock/bin:")
    assert not [step for step in image.runs if re.search(r"java|jre|jdk", step)]


def test_the_build_context_has_every_file_that_is_copied() -> None:
    """`read_dockerfile` checks that they exist; .dockerignore must not hide them."""
    allowed = [line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (FOLDER / "Dockerfile").read_text(), re.M)
    for source in (word for words in copied for word in words.split()):
        assert any(source == name or source.startswith(f"{name}/") for name in allowed), source


def closure(name: str, extras: frozenset[str]) -> Iterator[importlib.metadata.Distribution]:
    """The installed distributions that a package needs, with itself."""
    seen: set[tuple[str, str]] = set()

    def walk(name: str, extras: frozenset[str]) -> Iterator[importlib.metadata.Distribution]:
        found = importlib.metadata.distribution(name)
        for extra in ("", *extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if not extra:
                yield found
            for text in found.requires or ():
                each = Requirement(text)
                if each.marker is None or each.marker.evaluate({"extra": extra}):
                    yield from walk(each.name, frozenset(each.extras))

    yield from walk(name, extras)


def test_the_packages_of_the_image_are_small_and_need_no_torch() -> None:
    extras = frozenset(arguments()["EXTRAS"].split(","))
    found = {each.name.lower(): each for each in closure("penstock", extras)}
    assert "torch" not in found
    assert {"numpy", "hpack", "onnxruntime"} <= found.keys()
    sizes = {name: sum(f.size or 0 for f in each.files or ()) for name, each in found.items()}
    assert 100 * 2**20 < sum(sizes.values()) < MAX_INSTALLED_BYTES, sizes


def test_the_default_command_serves_archives_and_is_healthy(
    image: Container, start_pod: Callable[..., Pod], tmp_path: Path
) -> None:
    for name in ("torchserve", "torch-model-archiver", "penstock"):
        assert (Path(sys.executable).parent / name).exists()
    (tmp_path / "store").mkdir()
    write_archive(tmp_path / "store" / "m.mar", HANDLER)
    service = read_compose(COMPOSE["services"]["server"], image)
    volumes = {"/models": FOLDER / "models"}
    uppercase = start_pod(replace(service, ports=(8080, 8082)), volumes)
    archives = start_pod(image, {"/home/model-server/model-store": tmp_path / "store"})
    archives.wait_ready()
    assert archives.run("torch-model-archiver", "--help").returncode == 0
    assert archives.request("GET", "/ping")[0] == 400  # it needs the key, which the health check reads
    key = json.loads(archives.run("cat", "key_file.json").stdout)["inference"]["key"]
    headers = {"authorization": f"Bearer {key}", "content_type": "application/octet-stream"}
    uppercase.wait_ready()
    survives_sigterm(
        Load(archives, "/predictions/m", b"hello", b"HELLO", **headers),
        Load(uppercase, "/predictions/uppercase", b"hello", b"HELLO", content_type="text/plain"),
    )


# ---- docker-compose.yml


def mounts(service: str) -> dict[str, Path]:
    """The files and folders of a service by their place in its container."""
    pairs = (each.removesuffix(":ro").rsplit(":", 1) for each in COMPOSE["services"][service]["volumes"])
    found = {target: (FOLDER / source).resolve() for source, target in pairs}
    assert all(path.exists() for path in found.values()), found
    return found


def test_ports_are_published_to_this_machine_only() -> None:
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    for service in ("server", "worker"):
        assert read_compose(COMPOSE["services"][service], Container()).grace_s > 5 + 30


def test_prometheus_scrapes_the_server_and_grafana_shows_our_dashboard(
    image: Container, start_pod: Callable[..., Pod]
) -> None:
    files = mounts("prometheus")
    configuration = yaml.safe_load(files["/etc/prometheus/prometheus.yml"].read_text())
    (rules,) = configuration["rule_files"]
    assert "PenstockWorkerDown" in files[rules].read_text()
    (target,) = configuration["scrape_configs"][0]["static_configs"][0]["targets"]
    service, _, port = target.partition(":")
    assert service in COMPOSE["services"]

    files = mounts("grafana")
    source = yaml.safe_load(files["/etc/grafana/provisioning/datasources/penstock.yaml"].read_text())["datasources"][0]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    provider = yaml.safe_load(files["/etc/grafana/provisioning/dashboards/penstock.yaml"].read_text())["providers"][0]
    (board,) = [path for at, path in files.items() if at.startswith(provider["options"]["path"])]
    asked = set(re.findall(r"\bpenstock_\w+", board.read_text()))

    pod = start_pod(
        replace(read_compose(COMPOSE["services"]["server"], image), ports=(8080, int(port))), mounts("server")
    )
    pod.wait_ready()
    assert pod.request("POST", "/predictions/uppercase", b"a", {"content-type": "text/plain"})[0] == 200
    shown = set(re.findall(r"^# TYPE (penstock_\w+)", pod.request("GET", "/metrics", port=int(port))[1].decode(), re.M))
    plain = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked if "gpu" not in name}
    assert {name.removesuffix("_total") for name in plain} <= {name.removesuffix("_total") for name in shown}


def test_a_worker_serves_streamers_over_redis(
    image: Container, start_pod: Callable[..., Pod], tmp_path: Path, run_redis: Callable[..., Any]
) -> None:
    from penstock import RedisStreamer

    redis = run_redis("--unixsocket", str(tmp_path / "redis.sock"), "--unixsocketperm", "777")
    service = read_compose(COMPOSE["services"]["worker"], image)
    assert "redis:6379" in service.cmd  # the container has another network than the test's Redis
    words = tuple(word.replace("redis:6379", "unix:///redis/redis.sock") for word in service.cmd)
    pod = start_pod(replace(service, cmd=words), {**mounts("worker"), "/redis": tmp_path})
    with RedisStreamer(redis.address) as streamer:
        assert streamer.predict(["a", "b"]) == ["A", "B"]
    pod.terminate()
    assert pod.wait() == 0, pod.said()


# ---- the build


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("REHEARSE") != "full", reason="REHEARSE=full builds the image's environment")
def test_the_build_stage_makes_a_small_environment_that_serves(tmp_path: Path) -> None:
    """Runs the steps of the build stage that use pip, in a new virtual environment."""
    text = re.sub(r"\\\n\s*", "", (FOLDER / "Dockerfile").read_text()).partition("FROM python AS build")[2]
    steps = [step for step in re.findall(r"^RUN (.+)$", text.partition("\nFROM ")[0], re.M) if "pip install" in step]
    assert len(steps) == 2
    home, wheels = tmp_path / "penstock", tmp_path / "wheels"
    venv.create(home, with_pip=True)
    variables = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.environ.get("PIP_CONFIG_FILE", ""), **arguments()}
    places = {"/opt/penstock": str(home), "/src": str(ROOT)}
    for step in steps:
        command = re.sub("|".join(places), lambda match: places[match[0]], f"set -e; {step}")
        subprocess.run(["sh", "-c", command], env=variables, check=True)
    said = subprocess.run([str(home / "bin" / "torchserve"), "--version"], capture_output=True, text=True, check=True)
    assert "Penstock" in said.stdout
    download = [str(home / "bin" / "pip"), "download", "-q", "-d", str(wheels), "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*download, f"{ROOT}[{arguments()['EXTRAS']}]"], check=True)
    assert sum(file.stat().st_size for file in wheels.iterdir()) <= MAX_BYTES
