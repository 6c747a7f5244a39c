"""How long does a request take on an idle server, compared with calling the model in process?

`wrk` uses one connection; the models are an echo and a sleep of 5.2 ms for one item. Peers run one request at a time,
so they wait for no batch; Penstock keeps its defaults. "in process" calls the same function directly, in the same
minute.
"""

import dataclasses

import harness
import models

BODY = b'{"id": 12345, "text": "a small request of 50 bytes"}'
ANSWER = {"id": 12345, "text": "a small request of 50 bytes"}


def main() -> None:
    options = harness.options(__doc__, seconds=1, peers=("mosec", "litserve", "torchserve", "service_streamer"))
    columns = {"p50_ms": "p50 ms", "p99_ms": "p99 ms", "rate": "requests/s"}
    report = harness.Report(__file__, __doc__, options, columns)
    for model in ("echo", "accelerator"):
        function = getattr(models, model)
        also = {"in process": lambda f=function: harness.timed(lambda: f([ANSWER]), options.seconds)}
        workload = harness.Workload(model, BODY, ANSWER)
        alone = dataclasses.replace(workload, max_batch=1, wait_ms=0)
        contenders = {"penstock": ("penstock", workload)} | {peer: (peer, alone) for peer in options.peers}
        with harness.serving(contenders) as servers:
            runs = harness.closed_loops(servers, 1, options, also)
        report.add({"model": model}, runs)
        more = [a["p50_ms"] - b["p50_ms"] for a, b in zip(runs["penstock"], runs["in process"], strict=True)]
        report.target(f"{model}: p50 ms more than in process", more, most=0.6)
    report.save()


if __name__ == "__main__":
    main()
