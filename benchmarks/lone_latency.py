"""How long does one request take when nothing else is under way, beside calling the model in process?

One connection of `wrk`; an echo, and a model that sleeps 5.2 ms for one item. Peers wait 1 ms for a batch to fill. "in
process" calls the same function directly, in the same minute.
"""

from __future__ import annotations

import harness
import models

BODY = b'{"id": 12345, "text": "a small request of 50 bytes"}'
ANSWER = {"id": 12345, "text": "a small request of 50 bytes"}


def main() -> None:
    options = harness.options(__doc__, seconds=1)
    columns = {"p50_ms": "p50 ms", "p99_ms": "p99 ms", "rate": "requests/s"}
    report = harness.Report(__file__, __doc__, options, columns)
    for model in ("echo", "accelerator"):
        function = getattr(models, model)
        also = {"in process": lambda f=function: harness.timed(lambda: f([ANSWER]), options.seconds)}
        with harness.serving(harness.same(harness.Workload(model, BODY, ANSWER), options.peers)) as servers:
            runs = harness.closed_loops(servers, 1, options, also)
        report.add({"model": model}, runs)
        more = [a["p50_ms"] - b["p50_ms"] for a, b in zip(runs["penstock"], runs["in process"], strict=True)]
        report.target(f"{model}: p50 ms more than in process", more, most=0.6)
    report.save()


if __name__ == "__main__":
    main()
