"""Arrival times of requests: Poisson, constant, gamma, or recorded. Pure except for `read_trace`."""

from __future__ import annotations

import logging
import math
import random
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal

import msgspec
from msgspec import Struct

from penstock.errors import ConfigError, nearest

log = logging.getLogger("penstock.perf")

_EXPECTED: Final = "expected poisson, constant, gamma:CV or trace:FILE"
_CV: Final = (0.01, 100.0)  # outside, arrivals are constant, or a few bursts that no run is long enough for
_MOST: Final = 30_000_000  # arrivals of one run: 1 GB of samples


class Arrival(Struct, frozen=True):
    """An arrival process. `cv` is the coefficient of variation of the times between arrivals (gamma): 1 is Poisson,
    more is burstier. `path` is the file of a trace."""

    kind: Literal["poisson", "constant", "gamma", "trace"]
    cv: float = 1.0
    path: str = ""


class Trace(Struct, frozen=True):
    """Recorded arrivals: sorted seconds from the first, rows of each (1 if unknown), and the names of the models.

    `unsorted` counts the lines that were earlier than the line before."""

    times_s: array[float]
    rows: array[int]
    models: tuple[str, ...] = ()
    unsorted: int = 0


class _Line(Struct):
    t: float
    rows: int = 1
    bytes: int = 0
    model: str = ""


def parse_arrival(text: str) -> Arrival:
    """Parses "poisson", "constant", "gamma:2.5" or "trace:FILE". Raises ConfigError."""
    kind, _, rest = text.partition(":")
    if kind in ("poisson", "constant") and not rest:
        return Arrival("poisson" if kind == "poisson" else "constant")
    if kind == "trace" and rest:
        return Arrival("trace", path=rest)
    if kind == "gamma":
        try:
            cv = float(rest)
        except ValueError:
            cv = math.nan
        if not _CV[0] <= cv <= _CV[1]:
            raise ConfigError(f'arrival "{text}": expected a coefficient of variation, for instance gamma:2.5')
        return Arrival("gamma", cv)
    hint = nearest(kind, ("poisson", "constant", "gamma", "trace"))
    raise ConfigError(f'arrival "{text}" is not known; {_EXPECTED}{hint}')


def times(arrival: Arrival, rate: float, seconds: float, seed: int, trace: Sequence[float] = ()) -> array[float]:
    """Sorted arrival times in seconds at `rate` per second, all below `seconds`; deterministic.

    A trace keeps its own times if `rate` is 0, otherwise it is stretched to the rate. It is whole if `seconds` is 0,
    and does not repeat.
    """
    if arrival.kind == "trace":
        stretches = rate > 0 and len(trace) > 1 and trace[-1] > 0
        stretch = (len(trace) - 1) / trace[-1] / rate if stretches else 1.0
        return array("d", (t * stretch for t in trace if not seconds or t * stretch < seconds))
    if not (0 < rate < math.inf and 0 < seconds < math.inf):
        raise ConfigError(f"arrivals at {rate:g}/s for {seconds:g} s: expected a rate and a time over 0")
    if rate * seconds > _MOST:
        many = f"{rate * seconds:.3g}"
        raise ConfigError(f"arrivals at {rate:g}/s for {seconds:g} s are {many}; expected at most {_MOST:g}")
    if arrival.kind == "constant":
        return array("d", (n / rate for n in range(math.ceil(seconds * rate - 1e-9))))
    draw = random.Random(seed)
    shape = 1.0 if arrival.kind == "poisson" else arrival.cv**-2
    scale = 1 / (rate * shape)
    found: array[float] = array("d")
    now = draw.gammavariate(shape + 1, scale) * draw.random()  # a stationary start: the rate holds from time 0
    while now < seconds:
        found.append(now)
        now += draw.gammavariate(shape, scale)
    return found


def read_trace(path: str, model: str = "") -> Trace:
    """Reads a file of `penstock serve --record`, or JSON lines with `t` in seconds and optional `rows` and `bytes`.

    `model` selects the requests of one model. Other keys and a truncated last line are ignored. Raises ConfigError with
    file and line.
    """
    decode = msgspec.json.Decoder(_Line).decode
    lines: list[_Line] = []
    try:
        with open(path, "rb") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                line = decode(text)
                if not (0 <= line.t < math.inf and 1 <= line.rows < 2**31 and 0 <= line.bytes < 2**63):
                    found = text.strip()[:80]
                    raise ConfigError(f"{path}:{number}: found {found!r}, expected t from 0, rows over 0, bytes from 0")
                lines.append(line)
    except OSError as exc:
        raise ConfigError(f"trace {path} cannot be read: {exc.strerror or exc}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        if text.endswith(b"\n") or not lines:
            raise ConfigError(f'{path}:{number}: {exc}; expected for instance {{"t": 0.25, "rows": 1}}') from None
        log.warning("file=%s line=%d dropped=true reason=truncated", path, number)  # by the end of a server
    models = tuple(sorted({line.model for line in lines if line.model}))
    if model:
        lines = [line for line in lines if line.model == model]
        if not lines:
            raise ConfigError(f"trace {path}: no request for model '{model}'; found {', '.join(models) or 'no names'}")
    if not lines:
        raise ConfigError(f'trace {path} is empty; expected JSON lines such as {{"t": 0.25, "rows": 1}}')
    unsorted = sum(after.t < before.t for before, after in pairwise(lines))
    lines.sort(key=lambda line: line.t)  # several processes may have written it
    first = lines[0].t
    times_s, rows = array("d", (line.t - first for line in lines)), array("q", (line.rows for line in lines))
    return Trace(times_s, rows, models, unsorted)
