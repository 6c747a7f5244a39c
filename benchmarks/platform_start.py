"""How long does a container take until its model answers, and what do health checks cost?

The containers of deploy/ run as in the tests (`tests/support/pods.py`), with models that need no torch; the time counts
from the start of the process to the first successful readiness check, one every 10 ms. Then /ping is asked 100 times a
second, on one connection and then on a new one each; the cost is that of all processes of the container. The caches
of the processor are cold at each ping: "bare uvloop" is a server in one process that only returns a constant.
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import harness

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.containers import Container, Probe, read_dockerfile  # noqa: E402
from support.kserve import rendered, write_tree  # noqa: E402
from support.pods import Pod  # noqa: E402

PINGS_PER_S = 100
BARE = """
import asyncio, uvloop

class Bare(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nok")

async def main():
    server = await asyncio.get_running_loop().create_server(Bare, "0.0.0.0", 8080)
    await server.serve_forever()

uvloop.run(main())
"""
MODEL = "class Double:\n    def predict(self, items):\n        return [2 * x for x in items]\n"
SCRIPT = "def model_fn(model_dir):\n    return 2\n\n\ndef predict_fn(data, model):\n    return data * model\n"


def image(name: str) -> Container:
    """An image of deploy/, on that of deploy/docker."""
    base = read_dockerfile(ROOT / "deploy" / "docker" / "Dockerfile", ROOT)
    return read_dockerfile(ROOT / "deploy" / name / "Dockerfile", ROOT / "deploy" / name, {"penstock": base})


def checked(container: Container, port: int, path: str = "/ping", **env: str) -> Container:
    probes = {"readinessProbe": Probe(port, path)}
    return replace(container, env={**container.env, **env}, ports=(port,), probes=probes)


@contextlib.contextmanager
def started(container: Container, at: str, write: Callable[[Path], object]) -> Iterator[tuple[Pod, float]]:
    """The container with a volume that `write` fills, and its seconds to be ready."""
    with tempfile.TemporaryDirectory() as folder:
        volume = Path(folder) / "volume"
        volume.mkdir()
        write(volume)
        pod = Pod(container, Path(folder), {at: volume})
        try:
            yield pod, pod.wait_ready()
        finally:
            pod.close()


def write_script(folder: Path) -> None:
    (folder / "code").mkdir()
    (folder / "code" / "inference.py").write_text(SCRIPT)


def cpu_s(pod: Pod) -> float:
    """CPU time of all threads of all processes of the container, whose clock has nanoseconds."""
    files = (file for process in pod.processes() for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def run(container: Container, at: str, write: Callable[[Path], object], seconds: float) -> harness.Sample:
    with started(container, at, write) as (pod, ready_s):
        return {
            "ready_s": ready_s,
            "ping_percent": ping_percent(pod, seconds, keep=True),
            "new_percent": ping_percent(pod, seconds, keep=False),
        }


def ping_percent(pod: Pod, seconds: float, keep: bool) -> float:
    """Share of a core that the pings take, on one connection or on a new one for each."""
    connection = pod.connect()
    before, begin = cpu_s(pod), time.perf_counter()
    for i in range(int(seconds * PINGS_PER_S)):
        time.sleep(max(0.0, begin + i / PINGS_PER_S - time.perf_counter()))
        if not keep:
            connection.close()
            connection = pod.connect()
        connection.request("GET", "/ping")
        assert connection.getresponse().read()
    percent = 100 * (cpu_s(pod) - before) / (time.perf_counter() - begin)
    connection.close()
    return percent


def main() -> None:
    options = harness.options(__doc__, seconds=5)
    columns = {
        "ready_s": "ready after s",
        "ping_percent": "% of a core at 100 pings/s",
        "new_percent": "... on new connections",
    }
    report = harness.Report(__file__, __doc__, options, columns)
    base = read_dockerfile(ROOT / "deploy" / "docker" / "Dockerfile", ROOT)
    vertex = {"AIP_HTTP_PORT": "8080", "AIP_HEALTH_ROUTE": "/health", "AIP_PREDICT_ROUTE": "/predict"}
    containers: dict[str, tuple[Container, str, Callable[[Path], object]]] = {
        "KServe, an archive": (checked(rendered(base, "v1"), 8080), "/mnt/models", write_tree),
        "SageMaker, a script": (checked(image("sagemaker"), 8080), "/opt/ml/model", write_script),
        "Vertex AI, a class": (
            checked(image("vertex"), 8080, "/health", **vertex, AIP_STORAGE_URI="/mnt/artifacts"),
            "/mnt/artifacts",
            lambda folder: (folder / "model.py").write_text(MODEL),
        ),
    }
    bare = replace(checked(base, 8080), entrypoint=("python", "-c", BARE), cmd=())
    containers["bare uvloop"] = (bare, "/mnt/nothing", lambda folder: None)
    contenders = {name: lambda args=args: run(*args, options.seconds) for name, args in containers.items()}
    runs = harness.interleave(options.rounds, contenders)
    report.add({}, runs)
    for name, samples in runs.items():
        if name == "bare uvloop":
            continue
        report.target(f"{name}: ready after s", [sample["ready_s"] for sample in samples], most=1.5)
        report.target(f"{name}: % of a core at 100 pings/s", [s["ping_percent"] for s in samples], most=1.0)
    report.save()


if __name__ == "__main__":
    main()
