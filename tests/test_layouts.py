"""What a rewritten program returns has the strides that it has unrewritten."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sparse_inductor
from sparse_inductor.testing import compile_without_codegen


def scores_by_embedding(q, ids, w):
    return (F.embedding(ids, q.t()) * w.unsqueeze(-1)).sum(1).t()


def scores_by_einsum(q, ids, w):
    return torch.einsum("qnl,nl->qn", q[:, ids], w)


def both_ways(q, ids, w):
    y = (F.embedding(ids, q.t()) * w.unsqueeze(-1)).sum(1).t()
    return y, y.topk(2)[0], y


def scores_by_embedding_mT(q, ids, w):
    return (F.embedding(ids, q.mT) * w.unsqueeze(-1)).sum(1).mT


def block_over_channels(q, ids, w):
    return F.linear(F.relu(F.linear(w, torch.ones(7, 5))), torch.ones(4, 7)).t()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "fn",
    [scores_by_embedding, scores_by_embedding_mT, scores_by_einsum, both_ways, block_over_channels],
    ids=lambda fn: fn.__name__,
)
def test_results_have_the_strides_of_the_program(fn, dynamic):
    generator = torch.Generator().manual_seed(0)
    args = (
        torch.randn(3, 9, generator=generator),
        torch.randint(0, 9, (12, 5), generator=generator),
        torch.randn(12, 5, generator=generator),
    )
    sparse_inductor.enable()
    expected, got = fn(*args), compile_without_codegen(fn, dynamic=dynamic)(*args)
    assert sparse_inductor.report().rewrites
    for e, g in zip(*((t,) if isinstance(t, torch.Tensor) else t for t in (expected, got))):
        assert g.stride() == e.stride()
        torch.testing.assert_close(g, e)
