"""Latencies as an HDR histogram in text: microseconds from 1 us to an hour, three digits, V2 compressed, base64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from penstock.errors import ConfigError

_LEAST_US: Final = 1
_MOST_US: Final = 3_600_000_000
_DIGITS: Final = 3


def encode(latencies_s: Sequence[float]) -> str:
    """The histogram; "" without the library (the extra `bench`). What is over an hour counts as an hour."""
    try:
        from hdrh.histogram import HdrHistogram
    except ImportError:
        return ""
    histogram = HdrHistogram(_LEAST_US, _MOST_US, _DIGITS)
    us = np.clip(np.rint(np.asarray(latencies_s, float) * 1e6), _LEAST_US, _MOST_US)
    for value, count in zip(*np.unique(us, return_counts=True), strict=True):
        histogram.record_value(int(value), int(count))
    return str(histogram.encode().decode("ascii"))


def decode(text: str) -> list[tuple[float, int]]:
    """(seconds, how many took about so long), rising. Raises ConfigError for what is no histogram, or no library."""
    try:
        from hdrh.histogram import HdrHistogram
    except ImportError:
        raise ConfigError("histograms are read with hdrhistogram; install penstock[bench]") from None
    try:
        histogram = HdrHistogram.decode(text)
    except Exception as exc:  # the library's own, zlib's, base64's and ctypes'
        raise ConfigError(f"no HDR histogram: found {text[:20]!r}..., expected V2 in base64 ({exc})") from None
    found = ((x.value_iterated_to * 1e-6, x.count_at_value_iterated_to) for x in histogram.get_recorded_iterator())
    return [(seconds, int(count)) for seconds, count in found if math.isfinite(seconds)]
