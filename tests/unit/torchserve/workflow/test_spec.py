from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.torchserve.protocol.api import ApiError
from penstock.torchserve.workflow import make_workflow


def test_a_models_keys_override_the_common_ones():
    spec = make_workflow(
        "w",
        {
            "models": {
                "max-workers": 4,
                "batch-size": 3,
                "m": {"url": "m.mar", "batch-size": 8},
                "n": {"url": "n.mar"},
            },
            "dag": {"f": ["m"], "m": ["n"]},
        },
    )
    m, n, f = (spec.nodes[name] for name in ("m", "n", "f"))
    assert (m.model, m.url, m.settings.workers, m.settings.batch_size) == ("w__m", "m.mar", 4, 8)
    assert (n.settings.batch_size, n.settings.max_batch_delay, n.settings.retry_attempts) == (3, 50, 1)
    assert (f.url, f.settings.workers, f.settings.batch_size, f.settings.max_batch_delay) == (None, 1, 1, 0)
    assert spec.dag_text == "{f=[m], m=[n]}"
    assert spec.graph.order() == ("f", "m", "n")


def test_a_function_has_the_common_limits_of_time_and_attempts():
    spec = make_workflow("w", {"models": {"timeout-ms": 7, "retry-attempts": 3}, "dag": {"f": None}})
    assert (spec.nodes["f"].settings.timeout_ms, spec.nodes["f"].settings.retry_attempts) == (7, 3)


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        (None, "InvalidWorkflowException", "expected the keys models and dag"),
        ({}, "InvalidWorkflowException", "dag: found nothing"),
        ({"dag": {}}, "InvalidDAGException", "only one start node; found none"),
        ({"dag": {"a": ["c"], "b": ["c"]}}, "InvalidDAGException", "only one start node; found a, b"),
        ({"dag": {"a": ["a"]}}, "InvalidDAGException", "Self loop exception: a"),
        ({"dag": {"a": ["b"], "b": ["c"], "c": ["b"]}}, "InvalidDAGException", "Not a valid DAG: b -> c -> b"),
        ({"dag": {"a": "b"}}, "InvalidWorkflowException", "dag: a: found the string 'b', expected a list"),
        ({"dag": {1: ["b"]}}, "InvalidWorkflowException", "dag: 1"),
        ({"dag": {"a": [1]}}, "InvalidWorkflowException", "found 1, expected names"),
        ({"dag": {"a": ["../b"]}}, "InvalidWorkflowException", "w__../b"),
        ({"dag": {"a": ["b:c"]}}, "InvalidWorkflowException", "w__b:c"),
        ({"models": [], "dag": {"a": []}}, "", ""),
        ({"models": [1], "dag": {"a": []}}, "InvalidWorkflowException", "models: found a list"),
        ({"models": {"batch-size": 0}, "dag": {"a": []}}, "InvalidWorkflowException", "models: "),
        ({"models": {"m": {"url": "m", "timeout-ms": "x"}}, "dag": {}}, "InvalidWorkflowException", "models: m: "),
        ({"models": {"m": {}}, "dag": {"m": []}}, "InvalidWorkflowException", "models: m: found no url"),
        ({"models": {"min-worker": 2}, "dag": {"a": []}}, "InvalidWorkflowException", "min-workers"),
    ],
)
def test_a_wrong_specification_is_refused_with_what_was_found(source: Any, kind: str, words: str):
    if not kind:
        assert make_workflow("w", source).nodes
        return
    with pytest.raises(ApiError) as found:
        make_workflow("w", source)
    assert (found.value.kind, found.value.status) == (kind, 400)
    assert words in found.value.message


scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
names = st.sampled_from(["a", "b", "c", "url", "batch-size", "models"])
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(names | scalars, v, max_size=3))


@given(
    st.fixed_dictionaries({}, optional={"models": values, "dag": st.dictionaries(names, st.lists(names), max_size=4)})
)
def test_any_value_is_a_workflow_or_an_api_error(source: Any):
    try:
        spec = make_workflow("w", source)
    except ApiError:
        return
    order = spec.graph.order()
    assert sorted(order) == sorted(spec.nodes)
    assert all(order.index(a) < order.index(b) for a, after in spec.dag.items() for b in after)


def test_a_deep_chain_is_a_workflow():
    spec = make_workflow("w", {"dag": {f"n{i}": [f"n{i + 1}"] for i in range(2000)}})
    assert len(spec.nodes) == 2001
