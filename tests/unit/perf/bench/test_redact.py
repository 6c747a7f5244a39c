from __future__ import annotations

import pytest

from penstock.perf.bench.redact import redacted, typed


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("http://h:8080/predictions/m?token=t0p&x=1", "http://h:8080/predictions/m?token=***&x=1"),
        ("https://me:p@ss@h/x.mar?X-Amz-Signature=t0p", "https://***@h/x.mar?X-Amz-Signature=***"),
        ('{"apiKey": "t0 \\"p", "n": 1}', '{"apiKey": ***, "n": 1}'),
        ("{hf_token = 't0 p', n = 1}", "{hf_token = ***, n = 1}"),
        ("Authorization: Bearer t0p", "Authorization: ***"),
        ("PASSWORD=t0p;x", "PASSWORD=***;x"),
        ("http://h/a@b?max_tokens=5&token_file=/f&keyboard=1", "http://h/a@b?max_tokens=5&token_file=/f&keyboard=1"),
        ("package.token:Model", "package.token:Model"),
        ("app.py:Model", "app.py:Model"),
    ],
)
def test_what_is_secret_by_its_name_is_hidden_and_the_rest_is_not(text: str, kept: str) -> None:
    assert redacted(text) == kept


def test_the_command_line_is_kept_without_its_secrets() -> None:
    words = ["bench", "app.py:My Model", "--option", "api_key=t0 p, x", "--option=db.password=t0=p", "--set", "a.key="]
    told = "penstock bench 'app.py:My Model' --option 'api_key=***' '--option=db.password=***' --set a.key="
    assert typed([*words, "--token-file", "f"]) == f"{told} --token-file f"


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert typed(["a\udcff", "key=\udcff", "\udcffkey=x"]) == "penstock 'a\\udcff' 'key=***' '\\udcffkey=***'"
