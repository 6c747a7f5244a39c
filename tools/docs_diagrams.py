"""Draws the diagrams of the documentation, as SVG in docs/pictures. `make docs` runs it; a test compares the files.

The time lines come from the simulator, and the bars from the table of docs/performance.md. A diagram has no colours of
its own for text and lines: it follows the light or dark scheme of the reader's system.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from penstock.config.schema import BatchingConfig
from penstock.core.engine.rules import policy_of
from penstock.perf.simulate.simulator import OpenLoop, ServiceTime, SimulationSettings, simulated

DOCS = Path(__file__).parents[1] / "docs"

STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.s{font-size:11px;fill:#57606a}.m{text-anchor:middle}"
    ".e{text-anchor:end}.b{fill:#f6f8fa;stroke:#8c959f}.g{fill:none;stroke:#8c959f;stroke-dasharray:4 3}"
    ".l{fill:none;stroke:#57606a;stroke-width:1.3}.a{fill:#57606a}.p{fill:#4051b5}.q{fill:#d97706}.r{fill:#9aa4af}"
    ".w{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9aa4af}.b{fill:#21262d;stroke:#6e7681}"
    ".l{stroke:#9aa4af}.a{fill:#9aa4af}.p{fill:#8c9eff}.q{fill:#f0a94b}.r{fill:#6e7681}.w{fill:#0d1117}}"
)
LINE = 15  # between the lines of a text


class Drawing:
    """An SVG that grows by shapes. Coordinates and sizes are pixels."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """`style`: classes, of which `m` centres the text at `x`, `e` ends it there, and `s` is small."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(text)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, style: str, radius: float = 5) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{style}"/>'
        )

    def box(self, x: float, y: float, width: float, height: float, lines: str, style: str = "b") -> None:
        """A box with centred lines; lines after the first are small."""
        self.rect(x, y, width, height, style)
        rows = lines.split("\n")
        top = y + height / 2 - (len(rows) - 1) * LINE / 2 + 4
        for i, row in enumerate(rows):
            self.text(x + width / 2, top + i * LINE, row, "m s" if i else "m")

    def group(self, x: float, y: float, width: float, height: float, label: str) -> None:
        """A dashed frame around boxes, with a label in its upper left corner."""
        self.rect(x, y, width, height, "g")
        self.text(x + 10, y + 17, label, "s")

    def line(self, *points: tuple[float, float], arrow: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#a)"' if arrow else ""
        self._parts.append(f'<polyline points="{path}" class="l"{end}/>')

    def arrow(self, *points: tuple[float, float], label: str = "") -> None:
        """An arrow with a small label above the middle of its first part."""
        self.line(*points, arrow=True)
        if label:
            (x, y), (to_x, to_y) = points[:2]
            self.text((x + to_x) / 2, (y + to_y) / 2 - 5, label, "m s")

    def dot(self, x: float, y: float, style: str = "a") -> None:
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="2.5" class="{style}"/>')

    def svg(self) -> str:
        marker = '<marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" role="img">'
        parts = [f'{marker}<path d="M0,0L8,4L0,8z" class="a"/></marker>', *self._parts]
        return "\n".join((head, f"<title>{escape(self.title)}</title>", f"<style>{STYLE}</style>", *parts, "</svg>\n"))


# ---- how things are connected


def request() -> Drawing:
    d = Drawing(860, 250, "The path of a request: the server process, shared memory, and a worker process")
    for i in range(3):
        d.box(10, 62 + 42 * i, 90, 32, ("HTTP", "gRPC", "a call")[i])
    d.group(150, 20, 330, 210, "server process")
    d.box(165, 52, 110, 120, "listener\nreads heads,\nchecks limits")
    d.box(320, 52, 145, 120, "scheduler\none queue a model,\ncost of a batch,\ndeadlines")
    d.box(165, 186, 300, 32, "metrics, dashboard, management")
    d.group(600, 20, 250, 210, "worker process, one per instance")
    d.box(615, 52, 220, 38, "decode and stack a batch")
    d.box(615, 106, 220, 38, "predict (CPU or GPU)")
    d.box(615, 160, 220, 38, "encode the results")
    for i in range(3):
        d.arrow((100, 78 + 42 * i), (164, 78 + 42 * i))
    d.arrow((275, 100), (319, 100))
    d.arrow((465, 71), (614, 71), label="a batch")
    d.text(540, 88, "large bodies in", "m s")
    d.text(540, 103, "shared memory", "m s")
    d.arrow((725, 90), (725, 105))
    d.arrow((725, 144), (725, 159))
    d.arrow((614, 179), (540, 179), (540, 150), (466, 150))
    d.text(540, 195, "results", "m s")
    d.arrow((320, 150), (276, 150))
    return d


def processes() -> Drawing:
    d = Drawing(860, 190, "A node in two processes: images go in, and pixels come back in shared memory")
    d.group(10, 15, 430, 160, "process of the pipeline: queues, batches, threads")
    d.box(25, 65, 170, 70, "queue of decode")
    d.box(255, 65, 170, 70, "net\ninstances = 2")
    for i in range(2):
        d.box(640, 25 + 85 * i, 210, 55, f"process {i + 1} of decode")
    d.arrow((110, 65), (110, 45), (639, 45))
    d.arrow((110, 135), (110, 145), (639, 145))
    d.text(540, 39, "encoded images", "m s")
    d.arrow((640, 68), (540, 68), (540, 90), (426, 90))
    d.arrow((640, 122), (540, 122), (540, 108), (426, 108))
    d.text(548, 103, "pixels in shared memory", "s")
    return d


def redis() -> Drawing:
    d = Drawing(860, 230, "Web servers, Redis and workers on several machines")
    for i in range(2):
        d.group(10, 15 + 108 * i, 250, 95, f"web server {i + 1}")
        d.box(25, 42 + 108 * i, 220, 55, "your application\nRedisStreamer.predict(items)")
        d.arrow((245, 62 + 108 * i), (349, 92 + 40 * i), label="requests" if not i else "")
        d.arrow((349, 107 + 40 * i), (246, 80 + 108 * i))
    d.box(350, 62, 160, 108, "Redis\na queue a model,\nresults, heartbeats")
    for i in range(3):
        d.group(610, 8 + 74 * i, 240, 66, f"machine {i + 1}")
        d.box(625, 30 + 74 * i, 210, 36, "penstock worker")
        d.arrow((510, 92 + 24 * i), (624, 42 + 74 * i), label="batches" if not i else "")
        d.arrow((624, 56 + 74 * i), (511, 102 + 24 * i))
    return d


def chart() -> Drawing:
    d = Drawing(860, 260, "What the Helm chart makes: services, server pods, workers, Redis and monitoring")
    d.box(10, 92, 110, 50, "Ingress\nor a Service")
    d.group(165, 15, 300, 230, "Deployment: servers")
    for i in range(2):
        d.box(
            180,
            45 + 96 * i,
            270,
            80,
            "pod: penstock serve\nHTTP 8080, gRPC 8001, metrics 8082\nreadiness, lame duck, limits",
        )
        d.arrow((120, 117), (179, 85 + 96 * i))
    d.box(560, 20, 140, 50, "HPA\nqueue wait, load")
    d.arrow((560, 45), (466, 45))
    d.box(560, 90, 140, 50, "Prometheus\nrules, dashboard")
    d.arrow((560, 115), (451, 115), label="scrapes")
    d.box(560, 175, 140, 50, "Redis\noptional")
    d.arrow((450, 195), (559, 195), label="items")
    d.group(725, 150, 125, 95, "Deployment")
    d.box(735, 175, 105, 50, "penstock\nworker")
    d.arrow((700, 200), (734, 200))
    return d


def scale() -> Drawing:
    d = Drawing(860, 145, "From one process to many machines, in six steps")
    steps = (
        "Instances\nmore processes", "Autoscale\nthey follow the load", "Budgets\nmodels share a device",
        "Shared\none for web servers", "Redis\non other machines", "Clusters\nKubernetes, Ray",
    )  # fmt: skip
    for i, step in enumerate(steps):
        d.box(10 + 142 * i, 80 - 14 * i, 132, 55, f"{i + 1}. {step}")
    return d


def choose() -> Drawing:
    d = Drawing(860, 330, "Which interface: questions from top to bottom, answers on the right")
    questions = (
        ("Videos or images on a disk?", "penstock caption"),
        ("TorchServe, TorchPipe, service_streamer?", "the same files and names: see Migrate"),
        ("Several steps around one or more models?", "a pipeline in TOML"),
        ("Clients over HTTP or gRPC?", "penstock serve"),
        ("Web servers on several machines?", "RedisStreamer, penstock worker"),
        ("Does the model need processes or GPUs?", "Streamer, with shared= for gunicorn"),
    )
    for i, (question, answer) in enumerate(questions):
        y = 10 + 46 * i
        d.box(10, y, 380, 32, question)
        d.box(520, y, 330, 32, answer)
        d.arrow((390, y + 16), (519, y + 16), label="yes")
        d.arrow((200, y + 32), (200, y + 45))
    d.text(210, 10 + 46 * 6 - 3, "no", "s")
    d.box(10, 10 + 46 * 6, 380, 32, "ThreadedStreamer")
    return d


def traces() -> Drawing:
    d = Drawing(860, 190, "The spans of two requests, and the span of the batch in which both ran")
    for i in range(2):
        y = 20 + 85 * i
        _bar(d, 10, y, 420, f"request {i + 1}", "r")
        _bar(d, 10, y + 34, 150 - 60 * i, "queue", "q")
        _bar(d, 160 - 60 * i, y + 34, 270 + 60 * i, "run", "p")
        d.arrow((430, y + 49), (519, 62 + 12 * i), label="" if i else "links")
        d.arrow((520, 50 + 36 * i), (431, y + 15))
    _bar(d, 520, 54, 330, "batch", "p")
    for name, x, width in (("preprocess", 520, 85), ("predict", 605, 160), ("postprocess", 765, 85)):
        _bar(d, x, 88, width, name, "r")
    d.text(520, 40, "a trace of its own", "s")
    return d


# ---- what happens when


def batching() -> Drawing:
    """Twenty requests under both rules, as the simulator of the scheduler serves them."""
    service = ServiceTime(0.010, 0.0005, jitter=0.0, tail=0.0)
    arrivals = [t / 1000 for t in (4, 19, 21, 22, 24, 26, 28, 33, 35, 37, 41, 43, 44, 46, 49, 75, 97, 98, 99, 101)]
    d = Drawing(860, 250, "The same requests with a fixed delay and with the adaptive policy, on a time line")
    left, per_s = 120.0, 5200.0
    rules = (
        ("fixed, 20 ms", BatchingConfig(policy="fixed", max_hold_s=0.020), "q"),
        ("adaptive", BatchingConfig(), "p"),
    )
    for row, (name, config, style) in enumerate(rules):
        y = 40 + 95 * row
        found = simulated(service, policy_of(config), OpenLoop(arrivals), SimulationSettings(max_batch_size=16))
        mean_s = sum(end - start for start, end in found.done) / len(found.done)
        d.text(10, y + 16, name)
        d.text(10, y + 33, f"mean {1000 * mean_s:.0f} ms", "s")
        for t in arrivals:
            d.dot(left + per_s * t, y - 8)
        for start, rows, seconds in found.batches:
            d.rect(left + per_s * start, y, per_s * seconds, 40, style, 3)
            d.text(left + per_s * (start + seconds / 2), y + 25, str(rows), "m w")
        end = max(end for _, end in found.done)
        d.line((left, y + 48), (left + per_s * 0.135, y + 48))
        d.text(left + per_s * end + 6, y + 25, "done", "s")
    for ms in range(0, 131, 10):
        d.text(left + per_s * ms / 1000, 215, str(ms), "m s")
    d.text(
        left, 238, "dots: requests arrive; bars: batches run, with their rows; a batch takes 10 ms + 0.5 ms a row", "s"
    )
    d.text(840, 238, "ms", "e s")
    return d


def overlap() -> Drawing:
    """Four images, of which each needs 30 ms of decoding and 20 ms of a network."""
    d = Drawing(860, 235, "Decoding and a network: one after the other, and as nodes of a pipeline")
    left, per_ms, decode_ms, run_ms, count = 150.0, 3.4, 30, 20, 4
    d.text(10, 47, "a loop")
    for i in range(count):
        x = left + per_ms * i * (decode_ms + run_ms)
        _bar(d, x, 25, per_ms * decode_ms, f"decode {i + 1}", "r")
        _bar(d, x + per_ms * decode_ms, 25, per_ms * run_ms, f"net {i + 1}", "p")
    d.text(10, 98, "a pipeline:")
    for k in range(2):
        d.text(10, 120 + 36 * k, f"decode, instance {k + 1}", "s")
    d.text(10, 192, "network, one instance", "s")
    free = 0.0
    for i in range(count):
        ready = (i // 2 + 1) * decode_ms
        _bar(d, left + per_ms * (ready - decode_ms), 98 + 36 * (i % 2), per_ms * decode_ms, f"decode {i + 1}", "r")
        start = max(free, ready)
        free = start + run_ms
        _bar(d, left + per_ms * start, 170, per_ms * run_ms, f"net {i + 1}", "p")
    d.line((left + per_ms * free, 90), (left + per_ms * free, 215))
    d.text(left + per_ms * free + 6, 212, f"{free:g} ms instead of {count * (decode_ms + run_ms)}", "s")
    return d


def _bar(d: Drawing, x: float, y: float, width: float, text: str, style: str) -> None:
    d.rect(x + 1, y, width - 2, 30, style, 3)
    d.text(x + width / 2, y + 19, text, "m w s")


# ---- figures


def performance() -> Drawing:
    """The ratios of the table `The rows at a glance`."""
    rows = list(ratios((DOCS / "performance.md").read_text()))
    d = Drawing(860, 44 + 17 * len(rows), "Penstock's throughput beside the best peer's, by row")
    left, per_factor, most = 440.0, 110.0, 3.4
    d.text(left + per_factor, 16, "the best peer", "m s")
    for i, (name, ratio) in enumerate(rows):
        y = 28 + 17 * i
        d.text(left - 8, y + 11, name, "e s")
        d.rect(left, y, per_factor * min(ratio, most), 13, "p" if ratio >= 1 else "q", 2)
        d.text(left + per_factor * min(ratio, most) + 5, y + 11, f"{ratio:g}", "s")
    d.line((left + per_factor, 22), (left + per_factor, 34 + 17 * len(rows)))
    return d


def ratios(page: str) -> Iterator[tuple[str, float]]:
    """(row, ratio) of each row of the first table that has a peer. A row with several ratios gives the lowest."""
    table = page.partition("| row | Penstock |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        name, _, peer, ratio, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        if peer and (found := re.findall(r"\d+\.?\d*", ratio)):
            name = re.sub(r"\s*\(20[\d-]+\)|\s*\*", "", name)
            yield name if len(name) <= 64 else f"{name[:62]} ...", min(map(float, found))


DIAGRAMS: Sequence[Callable[[], Drawing]] = (
    request, batching, overlap, processes, scale, traces, redis, chart, choose, performance,
)  # fmt: skip


def main() -> None:
    for make in DIAGRAMS:
        (DOCS / "pictures" / f"{make.__name__}.svg").write_text(make().svg())


if __name__ == "__main__":
    main()
