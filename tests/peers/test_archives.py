"""TorchServe 0.12.0 serves Penstock's archives, and Penstock serves torch-model-archiver's, unchanged."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.archives import read_archive

pytestmark = pytest.mark.peer

HANDLER = '''"""Answers with what it sees: files beside it, its configuration, the model's name, and the request."""

import json
import os

import helper


class Service:
    def initialize(self, context):
        folder = context.system_properties["model_dir"]
        self.files = sorted(
            os.path.relpath(os.path.join(root, file), folder)
            for root, _, files in os.walk(folder)
            for file in files
            if not file.endswith(".pyc")
        )
        with open(os.path.join(folder, "sub", "table.txt")) as f:
            self.table = f.read()
        self.yaml = context.model_yaml_config

    def handle(self, data, context):
        return [
            {
                "model": context.manifest["model"],
                "files": self.files,
                "table": self.table,
                "greeting": self.yaml["handler"]["greeting"],
                "helper": helper.NAME,
                "body": str(row.get("body") or row.get("data")),
            }
            for row in data
        ]


service = Service()


def handle(data, context):
    if data is None:
        return service.initialize(context)
    return service.handle(data, context)


def named(data, context):
    return handle(data, context)
'''
ALONE = HANDLER[: HANDLER.index("service = Service()")]  # a class and nothing else

FORMATS = {"default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz", "no-archive": ""}
REQUESTS = [
    (b"plain bytes", "application/octet-stream"),
    (b'{"a": [1, 2.5, null]}', "application/json"),
    ("grün".encode(), "text/plain"),
    (
        b'--x\r\nContent-Disposition: form-data; name="data"\r\n\r\nvalue\r\n--x--\r\n',
        "multipart/form-data; boundary=x",
    ),
]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with the files of models, and an empty store."""
    files = {
        "ts_handler.py": HANDLER,
        "alone.py": ALONE,
        "extra/helper.py": "NAME = 'helper'\n",
        "extra/sub/table.txt": "a\tb\n",
        "extra/__pycache__/x.pyc": "not wanted",
        "extra/.git/config": "not wanted",
        "model-config.yaml": "minWorkers: 1\nmaxWorkers: 1\nhandler:\n  greeting: hello\n",
        "requirements.txt": "numpy\n",
        "w.pt": "weights",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "store").mkdir()
    return tmp_path


def write(archiver: str, work: Path, name: str, handler: str, archive_format: str, export_path: str = "store") -> None:
    command = [archiver, "--model-name", name, "--version", "1.0", "--handler", handler, "--extra-files", "extra"]
    command += ["--serialized-file", "w.pt", "-r", "requirements.txt", "-c", "model-config.yaml"]
    command += ["--archive-format", archive_format, "--export-path", export_path]
    subprocess.run(command, cwd=work, check=True)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("archive_format", FORMATS)
def test_both_archivers_write_the_same(program: Any, work: Path, archive_format: str):
    found = {}
    for owner in ("penstock", "torchserve"):
        (work / owner).mkdir()
        write(program(owner, "torch-model-archiver"), work, "m", "ts_handler", archive_format, owner)
        archive = read_archive(work / owner / f"m{FORMATS[archive_format]}", work / f"{owner}-unpacked")
        files = tree(archive.folder)
        manifest = json.loads(files.pop("MAR-INF/MANIFEST.json"))
        assert manifest.keys() == {"createdOn", "runtime", "model", "archiverVersion"}
        found[owner] = (files, manifest["runtime"], manifest["model"])
    assert found["penstock"] == found["torchserve"]


@pytest.mark.parametrize(
    ("server", "archiver"), [("penstock", "torchserve"), ("torchserve", "penstock"), ("penstock", "penstock")]
)
def test_an_archive_is_served_unchanged(program: Any, peer_server: Any, work: Path, server: str, archiver: str):
    command = program(archiver, "torch-model-archiver")
    handlers = {"default": "ts_handler.py", "zip-store": "ts_handler:named", "tgz": "alone.py", "no-archive": "alone"}
    models = []
    for archive_format, handler in handlers.items():
        name = archive_format.replace("-", "")
        write(command, work, name, handler, archive_format)
        models.append(f"{name}={name}{FORMATS[archive_format]}")
    running = peer_server(server, work / "store", models)
    for model, handler in zip(models, handlers.values(), strict=True):
        name = model.partition("=")[0]
        for body, content_type in REQUESTS:
            status, answer = running.post(f"/predictions/{name}", body, content_type)
            assert status == 200, answer
            files = {"MAR-INF/MANIFEST.json", "helper.py", "sub/table.txt", "model-config.yaml", "requirements.txt"}
            assert json.loads(answer) == {
                "model": {
                    "modelName": name,
                    "modelVersion": "1.0",
                    "handler": handler,
                    "serializedFile": "w.pt",
                    "requirementsFile": "requirements.txt",
                    "configFile": "model-config.yaml",
                },
                "files": sorted({*files, "w.pt", handler.partition(":")[0].removesuffix(".py") + ".py"}),
                "table": "a\tb\n",
                "greeting": "hello",
                "helper": "helper",
                "body": as_seen(body, content_type),
            }
        assert running.post(f"/predictions/{name}/2.0", b"x")[0] == 404


def as_seen(body: bytes, content_type: str) -> str:
    """What a handler sees of the request, as text."""
    if content_type == "application/json":
        return str(json.loads(body))
    if content_type == "text/plain":
        return body.decode()
    return str(bytearray(b"value" if content_type.startswith("multipart") else body))
