"""Weights once in a process: which modules share parameters, and that their results stay their own."""

import gc
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock.config.schema import ModelConfig
from penstock.runtimes import files, weights
from penstock.runtimes.torch import open_program

torch = pytest.importorskip("torch")
KINDS = ("net.ts", "net.pt2", "class with weights")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.linear(x)


class Counts(Net):
    def forward(self, x):
        self.seen += len(x)
        return self.linear(x) * 0 + self.seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, net = tmp_path_factory.mktemp("weights"), Net().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.script(net).save(str(folder / "net.ts"))
        rows = torch.export.Dim("rows", min=1, max=512)
        torch.export.save(
            torch.export.export(net, (torch.zeros(2, 4),), dynamic_shapes=({0: rows},)), folder / "net.pt2"
        )
    torch.save(net.state_dict(), folder / "weights.pt")
    return folder


def opened(folder, kind, precision="fp32", target=Net):
    """The program, and the places of its parameters."""
    found = str(folder / "weights.pt") if kind == "class with weights" else None
    config = ModelConfig(target="unused:unused", weights=found, precision=precision)
    settings = files.settings_of(config, 1)
    program = files._open_module(target, found, settings) if found else open_program(str(folder / kind), settings)
    return program, [parameter.data_ptr() for parameter in program._module.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_instances_hold_one_copy_of_the_weights_and_answer_as_one_does(folder, kind):
    alone, places = opened(folder, kind)
    with ThreadPoolExecutor(4) as pool:
        several = [alone, *(program for program, _ in pool.map(lambda _: opened(folder, kind), range(4)))]
        assert places
        assert all([p.data_ptr() for p in program._module.parameters()] == places for program in several)
        batches = [np.random.default_rng(n).normal(size=(1 + n % 5, 4)).astype(np.float32) for n in range(60)]
        expected = [next(iter(alone.run({"x": batch}).values())) for batch in batches]
        found = pool.map(lambda n: next(iter(several[n % 5].run({"x": batches[n]}).values())), range(60))
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_other_weights_precisions_and_buffers_are_not_shared(folder, tmp_path):
    program, places = opened(folder, "class with weights")
    half, half_places = opened(folder, "class with weights", "fp16")
    assert opened(folder, "class with weights", "fp16")[1] == half_places != places
    state = torch.load(folder / "weights.pt")
    torch.save(state | {"linear.bias": state["linear.bias"] + 1}, tmp_path / "weights.pt")
    other, other_places = opened(tmp_path, "class with weights")
    assert not {*places} & {*other_places}
    x = np.ones((2, 4), np.float32)
    assert np.allclose(other.run({"x": x})["OUTPUT__0"], program.run({"x": x})["OUTPUT__0"] + 1, atol=1e-6)
    first, second = (opened(folder, "class with weights", target=Counts)[0] for _ in range(2))
    assert first.run({"x": x})["OUTPUT__0"][0, 0] == first.run({"x": x})["OUTPUT__0"][0, 0] - 2 == 2
    assert second.run({"x": x})["OUTPUT__0"][0, 0] == 2
    assert half is not None


def test_a_module_of_the_user_is_left_alone(folder):
    kept, mine = opened(folder, "class with weights"), Net()
    program, places = opened(folder, "class with weights", target=mine)
    assert program._module is mine
    assert not {*places} & {*kept[1]}


def test_weights_are_released_with_the_last_module():
    module = Net()
    weights.share(module)
    gone = weakref.ref(module)
    assert any(module in modules for modules in weights._loaded.values())
    del module
    gc.collect()
    assert gone() is None
    other = torch.nn.Linear(1, 1)
    weights.share(other)
    assert all(weights._loaded.values()), "nothing remains of modules that are gone"
