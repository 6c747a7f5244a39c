from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ArchiveError
from penstock.torchserve.archive.names import Names, check_name

BAD = {
    "../x": "climb",
    "a/../../x": "climb",
    "a/..": "climb",
    "..": "climb",
    "/etc/passwd": "absolute",
    "//x": "absolute",
    "": "empty",
    "./": "empty",
    "a//b": "empty or '.'",
    "a/./b": "empty or '.'",
    ".": "empty or '.'",
    "C:/x": "drive",
    "c:x": "drive",
    "a\\b": "backslash",
    "..\\x": "backslash",
    "a\0b": "printable",
    "a\nb": "printable",
    "a\udc80": "printable",
    "a" * 256: "255",
    "é" * 128: "255",
    "/".join(["a" * 200] * 6): "1024",
}


@pytest.mark.parametrize(("name", "rule"), BAD.items(), ids=[ascii(name)[:30] for name in BAD])
def test_a_bad_name_is_refused_by_its_rule(name: str, rule: str):
    with pytest.raises(ArchiveError, match=rule):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "a b.py", ".hidden", "a/b/c", "...", "a..b", "モデル.pt", "ab:b", "-f"])
def test_a_plain_name_passes(name: str):
    assert check_name(name) == name
    assert check_name(f"./{name}") == name


@given(st.text() | st.lists(st.sampled_from(["..", ".", "a", "", "\\", "C:"])).map("/".join))
def test_a_name_that_passes_stays_below_its_folder(name: str):
    try:
        checked = check_name(name)
    except ArchiveError:
        return
    assert os.path.normpath(f"/root/{checked}") == f"/root/{checked}"
    assert checked.isprintable()


@pytest.mark.parametrize(
    "names",
    [["a", "a"], ["a", "A"], ["d/x", "D/y"], ["d", "d/x"], ["d/x", "d"], ["café", "cafe\u0301"], ["straße", "STRASSE"]],
)
def test_a_name_stands_once_in_whatever_case(names: list[str]):
    seen = Names()
    seen.add(names[0], folder=False)
    with pytest.raises(ArchiveError, match=r"twice|only in case"):
        seen.add(names[1], folder=False)


def test_a_folder_may_be_named_after_what_is_in_it():
    seen = Names()
    seen.add("d/x", folder=False)
    seen.add("d", folder=True)
    seen.add("d", folder=True)
    seen.add("d/y", folder=False)
