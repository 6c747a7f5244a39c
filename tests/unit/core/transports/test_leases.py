"""Which slabs a model still looks at after its answer."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.core.wire.slabs import HeldSlabs, SlabPool, lease


@pytest.fixture
def pool() -> SlabPool:
    return SlabPool(2**16)


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Nothing is collected by chance."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def in_a_circle(view: Any) -> None:
    box = [view]
    box.append(box)


def test_a_slab_is_held_until_the_model_releases_it(pool: SlabPool) -> None:
    held = HeldSlabs()
    first, first_alive = lease(pool.memory, 0, 10)
    second, second_alive = lease(pool.memory, 4096, 10)
    assert held.after([(0, first_alive), (4096, second_alive)]) == ([0, 4096], [])
    assert held.offsets == {0, 4096}
    del first
    assert held.after([]) == ([], [0])
    assert held
    del second
    assert held.after([]) == ([], [4096])
    assert not held


def test_garbage_is_not_held(pool: SlabPool) -> None:
    view, alive = lease(pool.memory, 0, 10)
    in_a_circle(view)
    del view
    assert HeldSlabs().after([(0, alive)]) == ([], [])


def test_uncollected_garbage_holds_its_slab(pool: SlabPool) -> None:
    held = HeldSlabs()
    view, alive = lease(pool.memory, 0, 10)
    in_a_circle(view)
    del view
    assert held.after([(0, alive)], collect=False) == ([0], [])
    gc.collect()
    assert held.after([]) == ([], [0])
