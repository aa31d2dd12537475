"""The gradient of a dense block's tokens on Hopper GPUs, where no row is sparse: tiles in Gluon.

    out = a b (+ c d)

Whole rounds of tiles of all programs are made here; what is left past the last of them, tiles that `rest_of` halves and
shares out, is left to the kernel that makes listed rows.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from . import relu_ffn_hopper as hopper
from .boxes import addressable
from .gluon_names import let_next_start, store_box, wait_for_previous
from .hopper_ring import DEPTH, copy_tile, descriptor, make_ring, multiply_tile
from .hopper_tiles import CONSUMERS, PIECE, ROWS, accumulator, as_boxed, pieces
from .launch import launch as launch_kernel
from .launch import multiprocessors
from .relu_ffn_tiles import tiles_in_rounds
from .tile_order import rows_full, tile_last

__all__ = ["applies", "product"]

COLUMNS = gl.constexpr(256)
STAGES = gl.constexpr(4)
PIECES = gl.constexpr(COLUMNS.value // PIECE.value)
# A consumer's: one is filled while the other one is copied.
BOXES = gl.constexpr(2)


@gluon.jit
def _copy_tiles(source, TWO: gl.constexpr):
    """Producer warp: the operands of every tile of this program, in order, into the ring."""
    a, b, c, d, ring, tiles, full, tiles_n, steps = source
    n = 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        pm, pn = tile_last(t, full, tiles_n)
        m0, n0 = pm * (ROWS * CONSUMERS), pn * COLUMNS
        n = copy_tile(a, (b,), ring, n, m0, n0, steps, COLUMNS, STAGES, False, True)
        if TWO:
            n = copy_tile(c, (d,), ring, n, m0, n0, steps, COLUMNS, STAGES, False, True)


@gluon.jit
def _multiply_tiles(operands, ME: gl.constexpr, TWO: gl.constexpr):
    """Consumer ME: 64 rows of every tile of this program."""
    out, ring, out_ring, tiles, full, tiles_n, steps = operands
    MMA: gl.constexpr = accumulator(COLUMNS)
    n = 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        pm, pn = tile_last(t, full, tiles_n)
        accs = (gl.zeros([ROWS, COLUMNS], gl.float32, MMA),)
        accs, n = multiply_tile(accs, ring, n, steps * (1 + TWO), ME, COLUMNS, STAGES, False, True)
        found = pieces(accs[0], PIECES)
        for i in gl.static_range(PIECES):
            piece = as_boxed(found[i])
            to = out_ring.index(BOXES * ME + i % BOXES)
            tma.store_wait(BOXES - 1)  # what was copied from this box has left it
            to.store(piece.to(out.dtype))
            fence_async_shared()
            store_box(out, [(pm * CONSUMERS + ME) * ROWS, pn * COLUMNS + i * PIECE], to)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "steps", "whole"])
def _product_kernel(
    a, b, c, d, out, length, M, N, steps, whole, TWO: gl.constexpr
):  # fmt: skip
    """The first so many tiles; nothing but where all M rows are listed, which `length` says."""
    ring = make_ring(a, (b,), COLUMNS, STAGES, False, True)
    out_ring = gl.allocate_shared_memory(out.dtype, [BOXES * CONSUMERS, ROWS, PIECE], out.layout)
    let_next_start()
    wait_for_previous()
    full = rows_full(M, ROWS * CONSUMERS)
    tiles_n = gl.cdiv(N, COLUMNS)
    tiles = gl.where(gl.load(length) == M, whole, 0)
    source = (a, b, c, d, ring, tiles, full, tiles_n, steps)
    operands = (out, ring, out_ring, tiles, full, tiles_n, steps)
    gl.warp_specialize(
        [
            (_multiply_tiles, (operands, 0, TWO)),
            (_multiply_tiles, (operands, 1, TWO)),
            (_copy_tiles, (source, TWO)),
        ],
        [4, 1],
        [240, 24],
    )


def applies(*matrices: torch.Tensor) -> bool:
    """Whether `product` can run with these."""
    return hopper.applies(matrices[0]) and all(map(addressable, matrices))


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    length: torch.Tensor,
    second: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Where `length` says that all M rows are listed, out [M, N] = a @ b (+ the same of `second`), but for the tiles
    that `rest_of` halves. a: [M or more, K]."""
    (M, N), K = out.shape, a.shape[1]
    c, d = second or (a, b)
    rows, columns, depth = ROWS.value, COLUMNS.value, DEPTH.value
    programs, steps = multiprocessors(a.device), -(-K // depth)
    sums = 1 if second is None else 2
    whole = tiles_in_rounds(M, -(-N // columns), steps * sums, programs, rows * CONSUMERS.value)
    args = (
        descriptor(a, rows, depth), descriptor(b, depth, columns),
        descriptor(c, rows, depth), descriptor(d, depth, columns),
        descriptor(out, rows, PIECE.value),
        length, M, N, steps, whole,
    )  # fmt: skip
    constants = {"TWO": second is not None}
    launch_kernel(_product_kernel, (programs,), args, constants, num_warps=4, launch_pdl=True)
