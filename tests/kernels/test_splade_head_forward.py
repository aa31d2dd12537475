"""The SPLADE head's forward kernels against the same formula in fp64."""

import importlib
import math

import pytest
import torch

from sparse_inductor.epilogue import steps
from sparse_inductor.epilogue.plan import Lowered, lower, plan
from sparse_inductor.kernels.splade_head import forward as splade_head_forward
from sparse_inductor.kernels.splade_head.forward import forward
from support import heavy, in_a_graph

RELU_LOG1P = steps.parse("relu | log1p")
# Relative to the largest value of the tensor. Both computations use the same rounded operands, so the tolerance covers
# the accumulation order (fp32) and the rounding of the output (16-bit dtypes).
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def nothing_is_few(monkeypatch):
    """On a Hopper GPU, the Hopper kernel also computes heads as small as those of the tests."""
    monkeypatch.setattr(splade_head_forward, "FEW", 0)


def make(device, B=3, S=37, D=24, V=50, dtype=torch.float32, bias=True):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, S, D, generator=g).to(device, dtype)
    weight = (torch.randn(V, D, generator=g) * 0.5).to(device, dtype)
    return hidden, weight, torch.randn(V, generator=g).to(device, dtype) if bias else None


def lengths_to_add(lengths, S, device):
    s = torch.arange(S)
    keep = s[None, :] < torch.tensor(lengths)[:, None]
    return torch.where(keep, 0.0, -math.inf).to(device)


def reference(hidden, weight, bias, add, fill, outer, inner=(), rows=()):
    """Return (values, logits z [B, S, V], operand of the maximum [B, S, V], dropped [B, S]) in fp64."""
    z = hidden.double() @ weight.double().T
    if bias is not None:
        z = z + bias.double()
    dropped = torch.zeros(z.shape[:2], dtype=torch.bool, device=z.device)
    if add is not None:
        dropped = add == -math.inf
        z = z if inner else z + torch.where(dropped, 0.0, add).double()[..., None]
    y = steps.run(inner, z, [r.double() for r in rows])
    y = torch.where(dropped[..., None], -math.inf, y)
    values = steps.run(outer, y.amax(1))
    if fill is not None:
        values = torch.maximum(values, fill.double()[:, None])
    return values, z, y, dropped


def assert_close(actual, expected, dtype):
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.isinf(), expected.isinf())
    finite = expected.isfinite()
    assert torch.equal(
        actual[~finite & ~expected.isnan()].double(), expected[~finite & ~expected.isnan()]
    )
    if finite.any():
        error = (actual.double() - expected)[finite].abs().max()
        assert error <= TOLERANCE[dtype] * expected[finite].abs().max().clamp_min(1.0)


def check(
    hidden, weight, bias, add=None, fill=None, outer=RELU_LOG1P, inner=(), rows=(), out_dtype=None,
    winner_dtype=torch.int16,
):  # fmt: skip
    """Check values, winner and peak of one call against the reference; return the winner."""
    dtype = out_dtype or hidden.dtype
    kwargs = {"inner": inner, "rows": rows, "out_dtype": dtype}
    values, winner, peak = forward(
        hidden, weight, bias, add, fill, outer, winner_dtype=winner_dtype, **kwargs
    )
    expected, z, y, dropped = reference(hidden, weight, bias, add, fill, outer, inner, rows)
    most = y.amax(1)
    assert (values.dtype, winner.dtype, peak.dtype) == (dtype, winner_dtype, torch.float32)
    assert_close(values, expected, dtype)
    at_winner = z.gather(1, winner.long().clamp_min(0)[:, None]).squeeze(1)
    assert_close(peak, torch.where(winner < 0, peak.double(), at_winner), torch.float32)
    assert (peak[dropped.all(1)] == -math.inf).all()
    only_values, *nothing = forward(hidden, weight, bias, add, fill, outer, **kwargs)
    assert torch.equal(only_values.isnan(), values.isnan()) and nothing == [None, None]
    assert torch.equal(only_values.nan_to_num(), values.nan_to_num())
    lost = dropped.all(1)[:, None].expand_as(winner)
    if fill is not None:
        lost = lost | (fill[:, None] > steps.run(outer, most.float()))
    assert (winner[lost] == -1).all()
    at = y.gather(1, winner.long().clamp_min(0)[:, None]).squeeze(1)
    slack = 2e-6 * most[most.isfinite()].abs().max().clamp_min(1.0)
    assert (winner[~lost] >= 0).all() and (at >= most - slack)[~lost].all()
    return winner


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("S, D, V", [(1, 1, 1), (33, 17, 31), (70, 40, 65), (256, 64, 130)])
def test_values_winner_and_peak(device, dtype, S, D, V):
    check(*make(device, S=S, D=D, V=V, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bias_and_other_output_dtype(device, dtype):
    check(*make(device, dtype=dtype, bias=False), out_dtype=torch.float32)


def test_a_bias_wider_than_the_states(device):
    hidden, weight, bias = make(device, dtype=torch.bfloat16)
    check(hidden, weight, bias.float() + 1e-3, out_dtype=torch.float32)


@pytest.mark.parametrize("lengths", [(300, 1, 64), (32, 33, 31), (0, 257, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropped_positions(device, dtype, lengths):
    hidden, weight, bias = make(device, S=300, dtype=dtype)
    winner = check(hidden, weight, bias, lengths_to_add(lengths, 300, device))
    assert (winner < torch.tensor(lengths, device=device)[:, None]).all()


def test_scattered_and_leading_drops(device):
    hidden, weight, bias = make(device, B=4, S=200, dtype=torch.bfloat16)
    add = torch.zeros(4, 200)
    add[0, ::2] = -math.inf
    add[1, :150] = -math.inf
    add[2, 32:64] = -math.inf
    add[3, 7:] = -math.inf
    check(hidden, weight, bias, add.to(device))


def test_real_valued_add(device):
    hidden, weight, bias = make(device, S=90, dtype=torch.bfloat16)
    add = torch.randn(3, 90, generator=torch.Generator().manual_seed(1)) * 3
    check(hidden, weight, bias, add.to(device))


def test_a_dropped_position_may_hold_nan(device):
    hidden, weight, bias = make(device, S=70, dtype=torch.bfloat16)
    hidden[:, 40:] = math.nan
    values, _, _ = forward(
        hidden, weight, bias, lengths_to_add((40, 35, 1), 70, device), None, RELU_LOG1P
    )
    assert values.isfinite().all()


def test_nan_logits_give_nan(device):
    hidden, weight, bias = make(device, S=70, dtype=torch.bfloat16)
    hidden[1, 50, 3] = math.nan
    values, _, _ = forward(hidden, weight, bias, None, None, RELU_LOG1P, winner_dtype=torch.int16)
    assert values[1].isnan().all() and values[[0, 2]].isfinite().all()


def test_fill_wins_where_it_exceeds_the_peak(device):
    hidden, weight, bias = make(device, S=40)
    add = lengths_to_add((40, 20, 0), 40, device)
    winner = check(hidden, weight, bias, add, torch.tensor([-math.inf, 1.5, 0.0], device=device))
    assert (winner[0] >= 0).all() and (winner[1] < 0).any() and (winner[2] == -1).all()


def test_ties_go_to_the_first_position(device):
    hidden, weight, bias = make(device, S=300, dtype=torch.bfloat16)
    hidden[:] = hidden[:, :1]
    _, winner, _ = forward(hidden, weight, bias, None, None, RELU_LOG1P, winner_dtype=torch.int16)
    assert (winner == 0).all()


def test_an_identity_outer_keeps_minus_infinity(device):
    hidden, weight, bias = make(device)
    check(hidden, weight, bias, lengths_to_add((0, 37, 5), 37, device), outer=())


@pytest.mark.parametrize(
    "S, dtype", [(128, torch.int8), (129, torch.int64), heavy(32769, torch.int32)]
)
def test_winner_comes_in_any_signed_integer_that_holds_it(device, S, dtype):
    check(*make(device, B=1, S=S, D=8, V=3), winner_dtype=dtype)


def test_strided_inputs(device):
    hidden, weight, bias = make(device, S=64, D=40, V=60, dtype=torch.bfloat16)
    check(hidden.transpose(1, 2).contiguous().transpose(1, 2), weight, bias)
    check(hidden.transpose(0, 1).contiguous().transpose(0, 1), weight, bias)
    check(hidden[:, ::2, 8:], weight.t().contiguous().t()[:, 8:], bias)


def test_empty_batch(device):
    hidden, weight, bias = make(device)
    values, winner, peak = forward(
        hidden[:0], weight, bias, None, None, RELU_LOG1P, winner_dtype=torch.int16
    )
    assert values.shape == winner.shape == peak.shape == (0, 50)


PER_ELEMENT = "row_mul(0) | relu | row_add(1) | row_where(2, -1.0)"


def per_token(B, S, device, *kinds):
    """Return row operands of several dtypes and layouts."""
    g = torch.Generator().manual_seed(2)
    made = {
        "real": lambda: torch.randn(B, S, generator=g),
        "strided": lambda: torch.randn(S, B, generator=g).half().t(),
        "bool": lambda: torch.rand(B, S, generator=g) < 0.5,
        "int64": lambda: torch.randint(-1, 3, (B, S), generator=g),
        "one for all": lambda: torch.randn(1, S, generator=g).expand(B, S),
    }
    return [made[kind]().to(device) for kind in kinds]


@pytest.mark.parametrize("kinds", [("real", "real", "bool"), ("int64", "strided", "one for all")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_before_the_maximum(device, dtype, kinds):
    hidden, weight, bias = make(device, S=70, dtype=dtype)
    rows = per_token(3, 70, device, *kinds)
    add = lengths_to_add((70, 33, 0), 70, device)
    check(hidden, weight, bias, add, inner=steps.parse(PER_ELEMENT), rows=rows)


def test_steps_before_the_maximum_of_one_sequence(device):
    hidden, weight, bias = make(device, B=1, S=33)
    check(
        hidden, weight, bias, inner=steps.parse("row_mul(0)"), rows=per_token(1, 33, device, "real")
    )


def test_steps_before_the_maximum_without_any_operand(device):
    """Squares reach their maximum at other positions than the logits."""
    hidden, weight, bias = make(device, S=70)
    check(hidden, weight, bias, inner=steps.parse("square"))


def test_the_peak_of_a_plateau_is_the_logit_of_its_first_position(device):
    hidden, weight, bias = make(device, S=70)
    weight.abs_(), hidden.abs_().neg_(), bias.zero_()
    _, winner, peak = forward(
        hidden, weight, bias, None, None, (), inner=steps.parse("relu"), winner_dtype=torch.int16
    )
    assert (winner == 0).all()
    assert_close(peak, hidden[:, 0].double() @ weight.double().T, torch.float32)


def test_the_peak_of_a_nan_is_nan(device):
    """This includes a NaN that the steps produce from an ordinary logit."""
    hidden, weight, bias = make(device, S=70)
    values, _, peak = forward(
        hidden, weight, bias, None, None, (), inner=steps.parse("log"), winner_dtype=torch.int16
    )
    assert values.isnan().all() and peak.isnan().all()


FLAGS = {
    "none": lambda b: b < 0,
    "all": lambda b: b >= 0,
    "the last": lambda b: b == b.max(),
    "every third": lambda b: b % 3 == 1,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "flags, B",
    [(name, B) for name in FLAGS for B in (1, 4)]
    + [(name, 11) if name == "every third" else heavy(name, 11) for name in FLAGS],
)
def test_each_sequence_takes_its_own_path(device, flags, B, monkeypatch):
    monkeypatch.setattr(splade_head_forward, "_FLAGS", 4)  # flags at a time
    S = 40
    hidden, weight, bias = make(device, B=B, S=S, dtype=torch.bfloat16)
    rows = per_token(B, S, device, "real")
    add = lengths_to_add([S - (b * S) // B for b in range(B)], S, device)
    per_element = FLAGS[flags](torch.arange(B)).to(device)
    inner, outer = steps.parse("relu | row_mul(0)"), steps.parse("log1p")
    both = forward(
        hidden, weight, bias, add, None, outer, inner=inner, rows=rows, winner_dtype=torch.int16,
        per_element=per_element, outer_fast=RELU_LOG1P,
    )  # fmt: skip
    slow = forward(
        hidden, weight, bias, add, None, outer, inner=inner, rows=rows, winner_dtype=torch.int16
    )
    fast = forward(hidden, weight, bias, add, None, RELU_LOG1P, winner_dtype=torch.int16)
    for actual, one, other in zip(both, slow, fast, strict=True):
        expected = torch.where(per_element[:, None], one, other)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("few, kernel", [(3 * 37 * 24 * 50, "portable"), (1000, "hopper")])
def test_what_is_few_takes_no_list_of_positions(few, kernel, monkeypatch):
    """The list would need a launch before the computing kernel."""
    took = []

    class Hopper:
        applies = staticmethod(lambda *args: True)
        launch = staticmethod(lambda *args: took.append("hopper"))

    monkeypatch.setattr(splade_head_forward, "FEW", few)
    monkeypatch.setattr(splade_head_forward, "hopper", Hopper)
    monkeypatch.setattr(splade_head_forward, "_launch", lambda *a, **k: took.append("portable"))
    forward(*make("cpu"), None, None, RELU_LOG1P)
    assert took == [kernel]
    some = torch.tensor([True, False, False])
    forward(
        *make("cpu"), None, None, RELU_LOG1P,
        inner=steps.parse("square"), per_element=some, outer_fast=RELU_LOG1P,
    )  # fmt: skip
    assert took == [kernel, kernel, "portable"]


@pytest.mark.gpu
def test_runs_in_a_cuda_graph():
    hidden, weight, bias = make("cuda", S=300, D=64, dtype=torch.bfloat16)
    add = lengths_to_add((300, 1, 64), 300, "cuda")
    call = lambda: forward(hidden, weight, bias, add, None, RELU_LOG1P)[0]
    expected = call()
    graph, values = in_a_graph(call)
    values.fill_(math.nan)
    graph.replay()
    assert torch.equal(values, expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "text",
    [
        "relu | log1p | row_mul(0)",
        "row_add(0) | tanh | row_mul(1)",
        "square | row_mul(0) | row_where(1, -1.0)",
        heavy("square"),
    ],
)
def test_what_is_kept_is_that_of_the_other_path(device, text):
    """Either path, kernels or ATen operators, can run the backward of the other's forward.

    A training step may use both, because the kernels do not compute fp64 and empty tensors.
    """
    op = importlib.import_module("sparse_inductor.ops.splade_head")
    hidden, weight, bias = make(device, B=4, S=40)
    p = plan(text)
    weights = per_token(4, 40, device, "real")[0]
    weights[2] = 1.0
    weights[3] = (weights[3] > 0).float()
    rows = [weights, *per_token(4, 40, device, "bool")][: text.count("row_")]
    low = lower(p, rows)
    values, winner, peak, per_element = op._cuda_forward(
        hidden, weight, bias, rows, p, torch.float32, torch.int8
    )
    other = op.aten.forward(hidden, weight, bias, rows, low, torch.float32, torch.int8)
    assert torch.equal(winner, other[1])
    torch.testing.assert_close(values, other[0])
    torch.testing.assert_close(peak[winner >= 0], other[2][winner >= 0])
    assert (per_element is None) == (low.per_element is None)
    grad = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).to(device)
    kept = Lowered(p, None, None, per_element), winner, peak
    needs = [True, True, True]
    ours = op._cuda_backward(grad, hidden, weight, bias, rows, *kept, needs)
    theirs = op.aten.backward(grad, hidden, weight, bias, rows, *kept, needs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
