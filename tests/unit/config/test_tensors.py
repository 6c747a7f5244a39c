"""Tensors in the configuration."""

from __future__ import annotations

import pytest

from penstock.config.checks import check_model
from penstock.config.schema import ModelConfig
from penstock.config.tensors import specs_of
from penstock.errors import ConfigError
from penstock.types import TensorSpec


def test_tensors_are_read_in_their_order() -> None:
    found = specs_of({"image": "FP32[-1,3,224,224]", "ids": " INT64 [ -1, -1 ] ", "flag": "BOOL[-1]"})
    assert found == (
        TensorSpec("image", "FP32", (-1, 3, 224, 224)),
        TensorSpec("ids", "INT64", (-1, -1)),
        TensorSpec("flag", "BOOL", (-1,)),
    )


@pytest.mark.parametrize("text", ["", "FP32", "FP32[]", "FP32[3]", "FP31[-1]", "FP32[-1,x]", "FP32[-1,-2]", "[-1]"])
def test_what_is_no_tensor_is_told_with_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r'models\.m\.inputs\.x: found .*such as "FP32\[-1,3,224,224\]"'):
        check_model(ModelConfig(target="net.ts", inputs={"x": text}), "models.m.")
