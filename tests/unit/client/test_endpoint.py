from pathlib import Path

import pytest

from penstock.client.endpoint import parse_url, tls_context
from penstock.errors import ConfigError

CERT = str(Path(__file__).parents[2] / "tls" / "cert.pem")


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix", "rebuilt"),
    [
        ("http://gpu1", "gpu1", 80, "", "http://gpu1"),
        ("http://gpu1:8080/", "gpu1", 8080, "", "http://gpu1:8080"),
        ("https://gpu1/penstock/", "gpu1", 443, "/penstock", "https://gpu1/penstock"),
        ("http://[::1]:8080", "::1", 8080, "", "http://[::1]:8080"),
    ],
)
def test_an_address_is_parsed_and_rebuilt(url: str, host: str, port: int, prefix: str, rebuilt: str):
    endpoint = parse_url(url)
    assert (endpoint.host, endpoint.port, endpoint.prefix, endpoint.url) == (host, port, prefix, rebuilt)
    assert (endpoint.tls is not None) == url.startswith("https")


@pytest.mark.parametrize(
    "url",
    ["gpu1:8080", "ftp://gpu1", "http://", "http://gpu1:0x50", "http://gpu1:99999", "http://gpu1/a b", "http://gpu1?a=1",
     "http://gpu1#a", "http://[::1", "", "http://gpu1/\r\nx: y", "http://bücher.example"],
)  # fmt: skip
def test_an_invalid_server_address_is_rejected(url: str):
    with pytest.raises(ConfigError, match="expected http://HOST"):
        parse_url(url)


def test_a_password_in_an_address_is_rejected_and_not_repeated():
    with pytest.raises(ConfigError) as caught:
        parse_url("http://me:secret@gpu1")
    assert "secret" not in caught.value.message


def test_addresses_of_this_machine_are_local():
    local = [
        parse_url(url).local for url in ("http://localhost", "http://127.8.0.1", "http://[::1]", "http://10.0.0.1")
    ]
    assert local == [True, True, True, False]


def test_unreadable_tls_files_are_named():
    assert tls_context(CERT).check_hostname
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        tls_context("/nowhere.pem")
    with pytest.raises(ConfigError, match=r"test_endpoint\.py"):
        tls_context(__file__)
