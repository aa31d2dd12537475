"""Packing by a bitmask: the PTX on a CPU, by `ptx_machine`, and the whole on a Hopper GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_machine import Memory, block
from test_relu_ffn_hopper import bitmask_of

from sparse_inductor.kernels.relu_ffn import bitmask_packing, hopper
from sparse_inductor.kernels.relu_ffn import bitmask_ptx as ptx
from sparse_inductor.kernels.relu_ffn import packing as packer

GARBAGE = 0x7777


class Rows:
    """A random gate projection, 16-bit: some rows have too many active neurons, one none."""

    def __init__(self, M: int, N: int, share: float, device: str = "cpu") -> None:
        torch.manual_seed(0)
        gate = torch.randn(M, N, device=device)
        gate -= torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - share)).item()
        gate[3::40] += 3.0
        gate[5] = -1.0
        gate[6, 7] = torch.nan
        self.gate = gate.half()
        self.active = ~(self.gate <= 0)
        self.bitmask = bitmask_of(self.gate.float(), 0.0)


def check(rows, cap, piece, count, index, value, state, overflow, pieces):
    """All that is packed."""
    M, N = rows.gate.shape
    bits, active = rows.gate.cpu().view(torch.int16).numpy(), rows.active.cpu().numpy()
    n_overflow, cost = 0, 0
    for m in range(M):
        c, want = count[m], np.flatnonzero(active[m])
        if len(want) > cap:
            n_overflow += 1
            assert c == cap + 1
            continue
        order = np.argsort(index[m, :c])
        assert (index[m, :c][order] == want).all()
        assert (value[m, :c][order] == bits[m, want]).all()
        cost += c
    assert n_overflow and (count == 0).any()
    most = -(-cap // piece)
    long = [m for m in range(M) if piece < count[m] <= cap]
    listed = [m * most + j for m in long for j in range(-(-count[m] // piece))]
    assert sorted(pieces[: state[packer.LISTED.value]].tolist()) == listed
    row = packer.dense_row(M, N)
    dense = 2 * n_overflow > M or cost + n_overflow * row > 0.9 * row * M
    assert state[packer.DENSE.value] == (M if dense else n_overflow)
    counters = state[: packer.LINE.value * packer.COUNTERS.value : packer.LINE.value]
    listed = overflow.reshape(packer.COUNTERS.value, -1)
    found = [
        listed[
            t,
            : n // packer.ONE_OVERFLOW.value % (packer.ONE_ROW.value // packer.ONE_OVERFLOW.value),
        ]
        for t, n in enumerate(counters)
    ]
    assert sorted(np.concatenate(found)) == np.flatnonzero(count > cap).tolist()


@pytest.mark.parametrize(
    ("M", "N", "cap", "piece", "share", "wide", "warps"),
    [
        (20, 600, 16, 8, 0.015, False, 8),
        (9, 600, 32, 8, 0.03, False, 1),
        (9, 8900, 3000, 32, 0.2, True, 8),  # more than a list has room for
        (60, 5632, 30, 8, 0.003, False, 8),  # packed rows pay
    ],
)
def test_rows_are_packed(M, N, cap, piece, share, wide, warps):
    rows = Rows(M, N, share)
    each = 2 * warps if warps > 1 else 1
    blocks = -(-M // each)
    most = -(-cap // piece)
    made = {
        "bitmask": rows.bitmask.numpy(),
        "gate": rows.gate.view(torch.int16).numpy(),
        "count": np.full(M, -9, np.int32),
        "index": np.full((M, cap), -9, np.int32 if wide else np.int16),
        "value": np.full((M, cap), GARBAGE, np.int16),
        "state": np.zeros(packer.ARRIVED.value, np.int64),
        "overflow": np.full(packer.room_for_rows(M), -9, np.int32),
        "pieces": np.full(M * most, -9, np.int32),
    }
    memory = Memory()
    at = [memory.add((i + 1) << 40, a) for i, a in enumerate(made.values())]
    code = ptx.pack(
        made["bitmask"].shape[1],
        N,
        cap,
        piece,
        most,
        wide,
        each,
        warps,
    )
    row = int(np.float32(packer.dense_row(M, N)).view(np.uint32))
    for b in range(blocks):
        inputs = [b, M, *at, blocks, row]
        block(code, inputs, Memory(), memory, warps=warps)
    packed = [made[n] for n in "count index value state overflow pieces".split()]
    check(rows, cap, piece, *packed)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "N", "cap", "share"),
    [
        (2000, 5632, 187, 0.01),
        (10001, 1408, 64, 0.02),
        (777, 40000, 600, 0.005),
        (5001, 5632, 187, 0.01),
        (300, 32768, 900, 0.003),
        (17001, 20000, 900, 0.003),
    ],
)
def test_rows_are_packed_on_a_gpu(M, N, cap, share):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    rows = Rows(M, N, share, "cuda")
    index = torch.int16 if N <= 32768 else torch.int32
    draw = lambda *s, dtype: torch.full(s, GARBAGE, dtype=dtype, device="cuda")
    count, index = draw(M, dtype=torch.int32), draw(M, cap, dtype=index)
    value = draw(M, cap, dtype=torch.int16).view(torch.float16)
    overflow = draw(packer.room_for_rows(M), dtype=torch.int32)
    state = packer.new_state(rows.gate.device).zero_()
    _, pieces = bitmask_packing.pack(
        rows.gate, rows.bitmask, (count, index, value), overflow, state
    )
    found = [t.cpu() for t in (count, index, value.view(torch.int16), state, overflow, pieces)]
    piece, _ = packer.pieces_of(M, cap, False)
    check(rows, cap, piece, *(t.numpy() for t in found))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("M", [1000, 5000])
def test_bitmask_of_a_product(dtype, M):
    """What the gate projection's bitmask says is packed."""
    torch.manual_seed(0)
    x, w = (torch.randn(n, 512, device="cuda").to(dtype) for n in (M, 1408))
    if not hopper.applies(x, w):
        pytest.skip("needs a Hopper GPU")
    state = packer.new_state(x.device)
    gate, bitmask = hopper.product_with_bitmask(x, w, None, 50.0, state)
    count = torch.empty(M, dtype=torch.int32, device="cuda")
    index = torch.empty(M, 128, dtype=torch.int16, device="cuda")
    value = gate.new_empty(M, 128)
    overflow = count.new_empty(packer.room_for_rows(M))
    bitmask_packing.pack(gate, bitmask, (count, index, value), overflow, state)
    active = gate > 50.0
    assert torch.equal(count.long(), active.sum(1).clamp(max=129))
    there = torch.arange(128, device="cuda") < count[:, None]
    dense = torch.zeros_like(gate)
    dense.scatter_(
        1, torch.where(there, index.long(), 0), torch.where(there, value, 0), reduce="add"
    )
    assert torch.equal(dense, torch.where(active, gate, 0))
