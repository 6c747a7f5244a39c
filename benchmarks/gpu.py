"""How much of a GPU does a server use, beside a bare loop over the same network?

ResNet-50 on images of 150 KB (bytes become floats on the GPU), BERT-base on 32 tokens, and JPEGs that are decoded
first; fp16 and random weights. "loop" copies, computes and copies back, one batch after the other. "overlapped loop"
has pinned memory, a copy stream and late results: what a GPU can do with this network. "on the device" has no copies.
Penstock runs the network as a model file (TorchScript), and over HTTP also as a class that stacks and copies its items
itself, and as one with `arrays = "torch"`.

It takes about 5 minutes on one GPU and needs no network; what is not installed is skipped. `--loadgen` adds MLPerf's
LoadGen, `--only resnet,http` selects networks, and `--dry` is a trial of small networks on the CPU.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
from closed_loop import Sample, python_loops
from harness import Runs
from servers import HERE, Penstock, site_of
from streamer_loadgen import fastest_valid, loadgen

from penstock.core.readings import Gpus
from penstock.serving.protocols.oip_messages import encode_arrays

BATCH = 64
QUEUED = 8  # batches that a loop without copies launches ahead
UNLIMITED = 2**31 - 1
SIZES = (1, 8, BATCH)
LOADS = ((1, 1), (64, 1), (256, 1), (32, 8))  # clients over HTTP, images of each request
LATENCY_S = 0.015  # most that the p99 of LoadGen's Server scenario may be
LOADGEN = "loadgen"
ITEMS, TENSORS = "a class of items", "a class of tensors"  # of Penstock, beside the model file
TABLES = ("resnet", "http", "bert", "jpeg")
# of the overlapped loop, or of the loop of full batches: what Penstock is to reach on one H100 or H200
IN_PROCESS = {8: 0.9, BATCH: 0.95}
OVER_HTTP, OF_BERT, OF_OFFLINE = 0.85, 0.95, 0.85


class Bench:
    """One run of the benchmark: its options, its report, and the folder with the networks."""

    def __init__(self, options: argparse.Namespace, report: harness.Report, folder: Path) -> None:
        self.options, self.report, self.folder = options, report, folder
        self.device: str = options.device
        self._gpus = Gpus()

    def busy(self, run: Callable[[], Sample]) -> Sample:
        """The sample of a run, with the share of its time in which the GPU was busy if a driver says so."""
        index = self.device.partition(":")[2] or "0"
        self._gpus.read()
        sample = run()
        shares = [busy for (number, _), busy, *_ in self._gpus.read() if number == index and self.device != "cpu"]
        return {**sample, "busy": 100 * shares[0]} if shares else sample

    def measure(self, what: str, load: str, contenders: dict[str, Callable[[], Sample]]) -> Runs:
        """Rows of interleaved runs, after a first one of each that does not count."""
        for run in contenders.values():
            run()
        runs = harness.interleave(
            self.options.rounds, {who: functools.partial(self.busy, run) for who, run in contenders.items()}
        )
        self.report.add({"network": what, "load": load}, runs)
        return runs

    def share(self, what: str, runs: Runs, of: str, least: float | None) -> None:
        if least is not None and not self.options.dry:
            self.report.target(f"{what}: part of the {of}", self.report.ratios(runs, "penstock", of), least=least)


# ---- bare loops


def batches(call: Callable[[], object], rows: int, seconds: float) -> Sample:
    """Rows/s and latency of a call with so many rows, repeated by this thread."""
    sample = harness.timed(call, seconds)
    return {**sample, "rate": sample["rate"] * rows}


class Overlapped:
    """Three batches in turn through pinned memory: copied on a stream of its own, fetched when they are needed."""

    def __init__(self, net: Any, rows: Any, device: str) -> None:
        import torch

        self._torch, self._net, self._rows, self._turn = torch, net, rows, 0
        self._copies, self._main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        self._hosts = [torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True) for _ in range(3)]
        self._inputs = [torch.empty_like(host, device=device) for host in self._hosts]
        self._outputs = [torch.empty(len(rows), dtype=torch.int64, pin_memory=True) for _ in range(3)]
        self._ends = [torch.cuda.Event() for _ in range(3)]
        for _ in range(3):
            self._submit()

    def _submit(self) -> None:
        k, self._turn = self._turn, (self._turn + 1) % 3
        self._hosts[k].numpy()[:] = self._rows
        with self._torch.cuda.stream(self._copies):
            self._inputs[k].copy_(self._hosts[k], non_blocking=True)
        self._main.wait_stream(self._copies)
        with self._torch.inference_mode():
            self._outputs[k].copy_(self._net(self._inputs[k]), non_blocking=True)
        self._ends[k].record(self._main)

    def __call__(self) -> None:
        self._ends[self._turn].synchronize()
        self._outputs[self._turn].tolist()
        self._submit()


def loops_of(bench: Bench, size: int) -> dict[str, Callable[[], Sample]]:
    """The bare loops over ResNet-50 in batches of `size`."""
    import torch
    from gpu_models import ResNet

    model = ResNet()
    model.load(bench.device)
    rows, cuda = list(images(size)), bench.device.startswith("cuda")
    found = {"loop": functools.partial(batches, lambda: model.predict(rows), size, bench.options.seconds)}
    there = torch.from_numpy(np.stack(rows)).to(bench.device)

    def on_the_device() -> None:
        with torch.inference_mode():
            for _ in range(QUEUED):
                model.net(there)
            if cuda:
                torch.cuda.synchronize()

    def without_copies() -> Sample:
        return {"rate": batches(on_the_device, QUEUED * size, bench.options.seconds)["rate"]}

    if cuda:
        overlapped = Overlapped(model.net, np.stack(rows), bench.device)
        found["overlapped loop"] = functools.partial(batches, overlapped, size, bench.options.seconds)
    found["on the device"] = without_copies
    return found


def images(count: int) -> Any:
    """Random pixels, uint8 `[count, SIDE, SIDE, 3]`."""
    from gpu_models import SIDE

    return np.random.default_rng(0).integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)


# ---- Penstock


def futures(submit: Callable[[Any], Any], items: list[Any], ahead: int, seconds: float) -> Sample:
    """Items/s of one thread that keeps `ahead` futures waiting, or the latency of a lone call if that is one."""
    if ahead == 1:
        return harness.timed(lambda: submit(items[0]).result(), seconds)
    waiting: deque[Any] = deque()
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        while len(waiting) < ahead:
            waiting.append(submit(items[(done + len(waiting)) % len(items)]))
        while len(waiting) > ahead // 2:
            waiting.popleft().result()
            done += 1
    done += len([future.result() for future in waiting])
    return {"rate": done / (time.perf_counter() - start)}


def callers(predict: Callable[[Any], Any], item: Any, threads: int, seconds: float) -> Sample:
    """Calls/s and latency of threads that make one call after the other."""
    samples: list[list[float]] = [[] for _ in range(threads)]
    start = time.perf_counter()

    def call(latencies: list[float]) -> None:
        last = time.perf_counter()
        while last - start < seconds:
            predict(item)
            now = time.perf_counter()
            latencies.append(now - last)
            last = now

    crew = [threading.Thread(target=call, args=(latencies,)) for latencies in samples]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    every = [latency for latencies in samples for latency in latencies]
    return {"rate": len(every) / (time.perf_counter() - start), **harness.percentiles(every)}


@contextlib.contextmanager
def in_process(bench: Bench, size: int) -> Iterator[Callable[[Any], Any]]:
    """`submit` of the model file in this process, in batches of at most `size`.

    Its queue has no limit: LoadGen's Offline scenario submits everything at once.
    """
    from gpu_models import SIDE

    from penstock import ModelConfig, Portal
    from penstock.config.schema import BatchingConfig, LimitsConfig

    config = ModelConfig(
        target=str(bench.folder / "classes.pt"),
        devices=(bench.device,),
        transport="thread",
        instances=1,
        inputs={"pixels": f"UINT8[-1,{SIDE},{SIDE},3]"},
        batching=BatchingConfig(max_batch_size=size, max_queue=UNLIMITED),
    )
    with Portal(LimitsConfig(max_queue_bytes=2**20 * UNLIMITED)) as portal:
        portal.load("resnet", config)
        yield lambda item: portal.submit("resnet", item)


def resnet(bench: Bench) -> None:
    """ResNet-50 in one process."""
    for size in SIZES:
        with in_process(bench, size) as submit:
            loops = loops_of(bench, size)
            mine = functools.partial(futures, submit, list(images(BATCH)), 4 * size, bench.options.seconds)
            if size == 1:
                mine = functools.partial(futures, submit, list(images(1)), 1, bench.options.seconds)
            runs = bench.measure("ResNet-50, in process", f"batches of {size}", {**loops, "penstock": mine})
        bench.share(f"ResNet-50, batches of {size}", runs, "overlapped loop", IN_PROCESS.get(size))


def served(bench: Bench, target: str, name: str) -> Penstock:
    from gpu_models import SIDE

    keys = [f"models.{name}.devices=['{bench.device}']", f"models.{name}.batching.max_batch_size={BATCH}"]
    keys += [f"models.{name}.instances=1"]
    if target.endswith(".pt"):
        keys.append(f'models.{name}.inputs={{pixels="UINT8[-1,{SIDE},{SIDE},3]"}}')
    return Penstock(f"{name}={target}", keys)


def http(bench: Bench) -> None:
    """ResNet-50 behind `penstock serve`: the model file, and two classes."""
    loops = loops_of(bench, BATCH)
    of = "overlapped loop" if "overlapped loop" in loops else "loop"
    with (
        served(bench, str(bench.folder / "classes.pt"), "file") as file,
        served(bench, f"{HERE / 'gpu_models.py'}:ResNet", "own") as own,
        served(bench, f"{HERE / 'gpu_models.py'}:TensorResNet", "tensors") as tensors,
    ):
        for clients, count in LOADS:
            head, buffers = encode_arrays({"pixels": images(count)}, binary_outputs=True)
            length = {"Inference-Header-Content-Length": len(head)}
            body = b"".join([head, *map(bytes, buffers)])
            load = functools.partial(load_of, bench, clients)
            contenders = {
                of: loops[of],
                "penstock": functools.partial(load, file, "v2/models/file/infer", body, count, length),
                TENSORS: functools.partial(load, tensors, "v2/models/tensors/infer", body, count, length),
            }
            if count == 1:
                contenders[ITEMS] = functools.partial(load, own, "predictions/own", images(1).tobytes(), 1)
            runs = bench.measure("ResNet-50, HTTP", f"{clients} clients, {count} each", contenders)
            bench.share(f"HTTP, {clients} clients, {count} each", runs, of, OVER_HTTP if count > 1 else None)
            if not bench.options.dry:
                of_file = bench.report.ratios(runs, TENSORS, "penstock")
                bench.report.target(f"{TENSORS}, {clients} clients, {count} each: x the file", of_file, least=0.98)


def load_of(
    bench: Bench, clients: int, server: Penstock, path: str, body: bytes, rows: int, headers: Any = None
) -> Sample:
    """A run of `wrk`, or of Penstock's own clients where it is not installed; rows/s."""
    run = harness.wrk if shutil.which("wrk") else python_loops
    url = f"{server.urls['inference']}/{path}"
    with server.awake():
        sample = run(url, body, "application/octet-stream", clients, bench.options.seconds, headers)
    return {**sample, "rate": sample["rate"] * rows}


def bert(bench: Bench) -> None:
    """BERT-base through a streamer."""
    from gpu_models import TOKENS, Bert

    from penstock import ThreadedStreamer

    model, seconds = Bert(bench.device), bench.options.seconds
    sentence = [101, *range(1000, 998 + TOKENS), 102]
    loop = functools.partial(batches, lambda: model.predict([sentence] * BATCH), BATCH, seconds)
    with ThreadedStreamer(model.predict, batch_size=BATCH) as streamer:
        waiting = functools.partial(futures, lambda item: streamer.submit([item]), [sentence], 4 * BATCH, seconds)
        runs = bench.measure("BERT-base, streamer", "futures, 256 ahead", {"loop": loop, "penstock": waiting})
        bench.share("BERT-base, futures", runs, "loop", OF_BERT)
        crowd = functools.partial(callers, streamer.predict, [sentence], 2 * BATCH, seconds)
        bench.measure("BERT-base, streamer", "128 callers", {"loop": loop, "penstock": crowd})


JPEGS = """
[decode]
ops = ["DecodeMat", {{op = "ResizeMat", resize_h = {side}, resize_w = {side}}}, {{op = "CvtColorMat", color = "rgb"}}]
instances = {decoders}
next = "net"

[net]
ops = ["Mat2Tensor", {{op = "TorchScriptTensor", model = "{model}", mean = {mean}, std = {std}, precision = "{kind}"}}]
device = "{device}"
max_batch = 32
"""


def jpeg(bench: Bench) -> None:
    """JPEGs of 500 x 375 through a pipeline, beside threads that decode and take turns on the network."""
    import torch
    from gpu_models import DTYPE, MEAN, SIDE, STD
    from PIL import Image

    from penstock import Pipeline

    written = io.BytesIO()
    Image.fromarray(images(1)[0]).resize((500, 375)).save(written, "JPEG")
    data, seconds = written.getvalue(), bench.options.seconds
    path = bench.folder / "jpeg.toml"
    path.write_text(
        JPEGS.format(
            side=SIDE, decoders=max(2, (os.cpu_count() or 4) - 4), model=bench.folder / "logits.pt", mean=list(MEAN),
            std=list(STD), kind="fp16" if torch.float16 == DTYPE else "fp32", device=bench.device,
        )
    )  # fmt: skip
    net, turn = torch.jit.load(bench.folder / "logits.pt", map_location=bench.device).to(DTYPE).eval(), threading.Lock()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def naive(jpeg: bytes) -> int:
        pixels = np.asarray(Image.open(io.BytesIO(jpeg)).resize((SIDE, SIDE)))
        x = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float().sub_(mean).div_(std)[None]
        with turn, torch.inference_mode():
            return int(net(x.to(bench.device, DTYPE)).argmax())

    with Pipeline.from_toml(path).local() as pipeline:
        for threads in (10, 128):
            loop = functools.partial(callers, naive, data, min(threads, 10), seconds)
            mine = functools.partial(callers, lambda item: pipeline.infer({"data": item}), data, threads, seconds)
            bench.measure("JPEG and ResNet-50, pipeline", f"{threads} threads", {"loop": loop, "penstock": mine})


def mlperf(bench: Bench) -> None:
    """MLPerf's LoadGen over futures of the model file in this process."""
    try:
        site = None if importlib.util.find_spec("mlperf_loadgen") else site_of(LOADGEN)
    except (OSError, subprocess.CalledProcessError):
        bench.report.section("Not measured: LoadGen is not installed (pip install mlcommons-loadgen).")
        return
    loops = loops_of(bench, BATCH)
    [of, loop] = next((name, run) for name, run in loops.items() if name == "overlapped loop" or len(loops) == 2)
    with in_process(bench, BATCH) as submit:
        rows, seconds = list(images(BATCH)), max(bench.options.seconds, 2)
        send = functools.partial(_submit, submit, rows)
        ceiling = loop()["rate"]
        run = functools.partial(loadgen, send, seconds=seconds, site=site, latency_s=LATENCY_S)
        offline = run("Offline", qps=ceiling)
        server = fastest_valid(lambda qps: run("Server", qps=qps), offline["rate"], least=0.5)
        scenarios = {"Offline": offline, f"Server, p99 {LATENCY_S * 1e3:g} ms": server}
        for scenario, sample in scenarios.items():
            runs = {of: [{"rate": ceiling}], "penstock": [sample]}
            bench.report.add({"network": "ResNet-50, LoadGen", "load": scenario}, runs)
    if not bench.options.dry:
        share = [server["rate"] / offline["rate"]]
        bench.report.target("LoadGen, Server: part of Offline", share, least=OF_OFFLINE)


def _submit(submit: Callable[[Any], Any], rows: list[Any], index: int) -> Any:
    return submit(rows[index % len(rows)])


def arguments() -> argparse.Namespace:
    """The arguments of every benchmark, plus `device`, `dry`, `only` and `loadgen`."""
    further = {"device": {"default": "cuda:0"}, "dry": harness.FLAG, "loadgen": harness.FLAG}
    options = harness.options(__doc__, seconds=1, tables=TABLES, **further)
    if options.dry:
        options.device = "cpu"
    return options


def missing(device: str) -> str | None:
    """Why nothing can be measured."""
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as e:
        return f"{e.name} is not installed"
    if device.startswith("cuda") and not torch.cuda.is_available():
        return f"there is no CUDA device here (torch {torch.__version__}); --dry tries small networks on the CPU"
    return None


def main() -> None:
    options = arguments()
    if options.dry:
        os.environ["BENCH_DRY"] = "1"
    if why := missing(options.device):
        raise SystemExit(f"not measured: {why}")
    columns = {"rate": "rows/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms", "busy": "GPU busy, %", "result": "LoadGen"}
    report = harness.Report(__file__, __doc__, options, columns, libraries=("torch", "transformers", "nvidia-ml-py"))
    with tempfile.TemporaryDirectory() as folder:
        from gpu_models import save

        bench = Bench(options, report, Path(folder))
        save(bench.folder, options.device)
        if options.device != "cpu":
            import torch

            report.section(torch.cuda.get_device_name(options.device))
        for table in (globals()[name] for name in options.only):
            try:
                table(bench)
            except ImportError as e:
                report.section(f"Not measured: {table.__doc__} {e.name} is not installed.")
        if options.loadgen:
            mlperf(bench)
    report.save(None if not options.dry and options.only == list(TABLES) else False)


if __name__ == "__main__":
    main()
