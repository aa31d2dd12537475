"""Backward of the ReLU feed-forward block on a GPU: every gradient is a product with the same sparse pattern.

By rows: the gradient of h at the active neurons, from it those of both projections, and the gradient of x. By neurons:
the gradients of the weights, over lists of the tokens where a neuron is active. The lists are built by counting, in
token order, so that sums are taken in the same order every time. Rows that were not packed are computed again, densely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..common.launch import relaunched
from . import dots as dot_rows
from . import few, forward, gather, listed, popular, rows
from .forward import Block, Packed, chunks, rows_of_table
from .packing import popcount

# Rows a word of the token masks.
WORD = 32
# Columns of two sums over a neuron's tokens, by two warps (129 us at 8 192 tokens, 162 by four).
WIDTH = 1024
# Elements of a dense chunk: three work tensors of 128 MiB at 16 bits.
CHUNK = 1 << 26


@relaunched
@triton.jit
def _set_bits_kernel(count, index, bitmask, N, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """bitmask[m // 32, n] |= 1 << m % 32 for every active neuron n of row m; or commutes: any order gives the same."""
    m = tl.program_id(0)
    c = tl.load(count + m)
    if c > CAP:
        return
    i = tl.arange(0, BLOCK)
    n = tl.load(index + m.to(tl.int64) * CAP + i, mask=i < c, other=0).to(tl.int64)
    bit = tl.full([BLOCK], 1, tl.int32) << (m % 32)
    tl.atomic_or(bitmask + (m // 32).to(tl.int64) * N + n, bit, mask=i < c)


@relaunched
@triton.jit
def _count_kernel(bitmask, before, total, words, N, WORDS: tl.constexpr, BN: tl.constexpr):
    """before[w, n] = tokens of neuron n in words before w; total[n] = all of them."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    carry = tl.zeros([BN], tl.int32)
    for w0 in range(0, words, WORDS):
        w = w0 + tl.arange(0, WORDS)
        at = w[:, None].to(tl.int64) * N + n[None, :]
        mask = (w < words)[:, None] & (n < N)[None, :]
        ones = popcount(tl.load(bitmask + at, mask=mask, other=0))
        ends = tl.cumsum(ones, 0)
        tl.store(before + at, carry[None, :] + ends - ones, mask=mask)
        carry += tl.sum(ones, 0)
    tl.store(total + n, carry, mask=n < N)


@relaunched
@triton.jit
def _place_kernel(
    count, index, bitmask, before, start, entry, N, CAP: tl.constexpr, BLOCK: tl.constexpr
):
    """entry[start[n] + rank] = m * CAP + i for the row's i-th active neuron n, rank being its rank among n's tokens."""
    m = tl.program_id(0)
    c = tl.load(count + m)
    if c > CAP:
        return
    i = tl.arange(0, BLOCK)
    mask = i < c
    n = tl.load(index + m.to(tl.int64) * CAP + i, mask=mask, other=0).to(tl.int64)
    at = (m // 32).to(tl.int64) * N + n
    lower = (tl.full([BLOCK], 1, tl.int32) << (m % 32)) - 1
    rank = popcount(tl.load(bitmask + at, mask=mask, other=0) & lower)
    rank += tl.load(before + at, mask=mask, other=0)
    slot = tl.load(start + n, mask=mask, other=0) + rank
    tl.store(entry + slot, m * CAP + i, mask=mask)


@relaunched
@triton.jit
def _scan_kernel(total, start, N, BLOCK: tl.constexpr):
    """One program: start[n] = the sum of total before n."""
    before = tl.full([], 0, tl.int32)
    for n0 in range(0, N, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        t = tl.load(total + n, mask=n < N, other=0)
        tl.store(start + n, before + tl.cumsum(t, 0) - t, mask=n < N)
        before += tl.sum(t, 0)


class TokenLists(NamedTuple):
    """The tokens of each neuron n: entry[start[n] + j] is the place of the j-th in the packed form, j < total[n]."""

    entry: torch.Tensor
    start: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, count: torch.Tensor, index: torch.Tensor, N: int) -> TokenLists:
        """The lists of packed rows: count [M], and index [M, cap] of N neurons."""
        M, cap = index.shape
        words = triton.cdiv(M, WORD)
        bitmask = count.new_zeros(words, N)
        before = torch.empty_like(bitmask)
        lists = cls(count.new_empty(M * cap), count.new_empty(N), count.new_empty(N))
        block = triton.next_power_of_2(cap)
        warps = 1 if block <= 128 else 4
        _set_bits_kernel[(M,)](count, index, bitmask, N, CAP=cap, BLOCK=block, num_warps=warps)
        bn = 32
        _count_kernel[(triton.cdiv(N, bn),)](
            bitmask, before, lists.total, words, N,
            WORDS=min(256, triton.next_power_of_2(words)), BN=bn, num_warps=8,
        )  # fmt: skip
        _scan_kernel[(1,)](lists.total, lists.start, N, BLOCK=4096, num_warps=8)
        _place_kernel[(M,)](
            count, index, bitmask, before, lists.start, lists.entry, N,
            CAP=cap, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return lists


@relaunched
@triton.jit
def _by_neuron_kernel(
    entry, start, total, x, value_a, value_b, out_a, out_b, bias_a, bias_b,
    K, stride_x, stride_a, stride_b,
    TWO: tl.constexpr, BIAS_A: tl.constexpr, BIAS_B: tl.constexpr, CAP: tl.constexpr,
    FLIGHT: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program writes out_a[n, k0:k0 + WIDTH] = sum over the neuron's tokens of value_a * x[token], and out_b."""
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    first = tl.load(start + n)
    c = tl.load(total + n)
    r = tl.arange(0, FLIGHT)
    sum_a = tl.zeros([WIDTH], tl.float32)
    sum_b = tl.zeros([WIDTH], tl.float32)
    side_a = tl.full([], 0.0, tl.float32)
    side_b = tl.full([], 0.0, tl.float32)
    for e in tl.range(0, c, FLIGHT, num_stages=STAGES):
        valid = e + r < c
        at = tl.load(entry + first + tl.minimum(e + r, c - 1))  # past the end, the last again
        token = (at // CAP).to(tl.int64)
        source = x + token[:, None] * stride_x + k[None, :]
        v = tl.load(source) if EVEN else tl.load(source, mask=(k < K)[None, :], other=0.0)
        v = v.to(tl.float32)
        a = tl.load(value_a + at, mask=valid, other=0.0).to(tl.float32)
        sum_a += tl.sum(v * a[:, None], 0)
        side_a += tl.sum(a, 0)
        if TWO:
            b = tl.load(value_b + at, mask=valid, other=0.0).to(tl.float32)
            sum_b += tl.sum(v * b[:, None], 0)
            side_b += tl.sum(b, 0)
    tl.store(out_a + n * stride_a + k, sum_a.to(out_a.dtype.element_ty), mask=k < K)
    if TWO:
        tl.store(out_b + n * stride_b + k, sum_b.to(out_b.dtype.element_ty), mask=k < K)
    if tl.program_id(1) == 0:
        if BIAS_A:
            tl.store(bias_a + n, side_a.to(bias_a.dtype.element_ty))
        if BIAS_B:
            tl.store(bias_b + n, side_b.to(bias_b.dtype.element_ty))


def sums_by_neuron(
    lists: TokenLists, x, a, out_a, bias_a, cap, b=None, out_b=None, bias_b=None
) -> None:  # fmt: skip
    """out[n] = sum over the tokens of neuron n of value * x[token]."""
    K = x.shape[1]
    width = gather.width(K, WIDTH, not x.is_cuda)
    _by_neuron_kernel[(len(lists.total), triton.cdiv(K, width))](
        lists.entry, lists.start, lists.total, x, a, b, out_a, out_b, bias_a, bias_b,
        K, x.stride(0), out_a.stride(0), 0 if out_b is None else out_b.stride(0),
        TWO=b is not None, BIAS_A=bias_a is not None, BIAS_B=bias_b is not None, CAP=cap,
        FLIGHT=gather.FLIGHT, WIDTH=width, EVEN=K % width == 0, STAGES=1, num_warps=2,
    )  # fmt: skip


def backward(
    dy: torch.Tensor,
    d_stats: torch.Tensor | None,
    x: torch.Tensor,
    b: Block,
    packed: Packed,
    needs: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Gradients of x, gate, gate_bias, up, up_bias, down, down_bias; None where not needed."""
    x = x if x.stride(1) == 1 else x.contiguous()
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    d_stats = None if d_stats is None else d_stats.float().contiguous()
    N = b.gate.shape[0]
    if d_stats is None and forward.is_few(len(x), N):
        return few.backward(dy, x, b, needs)
    cap = packed.index.shape[1]
    gated = b.up is not None
    gate, up = rows_of_table(b.gate), None if b.up is None else rows_of_table(b.up)

    def like(t: torch.Tensor | None, needed: bool) -> torch.Tensor | None:
        return (
            torch.empty(t.shape, dtype=t.dtype, device=t.device)
            if needed and t is not None
            else None
        )

    sources = (x, b.gate, b.gate_bias, b.up, b.up_bias, b.down, b.down_bias)
    dx, d_wg, d_bg, d_wu, d_bu, _, d_bd = map(like, sources, needs)
    by_gate = d_wg is not None or d_bg is not None
    by_up = d_wu is not None or d_bu is not None
    by_down = needs[5]

    # What is not wanted has a place to go all the same: one kernel makes both, and their biases' gradients.
    into_gate = torch.empty_like(gate) if d_wg is None else d_wg
    into_up = None if up is None else torch.empty_like(up) if d_wu is None else d_wu
    d_wd = torch.empty_like(b.down, memory_format=torch.contiguous_format) if by_down else None
    wanted = (
        (into_gate, d_bg) if by_gate else (None, None),
        (into_up, d_bu) if by_up else (None, None),
        (None if d_wd is None else d_wd.t(), None),
    )
    by_neuron = by_gate or by_up or by_down
    lists = TokenLists.of(packed.count, packed.index, N) if by_neuron else None
    table = rows.by_neuron(b.down)
    d_table = torch.empty(table.shape, dtype=x.dtype, device=x.device) if by_down else None
    entries = packed.count, packed.index, packed.gate
    d_gate, h = torch.empty_like(packed.gate), torch.empty_like(packed.gate)
    d_up = torch.empty_like(packed.up) if gated else None
    work = (entries, packed.up if gated else None, d_stats)
    dot_rows.gradients(dy, table, *work, (d_gate, d_up, h), b.f, b.g)
    common = None
    if d_stats is None and len(packed.popular):
        common = popular.Gradients(
            dy, packed.popular, packed.popular_gate, packed.popular_up if gated else None,
            (gate, up, table), packed.count, cap, b.f, b.g, b.zero_threshold,
        )  # fmt: skip
    if dx is not None:
        second = None if up is None or d_up is None else (d_up, up)
        onto = None if common is None else common.of_x()
        rows.weighted_rows(packed.count, packed.index, d_gate, gate, dx, second=second, onto=onto)
    if lists is not None and (by_gate or by_up):
        sums_by_neuron(lists, x, d_gate, into_gate, d_bg, cap, d_up, into_up, d_bu)
    if lists is not None and d_table is not None:
        sums_by_neuron(lists, dy, h, d_table, None, cap)
    if common is not None:
        weights = (into_gate, into_up) if by_gate or by_up else ()
        common.add_to(x, dy, weights, (d_bg, d_bu), d_table)
    if d_table is not None:
        rows.by_neuron(d_table, out=d_wd)
    for part in chunks(len(x), N, CHUNK):  # one at a time: they are large
        numbers = None if d_stats is None else d_stats[:, part]
        rest = listed.Listed.of(packed.count[part], cap)
        made = listed.gradients(
            x[part], dy[part], (gate, b.gate_bias), None if up is None else (up, b.up_bias), b.down,
            numbers, rest, b.f, b.g, b.zero_threshold,
        )  # fmt: skip
        if dx is not None:
            second = None if up is None or made[1] is None else (made[1], up.t())
            listed.product(made[0], gate.t(), dx[part], rest, second=second)
        of_tokens = x[part], x[part], dy[part]
        sums = [
            listed.Sum(values, tokens, weight, bias)
            for values, tokens, (weight, bias) in zip(made, of_tokens, wanted, strict=True)
            if values is not None and weight is not None
        ]
        if sums:
            listed.add_sums(sums, rest)
    if d_bd is not None:
        torch.sum(dy, 0, out=d_bd)
    return [dx, d_wg, d_bg, d_wu, d_bu, d_wd, d_bd]
