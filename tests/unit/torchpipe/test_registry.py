from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from penstock.torchpipe import Status, is_registered, list_backends, pipe, register_backend


class Adds:
    """A class in TorchPipe's style: one item at a time, with its own number."""

    def init(self, config: dict[str, str]) -> None:
        self.add = int(config["add"])
        self.other = config["any_key_you_want"]

    def forward(self, items: list[dict[str, Any]]) -> None:
        (item,) = items
        item["result"] = item["data"] + self.add
        item["other"] = self.other


@pytest.mark.parametrize("backend", ["Python[adds]", "adds", "S[Identity,Python[adds],Identity]"])
def test_a_registered_class_is_found_by_its_name(make_pipe: Callable[..., pipe], backend: str) -> None:
    assert register_backend(Adds, "adds") is Adds
    adds = make_pipe({"backend": backend, "add": 1, "any_key_you_want": "x"})
    items: list[dict[str, Any]] = [{"data": 2}, {"data": 3}]
    adds(items)
    assert [(item["result"], item["other"]) for item in items] == [(3, "x"), (4, "x")]


def test_it_is_a_decorator_too() -> None:
    @register_backend("first_of_mine")
    class One(Adds):
        pass

    @register_backend
    class SecondOfMine(Adds):
        pass

    assert One.__name__ == "One"
    assert {"first_of_mine", "SecondOfMine", "DecodeMat"} <= set(list_backends("Backend"))
    assert is_registered("decodemat")
    assert not is_registered("none_of_mine")


def test_max_is_how_many_it_takes_at_once(make_pipe: Callable[..., pipe]) -> None:
    seen: list[int] = []

    class Batches:
        def forward(self, items: list[dict[str, Any]]) -> None:
            seen.append(len(items))
            for item in items:
                item["result"] = item["data"]

        def max(self) -> int:
            return 4

    register_backend(Batches, "batches")
    batches = make_pipe({"backend": "batches", "batching_timeout": 50, "max": 4})
    batches([{"data": i} for i in range(16)])
    assert sum(seen) == 16
    assert 1 < max(seen) <= 4


def test_tensors_reach_it_as_tensors_and_leave_it_as_arrays_for_the_next(make_pipe: Callable[..., pipe]) -> None:
    seen: list[Any] = []

    class Scores:
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                seen.append(item["data"])
                item["result"] = torch.softmax(item["data"].float(), -1)

    register_backend(Scores, "scores")
    scores = make_pipe({"a": {"backend": "Identity", "next": "b"}, "b": {"backend": "S[scores,ArgMax]"}})
    item = {"data": torch.tensor([[1, 5, 2]])}
    scores(item)
    assert isinstance(seen[0], torch.Tensor)
    assert int(item["result"]) == 1


def test_an_init_that_returns_false_is_a_configuration_error(make_pipe: Callable[..., pipe]) -> None:
    class Never:
        def init(self, config: dict[str, str]) -> bool:
            return False

        def forward(self, items: list[dict[str, Any]]) -> None: ...

    register_backend(Never, "never")
    with pytest.raises(RuntimeError, match="init returned False"):
        make_pipe({"backend": "never"})


def test_a_target_that_cannot_be_called_is_rejected() -> None:
    with pytest.raises(ConfigError, match="expected a function"):
        register_backend(type("Nothing", (), {}), "nothing")


def test_continue_is_a_synonym_of_run() -> None:
    assert Status.Continue is Status.Run
    assert len(Status) == 6
