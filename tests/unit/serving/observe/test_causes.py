from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from penstock.core.contracts import ModelSnapshot
from penstock.serving.observe.causes import CAUSES, WORTH, Reading, ServerReading, findings
from penstock.serving.observe.history import Second
from penstock.serving.observe.verdict import verdict
from penstock.types import ModelStatus

SNAPSHOT = ModelSnapshot(ModelStatus("m", "1", "READY", 1, 1, 8, ("cpu",)))
SERVER = {"cores": 2, "idle": 1.0}
WELL = {
    "requests": 400.0, "answers": 400.0, "up": 2, "busy": 0.8, "working": 0.7, "batches": 100.0, "rows": 4.0,
    "max_batch_size": 8, "in_flight_rows": 8.0, "run_s": 0.007, "decode_s": 0.001, "fixed_s": 0.004, "row_s": 0.001,
    "cpu": 0.6, "runnable": 0.7, "body_bytes": 900.0,
}  # fmt: skip
BUSY = {"busy": 2.0, "working": 1.9, "batches": 300.0}
LOOP = {"loop_busy": 0.98, "loop_cpu": 0.8}

TABLE: dict[str, tuple[dict[str, Any], dict[str, Any], str, float | None]] = {
    # the reading, the server, the change, the gain
    "crashing worker": ({"died": 2}, {}, "log", None),
    "leaking worker": ({"leaking": 1}, {}, "max_memory_bytes", None),
    "out of memory": ({"ceiling": 6}, {}, "max_batch_size = 6", None),
    "broker lag": ({}, {"broker_s": 0.02}, "beside the broker", None),
    "slow clients": ({}, {"unsent_bytes": 5e6}, "proxy", None),
    "big bodies": ({"body_bytes": 1e6, "busy": 2.0, "working": 0.5}, LOOP, "smaller bodies", 2.0),
    "small bodies": ({"busy": 2.0, "working": 0.5}, LOOP, "several items in one request", None),
    "too many threads": (BUSY | {"cpu": 1.8, "runnable": 7.0}, {"runnable": 7.0}, "threads = 1", None),
    "too many instances": (
        {"up": 8, "busy": 8.0, "working": 7.9, "cpu": 1.9, "runnable": 7.8, "in_flight_rows": 64.0, "rows": 8.0},
        {"runnable": 7.8},
        "instances = 2",
        1.0,
    ),
    "padding": ({"padded": 0.75, "busy": 1.2}, {}, "add 4 to batching.sizes", (4 + 16) / (4 + 4)),
    "slow decode": (
        BUSY | {"decode_s": 0.008, "run_s": 0.004, "in_flight_rows": 64.0},
        {"cores": 2, "idle": 0.75},
        "binary",
        2 / 1.25,
    ),
    "slow preprocess": (BUSY | {"preprocess_s": 0.004, "batches": 250.0}, {}, "preprocess_processes = 2", 8 / 3),
    "GPU starved": (BUSY | {"gpu": 0.2}, {}, "preprocess_processes", None),
    "queue bound": ({"refused": 100.0, "max_queue": 8}, {}, "max_queue = 256", 4 / 3),
    "batch limit": (
        BUSY | {"rows": 8.0, "in_flight_rows": 48.0},
        {"idle": 0.0},
        "max_batch_size = 16",
        (16 / 20) / (8 / 12),
    ),
    "too few instances": (BUSY | {"in_flight_rows": 64.0, "rows": 8.0, "fixed_s": 0.0}, {}, "instances = 4", 2.0),
}


def reading(changed: dict[str, Any], server: dict[str, Any]) -> Reading:
    return Reading(**(WELL | changed), server=ServerReading(**(SERVER | server)))


@pytest.mark.parametrize("cause", TABLE)
def test_each_cause_is_named_first_with_its_change_and_gain(cause: str) -> None:
    changed, server, change, gain = TABLE[cause]
    found = findings([reading({}, {}), reading(changed | {"name": "slow"}, server)])
    first = next(f for f in found if f.model == "slow")
    assert (first.cause, found[0].cause) == (cause, cause)
    assert change in first.change
    assert first.gain == (gain if gain is None else pytest.approx(gain))


def test_the_table_has_every_cause_and_a_healthy_server_none() -> None:
    assert [cause.name for cause in CAUSES] == list(TABLE)
    assert findings([reading({}, {}), Reading()]) == []


def _values(kind: Any) -> st.SearchStrategy[Any]:
    numbers = {int: st.integers(0, 10**6), float: st.floats(0, 1e9).map(lambda x: round(x, 6))}
    if kind in numbers:
        return numbers[kind]
    if kind is str:
        return st.sampled_from(["m", "n"])
    return st.none() | numbers[int if "int" in str(kind) else float]


servers = st.fixed_dictionaries({name: _values(kind) for name, kind in get_type_hints(ServerReading).items()}).map(
    lambda given: ServerReading(**given | {"cores": max(1, given["cores"] % 512)})
)
readings = st.fixed_dictionaries(
    {name: _values(kind) for name, kind in get_type_hints(Reading).items() if name != "server"}
).flatmap(lambda given: servers.map(lambda server: Reading(**given, server=server)))


@given(st.lists(readings, max_size=4))
def test_any_reading_gives_whole_sentences_and_finite_gains(found: list[Reading]) -> None:
    for each in findings(found):
        assert each.evidence
        assert each.change
        assert not re.search(r"\bnan\b|\binf\b", each.evidence + each.change)
        assert each.gain is None or (math.isfinite(each.gain) and each.gain > 0)


@given(readings)
def test_a_server_without_busy_instances_or_a_busy_loop_is_not_slow(found: Reading) -> None:
    idle = structs.replace(
        found, busy=0.5 * found.up - 1e-9, died=0, leaking=0, ceiling=None, memory_failed=0.0, refused=0.0,
        server=structs.replace(found.server, loop_busy=0.5, pool=0.5, unsent_bytes=0, broker_s=0.0, runnable=0.0),
    )  # fmt: skip
    assert findings([idle]) == []


@given(readings)
def test_more_of_something_is_proposed_only_where_it_brings_more(found: Reading) -> None:
    for each in findings([found]):
        if each.cause in ("batch limit", "too few instances"):
            assert each.gain is not None
            assert each.gain >= WORTH


def test_the_verdict_is_the_first_cause_unless_something_fails() -> None:
    causes = findings([reading(*TABLE["batch limit"][:2])])
    slow = verdict([SNAPSHOT], {}, causes)
    assert (slow.level, slow.word, slow.model) == ("warning", "batch limit", "m")
    assert "set batching.max_batch_size = 16, for about 1.2 times the requests" in slow.text
    failing = verdict([SNAPSHOT], {("m", "1"): [Second(requests=10, answers=10, failed=5)]}, causes)
    assert (failing.word, failing.causes) == ("errors", causes)
    assert failing.text.endswith(slow.text)


def test_every_cause_has_its_place_and_metric_in_the_documentation() -> None:
    docs = Path(__file__).parents[4] / "docs"
    operate, metrics = (docs / "operate.md").read_text(), (docs / "metrics.md").read_text()
    for cause in CAUSES:
        assert f"| `{cause.name}` |" in operate, cause.name
        assert f"`{cause.metric}`" in operate.replace("\n", " "), cause.metric
        assert f"`{cause.metric}`" in metrics, cause.metric
