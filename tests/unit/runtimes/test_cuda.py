"""The capture of a graph, over a stand-in for PyTorch's CUDA: in which order it is asked, and which error is told."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from penstock.runtimes import cuda


class Tensor:
    is_cuda = False

    def contiguous(self):
        return self


class Cuda:
    """`log` is what happened; the end of a capture fails after an error of a kernel, as on a GPU."""

    def __init__(self):
        self.log = []
        log = self.log

        class CUDAGraph:
            own_pool = None

            def pool(self):
                return self.own_pool

            def replay(self):
                log.append("replay")

        self.CUDAGraph = CUDAGraph
        self.Stream = lambda device: SimpleNamespace(wait_stream=lambda other: None)
        self.current_stream = self.empty_cache = lambda *_: None
        self.device = self.stream = lambda _: nullcontext()
        self.memory_reserved = lambda device: 5

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        self.log.append(f"begin in {pool}, {capture_error_mode}")
        errors = len(self.log)
        graph.own_pool = pool or "a new pool"
        yield
        if "error" in self.log[errors:]:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.log.append("end")


@pytest.fixture
def made(monkeypatch):
    driver = Cuda()
    monkeypatch.setattr(cuda, "import_torch", lambda: SimpleNamespace(cuda=driver, device=str))
    return driver.log, cuda.CudaDevice("cuda:0")


def test_kernels_run_cold_are_captured_and_then_replayed_in_shared_memory(made):
    log, device = made
    result = Tensor()
    graphs = [device.capture(lambda: log.append("kernels") or {"y": result}) for _ in range(2)]
    cold = ["kernels"] * cuda.COLD_RUNS
    first, second = ([f"begin in {pool}, thread_local", "kernels", "end"] for pool in (None, "a new pool"))
    assert log == [*cold, *first, *cold, *second]
    del log[:]
    assert [graph() for graph in graphs] == [{"y": result}] * 2
    assert log == ["replay"] * 2
    assert device.held_bytes() == 5


def test_the_error_of_a_kernel_is_told_and_not_that_of_the_end_of_its_capture(made):
    log, device = made
    calls = []

    def waits():
        calls.append(1)
        if len(calls) > cuda.COLD_RUNS:
            log.append("error")
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return {}

    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        device.capture(waits)
    device.capture(dict)
    assert log[-2:] == ["begin in None, thread_local", "end"]
