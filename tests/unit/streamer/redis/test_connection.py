from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.streamer.redis.connection import parse_address


@pytest.mark.parametrize(
    ("broker", "url", "name"),
    [
        ("localhost:6379", "redis://localhost:6379", "localhost:6379"),
        ("cache", "redis://cache", "cache:6379"),
        ("[::1]:7000", "redis://[::1]:7000", "[::1]:7000"),
        ("redis://:secret@host:1/2", "redis://:secret@host:1/2", "host:1/2"),
        ("rediss://user:secret@host", "rediss://user:secret@host", "host:6379"),
        ("unix://user:secret@/run/r.sock?db=2", "unix://user:secret@/run/r.sock?db=2", "unix:///run/r.sock"),
    ],
)
def test_the_name_of_an_address_contains_no_password(broker, url, name):
    address = parse_address(broker)
    assert (address.url, address.name) == (url, name)


@pytest.mark.parametrize(
    ("broker", "why"),
    [
        ("http://host", "'http://' is not one of"),
        ("host:port", "its port is not a number"),
        ("host:99999", "its port is not a number"),
        ("", "names no host"),
        ("redis://:secret@/0", "names no host"),
        ("host/first", "database 'first' is not a number"),
        ("unix://", "names no socket"),
        ("redis://[:secret@host", "malformed"),
    ],
)
def test_a_malformed_address_is_refused_and_the_error_names_the_expected_form(broker, why):
    with pytest.raises(ConfigError, match=why) as caught:
        parse_address(broker)
    assert "redis://[user:password@]host:port/db" in str(caught.value)
    assert "secret" not in str(caught.value)
