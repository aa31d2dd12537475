"""Entmax attention called directly on the CPU, against scores, entmax and values written out in PyTorch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from sparse_inductor.ops import entmax, entmax_attention
from support import Largest

ops = torch.ops.sparse_inductor
INF = math.inf


def written_out(
    q, k, v, alpha=1.5, scale=None, mask=None, bias=None, causal=False, fill=-INF,
    added=False, query_lengths=None, key_lengths=None, rows=entmax,
):  # fmt: skip
    """Compute the formula in PyTorch; `rows` makes probabilities of scores and alpha."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    z = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    Lq, Lk = z.shape[-2:]
    i, j = torch.arange(Lq, device=z.device)[:, None], torch.arange(Lk, device=z.device)
    if bias is not None:
        z = z + bias
    if mask is not None:
        z = torch.where(mask, z, fill_in(z, fill, added))
    if causal:
        z = torch.where(j <= i + Lk - Lq, z, fill_in(z, fill, added))
    if key_lengths is not None:
        z = torch.where(j < key_lengths[:, None, None, None], z, -INF)
    if query_lengths is not None:
        z = torch.where(i < query_lengths[:, None, None, None], z, -INF)
    return rows(z, alpha) @ v


def fill_in(z, fill, added):
    return z - z.detach() + fill if added else z.new_tensor(fill)


def make(B=2, H=4, Hkv=2, Lq=5, Lk=6, D=3, Dv=2, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    shapes = ((B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv))
    return [
        torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes
    ]


def compare(leaves, **kwargs):
    """Compare output and gradients of the operator with those of the formula written out."""
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


@pytest.mark.parametrize(
    "fill, added", [(-INF, False), (-1e9, False), (-1e9, True), (-1.0, False), (-1.0, True)]
)
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, "per head"])
def test_all_terms_in_all_combinations(alpha, fill, added):
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
        compare(
            leaves, alpha=alpha, causal=causal, fill=fill, added=added, mask=m, bias=b, **padding
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (6, 2), (4, 1)])
def test_grouped_heads_and_strides_in_every_precision(dtype, heads):
    H, Hkv = heads
    q, k, v = (t.detach() for t in make(2, H, Hkv, 37, 51, 16, 8))
    wide = [t.requires_grad_() for t in (q, k, v)]
    # q and k are [B, L, H, D] viewed as [B, H, L, D]; v is a slice of a wider tensor.
    narrow = [t.detach().to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for t in wide]
    narrow[2] = torch.cat([narrow[2]] * 2, -1)[..., :8]
    narrow = [t.requires_grad_() for t in narrow]
    results = []
    for leaves in (narrow, [t.detach().double().requires_grad_() for t in narrow]):
        out = entmax_attention(*leaves, causal=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for got, truth in zip(*results, strict=True):
        assert got.dtype == dtype
        limit = 1e-5 if dtype == torch.float32 else 2e-2
        assert (got.double() - truth).norm() <= limit * truth.norm()


def test_three_dimensions_are_one_head():
    q, k, v = (t[:, 0] for t in make(H=1, Hkv=1))
    mask = torch.rand(2, 5, 6) > 0.3
    bias = torch.randn(5, 6, dtype=torch.float64)
    alpha = torch.tensor([1.3, 1.7], dtype=torch.float64).view(2, 1, 1)
    flat = entmax_attention(q, k, v, alpha, mask=mask, bias=bias)
    four = entmax_attention(
        *(t.unsqueeze(1) for t in (q, k, v)),
        alpha.unsqueeze(1),
        mask=mask.unsqueeze(1),
        bias=bias,
    )
    assert flat.shape == (2, 5, 2) and torch.equal(flat, four.squeeze(1))


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, 3.0])
def test_queries_without_keys_are_zero_and_have_no_gradient(alpha):
    q, k, v = make()
    mask = torch.ones(1, 1, 5, 6, dtype=torch.bool)
    mask[..., 2, :] = False
    out = entmax_attention(q, k, v, alpha, mask=mask)
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert not out[:, :, 2].any() and not dq[:, :, 2].any()
    assert all(t.isfinite().all() for t in (out, dq, dk, dv))


def test_a_finite_fill_averages_all_values():
    q, k, v = make(H=2)
    mask = torch.zeros(1, 1, 5, 6, dtype=torch.bool)
    out = entmax_attention(q, k, v, mask=mask, causal=True, fill=-1e9)
    assert torch.allclose(out, v.mean(2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_an_added_fill_that_takes_every_key_passes_the_gradient_on(causal, dtype):
    """This is the case of a program that adds the lowest number of a dtype, which absorbs the dropped scores."""
    q, k, v = make(Lq=6)
    low, past = torch.finfo(dtype).min, torch.ones(6, 6, dtype=torch.bool).tril()
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [0] * 6], dtype=torch.bool)[:, None, None]
    keep = mask & past if causal else mask
    k_, v_ = (t.repeat_interleave(2, 1) for t in (k, v))
    lowered = (q @ k_.mT * 3**-0.5).float() + torch.where(keep, 0.0, low)
    grads = [
        torch.autograd.grad(out.double().square().sum(), (q, k, v))
        for out in (
            entmax_attention(q, k, v, mask=mask, causal=causal, fill=low, added=True),
            entmax(lowered, 1.5) @ v_.float(),
        )
    ]
    assert grads[0][0][1].abs().min() > 0  # these queries have no key
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_nan_stays_in_its_row_and_padding_is_never_seen():
    q, k, v = (t.detach() for t in make())
    q[0, 0, 1] = math.nan
    k[1, :, 4:], v[1, :, 4:] = math.nan, math.inf
    q[1, :, 3:] = math.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    lengths = torch.tensor([6, 4])
    out = entmax_attention(*leaves, key_lengths=lengths, query_lengths=torch.tensor([5, 3]))
    assert out[0, 0, 1].isnan().all()
    assert out.isnan().sum() == out.shape[-1] and not out[1, :, 3:].any()
    grads = torch.autograd.grad(out[1].sum(), leaves)
    assert all(g[1].isfinite().all() for g in grads)


@pytest.mark.parametrize("shape", [(0, 6), (5, 0), (0, 0)])
def test_empty_sequences(shape):
    Lq, Lk = shape
    leaves = make(Lq=Lq, Lk=Lk)
    out = entmax_attention(*leaves)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert out.shape == (2, 4, Lq, 2) and not out.any()
    assert [g.shape for g in grads] == [t.shape for t in leaves]


def test_autocast_casts_the_operands():
    q, k, v = (t.float() for t in make())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = entmax_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), entmax_attention(q, k, v), atol=3e-2)


@pytest.mark.parametrize("alpha", [1.3, 1.5])
def test_nothing_as_large_as_the_scores_is_made(alpha):
    leaves = make(2, 4, 2, 600, 700, 8, 8, dtype=torch.float32)
    bias = torch.zeros(1, 4, 1, 700, requires_grad=True)
    with Largest() as seen:
        out = entmax_attention(*leaves, alpha, bias=bias, causal=True)
        torch.autograd.grad(out.sum(), [*leaves, bias])
    assert 0 < seen.elements < 2 * 4 * 600 * 700 / 8


@pytest.mark.parametrize(
    "error, words, change",
    [
        (ValueError, "q is .B, Lq, D., so k and v", {"q": (5, 6, 3)}),
        (ValueError, "k must be .B, Hkv, Lk, D.", {"k": (2, 2, 6, 4)}),
        (ValueError, "v must be .B, Hkv, Lk, Dv.", {"v": (2, 2, 7, 3)}),
        (ValueError, "q has 4 heads, which is no multiple of the 3", {"k": (2, 3, 6, 3), "v": (2, 3, 6, 2)}),
        (TypeError, "k must have the dtype of q", {"k": torch.randn(2, 2, 6, 3).half()}),
        (TypeError, "mask must be bool", {"mask": torch.ones(5, 6)}),
        (ValueError, "mask must broadcast to", {"mask": torch.ones(4, 6, dtype=torch.bool)}),
        (ValueError, "bias must have at most 4 dimensions", {"bias": torch.ones(1, 2, 4, 5, 6)}),
        (TypeError, "bias must be one of", {"bias": torch.ones(5, 6, dtype=torch.int64)}),
        (ValueError, "alpha must broadcast to", {"alpha": torch.full((4, 5, 6), 1.5)}),
        (ValueError, "alpha must be above 1, got 0.5", {"alpha": 0.5}),
        (ValueError, "key_lengths must be .B. = .2.", {"key_lengths": torch.ones(3, dtype=torch.int64)}),
        (TypeError, "query_lengths must be integers", {"query_lengths": torch.ones(2)}),
        (ValueError, "fill must be finite or -inf, got inf", {"fill": INF}),
        (ValueError, "scale must be finite, got nan", {"scale": math.nan}),
    ],
)  # fmt: skip
def test_bad_input_names_the_value(error, words, change):
    arguments = {"q": (2, 4, 5, 3), "k": (2, 2, 6, 3), "v": (2, 2, 6, 2), **change}
    arguments = {n: torch.randn(a) if isinstance(a, tuple) else a for n, a in arguments.items()}
    with pytest.raises(error, match=words):
        entmax_attention(**arguments)
