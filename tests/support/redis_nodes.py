"""Real Redis servers that are more than one: a master with a replica and three Sentinels, and a cluster."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SERVICE = "main"
DOWN_MS = 500
PATIENCE_S = 30.0
_CONFIG = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor {service} 127.0.0.1 {master} 2
sentinel down-after-milliseconds {service} {down_ms}
sentinel failover-timeout {service} 3000
"""


def wait_for(true: Callable[[], Any], what: str) -> None:
    """Returns when `true()`. Errors of the servers' client count as false."""
    from redis.exceptions import RedisError

    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            if true():
                return
        except RedisError:
            pass
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.02)


class SentinelSetup:
    """A master, its replica, and three Sentinels that know each other. `run_redis` starts and ends the servers."""

    def __init__(self, run_redis: Callable[..., Any], folder: Path, *options: str) -> None:
        own = ["--repl-diskless-sync-delay", "0", *options]
        self.master = run_redis("--dbfilename", "master.rdb", *own)
        self.replica = run_redis("--dbfilename", "replica.rdb", "--replicaof", f"127.0.0.1 {self.master.port}", *own)
        self.sentinels = []
        for number in range(3):
            place = folder / f"sentinel-{number}"
            place.mkdir()
            self.sentinels.append(run_redis("--sentinel", config=self._config(place)))
        wait_for(lambda: all(self._complete(each.ask) for each in self.sentinels), "the Sentinels find each other")

    def _config(self, folder: Path) -> Callable[[int], Path]:
        """Writes the file of a Sentinel, which it changes itself, once its port is known."""

        def write(port: int) -> Path:
            values = {"port": port, "folder": folder, "service": SERVICE, "master": self.master.port}
            (folder / "sentinel.conf").write_text(_CONFIG.format(**values, down_ms=DOWN_MS))
            return folder / "sentinel.conf"

        return write

    @staticmethod
    def _complete(ask: Any) -> bool:
        state = ask.sentinel_master(SERVICE)
        replicas = ask.sentinel_slaves(SERVICE)
        online = [each for each in replicas if each["flags"] == "slave" and each["master-link-status"] == "ok"]
        return int(state["num-other-sentinels"]) == 2 and len(online) == 1

    @property
    def address(self) -> str:
        """Begins with a node at which nothing listens."""
        nodes = ",".join(["127.0.0.1:1", *(each.address for each in self.sentinels)])
        return f"redis+sentinel://{nodes}/{SERVICE}"

    def promoted(self) -> None:
        """Waits until the replica is the master."""
        wait_for(lambda: self.replica.ask.role()[0] == "master", "the replica becomes the master")


class Cluster:
    """Three masters with all slots, each with a replica if `replicas`. `run_redis` starts and ends the servers."""

    def __init__(self, run_redis: Callable[..., Any], *, replicas: bool = False) -> None:
        count = 6 if replicas else 3
        self.nodes = []
        for number in range(count):
            names = ["--cluster-config-file", f"nodes-{number}.conf", "--dbfilename", f"{number}.rdb"]
            times = ["--cluster-node-timeout", "1000", "--repl-diskless-sync-delay", "0"]
            self.nodes.append(run_redis("--cluster-enabled", "yes", *names, *times))
        addresses = [node.address for node in self.nodes]
        create = ["redis-cli", "--cluster", "create", *addresses, "--cluster-replicas", str(count // 3 - 1)]
        done = subprocess.run([*create, "--cluster-yes"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_for(lambda: all(self._complete(node.ask, count) for node in self.nodes), "all nodes know the cluster")

    @staticmethod
    def _complete(ask: Any, count: int) -> bool:
        state = ask.execute_command("CLUSTER INFO")
        roles = ask.role()
        linked = roles[0] == "master" or roles[3] == "connected"
        return state["cluster_state"] == "ok" and int(state["cluster_known_nodes"]) == count and linked

    @property
    def address(self) -> str:
        return "redis+cluster://" + ",".join(node.address for node in self.nodes)

    def owner(self, key: str) -> Any:
        """The master that holds the slot of a key."""
        from redis.exceptions import MovedError

        for node in self.nodes:
            try:
                node.ask.exists(key)
            except MovedError as e:
                return next(each for each in self.nodes if each.port == e.port)
            if node.ask.role()[0] == "master":
                return node
        raise AssertionError("no node holds the slot")
