from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.wire.messages import LARGE_BYTES, Pickled, Unsent
from penstock.errors import BadOutput, BadRequest
from penstock.streamer.shared.sealed import Sealed, SealedModel, opened, seal, seal_item

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)
large = st.integers(LARGE_BYTES + 1, LARGE_BYTES + 10).map(lambda n: np.arange(n, dtype=np.uint8))
value = plain | large | st.lists(large | plain, max_size=3) | st.integers(0, 10).map(lambda n: b"x" * (LARGE_BYTES + n))


def across(values: list[Any], large: list[memoryview]) -> Any:
    """The values after a pickle of all of them, whose large buffers it adds to the list."""
    data = pickle.dumps(values, 5, buffer_callback=lambda buffer: large.append(buffer.raw().toreadonly()))
    assert len(data) < 100 + len(values) * 3 * LARGE_BYTES
    return pickle.loads(data, buffers=[bytearray(view) for view in large])


@given(st.lists(value, max_size=4))
def test_values_survive_two_passes_through_other_pickles(values: list[Any]) -> None:
    sealed = [seal(each) for each in values]
    for _ in range(2):
        sealed = across(sealed, [])
    for mine, theirs in zip(values, map(opened, sealed), strict=True):
        np.testing.assert_equal(theirs, mine)


def test_large_arrays_stay_out_of_the_pickles_and_remain_writable() -> None:
    array = np.ones(10**6)
    sealed = seal({"a": array, "small": np.ones(3)})
    assert sealed.nbytes > array.nbytes
    buffers: list[memoryview] = []
    (copy,) = across([sealed], buffers)
    assert [buffer.nbytes for buffer in buffers] == [array.nbytes]
    found = copy.load()
    found["a"][0] = 2
    assert array[0] == 1
    array.flags.writeable = False
    assert not across([seal(array)], [])[0].load().flags.writeable


def test_what_cannot_be_pickled_or_loaded_is_an_error_in_its_place() -> None:
    refused = seal_item(threading.Lock())
    assert isinstance(refused, Unsent)
    assert isinstance(refused.error, BadRequest)
    broken = Sealed(b"\x80\x05cno_such_module\nthing\n.", [])
    assert isinstance(opened(broken), BadOutput)
    model = SealedModel(lambda batch: batch)
    with pytest.raises(BadRequest, match="the item cannot be unpickled in the worker: ModuleNotFoundError"):
        model.preprocess(broken)
    with pytest.raises(BadOutput, match="the model returned a lock that cannot be pickled"):
        model.postprocess(threading.Lock())
    assert isinstance(model.postprocess(1), Pickled)
    assert model.preprocess(seal([1, 2])) == [1, 2]


def test_the_batcher_passes_on_values_without_their_libraries() -> None:
    code = """
import sys, pickle
import penstock.streamer.shared.batcher
sealed = pickle.loads(sys.stdin.buffer.read())
again = pickle.dumps(sealed, 5)
assert not {"numpy", "torch", "click", "redis", "grpc", "prometheus_client"} & sys.modules.keys(), sys.modules.keys()
sys.stdout.buffer.write(again)
"""
    sent = pickle.dumps([seal(np.arange(5)), seal(np.ones(10**5))], 5)
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    first, second = pickle.loads(done.stdout)
    assert first.load().tolist() == [0, 1, 2, 3, 4]
    assert second.load().sum() == 10**5
