"""Dot products of packed rows with a table whose slices stay in shared memory, on Hopper GPUs.

A gathered row is read from L2 by every token that needs it, and L2 is what `relu_ffn_dots.dots` is bound by. Here a
multiprocessor holds 128 features of every PARTS-th neuron, as much as its shared memory takes, and passes over all
tokens; what the slices of the features make of an entry is added up after that. (By the last slice to end, it is one
and the same that ends last each time, and the later for it: 148 us at 8 192 tokens for 91 and 6.)

Tokens are taken by groups of eight. The entries of a group whose neurons are in one part stand in *octets*:

    heads    [parts, groups] int32: the first octet of a group's and, in the low bits, how many there are
    records  [octets, 8] int16: the row in the part, neuron // PARTS, and above it which token of the group; entry k of
             an octet is the number 2 (k % 4) + k // 4
    places   [octets, 8] int32: where the result goes; -1 where an octet is not full

Groups with few entries have no octets. They are listed, in `alone` [groups] int32, and left to `relu_ffn_dots`.

Tensor cores multiply four entries at a time by the group's eight tokens, of which one is wanted: there is nothing that
tokens drawn on their own could share, and reading shared memory is the bound all the same.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sparse_inductor.epilogue.steps import Program

from . import gluon_names as names
from . import relu_ffn_ptx as ptx
from .boxes import addressable, sliceable
from .early import early, wait_for_previous
from .epilogue import encode
from .launch import launch as launch_kernel
from .launch import multiprocessors, relaunched
from .relu_ffn_dots import hidden_of, put_slopes
from .relu_ffn_packing import n_listed

__all__ = ["Lists", "Plan", "dots", "gradients", "plan"]

FEATURES = gl.constexpr(ptx.FEATURES)
# Rows of a table that a block copies at a time, 16 bytes a thread; and such tiles at most: 224 KiB.
TILE = gl.constexpr(64)
MOST_TILES = 14
# Three would be the 48 KiB that are given unasked, and what the PTX declares itself is more.
LEAST_TILES = 4
WARPS = 32
# Groups a run, at most, and runs a warp at least.
RUN = 8
RUNS = 4
# Partial sums that a program adds up at a time.
SUMS = 4096


class Plan(NamedTuple):
    """How a table is cut up: slices of 128 features; parts of the neurons, `tiles` tiles of rows each; and shares of
    the tokens, where there are fewer slices and parts than multiprocessors."""

    slices: int
    parts: int
    tiles: int
    shares: int


@functools.lru_cache(maxsize=256)
def _plan(K: int, N: int, programs: int) -> Plan | None:
    slices = K // ptx.FEATURES
    best, found = 1e30, None
    for parts in range(4, ptx.MOST_PARTS + 1, 4):
        tiles = max(LEAST_TILES, -(-N // (parts * TILE.value)))
        if tiles > MOST_TILES:
            continue
        blocks = slices * parts
        shares = max(1, programs // blocks)
        turns = -(-blocks * shares // programs) / shares
        # Wavefronts of shared memory a group of tokens with 32 entries each; half of an octet is empty.
        cost = turns * (32 + 20 * (32 / parts + 0.44))
        if cost < best:
            best, found = cost, Plan(slices, parts, tiles, shares)
    # What to gather for a group takes, in the same measure.
    return found if best < 0.093 * K else None


def plan(x: torch.Tensor, table: torch.Tensor) -> Plan | None:
    """How to multiply tokens x [M, K] by rows of table [N, K]; None where this cannot, or gathering is quicker."""
    if not sliceable(x, table) or not addressable(x) or x.shape[1] % ptx.FEATURES:
        return None
    return _plan(x.shape[1], len(table), multiprocessors(x.device))


@relaunched
@triton.jit(do_not_specialize=["groups", "M"])
def _arrange_kernel(
    count, index, state, octets, heads, records, places, alone, groups, M,
    ASK: tl.constexpr, BODY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program arranges the entries of a group of tokens, or leaves it alone. Groups take octets in no certain order,
    and so do entries places in them; the result of each is the same wherever it stands."""
    wait_for_previous(EARLY)
    if ASK and n_listed(state) == M:
        return
    tl.inline_asm_elementwise(
        BODY, "=r,r,l,l,l,l,l,l,r,r,l",
        [
            tl.program_id(0), count.to(tl.int64), index.to(tl.int64), octets.to(tl.int64), heads.to(tl.int64),
            records.to(tl.int64), places.to(tl.int64), groups, M, alone.to(tl.int64),
        ],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


class Lists:
    """The entries of packed rows, by groups and parts."""

    def __init__(
        self,
        count: torch.Tensor,
        index: torch.Tensor,
        made: Plan,
        most: int,
        octets: torch.Tensor,
    ) -> None:
        """most: entries of all rows that are ever packed. octets [2]: int32 zeros, for how many octets there are, and
        how many groups are left alone."""
        self.plan, self.octets = made, octets
        self._count, self._index = count, index
        M, cap = index.shape
        self.groups = -(-M // ptx.GROUP)
        room = min(cap * M, most) // 8 + self.groups * made.parts + 1
        new = functools.partial(torch.empty, dtype=torch.int32, device=index.device)
        self.heads = new(made.parts, self.groups)
        self.alone = new(self.groups)
        self.records = new(room, 8, dtype=torch.int16)
        self.places = new(room, 8)
        self.partial = new(room, made.slices, 8, dtype=torch.float32)

    @property
    def rest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(octets, alone): what `relu_ffn_dots` takes."""
        return self.octets, self.alone

    def fill(self, state: torch.Tensor | None = None) -> None:
        """Launch what makes the lists. state: of `pack`; where all rows take the dense path, nothing is made."""
        M, cap = self._index.shape
        _arrange_kernel[(self.groups,)](
            self._count, self._index, state, self.octets, self.heads, self.records, self.places, self.alone,
            self.groups, M,
            ASK=state is not None, BODY=ptx.arrange(self.plan.parts, cap), **early(self._index),
            num_warps=ptx.ARRANGE_WARPS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "N", "groups", "run"])
def _dots_kernel(
    x, table, octets, heads, records, partial,
    M, N, groups, run, stride_x, stride_t,
    SLICES: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr, BODY: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """A program multiplies tokens by a slice of a part of the table.

    Reads the slice once, and of every group of tokens with entries in the part the slice's features; for an octet, 16
    lines of shared memory, and 28 wavefronts in all. FIRST: the table is there before the kernel in front ends.
    """
    names.let_next_start()
    slice = gl.program_id(0) % SLICES
    part = gl.program_id(0) // SLICES % PARTS
    share = gl.program_id(0) // (SLICES * PARTS)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [32, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    held = gl.allocate_shared_memory(table.dtype.element_ty, [TILES, TILE, FEATURES], plain)
    r = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    k = gl.arange(0, FEATURES, gl.SliceLayout(0, layout))
    if not FIRST:
        names.wait_for_previous()
    column = table + slice * FEATURES + k
    for i in gl.static_range(TILES):
        n = gl.minimum((i * TILE + r) * PARTS + part, N - 1).to(gl.int64)
        rows = column[None, :] + (n * stride_t)[:, None]
        names.load_rows(held.index(i), rows)
    async_copy.commit_group()
    if FIRST:
        names.wait_for_previous()
    some = gl.load(octets) > 0
    async_copy.wait_group(0)
    if some:
        gl.inline_asm_elementwise(
            BODY, "=r,l,r,r,l,r,l,l,r,r",
            [
                (x + slice * FEATURES).to(gl.int64), stride_x * 2, M - 1,
                (heads + part * groups).to(gl.int64), groups, records.to(gl.int64),
                (partial + slice * 8).to(gl.int64), run, share,
            ],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def _products(
    x: torch.Tensor, table: torch.Tensor, lists: Lists, first: bool
) -> tuple[dict[str, int], int]:
    """Fill `lists.partial`: (sizes of the kernels that add it up, their programs)."""
    made = lists.plan
    body = ptx.dots(ptx.element(x), made.slices, made.shares)
    run = max(1, min(RUN, lists.groups // (RUNS * WARPS * made.shares)))
    args = (
        x, table, lists.octets, lists.heads, lists.records, lists.partial,
        len(x), len(table), lists.groups, run, x.stride(0), table.stride(0),
    )  # fmt: skip
    constants = {
        "SLICES": made.slices, "PARTS": made.parts, "TILES": made.tiles, "BODY": body, "FIRST": first,
    }  # fmt: skip
    programs = made.slices * made.parts * made.shares
    options = {"launch_pdl": True, "maxnreg": 64}
    launch_kernel(_dots_kernel, (programs,), args, constants, num_warps=WARPS, **options)
    wide = triton.next_power_of_2(made.slices)
    block = max(1, SUMS // (8 * wide))
    sizes = {"SLICES": made.slices, "WIDE": wide, "BLOCK": block}
    return sizes, min(8 * multiprocessors(x.device), triton.cdiv(len(lists.records), block))


@triton.jit
def _sums(partial, places, o, n, SLICES: tl.constexpr, WIDE: tl.constexpr):
    """(sums of the slices of octets o, the places of their entries, which there are), flat."""
    s = tl.arange(0, WIDE)
    k = tl.arange(0, 8)
    at = (o.to(tl.int64)[:, None, None] * SLICES + s[None, :, None]) * 8 + k[None, None, :]
    mask = (o < n)[:, None, None] & (s < SLICES)[None, :, None] & (k >= 0)[None, None, :]
    place = tl.load(places + o[:, None] * 8 + k[None, :], mask=(o < n)[:, None], other=-1)
    total = tl.sum(tl.load(partial + at, mask=mask, other=0.0), 1)
    return total, place, place >= 0


@relaunched
@triton.jit
def _hidden_kernel(
    octets, partial, places, index, gates, bias, ups, out,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr,
    SLICES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """h = f(gate) * g(x . up + bias) of every entry, BLOCK octets at a time."""
    wait_for_previous(EARLY)
    n = tl.load(octets)
    for o0 in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        u, at, there = _sums(partial, places, o0 + tl.arange(0, BLOCK), n, SLICES, WIDE)
        g = tl.load(gates + at, mask=there, other=0.0).to(tl.float32)
        id = at
        if HAS_BIAS:
            id = tl.load(index + at, mask=there, other=0).to(tl.int32)
        h = hidden_of(g, u, there, id, at, bias, ups, F_STEPS, G_STEPS, HAS_BIAS, KEEP)
        tl.store(out + at, h.to(out.dtype.element_ty), mask=there)


@relaunched
@triton.jit
def _slopes_kernel(
    octets, partial, places, gates, ups, d_gate, d_up, hidden, d_stats, stride_s,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr, STATS: tl.constexpr, CAP: tl.constexpr,
    SLICES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The gradients of both projections, and h, of every entry from that of h, BLOCK octets at a time."""
    wait_for_previous(EARLY)
    n = tl.load(octets)
    for o0 in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        dh, at, there = _sums(partial, places, o0 + tl.arange(0, BLOCK), n, SLICES, WIDE)
        g = tl.load(gates + at, mask=there, other=0.0).to(tl.float32)
        u = tl.load(ups + at, mask=there, other=0.0).to(tl.float32) if GATED else g
        da_extra = tl.zeros_like(dh)
        dh_extra = tl.zeros_like(dh)
        if STATS:
            da_extra = tl.load(d_stats + at // CAP, mask=there, other=0.0)
            dh_extra = tl.load(d_stats + 2 * stride_s + at // CAP, mask=there, other=0.0)
        put_slopes(
            g, u, dh, da_extra, dh_extra, d_gate, d_up, hidden, at, there, F_STEPS, G_STEPS, GATED
        )  # fmt: skip


def dots(
    x: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor | None,
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ups: torch.Tensor | None,
    lists: Lists,
    out: torch.Tensor,
    f: Program,
    g: Program,
) -> None:
    """h of the packed rows into `out` [M, CAP], and the up projection itself into `ups`, where given. Nothing that ran
    just before writes the table."""
    _, index, gates = packed
    sizes, programs = _products(x, table, lists, first=True)
    _hidden_kernel[(programs,)](
        lists.octets, lists.partial, lists.places, index, gates, bias, ups, out,
        F_STEPS=encode(f), G_STEPS=encode(g), HAS_BIAS=bias is not None, KEEP=ups is not None,
        **sizes, **early(x), num_warps=4,
    )  # fmt: skip


def gradients(
    dy: torch.Tensor,
    table: torch.Tensor,
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ups: torch.Tensor | None,
    d_stats: torch.Tensor | None,
    lists: Lists,
    out: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    f: Program,
    g: Program,
) -> None:
    """(d gate, d up, h) of the packed rows into `out`, each [M, CAP]; `table` is the down projection as [N, D]."""
    _, index, gates = packed
    sizes, programs = _products(dy, table, lists, first=False)
    _slopes_kernel[(programs,)](
        lists.octets, lists.partial, lists.places, gates, ups, *out, d_stats,
        0 if d_stats is None else d_stats.stride(0),
        F_STEPS=encode(f), G_STEPS=encode(g), GATED=ups is not None, STATS=d_stats is not None, CAP=index.shape[1],
        **sizes, **early(dy), num_warps=4,
    )  # fmt: skip
