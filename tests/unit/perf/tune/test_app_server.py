import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.client.endpoint import ConnectionLost, Endpoint
from penstock.client.response import HttpResponse
from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.errors import LoadFailed, ModelNotReady, PenstockError
from penstock.perf.bench.target import Target
from penstock.perf.tune import app as module
from penstock.perf.tune.app import TunedServer
from penstock.perf.tune.config_file import TunedModel, keys_of
from penstock.perf.tune.space import CandidateSettings, parse_settings


class Server:
    """Replaces the server that `open_target` starts, and its management listener."""

    alive = True

    def __init__(self) -> None:
        self.starts: list[list[str]] = []
        self.stops = 0
        self.tls: Any = None
        self.asked: list[tuple[str, str, Any]] = []
        self.flags: list[dict[str, Any]] = []  # of what was asked
        self.answer: HttpResponse | PenstockError = HttpResponse(
            200, {}, b'{"versions": [{"instances": 3, "max_batch_size": 8}]}'
        )
        self.fails: PenstockError | None = None  # each start

    @contextmanager
    def open_target(self, text: str, *, sets: list[str], **flags: Any) -> Iterator[Target]:
        self.tls = flags.pop("tls")
        assert flags == {"model": "net", "token": "secret", "management": True}
        self.starts.append(sets)
        if self.fails is not None:
            raise self.fails
        there = Endpoint("127.0.0.1", 1)
        yield Target(text=text, endpoint=there, model="net", path="", management=there, server=self)  # type: ignore[arg-type]
        self.stops += 1

    def fetch(self, endpoint: Endpoint, method: str, path: str, body: bytes | None, **flags: Any) -> HttpResponse:
        self.asked.append((method, path, None if body is None else msgspec.json.decode(body)))
        self.flags.append(flags)
        if isinstance(self.answer, PenstockError):
            raise self.answer
        return self.answer

    def output(self) -> str:
        return "OSError: no weights"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()
    monkeypatch.setattr(module, "open_target", found.open_target)
    monkeypatch.setattr(module, "fetch", found.fetch)
    return found


def served(**keys: Any) -> TunedServer:
    model = ModelConfig(target="/there/app.py:Net", **keys)
    return TunedServer(TunedModel(target="app.py:Net", section="net", model=model, token="secret"))


def at(text: str) -> CandidateSettings:
    return parse_settings(text)


def test_settings_set_keys_of_the_model() -> None:
    assert keys_of(at("batch=8,instances=2,precision=fp16,device=cuda,hold=0,batching.timeout_s=2")) == {
        "batching.max_batch_size": 8,
        "instances": 2,
        "precision": "fp16",
        "devices": ["cuda"],
        "batching.max_hold_s": 0,
        "batching.timeout_s": 2,
    }


def test_other_keys_of_the_model_stay() -> None:
    model = ModelConfig(target="a:b", threads=2, options={"k": 1}, batching=BatchingConfig(slo_s=0.1))
    subject = TunedModel(target="x.toml", section="net", model=model)
    found = subject.with_settings(at("batch=4,device=cuda,options.k=2,options.deep.er=3"))
    assert found == ModelConfig(
        target="a:b",
        threads=2,
        options={"k": 2, "deep": {"er": 3}},
        devices=("cuda",),
        batching=BatchingConfig(slo_s=0.1, max_batch_size=4),
    )


def test_the_server_starts_with_the_settings(server: Server) -> None:
    assert served().use(at("batch=4,device=cpu,policy=none"))
    assert server.starts == [
        [
            'models."net".batching.max_batch_size=4',
            'models."net".devices=["cpu"]',
            'models."net".batching.policy="none"',
        ]
    ]


def test_a_tls_server_is_trusted_by_its_own_certificate_alone(server: Server) -> None:
    served().use(CandidateSettings())
    assert server.tls is None
    folder = Path(__file__).parents[3] / "tls"
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    model = ModelConfig(target="/there/app.py:Net")
    tuned = TunedModel(target="app.py:Net", section="net", model=model, token="secret", tls_cert=cert)
    TunedServer(tuned).use(CandidateSettings())
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(cert, key)
    to_us, to_them = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = server.tls.wrap_bio(to_us, to_them, server_hostname="127.0.0.1")
    other = theirs.wrap_bio(to_them, to_us, server_side=True)
    for side in (one, other):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    one.do_handshake()
    assert len(server.tls.get_ca_certs()) == 1


SCALED, RELOADED, RESTARTED = ["PUT /models/net/scale"], ["DELETE /models/net/1", "PUT /models/net/1"], None


@pytest.mark.parametrize(
    ("before", "after", "requests"),
    [
        ("batch=4", "batch=4", []),
        ("instances=1,threads=1", "instances=3,threads=1", SCALED),
        ("instances=2", "", SCALED),  # to the model's own
        ("instances=1", "instances=2", RELOADED),  # each instance's share of the threads changes
        ("instances=1,threads=1", "instances=2,threads=1,batch=4", RELOADED),
        ("batch=2,instances=1", "batch=4,instances=1", RELOADED),
        ("device=cuda:0", "device=cuda:1", RELOADED),  # the colon of a device does not mark a class
        ("options.width=1", "options.width=2", RESTARTED),
        ("policy=none", "policy=pkg.mod:Mine", RESTARTED),
        ("policy=pkg.mod:Mine", "policy=none", RESTARTED),
    ],
)
def test_a_change_takes_the_smallest_step(server: Server, before: str, after: str, requests: list[str] | None) -> None:
    found = served(load_timeout_s=100.0, **({"instances": 3, "threads": 1} if not after else {}))
    found.use(at(before))
    assert found.use(at(after)) == (before != after)
    assert [f"{method} {path}" for method, path, _ in server.asked] == (requests or [])
    assert (len(server.starts), server.stops) == ((2, 1) if requests is None else (1, 0))
    assert all(flags == {"token": "secret", "timeout_s": 160.0} for flags in server.flags)
    if requests == SCALED:
        assert server.asked[0][2] == {"instances": 3}


@pytest.mark.parametrize(
    ("settings", "queue"),
    [
        ("batch=1,instances=2", 384),  # 3 instances with batches of 8 have 16 full batches each
        ("batch=8,instances=3", None),
        ("batch=32,instances=1", None),
        ("instances=1", None),
        ("batch=1,batching.max_queue=5", 5),
    ],
)
def test_the_queue_does_not_shrink_with_the_batch(server: Server, settings: str, queue: int | None) -> None:
    found = served(instances=3, threads=1)
    found.use(CandidateSettings())
    assert found.model.keys(at(settings)).get("batching.max_queue") == queue
    assert found.model.with_settings(at(settings)).batching.max_queue == queue
    bounded = served(batching=BatchingConfig(max_queue=7))
    bounded.use(CandidateSettings())
    assert bounded.model.with_settings(at("batch=1")).batching.max_queue == 7


def test_a_reload_leaves_out_keys_that_only_a_configuration_may_set(server: Server) -> None:
    found = served(options={"k": 1}, weights="w.pt", name="net", traffic={"1": 1.0})
    found.use(at("batch=2"))
    found.use(at("batch=4"))
    assert server.asked[1][2] == {"target": "/there/app.py:Net", "batching": {"max_batch_size": 4}}


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (HttpResponse(500, {}, b'{"error": {"message": "could not be loaded"}}'), r"\(500\): could not be loaded"),
        (ConnectionLost("127.0.0.1: the connection ended"), r"failed with the settings: 127\.0\.0\.1: the connection"),
    ],
)
def test_settings_that_do_not_load_or_end_the_server_cost_a_new_one(
    server: Server, response: HttpResponse | PenstockError, message: str
) -> None:
    found = served()
    found.use(at("batch=2"))
    server.answer = response
    with pytest.raises(LoadFailed, match=message) as caught:
        found.use(at("batch=4"))
    assert caught.value.detail == "OSError: no weights"
    found.use(at("batch=2"))
    assert (len(server.starts), server.stops) == (2, 1)
    server.alive = False
    assert found.use(at("batch=2")), "it died in the meantime"
    assert (len(server.starts), server.stops) == (3, 2)


def test_a_first_server_that_does_not_start_ends_the_tuning(server: Server) -> None:
    server.fails = ModelNotReady("not ready")
    with pytest.raises(ModelNotReady):
        served().use(CandidateSettings())


def test_settings_with_which_a_later_server_does_not_start_are_reported_in_one_line(server: Server) -> None:
    found = served()
    found.use(at("options.width=1"))
    server.fails = PenstockError("the server did not start; it said:\n  net  loading\npenstock: no room\nTraceback")
    with pytest.raises(LoadFailed, match=r"^no server starts: no room$") as caught:
        found.use(at("options.width=2"))
    assert "Traceback" in caught.value.detail
    server.fails = PenstockError("the server is not ready after 300 s; it said:\n")
    with pytest.raises(LoadFailed, match=r"^no server starts: the server is not ready after 300 s; it said:$"):
        found.use(at("options.width=3"))
    server.fails = None
    assert found.use(at("options.width=1"))


@pytest.mark.parametrize(
    ("answer", "clients"),
    [
        (b'{"versions": [{"instances": 3, "max_batch_size": 8}]}', 48),
        (b'{"versions": [{"instances": 1, "max_batch_size": 1}]}', 4),
        (b'{"versions": [{"instances": 8, "max_batch_size": 64}]}', 512),
        (b"", 4),
    ],
)
def test_clients_are_twice_the_rows_of_all_instances(server: Server, answer: bytes, clients: int) -> None:
    found = served()
    found.use(at("batch=8"))
    server.answer = HttpResponse(200, {}, answer)
    assert found.clients() == clients
