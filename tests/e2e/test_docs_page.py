"""The page /docs in a real browser: with Swagger UI, and without."""

import importlib.util
import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.browser import Browser, installed

pytestmark = pytest.mark.skipif(not installed(), reason="needs chromium")

SOURCE = """
    import msgspec

    class House(msgspec.Struct):
        rooms: int

    def prices(items: list[House]) -> list[float]:
        return [100.0 * item.rooms for item in items]
"""
TOKEN = "a-token-of-the-test"
EXECUTE = """(async () => {
    const until = async (find) => { for (;;) { const found = find(); if (found) return found;
                                              await new Promise((next) => setTimeout(next, 20)); } };
    const operation = document.querySelector("#operations-prices-post_predictions_prices");
    operation.querySelector("button").click();
    (await until(() => operation.querySelector(".try-out__btn"))).click();
    const text = await until(() => operation.querySelector("textarea"));
    const shown = text.value;
    Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, "value").set.call(text, '{"rooms": 3}');
    text.dispatchEvent(new Event("input", {bubbles: true}));
    (await until(() => operation.querySelector("button.execute"))).click();
    const row = await until(() => operation.querySelector(".live-responses-table .response"));
    return [shown, row.innerText];
})()"""


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser of its own for each test: errors of an earlier page may be reported late."""
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(SOURCE, "prices")


def executed(browser: Browser) -> str:
    """What the page shows after "Execute" with {"rooms": 3}."""
    browser.wait_for('!!document.querySelector("#operations-prices-post_predictions_prices")')
    shown, answer = browser.run(EXECUTE)
    assert json.loads(shown) == {"rooms": 0}  # an example of the schema
    return str(answer)


@contextmanager
def under_prefix(server: Any) -> Iterator[str]:
    """The address of the server behind a proxy, which adds a prefix."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path.startswith("/ml/")
            body = self.rfile.read(int(self.headers.get("content-length", 0))) or None
            request = urllib.request.Request(server.url + self.path[3:], body, dict(self.headers), method=self.command)
            with urllib.request.urlopen(request) as answer:
                content = answer.read()
                self.send_response(answer.status)
                for name in ("content-type", "content-security-policy"):
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}/ml"
        finally:
            proxy.shutdown()
            thread.join()


@pytest.fixture(params=["", "/ml"])
def place(request: pytest.FixtureRequest) -> Callable[[Any], AbstractContextManager[str]]:
    """The address of a server, or of a proxy in front of it."""
    return under_prefix if request.param else lambda server: nullcontext(server.url)


@pytest.mark.skipif(importlib.util.find_spec("flask_swagger_ui") is None, reason="needs the extra swagger")
def test_swagger_ui_shows_and_executes_the_operations(browser: Browser, server: Any, place: Any) -> None:
    browser.problems.clear()
    with place(server) as url:
        check_swagger(browser, url)


def check_swagger(browser: Browser, url: str) -> None:
    browser.open(url + "/docs")
    assert re.search(r"200\b.*300", executed(browser), re.S)
    assert not browser.problems, "the page breaks its own security policy"


@pytest.mark.skipif(importlib.util.find_spec("flask_swagger_ui") is None, reason="needs the extra swagger")
def test_a_server_with_tokens_shows_its_routes_for_a_token(
    browser: Browser, serve: Callable[..., Any], token_file: str
) -> None:
    server = serve(SOURCE, "prices", "--token-file", token_file)
    browser.open(server.url + "/docs")
    browser.wait_for('!document.querySelector("#token").hidden')
    fill = 'document.querySelector("#token input").value = %s; document.querySelector("#token button").click()'
    browser.run(fill % json.dumps("wrong"))
    assert "bearer token" in browser.wait_for('document.querySelector("#problem").innerText')
    assert not browser.run('document.querySelector("#routes").innerText')
    browser.run(fill % json.dumps(TOKEN))
    assert re.search(r"200\b.*300", executed(browser), re.S)
    assert browser.run('document.querySelector(".auth-wrapper button.authorize.locked") !== null')


def test_without_swagger_ui_the_page_lists_and_executes_them_too(
    browser: Browser, serve: Callable[..., Any], tmp_path: Path, place: Any
) -> None:
    (tmp_path / "flask_swagger_ui.py").write_text("")  # hides the package
    server = serve(SOURCE, "prices", env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2] / 'src'}"})
    with place(server) as url:
        check_plain(browser, url)


def check_plain(browser: Browser, url: str) -> None:
    browser.open(url + "/docs")
    assert "extra 'swagger'" in browser.wait_for('document.querySelector("#routes").innerText')
    browser.run("""
        const entries = [...document.querySelectorAll("details")];
        const entry = entries.find((each) => each.innerText.startsWith("POST /predictions/prices"));
        entry.open = true;
        entry.querySelector("textarea").value = '{"rooms": 3}';
        entry.querySelector("button").click();
    """)
    find = '[...document.querySelectorAll("details[open] pre")].at(-1).textContent'
    assert browser.wait_for(find) == "200\n300.0"


def test_the_page_is_open_and_loads_nothing_from_elsewhere(serve: Callable[..., Any], token_file: str) -> None:
    server = serve(SOURCE, "prices", "--token-file", token_file)
    assert server.get("/openapi.json")[0] == 401
    assert server.get("/docs/../../pyproject.toml")[0] == 404
    for path in ("/docs", "/docs/docs.js"):
        with urllib.request.urlopen(server.url + path) as answer:
            policy, text = answer.headers["content-security-policy"], answer.read().decode()
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"https?://|//cdn", text)
    status, body = server.get("/docs/openapi.py")
    assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")
