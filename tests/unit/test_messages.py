"""Messages whose first wording did not say what was wrong."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.config.load import load_config
from penstock.config.schema import Config
from penstock.core.worker.predict import aligned
from penstock.errors import BadOutput, PenstockError, install_hint, nearest
from penstock.serving.protocols.bodies import decode_json, encode_json
from penstock.serving.protocols.openai_embeddings import _written

NAN, INF, BOM = float("nan"), float("inf"), b"\xef\xbb\xbf"


class Scores(msgspec.Struct):
    values: Any


@dataclasses.dataclass
class Box:
    area: Any


def configured(text: bytes) -> Callable[[Path], Config]:
    def load(folder: Path) -> Config:
        (folder / "penstock.toml").write_bytes(text)
        return load_config(str(folder / "penstock.toml"), env={})

    return load


PLACES: dict[str, Any] = {
    "$.scores[3]": {"scores": [1.0, 2, None, NAN]},
    "$[0][1]": np.array([[1.0, INF]]),
    "$.values.area": Scores(Box(np.float32("nan"))),
    "$[1]": (None, -INF),
    "$.x.1": {"x": {1: NAN}},
    "$": NAN,
}


@pytest.mark.parametrize(
    ("make", "kind", "told"),
    [
        (lambda: _written([1.0, NAN], None), BadOutput, "returned NaN or infinity at place 1 of an embedding"),
        (lambda: _written([[1.0]], None), BadOutput, "an array of shape [1, 1], expected numbers [length]"),
        (
            lambda: aligned(1, 2, "yielded"),
            BadOutput,
            "predict yielded a int, expected a list, a tuple or an array of 2 results; a generator yields all parts"
            " of a step together, or return list(...)",
        ),
        (lambda: aligned(1, 2), BadOutput, "predict returned a int, expected a list, a tuple or an array of 2 results"),
        *(
            (
                lambda value=value: encode_json(value),
                BadOutput,
                f"the model returned NaN or infinity at {at}, which JSON",
            )
            for at, value in PLACES.items()
        ),
    ],
)
def test_a_message_names_what_is_wrong(make: Callable[[], object], kind: type[PenstockError], told: str) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert told in caught.value.message


def test_byte_order_marks_are_ignored(tmp_path: Path) -> None:
    """RFC 8259 lets a parser ignore one, as json.loads does for bytes; editors on Windows write it into TOML."""
    assert decode_json(BOM + b'{"a": 1}') == decode_json(memoryview(BOM + b'{"a": 1}')) == {"a": 1}
    with pytest.raises(PenstockError, match=r"the body ends at byte 1 inside a value"):
        decode_json(BOM + b"{")
    assert list(configured(BOM + b'[models.m]\ntarget = "app.py:M"\n')(tmp_path).models) == ["m"]


def test_a_known_word_is_not_suggested_in_its_own_place() -> None:
    assert nearest("color", ["color", "colors"]) == ""


def test_a_name_in_another_case_is_the_nearest() -> None:
    assert nearest("model", ["model2", "Model", "modes"]) == "; did you mean 'Model'?"


def test_hints_name_packages_and_not_a_checkout() -> None:
    assert install_hint("redis").startswith("pip install 'redis[hiredis]>=")
    assert install_hint("image").count("'") == 6
    assert install_hint("unknown") == "pip install unknown"
