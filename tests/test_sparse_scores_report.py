"""The report on scoring that the pass cannot see, and encoding, indexing and search in one function."""

from __future__ import annotations

import pytest
import torch

from sparse_inductor import SparseIndex
from support import compile_without_codegen, only, rewrites
from test_modes import HeadOnly


@pytest.mark.parametrize("where", ["closure", "made_inside", "whole_frame"])
def test_torch_sparse_is_a_near_miss_that_names_the_way_out(where):
    dense = torch.rand(30, 20) * (torch.rand(30, 20) < 0.3)
    held = dense.to_sparse_csr()

    def score(q):
        if where == "whole_frame":  # Dynamo captures nothing of it
            return (held @ q.t()).topk(3, dim=0)
        matrix = held if where == "closure" else dense.to_sparse_csr()
        return torch.sparse.mm(matrix, (q * 2).t()).t().topk(3)

    with only("sparse_scores") as report:
        compile_without_codegen(score)(torch.rand(2, 20))
        (miss,) = [m for m in report.near_misses if m.stage == "dynamo"]
        assert "sparse_inductor.SparseIndex" in miss.reason
        assert "sparse_inductor.SparseIndex" in str(report)
        assert "SparseIndex" in report.to_json()
    assert "SparseIndex" in str(report), "it stays when the session is over"


def test_nothing_is_said_where_nobody_asked():
    held = torch.eye(4).to_sparse_csr()
    with only("splade_head") as report:
        compile_without_codegen(lambda q: torch.sparse.mm(held, q))(torch.rand(4, 2))
        assert not report.near_misses


def test_representations_that_are_made_sparse_are_not_scored():
    with only("sparse_scores") as report:
        compile_without_codegen(lambda x: (torch.relu(x) * 2).to_sparse())(torch.randn(4, 2))
        assert not report.near_misses


def test_a_break_in_a_function_called_sparse_is_not_torch_sparse():
    def sparsemax_or_not(q):
        return q * 2 if torch.any(q > 3) else q

    with only("sparse_scores") as report:
        compile_without_codegen(sparsemax_or_not)(torch.rand(4, 2))
        assert not report.near_misses


def test_encode_index_and_search_in_one_compiled_function():
    """The head is rewritten, and the index searches its result in the same graph."""
    torch.manual_seed(0)
    encoder = HeadOnly().eval()
    texts, queries = torch.randint(0, 50, (40, 6)), torch.randint(0, 50, (3, 4))
    mask = torch.ones_like
    with torch.no_grad():
        index = SparseIndex.build(encoder(texts, mask(texts)))
        want = index.search(encoder(queries, mask(queries)), 5)
        with only("splade_head", "sparse_scores") as report:
            both = compile_without_codegen(
                lambda ids: index.search(encoder(ids, mask(ids)), 5), fullgraph=True
            )
            scores, ids = both(queries)
            assert len(rewrites(report, "splade_head")) == 1
            assert both.calls("index_search") == 1
    assert torch.equal(ids, want[1])
    torch.testing.assert_close(scores, want[0])
