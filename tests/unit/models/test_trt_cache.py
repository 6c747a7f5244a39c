"""Engines are kept, and thrown away when they are not what they were."""

from __future__ import annotations

import json
import logging
import threading

import pytest

from penstock.models.trt_cache import SIDECAR, EngineCache, file_digest

KEY = {"model": "abc", "precision": "fp16"}


@pytest.fixture
def sealed(tmp_path):
    with EngineCache(tmp_path, KEY).open() as folder:
        (folder / "a.engine").write_bytes(b"engine")
    return folder


def left(tmp_path, key=KEY):
    with EngineCache(tmp_path, key).open() as folder:
        return sorted(path.name for path in folder.iterdir())


def test_engines_are_found_again(tmp_path, sealed, caplog):
    assert left(tmp_path) == ["a.engine", SIDECAR]
    assert left(tmp_path, {**KEY, "model": "other"}) == []
    assert caplog.records == []
    assert oct(sealed.stat().st_mode)[-3:] == "700"


def swapped(folder):
    (folder / "a.engine").write_bytes(b"another")


def added(folder):
    (folder / "b.engine").write_bytes(b"another")


def missing(folder):
    (folder / "a.engine").unlink()


def foreign(folder):
    text = json.loads((folder / SIDECAR).read_text())
    (folder / SIDECAR).write_text(json.dumps({**text, "key": {**KEY, "model": "other"}}))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (swapped, "not those that were written"),
        (added, "not those that were written"),
        (missing, "not those that were written"),
        (foreign, "that of other engines"),
        (lambda folder: (folder / SIDECAR).write_text("{"), "no engine.json that can be read"),
        (lambda folder: (folder / SIDECAR).write_text("[]"), "that of other engines"),
        (lambda folder: (folder / SIDECAR).unlink(), "no engine.json that can be read"),
    ],
)
def test_what_does_not_fit_is_thrown_away_with_one_warning(tmp_path, sealed, caplog, change, why):
    change(sealed)
    with caplog.at_level(logging.WARNING):
        assert left(tmp_path) == []
        assert left(tmp_path) == [SIDECAR]
    (record,) = caplog.records
    assert why in record.getMessage()


def test_engines_that_were_not_finished_are_built_anew(tmp_path):
    def fail():
        with EngineCache(tmp_path, KEY).open() as folder:
            (folder / "a.engine").write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert left(tmp_path) == []


def test_of_two_that_build_the_same_the_second_waits(tmp_path):
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


def test_a_digest_is_that_of_the_content(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    assert file_digest(str(tmp_path / "a")).startswith("e3b0c44298fc1c14")
