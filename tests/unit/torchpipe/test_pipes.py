import gc
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError, DecodeError, ItemFailed
from penstock.torchpipe import Dict, Event, Interpreter, Status, parse_toml, pipe, register_backend, register_filter
from penstock.torchpipe.pipes import graph_of
from support.waiting import wait_for


def test_a_dict_is_filled_in_place_and_keeps_what_was_given(double: pipe) -> None:
    item = {"data": 3, "node_name": "first", "mine": "kept"}
    assert double(item) is None
    assert item == {"data": 3, "node_name": "first", "mine": "kept", "result": 6, "seen": 3}


def test_fields_without_a_dict_give_the_result_itself(double: pipe) -> None:
    assert double(data=4) == 8
    item: dict[str, Any] = {"data": 4}
    assert double(data=item, more=1) is None
    assert item["result"] == 8
    assert item["more"] == 1


def test_a_result_of_an_earlier_call_is_removed(double: pipe) -> None:
    item = {"data": "none", "result": "stale", "exception": "stale"}
    double(item)
    assert item == {"data": "none"}


def test_hazard_5_an_undecodable_image_has_no_result_but_a_reason(
    double: pipe, caplog: pytest.LogCaptureFixture
) -> None:
    item: dict[str, Any] = {"data": "bad", "result": "stale"}
    with caplog.at_level(logging.WARNING, "penstock.torchpipe"):
        double(item)
        double({"data": "bad"})
    assert item.keys() == {"data", "exception"}
    assert isinstance(item["exception"], DecodeError)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "penstock.torchpipe"]
    assert "no known image format" in line, "once a minute, not for each"


def test_another_failure_of_a_single_dict_is_raised_and_changes_nothing(double: pipe) -> None:
    item = {"data": "worse", "mine": 1}
    with pytest.raises(ItemFailed, match="ValueError") as e:
        double(item)
    assert isinstance(e.value, RuntimeError), "which TorchPipe's programs catch"
    assert item == {"data": "worse", "mine": 1}


def test_hazard_2_one_failure_in_a_list_removes_no_other_result(double: pipe) -> None:
    items: list[dict[str, Any]] = [{"data": 1}, {"data": "worse"}, {"data": "bad"}, {"data": "none"}, {}, {"data": 5}]
    items.append({"data": 1, "node_name": "frist"})
    assert double(items) is None
    assert [item.get("result") for item in items] == [2, None, None, None, None, 10, None]
    errors = [item.get("exception") for item in items]
    assert [type(e).__name__ for e in errors] == [
        "NoneType", "ItemFailed", "DecodeError", "NoneType", "NoData", "NoneType", "NoSuchNode",
    ]  # fmt: skip
    assert all(isinstance(e, RuntimeError) for e in errors if e is not None)


def test_a_list_may_be_empty_or_longer_than_any_queue(double: pipe) -> None:
    assert double([]) is None
    items = [{"data": i} for i in range(3000)]
    double(items)
    assert [item["result"] for item in items] == [2 * i for i in range(3000)]


@pytest.mark.parametrize("name", ["last", "node.last"])
def test_an_item_begins_where_its_node_name_says(double: pipe, name: str) -> None:
    """TorchPipe registers the node `last` as `node.last`, too."""
    item = {"data": 3, "node_name": name}
    double(item)
    assert item["result"] == 3
    with pytest.raises(IndexError, match=r"node_name is 'frist', expected one of first, last; did you mean 'first'"):
        double({"data": 3, "node_name": "frist"})


def test_a_single_node_may_be_called_by_any_name(make_pipe: Callable[..., pipe]) -> None:
    item = {"data": 3, "node_name": "whatever"}
    make_pipe({"backend": "Identity"})(item)
    assert item["result"] == 3


def test_items_may_name_nodes_without_edges(make_pipe: Callable[..., pipe]) -> None:
    register_backend(lambda data: data + 1, "More")
    both = make_pipe({"a": {"backend": "Identity"}, "b": {"backend": "More"}, "global": {"instance_num": "2"}})
    a, b = {"data": 1, "node_name": "a"}, {"data": 1, "node_name": "b"}
    both([a, b])
    assert (a["result"], b["result"]) == (1, 2)
    first: dict[str, Any] = {"data": 1}
    both(first)
    assert first["result"] == 1, "which a warning said when it was made"


@pytest.mark.parametrize("wrong", ["x", 3, b"x", ["x"], [{"data": 1}, None]])
def test_a_value_other_than_a_dict_is_rejected(double: pipe, wrong: Any) -> None:
    with pytest.raises(TypeError, match="expected a dict"):
        double(wrong)


def test_an_item_without_data_is_an_error(double: pipe) -> None:
    with pytest.raises(IndexError, match=r"found 'x', expected 'data'"):
        double({"x": 1})


# ---- tensors


def test_tensors_come_in_and_go_out_where_torch_is_loaded(double: pipe) -> None:
    item = {"data": torch.ones(1, 3)}
    double(item)
    assert isinstance(item["result"], torch.Tensor)
    assert item["result"].tolist() == [[2, 2, 2]]
    assert isinstance(item["seen"], torch.Tensor)
    item["result"] += 1
    assert item["data"].tolist() == [[1, 1, 1]]


def test_results_stay_arrays_where_torch_is_not_loaded(
    make_pipe: Callable[..., pipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    through = make_pipe({"backend": "Identity"})
    monkeypatch.delitem(sys.modules, "torch")
    item = {"data": np.ones((1, 3))}
    through(item)
    assert isinstance(item["result"], np.ndarray)


def test_a_picture_stays_an_array(make_pipe: Callable[..., pipe]) -> None:
    item = {"data": np.zeros((4, 6, 3), np.uint8)}
    make_pipe({"backend": "ResizeMat", "resize_h": 2, "resize_w": "5"})(item)
    assert isinstance(item["result"], np.ndarray)
    assert item["result"].shape == (2, 5, 3)


def test_a_field_that_no_node_changed_is_the_callers_own(double: pipe) -> None:
    box = torch.ones(1, 4)
    item = {"data": 1, "_box": box}
    double(item)
    assert item["_box"] is box


# ---- events


def test_an_event_is_set_when_the_dict_is_filled(double: pipe) -> None:
    event, seen = Event(), []
    item: dict[str, Any] = {"data": 2, "event": event}
    event.set_callback(lambda: seen.append(item["result"]))
    double(item)
    assert event.wait(10_000)
    assert seen == [4]
    assert item["result"] == 4
    assert item["event"] is event


def test_an_event_of_many_items_reports_the_first_failure_when_all_are_done(double: pipe) -> None:
    event = Event(4)
    items = [{"data": d, "event": event} for d in (1, "worse", "bad")]
    double(items)
    assert not event.is_set()
    double({"data": 4, "event": event})
    with pytest.raises(ItemFailed):
        event.wait(10_000)
    assert [item.get("result") for item in items] == [2, None, None]
    assert isinstance(event.get_exception(), RuntimeError)


def test_an_event_whose_image_cannot_be_decoded_raises_nothing(double: pipe) -> None:
    event = Event()
    item: dict[str, Any] = {"data": "bad", "event": event}
    double(item)
    assert event.wait(10_000)
    assert item.keys() == {"data", "event", "exception"}


@pytest.mark.parametrize("wrong", [{}, {"data": 1, "node_name": "frist"}])
def test_the_event_of_a_rejected_item_reports_it(double: pipe, wrong: dict[str, Any]) -> None:
    event = Event()
    double({**wrong, "event": event})
    with pytest.raises(IndexError):
        event.wait(10_000)


def test_a_used_event_and_another_type_are_rejected(double: pipe) -> None:
    event = Event()
    double({"data": 1, "event": event})
    with pytest.raises(ValueError, match="already used for 1 items"):
        double({"data": 1, "event": event})
    with pytest.raises(TypeError, match="found a int as 'event', expected an Event"):
        double({"data": 1, "event": 3})


def test_a_list_that_uses_an_event_too_often_is_rejected_and_wakes_waiting_threads(double: pipe) -> None:
    event = Event(2)
    with pytest.raises(ValueError, match="already used for 2 items"):
        double([{"data": i, "event": event} for i in range(3)])
    with pytest.raises(ValueError, match="already used for 2 items"):
        event.wait(30_000)


def test_a_callback_may_begin_items_but_not_wait_for_them(double: pipe) -> None:
    first, second = Event(), Event()
    refused: list[str] = []
    again = {"data": 5, "event": second}

    def callback() -> None:
        double(again)
        for wait in (lambda: double({"data": 1}), lambda: double([{"data": 1}]), second.wait):
            try:
                wait()
            except RuntimeError as e:
                refused.append(str(e))

    first.set_callback(callback)
    double({"data": 1, "event": first})
    assert first.wait(10_000)
    assert second.wait(10_000)
    assert again["result"] == 10
    assert len(refused) == 3
    assert "must not wait for an event" in refused[2]


# ---- life


def test_a_missing_model_is_an_error_of_the_constructor(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="net"):
        pipe({"net": {"backend": "SyncTensor[TensorrtTensor]", "model": str(tmp_path / "none.onnx")}})


def test_an_invalid_number_is_an_error_of_the_constructor() -> None:
    with pytest.raises(ConfigError, match="instance_num: found the string 'dd'") as e:
        pipe({"instance_num": "dd"})
    assert isinstance(e.value, RuntimeError)


def test_a_pipe_without_references_stops_its_threads(double: pipe) -> None:
    before = set(threading.enumerate())
    dropped = pipe({"backend": "Identity", "instance_num": 3})
    dropped({"data": 1})
    its_own = set(threading.enumerate()) - before
    assert its_own
    del dropped
    gc.collect()
    wait_for(lambda: not its_own & set(threading.enumerate()))


def test_accepted_items_are_answered_after_the_pipe_is_dropped() -> None:
    event = Event()
    item: dict[str, Any] = {"data": 1, "event": event}
    pipe({"backend": "Identity"})(item)
    assert event.wait(20_000)
    assert item["result"] == 1


def test_a_closed_pipe_rejects_calls() -> None:
    with pipe({"backend": "Identity"}) as closed:
        assert (closed.max(), closed.min()) == (2**32 - 1, 1)
    closed.close()
    for call in ({"data": 1}, [{"data": 1}]):
        with pytest.raises(RuntimeError, match="closed"):
            closed(call)
    event = Event()
    closed({"data": 1, "event": event})
    with pytest.raises(RuntimeError, match="closed"):
        event.wait(10_000)


TOML = """
batching_timeout = 5
instance_num = 8
precision = "fp16"
flag = true
[decode]
backend = "DecodeMat"
next = ["small"]
[small]
backend = "ResizeMat"
resize_h = 2
resize_w = 3.0
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(TOML)
    return path


def test_parse_toml_gives_texts_by_node_and_key(toml: Path) -> None:
    assert parse_toml(toml) == {
        "global": {"batching_timeout": "5", "instance_num": "8", "precision": "fp16", "flag": "1"},
        "decode": {"backend": "DecodeMat", "next": ["small"]},
        "small": {"backend": "ResizeMat", "resize_h": "2", "resize_w": "3.0"},
    }


def test_changed_tables_take_effect(toml: Path) -> None:
    tables = parse_toml(toml)
    tables["small"]["resize_h"] = 7
    tables["global"]["instance_num"] = "3"
    del tables["global"]["flag"]
    kept = repr(tables)
    graph = graph_of(tables)
    assert graph.nodes["small"].steps[0].params["resize_h"] == 7
    assert {node.instances for node in graph.nodes.values()} == {3}
    assert repr(tables) == kept, "the caller's dict is the caller's"


def test_a_file_and_its_tables_are_the_same_pipeline(toml: Path) -> None:
    assert graph_of(toml).nodes == graph_of(str(toml)).nodes == graph_of(parse_toml(toml)).nodes


def test_unknown_keys_cause_a_warning_and_the_pipe_runs(toml: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert list(graph_of(toml).nodes) == ["decode", "small"]
    assert "flag" in caplog.text


def test_relative_paths_start_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "sub" / "net.toml").write_text('[net]\nbackend = "SaveMat"\nsave_dir = "out"\n')
    for config in ("sub/net.toml", parse_toml("sub/net.toml")):
        assert Path(graph_of(config).nodes["net"].steps[0].params["save_dir"]) == tmp_path / "out"


@pytest.mark.parametrize("config", [{}, None, [], 3])
def test_an_invalid_configuration_is_rejected(config: Any) -> None:
    with pytest.raises(ConfigError, match="expected a path to a TOML file, or a dict"):
        graph_of(config)


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        parse_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[a\n")
    with pytest.raises(ConfigError, match=r"bad\.toml.*line 1"):
        pipe(str(tmp_path / "bad.toml"))


def test_a_registered_filter_decides_whether_a_node_runs(make_pipe: Callable[..., pipe]) -> None:
    class Sometimes:
        def init(self, config: dict[str, str]) -> None:
            self.status = {"run": Status.Run, "skip": Status.Skip, "break": Status.Break, "error": Status.Error}

        def forward(self, item: dict[str, Any]) -> Any:
            item["data"] = item["result"]
            return self.status.get(item["way"], item["way"])

    register_filter(Sometimes, "sometimes")
    nodes = {
        "a": {"next": "b"},
        "b": {"backend": "AddInt[b:1]", "filter": "sometimes", "next": "c"},
        "c": {"backend": "AddInt[c:1]"},
    }
    ways = make_pipe(nodes)
    for way, written in (("run", {"b", "c"}), ("skip", {"c"}), ("break", set())):
        item: dict[str, Any] = {"data": 1, "way": way}
        ways(item)
        assert {"b", "c"} & item.keys() == written
        assert item["result"] == 1
    for way, message in (("error", "the filter 'sometimes' returned Error"), (3, "returned 3, expected a Status")):
        with pytest.raises(RuntimeError, match=message):
            ways({"data": 1, "way": way})


def test_a_registered_filter_guards_an_op_of_a_sequence(make_pipe: Callable[..., pipe]) -> None:
    class Large:
        def forward(self, item: dict[str, Any]) -> Status:
            return {"skip": Status.Skip, "break": Status.SerialSkip, "error": Status.Error}.get(item["way"], Status.Run)

    register_filter(Large, "large")
    guarded = make_pipe({"backend": "S[Identity,(large)S[AddInt[a:1],AddInt[b:1]],AddInt[c:1]]"})
    for way, written in (("run", {"a", "b", "c"}), ("skip", {"c"}), ("break", set())):
        item: dict[str, Any] = {"data": 1, "way": way}
        guarded(item)
        assert {"a", "b", "c"} & item.keys() == written
        assert item["result"] == 1
    with pytest.raises(RuntimeError, match="filter of the op returned Error"):
        guarded({"data": 1, "way": "error"})


def test_a_registered_filter_receives_the_keys_of_its_node_that_no_op_takes(make_pipe: Callable[..., pipe]) -> None:
    received: list[Any] = []

    class Configured:
        def init(self, config: dict[str, str], dict_config: Any) -> None:
            received.append((config, dict_config))

        def forward(self, item: dict[str, Any]) -> Status:
            return Status.Run

    register_filter(Configured, "configured")
    make_pipe({"backend": "ResizeMat", "filter": "configured", "resize_h": 1, "resize_w": 1, "least": "1,2"})
    assert received == [({"least": "1,2"}, None)]


def test_an_interpreter_is_a_pipe_that_is_loaded_later() -> None:
    interpreter = Interpreter()
    with pytest.raises(RuntimeError, match="call init"):
        interpreter({"data": 1})
    assert interpreter.init({"backend": "Identity"})
    items = [Dict({"data": i}) for i in range(3)]
    interpreter(items)
    one = {"data": "x"}
    Interpreter({"backend": "Identity"}).forward(one)
    assert [item["result"] for item in items] + [one["result"]] == [0, 1, 2, "x"]
    assert (interpreter.max(), interpreter.min()) == (2**32 - 1, 1)
