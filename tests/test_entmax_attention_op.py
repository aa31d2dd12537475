"""Entmax attention called directly on the CPU, against scores, entmax and values written out in PyTorch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from sparse_inductor.ops import entmax, entmax_attention

ops = torch.ops.sparse_inductor
INF = math.inf


def written_out(
    q, k, v, alpha=1.5, scale=None, mask=None, bias=None, causal=False, fill=-INF,
    query_lengths=None, key_lengths=None,
):  # fmt: skip
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    z = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    Lq, Lk = z.shape[-2:]
    i, j = torch.arange(Lq)[:, None], torch.arange(Lk)
    if bias is not None:
        z = z + bias
    if mask is not None:
        z = torch.where(mask, z, fill)
    if causal:
        z = torch.where(j <= i + Lk - Lq, z, fill)
    if key_lengths is not None:
        z = torch.where(j < key_lengths[:, None, None, None], z, -INF)
    if query_lengths is not None:
        z = torch.where(i < query_lengths[:, None, None, None], z, -INF)
    return entmax(z, alpha) @ v


def make(B=2, H=4, Hkv=2, Lq=5, Lk=6, D=3, Dv=2, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv))
    return [
        torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes
    ]


def compare(leaves, **kwargs):
    """Output and gradients of the operator and of the formula written out."""
    wanted = [
        *leaves,
        *(t for t in (kwargs.get("bias"), kwargs.get("alpha")) if isinstance(t, torch.Tensor)),
    ]
    results = []
    for f in (entmax_attention, written_out):
        out = f(*leaves, **kwargs)
        g = torch.Generator().manual_seed(1)
        cotangent = torch.randn(out.shape, generator=g, dtype=torch.float64).to(out.dtype)
        results.append((out, *torch.autograd.grad(out, wanted, cotangent)))
    for ours, formula in zip(*results, strict=True):
        assert ours.dtype == formula.dtype
        assert torch.allclose(ours, formula, atol=1e-9), (ours - formula).abs().max()


@pytest.mark.parametrize("fill", [-INF, -1e9, -1.0])
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, "per head"])
def test_all_terms_in_all_combinations(alpha, fill):
    leaves = make()
    (B, H, Lq, _), Lk = leaves[0].shape, leaves[1].shape[2]
    if alpha == "per head":
        alpha = (
            torch.tensor([1.2, 1.5, 1.9, 2.0], dtype=torch.float64)
            .view(1, H, 1, 1)
            .requires_grad_()
        )
    mask = torch.rand(B, 1, Lq, Lk) > 0.4
    mask[0, 0, 1] = False
    bias = torch.randn(1, H, 1, Lk, dtype=torch.float64).requires_grad_()
    lengths = {"key_lengths": torch.tensor([3, 6]), "query_lengths": torch.tensor([5, 2])}
    for causal, m, b, padding in itertools.product(
        (False, True), (None, mask), (None, bias), ({}, lengths)
    ):
        compare(leaves, alpha=alpha, causal=causal, fill=fill, mask=m, bias=b, **padding)


def test_opcheck():
    q, k, v = make()
    bias = torch.randn(1, 4, 1, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 1, 5, 6) > 0.4
    alpha = torch.full((1, 4, 1, 1), 1.3, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([3, 6])
    op = ops.entmax_attention.default
    torch.library.opcheck(op, (q, k, v, bias, mask, alpha, None, lengths, 0.0, 0.3, -1e9, True))
    torch.library.opcheck(op, (q, k, v, None, None, None, None, None, 1.5, 0.3, -INF, True))


def test_compiles_with_dynamic_shapes():
    def attention(q, k, v, bias):
        return entmax_attention(q, k, v, bias=bias, causal=True)

    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for Lq, Lk in ((5, 6), (9, 11)):
        leaves = [
            *make(Lq=Lq, Lk=Lk),
            torch.randn(1, 4, 1, Lk, dtype=torch.float64, requires_grad=True),
        ]
        for got, eager in zip(
            *(
                (out := f(*leaves), *torch.autograd.grad(out.square().sum(), leaves))
                for f in (compiled, attention)
            ),
            strict=True,
        ):
            assert torch.equal(got, eager)
