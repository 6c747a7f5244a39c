"""What codecs declare, and the codecs of one model."""

import pytest

from penstock.config.schema import ModelConfig
from penstock.core.codecs import CodecTraits, ModelCodecs, traits_of
from penstock.core.contracts import Codec
from penstock.core.engine.engine import Engine
from penstock.errors import ConfigError
from penstock.plugins import BUILTIN
from penstock.types import Item, ItemResult, ModelMetadata

FACES = {"kserve", "kserve_explain", "openai_chat", "openai_completions", "openai_embeddings"}


class Upper(Codec):
    """A user's own codec, which wants the metadata of its model."""

    divisible = True

    def __init__(self, model, version, metadata):
        self.platform = metadata.platform

    def decode(self, item):
        return item.payload.upper(), None

    def encode(self, value, item, context):
        return ItemResult(body=value)

    def join(self, parts):
        return parts[0]

    @staticmethod
    def peek(item, body):
        return len(body), "x"


def test_the_built_in_codecs_declare_what_the_engine_relies_on() -> None:
    traits = {name: traits_of(name) for name in BUILTIN["codec"]}
    divisible = {"oip_binary", "oip_binary_coded", "oip_grpc", *FACES}
    assert {name for name, t in traits.items() if t.divisible} == divisible
    peeked = {"oip_json", "oip_json_coded", "oip_npy", "oip_npy_coded", *divisible}
    assert {name for name, t in traits.items() if t.peek is not None} == peeked
    headed = {"oip_binary_coded", "oip_json_coded", "oip_npy", "oip_npy_coded"}
    assert headed <= {name for name, t in traits.items() if t.reads_headers}


def test_objects_of_this_process_have_no_codec() -> None:
    assert traits_of("object") == CodecTraits()


def test_your_own_codec_is_found_by_its_path_and_receives_the_metadata() -> None:
    name = f"{__file__}:Upper"
    traits = traits_of(name)
    assert traits.divisible
    assert traits.peek is not None
    assert traits.peek(Item(b"abc"), b"abc") == (3, "x")
    codecs = ModelCodecs(ModelMetadata("m", "1", platform="onnx"))
    codec = codecs.get(name)
    assert codec.platform == "onnx"  # type: ignore[attr-defined]
    assert codecs.get(name) is codec


def test_an_unknown_codec_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown codec 'oip_jsn'.*did you mean 'oip_json'"):
        traits_of("oip_jsn")


async def test_a_request_whose_codec_is_divisible_may_be_cut_to_fill_a_batch() -> None:
    async with Engine() as engine:
        await engine.load("m", ModelConfig(target="x:y", transport="inline"), target=lambda items: items)
        for codec, divisible in (("oip_binary", True), ("native", False)):
            call = engine.submit("m", None, Item(b"[]", codec), lambda result: None)
            assert call.entry.divisible is divisible
            call.cancel()
