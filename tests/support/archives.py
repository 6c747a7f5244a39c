"""Archives that tests write, and a package for pip."""

import json
import zipfile
from pathlib import Path

from penstock.torchserve.archive.store import Archive, read_folder, unpack_archive


def read_archive(path: Path, target: Path) -> Archive:
    """The archive at `path`, unpacked into the new folder `target`; a folder is read in place."""
    if path.is_dir():
        return read_folder(path, name=path.name)
    with path.open("rb") as file:
        return unpack_archive(file, path.name, target)


def write_wheel(folder: Path, version: str = "1.0") -> Path:
    """A package `penstock_tiny` with NAME and VERSION, for pip without a network."""
    wheel = folder / f"penstock_tiny-{version}-py3-none-any.whl"
    info = f"penstock_tiny-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("penstock_tiny.py", f"NAME, VERSION = 'tiny', {version!r}\n")
        z.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: penstock-tiny\nVersion: {version}\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    return wheel


def write_mar(store: Path, name: str, handler: str, config: str = "") -> None:
    """Writes the archive of a model with this handler code and model-config.yaml to the store."""
    store.mkdir(exist_ok=True)
    model = {"modelName": name, "modelVersion": "1.0", "handler": "service.py"}
    if config:
        model["configFile"] = "model-config.yaml"
    with zipfile.ZipFile(store / f"{name}.mar", "w") as mar:
        mar.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
        mar.writestr("service.py", handler)
        mar.writestr("model-config.yaml", config)


def write_war(store: Path, name: str, spec: str, functions: str, file: str = "") -> str:
    """Writes a workflow's archive to the store and returns the archive's name."""
    store.mkdir(exist_ok=True)
    workflow = {"workflowName": name, "specFile": "spec.yaml", "handler": "functions.py"}
    path = store / (file or f"{name}.war")
    with zipfile.ZipFile(path, "w") as war:
        manifest = {"createdOn": "1", "workflow": workflow, "archiverVersion": "0.2"}
        war.writestr("WAR-INF/MANIFEST.json", json.dumps(manifest))
        war.writestr("spec.yaml", spec)
        war.writestr("functions.py", functions)
    return path.name
