"""examples/embeddings: hashed letters, and an encoder of transformers."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock

FILE = Path(__file__).parents[2] / "examples" / "embeddings" / "embedder.py"


@pytest.fixture(scope="module")
def embedder() -> Any:
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("embedder", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Embedder


def request(text: Any, dimensions: int | None = None) -> penstock.EmbeddingRequest:
    return penstock.EmbeddingRequest(input=text, dimensions=dimensions)


def test_hashed_vectors_have_length_1_and_are_near_for_similar_texts(embedder: Any) -> None:
    model = embedder()
    model.load("cpu")
    texts = ["the weather in paris", "weather of paris", "a list of integers"]
    found = model.predict([*map(request, texts), request("the weather in paris", 32), request([1, 2])])
    vectors = [each.vector for each in found[:4]]
    assert np.allclose([np.linalg.norm(vector) for vector in vectors], 1)
    assert vectors[0] @ vectors[1] > 0.5 > vectors[0] @ vectors[2]
    assert (len(vectors[0]), len(vectors[3]), found[0].tokens) == (512, 32, 4)
    assert isinstance(found[4], penstock.BadRequest)


def test_an_encoder_gives_each_text_the_vector_that_it_has_alone(embedder: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(1)
    vocabulary = {letter: k for k, letter in enumerate("_abcdefghijklmnopqrstuvwxyz")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="_"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="_", pad_token="_")
    fast.save_pretrained(tmp_path)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=24,
    )  # fmt: skip
    encoder = transformers.BertModel(config).eval()
    encoder.save_pretrained(tmp_path)

    model = embedder(str(tmp_path))
    model.load("cpu")
    texts = ["abc", "thequickbrownfox", "z"]
    bad = [request("x" * 25), request([27]), request("a", 8)]
    found = model.predict([request(texts[0]), *bad, *map(request, texts[1:]), request(fast("abc")["input_ids"], 16)])
    assert [type(each) for each in found[1:4]] == [penstock.BadRequest] * 3
    with torch.inference_mode():
        for text, each in zip([*texts, "abc"], [found[0], *found[4:]], strict=True):
            mean = encoder(**fast(text, return_tensors="pt")).last_hidden_state[0].mean(0)
            assert np.allclose(each.vector, mean / mean.norm(), atol=1e-5)
            assert each.tokens == len(text)
