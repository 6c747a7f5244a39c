"""What does a second of the dashboard cost: 20 busy models, no viewer, one, ten, and one of a model's page?

CPU time of this process per second of the dashboard, without sending: a percent of a core is 10,000 us.
"""

import time

import harness

from penstock.core.contracts import BatchRecord, ModelSnapshot, ServerSnapshot
from penstock.serving.http.dashboard import Dashboard
from penstock.serving.observe.history import History
from penstock.serving.observe.prometheus import PrometheusObserver
from penstock.serving.observe.recorders import KEPT_BATCHES, BatchRecords
from penstock.serving.protocols.route import Route, Template
from penstock.types import ItemResult, ModelStatus

MODELS = 20
SECONDS = 300  # as long as the charts reach back, one by one
PAGES = {"no viewer": [], "one viewer": [""], "ten viewers": [""] * 10, "a page of one model": ["m1"]}


class Second:
    """A dashboard of busy models, with the viewers of these pages ("": of all models)."""

    def __init__(self, pages: list[str]) -> None:
        stages = {"stages_s": (0.001, 0.016, 0.001)}
        self.models = [
            ModelSnapshot(ModelStatus(f"m{i}", "1", "READY", 2, 2, 64, ("cpu",)), in_flight=64) for i in range(MODELS)
        ]
        self.counts, self.records, self.history = PrometheusObserver(), BatchRecords(), History()
        self.batches = [
            BatchRecord(f"m{i}", "1", 0, 64, 64, "full", False, 0.018, 0.019, [0.001] * 64, 0, **stages)
            for i in range(MODELS)
        ]
        self.dashboard = Dashboard(
            self.history, lambda: ServerSnapshot(self.models), self.counts.totals, self.records.newest, self.counts.work
        )
        for batch in self.batches * KEPT_BATCHES:
            self.records.on_complete(batch)
        for _ in range(SECONDS):
            self.run()
        self.sent = 0
        for page in pages:
            self.dashboard.subscribe(Route(Template("/", ""), page, "1" if page else None), self.sink)

    def sink(self, part: ItemResult) -> None:
        self.sent += len(part.body)

    def run(self) -> float:
        """CPU seconds of the next second, in which each model answers 3,200 requests."""
        for batch in self.batches:
            for _ in range(50):
                self.counts.on_complete(batch)
                self.counts.on_answer(batch.model, "1", [0.02] * 64, 0)
                self.history.on_answer(batch.model, "1", [0.02] * 64, 0)
        self.counts.totals()  # counting is done anyway, and is none of the dashboard's cost
        began_s = time.thread_time()
        self.dashboard.tick()
        return time.thread_time() - began_s


def main() -> None:
    options = harness.options(__doc__, seconds=1)
    report = harness.Report(__file__, __doc__, options, {"cpu_us": "CPU us"})
    seconds = {label: Second(pages) for label, pages in PAGES.items()}
    runs = harness.interleave(
        options.rounds,
        {label: lambda s=s: {"cpu_us": sum(s.run() for _ in range(10)) / 10 * 1e6} for label, s in seconds.items()},
    )
    report.add({"models": MODELS}, runs)
    for label, most in (("one viewer", 10_000), ("ten viewers", 30_000), ("a page of one model", 10_000)):
        report.target(f"{label}: CPU us a second", [s["cpu_us"] for s in runs[label]], most=most)
    report.save()


if __name__ == "__main__":
    main()
