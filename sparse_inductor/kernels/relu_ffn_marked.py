"""Packing by the marks of `relu_ffn_hopper`, pools of neurons included, in one pass: what `relu_ffn_packing` and
`relu_ffn_pool` make of the projection itself in three.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import relu_ffn_marked_ptx as ptx
from . import relu_ffn_pool as rows_pool
from .early import early, wait_for_previous
from .launch import relaunched
from .relu_ffn_packing import dense_row, pieces_of

__all__ = ["pack"]

# Rows up to which a warp has one row to pack, where there are no pools.
FEW = 8192
EACH = 4


@relaunched
@triton.jit(do_not_specialize=["M", "ROW"])
def _pack_kernel(
    marks, gate, count, index, value, state, rows_heavy, pieces, size, neuron, pool_value, M, ROW,
    BODY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program packs the rows of a block, as BODY says. Without pools there is nothing of theirs."""
    wait_for_previous(EARLY)
    if size is None:
        size, neuron, pool_value = count, count, count
    tl.inline_asm_elementwise(
        BODY, "=r,r,r,l,l,l,l,l,l,l,l,r,f,l,l,l",
        [
            tl.program_id(0), M, marks.to(tl.int64), gate.to(tl.int64), count.to(tl.int64), index.to(tl.int64),
            value.to(tl.int64), state.to(tl.int64), rows_heavy.to(tl.int64), pieces.to(tl.int64),
            tl.num_programs(0), ROW, size.to(tl.int64), neuron.to(tl.int64), pool_value.to(tl.int64),
        ],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def pack(
    gate: torch.Tensor,
    marks: torch.Tensor,
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows_heavy: torch.Tensor,
    state: torch.Tensor,
    pool: rows_pool.Pool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack rows from their gate projection [M, N], 16-bit and contiguous, and its marks: (state, pieces), as
    `relu_ffn_packing.pack`. Entries are in the order of the marks.

    rows_heavy: room for `listed` rows. state: of `new_state`, zeros. pool: becomes the pools of blocks with enough
    neurons in common, and what is packed are the strays.
    """
    M, N = gate.shape
    count, index, value = packed
    cap = index.shape[1]
    piece, most = pieces_of(M, cap, False)
    pieces = torch.empty(M * most, dtype=torch.int32, device=gate.device)
    wide = index.dtype == torch.int32
    if pool is None:
        rows, chosen = ptx.WARPS[False] * (1 if M <= FEW else EACH), (None, None, None)
        body = ptx.pack(marks.shape[1], N, cap, piece, most, wide, rows)
    else:
        rows, chosen = rows_pool.ROWS, (pool.size, pool.neuron, pool.value)
        size, entries = rows_pool.SIZE, rows_pool.ENTRIES
        body = ptx.pack(marks.shape[1], N, cap, piece, most, wide, rows, size, entries)
    _pack_kernel[(triton.cdiv(M, rows),)](
        marks, gate, count, index, value, state, rows_heavy, pieces, *chosen, M, dense_row(M, N),
        BODY=body, **early(gate), num_warps=ptx.WARPS[pool is not None],
    )  # fmt: skip
    return state, pieces
