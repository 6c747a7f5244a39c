"""Checks of the spans that an exporter of OpenTelemetry's SDK received."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan


def context_of(span: ReadableSpan) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


def links_of(span: ReadableSpan) -> set[tuple[int, int]]:
    return {(link.context.trace_id, link.context.span_id) for link in span.links}


def check_links(spans: list[ReadableSpan], noun: str) -> tuple[list[ReadableSpan], list[ReadableSpan]]:
    """The spans of batches and of requests, or of nodes; each request refers to its batches, and they to it."""
    found = [span for span in spans if span.name.startswith(f"{noun} ")]
    names = {span.name.removeprefix(f"{noun} ") for span in found}
    batches = [span for span in spans if span.name.removeprefix("batch ") in names and span.name.startswith("batch ")]
    runs = [span for span in spans if span.name == "run"]
    for span in found:
        mine = {context_of(batch) for batch in batches if context_of(span) in links_of(batch)}
        assert mine, span.name
        linked = [links_of(run) for run in runs if run.parent is not None and run.parent.span_id == context_of(span)[1]]
        assert set().union(*linked) == mine
    assert set().union(*map(links_of, batches)) == {context_of(span) for span in found}
    assert all(batch.parent is None for batch in batches)
    return batches, found
