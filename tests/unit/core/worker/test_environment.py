from __future__ import annotations

import psutil
import pytest

from penstock.config.schema import ModelConfig
from penstock.core.worker.devices import THREAD_VARIABLES, environment, threads_of
from penstock.core.worker.spec import WorkerSpec


def spec(instances=1, **config):
    return WorkerSpec("m", "1", ModelConfig(target="m:m", **config), "m:m", instances=instances)


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)), raising=False)


@pytest.mark.parametrize(("instances", "threads"), [(1, 8), (3, 2), (20, 1)])
def test_physical_cores_are_shared_out(cores, instances, threads):
    assert threads_of(spec(instances)) == threads
    env, device = environment(spec(instances), "cpu", {})
    assert {env[name] for name in THREAD_VARIABLES} == {str(threads)}
    assert (env["OMP_WAIT_POLICY"], env["GOMP_SPINCOUNT"]) == ("PASSIVE", "10000")
    assert (env["OPENBLAS_THREAD_TIMEOUT"], env["PYTHONUNBUFFERED"]) == ("4", "1")
    assert env["ORT_DISABLE_TELEMETRY"] == "1"
    assert env["MALLOC_TRIM_THRESHOLD_"] == env["MALLOC_MMAP_THRESHOLD_"] == "33554432"
    assert device == "cpu"


def test_automatic_instances_have_one_thread_each(cores):
    def threads(**keys):
        return threads_of(WorkerSpec("m", "1", ModelConfig(target="m:m", instances="auto", **keys), "m:m", instances=4))

    assert threads() == 1
    assert threads(threads=3) == 3
    assert threads(devices=("cuda:0", "cuda:1")) == 2


def test_only_cores_of_the_affinity_mask_are_counted(cores, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert threads_of(spec()) == 2


def test_the_users_environment_wins_and_configuration_over_it(cores):
    base = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}
    env, _ = environment(spec(), "cpu", base)
    assert (env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"], env["OMP_WAIT_POLICY"]) == ("3", "8", "ACTIVE")
    env, _ = environment(spec(threads=5, env={"A": "b", "MKL_NUM_THREADS": "7"}), "cpu", base)
    assert (env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"], env["A"]) == ("5", "7", "b")
    assert base == {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}


@pytest.mark.parametrize("policy", ["ACTIVE", "PASSIVE"])
def test_a_users_omp_wait_policy_is_kept(cores, policy):
    said = {"OMP_WAIT_POLICY": policy}  # a count of spins would be obeyed rather than this
    for env, _ in (environment(spec(), "cpu", said), environment(spec(env=said), "cpu", {})):
        assert env["OMP_WAIT_POLICY"] == policy
        assert "GOMP_SPINCOUNT" not in env
    assert environment(spec(), "cpu", {"GOMP_SPINCOUNT": "7"})[0]["GOMP_SPINCOUNT"] == "7"


@pytest.mark.parametrize(
    ("device", "base", "visible", "inner"),
    [
        ("cuda:2", {}, "2", "cuda:0"),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "4,6"}, "6", "cuda:0"),
        ("cuda:2,0", {"CUDA_VISIBLE_DEVICES": "4,6,7"}, "7,4", "cuda:0"),
        ("cuda:2,0", {}, "2,0", "cuda:0"),
        ("cuda", {}, None, "cuda"),
        ("cpu", {}, None, "cpu"),
    ],
)
def test_a_worker_sees_only_its_own_device(cores, device, base, visible, inner):
    env, found = environment(spec(), device, base)
    assert (env.get("CUDA_VISIBLE_DEVICES"), found) == (visible, inner)
