import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ArchiveError
from penstock.torchserve.archive.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    check_model_name,
    model_name_from,
    parse_manifest,
)


def text_of(**model: Any) -> bytes:
    return json.dumps({"runtime": "python", "model": {"modelName": "m", **model}}).encode()


def test_every_field_is_read():
    raw = {
        "createdOn": "01/02/2024 10:11:12",
        "runtime": "python3",
        "archiverVersion": "0.12.0",
        "model": {
            "modelName": "densenet161",
            "modelVersion": "2.5",
            "handler": "h.py:run",
            "serializedFile": "w.pt",
            "modelFile": "model.py",
            "extensions": {"a": 1},
            "requirementsFile": "requirements.txt",
            "configFile": "model-config.yaml",
        },
    }
    assert parse_manifest(json.dumps(raw).encode()) == Manifest(
        model_name="densenet161",
        model_version="2.5",
        handler="h.py:run",
        runtime="python3",
        serialized_file="w.pt",
        model_file="model.py",
        extensions={"a": 1},
        requirements_file="requirements.txt",
        config_file="model-config.yaml",
        created_on="01/02/2024 10:11:12",
        archiver_version="0.12.0",
        raw=raw,
    )


def test_an_old_manifest_with_further_keys_is_read():
    raw = {
        "specificationVersion": "1.0",
        "implementationVersion": "1.0",
        "modelServerVersion": "1.0",
        "license": "Apache 2.0",
        "description": None,
        "model": {"modelName": "squeezenet", "handler": "service:handle", "description": "old", "extra": [1]},
        "engine": {"engineName": "MXNet"},
    }
    found = parse_manifest(json.dumps(raw).encode())
    assert (found.model_name, found.model_version, found.handler, found.runtime) == (
        "squeezenet",
        "1.0",
        "service:handle",
        "python",
    )
    assert found.raw == raw


def test_a_numeric_version_becomes_text():
    assert parse_manifest(text_of(modelVersion=2.5)).model_version == "2.5"
    assert parse_manifest(text_of(modelVersion=3)).model_version == "3"


def test_a_manifest_without_a_name_is_named_after_its_file():
    assert parse_manifest(text_of(modelName=None), file_name="resnet-18.mar").model_name == "resnet-18"


BAD = {
    "not JSON": (b"{", "is not JSON"),
    "not text": (b"\xff\xfe\x00", "is not JSON"),
    "deep": (b"[" * 100_000, "is not JSON"),
    "huge": (b" " * (MAX_MANIFEST_BYTES + 1), "more than"),
    "a list": (b"[]", "expected an object"),
    "no model": (b"{}", 'no object "model"'),
    "model is text": (b'{"model": "m"}', 'no object "model"'),
    "runtime": (b'{"runtime": "perl", "model": {"modelName": "m"}}', "runtime is 'perl'"),
    "handler above": (text_of(handler="../../x"), "handler: .*climb"),
    "handler above, function": (text_of(handler="../x.py:run"), "handler: .*climb"),
    "absolute handler": (text_of(handler="/etc/x.py"), "handler: .*absolute"),
    "only a function": (text_of(handler=":run"), "handler: .*empty"),
    "weights above": (text_of(serializedFile="../w.pt"), "serializedFile: .*climb"),
    "model file above": (text_of(modelFile="a/../../m.py"), "modelFile: .*climb"),
    "requirements above": (text_of(requirementsFile="/r.txt"), "requirementsFile: .*absolute"),
    "config above": (text_of(configFile="..\\c.yaml"), "configFile: .*backslash"),
    "name above": (text_of(modelName="../x"), "the model's name is '../x'"),
    "name of a list": (text_of(modelName=["m"]), "modelName is a list; expected a string"),
    "name true": (text_of(modelName=True), "modelName is a bool"),
    "version above": (text_of(modelVersion="../1"), "modelVersion is '../1'"),
    "version ..": (text_of(modelVersion=".."), "modelVersion"),
    "long version": (text_of(modelVersion="1" * 129), "modelVersion"),
}


@pytest.mark.parametrize(("text", "said"), BAD.values(), ids=BAD)
def test_a_bad_manifest_is_refused_with_the_name_of_the_field(text: bytes, said: str):
    with pytest.raises(ArchiveError, match=said):
        parse_manifest(text)


@pytest.mark.parametrize("name", ["../x", "", ".m", "-m", "a b", "a/b", "m\n", "é", "m" * 129])
def test_an_invalid_model_name_is_refused(name: str):
    with pytest.raises(ArchiveError, match="the model's name"):
        check_model_name(name)


@pytest.mark.parametrize(
    ("file", "name"),
    [("m.mar", "m"), ("m.tar.gz", "m"), ("m-1.0.tgz", "m-1.0"), ("my model.mar", "my_model"), (".m", "m"), ("x", "x")],
)
def test_a_model_is_named_after_its_file(file: str, name: str):
    assert model_name_from(file) == name


KEYS = st.sampled_from(["model", "runtime", "modelName", "modelVersion", "handler"])
TREES = st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(KEYS, x))


@given(st.binary() | TREES.map(lambda tree: json.dumps(tree).encode()))
def test_arbitrary_text_raises_nothing_else(text: bytes):
    try:
        parse_manifest(text)
    except ArchiveError:
        pass


WORD = st.text(string.ascii_letters + string.digits, min_size=1, max_size=20)


@given(
    st.builds(
        Manifest,
        model_name=WORD,
        model_version=WORD,
        handler=WORD.map("{}.py".format) | st.tuples(WORD, WORD).map("{0[0]}.py:{0[1]}".format),
        runtime=st.sampled_from(["python", "python3", "LSP"]),
        serialized_file=st.just("") | WORD,
        model_file=st.just("") | WORD,
        requirements_file=st.just("") | WORD,
        config_file=st.just("") | WORD,
        created_on=WORD,
        archiver_version=WORD,
    )
)
def test_a_written_manifest_is_read_back(manifest: Manifest):
    found = parse_manifest(manifest.to_json().encode())
    assert found == Manifest(**{**{f: getattr(manifest, f) for f in Manifest.__struct_fields__}, "raw": found.raw})
