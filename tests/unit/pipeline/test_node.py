"""NodeModel: a batch through the ops of one node. Each item keeps its place."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from typing import Any

import pytest

from penstock.errors import BadRequest, ItemFailed, OutOfMemory, WrongRowCount
from penstock.pipeline.graph import Node, NodeStep
from penstock.pipeline.handover import Visit
from penstock.pipeline.node import MODEL_ROWS, SLICE_ROWS, NodeModel, SharedState, one_thread, tune_process
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import BatchOp, ItemOp

A, B = NodeStep("Words", {"word": "a"}), NodeStep("Words", {"word": "b"}, "swap")
BATCH = NodeStep("BatchWords", {"word": "!"}, "swap")


@pytest.fixture
def node(known: None, caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.CRITICAL)

    def made(*steps: NodeStep, shared: SharedState | None = None, **keys: Any) -> NodeModel:
        model = NodeModel(Node("n", steps, **keys), shared)
        model.load("cpu")
        return model

    return made


def visits(*data: Any, swap: bool = False) -> list[Visit]:
    return [Visit({"result" if swap else "data": d}, swap) for d in data]


def told(found: list[Any]) -> list[Any]:
    return [type(f).__name__ if isinstance(f, Exception) else f[0].get("result") for f in found]


def test_items_keep_their_places(node: Any) -> None:
    model = node(NodeStep("Picky"), B, BATCH)
    assert told(model.predict(visits("1", "x", "-", "4"))) == ["1b!", "ItemFailed", None, "4b!"]


def test_an_item_without_data_leaves_its_batch_alone(node: Any) -> None:
    model = node(NodeStep("BatchWords"))
    found = model.predict([*visits("1"), Visit({"other": 2}, swap=False), *visits("3")])
    assert told(found) == ["1", "BadRequest", "3"]
    assert found[1].message == "node 'n', op 'BatchWords' found no field 'data', only: other"


def test_items_that_skipped_an_or_do_not_affect_the_next_batch(node: Any) -> None:
    model = node(NodeStep("Picky"), NodeStep("Words", {"word": "a"}, "or"), NodeStep("Words", {"word": "b"}, "then"))
    assert told(model.predict(visits("1"))) == ["1"]
    assert told(model.predict(visits("-"))) == ["-ab"]


def test_chained_nodes_get_only_items_with_a_result(known: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    model = NodeModel(Node("n", (NodeStep("Picky"),)), then=[(Node("m", (A,)), SharedState())])
    model.load("cpu")
    found = model.predict(visits("1", "x", "-", "4"))
    assert told(found) == ["1", "ItemFailed", None, "4"]
    assert [len(f) if isinstance(f, tuple) else 0 for f in found] == [4, 0, 2, 4]
    assert [f[2]["result"] for f in (found[0], found[3])] == ["1a", "4a"]


def test_the_input_stays_unchanged(node: Any) -> None:
    model = node(A, B)
    given = visits("1", swap=True)
    assert told(model.predict(given)) == ["1ab"]
    assert given[0].fields == {"result": "1"}
    assert told(model.predict(given)) == ["1ab"]  # a batch can be run again


def test_an_error_of_a_batch_op_is_left_for_the_worker_to_split(node: Any) -> None:
    model = node(NodeStep("BatchWords"))
    given = visits("1", "x")
    with pytest.raises(ValueError, match="one has an x"):
        model.predict(given)
    found = model.predict(given[1:])
    assert told(found) == ["ItemFailed"]
    assert "item 1 of its batch" in found[0].detail  # its place in the batch as it first was
    assert told(model.predict(given[:1])) == ["1"]


@pytest.mark.parametrize("keys", [{"retry_split": False}, {"idempotent": False}])
def test_without_idempotence_all_remaining_items_fail(node: Any, keys: dict[str, bool]) -> None:
    model = node(NodeStep("Picky"), BATCH, NodeStep("BatchWords", {}, "swap"), **keys)
    model._parts[1][0].op.word = "x"  # the second batch op raises for all
    assert told(model.predict(visits("1", "-", "3"))) == ["ItemFailed", None, "ItemFailed"]


def test_out_of_memory_is_left_for_the_worker_to_split_even_without_retry_split(node: Any) -> None:
    class Large(BatchOp):
        def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> list[Any]:
            raise MemoryError

    catalog.register("Large", Large)
    model = node(NodeStep("Large"), retry_split=False)
    with pytest.raises(MemoryError):
        model.predict(visits("1", "2"))
    found = model.predict(visits("1"))
    assert isinstance(found[0], OutOfMemory)


def test_a_wrong_number_of_results_is_left_for_the_worker_to_split_unless_the_node_forbids_it(node: Any) -> None:
    steps = NodeStep("Picky"), NodeStep("TooFew", {}, "swap")
    with pytest.raises(WrongRowCount):
        node(*steps).predict(visits("1", "x", "3"))
    found = node(*steps, retry_split=False).predict(visits("1", "x", "3"))
    assert [type(f) for f in found] == [WrongRowCount, ItemFailed, WrongRowCount]
    assert "1 results for 2 items" in str(found[0])


@pytest.mark.parametrize("ends", [SystemExit, KeyboardInterrupt])
def test_an_op_that_ends_the_program_fails_its_item_alone(node: Any, ends: Any) -> None:
    class ExitsOne(ItemOp):
        def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
            if data == "die":
                raise ends
            return data

    class ExitsAll(BatchOp):
        def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> list[Any]:
            if "die" in data:
                raise ends
            return data

    catalog.register("ExitsOne", ExitsOne)
    catalog.register("ExitsAll", ExitsAll)
    assert told(node(NodeStep("ExitsOne")).predict(visits("1", "die", "3"))) == ["1", "ItemFailed", "3"]
    model = node(NodeStep("ExitsAll"))
    with pytest.raises(ItemFailed, match=ends.__name__):  # the worker halves the batch
        model.predict(visits("1", "die"))
    assert told(model.predict(visits("die"))) == ["ItemFailed"]


def test_errors_name_the_position_and_keep_no_frames(node: Any) -> None:
    alive: list[weakref.ref[Any]] = []

    class Held:
        pass

    class Raises(ItemOp):
        def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
            held = Held()
            alive.append(weakref.ref(held))
            raise BadRequest("expected an image", detail="of 3 bytes")

    catalog.register("Raises", Raises)
    (error,) = node(NodeStep("Raises")).predict(visits("1"))
    gc.collect()
    assert (type(error), str(error)) == (BadRequest, "node 'n', op 'Raises': expected an image")
    assert error.detail == "node 'n', op 'Raises', item 0 of its batch\nof 3 bytes"
    assert alive[0]() is None


def test_a_distinct_error_is_logged_once_a_minute(node: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = node(NodeStep("Picky"))
    caplog.set_level(logging.WARNING, "penstock.pipeline")
    model.predict(visits("x", "xx", "x"))
    model.predict(visits("x"))
    (line,) = [r.getMessage().partition("\n")[0] for r in caplog.records]
    assert "where=\"node 'n', op 'Picky', item 0 of its batch\"" in line
    assert "error='Picky raised ValueError: this has an x'" in line


def test_its_size_is_what_the_node_says_and_its_ops_can_take(node: Any) -> None:
    def size(*steps: NodeStep, **keys: Any) -> int:
        return int(node(*steps, **keys).__penstock_options__["max_batch_size"])

    assert size(A) == SLICE_ROWS
    assert size(NodeStep("BatchWords")) == MODEL_ROWS
    assert size(NodeStep("BatchWords"), shared=SharedState(compat=True)) == 1
    assert size(NodeStep("BatchWords"), max_batch=5) == 5
    assert size(NodeStep("BatchWords", {"rows": 3}), max_batch=5) == 3


def test_the_batches_of_a_node_are_numbered_over_its_instances(node: Any) -> None:
    shared = SharedState()
    one, two = node(A, shared=shared), node(A, shared=shared)
    stamps = [m.predict(visits("1", "2"))[0][1] for m in (one, two, one)]
    assert [s.batch_id for s in stamps] == [0, 1, 2]
    assert [s.size for s in stamps] == [2, 2, 2]


def test_ops_are_unloaded_with_their_node(node: Any) -> None:
    ended = []

    class Ends(ItemOp):
        def unload(self) -> None:
            ended.append(self)

    catalog.register("Ends", Ends)
    model = node(NodeStep("Ends"), NodeStep("Ends"))
    model.unload()
    assert len(ended) == 2


def test_libraries_start_no_threads_for_one_image(monkeypatch: Any) -> None:
    said: list[int] = []
    monkeypatch.setitem(sys.modules, "cv2", type("cv2", (), {"setNumThreads": staticmethod(said.append)}))
    one_thread()
    assert said == [1]


def test_a_process_of_pipelines_has_a_short_switch_interval() -> None:
    before = sys.getswitchinterval()
    try:
        tune_process()
        assert sys.getswitchinterval() == pytest.approx(0.001)
    finally:
        sys.setswitchinterval(before)
