"""The connection of this process to a Ray cluster, the resources of an instance and of the cluster, and `Place`."""

import os
import sys
import threading
from importlib.metadata import PackageNotFoundError, version

from msgspec import Struct

from penstock.config.schema import RayConfig
from penstock.errors import ConfigError, LoadFailed, describe, install_hint

LEAST, BELOW = (2, 60), (3, 0)  # the versions of Ray that are supported

_connecting = threading.Lock()
_forked = False  # from a process that had a connection: Ray's threads are missing


def _after_fork() -> None:
    global _forked, _connecting
    import ray

    _forked, _connecting = ray.is_initialized(), threading.Lock()


def check_ray() -> None:
    """Raises ConfigError if Ray is not installed, or in a version that is not supported. Does not import it: that takes
    seconds."""
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise ConfigError(f"transport = 'ray' and penstock.ray need the package ray: {install_hint('ray')}") from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if not LEAST <= numbers < BELOW:
        least, below = (".".join(map(str, numbers)) for numbers in (LEAST, BELOW))
        raise ConfigError(f"ray: found version {found}, expected {least} or newer below {below}: {install_hint('ray')}")


def connect(address: str) -> None:
    """Connects this process to a running cluster, unless it is connected. Without an address it is that of RAY_ADDRESS,
    else one that runs on this machine.

    Blocks for seconds. The connection ends with the process. Raises ConfigError, LoadFailed.
    """
    if address.startswith("ray://"):
        raise ConfigError(
            f"ray.address: found {address}, which is for Ray's client: run on a node of the cluster, and give the"
            " address of its head, such as 10.0.0.1:6379"
        )
    import ray

    with _connecting:
        if _forked:
            raise LoadFailed("this process was forked from one that is connected to Ray: start it with spawn instead")
        if ray.is_initialized():
            return
        try:
            ray.init(address=address or "auto", configure_logging=False)
        except Exception as e:  # ConnectionError, RuntimeError for another version, and Ray's own
            where = f"at {address}" if address else "that RAY_ADDRESS or this machine names"
            raise LoadFailed(
                f"the Ray cluster {where} cannot be used ({describe(e)}): check that it runs, with the same versions of"
                " Ray and Python; 'ray start --head' starts one",
                detail=repr(e),
            ) from e
    os.register_at_fork(after_in_child=_after_fork)


def wanted(config: RayConfig, device: str) -> dict[str, float]:
    """The resources of one instance, by Ray's names."""
    gpus = config.num_gpus if config.num_gpus is not None else float(device.startswith("cuda"))
    return {"CPU": config.num_cpus, "GPU": gpus, **config.resources}


def no_room(want: dict[str, float], timeout_s: float) -> str:
    """Why the cluster has not placed an instance. Blocks; raises errors of Ray."""
    import ray

    asked = {name: amount for name, amount in want.items() if amount}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = any(all(node.get(name, 0) >= amount for name, amount in asked.items()) for node in nodes)
    free = ray.available_resources()
    has = ", ".join(
        f"{name} {sum(node.get(name, 0) for node in nodes):g} ({free.get(name, 0):g} free)" for name in asked
    )
    needs = ", ".join(f"{name} {amount:g}" for name, amount in asked.items())
    why = "other work takes it" if fits else "no node has as much"
    return (
        f"the Ray cluster placed no instance with {needs} within ray.placement_timeout_s={timeout_s:g}, because {why}:"
        f" its {len(nodes)} nodes have {has}; add a node, or ask for less in [models.NAME.ray]"
    )


class Place(Struct, frozen=True):
    """Where a process looks for the files and modules that a target names."""

    folder: str
    paths: list[str]


def here() -> Place:
    folder = os.getcwd()
    return Place(folder, [path or folder for path in sys.path])


def enter(place: Place) -> None:
    """Makes this process look there too. A node without the folder keeps its own, such as a `working_dir` of Ray's."""
    if os.path.isdir(place.folder):
        os.chdir(place.folder)
    sys.path += [path for path in place.paths if path not in sys.path]
