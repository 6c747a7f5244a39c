"""Does the throughput of workers on a Ray cluster grow with their number, and what is lost when a node goes?

A local cluster has four nodes with room for one worker each (`ray.cluster_utils.Cluster`). A worker is an actor with
one copy of a model that sleeps 10 ms + 2 ms per item (`models.heavy`, 381 items/s in batches of 16). One program asks
for numbers with a Streamer and keeps four batches per worker in flight. Every answer must be the number that was asked
for. "lost" counts the calls that were not answered at all, that failed, or that got another number. In one row the
workers are processes of the program. In the last row a node and its worker are killed in the middle of the run, and a
new node joins.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import harness
import models
from redis_scale import BATCH, BATCHES_IN_FLIGHT, WARM_S, Load

from penstock import Streamer

WORKERS = 4


class Nodes:
    """The cluster. Its head has no room for workers."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self._nodes = [self._add() for _ in range(WORKERS)]
        ray.init(address=self._cluster.address, configure_logging=False, log_to_driver=False)

    def _add(self) -> Any:
        return self._cluster.add_node(num_cpus=0, resources={"place": 1})

    def replace_one(self) -> None:
        """Kills a node; then a new one joins."""
        self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)
        self._nodes.append(self._add())

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def cluster() -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.close()


def measure(
    count: int, seconds: float, ray: dict[str, Any] | None, halfway: Callable[[], None] | None = None
) -> harness.Sample:
    """A run with `count` workers; `halfway` is called in a thread after half of the time."""
    with Streamer(
        models.heavy, BATCH, worker_num=count, worker_timeout=120, wait_for_worker_ready=True, ray=ray
    ) as made:
        load = Load(made, count * BATCHES_IN_FLIGHT)
        load.run(WARM_S)
        timer = threading.Timer(seconds / 2, halfway or (lambda: None))
        timer.start()
        rate = load.run(seconds)
        load.end()
        timer.join()
        return {"rate": rate, "lost": float(load.lost), "longest_s": load.longest_s}


def main() -> None:
    options = harness.options(__doc__, seconds=4)
    columns = {"rate": "items/s", "lost": "lost", "longest_s": "longest call s"}
    report = harness.Report(__file__, __doc__, options, columns, libraries=["ray"])
    place = {"num_cpus": 0, "resources": {"place": 1}}
    with cluster() as nodes:
        runs = harness.interleave(
            options.rounds,
            {
                "1 worker": lambda: measure(1, options.seconds, place),
                "2 workers": lambda: measure(2, options.seconds, place),
                "4 workers": lambda: measure(4, options.seconds, place),
                "4 worker processes": lambda: measure(4, options.seconds, None),
                "4 workers, one node is killed": lambda: measure(4, options.seconds, place, nodes.replace_one),
            },
        )
    report.add({}, runs, base="4 workers")
    report.target("2 workers: x 1 worker", report.ratios(runs, "2 workers", "1 worker"), least=1.8)
    report.target("4 workers: x 1 worker", report.ratios(runs, "4 workers", "1 worker"), least=3.6)
    lost = [sum(sample["lost"] for sample in runs["4 workers, one node is killed"])]
    report.target("4 workers, one node is killed: lost in all rounds", lost, most=0)
    report.save()


if __name__ == "__main__":
    main()
