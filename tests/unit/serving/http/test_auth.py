"""Tokens and TLS."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError, Unauthorized
from penstock.serving.http.auth import check_token, make_ssl_context


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
