"""A headless Chromium, driven over its DevTools pipe without a library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip
WAIT_S = 60.0


def installed() -> bool:
    """Whether Chromium is there."""
    return shutil.which("chromium") is not None


class Browser:
    """One page. `problems` collects what its console reports as errors, violations of its security policy included."""

    def __init__(self, folder: Path) -> None:
        their_read, self._write = os.pipe()
        self._read, their_write = os.pipe()
        command = ["bash", "-c", f'exec "$@" 3<&{their_read} 4>&{their_write}', "bash", "chromium", *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={folder}"],
            pass_fds=(their_read, their_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_read)
        os.close(their_write)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def open(self, url: str) -> None:
        """Begins to load a page."""
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; awaits a promise."""
        found = self._evaluate(script)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _evaluate(self, script: str) -> dict[str, Any]:
        found: dict[str, Any] = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        return found

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the page's window, in pixels."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """Asks for "light" or "dark" colours."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def disable_scripts(self) -> None:
        """Pages that are opened from now on run no scripts; `run` still works."""
        self._call("Emulation.setScriptExecutionDisabled", value=True)

    def picture(self) -> bytes:
        """The page as a PNG file."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def wait_for(self, script: str) -> Any:
        """The value of the expression once it is true; one that raises, as while a page loads, is not."""
        end = time.monotonic() + WAIT_S
        while "exceptionDetails" in (found := self._evaluate(script)) or not found["result"].get("value"):
            assert time.monotonic() < end, (
                f"{script} stays false\n{self.run('document.body.innerText')}\n{self.problems}"
            )
            time.sleep(0.02)
        return found["result"]["value"]

    def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.problems.append(answer["params"]["entry"]["text"])
            elif answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(answer["params"]["exceptionDetails"]))
        assert "result" in answer, answer
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
