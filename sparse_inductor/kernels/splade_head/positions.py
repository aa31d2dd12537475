"""Classification of the positions of a batch: `epilogue.plan.lower` as one kernel.

`classify` decides for every position, from the values of the row operands, whether it is kept, dropped
or neither, and summarises each sequence, so that the forward kernels read [B] instead of [B, S].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import ROW, Program, Step

from ..common.epilogue import _value, encode, row_arguments, row_operand
from ..common.launch import launch

# Positions per granule, the unit in which `splade_head.hopper` skips positions. A sequence wastes half a granule on
# average; smaller granules need more copies per stage.
GRANULE = tl.constexpr(32)
# Bits of a granule. KEPT: it has a kept position. PARTLY: it has a position that is dropped, is past the end, or has a
# non-zero number added.
KEPT = tl.constexpr(1)
PARTLY = tl.constexpr(2)
NEG_INF = tl.constexpr(float("-inf"))

# The program of a mask that is added to the logits.
ADDED: Program = (Step("row_add", row=0),)


@dataclasses.dataclass(frozen=True)
class Positions:
    """The positions of B sequences.

    add [B, S] fp32: -inf if the position is dropped, else the number that is added to its logits.
    fill [B] fp32: the largest value that dropped positions contribute, -inf if there are none.
    per_element [B] bool or None: sequences that need the general path.
    spans [B, parts, 4] int32: for each part of a sequence its first kept position (or 2**30), the end of its
        kept positions (or 0), their number, and whether a number other than 0 is added to one of them.
    kinds [B, granules] uint8: bits KEPT and PARTLY of each granule.
    """

    add: torch.Tensor
    fill: torch.Tensor
    per_element: torch.Tensor | None
    spans: torch.Tensor
    kinds: torch.Tensor


@triton.jit
def _finite(states, stride, wanted, words, STRIP: tl.constexpr, BW: tl.constexpr):
    """Whether the hidden states at pointers `states` [N], of `words` words, are finite; True where not `wanted`.

    STRIP: (mask of a word's exponents, their lowest bits). Adding the lowest bit to an exponent of all
    ones, which is inf or NaN, carries into the bit above.
    """
    carried = tl.zeros([wanted.shape[0], BW], tl.int32)
    if tl.max(wanted.to(tl.int32), 0) != 0:
        for w0 in range(0, words, BW):
            w = w0 + tl.arange(0, BW)
            bits = tl.load(
                states[:, None] + w[None, :] * stride,
                mask=wanted[:, None] & (w < words)[None, :], other=0,
            ).to(tl.int32)  # fmt: skip
            carried |= (bits & STRIP[0]) + STRIP[1]
    # The bit above an exponent is bit 31, and for 16-bit elements also bit 15, which is never set for fp32.
    return tl.max((carried >> 15) & 0x10001, 1) == 0


@triton.jit
def _classify_kernel(
    hidden, rows, strides, add, fill, other, spans, kinds,
    S, words, stride_hb, stride_hs, stride_hw,
    STEPS: tl.constexpr, SHIFTS: tl.constexpr, EXHAUSTIVE: tl.constexpr, STRIP: tl.constexpr,
    BLOCK: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """A program classifies BLOCK positions of a sequence, as `epilogue.plan.lower` does.

    The row steps before item SHIFTS of STEPS precede all other steps. A program reads the row operands
    and, for positions that are multiplied by 0, the hidden states as words. It writes 4 bytes of `add`
    per position, 1 byte per granule, and 21 more bytes.
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
            r = row_operand(rows, strides, b, s, inside, STEPS[i + 1])
            if STEPS[i] == "row_where":
                value = tl.where(r == 0.0, STEPS[i + 2], value)
                dropped = dropped | (r == 0.0)
            elif STEPS[i] == "row_mul":
                value = tl.where(dropped, value * r, 0.0)
                wanted = (r == 0.0) & (dropped == 0) & inside
                states = hidden + b * stride_hb + s.to(tl.int64) * stride_hs
                # inf * 0 and NaN * 0 are NaN: a position with such logits cannot be dropped.
                finite = _finite(states, stride_hw, wanted, words, STRIP, BW)
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
    kind = KEPT * some + PARTLY * (1 - plain)
    g = tl.arange(0, BLOCK // GRANULE)
    tl.store(kinds + part * (BLOCK // GRANULE) + g, kind.to(tl.uint8))


# Positions per program, and words of hidden states per step: 8 loads of 16 bytes per thread are in flight.
_BLOCK, _WORDS = 512, 32
# The exponent of a format and its lowest bit.
_EXPONENT = {
    torch.float32: (0x7F800000, 0x00800000),
    torch.float16: (0x7C00, 0x0400),
    torch.bfloat16: (0x7F80, 0x0080),
}


def _words(hidden: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return (hidden [B, S, D] as words [B, S, W] of 32 bits, or 16 if its strides require it; STRIP of `_finite`)."""
    exponent, lowest = _EXPONENT[hidden.dtype]
    if hidden.dtype == torch.float32:
        return hidden.view(torch.int32), (exponent, lowest)
    batch, token, feature = hidden.stride()
    even = hidden.shape[2] | batch | token | hidden.storage_offset()
    if feature == 1 and even % 2 == 0:
        return hidden.view(torch.int32), (exponent << 16 | exponent, lowest << 16 | lowest)
    return hidden.view(torch.int16), (exponent, lowest)


def classify(
    program: Program,
    operands: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    *,
    exhaustive: bool = True,
) -> Positions:
    """Classify the positions of hidden [B, S, D] by the values of operands [B, S], of any real or bool dtype.

    program: as for `epilogue.plan.lower`; its scalar steps are non-decreasing. exhaustive: no sequence
    can need the general path. Arithmetic is fp32.
    """
    B, S, _ = hidden.shape
    block = max(GRANULE.value, min(_BLOCK, 1 << (S - 1).bit_length()))
    parts = -(-S // block)

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, device=hidden.device, dtype=dtype)

    add, fill = empty(B, S), empty(B, parts)
    other = None if exhaustive else empty(B, parts, dtype=torch.bool)
    spans = empty(B, parts, 4, dtype=torch.int32)
    kinds = empty(B, parts * (block // GRANULE.value), dtype=torch.uint8)
    words, strip = _words(hidden)
    scalar = [i for i, step in enumerate(program) if step.fn not in ROW]
    args = (
        words, *row_arguments(operands),
        add, fill, None if other is None else other.view(torch.uint8), spans, kinds,
        S, words.shape[2], *words.stride(),
    )  # fmt: skip
    constants = {
        "STEPS": encode(program),
        "SHIFTS": 4 * (scalar[0] if scalar else len(program)),
        "EXHAUSTIVE": exhaustive,
        "STRIP": strip,
        "BLOCK": block,
        "BW": _WORDS,
    }
    launch(_classify_kernel, (B, parts), args, constants, num_warps=16)
    if parts == 1:
        return Positions(add, fill.view(B), None if other is None else other.view(B), spans, kinds)
    per_element = None if other is None else other.any(1)
    if per_element is not None and any(step.fn == "row_add" for step in program):
        # The general path adds the operand itself, in all parts of the sequence.
        add = torch.where(per_element[:, None] & (add != float("-inf")), 0.0, add)
    return Positions(add, fill.amax(1), per_element, spans, kinds)
