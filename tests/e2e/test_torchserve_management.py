"""TorchServe's management API on a running server, called correctly and incorrectly."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

ALLOWED_URLS = r"https://models\\.example\\.com/.*"
HANDLER = """
import time
def handle(data, context):
    if data is not None:
        time.sleep(float(bytes(data[0]["body"]) or 0))
        return [context.manifest["model"]["modelVersion"]] * len(data)
"""


class Api:
    """A client of a server's management and inference APIs."""

    def __init__(self, torchserve: Any, key: str = "") -> None:
        self._torchserve = torchserve
        self.key = key

    def ask(self, method: str, path: str, body: bytes | None = None, api: str = "Management") -> tuple[int, Any]:
        headers = {"Content_Type": "application/octet-stream"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        status, text = self._torchserve.fetch(self._torchserve.url(api) + path, body, method=method, **headers)
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode()

    def predict(self, path: str, body: bytes = b"") -> tuple[int, Any]:
        return self.ask("POST", f"/predictions/{path}", body, api="Inference")

    def status(self, method: str, path: str) -> tuple[int, str]:
        """The status code, and the status or error text."""
        code, answer = self.ask(method, path)
        return code, answer.get("status") or answer.get("message")


@pytest.fixture
def api(torchserve: Any) -> Api:
    """A server without tokens, whose store has m 1.0, which it serves, and m 2.0."""
    for version in ("1.0", "2.0"):
        torchserve.add_model(HANDLER, version, f"m-{version}.mar")
    torchserve.configure(allowed_urls=ALLOWED_URLS)
    torchserve.start("--models", "m-1.0.mar", "--disable-token-auth", "--enable-model-api")
    return Api(torchserve)


def test_the_load_decides_between_min_and_max_workers(api: Api) -> None:
    assert api.status("PUT", "/models/m?min_worker=1&max_worker=3&synchronous=true")[0] == 200

    def workers() -> int:
        return len(api.ask("GET", "/models/m")[1][0]["workers"])

    before = workers()
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(api.predict, "m", b"0.1") for _ in range(150)]
        seen = {before}
        while not all(answer.done() for answer in answers):
            seen.add(workers())
            time.sleep(0.05)
        assert {answer.result() for answer in answers} == {(200, 1.0)}
    assert max(seen) > before
    assert max(seen) <= 3
    assert api.status("PUT", "/models/m?min_worker=1&max_worker=1&synchronous=true")[0] == 200
    assert workers() == 1


def test_a_model_is_registered_scaled_made_default_and_removed(api: Api) -> None:
    assert api.predict("m") == (200, 1.0)
    path = "/models?url=m-2.0.mar&initial_workers=2"
    assert api.status("POST", path) == (200, 'Model "m" Version: 2.0 registered with 2 initial workers')
    assert api.status("POST", path) == (409, "Model version 2.0 is already registered for model m")
    assert (api.predict("m"), api.predict("m/2.0")) == ((200, 1.0), (200, 2.0))
    assert api.status("PUT", "/models/m/2.0?min_worker=1&synchronous=true") == (
        200,
        "Workers scaled to 1 for model: m, version: 2.0",
    )
    assert api.status("DELETE", "/models/m/1.0") == (403, "Cannot remove default version for model m")
    assert api.status("PUT", "/models/m/2.0/set-default") == (
        200,
        'Default version successfully updated for model "m" to "2.0"',
    )
    assert api.predict("m") == (200, 2.0)
    assert api.status("PUT", "/models/m/9.9/set-default") == (404, "Model version 9.9 does not exist for model m")
    code, found = api.ask("GET", "/models/m/all")
    assert code == 200
    assert [(d["modelVersion"], len(d["workers"]), d["loadedAtStartup"]) for d in found] == [
        ("1.0", 1, True),
        ("2.0", 1, False),
    ]
    assert api.status("DELETE", "/models/m/1.0") == (200, 'Model "m" unregistered')
    assert api.status("DELETE", "/models/m") == (200, 'Model "m" unregistered')
    assert api.ask("GET", "/models") == (200, {"models": []})
    assert api.predict("m") == (
        404,
        {"code": 404, "type": "ModelNotFoundException", "message": "Model not found: m"},
    )


def test_ping_reports_a_dead_worker_within_a_second(torchserve: Any, api: Api) -> None:
    def ping_becomes(wanted: int, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while (found := api.ask("GET", "/ping", api="Inference"))[0] != wanted:
            assert time.monotonic() < end
            time.sleep(0.02)
        return found[1]

    assert ping_becomes(200, 1.0) == {"status": "Healthy"}
    (file,) = torchserve.folder.rglob("service.py")
    file.write_text("raise RuntimeError('not now')")
    (worker,) = api.ask("GET", "/models/m")[1][0]["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    assert ping_becomes(500, 1.0) == {"status": "Unhealthy"}
    file.write_text(HANDLER)
    assert ping_becomes(200, 30.0) == {"status": "Healthy"}
    assert api.predict("m") == (200, 1.0)


def test_a_server_restarts_with_its_models(torchserve: Any, api: Api) -> None:
    api.status("POST", "/models?url=m-2.0.mar&initial_workers=2&batch_size=3")
    api.status("PUT", "/models/m/2.0/set-default")
    torchserve.run("torchserve", "--stop")
    kinds = [file.name.partition("-")[2] for file in sorted((torchserve.folder / "logs" / "config").iterdir())]
    assert kinds == ["startup.cfg", "snapshot.cfg", "snapshot.cfg", "shutdown.cfg"]
    torchserve.start()
    assert (api.predict("m"), api.predict("m/1.0")) == ((200, 2.0), (200, 1.0))
    (found,) = api.ask("GET", "/models/m")[1]
    assert (found["batchSize"], found["minWorkers"], len(found["workers"])) == (3, 2, 2)
    torchserve.run("torchserve", "--stop")


def test_each_key_opens_its_own_api_and_can_be_renewed(torchserve: Any) -> None:
    torchserve.add_model(HANDLER)
    torchserve.configure(allowed_urls=ALLOWED_URLS)
    torchserve.start("--models", "m.mar")
    keys = torchserve.keys
    management, inference = Api(torchserve, keys()["management"]), Api(torchserve, keys()["inference"])
    assert management.ask("GET", "/models")[0] == 200
    assert inference.predict("m") == (200, 1.0)
    code, answer = inference.ask("GET", "/models")
    assert (code, answer["type"]) == (400, "InvalidKeyException")
    assert management.predict("m")[0] == 400
    assert management.ask("POST", "/models?url=m.mar")[0] == 405  # the API that changes models is off
    assert Api(torchserve, keys()["API"]).ask("GET", "/token?type=inference") == (200, "\n")
    assert inference.predict("m")[0] == 400
    assert Api(torchserve, keys()["inference"]).predict("m") == (200, 1.0)
