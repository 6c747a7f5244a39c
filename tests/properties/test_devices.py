"""Batches on a simulated device, in any order of their phases, in virtual time."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.worker.main import open_model
from penstock.core.worker.spec import WorkerSpec
from penstock.core.worker.tensor_model import ProgramSettings, TensorModel
from penstock.runtimes.device import DeviceProgram
from penstock.runtimes.torch import of_module
from penstock.types import Item, TensorSpec
from support.simulated_device import SimulatedDevice

torch = pytest.importorskip("torch")

COPY_S, LAUNCH_S, REPLAY_S = 1e-3, 1e-4, 1e-5
SPECS = (TensorSpec("x", "FP32", (-1, 2)),)


def kernels_s(rows):
    return 2e-3 + 5e-5 * rows


class Clock:
    now = 0.0

    def read(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds + 1e-9


class Doubles(torch.nn.Module):
    def forward(self, x):
        return x * 2


def made():
    clock = Clock()
    device = SimulatedDevice(
        copy_s=COPY_S,
        launch_s=LAUNCH_S,
        replay_s=REPLAY_S,
        kernels_s=kernels_s,
        now_s=clock.read,
        sleep=clock.sleep,
    )
    program = of_module(Doubles(), ProgramSettings(inputs=SPECS))
    return clock, device, DeviceProgram(program, device, graphs=True)


def rows_of(program, count, value):
    array = program.empty((count, 2), np.dtype(np.float32))
    array[...] = value
    return {"x": array}


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 2), st.floats(0, 0.01)), max_size=30),
    st.sets(st.integers(1, 64), max_size=3),
)
def test_every_batch_gets_its_results_and_is_charged_for_its_kernels_alone(steps, sizes):
    """Also if some sizes have graphs."""
    clock, device, program = made()
    assert program.capture(sizes).sizes == tuple(sorted(sizes))
    del device.spans[:]
    staged, launched, ended = [], [], []
    for number, (rows, phase, pause_s) in enumerate(steps):
        clock.now += pause_s
        if phase == 0:
            size = min((n for n in sizes if n >= rows), default=rows)
            staged.append((size, number, program.stage(rows_of(program, rows, number), size)))
        elif phase == 1 and staged:
            count, value, found = staged.pop(0)
            began = clock.now
            launched.append((count, value, program.launch(found)))
            assert clock.now - began == pytest.approx(REPLAY_S if count in sizes else LAUNCH_S, abs=1e-8)
        elif phase == 2 and launched:
            count, value, found = launched.pop(0)
            outputs, seconds = program.fetch(found)
            ended.append((value, outputs["OUTPUT__0"]))
            assert seconds == pytest.approx(kernels_s(count))
    for value, outputs in ended:
        assert (outputs == 2 * value).all()
    for queue in ("in", "kernels", "out"):
        spans = [(start, end) for name, start, end in device.spans if name == queue]
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


@given(st.lists(st.integers(1, 64), min_size=8, max_size=20))
def test_two_launched_batches_keep_the_device_busy(sizes):
    """Also with the smallest ones: a batch takes longer than the copies of another, and than what launches it."""
    clock, device, program = made()
    launched, ahead = [], None
    for rows in [*sizes, None, None]:
        staged, ahead = ahead, None if rows is None else program.stage(rows_of(program, rows, 1))
        if staged is not None:
            launched.append(program.launch(staged))
        if len(launched) == 2 or (rows is None and launched):
            program.fetch(launched.pop(0))
    first = min(start for name, start, _ in device.spans if name == "kernels")
    last = max(end for name, _, end in device.spans if name == "kernels")
    assert device.busy_s("kernels") == pytest.approx(last - first)
    assert device.overlap_s() > 0.5 * (device.busy_s("in") + device.busy_s("out")) * (len(sizes) - 2) / len(sizes)
    assert clock.now >= device.busy_s("kernels")


def test_results_are_garbage_until_their_copy_has_ended():
    _, _, program = made()
    launched = program.launch(program.stage(rows_of(program, 3, 1)))
    assert not (launched.outputs["OUTPUT__0"] == 2).any()
    assert (program.fetch(launched)[0]["OUTPUT__0"] == 2).all()


@given(batches=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=12))
def test_only_the_sizes_of_the_ladder_reach_the_device_and_all_of_them_before_it_serves(batches):
    clock, ran = Clock(), []
    device = SimulatedDevice(
        kernels_s=lambda rows: ran.append(rows) or kernels_s(rows), now_s=clock.read, sleep=clock.sleep
    )
    program = DeviceProgram(of_module(Doubles(), ProgramSettings(inputs=SPECS)), device)
    config = ModelConfig(target="m:m", batching=BatchingConfig(sizes=(1, 4, 16)))
    target = TensorModel(lambda _: program, ProgramSettings())
    runner, ready = open_model(WorkerSpec("m", "1", config, target), "cpu")
    assert set(ran) == {1, 4, 16} == set(ready.sizes)
    for batch in batches:
        items = [Item({"x": np.full((rows, 2), rows, np.float32)}) for rows in batch]
        part = runner.begin(1, runner.decode(items), lambda part: None)()
        for rows, result in zip(batch, part.results, strict=True):
            (array,) = result.body.values()
            assert array.tolist() == [[2.0 * rows] * 2] * rows
    assert set(ran) == {1, 4, 16}
