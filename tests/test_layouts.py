"""The results of a rewritten program have the strides of the original program's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from entmax import entmax15
from torch import nn
from torch.utils.checkpoint import checkpoint

import sparse_inductor
from sparse_inductor.testing import compile_without_codegen


def both_ways(q, ids, w):
    y = (F.embedding(ids, q.t()) * w.unsqueeze(-1)).sum(1).t()
    return y, y.topk(2)[0], y


PROGRAMS = {
    "scores_by_embedding": lambda q, ids, w: (F.embedding(ids, q.t()) * w.unsqueeze(-1)).sum(1).t(),
    "scores_by_embedding_mT": lambda q, ids, w: (F.embedding(ids, q.mT) * w.unsqueeze(-1)).sum(1).mT,
    "scores_by_einsum": lambda q, ids, w: torch.einsum("qnl,nl->qn", q[:, ids], w),
    "both_ways": both_ways,
    "block_over_channels": lambda q, ids, w: (
        F.linear(F.relu(F.linear(w, torch.ones(7, 5))), torch.ones(4, 7)).t()
    ),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS)
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


def a_head(x, w):
    return torch.relu(x @ w).amax(1)


def an_adapted_head(x, w, a, b):
    return torch.relu(F.linear(x, w) + F.linear(F.linear(x, a), b)).amax(1)


def a_head_of_two_inputs(x, w, y, v):
    return torch.relu(x @ w + F.linear(y, v)).amax(1)


def a_head_over_channels(x, w):
    return torch.relu(F.conv1d(x, w)).amax(-1)


def a_block_over_channels(x, w, v):
    return F.conv1d(F.relu(F.conv1d(x, w)), v)


def an_adapted_block(x, w, v, a, b):
    h = F.relu(x @ w)
    return h @ v + h @ a @ b


def attention_to_transposed_keys(q, k, v):
    return entmax15(q @ k, dim=-1) @ v


@pytest.mark.parametrize(
    ("fn", "sizes"),
    [
        (a_head, [(2, 5, 8), (8, 11)]),
        (an_adapted_head, [(2, 5, 8), (11, 8), (3, 8), (11, 3)]),
        (a_head_of_two_inputs, [(2, 5, 8), (8, 11), (2, 5, 7), (11, 7)]),
        (a_head_over_channels, [(2, 8, 5), (11, 8, 1)]),
        (a_block_over_channels, [(2, 8, 5), (32, 8, 1), (8, 32, 1)]),
        (an_adapted_block, [(2, 5, 8), (8, 32), (32, 8), (32, 3), (3, 8)]),
        (attention_to_transposed_keys, [(2, 5, 8), (2, 8, 6), (2, 6, 8)]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
@pytest.mark.parametrize("codegen", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_gradients_are_contiguous_where_the_program_has_them_so(fn, sizes, codegen):
    """A program may call view(-1) on what torch.autograd.grad returns."""
    torch.manual_seed(0)
    inputs = [torch.randn(size).div(size[-1] ** 0.5).requires_grad_() for size in sizes]
    expected = torch.autograd.grad(fn(*inputs).square().sum(), inputs)
    with sparse_inductor.enabled(policy="always"):
        compiled = torch.compile(fn) if codegen else compile_without_codegen(fn)
        got = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    assert len(sparse_inductor.report().rewrites) == 1
    for e, g in zip(expected, got):
        assert g.is_contiguous() or not e.is_contiguous()
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("training", [True, False])
def test_what_is_cut_from_a_block_is_a_tensor_of_its_own(rows, training):
    """The weighted sum of the activations is a row of the operator's statistics, but must not be returned as a view."""
    up, down = nn.Linear(8, 40), nn.Linear(40, 8)

    def fn(x):
        h = F.relu(up(x))
        return down(h), (h * down.weight.norm(dim=0)).sum(-1)

    x = torch.randn(rows, 8)
    with torch.set_grad_enabled(training), sparse_inductor.enabled(policy="always"):
        expected, got = fn(x), compile_without_codegen(fn)(x)
    assert [r.pattern for r in sparse_inductor.report().rewrites] == ["relu_ffn"]
    for e, g in zip(expected, got):
        assert g.stride() == e.stride()
        assert not g._is_view()
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("family", ["head", "scores"])
def test_what_is_cut_from_a_sort_is_a_tensor_of_its_own(family):
    """In the original program it is a view of the whole sorted tensor, which does not exist after the rewrite."""
    decoder, ids, weights = nn.Linear(6, 9), torch.randint(0, 30, (20, 6)), torch.rand(20, 6)
    if family == "head":
        x = torch.randn(2, 5, 6)
        fn = lambda x: (decoder(x).relu().sort(1).values[:, -1],)
    else:
        x = torch.rand(3, 30)
        fn = lambda x: tuple(
            t[:, :5] for t in (x[:, ids] * weights).sum(-1).sort(-1, descending=True)
        )
    with torch.no_grad(), sparse_inductor.enabled(policy="always"):
        expected, got = fn(x), compile_without_codegen(fn)(x)
        assert len(sparse_inductor.report().rewrites) == 1
    for e, g in zip(expected, got, strict=True):
        assert not e.is_contiguous() and g.is_contiguous()
        assert g.untyped_storage().nbytes() == g.numel() * g.itemsize
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("family", ["head", "block"])
def test_equal_calls_return_tensors_of_their_own(family):
    """AOTAutograd merges equal calls, but each result needs its own memory and gradient."""
    up, down = nn.Linear(6, 16), nn.Linear(16, 6)
    f = (lambda t: up(t).relu().amax(1)) if family == "head" else (lambda t: down(up(t).relu()))
    program = lambda x: (
        f(x), f(x.detach()), f(x.view_as(x).data), f(x), f(x * 2), f(x.flatten().view_as(x)), f(x * 1), f(x.mT.mT),
    )  # fmt: skip

    def gradient(fn):
        x = torch.linspace(-1, 1, 60).view(2, 5, 6).requires_grad_()
        results = fn(x)
        assert len({r.untyped_storage().data_ptr() for r in results}) == len(results)
        sum((n + 1) * r.square().sum() for n, r in enumerate(results)).backward()
        return x.grad

    expected = gradient(program)
    with sparse_inductor.enabled(policy="always"):
        compiled = gradient(compile_without_codegen(program))
        assert len(sparse_inductor.report().rewrites) == 8
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-4)


def test_calls_in_a_checkpoint_and_beside_it_return_tensors_of_their_own():
    """AOTAutograd inlines the bodies of checkpoints into the calling graph, and may merge calls across them."""
    up, down = nn.Linear(6, 16), nn.Linear(16, 6)
    block = lambda t: down(up(t).relu())
    again = lambda t: checkpoint(block, t, use_reentrant=False)
    x = torch.randn(2, 5, 6)

    def program(x):
        return again(x), block(x), again(x.detach()), block(x * 1)

    with sparse_inductor.enabled(policy="always"):
        results = compile_without_codegen(program)(x)
        assert len(sparse_inductor.report().rewrites) == 4
    assert len({r.untyped_storage().data_ptr() for r in results}) == 4
    for result in results:
        torch.testing.assert_close(result, block(x), rtol=1e-4, atol=1e-4)
