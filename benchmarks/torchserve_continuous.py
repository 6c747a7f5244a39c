"""How many parts per second does a handler with `continuousBatching` send under Penstock and under TorchServe 0.12.0?

32 clients in closed loops ask for answers of 8 to 128 parts, one part for each step of the handler; at most 32 requests
are active. The step takes no time, or 4 ms + 0.1 ms x active. "torchserve" logs as it does by default, "torchserve,
unlogged" logs only errors.
"""

import functools
import tempfile
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import harness
import uvloop
from closed_loop import Sample
from text_generation import COLUMNS, LONGEST, SHORTEST, streaming_clients
from torchserve_servers import Archive, Setting, TorchServe, make_archive

CLIENTS = 32
PEER, UNLOGGED = "torchserve", "torchserve, unlogged"
STEPS = {"no time": (0.0, 0.0), "4 ms + 0.1 ms x active": (0.004, 0.0001)}
CONFIG = f"continuousBatching: true\nminWorkers: 1\nmaxWorkers: 1\nbatchSize: {CLIENTS}\nmaxBatchDelay: 1\n"


class Continuous(TorchServe):
    """A server whose handler takes this time for a step."""

    def __init__(self, kind: str, archive: Archive, step: tuple[float, float]) -> None:
        self._step = step
        super().__init__(kind, archive, Setting(CLIENTS, 1, 1))

    def _spawn(self, command: list[str], **environment: str) -> None:
        step_s, row_s = self._step
        super()._spawn(command, **environment, STEP_S=str(step_s), ROW_S=str(row_s))

    def run(self, seconds: float) -> Sample:
        port = urlsplit(self.url).port
        with self.awake():
            return uvloop.run(
                streaming_clients(port, self.workload.model, lambda length, rng: length, CLIENTS, seconds)
            )


def main() -> None:
    options = harness.options(__doc__, seconds=5, peers=(PEER,))
    method = (
        f"Medians of {options.rounds} interleaved rounds of {options.seconds} s, (least..most) behind. {CLIENTS}"
        f" clients, answers of {SHORTEST} to {LONGEST} parts; `first` is the time to the first part."
    )
    report = harness.Report(__file__, __doc__, options, COLUMNS, (), method, "")
    kinds = ["penstock", *((PEER, UNLOGGED) if options.peers else ())]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "model-config.yaml")
        config.write_text(CONFIG)
        store = Path(folder, "store")
        store.mkdir()
        file = make_archive(store, "continuous", "continuous", "--config-file", str(config))
        archive = Archive(file, b"2", b"xx")
        for name, step in STEPS.items():
            with ExitStack() as stack:
                servers = {kind: stack.enter_context(Continuous(kind, archive, step)) for kind in kinds}
                calls = {kind: functools.partial(server.run, options.seconds) for kind, server in servers.items()}
                runs = harness.interleave(options.rounds, calls)
            report.add({"step": name}, runs, "penstock")
            for peer in kinds[1:] if not any(step) else ():  # the time of a step limits the ratio
                what = f"penstock / {peer}, parts/s, step of {name}"
                report.target(what, report.ratios(runs, "penstock", peer, "rate"), least=3.0)
    report.save()


if __name__ == "__main__":
    main()
