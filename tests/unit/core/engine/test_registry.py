from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.engine.registry import ModelRegistry, version_order
from penstock.errors import ConfigError, ModelNotFound


def handle(name: str, version: str = "1") -> Any:
    return SimpleNamespace(name=name, version=version, ready=True)


@pytest.fixture
def three() -> tuple[ModelRegistry, list[Any]]:
    """A registry of the versions 1, 2 and 3 of `m`."""
    registry, handles = ModelRegistry(), [handle("m", v) for v in "123"]
    for h in handles:
        registry.add(h)
    return registry, handles


def asked(registry: ModelRegistry, requests: int) -> Counter[str]:
    """Which versions answer so many requests that name none."""
    return Counter(registry.route("m", None).version for _ in range(requests))


ORDERED = (
    "build",
    "0",
    "1.0-a",
    "1.0-rc1",
    "1.0-rc2",
    "1.0",
    "v1.0",
    "1.0+cu11",
    "1.0+cu12",
    "1.0.1",
    "1.9",
    "v1.10",
    "2",
)


def test_the_newest_version_has_the_highest_numbers() -> None:
    assert sorted(reversed(ORDERED), key=version_order) == list(ORDERED)


@given(st.lists(st.integers(0, 10**20), unique=True))
def test_whole_numbers_keep_their_order(numbers: list[int]) -> None:
    assert sorted(map(str, numbers), key=version_order) == list(map(str, sorted(numbers)))


@given(*[st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,20}", fullmatch=True)] * 2)
def test_any_two_versions_are_in_order(one: str, other: str) -> None:
    assert (one == other) + (version_order(one) < version_order(other)) + (
        version_order(one) > version_order(other)
    ) == 1


@pytest.mark.parametrize("order", [("1", "2", "10"), ("10", "2", "1"), ("2", "10", "1")])
def test_the_newest_ready_version_is_the_default_in_whatever_order_they_came(order: tuple[str, ...]) -> None:
    registry = ModelRegistry()
    versions = {v: handle("m", v) for v in order}
    for each in versions.values():
        registry.add(each)
    assert registry.find("m", None) is registry.route("m", None) is versions["10"]
    versions["10"].ready = False
    assert registry.find("m", None) is registry.route("m", None) is versions["2"]
    assert [registry.share(versions[v])[0] for v in ("1", "2", "10")] == [False, True, False]
    versions["2"].ready = versions["1"].ready = False
    assert registry.find("m", None) is versions["10"]
    versions["10"].ready = versions["2"].ready = True
    assert registry.find("m", None) is versions["10"]
    registry.remove(versions["10"])
    assert registry.find("m", None) is versions["2"]


def test_a_default_that_was_set_stays_while_newer_versions_come_and_it_is_not_ready(three: Any) -> None:
    registry, (one, two, _) = three
    registry.set_default("m", "1")
    registry.add(handle("m", "4"))
    one.ready = False
    assert registry.find("m", None) is one
    registry.remove(one)
    assert registry.find("m", None).version == "4"
    registry.set_default("m", "2")
    registry.unset_default("m")
    assert registry.find("m", None).version == "4"
    assert two.ready


def test_an_unknown_model_names_the_nearest_and_an_unknown_version_lists_versions() -> None:
    registry = ModelRegistry()
    registry.add(handle("digits"))
    with pytest.raises(ModelNotFound, match="did you mean 'digits'"):
        registry.find("digit", None)
    with pytest.raises(ModelNotFound, match="version '7' of model 'digits' is not found; it has 1"):
        registry.find("digits", "7")


def test_the_same_version_twice_is_refused() -> None:
    registry = ModelRegistry()
    registry.add(handle("m"))
    with pytest.raises(ConfigError, match="already loaded"):
        registry.add(handle("m"))


def test_a_replacement_takes_over_all_requests_of_a_version(three: Any) -> None:
    registry, (one, _, _) = three
    registry.set_traffic("m", {"1": 0.5, "2": 0.5})
    again = handle("m", "1")
    registry.replace(one, again)
    assert registry.find("m", "1") is again
    assert {id(registry.route("m", None)) for _ in range(4)} >= {id(again)}
    assert id(one) not in {id(registry.route("m", None)) for _ in range(4)}
    registry.remove(one)  # it is out of sight already
    assert registry.find("m", "1") is again


# ---- traffic


@pytest.mark.parametrize("weights", [(0.9, 0.1, 0.0), (1 / 3, 1 / 3, 1 / 3), (0.5, 0.25, 0.25), (0.0, 0.0, 1.0)])
def test_any_stretch_of_requests_is_shared_out_as_the_weights_say(three: Any, weights: tuple[float, ...]) -> None:
    registry, _ = three
    split = dict(zip("123", weights, strict=True))
    registry.set_traffic("m", split)
    for requests in (7, 100, 100, 1000):
        found = asked(registry, requests)
        assert all(abs(found[v] - w * requests) <= 2 for v, w in split.items()), found
        assert all(found[v] == 0 for v, w in split.items() if w == 0)


def test_a_small_share_is_spread_evenly(three: Any) -> None:
    registry, _ = three
    registry.set_traffic("m", {"1": 0.75, "2": 0.25})
    seen = "".join(registry.route("m", None).version for _ in range(12))
    assert seen == "1121" * 3


def test_a_request_that_names_its_version_is_not_shared_out(three: Any) -> None:
    registry, (_, two, _) = three
    registry.set_traffic("m", {"1": 1.0})
    assert registry.route("m", "2") is two
    other = handle("n")
    registry.add(other)
    assert registry.route("n", None) is other


def test_a_version_without_a_worker_is_passed_over_while_another_has_one(three: Any) -> None:
    registry, (one, two, _) = three
    registry.set_traffic("m", {"1": 0.9, "2": 0.1})
    one.ready = False
    assert asked(registry, 10) == {"2": 10}
    two.ready = False
    assert asked(registry, 10).total() == 10
    one.ready = two.ready = True
    assert 85 <= asked(registry, 100)["1"] <= 95


def test_an_unloaded_version_leaves_its_part_to_the_others(three: Any) -> None:
    registry, (one, two, three_) = three
    registry.set_traffic("m", {"1": 0.5, "2": 0.4, "3": 0.1})
    registry.remove(one)
    assert registry.share(two) == (False, pytest.approx(0.8))
    assert registry.share(three_) == (True, pytest.approx(0.2))
    registry.remove(two)
    registry.remove(three_)
    with pytest.raises(ModelNotFound):
        registry.route("m", None)


def test_removing_the_only_share_sends_all_requests_to_the_default(three: Any) -> None:
    registry, (one, two, three_) = three
    registry.set_traffic("m", {"2": 1.0})
    registry.remove(two)
    assert asked(registry, 5) == {"3": 5}
    assert [registry.share(h) for h in (one, three_)] == [(False, 0.0), (True, 1.0)]


def test_a_new_default_ends_the_split(three: Any) -> None:
    registry, (one, _, three_) = three
    registry.set_traffic("m", {"1": 0.5, "2": 0.5})
    registry.set_default("m", "3")
    assert asked(registry, 5) == {"3": 5}
    assert (registry.share(one), registry.share(three_)) == ((False, 0.0), (True, 1.0))
    with pytest.raises(ModelNotFound, match="version '9'"):
        registry.set_default("m", "9")


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"1": 0.9}, "add up to 0.9, expected 1"),
        ({"1": 0.9, "2": 0.100002}, "add up to 1.000002"),
        ({}, "add up to 0"),
        ({"1": 1.5, "2": -0.5}, "found 1.5 for version '1'"),
        ({"1": float("nan")}, "found nan"),
    ],
)
def test_a_split_that_cannot_be_is_refused_and_changes_nothing(three: Any, weights: Any, words: str) -> None:
    registry, _ = three
    registry.set_traffic("m", {"2": 1.0})
    with pytest.raises(ConfigError, match=words):
        registry.set_traffic("m", weights)
    assert asked(registry, 3) == {"2": 3}


def test_a_part_for_an_absent_version_is_not_found_as_its_default_is(three: Any) -> None:
    registry, _ = three
    for change in (lambda: registry.set_traffic("m", {"1": 0.9, "9": 0.1}), lambda: registry.set_default("m", "9")):
        with pytest.raises(ModelNotFound, match="version '9' of model 'm' is not found; it has 1, 2, 3"):
            change()
    with pytest.raises(ModelNotFound, match=r"version '9{100}' of"):
        registry.find("m", "9" * 10_000)


def test_weights_that_are_rounded_are_one() -> None:
    registry = ModelRegistry()
    registry.add(handle("m"))
    registry.set_traffic("m", {"1": 0.9999995})
    with pytest.raises(ModelNotFound):
        registry.set_traffic("n", {"1": 1.0})
