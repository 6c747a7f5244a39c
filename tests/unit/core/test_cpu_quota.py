"""The CPU quota of a container, as the files of its cgroups show it, and what follows it."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config.schema import ModelConfig
from penstock.core import os_threads
from penstock.core.engine.rules import devices_of
from penstock.core.os_threads import cpu_quota, usable_cores
from penstock.core.worker.devices import threads_of
from penstock.core.worker.spec import WorkerSpec

V1 = "4:memory:/x\n1:cpu,cpuacct:{}\n0::/\n"


def v1(folder: str, quota: int, period: int = 100000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("cgroups", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {}, math.inf),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "max 100000\n"}, 4.0),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "50000 25000\n"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "cpu.max": "50000 100000\n"}, 0.5),
        ("0::/../../other\n", {"cpu.max": "100000 100000\n"}, 1.0),
        ("0::/kubepods/pod1/c\n", {"cpu.max": "200000 100000\n"}, 2.0),  # its own cgroup is at the top
        (V1.format("/"), v1("cpu,cpuacct", 300000), 3.0),
        (V1.format("/"), v1("cpu", 50000, 200000), 0.25),
        (V1.format("/"), v1("cpu", -1), math.inf),
        (V1.format("/a/b"), v1("cpu/a/b", -1) | v1("cpu/a", 100000), 1.0),
        (V1.format("/docker/1"), v1("cpu,cpuacct", 200000), 2.0),
        (V1.format("/"), {"unified/cpu.max": "100000 100000\n"}, 1.0),
        ("2:cpuset:/\n", v1("cpu", 100000), math.inf),  # another controller
        ("0::/\n", {"cpu.max": "what\n"}, math.inf),
        ("0::/\n", {"cpu.max": ""}, math.inf),
        ("0::/\n", {"cpu.max": "0 0\n"}, math.inf),
        (None, {"cpu.max": "100000 100000\n"}, math.inf),
    ],
)
def test_the_least_quota_of_a_cgroup_and_those_above_counts(
    tmp_path: Path, cgroups: str | None, files: dict[str, str], quota: float
) -> None:
    if cgroups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(cgroups)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("quota", "cores"), [(math.inf, 8), (64.0, 8), (8.0, 8), (5.01, 6), (2.0, 2), (0.1, 1)])
def test_threads_and_instances_follow_the_quota_rounded_up(
    monkeypatch: pytest.MonkeyPatch, quota: float, cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 8)
    monkeypatch.setattr(os_threads, "cpu_quota", lambda root: quota)
    config = ModelConfig(target="m:m")
    assert usable_cores() == threads_of(WorkerSpec("m", "1", config, "m:m")) == cores
    assert len(devices_of(ModelConfig(target="m:m", instances="auto"))) == max(1, cores // 2)


def test_the_quota_of_this_process_is_read() -> None:
    """In a cgroup with a quota of one CPU, where this machine lets the test make one."""
    for top, name, text in (("", "cpu.max", "100000 100000"), ("cpu", "cpu.cfs_quota_us", "100000")):
        own = Path("/sys/fs/cgroup", top, f"penstock-{os.getpid()}")
        try:
            own.mkdir()
        except OSError:
            continue
        try:
            if not (own / name).exists():  # no file system of cgroups
                continue
            (own / name).write_text(text)
            code = "from penstock.core.os_threads import usable_cores; print(usable_cores())"
            shell = f'echo $$ > {own}/cgroup.procs && exec "$0" -c "$1"'
            done = subprocess.run(["sh", "-c", shell, sys.executable, code], capture_output=True, text=True, check=True)
            assert done.stdout == "1\n"
            return
        except OSError:
            continue
        finally:
            own.rmdir()
    pytest.skip("this machine lets no test make a cgroup")
