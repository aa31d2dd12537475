"""Popular neurons, which are active for many tokens and are computed by dense matrix products over all tokens.

In the time in which L2 delivers a neuron's weights for one token, tensor cores multiply about seventy tokens by them. A
neuron that is active for more than one token in seventy therefore takes less time as a column of a matrix product. The
popular neurons of a call are the ones with the most active tokens, counted in the bitmask of `relu_ffn.hopper`. Only
the other neurons are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program

from ..common.epilogue import encode, evaluate
from ..common.launch import relaunched
from .dots import slopes
from .packing import neuron_of

# Maximum rows of the bitmask in which active neurons are counted.
COUNTED = 2048
# Rows per counting program, and rows that it loads at a time.
ROWS, AT_ONCE = 64, 32
WORDS = 8
# Neurons with at least this number of counted tokens are equally popular.
MANY = 255
# Rows and columns of the popular neurons' activations per program.
TILE = 4, 256


@relaunched
@triton.jit
def _count_kernel(
    bitmask, totals, rows, words, step, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """totals [words, 32] += the number of rows among 0, step, 2 * step, ... in which each bit is set."""
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    total = tl.zeros([WORDS, 32], tl.int32)
    first = tl.program_id(1) * ROWS
    for i0 in range(first, first + ROWS, AT_ONCE):
        i = i0 + tl.arange(0, AT_ONCE)
        at = (i * step).to(tl.int64)[:, None] * words + word[None, :]
        w = tl.load(bitmask + at, mask=(i < rows)[:, None], other=0)
        total += tl.sum((w[:, :, None] >> bit[None, None, :]) & 1, 0)
    tl.atomic_add(totals + word[:, None] * 32 + bit[None, :], total, sem="relaxed")


@relaunched
@triton.jit
def _choose_kernel(
    totals, popular, keep, words, N, MANY: tl.constexpr, POPULAR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """popular [POPULAR] = the neurons with the largest totals, keep [words] = mask of the other neurons. Totals of MANY
    and more are equal; among equal totals, neurons with lower bit positions are chosen."""
    place = tl.arange(0, BLOCK)
    n = neuron_of(place)
    there = (place < 32 * words) & (n < N)
    total = tl.minimum(tl.load(totals + place, mask=there, other=-1), MANY)
    least = tl.zeros([], tl.int32)
    most = least + MANY
    while least < most:
        middle = (least + most + 1) // 2
        enough = tl.sum((total >= middle).to(tl.int32), 0) >= POPULAR
        least = tl.where(enough, middle, least)
        most = tl.where(enough, most, middle - 1)
    more, equal = (total > least).to(tl.int32), (total == least).to(tl.int32)
    room = POPULAR - tl.sum(more, 0)
    chosen = more | (equal & (tl.cumsum(equal, 0) <= room).to(tl.int32))
    tl.store(popular + tl.cumsum(chosen, 0) - 1, n, mask=chosen != 0)
    of_word = tl.reshape(chosen, [BLOCK // 32, 32]) << tl.arange(0, 32)[None, :]
    word = tl.arange(0, BLOCK // 32)
    tl.store(keep + word, ~tl.sum(of_word, 1), mask=word < words)


def choose(
    bitmask: torch.Tensor, totals: torch.Tensor, N: int, popular: torch.Tensor
) -> torch.Tensor:
    """Write the most popular of N neurons to `popular`, int64; returns the mask of the others, [words].

    totals: [words, 32] int32 zeros, used for counting.
    """
    M, words = bitmask.shape
    step = -(-M // COUNTED)
    rows = -(-M // step)
    _count_kernel[(words // WORDS, triton.cdiv(rows, ROWS))](
        bitmask, totals, rows, words, step, ROWS=ROWS, AT_ONCE=AT_ONCE, WORDS=WORDS, num_warps=4
    )
    keep = bitmask.new_empty(words)
    _choose_kernel[(1,)](
        totals, popular, keep, words, N,
        MANY=MANY, POPULAR=len(popular), BLOCK=triton.next_power_of_2(words * 32), num_warps=16,
    )  # fmt: skip
    return keep


@triton.jit
def _row(
    table, rows, popular, width, stride_t, stride_tc, stride_r, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """rows[p] = table[popular[p]], or if ADD table[popular[p]] += rows[p], for BLOCK columns of row p."""
    p = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < width
    of_table = table + tl.load(popular + p) * stride_t + c.to(tl.int64) * stride_tc
    of_rows = rows + p * stride_r + c
    v = tl.load(of_table, mask=mask, other=0.0)
    if ADD:
        v = v.to(tl.float32) + tl.load(of_rows, mask=mask, other=0.0).to(tl.float32)
        tl.store(of_table, v.to(table.dtype.element_ty), mask=mask)
    else:
        tl.store(of_rows, v, mask=mask)


@relaunched
@triton.jit
def _rows_kernel(
    t0, r0, w0, st0, sc0, sr0, t1, r1, w1, st1, sc1, sr1, t2, r2, w2, st2, sc2, sr2, popular,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_row` for up to three tables."""
    which = tl.program_id(2)
    if which == 0:
        _row(t0, r0, popular, w0, st0, sc0, sr0, ADD, BLOCK)
    if t1 is not None and which == 1:
        _row(t1, r1, popular, w1, st1, sc1, sr1, ADD, BLOCK)
    if t2 is not None and which == 2:
        _row(t2, r2, popular, w2, st2, sc2, sr2, ADD, BLOCK)


def _launch_rows(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], popular: torch.Tensor, add: bool
) -> None:
    """rows = table[popular], or if `add` table[popular] += rows, for one to three pairs (table [N, *], rows [P, *])."""
    given: list[Any] = []
    for table, rows in pairs:
        given += [table, rows, rows.shape[1], *table.stride(), rows.stride(0)]
    given += [None, None, 1, 1, 1, 1] * (3 - len(pairs))
    widest = max(rows.shape[1] for _, rows in pairs)
    block = min(2048, triton.next_power_of_2(widest))
    _rows_kernel[(len(popular), triton.cdiv(widest, block), len(pairs))](
        *given, popular, ADD=add, BLOCK=block, num_warps=4 if block > 256 else 1
    )


@relaunched
@triton.jit
def _hidden_kernel(
    gate, popular, up, hidden, gates, M, N, P, THRESHOLD,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """hidden [M, P] = f(gate[:, popular]) * g(up), with up [M, P]; gates [M, P] = gate[:, popular] unless None."""
    m = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    mask = (m < M)[:, None] & (p < P)[None, :]
    n = tl.load(popular + p, mask=p < P, other=0)
    given = tl.load(gate + m[:, None] * N + n[None, :], mask=mask, other=0.0)
    g = given.to(tl.float32)
    at = m[:, None] * P + p[None, :]
    h = evaluate(g, F_STEPS)
    if up is not None:
        h = h * evaluate(tl.load(up + at, mask=mask, other=0.0).to(tl.float32), G_STEPS)
    tl.store(hidden + at, tl.where(g <= THRESHOLD, 0.0, h).to(hidden.dtype.element_ty), mask=mask)
    if gates is not None:
        tl.store(gates + at, given, mask=mask)


def product(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    table: torch.Tensor,
    popular: torch.Tensor,
    f: Program,
    g: Program,
    threshold: float,
    kept: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return the contribution of the popular neurons to y [M, D], fp32, from the gate projection [M, N].

    up [N, K], table [N, D]: the weights, one row per neuron. kept: buffers [M, P] that receive the neurons' gate and up
    projections; None if no backward needs them.
    """
    (M, N), P = gate.shape, len(popular)
    gates, u = kept or (None, None)
    down = table.new_empty(P, table.shape[1])
    pairs = [(table, down)]
    if up is not None:
        weight = up.new_empty(P, up.shape[1])
        pairs.append((up, weight))
    if up_bias is not None:
        bias = up_bias.new_empty(P, 1)
        pairs.append((up_bias[:, None], bias))
    _launch_rows(pairs, popular, add=False)
    if up is not None:
        u = x.new_empty(M, P) if u is None else u
        if up_bias is None:
            torch.mm(x, weight.t(), out=u)
        else:
            torch.addmm(bias[:, 0], x, weight.t(), out=u)
    hidden = x.new_empty(M, P)
    rows, columns = TILE
    _hidden_kernel[(triton.cdiv(M, rows), triton.cdiv(P, columns))](
        gate, popular, None if up is None else u, hidden, gates, M, N, P, threshold,
        F_STEPS=encode(f), G_STEPS=encode(g), BM=rows, BP=columns, num_warps=4,
    )  # fmt: skip
    return _product(hidden, down)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


@relaunched
@triton.jit
def _slopes_kernel(
    gates, ups, dh, count, d_both, M, P, THRESHOLD,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr, CAP: tl.constexpr,
    BM: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """d_both [M, P] or [M, 2 P] = the gradients of the popular neurons' projections; dh is overwritten with h. Both are
    zero in overflow rows."""
    m = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    mask = (m < M)[:, None] & (p < P)[None, :]
    at = m[:, None] * P + p[None, :]
    g = tl.load(gates + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(ups + at, mask=mask, other=0.0).to(tl.float32) if GATED else g
    gradient = tl.load(dh + at, mask=mask, other=0.0).to(tl.float32)
    dg, du, h = slopes(g, u, gradient, 0.0, 0.0, F_STEPS, G_STEPS, GATED)
    off = (g <= THRESHOLD) | (tl.load(count + m, mask=m < M, other=0) > CAP)[:, None]
    width = 2 * P if GATED else P
    to = d_both + m[:, None] * width + p[None, :]
    dtype = d_both.dtype.element_ty
    tl.store(to, tl.where(off, 0.0, dg).to(dtype), mask=mask)
    if GATED:
        tl.store(to + P, tl.where(off, 0.0, du).to(dtype), mask=mask)
    tl.store(dh + at, tl.where(off, 0.0, h).to(dtype), mask=mask)


class Gradients:
    """Contributions of the popular neurons to the gradients of x and of the weights.

    gates, ups: their projections [M, P]. count, cap: rows with count > cap are overflow rows and contribute nothing.
    weights: gate and up [N, K] and table [N, D], one row per neuron.
    """

    def __init__(
        self,
        dy: torch.Tensor,
        popular: torch.Tensor,
        gates: torch.Tensor,
        ups: torch.Tensor | None,
        weights: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
        count: torch.Tensor,
        cap: int,
        f: Program,
        g: Program,
        threshold: float,
    ) -> None:
        gate, up, table = weights
        M, P = gates.shape
        self._popular = popular
        tables = [gate] if up is None else [gate, up]
        self._weights = gate.new_empty(P * len(tables), gate.shape[1])
        down = table.new_empty(P, table.shape[1])
        parts = self._weights.split(P)
        _launch_rows([*zip(tables, parts), (table, down)], popular, add=False)
        self._hidden = torch.mm(dy, down.t())
        self._both = dy.new_empty(M, P * len(tables))
        rows, columns = TILE
        _slopes_kernel[(triton.cdiv(M, rows), triton.cdiv(P, columns))](
            gates, ups, self._hidden, count, self._both, M, P, threshold,
            F_STEPS=encode(f), G_STEPS=encode(g), GATED=up is not None, CAP=cap,
            BM=rows, BP=columns, num_warps=4,
        )  # fmt: skip

    def of_x(self) -> torch.Tensor:
        """Return the contribution to the gradient of x, [M, K], fp32."""
        return _product(self._both, self._weights)

    def add_to(
        self,
        x: torch.Tensor,
        dy: torch.Tensor,
        weights: Sequence[torch.Tensor | None],
        biases: Sequence[torch.Tensor | None],
        table: torch.Tensor | None,
    ) -> None:
        """Add the contributions to the gradients of gate and up [N, K], of their biases [N], and of down, [N, D]."""
        P, pairs = len(self._popular), []
        if any(w is not None for w in weights):
            sums = torch.mm(self._both.t(), x).split(P)
            pairs = [(w, rows) for w, rows in zip(weights, sums) if w is not None]
        if table is not None:
            pairs.append((table, torch.mm(self._hidden.t(), dy)))
        if pairs:
            _launch_rows(pairs, self._popular, add=True)
        for bias, part in zip(biases, self._both.split(P, 1)):
            if bias is not None:
                _launch_rows([(bias[:, None], part.sum(0)[:, None])], self._popular, add=True)
