"""Models are loaded, swapped, scaled, shared out and unloaded while requests come without a pause."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from contextlib import closing as closing_http
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from msgspec import inspect

from penstock.config.schema import BatchingConfig, ModelConfig

CLIENTS = 32

MODEL = """
import os
import time


class Model:
    def predict(self, items):
        time.sleep(0.002)
        return [{tag!r} for _ in items]


class Broken(Model):
    def load(self, device):
        raise RuntimeError("no weights in /a/secret/place")


class Brittle(Model):
    def load(self, device):
        if os.path.exists("broken"):
            raise RuntimeError("broken")


class Hangs(Model):
    def load(self, device):
        if os.path.exists("broken"):
            time.sleep(600)
"""


@asynccontextmanager
async def closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()
        await writer.wait_closed()


class LoadClients:
    """Connections that ask the model `m` again and again; what they were answered, by the answer."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self.answers: Counter[str] = Counter()
        self._left: int | None = None
        self._came = asyncio.Event()

    async def ask(self, requests: int) -> Counter[str]:
        """Exactly so many requests; their answers."""
        before = Counter(self.answers)
        self._left = requests
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))
        self._left = None
        return self.answers - before

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """Requests without a pause. All of them have been answered at the end."""
        stop = asyncio.Event()
        clients = [asyncio.create_task(self._client(stop)) for _ in range(CLIENTS)]
        try:
            yield
            await self.more(100)
        finally:
            stop.set()
            await asyncio.gather(*clients)

    async def more(self, answers: int) -> None:
        """Returns when so many more have come."""
        async with asyncio.timeout(20):
            goal = self.answers.total() + answers
            while self.answers.total() < goal:
                self._came.clear()
                await self._came.wait()

    async def _client(self, stop: asyncio.Event | None = None) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        async with closing(writer):
            await self._ask_on(reader, writer, stop)

    async def _ask_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stop: asyncio.Event | None
    ) -> None:
        while not (stop is not None and stop.is_set()):
            if self._left is not None:
                if self._left == 0:
                    break
                self._left -= 1
            writer.write(b"POST /predictions/m HTTP/1.1\r\nhost: m\r\ncontent-length: 1\r\n\r\n1")
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            body = (await reader.readexactly(length)).decode()
            self.answers[body if head.startswith("http/1.1 200 ") else f"{head.splitlines()[0]} {body}"] += 1
            self._came.set()


class Manager:
    """The management listener of a server; every call gives the status and the answer."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=60) as client:
            answer = await client.request(method, path, content=None if body is None else json.dumps(body))
        return answer.status_code, answer.json()

    async def ok(self, method: str, path: str, body: Any = None) -> dict[str, dict[str, Any]]:
        """The versions afterwards, by version."""
        status, found = await self(method, path, body)
        assert status == 200, found
        return {v["version"]: v for v in found["versions"]}


@pytest.fixture
def served(serve: Callable[..., Any], tmp_path: Path) -> Any:
    (tmp_path / "store").mkdir()
    for tag in ("two", "three"):
        (tmp_path / "store" / f"{tag}.py").write_text(MODEL.format(tag=tag))
    (tmp_path / "app.py").write_text(MODEL.format(tag="one"))
    (tmp_path / "penstock.toml").write_text(
        """
        [server]
        management = true
        model_store = "store"
        [limits]
        max_instances = 4
        [models.m]
        target = "app.py:Model"
        [models.m.batching]
        max_batch_size = 16
        """
    )
    return serve(None, "penstock.toml")


async def test_every_change_under_load_costs_no_request(served: Any) -> None:
    tree = psutil.Process(served.process.pid)
    clients, manage = LoadClients(served.url), Manager(served.urls["management"])
    async with clients.asking():
        await manage.ok("PUT", "/models/m/default", {"version": "1"})
        versions = await manage.ok("PUT", "/models/m/2", {"target": "two.py:Model"})
        assert (versions["1"]["traffic"], versions["2"]["traffic"]) == (1, 0)
        await clients.more(100)
        assert set(clients.answers) == {"one"}

        await manage.ok("PUT", "/models/m/traffic", {"1": 0.5, "2": 0.5})
        versions = await manage.ok("PUT", "/models/m/1/scale", {"instances": 3})
        assert (versions["1"]["instances"], versions["1"]["ready_instances"]) == (3, 3)
        assert len(tree.children()) == 4
        await clients.more(300)
        versions = await manage.ok("PUT", "/models/m/scale", {"instances": 1})
        assert (versions["1"]["instances"], versions["1"]["ready_instances"]) == (1, 1)
        assert len(tree.children()) == 2
        assert set(clients.answers) == {"one", "two"}
    async with clients.asking():
        await manage.ok("PUT", "/models/m/2", {"target": "three.py:Model", "instances": 2})
        seen = clients.answers["two"]
        await clients.more(300)
        assert clients.answers["two"] <= seen + CLIENTS, "the old one answered after the swap"
        await manage.ok("PUT", "/models/m/default", {"version": "2"})
        versions = await manage.ok("DELETE", "/models/m/1")
        assert list(versions) == ["2"]
        assert versions["2"]["default"]
    assert set(await clients.ask(100)) == {"three"}
    assert set(clients.answers) == {"one", "two", "three"}, "not one error"
    assert len(tree.children()) == 2

    workers = tree.children()
    assert served.stop()[0] == 0
    assert not [w for w in workers if w.is_running()]


HUGE = ("1e30", "-1e30", str(10**30), str(2**64), str(2**63 - 1), "9" * 5000, "1e308", "1e999", "-1e999")
NO_NUMBERS = ("NaN", "Infinity", "-Infinity", '"2"', '"nan"', "true", "[[1]]", '{"a": 1}')
BAD_NUMBERS = (*HUGE, *NO_NUMBERS, "-1")
BAD_COUNTS = (*BAD_NUMBERS, "0", "1.5", "-0.0", "null", "5", str(10**9))


def number_keys(table: type) -> list[str]:
    """The keys of a table whose value is a number, or a list of them."""

    def numeric(kind: Any) -> bool:
        inner = [getattr(kind, name) for name in ("type", "item_type") if hasattr(kind, name)]
        inner += getattr(kind, "types", ())
        return isinstance(kind, (inspect.IntType, inspect.FloatType)) or any(numeric(each) for each in inner)

    return [each.encode_name for each in inspect.type_info(table).fields if numeric(each.type)]  # type: ignore[attr-defined]


def wrong_changes() -> Iterator[tuple[str, str]]:
    """(path, JSON body) of management requests with a number that cannot be used."""
    target = '"target": "two.py:Model"'
    for path in ("/models/m", "/models/new", "/models/m/2"):
        for value in BAD_COUNTS:
            yield path, f'{{{target}, "instances": {value}}}'
        for value in BAD_NUMBERS:
            for key in number_keys(ModelConfig):
                yield path, f'{{{target}, "{key}": {value}}}'
            for key in number_keys(BatchingConfig):
                yield path, f'{{{target}, "batching": {{"{key}": {f"[{value}]" if key == "priority" else value}}}}}'
            yield path, f'{{{target}, "version": {value if value[0] != chr(34) else 2}}}'
    for value in BAD_COUNTS:
        yield "/models/m/scale", f'{{"instances": {value}}}'
        yield "/models/m/1/scale", f'{{"instances": {value}}}'
    for value in BAD_NUMBERS:
        yield "/models/m/traffic", f'{{"1": {value}}}'
        yield "/models/m/default", f'{{"version": {value}}}'


def test_no_number_in_a_management_request_hangs_or_changes_the_server(served: Any) -> None:
    manage = HTTPConnection(served.urls["management"].removeprefix("http://"), timeout=10)
    worker = psutil.Process(served.process.pid).children()

    def ask(method: str, path: str, body: str = "") -> tuple[int, bytes]:
        manage.request(method, path, body)
        answer = manage.getresponse()
        return answer.status, answer.read()

    def state() -> dict[str, Any]:
        _, found = ask("GET", "/models")
        return json.loads(found)

    before = state()
    for path, body in wrong_changes():
        status, found = ask("PUT", path, body)
        assert 400 <= status < 500, (path, body[:200], status, found)
        assert len(found) < 600, "the message repeats at most a part of the value"
    for limit in ("0", "-1", "1e3", "nan", "9" * 30, "0" * 20 + "9" * 20, "1" * 5000):
        address = served.urls["metrics"].removeprefix("http://")
        with closing_http(HTTPConnection(address, timeout=10)) as metrics:
            metrics.request("GET", f"/debug/batches?limit={limit}")
            assert metrics.getresponse().status == 400, limit
    assert state() == before
    assert psutil.Process(served.process.pid).children() == worker
    assert served.post("/predictions/m", b"1")[1] == b"one"
    # the largest numbers that the keys accept size nothing
    most = 2**31 - 1
    keys = {
        "load_timeout_s": most,
        "batching": {"max_batch_size": most, "max_hold_s": 0, "max_queue": most, "timeout_s": most, "slo_s": most}
        | {"run_timeout_s": most, "priority": [0, most]},
    }
    assert ask("PUT", "/models/m/1", json.dumps({"target": "two.py:Model", **keys}))[0] == 200
    assert served.post("/predictions/m", b"1")[1] == b"two"
    assert served.stop()[0] == 0
    manage.close()


async def test_answers_are_shared_out_as_the_weights_say(served: Any) -> None:
    clients, manage = LoadClients(served.url), Manager(served.urls["management"])
    await manage.ok("PUT", "/models/m/2", {"target": "two.py:Model"})
    await manage.ok("PUT", "/models/m/traffic", {"1": 0.9, "2": 0.1})
    assert await clients.ask(1000) == {"one": 900, "two": 100}
    assert served.metric("penstock_answers_total", version="2") == 100
    versions = await manage.ok("DELETE", "/models/m/2")
    assert versions["1"]["traffic"] == 1
    assert await clients.ask(100) == {"one": 100}


async def test_what_does_not_load_changes_nothing(served: Any, tmp_path: Path) -> None:
    clients, manage = LoadClients(served.url), Manager(served.urls["management"])
    async with clients.asking():
        for path in ("/models/m/1", "/models/m/2", "/models/new"):
            status, found = await manage("PUT", path, {"target": "two.py:Broken"})
            assert (status, found["error"]["code"]) == (500, "load_failed")
            assert "secret" not in found["error"]["message"]
        await manage.ok("PUT", "/models/m/1", {"target": "three.py:Brittle"})
        (tmp_path / "broken").touch()
        assert (await manage("PUT", "/models/m/scale", {"instances": 2}))[0] == 500
        versions = await manage.ok("GET", "/models/m")
        assert [(v["instances"], v["state"]) for v in versions.values()] == [(1, "READY")]
    assert set(clients.answers) == {"one", "three"}
    assert len(psutil.Process(served.process.pid).children()) == 1
    assert "no weights in /a/secret/place" in served.stop()[2]


async def test_an_unload_ends_what_hangs_and_what_waits_behind_it(served: Any, tmp_path: Path) -> None:
    tree = psutil.Process(served.process.pid)
    manage = Manager(served.urls["management"])
    await manage.ok("PUT", "/models/h/1", {"target": "two.py:Hangs"})
    (tmp_path / "broken").touch()
    scaling = asyncio.create_task(manage("PUT", "/models/h/scale", {"instances": 3}))
    async with asyncio.timeout(20):
        while len(tree.children()) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        waiting = [
            asyncio.create_task(manage("PUT", "/models/h/1", {"target": "two.py:Hangs"})),
            asyncio.create_task(manage("PUT", "/models/h/scale", {"instances": 2})),
        ]
        await asyncio.sleep(0.2)  # they wait, and so does the server for them
        assert served.post("/predictions/h", b"1")[1] == b"two"
        assert await manage.ok("DELETE", "/models/h") == {}
        for change in (scaling, *waiting):
            status, found = await change
            assert (status, found["error"]["code"]) == (409, "conflict")
        assert len(tree.children()) == 1
        loading = asyncio.create_task(manage("PUT", "/models/h/1", {"target": "two.py:Hangs", "load_timeout_s": 0.5}))
        status, found = await loading
        assert (status, found["error"]["code"]) == (500, "load_failed")
    assert len(tree.children()) == 1
    assert "loading exceeded load_timeout_s=0.5" in served.stop()[2]


async def test_the_page_s_configuration_has_two_versions_and_its_curl_lines_change_them(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "management.md").read_text()
    first, curls, second = re.findall(r"^```(?:toml)?\n(.*?)^```$", page, re.S | re.M)
    (tmp_path / "models").mkdir()
    for file in ("app.py", "models/digits2.py"):
        source = "def Digits(items): return [1 for _ in items]\ndef BetterDigits(items): return [2 for _ in items]\n"
        (tmp_path / file).write_text(source)
    (tmp_path / "penstock.toml").write_text(first.partition("[models")[0] + second)
    server = serve(None, "penstock.toml")
    assert Counter(server.post("/predictions/digits", b"1")[1] for _ in range(20)) == {b"1": 18, b"2": 2}
    for line in curls.splitlines():
        method, path, body = re.fullmatch(r"curl -X (\w+) http://127.0.0.1:8081(\S+)(?: -d '(.*)')?", line).groups()  # type: ignore[union-attr]
        await Manager(server.urls["management"]).ok(method, path, None if body is None else json.loads(body))
    assert server.post("/predictions/digits", b"1")[1] == b"1", "version 2 is now the Digits of digits2.py"
    assert server.post("/predictions/digits/1", b"1")[0] == 404
    assert json.loads(server.get("/models/digits/2", "management")[1])["instances"] == 2
    closed = serve(None, "penstock.toml", "--set", "server.management=false")
    status, found = await Manager(closed.urls["management"])("DELETE", "/models/digits")
    assert (status, found["error"]["code"]) == (403, "forbidden")
    assert closed.post("/predictions/digits", b"1")[0] == 200
