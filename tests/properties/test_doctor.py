"""The gains that the doctor predicts, beside the scheduler on a virtual clock."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.config.schema import BatchingConfig
from penstock.core.engine.rules import policy_of
from penstock.perf.simulate.simulator import ServiceTime, SimulationResult
from penstock.serving.observe.causes import Reading, ServerReading, findings
from support.simulator import ClosedLoop, SimulationSettings, simulate

CHANGED = {"batch limit": (1, 2), "too few instances": (2, 1)}  # times as many instances, and rows of a batch


def ran(service: ServiceTime, clients: int, instances: int, limit: int) -> SimulationResult:
    policy = policy_of(BatchingConfig(max_batch_size=limit))
    load = ClosedLoop(clients, horizon_s=150 * service.t(limit))
    keys = SimulationSettings(slots=instances, depth=2, max_batch_size=limit, handover_s=0.0002)
    return simulate(service, policy, load, keys)


@settings(max_examples=15)
@given(
    st.floats(0.0, 0.05), st.floats(0.003, 0.01), st.integers(1, 3), st.integers(1, 4), st.integers(4, 10)
)  # fmt: skip
def test_a_predicted_gain_is_what_the_scheduler_brings(
    fixed_s: float, row_s: float, instances: int, power: int, fold: int
) -> None:
    service, limit = ServiceTime(fixed_s, row_s, jitter=0.02), 2**power
    clients = fold * instances * limit
    now = ran(service, clients, instances, limit)
    reading = Reading(
        requests=now.throughput, answers=now.throughput, up=instances, busy=now.busy * instances, working=now.busy,
        batches=now.throughput / now.mean_batch, rows=now.mean_batch, max_batch_size=limit, in_flight_rows=clients,
        run_s=now.run_s, fixed_s=fixed_s, row_s=row_s, server=ServerReading(cores=64, idle=60.0),
    )  # fmt: skip
    found = [each for each in findings([reading]) if each.cause in CHANGED]
    assume(found)
    for each in found:
        more, larger = CHANGED[each.cause]
        then = ran(service, clients, more * instances, larger * limit)
        assert each.gain is not None
        assert abs(each.gain / (then.throughput / now.throughput) - 1) < 0.2, each
