from html.parser import HTMLParser

import pytest

from penstock.perf.bench.document import (
    BulletList,
    CodeBlock,
    Heading,
    Paragraph,
    Plot,
    Report,
    TableBlock,
    align,
    around,
    by_text,
    make_report,
    markdown,
    memory,
    number,
    page,
    percent,
    seconds,
    table,
    value_text,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"), (0.0, "0 µs"), (4.2e-7, "0.42 µs"), (0.00042, "420 µs"), (0.0009996, "1,000 µs"),
        (0.0123, "12.3 ms"), (0.9996, "1,000 ms"), (1.25, "1.25 s"), (3725.0, "3,725 s"),
    ],
)  # fmt: skip
def test_seconds_have_the_unit_that_suits(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_memory_has_the_unit_that_suits() -> None:
    assert [memory(n) for n in (None, 3 * 2**30, 2**27)] == ["n/a", "3 GiB", "128 MiB"]


def test_an_interval_has_one_unit() -> None:
    assert around(0.0123, 0.0119, 1.5) == "12.3 ms (11.9..1,500)"


def test_lines_stand_in_columns() -> None:
    found = align([["load", "good/s"], ["1 client", "7"], ["64 clients"]])
    assert found == ["load        good/s", "1 client         7", "64 clients"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "n/a"), (0.0, "0"), (0.1234, "0.123"), (99.4, "99.4"), (99.6, "100"), (12345.6, "12,346")],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"), (0.0, "0.0 %"), (0.0014, "+0.14 %"), (-0.00001, "0.0 %"), (-0.0451, "-4.5 %"),
        (0.00996, "+1.0 %"), (0.0994, "+9.9 %"), (0.0996, "+10 %"), (-1.0, "-100 %"), (12.3456, "+1,235 %"),
    ],
)  # fmt: skip
def test_shares_are_percent_with_their_sign(value: float | None, text: str) -> None:
    assert percent(value, signed=True) == text


def test_text_cannot_break_the_markdown() -> None:
    report = Report(
        "a*b",
        [Paragraph("x\n## y", "bad"), BulletList(["one\n- two"])],
        [TableBlock(["h|"], [["<b>|"]]), CodeBlock("a:", "````")],
    )
    assert markdown(report) == (
        "# a\\*b\n\n**x ## y**\n\n- one - two\n\n| h\\| |\n| --- |\n| \\<b>\\| |\n\na:\n\n`````\n````\n`````\n"
    )


def test_blocks_without_content_and_headings_without_blocks_are_left_out() -> None:
    said, note = Paragraph("said"), CodeBlock("so:", "said")
    empty = [Paragraph("", "bad"), BulletList([]), CodeBlock("so:", ""), TableBlock(["a"], [], "a note")]
    report = make_report("t", [Heading("x"), *empty, Heading("y"), said], [*empty, note, Heading("z"), *empty])
    assert (report.verdict, report.rest) == ([Heading("y"), said], [note])


def test_a_column_without_a_text_in_any_row_is_left_out() -> None:
    columns = {"n": str, "even": lambda n: "" if n % 2 else "yes", "large": lambda n: "yes" if n > 9 else ""}
    assert table(columns, [1, 2], "note") == TableBlock(["n", "even"], [["1", ""], ["2", "yes"]], "note")


def test_a_text_appears_once_with_its_names_unless_it_is_true_of_all() -> None:
    pairs = [("a", "x"), ("a", "y"), ("a", "x"), ("b", "y"), *(("c", name) for name in "uvwxyz")]
    assert by_text(pairs, 2) == ["a", "y: b", "u; v; w; x and 2 more: c"]


def test_the_value_of_an_objective_has_its_unit() -> None:
    found = [value_text(name, value) for name, value in (("p99", 0.1234), ("error", 0.0012), ("throughput", 1234.0))]
    assert found == ["123 ms", "0.12 %", "1,234/s"]


EVIL = '<script src="https://x/y.js">&'


class ParsedPage(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_kind_of_block_is_rendered_and_markup_is_escaped() -> None:
    blocks = [
        Heading(EVIL),
        Paragraph(EVIL, "bad"),
        Paragraph(EVIL),
        BulletList([EVIL]),
        CodeBlock(EVIL, EVIL),
        TableBlock([EVIL], [[EVIL]], EVIL),
    ]
    parsed = ParsedPage(text := page(Report(EVIL, blocks, blocks), [Plot(EVIL, "<svg></svg>", EVIL)], ""))
    assert not parsed.open
    names = [tag for tag, _ in parsed.tags]
    assert {"h1", "h2", "p", "li", "pre", "td", "th", "svg", "figcaption"} <= set(names)
    assert "script" not in names
    assert text.count("&lt;script src=&quot;https://x/y.js&quot;&gt;&amp;") == 2 + 2 + 2 * 9


def test_nothing_is_fetched_and_nothing_runs() -> None:
    text = page(Report("t", [Paragraph("s")], []), [], "")
    assert "default-src 'none'" in text
    assert not {attribute for _, attributes in ParsedPage(text).tags for attribute in attributes} & {"src", "href"}
    assert "url(" not in text


def test_the_verdict_precedes_the_plots() -> None:
    text = page(Report("t", [Paragraph("first")], [Paragraph("last")]), [Plot("p", "<svg></svg>", "n")], "")
    assert text.index("<p>first") < text.index("<svg") < text.index("<p>last")


def test_a_page_without_plots_says_why() -> None:
    assert "<p>No plots: install &lt;it&gt;</p>" in page(Report("t", [], []), [], "install <it>")
