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
from .launch import multiprocessors, relaunched
from .relu_ffn_hopper import Marks
from .relu_ffn_packing import dense_row, pieces_of

__all__ = ["pack"]

# Rows up to which a block without pools is a warp and has one row; (warps, rows of each) where there are more.
FEW = 4096
BLOCK = (8, 4)
# Warps of a block with pools: where each has a multiprocessor for itself, and where they share them.
POOL_WARPS = 32
POOL_WARPS_MANY = 16
# Blocks that share the rows of one, if each has a multiprocessor for itself.
PARTS = 2


def _blocks(words: int, blocks: int, multiprocessors: int) -> tuple[int, int]:
    """(warps of a block, blocks that share the rows of one) for pools of so many blocks; a word of marks a thread."""
    many = blocks > multiprocessors and words <= 32 * POOL_WARPS_MANY
    return (
        POOL_WARPS_MANY if many else POOL_WARPS,
        PARTS if PARTS * blocks <= multiprocessors else 1,
    )


@relaunched
@triton.jit(do_not_specialize=["M", "ROW"])
def _pack_kernel(
    marks, gate, count, index, value, state, rows_heavy, pieces, size, neuron, pool_value, M, ROW,
    BODY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program packs the rows of a block, as BODY says. Without pools there is nothing of theirs."""
    wait_for_previous(EARLY)
    if value is None:
        value = count
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
    marks: Marks,
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    rows_heavy: torch.Tensor,
    state: torch.Tensor,
    pool: rows_pool.Pool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack rows from their gate projection [M, N], 16-bit and contiguous, and its marks: (state, pieces), as
    `relu_ffn_packing.pack`. Entries are in the order of the marks' bits.

    rows_heavy: room for `listed` rows. state: of `new_state`, zeros. pool: becomes the pools of blocks with enough
    neurons in common, and what is packed are the strays.
    """
    M, N = gate.shape
    count, index, value = packed
    cap = index.shape[1]
    piece, most = pieces_of(M, cap, False)
    pieces = torch.empty(M * most, dtype=torch.int32, device=gate.device)
    parts, values = 1, value is not None
    words, by_quad = marks
    made = (words.shape[1], by_quad, N, cap, piece, most, index.dtype == torch.int32)
    if pool is None:
        chosen = (None, None, None)
        warps, each = (1, 1) if M <= FEW else BLOCK
        rows = warps * each
        body = ptx.pack(*made, rows, warps, values=values)
    else:
        warps, parts = _blocks(words.shape[1], pool.blocks, multiprocessors(gate.device))
        rows, chosen = rows_pool.ROWS, (pool.size, pool.neuron, pool.value)
        body = ptx.pack(*made, rows, warps, rows_pool.SIZE, rows_pool.ENTRIES, parts, values)
    _pack_kernel[(triton.cdiv(M, rows) * parts,)](
        words, gate, count, index, value, state, rows_heavy, pieces, *chosen, M, dense_row(M, N),
        BODY=body, **early(gate), num_warps=warps,
    )  # fmt: skip
    return state, pieces
