"""Weighted sums of a table's rows whose slices stay in shared memory, on Hopper GPUs.

A gathered row is read from L2 by every token that needs it, and L2 is what `relu_ffn_rows.weighted_rows` is bound by.
Here a multiprocessor holds 16 features of all neurons, and makes these features of all tokens: nothing is left to be
added up. What it is bound by is how many lines of shared memory it reads, and beside them the list of what to read,
which each multiprocessor reads whole.

Tokens are ranked by how many entries they have, BLOCK of them at a time, and taken by groups of eight in that order.
Entries of a group get *slots*: in a slot, a token has one entry at most, and entries of two tokens lie in different
banks of shared memory. (A group of rows of 30 entries has 1.29 times as many slots as would do without that.) Two slots
are a step, the 16 rows of the second operand of `mma.m16n8k16`; a *window* has up to 64 slots, for up to 48 entries of
each token. All of it is a function of the rows alone, so that sums are the same bits each time:

    order    [blocks, BLOCK] int32: tokens as they are ranked, -1 behind the last; rows that are not packed have no rank
    flags    [blocks] int32: whether the tokens of the block are summed here: they have enough entries, and no pools
    heads    [groups, 4] int32: steps of the group's first window; how many more it has; the first of them
    owners   [further windows] int32: the group
    steps    [further windows] int32: the steps
    records  [windows, 4, 256] int16: 4 chunks of 8 steps; first, for each slot of a step, row of the operand and step,
             the neuron's place in shared memory; then the values, by lane of a warp. The i-th of the further windows
             is window groups + i.

Until `values` puts them there, the places of the values hold which of its token's entries each is to be.
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
from .boxes import addressable
from .early import early, wait_for_previous
from .epilogue import encode, evaluate
from .launch import launch as launch_kernel
from .relu_ffn_packing import n_listed

__all__ = ["BLOCK", "Schedule", "applies"]

BLOCK = ptx.BLOCK
FEATURES = gl.constexpr(ptx.FEATURES)
# Rows of a table that a block copies at a time, 16 bytes a thread; and such tiles at most: 224 KiB.
TILE = gl.constexpr(512)
MOST_TILES = 14
# Three would be the 48 KiB that are given unasked, and what the PTX declares itself is more.
LEAST_TILES = 4
WARPS = 32
# Warps of a block that ranks tokens: it counts for each of them, in at most 48 KiB.
RANK_WARPS = 8
ROWS = tl.constexpr(ptx.BLOCK)
GROUPS = tl.constexpr(ptx.BLOCK // ptx.GROUP)
# Entries of a token, on average, from which on this is quicker than to gather.
LEAST = 8
# What an entry takes here, a turn of the GPU for each 16 features, in what gathering a feature for it does: 618 us for
# 865, at 65 536 tokens of 29 entries and 2 048 features.
TURN = 1463
# Windows whose values a program looks up at least, where there are many.
PROGRAMS = 4096


def applies(y: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether rows of table [N, D] are summed to y [M, D] this way: where this can, and is quicker than gathering."""
    if not y.is_cuda or y.element_size() != 2 or not y.dtype.is_floating_point:
        return False
    if torch.cuda.get_device_capability(y.device) != (9, 0) or not addressable(table):
        return False
    N, D = table.shape
    # 16 bytes are copied at a time, which Triton sees in a stride of 16 elements.
    return table.stride(0) % 16 == 0 and _pays(N, D, _multiprocessors(y))


def _multiprocessors(t: torch.Tensor) -> int:
    return torch.cuda.get_device_properties(t.device).multi_processor_count


def _grid(D: int, multiprocessors: int) -> tuple[int, int]:
    """(slices of the features, shares of the tokens)."""
    slices = D // ptx.FEATURES
    return slices, max(1, multiprocessors // max(1, slices))


def _pays(N: int, D: int, multiprocessors: int) -> bool:
    slices, shares = _grid(D, multiprocessors)
    turns = triton.cdiv(slices * shares, multiprocessors)
    tiles = triton.cdiv(N, TILE.value)
    return D % ptx.FEATURES == 0 and tiles <= MOST_TILES and TURN * turns / shares < 0.9 * D


@triton.jit(do_not_specialize=["M", "groups"])
def _rank_kernel(
    count, state, pool_size, order, flags, taken, heads, owners, M, groups,
    ASK: tl.constexpr, POOLS: tl.constexpr, BODY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program ranks a block of tokens. POOLS: pools of the rows of a block, unless that is 0."""
    wait_for_previous(EARLY)
    here = tl.full([], 1, tl.int32)
    if ASK:
        here = (n_listed(state) != M).to(tl.int32)
    if POOLS > 0:
        p = tl.program_id(0) * POOLS + tl.arange(0, POOLS)
        size = tl.load(pool_size + p, mask=p < tl.cdiv(M, ROWS // POOLS), other=0)
        here = tl.where(tl.max(size, 0) > 0, 0, here)
    tl.inline_asm_elementwise(
        BODY, "=r,r,l,r,r,l,l,l,l,l,r",
        [
            tl.program_id(0), count.to(tl.int64), M, here, order.to(tl.int64), flags.to(tl.int64),
            taken.to(tl.int64), heads.to(tl.int64), owners.to(tl.int64), groups,
        ],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["groups"])
def _schedule_kernel(
    taken, owners, heads, order, count, index, records, steps, flags, groups,
    WINDOWS: tl.constexpr, BODY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program gives the entries of WINDOWS windows their slots."""
    wait_for_previous(EARLY)
    tl.inline_asm_elementwise(
        BODY, "=r,r,l,l,l,l,l,l,l,l,r,l",
        [
            tl.program_id(0) * WINDOWS, taken.to(tl.int64), owners.to(tl.int64), heads.to(tl.int64),
            order.to(tl.int64), count.to(tl.int64), index.to(tl.int64), records.to(tl.int64), steps.to(tl.int64),
            groups, flags.to(tl.int64),
        ],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _window(w, groups, heads, owners, steps, flags):
    """(group, chunks that are used) of window w."""
    g = w
    if w >= groups:
        g = tl.load(owners + w - groups)
        used = tl.load(steps + w - groups)
    else:
        used = tl.load(heads + w * 4)
    return g, tl.where(tl.load(flags + g // GROUPS) != 0, (used + 7) // 8, 0)


@triton.jit(do_not_specialize=["groups"])
def _values_kernel(
    taken, owners, heads, order, steps, records, values, hidden, flags, groups,
    STEPS: tl.constexpr, CAP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program puts the values of a window, then of the next that is its own, where records say which they are.

    records and values are the same memory; 0 where there is no entry.
    """
    wait_for_previous(EARLY)
    e = tl.arange(0, 512)
    at = e // 128 * 256 + 128 + e % 128
    token = e % 128 // 16
    n = groups + tl.load(taken)
    for w in range(tl.program_id(0), n, tl.num_programs(0)):
        g, used = _window(w, groups, heads, owners, steps, flags)
        there = e // 128 < used
        m = tl.load(order + g * 8 + token)
        k = tl.load(records + w * 1024 + at, mask=there, other=-1).to(tl.int64)
        h = tl.load(hidden + m.to(tl.int64) * CAP + k, mask=k >= 0, other=0.0).to(tl.float32)
        h = tl.where(k >= 0, evaluate(h, STEPS), 0.0)
        tl.store(values + w * 1024 + at, h.to(values.dtype.element_ty), mask=there)


@gluon.jit(do_not_specialize=["N", "groups"])
def _sums_kernel(
    table, out, taken, order, heads, steps, records, bias, N, groups, stride_t, stride_o,
    SLICES: gl.constexpr, TILES: gl.constexpr, BODY: gl.constexpr,
):  # fmt: skip
    """A program makes 16 features of the sums of a share of the groups. Reads its slice of the table once."""
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
    names.wait_for_previous()
    if gl.load(taken + 1) > 0:
        for i in gl.static_range(TILES):
            n = gl.minimum(i * TILE + r, N - 1).to(gl.int64)
            rows = column[None, :] + (n * stride_t)[:, None]
            names.load_rows(held.index(i), rows)
        async_copy.commit_group()
        async_copy.wait_group(0)
        gl.inline_asm_elementwise(
            BODY, "=r,l,r,l,l,l,l,r,r,l",
            [
                (out + slice * FEATURES).to(gl.int64), stride_o * 2, order.to(gl.int64),
                heads.to(gl.int64), steps.to(gl.int64), records.to(gl.int64), groups, share,
                (bias + slice * FEATURES).to(gl.int64),
            ],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


class Schedule:
    """What is read for packed rows, and when."""

    def __init__(
        self, count: torch.Tensor, index: torch.Tensor, most: int, taken: torch.Tensor
    ) -> None:
        """most: entries of all rows that are ever packed. taken [2]: int32 zeros, for how many further windows and how
        many ranked blocks there are."""
        self._count, self._index, self._taken = count, index, taken
        M, cap = index.shape
        blocks = triton.cdiv(M, BLOCK)
        self._groups = blocks * BLOCK // ptx.GROUP
        # The tokens of a group have at least as many entries as those of the next.
        further = min(most, M * cap) // (ptx.GROUP * ptx.SPAN) + blocks * (cap // ptx.SPAN + 1)
        new = functools.partial(torch.empty, dtype=torch.int32, device=index.device)
        self.flags = new(blocks)
        self._order = new(blocks, BLOCK)
        self._heads = new(self._groups, 4)
        self._owners, self._steps = new(further), new(further)
        self._records = new(self._groups + further, 32 * ptx.SLOTS // 2, dtype=torch.int16)

    @property
    def done(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(flags, how many of them are set): what `relu_ffn_rows` takes."""
        return self.flags, self._taken[1:]

    def fill(
        self,
        state: torch.Tensor | None = None,
        pool_size: torch.Tensor | None = None,
        pool_rows: int = 0,
    ) -> None:
        """Launch what ranks tokens and gives their entries slots. state: of `pack`; where all rows take the dense path,
        nothing is made, nor for a block of which `pool_rows` rows have a pool."""
        M, cap = self._index.shape
        _rank_kernel[(len(self.flags),)](
            self._count, state, pool_size, self._order, self.flags, self._taken, self._heads, self._owners,
            M, self._groups,
            ASK=state is not None, POOLS=BLOCK // pool_rows if pool_rows else 0,
            BODY=ptx.rank(cap, LEAST, RANK_WARPS), EARLY=False, num_warps=RANK_WARPS,
        )  # fmt: skip
        _schedule_kernel[(triton.cdiv(len(self._records), ptx.WINDOWS),)](
            self._taken, self._owners, self._heads, self._order, self._count, self._index, self._records,
            self._steps, self.flags, self._groups,
            WINDOWS=ptx.WINDOWS, BODY=ptx.schedule(cap), **early(self._index), num_warps=1,
        )  # fmt: skip

    def sums(
        self,
        value: torch.Tensor,
        table: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        steps: Program = (),
    ) -> None:
        """out[m] = bias + sum_i steps(value[m, i]) * table[index[m, i]] for the rows of flagged blocks that are not
        heavy. value [M, CAP], table [N, D], out [M, D].

        Where a table's row is not finite, not only tokens that need it get NaN, as from a product with all of it."""
        records, cap = self._records, self._index.shape[1]
        _values_kernel[(min(len(records), PROGRAMS),)](
            self._taken, self._owners, self._heads, self._order, self._steps, records,
            records.view(value.dtype), value, self.flags, self._groups,
            STEPS=encode(steps), CAP=cap, **early(value), num_warps=4,
        )  # fmt: skip
        N, D = table.shape
        slices, shares = _grid(D, _multiprocessors(out))
        body = ptx.sums("bf16" if out.dtype == torch.bfloat16 else "f16", shares, bias is not None)
        args = (
            table, out, self._taken, self._order, self._heads, self._steps, records,
            table if bias is None else bias, N, self._groups, table.stride(0), out.stride(0),
        )  # fmt: skip
        constants = {
            "SLICES": slices, "TILES": max(LEAST_TILES, triton.cdiv(N, TILE.value)), "BODY": body,
        }  # fmt: skip
        options = {"launch_pdl": True, "maxnreg": 64}
        launch_kernel(_sums_kernel, (slices * shares,), args, constants, num_warps=WARPS, **options)
