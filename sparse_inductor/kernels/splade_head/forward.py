"""Forward of the SPLADE head: logits = hidden @ weight.T + bias and their maximum over positions.

    values[b, v] = max(outer(peak[b, v]), fill[b])
    peak[b, v]   = max_s (hidden[b, s] . weight[v] + add[b, s]) + bias[v]

With steps `inner` before the maximum, max_s inner(hidden[b, s] . weight[v] + bias[v]) replaces peak[b, v] in the first
equation, and peak[b, v] is the logit of the maximum. The logits [B, S, V] are never written to memory. The vocabulary
is the M dimension of the matrix product and the positions are the N dimension, so that the maximum runs along the rows
of an accumulator. One warp holds each row.

`forward` launches the kernels. The kernel here is portable Triton and also runs in the interpreter;
`splade_head.hopper` is the same reduction for Hopper GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program

from ..common.epilogue import encode, evaluate, evaluate_rows, row_arguments
from ..common.launch import relaunched, sm_count
from ..common.tiles import sizes_of
from .positions import Positions

try:
    from . import hopper
except ImportError:  # a Triton without Gluon, or with another Gluon
    hopper = None  # type: ignore[assignment]

NEG_INF = tl.constexpr(float("-inf"))

# The portable kernel is used up to this number of multiplications. `splade_head.hopper` would save less time than its
# additional launch takes, which lists the positions.
FEW = 1 << 24
# Flags of sequences that a program loads at a time; most batches have fewer sequences.
_FLAGS = 1024


@dataclasses.dataclass(frozen=True)
class Tile:
    """One program's tile: VOCAB x POSITIONS logits, DEPTH hidden features at a time."""

    vocab: int
    positions: int
    depth: int
    warps: int
    stages: int
    # Whether steps on every element process a quarter of the positions at a time: the accumulator of a wgmma or mma
    # takes half of the registers, and steps on all of it at once would spill.
    quarters: bool = True


def _tile(hidden: torch.Tensor, inner: Program) -> Tile:
    """Return the tile for this dtype, program and GPU."""
    if hidden.device.type != "cuda":
        return Tile(32, 32, 32, 4, 1)  # interpreter: small, so that small shapes take several tiles
    facts = ["steps"] if inner else []
    if hidden.dtype == torch.float32:
        facts += ["fp32", "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"]
    found: dict[str, Any] = sizes_of("splade_head", hidden.device, 0, *facts)
    return Tile(**found, quarters="ieee" not in facts)


@triton.jit
def _wanted(flags, b, B, WANT: tl.constexpr):
    """Return 1 for each sequence b with flag WANT, else 0."""
    return (tl.load(flags + b, mask=b < B, other=1 - WANT) == WANT).to(tl.int32)


@triton.jit
def _how_many(flags, B, WANT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of sequences with flag WANT. Reads B bytes."""
    n = 0
    for b0 in range(0, B, BLOCK):
        n += tl.sum(_wanted(flags, b0 + tl.arange(0, BLOCK), B, WANT), 0)
    return n


@triton.jit
def _nth(flags, n, B, WANT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the n-th sequence, counted from 0, with flag WANT. It must exist. Reads up to B bytes."""
    b = tl.arange(0, BLOCK)
    wanted = _wanted(flags, b, B, WANT)
    here = tl.sum(wanted, 0)
    while n >= here:
        n -= here
        b += BLOCK
        wanted = _wanted(flags, b, B, WANT)
        here = tl.sum(wanted, 0)
    return tl.sum(tl.where((wanted != 0) & (tl.cumsum(wanted, 0) == n + 1), b, 0), 0)


@triton.jit
def _halves(x):
    """Return the halves [A, n] of a tensor [A, 2n]. No data moves if a thread holds both."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@triton.jit
def _quarters(x):
    """Return the quarters [A, n] of a tensor [A, 4n]."""
    left, right = _halves(x)
    q0, q1 = _halves(left)
    q2, q3 = _halves(right)
    return q0, q1, q2, q3


@triton.jit
def _best_of(
    z,
    s,
    kept,
    best,
    where,
    won,
    b,
    S,
    rows,
    row_strides,
    INNER: tl.constexpr,
    WANT_WINNER: tl.constexpr,
):
    """Update (maximum, its position, its logit) with INNER of the logits z [BV, n] of positions s [n]."""
    y = evaluate_rows(z, rows, row_strides, b, s[None, :], kept[None, :], INNER)
    y = tl.where(kept[None, :], y, NEG_INF)
    top = _top(y)
    if WANT_WINNER:
        first = _first(y, top, s, S)
        logit = tl.sum(tl.where(s[None, :] == first[:, None], z, 0.0), 1)
        where = tl.where(top > best, first, where)
        won = tl.where(top > best, logit, won)
    return tl.maximum(best, top, propagate_nan=tl.PropagateNan.ALL), where, won


@triton.jit
def _top(x):
    """Return the maximum of each row, or NaN if the row contains NaN, which tl.max ignores on a GPU."""
    top = tl.max(x, 1)
    return tl.where(tl.max((x != x).to(tl.int32), 1) != 0, float("nan"), top)


@triton.jit
def _first(x, top, s, S):
    """Return the first position of each row's maximum."""
    # ~(x < top) selects the columns that equal the maximum, and all columns if it is NaN.
    return tl.min(tl.where(x < top[:, None], S, s[None, :]), 1)


@relaunched
@triton.jit(do_not_specialize=["B"])  # B == 1 would be a constexpr, which has no .to
def _peak_kernel(
    hidden, weight, bias, add, fill, rows, row_strides, flags,
    values, winner, peak,
    B, S, V, stride_hb, stride_hs, stride_hd, stride_wv, stride_wd, stride_ab, stride_as,
    D: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, HAS_FILL: tl.constexpr,
    SELECTED: tl.constexpr, WANT: tl.constexpr, BLOCK: tl.constexpr,
    WANT_WINNER: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BV: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, QUARTERS: tl.constexpr,
):  # fmt: skip
    """A program computes BV columns of one sequence at a time: values, winner, peak [b, v0:v0 + BV].

    For each tile of BS positions with at least one kept position it reads BV * D elements of weight and BS * D elements
    of hidden; for every tile it reads 4 bytes of `add` per position. It writes BV values and, if wanted, BV winners and
    4 * BV bytes of peak. Programs stride over the tiles, with sequences as the fastest dimension, so that programs that
    run at the same time share weight rows. If SELECTED, only sequences with flags[b] == WANT are computed; each program
    finds them itself.
    """
    sequences = _how_many(flags, B, WANT, BLOCK) if SELECTED else B
    blocks = tl.cdiv(V, BV)
    for tile in range(tl.program_id(0), sequences * blocks, tl.num_programs(0)):
        b = tile % sequences
        if SELECTED:  # a constexpr, so not one condition with the next  # noqa: SIM102
            if sequences < B:
                b = _nth(flags, b, B, WANT, BLOCK)
        b = b.to(tl.int64)
        v = (tile // sequences) * BV + tl.arange(0, BV)
        in_v = v < V
        weight_rows = weight + v.to(tl.int64)[:, None] * stride_wv
        best = tl.full([BV], NEG_INF, tl.float32)
        where = tl.full([BV], 0, tl.int32)
        won = best  # the logit that gave the maximum
        if HAS_BIAS:
            shift = tl.load(bias + v, mask=in_v, other=0.0).to(tl.float32)
        for s0 in range(0, S, BS):
            s = s0 + tl.arange(0, BS)
            in_s = s < S
            plus = tl.where(in_s, 0.0, NEG_INF)
            if HAS_ADD:
                plus = tl.load(add + b * stride_ab + s * stride_as, mask=in_s, other=NEG_INF)
            if tl.max(plus, 0) != NEG_INF:
                hidden_rows = hidden + b * stride_hb + s.to(tl.int64)[None, :] * stride_hs
                acc = tl.zeros([BV, BS], tl.float32)
                for d0 in range(0, D, BD):
                    d = d0 + tl.arange(0, BD)
                    if D % BD == 0:
                        w = tl.load(
                            weight_rows + d[None, :] * stride_wd, mask=in_v[:, None], other=0.0
                        )
                        h = tl.load(
                            hidden_rows + d[:, None] * stride_hd, mask=in_s[None, :], other=0.0
                        )
                    else:
                        w = tl.load(
                            weight_rows + d[None, :] * stride_wd,
                            mask=in_v[:, None] & (d < D)[None, :], other=0.0,
                        )  # fmt: skip
                        h = tl.load(
                            hidden_rows + d[:, None] * stride_hd,
                            mask=in_s[None, :] & (d < D)[:, None], other=0.0,
                        )  # fmt: skip
                    if WIDEN:
                        w, h = w.to(tl.float32), h.to(tl.float32)
                    acc = tl.dot(w, h, acc, input_precision=PRECISION)
                if len(INNER) > 0:
                    if HAS_BIAS:
                        acc += shift[:, None]
                    parts = _quarters(acc) if QUARTERS else (acc,)
                    for i in tl.static_range(len(parts)):
                        t = s0 + i * (BS // len(parts)) + tl.arange(0, BS // len(parts))
                        kept = t < S
                        if HAS_ADD:
                            to = add + b * stride_ab + t * stride_as
                            kept = tl.load(to, mask=kept, other=NEG_INF) != NEG_INF
                        if tl.max(kept.to(tl.int32), 0) != 0:
                            best, where, won = _best_of(
                                parts[i], t, kept, best, where, won, b, S, rows, row_strides,
                                INNER, WANT_WINNER,
                            )  # fmt: skip
                else:
                    if (tl.min(plus, 0) != 0.0) | (tl.max(plus, 0) != 0.0):
                        # A dropped position stays dropped even if its logit is NaN: NaN + -inf would be NaN.
                        acc = tl.where(plus[None, :] == NEG_INF, NEG_INF, acc + plus[None, :])
                    top = _top(acc)
                    if WANT_WINNER:
                        where = tl.where(top > best, _first(acc, top, s, S), where)
                    best = tl.maximum(best, top, propagate_nan=tl.PropagateNan.ALL)
        # No position is kept. This is tested before the bias is added, because the bias may be -inf.
        none = best == NEG_INF
        if HAS_BIAS and len(INNER) == 0:
            best += shift
        y = evaluate(best, OUTER)
        lost = none | (best == NEG_INF)
        if HAS_FILL:
            floor = tl.load(fill + b)
            lost = lost | (floor > y)
            y = tl.where(none, floor, tl.maximum(y, floor, propagate_nan=tl.PropagateNan.ALL))
        out = b * V + v
        tl.store(values + out, y.to(values.dtype.element_ty), mask=in_v)
        if WANT_WINNER:
            tl.store(winner + out, tl.where(lost, -1, where).to(winner.dtype.element_ty), mask=in_v)
            if len(INNER) > 0:
                best = tl.where(best != best, best, won)
            tl.store(peak + out, best, mask=in_v)


def _launch(operands, outputs, outer, inner=(), rows=(), flags=None, want=False):
    """Launch the portable kernel for all sequences, or for sequences with flags[b] == want."""
    hidden, weight, bias, add, fill = operands
    values, winner, peak = outputs
    B, S, D = hidden.shape
    V = weight.shape[0]
    tile = _tile(hidden, inner)
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    tiles = B * triton.cdiv(V, tile.vocab)
    programs = tiles
    if hidden.device.type == "cuda":
        # Two programs per SM, if they fit its shared memory, hide each other's epilogue.
        programs = 2 * sm_count(hidden.device)
    _peak_kernel[(min(tiles, programs),)](
        hidden, weight, bias, add, fill, *row_arguments(rows),
        None if flags is None else flags.view(torch.uint8), values, winner, peak,
        B, S, V, *hidden.stride(), *weight.stride(), *((0, 0) if add is None else add.stride()),
        D=D, INNER=encode(inner), OUTER=encode(outer),
        HAS_BIAS=bias is not None, HAS_ADD=add is not None, HAS_FILL=fill is not None,
        SELECTED=flags is not None, WANT=int(want), BLOCK=_FLAGS,
        WANT_WINNER=winner is not None, PRECISION=precision,
        WIDEN=hidden.device.type != "cuda",  # the interpreter multiplies bf16 as integers
        BV=tile.vocab, BS=tile.positions, BD=tile.depth, QUARTERS=tile.quarters,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _reduce(operands, outputs, outer, skip=None, positions=None):
    """Run the path without `inner` for all sequences, or for sequences with skip[b] == False."""
    hidden, weight = operands[:2]
    few = hidden.numel() * weight.shape[0] <= FEW
    if hopper is not None and not few and hopper.applies(hidden, weight, outer):
        hopper.launch(operands, outputs, outer, skip, positions)
    else:
        _launch(operands, outputs, outer, flags=skip, want=False)


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    fill: torch.Tensor | None,
    outer: Program,
    *,
    inner: Program = (),
    rows: Sequence[torch.Tensor] = (),
    per_element: torch.Tensor | None = None,
    outer_fast: Program | None = None,
    out_dtype: torch.dtype | None = None,
    winner_dtype: torch.dtype | None = None,
    positions: Positions | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return values [B, V] of the SPLADE head and, if wanted, winner and peak [B, V].

    hidden [B, S, D] and weight [V, D], fp32, fp16 or bf16, any strides; bias [V] of any float dtype
    or None. Products accumulate in fp32; fp32 operands follow `torch.get_float32_matmul_precision`.

    add fp32 [B, S] or None: added to every logit of its position; -inf drops the position, and a
    tile of dropped positions is not computed. fill fp32 [B] or None: the value that dropped positions
    contribute to the maximum.

    Without `inner`, peak[b, v] = max_s (acc + add[b, s]) + bias[v] and
    values = max(outer(peak), fill[b]), in `out_dtype` (hidden's by default). `outer` contains
    only scalar steps. A NaN logit gives a NaN value.

    With `inner`, values are max(outer(y), fill[b]) of the maximum y = max_s inner(acc + bias[v]),
    element by element; `add` only drops positions. peak is the logit acc + bias[v] that gave the
    maximum, or NaN if the maximum is NaN. A row step reads its operand in rows, each [B, S] of any real
    or bool dtype and any strides. With a bool tensor per_element [B], only its True sequences are
    computed this way. The others take the path without `inner`, with `outer_fast` as their outer
    program. Both kernels are launched and skip each other's sequences, without a host synchronisation.

    positions: the result of `classify` for `add`, if available.

    winner: position of the first maximum, in `winner_dtype`, a signed integer that holds S - 1; -1 where
    fill[b] exceeds the value or no position is kept. peak fp32. Both are None without a
    `winner_dtype`.

    Raises ValueError if per_element is given without outer_fast.
    """
    B, V = hidden.shape[0], weight.shape[0]
    if per_element is not None and outer_fast is None:
        raise ValueError(
            "per_element needs outer_fast, the program of the sequences that skip inner"
        )
    values = torch.empty(B, V, device=hidden.device, dtype=out_dtype or hidden.dtype)
    winner = peak = None
    if winner_dtype is not None:
        winner = torch.empty(B, V, device=hidden.device, dtype=winner_dtype)
        peak = torch.empty(B, V, device=hidden.device, dtype=torch.float32)
    if values.numel() == 0:
        return values, winner, peak
    bias, fill = (t if t is None else t.contiguous() for t in (bias, fill))
    operands = hidden, weight, bias, add, fill
    outputs = values, winner, peak
    with torch.cuda.device_of(hidden):
        if not inner:
            _reduce(operands, outputs, outer, None, positions)
        elif per_element is None:
            _launch(operands, outputs, outer, inner, rows)
        else:
            # Launched first: it computes nearly all sequences of nearly all batches while the host launches the other
            # kernel.
            _reduce(operands, outputs, outer_fast, per_element, positions)
            _launch(operands, outputs, outer, inner, rows, per_element, True)
    return outputs
