"""The feed-forward kernels against the ATen path, in the interpreter (or on a GPU)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sparse_inductor.epilogue.steps import parse
from sparse_inductor.epilogue.zero_threshold import zero_threshold
from sparse_inductor.kernels.relu_ffn import backward as backward_kernel
from sparse_inductor.kernels.relu_ffn import columns, dots, gather, rows
from sparse_inductor.kernels.relu_ffn import forward as kernel
from sparse_inductor.kernels.relu_ffn import packing as packer
from sparse_inductor.ops import _relu_ffn_aten as aten
from support import heavy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAP = 16


@pytest.fixture(autouse=True)
def packed_rows_pay(monkeypatch):
    """Lets rows be packed at these small sizes too, so that both paths run."""
    monkeypatch.setattr(packer, "DENSE_ROW", 1.0)
    monkeypatch.setattr(kernel, "FEW", 0)


def make(M, K=40, N=72, D=24, *, gated=True, bias=True, steps="relu", up_steps="", share=0.1):
    """Return tokens and a block in which about `share` of the neurons are active."""
    torch.manual_seed(0)
    draw = lambda *s: torch.randn(*s, device=DEVICE)
    shift = torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - share)).item()
    x = draw(M, K)
    b = aten.Block(
        draw(N, K) / K**0.5,
        (draw(N) * 0.1 - shift) if bias else None,
        draw(N, K) / K**0.5 if gated else None,
        draw(N) * 0.1 if gated and bias else None,
        draw(D, N) / 4,
        draw(D) if bias else None,
        parse(steps),
        parse(up_steps),
        zero_threshold(parse(steps)),
    )
    return x, b


def empty_packed(x, b, cap=CAP, popular=0):
    M = len(x)
    ups = M if b.up is not None else 0
    return aten.Packed(
        torch.empty(M, dtype=torch.int32, device=DEVICE),
        torch.empty(M, cap, dtype=torch.int16, device=DEVICE),
        x.new_empty(M, cap),
        x.new_empty(ups, cap),
        torch.empty(popular, dtype=torch.int64, device=DEVICE),
        x.new_empty(M, popular),
        x.new_empty(ups, popular),
    )


def empty_statistics(x, b, fill):
    N = len(b.gate)
    weight = torch.linspace(-1, 2, N, device=DEVICE)
    counts = torch.zeros(N, dtype=torch.int32, device=DEVICE)
    return aten.Statistics(torch.full((5, len(x)), fill, device=DEVICE), weight, counts)


def check_forward(x, b, stats=True, train=True):
    want_stats, got_stats = (
        empty_statistics(x, b, fill) if stats else None for fill in (0.0, torch.nan)
    )
    packed = empty_packed(x, b) if train else None
    want = aten.forward(x, b, want_stats, empty_packed(x, b) if train else None)
    got = kernel.forward(x, b, got_stats, packed, CAP)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    if stats:
        torch.testing.assert_close(got_stats.stats, want_stats.stats, rtol=1e-4, atol=1e-4)
        assert torch.equal(got_stats.counts, want_stats.counts)


SHAPES = [(1, 40, 72, 24), heavy((37, 40, 72, 24)), (13, 33, 100, 50), heavy((70, 64, 64, 64))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gated", [True, False])
def test_forward_agrees_with_aten(shape, gated):
    M, K, N, D = shape
    check_forward(*make(M, K, N, D, gated=gated))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 0.5, 1.0])
def test_every_density_is_exact(share):
    """From no active neuron to all of them: packed rows, overflow rows, and both."""
    check_forward(*make(16, share=min(max(share, 1e-6), 1 - 1e-6)))


@pytest.mark.heavy
def test_a_few_overflow_rows_among_sparse_ones():
    x, b = make(50, share=0.05)
    x[::9] *= 8.0
    counts = (torch.nn.functional.linear(x, b.gate, b.gate_bias) > 0).sum(1)
    assert (counts > CAP).sum() >= 3 and (counts <= CAP).sum() >= 30
    check_forward(x, b)


@pytest.mark.heavy
def test_where_packed_rows_do_not_pay_all_are_dense(monkeypatch):
    x, b = make(20, share=0.1)
    packed = empty_packed(x, b)
    kernel.forward(x, b, None, packed, CAP)
    assert (packed.count <= CAP).sum() >= 16
    monkeypatch.setattr(packer, "DENSE_ROW", 1 / 105)
    kernel.forward(x, b, None, packed, CAP)
    assert (packed.count > CAP).all()
    check_forward(x, b)


@pytest.mark.parametrize(
    ("steps", "up_steps"),
    [
        ("relu | square", ""),
        ("threshold(0.1, 0.0)", "relu"),
        ("add(-0.2) | relu", "sigmoid"),
        ("clamp_min(0.0)", ""),
    ],
)
def test_programs(steps, up_steps):
    check_forward(*make(8, steps=steps, up_steps=up_steps))


@pytest.mark.parametrize("M", [1, 7, heavy(20)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("share", [0.0001, 0.1, 0.9999])
def test_decoding(M, gated, share):
    check_forward(*make(M, gated=gated, share=share), stats=False, train=False)


@pytest.mark.parametrize("M", [1, heavy(7), 20])
@pytest.mark.parametrize("stats", [True, False])
def test_a_residual(M, stats):
    x, b = make(M)
    residual = torch.randn(b.down.shape[0], M, device=DEVICE).t()
    numbers = empty_statistics(x, b, 0.0) if stats else None
    want = aten.forward(x, b, None, None) + residual
    got = kernel.forward(x, b, numbers, None, CAP, residual)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("share", "train", "pay"),
    [
        (0.02, True, True),
        (0.2, True, True),
        (0.2, False, True),
        (0.2, False, False),
        (0.5, True, False),
    ],
)
def test_rows_follow_their_dot_products(monkeypatch, share, train, pay):
    """The dot products signal each row, and its entries, as the weighted rows expect.

    Rows are short, long, heavy, or all computed densely although they were packed.
    """
    if not pay:
        monkeypatch.setattr(packer, "DENSE_ROW", 1 / 105)
    x, b = make(40, share=share)
    x[::9] *= 8.0
    want = aten.forward(x, b, None, empty_packed(x, b))
    monkeypatch.setattr(dots, "follows", lambda *_: True)
    waited = []
    plain = rows.weighted_rows
    spy = lambda *args, ready, **rest: (
        waited.append(ready.clone()) or plain(*args, ready=ready, **rest)
    )
    monkeypatch.setattr(rows, "weighted_rows", spy)
    packed = empty_packed(x, b)
    got = kernel.forward(x, b, None, packed if train else None, CAP)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    (done,) = waited
    seen = gather.ROW_SEEN.value
    assert (done[:40] >= seen).all()
    if train and pay:
        entries = torch.where(packed.count <= CAP, packed.count, 0)
        assert torch.equal(done[:40] - seen, entries)
    if not pay and share == 0.2:
        assert (done[:40] == seen).all()


@pytest.mark.parametrize(("few", "most"), [("FEW", 50), ("FEW_GATES", 50 * 72)])
@pytest.mark.parametrize("gated", [True, False])
def test_rows_too_few_to_pack(monkeypatch, gated, few, most):
    monkeypatch.setattr(kernel, few, most)
    monkeypatch.setattr(packer, "pack", None)
    check_forward(*make(50, gated=gated), stats=False, train=False)
    with pytest.raises(TypeError):  # with one more row, rows are packed
        check_forward(*make(51, gated=gated), stats=False, train=False)


@pytest.mark.heavy
def test_rows_in_pieces(monkeypatch):
    monkeypatch.setattr(kernel, "CHUNK", 128 * 72)
    check_forward(*make(140, share=0.15))


GRADIENTS = ("x", "gate", "gate_bias", "up", "up_bias", "down", "down_bias", "weight")


def check_backward(x, b, stats=True, needs=(True,) * 8, column_major=(False,) * 3):
    packed = empty_packed(x, b)
    aten.forward(x, b, None, packed)
    dy = torch.randn(len(x), b.down.shape[0], device=DEVICE)
    d_stats = torch.randn(5, len(x), device=DEVICE) if stats else None
    weight = torch.randn(len(b.gate), device=DEVICE) if stats else None
    call = dy, d_stats, weight, x, b, packed, needs, column_major
    want = aten.backward(*call)
    got = backward_kernel.backward(*call)
    for name, g, w in zip(GRADIENTS, got, want, strict=True):
        assert (g is None) == (w is None), name
        if g is not None:
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4, msg=name)
            assert g.stride() == w.stride(), name
    if x.is_cuda:  # in the interpreter, programs run sequentially and thus repeatably
        again = backward_kernel.backward(*call)
        assert all(g is None or torch.equal(g, a) for g, a in zip(got, again)), "not the same bits"


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gated", [True, False])
def test_backward_agrees_with_aten(shape, gated):
    M, K, N, D = shape
    check_backward(*make(M, K, N, D, gated=gated))


@pytest.mark.sample(2)
@pytest.mark.parametrize("share", [0.0001, 0.2, 0.5, 0.9999])
def test_backward_at_every_density(share):
    check_backward(*make(16, share=share))


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_weights_that_lie_by_columns(share):
    """Weights are column-major, as in x @ W. With half of the neurons active, rows overflow."""
    x, b = make(9, gated=share < 0.5, share=share)
    weights = {n: getattr(b, n) for n in ("gate", "up", "down") if getattr(b, n) is not None}
    b = dataclasses.replace(b, **{n: w.t().contiguous().t() for n, w in weights.items()})
    check_forward(x, b)
    check_backward(x, b, column_major=(True,) * 3)


@pytest.mark.parametrize("share", [0.05, heavy(0.5)])
@pytest.mark.parametrize("few", [0, 50])
def test_thresholds_of_the_neurons(monkeypatch, share, few):
    """Thresholds per neuron work for packed rows, rows that overflow, and few rows, which are not packed."""
    monkeypatch.setattr(kernel, "FEW", few)
    x, b = make(9, gated=False, share=share, steps="mul(2.0)")
    b = dataclasses.replace(b, thresholds=torch.linspace(-0.2, 0.4, 72, device=DEVICE))
    check_forward(x, b, stats=False)
    check_forward(x, b, stats=False, train=False)
    check_backward(x, b, stats=False)


def test_backward_of_programs():
    check_backward(*make(8, steps="relu | square", up_steps="relu"), stats=False)
    check_backward(*make(8, steps="threshold(0.1, 0.0) | mul(2.0)", bias=False))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("few", "most"), [("FEW", 50), ("FEW_GATES", 50 * 72)])
@pytest.mark.parametrize("gated", [True, False])
def test_backward_of_rows_too_few_to_pack(monkeypatch, gated, few, most):
    monkeypatch.setattr(kernel, few, most)
    monkeypatch.setattr(dots, "gradients", None)
    x, b = make(50, gated=gated, steps="relu | square")
    packed = empty_packed(x, b)
    kernel.forward(x, b, None, packed, CAP)
    assert (packed.count > CAP).all()
    check_backward(x, b, stats=False)


def test_only_what_is_needed():
    for wanted in ({"x"}, {"gate", "up_bias", "down_bias"}, {"weight"}):
        check_backward(*make(8), needs=[name in wanted for name in GRADIENTS])


@pytest.mark.sample(1)
@pytest.mark.parametrize("of_x", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_backward_in_pieces(monkeypatch, gated, of_x):
    """Dense gradients of overflow rows are computed for 128 neurons at a time, column-major gradients for 64."""
    monkeypatch.setattr(backward_kernel, "CHUNK", 140 * 128)
    monkeypatch.setattr(columns, "BUFFER", 1)
    x, b = make(140, N=300, gated=gated, share=0.05)
    check_backward(x, b, needs=(of_x, *(True,) * 7), column_major=(True, not gated, False))


@pytest.mark.sample(1)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("room", [1 << 20, 1200])
def test_tables_that_do_not_stay_in_the_cache(monkeypatch, train, room):
    """They are processed in slices of 16 columns, the last of 8; with less room, two slices at a time."""
    monkeypatch.setattr(gather, "RESIDENT", 1)
    monkeypatch.setattr(gather, "NARROWEST", 16)
    monkeypatch.setattr(dots, "SLICE_SUMS", room)
    x, b = make(9, N=600, share=0.02)
    assert dots._slices(b.gate)[:2] == (3, 16)
    assert (room // (4 * 9 * CAP) < 3) == (room == 1200)
    x[5] *= 3.0  # this row has several pieces
    check_forward(x, b, stats=False, train=train)
