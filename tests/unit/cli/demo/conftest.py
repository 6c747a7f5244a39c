"""The digits model, loaded once, and the held-out images."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.cli.demo.digits import Digits, data


@pytest.fixture(scope="session")
def digits() -> Digits:
    model = Digits()
    model.load("cpu")
    return model


@pytest.fixture(scope="session")
def heldout() -> dict[str, NDArray[Any]]:
    arrays = data("heldout.npz")
    assert arrays["images"].dtype == np.uint8
    return arrays
