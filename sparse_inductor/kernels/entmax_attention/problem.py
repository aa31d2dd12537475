"""Kernel arguments of entmax attention, and the computation of the scores of one tile.

Each kernel takes `Operands`, arguments of its own, and `Fixed`, the constants on which its code depends.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common.tiles import sizes_of
from .tau import GENERAL, HARDWARE, NEG_INF, POS_INF, SPREAD_NAN, exponent_kind

# The lowest fp32 number.
LOWEST = tl.constexpr(-3.4028234663852886e38)


# --- Arguments of a kernel --------------------------------------------------------------------------------------------


class Strided(NamedTuple):
    """A four-dimensional tensor and its strides. alpha has a single column, so its column stride is unused."""

    start: Any
    batch: int
    head: int
    row: int
    column: int

    @classmethod
    def of(cls, t: torch.Tensor) -> Strided:
        return cls(t, *t.stride())


class Operands(NamedTuple):
    """The operands of every kernel; absent ones are None. G query heads share a key head."""

    q: Strided
    k: Strided
    v: Strided
    bias: Strided | None
    mask: Strided | None
    alpha: Strided | None
    query_lengths: torch.Tensor | None
    key_lengths: torch.Tensor | None
    H: int
    G: int
    Lq: int
    Lk: int
    am1: float
    scale: float
    fill: float
    last: None = None
    """A constant of the outer tuple. Without one, if all optional operands are present, Triton 3.6 takes strides of 1
    in the nested tuples for None."""


class Fixed(NamedTuple):
    """The constants of a kernel, each a `tl.constexpr`. BD and BDV are D and DV rounded up to powers of two."""

    D: int
    DV: int
    BD: int
    BDV: int
    KIND: int
    HAS_BIAS: bool
    HAS_MASK: bool
    BIAS_ROWS: bool
    """BIAS_ROWS and MASK_ROWS: whether the bias, or the mask, may differ between rows of a head."""
    MASK_ROWS: bool
    HAS_ALPHA: bool
    CAUSAL: bool
    FINITE_FILL: bool
    ADDED: bool
    LANES: int
    PRECISION: str
    INTERPRETED: bool
    """Whether Triton's interpreter runs the kernel. It multiplies bf16 as integers and supports neither PTX nor TMA."""
    FALLBACK_ROWS: int
    """Rows per block of `FallbackRows.earlier`; 0 if the kernel computes all rows."""
    BM: int
    BN: int
    STAGES: int
    IN_PLACE: bool


class FallbackRows(NamedTuple):
    """The rows that the block passes compute, ascending: rows int32 [B, H, Lq].

    earlier int32 [B, H, blocks + 1]: the number of these rows before each block of `block` rows, and finally the total.
    """

    rows: torch.Tensor
    earlier: torch.Tensor
    block: int


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile of `rows` queries x `keys` keys, launch options, and the limit of registers per thread (None: 255).

    in_place: each thread loads bias and mask entry by entry for its own scores, so that the scores keep the
    accumulator's layout. Otherwise loads are wide, and are pipelined in a loop with several stages.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    in_place: bool = False

    def options(self) -> dict[str, int]:
        """Return the launch options."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, **limit}


def tile_for(problem: Problem, kernel: str) -> Tile:
    """Return the tile of a block kernel: "threshold", "output", "solve", "rows" (dq), "keys" (dk, dv) or "bias"."""
    if problem.interpreted:
        return Tile(16, 16, 4, 1)  # small, so that small shapes take several tiles
    width = max(problem.width, problem.value_width)
    facts = ["busy" if any(problem.by_row) else "not busy"]
    facts += ["fp32"] if problem.q.dtype == torch.float32 else []
    facts += ["alpha"] if problem.alpha is not None else []
    found: dict[str, Any] = sizes_of(f"entmax_attention/{kernel}", problem.q.device, width, *facts)
    return Tile(**found)


def _block(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call: q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv] and the terms of the scores.

    bias, mask and alpha are views expanded to [B, H, Lq, Lk] (alpha [B, H, Lq, 1]), so that size-1
    dimensions have stride 0.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    alpha: torch.Tensor | None
    query_lengths: torch.Tensor | None
    key_lengths: torch.Tensor | None
    alpha_value: float
    scale: float
    fill: float
    causal: bool
    added: bool

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        alpha: torch.Tensor | None,
        **keywords: Any,
    ) -> Problem:
        B, H, Lq, _ = q.shape
        full = (B, H, Lq, k.shape[2])
        return cls(
            q, k, v,
            None if bias is None else bias.expand(full),
            None if mask is None else mask.expand(full).view(torch.uint8),
            None if alpha is None else alpha.expand(B, H, Lq, 1),
            **keywords,
        )  # fmt: skip

    @property
    def width(self) -> int:
        return self.q.shape[3]

    @property
    def value_width(self) -> int:
        return self.v.shape[3]

    @property
    def interpreted(self) -> bool:
        return self.q.device.type != "cuda"

    @property
    def heads(self) -> int:
        """B * H."""
        return self.q.shape[0] * self.q.shape[1]

    @property
    def drops(self) -> bool:
        """Whether the score of some key may be replaced by `fill`."""
        return self.causal or self.mask is not None

    @property
    def finite_fill(self) -> bool:
        return self.drops and self.fill != -math.inf

    @property
    def added_fill(self) -> bool:
        """Whether dropped keys, whose score is `fill`, receive a gradient."""
        return self.finite_fill and self.added

    @property
    def lanes(self) -> int:
        """Number of `lane_sums` per row in the block kernels.

        It is 1 with a mask or a bias: a row of scores may then be spread over two warps, as in a mask whose row stride
        is not a multiple of 16 bytes, and Triton 3.6 reduces parts of rows across warps wrongly.
        """
        busy = self.mask is not None or self.bias is not None
        return 4 if self.q.element_size() == 2 and not busy else 1

    @property
    def by_row(self) -> tuple[bool, bool]:
        """Whether the bias, and whether the mask, varies from row to row. Key padding does not."""
        bias, mask = (t is not None and t.stride(2) != 0 for t in (self.bias, self.mask))
        return bias, mask

    @property
    def kind(self) -> int:
        """The KIND argument of `powers`."""
        general = HARDWARE if self.q.is_cuda and self.q.element_size() == 2 else GENERAL
        return exponent_kind(None if self.alpha is not None else self.alpha_value, general)

    def operands(self) -> Operands:
        """The operands of every kernel."""

        def strided(t: torch.Tensor | None) -> Strided | None:
            return None if t is None else Strided.of(t)

        H, Lq = self.q.shape[1:3]
        return Operands(
            Strided.of(self.q), Strided.of(self.k), Strided.of(self.v),
            strided(self.bias), strided(self.mask), strided(self.alpha),
            self.query_lengths, self.key_lengths, H, H // self.k.shape[1], Lq, self.k.shape[2],
            float(self.alpha_value - 1.0), float(self.scale), float(self.fill),
        )  # fmt: skip

    def fixed(
        self, tile: Tile, fallback: FallbackRows | None = None, lanes: int | None = None
    ) -> Fixed:
        """Return the constants of a kernel with this tile, for all rows or the fallback rows."""
        exact = self.q.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
        made = Fixed(
            self.width,
            self.value_width,
            _block(self.width),
            _block(self.value_width),
            self.kind,
            self.bias is not None,
            self.mask is not None,
            *self.by_row,
            self.alpha is not None,
            self.causal,
            self.finite_fill,
            self.added_fill,
            self.lanes if lanes is None else lanes,
            "ieee" if exact else "tf32",
            self.interpreted,
            0 if fallback is None else fallback.block,
            tile.rows,
            tile.keys,
            tile.stages,
            tile.in_place,
        )
        return Fixed(*map(tl.constexpr, made))


# --- Heads and rows ---------------------------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """One head's part of an operand."""

    start: Any
    row: Any
    column: Any


class Head(NamedTuple):
    """One head's operands, the number of its rows in memory, and the ends of its valid rows and keys.

    Absent operands are replaced by q's matrix, since a Triton function cannot return None; `Fixed` tells them apart.
    """

    q: Matrix
    k: Matrix
    v: Matrix
    bias: Matrix
    mask: Matrix
    alpha: Matrix
    Lq: Any
    last_row: Any
    last_key: Any
    diagonal: Any
    """In causal attention, row i sees the keys up to i + diagonal."""
    am1: Any
    scale: Any
    fill: Any


class Row(NamedTuple):
    """Constants of each row: scale * (alpha - 1), alpha - 1, the reference, and x of dropped keys."""

    factor: Any
    am1: Any
    reference: Any
    fill: Any


@triton.jit
def matrix(t, b, h):
    """Return the matrix of head h of batch element b of a Strided; b and h are 64-bit."""
    return Matrix(t.start + (b * t.batch + h * t.head), t.row, t.column)


@triton.jit
def open_head(x, b, h):
    """Return the `Head` of head h of batch element b."""
    b = b.to(tl.int64)
    h = h.to(tl.int64)
    last_row = x.Lq
    if x.query_lengths is not None:
        last_row = tl.minimum(x.Lq, tl.load(x.query_lengths + b).to(tl.int32))
    last_key = x.Lk
    if x.key_lengths is not None:
        last_key = tl.minimum(x.Lk, tl.load(x.key_lengths + b).to(tl.int32))
    hkv = h // x.G
    return Head(
        matrix(x.q, b, h),
        matrix(x.k, b, hkv),
        matrix(x.v, b, hkv),
        matrix(x.q if x.bias is None else x.bias, b, h),
        matrix(x.q if x.mask is None else x.mask, b, h),
        matrix(x.q if x.alpha is None else x.alpha, b, h),
        x.Lq,
        last_row,
        last_key,
        x.Lk - x.Lq,
        x.am1,
        x.scale,
        x.fill,
    )


@triton.jit
def entry_pointers(m, i, j):
    """Return pointers to the entries [len(i), len(j)] of a matrix."""
    rows = m.start + i.to(tl.int64)[:, None] * m.row
    return rows + j.to(tl.int64)[None, :] * m.column


def _load_source(load: str, register: str) -> str:
    """Return PTX that loads from $1 if $2 is not 0; otherwise the result is 0."""
    return f"{{.reg .pred p; setp.ne.s32 p, $2, 0; mov.{register} $0, 0; @p ld.global.{load} $0, [$1];}}"


LOAD_8 = tl.constexpr(_load_source("u8", "b32"))
LOAD_16, LOAD_32, LOAD_64 = (tl.constexpr(_load_source(t, t)) for t in ("b16", "b32", "b64"))


@triton.jit
def load_in_place(at, inside):
    """Same as tl.load(at, mask=inside, other=0), in the layout of its user instead of the layout of wide loads."""
    kind: tl.constexpr = at.dtype.element_ty
    given = [at, inside.to(tl.int32)]
    if kind.primitive_bitwidth == 64:
        x = tl.inline_asm_elementwise(LOAD_64, "=l,l,r", given, tl.int64, True, 1)
    elif kind.primitive_bitwidth == 32:
        x = tl.inline_asm_elementwise(LOAD_32, "=r,l,r", given, tl.int32, True, 1)
    elif kind.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise(LOAD_16, "=h,l,r", given, tl.int16, True, 1)
    else:
        x = tl.inline_asm_elementwise(LOAD_8, "=r,l,r", given, tl.int32, True, 1).to(kind)
    return x.to(kind, bitcast=True)


@triton.jit
def load_entries(m, i, j, head, ROWS: tl.constexpr, IN_PLACE: tl.constexpr):
    """Load entries [len(i), len(j)] of a bias or a mask, zeros outside; [1, len(j)] unless ROWS, since all rows are
    then equal."""
    inside = (j < head.last_key)[None, :]
    if ROWS:
        inside = (i < head.Lq)[:, None] & inside
        if IN_PLACE:
            x = load_in_place(entry_pointers(m, i, j), inside)
        else:
            x = tl.load(entry_pointers(m, i, j), mask=inside, other=0)
    else:
        x = tl.load(m.start + j.to(tl.int64) * m.column, mask=j < head.last_key, other=0)[None, :]
    return x


@triton.jit
def load_tile(m, i, limit, EDGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Load rows i of a matrix [., D] as [len(i), BD]; zeros beyond column D and, if EDGE, from row `limit` on."""
    d = tl.arange(0, BD)
    at = m.start + i.to(tl.int64)[:, None] * m.row + d[None, :] * m.column
    if EDGE:
        x = tl.load(at, mask=(i < limit)[:, None] & (d < D)[None, :], other=0.0)
    elif D != BD:
        x = tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def store_tile(base, at, acc, inside, D: tl.constexpr, BD: tl.constexpr):
    """Store acc [M, BD] to rows `at` of a contiguous matrix [., D], where `inside`."""
    d = tl.arange(0, BD)
    where = base + at.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(where, acc.to(base.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


@triton.jit
def product(a, b, C: tl.constexpr):
    if C.INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=C.PRECISION)


@triton.jit
def add_product(a, b, acc, C: tl.constexpr):
    if C.INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=C.PRECISION)


@triton.jit
def larger(a, b):
    """Return the maximum; NaN propagates."""
    return tl.maximum(a, b, propagate_nan=SPREAD_NAN)


@triton.jit
def row_maxima(top, i, head):
    """Return (m, dead, idle) of rows i from maxima top [M, N]. A dead row has no visible key or is beyond the last row.
    m is the row's maximum, 0 if it is dead. An idle row is dead or has NaN or inf, and needs no search."""
    m = tl.reduce(top, 1, larger)
    dead = (m == NEG_INF) | (i >= head.last_row)
    m = tl.where(dead, 0.0, m)
    return m, dead, dead | (tl.abs(m) == POS_INF) | (m != m)


@triton.jit
def lane_sums(x, LANES: tl.constexpr):
    """Return partial sums [M, LANES] of the rows of x [M, N], to be added up after all tiles.

    4 LANES match the four lanes that hold a row in the accumulator of a 16-bit product: no data moves between threads.
    """
    if LANES == 1:
        return tl.sum(x, 1)[:, None]
    else:
        N: tl.constexpr = x.shape[1] // LANES
        parts = tl.permute(tl.reshape(x, (x.shape[0], N // 2, LANES, 2)), (0, 2, 1, 3))
        return tl.sum(tl.reshape(parts, (x.shape[0], LANES, N)), 2)


@triton.jit
def dropped_score(am1, fill_value, FINITE_FILL: tl.constexpr):
    """Return (alpha - 1) * fill [M], bitwise equal in all kernels."""
    fill = am1 * fill_value
    if FINITE_FILL:
        # Callers subtract a reference, which may be this rounded product. If the subtraction were contracted with the
        # product into an FMA, a fill of -1e9 would differ from it by up to 32. The maximum prevents the contraction.
        # It also prevents an overflow to -inf if the fill is the lowest fp32 number.
        fill = tl.maximum(fill, LOWEST)
    return fill


@triton.jit
def tile_scores(q, k, i, j, row, head, EDGE: tl.constexpr, C: tl.constexpr):
    """Return (x [M, N], mask of the kept keys), x = (alpha - 1) z - reference, for queries i [M] and keys j [N].

    q is [M, D] and k [N, D]. EDGE: some keys may be beyond the last one or the diagonal.
    """
    x = product(q, tl.trans(k), C) * row.factor[:, None]
    inside = (i < head.Lq)[:, None] & (j < head.last_key)[None, :]
    kept = inside
    if C.HAS_BIAS:
        bias = load_entries(head.bias, i, j, head, C.BIAS_ROWS, C.IN_PLACE)
        x += bias.to(tl.float32) * row.am1[:, None]
    x = x - row.reference[:, None]
    if C.HAS_MASK:
        kept = kept & (load_entries(head.mask, i, j, head, C.MASK_ROWS, C.IN_PLACE) != 0)
        x = tl.where(kept, x, row.fill[:, None])
    if EDGE:
        if C.CAUSAL:
            before = j[None, :] <= i[:, None] + head.diagonal
            kept = kept & before
            x = tl.where(before, x, row.fill[:, None])
        x = tl.where((j < head.last_key)[None, :], x, NEG_INF)
    return x, kept


@triton.jit
def key_scores(q, n, i, row, head, EDGE: tl.constexpr, C: tl.constexpr):
    """Load the keys of tile n and return (j, k, x, kept): key numbers, keys [BN, D], and the results of
    `tile_scores`."""
    j = n * C.BN + tl.arange(0, C.BN)
    k = load_tile(head.k, j, head.last_key, EDGE, C.D, C.BD)
    x, kept = tile_scores(q, k, i, j, row, head, EDGE, C)
    return j, k, x, kept


@triton.jit
def row_constants(head, i, C: tl.constexpr, EDGE: tl.constexpr = True):
    """Return (factor, am1, beta) [M] of rows i: scale * (alpha - 1), alpha - 1 and 1 / (alpha - 1).

    EDGE: some rows may be beyond the last.
    """
    am1 = tl.zeros_like(i).to(tl.float32) + head.am1
    if C.HAS_ALPHA:
        at = head.alpha.start + i.to(tl.int64) * head.alpha.row
        if EDGE:
            am1 = tl.load(at, mask=i < head.Lq, other=1.5).to(tl.float32) - 1.0
        else:
            am1 = tl.load(at).to(tl.float32) - 1.0
    return am1 * head.scale, am1, 1.0 / am1


# --- Tiles ------------------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """Numbers of key tiles of a block of rows: tiles without an edge, tiles with a visible key, and all tiles."""

    whole: Any
    seen: Any
    every: Any


@triton.jit
def key_range(tiles, EDGE: tl.constexpr):
    """Return (first, end) of a block's visible key tiles: those without an edge or, if EDGE, the others."""
    if EDGE:
        return tiles.whole, tiles.seen
    else:
        return 0, tiles.whole


class Block(NamedTuple):
    """A program's rows: their head, row numbers, positions in [B, H, Lq] and constants, each [BM]."""

    head: Head
    i: Any
    at: Any
    factor: Any
    am1: Any
    beta: Any
    fill: Any


@triton.jit
def key_tiles(first_row, end_row, head, CAUSAL: tl.constexpr, BN: tl.constexpr):
    """Return the numbers of tiles of BN keys for rows first_row:end_row."""
    whole = head.last_key // BN
    every = tl.cdiv(head.last_key, BN)
    tiles = every
    if CAUSAL:
        whole = tl.maximum(tl.minimum(whole, (first_row + head.diagonal + 1) // BN), 0)
        tiles = tl.maximum(tl.minimum(every, tl.cdiv(end_row + head.diagonal, BN)), 0)
    return Tiles(tl.minimum(whole, tiles), tiles, every)


@triton.jit
def own_rows(x, fallback, C: tl.constexpr):
    """Return (head, block, number of rows of the head) for a program of BM rows. The rows of a head are all its rows,
    or its fallback rows."""
    blocks = tl.cdiv(x.Lq, C.BM)
    bh = tl.program_id(0) // blocks
    count = x.Lq
    if C.FALLBACK_ROWS > 0:
        groups = tl.cdiv(x.Lq, C.FALLBACK_ROWS)
        count = tl.load(fallback.earlier + bh * (groups + 1) + groups)
    return bh, tl.program_id(0) % blocks, count


@triton.jit
def open_rows(x, fallback, bh, block, count, C: tl.constexpr):
    """Return (Block, Tiles) of a program from the results of `own_rows`. Rows are ascending; missing ones are Lq.

    CAUSAL: the last block, which has the longest rows, comes first.
    """
    if C.CAUSAL:
        block = tl.cdiv(count, C.BM) - 1 - block
    at = block * C.BM + tl.arange(0, C.BM)
    if C.FALLBACK_ROWS > 0:
        i = tl.load(fallback.rows + bh.to(tl.int64) * x.Lq + at, mask=at < count, other=x.Lq)
        first = tl.min(i, 0)
        end = tl.max(tl.where(i < x.Lq, i + 1, 0), 0)
    else:
        i = at
        first = block * C.BM
        end = tl.minimum(first + C.BM, x.Lq)
    head = open_head(x, bh // x.H, bh % x.H)
    factor, am1, beta = row_constants(head, i, C)
    fill = dropped_score(am1, x.fill, C.FINITE_FILL)
    block = Block(head, i, bh.to(tl.int64) * x.Lq + i, factor, am1, beta, fill)
    return block, key_tiles(first, end, head, C.CAUSAL, C.BN)
