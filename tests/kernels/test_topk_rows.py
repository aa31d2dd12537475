"""The kernels of rows with k entries against the ATen path, in the interpreter (or on a GPU)."""

from __future__ import annotations

import pytest
import torch

from sparse_inductor.aten import sparse_rows as aten
from sparse_inductor.kernels.common import transpose
from sparse_inductor.kernels.sparse_rows import sums as topk_sums
from sparse_inductor.kernels.sparse_rows import topk as topk_rows
from support import heavy

INF, NAN = float("inf"), float("nan")


def rows(N: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return rows of every kind: random, all equal, all NaN, half NaN, all -inf, ties, negative, and both zeros.

    Two rows have their largest values in one group, with other groups that differ or are all 0.
    """
    torch.manual_seed(0)
    s = torch.randn(10, N).to(dtype)
    s[1], s[2], s[3, : N // 2], s[4] = 1, NAN, NAN, -INF
    s[5], s[6] = (s[5] * 1.5).round(), -s[6].abs()
    s[7], s[7, ::2] = 0, -0.0
    s[8, :6] = s[8, :6].abs() + 9
    s[9], s[9, :6] = 0, s[8, :6]
    return s.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, heavy(torch.float16)])
@pytest.mark.parametrize(
    ("N", "k", "ordered"), [(103, 5, True), (1030, 5, False), heavy(64, 30, False)]
)
def test_the_k_largest(N, k, ordered, dtype, device):
    scores = rows(N, dtype, device)
    values, indices = scores.new_empty(10, k), torch.empty(10, k, dtype=torch.int64, device=device)
    topk_rows.top(scores, k, ordered, values, indices)
    torch.testing.assert_close((values, indices), aten.top(scores, k, ordered), equal_nan=True)


def test_the_product_is_made_in_parts(device, monkeypatch):
    monkeypatch.setattr(topk_rows, "ROWS", 2)
    monkeypatch.setattr(topk_rows, "PRODUCT", 2 * 40 * 4)
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(s, device=device) for s in ((3, 8), (40, 8), (40,)))
    values, indices = topk_rows.encode(x, weight, bias, None, 3, False)
    wanted, at = aten.encode(x, weight, bias, None, 3, False)
    torch.testing.assert_close((values, indices), (wanted, at))


@pytest.mark.parametrize("sort", [heavy(False), True])
def test_sums_by_row_and_by_column(sort, device, monkeypatch):
    """One column has an entry in every row, which is more than one piece."""
    monkeypatch.setattr(aten, "PIECE", 8)
    if sort:
        monkeypatch.setattr(topk_sums, "MASKS", 0)
    torch.manual_seed(0)
    M, N, D, k = 12, 20, 40, 3
    scores = torch.randn(M, N, device=device)
    scores[:, 3] += 9
    values, indices = aten.top(scores, k, False)
    x, weight, bias = (torch.randn(s, device=device) for s in ((M, D), (D, N), (D,)))
    found = topk_sums.decode(values, indices, weight.t(), bias)
    torch.testing.assert_close(found, aten.decode(values, indices, weight.t(), bias))
    found = topk_sums.dots(x, weight.t(), indices)
    torch.testing.assert_close(found, aten.dots(x, weight.t(), indices))
    by = topk_sums.columns(indices, N)
    wanted = aten.columns(indices, N)
    assert all(map(torch.equal, by, wanted)) and wanted.total.max() == M
    sums = aten.outer(values, x, wanted, False)
    torch.testing.assert_close(topk_sums.outer(values, x, by, False), sums)
    monkeypatch.setattr(transpose, "TILE", 8)
    monkeypatch.setattr(topk_sums, "BUFFER", 1)
    found = topk_sums.outer(values, x, by, True)
    torch.testing.assert_close(found, sums)
    assert found[0].t().is_contiguous()
