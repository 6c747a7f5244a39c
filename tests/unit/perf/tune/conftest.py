import pytest

from support.synthetic import Hill


@pytest.fixture
def hill() -> type[Hill]:
    """The class Hill."""
    return Hill
