from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from support.containers import Container, read_dockerfile
from support.pods import Pod

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

StartPod = Callable[..., Pod]


@pytest.fixture(scope="session")
def image() -> Container:
    """The image of deploy/docker."""
    return read_dockerfile(DEPLOY / "docker" / "Dockerfile", ROOT)


@pytest.fixture(scope="module")
def start_pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartPod]:
    """Runs containers: `start_pod(container, {"/mnt/models": folder})`, until the end of the test file."""
    pods: list[Pod] = []

    def start(container: Container, volumes: Mapping[str, Path] | None = None) -> Pod:
        pods.append(Pod(container, tmp_path_factory.mktemp("pod"), volumes))
        return pods[-1]

    yield start
    for pod in pods:
        pod.close()
