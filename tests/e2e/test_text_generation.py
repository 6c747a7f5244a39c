"""examples/text_generation answers under `penstock serve` in both modes, and runs a model of transformers."""

import importlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock

torch = pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_generation"
MODULES = ("sentences", "network", "generator", "train")


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    """The modules of the example."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)


def test_requests_of_different_lengths_get_the_right_answers_in_both_modes(
    modules: SimpleNamespace, serve: Callable[..., Any]
) -> None:
    server = serve(None, "examples/text_generation/text_generation.toml", cwd=EXAMPLE.parents[1])

    def answer(model: str, question: str) -> str:
        url = f"{server.url}/predictions/{model}"
        with urllib.request.urlopen(
            urllib.request.Request(url, question.encode(), {"content-type": "text/plain"})
        ) as got:
            text: str = got.read().decode()
        return text

    counting = modules.sentences.counting
    asked = [counting(a, b) for a, b in ((2, 3), (0, 10), (17, 20), (4, 12), (28, 29), (5, 14))]
    with ThreadPoolExecutor(len(asked)) as threads:
        for model in ("generate", "generate_by_batch"):
            found = list(threads.map(lambda question, m=model: answer(m, question), [q for q, _ in asked]))
            assert found == [expected.rstrip("\n") for _, expected in asked]
    with urllib.request.urlopen(f"{server.url}/v2/models/generate") as got:
        parameters = json.loads(got.read())["parameters"]
    assert (parameters["mode"], parameters["max_batch_size"]) == ("continuous", 32)
    with pytest.raises(urllib.error.HTTPError, match="400"):
        answer("generate", "a" * 256)


def written(modules: SimpleNamespace, generator: Any, items: list[Any]) -> list[str]:
    """The texts of these items; a new one joins at every second step."""
    items = [item if isinstance(item, str) else modules.generator.Request(**item) for item in items]
    waiting, active, texts = list(items), [], []
    for step in range(1000):
        if waiting and step % 2 == 0:
            active.append(generator.admit(waiting.pop(0)))
            texts.append(active[-1])
        steps = generator.step(active)
        for text, done in [(text, found.done) for text, found in zip(active, steps, strict=True)]:
            if done:
                active.remove(text)
                generator.evict(text)
        if not active and not waiting:
            return [text.sent for text in texts]
    raise AssertionError("never done")


def test_a_text_does_not_depend_on_those_beside_it(modules: SimpleNamespace) -> None:
    generator = modules.generator.Generator()
    generator.load("cpu")
    items = [
        "count from one to nine:",
        {"prompt": "two after may:", "max_tokens": 5},
        {"prompt": "count from", "temperature": 0.8, "seed": 3, "top_p": 0.9, "max_tokens": 60, "ignore_end": True},
        "six after monday:",
        {"prompt": "count from one to nine:", "stop": ["six", "our f"]},
    ]
    together = written(modules, generator, items)
    assert together == [written(modules, generator, [item])[0] for item in items]
    assert together[4] == " one two three f"
    for _ in range(2):  # texts that end in the same step leave nothing behind
        twins = [generator.admit(items[0]) for _ in range(2)]
        while not all(step.done for step in generator.step(twins)):
            pass
        assert [text.sent for text in twins] == [together[0]] * 2
        for text in twins:
            generator.evict(text)
    assert [len(together[1]), len(together[2])] == [5, 60]


def test_a_causal_model_of_transformers_writes_what_its_own_generate_writes(
    modules: SimpleNamespace, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(1)
    vocabulary = {letter: k for k, letter in enumerate("<>abcdefghijklmnopqrstuvwxyz")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=">", unk_token="<")
    fast.chat_template = "{% for m in messages %}<{{ m.role[0] }}{{ m.content }}{% endfor %}<a"
    fast.save_pretrained(tmp_path)
    config = transformers.GPT2Config(
        vocab_size=len(vocabulary), n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=1, bos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)

    generator = modules.generator.Generator(str(tmp_path))
    generator.load("cpu")
    prompts = ["abc", "hello", "z", "thequickbrownfox"]
    lengths = [20, 7, 30, 12]
    found = written(modules, generator, [{"prompt": p, "max_tokens": n} for p, n in zip(prompts, lengths, strict=True)])
    for prompt, length, text in zip(prompts, lengths, found, strict=True):
        tokens = torch.tensor([fast(prompt)["input_ids"]])
        whole = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=length, do_sample=False, pad_token_id=0
        )
        assert text == fast.decode(whole[0, tokens.shape[1] :], skip_special_tokens=True)
        assert text
    turns = [("system", "be"), ("user", "hi")]
    messages = [penstock.ChatMessage(*turn) for turn in turns]
    assert generator.admit(modules.generator.Request(messages=messages)).tokens == fast("<sbe<uhi<a")["input_ids"]
    assert generator.admit(modules.generator.Request(prompt=[3, 4])).tokens == [3, 4]
    with pytest.raises(penstock.BadRequest, match="a token is a number from 0 to 27"):
        generator.admit(modules.generator.Request(prompt=[28]))


def test_a_short_training_lowers_the_loss(
    modules: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules.train, "ROWS", 2)
    modules.train.train(3, tmp_path / "weights.pt")
    modules.network.CharacterModel(tmp_path / "weights.pt")
    assert 0 <= modules.train.check(tmp_path / "weights.pt", 4) <= 1
