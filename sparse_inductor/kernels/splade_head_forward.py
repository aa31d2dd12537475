"""Forward of the SPLADE head: logits = hidden @ weight.T + bias and their maximum over positions.

    values[b, v] = max(outer(peak[b, v]), fill[b])
    peak[b, v]   = max_s (hidden[b, s] . weight[v] + add[b, s]) + bias[v]

The logits [B, S, V] never reach memory. The vocabulary is on the M side of the matrix product and
the positions are on the N side, so that the maximum runs along the rows of an accumulator, which a
warp holds whole.

`forward` is the launcher. The kernel here is portable Triton and also runs in the interpreter;
`splade_head_hopper` is the same reduction for Hopper GPUs, where it applies.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program

from .epilogue import encode, evaluate, evaluate_rows
from .launch import relaunched
from .splade_head_positions import Positions

try:
    from . import splade_head_hopper as hopper
except ImportError:  # a Triton without Gluon, or with another Gluon
    hopper = None  # type: ignore[assignment]

__all__ = ["forward"]

NEG_INF = tl.constexpr(float("-inf"))

# Multiplications, a few microseconds of a GPU, up to which what `splade_head_hopper` saves is less than what the launch
# before it takes, which lists the positions.
FEW = 1 << 24


@dataclasses.dataclass(frozen=True)
class Tile:
    """One program's tile: VOCAB x POSITIONS logits, DEPTH hidden features at a time."""

    vocab: int
    positions: int
    depth: int
    warps: int
    stages: int


def _tile(hidden: torch.Tensor, inner: Program) -> Tile:
    """The tile for this dtype, program and machine."""
    if hidden.device.type != "cuda":
        return Tile(32, 32, 32, 4, 1)  # interpreter: small, so that small shapes take several tiles
    shared = torch.cuda.get_device_properties(hidden.device).shared_memory_per_block_optin
    if hidden.dtype == torch.float32:
        if torch.get_float32_matmul_precision() == "highest":
            return Tile(
                64, 64, 32, 4, 2
            )  # FMA units: 32 accumulators a thread leave room for operands
        return Tile(128, 128, 32, 8, 2)  # tf32: 4-byte operands, 64 KiB of stages
    if shared < 160 * 1024:  # consumer cards: 3 stages of 128 x 256 x 64 need 144 KiB
        return Tile(128, 128, 32, 8, 3)
    if (
        inner
    ):  # steps on every element need registers beside the accumulator: 64 of it a thread, not 128
        return Tile(128, 128, 64, 8, 3)
    # 128 x 256: at 16 bits the widest tile whose fp32 accumulator (128 registers a thread) still
    # fits 8 warps; the fewest operand bytes a flop.
    return Tile(128, 256, 64, 8, 3)


@relaunched
@triton.jit
def _select_kernel(per_element, order, count, B, WANT: tl.constexpr, BLOCK: tl.constexpr):
    """One program: order[:count] = the sequences b with per_element[b] == WANT, ascending.

    Reads B bytes, writes 4 bytes a selected sequence.
    """
    n = 0
    for b0 in range(0, B, BLOCK):
        b = b0 + tl.arange(0, BLOCK)
        take = (tl.load(per_element + b, mask=b < B, other=1 - WANT) != 0) == (WANT != 0)
        take = (take & (b < B)).to(tl.int32)
        tl.store(order + n + tl.cumsum(take, 0) - take, b, mask=take != 0)
        n += tl.sum(take, 0)
    tl.store(count, n)


@relaunched
@triton.jit(do_not_specialize=["B"])  # B == 1 would be a constexpr, which has no .to
def _peak_kernel(
    hidden, weight, bias, add, fill, rows, order, count,
    values, winner, peak,
    B, S, V, stride_hb, stride_hs, stride_hd, stride_wv, stride_wd, stride_ab, stride_as,
    D: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, HAS_FILL: tl.constexpr,
    SELECTED: tl.constexpr, WANT_WINNER: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BV: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A program owns [BV] columns of one sequence at a time: values, winner, peak [b, v0:v0 + BV].

    For each tile of BS positions that holds a kept one it reads BV * D elements of weight and
    BS * D of hidden, and for every tile 4 bytes of `add` a position; it writes BV values and, if
    wanted, BV winners and 4 * BV bytes of peak. Programs stride over the owned tiles, sequences
    fastest, so that programs running together share weight rows; `order[:count]` names the
    sequences (all of them unless SELECTED).
    """
    sequences = tl.load(count) if SELECTED else B
    blocks = tl.cdiv(V, BV)
    for tile in range(tl.program_id(0), sequences * blocks, tl.num_programs(0)):
        b = tile % sequences
        if SELECTED:
            b = tl.load(order + b)
        b = b.to(tl.int64)
        v = (tile // sequences) * BV + tl.arange(0, BV)
        in_v = v < V
        weight_rows = weight + v.to(tl.int64)[:, None] * stride_wv
        best = tl.full([BV], NEG_INF, tl.float32)
        where = tl.full([BV], 0, tl.int32)
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
                    acc = evaluate_rows(
                        acc, rows, B.to(tl.int64) * S, (b * S + s)[None, :], in_s[None, :], INNER
                    )
                if (tl.min(plus, 0) != 0.0) | (tl.max(plus, 0) != 0.0):
                    # A dropped position is dropped whatever it holds: NaN + -inf would be NaN.
                    acc = tl.where(plus[None, :] == NEG_INF, NEG_INF, acc + plus[None, :])
                top = tl.max(acc, 1)
                # tl.max skips NaN on a GPU; a NaN logit has to reach the value.
                nan = tl.max((acc != acc).to(tl.int32), 1) != 0
                top = tl.where(nan, float("nan"), top)
                if WANT_WINNER:
                    # ~(acc < top): the columns that equal the top; all of them where it is NaN.
                    first = tl.min(tl.where(acc < top[:, None], S, s[None, :]), 1)
                    where = tl.where(top > best, first, where)
                best = tl.maximum(best, top, propagate_nan=tl.PropagateNan.ALL)
        # Nothing kept: before the bias, which may be -inf itself and has no say in that.
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
            tl.store(peak + out, best, mask=in_v)


def _winner_dtype(S: int) -> torch.dtype:
    """The smallest signed integer that holds every position 0..S-1 and -1."""
    return torch.int8 if S <= 2**7 else torch.int16 if S <= 2**15 else torch.int32


def _select(per_element: torch.Tensor, want: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences whose `per_element` equals `want`, and their number, left on the device."""
    B = per_element.shape[0]
    order = torch.empty(B, device=per_element.device, dtype=torch.int32)
    count = torch.empty(1, device=per_element.device, dtype=torch.int32)
    _select_kernel[(1,)](per_element, order, count, B, WANT=int(want), BLOCK=1024)
    return order, count


def _launch(operands, outputs, outer, inner=(), rows=None, selected=None):
    """The portable kernel over all sequences, or over `selected`."""
    hidden, weight, bias, add, fill = operands
    values, winner, peak = outputs
    B, S, D = hidden.shape
    V = weight.shape[0]
    tile = _tile(hidden, inner)
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    tiles = B * triton.cdiv(V, tile.vocab)
    programs = tiles
    if hidden.device.type == "cuda":
        # Two programs a multiprocessor hide each other's epilogue where shared memory lets both in.
        programs = 2 * torch.cuda.get_device_properties(hidden.device).multi_processor_count
    order, count = (None, None) if selected is None else selected
    _peak_kernel[(min(tiles, programs),)](
        hidden, weight, bias, add, fill, rows, order, count, values, winner, peak,
        B, S, V, *hidden.stride(), *weight.stride(), *((0, 0) if add is None else add.stride()),
        D=D, INNER=encode(inner), OUTER=encode(outer),
        HAS_BIAS=bias is not None, HAS_ADD=add is not None, HAS_FILL=fill is not None,
        SELECTED=selected is not None, WANT_WINNER=winner is not None, PRECISION=precision,
        WIDEN=hidden.device.type != "cuda",  # the interpreter multiplies bf16 as integers
        BV=tile.vocab, BS=tile.positions, BD=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _reduce(operands, outputs, outer, skip=None, positions=None):
    """The path without `inner`, for all sequences or for those with skip[b] False."""
    hidden, weight = operands[:2]
    few = skip is None and hidden.numel() * weight.shape[0] <= FEW
    if hopper is not None and not few and hopper.applies(hidden, weight, outer):
        hopper.launch(operands, outputs, outer, skip, positions)
    else:
        _launch(operands, outputs, outer, selected=None if skip is None else _select(skip, False))


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    fill: torch.Tensor | None,
    outer: Program,
    *,
    inner: Program = (),
    rows: torch.Tensor | None = None,
    per_element: torch.Tensor | None = None,
    outer_fast: Program | None = None,
    out_dtype: torch.dtype | None = None,
    want_winner: bool = False,
    positions: Positions | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Values [B, V] of the SPLADE head and, if wanted, winner and peak [B, V].

    hidden [B, S, D] and weight [V, D], fp32, fp16 or bf16, any strides; bias [V] of any float dtype
    or None. Products accumulate in fp32; fp32 operands follow `torch.get_float32_matmul_precision`.

    add fp32 [B, S] or None: added to every logit of its position; -inf drops the position, and a
    tile of dropped positions is not computed. fill fp32 [B] or None: what the dropped positions
    contribute to the maximum.

    Without `inner`, peak[b, v] = max_s (acc + add[b, s]) + bias[v] and
    values = max(outer(peak), fill[b]), in `out_dtype` (hidden's by default). `outer` holds scalar
    steps only. A NaN logit gives a NaN value.

    With `inner`, the maximum is over y = inner(acc + bias[v]) + add[b, s], element by element; row
    step i reads rows[i] of fp32 [R, B, S]. Where a bool tensor per_element [B] is given, only its
    True sequences are computed so, and the others take the path without `inner`, with `outer_fast`
    for their outer program; both are launched and each skips the other's sequences, without a host
    synchronisation.

    positions: what `classify` says of `add`, if it is known already.

    winner: position of the first maximum, in the smallest signed integer that holds S; -1 where
    fill[b] exceeds outer(peak) or no position is kept. peak fp32. Both are None unless
    `want_winner`.

    Raises ValueError if per_element is given without outer_fast.
    """
    B, S, _ = hidden.shape
    V = weight.shape[0]
    if per_element is not None and outer_fast is None:
        raise ValueError(
            "per_element needs outer_fast, the program of the sequences that skip inner"
        )
    values = torch.empty(B, V, device=hidden.device, dtype=out_dtype or hidden.dtype)
    winner = peak = None
    if want_winner:
        winner = torch.empty(B, V, device=hidden.device, dtype=_winner_dtype(S))
        peak = torch.empty(B, V, device=hidden.device, dtype=torch.float32)
    if values.numel() == 0:
        return values, winner, peak
    bias, fill, rows = (t if t is None else t.contiguous() for t in (bias, fill, rows))
    operands = hidden, weight, bias, add, fill
    outputs = values, winner, peak
    with torch.cuda.device_of(hidden):
        if not inner:
            _reduce(operands, outputs, outer, None, positions)
        elif per_element is None:
            _launch(operands, outputs, outer, inner, rows)
        else:
            # Nearly all sequences of nearly all batches: first, so that the host is not waited for.
            _reduce(operands, outputs, outer_fast, per_element, positions)
            _launch(operands, outputs, outer, inner, rows, _select(per_element, True))
    return outputs
