import pytest

from penstock.errors import ConfigError
from penstock.streamer.redis import connection
from penstock.streamer.redis.connection import SENTINEL, parse_address


@pytest.mark.parametrize(
    ("broker", "url", "name"),
    [
        ("localhost:6379", "redis://localhost:6379", "localhost:6379"),
        ("cache", "redis://cache", "cache:6379"),
        ("[::1]:7000", "redis://[::1]:7000", "[::1]:7000"),
        ("redis://:secret@host:1/2", "redis://:secret@host:1/2", "host:1/2"),
        ("rediss://user:secret@host", "rediss://user:secret@host", "host:6379"),
        ("unix://user:secret@/run/r.sock?db=2", "unix://user:secret@/run/r.sock?db=2", "unix:///run/r.sock"),
        (
            "redis+sentinel://user:secret@a,[::1]:7,c:8/main/2?sentinel_password=secret&ssl_ca_certs=/x",
            "redis://user:secret@a:26379/2?ssl_ca_certs=%2Fx",
            "redis+sentinel://a:26379,[::1]:7,c:8/main/2",
        ),
        ("rediss+cluster://:secret@a:7,b", "rediss://:secret@a:7/", "rediss+cluster://a:7,b:6379"),
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
        ("redis+sentinel://a:1,b:2", "does not name the Sentinels' service"),
        ("redis+sentinel://:secret@a:1,:2/main", "names no host"),
        ("redis+sentinel://a:1,b:port/main", "its port is not a number"),
        ("redis+sentinel://a:1/main/first", "database 'first' is not a number"),
        ("redis+cluster://a:1/3", "a cluster has only database 0"),
        ("redis+cluster://a:1?sentinel_password=secret", "a cluster has no sentinel_username"),
        ("redis+sentinels://a:1/main", "'redis\\+sentinels://' is not one of"),
    ],
)
def test_a_malformed_address_is_refused_and_the_error_names_the_expected_form(broker, why):
    with pytest.raises(ConfigError, match=why) as caught:
        parse_address(broker)
    assert "redis://[user:password@]host:port/db" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_address_of_several_nodes_has_their_places_and_the_logins_of_each_kind():
    address = parse_address("redis+sentinel://:one@a,b:7/main?sentinel_username=watch&sentinel_password=two")
    assert (address.kind, address.service, address.login) == (SENTINEL, "main", ("watch", "two"))
    assert address.nodes == (("a", 26379), ("b", 7))
    assert parse_address("redis+cluster://a,b:7").nodes == (("a", 6379), ("b", 7))
    assert parse_address("host").nodes == ()


async def test_the_node_of_a_queue_is_looked_up_by_the_queue_also_over_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(connection, "NodeFinder", lambda address, key, *_: asked.append(key))
    connection.RedisConnection(parse_address("rediss+cluster://a:7?ssl_keyfile=k.pem"), "{penstock:}:queue")
    assert asked == ["{penstock:}:queue"]
