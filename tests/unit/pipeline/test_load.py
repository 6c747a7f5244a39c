"""Graphs from TOML: the effect of keys, and the errors of bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.pipeline.check import check
from penstock.pipeline.describe import to_toml
from penstock.pipeline.graph import Graph, NodeInput, NodeStep, outside
from penstock.pipeline.load import load_graph, read_tables
from penstock.pipeline.notation import is_pipeline
from penstock.types import TensorSpec

NET = '[net]\nbackend = "OnnxTensor"\nmodel = "net.onnx"\n'


def load(tmp_path: Path, text: str, *, compat: bool = False) -> Graph:
    (tmp_path / "p.toml").write_text(text)
    return load_graph(tmp_path / "p.toml", compat=compat)


def refused(tmp_path: Path, text: str, *, compat: bool = False) -> str:
    """The error of a bad file, without its folder."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, compat=compat)
    assert caught.value.message.startswith(str(tmp_path / "p.toml"))
    return caught.value.message.removeprefix(str(tmp_path / "p.toml"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('threads = "1|2|3"', "threads: found the string '1|2|3', expected a whole number"),
        ("instances = 0", "instances: found 0, expected a whole number from 1 to 1024"),
        ('instances = "many"', "expected a whole number from 1 to 1024"),
        ("instances = 2000", "expected a whole number from 1 to 1024"),
        ("instances = [2]", "found a list of 1, expected a whole number"),
        ("wait_ms = -1", "wait_ms: found -1, expected a number from 0"),
        ("wait_ms = nan", "wait_ms: found nan, expected a number from 0"),
        ('device = "gpu"', "device: found the string 'gpu', expected auto, cpu, cuda"),
        ('mean = "1, two"', "mean: OnnxTensor: mean: found the string '1, two'"),
        ('std = "1, 0, 1"', "line 4: [net] std: std and mean: found (1.0, 0.0, 1.0)"),
        ("threads = -4", "line 4: [net] threads: threads = -4, expected 1 or more"),
        ("retry_split = 2", "retry_split: found 2, expected true or false"),
        ('on_error = "stop"', 'on_error: found the string \'stop\', expected "fail" or "skip"'),
        ("pad_to = [4, 4]", "pad_to: found 4, 4, expected ascending sizes"),
        ("sizes = [4, 1]", "sizes: found 4, 1, expected ascending sizes"),
        ("sizes = [1, 2]\nmax_batch = 4", "sizes: the largest is 2, expected at least max_batch, which is 4"),
        ("ops = []", "found both ops and backend"),
    ],
)
def test_an_invalid_value_is_refused(tmp_path: Path, text: str, told: str) -> None:
    message = refused(tmp_path, NET + text)
    assert "[net]" in message
    assert told in message


def test_a_body_takes_fields_of_nodes_around_it_and_no_item_of_theirs_enters_it(tmp_path: Path) -> None:
    text = (
        '[image]\nnext = "boxes"\n[boxes]\nnext = "read"\n[read]\neach = "box"\nbody = "crop"\nnext = "end"\n'
        '[crop]\ninputs = {data = "image.result", box = "read.box"}\nnext = "text"\n'
        '[text]\ninputs = {data = "crop.result", image = "image.data"}\n[end]\n'
    )
    graph = load(tmp_path, text)
    assert {name: node.next for name, node in graph.nodes.items()} == {
        "image": ("boxes",), "boxes": ("read",), "read": ("end",), "crop": ("text",), "text": (), "end": ()
    }  # fmt: skip
    assert graph.bodies == {"crop": {"crop", "text"}}
    assert outside(graph, "crop") == {"image", "read"}
    assert graph.outputs == ("end",)
    assert graph.order() == ("image", "boxes", "read", "crop", "text", "end")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[a]\neach = "x"\nbody = "a"\n', "the nodes a -> a are in a cycle"),
        ('[a]\neach = "x"\nbody = "b"\n[b]\nnext = "c"\n[c]\neach = "x"\nbody = "b"\n', "in a cycle"),
        ('[a]\neach = "x"\nbody = "bc"\n[bb]\n', "line 3: [a] body: there is no node 'bc'; did you mean 'bb'"),
        ('[a]\neach = "x"\n', "line 2: [a] each: needs 'body'"),
        ('[a]\nbody = "b"\nmax_fanout = 4\n[b]\n', "line 3: [a] max_fanout: needs 'each'"),
        ('[a]\neach = "x"\nbody = "b"\nmax_fanout = nan\n[b]\n', "line 4: [a] max_fanout: found nan, expected"),
        (
            '[a]\neach = "x"\nbody = "b"\nnext = "b"\n[b]\n',
            "[b]: follows [a], but belongs to the body of [a], which begins at [b]: nodes after the fan-out take its"
            " gathered fields, such as a.result",
        ),
        (
            '[a]\neach = "x"\nbody = "b"\nnext = "c"\n[b]\n[c]\ninputs = {data = "b.result"}\n',
            "[c]: follows [a], but belongs to the body of [a]",
        ),
        (
            '[a]\neach = "x"\nbody = "b"\nnext = "c"\n[b]\ninputs = {data = "c.result"}\n[c]\n',
            "line 6: [b] inputs: takes a field of [c], which the items of [a] do not pass before",
        ),
    ],
)
def test_an_invalid_fan_out_is_refused(tmp_path: Path, text: str, told: str) -> None:
    assert told in refused(tmp_path, text)


def test_an_alias_is_accepted(tmp_path: Path) -> None:
    text = (
        '[in]\nnext = "rec,rec.2"\n[rec]\nnext = "final"\n[rec.2]\nnext = "final"\nbackend = "C10Exception"\n'
        '[final]\ninputs = {data = "rec", "data.2" = "rec.2"}\n'
    )
    graph = load(tmp_path, text)
    assert graph.nodes["rec.2"].alias_of == "rec"
    assert graph.nodes["final"].inputs == (NodeInput("rec", "result", "data"), NodeInput("rec.2", "result", "data.2"))


def test_a_file_without_tables_is_one_node(tmp_path: Path) -> None:
    graph = load(tmp_path, 'backend = "DecodeMat"\ninstances = 2\n')
    assert graph.order() == ("p",)
    assert (graph.nodes["p"].instances, graph.nodes["p"].steps) == (2, (NodeStep("DecodeMat"),))


def test_parameters_of_ops_may_be_defaults_of_all_nodes(tmp_path: Path) -> None:
    graph = load(tmp_path, 'max_pixels = 1000\n[a]\nbackend = "DecodeMat"\nnext = "b"\n[b]\n')
    assert graph.nodes["a"].steps == (NodeStep("DecodeMat", {"max_pixels": 1000}),)
    assert refused(tmp_path, "max_pixels = 1000\n[a]\n").startswith(", line 1: max_pixels: unknown key")


# ---- expressions and ops


def test_ops_may_be_a_list(tmp_path: Path) -> None:
    text = (
        '[a]\nops = ["DecodeMat", {op = "ResizeMat", resize_h = 8, resize_w = 9}, {op = "Mat2Tensor", filter = "or"}]'
    )
    assert load(tmp_path, text).nodes["a"].steps == (
        NodeStep("DecodeMat"),
        NodeStep("ResizeMat", {"resize_h": 8, "resize_w": 9}, "swap"),
        NodeStep("Mat2Tensor", {}, "or"),
    )


def test_text_in_brackets_may_be_a_parameter(tmp_path: Path) -> None:
    assert load(tmp_path, '[a]\nbackend = "Copy[a:b, c:d]"').nodes["a"].steps == (
        NodeStep("Copy", {"pairs": "a:b,c:d"}),
    )


def test_a_wrapping_op_runs_after_the_inner_one(tmp_path: Path) -> None:
    steps = load(tmp_path, '[a]\nbackend = "Result2Key(key=image)[DecodeMat]"').nodes["a"].steps
    assert steps == (NodeStep("DecodeMat"), NodeStep("Result2Key", {"key": "image"}, "swap"))


def test_a_users_class_takes_the_keys_that_match_its_parameters(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Scale:\n"
        "    def __init__(self, factor: float) -> None:\n"
        "        self.factor = factor\n"
        "    def __call__(self, data):\n"
        "        return data * self.factor\n"
    )
    text = '[a]\nops = ["ResizeMat", "Python[own.py:Scale]"]\nfactor = "0.5"\nresize_h = 1\nresize_w = 1\n'
    step = load(tmp_path, text).nodes["a"].steps[1]
    assert step == NodeStep("Python", {"target": f"{tmp_path}/own.py:Scale", "factor": 0.5}, "swap")
    assert "[a] factr: unknown key" in refused(tmp_path, text.replace("factor", "factor = 1\nfactr", 1))
    assert "factor: found the string 'half'" in refused(tmp_path, text.replace("0.5", "half"))


def test_a_users_class_with_any_parameters_gets_the_remaining_keys(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Free:\n"
        "    def __init__(self, **params):\n"
        "        self.params = params\n"
        "    def __call__(self, data):\n"
        "        return data\n"
    )
    text = '[a]\nops = ["ResizeMat", "Python[own.py:Free]"]\nfactor = 0.5\nresize_h = 1\nresize_w = 1\n'
    first, own = load(tmp_path, text).nodes["a"].steps
    assert first.params == {"resize_h": 1, "resize_w": 1}
    assert own.params == {"target": f"{tmp_path}/own.py:Free", "factor": 0.5}


def test_a_missing_class_is_rejected(tmp_path: Path) -> None:
    assert "there is no file" in refused(tmp_path, '[a]\nbackend = "Python[none.py:Scale]"')
    assert "there is no module 'no_such'" in refused(tmp_path, '[a]\nbackend = "Python[no_such.mod:Scale]"')
    assert "Python needs target, not found" in refused(tmp_path, '[a]\nbackend = "Python"')


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        ("DecodMat", "unknown op 'DecodMat'; did you mean 'DecodeMat'?"),
        ("Decode Mat[", "at character 12 of 'Decode Mat[': found the end, expected a name"),
        ("DecodeMat[ResizeMat]", "at character 1: DecodeMat takes no arguments in brackets"),
        ("ResizeMat", "ResizeMat needs resize_h and resize_w, not found"),
        ("ResizeMat(resize_h=8,resize_w=wide)", "resize_w: found the string 'wide'"),
        ("DecodeMat(colour=rgb)", "has no parameter 'colour'"),
        ("Copy[S[DecodeMat]]", "at character 1: Copy takes no ops in its brackets"),
    ],
)
def test_an_op_that_does_not_fit_is_refused(tmp_path: Path, backend: str, told: str) -> None:
    message = refused(tmp_path, f'[a]\nbackend = "{backend}"')
    assert message.startswith(", line 2: [a] backend: ")
    assert told in message


@pytest.mark.parametrize(
    ("ops", "told"),
    [
        ("3", "found 3, expected a list"),
        ("[]", "found a list of 0, expected a list such as"),
        ("[3]", "found 3 among the ops"),
        ('[{name = "DecodeMat"}]', "found a table among the ops"),
    ],
)
def test_a_bad_list_of_ops_is_rejected(tmp_path: Path, ops: str, told: str) -> None:
    assert told in refused(tmp_path, f"[a]\nops = {ops}")


# ---- native keys


def test_native_keys_are_fields_of_the_node(tmp_path: Path) -> None:
    text = NET + (
        'instances = 2\nmax_batch = 16\nsizes = [1, 16]\nwait_ms = 1.5\nbucket = ["image.shape"]\npad_to = [32, 64]\n'
        "queue = 9\nqueue_bytes = 1000\ndeadline_ms = 250\nrun_timeout_s = 5\nretry_split = false\nidempotent = false\n"
        'on_error = "skip"\nwhen = "score >= 0.4"\nelse = "stop"\nrequire = "any"\n'
    )
    node = load(tmp_path, text).nodes["net"]
    assert (node.instances, node.max_batch, node.sizes, node.wait_s) == (2, 16, (1, 16), 0.0015)
    assert (node.bucket, node.pad_to, node.queue, node.queue_bytes) == (("image.shape",), (32, 64), 9, 1000)
    assert (node.deadline_s, node.run_timeout_s, node.retry_split, node.idempotent) == (0.25, 5.0, False, False)
    assert (node.on_error, node.when, node.otherwise, node.require) == ("skip", "score >= 0.4", "stop", "any")


def test_settings_of_the_pipeline_are_its_own(tmp_path: Path) -> None:
    text = '[pipeline]\nname = "nets"\nentry = "b"\ntrace = true\nin_flight = 5\ninputs = ["data", "box"]\n'
    graph = load(tmp_path, text + 'outputs = ["label"]\n[server]\nport = 1\n[a]\n[b]\n')
    assert (graph.name, graph.entry, graph.trace, graph.in_flight) == ("nets", "b", True, 5)
    assert (graph.takes, graph.gives, list(graph.nodes)) == (("data", "box"), ("label",), ["a", "b"])


def test_relative_paths_start_at_the_folder_of_the_file(tmp_path: Path) -> None:
    (step,) = load(tmp_path, NET).nodes["net"].steps
    assert step.params["model"] == str(tmp_path / "net.onnx")


def test_inputs_that_name_a_node_are_an_edge(tmp_path: Path) -> None:
    graph = load(tmp_path, '[a]\n[b]\ninputs = {data = "a"}\n[c]\ninputs = {data = "b.result", image = "a.data"}\n')
    assert graph.nodes["a"].next == ("b", "c")
    assert graph.nodes["b"].inputs == (NodeInput("a", "result", "data"),)
    assert graph.nodes["c"].inputs == (NodeInput("b", "result", "data"), NodeInput("a", "data", "image"))


# ---- graphs that are none


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[a\n", ": not valid TOML: "),
        ('[a]\nnext = "b"\n[b]\nnxt = "c"\n', ", line 4: [b] nxt: unknown key: neither the node nor its ops have it;"),
        ('[a]\nbackend="DecodeMat"\nresize_w=3', "[a] resize_w: unknown key"),
        ('[a]\nbackend="DecodeMat"\npad_to=[3]', "[a] pad_to: applies to the input of a model, but the node has none"),
        ("resize_hh = 3\n[a]\n", ", line 1: resize_hh: unknown key: no op of this file has it"),
        ('next = "a"\n[a]\n', ", line 1: next: belongs to one node"),
        ("instances = 0\n[a]\n", ", line 1: instances: found 0"),
        ('[a]\nnext = "b"\n[b]\nnext = "c"\n[c]\nnext = "a"\n', "the nodes a -> b -> c -> a are in a cycle"),
        ('[in]\nnext = "a"\n[a]\nnext = "b"\n[b]\nnext = "a"\n', "the nodes a -> b -> a are in a cycle"),
        (
            '[in]\nnext="a"\n[a]\nnext="b"\ninputs={data="in.data",x="b.result"}\n[b]\n',
            "the nodes a -> b -> a are in a cycle",
        ),
        ('[a]\nnext = "a"\n', "the nodes a -> a are in a cycle"),
        ("[a]\n[b]\n", "found 2 entries, [a], [b]: no next names them; name one with entry in [pipeline]"),
        ('[pipeline]\nentry = "bb"\n[b1]\n[b]\n', "entry: there is no node 'bb'; did you mean 'b"),
        (
            '[decode]\nnext = "resnet"\n[resnet50]\n',
            "[decode] next: there is no node 'resnet'; did you mean 'resnet50'?",
        ),
        ('[a]\nnext = ["b", "b"]\n[b]\n', "[a] next: found b, b, expected each node once"),
        ("[a]\nnext = 3\n[b]\n", "[a] next: there is no node '3'"),
        ("[a]\nnext = {b = 1}\n[b]\n", "[a] next: found a table, expected"),
        ('[a]\nnext = "b,c"\n[b]\nnext = "d"\n[c]\nnext = "d"\n[d]\n', "[d]: takes items from b, c, but does not name"),
        ('[a]\nnext="b"\n[b]\ninputs = {image = "a.result"}', "[b] inputs: found image, expected 'data' among them"),
        ('[a]\nnext="b"\n[b]\ninputs = {data = "x.result"}', "[b] inputs: there is no node 'x'"),
        ('[a]\nnext="b"\n[b]\ninputs = {data = 3}', "[b] inputs: data: found 3, expected a field such as"),
        ('[a]\nnext="b"\n[b]\ninputs = "a"', "[b] inputs: found the string 'a', expected a table"),
        ('[a]\nnext="b"\n[b]\n[b.input]\ndata = "a.result"', "[b] input: unknown key"),
        (
            '[pipeline]\nentry="a"\n[a]\nnext="c"\n[b]\nnext="c"\n[c]\ninputs={data="a",x="b"}',
            "[c]: waits for items from b, which items that begin at [a] never reach",
        ),
        ('[a]\nbackend="Identity"\nops=["Identity"]', "found both ops and backend, which mean the same"),
        ('[pipeline]\nnam = "x"\n[a]\n', ", line 2: [pipeline] nam: unknown key; did you mean 'name'?"),
        ("[pipeline]\nin_flight = 0\n[a]\n", "[pipeline] in_flight: found 0, expected a whole number from 1"),
        ("pipeline = 3\n[a]\n", "pipeline: found 3, expected a table"),
        ('["a b"]\n', "[a b]: is not a valid node name"),
        (
            "[a]\n[metrics]\nport = 1\n",
            ", line 2: [metrics]: pipelines have no such table; set metrics_host and metrics_port",
        ),
        ("", ": found no node; expected a table such as [decode]"),
        ("\n# a comment\n" + NET + "retry_split = 7\n", ", line 6: [net] retry_split: "),
        ("x = 1\n", ": found no node; expected a table such as [decode]"),
        ('[a]\nwhen = "score >"', ", line 2: [a] when: found 'score >', which is no condition"),
        ('[a]\nelse = "stop"', ", line 2: [a] else: needs 'when'"),
        ('[a]\nnext="b.2"\n[b.2]', ", line 3: [b.2]: is an alias of [b], which has no keys"),
        ('[a]\nnext="b"\n[b]\ninputs={data={from=3}}', "[b] inputs: data: found a table, expected a field such as"),
        ('[a]\nnext="b"\n[b]\ninputs={data=["a", 3]}', "[b] inputs: data: found"),
        ("[a]\nbackend = 'Identity'\nnext = \n", "line 3"),
        ('[models.digits]\ntarget = "app.py:Digits"\n', "this is a configuration of `penstock serve`"),
    ],
)
def test_a_bad_file_is_rejected(tmp_path: Path, text: str, told: str) -> None:
    assert told in refused(tmp_path, text)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_graph(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_graph(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'[a]\nbackend = "D\xe9code"')
    with pytest.raises(ConfigError, match="not UTF-8 at byte 16"):
        read_tables(tmp_path / "latin.toml")
    assert refused(tmp_path, "a = " + "[" * 3000 + "]" * 3000) == ": not valid TOML: brackets are nested too deeply"


def test_a_pipeline_is_distinguished_from_a_configuration() -> None:
    assert is_pipeline({"decode": {"backend": "DecodeMat"}})
    assert is_pipeline({"backend": "DecodeMat"})
    assert is_pipeline({"pipeline": {}, "server": {}})
    assert not is_pipeline({"models": {"digits": {"target": "app.py:Digits"}}, "server": {"port": 1}})
    assert not is_pipeline({"server": {"port": 1}})
    assert not is_pipeline({})


TENSORS = """[pipeline.inputs]
A = "FP32[-1,4]"
"input.1" = "BYTES[-1]"

[pipeline.outputs]
SUM = {tensor = "FP32[-1,4]", from = "a.sum"}
text = "BYTES[-1,1]"

[a]
inputs = ["A", "pipeline.input.1"]

[b]
inputs = {data = "A", text = "input.1"}

[c]
inputs = {data = "a", b = "b"}
"""


def test_declared_tensors_are_inputs_of_nodes_and_fields_of_nodes(tmp_path: Path) -> None:
    graph = load(tmp_path, TENSORS)
    assert (graph.takes, graph.gives) == (("A", "input.1"), ("SUM", "text"))
    assert graph.tensors == (TensorSpec("A", "FP32", (-1, 4)), TensorSpec("input.1", "BYTES", (-1,)))
    assert graph.results == (TensorSpec("SUM", "FP32", (-1, 4)), TensorSpec("text", "BYTES", (-1, 1)))
    assert graph.sources == (NodeInput("a", "sum", "SUM"),)
    assert [i.source for i in graph.nodes["a"].inputs] == ["A", "input.1"]
    assert graph.starts == ("a", "b")
    again = load(tmp_path, to_toml(graph))
    assert (again.nodes, again.tensors, again.results, again.sources) == (
        graph.nodes, graph.tensors, graph.results, graph.sources,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"FP32[-1,4]"', '"FP31[-1,4]"', "line 2: [pipeline.inputs] A: found 'FP31[-1,4]', expected a datatype and"),
        ("A = ", "result = ", "line 2: [pipeline.inputs] result: is a field of every item"),
        ("from =", "fro =", "line 6: [pipeline.outputs] SUM: unknown key 'fro'; did you mean 'from'?"),
        ("a.sum", "aa.sum", "[pipeline] outputs: there is no node 'aa'"),
        ("from =", "default =", "line 6: [pipeline.outputs] SUM: unknown key 'default'"),
        ('tensor = "FP32[-1,4]", ', "", "line 6: [pipeline.outputs] SUM: found None, expected a datatype"),
        ('["A",', '["AA",', "[a] inputs: there is no node 'AA'"),
    ],
)
def test_errors_in_declared_tensors_name_the_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError) as found:
        load(tmp_path, TENSORS.replace(old, new, 1))
    assert message in found.value.message


def test_a_table_of_tensors_has_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found no tensor"):
        load(tmp_path, "[pipeline.inputs]\n[a]\n")


def test_outputs_are_fields_that_their_node_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SUM: \[a\] has no field 'sum'; it has data, result"):
        check(load(tmp_path, TENSORS))
    inner = '[pipeline.outputs]\ny={tensor="FP32[-1]", from="b"}\n[a]\neach="data"\nbody="b"\n[b]\n'
    with pytest.raises(ConfigError, match="is in the body of a fan-out"):
        check(load(tmp_path, inner))
