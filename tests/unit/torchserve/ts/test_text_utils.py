from __future__ import annotations

import pytest

from penstock.torchserve.ts.util import get_tokenizer, ngrams_iterator


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
