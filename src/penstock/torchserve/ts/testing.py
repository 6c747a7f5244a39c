"""What tests of handlers import: a loader and a context without a server, and a launcher of `torchserve`.

Source: `ts/model_loader.py`, `ts/launcher.py` and the test utilities of TorchServe 0.12.0.
"""

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import tempfile
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any, Final

from penstock.torchserve.handlers.entry import find_entry, in_envelope
from penstock.torchserve.ts import __version__
from penstock.torchserve.ts.context import Context
from penstock.torchserve.ts.metric_cache import Metric, MetricsCache, MetricsStore
from penstock.torchserve.ts.util import get_yaml_config

_LINES: Final = 1000  # that wait to be read; further ones are only printed

# ---- a handler in this process

PREDICTION_METRIC = "PredictionTime"


class Service:
    """A loaded handler with its context; `handle(data, context)` is the handler's."""

    def __init__(self, context: Any, entry_point: Callable[[Any, Any], Any]) -> None:
        self.context = context
        self.handle = entry_point


def emit_metrics(metrics: Iterable[Metric]) -> None:
    """Records the value of each metric."""
    for metric in metrics or ():
        metric.update(metric.value)


class TsModelLoader:
    def load(
        self,
        model_name: str,
        model_dir: str,
        handler: str,
        gpu_id: int | None,
        batch_size: int | None,
        envelope: str | None = None,
        limit_max_image_pixels: bool = True,
        metrics_cache: Any = None,
    ) -> Service:
        """The initialized handler of an unpacked archive. `model_dir` must be on the import path.

        The parameters are TorchServe's. Raises ImportError, ValueError, and the handler's errors.
        """
        manifest = _manifest(model_dir)
        initialize, handle = find_entry(handler)
        if envelope is not None:
            handle = in_envelope(envelope, handle)
        config = ((manifest or {}).get("model") or {}).get("configFile")
        context = Context(
            model_name,
            model_dir,
            manifest,
            batch_size,
            gpu_id,
            __version__,
            limit_max_image_pixels,
            metrics_cache or MetricsCache(model_name),
            get_yaml_config(os.path.join(model_dir, config)) if config else {},
        )
        initialize(context)
        return Service(context, handle)


class ModelLoaderFactory:
    @staticmethod
    def get_model_loader() -> TsModelLoader:
        return TsModelLoader()


def _manifest(model_dir: str) -> Any:
    path = os.path.join(model_dir, "MAR-INF", "MANIFEST.json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as f:
        return json.load(f)


class MockContext:
    """A Context for a handler's `initialize` and `handle`, without explanations."""

    def __init__(
        self,
        model_pt_file: str | None = "model.pt",
        model_dir: str = "ts/torch_handler/unit_tests/models/tmp",
        model_file: str | None = "model.py",
        gpu_id: str | None = "0",
        model_name: str = "mnist",
        model_yaml_config_file: str | None = None,
    ) -> None:
        import torch

        self.manifest: dict[str, Any] = {"model": {}}
        if model_pt_file:
            self.manifest["model"]["serializedFile"] = model_pt_file
        if model_file:
            self.manifest["model"]["modelFile"] = model_file
        self.system_properties: dict[str, Any] = {"model_dir": model_dir}
        if gpu_id and torch.cuda.is_available():
            self.system_properties["gpu_id"] = gpu_id
        self.explain = False
        self.metrics = MetricsStore(uuid.uuid4(), model_name)
        self.model_yaml_config: Any = {}
        if model_yaml_config_file:
            self.model_yaml_config = get_yaml_config(os.path.join(model_dir, model_yaml_config_file))

    def get_request_header(self, idx: int, exp: str) -> bool:
        return bool(idx and exp and self.explain)


def download_model(model_url: str, model_dir: Path) -> None:
    """Puts the file at the URL into `model_dir` as `model.pt`. The user's cache keeps it for the next call."""
    kept = Path.home() / ".cache" / "penstock" / hashlib.sha256(model_url.encode()).hexdigest()[:16]
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            with urllib.request.urlopen(model_url) as source:
                shutil.copyfileobj(source, file)
            os.replace(file.name, kept)
    shutil.copy(kept, Path(model_dir) / "model.pt")


def copy_files(src_dir: Path, dst_dir: Path, files: Mapping[str, str]) -> None:
    """Copies each file of `src_dir` to its name in `dst_dir`."""
    for source, target in files.items():
        shutil.copyfile(Path(src_dir) / source, Path(dst_dir) / target)


# ---- a server, as a process


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
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
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
