"""The kernels of a top-k of a whole tensor against the ATen path, in the interpreter (or on a GPU)."""

from __future__ import annotations

import pytest
import torch

from sparse_inductor.aten import sparse_rows as aten
from sparse_inductor.kernels.sparse_rows import batch, sums
from support import heavy

INF, NAN = float("inf"), float("nan")


def tensors(n: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(n)
    few, zeros = torch.zeros(n), torch.zeros(n)
    few[n // 2 :: 50], zeros[::2] = 1, -0.0
    return {
        "random": x,
        "rectified": x.relu(),
        "ties": (x * 1.5).round(),
        "all equal": torch.ones(n),
        "few that are not zero": few,
        "both zeros": zeros,
        "negative": -x.abs(),
        "all NaN": torch.full((n,), NAN),
        "some NaN": torch.where(x > 1, NAN, x),
        "infinities": torch.where(x > 0.5, INF, torch.where(x < 0, -INF, x)),
    }


def cast(x: torch.Tensor, dtype: torch.dtype, device: object) -> torch.Tensor:
    """A cast to bf16 makes NaN negative, and torch's stable sort on a GPU does not keep the order of such NaNs."""
    x = x.to(dtype)
    x[x.isnan()] = NAN
    return x.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, heavy(torch.float16)])
@pytest.mark.parametrize("name", tensors(1))
@pytest.mark.parametrize(
    ("n", "k"), [(203, 5), heavy(203, 40), heavy(203, 203), heavy(1, 1), heavy(1500, 90)]
)
def test_the_k_largest(name, n, k, dtype, device):
    x = cast(tensors(n)[name], dtype, device)
    found, (values, indices) = batch.top(x, k), aten.top(x[None], k, False)
    torch.testing.assert_close(found, (values[0], indices[0]), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", tensors(1))
def test_the_k_largest_on_a_cpu(name, dtype):
    """With 1, 2 and 9 of 40 groups of maxima, the last entries belong to no group; with 40 entries none are used."""
    x = cast(tensors(1289)[name], dtype, "cpu")
    order = x.sort(descending=True, stable=True).indices
    for k in (0, 1, 2, 9, 40, 1289):
        values, indices = aten.top_of_batch(x, k)
        assert torch.equal(indices, order[:k].sort().values)
        torch.testing.assert_close(values, x[indices], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("strided", [lambda x: x[::2], lambda x: x[:1].expand(40)])
def test_entries_may_be_apart_in_memory(strided, device):
    x = strided(torch.randn(203, device=device))
    values, indices = aten.top(x[None], 9, False)
    torch.testing.assert_close(batch.top(x, 9), (values[0], indices[0]), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", tensors(1))
def test_the_k_largest_of_many(name, dtype):
    """With few listed groups most programs have none, and with many ties all groups are listed."""
    x = cast(tensors(3_000_017)[name], dtype, "cuda")
    order = x.sort(descending=True, stable=True).indices
    for k in (1, 2, 17, 1000, 8192, 30_000, 800_000):
        values, indices = batch.top(x, k)
        assert torch.equal(indices, order[:k].sort().values)
        torch.testing.assert_close(values, x[indices], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("sort", [heavy(False), True])
def test_sums_over_entries_in_any_order(sort, device, monkeypatch):
    """Rows and columns have any number of entries: none, and more than one piece."""
    monkeypatch.setattr(aten, "PIECE", 8)
    if sort:
        monkeypatch.setattr(sums, "MASKS", 0)
    torch.manual_seed(0)
    M, N, D = 40, 20, 40
    f = torch.randn(M, N) * (torch.rand(M, N) > 0.9)
    f[3, :], f[5:30, 4], f[7], f[:, 9] = 1, 2, 0, 0
    f = f.to(device)
    where = f.flatten().nonzero().squeeze(1)[torch.randperm(int(f.count_nonzero()))]
    rows, columns, values = (where // N).int(), (where % N).int(), f.flatten()[where]
    x, table = torch.randn(M, D, device=device), torch.randn(N, D, device=device)

    by = sums.columns(columns, N, rows, M)
    assert all(map(torch.equal, by, aten.columns(columns, N, rows, M)))
    found, totals = sums.outer(values, x, by, False, rows)
    torch.testing.assert_close((found, totals), (f.t() @ x, f.sum(0)))
    by = sums.columns(rows, M, columns, N)
    torch.testing.assert_close(sums.outer(values, table, by, False, columns)[0], f @ table)
    dots = sums.dots(x, table, columns, rows)
    torch.testing.assert_close(dots, (x @ table.t()).flatten()[where])


def test_a_bias_is_added_before_the_sums_are_rounded(device):
    torch.manual_seed(0)
    table, bias = torch.randn(9, 40).half(), torch.randn(80).bfloat16()[::2]
    rows, columns, values = (
        torch.tensor([6, 0, 3]),
        torch.tensor([8, 0, 8]),
        torch.randn(3).half(),
    )
    want = bias.double().repeat(7, 1)
    want[rows] += values[:, None].double() * table[columns].double()
    table, bias, rows, columns, values = (
        t.to(device) for t in (table, bias, rows.int(), columns.int(), values)
    )
    by = sums.columns(rows, 7, columns, 9)
    found, _ = sums.outer(values, table, by, False, columns, bias)
    assert torch.equal(found.cpu(), want.float().half())


def test_rows_beside_an_empty_column_are_not_read(device):
    """An empty column has no first entry, and what is not finite in another row does not reach it."""
    x = torch.ones(3, 32, device=device)
    x[0] = INF
    rows, columns = (torch.tensor(t, device=device).int() for t in ([0, 1, 1, 2], [0, 2, 3, 3]))
    values = torch.ones(4, device=device)
    by = sums.columns(columns, 4, rows, 3)
    found, _ = sums.outer(values, x, by, False, rows)
    assert not found[0].isfinite().any() and found[1:, 0].tolist() == [0, 1, 2]
