import json
import re
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.torchserve.admin.files import Snapshots, Tokens, last_snapshot
from penstock.torchserve.config import read_properties
from penstock.torchserve.protocol.api import ApiError

MODELS: dict[str, dict[str, dict[str, Any]]] = {"m": {"1.0": {"marName": "m.mar", "minWorkers": 1}}}


def test_a_snapshot_is_a_configuration_with_its_models(tmp_path: Path) -> None:
    writer = Snapshots(tmp_path, {"job_queue_size": "7", "load_models": "all", "model_snapshot": "old"})
    file = writer.write("startup", MODELS)
    assert file is not None
    assert file.parent == tmp_path / "config"
    assert re.fullmatch(r"\d{17}-startup\.cfg", file.name)
    found = {key: each.value for key, each in read_properties(str(file)).items()}
    message = json.loads(found.pop("model_snapshot"))
    assert found == {"job_queue_size": "7"}
    assert (message["name"], message["modelCount"], message["models"]) == (file.name, 1, MODELS)


def test_the_last_snapshot_is_the_newest_by_name(tmp_path: Path) -> None:
    assert last_snapshot(tmp_path) is None
    writer = Snapshots(tmp_path, {})
    files = [writer.write(kind, MODELS) for kind in ("startup", "snapshot", "snapshot", "shutdown")]
    assert len(set(files)) == 4
    assert last_snapshot(tmp_path) == files[-1]


def test_other_files_are_not_snapshots(tmp_path: Path) -> None:
    file = Snapshots(tmp_path, {}).write("snapshot", MODELS)
    for name in ("99999999999999999-snapshot.cfg.bak", "zz-snapshot.cfg", "notes.txt", ".99999999999999999-x.cfg.1"):
        (tmp_path / "config" / name).write_text("")
    assert last_snapshot(tmp_path) == file


def test_old_snapshots_are_removed_and_other_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.torchserve.admin.files.KEEP", 3)
    writer = Snapshots(tmp_path, {})
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "notes.txt").write_text("")
    files = [writer.write("snapshot", MODELS) for _ in range(5)]
    assert sorted(p for p in (tmp_path / "config").iterdir() if p.suffix == ".cfg") == files[2:]
    assert (tmp_path / "config" / "notes.txt").exists()


def test_a_folder_that_cannot_be_created_only_costs_the_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("a file")
    assert Snapshots(tmp_path / "logs", {}).write("snapshot", MODELS) is None
    assert "snapshot_not_written" in caplog.text


# ---- keys

Refused = Callable[[pytest.ExceptionInfo[ApiError]], tuple[int, str, str]]
WRONG = "Token either incorrect, expired, or not provided correctly"


class Clock:
    def __init__(self) -> None:
        self.time = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(tmp_path: Path, clock: Clock) -> Tokens:
    found = Tokens(tmp_path, 3600.0, clock)
    found.publish()
    return found


def key_of(tokens: Tokens, kind: str) -> str:
    return str(json.loads(tokens.file.read_text())[kind]["key"])


def test_the_file_has_three_keys_in_torchserves_layout_and_only_its_owner_reads_it(tokens: Tokens) -> None:
    layout = json.loads(tokens.file.read_text())
    assert tokens.file.name == "key_file.json"
    assert stat.S_IMODE(tokens.file.stat().st_mode) == 0o600
    assert {kind: sorted(found) for kind, found in layout.items()} == {
        "management": ["expiration time", "key"],
        "inference": ["expiration time", "key"],
        "API": ["key"],
    }
    assert layout["inference"]["expiration time"] == "2026-01-01T01:00:00Z"
    assert len({found["key"] for found in layout.values()}) == 3


def test_a_key_has_at_least_128_random_bits(tokens: Tokens) -> None:
    assert all(len(key_of(tokens, kind)) * 6 >= 128 for kind in ("management", "inference", "API"))


def test_each_key_opens_only_its_own_api(tokens: Tokens) -> None:
    tokens.check("inference", f"Bearer {key_of(tokens, 'inference')}".encode())
    tokens.check("management", f"Bearer {key_of(tokens, 'management')}".encode())
    for kind, other in (("inference", "management"), ("management", "inference"), ("inference", "API")):
        with pytest.raises(ApiError):
            tokens.check(kind, f"Bearer {key_of(tokens, other)}".encode())


@pytest.mark.parametrize(
    "form",
    ["", "Bearer", "Bearer ", "{}", "bearer {}", "Bearer  {}", "Bearer {} ", " Bearer {}", "Basic {}", "Bearer {}x"],
)
def test_only_the_exact_header_opens(tokens: Tokens, refused: Refused, form: str) -> None:
    with pytest.raises(ApiError) as found:
        tokens.check("inference", form.format(key_of(tokens, "inference")).encode())
    assert refused(found) == (400, "InvalidKeyException", f"Token Authorization failed. {WRONG}")


def test_a_missing_or_undecodable_header_is_refused(tokens: Tokens) -> None:
    for header in (None, b"Bearer \xff\xfe"):
        with pytest.raises(ApiError):
            tokens.check("inference", header)


def test_a_key_expires(tokens: Tokens, clock: Clock, refused: Refused) -> None:
    header = f"Bearer {key_of(tokens, 'management')}".encode()
    clock.time += timedelta(seconds=3599)
    tokens.check("management", header)
    clock.time += timedelta(seconds=1)
    with pytest.raises(ApiError) as found:
        tokens.check("management", header)
    assert refused(found)[2] == f"Token Authorization failed. {WRONG}"


def test_a_new_key_replaces_the_old_one_and_keeps_the_others(tokens: Tokens, clock: Clock) -> None:
    before = json.loads(tokens.file.read_text())
    clock.time += timedelta(hours=2)
    tokens.renew("inference", f"Bearer {key_of(tokens, 'API')}".encode())
    after = json.loads(tokens.file.read_text())
    assert after["inference"]["key"] != before["inference"]["key"]
    assert after["inference"]["expiration time"] == "2026-01-01T03:00:00Z"
    assert (after["management"], after["API"]) == (before["management"], before["API"])
    tokens.check("inference", f"Bearer {after['inference']['key']}".encode())
    with pytest.raises(ApiError):
        tokens.check("inference", f"Bearer {before['inference']['key']}".encode())
    assert stat.S_IMODE(tokens.file.stat().st_mode) == 0o600


@pytest.mark.parametrize("key", ["management", "inference"])
def test_only_the_api_key_renews_keys(tokens: Tokens, refused: Refused, key: str) -> None:
    with pytest.raises(ApiError) as found:
        tokens.renew("inference", f"Bearer {key_of(tokens, key)}".encode())
    assert refused(found) == (400, "InvalidKeyException", f"Token Authentication failed. {WRONG}")


def test_an_unknown_kind_of_key_is_refused(tokens: Tokens, refused: Refused) -> None:
    with pytest.raises(ApiError) as found:
        tokens.renew("API", f"Bearer {key_of(tokens, 'API')}".encode())
    assert refused(found) == (400, "BadRequestException", "type: found 'API', expected management or inference")


def test_a_key_stays_when_the_file_cannot_be_written(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    header = f"Bearer {key_of(tokens, 'inference')}".encode()
    api = f"Bearer {key_of(tokens, 'API')}".encode()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        tokens.renew("inference", api)
    tokens.check("inference", header)
    assert [file.name for file in tokens.file.parent.iterdir()] == ["key_file.json"]


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--disable-token-auth"):
        Tokens(tmp_path / "none", 60.0).publish()


def test_a_key_can_be_valid_forever(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path, 1e30)
    tokens.publish()
    tokens.check("inference", f"Bearer {key_of(tokens, 'inference')}".encode())


def test_a_server_that_fails_to_start_keeps_another_servers_file(tokens: Tokens, tmp_path: Path) -> None:
    before = tokens.file.read_text()
    Tokens(tmp_path, 60.0).remove()
    assert tokens.file.read_text() == before


def test_the_file_is_removed_with_its_server(tokens: Tokens) -> None:
    tokens.remove()
    assert not tokens.file.exists()
    tokens.remove()
