"""Packing by the bitmask of `relu_ffn.hopper`: what `relu_ffn.packing` makes of the projection itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import relaunched
from ..common.pdl import pdl_options, wait_for_previous
from . import bitmask_ptx as ptx
from .packing import dense_row, pieces_of

# Rows up to which a block is a warp and has one row; (warps, rows of each) where there are more.
FEW = 4096
BLOCK = (8, 4)


@relaunched
@triton.jit(do_not_specialize=["M", "ROW"])
def _pack_kernel(
    bitmask, gate, count, index, value, state, rows_overflow, pieces, M, ROW,
    BODY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program packs the rows of a block, as BODY says."""
    wait_for_previous(PDL)
    if value is None:
        value = count
    tl.inline_asm_elementwise(
        BODY, "=r,r,r,l,l,l,l,l,l,l,l,r,f",
        [
            tl.program_id(0), M, bitmask.to(tl.int64), gate.to(tl.int64), count.to(tl.int64), index.to(tl.int64),
            value.to(tl.int64), state.to(tl.int64), rows_overflow.to(tl.int64), pieces.to(tl.int64),
            tl.num_programs(0), ROW,
        ],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def pack(
    gate: torch.Tensor,
    bitmask: torch.Tensor,
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    rows_overflow: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack rows from their gate projection [M, N], 16-bit and contiguous, and its bitmask: (state, pieces), as
    `relu_ffn.packing.pack`. Entries are in the order of the bitmask's bits.

    rows_overflow: room for `listed` rows. state: of `new_state`, zeros.
    """
    M, N = gate.shape
    count, index, value = packed
    cap = index.shape[1]
    piece, most = pieces_of(M, cap, False)
    pieces = torch.empty(M * most, dtype=torch.int32, device=gate.device)
    warps, each = (1, 1) if M <= FEW else BLOCK
    rows = warps * each
    wide, values = index.dtype == torch.int32, value is not None
    body = ptx.pack(bitmask.shape[1], N, cap, piece, most, wide, rows, warps, values)
    _pack_kernel[(triton.cdiv(M, rows),)](
        bitmask, gate, count, index, value, state, rows_overflow, pieces, M, dense_row(M, N),
        BODY=body, **pdl_options(gate), num_warps=warps,
    )  # fmt: skip
    return state, pieces
