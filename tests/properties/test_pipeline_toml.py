"""Any graph written as TOML and loaded again is the same graph."""

import tomllib
from typing import Any

from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.errors import ConfigError
from penstock.pipeline.describe import to_toml
from penstock.pipeline.load import parse_graph
from penstock.pipeline.notation import NODE, parse
from penstock.torchpipe.dialect import TORCHPIPE

FOLDER = "/srv/nets"
MILLISECONDS = st.floats(0.001, 1e6) | st.integers(1, 10_000)
FIELDS = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=8)

RESIZE = st.fixed_dictionaries({"op": st.just("ResizeMat"), "resize_h": st.integers(1, 9), "resize_w": st.just("7")})
MODEL = st.fixed_dictionaries(
    {"op": st.just("OnnxTensor"), "model": st.sampled_from(["net.onnx", "/elsewhere/net.onnx", 'sub/ä "net".onnx'])},
    optional={
        "mean": st.lists(st.floats(-300, 300), min_size=1, max_size=3),
        "model_cache": st.just("net.trt"),
        "threads": st.integers(1, 4),
        "max_batch": st.just(64),
        "filter": st.just("or"),
    },
)
COPY = st.builds(lambda a: {"op": "Copy", "pairs": f"a:{a}"}, st.sampled_from(["b", "x y", "é"]))
OPS = st.lists(st.sampled_from(["Identity", "DecodeMat", "Mat2Tensor"]) | RESIZE | MODEL | COPY, min_size=1, max_size=4)
KEYS = st.fixed_dictionaries(
    {},
    optional={
        "instances": st.integers(1, 16),
        "max_batch": st.integers(8, 64),
        "min_batch": st.integers(1, 8),
        "pad_to": st.sets(st.integers(1, 999), max_size=3).map(sorted),
        "bucket": st.lists(FIELDS.map(lambda f: f.replace(",", "").strip() or "a"), max_size=2),
        "wait_ms": MILLISECONDS,
        "deadline_ms": MILLISECONDS,
        "device": st.sampled_from(["cpu", "cuda", "cuda:3"]),
        "queue": st.integers(1, 10**9),
        "queue_bytes": st.integers(1, 10**12),
        "run_timeout_s": st.floats(0.01, 1000),
        "retry_split": st.booleans(),
        "idempotent": st.booleans(),
        "on_error": st.sampled_from(["fail", "skip"]),
        "filter": st.sampled_from(["swap", "or", "odd"]),
        "when": st.sampled_from(["score > 0.5", "present(box) and label in ['a', \"b\"]"]),
        "require": st.sampled_from(["all", "any"]),
    },
)
EACH = st.fixed_dictionaries(
    {"each": FIELDS, "body": st.just("n0")},
    optional={"gather": st.just(["a", "b"]), "max_fanout": st.integers(1, 9), "on_item_error": st.just("null")},
)


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """Tables of a graph: each node except the first follows one or more earlier ones."""
    count = draw(st.integers(1, 5))
    tables: dict[str, Any] = {f"n{i}": {**draw(KEYS), "ops": draw(OPS), "next": []} for i in range(count)}
    for table in tables.values():
        if "device" not in table and draw(st.booleans()):
            table["processes"] = table.get("instances", 3)
        if all(isinstance(op, str) or op["op"] != "OnnxTensor" for op in table["ops"]):
            table.pop("pad_to", None)
    for i in range(1, count):
        before = draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=3))
        for producer in before:
            tables[f"n{producer}"]["next"].append(f"n{i}")
        if len(before) > 1 or draw(st.booleans()):
            names = ["data", *draw(st.lists(FIELDS.filter(lambda f: f != "data"), unique=True, max_size=2))]
            tables[f"n{i}"]["inputs"] = {name: f"n{min(before)}.{draw(FIELDS)}" for name in names}
    if draw(st.booleans()):
        tables["n0"]["nestedone"] = {"next": []}  # longer than a field, so that no input means it
    if draw(st.integers(0, 9)) == 0:
        tables["fan"] = draw(EACH)
    settings = {
        "entry": "n0",
        "trace": draw(st.booleans()),
        "inputs": ["data", draw(FIELDS).replace(",", "").strip() or "b"],
    }
    return {
        "pipeline": settings,
        **draw(KEYS.map(lambda k: {x: k[x] for x in ("instances", "wait_ms") if x in k})),
        **tables,
    }


@settings(deadline=None, max_examples=100)
@given(tables=graphs())
def test_a_converted_graph_is_the_same_graph(tables: dict[str, Any]) -> None:
    graph = parse_graph(tables, name="nets", folder=FOLDER)
    text = to_toml(graph)
    again = parse_graph(tomllib.loads(text), name="other", folder=FOLDER)
    assert again == graph
    assert to_toml(again) == text


SCALARS = (
    st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.dates()
    | st.sampled_from(
        ["a", "b", "a.result", "1&2", "4x3x2", "a[result:data]", "S[DecodeMat", "(or)ResizeMat", "cuda:99"]
    )
)
VALUES = st.recursive(
    SCALARS,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(["op", "data", "next", "x"]), v, max_size=2),
)
NAMES = [*NODE, *TORCHPIPE, "resize_h", "color", "target", "x"]
ANY_TABLE = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4)
ANY_TABLES = st.dictionaries(
    st.sampled_from(["a", "b", "a b", "global", "pipeline", *NAMES[:8]]), ANY_TABLE | VALUES, max_size=5
)


@settings(deadline=None, max_examples=300)
@given(tables=ANY_TABLES, compat=st.booleans())
@example(tables={"a": {"backend": False, "preprocessor": []}}, compat=False)
def test_any_tables_are_a_graph_or_an_error_that_says_where(tables: dict[str, Any], compat: bool) -> None:
    try:
        graph = parse_graph(tables, name="nets", folder=FOLDER, compat=compat)
    except ConfigError as e:
        event(e.message[:30])
    else:
        assert parse_graph(tomllib.loads(to_toml(graph)), name="nets", folder=FOLDER) == replace(graph, compat=False)


def refusal(text: str) -> str | None:
    """The error of an invalid expression."""
    try:
        parse(text)
    except ConfigError as e:
        return e.message
    return None


@settings(deadline=None, max_examples=300)
@given(text=st.text(alphabet="AS[](),= k:1\t", max_size=30))
def test_any_expression_is_a_tree_or_an_error_with_a_position(text: str) -> None:
    told = refusal(text)
    assert told is None or "at character " in told
