"""The feed-forward block's products on a Hopper GPU: results, the bitmask, and the threshold of active neurons."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F

import sparse_inductor
from sparse_inductor.kernels.relu_ffn import hopper


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threshold", [0.0, 0.1, -0.2, 1.0, 3e-5, -1.0, 1e5, -1e5, 1e39, -1e39])
def test_the_zero_threshold_is_the_last_number_that_is_not_active(dtype, threshold):
    both = torch.tensor([hopper.twice(threshold, dtype)], dtype=torch.int32).view(dtype)
    assert both[0] == both[1]
    least = both[0]
    above = torch.nextafter(least, torch.tensor(math.inf, dtype=dtype))
    assert least.item() <= threshold and (threshold < above.item() or least.item() == math.inf)


# On a GPU of 132 SMs.
tile_for = functools.partial(hopper.tile_for, programs=132)


def test_tiles_are_as_wide_as_fits_the_last_wave():
    assert [tile_for(M, 5632) for M in (128, 1001, 2048, 8192)] == [128, 128, 256, 256]
    assert tile_for(2048, 5632, room=hopper.ROOM) == 256
    assert tile_for(2305, 5632, room=hopper.ROOM) == 128


@pytest.mark.parametrize("columns", [columns for columns, _ in hopper.COSTS])
def test_stages_fit_beside_what_is_written(columns):
    beside, stage = 2 * 128 * 64, 2 * 64 * (128 + columns)
    assert hopper.stages(columns) * stage + beside <= hopper.SHARED
    assert (hopper.stages(columns) + 1) * stage + beside > hopper.SHARED, "as many as fit"


def bitmask_of(gate, threshold):
    """Return the bitmask that the Hopper product writes beside the gate projection."""
    M, N = gate.shape
    tiles = -(-N // 256)
    active = torch.zeros(M, 256 * tiles, dtype=torch.bool, device=gate.device)
    active[:, :N] = ~(gate <= threshold)
    active = active.view(M, tiles, 2, 16, 4, 2).permute(0, 1, 4, 2, 3, 5)
    bits = torch.arange(32, device=gate.device)
    return (active.reshape(M, 8 * tiles, 32).long() << bits).sum(2).to(torch.int32)


PRODUCTS = [
    (128, 64, 256),
    (1001, 200, 1000),
    (300, 4616, 512),
    (1481, 128, 5512),  # two tiles per program
    (4100, 1096, 2040),
    (5000, 512, 1408),
    (2048, 512, 5632),
    (2433, 2048, 5632),
    (5625, 1088, 1400),
]


def factors(dtype, M, K, N, k_major):
    """Return x [M, K], with a NaN, and a weight [N, K] that has unit stride along either dimension."""
    torch.manual_seed(0)
    x, w = (torch.randn(s, K, device="cuda", dtype=dtype) for s in (M, N))
    w /= K**0.5
    x[1, 3] = torch.nan
    return x, w if k_major else w.t().contiguous().t()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("M", "K", "N"), PRODUCTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("k_major", [True, False])
def test_marked_product(dtype, M, K, N, bias, k_major):
    x, w = factors(dtype, M, K, N, k_major)
    b = torch.randn(N, device="cuda", dtype=dtype) if bias else None
    assert hopper.applies(x, w)
    state = torch.full((M * 7 + 1,), -1, dtype=torch.int64, device="cuda")
    want = F.linear(x, w, b)
    for room in (False, True):
        out, bitmask = hopper.product_with_bitmask(x, w, b, 0.3, state, room=room)
        assert not state.any()
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2, equal_nan=True)
        assert torch.equal(bitmask, bitmask_of(out.float(), 0.3))
        if not room:
            state.fill_(-1)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize(("M", "K", "N"), PRODUCTS)
def test_marked_product_by_thresholds_of_neurons(dtype, k_major, M, K, N):
    x, w = factors(dtype, M, K, N, k_major)
    thresholds = torch.randn(N, device="cuda", dtype=dtype)
    state = torch.full((7,), -1, dtype=torch.int32, device="cuda")
    out, bitmask = hopper.product_with_bitmask(x, w, None, -math.inf, state, thresholds=thresholds)
    assert not state.any()
    torch.testing.assert_close(out, F.linear(x, w), rtol=2e-2, atol=2e-2, equal_nan=True)
    assert torch.equal(bitmask, bitmask_of(out.float(), thresholds.float()))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("steps", ["relu", "relu | square"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("share", [0.5, 0.005])
def test_statistics(share, gated, steps, train):
    """With dense rows only, and with sparse rows and some overflow rows."""
    torch.manual_seed(0)
    M, K, N, D = 1800, 512, 5632, 384
    draw = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    x, gate, down = draw(M, K), draw(N, K) / K**0.5, draw(D, N) / 8
    up = draw(N, K) / K**0.5 if gated else None
    assert hopper.applies(x, gate)
    shift = torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - share))
    bias = torch.full((N,), -shift.item(), device="cuda", dtype=torch.bfloat16)
    x[::100] *= 4
    y, stats = sparse_inductor.ops.relu_ffn(
        x.requires_grad_(train), gate, down, up, gate_bias=bias, gate_steps=steps, return_stats=True
    )
    a = F.relu(F.linear(x.double(), gate.double(), bias.double()))
    a = a.square() if "square" in steps else a
    h = a if up is None else a * F.linear(x.double(), up.double())
    want = torch.stack([f for t in (a, h) for f in (t.abs().sum(1), (t != 0).sum(1))]).detach()
    torch.testing.assert_close(stats.double(), want, rtol=2e-2, atol=2)
    want = h @ down.double().t()
    assert ((y - want).abs() < 0.05 * want.square().mean(1, keepdim=True).sqrt()).all()
