"""The SPLADE head in chunked ATen, without a [B, S, V] tensor: the CPU path, and the path for calls that the kernels do
not support on a GPU.

The forward computes the GEMM in tiles that fit the cache and reduces each over its positions while it is cached. The
backward is two products with a sparse [B*S, V] matrix that has one entry for each active (sequence, vocabulary entry).
On a GPU that matrix is dense, and computed for some columns at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..aten import all_finite, compute_dtype, looks_at
from ..aten.csr import csr
from ..epilogue.plan import Lowered, Plan
from ..epilogue.steps import Program, apply, dual, dual_parts, run

# A tile of logits has _TOKENS by _COLUMNS elements: 4 MiB in fp32, about a core's share of the outer caches.
# Smaller tiles make the GEMM itself slower; with larger tiles the reduction reads from memory.
_TOKENS = 2048
_COLUMNS = 512
# Elements of a chunk of dense gradients of logits: 64 MiB in fp32.
_DENSE = 1 << 24
# Gradients that are divided among several positions: indices b, v and s, and the gradient of the logit at [b, s, v].
Shares = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# hidden, weight and bias; and their gradients.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: Sequence[torch.Tensor],
    low: Lowered,
    out_dtype: torch.dtype,
    winner_dtype: torch.dtype | None,
    even: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(values [B, V], winner [B, V] or None, peak [B, V] or None), as in `kernels.splade_head.forward.forward`.

    even: the gradient of a maximum that several positions share is divided among them. If s is the first of several
    such positions, winner holds -2 - s.
    """
    B, S, _ = hidden.shape
    V = weight.shape[0]
    dt = compute_dtype(hidden, weight, bias)
    rows = [r.to(dt) for r in rows]
    values = hidden.new_empty(B, V, dtype=out_dtype)
    want_winner = winner_dtype is not None
    winner = hidden.new_empty(B, V, dtype=winner_dtype) if want_winner else None
    peak = hidden.new_empty(B, V, dtype=dt) if want_winner else None
    per_element = low.per_element
    if not low.plan.hoists:
        per_element = hidden.new_ones(B, dtype=torch.bool)
    elif per_element is not None and looks_at(hidden) and not per_element.any():
        per_element = None
    step = max(1, _TOKENS // S)
    buffer = hidden.new_empty(min(B, step) * S * min(V, _COLUMNS), dtype=dt)
    for v in range(0, V, _COLUMNS):
        cols = slice(v, min(v + _COLUMNS, V))
        w = weight[cols].to(dt).t()
        b = None if bias is None else bias[cols].to(dt)
        for i in range(0, B, step):
            part = slice(i, min(i + step, B))
            x = hidden[part].to(dt)
            tile = buffer[: x.shape[0] * S * w.shape[1]].view(x.shape[0] * S, w.shape[1])
            torch.mm(x.flatten(0, 1), w, out=tile)
            general = None if per_element is None else per_element[part]
            logits = tile.view(-1, S, w.shape[1])
            got = _reduce(logits, b, rows, part, low, general, want_winner, even)
            values[part, cols] = got[0]
            if winner is not None and peak is not None:
                winner[part, cols], peak[part, cols] = got[1], got[2]
    return values, winner, peak


def _reduce(logits, bias, rows, part, low, general, want_winner, even):
    """Reduce one tile [b, S, v] to values, winner and peak [b, v]."""
    p = low.plan
    dropped = shift = None
    if low.add is not None:
        add = low.add[part].to(logits.dtype).unsqueeze(-1)
        dropped = add == float("-inf")
        shift = add.masked_fill(dropped, 0)
    fill = None if low.fill is None else low.fill[part, None].to(logits.dtype)
    if p.drops_nan:  # a maximum would propagate NaN
        logits = logits.masked_fill(logits.isnan(), float("-inf"))
    fast = slow = None
    looks = looks_at(logits)
    if general is None or (p.hoists and not (looks and general.all())):
        # Dropped logits are replaced rather than shifted, because padding may hold NaN.
        z = logits if shift is None or (looks and not shift.any()) else logits + shift
        if dropped is not None and not (looks and not dropped.any()):
            z = z.masked_fill(dropped, float("-inf"))
        # The bias is the same for every position, so it is added after the maximum.
        top, winner = _max(z, want_winner)
        peak = top if bias is None else top + bias
        values = run(p.scalar, peak)
        if even and looks:
            winner = _marked(winner, z, top)
        if winner is not None and p.bounds:
            winner = _at_bound(winner, at_bound(p, p.scalar, peak), z, top, even, dropped)
        fast = _finish(values, peak, winner, top, fill, even, dropped)
    if general is not None:
        z = logits if bias is None else logits + bias
        y = run(p.inner, z, [r[part] for r in rows])
        if dropped is not None:
            y = y.masked_fill(dropped, float("-inf"))
        top, winner = _max(y, want_winner)
        if winner is not None and even and p.bounds:
            sloped = at_bound(p, p.inner, z, [r[part] for r in rows]) & (y == top[:, None])
            winner = torch.where(sloped.any(1), sloped.byte().argmax(1), winner)
        peak = top if winner is None else z.gather(1, winner[:, None]).squeeze(1)
        if even:  # all positions share a maximum of NaN, regardless of their logits
            peak = torch.where(top.isnan(), top, peak)
        winner = _marked(winner, y, top) if even and looks else winner
        slow = _finish(run(p.outer, top), peak, winner, top, fill, even, dropped)
    if fast is None or slow is None:
        return fast or slow
    pick = general[:, None]
    return tuple(None if f is None else torch.where(pick, s, f) for f, s in zip(fast, slow))


def _max(y, want_winner):
    return tuple(y.max(1)) if want_winner else (y.amax(1), None)


def _marked(winner, y, top):
    """Positions [b, v] of the maxima `top` [b, v] of y [b, s, v]. If several positions share a maximum, or if it is
    NaN, the position s of the first is replaced by -2 - s."""
    equal = y == top[:, None]
    if winner is None or (equal.count_nonzero() == winner.numel() and not top.isnan().any()):
        return winner
    return torch.where(equal.sum(1) != 1, -2 - winner, winner)


def at_bound(
    p: Plan, program: Program, y: torch.Tensor, rows: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """A mask of the elements at which one of the plan's shared bounds is exactly reached."""
    found = torch.zeros_like(y, dtype=torch.bool)
    for step in program:
        if step in p.bounds:
            found |= y == step.consts[0]
        y = apply(step, y, rows)
    return found


def _at_bound(winner, bound, z, top, even, dropped):
    """Positions [b, v] of maxima, corrected for maxima that are equal to a bound: all positions of a sequence share
    these, and the first of them may have slope 0."""
    if even:
        return torch.where(bound & (winner >= 0), -2 - winner, winner)
    first = torch.zeros_like(winner[:, :1]) if dropped is None else (~dropped).byte().argmax(1)
    sloped = z.gather(1, first[:, None].expand(-1, -1, z.shape[2])).squeeze(1) == top
    return torch.where(bound, torch.where(sloped, first, -1), winner)


def _finish(values, peak, winner, top, fill, even, dropped):
    """Include dropped positions, with their value `fill`, in the maximum. They win if the fill is larger or if all
    positions are dropped. If it equals the maximum, they share it (`even`), or win if they come first."""
    if fill is None or dropped is None:
        return values, winner, peak
    empty = dropped.all(1)
    if winner is not None:
        shared = (fill == values) & (winner >= 0)
        if even:
            winner = torch.where(shared, -2 - winner, winner)
        else:
            winner = torch.where(shared & (dropped.byte().argmax(1) < winner), -1, winner)
        winner = torch.where(empty | (fill > values), -1, winner)
    return torch.where(empty, fill, torch.maximum(values, fill)), winner, peak


def backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: Sequence[torch.Tensor],
    low: Lowered,
    winner: torch.Tensor,
    peak: torch.Tensor,
    needs: Sequence[bool],
    even: bool = False,
) -> Gradients:
    """Gradients of hidden, weight and bias, each in its input's dtype. even: as in `forward`."""
    of = hidden, weight, bias
    if not looks_at(grad):
        slope = _slopes(grad, rows, low, winner, peak)
        return _from_columns(slope, winner, None, of, needs)
    tied = winner < -1
    # If the gradient is not finite, the other positions get 0 times it, which is NaN.
    all_get_one = ~grad.isfinite() if even else torch.zeros_like(tied)
    some = bool((tied | all_get_one).any())
    if some:
        winner = torch.where(tied, -2 - winner, winner)
    slope = _slopes(grad, rows, low, winner, peak)
    shares = None
    if some:
        # A maximum equal to the program's lowest value is shared by many positions, all with slope 0 (but see
        # `_at_bound`), so it needs no shares.
        p = low.plan
        lowest = run(p.scalar, peak.new_full((), float("-inf")))
        tied &= (slope != 0) | peak.isnan() | (run(p.scalar, peak) != lowest)
        tied |= all_get_one
        shares = _shares(tied, grad, of, rows, low, winner)
        slope = slope.masked_fill(tied, 0.0)
    finite = all_finite(hidden) and all_finite(weight)
    return (_from_entries if finite else _from_columns)(slope, winner, shares, of, needs)


# The largest relative distance to the maximum at which a position shares it: the rounding of equal products in fp64.
_SHARES_IT = 1e-12


def _shares(
    tied: torch.Tensor,
    grad: torch.Tensor,
    of: Inputs,
    rows: Sequence[torch.Tensor],
    low: Lowered,
    winner: torch.Tensor,
) -> Shares | None:
    """The gradients of all positions that share the maximum of an entry of `tied` [B, V]; None without any.

    Logits are recomputed in fp64, so that of logits that are equal only after rounding to fp32, the larger one gets the
    gradient.
    """
    hidden, weight, bias = of
    S = hidden.shape[1]
    found = []
    for i in tied.any(1).nonzero().flatten().tolist():
        x = hidden[i].double()
        for v in tied[i].nonzero().flatten().split(max(1, _DENSE // 16 // S)):
            z = x @ weight[v].double().t()
            if bias is not None:
                z += bias[v]
            y, slope, flat = dual_parts(low.plan.program, z, [r[i].unsqueeze(-1) for r in rows])
            top = y.amax(0)
            equal = top - y <= _SHARES_IT * top.abs()
            first = winner[i, v].long()
            equal[first, torch.arange(len(v))] |= first >= 0
            share = (equal * grad[i, v].double() / equal.sum(0)).masked_fill(top.isnan(), torch.nan)
            g = (share * slope).masked_fill(flat, 0.0)
            s, column = (g != 0).nonzero(as_tuple=True)
            found.append((torch.full_like(s, i), v[column], s, g[s, column]))
    if not found:
        return None
    b, v, s, g = map(torch.cat, zip(*found))
    return b, v, s, g.to(compute_dtype(*of))


def _slopes(
    grad: torch.Tensor,
    rows: Sequence[torch.Tensor],
    low: Lowered,
    winner: torch.Tensor,
    peak: torch.Tensor,
) -> torch.Tensor:
    """The gradient [B, V] of the winning logits; 0 without a winning logit."""
    g = grad.to(peak.dtype)
    p = low.plan
    if p.hoists:
        _, slope = dual(p.scalar, peak)
    else:
        slope = torch.ones_like(peak)
    active = (winner >= 0) & ((g != 0) | peak.isnan())  # 0 times NaN is NaN
    general = low.per_element if p.hoists else g.new_ones(len(g), dtype=torch.bool)
    if general is not None and looks_at(grad):
        b, v = (general[:, None] & active).nonzero(as_tuple=True)
        s = winner[b, v].long()
        _, slope[b, v] = dual(p.program, peak[b, v], [r[b, s] for r in rows])
    elif general is not None:
        s = winner.clamp(min=0).long()
        _, per_element = dual(p.program, peak, [r.gather(1, s) for r in rows])
        slope = torch.where(general[:, None], per_element, slope)
    return torch.where(active & (slope != 0), g * slope, 0.0)


def _from_columns(
    slope: torch.Tensor,
    winner: torch.Tensor,
    shares: Shares | None,
    of: Inputs,
    needs: Sequence[bool],
) -> Gradients:
    """Two products with the dense gradient of the logits, some columns of the vocabulary at a time. Used for operands
    that are not finite, because 0 times them is NaN, and on a GPU."""
    hidden, weight, bias = of
    B, S, D = hidden.shape
    V = weight.shape[0]
    dt = slope.dtype
    x = hidden.reshape(B * S, D).to(dt)
    d_hidden = x.new_zeros(x.shape) if needs[0] else None
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs[1] else None
    d_bias = torch.empty_like(bias) if needs[2] and bias is not None else None
    step = max(1, _DENSE // (B * S))
    for v in range(0, V, step):
        cols = slice(v, min(v + step, V))
        g = slope[:, cols]
        logits = g.new_zeros(B, S, g.shape[1])
        logits.scatter_(1, winner[:, None, cols].clamp(min=0).long(), g[:, None])
        if shares is not None:
            b, column, s, share = shares
            here = (column >= v) & (column < v + step)
            logits.index_put_((b[here], s[here], column[here] - v), share[here], accumulate=True)
        if d_bias is not None:
            d_bias[cols] = logits.sum((0, 1)).to(d_bias.dtype)
        logits = logits.view(B * S, -1)
        if d_hidden is not None:
            d_hidden += logits @ weight[cols].to(dt)
        if d_weight is not None:
            d_weight[cols] = (logits.t() @ x).to(d_weight.dtype)
    if d_hidden is not None:
        d_hidden = d_hidden.view(B, S, D).to(hidden.dtype)
    return d_hidden, d_weight, d_bias


def _from_entries(
    slope: torch.Tensor,
    winner: torch.Tensor,
    shares: Shares | None,
    of: Inputs,
    needs: Sequence[bool],
) -> Gradients:
    """Two products with the sparse matrix of the active entries and of `shares`."""
    hidden, weight, bias = of
    b, v = (slope != 0).nonzero(as_tuple=True)
    s, g = winner[b, v].long(), slope[b, v]
    if shares is not None:
        b, v, s, g = (torch.cat(both) for both in zip((b, v, s, g), shares))
    B, S, D = hidden.shape
    V = weight.shape[0]
    token = b * S + s
    d_hidden = d_weight = d_bias = None
    if needs[0]:
        d_hidden = _scatter_rows(token, v, g, B * S, weight, hidden.dtype).view(B, S, D)
    if needs[1]:
        d_weight = _scatter_rows(v, token, g, V, hidden.reshape(B * S, D), weight.dtype)
    if needs[2] and bias is not None:
        # Deterministic: for a vector `index_add_` runs in one thread, in order.
        d_bias = g.new_zeros(V).index_add_(0, v, g).to(bias.dtype)
    return d_hidden, d_weight, d_bias


# Rows of a gradient that are computed at a time. The product allocates its result twice, so this keeps it to a few MiB.
_GRADIENT_ROWS = 2048


def _scatter_rows(
    row: torch.Tensor,
    col: torch.Tensor,
    value: torch.Tensor,
    n: int,
    table: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """out[row[i]] += value[i] * table[col[i]], out [n, D], as products with CSR matrices; deterministic."""
    order = torch.argsort(row, stable=True)
    col, value = col[order], value[order]
    start = torch.zeros(n + 1, dtype=torch.int64, device=row.device)
    torch.cumsum(torch.bincount(row, minlength=n), 0, out=start[1:])
    table = table.to(value.dtype)
    out = table.new_empty(n, table.shape[1], dtype=dtype)
    for first in range(0, n, _GRADIENT_ROWS):
        last = min(first + _GRADIENT_ROWS, n)
        a, b = int(start[first]), int(start[last])
        if a == b:
            out[first:last] = 0
            continue
        size = (last - first, table.shape[0])
        matrix = csr(start[first : last + 1] - a, col[a:b], value[a:b], size)
        out[first:last] = matrix @ table
    return out
