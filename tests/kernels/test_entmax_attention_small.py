"""Entmax attention of small sizes against fp64: few queries, which are split over the keys, and short rows, for which
the scores stay in registers."""

from __future__ import annotations

import math

import pytest
import torch
from test_entmax_attention import check, check_nan, operands

from sparse_inductor.kernels.entmax_attention import attention as entmax_attention
from support import heavy

pytestmark = pytest.mark.usefixtures("nan_filled_memory")


@pytest.fixture(params=["few", "short"])
def small(request, device, monkeypatch):
    """Returns a function that makes operands for the kernels for few queries or for short rows.

    All other forward kernels raise.
    """
    few = request.param == "few"

    def passes(*_):
        raise AssertionError("taken by others")

    monkeypatch.setattr(entmax_attention, "forward_blocks", passes)
    monkeypatch.setattr(entmax_attention.lists, "forward_lists", passes)
    other = "short" if few else "few"
    monkeypatch.setattr(getattr(entmax_attention, other), f"forward_{other}", passes)
    if few:  # several tiles of keys and chunks of a row
        sizes = {"B": 2, "H": 2, "Hkv": 1, "Lq": 2, "Lk": 9000 if device.type == "cuda" else 50}
    else:
        sizes = {"Lq": 130, "Lk": 100} if device.type == "cuda" else {"Lq": 18, "Lk": 30}
        sizes |= {"H": 2, "dtype": torch.bfloat16}
    return lambda **keywords: operands(device, **{**sizes, **keywords})


only_few, only_short = (
    pytest.mark.parametrize("small", [kind], indirect=True) for kind in ("few", "short")
)


@pytest.mark.parametrize("alpha", [1.5, heavy(1.3), heavy(2.0)])
@pytest.mark.parametrize("variance", [6.0, heavy(1e-4), heavy(0.5)])
def test_any_alpha_and_variance(alpha, variance, small):
    check(*small(dtype=torch.bfloat16, variance=variance), alpha_value=alpha, causal=True)


@pytest.mark.heavy
@only_few
@pytest.mark.parametrize(
    "dtype, alpha, variance",
    [(torch.float16, 1.3, 0.5), (torch.float32, 1.3, 0.5), (torch.float32, 2.0, 1e-4)],
)
def test_other_dtypes(dtype, alpha, variance, small):
    check(*small(dtype=dtype, variance=variance), alpha_value=alpha, causal=True)


@pytest.mark.heavy
@only_few
@pytest.mark.parametrize("D, DV", [(40, 16), (16, 72), (256, 64)])
def test_any_width(D, DV, small):
    check(*small(D=D, DV=DV, dtype=torch.bfloat16))


@only_short
@pytest.mark.parametrize("part, D", [heavy(1 / 32, 32), heavy(0.55, 64), (1, 64), heavy(1, 128)])
def test_numbers_of_keys_and_widths(part, D, device, small):
    """Up to the largest number of keys for which scores stay in registers, with both kinds of tile."""
    most = 256 if device.type == "cuda" else 32
    check(*small(Lk=int(part * most), D=D, variance=6.0))


@only_short
@pytest.mark.heavy
@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (1, 1, 0, 0)])
def test_bias_and_alpha_have_gradients(shape, device, small):
    q, k, v, grad = small()
    g = torch.Generator().manual_seed(1)
    sizes = [n or m for n, m in zip(shape, (1, 2, q.shape[2], k.shape[2]))]
    bias = torch.randn(sizes, generator=g).to(device)
    alpha = torch.tensor([1.4, 1.8]).view(1, 2, 1, 1).to(device)
    check(q, k, v, grad, bias=bias, alpha=alpha)


@pytest.mark.parametrize("fill, added", [(-math.inf, False), heavy(-1e4, False), heavy(0.25, True)])
@pytest.mark.parametrize(
    "small, sides",
    [("few", "each head"), heavy("few", "shared"), ("short", "mask")],
    indirect=["small"],
)
def test_masks_and_biases(fill, added, sides, device, small):
    """Masks and biases per head or shared, grouped heads, padding of keys and of queries, and a row without keys."""
    q, k, v, grad = small(B=2, H=2, Hkv=1, variance=0.5)
    Lq, Lk = q.shape[2], k.shape[2]
    g = torch.Generator().manual_seed(1)
    heads = 2 if sides == "each head" else 1
    keep = torch.rand(2, heads, Lq, Lk, generator=g) > 0.4
    keep[:, -1, 1] = False
    keywords = {
        "mask": keep.to(device),
        "query_lengths": torch.tensor([Lq, Lq - 1], device=device),
        "key_lengths": torch.tensor([Lk * 2 // 5 + 1, Lk], device=device),
    }
    if sides != "mask":
        bias = torch.randn(1, heads, Lq if heads == 2 else 1, Lk, generator=g)
        keywords["bias"] = bias.to(device)
        keywords["alpha"] = torch.tensor([1.4, 2.0]).view(1, 2, 1, 1).to(device)
    check(q, k, v, grad, fill=fill, added=added, tolerance=5e-6, **keywords)


@pytest.mark.heavy
def test_nan_stays_in_its_rows(small):
    check_nan(small(), 1)
