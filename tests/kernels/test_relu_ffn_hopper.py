"""The feed-forward block's products on a Hopper GPU: numbers, the bitmask, and the boundary of what is active."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import sparse_inductor
import support
from sparse_inductor.kernels.common import tile_order
from sparse_inductor.kernels.common.unroll import unrolled
from sparse_inductor.kernels.relu_ffn import dense, hopper, overflow
from sparse_inductor.kernels.relu_ffn import packing as packer
from sparse_inductor.kernels.relu_ffn import tiles as tile_rounds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threshold", [0.0, 0.1, -0.2, 1.0, 3e-5, -1.0, 1e5, -1e5, 1e39, -1e39])
def test_the_zero_threshold_is_the_last_number_that_is_not_active(dtype, threshold):
    both = torch.tensor([packer.twice(threshold, dtype)], dtype=torch.int32).view(dtype)
    assert both[0] == both[1]
    least = both[0]
    above = torch.nextafter(least, torch.tensor(math.inf, dtype=dtype))
    assert least.item() <= threshold and (threshold < above.item() or least.item() == math.inf)


def test_steps_are_unrolled_within_what_a_compiler_takes():
    for steps in range(1, 200):
        total, each = unrolled(steps)
        assert total % each == 0 and steps <= total <= steps * 9 / 8 + 1
        assert each <= 16 and (each == total or each >= 5)


# On a GPU of 132 SMs.
tile_for = functools.partial(hopper.tile_for, programs=132)


def test_tiles_are_as_wide_as_fits_the_last_wave():
    assert [tile_for(M, 5632)[0] for M in (128, 1001, 2048, 8192)] == [128, 128, 256, 256]
    assert tile_for(2048, 5632, room=hopper.ROOM) == (256, True)
    assert tile_for(2305, 5632, room=hopper.ROOM)[0] == 128


@pytest.mark.parametrize("columns", [columns for columns, _ in hopper.COSTS])
def test_stages_fit_beside_what_is_written(columns):
    beside, stage = 2 * 128 * 64, 2 * 64 * (128 + columns)
    assert hopper.stages(columns) * stage + beside <= hopper.SHARED
    assert (hopper.stages(columns) + 1) * stage + beside > hopper.SHARED, "as many as fit"


@triton.jit
def _rest_kernel(out, tiles, short, steps):
    rest, halves, alone, splits = tile_rounds.rest_of(tiles, short, steps)
    if tl.program_id(0) == 0:
        tl.store(out, rest)
        tl.store(out + 1, halves)
        tl.store(out + 2, alone)
        tl.store(out + 3, splits)


@pytest.mark.parametrize("rows", [support.heavy(128), 65, support.heavy(64), 1])
@pytest.mark.parametrize("tiles_n", [support.heavy(1), 5])
@pytest.mark.parametrize("steps", [4, support.heavy(36), 88, support.heavy(176)])
def test_what_is_left_past_the_last_round_is_shared_out(steps, tiles_n, rows, device):
    """The last row tile has so many rows of 128."""
    programs = 24
    for tiles_m in range(1, 3 * programs // tiles_n):
        tiles = tiles_m * tiles_n
        short = tiles_n if rows <= 64 else 0
        out = torch.empty(4, dtype=torch.int32, device=device)
        _rest_kernel[(programs,)](out, tiles, short, steps)
        rest, halves, alone, splits = out.tolist()
        assert rest in (0, tiles % programs) and alone <= min(halves, programs)
        assert halves == 2 * rest - min(rest, short)
        assert (halves - alone) * splits <= programs, "a program for each part"
        assert splits * tile_rounds.STEPS_TMA.value <= max(steps, tile_rounds.STEPS_TMA.value)
        if halves > programs:
            assert alone == programs and splits >= tile_rounds.LEAST_SPLITS.value


@triton.jit
def _places_kernel(out, M, tiles_n, rest, halves, BM: tl.constexpr):
    tiles = tl.cdiv(M, BM) * tiles_n
    full = tile_order.rows_full(M, BM)
    for half in range(halves):
        m0, pn = tile_rounds.half_at(half, tiles, rest, halves, full, tiles_n, BM)
        tl.store(out + 2 * half, m0)
        tl.store(out + 2 * half + 1, pn)
    for t in range(tiles - rest):
        pm, pn = tile_order.tile_last(t, full, tiles_n)
        tl.store(out + 2 * (halves + t), pm * BM)
        tl.store(out + 2 * (halves + t) + 1, pn)


@pytest.mark.parametrize("rows", [128, 65, 64, 1])
@pytest.mark.parametrize(("tiles_m", "tiles_n"), [(1, 3), (9, 3), (10, 5), (25, 2)])
def test_halves_and_whole_tiles_are_all_there_is(tiles_m, tiles_n, rows, device):
    """Each once, and none without rows."""
    M, tiles = 128 * (tiles_m - 1) + rows, tiles_m * tiles_n
    for rest in (0, 1, tiles_n, tiles // 2, tiles):
        halves = 2 * rest - (min(rest, tiles_n) if rows <= 64 else 0)
        out = torch.empty(halves + tiles - rest, 2, dtype=torch.int32, device=device)
        _places_kernel[(1,)](out, M, tiles_n, rest, halves, 128)
        made = torch.zeros(2 * tiles_m, tiles_n, dtype=torch.int32)
        for i, (m0, pn) in enumerate(out.tolist()):
            assert m0 < M and m0 % (64 if i < halves else 128) == 0
            made[m0 // 64 : m0 // 64 + (1 if i < halves else 2), pn] += 1
        assert (made[: -(-M // 64)] == 1).all()


def bitmask_of(gate, threshold):
    """The bits that `relu_ffn_hopper` writes beside the gate projection."""
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
    (1481, 128, 5512),  # two tiles a program
    (4100, 1096, 2040),
    (5000, 512, 1408),
    (2048, 512, 5632),
    (2433, 2048, 5632),
    (5625, 1088, 1400),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("M", "K", "N"), PRODUCTS)
@pytest.mark.parametrize("bias", [True, False])
def test_marked_product(dtype, M, K, N, bias):
    torch.manual_seed(0)
    x, w = (torch.randn(s, K, device="cuda", dtype=dtype) for s in (M, N))
    w /= K**0.5
    b = torch.randn(N, device="cuda", dtype=dtype) if bias else None
    x[1, 3] = torch.nan
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
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("steps", ["relu", "relu | square"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("share", [0.5, 0.005])
def test_statistics(share, gated, steps, train):
    """Of dense rows only, and of sparse ones and some overflow rows."""
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


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("M", "N", "D"),
    [
        (2049, 3200, 2048),  # 136 tiles of 128 x 256: four past a round of 132, all with one row
        (2100, 3200, 2048),  # with 52, and eight programs each
        (2305, 4104, 2048),  # 152: twelve by halves, and eight with one row
        (4300, 2600, 2056),  # 306: the last column tiles are not full
        (300, 5632, 520),  # 9: 15 halves, by eight programs each
        (2700, 512, 768),  # 66: a program a half
        (1900, 1032, 1288),  # 90: too many for a round that is not full
        (3100, 4104, 2048),  # 200: a round, and one of halves, with 28 rows in the last
        (3150, 4104, 2048),  # and with 78: four of the halves are made by several programs
        (20, 5632, 2048),  # 8, all short
        (1700, 5000, 1536),  # 84, 162 halves: a round of them, and 30 by four programs each
        (1750, 5000, 1536),  # 84, 168 halves: 36 by three, the least
    ],
)
def test_product_of_all_rows(M, N, D, bias):
    torch.manual_seed(0)
    draw = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    h, down, b = draw(M, N), draw(D, N) / N**0.5, draw(D) if bias else None
    assert hopper.applies(h, down)
    state = packer.new_state(h.device).zero_()
    state[packer.DENSE.value] = M
    out = torch.full((M, D), torch.nan, device="cuda", dtype=torch.bfloat16)
    listed = torch.empty(packer.room_for_rows(M), dtype=torch.int32, device="cuda")
    dense.product(h, down, out, (state, listed), b)
    want = F.linear(h.float(), down.float(), None if b is None else b.float())
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("two", [True, False])
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize(
    ("M", "N", "D", "n", "parts"),
    [
        (2049, 2600, 2048, 2049, True),
        (2700, 2800, 512, 1500, True),
        (2700, 200, 3080, 2561, False),  # a sum of four steps
        (3100, 4104, 2048, 3100, False),  # 128 halves
        (3150, 4104, 2048, 3150, True),  # 136 halves
        (1700, 5000, 1536, 1665, True),
        (1750, 5000, 1536, 1730, True),
    ],
)
def test_tiles_past_the_last_round_are_made_in_parts(two, by_row, M, N, D, n, parts):
    torch.manual_seed(0)
    draw = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    pairs = [(draw(M, N), draw(N, D) / N**0.5) for _ in range(1 + two)]
    assert hopper.applies(*pairs[0])
    (a, w), *second = [(a, w if by_row else w.t().contiguous()) for a, w in pairs]
    order = torch.arange(M, device="cuda") if n == M else torch.randperm(M, device="cuda")
    rows = order.to(torch.int32)
    counts = torch.zeros(1 + packer.ARRIVALS, dtype=torch.int32, device="cuda")
    counts[0] = n
    out = torch.full((M, D), torch.nan, device="cuda", dtype=torch.bfloat16)
    more = second[0] if two else None
    options = {"by_row": by_row, "scatter": True, "second": more}
    overflow.copied_product(a, w, out, rows, counts[:1], arrived=counts[1:], **options)
    if torch.cuda.get_device_properties("cuda").multi_processor_count == 132:
        assert counts[1:].any() == parts
    want = sum(a.float() @ w.float() for a, w in pairs)
    torch.testing.assert_close(out[rows[:n].long()].float(), want[:n], rtol=2e-2, atol=2e-2)
    assert out[rows[n:].long()].isnan().all()
    once = torch.empty_like(out)
    overflow.copied_product(a, w, once, rows, counts[:1], **options)
    listed = rows[:n].long()
    torch.testing.assert_close(once[listed].float(), want[:n], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("n", [2049, 700, 1, 0])
@pytest.mark.parametrize("sums", [1, 2, 3])
def test_sums_over_rows_one_behind_the_other(sums, n):
    torch.manual_seed(0)
    M, N, widths = 2049, 1408, (640, 640, 1000)
    room = M + overflow.PAD.value
    draw = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    listed = torch.randperm(M, device="cuda")[:n] if n < M else torch.arange(M, device="cuda")
    length = torch.tensor([n], dtype=torch.int32, device="cuda")
    given, wants = [], []
    for i, K in enumerate(widths[:sums]):
        a, source = draw(room, N) / n**0.5 if n else draw(room, N), draw(M, K)
        a[n:] = 0
        x = torch.zeros(room, K, device="cuda", dtype=torch.bfloat16)
        x[:n] = source[listed]
        out, bias = draw(N, K) if i < 2 else draw(K, N).t(), draw(N) if i else None
        wants.append(out.float() + a[:n].float().t() @ x[:n].float())
        if bias is not None:
            wants.append(bias.float() + a[:n].float().sum(0))
        given.append(overflow.Sum(a, x, source, out, bias))
    assert hopper.applies(given[0].source)
    overflow.add_products(given, length)
    got = [t for s in given for t in (s.out, s.bias) if t is not None]
    for t, want in zip(got, wants, strict=True):
        torch.testing.assert_close(t.float(), want, rtol=2e-2, atol=2e-2)
