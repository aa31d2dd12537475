"""Backward of the ReLU feed-forward block on a GPU: every gradient is a product with the same sparsity pattern.

Row kernels compute the gradient of h at the active neurons, the gradients of both projections from it, and the gradient
of x. The gradients of the weights are sums over lists of the tokens for which each neuron is active
(`relu_ffn.columns`). Overflow rows are recomputed densely.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.transpose import along_rows, row_major
from . import dots as dot_rows
from . import few, forward, listed, popular, rows
from .columns import TokenLists, sums_by_neuron
from .forward import Block, Packed, chunks

# Maximum elements of each work tensor for overflow rows: 128 MiB at 16 bits. Chunks have this size because the gradient
# of x is rounded after each of them. If it is not needed, a chunk is a quarter of [M, N], but at least 32 MiB.
CHUNK = 1 << 26


def backward(
    dy: torch.Tensor,
    d_stats: torch.Tensor | None,
    weight: torch.Tensor | None,
    x: torch.Tensor,
    b: Block,
    packed: Packed,
    needs: Sequence[bool],
    column_major: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Return the gradients of x, gate, gate_bias, up, up_bias, down, down_bias and of the statistic's weight. Gradients
    that are not needed are None. column_major: which of the gradients of gate, up and down are laid out
    column-major."""
    x, dy = along_rows(x), along_rows(dy)
    d_stats = None if d_stats is None else d_stats.float().contiguous()
    N = b.gate.shape[0]
    if d_stats is None and forward.is_few(len(x), N):
        return few.backward(dy, x, b, needs, column_major)
    cap = packed.index.shape[1]
    gated = b.up is not None
    # Rows of these weights are gathered only for the gradient of x and for popular neurons.
    gathered = needs[0] or len(packed.popular) > 0
    gate, up = (None if t is None else row_major(t) if gathered else t for t in (b.gate, b.up))
    assert gate is not None

    def like(t: torch.Tensor | None, needed: bool, by_columns: bool) -> torch.Tensor | None:
        if t is None or not needed:
            return None
        made = t.new_empty(t.shape[::-1] if by_columns else t.shape)
        return made.t() if by_columns else made

    sources = (x, b.gate, b.gate_bias, b.up, b.up_bias, b.down, b.down_bias, weight)
    of_gate, of_up, of_down = column_major
    layouts = (False, of_gate, False, of_up, False, of_down, False, False)
    dx, d_wg, d_bg, d_wu, d_bu, d_wd, d_bd, d_weight = map(like, sources, needs, layouts)
    by_gate = d_wg is not None or d_bg is not None
    by_up = d_wu is not None or d_bu is not None
    by_down = d_wd is not None or d_weight is not None

    # One kernel computes the gradients of both weights, so each needs a buffer even if only one is requested.
    into_gate = gate.new_empty(gate.shape) if d_wg is None else d_wg
    into_up = None if up is None else up.new_empty(up.shape) if d_wu is None else d_wu
    scale = None if d_stats is None or weight is None else d_stats[4]
    by_neuron = by_gate or by_up or by_down
    lists = TokenLists.of(packed.count, packed.index, N) if by_neuron else None
    table = row_major(b.down.t())
    d_table = d_wd.t() if d_wd is not None else torch.empty_like(table) if by_down else None
    entries = packed.count, packed.index, packed.gate
    d_gate, h = torch.empty_like(packed.gate), torch.empty_like(packed.gate)
    d_up = torch.empty_like(packed.up) if gated else None
    work = (entries, packed.up if gated else None, d_stats, weight)
    dot_rows.gradients(dy, table, *work, (d_gate, d_up, h), b.f, b.g)
    wanted = (
        (into_gate if by_gate else None, d_bg),
        (into_up if by_up else None, d_bu),
        (d_table, d_weight),
    )
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
        sums_by_neuron(lists, dy, h, d_table, d_weight, cap, scale=scale)
    if common is not None:
        weights = (into_gate, into_up) if by_gate or by_up else ()
        common.add_to(x, dy, weights, (d_bg, d_bu), d_table)
    rest = listed.Listed.of(packed.count, cap)
    # Neurons are processed in chunks, which limits the size of the work tensors.
    most = CHUNK if dx is not None else max(CHUNK // 4, min(CHUNK, len(x) * N // 4))
    parts = chunks(N, len(x), most)
    room = len(x) * parts[0].stop
    rooms = [x.new_empty(room) if there else None for there in (True, gated, True)]
    for part in parts:
        n = part.stop - part.start
        made = [None if t is None else t[: len(x) * n].view(len(x), n) for t in rooms]
        gate_part, up_part, down_part = gate[part], _of(up, part), b.down[:, part]
        listed.gradients(
            x, dy, (gate_part, _of(b.gate_bias, part)),
            None if up_part is None else (up_part, _of(b.up_bias, part)), down_part,
            d_stats, _of(weight, part), rest, b.f, b.g, b.zero_threshold, _of(b.thresholds, part),
            made,
        )  # fmt: skip
        if dx is not None:
            second = None if up_part is None or made[1] is None else (made[1], up_part.t())
            add = part.start > 0
            listed.product(made[0], gate_part.t(), dx, rest, second=second, add=add)
        sums = [
            listed.Sum(values, tokens, into[part], _of(bias, part), each)
            for values, tokens, (into, bias), each in zip(
                made, (x, x, dy), wanted, (None, None, scale)
            )
            if values is not None and into is not None
        ]
        if sums:
            listed.add_sums(sums, rest)
    if d_bd is not None:
        torch.sum(dy, 0, out=d_bd)
    return [dx, d_wg, d_bg, d_wu, d_bu, d_wd, d_bd, d_weight]


def _of(t: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    """Return the part of a tensor [N, ...] for a range of neurons."""
    return None if t is None else t[part]
