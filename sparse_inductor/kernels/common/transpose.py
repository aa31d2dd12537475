"""Row-major copies of column-major matrices."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import Launcher, launch
from .pdl import USE_PDL

# Loads and stores of 16-bit elements access 128 consecutive bytes.
TILE = 64


@triton.jit(do_not_specialize=["first"])
def _transpose_kernel(
    source, out, first, M, N, stride_m, stride_n, stride_o, TILE: tl.constexpr, BESIDE: tl.constexpr
):  # fmt: skip
    """out[n, first + m] = source[m, n], one tile per program.

    BESIDE: overlap the end of the preceding kernel, which does not write the source. One program waits for that kernel
    before it exits, so that a kernel which waits for this one waits for both.
    """
    if BESIDE:
        tl.extra.cuda.gdc_launch_dependents()
    tiles_m = tl.cdiv(M, TILE)
    m = (tl.program_id(0) % tiles_m).to(tl.int64) * TILE + tl.arange(0, TILE)
    n = (tl.program_id(0) // tiles_m).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = (m < M)[:, None] & (n < N)[None, :]
    at = source + m[:, None] * stride_m + n[None, :] * stride_n
    tile = tl.load(at, mask=mask, other=0.0)
    to = out + n[:, None] * stride_o + (first + m)[None, :]
    tl.store(to, tl.trans(tile), mask=tl.trans(mask))
    if BESIDE and tl.program_id(0) == 0:
        tl.extra.cuda.gdc_wait()


def transpose(
    source: Tensor, out: Tensor, first: int = 0, run: Launcher = launch, beside: bool = False
) -> None:
    """out[:, first : first + M] = source^T for source [M, N], any strides, and out [N, >= first + M], unit stride along
    its rows. run: launches the kernel. beside: see `row_major`."""
    M, N = source.shape
    tile = TILE if source.is_cuda else 16
    args = source, out, first, M, N, *source.stride(), out.stride(0)
    grid = (triton.cdiv(M, tile) * triton.cdiv(N, tile),)
    if beside and USE_PDL:
        launch(_transpose_kernel, grid, args, {"TILE": tile, "BESIDE": True}, 4, launch_pdl=True)
    else:
        run(_transpose_kernel, grid, args, {"TILE": tile, "BESIDE": False}, 4)


def buffered_rows(t: Tensor, most: int) -> int:
    """Return how many rows like those of t [N, D] fit `most` bytes, rounded down to tiles but at least one tile."""
    return max(1, most // (t.shape[1] * t.element_size() * TILE)) * TILE


def along_rows(t: Tensor) -> Tensor:
    """Return t [M, N], or a contiguous copy of it, with unit stride along its rows."""
    return t if t.stride(1) == 1 else t.contiguous()


def row_major(t: Tensor, run: Launcher = launch, beside: bool = False) -> Tensor:
    """Return t [N, D], or a copy of it, with unit stride along its rows. run: launches the kernel. beside: copy while
    the preceding kernel ends, which must trigger its dependents early and not write t."""
    if t.stride(1) == 1:
        return t
    out = t.new_empty(t.shape)
    transpose(t.t(), out, run=run, beside=beside)
    return out
