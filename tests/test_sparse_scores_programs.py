"""Further tests of some programs of sparse scoring, beyond `test_programs`."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import sparse_inductor
from corpus.cases import named
from corpus.check import check
from sparse_inductor.testing import compile_without_codegen

BY_NAME = named("sparse_scores")


def traces_weights_of_bincount() -> bool:
    """Whether torch traces weighted counts as floating-point numbers; torch 2.11 traces them as integers."""
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        return torch.bincount(torch.zeros(2).long(), torch.ones(2)).is_floating_point()


@pytest.mark.skipif(not traces_weights_of_bincount(), reason="traced with another dtype")
def test_a_bincount_that_is_kept_in_the_graph():
    """Dynamo breaks the graph at a bincount unless it is configured to capture data-dependent sizes."""
    case = dataclasses.replace(BY_NAME["weighted_bincount__infer"], expect="rewrite")
    with (
        sparse_inductor.enabled(only="sparse_scores"),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        check(case)


@pytest.mark.parametrize("dynamic", [True, False])
def test_rows_that_queries_may_not_have(dynamic):
    """An accumulator with 3 rows has one row per query only if there are 3 queries, which dynamic sizes leave open."""

    def score(q, cols, rows, vals):
        return torch.zeros(3, 9).index_add(1, rows, q[:, cols] * vals)

    cols, rows, q = torch.arange(6), torch.arange(6), torch.rand(3, 8)
    with sparse_inductor.enabled(only="sparse_scores"), torch.no_grad():
        report = sparse_inductor.report()
        compile_without_codegen(score, dynamic=dynamic)(q, cols, rows, torch.rand(6))
        said = [m.reason for m in report.near_misses]
        assert len(report.rewrites) == (not dynamic)
    assert said == (
        ["nothing says that the accumulator has as many rows as there are queries"] * dynamic
    )


def test_rows_that_contributions_may_not_have():
    """scatter_add uses as many contributions as there are rows; with dynamic sizes the numbers may differ."""

    def score(q, cols, rows, vals):
        products = q[:, cols] * vals
        return torch.zeros(3, 9).scatter_add(1, rows.expand(3, -1), products)

    with sparse_inductor.enabled(only="sparse_scores"), torch.no_grad():
        compiled = compile_without_codegen(score, dynamic=True)
        for n, of in (6, 6), (6, 8):
            args = torch.rand(3, 8), torch.arange(of) % 8, torch.arange(n), torch.rand(of)
            torch.testing.assert_close(compiled(*args), score(*args))
        said = {m.reason for m in sparse_inductor.report().near_misses}
    assert said == {"nothing says that there are as many rows as contributions"}


@pytest.mark.parametrize("kept", ["rows", "offsets"])
def test_shards_of_as_many_documents_as_come(kept):
    """The operator reads the number of documents from the accumulator, or from the offsets, at run time."""

    def score(q, cols, vals, rows, offsets):
        if kept == "rows":
            scores = q.new_zeros(len(q), len(offsets) - 1).index_add(1, rows, q[:, cols] * vals)
        else:
            scores = F.embedding_bag(
                cols, q.t(), offsets, mode="sum", per_sample_weights=vals, include_last_offset=True
            ).t()
        return scores.topk(2)

    with sparse_inductor.enabled(only="sparse_scores"), torch.no_grad():
        compiled = compile_without_codegen(score, dynamic=True)
        for documents, length in (7, 4), (5, 3), (11, 2):
            n = documents * length
            rows = torch.arange(documents).repeat_interleave(length)
            offsets = torch.arange(0, n + 1, length)
            args = torch.rand(3, 50), torch.arange(n), torch.rand(n), rows, offsets
            torch.testing.assert_close(compiled(*args), score(*args))
        report = sparse_inductor.report()
        assert not report.near_misses and len(report.rewrites) == report.graphs
        assert all("top-k" in rewrite.note for rewrite in report.rewrites)


@pytest.mark.parametrize(
    "name",
    [
        "assigned_where_padded__train",
        "emptied_in_the_same_line__infer",
        "emptied_under_two_names__infer",
        "index_add_in_place_over_batch__train",
        "addressed_by_query_and_document__infer",
        "segments_by_offset_documents_first__infer",
        "two_factors_of_eight_bits__infer",
    ],
)
def test_verified_on_real_tensors(name):
    """`enable(verify=True)` runs the replaced nodes beside the operator, so the match has to list all of them."""
    case = BY_NAME[name]
    fn, inputs = case.build()
    with sparse_inductor.enabled(only="sparse_scores", verify=True):
        report = sparse_inductor.report()
        with torch.set_grad_enabled(case.training):
            compile_without_codegen(fn)(*inputs)
        assert [c.verdict for c in report.checks] == ["agrees"]


def test_a_gradient_that_is_asked_for_as_a_sparse_tensor():
    """The program uses `gather(sparse_grad=True)`, which without gradients is an ordinary gather."""
    ids = torch.arange(24).view(6, 4) % 10

    def scores(q):
        taken = q.gather(0, ids.flatten(), sparse_grad=True).view(6, 4)
        return (taken * torch.arange(4.0)).sum(-1)

    q, other = torch.rand(10, requires_grad=True), torch.rand(10)
    with sparse_inductor.enabled(only="sparse_scores"):
        compile_without_codegen(scores)(q).sum().backward()
        (miss,) = sparse_inductor.report().near_misses
        assert miss.reason == "the gradient is asked for as a sparse tensor" and q.grad.is_sparse
        torch.testing.assert_close(compile_without_codegen(scores)(other), scores(other))
        assert len(sparse_inductor.report().rewrites) == 1
