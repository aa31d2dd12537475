"""ATen implementation of rows with few entries: the CPU path, the fp64 path, and the reference of the kernels.

A row is `k` values and their columns. Sums over rows and over columns use `embedding_bag`: each is computed in a fixed
order, with fp32 accumulation for 16-bit dtypes. No [M, N] tensor is materialised except one chunk of the encoder's
product at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import all_finite, looks_at

# Elements of a chunk: 16 MiB of fp32, which fits into a last-level cache.
_CHUNK = 1 << 22
# Entries of a group in `top_of_batch`, and groups for each of the k entries from which on their maxima are used.
_GROUP, _EACH = 32, 4
# Columns of a matrix that are transposed at a time: in torch, a whole matrix is transposed by one thread.
_TRANSPOSED = 256
# The most entries of a column that one kernel program sums. Longer columns are split into pieces of this size.
PIECE = 256


class Columns(NamedTuple):
    """The entries of each column in the order of their rows; all tensors are int32.

    entry[start[n] + j] is the position (row * k + i) of the j-th entry of column n, j < total[n]. ends[n] is the total
    number of pieces of columns 0 to n, counting only columns of more than PIECE entries.
    """

    entry: Tensor
    start: Tensor
    total: Tensor
    ends: Tensor


def top(scores: Tensor, k: int, ordered: bool) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row and their columns. NaN is the largest value; of equal values those of the
    smallest columns are selected. Sorted by value if `ordered`, else by column."""
    N = scores.shape[1]
    found, indices = scores.topk(min(k + 1, N), dim=1)
    if k < N:
        last, after = found[:, k - 1 : k + 1].unbind(1) if k else (found[:, 0], found[:, 0])
        tied = (last == after) | (last.isnan() & after.isnan())
        indices = indices[:, :k]
        # topk does not specify which of equal values it selects; a stable sort selects the first.
        if not looks_at(scores):
            indices = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
        elif len(again := tied.nonzero().squeeze(1)):
            order = scores[again].sort(dim=1, descending=True, stable=True).indices
            indices = indices.index_copy(0, again, order[:, :k])
    indices = indices.sort(dim=1).values
    values = scores.gather(1, indices)
    if ordered:
        values, order = values.sort(dim=1, descending=True, stable=True)
        indices = indices.gather(1, order)
    return values, indices


def top_of_batch(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`top` of one long row x [n], by position. On a CPU, of groups of entries only those are searched whose maximum
    reaches the k-th largest maximum; no others can contain one of the k largest entries."""
    groups = x.numel() // _GROUP
    if not (looks_at(x) and 0 < _EACH * k <= groups):
        values, indices = top(x.unsqueeze(0), k, False)
        return values.squeeze(0), indices.squeeze(0)
    whole = x[: groups * _GROUP]
    maxima = whole.view(groups, _GROUP).amax(1)
    listed = (~(maxima < maxima.topk(k).values[-1])).nonzero()  # also those that are NaN
    places = torch.arange(_GROUP).add(listed * _GROUP).flatten()
    places = torch.cat([places, torch.arange(len(whole), x.numel())])
    values, at = top(x[places].unsqueeze(0), k, False)
    return values.squeeze(0), places[at.squeeze(0)]


def encode(
    x: Tensor, weight: Tensor, bias: Tensor | None, scores: Tensor | None, k: int, ordered: bool
) -> tuple[Tensor, Tensor]:
    """Return `top` of x @ weight.t() + bias, or of `scores` if this product is given."""
    M, N = len(x), len(weight)
    values, indices = x.new_empty(M, k), torch.empty(M, k, dtype=torch.int64, device=x.device)
    step = max(1, _CHUNK // max(N, 1))
    for i in range(0, M, step):
        part = slice(i, min(i + step, M))
        product = F.linear(x[part], weight, bias) if scores is None else scores[part]
        values[part], indices[part] = top(product, k, ordered)
    return values, indices


def decode(values: Tensor, indices: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return y[m] = bias + sum over i of values[m, i] * weight[indices[m, i]]."""
    if not values.numel():
        y = values.new_zeros(len(values), weight.shape[1])
    else:
        table = weight.contiguous()
        y = F.embedding_bag(indices, table, mode="sum", per_sample_weights=values)
    return y if bias is None else y + bias


def dots(x: Tensor, weight: Tensor, indices: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return values[m, i] = x[m] . weight[indices[m, i]], or values[i] = x[rows[i]] . weight[indices[i]]."""
    M, k, D = len(indices), 1 if rows is not None else indices.shape[1], weight.shape[1]
    values = x.new_empty(indices.shape)
    step = max(1, _CHUNK // max(k * D, 1))
    for i in range(0, M, step):
        part = slice(i, min(i + step, M))
        at = indices[part]
        table = weight.index_select(0, at.reshape(-1)).view(len(at), k, D)
        of = x[part] if rows is None else x[rows[part]]
        values[part] = torch.bmm(table, of.unsqueeze(2)).view(at.shape)
    return values


def columns(indices: Tensor, N: int, rows: Tensor | None = None, M: int = 0) -> Columns:
    """Return the entries of each column, for indices [M, k] or, with `rows`, pairs [entries] in any order."""
    if rows is None:
        found, entry = indices.reshape(-1).sort(stable=True)
    else:
        found, entry = (indices.long() * M + rows).sort()
        found = found // max(M, 1)
        if len(found) and looks_at(found) and not 0 <= found[0] <= found[-1] < N:
            raise IndexError(f"an index is out of range for {N} columns")
    edges = torch.searchsorted(found, torch.arange(N + 1, device=found.device), out_int32=True)
    return cut_up(entry.int(), edges[:-1].clone(), edges.diff())


def cut_up(entry: Tensor, start: Tensor, total: Tensor) -> Columns:
    several = torch.where(total > PIECE, (total + (PIECE - 1)) // PIECE, 0)
    return Columns(entry, start, total, several.cumsum(0, dtype=torch.int32))


def outer(
    values: Tensor,
    x: Tensor,
    by: Columns,
    column_major: bool,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return bias [D] + the sums [N, D] of value * x[row] over the entries of each column, in column-major layout if
    `column_major`, and the sums [N] of the values. values: [M, k], or [entries] with their `rows`."""
    sums, totals = _outer(values, x, by, rows)
    if bias is not None:
        sums += bias
    return _column_major(sums) if column_major else sums, totals


def _column_major(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[1], x.shape[0])
    for i in range(0, len(x), _TRANSPOSED):
        part = x[i : i + _TRANSPOSED]
        out.narrow(1, i, len(part)).copy_(part.t())
    return out.t()


def _outer(values: Tensor, x: Tensor, by: Columns, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    N, entry = len(by.start), by.entry.long()
    if not entry.numel():
        return x.new_zeros(N, x.shape[1]), x.new_zeros(N)
    row = entry // values.shape[1] if rows is None else rows[entry].long()
    values = values.reshape(-1)
    value = values[entry]
    if looks_at(x) and not all_finite(x):
        # 0 times a value that is not finite is NaN, so a row affects the columns in which it has no entry, too.
        h = values.new_zeros(len(x), N)
        h[row, torch.repeat_interleave(by.total.long())] = value
        return h.t() @ x, h.sum(0)
    start = by.start.long()
    sums = F.embedding_bag(row, x.contiguous(), start, mode="sum", per_sample_weights=value)
    totals = F.embedding_bag(entry, values.unsqueeze(1), start, mode="sum")
    return sums, totals.squeeze(1)
