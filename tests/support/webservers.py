"""Web servers with several processes, as tests start and ask them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def served(
    folder: Path, app: str, environment: Mapping[str, str], *command: str
) -> Iterator[tuple[str, subprocess.Popen[bytes], tempfile._TemporaryFileWrapper[bytes]]]:
    """(address, process, what it says) of a server of `app.py`, whose text is given.

    Its command has `{socket}`, or `{port}`, where its address belongs.
    """
    (folder / "app.py").write_text(textwrap.dedent(app))
    with socket.socket() as free, tempfile.TemporaryFile() as said:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        address = f"127.0.0.1:{port}"
        free.close()
        process = subprocess.Popen(
            [part.replace("{socket}", address).replace("{port}", port) for part in command],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            yield f"http://{address}/", process, said
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a master that is killed leaves its workers behind
            process.wait()


def ask(url: str) -> Any:
    """The answer, as JSON; waits for a server that starts."""
    end = time.monotonic() + 40
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
