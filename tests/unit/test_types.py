"""StopScanner: a text in parts ends where the whole text would."""

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.types import StopScanner

letters = st.text("ab", max_size=4)


@example(["a", "b", "b"], ["abb", "b"])
@given(st.lists(letters), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_text_in_parts_ends_where_the_whole_one_does(parts: list[str], stop: list[str]) -> None:
    scanner, sent = StopScanner(stop), ""
    for number, part in enumerate(parts, 1):
        sent += scanner.feed(part)
        so_far = "".join(parts[:number])
        # what was sent is never taken back, and nothing is held that cannot begin a stop text
        assert so_far.startswith(sent)
        held = so_far[len(sent) :]
        assert scanner.stopped or held == "" or any(s.startswith(held) for s in stop)
    sent += scanner.end()
    whole = "".join(parts)
    found = [(at + len(s), at) for s in stop if (at := whole.find(s)) >= 0]  # the first one to be complete ends it
    assert scanner.stopped == bool(found)
    assert sent == (whole[: min(found)[1]] if found else whole)
