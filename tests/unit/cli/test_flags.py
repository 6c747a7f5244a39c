"""What the pages say of flags, held against the flags that there are."""

import re
from functools import cache
from pathlib import Path

import click
import pytest

from penstock.cli.main import main

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/*.md"))]
TOLD_IN = {
    "bench": "bench",
    "benchmark-suite": "benchmark-suite",
    "compare": "bench-reports",
    "gate": "bench-reports",
    "simulate": "simulate",
    "tune": "tune",
}
"""Verbs that measure, and the page that tells each flag of them."""
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
CALL = re.compile(r"penstock[ \n]([a-z-]+)\b([^`\n]*)")


@cache
def flags(verb: str) -> frozenset[str]:
    """Of a verb; of one that has verbs of its own all of theirs."""
    command = main.get_command(click.Context(main), verb)
    assert command is not None, f"penstock has no verb {verb}"
    own = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return frozenset({"--help", *own, *(name for each in inner for option in each.params for name in option.opts)})


@pytest.mark.parametrize("verb", TOLD_IN)
def test_each_flag_of_a_verb_that_measures_is_told_on_its_page(verb: str) -> None:
    told = set(FLAG.findall((ROOT / "docs" / f"{TOLD_IN[verb]}.md").read_text()))
    command = main.get_command(click.Context(main), verb)
    assert command is not None
    shown = [option for option in command.params if not getattr(option, "hidden", False)]
    missing = [option.opts[0] for option in shown if isinstance(option, click.Option) and option.opts[0] not in told]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_have_flags_that_there_are(page: Path) -> None:
    verbs = main.list_commands(click.Context(main))
    for verb, rest in CALL.findall(page.read_text()):
        if verb in verbs:
            rest = re.sub(r'"[^"]*"|\'[^\']*\'', "", rest)  # the command of an --engine has flags of its own
            assert set(FLAG.findall(rest)) <= flags(verb), f"penstock {verb}{rest}"


@pytest.mark.parametrize("page", sorted(set(TOLD_IN.values())))
def test_a_page_of_measuring_names_no_flag_that_nobody_has(page: str) -> None:
    text = CALL.sub("", (ROOT / "docs" / f"{page}.md").read_text())
    assert set(FLAG.findall(text)) <= set().union(*map(flags, TOLD_IN))
