"""ATen implementation of the ReLU feed-forward block: the CPU path, fp64, and the reference for the kernels.

Rows are computed in chunks, so no [M, N] tensor is materialized. For few rows with few active neurons only the weights
of those neurons are read. For the backward up to `cap` active neurons per row are packed; a row with more saves nothing
and is recomputed. On a GPU all weights are read, and nothing is packed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..aten import looks_at
from ..epilogue.steps import Program, dual_parts, run

# Elements of a chunk of hidden activations: 16 MiB of fp32, so that a chunk stays in a last-level cache.
_CHUNK = 1 << 22
# The largest number of rows, and the largest share of neurons that are active in any of them, for which gathering
# weights is faster than reading all of them (2 cores, fp32: break-even at about 0.25).
_DECODE_ROWS, _DECODE_SHARE = 8, 0.2


@dataclasses.dataclass(frozen=True)
class Block:
    """Weights and programs of a block. gate, up: [N, K]; down: [D, N]. A neuron is inactive up to `zero_threshold` (see
    `epilogue`), or up to its element of `thresholds` [N] if these are given."""

    gate: Tensor
    gate_bias: Tensor | None
    up: Tensor | None
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    f: Program
    g: Program
    zero_threshold: float
    thresholds: Tensor | None = None

    def active(self, gate: Tensor) -> Tensor:
        """Mask of the gate values that are above their threshold, or NaN. A comparison rounds the threshold to the
        tensor's dtype, so a non-zero threshold is lowered for 16 bits. Zeros of a clamp at 0, which passes their
        gradient on, thus stay above it."""
        if self.thresholds is not None:
            return ~(gate <= self.thresholds)
        at = self.zero_threshold
        if at and gate.element_size() == 2:
            info = torch.finfo(gate.dtype)
            at -= max(abs(at) * info.eps, info.tiny)
        return ~(gate <= at)

    def wide(self, x: Tensor) -> Tensor:
        """x in the dtype of the elementwise arithmetic: fp32, or fp64 for fp64."""
        return x if x.dtype == torch.float64 else x.float()


@dataclasses.dataclass(frozen=True)
class Packed:
    """The active neurons of every row. count: [M] int32; index, gate, up: [M, cap]; up is empty if the block has none.

    Rows with count > cap and rows that are not finite store nothing. popular: [P] int64, neurons that are computed
    densely and are not part of index; popular_gate, popular_up: [M, P], their projections in packed rows.
    """

    count: Tensor
    index: Tensor
    gate: Tensor
    up: Tensor
    popular: Tensor
    popular_gate: Tensor
    popular_up: Tensor

    @property
    def cap(self) -> int:
        return self.index.shape[1]

    def without_popular(self) -> None:
        """Mark popular neurons as unused: fill in arbitrary neurons that are inactive in every row."""
        if len(self.popular):
            torch.arange(len(self.popular), out=self.popular)
            self.popular_gate.fill_(-math.inf)


class Statistics(NamedTuple):
    """Statistics of a call. stats [4, M], or [5, M] with a weight [N]: the sum of |a| and the number of non-zeros of
    a = f(gate), the same two of h, and the sum of h * weight. counts [N], or None: for each neuron the number of tokens
    at which h is not 0, added to the initial zeros."""

    stats: Tensor
    weight: Tensor | None
    counts: Tensor | None

    def fill(self, part: slice, a: Tensor, h: Tensor) -> None:
        """Write the statistics of some rows, from a and h [m, N], and add to the counts."""
        for row, t in ((0, a), (2, h)):
            self.stats[row, part] = t.abs().sum(1).to(self.stats.dtype)
            self.stats[row + 1, part] = (t != 0).sum(1).to(self.stats.dtype)
        if self.weight is not None:
            self.stats[4, part] = (h * self.weight.to(h.dtype)).sum(1).to(self.stats.dtype)
        if self.counts is not None:
            self.counts.add_((h != 0).sum(0))


def forward(x: Tensor, b: Block, stats: Statistics | None, packed: Packed | None) -> Tensor:
    """y [M, D]; fills `stats` and `packed` if they are given."""
    M, N = x.shape[0], b.gate.shape[0]
    y = x.new_empty(M, b.down.shape[0])
    if packed is not None:
        packed.without_popular()
    step = max(1, _CHUNK // max(N, 1))
    for i in range(0, M, step):
        part = slice(i, min(i + step, M))
        y[part] = _rows(x[part], b, part, stats, packed)
    return y


def _rows(
    x: Tensor, b: Block, part: slice, stats: Statistics | None, packed: Packed | None
) -> Tensor:
    gate = F.linear(x, b.gate, b.gate_bias)
    if packed is None and stats is None and len(x) <= _DECODE_ROWS and looks_at(x):
        top = gate if len(x) == 1 else gate.amax(0, keepdim=True)  # propagates NaN
        columns = b.active(top[0]).nonzero().squeeze(1)
        if len(columns) <= _DECODE_SHARE * b.gate.shape[0]:
            return _few(x, gate, columns, b)
    up = None if b.up is None else F.linear(x, b.up, b.up_bias)
    if packed is not None and not looks_at(x):
        packed.count[part] = packed.cap + 1
    elif packed is not None:
        _pack(b.active(gate), gate, up, packed, part)
        packed.count[part].masked_fill_(_not_finite(x), packed.cap + 1)
    a = _activated(b, gate)
    h = a
    if up is not None:
        g = run(b.g, b.wide(up))
        h = a * g if stats is not None else a.mul_(g)
    if stats is not None:
        stats.fill(part, a, h)
    return F.linear(h.to(x.dtype), b.down, b.down_bias)


def _activated(b: Block, gate: Tensor) -> Tensor:
    """f(gate), 0 for inactive neurons. A leading ReLU runs in place, which saves one pass over the chunk."""
    y, f = b.wide(gate), b.f
    if b.thresholds is not None:
        return torch.where(b.active(gate), run(f, y), 0.0)
    if f and f[0].fn == "relu":
        y, f = y.relu_(), f[1:]
    return run(f, y)


def _few(x: Tensor, gate: Tensor, columns: Tensor, b: Block) -> Tensor:
    """y of a few rows, reading only the weights of `columns`, the neurons that are active in any of the rows."""
    h = run(b.f, b.wide(gate.index_select(1, columns)))
    if b.thresholds is not None:
        h = torch.where(b.active(gate).index_select(1, columns), h, 0.0)
    if b.up is not None:
        bias = None if b.up_bias is None else b.up_bias.index_select(0, columns)
        up = F.linear(x, b.up.index_select(0, columns), bias)
        h = h * run(b.g, b.wide(up))
    return F.linear(h.to(x.dtype), _columns(b.down, columns), b.down_bias)


def _columns(weight: Tensor, columns: Tensor) -> Tensor:
    """weight[:, columns]. On a column-major matrix `index_select` copies single elements, which takes 57 ms where
    selecting rows of the transpose takes 0.3 ms, in a block of 4 ms. On a row-major matrix it takes up to twice as long
    as `gather`."""
    if weight.stride(1) == 1:
        return weight.gather(1, columns.expand(len(weight), -1))
    found = weight.t().index_select(0, columns).t()
    # Products of 16-bit column-major matrices take up to ten times as long.
    return found if found.element_size() > 2 else found.contiguous()


def _not_finite(x: Tensor) -> Tensor:
    """Mask of the rows of inputs or gradients with an element, or a sum, that is not finite. 0 times an element that is
    not finite is NaN, so all neurons of these rows are computed."""
    return ~x.sum(1).isfinite()


def _pack(active: Tensor, gate: Tensor, up: Tensor | None, packed: Packed, part: slice) -> None:
    count = active.sum(1)
    packed.count[part] = count.to(torch.int32)
    kept = active & (count <= packed.cap).unsqueeze(1)
    row, column = kept.nonzero(as_tuple=True)
    slot = (kept.cumsum(1) - 1)[row, column]
    for t, values in ((packed.index, None), (packed.gate, gate), (packed.up, up)):
        if t is packed.up and up is None:
            continue
        t[part] = 0
        t[part][row, slot] = (column if values is None else values[row, column]).to(t.dtype)


def _unpack(
    x: Tensor, b: Block, packed: Packed, part: slice, d_rows: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(active, gate, up) [m, N] of a chunk of rows. Rows are recomputed if they were not stored, or if the gradients of
    their activations, `d_rows`, are not finite."""
    if not looks_at(x):
        gate = F.linear(x, b.gate, b.gate_bias)
        up = None if b.up is None else F.linear(x, b.up, b.up_bias)
        return b.active(gate), gate, up
    count = packed.count[part]
    N = b.gate.shape[0]
    spoiled = _not_finite(d_rows)
    stored = (count <= packed.cap) & ~spoiled
    slots = torch.arange(packed.cap, device=x.device) < torch.where(stored, count, 0).unsqueeze(1)
    row, slot = slots.nonzero(as_tuple=True)
    column = packed.index[part][row, slot].long()
    active = torch.zeros(len(x), N, dtype=torch.bool, device=x.device)
    active[row, column] = True
    gate = x.new_zeros(len(x), N)
    gate[row, column] = packed.gate[part][row, slot]
    up = None
    if b.up is not None:
        up = x.new_zeros(len(x), N)
        up[row, column] = packed.up[part][row, slot]
    if len(packed.popular):
        popular = packed.popular_gate[part]
        also = b.active(popular) & stored.unsqueeze(1)
        active[:, packed.popular] |= also
        gate[:, packed.popular] = torch.where(also, popular, gate[:, packed.popular])
        if up is not None:
            ups = packed.popular_up[part]
            up[:, packed.popular] = torch.where(also, ups, up[:, packed.popular])
    again = (~stored).nonzero().squeeze(1)
    if len(again):
        gate[again] = F.linear(x[again], b.gate, b.gate_bias)
        everything = spoiled[again] | _not_finite(x[again])
        active[again] = b.active(gate[again]) | everything.unsqueeze(1)
        if up is not None:
            up[again] = F.linear(x[again], b.up, b.up_bias)
    return active, gate, up


def backward(
    dy: Tensor,
    d_stats: Tensor | None,
    weight: Tensor | None,
    x: Tensor,
    b: Block,
    packed: Packed,
    needs: Sequence[bool],
    column_major: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of x, gate, gate_bias, up, up_bias, down, down_bias and stat_weight in their dtypes; None if not
    needed. column_major: whether the gradients of gate, up and down are column-major."""
    sources = (x, b.gate, b.gate_bias, b.up, b.up_bias, b.down, b.down_bias, weight)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    sums = [
        torch.zeros(t.shape, dtype=wide, device=x.device) if n and t is not None else None
        for t, n in zip(sources[1:], needs[1:])
    ]
    dx = x.new_empty(x.shape) if needs[0] else None
    step = max(1, _CHUNK // max(b.gate.shape[0], 1))
    for i in range(0, len(x), step):
        part = slice(i, min(i + step, len(x)))
        xs, dys = x[part], dy[part]
        d_some = None if d_stats is None else d_stats[:, part]
        d_gate, d_up, h = _slopes(dys, d_some, weight, xs, b, packed, part)
        weighted = None if weight is None or d_some is None else d_some[4].to(wide).unsqueeze(1) * h
        left = (d_gate, d_gate, d_up, d_up, dys, dys, weighted)
        right = (xs, None, xs, None, h, None, None)
        for total, s, t in zip(sums, left, right):
            if total is not None and s is not None:
                total += s.sum(0, dtype=wide) if t is None else s.t() @ t
        if dx is not None:
            dx[part] = d_gate @ b.gate
            if d_up is not None:
                dx[part] += d_up @ b.up
    rest = [None if s is None else s.to(t.dtype) for s, t in zip(sums, sources[1:])]
    for i, by_columns in zip((0, 2, 4), column_major):
        if by_columns and (found := rest[i]) is not None:
            rest[i] = found.t().contiguous().t()
    return [dx, *rest]


def _slopes(
    dy: Tensor,
    d_stats: Tensor | None,
    weight: Tensor | None,
    x: Tensor,
    b: Block,
    packed: Packed,
    part: slice,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(gradient of the gate projection, gradient of the up projection or None, h) of a chunk of rows, [m, N] in the
    dtype of x."""
    dh = b.wide(dy @ b.down)
    d_rows = dh if d_stats is None else torch.cat([dh, d_stats.t().to(dh.dtype)], 1)
    active, gate, up = _unpack(x, b, packed, part, d_rows)
    a, a_slope, a_flat = dual_parts(b.f, b.wide(gate))
    a = torch.where(active, a, 0.0)
    g = None if up is None else dual_parts(b.g, b.wide(up))
    v = None if g is None else g[0]
    h = a if v is None else torch.where(active, a * v, 0.0)
    if d_stats is not None:
        dh = dh + d_stats[2].unsqueeze(1).to(dh.dtype) * h.sign()
        if weight is not None:
            dh = dh + d_stats[4].unsqueeze(1).to(dh.dtype) * weight.to(dh.dtype)
    da = dh if v is None else dh * v
    if d_stats is not None:
        da = da + d_stats[0].unsqueeze(1).to(dh.dtype) * a.sign()
    d_gate = torch.where(active & ~a_flat, da * a_slope, 0.0).to(x.dtype)
    d_up = None
    if g is not None:
        _, slope, flat = g
        d_up = torch.where(active & ~flat, dh * a * slope, 0.0).to(x.dtype)
    return d_gate, d_up, h.to(x.dtype)
