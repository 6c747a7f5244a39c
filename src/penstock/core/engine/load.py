"""Whether the callers keep a processor busy: threads of this process that send requests to a model."""

# One thread at a time has the interpreter. While the callers compete for it, a model that starts a batch takes it from
# the threads that are about to send the next requests. So a batch loses nothing by waiting for these, and is fuller.
# A model in another process waits for callers that cannot be faster: fuller batches leave more of the cores to them.
# The share of a processor that the callers use answers two questions: whether they usually leave the interpreter little
# rest, and, while a batch waits, whether they still do. The kernel measures it, so the policy needs no trials.

import math
import time
from collections.abc import Iterable

# choices, measured with a BERT and with a no-op behind Flask on two cores: the callers use 0.8 and 0.9 of a processor
USUAL_SHARE = 0.4
"""Of one processor. Below it, the callers wait for the model."""
WAITING_SHARE = 0.3
"""The same while a batch waits. Less: other programs may need the processor too, or a caller may be in the kernel."""
MEMORY_S = 0.1
"""How far back the usual share looks: some batches."""
LEAST_S = 0.001
"""A shorter time says nothing: the kernel counts when it switches threads."""


class CallersLoad:
    """The share of a processor that all threads of this process use, apart from the model's."""

    def __init__(self) -> None:
        self.busy = self.running = False  # `running`: a batch runs until the next look
        self._usual = 0.0
        self._time_s, self._cpu_s = time.monotonic(), time.process_time()
        self._models: dict[int, float] = {}  # processor time of the model's threads, by clock

    def look(self, clocks: Iterable[int]) -> bool:
        """Whether they are busy, as of now. `clocks`: the processor clocks of the threads that are no callers."""
        now = time.monotonic()
        past_s = now - self._time_s
        if past_s < LEAST_S:
            return self.busy
        cpu_s, models = time.process_time(), dict[int, float]()
        for clock in clocks:
            try:
                models[clock] = time.clock_gettime(clock)
            except OSError:  # its thread has just ended
                pass
        used_s = cpu_s - self._cpu_s - sum([s - self._models.get(clock, s) for clock, s in models.items()])
        self._time_s, self._cpu_s, self._models = now, cpu_s, models
        share = used_s / past_s
        self._usual += (min(share, 1.0) - self._usual) * (1 - math.exp(-past_s / MEMORY_S))
        self.busy = self._usual >= USUAL_SHARE and (share >= WAITING_SHARE or self.running)
        return self.busy
