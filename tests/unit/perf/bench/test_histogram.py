from __future__ import annotations

import builtins
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.perf.bench.histogram import decode, encode


def test_latencies_come_back_to_three_digits_with_their_counts() -> None:
    given = [0.001, 0.001, 0.0123456, 1.5, 0.25, 0.25, 0.25]
    found = decode(encode(given))
    assert [count for _, count in found] == [2, 1, 3, 1]
    assert [seconds for seconds, _ in found] == pytest.approx([0.001, 0.0123456, 0.25, 1.5], rel=0.001)


def test_what_is_out_of_range_counts_at_its_end() -> None:
    assert decode(encode([0.0, 1e-9, 7200.0])) == [(pytest.approx(1e-6), 2), (pytest.approx(3600, rel=0.001), 1)]


def test_nothing_is_an_empty_histogram() -> None:
    assert decode(encode([])) == []


@pytest.mark.parametrize("text", ["", "x", "HISTFAAAA", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"])
def test_what_is_no_histogram_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no HDR histogram: found"):
        decode(text)


def test_without_the_library_there_is_no_histogram_and_none_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("hdrh"):
            raise ImportError(name)
        return real(name, *rest)

    text = encode([0.1])
    monkeypatch.setattr(builtins, "__import__", absent)
    assert encode([0.1]) == ""
    with pytest.raises(ConfigError, match=r"install penstock\[bench\]"):
        decode(text)
