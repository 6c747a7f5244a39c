"""Tokens and TLS."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError, Unauthorized
from penstock.frontends.http.auth import check_token, load_tokens, make_ssl_context


def test_tokens_are_lines_of_all_files(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("# for the phone\nalpha\n\n  beta  \n")
    two.write_text("gamma")
    assert load_tokens([str(one), None, str(two)]) == {b"alpha", b"beta", b"gamma"}


@pytest.mark.parametrize("content", [None, "", "# nothing\n"])
def test_a_token_file_that_would_open_to_everybody_is_refused(tmp_path, content):
    path = tmp_path / "tokens"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="token file"):
        load_tokens([str(path)])


@pytest.mark.parametrize("given", [None, b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Basic right", b"right"])
def test_anything_but_a_right_bearer_token_is_refused(given):
    with pytest.raises(Unauthorized):
        check_token(frozenset({b"right", b"other"}), given)


def test_right_tokens_pass_and_no_tokens_open_to_all():
    check_token(frozenset({b"right", b"other"}), b"bearer right")
    check_token(frozenset(), None)


def test_tls_needs_files_that_can_be_read(tmp_path):
    assert make_ssl_context(None, None) is None
    with pytest.raises(ConfigError, match=r"need server\.tls_cert"):
        make_ssl_context(None, "key.pem")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        make_ssl_context(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
