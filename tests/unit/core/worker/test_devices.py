"""GPUs are counted without a driver's library."""

from __future__ import annotations

import subprocess

import pytest

from penstock.core.worker import devices


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A machine of four GPUs."""
    for i in range(4):
        (tmp_path / f"0000:0{i}:00.0").mkdir()
    monkeypatch.setattr(devices, "_DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("shown", "count"),
    [(None, 4), ("0,1", 2), ("3", 1), ("", 0), ("-1", 0), ("0,-1,2", 1), ("GPU-abc,GPU-def", 2), ("0,1,2,3,4,5", 4)],
)
def test_the_environment_shows_some_of_them(driver, shown, count):
    assert devices.visible_gpus({} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}) == count


def test_cuda_is_all_of_them_in_turn(driver, monkeypatch):
    assert devices.expanded(("cuda",)) == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert devices.expanded(("cpu", "cuda:3")) == ("cpu", "cuda:3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices.expanded(("cuda", "cpu")) == ("cuda:0", "cpu")
    assert devices.expanded(()) == ("cpu",)


@pytest.mark.parametrize(
    ("says", "count"),
    [(b"GPU 0: H0 (UUID: x)\nGPU 1: H0 (UUID: y)\n", 2), (b"No devices found\n", 0), (None, 0)],
)
def test_nvidia_smi_is_the_fallback_without_the_driver_folder(monkeypatch, tmp_path, says, count):
    def run(command, **_):
        if says is None:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0, says)

    monkeypatch.setattr(devices, "_DRIVER", tmp_path / "nowhere")
    monkeypatch.setattr(subprocess, "run", run)
    assert devices.visible_gpus({}) == count
    assert devices.expanded(("cuda",)) == (("cuda:0", "cuda:1") if count else ("cuda",))
