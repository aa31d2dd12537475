"""The kernels of products with mostly-zero matrices against dense products, in the interpreter (or on a GPU)."""

from __future__ import annotations

import pytest
import torch

import sparse_inductor
from sparse_inductor import layers
from sparse_inductor.doctor import registered
from sparse_inductor.kernels.sparse_rows import products as sparse_products
from support import heavy


def pack(h, capacity):
    M = len(h)
    count, index = (h.new_empty(*s, dtype=torch.int32) for s in ((M,), (M, capacity)))
    entries = count, index, h.new_empty(M, capacity)
    sparse_products.pack(h, entries)
    return entries


@pytest.mark.parametrize(
    ("M", "N", "D", "dtype", "fits"),
    [
        (3, 40, 8, torch.float32, 1),
        heavy(140, 130, 40, torch.float32, 2),
        heavy(12, 130, 40, torch.bfloat16, 0),
        heavy(12, 130, 40, torch.float16, 12),
    ],
)
def test_rows_that_fit_and_rows_that_do_not(M, N, D, dtype, fits, device):
    """Rows have 8 % or half of their entries. One row is zero, and one column has an entry in all others."""
    torch.manual_seed(0)
    share = torch.where(torch.arange(M) % 12 < fits, 0.5, 0.08).unsqueeze(1)
    h = torch.randn(M, N) * (torch.rand(M, N) < share)
    h[1], h[:, 3] = 0, 1
    h, weight, x = (t.to(device, dtype) for t in (h, torch.randn(D, N), torch.randn(M, D)))
    entries = pack(h, N // 4)
    exact = [t.double() for t in (h, weight, x)]
    close = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
    y = sparse_products.matmul(h, entries, weight.t())
    torch.testing.assert_close(y.double(), exact[0] @ exact[1].t(), **close)
    out, total = sparse_products.outer(h, entries, x)
    torch.testing.assert_close(out.double(), exact[0].t() @ exact[2], **close)
    torch.testing.assert_close(total.double(), exact[0].sum(0), **close)
    masked = sparse_products.masked_matmul(entries, x, weight.t())
    there = (h != 0) | ((h != 0).sum(1) > N // 4).unsqueeze(1)
    wanted = torch.where(there, exact[2] @ exact[1], 0)
    torch.testing.assert_close(masked.double(), wanted, **close)
    if M > 3:
        again = sparse_products.outer(h, entries, x)
        assert torch.equal(out, again[0])
        assert torch.equal(total, again[1])


def test_the_pattern_with_kernels_agrees_with_what_is_written(device, monkeypatch):
    """The program returns the activations, so the gradient of the ReLU's input is computed entry by entry."""
    monkeypatch.setattr(layers, "DEVICES", {"cpu", "cuda"})
    example = next(e for e in registered()["sparse_product"].examples if e.name == "returned")
    model, args = example.build()
    args = tuple(t.to(device) for t in args)
    fn = torch.compile(
        model.to(device), options=sparse_inductor.options(only="sparse_product", verify=True)
    )
    fn(*args)[0].sum().backward()
    assert [c.verdict for c in sparse_inductor.report().checks] == ["agrees"]


def test_a_value_that_is_no_number_is_an_entry(device):
    h = torch.zeros(3, 64, device=device)
    h[1, 5] = float("nan")
    y = sparse_products.matmul(h, pack(h, 32), torch.ones(64, 8, device=device))
    assert y[1].isnan().all()
    assert not y[[0, 2]].any()
