"""The same HTTP requests to TorchServe 0.12.0 and to Penstock have the same status, type, text and effect."""

import json
import ssl
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.archives import write_mar, write_wheel

pytestmark = pytest.mark.peer

HANDLER = """
import os
from ts.utils.util import PredictionException

def handle(data, context):
    if data is None:
        return None
    order = bytes(data[0]["body"])
    if order == b"raise":
        raise ValueError("secret")
    if order == b"memory":
        raise MemoryError
    if order == b"cuda":
        raise RuntimeError("CUDA error")
    if order == b"refuse":
        raise PredictionException("no such thing", 513)
    if order == b"die":
        os._exit(3)
    return {b"wrong": 7, b"length": ["a", "b"], b"type": [object()]}.get(order, ["ok"])
"""
ORDERS = (b"", b"raise", b"memory", b"cuda", b"refuse", b"wrong", b"length", b"type", b"die")
NUMBERS = ("batch_size", "max_batch_delay", "response_timeout", "startup_timeout", "initial_workers")
LISTS = ("limit=", "limit=-1", "limit=x", "limit=1.5", "limit=9999999999", "limit=1", "next_page_token=",
         "next_page_token=x", "next_page_token=-1", "next_page_token=5")  # fmt: skip
REGISTRATIONS = ("", "?url=", "?url=%20", "?url=none.mar", "?url=m.mar&runtime=perl", "?url=fails.mar",
                 "?url=memory.mar", "?url=cuda.mar")  # fmt: skip
BODIES: tuple[dict[str, Any], ...] = (
    {"url": ""}, {"batch_size": "3"}, {"batch_size": -1}, {"batch_size": None}, {"initial_workers": -1},
    {"synchronous": "junk"}, {"max_batch_delay": "50"},
)  # fmt: skip
SCALES = ("min_worker=", "min_worker=x", "min_worker=1.5", "min_worker=0", "min_worker=0&max_worker=x",
          "min_worker=0&max_worker=-1", "max_worker=0", "max_worker=-1", "min_worker=0&timeout=x")  # fmt: skip
SETTINGS = ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout")


def settings_of(server: Any) -> tuple[Any, ...]:
    """The settings of the model "n", which is then unregistered."""
    status, found = server.manage("GET", "/models/n")
    server.manage("DELETE", "/models/n")
    return tuple(found[0][key] for key in SETTINGS) if status == 200 else (status, found)


def outcomes(server: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for order in ORDERS:
        status, body = server.post("/predictions/m", order)
        found[f"predict {order!r}"] = (status, body)
    for query in LISTS:
        found[f"list {query}"] = server.manage("GET", f"/models?{query}")
    for query in REGISTRATIONS:
        found[f"register {query}"] = server.manage("POST", f"/models{query}")
    for name in NUMBERS:
        for value in ("", "x", "1.5", "9999999999", "3") if name != "initial_workers" else ("-1", "0", "x"):
            query = f"url=m.mar&model_name=n&initial_workers=0&{name}={value}"
            if name == "initial_workers":
                query = f"url=m.mar&model_name=n&{name}={value}"
            answer = server.manage("POST", f"/models?{query}")
            found[f"register {name}={value}"] = answer, settings_of(server)
    for name in ("batch_size", "response_timeout", "startup_timeout"):
        answer = server.manage("POST", f"/models?url=m.mar&model_name=n&initial_workers=0&{name}=-1")
        found[f"register {name}=-1"] = answer, settings_of(server)
    for name in ("batch_size", "response_timeout", "startup_timeout", "max_batch_delay"):  # they have another effect
        found[f"register {name}=0"] = server.manage(
            "POST", f"/models?url=m.mar&model_name=n&initial_workers=0&{name}=0"
        )
        settings_of(server)
    for body in BODIES:
        sent = {"url": "m.mar", "model_name": "n", "initial_workers": 0, "max_batch_delay": 100, **body}
        answer = server.manage("POST", "/models", json.dumps(sent).encode())
        found[f"register {body}"] = answer, settings_of(server)
    server.manage("POST", "/models?url=m.mar&model_name=n&initial_workers=0")
    for query in SCALES:
        found[f"scale {query}"] = server.manage("PUT", f"/models/n?synchronous=true&{query}")
    return found


def test_errors_and_numbers_are_the_same(peer_server: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_mar(store, "m", HANDLER)
    for name, error in (("fails", "ValueError"), ("memory", "MemoryError"), ("cuda", "RuntimeError('CUDA')")):
        write_mar(store, name, f"def handle(data, context):\n    raise {error}\n")
    settings = "enable_model_api=true\n"
    theirs, ours = (outcomes(peer_server(owner, store, ["m=m.mar"], settings)) for owner in ("torchserve", "penstock"))
    assert {call: (ours[call], found) for call, found in theirs.items() if ours[call] != found} == {}


@pytest.mark.parametrize(
    ("key", "archive", "starts"),
    [
        ("model_snapshot", "m.mar", {"torchserve", "penstock"}),
        ("model_snapshot", "none.mar", set()),
        ("load_models", "none.mar", {"torchserve"}),  # it warns: docs/migrate-from-torchserve.md lists the difference
    ],
)
def test_a_missing_archive_aborts_the_start(
    peer_server: Any, tmp_path: Path, key: str, archive: str, starts: set[str]
) -> None:
    write_mar(tmp_path / "store", "m", HANDLER)
    state = {"defaultVersion": True, "marName": archive, "minWorkers": 1, "maxWorkers": 1, "batchSize": 1}
    models = {"m": {"1.0": {**state, "maxBatchDelay": 100, "responseTimeout": 120}}}
    snapshot = json.dumps({"name": "startup.cfg", "modelCount": 1, "created": 1, "models": models})
    value = snapshot if key == "model_snapshot" else f"m={archive}"
    for owner in ("torchserve", "penstock"):
        server = peer_server(owner, tmp_path / "store", [], f"{key}={value}\n")
        assert server.started() is (owner in starts), owner


def test_both_start_with_a_key_of_1024_bits(peer_server: Any, tmp_path: Path) -> None:
    write_mar(tmp_path / "store", "m", HANDLER)
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:1024", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl._create_unverified_context()
    context.set_ciphers("DEFAULT:@SECLEVEL=1")
    for owner in ("torchserve", "penstock"):
        settings = f"certificate_file={certificate}\nprivate_key_file={key}\nenable_grpc_ssl=false\n"
        server = peer_server(owner, tmp_path / "store", [], settings, tls=True)
        assert server.started(), owner
        with urllib.request.urlopen(f"{server.management}/models", timeout=30, context=context) as response:
            assert json.load(response) == {"models": []}


def test_packages_of_a_folder_are_installed_without_changing_it(peer_server: Any, tmp_path: Path) -> None:
    requirements = str(write_wheel(tmp_path))
    for owner in ("torchserve", "penstock"):
        folder = tmp_path / f"store-{owner}" / "m"
        (folder / "MAR-INF").mkdir(parents=True)
        model = {"modelName": "m", "modelVersion": "1.0", "handler": "service.py", "requirementsFile": "r.txt"}
        (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"runtime": "python", "model": model}))
        (folder / "r.txt").write_text(requirements)
        code = "from penstock_tiny import NAME\ndef handle(data, context):\n    return data and [NAME for _ in data]\n"
        (folder / "service.py").write_text(code)
        before = set(folder.rglob("*"))
        server = peer_server(owner, folder.parent, ["m=m"], "install_py_dep_per_model=true\n")
        assert server.post("/predictions/m", b"x") == (200, b"tiny")
        assert set(folder.rglob("*")) == before, owner
