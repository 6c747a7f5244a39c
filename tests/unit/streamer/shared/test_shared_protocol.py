"""The protocol of the shared batcher's socket: address and users, messages, values."""

import os
import pickle
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.schema import BatchingConfig, LimitsConfig, ModelConfig
from penstock.core.wire.messages import LARGE_BYTES, Pickled, Unsent
from penstock.core.worker.spec import Wrapped
from penstock.errors import BadOutput, BadRequest, ConfigError, LoadFailed, PenstockError
from penstock.streamer.model import ManagedModel, wrapped
from penstock.streamer.shared import protocol
from penstock.streamer.shared.protocol import (
    Offer,
    Sealed,
    SealedModel,
    connected,
    listening,
    offer_of,
    opened,
    read_offer,
    seal,
    seal_item,
    socket_path,
    write_offer,
)
from penstock.torchserve.archive.store import ModelStore
from penstock.torchserve.cli.pid_file import pid_path

# ---- the socket


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as short:  # a socket has room for about a hundred characters
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", f"{short}/run")
        yield Path(short, "run")


def test_a_name_is_a_socket_in_a_directory_for_this_user_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        assert socket_path("bert-1.2_b") == f"{folder}/bert-1.2_b.sock"
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert socket_path(f"{folder}/./x") == f"{folder}/x"
    monkeypatch.delenv("PENSTOCK_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert socket_path("bert") == f"{folder}/penstock-{os.geteuid()}/bert.sock"


def test_a_machine_without_a_writable_folder_is_told_which_variable_names_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file is there")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", f"{folder}/x")
    with pytest.raises(ConfigError, match=r"/x for the socket cannot be made: .*; set PENSTOCK_RUNTIME_DIR"):
        socket_path("bert")
    monkeypatch.delenv("PENSTOCK_RUNTIME_DIR")

    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(ConfigError, match="no directory for temporary files can be written; set PENSTOCK_RUNTIME_DIR"):
        socket_path("bert")
    for other in (pid_path, lambda: ModelStore(None)):
        with pytest.raises(ConfigError, match="no directory for temporary files can be written; set TMPDIR"):
            other()


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "-x", "a b", "ä", "x" * 65, "a\0"])
def test_a_name_that_could_leave_the_directory_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="expected an absolute path, or a name of at most 64"):
        socket_path(name)


def test_a_path_that_is_too_long_for_a_socket_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="more than 98 bytes: set PENSTOCK_RUNTIME_DIR"):
        socket_path("/" + "x" * 98)


def test_a_directory_that_others_can_use_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(0o755)
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="has mode 0750, expected 0700"):
        socket_path("x")
    folder.rmdir()
    (tmp_path / "real").mkdir(0o700)
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="is not a directory"):
        socket_path("x")
    with pytest.raises(ConfigError, match="cannot be made: No such file"):
        socket_path("/nowhere/at/all/x.sock")


def test_a_directory_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(0o700)
    monkeypatch.setattr(protocol.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {os.getuid()}, expected user {os.getuid() + 1}"):
        socket_path("x")


def test_the_file_of_a_dead_listener_is_replaced_and_no_other_file_is(folder: Path) -> None:
    path = socket_path("x")
    assert connected(path) is None
    dead = listening(path)
    dead.close()
    assert connected(path) is None, "its file is left, but nobody listens"
    with listening(path) as alive, connected(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert not alive.getblocking()
    os.unlink(path)
    Path(path).write_text("valuable")
    with pytest.raises(ConfigError, match="is not a socket"):
        listening(path)
    assert Path(path).read_text() == "valuable"


def test_a_socket_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = socket_path("x")
    with listening(path):
        monkeypatch.setattr(protocol, "peer_uid", lambda sock: os.geteuid() + 1)
        with pytest.raises(ConfigError, match=f"belongs to user {os.geteuid() + 1}, expected user {os.geteuid()}"):
            connected(path)


def test_the_kernel_reports_the_user_at_the_other_end() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert protocol.peer_uid(one) == os.geteuid()


def test_a_forked_process_closes_its_copies_of_sockets() -> None:
    one, other = socket.socketpair()
    with other:
        protocol.keep(one)
        if (child := os.fork()) == 0:
            try:
                one.getpeername()
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        protocol.close(one)
        closed = weakref.ref(one)
        del one
        assert closed() is None, "what is closed is forgotten"


# ---- messages


def offer(target: Wrapped | None = None, linger_s: float = 5.0, **batching: object) -> Offer:
    keys = {"max_batch_size": 8, "max_queue": 100, "max_hold_s": 0.1, **batching}
    config = ModelConfig(target="model", batching=BatchingConfig(**keys), instances=2, devices=("cpu",))  # type: ignore[arg-type]
    return offer_of(config, target or wrapped(ManagedModel), LimitsConfig(), linger_s)


def test_an_offer_survives_its_way_to_the_batcher() -> None:
    sent = offer(slo_s=0.5, priority=(0.0, 1.0))
    found = read_offer(write_offer(sent))
    assert found == sent
    assert found.packed_target().load().wrapper == "penstock.streamer.shared.protocol:SealedModel"
    assert os.getcwd() in found.sys_path or "" not in sys.path


def test_an_offer_of_values_that_are_not_plain_names_them() -> None:
    found = offer(policy="my.policy:Policy", options={"lock": object()})
    with pytest.raises(PenstockError, match="must be plain values"):
        write_offer(found)
    with pytest.raises(LoadFailed, match="cannot be sent"):
        offer(wrapped(lambda batch: batch))


def test_all_settings_are_part_of_the_identity_and_differences_are_named() -> None:
    mine = offer()
    assert mine.identity == offer().identity
    assert mine.differences(offer().settings) == ""
    others = offer(max_batch_size=4), offer(linger_s=1.0, max_hold_s=0.2), offer(wrapped(ManagedModel, ["weights"]))
    assert len({one.identity for one in (mine, *others)}) == 4
    assert mine.differences(others[0].settings) == "batch_size is 4 there and 8 here"
    assert mine.differences(others[1].settings) == (
        "max_latency is 0.2 there and 0.1 here, linger_s is 1 there and 5 here"
    )
    assert "digest" in mine.differences(others[2].settings)
    assert "batch_size is (unknown) there and 8 here" in mine.differences({})


def test_the_digest_of_arguments_is_the_same_in_all_processes() -> None:
    code = """
from penstock.streamer.model import ManagedModel, wrapped
from penstock.streamer.shared.protocol import _digest
words = {"labels": {"cat", "dog", "bird", "fish"}, "pairs": [("a", frozenset("xyz"))], "size": 3}
print(_digest(wrapped(ManagedModel, [words], {"more": {1, 2, 3}}), []))
"""
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


# ---- values


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)
large = st.integers(LARGE_BYTES + 1, LARGE_BYTES + 10).map(lambda n: np.arange(n, dtype=np.uint8))
value = plain | large | st.lists(large | plain, max_size=3) | st.integers(0, 10).map(lambda n: b"x" * (LARGE_BYTES + n))


def across(values: list[Any], large: list[memoryview]) -> Any:
    """The values after a pickle of all of them, whose large buffers it adds to the list."""
    data = pickle.dumps(values, 5, buffer_callback=lambda buffer: large.append(buffer.raw().toreadonly()))
    assert len(data) < 100 + len(values) * 3 * LARGE_BYTES
    return pickle.loads(data, buffers=[bytearray(view) for view in large])


@given(st.lists(value, max_size=4))
def test_values_survive_two_passes_through_other_pickles(values: list[Any]) -> None:
    sealed = [seal(each) for each in values]
    for _ in range(2):
        sealed = across(sealed, [])
    for mine, theirs in zip(values, map(opened, sealed), strict=True):
        np.testing.assert_equal(theirs, mine)


def test_large_arrays_stay_out_of_the_pickles_and_remain_writable() -> None:
    array = np.ones(10**6)
    sealed = seal({"a": array, "small": np.ones(3)})
    assert sealed.nbytes > array.nbytes
    buffers: list[memoryview] = []
    (copy,) = across([sealed], buffers)
    assert [buffer.nbytes for buffer in buffers] == [array.nbytes]
    found = copy.load()
    found["a"][0] = 2
    assert array[0] == 1
    array.flags.writeable = False
    assert not across([seal(array)], [])[0].load().flags.writeable


def test_what_cannot_be_pickled_or_loaded_is_an_error_in_its_place() -> None:
    refused = seal_item(threading.Lock())
    assert isinstance(refused, Unsent)
    assert isinstance(refused.error, BadRequest)
    broken = Sealed(b"\x80\x05cno_such_module\nthing\n.", [])
    assert isinstance(opened(broken), BadOutput)
    model = SealedModel(lambda batch: batch)
    with pytest.raises(BadRequest, match="the item cannot be unpickled in the worker: ModuleNotFoundError"):
        model.preprocess(broken)
    with pytest.raises(BadOutput, match="the model returned a lock that cannot be pickled"):
        model.postprocess(threading.Lock())
    assert isinstance(model.postprocess(1), Pickled)
    assert model.preprocess(seal([1, 2])) == [1, 2]


def test_the_batcher_passes_on_values_without_their_libraries() -> None:
    code = """
import sys, pickle
import penstock.streamer.shared.batcher
sealed = pickle.loads(sys.stdin.buffer.read())
again = pickle.dumps(sealed, 5)
assert not {"numpy", "torch", "click", "redis", "grpc", "prometheus_client"} & sys.modules.keys(), sys.modules.keys()
sys.stdout.buffer.write(again)
"""
    sent = pickle.dumps([seal(np.arange(5)), seal(np.ones(10**5))], 5)
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    first, second = pickle.loads(done.stdout)
    assert first.load().tolist() == [0, 1, 2, 3, 4]
    assert second.load().sum() == 10**5
