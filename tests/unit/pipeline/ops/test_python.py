from __future__ import annotations

import sys

import pytest

from penstock.errors import ConfigError, LoadFailed, TargetNotFound
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import BatchOp, ItemOp, make_op, parameters_of, takes_any
from penstock.pipeline.ops.python import Python, adapt, op, resolve


class Item(ItemOp):
    """A plain op."""

    def __init__(self, more: int = 1) -> None:
        self.more = more

    def __call__(self, data, fields):
        return data + self.more


class Called:
    """It is called.

    - `factor`: by how much.
    """

    gives = "tensor"
    writes = ("seen",)

    def __init__(self, factor: int, words: tuple[str, ...] = ()) -> None:
        self.factor, self.words, self.log = factor, words, []

    def __call__(self, data):
        return data * self.factor

    def load(self, device):
        self.log.append(device)

    def unload(self):
        self.log.append("unloaded")


class OfFields:
    def __call__(self, data, fields):
        fields["seen"] = data
        return data


class Peers:
    """A class in TorchPipe's style."""

    def init(self, params):
        self.params = params
        return params.get("refuse") != "1"

    def forward(self, dicts):
        for one in dicts:
            if one["data"] != "skip":
                one["result"] = (one["data"], len(dicts), self.params)
            one["seen"] = True

    def max(self):
        return 4


class Bare:
    def forward(self, dicts):
        for one in dicts:
            one["result"] = one["data"]


@op(gives="any", writes=["label"], reads=["box"], batch=True, max_rows=8)
def whole(data, fields):
    for one in fields:
        one["label"] = "x"
    return [ValueError(str(d)) if d < 0 else d + 1 for d in data]


@op(batch=True)
class WholeCalled:
    def __call__(self, data):
        return list(reversed(data))


def double(data):
    return data * 2


def of_fields(data, fields):
    return fields["k"]


def with_default(data, scale=3):
    return data * scale


def made(target, **params):
    return make_op(adapt(target), params)


# ---- what may stand there


def test_an_op_class_is_used_unchanged():
    assert adapt(Item) is Item


@pytest.mark.parametrize(
    ("target", "params", "result"),
    [
        (double, {}, 4),
        (of_fields, {}, 7),
        (with_default, {}, 6),
        (lambda data, fields=None: fields["k"], {}, 7),
        (lambda data, *more: more[0]["k"], {}, 7),
        (abs, {}, 2),
        (Called, {"factor": "5"}, 10),
        (OfFields, {}, 2),
        (Called(3), {}, 6),
    ],
    ids=[
        "function",
        "of fields",
        "default",
        "default fields",
        "any number",
        "builtin",
        "class",
        "class of fields",
        "instance",
    ],
)
def test_a_callable_gets_the_fields_if_it_takes_two_arguments(target, params, result):
    made_op = made(target, **params)
    assert isinstance(made_op, ItemOp)
    assert made_op(2, {"k": 7}) == result


def test_declarations_and_documentation_of_a_class_become_the_ops():
    cls = adapt(Called)
    assert cls.__name__ == "Called"
    assert (cls.takes, cls.gives, cls.reads, cls.writes) == ("any", "tensor", (), ("seen",))
    assert [(p.name, p.type, p.doc) for p in parameters_of(cls).values()] == [
        ("factor", int, "by how much."),
        ("words", tuple[str, ...], ""),
    ]
    assert made(Called, factor=2, words="a, b").inner.words == ("a", "b")
    with pytest.raises(ConfigError, match="Called needs factor"):
        make_op(cls, {})


def test_an_op_without_declarations_may_write_any_field():
    assert adapt(double).writes is None
    assert adapt(Peers).writes is None


def test_a_class_is_loaded_and_unloaded_if_it_can_be():
    loaded = made(Called, factor=2)
    loaded.load("cpu")
    loaded.unload()
    assert loaded.inner.log == ["cpu", "unloaded"]
    plain = made(OfFields)
    plain.load("cpu")
    plain.unload()


def test_each_instance_has_its_own_object():
    cls = adapt(Called)
    assert make_op(cls, {"factor": 1}).inner is not make_op(cls, {"factor": 1}).inner


def test_an_op_declared_with_batch_gets_lists():
    batch = made(whole)
    assert isinstance(batch, BatchOp)
    assert batch.max_rows == 8
    assert (type(batch).reads, type(batch).writes) == (("box",), ("label",))
    fields = [{}, {}]
    one, two = batch([1, -1], fields)
    assert one == 2
    assert isinstance(two, ValueError)
    assert fields == [{"label": "x"}, {"label": "x"}]
    assert made(WholeCalled)([1, 2], [{}, {}]) == [2, 1]


def test_a_class_of_torchpipe_gets_texts_and_dicts():
    peers = made(Peers, a=1, b=True, c=[1, 2.5], d="x")
    assert isinstance(peers, BatchOp)
    assert peers.max_rows == 4
    assert takes_any(type(peers))
    fields = [{"data": 5, "result": "old"}, {"data": "skip", "result": "old"}]
    results = peers([5, "skip"], fields)
    assert results == [(5, 2, {"a": "1", "b": "1", "c": "1,2.5", "d": "x"}), None]
    assert all(one["seen"] for one in fields)


def test_a_torchpipe_class_without_max_takes_one_item():
    bare = made(Bare)
    assert bare.max_rows == 1
    assert bare([3], [{"data": 3}]) == [3]


def test_a_torchpipe_class_whose_init_returns_false_is_an_error():
    with pytest.raises(ConfigError, match=r"Peers.init returned False for \{'refuse': '1'\}"):
        made(Peers, refuse="1")


async def asynchronous(data):
    return data


def generator(data):
    yield data


def nothing():
    return None


def three(data, fields, more):
    return data


def keyword(data, *, size):
    return data


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (asynchronous, "asynchronous or a generator"),
        (generator, "asynchronous or a generator"),
        (nothing, r"takes \(\), expected \(data\) or \(data, fields\)"),
        (three, r"takes \(data, fields, more\), expected"),
        (keyword, r"takes \(data, \*, size\), expected"),
        (3, "is 3, expected a function"),
        (type("Empty", (), {}), "expected a function, a class whose instances can be called"),
    ],
)
def test_an_invalid_target_is_an_error(target, why):
    with pytest.raises(ConfigError, match=why):
        adapt(target)


# ---- Python[...]


MODULE = """
def plus(data):
    return data + 1


class Times:
    def __init__(self, k: int = 2):
        self.k = k

    def __call__(self, data):
        return data * self.k
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_ops.py").write_text(MODULE)
    (tmp_path / "my_broken.py").write_text("raise ValueError('no')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("my_ops", "my_broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("where", ["my_ops", "my_ops.py", "./my_ops.py"])
def test_a_target_is_in_a_module_or_a_file(module, where):
    assert make_op(catalog.find("Python"), {"target": f"{where}:plus"})(1, {}) == 2
    assert make_op(Python, {"target": f"{where}:Times", "k": "5"})(2, {}) == 10
    assert resolve(f"{where}:Times").__name__ == "Times"


def test_a_target_may_be_a_registered_name():
    catalog.register("Doubled", adapt(double))
    try:
        assert make_op(Python, {"target": "doubled"})(4, {}) == 8
    finally:
        catalog.unregister("Doubled")


def test_its_parameters_are_the_targets_own(module):
    with pytest.raises(ConfigError, match=r"Times has no parameter 'kk'; did you mean 'k'\?"):
        make_op(Python, {"target": "my_ops:Times", "kk": 1})
    with pytest.raises(ConfigError, match="Python needs target"):
        make_op(Python, {})


def test_a_missing_target_is_an_error(module):
    with pytest.raises(TargetNotFound, match=r"'my_ops' has no 'pluss'; did you mean 'plus'\?"):
        make_op(Python, {"target": "my_ops:pluss"})
    with pytest.raises(TargetNotFound, match="there is no module 'my_opps'"):
        make_op(Python, {"target": "my_opps:plus"})
    with pytest.raises(LoadFailed, match="importing my_broken raised ValueError: no"):
        make_op(Python, {"target": "my_broken:plus"})
    with pytest.raises(ConfigError, match="unknown op 'pluss'"):
        make_op(Python, {"target": "pluss"})


@pytest.mark.parametrize("key", ["takes", "gives"])
def test_an_unknown_kind_is_refused_with_the_nearest_one(key: str) -> None:
    decorated = op(**{key: "matt"})(lambda data: data)
    own = type("Own", (ItemOp,), {key: "matt"})
    for make in (lambda: adapt(decorated, "x"), lambda: adapt(own), lambda: catalog.register("own", own)):
        with pytest.raises(ConfigError, match=f"{key} = 'matt' is no kind of data; did you mean 'mat'"):
            make()
