"""Weighted sums of the table rows of each packed row's active neurons. See `relu_ffn.gather`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program

from ..common.epilogue import encode, evaluate
from ..common.launch import relaunched
from ..common.pdl import let_next_start, pdl_options, wait_for_previous
from . import gather
from .gather import (
    FLIGHT,
    ROW_SEEN,
    STAGES,
    fp32,
    in_pairs,
    limited,
)
from .packing import n_listed

# Columns of a sum per program of one warp, with loads of 16 bytes per thread. Several programs share a wide row. The
# programs of all rows process the same columns before the next ones, so that these columns of the table stay in L2.
WIDTH = 256


@triton.jit
def _wait_for_entries(ready, m, n, seen):
    """Wait until n entries of row m are done. Returns the counter's value. seen: the counter's last known value.

    This cannot deadlock: all programs that compute entries were running before the first waiting program was launched.
    """
    while seen < n + ROW_SEEN:
        seen = tl.atomic_add(ready + m, 0, sem="acquire")
    return seen


@triton.jit
def _sum_block(table, id, stride, d, in_d, v, EVEN: tl.constexpr, PAIRS: tl.constexpr):
    """Return the sum of the table rows `id`, each multiplied by its v."""
    at = table + id[:, None] * stride + d[None, :]
    w = tl.load(at) if EVEN else tl.load(at, mask=in_d[None, :], other=0.0)
    return tl.sum(fp32(w, PAIRS) * v[:, None], 0)


@relaunched
@triton.jit
def _weighted_rows_kernel(
    count, index, value_a, table_a, value_b, table_b, onto, bias, out, state, ready,
    M, D, stride_a, stride_b, stride_o,
    STEPS: tl.constexpr, TWO: tl.constexpr, ASK: tl.constexpr, HAS_BIAS: tl.constexpr, CAP: tl.constexpr,
    FLIGHT: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (m, part) writes out[m, part] = bias + the sum over the row's entries of value * table row, unless the
    row overflows.

    ASK: every row is marked as an overflow row if `state` says that all rows are dense. ready: wait only for this
    row's entries, which the preceding kernel computes, instead of for the end of that kernel.
    """
    m = tl.program_id(0).to(tl.int64)
    seen = tl.zeros([], tl.int32)
    if ready is None:
        wait_for_previous(PDL)
    else:
        let_next_start(PDL)
        seen = _wait_for_entries(ready, m, 0, seen)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    in_d = d < D
    r = tl.arange(0, FLIGHT)
    # All loads are issued together, so positions past the row's end are loaded, too.
    c, ahead = tl.load(count + m), tl.load(index + m * CAP + r)
    none = False
    if ASK:
        none = n_listed(state) == M
    if c <= CAP:
        if none:
            tl.store(count + m, CAP + 1)
        else:
            if ready is not None:
                _wait_for_entries(ready, m, c, seen)
            total = tl.zeros([WIDTH], tl.float32)
            if onto is not None:
                total = tl.load(onto + m * D + d, mask=in_d, other=0.0)
            # Past the end, a valid row is loaded again, because a mask costs more.
            after = tl.where(r < c, ahead, 0).to(tl.int32)
            for e in tl.range(0, c, FLIGHT, num_stages=STAGES):
                valid = e + r < c
                id = after.to(tl.int64)
                after = tl.load(index + m * CAP + tl.minimum(e + FLIGHT + r, c - 1)).to(tl.int32)
                v = tl.load(value_a + m * CAP + e + r, mask=valid, other=0.0).to(tl.float32)
                v = tl.where(valid, evaluate(v, STEPS), 0.0)
                total += _sum_block(table_a, id, stride_a, d, in_d, v, EVEN, PAIRS)
                if TWO:
                    v = tl.load(value_b + m * CAP + e + r, mask=valid, other=0.0).to(tl.float32)
                    total += _sum_block(table_b, id, stride_b, d, in_d, v, EVEN, PAIRS)
            if HAS_BIAS:
                total += tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)
            tl.store(out + m * stride_o + d, total.to(out.dtype.element_ty), mask=in_d)
    if PDL and ready is not None:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.extra.cuda.gdc_wait()  # a kernel that waits for this one waits for the preceding one, too


def weighted_rows(
    count: torch.Tensor,
    index: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    *,
    steps: Program = (),
    second: tuple[torch.Tensor, torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    onto: torch.Tensor | None = None,
    ready: torch.Tensor | None = None,
) -> None:
    """Write out[m] = bias + sum_i steps(value[m, i]) * table[index[m, i]].

    second: another value and table; their sum is added. onto: [M, D], fp32 and contiguous, is added, too.
    Overflow rows are not written. With `state` (from `pack`), all rows become overflow rows if it says that all rows
    are dense. ready: counters from `dots`, which must be the preceding kernel.
    """
    M, D = out.shape
    value_b, table_b = second if second is not None else (value, table)
    width = gather.width(D, WIDTH, not out.is_cuda)
    _weighted_rows_kernel[(M, triton.cdiv(D, width))](
        count, index, value, table, value_b, table_b, onto, bias, out, state, ready,
        M, D, table.stride(0), table_b.stride(0), out.stride(0),
        STEPS=encode(steps), TWO=second is not None, ASK=state is not None, HAS_BIAS=bias is not None,
        CAP=index.shape[1], FLIGHT=FLIGHT, WIDTH=width, EVEN=D % width == 0,
        STAGES=STAGES, PAIRS=in_pairs(table), **pdl_options(out), **limited(out), num_warps=1,
    )  # fmt: skip
