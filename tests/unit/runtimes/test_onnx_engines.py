"""Engines are cached, and deleted if they changed."""

import json
import logging
import threading

import pytest

from penstock.runtimes.onnx import SIDECAR, EngineCache, file_digest

KEY = {"model": "abc", "precision": "fp16"}


@pytest.fixture
def sealed(tmp_path):
    with EngineCache(tmp_path, KEY).open() as folder:
        (folder / "a.engine").write_bytes(b"engine")
    return folder


def left(tmp_path, key=KEY):
    with EngineCache(tmp_path, key).open() as folder:
        return sorted(path.name for path in folder.iterdir())


def test_engines_are_reused(tmp_path, sealed, caplog):
    assert left(tmp_path) == ["a.engine", SIDECAR]
    assert left(tmp_path, {**KEY, "model": "other"}) == []
    assert caplog.records == []
    assert oct(sealed.stat().st_mode)[-3:] == "700"


FOREIGN = json.dumps({"key": {**KEY, "model": "other"}, "files": {}})


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("a.engine", "another", "differ from those that were written"),
        ("b.engine", "added", "differ from those that were written"),
        ("sub/b.engine", "added", "differ from those that were written"),
        ("a.engine", None, "differ from those that were written"),
        (SIDECAR, FOREIGN, "describes other engines"),
        (SIDECAR, "{", "no readable engine.json"),
        (SIDECAR, "[]", "describes other engines"),
        (SIDECAR, None, "no readable engine.json"),
    ],
)
def test_engines_that_do_not_match_are_deleted_with_one_warning(tmp_path, sealed, caplog, file, content, why):
    (sealed / file).parent.mkdir(exist_ok=True)
    if content is None:
        (sealed / file).unlink()
    else:
        (sealed / file).write_text(content)
    with caplog.at_level(logging.WARNING):
        assert left(tmp_path) == []
        assert left(tmp_path) == [SIDECAR]
    (record,) = caplog.records
    assert why in record.getMessage()


def test_unfinished_engines_are_rebuilt(tmp_path):
    def fail():
        with EngineCache(tmp_path, KEY).open() as folder:
            (folder / "a.engine").write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert left(tmp_path) == []


def test_a_second_process_waits_for_the_same_engine(tmp_path):
    inside, go, done = threading.Event(), threading.Event(), []

    def build(name):
        with EngineCache(tmp_path, KEY).open() as folder:
            done.append((name, (folder / "a.engine").exists()))
            inside.set()
            go.wait(10)
            (folder / "a.engine").write_bytes(b"engine")

    threads = [threading.Thread(target=build, args=(n,)) for n in ("first", "second")]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    assert [name for name, _ in done] == ["first"]
    go.set()
    for thread in threads:
        thread.join(10)
    assert done == [("first", False), ("second", True)]


def test_a_digest_depends_on_the_content_alone(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    assert file_digest(str(tmp_path / "a")).startswith("e3b0c44298fc1c14")


# ---- where a user names it


def kept(path, key=KEY):
    """The engines next to a path; writes one if there is none."""
    with EngineCache.next_to(path, key).open() as folder:
        found = sorted(file.name for file in folder.iterdir() if file.suffix == ".engine")
        (folder / "a.engine").write_bytes(b"engine")
    return found


@pytest.fixture
def named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return str(tmp_path / "engines" / "net.trt")


def test_engines_next_to_a_path_are_reused(named, caplog):
    assert [kept(named), kept(named)] == [[], ["a.engine"]]
    assert caplog.records == []


def test_a_file_at_the_path_is_not_touched(named, tmp_path):
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "net.trt").write_bytes(b"of others")
    assert kept(named) == []
    assert (tmp_path / "engines" / "net.trt").read_bytes() == b"of others"


def test_an_existing_file_with_the_name_of_the_lock_is_not_changed(named, tmp_path):
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "net.trt.lock").write_text("of others")
    assert [kept(named), kept(named)] == [[], ["a.engine"]]
    assert (tmp_path / "engines" / "net.trt.lock").read_text() == "of others"


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"model": "other"}, "found model 'abc', expected 'other'"),
        ({"precision": "fp32"}, "found precision 'fp16', expected 'fp32'"),
        ({"tensorrt": "11.0"}, "found tensorrt 'None', expected '11.0'"),
        ({"model": "other", "precision": "int8"}, "model 'abc', expected 'other'; precision 'fp16', expected 'int8'"),
    ],
)
def test_engines_with_another_key_are_not_reused_and_the_difference_is_logged(named, caplog, changed, error):
    kept(named)
    assert kept(named, KEY | changed) == []
    (record,) = caplog.records
    assert error in record.getMessage()
    assert kept(named, KEY | changed) == ["a.engine"]


def test_without_a_usable_folder_the_users_cache_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "net.trt")
    assert [kept(path), kept(path)] == [[], ["a.engine"]]
    assert list((tmp_path / "user").glob("penstock/engines/*/a.engine"))
    assert "unusable" in caplog.records[0].getMessage()
    assert "consequence=kept_in_" in caplog.records[0].getMessage()


def test_a_folder_of_another_user_is_not_used(named, tmp_path, monkeypatch, caplog):
    kept(named)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert kept(named) == []
    assert "it is another user's" in caplog.records[0].getMessage()
