"""What was typed, as it may be kept: without what is secret by its name, and without the users of URLs. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Final

from penstock.errors import plain

HIDDEN: Final = "***"
_NAME: Final = r"[\w.-]*(?:token|key|password|passwd|secret|authorization|credentials?|signature)"
_SIGN: Final = r"""(?:\s*=\s*|["']\s*[=:]\s*|:\s+)"""  # a colon alone stands in file.py:Class too
_VALUE: Final = r""""(?:[^"\\]|\\.)*"|'[^']*'|(?:(?:bearer|basic)\s+)?[^\s"'&;,}\]]+"""
_SETTING: Final = re.compile(rf"({_NAME}=|--[\w-]+={_NAME}=).+", re.IGNORECASE | re.DOTALL)
_INSIDE: Final = re.compile(rf"(?<![\w.-])({_NAME}{_SIGN})(?:{_VALUE})", re.IGNORECASE)
_USER: Final = re.compile(r"(?<=://)[^/?#\s]*@")


def redacted(text: str) -> str:
    """The text with *** for the values of names such as `api_key` or `access_token`, and for who a URL says to be."""
    return _USER.sub(f"{HIDDEN}@", _INSIDE.sub(rf"\1{HIDDEN}", plain(text)))


def typed(words: Sequence[str]) -> str:
    """The command line `penstock WORDS`, as it can be pasted into a shell, redacted."""
    return shlex.join(["penstock", *map(_word, words)])


def _word(word: str) -> str:
    setting = _SETTING.fullmatch(word)  # KEY=VALUE: all that stands behind it is the value
    return plain(setting[1]) + HIDDEN if setting else redacted(word)
