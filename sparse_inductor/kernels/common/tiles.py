"""The table of tile sizes of the portable kernels, each with its reason.

To tune a kernel for another GPU, insert a row with that architecture in front of the kernel's rows: the first row that
fits is used. Kernels for Hopper (`hopper.py` of each family) define their own tiles.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from .arch import compute_capability, shared_memory

_LARGE = (
    160  # KiB of shared memory: A100, H100 and later ones of their kind; consumer cards have 99
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One tile.

    kernel: the family, or "family/kernel". when: facts that must hold, such as "fp32" (else 16 bits). width: largest
    head dimension (entmax attention). arch: such as "sm120", or "" for all. kib: minimum shared memory of the GPU,
    in KiB.
    """

    kernel: str
    sizes: dict[str, int | None]
    why: str = ""
    when: frozenset[str] = frozenset()
    width: int | None = None
    arch: str = ""
    kib: int = 0


def _splade(
    vocab: int, positions: int, depth: int, warps: int, stages: int
) -> dict[str, int | None]:
    return {
        "vocab": vocab,
        "positions": positions,
        "depth": depth,
        "warps": warps,
        "stages": stages,
    }


def _attention(
    rows: int, keys: int, warps: int, stages: int, registers: int | None = None
) -> dict[str, int | None]:
    return {"rows": rows, "keys": keys, "warps": warps, "stages": stages, "registers": registers}


def _matmul(BM: int, BN: int, BK: int, warps: int, stages: int) -> dict[str, int | None]:
    return {"BM": BM, "BN": BN, "BK": BK, "num_warps": warps, "num_stages": stages}


_FP32, _EXACT, _STEPS = frozenset({"fp32"}), frozenset({"fp32", "ieee"}), frozenset({"steps"})
# "busy": a bias, a mask or an alpha that differs from row to row needs tiles in addition to the scores.
_BUSY, _ALPHA = frozenset({"busy"}), frozenset({"alpha", "not busy"})

TILES: tuple[Row, ...] = (
    # SPLADE head, portable kernels
    Row(
        "splade_head", _splade(64, 64, 32, 4, 2), when=_EXACT,
        why="FMA units: 32 accumulators a thread leave room for operands",
    ),
    Row("splade_head", _splade(128, 128, 32, 8, 2), "4-byte operands, 64 KiB of stages", _FP32),
    Row(
        "splade_head", _splade(128, 128, 64, 8, 3), when=_STEPS, kib=_LARGE,
        why="steps on every element need registers beside the accumulator: 64 of it a thread, not 128",
    ),
    Row(
        "splade_head", _splade(128, 256, 64, 8, 3), kib=_LARGE,
        why="the widest tile whose fp32 accumulator, 128 registers a thread, fits 8 warps: the fewest bytes a flop",
    ),
    Row("splade_head", _splade(128, 128, 32, 8, 3), "3 stages of 128 x 256 x 64 need 144 KiB"),
    # Feed-forward blocks: products of the rows that are not packed
    Row("relu_ffn", _matmul(64, 64, 32, 4, 2), when=_FP32),
    Row(
        "relu_ffn/projections", _matmul(128, 64, 64, 8, 6), kib=_LARGE,
        why="three accumulators fit 8 warps; few rows are few tiles of long sums: many stages, of 24 KiB",
    ),
    Row("relu_ffn/projections", _matmul(128, 64, 64, 8, 3), "three stages of 24 KiB"),
    Row(
        "relu_ffn", _matmul(128, 128, 64, 8, 6), kib=_LARGE,
        why="the pipeline keeps two stages of 32 KiB back where rows are listed",
    ),
    Row("relu_ffn", _matmul(128, 128, 64, 8, 3), "three stages of 32 KiB"),
    # Entmax attention, block kernels. In fp32, FMA units: few accumulators a thread, 4-byte operands in shared memory.
    Row("entmax_attention", _attention(64, 32, 4, 2), when=_FP32, width=64),
    Row("entmax_attention", _attention(32, 32, 4, 1), when=_FP32),
    Row("entmax_attention/bias", _attention(64, 64, 8, 1), width=128),
    Row("entmax_attention/bias", _attention(64, 32, 8, 1)),
    # If a product is the operand of another product, each warp computes 16 rows. 64 rows occupy four warps; four more
    # would repeat their work.
    Row("entmax_attention/threshold", _attention(128, 64, 8, 3), when=_BUSY, width=64),
    Row(
        "entmax_attention/threshold", _attention(128, 64, 8, 3, 128), width=64,
        why="128 registers a thread let two programs share an SM",
    ),
    Row("entmax_attention/output", _attention(128, 64, 8, 3), when=_BUSY, width=64),
    Row("entmax_attention/output", _attention(128, 64, 8, 3, 128), "as threshold", width=64),
    Row("entmax_attention/solve", _attention(64, 64, 4, 3), when=_BUSY, width=64),
    Row(
        "entmax_attention/solve", _attention(64, 64, 4, 3, 168), width=64,
        why="an output with two sums; programs in turn keep the matrix and special function units busy",
    ),
    Row(
        "entmax_attention/rows", _attention(64, 64, 4, 2), when=_ALPHA, width=64,
        why="dalpha's sums are faster in smaller programs: large supports, [2, 16, 8192, 64], 13.1 ms of 13.6",
    ),
    Row("entmax_attention/rows", _attention(128, 64, 8, 2), when=_BUSY, width=64),
    Row("entmax_attention/rows", _attention(128, 64, 8, 3), "scores, dp and two sums", width=64),
    Row("entmax_attention/keys", _attention(64, 64, 4, 2), width=64),
    Row("entmax_attention/threshold", _attention(128, 64, 8, 3), when=_BUSY, width=128, kib=_LARGE),
    Row("entmax_attention/threshold", _attention(128, 64, 8, 2), when=_BUSY, width=128),
    Row("entmax_attention/threshold", _attention(128, 64, 8, 3), width=128),
    Row("entmax_attention/output", _attention(128, 64, 8, 2), width=128),
    Row("entmax_attention/solve", _attention(64, 64, 4, 2), width=128),
    Row("entmax_attention/rows", _attention(128, 32, 8, 2), width=128),
    Row("entmax_attention/keys", _attention(64, 64, 8, 2), width=128),
    # A tile of 64 keys or rows takes 32 KiB, so that one stage of each of four operands fits.
    Row("entmax_attention/threshold", _attention(64, 64, 8, 2)),
    Row("entmax_attention/output", _attention(64, 64, 8, 1)),
    Row("entmax_attention/rows", _attention(64, 32, 8, 1)),
    Row("entmax_attention/keys", _attention(32, 64, 8, 1), kib=_LARGE),
    Row("entmax_attention/keys", _attention(32, 32, 4, 1)),
)  # fmt: skip


@functools.lru_cache(maxsize=1024)
def row_of(kernel: str, device: torch.device, width: int = 0, *facts: str) -> Row:
    """Return the first row of a kernel or its family that fits a CUDA device, a head dimension and the facts of a call.

    Raises KeyError if no row fits.
    """
    family, arch = kernel.partition("/")[0], "sm{}{}".format(*compute_capability(device))
    kib = shared_memory(device) // 1024
    for row in TILES:
        if (
            row.kernel in (family, kernel)
            and row.arch in ("", arch)
            and row.kib <= kib
            and (row.width is None or width <= row.width)
            and row.when <= {*facts}
        ):
            return row
    raise KeyError(f"no tile of {kernel} fits {kib} KiB of shared memory")


def sizes_of(
    kernel: str, device: torch.device, width: int = 0, *facts: str
) -> dict[str, int | None]:
    """Return the sizes of the row that `row_of` returns."""
    return dict(row_of(kernel, device, width, *facts).sizes)
