"""Tiled products of listed rows, against the same products of all rows."""

from __future__ import annotations

import pytest
import torch

from sparse_inductor.kernels.relu_ffn import listed
from sparse_inductor.kernels.relu_ffn.packing import ARRIVALS
from support import heavy

SIZES = [
    (13, 40, 24, 5),
    heavy(13, 33, 50, 13),
    heavy(37, 64, 32, 0),
    *(
        pytest.param(*sizes, marks=pytest.mark.gpu)
        for sizes in (
            (2049, 2600, 2048, 2049),
            (2700, 2800, 512, 1500),
            (700, 5632, 1001, 3),
            (300, 513, 66, 299),
        )
    ),
]
RTOL = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def draw(request, device):
    if request.param == torch.bfloat16 and str(device) == "cpu":
        pytest.skip("the interpreter multiplies no bf16 tiles")
    torch.manual_seed(0)
    return lambda *s: torch.randn(*s, device=device).to(request.param)


def listing(M, n, device):
    """Return n of M rows, in random order unless n = M, and a `Listed` with them."""
    order = torch.arange(M) if n == M else torch.randperm(M)
    rows = order.to(device, torch.int32)
    length = torch.zeros(1 + ARRIVALS, dtype=torch.int32, device=device)
    length[0] = n
    return rows.long(), listed.Listed(rows, length, length[1:])


def close(got, want):
    want = want.float()
    error = (got.float() - want).abs().max() if got.numel() else torch.zeros(())
    assert error <= RTOL[got.dtype] * max(1.0, want.abs().max().item() if want.numel() else 0.0)


@pytest.mark.parametrize("two", [True, False])
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize(("M", "K", "N", "n"), SIZES)
def test_products(M, K, N, n, by_row, two, draw, device):
    pairs = [(draw(M, K), draw(K, N) / K**0.5) for _ in range(1 + two)]
    (a, w), *more = [(a, w.t() if by_row else w.t().contiguous()) for a, w in pairs]
    bias, out = draw(N), draw(M, N).fill_(torch.nan)
    rows, of = listing(M, n, device)
    listed.product(a, w, out, of, second=more[0] if two else None, bias=bias)
    want = sum(a.float() @ w.float() for a, w in pairs) + bias.float()
    close(out[rows[:n]], want[rows[:n]])
    assert out[rows[n:]].isnan().all()


@pytest.mark.parametrize("sums", [1, heavy(2), 3])
@pytest.mark.parametrize(("M", "K", "N", "n"), SIZES)
def test_sums(M, K, N, n, sums, draw, device):
    rows, of = listing(M, n, device)
    given, wants = [], []
    for i in range(sums):
        a, x = draw(M, N) / max(n, 1) ** 0.5, draw(M, K + 8 * i)
        out, bias = draw(N, K + 8 * i) if i < 2 else draw(K + 8 * i, N).t(), draw(N) if i else None
        chosen = rows[:n]
        wants.append(out.float() + a[chosen].float().t() @ x[chosen].float())
        if bias is not None:
            wants.append(bias.float() + a[chosen].float().sum(0))
        given.append(listed.Sum(a, x, out, bias))
    listed.add_sums(given, of)
    got = [t for s in given for t in (s.out, s.bias) if t is not None]
    for t, want in zip(got, wants, strict=True):
        close(t, want)
