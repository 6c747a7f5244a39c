"""The diagrams of the documentation are what the tool draws, and each is in a page."""

from collections.abc import Callable

import pytest

from docs_diagrams import DIAGRAMS, DOCS, Drawing


@pytest.mark.parametrize("make", DIAGRAMS, ids=lambda make: make.__name__)
def test_a_diagram_is_up_to_date_and_shown(make: Callable[[], Drawing]) -> None:
    file = DOCS / "pictures" / f"{make.__name__}.svg"
    assert file.read_text() == make().svg(), "run: python tools/docs_diagrams.py"
    assert any(f"](pictures/{file.name})" in page.read_text() for page in DOCS.glob("*.md"))
