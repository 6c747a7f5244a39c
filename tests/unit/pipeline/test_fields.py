"""What travels over the edges of graphs whose nodes and steps have filters."""

from __future__ import annotations

from penstock.pipeline.check import check
from penstock.pipeline.fields import fields_of
from penstock.pipeline.load import parse_graph


def test_published_fallbacks_to_another_decoder_are_graphs_that_fit() -> None:
    inside = "S[S[DecodeTensor,SyncTensor],(or)S[DecodeMat,CvtColorMat,Mat2Tensor]]"
    nodes = {
        "gpu": {"backend": "DecodeTensor", "filter": "run", "next": "cpu"},
        "cpu": {"backend": "S[DecodeMat,CvtColorMat,Mat2Tensor]", "filter": "or", "color": "rgb"},
    }
    for tables in ({"both": {"backend": inside, "color": "rgb"}}, nodes):
        graph = parse_graph(tables, name="fallback", folder=".", compat=True)
        check(graph)
        assert fields_of(graph)[graph.outputs[0]]["result"] == "tensor"


def test_a_step_that_runs_on_the_data_that_there_was_may_take_it_again() -> None:
    graph = parse_graph({"a": {"backend": "S[DecodeMat,(run)DecodeTensor]"}}, name="twice", folder=".")
    check(graph)
    assert fields_of(graph)["a"]["result"] == "tensor"
