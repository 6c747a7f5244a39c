from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.torchserve.handlers.answers import answer, refusal, status_of
from penstock.torchserve.ts.context import RequestProcessor

KEYS = st.text() | st.integers() | st.none() | st.booleans() | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
)


@given(VALUES)
def test_json_is_as_python_writes_it(value):
    if not isinstance(value, str):
        assert answer(value, RequestProcessor({}), 0).body == json.dumps(value, indent=2).encode()


@pytest.mark.parametrize("value", [{1: math.nan}, ["\ud800"], {"ü": "\ud83d"}, [[], {}], (1,), math.inf, 2**200])
def test_odd_json_too(value):
    assert answer(value, RequestProcessor({}), 0).body == json.dumps(value, indent=2).encode()


def test_headers_of_any_type_go_out_as_text():
    processor = RequestProcessor({})
    processor.add_response_property("X-Count", 3)  # type: ignore[arg-type]
    processor.add_response_property("Content-Type", "text/csv")
    found = answer("x", processor, 0)
    assert (found.headers, found.content_type) == ([("X-Count", "3")], "text/csv")


@pytest.mark.parametrize(
    ("code", "status"), [(None, 200), (200, 200), (599, 599), (100, 500), (0, 500), ("404", 500), (2**40, 500)]
)
def test_a_status_that_http_cannot_carry_is_500(code, status):
    assert status_of(code, 200) == status


def test_a_refusal_is_the_error_that_clients_know():
    found = refusal(507, 'too "much"')
    assert found.body == b'{\n  "code": 507,\n  "type": "InternalServerException",\n  "message": "too \\"much\\""\n}\n'
    assert (found.status, found.content_type) == (507, "application/json")
