from __future__ import annotations

import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.torchserve.ts.text import TextClassifier, TextHandler
from penstock.torchserve.ts.util import CONTRACTION_MAP, get_tokenizer, ngrams_iterator

pytestmark = pytest.mark.usefixtures("forget_modules")

NET = """
import torch

class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(5, 2, mode="sum")

    def forward(self, words, offsets):
        return self.embedding(words, offsets)
"""
WORDS = {"<unk>": 0, "good": 1, "bad": 2, "not": 3, "not good": 4}
WEIGHTS = [[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 0.5], [-3.0, 1.0]]


@pytest.fixture
def load(tmp_path: Path, make_context):
    """A classifier with a vocabulary, and its context."""

    def load(vocabulary: Any, *headers: Any, config: Any = None) -> tuple[TextClassifier, Any]:
        name = f"bag_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(NET)
        torch.save({"embedding.weight": torch.tensor(WEIGHTS)}, tmp_path / "bag.pth")
        torch.save(vocabulary, tmp_path / "source_vocab.pt")
        context = make_context({"modelFile": f"{name}.py", "serializedFile": "bag.pth"}, *headers, config=config)
        made = TextClassifier()
        made.initialize(context)
        return made, context

    return load


def probabilities(scores: list[float]) -> list[float]:
    total = sum(map(math.exp, scores))
    return [math.exp(score) / total for score in scores]


@pytest.mark.parametrize("vocabulary", [WORDS, OrderedDict(WORDS), list(WORDS), Counter(WORDS)])
def test_words_pairs_and_unknown_words_are_counted(load, vocabulary):
    handler, context = load(vocabulary)
    # the, film, isn't -> is not, good; of the pairs only "not good" is known
    (answer,) = handler.handle([{"data": bytearray(b"The <b>film</b> isn't GOOD!")}], context)
    assert list(answer) == ["0", "1"]
    assert list(answer.values()) == pytest.approx(probabilities([2.0 - 3.0, 0.5 + 1.0]))


def test_text_may_be_a_string_and_labels_have_names(load, tmp_path: Path):
    (tmp_path / "index_to_name.json").write_text('{"0":"yes","1":"no"}')
    handler, context = load(WORDS)
    (answer,) = handler.handle([{"body": "bad"}], context)
    assert answer == pytest.approx(dict(zip(("yes", "no"), probabilities([0.0, 2.0]), strict=True)))


def test_an_explanation_lists_the_words_and_their_importance(load):
    handler, context = load(WORDS, {"explain": "True"})
    (answer,) = handler.handle([{"data": "good bad", "target": bytearray(b"1")}], context)
    assert answer["words"] == ["good", "bad"]
    # the bag's sum is one row: it adds nothing to score 0 and 2 to score 1, against a text of unknown words
    assert answer["importances"] == [pytest.approx(probabilities([0.0, 2.0]))]


def test_an_archive_without_a_vocabulary_is_refused(load, tmp_path: Path, make_context):
    handler, context = load(WORDS)
    (tmp_path / "source_vocab.pt").unlink()
    with pytest.raises(Exception, match="source_vocab"):
        handler.initialize(context)


def test_an_old_manifest_may_name_the_vocabulary(load, tmp_path: Path):
    handler, context = load(WORDS)
    (tmp_path / "source_vocab.pt").rename(tmp_path / "words.pt")
    context.manifest["model"]["sourceVocab"] = str(tmp_path / "words.pt")
    handler.initialize(context)
    assert handler.source_vocab["nowhere"] == 0


def test_a_vocabulary_without_unk_fails_on_an_unknown_word(load):
    handler, context = load({"good": 1})
    with pytest.raises(KeyError, match="strange"):
        handler.handle([{"data": "strange"}], context)


class Cleaner(TextHandler):
    pass


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I'd say they've won't", "I would say they have will not"),
        ("Can't you?", "Cannot you?"),
        ("can't've", "cannotve"),  # the shorter one is found first
        ("it ain't", "it as not"),  # the first character stays
        ("dogs' bone", "dogs bone"),
    ],
)
def test_contractions_are_expanded(text, expected):
    assert Cleaner()._expand_contractions(text) == expected


def test_the_table_of_contractions_is_complete():
    assert CONTRACTION_MAP["they're"] == "they are"
    assert CONTRACTION_MAP["o'clock"] == "of the clock"
    assert all("'" in short and "'" not in long for short, long in CONTRACTION_MAP.items())


def test_texts_are_cleaned():
    cleaner = Cleaner()
    assert cleaner._remove_html_tags("<p>a&nbsp;b</p>&#12;c") == "abc"
    assert cleaner._remove_accented_characters("Déjà vu – ß") == "Deja vu  "
    assert cleaner._remove_punctuation("a,b.c-d!") == cleaner._remove_puncutation("a,b.c-d!") == "abcd"
    assert cleaner.get_word_token(["Ġgood", "bad"]) == ["good", "bad"]


def test_words_and_punctuation_marks_are_tokens():
    tokens = get_tokenizer("basic_english")('It\'s "good"; well: (very)!\tYes?<br />End. a,b')
    assert tokens == ["it", "'", "s", "good", "well", "(", "very", ")", "!", "yes", "?", "end", ".", "a", ",", "b"]


def test_other_tokenizers():
    assert get_tokenizer(None)("A  b,\nc") == ["A", "b,", "c"]
    assert get_tokenizer(list)("ab") == ["a", "b"]
    with pytest.raises(ValueError, match="expected 'basic_english'"):
        get_tokenizer("spacy")


def test_ngrams_follow_the_words():
    assert list(ngrams_iterator(["here", "we", "are"], 3)) == [
        "here", "we", "are", "here we", "we are", "here we are",
    ]  # fmt: skip
    assert list(ngrams_iterator(["here"], 2)) == ["here"]
