"""Weighted sums of a table's rows whose slices stay in shared memory, on Hopper GPUs.

A gathered row is read from L2 by every token that needs it, and L2 is what `relu_ffn_rows.weighted_rows` is bound by.
Here a multiprocessor holds 16 features of all neurons, and makes these features of all tokens: nothing is left to be
added up. What it is bound by is how many lines of shared memory it reads, and beside them the lists of what to read,
which each multiprocessor reads whole.

Tokens are ranked by how many entries they have, BLOCK of them at a time, and taken by groups of eight in that order.
Their entries get *places*, at each of which a token has one or none. Eight rows of the table are one read of shared
memory if they lie in different banks, as neurons do that differ modulo 8; so places are given such that those of a
place are of different classes, as far as that is simple (1.37 reads for one, with 30 entries a row). All of it is a
function of the rows alone, so that sums are the same bits each time.

    flags    [blocks] int32: whether the tokens of the block are summed here: they have enough entries
    tokens   [groups, 8] int32: -1 behind the last; rows that are not packed have no rank. Bit 30 says that the token's
             rows have a pool, whose part of the sums is there already.
    heads    [groups, 2] int32: the group's first turn, a turn being 16 places; and how many places it has
    lists    [turns, 32, 2, 4] int16: by lane of a warp, neurons as places in shared memory, and values

Until `put` puts them there, the places of the values hold which of its token's entries each is to be, or -1.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sparse_inductor.epilogue.steps import Program

from . import gluon_names as names
from . import relu_ffn_sums_ptx as ptx
from .boxes import sliceable
from .early import early, wait_for_previous
from .epilogue import encode, evaluate
from .launch import launch as launch_kernel
from .launch import multiprocessors, relaunched
from .relu_ffn_packing import n_listed
from .relu_ffn_ptx import element

__all__ = ["BLOCK", "Lists", "applies"]

BLOCK = ptx.BLOCK
FEATURES = gl.constexpr(ptx.FEATURES)
# Rows of a table that a block copies at a time, 16 bytes a thread; and such tiles at most: 224 KiB.
TILE = gl.constexpr(512)
MOST_TILES = 14
# Three would be the 48 KiB that are given unasked, and what the PTX declares itself is more.
LEAST_TILES = 4
WARPS = 32
SHARES = tl.constexpr(ptx.SHARES)
POOLED = tl.constexpr(ptx.POOLED)
# Entries of a token, on average, from which on this is quicker than to gather (H200: with 10 it takes 5 % more of the
# whole block at 8 192 and 65 536 tokens, with 17 it saves 2 to 3 %).
LEAST = 12
# What an entry takes here, a turn of the GPU for each 16 features, in what gathering a feature for it does: 590 us for
# 907, at 65 536 tokens of 30 entries and 2 048 features.
TURN = 1340


def applies(y: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether rows of table [N, D] are summed to y [M, D] this way: where this can, and is quicker than gathering."""
    N, D = table.shape
    return sliceable(y, table) and _pays(N, D, multiprocessors(y.device))


def _grid(D: int, multiprocessors: int) -> tuple[int, int]:
    """(slices of the features, shares of the tokens)."""
    slices = D // ptx.FEATURES
    return slices, max(1, multiprocessors // max(1, slices))


def _pays(N: int, D: int, multiprocessors: int) -> bool:
    slices, shares = _grid(D, multiprocessors)
    turns = triton.cdiv(slices * shares, multiprocessors)
    tiles = triton.cdiv(N, TILE.value)
    return D % ptx.FEATURES == 0 and tiles <= MOST_TILES and TURN * turns / shares < 0.9 * D


@relaunched
@triton.jit(do_not_specialize=["M"])
def _arrange_kernel(
    count, state, pool_size, index, tokens, heads, lists, flags, summed, M,
    ASK: tl.constexpr, POOL_ROWS: tl.constexpr, BODY: tl.constexpr,
):  # fmt: skip
    """A program makes a share of a block's lists. pool_size: of each POOL_ROWS rows, unless that is 0."""
    block = tl.program_id(0) // SHARES
    here = tl.full([], 1, tl.int32)
    if ASK:
        here = (n_listed(state) != M).to(tl.int32)
    sizes = pool_size if POOL_ROWS > 0 else count
    tl.inline_asm_elementwise(
        BODY, "=r,r,l,r,r,l,l,l,l,l,l,r,l",
        [
            block, count.to(tl.int64), M, here, index.to(tl.int64), tokens.to(tl.int64),
            heads.to(tl.int64), lists.to(tl.int64), flags.to(tl.int64), summed.to(tl.int64),
            tl.program_id(0) % SHARES, sizes.to(tl.int64),
        ],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@relaunched
@triton.jit
def _values_kernel(
    tokens, heads, lists, values, hidden, STEPS: tl.constexpr, CAP: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """A program puts the values of a group where its lists say which they are; 0 where there is none.

    lists and values are the same memory, and the lists have been made when this starts; the values have been when it
    has waited.
    """
    g = tl.program_id(0)
    first = tl.load(heads + 2 * g).to(tl.int64)
    places = tl.load(heads + 2 * g + 1)
    e = tl.arange(0, 512)
    token = e % 128 // 16
    m = (tl.load(tokens + g * 8 + token) & (POOLED - 1)).to(tl.int64)
    at = first * 256 + e // 128 * 256 + e % 128 // 4 * 8 + 4 + e % 4
    k = tl.load(lists + at, mask=e // 128 * 16 < places, other=-1).to(tl.int64)
    wait_for_previous(EARLY)
    for t in range(0, places, 64):
        h = tl.load(hidden + m * CAP + k, mask=k >= 0, other=0.0).to(tl.float32)
        h = tl.where(k >= 0, evaluate(h, STEPS), 0.0)
        tl.store(values + at, h.to(values.dtype.element_ty), mask=t + e // 128 * 16 < places)
        at += 1024
        k = tl.load(lists + at, mask=t + 64 + e // 128 * 16 < places, other=-1).to(tl.int64)


@gluon.jit(do_not_specialize=["N", "groups"])
def _sums_kernel(
    table, out, summed, tokens, heads, lists, bias, N, groups, stride_t, stride_o,
    SLICES: gl.constexpr, TILES: gl.constexpr, BODY: gl.constexpr,
):  # fmt: skip
    """A program makes 16 features of the sums of a share of the groups. Reads its slice of the table once.

    The table, and whether there is something to sum, are there when this starts; the values are when it has waited.
    """
    names.let_next_start()
    slice = gl.program_id(0) % SLICES
    share = gl.program_id(0) // SLICES
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [32, 1], [1, 0])
    # The halves of rows 4 to 7 of each eight change places, so that eight rows in a line have halves in all banks.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, order=[1, 0])
    held = gl.allocate_shared_memory(table.dtype.element_ty, [TILES, TILE, FEATURES], swizzled)
    r = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    k = gl.arange(0, FEATURES, gl.SliceLayout(0, layout))
    column = table + slice * FEATURES + k
    some = gl.load(summed) > 0
    if some:
        for i in gl.static_range(TILES):
            n = gl.minimum(i * TILE + r, N - 1).to(gl.int64)
            rows = column[None, :] + (n * stride_t)[:, None]
            names.load_rows(held.index(i), rows)
        async_copy.commit_group()
    names.wait_for_previous()
    if some:
        async_copy.wait_group(0)
        gl.inline_asm_elementwise(
            BODY, "=r,l,r,l,l,l,r,r,l",
            [
                (out + slice * FEATURES).to(gl.int64), stride_o * 2, tokens.to(gl.int64), heads.to(gl.int64),
                lists.to(gl.int64), groups, share, (bias + slice * FEATURES).to(gl.int64),
            ],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


class Lists:
    """What is read for packed rows, and when."""

    def __init__(self, count: torch.Tensor, index: torch.Tensor, summed: torch.Tensor) -> None:
        """count [M] and index [M, CAP] int16 of packed rows, CAP a multiple of 4; summed [1]: int32 zero, for how many
        blocks are summed here."""
        self._count, self._index, self._summed = count, index, summed
        self._pools = False
        blocks = triton.cdiv(len(count), BLOCK)
        groups = blocks * BLOCK // ptx.GROUP
        new = functools.partial(torch.empty, dtype=torch.int32, device=count.device)
        self._flags = new(blocks)
        self._tokens = new(groups, ptx.GROUP)
        self._heads = new(groups, 2)
        self._lists = new(groups * ptx.TURNS, 2 * ptx.GROUP * ptx.TURN, dtype=torch.int16)

    @property
    def done(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(flags, how many of them are set): what `relu_ffn_rows` takes."""
        return self._flags, self._summed

    def fill(
        self,
        state: torch.Tensor | None = None,
        pool_size: torch.Tensor | None = None,
        pool_rows: int = 0,
    ) -> None:
        """Launch what makes the lists. state: of `pack`; where all rows take the dense path, nothing is made.
        pool_size: of each `pool_rows` rows, a power of two; where it is not 0, `sums` adds to what is there."""
        M, cap = self._index.shape
        self._pools = pool_rows > 0
        _arrange_kernel[(len(self._flags) * ptx.SHARES,)](
            self._count, state, pool_size, self._index, self._tokens, self._heads, self._lists, self._flags,
            self._summed, M,
            ASK=state is not None, POOL_ROWS=pool_rows, BODY=ptx.arrange(cap, LEAST, pool_rows), num_warps=ptx.WARPS,
        )  # fmt: skip

    def put(self, value: torch.Tensor, steps: Program = ()) -> None:
        """Launch what puts steps(value) [M, CAP] into the lists, which `fill` has made."""
        lists = self._lists
        _values_kernel[(len(self._heads),)](
            self._tokens, self._heads, lists, lists.view(value.dtype), value,
            STEPS=encode(steps), CAP=value.shape[1], **early(value), num_warps=4,
        )  # fmt: skip

    def sums(self, table: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """out[m] = bias + sum_i value[m, i] * table[index[m, i]] for the rows of flagged blocks that are not heavy, by
        the values that were put by the launch before. table [N, D], there before that one starts; out [M, D].

        Where a table's row is not finite, not only tokens that need it get NaN, as from a product with all of it."""
        N, D = table.shape
        slices, shares = _grid(D, multiprocessors(out.device))
        body = ptx.sums(element(out), shares, bias is not None, self._pools)
        args = (
            table, out, self._summed, self._tokens, self._heads, self._lists, table if bias is None else bias,
            N, len(self._heads), table.stride(0), out.stride(0),
        )  # fmt: skip
        constants = {
            "SLICES": slices, "TILES": max(LEAST_TILES, triton.cdiv(N, TILE.value)), "BODY": body,
        }  # fmt: skip
        options = {"launch_pdl": True, "maxnreg": 64}
        launch_kernel(_sums_kernel, (slices * shares,), args, constants, num_warps=WARPS, **options)
