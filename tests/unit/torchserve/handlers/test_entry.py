import os
import sys
from types import ModuleType

import pytest

from penstock.torchserve.handlers.entry import make_ts_importable
from penstock.torchserve.protocol.codec import HandlerRequest


def response(model):
    """The body of the response to one empty request."""
    (found,) = model.predict([HandlerRequest("id", {}, {})])
    return bytes(found.body)


def test_the_process_is_prepared_for_the_model(make_handler, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("AWS_SECRET", "x")
    monkeypatch.setenv("AWS_REGION", "y")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "sibling.py").write_text("VALUE = 1")
    make_handler(
        """
        import os, sibling
        assert "AWS_SECRET" not in os.environ
        def handle(data, context): pass
        """,
        hidden_env=["AWS_S.*", "REGION"],
    )
    folder = str(tmp_path / "model")
    assert os.getcwd() == os.path.realpath(folder)
    assert sys.path[:2] == [folder, "/nowhere"]
    assert os.environ["PYTHONPATH"] == f"{folder}:/nowhere"
    assert os.environ["AWS_REGION"] == "y", "a pattern is of the whole name"


@pytest.mark.parametrize("handler", ["my_handler", "my_handler.py", "some/where/my_handler.py", "../../my_handler"])
def test_the_handler_is_imported_by_its_base_name(make_handler, handler):
    make_handler("def handle(data, context): return data and ['yes']", handler=handler)


def test_a_function_may_have_another_name(make_handler):
    model = make_handler("def entry(data, context):\n    return data and [1]", handler="my_handler:entry")
    assert response(model) == b"1"


CLASS = """
from collections import OrderedDict

class Handler:
    def __init__(self):
        self.calls = []

    def initialize(self, context):
        self.calls.append(context)
        self.handle = None

    def handle(self, data, context):
        return [len(self.calls)]
"""


def test_handle_is_looked_up_before_the_instance_is_initialized(make_handler):
    model = make_handler(CLASS)
    assert response(model) == b"1"


def test_a_handle_bound_by_the_constructor_is_used(make_handler):
    model = make_handler(
        """
        class Handler:
            def __init__(self): self.handle = self.other
            def initialize(self, context): pass
            def handle(self, data, context): return ["own"]
            def other(self, data, context): return ["bound"]
        """
    )
    assert response(model) == b"bound"


def test_a_function_takes_precedence_over_a_class(make_handler):
    model = make_handler(CLASS + "\ndef handle(data, context):\n    return data and ['function']")
    assert response(model) == b"function"


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        ("class A: pass\nclass B: pass", ValueError, "its classes: A, B"),
        ("from collections import OrderedDict", ValueError, "its classes: none"),
        ("class A: pass", ValueError, "no method 'handle'"),
        (
            "class A:\n    def __init__(self, x): pass\n    def handle(self, d, c): pass",
            TypeError,
            "missing 1 required",
        ),
        ("class A:\n    def handle(self, d, c): pass", AttributeError, "initialize"),
        ("def handle(:", SyntaxError, "invalid syntax"),
        ("import not_there_at_all", ImportError, "not_there_at_all"),
        ("def handle(data): pass", TypeError, "positional"),
    ],
)
def test_an_unusable_handler_is_reported_with_the_reason(make_handler, source, error, says):
    with pytest.raises(error, match=says):
        make_handler(source)


def test_an_unknown_handler_is_searched_among_the_built_ins(make_handler):
    with pytest.raises(ImportError, match="nobody_has_this"):
        make_handler("", handler="nobody_has_this")


def test_a_built_in_is_found_if_the_archive_has_no_such_file(make_handler, monkeypatch):
    built_in = ModuleType("ts.torch_handler.my_own")
    exec("def handle(data, context): return data and ['built in']", vars(built_in))
    monkeypatch.setitem(sys.modules, "ts.torch_handler.my_own", built_in)
    make_ts_importable()
    assert response(make_handler("", handler="my_own")) == b"built in"
