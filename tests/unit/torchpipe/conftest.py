from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.errors import DecodeError
from penstock.pipeline.ops import catalog
from penstock.torchpipe import pipe, register_backend


class PipeDouble:
    """Twice the data, and the data as `seen`. "bad" cannot be decoded, "worse" fails, "none" has no result."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for fields in items:
            data = fields["data"]
            if isinstance(data, str):
                if data == "bad":
                    raise DecodeError("found 'bad': no known image format")
                if data == "worse":
                    raise ValueError("worse")
                if data == "none":
                    continue
            fields["result"] = data * 2
            fields["seen"] = data


@pytest.fixture(autouse=True)
def no_ops_of_others() -> Iterator[None]:
    """Removes the ops that a test registers."""
    before = dict(catalog._registered)
    yield
    catalog._registered.clear()
    catalog._registered.update(before)


@pytest.fixture
def make_pipe() -> Iterator[Callable[..., pipe]]:
    """Makes pipes, closed at the end."""
    made: list[pipe] = []

    def make(config: Any) -> pipe:
        made.append(pipe(config))
        return made[-1]

    yield make
    for one in made:
        one.close(1.0)


@pytest.fixture
def double(make_pipe: Callable[..., pipe]) -> pipe:
    """A pipe of two nodes that doubles."""
    register_backend(PipeDouble, "Double")
    return make_pipe({"first": {"backend": "Double", "next": "last"}, "last": {"backend": "Identity"}})
