from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from penstock.client.endpoint import Endpoint
from penstock.config.schema import ModelConfig
from penstock.errors import ConfigError, LoadFailed, PenstockError
from penstock.perf.bench.measurement import Load, Measurement, parse_slo
from penstock.perf.bench.run import TargetFailing
from penstock.perf.bench.target import Target
from penstock.perf.bench.workload import Payload
from penstock.perf.tune import app as module
from penstock.perf.tune.accuracy import AccuracySample
from penstock.perf.tune.app import MOST_INVALID, WARM_S, AppUnderTest
from penstock.perf.tune.config_file import TunedModel
from penstock.perf.tune.profiler import InstanceProfile, ProfileRequest, RequestBody, SampleResponse
from penstock.perf.tune.space import CandidateSettings, parse_settings, parse_space

SPACE = "batch=1..8,instances=1,2,precision=fp32,bf16"
CLOSED = CandidateSettings((("closed", 1),))  # stands for close()


class World:
    """Replaces the server, the profiler and the load generator, and records the calls."""

    def __init__(self) -> None:
        self.used: list[CandidateSettings] = []
        self.requests: list[ProfileRequest] = []
        self.profiles: dict[str | None, InstanceProfile | LoadFailed] = {}
        self.runs: list[dict[str, Any]] = []
        self.loads: list[Load] = []
        self.run: Measurement | Exception | None = None
        self.target = Target(text="app.py:Net", endpoint=Endpoint("127.0.0.1", 1), model="net", path="/predictions/net")

    def use(self, settings: CandidateSettings) -> bool:
        changed = not self.used or self.used[-1] != settings
        self.used.append(settings)
        return changed

    def clients(self) -> int:
        return 12

    def close(self) -> None:
        self.used.append(CLOSED)

    def profile_instance(self, request: ProfileRequest) -> InstanceProfile:
        self.requests.append(request)
        found = self.profiles.get(request.config.precision, profile())
        if isinstance(found, LoadFailed):
            raise found
        return found

    async def measure(self, target: Target, requests: list[bytes], load: Load, **how: Any) -> Measurement:
        self.loads.append(load)
        self.runs.append(how)
        if isinstance(self.run, Exception):
            raise self.run
        return self.run or Measurement(load=load)


def profile(answer: bytes = b"[1.0]", **keys: Any) -> InstanceProfile:
    given = SampleResponse(answer, "application/json")
    return structs.replace(InstanceProfile(curve={1: 0.01, 8: 0.03}, memory_bytes=100, responses=[given]), **keys)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()
    monkeypatch.setattr(module, "TunedServer", lambda model: found)
    monkeypatch.setattr(module, "payloads", lambda data, target, seed: [Payload(b"[1]", "application/json", "a.json")])
    monkeypatch.setattr(module, "profile_instance", found.profile_instance)
    monkeypatch.setattr(module, "measure", found.measure)
    monkeypatch.setattr(module, "free_bytes", lambda: 1000)
    return found


def make(space: str = SPACE, *, start: bool = True, **options: Any) -> AppUnderTest:
    tuned = TunedModel(target="app.py:Net", section="net", model=ModelConfig(target="/there/app.py:Net"))
    app = AppUnderTest(tuned, parse_space(space), parse_slo("p99<=100ms"), **options)
    if start:
        app.start()
    return app


def test_an_app_starts_with_its_baseline_and_is_profiled_before_any_load(world: World) -> None:
    make()
    assert world.used == [CandidateSettings()]
    assert [request.config.precision for request in world.requests] == [None, "fp32"]
    assert (world.requests[0].sizes, world.requests[0].limit_s) == ([1, 2, 4, 8], 0.1)
    assert world.requests[0].samples == [RequestBody(b"[1]", "application/json")]
    assert not world.loads


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (LoadFailed("no weights"), "no weights"),
        (profile(error="the model raised KeyError"), "the model raised KeyError; give --data that it accepts"),
        (profile(oom_rows=1, curve={}), "cannot answer the requests: a single request runs out of memory"),
        (profile(fatal_rows=1, fatal="a batch of 1 ends the process"), "the requests: a batch of 1 ends the process"),
    ],
)
def test_a_baseline_that_does_not_load_or_cannot_answer_ends_the_tuning(
    world: World, found: InstanceProfile | LoadFailed, message: str
) -> None:
    world.profiles[None] = found
    with pytest.raises(PenstockError, match=message):
        make()


@pytest.mark.parametrize(
    ("space", "how"), [("batch=1,2", "with its baseline settings"), ("precision=fp32,bf16", "in fp32")]
)
def test_a_reference_that_differs_from_the_samples_ends_the_tuning(world: World, space: str, how: str) -> None:
    samples = [AccuracySample("line 1", RequestBody(b"[1]", "application/json"), [2.0])]
    with pytest.raises(ConfigError, match=f"the app {how} does not pass --accuracy-check: 1 of 1 responses differ"):
        make(space, samples=samples)


def test_a_parameter_that_the_model_does_not_use_is_rejected(world: World) -> None:
    world.profiles[None] = profile(ignores=["precision", "optimize"])
    make("batch=1,2,instances=1,2")
    with pytest.raises(ConfigError, match="--space precision: the model does not use it"):
        make()


@pytest.mark.parametrize("fp32", [LoadFailed("it was exported in fp16"), profile(error="the model raised TypeError")])
def test_if_fp32_does_not_run_the_baseline_is_the_reference(world: World, fp32: InstanceProfile | LoadFailed) -> None:
    world.profiles |= {"fp32": fp32, "bf16": profile(b"[2.0]")}
    app = make()
    assert "found 2, expected 1" in str(app.refusal(parse_settings("precision=bf16")))
    assert app.refusal(parse_settings("precision=fp32"))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (profile(), None),
        (profile(b"[1.005]"), None),
        (profile(b"[1.5]"), "1 of 1 responses differ; a.json: [0]: found 1.5, expected 1"),
        (profile(error="the model raised KeyError"), "cannot answer: the model raised KeyError"),
        (profile(oom_rows=1, curve={}), "cannot answer: a single request runs out of memory"),
        (profile(oom_rows=2, curve={1: 0.01}), None),
        (profile(fatal_rows=8, fatal="a batch of 8 ends the process"), "a batch of 8 ends the process"),
        (profile(fatal_rows=9, fatal="a batch of 9 ends the process"), None),
        (LoadFailed("export it in bf16"), "does not load: export it in bf16"),
    ],
)
def test_a_precision_is_used_only_if_it_loads_and_agrees_with_the_reference(
    world: World, found: InstanceProfile | LoadFailed, message: str | None
) -> None:
    world.profiles["bf16"] = found
    app = make()
    refusal = app.refusal(parse_settings("batch=8,precision=bf16"))
    assert refusal == message if message is None else message in str(refusal)
    assert app.refusal(parse_settings("batch=8,precision=fp32")) is None


def test_a_model_whose_requests_run_one_by_one_gets_no_larger_batches(world: World) -> None:
    texts = ("batch=1,instances=2", "instances=2", "batch=2,instances=1", "batch=8,instances=1")
    refused = "its requests run one by one: a row has other results beside another"
    for alone, refusals in (("", [None] * 4), (refused.partition(": ")[2], [None, None, refused, refused])):
        world.profiles[None] = profile(alone=alone)
        app = make("batch=1..8,instances=1,2")
        assert [app.refusal(parse_settings(text)) for text in texts] == refusals


def test_settings_that_do_not_affect_one_instance_share_its_profile_which_needs_no_server(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make()
    for text in ("batch=1,instances=1", "batch=8,instances=2,hold=0,policy=none,batching.timeout_s=2"):
        assert app.refusal(parse_settings(text)) is None
    assert len(world.requests) == 2
    monkeypatch.delattr(world, "target")
    app.refusal(parse_settings("threads=2"))
    assert world.requests[2].config.threads == 2


def test_the_curve_has_times_and_the_memory_of_its_device_with_its_limit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "gpu_bytes", lambda count: 80 * count)
    world.profiles |= {None: profile(device_bytes=7), "bf16": LoadFailed("no")}
    for devices, memory in ((("cpu",), (100, 1000)), (("cuda:0", "cuda:1"), (7, 160))):
        monkeypatch.setattr(module, "expanded", lambda _, devices=devices: devices)
        app = make()
        found = app.curve(CandidateSettings())
        assert found is not None
        assert found.points == ((1, 0.01), (8, 0.03))
        assert (found.memory_bytes, found.limit_bytes, world.requests[-1].device) == (*memory, devices[0])
        assert app.curve(parse_settings("precision=bf16")) is None, "it does not load"


@pytest.mark.parametrize(("device", "left", "closed"), [("cpu", 500, 0), ("cpu", 499, 2), ("cuda:0", 1000, 2)])
def test_the_server_stops_while_an_instance_is_profiled_if_memory_is_short_or_on_a_gpu(
    world: World, monkeypatch: pytest.MonkeyPatch, device: str, left: int, closed: int
) -> None:
    app = make(start=False)
    monkeypatch.setattr(module, "free_bytes", lambda: left)
    monkeypatch.setattr(module, "expanded", lambda devices: (device,))
    app.start()
    assert world.used[1:] == [CLOSED] * closed


@pytest.mark.parametrize(("limit", "free"), [("max\n", 800), ("900\n", 800), ("300\n", 300), (None, 800)])
def test_the_limit_of_a_container_bounds_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, limit: str | None, free: int
) -> None:
    def read_text(path: Path) -> str:
        if limit is None:
            raise FileNotFoundError
        return limit

    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=800))
    monkeypatch.setattr(module.Path, "read_text", read_text)
    assert module.free_bytes() == free


@pytest.mark.parametrize(("totals", "limit"), [([], 0), ([80, 40], 120)])
def test_each_gpu_counts_as_the_smallest(monkeypatch: pytest.MonkeyPatch, totals: list[int], limit: int) -> None:
    monkeypatch.setattr(module, "Gpus", lambda: SimpleNamespace(read=lambda: [("0", 0.5, 1, n) for n in totals]))
    assert module.gpu_bytes(3) == limit


def test_newly_loaded_settings_warm_up_until_they_settle(world: World) -> None:
    app = make()
    at = parse_settings("batch=8")
    for settings in (at, at, CandidateSettings()):
        app.measure(settings, 50.0, 2.0, 3)
    assert [run["warm_s"] for run in world.runs] == [None, WARM_S, None]
    assert world.loads[0] == Load(mode="open", rate=50.0, seconds=2.0, seed=3)
    assert world.runs[0]["label"] == "batch=8"
    assert world.runs[2]["label"] == "baseline"
    assert (world.runs[0]["timeout_s"], world.runs[0]["late_s"]) == (1.0, pytest.approx(0.01))


def test_an_explicit_short_warm_up_applies_to_each_run_and_a_closed_loop_fills_every_batch(world: World) -> None:
    app = make(warm_s=0.2)
    app.measure(CandidateSettings(), 50.0, 2.0, 3)
    app.saturate(CandidateSettings(), 2.0, 3)
    assert [run["warm_s"] for run in world.runs] == [0.2, 0.2]
    assert world.loads[1] == Load(mode="closed", concurrency=12, seconds=2.0, seed=3)


@pytest.mark.parametrize(
    "error", [TargetFailing("returns only errors; the first: 503"), ConfigError("no request comes within 30 s")]
)
def test_settings_without_any_answer_count_as_not_loaded(world: World, error: PenstockError) -> None:
    app = make()
    world.run = error
    with pytest.raises(LoadFailed, match=f"loaded, but {error.message}"):
        app.measure(CandidateSettings(), 50.0, 2.0, 3)


def test_a_series_of_invalid_runs_ends_the_tuning(world: World) -> None:
    app = make()
    late = Measurement(load=Load(mode="open"), invalid=["the generator was late"])
    for run in [late] * (MOST_INVALID - 1) + [None] + [late] * (MOST_INVALID - 1):  # in a row
        world.run = run
        app.measure(CandidateSettings(), 50.0, 2.0, 3)
    world.run = late
    with pytest.raises(PenstockError, match=r"8 runs in a row were INVALID.*: the generator was late"):
        app.measure(CandidateSettings(), 50.0, 2.0, 3)


def test_the_cost_of_a_run_includes_the_settings_change_and_failed_profiles(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make()
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def use(settings: CandidateSettings) -> bool:
        now[0] += 3.0
        if settings.get("batch") == 1:
            raise LoadFailed("no")
        return True

    def profile_instance(request: ProfileRequest) -> InstanceProfile:
        now[0] += 100.0
        raise LoadFailed("no")

    async def measure(*arguments: Any, **keys: Any) -> Measurement:
        now[0] += 2.0
        return await world.measure(*arguments, **keys)

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(world, "use", use)
    app.prepare(parse_settings("batch=8"))
    assert app.measure(parse_settings("batch=8"), 50.0, 2.0, 3).cost_s == 8.0
    with pytest.raises(LoadFailed):
        app.prepare(parse_settings("batch=1"))
    monkeypatch.setattr(module, "profile_instance", profile_instance)
    assert app.refusal(parse_settings("threads=2"))
    assert app.measure(parse_settings("batch=8"), 50.0, 2.0, 3).cost_s == 105.0
    world.run = TargetFailing("503")
    with pytest.raises(LoadFailed):
        app.measure(parse_settings("batch=8"), 50.0, 2.0, 3)
    world.run = None
    assert app.measure(parse_settings("batch=8"), 50.0, 2.0, 3).cost_s == 5.0


@pytest.mark.parametrize(
    ("payload", "codec"),
    [
        (Payload(b"", "image/png", "a"), "native"),
        (Payload(b"", "application/json", "a", "/v2/models/net/infer"), "oip_json"),
        (Payload(b"", "application/x-npy", "a", "/v2/models/net/infer"), "oip_npy"),
        (
            Payload(b"", "x", "a", "/v2/models/net/infer", {"Inference-Header-Content-Length": "3"}),
            "oip_binary",
        ),
    ],
)
def test_the_codec_of_a_body_follows_its_route(
    world: World, monkeypatch: pytest.MonkeyPatch, payload: Payload, codec: str
) -> None:
    monkeypatch.setattr(module, "payloads", lambda data, target, seed: [payload])
    make()
    assert world.requests[0].bodies[0].codec == codec


def test_the_payload_size_is_the_mean_of_the_requests_and_close_stops_the_server(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [Payload(b"1" * 100, "text/plain", "a"), Payload(b"1" * 301, "text/plain", "b")]
    monkeypatch.setattr(module, "payloads", lambda data, target, seed: sent)
    world.profiles[None] = world.profiles["fp32"] = profile(responses=2 * profile().responses)
    app = make(start=False)
    assert app.payload_bytes == 0
    app.start()
    assert app.payload_bytes == 200
    app.close()
    assert world.used[-1] == CLOSED
