"""Popular neurons, those active for the most tokens: their choice, and their part of the block and its gradients."""

from __future__ import annotations

import pytest
import torch
from test_relu_ffn import CAP, DEVICE, empty_packed, make
from test_relu_ffn_hopper import bitmask_of

from sparse_inductor.kernels.common import transpose
from sparse_inductor.kernels.relu_ffn import backward, forward, popular
from sparse_inductor.kernels.relu_ffn import packing as packer
from sparse_inductor.ops import _relu_ffn_aten as aten


def choose(active: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (popular neurons, the bitmask without them)."""
    bitmask = bitmask_of(active.float(), 0.0)
    found = torch.full((number,), -1, dtype=torch.int64, device=active.device)
    totals = bitmask.new_zeros(bitmask.shape[1], 32)
    return found, bitmask & popular.choose(bitmask, totals, active.shape[1], found)


@pytest.mark.parametrize(
    ("M", "N", "number"), [(70, 300, 128), (5, 256, 1), (130, 600, 299), (3, 40, 20)]
)
def test_the_most_active_are_chosen_and_the_others_kept(M, N, number):
    torch.manual_seed(N)
    active = torch.rand(M, N, device=DEVICE) < torch.rand(N, device=DEVICE) ** 4
    found, rest = choose(active, number)
    assert len({*found.tolist()}) == number and 0 <= int(found.min()) <= int(found.max()) < N
    counts = active.sum(0)
    others = torch.ones(N, dtype=torch.bool, device=DEVICE)
    others[found] = False
    assert counts[found].min() >= counts[others].max()
    assert torch.equal(rest, bitmask_of((active & others).float(), 0.0))


def test_equally_popular_ones_fill_the_number(monkeypatch):
    monkeypatch.setattr(popular, "MANY", 3)
    active = torch.ones(9, 300, dtype=torch.bool, device=DEVICE)
    found, rest = choose(active, 128)
    assert len({*found.tolist()}) == 128
    assert int(sum(bin(w & 0xFFFFFFFF).count("1") for w in rest[0].tolist())) == 300 - 128
    nobody, _ = choose(~active, 128)
    assert torch.equal(nobody.sort().values, found.sort().values)


def test_many_rows_are_sampled(monkeypatch):
    monkeypatch.setattr(popular, "COUNTED", 16)
    active = torch.zeros(100, 64, dtype=torch.bool, device=DEVICE)
    active[:, 7] = True
    active[::2, 9] = True
    found, _ = choose(active, 2)
    assert sorted(found.tolist()) == [7, 9]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("steps", ["relu", "add(-0.5) | relu | square"])
def test_what_they_add(gated, steps):
    x, b = make(37, N=160, gated=gated, steps=steps, share=0.4)
    number, cap = 48, 9
    found = torch.randperm(160, device=DEVICE)[:number]
    gate = torch.nn.functional.linear(x, b.gate, b.gate_bias)
    kept = (x.new_empty(37, number), x.new_empty(37 if gated else 0, number))
    table = b.down.t().contiguous()
    at = b.f, b.g, b.zero_threshold
    got = popular.product(x, gate, b.up, b.up_bias, table, found, *at, kept)

    alone = torch.zeros(160, device=DEVICE)
    alone[found] = 1
    count = torch.arange(37, dtype=torch.int32, device=DEVICE) % 12  # some rows overflow
    packed_rows = (count <= cap).unsqueeze(1).float()
    leaves = [t.clone().requires_grad_() for t in (x, b.gate, b.gate_bias, b.down)]
    if gated:
        leaves += [t.clone().requires_grad_() for t in (b.up, b.up_bias)]
    xs, wg, bg, wd, *more = leaves
    h = aten.run(b.f, torch.nn.functional.linear(xs, wg, bg))
    if gated:
        h = h * torch.nn.functional.linear(xs, *more)
    want = (h * alone) @ wd.t()
    torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kept[0], gate[:, found])

    dy = torch.randn_like(want)
    d_x, d_gate, d_bg, d_down, *d_more = torch.autograd.grad(want, leaves, dy * packed_rows)
    one = popular.Gradients(
        dy, found, kept[0], kept[1] if gated else None, (b.gate, b.up, table), count, cap, *at
    )
    torch.testing.assert_close(one.of_x(), d_x, rtol=1e-4, atol=1e-4)
    into = [torch.zeros_like(t) for t in (d_gate, d_bg, d_down.t().contiguous())]
    ups = [torch.zeros_like(t) for t in d_more] if gated else [None, None]
    one.add_to(x, dy, (into[0], ups[0]), (into[1], ups[1]), into[2])
    summed = [t for t in (*into, *ups) if t is not None]
    torch.testing.assert_close(summed, [d_gate, d_bg, d_down.t(), *d_more], rtol=1e-4, atol=1e-4)


@pytest.fixture
def bitmasks(monkeypatch):
    """Replaces the Hopper product by ATen operations that give the same bitmask; packing is the portable one."""

    def product(x, weight, bias, threshold, state, room=False, thresholds=None):
        state.zero_()
        gate = torch.nn.functional.linear(x, weight, bias)
        return gate, bitmask_of(gate, threshold)

    monkeypatch.setattr(packer, "DENSE_ROW", 1.0)
    monkeypatch.setattr(forward, "FEW", 0)
    monkeypatch.setattr(forward, "FEW_GATES", 0)
    monkeypatch.setattr(transpose, "USE_PDL", False)
    monkeypatch.setattr(forward.hopper, "may_emit_bitmask", lambda *_: True)
    monkeypatch.setattr(forward.hopper, "product_with_bitmask", product)


@pytest.mark.usefixtures("bitmasks")
@pytest.mark.parametrize(
    ("gated", "bias", "chunk"), [(True, True, 300 * 128), (False, False, 1 << 30)]
)
def test_a_block_with_popular_neurons(gated, bias, chunk, monkeypatch):
    """The whole block and all of its gradients: some rows overflow, and one case is computed in chunks of rows."""
    monkeypatch.setattr(forward, "CHUNK", chunk)
    x, b = make(140, N=300, gated=gated, bias=bias, share=0.06)
    if not bias:
        b.gate[:, 0] -= 2
        x[:, 0], x[5, 0] = 1, 0
    x[5] *= 40  # overflows with and without the popular neurons
    packed = empty_packed(x, b, popular=64)
    got = forward.forward(x, b, None, packed, CAP, neurons=64)
    plain = empty_packed(x, b)
    torch.testing.assert_close(got, aten.forward(x, b, None, plain), rtol=1e-4, atol=1e-4)
    assert (packed.count > CAP).any() and (packed.count <= CAP).sum() > 100
    active = (packed.popular_gate > 0).sum() + packed.count[packed.count <= CAP].sum()
    assert active > 0 and len({*packed.popular.tolist()}) == 64
    with torch.no_grad():
        alone = forward.forward(x, b, None, None, CAP, neurons=64)
    torch.testing.assert_close(alone, got, rtol=1e-5, atol=1e-5)

    call, wanted = (torch.randn_like(got), None, None, x, b), ([True] * 8, [False] * 3)
    mine = backward.backward(*call, packed, *wanted)
    theirs = aten.backward(*call, plain, *wanted)
    by_aten = aten.backward(*call, packed, *wanted)
    for found in (mine, by_aten):
        for one, other in zip(found, theirs, strict=True):
            if other is not None:
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
