"""Backward kernels of the SPLADE head against gather-and-scatter sums in fp64."""

import math

import pytest
import torch

from sparse_inductor.epilogue.steps import dual, parse
from sparse_inductor.kernels.splade_head import backward as splade_head_backward
from sparse_inductor.kernels.splade_head.backward import backward
from support import heavy, in_a_graph

LOG1P = parse("relu | log1p")
INNER = parse("mul(0.5) | row_add(1) | row_mul(2) | row_where(0, -2.0) | softplus(1.0, 20.0)")

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # NumPy warns of inf and NaN, which these tests need


def problem(device, B, S, D, V, dtype=torch.float32, active=0.3, hot=0.3, seed=0):
    """Return random tensors: position 0 wins a share `hot` of the entries, and a share 1 - `active` has no winner."""
    g = torch.Generator().manual_seed(seed)

    def rand(*size):
        return torch.randn(*size, generator=g)

    winner = torch.randint(0, S, (B, V), generator=g)
    winner[torch.rand(B, V, generator=g) < hot] = 0
    winner[torch.rand(B, V, generator=g) >= active] = -1
    small = torch.int8 if S <= 127 else torch.int16
    tensors = {
        "grad": rand(B, V),
        "hidden": rand(B, S, D).to(dtype),
        "weight": rand(V, D).to(dtype),
        "bias": rand(V).to(dtype),
        "winner": winner.to(small),
        "peak": rand(B, V).abs() + 0.01,
    }
    return {k: v.to(device) for k, v in tensors.items()}


def gains(p, outer, inner=(), rows=(), per_element=None, outer_fast=None):
    """Return the gradient g[b, v] of the winning logits in fp64, 0 where no position won."""
    p = {k: v.double() for k, v in p.items()}
    w = p["winner"].long().clamp_min(0)
    b = torch.arange(len(w), device=w.device)[:, None]
    slope = dual((*inner, *outer), p["peak"], [r.double()[b, w] for r in rows])[1]
    if per_element is not None:
        fast = dual(outer_fast or outer, p["peak"])[1]
        slope = torch.where(per_element[:, None], slope, fast)
    return torch.where(p["winner"] >= 0, p["grad"] * slope, 0.0)


def reference(p, g):
    """Return the three gradients in fp64, computed from g by a scatter over positions and dense products."""
    hidden, weight = p["hidden"].double(), p["weight"].double()
    w = p["winner"].long().clamp_min(0)
    picked = hidden.new_zeros(hidden.shape[0], hidden.shape[1], weight.shape[0])
    picked.scatter_(1, w[:, None, :], g[:, None, :])
    return picked @ weight, torch.einsum("bsv,bsd->vd", picked, hidden), g.sum(0)


def check(got, want, dtypes):
    """fp32 sums are within 1e-5 of the largest result; bf16 and fp16 outputs add their own rounding."""
    for x, ref, dtype in zip(got, want, dtypes, strict=True):
        assert x.dtype == dtype and x.shape == ref.shape and x.is_contiguous()
        # bf16 has 2**-7 and not 2**-8, because the interpreter truncates to bf16.
        eps = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-11}[dtype]
        error = (x.double() - ref).abs()
        assert (error <= 1e-5 * ref.abs().max() + eps * ref.abs()).all(), error.max()


def run_and_check(p, outer=LOG1P, **general):
    dtypes = [p[k].dtype for k in ("hidden", "weight", "bias")]
    check(backward(**p, outer=outer, **general), reference(p, gains(p, outer, **general)), dtypes)


# B, S, D, V: all sizes odd; all sizes 1; more sequences than a block; rows wider than a program; larger sizes.
SHAPES = [
    (3, 7, 5, 11),
    (1, 1, 1, 1),
    heavy((35, 3, 4, 20)),
    (1, 4, 1300, 9),
    heavy((2, 130, 33, 300)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_match_fp64(device, shape):
    run_and_check(problem(device, *shape))


@pytest.mark.heavy
def test_tiles_of_few_and_of_many_entries(device):
    """Tiles of at most 256 active entries are packed before they are sorted."""
    p = problem(device, 2, 9, 4, 512, active=1.0)
    p["winner"][0, 200:] = -1
    run_and_check(p)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.bfloat16, heavy(torch.float16)], ids=str)
def test_low_precision_inputs_accumulate_in_fp32(device, dtype):
    run_and_check(problem(device, 4, 9, 16, 300, dtype=dtype, active=1.0))


def test_a_bias_wider_than_the_states_has_a_gradient_as_wide(device):
    p = problem(device, 4, 9, 16, 30, dtype=torch.bfloat16)
    run_and_check({**p, "bias": p["bias"].float()})


@pytest.mark.parametrize("active", [0.0, heavy(0.02), 1.0])
def test_any_share_of_active_entries_in_several_tiles(device, active, monkeypatch):
    monkeypatch.setattr(splade_head_backward, "_TILE", 128)
    run_and_check(problem(device, 3, 7, 5, 300, active=active))


@pytest.mark.heavy
def test_one_position_may_win_everything(device, monkeypatch):
    """Another kernel sums positions that win many entries."""
    run_and_check(
        problem(device, 2, 3, 4, 130, active=1.0, hot=1.0)
    )  # one tile: not by that kernel
    monkeypatch.setattr(splade_head_backward, "_HOT", 64)
    monkeypatch.setattr(splade_head_backward, "_TILE", 128)
    run_and_check(problem(device, 2, 3, 4, 130, active=1.0, hot=1.0))
    run_and_check(
        problem(device, 1, 9, 70, 700, active=1.0, hot=0.1)
    )  # 9 hot positions, 8 programs


@pytest.mark.parametrize("tile", [128, heavy(1024)])
def test_slabs_cover_everything(device, tile, monkeypatch):
    monkeypatch.setattr(splade_head_backward, "_TILE", tile)
    monkeypatch.setattr(splade_head_backward, "_SCRATCH_BYTES", 0)
    run_and_check(problem(device, 5, 6, 4, 150))


def test_zero_gradient_and_flat_epilogue_are_inactive(device):
    """An entry with g = 0 must not touch its rows: 0 * inf would be NaN."""
    p = problem(device, 3, 7, 5, 40, active=1.0)
    p["grad"][:, ::2] = 0.0
    p["peak"][:, 1::4] = -1.0  # relu has slope 0 here
    g = gains(p, LOG1P)
    assert 0 < (g == 0).sum() < g.numel()
    p["weight"][::2] = math.inf
    p["weight"][1::4] = math.nan
    got = backward(**p, outer=LOG1P)
    p["weight"] = p["weight"].nan_to_num(0.0, 0.0, 0.0)
    check(got, reference(p, g), [torch.float32] * 3)


def test_nan_and_inf_gradients_reach_their_rows_only(device):
    p = problem(device, 2, 5, 4, 30, active=1.0)
    p["grad"][0, 3], p["grad"][1, 7] = math.nan, math.inf
    grad_hidden, grad_weight, grad_bias = backward(**p, outer=LOG1P)
    bad_positions = {(0, int(p["winner"][0, 3])), (1, int(p["winner"][1, 7]))}
    assert {
        (b, s) for b in range(2) for s in range(5) if not grad_hidden[b, s].isfinite().all()
    } == (bad_positions)
    assert {v for v in range(30) if not grad_weight[v].isfinite().all()} == {3, 7}
    assert grad_bias[3].isnan() and grad_bias[7].isinf()


def test_strided_and_expanded_inputs(device):
    p = problem(device, 3, 7, 6, 40)
    want = reference(p, gains(p, LOG1P))
    strided = dict(p)
    strided["hidden"] = p["hidden"].transpose(1, 2).contiguous().transpose(1, 2)
    strided["weight"] = p["weight"].t().contiguous().t()
    strided["grad"] = torch.stack([p["grad"], p["grad"]], -1)[..., 0]
    check(backward(**strided, outer=LOG1P), want, [torch.float32] * 3)
    p["grad"] = torch.tensor(2.0, device=device).expand(3, 40)
    run_and_check(p)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float64], ids=str)
def test_grad_may_have_another_dtype(device, grad_dtype):
    p = problem(device, 3, 7, 6, 40)
    p["grad"] = p["grad"].to(grad_dtype)
    run_and_check(p)


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_computes_what_is_needed(device, needs):
    p = problem(device, 3, 7, 6, 40)
    want = reference(p, gains(p, LOG1P))
    got = backward(**p, outer=LOG1P, needs=needs)
    assert [g is not None for g in got] == list(needs)
    i = needs.index(True)
    check(got[i : i + 1], want[i : i + 1], [torch.float32])


def test_without_bias(device):
    p = problem(device, 3, 7, 6, 40)
    want = reference(p, gains(p, LOG1P))
    p["bias"] = None
    *got, grad_bias = backward(**p, outer=LOG1P)
    assert grad_bias is None
    check(got, want[:2], [torch.float32] * 2)


def test_empty_batch(device):
    grad_hidden, grad_weight, grad_bias = backward(**problem(device, 0, 7, 6, 40), outer=LOG1P)
    assert grad_hidden.shape == (0, 7, 6)
    assert (grad_weight == 0).all() and (grad_bias == 0).all()


GENERAL = {
    "all": None,
    "none": lambda b: b < 0,
    "one": lambda b: b == 1,
    "every third": lambda b: b % 3 == 0,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "general, B, V",
    [(name, 4, 150) for name in GENERAL] + [heavy(name, 35, 20) for name in GENERAL],
)
def test_steps_before_the_maximum(device, general, B, V, monkeypatch):
    """Operands have several dtypes and layouts, and some values are negative."""
    monkeypatch.setattr(splade_head_backward, "_TILE", 128)
    S, D = 9, 6
    p = problem(device, B, S, D, V, active=0.6)
    p["peak"] = torch.randn(B, V, generator=torch.Generator().manual_seed(2)).to(device)
    g = torch.Generator().manual_seed(1)
    mask = torch.rand(B, S, generator=g) > 0.3
    added = torch.randn(S, B, generator=g).half().t()
    weights = torch.randn(1, S, generator=g).expand(B, S)
    steps = {"inner": INNER, "rows": [r.to(device) for r in (mask, added, weights)]}
    if GENERAL[general] is not None:
        steps["per_element"] = GENERAL[general](torch.arange(B)).to(device)
        steps["outer_fast"] = parse("relu | sqrt")
    run_and_check(p, outer=parse("log1p"), **steps)


def test_flat_steps_before_the_maximum_are_inactive(device):
    """This holds for all steps that follow: sqrt has an infinite slope at 0."""
    p = problem(device, 3, 5, 6, 20, active=1.0)
    p["peak"][:, ::2] = -1.0
    p["weight"][::2] = math.nan
    mask = [torch.full((3, 5), 0.5, device=device)]
    got = backward(**p, outer=parse("sqrt"), inner=parse("relu | row_mul(0)"), rows=mask)
    assert got[0].isfinite().all()
    assert (got[1][::2] == 0).all() and (got[1][1::2] != 0).any()


@pytest.mark.parametrize("tile", [128, heavy(1024)])
def test_bitwise_repeatable(device, tile, monkeypatch):
    monkeypatch.setattr(splade_head_backward, "_TILE", tile)
    p = problem(device, 2, 9, 16, 150, active=1.0)
    first, again = backward(**p, outer=LOG1P), backward(**p, outer=LOG1P)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, active",
    [((16, 512, 768, 30522), 0.02), ((4, 512, 768, 30522), 1.0), ((2, 8192, 100, 5000), 0.5)],
    ids=str,
)
def test_large_shapes_on_gpu(shape, active):
    p = problem("cuda", *shape, dtype=torch.bfloat16, active=active, hot=0.1)
    run_and_check(p)


@pytest.mark.gpu
def test_runs_in_a_cuda_graph():
    p = problem("cuda", 4, 64, 32, 1000)
    backward(**p, outer=LOG1P)  # compiles
    graph, got = in_a_graph(lambda: backward(**p, outer=LOG1P))
    other = problem("cuda", 4, 64, 32, 1000, active=0.9, seed=1)
    for name, t in other.items():
        p[name].copy_(t)
    graph.replay()
    check(got, reference(p, gains(p, LOG1P)), [torch.float32] * 3)
