import pytest

from penstock.torchserve.admin.model_spec import ModelSettings
from penstock.torchserve.admin.workers import DeviceAllocator, usable_gpus

PLAIN = ModelSettings(min_workers=1, max_workers=1)
CPU = ModelSettings(min_workers=1, max_workers=1, device_type="cpu")


@pytest.mark.parametrize(
    ("most", "environment", "found", "usable"),
    [
        (None, {}, 4, 4),
        (2, {}, 4, 2),
        (8, {}, 4, 4),
        (0, {}, 4, 0),
        (None, {"CUDA_VISIBLE_DEVICES": "1,3"}, 4, 2),
        (None, {"CUDA_VISIBLE_DEVICES": ""}, 4, 0),
        (None, {"CUDA_VISIBLE_DEVICES": "-1"}, 4, 0),
        (None, {"CUDA_VISIBLE_DEVICES": "0,-1,2"}, 4, 1),
        (None, {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, 4, 2),
        (None, {"CUDA_VISIBLE_DEVICES": "0,1"}, 0, 0),
        (1, {"CUDA_VISIBLE_DEVICES": "2,3"}, 4, 1),
    ],
)
def test_usable_gpus_are_present_visible_and_allowed(
    most: int | None, environment: dict[str, str], found: int, usable: int
) -> None:
    assert usable_gpus(most, environment, found) == usable


def test_without_gpus_everything_runs_on_the_cpu() -> None:
    devices = DeviceAllocator(0)
    assert devices.take(ModelSettings(min_workers=1, max_workers=1, device_type="gpu", device_ids=(0,)), 2) == ("cpu",)
    assert devices.kind(PLAIN) == "cpu"


def test_a_model_can_use_the_cpu_while_others_use_gpus() -> None:
    devices = DeviceAllocator(2)
    assert (devices.kind(CPU), devices.take(CPU, 2)) == ("cpu", ("cpu",))
    assert devices.kind(PLAIN) == "gpu"


def test_models_use_the_gpus_round_robin() -> None:
    devices = DeviceAllocator(3)
    firsts = [devices.take(PLAIN, workers)[0] for workers in (1, 1, 2, 1)]
    assert firsts == ["cuda:0", "cuda:1", "cuda:2", "cuda:1"]
    assert devices.take(PLAIN, 3) == ("cuda:2", "cuda:0", "cuda:1")


def test_a_worker_that_is_a_group_has_several_gpus() -> None:
    group = ModelSettings(min_workers=1, max_workers=1, parallel_type="tp", parallel_level=2)
    devices = DeviceAllocator(5)
    assert devices.take(group, 1) == ("cuda:0,1", "cuda:2,3")
    assert devices.take(PLAIN, 1)[0] == "cuda:2"
    assert DeviceAllocator(1).take(group, 1) == ("cuda:0",)
    own = ModelSettings(min_workers=1, max_workers=1, parallel_type="tp", parallel_level=2, device_ids=(3, 1))
    assert devices.take(own, 1) == ("cuda:3,1",)


def test_a_model_with_device_ids_uses_them_and_affects_no_others() -> None:
    devices = DeviceAllocator(4)
    own = ModelSettings(min_workers=1, max_workers=1, device_ids=(3, 1, 9))
    assert devices.take(own, 5) == ("cuda:3", "cuda:1")
    assert devices.take(PLAIN, 1)[0] == "cuda:0"
