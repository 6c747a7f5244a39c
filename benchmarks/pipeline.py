"""What does an image service gain when decoding, preparation and the model are nodes of a pipeline?

`examples/resnet50_pipeline` in three versions: the usual service (TorchPipe's published baseline: a thread per
client, one model behind a lock), the same without the lock, and the published TOML under `penstock serve`. All speak
Thrift; the client is the one of the example and runs on the same cores. `processes`: the same TOML with as
many processes as cores in place of the threads that prepare images. `bare loop` is not a server: it decodes, and runs
the model on prepared tensors, in as many threads as there are cores. It shows what the machine could do.

`--only small,resnet50` selects networks: small (a MobileNetV1 at 128 pixels: mostly decoding), mobilenet (MobileNetV2
at 224), resnet50. `--gpu` puts the model on a GPU.
"""

import argparse
import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import harness
import onnxruntime
import pipeline_servers as servers
from closed_loop import Sample

NETS = ("small", "mobilenet", "resnet50")
CLIENTS = (1, 2, 10, 20, 40)
ALL_AT = {"small": (10, 20), "mobilenet": (10,), "resnet50": (10,)}  # numbers of clients for the other contenders
SLOW = 2  # times as long runs of a net that does few images a second for each of many clients
COLUMNS = {
    "qps": "QPS",
    "tp50_ms": "TP50 ms",
    "tp99_ms": "TP99 ms",
    "cpu_ms_a_request": "CPU ms/request",
    "memory_mb": "MB",
    "client_cpu": "client's CPU %",
    "gpu": "GPU %",
}
Contenders = dict[str, Callable[[], Sample]]


def compare(net: str, options: argparse.Namespace, report: harness.Report) -> None:
    """The tables of one network, and its targets."""
    with contextlib.ExitStack() as stack:
        toml = functools.partial(servers.variant, net, gpu=options.gpu)
        published = stack.enter_context(servers.written(toml()))
        scaled = stack.enter_context(servers.written(toml(scaled=True)))
        naive = stack.enter_context(servers.naive(net, options))
        parallel = stack.enter_context(servers.naive(net, options, "--parallel"))
        pipeline = stack.enter_context(servers.pipeline(published))
        reduced = stack.enter_context(servers.pipeline(scaled))
        apart = stack.enter_context(servers.pipeline(stack.enter_context(servers.written(toml(processes=True)))))
        for clients in options.clients:
            seconds = options.seconds * (SLOW if net == "resnet50" and clients >= 10 and not options.gpu else 1)
            contenders: Contenders = {
                "pipeline": functools.partial(pipeline.run, clients, seconds),
                "naive": functools.partial(naive.run, clients, seconds),
            }
            if clients in ALL_AT[net]:
                contenders["naive, parallel"] = functools.partial(parallel.run, clients, seconds)
                contenders["pipeline, processes"] = functools.partial(apart.run, clients, seconds)
                contenders["pipeline, scaled decode"] = functools.partial(reduced.run, clients, seconds)
                if not options.gpu:
                    contenders["bare loop"] = bare(net, seconds)
            runs = harness.interleave(options.rounds, contenders)
            report.add({"net": net, "clients": clients}, runs, "pipeline")
            wanted(net, clients, runs, report)


def bare(net: str, seconds: float) -> Callable[[], Sample]:
    """The bare loop with its best batch size."""
    cores = len(os.sched_getaffinity(0))
    tried = {batch: servers.bare(net, batch, cores, 1)["qps"] for batch in (1, 4)}
    return functools.partial(servers.bare, net, max(tried, key=lambda batch: tried[batch]), cores, seconds)


def wanted(net: str, clients: int, runs: harness.Runs, report: harness.Report) -> None:
    """Records the pipeline's targets."""
    ratios = functools.partial(report.ratios, runs)
    errors = [sample["errors"] for samples in runs.values() for sample in samples if "errors" in sample]
    report.target(f"{net}, {clients} clients: failed requests", [sum(errors)], most=0)
    if net == "small" and clients in (10, 20):
        where = f"{net}, {clients} clients: pipeline / naive,"
        report.target(f"{where} QPS", ratios("pipeline", "naive"), least=2.9)
        report.target(f"{where} TP99", ratios("pipeline", "naive", "tp99_ms"), most=1 / 2.5)
        report.target(f"{where} CPU a request", ratios("pipeline", "naive", "cpu_ms_a_request"), most=0.5)
    if net == "resnet50" and clients in ALL_AT[net]:
        report.target(f"{net}, {clients} clients: pipeline / bare loop", ratios("pipeline", "bare loop"), least=0.95)


def accuracy(nets: Sequence[str], report: harness.Report) -> None:
    """The effect of a scaled decode, which yields different pixels."""
    from pipeline_accuracy import HEADER, agreement

    title = "What scaled decoding changes, over the client's images (the weights are random, and tell more apart than"
    report.table(f"{title} trained ones)", HEADER, [agreement(net) for net in nets])


def arguments() -> argparse.Namespace:
    """The arguments of every benchmark, plus `only`, `clients`, `gpu`."""
    clients = {"type": lambda text: list(map(int, text.split(","))), "default": list(CLIENTS)}
    options = harness.options(__doc__, seconds=2, tables=NETS, clients=clients, gpu=harness.FLAG)
    if options.gpu and "CUDAExecutionProvider" not in (known := onnxruntime.get_available_providers()):
        raise SystemExit(f"not measured: onnxruntime has only {', '.join(known)} here; onnxruntime-gpu has CUDA")
    return options


def prepare(nets: Sequence[str]) -> None:
    """Creates the files that the example creates at its first start."""
    if not servers.IMAGES.is_dir():
        subprocess.run([sys.executable, str(servers.EXAMPLE / "make_images.py")], check=True)
    if not all((servers.EXAMPLE / f"{net}.onnx").exists() for net in nets):
        subprocess.run([sys.executable, str(servers.EXAMPLE / "export.py")], check=True)


def main() -> None:
    options = arguments()
    prepare(options.only)
    libraries = ("numpy", "onnxruntime", "opencv-python-headless", "simplejpeg", "thriftpy2", "torch")
    method = f"Medians of {options.rounds} interleaved rounds of {options.seconds} s ({SLOW * options.seconds} s of"
    method += " resnet50 with 10 clients or more), (least..most) behind."
    part = "gpu" if options.gpu else ""
    report = harness.Report(__file__, __doc__, options, COLUMNS, libraries, method, part)
    for net in options.only:
        compare(net, options, report)
    accuracy(options.only, report)
    whole = options.only == list(NETS) and options.clients == list(CLIENTS)
    report.save(None if whole else False)


if __name__ == "__main__":
    main()
