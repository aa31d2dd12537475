"""The operator relu_ffn: values, gradients, statistics, errors, torch.library's own checks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

import sparse_inductor
from sparse_inductor.epilogue.steps import parse, run
from sparse_inductor.epilogue.zero_threshold import zero_threshold
from sparse_inductor.ops import _relu_ffn_aten
from sparse_inductor.ops.relu_ffn import capacity

relu_ffn = sparse_inductor.ops.relu_ffn
K, N, D = 6, 20, 5


def lying_by_columns(w):
    return {k: v if v is None or v.dim() == 1 else v.t().contiguous().t() for k, v in w.items()}


def weights(dtype=torch.float64, gated=True, bias=True, N=N, requires_grad=False):
    torch.manual_seed(0)
    draw = lambda *s: torch.randn(*s, dtype=dtype).div(2).requires_grad_(requires_grad)
    return {
        "gate": draw(N, K),
        "down": draw(D, N),
        "up": draw(N, K) if gated else None,
        "gate_bias": draw(N) if bias else None,
        "up_bias": draw(N) if gated and bias else None,
        "down_bias": draw(D) if bias else None,
    }


def arguments(x, w, *more):
    """Return the arguments of the operators."""
    order = ("gate", "gate_bias", "up", "up_bias", "down", "down_bias")
    return (x, *(w[k] for k in order), None, None, "relu", "", False, False, *more)


def dense(x, w, f=F.relu, g=lambda u: u):
    a = f(F.linear(x, w["gate"], w["gate_bias"]))
    h = a if w["up"] is None else a * g(F.linear(x, w["up"], w["up_bias"]))
    return F.linear(h, w["down"], w["down_bias"]), a, h


def tokens(*shape, dtype=torch.float64, requires_grad=False):
    torch.manual_seed(1)
    return torch.randn(*shape, K, dtype=dtype).requires_grad_(requires_grad)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), (0,), (2, 0, 3)])
def test_values(gated, bias, lead):
    x, w = tokens(*lead), weights(gated=gated, bias=bias)
    torch.testing.assert_close(relu_ffn(x, **w), dense(x, w)[0])


@pytest.mark.parametrize(
    ("steps", "f"),
    [
        ("relu | square", lambda z: F.relu(z) ** 2),
        ("threshold(0.1, 0.0)", lambda z: F.threshold(z, 0.1, 0.0)),
        ("add(-0.3) | relu", lambda z: F.relu(z - 0.3)),
        ("clamp_min(0.0) | clamp_max(6.0)", F.relu6),
        ("relu | mul(-2.0)", lambda z: -2 * F.relu(z)),
    ],
)
def test_programs(steps, f):
    x, w = tokens(9), weights()
    got = relu_ffn(x, **w, gate_steps=steps, up_steps="sigmoid")
    torch.testing.assert_close(got, dense(x, w, f, torch.sigmoid)[0])


@pytest.mark.parametrize("gated", [True, False])
def test_gradients(gated):
    x, w = tokens(4, requires_grad=True), weights(gated=gated, requires_grad=True)
    names = [k for k, v in w.items() if v is not None]

    def fn(x, *ws):
        return relu_ffn(x, **{**w, **dict(zip(names, ws))}, gate_steps="relu | square")

    assert gradcheck(fn, (x, *(w[k] for k in names)), fast_mode=True)


@pytest.mark.parametrize("gated", [True, False])
def test_gradients_of_statistics(gated):
    x, w = tokens(4, requires_grad=True), weights(gated=gated, requires_grad=True)
    weight = torch.randn(N, dtype=x.dtype, requires_grad=True)
    y, stats = relu_ffn(x, **w, return_stats=True, stat_weight=weight)
    want_y, a, h = dense(x, w)
    want = [a.abs().sum(-1), h.abs().sum(-1), (h * weight).sum(-1)]
    torch.testing.assert_close(stats[[0, 2, 4]], torch.stack(want))
    leaves = [x, weight, *(t for t in w.values() if t is not None)]
    scale = torch.arange(1.0, 5.0, dtype=x.dtype)
    losses = [
        y.sum() + sum((i + 2) * (t * scale).sum() for i, t in enumerate(ts))
        for y, ts in ((y, stats[[0, 2, 4]]), (want_y, want))
    ]
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves) for loss in losses))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("of_x", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_shift(gated, of_x, bias):
    x, w = tokens(2, 3, requires_grad=of_x), weights(gated=gated, bias=bias, requires_grad=True)
    shift = torch.randn(K, dtype=x.dtype, requires_grad=True)
    got, want = relu_ffn(x, **w, shift=shift), dense(x - shift, w)[0]
    leaves = [shift, *([x] if of_x else []), *(t for t in w.values() if t is not None)]
    found = [[y, *torch.autograd.grad(y.square().sum(), leaves)] for y in (got, want)]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(relu_ffn(x.detach(), **w, shift=shift.detach()), want)


@pytest.mark.parametrize("M", [0, 1, 4, 40])
@pytest.mark.parametrize("steps", ["", "relu | square"])
def test_thresholds(M, steps):
    x, w = tokens(M, requires_grad=True), weights(gated=False, requires_grad=True)
    thresholds = torch.linspace(-0.5, 1.0, N, dtype=x.dtype, requires_grad=True)
    f = lambda z: torch.where(z > thresholds, run(parse(steps), z), 0.0)
    got, want = relu_ffn(x, **w, gate_steps=steps, thresholds=thresholds), dense(x, w, f)[0]
    torch.testing.assert_close(got, want)
    leaves = [x, *(t for t in w.values() if t is not None)]
    found = [
        torch.autograd.grad(y.square().sum(), [*leaves, thresholds], allow_unused=True)
        for y in (got, want)
    ]
    assert found[0][-1] is None
    torch.testing.assert_close(*(grads[:-1] for grads in found))
    with torch.no_grad():
        torch.testing.assert_close(
            relu_ffn(x, **w, gate_steps=steps, thresholds=thresholds), want.detach()
        )


def test_gradients_lie_as_the_weights():
    x, w = tokens(4), lying_by_columns(weights())
    names = ("gate", "up", "down")
    for name in names:
        w[name].requires_grad_()
    grads = torch.autograd.grad(relu_ffn(x, **w).sum(), [w[name] for name in names])
    assert [g.stride() for g in grads] == [w[name].stride() for name in names]


def test_counts():
    x, w = tokens(2, 3), weights()
    _, stats, counts = relu_ffn(x, **w, return_stats=True, return_counts=True)
    _, a, h = dense(x, w)
    assert torch.equal(counts, (h != 0).sum((0, 1)).int()) and counts.dtype == torch.int32
    assert stats.shape == (4, 2, 3) and stats.dtype == x.dtype == torch.float64
    assert torch.equal(stats[1], (a != 0).sum(-1).double())
    assert torch.equal(stats[3], (h != 0).sum(-1).double())
    halves = {name: None if t is None else t.bfloat16() for name, t in w.items()}
    assert relu_ffn(x.bfloat16(), **halves, return_stats=True)[1].dtype == torch.float32


def test_rows_beyond_the_capacity_have_exact_gradients():
    """Some rows have more active neurons than entries can be saved; they are recomputed, and no entry is dropped."""
    wide = 200
    w = weights(N=wide, requires_grad=True)
    x = tokens(8, requires_grad=True)
    with torch.no_grad():
        w["gate_bias"].fill_(5.0)
        x[::2] *= 0.01
    active = (F.linear(x, w["gate"], w["gate_bias"]) > 0).sum(1)
    assert active.max() > capacity(wide)
    leaves = [x, *(t for t in w.values() if t is not None)]
    got = torch.autograd.grad(relu_ffn(x, **w).square().sum(), leaves)
    want = torch.autograd.grad(dense(x, w)[0].square().sum(), leaves)
    torch.testing.assert_close(got, want)


def test_what_is_saved_for_the_backward():
    x, w = tokens(64, requires_grad=True), weights(N=4096)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        relu_ffn(x, **w)
    own = {t.data_ptr() for t in (x, *w.values()) if t is not None}
    kept = sum(t.nbytes for t in saved if t.data_ptr() not in own)
    assert kept < 0.1 * 2 * 64 * 4096 * 8, "the dense gate and up projections would be twice M * N"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("bias", [-2.2, -100.0])
@pytest.mark.parametrize("M", [1, 3])
def test_decoding_reads_few_neurons(M, bias, by_columns, dtype, monkeypatch):
    """Sparse rows and rows without active neurons use the path that gathers weights, with the dense path's values."""
    gathered = []
    few = _relu_ffn_aten._few
    monkeypatch.setattr(_relu_ffn_aten, "_few", lambda *a: gathered.append(a) or few(*a))
    w = weights(N=512, dtype=dtype)
    w["gate_bias"].fill_(bias)
    if by_columns:  # x @ weight, as GPT-2 has them
        w = lying_by_columns(w)
    x = tokens(M, dtype=dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(relu_ffn(x, **w), dense(x, w)[0], **tolerance)
    assert len(gathered) == 1


def test_nan_reaches_the_output():
    x, w = tokens(3), weights()
    x[1, 2] = float("nan")
    y = relu_ffn(x, **w)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_close_to_the_truth_as_the_dense_block(dtype):
    w = weights(dtype=dtype, N=256)
    x = tokens(32, dtype=dtype)
    truth = dense(x.double(), {k: None if v is None else v.double() for k, v in w.items()})[0]
    ours = (relu_ffn(x, **w).double() - truth).square().mean()
    theirs = (dense(x, w)[0].double() - truth).square().mean()
    assert ours <= 1.1 * theirs


@pytest.mark.parametrize("train", [True, False])
def test_popular_neurons_change_nothing_on_a_cpu(train):
    w = weights(dtype=torch.float32, requires_grad=train)
    x = tokens(2, 3, dtype=torch.float32, requires_grad=train)
    y, same = relu_ffn(x, **w, popular=2), relu_ffn(x, **w)
    assert torch.equal(y, same)
    if train:
        leaves = [x, *(t for t in w.values() if t is not None)]
        assert all(map(torch.equal, *(torch.autograd.grad(t.sum(), leaves) for t in (y, same))))
    torch.library.opcheck(torch.ops.sparse_inductor.relu_ffn, arguments(x, w, None, 2))


@pytest.mark.parametrize("popular", [-1, N])
def test_popular_neurons_are_at_most_half(popular):
    with pytest.raises(ValueError, match=rf"popular must be 0 to N / 2 = {N // 2}, got {popular}"):
        relu_ffn(tokens(2), **weights(), popular=popular)


def test_the_backward_reads_popular_neurons_apart():
    """Kernels may save popular neurons separately; then their entries are not among the packed ones."""
    ops, w, x = torch.ops.sparse_inductor, weights(), tokens(5)
    call = arguments(x, w)
    wanted = [True] * 9, [False] * 3
    y, stats, _, count, index, gates, ups, found, *_ = ops.relu_ffn_train(*call, 3)
    grad = torch.randn_like(y)
    everything = ops.relu_ffn_train(*call, 0)[3:]
    want = ops.relu_ffn_backward(grad, stats, *call, *everything, *wanted)
    found.copy_(torch.tensor([4, 11, 2]))
    count[1] = index.shape[1] + 1  # a row that overflows
    for m in range(5):
        entries = [i for i in range(min(int(count[m]), N)) if int(index[m, i]) not in (4, 11, 2)]
        for t in (index, gates, ups):
            t[m, : len(entries)] = t[m, entries].clone()
        count[m] = len(entries) if m != 1 else count[m]
    apart = [F.linear(x, w[k], w[f"{k}_bias"])[:, found] for k in ("gate", "up")]
    apart[0][1], apart[1][1] = torch.nan, torch.nan
    got = ops.relu_ffn_backward(
        grad, stats, *call, count, index, gates, ups, found, *apart, *wanted
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("lead", [(), (1,), (1, 1), (2, 3), (0,)])
def test_residual(lead):
    x, w = tokens(*lead), weights()
    r = torch.randn(D, *lead, dtype=x.dtype).movedim(0, -1)
    torch.testing.assert_close(relu_ffn(x, **w, residual=r), r + dense(x, w)[0])
    got, stats = relu_ffn(x, **w, return_stats=True, residual=r)
    torch.testing.assert_close(got, r + dense(x, w)[0])
    assert stats.shape == (4, *lead)


def test_a_residual_is_added_to_the_rounded_result():
    x, w = tokens(3, dtype=torch.float32).bfloat16(), weights(dtype=torch.float32)
    w = {name: t.bfloat16() for name, t in w.items()}
    r = torch.randn(3, D).bfloat16()
    assert torch.equal(relu_ffn(x, **w, residual=r), r + relu_ffn(x, **w))


def test_gradients_with_a_residual():
    x, w = tokens(4, requires_grad=True), weights(requires_grad=True)
    r = torch.randn(4, D, dtype=x.dtype, requires_grad=True)
    fn = lambda x, r, down: relu_ffn(x, **{**w, "down": down}, residual=r)
    assert gradcheck(fn, (x, r, w["down"]), fast_mode=True)
    frozen = {name: t.detach() for name, t in w.items()}
    assert gradcheck(lambda r: relu_ffn(x.detach(), **frozen, residual=r), (r,), fast_mode=True)


def test_autocast():
    x, w = tokens(4, dtype=torch.float32), weights(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relu_ffn(x, **w).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"gate": torch.zeros(N, 3)}, ValueError, "gate must be [N, K] with K = 6, got shape (20, 3)"),
        ({"down": torch.zeros(D, 7)}, ValueError, "down must be [D, N] with N = 20, got shape (5, 7)"),
        ({"up": torch.zeros(7, K)}, ValueError, "up must be [N, K] = (20, 6), got shape (7, 6)"),
        ({"up": None}, ValueError, "up_bias is given without up"),
        ({"down_bias": torch.zeros(3)}, ValueError, "down_bias must be [5], got shape (3,)"),
        ({"down": torch.zeros(D, N).half()}, TypeError, "down must have the dtype of x"),
        ({"residual": torch.zeros(2, 3)}, ValueError, "residual must be (2, 5), got shape (2, 3)"),
        ({"residual": torch.zeros(D)}, ValueError, "residual must be (2, 5), got shape (5,)"),
        ({"residual": torch.zeros(2, D).half()}, TypeError, "residual must have the dtype of x"),
        ({"shift": torch.zeros(3)}, ValueError, "shift must be [6], got shape (3,)"),
        ({"stat_weight": torch.zeros(N)}, ValueError, "stat_weight is given without return_stats"),
        ({"thresholds": torch.zeros(3)}, ValueError, "thresholds must be [20], got shape (3,)"),
        ({"thresholds": torch.zeros(N)}, ValueError, "thresholds are given with up"),
        ({"return_counts": True}, ValueError, "return_counts is given without return_stats"),
        ({"stat_weight": torch.zeros(3), "return_stats": True}, ValueError, "stat_weight must be [20], got shape (3,)"),
        ({"gate_steps": "sigmoid"}, ValueError, "must be 0 up to some number, got 'sigmoid'"),
        ({"gate_steps": "relu | row_mul(0)"}, ValueError, "takes no row operands, got 'row_mul'"),
        ({"gate_steps": "rellu"}, ValueError, "unknown step 'rellu'"),
    ],
)  # fmt: skip
def test_errors_name_the_value(change, error, says):
    x, w = tokens(2, dtype=torch.float32), weights(dtype=torch.float32)
    with pytest.raises(error) as caught:
        relu_ffn(x, **{**w, **change})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("steps", "at"),
    [
        ("relu", 0.0),
        ("relu | square", 0.0),
        ("threshold(0.5, 0.0)", 0.5),
        ("relu | threshold(0.5, 0.0)", 0.5),
        ("add(-1.0) | relu", 1.0),
        ("mul(2.0) | add(-1.0) | relu", 0.5),
        ("relu | add(1.0)", None),
        ("clamp_min(-1.0)", None),
        ("leaky_relu(0.1)", None),
        ("mul(-1.0) | relu", None),
        ("relu | exp", None),
        ("relu | expm1", 0.0),
        ("clamp_max(7.0) | relu", 0.0),
        ("clamp_max(7.0) | add(-3.0) | relu", 3.0),
        ("clamp_max(0.0) | relu", None),  # zero everywhere
        ("tanh | relu", 0.0),
        ("mul(0.5) | tanh | mul(2.0) | relu", 0.0),
        ("tanh | add(-0.25) | relu", None),
        ("elu(1.0, 1.0) | relu", 0.0),
        ("elu(-1.0, 1.0) | relu", None),
        ("sigmoid | add(-0.5) | relu", 0.0),
        ("sigmoid | relu", None),
        ("", None),
    ],
)
def test_cut(steps, at):
    """Everything up to the zero threshold gives zero, and the threshold is at most 1e-5 below the true one."""
    found = zero_threshold(parse(steps))
    assert (found is None) == (at is None)
    if at is not None:
        assert at - 1e-5 <= found <= at
        below = torch.cat([torch.linspace(-9, found, 999), torch.tensor([found])])
        assert not run(parse(steps), below).any()


@pytest.mark.parametrize("sizes", [(0, 4, 3), (5, 0, 3), (5, 4, 0), (0, 0, 0)], ids=str)
def test_nothing_to_read_to_activate_or_to_return(sizes):
    """The number of features, of neurons or of results is 0."""
    features, neurons, results = sizes
    inputs = [
        torch.randn(shape, requires_grad=True)
        for shape in ((2, 3, features), (neurons, features), (results, neurons))
    ]
    x, gate, down = inputs
    y, expected = relu_ffn(x, gate, down), F.linear(F.relu(F.linear(x, gate)), down)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)
    )
