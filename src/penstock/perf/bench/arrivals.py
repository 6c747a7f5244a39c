"""When requests come: Poisson, constant, gamma, or as they were recorded. Pure but for `read_trace`."""

from __future__ import annotations

import logging
import math
import random
from array import array
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct

from penstock.errors import ConfigError

log = logging.getLogger("penstock.bench")

_EXPECTED: Final = "expected poisson, constant, gamma:CV or trace:FILE"
_CV: Final = (0.01, 100.0)
_MOST: Final = 30_000_000  # arrivals of one run: 1 GB of samples


class Arrival(Struct, frozen=True):
    """`cv` is the coefficient of variation of the times between two arrivals (gamma): 1 is Poisson, more is burstier.
    `path` is that of a trace."""

    kind: Literal["poisson", "constant", "gamma", "trace"]
    cv: float = 1.0
    path: str = ""


class Trace(Struct, frozen=True):
    """Recorded arrivals, sorted: seconds from the first, rows and bytes of each (1 and 0 where it was not told), and
    the names of the models in it."""

    times_s: array[float]
    rows: array[int]
    bytes: array[int]
    models: tuple[str, ...] = ()


class _Line(Struct):
    t: float
    rows: int = 1
    bytes: int = 0
    model: str = ""


def parse_arrival(text: str) -> Arrival:
    """What "poisson", "constant", "gamma:2.5" or "trace:FILE" says. Raises ConfigError."""
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
    raise ConfigError(f'arrival "{text}" is not known; {_EXPECTED}')


def times(arrival: Arrival, rate: float, seconds: float, seed: int, trace: Sequence[float] = ()) -> array[float]:
    """Seconds of the arrivals at `rate` a second, sorted, each below `seconds`. The same arguments, the same times.

    A trace comes at its own rate when `rate` is 0, else stretched to it; whole when `seconds` is 0. It does not begin
    again: past its end nothing comes.
    """
    if arrival.kind == "trace":
        return _replayed(trace, rate, seconds)
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
    now = draw.gammavariate(shape + 1, scale) * draw.random()  # as if it had gone on for long: the rate holds from 0 on
    while now < seconds:
        found.append(now)
        now += draw.gammavariate(shape, scale)
    return found


def _replayed(trace: Sequence[float], rate: float, seconds: float) -> array[float]:
    stretch = 1.0
    if rate > 0 and len(trace) > 1 and trace[-1] > 0:
        stretch = (len(trace) - 1) / trace[-1] / rate
    return array("d", (t * stretch for t in trace if not seconds or t * stretch < seconds))


def read_trace(path: str, model: str = "") -> Trace:
    """What `penstock serve --record` wrote, or any JSON lines with `t` in seconds, and `rows` and `bytes` where known.

    With `model` what came for it alone. Other keys are passed over, and so is a last line that was cut short. Raises
    ConfigError with file and line.
    """
    decode = msgspec.json.Decoder(_Line).decode
    lines: list[_Line] = []
    try:
        with open(path, "rb") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                line = decode(text)
                if not (math.isfinite(line.t) and 1 <= line.rows < 2**31 and 0 <= line.bytes < 2**63):
                    raise ConfigError(
                        f"{path}:{number}: found {text.strip()[:80]!r}, expected rows over 0, bytes from 0"
                    )
                lines.append(line)
    except OSError as exc:
        raise ConfigError(f"trace {path} cannot be read: {exc.strerror or exc}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        if text.endswith(b"\n") or not lines:
            raise ConfigError(f'{path}:{number}: {exc}; expected for instance {{"t": 0.25, "rows": 1}}') from None
        log.warning("file=%s line=%d dropped=true reason=it was cut short", path, number)  # as by a server's end
    models = tuple(sorted({line.model for line in lines if line.model}))
    if model:
        lines = [line for line in lines if line.model == model]
        if not lines:
            raise ConfigError(f"trace {path}: no request for model '{model}'; found {', '.join(models) or 'no names'}")
    if not lines:
        raise ConfigError(f'trace {path} is empty; expected JSON lines such as {{"t": 0.25, "rows": 1}}')
    lines.sort(key=lambda line: line.t)  # several processes may have written it
    first = lines[0].t
    return Trace(
        array("d", (line.t - first for line in lines)),
        array("q", (line.rows for line in lines)),
        array("q", (line.bytes for line in lines)),
        models,
    )
