"""How batches are cut for helper processes, and the errors and limits of these."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.config.schema import MOST_HELPERS, BatchingConfig, ModelConfig
from penstock.core.worker.devices import environment
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import BadRequest, WorkerDied
from penstock.runtimes.preprocess import CHUNKS, _config, _of_helper, cut


@given(st.lists(st.integers(), max_size=300), st.integers(1, MOST_HELPERS))
def test_chunks_keep_all_values_in_order_and_leave_no_helper_idle(values: list[int], helpers: int) -> None:
    chunks = cut(values, helpers)
    assert [value for chunk in chunks for value in chunk] == values
    assert len(chunks) <= CHUNKS * helpers
    assert all(chunks)
    sizes = {len(chunk) for chunk in chunks[:-1]}
    assert len(sizes) <= 1
    assert len(chunks) >= min(len(values), CHUNKS * helpers / 2)


def test_a_helper_has_one_thread_no_gpu_and_less_time_than_its_worker() -> None:
    batching = BatchingConfig(run_timeout_s=30.0, idempotent=False, slo_s=1.0)
    model = ModelConfig(
        target="app.py:Model", preprocess_processes=3, threads=8, devices=("cuda:1",), env={"A": "b"}, batching=batching
    )
    found = _config(model)
    assert (found.instances, found.preprocess_processes, found.options, found.devices) == (3, 0, {}, ("cpu",))
    assert found.batching.run_timeout_s < found.batching.timeout_s < 30.0
    assert not found.batching.idempotent
    env, device = environment(WorkerSpec("m", "1", found, "app.py:Model"), "cpu", {"CUDA_VISIBLE_DEVICES": "1"})
    assert (env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"], env["A"], device) == ("", "1", "b", "cpu")


def test_only_errors_that_are_not_the_users_own_name_the_helper() -> None:
    own = BadRequest("too dark", detail="Traceback (most recent call last): ...")
    assert _of_helper(own) is own
    died = _of_helper(WorkerDied("the worker exited with code 3", retry_after_s=1.0))
    assert (type(died), died.message, died.retry_after_s) == (
        WorkerDied, "preprocess helper: the worker exited with code 3", 1.0
    )  # fmt: skip
    assert type(_of_helper(KeyError("x"))) is WorkerDied
