"""NodeFinder: connects to the node that holds a queue, which Sentinels or the nodes of a cluster name.

All keys of a queue have one hash tag, so a cluster holds them on one node: one plain connection serves a queue, as with
a single server. After each lost connection the node is looked up again.
"""

from collections.abc import Mapping
from typing import Any

from penstock.streamer.redis.address import CLUSTER, SENTINEL, BrokerAddress, Node

LOOKUP_S = 2.0  # for each of the nodes asked


class NodeFinder:
    """`make(**options)` creates a connection of the client library."""

    def __init__(self, address: BrokerAddress, key: str, make: Any, options: Mapping[str, Any]) -> None:
        self._address, self._key = address, key
        self._make = make
        bounds = {"socket_connect_timeout": LOOKUP_S, "socket_timeout": LOOKUP_S}
        self._options = {**options, **bounds}
        if address.kind == SENTINEL:
            user, password = address.login
            self._options |= {"username": user, "password": password, "db": 0}

    async def connect(self, connection: Any) -> None:
        """Connects. Raises errors of the client library and the system."""
        if self._address.kind:
            connection.host, connection.port = await self._find()
        await connection.connect()
        if self._address.kind == SENTINEL:
            await _check_master(connection)
        else:
            # without a password, a broker that wants one refuses large commands with a misleading error
            await connection.send_command("PING", check_health=False)
            await connection.read_response()

    async def _find(self) -> Node:
        """Asks the nodes in turn. Raises ConnectionError if none knows, and at once what a refused password raises."""
        from redis.exceptions import AuthenticationError, ClusterDownError, RedisError

        ask = self._ask_cluster if self._address.kind == CLUSTER else self._ask_sentinel
        last: Exception | None = None
        for node in self._address.nodes:
            try:
                if (found := await ask(node)) is not None:
                    return found
            except AuthenticationError:
                raise
            except (ClusterDownError, RedisError, OSError, TimeoutError) as e:
                last = e
        service = f" '{self._address.service}'" if self._address.service else ""
        raise ConnectionError(f"no node knows the master{service}" + (f" ({last})" if last is not None else ""))

    async def _ask_sentinel(self, node: Node) -> Node | None:
        found = await self._ask(node, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.service)
        return None if found is None else (found[0].decode(), int(found[1]))

    async def _ask_cluster(self, node: Node) -> Node:
        from redis.exceptions import AskError, MovedError

        try:
            await self._ask(node, "EXISTS", self._key)
        except MovedError as e:
            return e.host or node[0], e.port
        except AskError:
            pass  # the slot is leaving this node, which has it until all its keys are gone
        return node

    async def _ask(self, node: Node, *command: str) -> Any:
        connection = self._make(**{**self._options, "host": node[0], "port": node[1]})
        try:
            await connection.connect()
            await connection.send_command(*command, check_health=False)
            return await connection.read_response(disable_decoding=True)
        finally:
            await connection.disconnect()


async def _check_master(connection: Any) -> None:
    """Raises ConnectionError if a Sentinel named a server that is no longer the master."""
    from redis.exceptions import NoPermissionError

    await connection.send_command("ROLE", check_health=False)
    try:
        role = (await connection.read_response(disable_decoding=True))[0]
    except NoPermissionError:
        return  # a write to a replica fails too, only later
    if role != b"master":
        await connection.disconnect()
        raise ConnectionError(f"{connection.host}:{connection.port} is now a {role.decode()}")


def is_moved(error: BaseException) -> bool:
    """Whether the queue is no longer on the node that reported this error, or cannot be changed there for a while: the
    node was demoted, its slots move, or it lacks replicas."""
    import redis.exceptions as theirs

    kinds = (theirs.AskError, theirs.TryAgainError, theirs.ClusterDownError, theirs.ReadOnlyError)
    if not isinstance(error, theirs.ResponseError):
        return False
    text = str(error)
    return (
        isinstance(error, kinds)
        or text.startswith("NOREPLICAS")
        or "-READONLY" in text  # a script of Redis 6.2 reports it behind other words
        or (text.startswith("UNBLOCKED") and "instance state changed" in text)
    )
