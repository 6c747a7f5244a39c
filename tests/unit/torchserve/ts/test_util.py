import json
import types
from pathlib import Path
from typing import Any

import pytest

from penstock.torchserve.ts import util
from penstock.torchserve.ts.util import timeit


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"0": "cat", "1": ["n01", "dog"]}, {"0": "cat", "1": "dog"}),
        ({"object_type_names": ["cat", "dog"]}, {"0": "cat", "1": "dog"}),
    ],
)
def test_labels_are_read_in_each_format(tmp_path: Path, written, expected):
    file = tmp_path / "index_to_name.json"
    file.write_text(json.dumps(written))
    assert util.load_label_mapping(str(file)) == expected


@pytest.mark.parametrize("written", [["cat"], {"0": 3}, {"0": []}])
def test_labels_in_another_format_are_refused(tmp_path: Path, written):
    file = tmp_path / "index_to_name.json"
    file.write_text(json.dumps(written))
    with pytest.raises(Exception, match="mapping"):
        util.load_label_mapping(file)


def test_without_a_file_there_are_no_labels(tmp_path: Path):
    assert util.load_label_mapping(tmp_path / "none.json") is None


def test_classes_become_labels():
    assert util.map_class_to_label([[0.7, 0.3]], {"0": "cat", "4": "dog"}, [[4, 0]]) == [{"dog": 0.7, "cat": 0.3}]
    assert util.map_class_to_label([[0.7, 0.3], [1, 0]]) == [{"0": 0.7, "1": 0.3}, {"0": 1, "1": 0}]
    with pytest.raises(Exception, match="Convert classes to list"):
        util.map_class_to_label((0.7, 0.3))
    with pytest.raises(Exception, match="must be a dict"):
        util.map_class_to_label([[1]], ["cat"])


def test_only_a_modules_own_classes_are_listed():
    module = types.ModuleType("mine")
    exec("class B: pass\nclass A(B): pass", module.__dict__)
    module.Other = Path
    assert [c.__name__ for c in util.list_classes_from_module(module)] == ["A", "B"]
    assert [c.__name__ for c in util.list_classes_from_module(module, module.A)] == ["A"]


def test_compiler_backends_are_known_by_name():
    assert util.check_valid_pt2_backend("inductor")
    assert not util.check_valid_pt2_backend("magic")


def test_a_prediction_exception_has_message_and_code():
    error = util.PredictionException("no face", 404)
    assert (error.message, error.error_code, str(error)) == ("no face", 404, "no face : 404")
    assert util.PredictionException("x").error_code == 500


def test_yaml_is_read(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("a: {b: [1, 2]}")
    assert util.get_yaml_config(str(file)) == {"a": {"b": [1, 2]}}


def test_decorators_do_not_change_the_result(capsys):
    @util.deprecated("0.1", "here", DeprecationWarning)
    @timeit
    def three() -> int:
        return 3

    with pytest.warns(DeprecationWarning, match="three is deprecated in 0.1 and moved to here"):
        assert three() == 3
    assert "'three' took" in capsys.readouterr().out


class Socket:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def sendall(self, parts: Any) -> None:
        self.sent.append(parts)


def test_a_partial_answer_goes_to_the_given_requests(make_context):
    context = make_context(None, {}, {})
    context.cl_socket = Socket()
    util.send_intermediate_predict_response(["a", "b"], context.request_ids, "on its way", 200, context)
    util.send_intermediate_predict_response({1: "c"}, {1: "id-1"}, "on its way", 200, context)
    first, second = context.cl_socket.sent
    assert (first.values, first.more, first.code) == ({0: "a", 1: "b"}, True, 200)
    assert second.values == {1: "c"}
    assert first.context is context


def test_only_the_first_process_sends_partial_answers(make_context, monkeypatch):
    context = make_context()
    context.cl_socket = Socket()
    monkeypatch.setenv("LOCAL_RANK", "1")
    util.send_intermediate_predict_response(["a"], context.request_ids, "", 200, context)
    assert context.cl_socket.sent == []


def test_a_class_is_imported_by_its_name():
    assert util.import_class("collections.OrderedDict").__name__ == "OrderedDict"
    assert util.import_class("abc.Mapping", "collections").__name__ == "Mapping"
    assert util.import_class("Counter", "collections").__name__ == "Counter"
    for name in ("", "Counter", "collections.Nothing"):
        with pytest.raises(ImportError):
            util.import_class(name)
