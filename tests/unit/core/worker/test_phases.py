"""Batches in phases: what may overlap, in which order they are finished, and errors of each phase."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from penstock.config.schema import BatchingConfig
from penstock.core.batching.ladder import ladder_of
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.phases import LAUNCHED, Finisher
from penstock.core.worker.python_model import PythonModel
from penstock.core.worker.tensor_model import ANY_ROWS, Input, ProgramSettings, TensorModel
from penstock.types import Item, TensorSpec


class Phased:
    """Doubles rows; `fails` are the phases that raise for more than one row."""

    platform = "python"
    inputs = (Input("x", "FP32", (-1, -1)),)
    outputs = (TensorSpec("y", "FP32", (-1, -1)),)
    rows = ANY_ROWS
    unbatched = False

    def __init__(self, fails=None):
        self.log, self._fails = [], fails

    empty = staticmethod(np.empty)

    def _phase(self, name, arrays):
        self.log.append((name, len(arrays["x"])))
        if self._fails == name and len(arrays["x"]) > 1:
            raise MemoryError(name) if name == "stage" else ValueError(name)
        return arrays

    def stage(self, arrays, rows):
        copies = ((0, rows - len(arrays["x"])), (0, 0))
        return self._phase("stage", {"x": np.pad(arrays["x"], copies, mode="edge")})

    def launch(self, staged):
        return self._phase("launch", staged)

    def fetch(self, launched):
        return self.run(self._phase("fetch", launched)), 0.25

    def run(self, arrays):
        return {"y": arrays["x"] * 2}


def runner(program):
    model = PythonModel(TensorModel(lambda _: program, ProgramSettings()))
    model.load("cpu")
    return BatchRunner(model, model.metadata("m", "1"), BatchingConfig())


def items(*widths):
    return [Item({"x": np.full((1, width), i + 1, "f4")}) for i, width in enumerate(widths)]


def check(part, widths):
    assert [r.body["y"].tolist() for r in part.results] == [[[2.0 * (i + 1)] * w] for i, w in enumerate(widths)]


def no_part(part):
    raise AssertionError("these models do not stream")


def test_a_batch_is_launched_before_the_last_one_is_fetched():
    run = runner(program := Phased())
    finish = [run.begin(k, run.decode(items(*[3] * k)), no_part) for k in (1, 2)]
    assert program.log == [("stage", 1), ("launch", 1), ("stage", 2), ("launch", 2)]
    for k, one in enumerate(finish, 1):
        part = one()
        check(part, [3] * k)
        assert (part.run_s, part.on_device) == (0.25, True)
        assert part.stages_s[1] == 0.25


@pytest.mark.parametrize("fails", ["stage", "launch", "fetch"])
def test_a_batch_that_fails_in_a_phase_runs_in_halves(fails):
    run = runner(Phased(fails))
    part = run.begin(1, run.decode(items(2, 2, 2)), no_part)()
    check(part, [2, 2, 2])
    assert part.oom == ((3, 2) if fails == "stage" else None)
    assert not part.on_device


def test_requests_that_cannot_share_a_call_are_predicted():
    run = runner(program := Phased())
    part = run.begin(1, run.decode(items(2, 3)), no_part)()
    check(part, [2, 3])
    assert (program.log, part.on_device) == ([], False)


def test_a_batch_is_padded_to_the_sizes_of_a_ladder():
    run = runner(program := Phased())
    run.model.pad(ladder_of([4, 8], 8))
    part = run.begin(1, run.decode(items(2, 2, 2)), no_part)()
    check(part, [2, 2, 2])
    assert program.log[0] == ("stage", 4)


def test_a_request_that_is_refused_is_not_launched():
    run = runner(program := Phased())
    good, bad = run.begin(1, run.decode([*items(2), Item("text")]), no_part)().results
    assert good.body["y"].tolist() == [[2, 2]]
    assert bad.error.code == "bad_request"
    assert program.log[0] == ("stage", 1)


def test_a_model_whose_rows_are_none_has_no_phases():
    run = runner(Phased())
    run.model.unbatch()
    assert not run.model.overlaps


# ---- the thread of the last phase


def test_batches_are_finished_in_order_and_two_are_begun_at_most():
    begun, finished, go = [], [], threading.Semaphore(0)

    def finish(box):
        go.acquire()
        finished.append(box.pop())

    finisher = Finisher(finish, "a test")
    done = threading.Event()

    def run():
        for k in range(5):
            finisher.run(lambda k=k: begun.append(k) or k)
        finisher.close()
        done.set()

    threading.Thread(target=run).start()
    for k in range(5):
        go.release()
        while len(finished) <= k:
            done.wait(0.001)
        assert len(begun) - len(finished) <= LAUNCHED
    assert done.wait(10)
    assert finished == [0, 1, 2, 3, 4]


def test_a_batch_can_wait_for_those_before_it_and_may_fail_to_begin():
    finished = []
    finisher = Finisher(lambda box: finished.append(box.pop()), "a test")
    for k in range(4):
        finisher.run(lambda k=k: k)

    def begin():
        finisher.wait()
        assert finished == [0, 1, 2, 3]
        raise ValueError("no batch")

    for _ in range(LAUNCHED + 1):
        with pytest.raises(ValueError, match="no batch"):
            finisher.run(begin)
    finisher.close()
