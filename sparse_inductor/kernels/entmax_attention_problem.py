"""Operands of entmax attention as the kernels take them, and the scores of one tile."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .entmax_attention_tau import GENERAL, HARDWARE, exponent_kind

__all__ = [
    "Left",
    "Problem",
    "Tile",
    "key_tiles",
    "lane_sums",
    "row_count",
    "row_scores",
    "tile_for",
    "tile_rows",
]

# The lowest fp32 number.
LOWEST = tl.constexpr(-3.4028234663852886e38)
NEG_INF = tl.constexpr(float("-inf"))


@dataclasses.dataclass(frozen=True)
class Tile:
    """ROWS queries x KEYS keys at a time; a thread has at most so many registers (None: 255)."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None

    def options(self) -> dict[str, int]:
        """What a launch says beside the sizes."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, **limit}


class Left(NamedTuple):
    """The rows that are left to the block passes, ascending: rows int32 [B, H, Lq].

    earlier int32 [B, H, blocks + 1]: how many come before each block of `block` rows, then all.
    """

    rows: torch.Tensor
    earlier: torch.Tensor
    block: int


def _interpreted(device: torch.device) -> bool:
    return device.type != "cuda"


def tile_for(problem: Problem, kernel: str) -> Tile:
    """The tile of a block kernel: "threshold", "output", "solve", "rows" (dq), "keys" (dk, dv) or "bias"."""
    if _interpreted(problem.q.device):
        return Tile(16, 16, 4, 1)  # small, so that small shapes take several tiles
    width = max(problem.width, problem.value_width)
    # Operands beside the scores take registers.
    busy = problem.bias is not None or problem.mask is not None
    if problem.q.dtype == torch.float32:
        # FMA units: few accumulators a thread, 4-byte operands in shared memory.
        return Tile(64, 32, 4, 2) if width <= 64 else Tile(32, 32, 4, 1)
    if kernel == "bias":
        return Tile(64, 64 if width <= 128 else 32, 8, 1)
    # A product that another takes in gives each warp 16 rows of its own: of 64 rows four warps have some,
    # and four more would do the same work again.
    if width <= 64:
        # 128 registers a thread let two programs share an SM.
        shared = None if busy else 128
        return {
            "threshold": Tile(128, 64, 8, 3, shared),
            "output": Tile(128, 64, 8, 3, shared),
            # as an output with two sums; programs in turn keep the matrix and special function units busy
            "solve": Tile(64, 64, 4, 3, None if busy else 168),
            # scores, dp and two sums of width 64; dalpha's sums beside them go quicker in smaller programs: a step with
            # broad rows, [2, 16, 8192, 64], in 13.1 ms instead of 13.6
            "rows": Tile(64, 64, 4, 2)
            if problem.alpha is not None and not busy
            else Tile(128, 64, 8, 2 if busy else 3),
            "keys": Tile(64, 64, 4, 2),
        }[kernel]
    if width <= 128:
        return {
            "threshold": Tile(128, 64, 8, 3),
            "output": Tile(128, 64, 8, 2),
            "solve": Tile(64, 64, 4, 2),
            "rows": Tile(128, 32, 8, 2),
            "keys": Tile(64, 64, 8, 2),
        }[kernel]
    # 32 KiB a tile of 64 keys or rows: one stage of each of four operands.
    return {
        "threshold": Tile(64, 64, 8, 2),
        "output": Tile(64, 64, 8, 1),
        "rows": Tile(64, 32, 8, 1),
        "keys": Tile(32, 64, 8, 1),
    }[kernel]


def _block(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call: q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv] and what shapes the scores.

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
    def heads(self) -> int:
        """B * H, the rows of the grids."""
        return self.q.shape[0] * self.q.shape[1]

    @property
    def drops(self) -> bool:
        """Whether some key may be dropped in favour of `fill`."""
        return self.causal or self.mask is not None

    @property
    def finite_fill(self) -> bool:
        return self.drops and self.fill != -math.inf

    @property
    def added_fill(self) -> bool:
        """Whether dropped keys, whose score is `fill`, pass their gradient on."""
        return self.finite_fill and self.added

    @property
    def lanes(self) -> int:
        """How many `lane_sums` the block kernels take of a row.

        One where a mask or a bias is read beside the scores: these may then lie in two warps a row, as do masks whose
        rows are not 16 bytes apart, and Triton 3.6 makes wrong sums of parts of rows across warps.
        """
        busy = self.mask is not None or self.bias is not None
        return 4 if self.q.element_size() == 2 and not busy else 1

    def operands(self) -> tuple[Any, ...]:
        """Leading arguments of every block kernel."""
        unused = self.q
        optional = (self.bias, self.mask, self.alpha, self.query_lengths, self.key_lengths)
        strides = [s for t in (self.q, self.k, self.v) for s in t.stride()]
        for t, n in ((self.bias, 4), (self.mask, 4), (self.alpha, 3)):
            strides += [0] * n if t is None else list(t.stride()[:n])
        H, G = self.q.shape[1], self.q.shape[1] // self.k.shape[1]
        return (
            self.q, self.k, self.v, *(unused if t is None else t for t in optional), *strides,
            H, G, self.q.shape[2], self.k.shape[2],
            float(self.alpha_value - 1.0), float(self.scale), float(self.fill),
        )  # fmt: skip

    def constants(self) -> dict[str, Any]:
        """Compile-time arguments of every block kernel."""
        exact = self.q.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
        rough = self.q.is_cuda and self.q.element_size() == 2
        return {
            "D": self.width,
            "DV": self.value_width,
            "BD": _block(self.width),
            "BDV": _block(self.value_width),
            "KIND": exponent_kind(
                None if self.alpha is not None else self.alpha_value, HARDWARE if rough else GENERAL
            ),
            "HAS_BIAS": self.bias is not None,
            "HAS_MASK": self.mask is not None,
            "HAS_ALPHA": self.alpha is not None,
            "HAS_QLEN": self.query_lengths is not None,
            "HAS_KLEN": self.key_lengths is not None,
            "CAUSAL": self.causal,
            "FINITE_FILL": self.finite_fill,
            "PRECISION": "ieee" if exact else "tf32",
            # The interpreter multiplies bf16 as integers.
            "WIDEN": _interpreted(self.q.device),
        }


@triton.jit
def load_tile(
    base, i, stride_i, limit, stride_d, EDGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """[len(i), BD] of a matrix [., D]; zeros beyond D and, at an EDGE, from row `limit` on."""
    d = tl.arange(0, BD)
    at = base + i.to(tl.int64)[:, None] * stride_i + d[None, :] * stride_d
    if EDGE:
        x = tl.load(at, mask=(i < limit)[:, None] & (d < D)[None, :], other=0.0)
    elif D != BD:
        x = tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def product(a, b, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def add_product(a, b, acc, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def lane_sums(x, LANES: tl.constexpr):
    """Sums of parts of the rows of x [M, N], [M, LANES]: what is left to add up when all tiles are through.

    4 LANES are the lanes of a row in the accumulator of a 16-bit product, in which no data moves.
    """
    if LANES == 1:
        return tl.sum(x, 1)[:, None]
    else:
        N: tl.constexpr = x.shape[1] // LANES
        parts = tl.permute(tl.reshape(x, (x.shape[0], N // 2, LANES, 2)), (0, 2, 1, 3))
        return tl.sum(tl.reshape(parts, (x.shape[0], LANES, N)), 2)


@triton.jit
def dropped_score(am1, fill_value, FINITE_FILL: tl.constexpr):
    """(alpha - 1) fill [M], the same bits wherever it is asked for."""
    fill = am1 * fill_value
    if FINITE_FILL:
        # A reader subtracts a reference. Were that contracted into one FMA with this product, a fill of
        # -1e9 would differ by up to 32 from the rounded one that the reference may be. The bound also
        # keeps the lowest number from overflowing.
        fill = tl.maximum(fill, LOWEST)
    return fill


@triton.jit
def row_scores(
    q, k, i, j, row, side, last_row, last_key, diagonal,
    EDGE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """x [M, N] = (alpha - 1) z - reference of queries i [M] and keys j [N], and which are kept.

    From q [M, D] and k [N, D]. row = (factor, am1, reference, fill), each [M]: scale * (alpha - 1),
    alpha - 1, and the dropped keys' x. side = (bias, stride_bl, stride_bk, mask, stride_ml,
    stride_mk) at this head. EDGE: some key may lie beyond last_key or the diagonal.
    """
    factor, am1, reference, fill = row
    bias, stride_bl, stride_bk, mask, stride_ml, stride_mk = side
    x = product(q, tl.trans(k), PRECISION, WIDEN) * factor[:, None]
    inside = (i < last_row)[:, None] & (j < last_key)[None, :]
    kept = inside
    if HAS_BIAS:
        at = bias + i.to(tl.int64)[:, None] * stride_bl + j.to(tl.int64)[None, :] * stride_bk
        x += tl.load(at, mask=inside, other=0.0).to(tl.float32) * am1[:, None]
    x = x - reference[:, None]
    if HAS_MASK:
        at = mask + i.to(tl.int64)[:, None] * stride_ml + j.to(tl.int64)[None, :] * stride_mk
        kept = kept & (tl.load(at, mask=inside, other=0) != 0)
        x = tl.where(kept, x, fill[:, None])
    if EDGE:
        if CAUSAL:
            before = j[None, :] <= i[:, None] + diagonal
            kept = kept & before
            x = tl.where(before, x, fill[:, None])
        x = tl.where((j < last_key)[None, :], x, NEG_INF)
    return x, kept


@triton.jit
def head_offsets(bh, H, G, sxb, sxh, skb, skh, svb, svh):
    """(b, h, offsets of this head's query-side, key and value matrices), 64-bit."""
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    hkv = h // G
    return b, h, b * sxb + h * sxh, b * skb + hkv * skh, b * svb + hkv * svh


@triton.jit
def row_constants(
    alpha, stride_al, i, last_row, am1_value, scale, HAS_ALPHA: tl.constexpr,
    EDGE: tl.constexpr = True,
):  # fmt: skip
    """(factor, am1, beta) [M] of rows i: scale * (alpha - 1), alpha - 1 and 1 / (alpha - 1).

    EDGE: some row may lie beyond last_row.
    """
    am1 = tl.zeros_like(i).to(tl.float32) + am1_value
    if HAS_ALPHA:
        at = alpha + i.to(tl.int64) * stride_al
        if EDGE:
            am1 = tl.load(at, mask=i < last_row, other=1.5).to(tl.float32) - 1.0
        else:
            am1 = tl.load(at).to(tl.float32) - 1.0
    return am1 * scale, am1, 1.0 / am1


@triton.jit
def key_tiles(first_row, end_row, last_key, diagonal, CAUSAL: tl.constexpr, BN: tl.constexpr):
    """Of rows first_row:end_row: key tiles without an edge, with a key to see, and all."""
    whole = last_key // BN
    every = tl.cdiv(last_key, BN)
    tiles = every
    if CAUSAL:
        whole = tl.maximum(tl.minimum(whole, (first_row + diagonal + 1) // BN), 0)
        tiles = tl.maximum(tl.minimum(every, tl.cdiv(end_row + diagonal, BN)), 0)
    return tl.minimum(whole, tiles), tiles, every


@triton.jit
def row_count(earlier, bh, Lq, LEFT_ROWS: tl.constexpr):
    """How many rows of a head are there for the block passes: all, or the last of earlier[bh]."""
    count = Lq
    if LEFT_ROWS > 0:
        blocks = tl.cdiv(Lq, LEFT_ROWS)
        count = tl.load(earlier + bh * (blocks + 1) + blocks)
    return count


@triton.jit
def tile_rows(
    left, bh, block, count, Lq, CAUSAL: tl.constexpr, LEFT_ROWS: tl.constexpr, BM: tl.constexpr
):
    """Rows i [BM] of one of `row_count` rows' tiles, ascending, Lq where there is none, first and end.

    With LEFT_ROWS of the rows left[bh]. CAUSAL: the last tile, of the longest rows, comes first.
    """
    if CAUSAL:
        block = tl.cdiv(count, BM) - 1 - block
    at = block * BM + tl.arange(0, BM)
    if LEFT_ROWS > 0:
        i = tl.load(left + bh.to(tl.int64) * Lq + at, mask=at < count, other=Lq)
        first = tl.min(i, 0)
        end = tl.max(tl.where(i < Lq, i + 1, 0), 0)
    else:
        i = at
        first = block * BM
        end = tl.minimum(first + BM, Lq)
    return i, first, end
