"""What a page of metrics says of a model, and what two of them say of the time between. Pure.

Known are the families of Penstock, and those of TorchServe where there are no others.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from itertools import pairwise
from typing import Any, Final

from msgspec import Struct, field

from penstock.perf.bench.figures import enough

Buckets = dict[float, float]

_HISTOGRAMS: Final = {
    "penstock_queue_seconds": "queue",
    "penstock_run_seconds": "worker",
    "penstock_preprocess_seconds": "preprocess",
    "penstock_predict_seconds": "predict",
    "penstock_postprocess_seconds": "postprocess",
    "penstock_batch_rows": "rows",
}
_PLAIN: Final = {
    "ts_queue_latency_microseconds": "ts_queue_us",
    "ts_inference_requests_total": "ts_requests",
    "QueueTime": "ts_last_queue_ms",
    "PredictionTime": "ts_last_run_ms",
}
_GAUGES: Final = ("ts_last_queue_ms", "ts_last_run_ms")
_SAMPLE: Final = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{([^}]*)\})?[ ]+([^\s#]+)", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MODEL: Final = ("model", "model_name", "ModelName")
_AT: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Page(Struct, frozen=True):
    """Sums over the versions of a model: `sums` by name ("queue_sum", "queue_count"), buckets by upper bound."""

    sums: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, Buckets] = field(default_factory=dict)


def read_page(text: str, model: str) -> Page:
    """What the page says of `model`, of all models when that is ""; lines that are no samples are passed over."""
    sums: dict[str, float] = defaultdict(float)
    buckets: dict[str, Buckets] = defaultdict(lambda: defaultdict(float))
    for name, given, value in _SAMPLE.findall(text):
        base, _, kind = name.rpartition("_")
        known = _HISTOGRAMS.get(base)
        plain = _PLAIN.get(name)
        if known is None and plain is None:
            continue
        labels = dict(_LABEL.findall(given))
        if model and next((labels[key] for key in _MODEL if key in labels), model) != model:
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if plain is not None:
            sums[plain] = number if plain in _GAUGES else sums[plain] + number
        elif kind == "bucket":
            buckets[str(known)][float(labels.get("le", "inf"))] += number
        else:
            sums[f"{known}_{kind}"] += number
    return Page(dict(sums), {name: dict(found) for name, found in buckets.items()})


def between(before: Page, after: Page) -> dict[str, Any]:
    """The fields of ServerSide that the time between two pages tells. Nothing when the server began anew meanwhile."""
    change = {name: value - before.sums.get(name, 0.0) for name, value in after.sums.items() if name not in _GAUGES}
    if any(value < 0 for value in change.values()):
        return {}
    found: dict[str, Any] = {
        "queue_s": _mean(change, "queue"),
        "preprocess_s": _mean(change, "preprocess"),
        "run_s": _mean(change, "predict"),
        "postprocess_s": _mean(change, "postprocess"),
        "mean_batch": _mean(change, "rows"),
        "queue_at_s": _quantiles(_new(before, after, "queue")),
        "worker_at_s": _quantiles(_new(before, after, "worker")),
        "batches": _by_rows(_new(before, after, "rows")),
    }
    if found["run_s"] is None:  # a model that does not tell its stages
        found["run_s"] = _mean(change, "worker")
    return {
        **_torchserve(change, after.sums),
        **{name: value for name, value in found.items() if value not in (None, {})},
    }


def _torchserve(change: dict[str, float], last: dict[str, float]) -> dict[str, Any]:
    """Waits are counted in one of its modes only; of the handler's time there is never more than that of one batch."""
    found = {}
    if change.get("ts_requests") and "ts_queue_us" in change:
        found["queue_s"] = change["ts_queue_us"] / change["ts_requests"] / 1e6
    elif "ts_last_queue_ms" in last:
        found["queue_s"] = last["ts_last_queue_ms"] / 1e3
    if "ts_last_run_ms" in last:
        found["run_s"] = last["ts_last_run_ms"] / 1e3
    return found


def _mean(change: dict[str, float], name: str) -> float | None:
    total, count = change.get(f"{name}_sum"), change.get(f"{name}_count")
    return total / count if total is not None and count else None


def _new(before: Page, after: Page, name: str) -> Buckets:
    """How many values came into each bucket, by its upper bound, in order."""
    old = before.buckets.get(name, {})
    up_to = sorted((bound, count - old.get(bound, 0.0)) for bound, count in after.buckets.get(name, {}).items())
    return {bound: count - less for (_, less), (bound, count) in pairwise([(0.0, 0.0), *up_to])}


def _quantiles(new: Buckets) -> dict[str, float]:
    """Those that there are values enough for."""
    total = sum(new.values())
    return {name: _quantile(new, share * total) for name, share in _AT.items() if enough(int(total), share)}


def _quantile(new: Buckets, rank: float) -> float:
    """Between the bounds of its bucket, as if the values in it lay evenly; the last bound where there is no next."""
    low = below = 0.0
    for bound, count in new.items():
        if count and below + count >= rank:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / count
        below += count
        low = bound
    return low


def _by_rows(new: Buckets) -> dict[str, int]:
    """Rows -> batches. Those beyond the last bound stand under twice that bound."""
    largest = max((bound for bound in new if not math.isinf(bound)), default=0.0)
    return {f"{2 * largest if math.isinf(bound) else bound:g}": int(count) for bound, count in new.items() if count}
