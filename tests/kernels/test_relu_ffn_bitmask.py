"""Packing of the active neurons, from the gate projection itself and from the bitmask of the Hopper kernel."""

from __future__ import annotations

import pytest
import torch
from test_relu_ffn_hopper import bitmask_of

from sparse_inductor.kernels.relu_ffn import hopper
from sparse_inductor.kernels.relu_ffn import packing as packer
from support import heavy


def gates(M: int, N: int, share: float, device: str) -> torch.Tensor:
    """Return a random gate projection in fp16: some rows have too many active neurons, one none, one a NaN."""
    torch.manual_seed(0)
    gate = torch.randn(M, N, device=device)
    gate -= torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - share)).item()
    gate[3::40] += 3.0
    gate[5] = -1.0
    gate[6, 7] = torch.nan
    return gate.half()


def check(gate, bitmask, cap):
    """Check everything that `pack` writes."""
    M, N = gate.shape
    made = lambda *s, dtype=torch.int32: torch.full(s, 99, dtype=dtype, device=gate.device)
    count, overflow = made(M), made(M)
    index = made(M, cap, dtype=torch.int16 if N <= 32768 else torch.int32)
    value = gate.new_full((M, cap), 77.0)
    state, _ = packer.new_state(gate.device)
    state.zero_()
    _, pieces = packer.pack(gate, bitmask, (count, index, value), overflow, state, 0.0)
    active = ~(gate <= 0)
    wanted = active.sum(1)
    fits = wanted <= cap
    assert torch.equal(count > cap, ~fits) and torch.equal(count[fits], wanted[fits].int())
    assert not fits.all() and (count == 0).any()
    there = (torch.arange(cap, device=gate.device) < count[:, None]) & fits[:, None]
    row, slot = there.nonzero(as_tuple=True)
    column = index[row, slot].long()
    found = torch.zeros_like(active).index_put(
        (row, column), torch.tensor(True, device=gate.device)
    )
    assert torch.equal(found, active & fits[:, None])
    torch.testing.assert_close(value[row, slot], gate[row, column], rtol=0, atol=0, equal_nan=True)
    n_overflow, entries = int((~fits).sum()), int(wanted[fits].sum())
    assert state[packer.OVERFLOW.value] == n_overflow and state[packer.ENTRIES.value] == entries
    assert torch.equal(overflow[:n_overflow].sort().values, (~fits).nonzero().squeeze(1).int())
    piece, most = packer.pieces_of(M, cap, not gate.is_cuda)
    listed = [
        m * most + j
        for m, c in enumerate(count.tolist())
        if piece < c <= cap
        for j in range(-(-c // piece))
    ]
    assert sorted(pieces[: state[packer.LISTED.value]].tolist()) == listed
    cost = packer.dense_row(N)
    dense = 2 * n_overflow > M or entries + n_overflow * cost > 0.9 * cost * M
    assert state[packer.LENGTH.value] == (M if dense else n_overflow)


SIZES = [
    (20, 600, 16, 0.015),
    heavy(9, 600, 32, 0.03),
    heavy(9, 8904, 2200, 0.2),
    heavy(60, 5632, 30, 0.003),  # packed rows are faster
]
LARGE = [
    (2000, 5632, 187, 0.01),
    (10001, 1408, 64, 0.02),
    (777, 40000, 600, 0.005),
    (17001, 20000, 900, 0.003),
]


@pytest.mark.parametrize("by_bitmask", [True, False])
@pytest.mark.parametrize(
    ("M", "N", "cap", "share"),
    [*SIZES, *(pytest.param(*sizes, marks=pytest.mark.gpu) for sizes in LARGE)],
)
def test_rows_are_packed(M, N, cap, share, by_bitmask, device):
    gate = gates(M, N, share, device)
    check(gate, bitmask_of(gate.float(), 0.0) if by_bitmask else None, cap)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("M", [1000, 5000])
def test_bitmask_of_a_product(dtype, M):
    """Neurons that are set in the product's bitmask are packed, and the product clears the state."""
    torch.manual_seed(0)
    x, w = (torch.randn(n, 512, device="cuda").to(dtype) for n in (M, 1408))
    state, _ = packer.new_state(x.device)
    gate, bitmask = hopper.product_with_bitmask(x, w, None, 50.0, state.fill_(7))
    assert not state.any()
    count = torch.empty(M, dtype=torch.int32, device="cuda")
    index = torch.empty(M, 128, dtype=torch.int16, device="cuda")
    value = gate.new_empty(M, 128)
    packer.pack(gate, bitmask, (count, index, value), count.new_empty(M), state, 50.0)
    active = gate > 50.0
    assert torch.equal(count.long(), active.sum(1))
    there = torch.arange(128, device="cuda") < count[:, None]
    dense = torch.zeros_like(gate)
    dense.scatter_(
        1, torch.where(there, index.long(), 0), torch.where(there, value, 0), reduce="add"
    )
    assert torch.equal(dense, torch.where(active, gate, 0))
