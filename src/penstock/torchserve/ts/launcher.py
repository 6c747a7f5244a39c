"""Starts and stops `torchserve` from Python, as tests do. Source: `ts/launcher.py` of TorchServe 0.12.0."""

import importlib
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any, Final

_LINES: Final = 1000  # that wait to be read; further ones are only printed


def stop(wait: bool = True) -> None:
    """Stops the server, if one runs."""
    subprocess.run(["torchserve", "--stop", *(["--foreground"] if wait else [])])


def start(
    model_store: str | None = None,
    snapshot_file: str | None = None,
    no_config_snapshots: bool = False,
    plugin_folder: str | None = None,
    disable_token: bool = False,
    models: str | None = None,
    enable_model_api: bool = False,
) -> Queue[str | None]:
    """Starts a server in place of a running one; returns, once it has started, the lines that it prints from then on.

    The last item is None. The parameters are TorchServe's.
    """
    stop()
    values = {
        "--model-store": model_store,
        "--plugins-path": plugin_folder,
        "--ts-config": snapshot_file,
        "--models": models,
    }
    switches = {
        "--no-config-snapshots": no_config_snapshots,
        "--disable-token-auth": disable_token,
        "--enable-model-api": enable_model_api,
    }
    command = ["torchserve", "--start", *(flag for flag, given in switches.items() if given)]
    command += [word for flag, value in values.items() if value for word in (flag, str(value))]
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert server.stdout is not None
    for line in server.stdout:
        print(line.strip())
        if "Model server started" in line:
            break
    lines: Queue[str | None] = Queue(_LINES)
    Thread(target=_forward, args=(server.stdout, lines), daemon=True).start()
    return lines


def register_model(model_name: str, url: str) -> Any:
    """The response to the registration of a model with one worker, at the default address."""
    return register_model_with_params(
        (("model_name", model_name), ("url", url), ("initial_workers", "1"), ("synchronous", "true"))
    )


def register_model_with_params(params: Any) -> Any:
    """The response to a registration with these parameters of the query. Needs the package `requests`."""
    requests: Any = importlib.import_module("requests")
    return requests.post("http://localhost:8081/models", params=params)


def _forward(output: Iterable[str], lines: Queue[str | None]) -> None:
    for line in output:
        print(line.strip())
        with suppress(Full):
            lines.put_nowait(line)
    if lines.full():
        with suppress(Empty):
            lines.get_nowait()
    lines.put(None)
