"""What the dashboard shows of a model's last batches: lanes of its instances, reasons, and the slowest request."""

# All of it comes from the reports that `recorders.py` keeps, when a page asks. A busy model fills its share of them in
# less than the shown time; lanes then begin with the oldest one that is left, and the page says so.

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from penstock.serving.observe.recorders import BatchReport

LANES_S: Final = 10.0
LANES: Final = 400  # batches: more are no longer seen apart, and the page must not cost the server more
SLOW_S: Final = 60.0
_NODE: Final = {
    "pipeline_run_seconds": "run_s",
    "pipeline_wait_seconds": "wait_s",
    "pipeline_queue_items": "queue",
    "pipeline_running_items": "running",
    "pipeline_instances": "instances",
}


def batches(newest: Sequence[BatchReport], now_s: float) -> dict[str, Any]:
    """The views of the batches of one model, the newest first; `now_s` in Unix seconds. Batches of the future, before
    the clock was set back, are left out."""
    last = [b for b in newest if 0.0 <= now_s - b.time_s <= SLOW_S]
    shown = [b for b in last if now_s - b.time_s <= LANES_S][:LANES]
    found: dict[str, Any] = {
        "lanes": [
            (b.instance, round(now_s - b.time_s + b.run_s, 4), round(b.run_s, 6), b.rows, b.reason) for b in shown
        ],
        "lanes_s": min(LANES_S, now_s - shown[-1].time_s + shown[-1].run_s) if len(shown) == LANES else LANES_S,
        "reasons": reasons(last),
        "batches_s": round(now_s - last[-1].time_s, 1) if last else 0.0,
    }
    if last:
        slow = max(last, key=lambda b: b.waited_s + b.seconds)
        before = delayed_by(slow, last)
        found["slow"] = {"ago_s": now_s - slow.time_s, **_unfolded(slow)}
        if before is not None:
            # how long after the arrival of the slow request it ended
            ended_s = before.time_s - (slow.time_s - slow.seconds - slow.waited_s)
            found["slow"]["before"] = {"ended_s": ended_s, **_unfolded(before)}
    return found


def reasons(reports: Sequence[BatchReport]) -> dict[str, dict[int, int]]:
    """The number of batches by reason and by size: 1, 2, up to 4, up to 8 rows ..."""
    counts = Counter((b.reason, 1 << (b.rows - 1).bit_length()) for b in reports)
    found: dict[str, dict[int, int]] = {}
    for (reason, size), count in sorted(counts.items()):
        found.setdefault(reason, {})[size] = count
    return found


def delayed_by(slow: BatchReport, reports: Sequence[BatchReport]) -> BatchReport | None:
    """The batch for which the oldest request of `slow` waited: the last one that ended on the same instance between the
    arrival of the request and the beginning of its run. None if there is none: then `slow.reason` says why it waited.
    """
    arrived_s, began_s = slow.time_s - slow.seconds - slow.waited_s, slow.time_s - slow.run_s
    before = [b for b in reports if b is not slow and b.instance == slow.instance and arrived_s < b.time_s <= began_s]
    return max(before, key=lambda b: b.time_s, default=None)


def nodes(series: Iterable[tuple[str, Mapping[str, str], float]]) -> dict[str, dict[str, float]]:
    """The counters and gauges of the nodes of a pipeline, from the metrics that it reports: (name, labels, value).

    `items` and `failed` count since the start, as `batches` and `rows` do, `run_s` and `wait_s` are sums.
    """
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, labels, value in series:
        node = found[labels.get("node", "")]
        if name == "pipeline_items_total":
            node["items" if labels["outcome"] == "ok" else "failed"] += value
        elif name == "pipeline_batches_total":
            node["batches"] += value
            node["rows"] += value * int(labels["size"])
        elif name in _NODE:
            node[_NODE[name]] += value
    found.pop("", None)
    return found


def _unfolded(report: BatchReport) -> dict[str, Any]:
    """A batch, with the parts of the time of its oldest request in their order."""
    stages_s, hooks_s = report.stages_s or (0.0, report.run_s, 0.0), report.hooks_s or (0.0, 0.0)
    parts = {
        "waited_s": report.waited_s,
        "handover_s": report.seconds - sum(stages_s),
        "decode_s": stages_s[0] - hooks_s[0],
        "preprocess_s": hooks_s[0],
        "predict_s": stages_s[1],
        "postprocess_s": hooks_s[1],
        "encode_s": stages_s[2] - hooks_s[1],
    }
    shown = ("reason", "rows", "requests", "max_batch_size", "instance", "ahead", "outcome")
    return {
        **{name: getattr(report, name) for name in shown},
        **{name: round(max(0.0, seconds), 6) for name, seconds in parts.items()},
    }
