"""The dashboard on a real server, in a real browser."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.runs import Run
from support.browser import Browser, installed

SOURCE = """
    import time

    import penstock

    def echo(items):
        return items

    def slow(items):
        time.sleep(0.3)
        return items

    def fails(items):
        raise ValueError("always")
"""
HOSTILE = '<img src=x onerror="document.title=1">\u001b[31m\nx'


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    keys = ("slow.batching.max_batch_size=1", "echo.batching.slo_s=0.5")
    settings = [word for key in keys for word in ("--set", f"models.{key}")]
    return serve_all(SOURCE, "echo", "slow", "fails", *settings)


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not installed():
        pytest.skip("needs chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def load(server: Any) -> Iterator[Callable[..., None]]:
    """Sends requests to a model from threads, until the test ends."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def send(model: str, callers: int) -> None:
        def run() -> None:
            while not over.is_set():
                server.post(f"/predictions/{model}", b'"x"')

        threads.extend(threading.Thread(target=run, daemon=True) for _ in range(callers))
        for thread in threads[-callers:]:
            thread.start()

    yield send
    over.set()
    for thread in threads:
        thread.join()


def events(url: str, count: int, headers: dict[str, str] | None = None, model: str = "") -> list[Any]:
    """The first events of the stream of all models, or of "model/version"."""
    request = urllib.request.Request(f"{url}/dashboard/events{model and f'/{model}'}", headers=headers or {})
    with urllib.request.urlopen(request, timeout=30) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        found = []
        while len(found) < count:
            line = stream.readline().rstrip()
            if line:
                found.append(json.loads(line.removeprefix(b"data: ")))
    return found


def test_the_stream_begins_with_everything_and_goes_on_each_second(server: Any, load: Callable[..., None]) -> None:
    load("echo", 2)
    first, *later = events(server.urls["metrics"], 4)
    place = {name: i for i, name in enumerate(first["fields"])}
    assert [model["name"] for model in first["models"]] == ["echo", "fails", "slow"]
    assert {event["kind"] for event in first["events"]} == {"ready"}
    assert all("fields" not in view for view in later)
    for view in later:
        (second,) = view["models"][0]["seconds"]
        assert second[place["requests"]] > 0
        assert 0 < second[place["p50_s"]] <= second[place["p99_s"]]
    assert later[-1]["models"][0]["memory_bytes"] > 2**20
    assert 0.5 < later[-1]["now_s"] - later[-2]["now_s"] < 10


@pytest.mark.parametrize(("model", "word"), [("fails", "errors"), ("slow", "computing")])
def test_the_verdict_names_the_model_and_the_cause(
    server: Any, load: Callable[..., None], model: str, word: str
) -> None:
    load(model, 8)
    for view in events(server.urls["metrics"], 60):
        if view["verdict"]["word"] == word and view["verdict"]["model"] == model:
            return
    raise AssertionError(view["verdict"])


def test_a_browser_shows_the_server_live(server: Any, browser: Browser, load: Callable[..., None]) -> None:
    browser.open(f"{server.urls['metrics']}/")
    browser.wait_for("document.querySelectorAll('#models tbody tr').length === 3")
    load("echo", 2)
    cell = "document.querySelector('#models tbody [data-label=\"Requests/s\"]')"
    browser.wait_for(f"parseFloat({cell}.textContent.replace(',', '')) > 10")
    browser.wait_for("document.querySelector('#models polyline').getAttribute('points').split(' ').length > 2")
    assert "echo" in browser.run("document.querySelector('#models').innerText")
    check_page(browser, "dashboard")


def check_page(browser: Browser, name: str) -> None:
    """What holds for every page: it fits wide and narrow windows, light and dark, loads nothing from elsewhere, has no
    error, and axe-core finds nothing serious. Its pictures are kept in $PENSTOCK_PICTURES."""
    for scheme, width in (("light", 1280), ("dark", 1280), ("light", 380)):
        browser.resize(width, 900)
        browser.prefer(scheme)
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth"), width
        picture = browser.picture()
        assert picture.startswith(b"\x89PNG")
        if folder := os.environ.get("PENSTOCK_PICTURES"):
            Path(folder, f"{name}-{scheme}-{width}.png").write_bytes(picture)
        if axe := find_spec("axe_core_python"):
            browser.run(Path(axe.origin or "").with_name("axe.min.js").read_text() + ";0")
            found = browser.run("axe.run().then((found) => found.violations)")
            serious = [f for f in found if f["impact"] in ("serious", "critical")]
            assert not serious, json.dumps([(f["id"], [n["html"] for n in f["nodes"]]) for f in serious], indent=1)
    assert browser.run("performance.getEntriesByType('resource').every((e) => e.name.startsWith(location.origin))")
    assert browser.problems == []


def test_a_model_has_a_page_with_its_past_and_its_last_batches(
    server: Any, browser: Browser, load: Callable[..., None]
) -> None:
    load("slow", 4)
    browser.open(f"{server.urls['metrics']}/")
    link = "document.querySelector('#models a[href=\"#model/slow/1\"]')"
    browser.wait_for(f"!!{link}")
    browser.run(f"{link}.focus(), (window.kept = {link}, 0)")
    browser.wait_for(f"{link}.closest('tr').querySelectorAll('polyline').length === 2")
    time.sleep(2.5)
    assert browser.run("document.activeElement === window.kept"), "a new second moves the focus"
    browser.run("document.activeElement.click()")
    browser.wait_for("document.querySelectorAll('#model .uplot canvas').length === 8")
    browser.wait_for("document.querySelectorAll('#model .lane rect').length > 5")
    latency = (
        "[...document.querySelectorAll('#model [role=img]')].map((e) => e.ariaLabel).find((t) => /^Latency/.test(t))"
    )
    browser.wait_for(f"/p99 [1-9.]+ s/.test({latency})")
    text = browser.wait_for("document.querySelector('#model').innerText")
    for shown in ("slow version 1", "Restarts", "Batches of the last", "full: it had", "The batch before it had 1 of"):
        assert shown in text, shown
    browser.run("[...document.querySelectorAll('#model button')].find((b) => /hour/.test(b.textContent)).click()")
    check_page(browser, "model")
    browser.run("document.querySelector('#model a').click()")
    browser.wait_for("!document.querySelector('#overview').hidden && document.querySelector('#model').hidden")


def test_the_stream_of_one_model_has_its_parts(server: Any, load: Callable[..., None]) -> None:
    load("slow", 3)
    url = server.urls["metrics"]
    first, *later = events(url, 5, model="slow/1")
    for view in (first, *later):
        assert [model["name"] for model in view["models"]] == ["slow"]
        assert {"lanes", "reasons", "cost", "restarts", "processes"} <= set(view["detail"])
    now = dict(zip(first["fields"], later[-1]["models"][0]["seconds"][0], strict=True))
    assert now["waited_s"] > now["predict_s"] > 0.25, "two others are before each request"
    assert later[-1]["detail"]["cost"]["points"]
    assert later[-1]["up_s"] > first["up_s"]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        events(url, 1, model="slow/2")


def test_a_client_that_reads_late_makes_writing_a_part_of_the_mean_time(serve_all: Callable[..., Any]) -> None:
    server = serve_all("def big(items):\n    return [b'x' * 2**24 for _ in items]\n", "big")
    url, request = server.urls["metrics"], urllib.request.Request(f"{server.url}/predictions/big", b"x")
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as late:
        late.sendall(b"POST /predictions/big HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx")
        time.sleep(3)
        with urllib.request.urlopen(request) as answer:
            assert len(answer.read()) == 2**24
        views = events(url, 4, model="big/1")
    place = views[0]["fields"].index("write_s")
    assert max(second[place] for view in views for second in view["models"][0]["seconds"]) > 1.0


def test_jobs_of_this_machine_are_shown_with_their_progress(server: Any, browser: Browser) -> None:
    with Run("caption", HOSTILE) as run:
        run.write(30, 120, "30 of 120 frames")
        browser.open(f"{server.urls['metrics']}/")
        browser.wait_for("document.querySelector('#runs progress')?.value === 30")
        text = browser.run("document.querySelector('#runs').innerText")
        assert "30 of 120 frames" in text
        assert "<img src=x" in text
        check_page(browser, "jobs")
    browser.wait_for("document.querySelector('#runs').hidden")


def press(browser: Browser, button: str) -> None:
    """Submits the form of a button."""
    found = f"[...document.querySelectorAll('main button')].find((b) => b.textContent === '{button}' && b.offsetParent)"
    browser.wait_for(f"!!{found}")
    browser.run(f"{found}.click()")


def test_a_model_is_scaled_and_unloaded_on_its_page(
    serve_all: Callable[..., Any], browser: Browser, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    keys = ("server.management=true", f"auth.management_token_file={tmp_path / 'token'}")
    server = serve_all(SOURCE, "echo", *(word for key in keys for word in ("--set", key)))
    browser.open(f"{server.urls['metrics']}/#model/echo/1")
    field = "document.querySelector('#model .actions input[type=number]')"
    browser.wait_for(f"{field}.value === '1' && modelPage.rows.length > 1")
    browser.run(f"{field}.value = '2', {field}.dispatchEvent(new Event('input'))")
    effect = browser.wait_for("document.querySelector('#model .effect').textContent")
    assert effect == "the effect is not known: too few batches yet, or too short ones"
    press(browser, "Scale")
    browser.wait_for("!!document.querySelector('#model .actions input[type=password]')")
    browser.run("document.querySelector('#model .actions input[type=password]').value = 'secret'")
    press(browser, "Continue")
    browser.wait_for("document.querySelector('#model dl').innerText.includes('2 of 2')")
    browser.wait_for("document.querySelector('#events').innerText.includes('scaled, from 1 to 2 instances')")
    browser.problems = [text for text in browser.problems if "401" not in text]
    check_page(browser, "actions")
    browser.run("document.querySelector('#model .actions input[type=checkbox]').checked = true")
    press(browser, "Unload")
    browser.wait_for("document.querySelector('#model dl').innerText.includes('no longer loaded')")


def test_a_model_is_loaded_on_the_page_and_gets_a_share_of_the_traffic(
    serve_all: Callable[..., Any], browser: Browser
) -> None:
    server = serve_all(SOURCE, "echo", "--set", "server.management=true")
    browser.open(f"{server.urls['metrics']}/")
    browser.wait_for("!document.querySelector('#load').hidden")
    values = json.dumps(["echo", "2", "app.py:echo"])
    browser.run(f"[...document.querySelectorAll('#load input')].forEach((e, i) => (e.value = {values}[i]))")
    press(browser, "Load")
    browser.wait_for("document.querySelectorAll('#models tbody tr').length === 2")
    browser.run("location.hash = '#model/echo/2'")
    browser.wait_for("document.querySelectorAll('#model .actions input[type=number]').length === 3")
    browser.run("[...document.querySelectorAll('#model .actions input')].slice(1, 3).forEach((e) => (e.value = 50))")
    press(browser, "Split traffic")
    browser.wait_for("/traffic, from [0-9]+% to 50%/.test(document.querySelector('#events').innerText)")
    press(browser, "Drain")
    browser.wait_for("document.querySelector('#model dl').innerText.includes('DRAINED')")
    assert {server.post("/predictions/echo", b"1")[0] for _ in range(4)} == {200}
    press(browser, "Resume")
    browser.wait_for("/READY/.test(document.querySelector('#model dl').innerText)")
    for event in ("drained", "resumed"):
        assert event in browser.wait_for("document.querySelector('#events').innerText")


def test_nothing_is_changed_where_management_is_off_or_another_page_asks(
    server: Any, serve_all: Callable[..., Any]
) -> None:
    def scale(url: str, origin: str) -> None:
        headers = {"origin": origin, "content-type": "application/json"}
        request = urllib.request.Request(
            f"{url}/dashboard/models/echo/scale", b'{"instances": 2}', headers, method="PUT"
        )
        urllib.request.urlopen(request)

    with pytest.raises(urllib.error.HTTPError, match="404"):
        scale(server.urls["metrics"], server.urls["metrics"])
    managed = serve_all(SOURCE, "echo", "--set", "server.management=true").urls["metrics"]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        scale(managed, "http://elsewhere.example")
    scale(managed, managed)
    public = ("--insecure", "--set", "server.metrics_host=0.0.0.0", "--set", "server.management=true")
    url = serve_all(SOURCE, "echo", *public).urls["metrics"].replace("0.0.0.0", "127.0.0.1")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        scale(url, url)


def test_a_pipeline_is_a_live_graph(serve_all: Callable[..., Any], browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text("def same(data):\n    return data\n")
    (tmp_path / "words.toml").write_text(
        '[first]\nbackend = "Python[ops.py:same]"\nnext = "second"\n'
        '[second]\nbackend = "Python[ops.py:same]"\ninstances = 2\n'
    )
    server = serve_all(None, "words.toml", cwd=tmp_path)
    browser.open(f"{server.urls['metrics']}/#model/words/1")
    browser.wait_for("document.querySelectorAll('#model .graph .node').length === 2")
    over = threading.Event()

    def send() -> None:
        while not over.is_set():
            server.post("/predictions/words", b'"x"')

    sender = threading.Thread(target=send)
    sender.start()
    try:
        label = "document.querySelector('#model .graph').ariaLabel"
        browser.wait_for(f"/second: [1-9][0-9,.]* items.s, .*, 2 instances/.test({label})")
        check_page(browser, "pipeline")
    finally:
        over.set()
        sender.join()


def test_files_are_small_and_nothing_runs_in_the_page(server: Any) -> None:
    from penstock.serving.http.dashboard import _TYPES

    url, total = server.urls["metrics"], 0
    for path in ("", *(f"dashboard/{name}" for name in _TYPES)):
        with urllib.request.urlopen(f"{url}/{path}") as answer:
            assert "script-src 'self'" in answer.headers["content-security-policy"]
            total += len(answer.read())
    assert total < 150_000
    with urllib.request.urlopen(url) as answer:
        page = answer.read().decode()
    assert page.count("<td>echo</td>") == 1, "a browser without scripts has a table"


def test_hostile_names_are_texts_on_every_page(serve_all: Callable[..., Any], browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("def echo(items):\n    return items\n")
    versions = "".join(
        f'[models.m{i}]\ntarget = "app.py:echo"\nname = {json.dumps(HOSTILE)}\nversion = "{i}"\n' for i in (1, 2)
    )
    (tmp_path / "penstock.toml").write_text(f"{versions}[server]\nmanagement = true\n")
    server = serve_all(None, "penstock.toml", cwd=tmp_path)
    url = server.urls["metrics"]
    with urllib.request.urlopen(url) as answer:
        page = answer.read().decode()
    assert page.count("&lt;img src=x") >= 2
    assert "<img" not in page
    with Run("tune", HOSTILE) as run:
        run.write(1, 2, HOSTILE)
        browser.open(f"{url}/")
        for shown in ("#models tbody th", "#runs li", "#events li"):
            assert HOSTILE in browser.wait_for(f"document.querySelector('{shown}')?.textContent"), shown
        check_page(browser, "hostile")
    browser.run("document.querySelector('#models a[href^=\"#model/%3Cimg\"]').click()")
    assert HOSTILE in browser.wait_for("document.querySelector('#model h2').textContent")
    browser.wait_for("document.querySelectorAll('#model dd').length > 5")
    press(browser, "Drain")
    browser.wait_for("document.querySelector('#events').innerText.includes('drained')")
    check_page(browser, "hostile-model")
    assert browser.run("[document.title, document.images.length]") == ["Penstock", 0]
    found = subprocess.run(
        [sys.executable, "-m", "penstock", "doctor", url], capture_output=True, text=True, timeout=60
    )
    assert "<img src=x" in found.stdout
    assert "\x1b" not in found.stdout + found.stderr


def test_a_browser_without_scripts_shows_a_table_and_nothing_that_waits(server: Any, browser: Browser) -> None:
    browser.disable_scripts()
    browser.resize(1280, 700)
    browser.open(f"{server.urls['metrics']}/")
    text = browser.wait_for("document.querySelector('noscript table') && document.body.innerText")
    assert "echo\t1\tREADY\t1 of 1\t" in text
    assert browser.run("document.querySelector('noscript td:nth-child(3)').dataset.label") == "State"
    assert "Connecting" not in text
    assert "Load" not in text
    assert "Models" not in text
    for width in (1280, 380):
        browser.resize(width, 700)
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth"), width
        if folder := os.environ.get("PENSTOCK_PICTURES"):
            Path(folder, f"no-scripts-{width}.png").write_bytes(browser.picture())


def test_the_page_asks_for_a_token(serve: Callable[..., Any], browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    server = serve(SOURCE, "app.py:echo", "--set", f"auth.metrics_token_file={tmp_path / 'token'}")
    url = server.urls["metrics"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        events(url, 1)
    assert events(url, 1, {"authorization": "Bearer secret"})
    with urllib.request.urlopen(url) as answer:
        assert b"<td>" not in answer.read()
    browser.open(f"{url}/")
    browser.wait_for("!document.querySelector('#token').hidden")
    browser.run("document.querySelector('#token input').value = 'secret'")
    browser.run("document.querySelector('#token').requestSubmit()")
    browser.wait_for("document.querySelectorAll('#models tbody tr').length === 1")


def test_a_thousand_viewers_are_bounded_and_leave_nothing(server: Any) -> None:
    from penstock.serving.http.dashboard import VIEWERS

    request = urllib.request.Request(f"{server.urls['metrics']}/dashboard/events")
    streams = [urllib.request.urlopen(request) for _ in range(VIEWERS)]
    for _ in range(1000 - VIEWERS):
        with pytest.raises(urllib.error.HTTPError, match="HTTP Error 429") as refused:
            urllib.request.urlopen(request)
        assert b"the dashboard has 100 viewers, and takes no more" in refused.value.read()
        refused.value.close()
    assert all(stream.readline().startswith(b"data: ") for stream in streams), "the first ones go on"
    assert server.post("/predictions/echo", b'"x"')[0] == 200
    for stream in streams:
        stream.close()
    for _ in range(100):  # the server is told that a viewer has left, or notices when it sends
        with contextlib.suppress(urllib.error.HTTPError):
            assert len(events(server.urls["metrics"], 2)) == 2
            return
        time.sleep(0.1)
    pytest.fail("the places of viewers that left stay taken")


def test_it_can_be_switched_off(serve: Callable[..., Any]) -> None:
    server = serve(SOURCE, "app.py:echo", "--set", "server.dashboard=false")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(server.urls["metrics"])
