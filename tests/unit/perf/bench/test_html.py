from __future__ import annotations

from html.parser import HTMLParser

from penstock.perf.bench.document import Bullets, Code, Heading, Report, Says, Table
from penstock.perf.bench.html import page
from penstock.perf.bench.plots import Plot

EVIL = '<script src="https://x/y.js">&'


class Seen(HTMLParser):
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


def test_every_kind_of_block_is_shown_and_text_of_others_stays_text() -> None:
    blocks = [Heading(EVIL), Says(EVIL, "bad"), Says(EVIL), Bullets([EVIL]), Code(EVIL), Table([EVIL], [[EVIL]])]
    seen = Seen(text := page(Report(EVIL, blocks, blocks), [Plot(EVIL, "<svg></svg>", EVIL)], ""))
    assert not seen.open
    names = [tag for tag, _ in seen.tags]
    assert {"h1", "h2", "p", "li", "pre", "td", "th", "svg", "figcaption"} <= set(names)
    assert "script" not in names
    assert text.count("&lt;script src=&quot;https://x/y.js&quot;&gt;&amp;") == 2 + 2 + 2 * 7


def test_nothing_is_fetched_and_nothing_runs() -> None:
    text = page(Report("t", [Says("s")], []), [], "")
    assert "default-src 'none'" in text
    assert not {attribute for _, attributes in Seen(text).tags for attribute in attributes} & {"src", "href"}
    assert "url(" not in text


def test_the_verdict_stands_before_the_plots_and_the_rest_behind() -> None:
    text = page(Report("t", [Says("first")], [Says("last")]), [Plot("p", "<svg></svg>", "n")], "")
    assert text.index("<p>first") < text.index("<svg") < text.index("<p>last")


def test_a_page_without_plots_tells_why() -> None:
    assert "<p>No plots: install &lt;it&gt;</p>" in page(Report("t", [], []), [], "install <it>")
