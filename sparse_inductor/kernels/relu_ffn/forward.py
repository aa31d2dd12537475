"""Forward of the ReLU feed-forward block on a GPU.

The gate projection is a dense matrix product; on Hopper its kernel also writes a bitmask of the active neurons,
elsewhere the result is scanned once. The active neurons of each row are packed; a row with too many of them is listed
instead. Packed rows read only the rows of the up and down weights that belong to their active neurons. Listed rows are
computed by dense tile products. The device decides which rows are listed, so that the sequence of launches is the same
for every input.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from sparse_inductor.epilogue.steps import Program

from ..common.transpose import along_rows, row_major
from . import decode, few, hopper, listed, popular, rows, statistics
from . import dots as dot_rows
from . import packing as packer

# Elements of the gate projection per chunk: 2 GiB at 16 bits. Every chunk waits for its longest row, so that 131 072
# tokens take 2 % longer in two chunks than in one.
CHUNK = 1 << 30
# Dense products are used for at most FEW rows, or at most FEW_GATES gates (rows x neurons). If rows are not sparse, the
# tiles of the listed rows' products are too few to fill the GPU, and the block would take up to a third longer (H200,
# half the gates active: 0.76x to 0.89x the speed at 1 025 to 1 600 rows of N = 3 072 to 28 672, 0.75x in training). If
# rows are sparse, dense products forgo a speedup of up to 1.3x, in training 1.4x.
FEW = 1664
FEW_GATES = 9 << 20


class Block(Protocol):
    """Weights and elementwise programs of a block. gate, up: [N, K]; down: [D, N]."""

    @property
    def gate(self) -> torch.Tensor: ...
    @property
    def gate_bias(self) -> torch.Tensor | None: ...
    @property
    def up(self) -> torch.Tensor | None: ...
    @property
    def up_bias(self) -> torch.Tensor | None: ...
    @property
    def down(self) -> torch.Tensor: ...
    @property
    def down_bias(self) -> torch.Tensor | None: ...
    @property
    def f(self) -> Program: ...
    @property
    def g(self) -> Program: ...
    @property
    def zero_threshold(self) -> float: ...
    @property
    def thresholds(self) -> torch.Tensor | None: ...


class Packed(Protocol):
    """The active neurons of every row: count [M]; index, gate and up [M, cap]; up is empty if the block has no gate.

    popular [P]: neurons that are left out of the entries; their projections popular_gate and popular_up [M, P] are kept
    for all rows instead.
    """

    def without_popular(self) -> None: ...

    @property
    def count(self) -> torch.Tensor: ...
    @property
    def index(self) -> torch.Tensor: ...
    @property
    def gate(self) -> torch.Tensor: ...
    @property
    def up(self) -> torch.Tensor: ...
    @property
    def popular(self) -> torch.Tensor: ...
    @property
    def popular_gate(self) -> torch.Tensor: ...
    @property
    def popular_up(self) -> torch.Tensor: ...


class Statistics(Protocol):
    """Outputs of `statistics`: stats [4, M], or [5, M] with a weight [N]; counts [N], initially zeros, or None."""

    @property
    def stats(self) -> torch.Tensor: ...
    @property
    def weight(self) -> torch.Tensor | None: ...
    @property
    def counts(self) -> torch.Tensor | None: ...


def is_few(M: int, N: int) -> bool:
    """Whether M rows of N gates are computed by dense products, provided that no statistics are requested."""
    return M <= FEW or M * N <= FEW_GATES


def chunks(M: int, N: int, elements: int) -> list[slice]:
    """Cut M rows evenly into chunks of about `elements` elements of [M, N]; a chunk is a multiple of 128 rows."""
    pieces = max(1, -(-M * N // elements))
    step = -(-M // pieces)
    step = -(-step // 128) * 128
    return [slice(i, min(i + step, M)) for i in range(0, M, step)]


def forward(
    x: torch.Tensor,
    b: Block,
    stats: Statistics | None,
    packed: Packed | None,
    cap: int,
    residual: torch.Tensor | None = None,
    neurons: int = 0,
) -> torch.Tensor:
    """Return y [M, D] of tokens x [M, K], plus `residual` [M, D]. Writes `stats` and `packed` unless they are None.

    cap: maximum entries of a packed row. neurons: number of popular neurons, 0 for none.
    """
    M, N = x.shape[0], b.gate.shape[0]
    y = x.new_empty(M, b.down.shape[0])
    x = along_rows(x)
    plain = packed is None and stats is None and b.thresholds is None
    if plain and decode.applies(x, b):
        return decode.forward(x, b, y, residual)
    if residual is not None:
        return forward(x, b, stats, packed, cap, neurons=neurons).add_(residual)
    if stats is None and is_few(M, N):
        if packed is not None:
            packed.count.fill_(cap + 1)  # no row is packed
            packed.without_popular()
        return few.forward(x, b)
    up = None if b.up is None else row_major(b.up)
    if packed is None and M > packer.MANY:
        # With this many rows, one or two have more active neurons than usual. Gathering their weights takes less time
        # than a tile of dense products.
        cap *= 2
    with_bitmask = hopper.may_emit_bitmask(x, b.gate, b.zero_threshold, b.thresholds)
    # Without statistics, `weighted_rows` is the kernel after `dots` and can process each row as soon as it is done.
    follows = up is not None and stats is None and dot_rows.follows(x, up)
    table = common = keep = None
    if neurons and with_bitmask:
        common = packed.popular if packed else x.new_empty(neurons, dtype=torch.int64)
    elif packed is not None:
        packed.without_popular()
    totals = 32 * hopper.words(N) if common is not None else 0
    parts = chunks(M, N, CHUNK)
    for part in parts:
        m = part.stop - part.start
        wanted = None if stats is None else (stats.stats[:, part], stats.weight, stats.counts)
        state, more = packer.new_state(x.device, totals + m if follows else totals)
        ready = more[totals:] if follows else None
        bitmask = None
        # `state` is cleared by or before the gate projection: with programmatic dependent launch, packing must be the
        # next kernel after it.
        if with_bitmask:
            gate, bitmask = hopper.product_with_bitmask(
                x[part], b.gate, b.gate_bias, b.zero_threshold, state,
                room=len(parts) == 1, thresholds=b.thresholds,
            )  # fmt: skip
        else:
            state.zero_()
            gate = F.linear(x[part], b.gate, b.gate_bias)
        if table is None:
            table = row_major(b.down.t(), beside=with_bitmask)
        if packed is None:
            count = torch.empty(m, dtype=torch.int32, device=x.device)
            index = torch.empty(
                m, cap, dtype=torch.int16 if N <= 32768 else torch.int32, device=x.device
            )
            # The entries' gates are copied only for kernels that read entry by entry. Others read the projection.
            picks = bitmask is None or up is None or wanted is not None
            value, ups = x.new_empty(m, cap) if picks else None, None
        else:
            count, index, value = packed.count[part], packed.index[part], packed.gate[part]
            ups = packed.up[part] if up is not None else None
        onto = None
        if common is not None:
            if keep is None:
                keep = popular.choose(bitmask, more[:totals], N, common)
            kept = (packed.popular_gate[part], packed.popular_up[part]) if packed else None
            onto = popular.product(
                x[part], gate, up, b.up_bias, table, common, b.f, b.g, b.zero_threshold, kept
            )
        overflow = count.new_empty(m)
        packing = packer.pack(
            gate,
            bitmask,
            (count, index, value),
            overflow,
            state,
            b.zero_threshold,
            keep,
            b.thresholds,
        )
        rest = listed.Listed(overflow, state[packer.LENGTH.value :], state[packer.ARRIVED.value :])
        h, steps = value, b.f
        if up is not None:
            h, steps = x.new_empty(m, cap), ()
            gates = gate if value is None else value
            dot_rows.dots(
                x[part], up, b.up_bias, (count, index, gates), ups, packing, h, b.f, b.g,
                whole=value is None, ready=ready,
            )  # fmt: skip
        if wanted is not None and value is not None:
            statistics.of_packed(
                (count, index, value), None if up is None else h, wanted, state, b.f
            )
            statistics.of_listed(gate, wanted, rest, hidden=False, steps=b.f)
        rows.weighted_rows(
            count, index, h, table, y[part],
            steps=steps, bias=b.down_bias, state=state, onto=onto, ready=ready,
        )  # fmt: skip
        listed.hidden(x[part], up, b.up_bias, gate, rest, b.f, b.g, b.zero_threshold, b.thresholds)
        listed.product(gate, b.down, y[part], rest, bias=b.down_bias)
        if wanted is not None:
            statistics.of_listed(gate, wanted, rest, hidden=True)
    return y
