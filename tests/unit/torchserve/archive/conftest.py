import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

HANDLER = "def handle(data, context):\n    return data\n"


class ArchiveMaker:
    """Writes archives of any kind into one folder; a member is a name with its bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def manifest(self, **model: Any) -> bytes:
        fields = {"modelName": "m", "modelVersion": "1.0", "handler": "h.py"} | model
        return json.dumps({"runtime": "python", "model": {k: v for k, v in fields.items() if v is not None}}).encode()

    def files(self, **model: Any) -> dict[str, bytes]:
        return {"h.py": HANDLER.encode(), "MAR-INF/MANIFEST.json": self.manifest(**model)}

    def mar(self, members: Mapping[str, bytes] | list[tuple[Any, bytes]] | None = None, name: str = "m.mar") -> Path:
        """A zip; members may be ZipInfo objects and may stand twice."""
        path = self.folder / name
        listed = members if isinstance(members, list) else list((self.files() if members is None else members).items())
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, data in listed:
                archive.writestr(member, data)
        return path

    def tgz(self, members: Mapping[str, bytes] | list[tuple[Any, bytes]] | None = None, name: str = "m.tar.gz") -> Path:
        """A gzipped tar; members may be TarInfo objects."""
        path = self.folder / name
        inner = {f"m/{n}": data for n, data in self.files().items()} if members is None else members
        with tarfile.open(path, "w:gz") as archive:
            for member, data in inner if isinstance(inner, list) else list(inner.items()):
                info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
                if info.isreg() and not info.size:
                    info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return path

    def tree(self, members: Mapping[str, bytes] | None = None, name: str = "m") -> Path:
        path = self.folder / name
        for member, data in (self.files() if members is None else members).items():
            (path / member).parent.mkdir(parents=True, exist_ok=True)
            (path / member).write_bytes(data)
        return path


@pytest.fixture
def archives(tmp_path: Path) -> ArchiveMaker:
    folder = tmp_path / "archives"
    folder.mkdir()
    return ArchiveMaker(folder)


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(name="files_below")
def _files_below() -> Any:
    return files_below
