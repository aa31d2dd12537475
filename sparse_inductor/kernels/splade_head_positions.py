"""Which positions of a batch count: `epilogue.plan.lower` as one kernel, and what a list of tiles needs to know.

`classify` decides for every position, on the values of the row operands, whether it is kept, dropped
or neither, and sums up each sequence, so that the forward kernels read [B] and not [B, S].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import ROW, Program, Step

from .epilogue import _value, encode

__all__ = ["ADDED", "GRANULE", "Positions", "classify"]

# Positions a granule, the unit in which `splade_head_hopper` skips them.
GRANULE = tl.constexpr(32)
# What a granule holds: a kept position; one that is not simply kept (dropped, moved, past the end).
KEPT = tl.constexpr(1)
MIXED = tl.constexpr(2)
NEG_INF = tl.constexpr(float("-inf"))

# The program of a mask that is already of the form "added to the logits".
ADDED: Program = (Step("row_add", row=0),)


@dataclasses.dataclass(frozen=True)
class Positions:
    """The positions of B sequences.

    add [B, S] fp32: -inf where dropped, else what is added to the logits.
    fill [B] fp32: the largest value that dropped positions contribute, -inf where there are none.
    per_element [B] bool or None: sequences that need the general path.
    rows [R, B, S] fp32 or None: the row operands, for the general path.
    spans [B, parts, 4] int32: of each part of a sequence its first kept position (or 2**30), one past
        the last (or 0), how many are kept, and whether anything but 0 is added to one of them.
    kinds [B, granules] uint8: KEPT and MIXED of each granule.
    """

    add: torch.Tensor
    fill: torch.Tensor
    per_element: torch.Tensor | None
    rows: torch.Tensor | None
    spans: torch.Tensor
    kinds: torch.Tensor


@triton.jit
def _finite(states, stride_hd, wanted, D, BD: tl.constexpr):
    """Whether the hidden states at pointers `states` [N] are finite; True where not `wanted`."""
    bad = tl.zeros(wanted.shape, tl.int32)
    if tl.max(wanted.to(tl.int32), 0) != 0:
        for d0 in range(0, D, BD):
            d = d0 + tl.arange(0, BD)
            h = tl.load(
                states[:, None] + d[None, :] * stride_hd,
                mask=wanted[:, None] & (d < D)[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            lost = 1 - (tl.abs(h) < float("inf")).to(tl.int32)
            bad = tl.maximum(bad, tl.max(lost, 1))
    return bad == 0


@triton.jit(do_not_specialize=["B"])  # B == 1 would be a constexpr, which has no .to
def _classify_kernel(
    hidden, operands, strides, add, fill, other, rows, spans, kinds,
    B, S, D, stride_hb, stride_hs, stride_hd,
    STEPS: tl.constexpr, SHIFTS: tl.constexpr, EXHAUSTIVE: tl.constexpr, WANT_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A program classifies BLOCK positions of a sequence, as `epilogue.plan.lower` does.

    The row steps before item SHIFTS of STEPS come before any other step. Reads the row operands and,
    where a position is multiplied by 0, its D hidden states; writes 4 bytes of `add` (and of each
    row if wanted) a position, a byte a granule and 21 bytes.
    """
    b = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = s < S
    shift = tl.zeros([BLOCK], tl.float32)
    value = tl.zeros([BLOCK], tl.float32)
    dropped = tl.zeros([BLOCK], tl.int1)
    general = tl.zeros([BLOCK], tl.int1)
    for i in tl.static_range(0, len(STEPS), 4):
        if STEPS[i + 1] < 0:
            value = _value(value, STEPS, i)
        else:
            at = b * strides[2 * STEPS[i + 1]] + s.to(tl.int64) * strides[2 * STEPS[i + 1] + 1]
            r = tl.load(operands[STEPS[i + 1]] + at, mask=inside, other=1).to(tl.float32)
            if WANT_ROWS:
                row = tl.full([], STEPS[i + 1], tl.int64)  # rows times B * S may pass 2**31
                tl.store(rows + (row * B + b) * S + s, r, mask=inside)
            if STEPS[i] == "row_where":
                value = tl.where(r == 0.0, STEPS[i + 2], value)
                dropped = dropped | (r == 0.0)
            elif STEPS[i] == "row_mul":
                value = tl.where(dropped, value * r, 0.0)
                wanted = (r == 0.0) & (dropped == 0) & inside
                states = hidden + b * stride_hb + s.to(tl.int64) * stride_hs
                # A logit that is not finite times 0 is NaN: that position cannot be dropped.
                finite = _finite(states, stride_hd, wanted, D, BD)
                dropped = dropped | ((r == 0.0) & finite)
                general = general | (r != 1.0)
            else:
                gone = r == NEG_INF
                value = tl.where(gone, r, value + r)
                dropped = dropped | gone
                if i < SHIFTS:
                    shift += r
                else:
                    general = general | (r != 0.0)
    part = b * tl.num_programs(1) + tl.program_id(1)
    lowest = tl.where(dropped & inside, value, NEG_INF)
    most = tl.max(lowest, 0)
    # tl.max skips NaN on a GPU.
    most = tl.where(tl.max((lowest != lowest).to(tl.int32), 0) != 0, float("nan"), most)
    tl.store(fill + part, most)
    if not EXHAUSTIVE:
        found = tl.max((general & (dropped == 0) & inside).to(tl.int32), 0)
        tl.store(other + part, found.to(tl.uint8))
        shift = tl.where(found != 0, 0.0, shift)
    tl.store(add + b * S + s, tl.where(dropped, NEG_INF, shift), mask=inside)
    kept = (dropped == 0) & inside
    one = kept.to(tl.int32)
    moved = (kept & (shift != 0.0)).to(tl.int32)
    tl.store(spans + part * 4, tl.min(tl.where(kept, s, 2**30), 0))
    tl.store(spans + part * 4 + 1, tl.max(tl.where(kept, s + 1, 0), 0))
    tl.store(spans + part * 4 + 2, tl.sum(one, 0))
    tl.store(spans + part * 4 + 3, tl.max(moved, 0))
    some = tl.max(tl.reshape(one, [BLOCK // GRANULE, GRANULE]), 1)
    plain = tl.min(tl.reshape(one - moved, [BLOCK // GRANULE, GRANULE]), 1)
    kind = KEPT * some + MIXED * (1 - plain)
    g = tl.arange(0, BLOCK // GRANULE)
    tl.store(kinds + part * (BLOCK // GRANULE) + g, kind.to(tl.uint8))


# Positions a program, and features at a time: 8 loads of 16 bytes a thread in flight, and registers
# for two programs a multiprocessor.
_BLOCK, _DEPTH = 512, 32


def classify(
    program: Program,
    operands: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    *,
    exhaustive: bool = True,
    want_rows: bool = False,
) -> Positions:
    """Classify the positions of hidden [B, S, D] by the values of operands [B, S], of any real or bool dtype.

    `program` as in `epilogue.plan.lower`, whose scalar steps are non-decreasing. `exhaustive`: no
    sequence can need the general path. Arithmetic is fp32.
    """
    B, S, D = hidden.shape
    block = max(GRANULE.value, min(_BLOCK, 1 << (S - 1).bit_length()))
    parts = -(-S // block)

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, device=hidden.device, dtype=dtype)

    add, fill = empty(B, S), empty(B, parts)
    other = None if exhaustive else empty(B, parts, dtype=torch.bool)
    rows = empty(len(operands), B, S) if want_rows else None
    spans = empty(B, parts, 4, dtype=torch.int32)
    kinds = empty(B, parts * (block // GRANULE.value), dtype=torch.uint8)
    scalar = [i for i, step in enumerate(program) if step.fn not in ROW]
    _classify_kernel[(B, parts)](
        hidden,
        tuple(r.view(torch.uint8) if r.dtype == torch.bool else r for r in operands),
        tuple(stride for r in operands for stride in r.stride()),
        add, fill, None if other is None else other.view(torch.uint8), rows, spans, kinds,
        B, S, D, *hidden.stride(),
        STEPS=encode(program), SHIFTS=4 * (scalar[0] if scalar else len(program)),
        EXHAUSTIVE=exhaustive, WANT_ROWS=want_rows, BLOCK=block, BD=_DEPTH, num_warps=8,
    )  # fmt: skip
    if parts == 1:
        return Positions(
            add, fill.view(B), None if other is None else other.view(B), rows, spans, kinds
        )
    per_element = None if other is None else other.any(1)
    if per_element is not None and any(step.fn == "row_add" for step in program):
        # The general path adds it itself, in every part of the sequence.
        add = torch.where(per_element[:, None] & (add != float("-inf")), 0.0, add)
    return Positions(add, fill.amax(1), per_element, rows, spans, kinds)
