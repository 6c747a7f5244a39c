from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import BadRequest
from penstock.pipeline.ops.scores import ArgMax, ArgMaxTensor, SoftmaxArgMax, SoftmaxCpu, SoftmaxMax, softmax

LOGITS = np.array([[1.0, 3.0, 2.0, -100.0]], np.float32)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32, np.uint8])
def test_shares_are_those_of_softmax(dtype):
    logits = np.array([[1, 3, 2, 0], [200, 100, 200, 7]]).astype(dtype)
    shares = softmax(logits)
    wide = logits.astype(np.float64)
    want = np.exp(wide - wide.max(1, keepdims=True))
    want /= want.sum(1, keepdims=True)
    assert shares.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert np.allclose(shares, want, atol=1e-6)


def test_large_logits_do_not_overflow():
    assert np.allclose(softmax(np.array([[3e38, 0.0, 3e38]], np.float32)), [[0.5, 0, 0.5]])


def test_softmax_applies_to_each_matrix_of_a_list():
    image = np.ones((1, 3, 2, 2), np.float32)
    shares, same = SoftmaxCpu()([LOGITS, image], {})
    assert np.array_equal(shares, softmax(LOGITS))
    assert same is image


def test_the_best_class_and_its_share():
    fields = {}
    score = float(softmax(LOGITS)[0, 1])
    assert SoftmaxArgMax()(LOGITS, fields) == 1
    assert fields == {"class": 1, "score": score}
    assert SoftmaxMax()(LOGITS, {}) == [1.0, score]
    assert ArgMax()(LOGITS, {}) == ArgMax()(LOGITS[0], {}) == 1
    assert type(ArgMax()(LOGITS, {})) is int


def test_the_first_of_equals_is_best():
    assert ArgMax()(np.array([[1.0, 5.0, 5.0]]), {}) == 1
    assert np.array_equal(ArgMaxTensor()(np.array([[1, 5, 5], [2, 2, 1]]), {}), [1, 0])


def test_each_row_has_its_best_class():
    found = ArgMaxTensor()(np.arange(24).reshape(2, 3, 4), {})
    assert found.shape == (2, 3)
    assert (found == 3).all()


@pytest.mark.parametrize("op", [SoftmaxMax(), SoftmaxArgMax(), ArgMax()])
def test_more_than_one_row_is_told(op):
    with pytest.raises(
        BadRequest, match=r"found float32 array \[2, 4\], expected the scores of one item, \[1, classes\]"
    ):
        op(np.repeat(LOGITS, 2, axis=0), {})


@pytest.mark.parametrize("op", [SoftmaxMax(), SoftmaxArgMax(), ArgMax(), ArgMaxTensor(), SoftmaxCpu()])
@pytest.mark.parametrize("data", [None, b"", np.zeros((1, 0)), np.array("a")])
def test_invalid_scores_are_an_error(op, data):
    with pytest.raises(BadRequest, match=f"{type(op).__name__} found "):
        op(data, {})
