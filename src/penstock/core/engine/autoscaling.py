"""LoadScaler: lets the instances of a model version follow its load. The asyncio shell of an Autoscaler."""

import asyncio
import logging
import time
from datetime import datetime
from zoneinfo import ZoneInfo

from penstock.config.checks import day_times
from penstock.config.schema import AutoscaleConfig, BatchingConfig
from penstock.core.batching.autoscale import AutoscaleLimits, Autoscaler, LoadReading
from penstock.core.engine.batcher import Batcher
from penstock.core.engine.instances import Instances

log = logging.getLogger("penstock.engine")

SLO_S = 1.0  # without one in the configuration
DRAIN_S = 600.0  # an instance that leaves answers its batches; `run_timeout_s` ends them earlier
LOOK_S = 3600.0  # at the schedule at least: clocks are set, and summer time begins
RETRY_S = 1.0  # after a start that the system refused, such as one without memory for a process


def limits_of(config: AutoscaleConfig, batching: BatchingConfig) -> AutoscaleLimits:
    """The limits of a section `[models.NAME.autoscale]` with `max`."""
    assert config.max is not None
    slo_s = None if config.target_wait_s is not None else config.slo_s or batching.slo_s or SLO_S
    return AutoscaleLimits(
        fewest=config.min,
        most=config.max,
        quiet_s=config.idle_s,
        slo_s=slo_s,
        wait_s=config.target_wait_s or SLO_S,
        zero=config.scale_to_zero,
        spare=config.spare,
        headroom=config.headroom,
        schedule=day_times(config),
    )


def day_s(timezone: str | None) -> float:
    """Seconds since midnight in a zone, by default the local one."""
    now = datetime.now(None if timezone is None else ZoneInfo(timezone))
    return now.hour * 3600.0 + now.minute * 60.0 + now.second + now.microsecond / 1e6


class LoadScaler:
    """Reads the load after a turn, at most every `tick_s` seconds, and changes the number of instances.

    Its timer runs only while there is work or an instance that may leave, and for the times of the schedule.
    """

    def __init__(self, config: AutoscaleConfig, instances: Instances) -> None:
        self._config = config
        self.autoscaler = Autoscaler(limits_of(config, BatchingConfig()))
        self._instances = instances
        self._batcher: Batcher | None = None
        self._full_rows = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ticking = False  # the timer is for the next tick, not for the schedule
        self._retry_at_s = 0.0
        instances.on_started = self.autoscaler.started

    def watch(self, batcher: Batcher, batching: BatchingConfig, full_rows: int) -> None:
        """Begins to follow the load of `batcher`. `full_rows` run together on an instance."""
        self._batcher, self._full_rows = batcher, full_rows
        self.autoscaler.limits = limits_of(self._config, batching)
        batcher.on_turn = self._after_turn
        batcher.wake()

    def close(self) -> None:
        """Leaves the number of instances as it is."""
        if self._timer is not None:
            self._timer.cancel()
        self._instances.on_started = lambda seconds: None
        if self._batcher is not None:
            self._batcher.on_turn = None

    def explain(self) -> dict[str, object]:
        """The statistics of the decision: its limits, the need of the last reading, and the learned time of a start."""
        limits = self.autoscaler.limits
        return {
            "min": self.autoscaler.floor,
            "max": limits.most,
            "need": self.autoscaler.need,
            "start_s": self.autoscaler.start_s,
        }

    def _after_turn(self, now: float) -> None:
        if not self._ticking:
            self._look(now)

    def _look(self, now: float) -> None:
        batcher, instances, limits = self._batcher, self._instances, self.autoscaler.limits
        assert batcher is not None
        today_s = day_s(self._config.timezone) if limits.schedule else 0.0
        number = self.autoscaler.decide(self._reading(batcher), now, today_s)
        if number != instances.count and now >= self._retry_at_s:
            log.info("autoscaled %s instances=%d before=%d", instances.label, number, instances.count)
            try:
                instances.follow(number, DRAIN_S)
            except Exception as e:  # the others serve on
                self._retry_at_s = now + RETRY_S
                log.warning("not_started %s error=%s: trying again in %g s", instances.label, e, RETRY_S)
        if self._timer is not None:
            self._timer.cancel()
        self._ticking = batcher.pending > 0 or instances.count > self.autoscaler.floor
        wait_s = limits.tick_s
        if not self._ticking:
            wait_s = max(wait_s, min(LOOK_S, limits.next_s(today_s, self.autoscaler.start_s)))
        if self._ticking or limits.schedule:
            self._timer = asyncio.get_running_loop().call_later(wait_s, lambda: self._look(time.monotonic()))

    def _reading(self, batcher: Batcher) -> LoadReading:
        scheduler, rows = batcher.scheduler, self._full_rows
        return LoadReading(
            scheduler.arrived_rows,
            scheduler.queued_rows,
            scheduler.running_rows,
            self._instances.count,
            scheduler.up,
            rows,
            0.0 if scheduler.concurrent else scheduler.seconds(rows),
            scheduler.concurrent,
        )
