"""Autoencoders that keep the k largest activations, in common spellings: their rewrites and their results."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparse_inductor
from sparse_inductor.aten import sparse_rows as aten
from sparse_inductor.pattern import registered
from sparse_inductor.policy.worth import Worth
from sparse_inductor.testing import (
    assert_matches_reference,
    assert_rewrites,
    compile_without_codegen,
)
from support import heavy, only

BOTH = {"topk_encode": 1, "sparse_decode": 1}


class Autoencoder(nn.Module):
    def __init__(self, forward, neurons=32):
        super().__init__()
        torch.manual_seed(0)
        self.W_enc = nn.Parameter(torch.randn(8, neurons))
        self.W_dec = nn.Parameter(torch.randn(neurons, 8))
        self.b_enc, self.b_dec = nn.Parameter(torch.randn(neurons)), nn.Parameter(torch.randn(8))
        self.threshold = nn.Parameter(torch.tensor(0.5))
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def plain(s, x):
    pre = (x - s.b_dec) @ s.W_enc + s.b_enc
    values, indices = pre.topk(4, dim=-1, sorted=False)
    return torch.zeros_like(pre).scatter_(-1, indices, values.relu()) @ s.W_dec + s.b_dec


def rectified_first(s, x):
    f = F.relu(F.linear(x - s.b_dec, s.W_enc.T, s.b_enc))
    top = f.topk(4, sorted=False, dim=-1)
    buffer = torch.zeros_like(f)
    encoded = buffer.scatter_(dim=-1, index=top.indices, src=top.values)
    return F.linear(encoded, s.W_dec.T) + s.b_dec


def largest(scores):
    values, indices = scores.topk(4)
    return torch.zeros_like(scores).scatter(-1, indices, values)


def tied(s, x):
    return largest(x @ s.W_enc) @ s.W_enc.T


def unit_rows(s, x):
    values, indices = (x @ s.W_enc + s.b_enc).topk(4)
    f = x.new_zeros(*x.shape[:-1], 32).scatter(-1, indices, values.relu())
    return torch.einsum("bsn,nd->bsd", f, F.normalize(s.W_dec, dim=1)) + s.b_dec


def with_everything_returned(s, x):
    pre = (x - s.b_dec) @ s.W_enc + s.b_enc
    values, indices = pre.topk(4)
    f = torch.zeros_like(pre).scatter_(-1, indices, values.relu())
    out = f @ s.W_dec + s.b_dec
    return (out - x).square().sum(-1).mean() + 0.1 * f.sum(-1).mean(), f, pre, (f > 0).any(0)


def by_decoder_norms(s, x):
    """Encode and decode as if the decoder's rows had norm 1, and return everything."""
    pre = ((x - s.b_dec) @ s.W_enc + s.b_enc) * s.W_dec.norm(dim=-1)
    values, indices = torch.topk(pre, k=4, dim=-1, sorted=False)
    f = torch.zeros_like(pre)
    f.scatter_(-1, indices, values.relu())
    return (f * (1 / s.W_dec.norm(dim=-1))) @ s.W_dec + s.b_dec, f, pre


def divided_by_decoder_norms(s, x):
    values, indices = (x @ s.W_enc + s.b_enc).topk(4)
    f = x.new_zeros(*x.shape[:-1], 32).scatter(-1, indices, values.relu())
    return (f / 2) / s.W_dec.norm(dim=-1) @ s.W_dec + s.b_dec


def times_a_constant_for_each_neuron(s, x):
    values, indices = (x @ s.W_enc + s.b_enc).topk(4)
    f = x.new_zeros(*x.shape[:-1], 32).scatter(-1, indices, values.relu())
    return f * torch.full((32,), 0.5) @ s.W_dec


def times_norms_and_written_to(s, x):
    """Of the products that fold the norms into them, the weight and the bias are saved; the program saves neither."""
    weight, bias = s.W_enc * 1, s.b_enc * 1
    values, indices = ((x @ weight + bias) * s.W_dec.norm(dim=-1)).topk(4)
    weight.zero_()
    bias[:4] = 1
    return x.new_zeros(*x.shape[:-1], 32).scatter(-1, indices, values) @ s.W_dec


def to_something_else(s, x):
    """Compute a transcoder with a skip connection."""
    values, indices = (x @ s.W_enc + s.b_enc).topk(4)
    f = x.new_zeros(*x.shape[:-1], 32).scatter(-1, indices, values.relu())
    return f @ s.W_dec + x @ s.W_enc[:, :8]


@pytest.mark.parametrize("policy", ["auto", "never"])
def test_one_that_runs_as_written_is_no_near_miss_of_a_feed_forward_block(policy):
    report = sparse_inductor.report()
    report.clear()
    with sparse_inductor.enabled(policy=policy):
        compile_without_codegen(Autoencoder(plain))(torch.randn(2, 3, 8))
    assert not report.rewrites and not report.near_misses


@pytest.mark.parametrize(
    "program",
    [
        plain,
        with_everything_returned,
        by_decoder_norms,
        divided_by_decoder_norms,
        times_a_constant_for_each_neuron,
        times_norms_and_written_to,
        *map(heavy, (rectified_first, tied, unit_rows, to_something_else)),
    ],
)
def test_it_is_rewritten_and_keeps_its_numbers(program):
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    explanation = assert_matches_reference(Autoencoder(program), (x,), grads=True)
    assert_rewrites(explanation, expected=BOTH)


def by_gathered_rows(s, x):
    values, indices = (x @ s.W_enc).topk(4)
    return (s.W_dec[indices] * values.unsqueeze(-1)).sum(-2)


def with_activations(s, x):
    f = F.relu(x @ s.W_enc + s.b_enc) * (x.sum(-1, keepdim=True) > s.threshold)
    return f @ s.W_dec[:, :4], f


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (plain, BOTH),
        (by_gathered_rows, {"topk_encode": 1, "gathered_decode": 1}),
        (with_activations, {"sparse_product": 1}),  # that of the decoder
    ],
)
def test_one_that_gives_the_features_of_a_training_step(program, expected):
    """Its weights are parameters, and no gradient is asked of it."""
    model, probe = Autoencoder(program), nn.Parameter(torch.randn(8))

    def step(x):
        with torch.no_grad():
            y = model(x)
        y, *others = y if isinstance(y, tuple) else (y,)
        return y @ probe[: y.shape[-1]], others

    x = torch.randn(2, 6, 8)
    want, _ = step(x)
    with only(*expected) as report:
        got, _ = compile_without_codegen(step)(x)
        assert collections.Counter(r.pattern for r in report.rewrites) == expected
        assert not report.near_misses
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), probe) for y in (got, want)))


class OfAnyK(Autoencoder):
    def forward(self, x, k):
        pre = (x - self.b_dec) @ self.W_enc + self.b_enc
        values, indices = pre.topk(k, dim=-1, sorted=False)
        return torch.zeros_like(pre).scatter_(-1, indices, values.relu()) @ self.W_dec


def test_k_may_be_a_symbol_of_which_break_even_points_know(monkeypatch):
    changing = []

    def look_up(operator, device, **sizes):
        changing.append(sizes["changing"])
        return Worth(1.0)

    for name in BOTH:
        monkeypatch.setattr(registered()[name].__module__ + ".look_up", look_up)
    model, x = OfAnyK(None), torch.randn(6, 8)
    with sparse_inductor.enabled(only=[*BOTH], policy="auto"):
        compiled = compile_without_codegen(model)
        for k in (4, 6, 9):  # the second value makes k symbolic
            torch.testing.assert_close(compiled(x, k), model(x, k))
    assert changing == [0, 0, 1, 1]


def centred_twice(s, x):
    centred = x - s.b_dec
    return largest(centred @ s.W_enc + s.b_enc) @ s.W_dec + centred


def centred_without_gradient(s, x):
    with torch.no_grad():
        centred = x - s.b_dec
    return largest(centred @ s.W_enc + s.b_enc) @ s.W_dec


def centred_and_written_to(s, x):
    x = x * 1
    centred = x - s.b_dec
    x.zero_()
    return largest(centred @ s.W_enc + s.b_enc) @ s.W_dec


def the_other_way_round(s, x):
    return largest((s.b_dec - x) @ s.W_enc + s.b_enc) @ s.W_dec


@pytest.mark.parametrize(
    ("program", "of_rows", "shifted"),
    [
        (plain, False, True),
        (plain, True, False),
        (centred_twice, False, False),
        (centred_without_gradient, False, False),
        (centred_and_written_to, False, False),
        (the_other_way_round, False, False),
    ],
)
def test_what_is_subtracted_of_every_row(program, of_rows, shifted):
    """The operator computes the difference if only the subtracted vector needs a gradient, and only it reads it."""
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1), requires_grad=of_rows)
    explanation = assert_matches_reference(Autoencoder(program), (x,), grads=True)
    assert_rewrites(explanation, expected=BOTH)
    (replaced,) = (r.replaced for r in explanation.report.rewrites if r.pattern == "topk_encode")
    assert ("sub" in replaced) == shifted


def test_values_of_a_rectified_row_may_be_written_to():
    """topk saves only its indices for the backward."""

    def scaled(s, x):
        top = F.relu(x @ s.W_enc + s.b_enc).topk(4)
        with torch.no_grad():
            top.values.mul_(0.5)
        return x.new_zeros(*x.shape[:-1], 32).scatter(-1, top.indices, top.values) @ s.W_dec

    model, x = Autoencoder(scaled), torch.randn(2, 3, 8)
    want = torch.autograd.grad(model(x).sum(), model.W_enc)
    with only(*BOTH) as report:
        got = torch.autograd.grad(compile_without_codegen(model)(x).sum(), model.W_enc)
        assert len(report.rewrites) == 2
    torch.testing.assert_close(got, want)


def test_what_is_returned_stays_as_it_is_written():
    program = Autoencoder(with_everything_returned, neurons=64)
    expected = BOTH | {"sparse_product": 1}
    explanation = assert_rewrites(program, (torch.randn(2, 6, 8),), expected)
    notes = {r.pattern: r.note for r in explanation.report.rewrites}
    assert notes["topk_encode"].endswith("the product is kept")
    assert notes["sparse_decode"].endswith("the activations are kept")
    assert notes["sparse_product"] == "the encoder"


def only_returned(s, x):
    pre = ((x - s.b_dec) @ s.W_enc + s.b_enc) * s.W_dec.norm(dim=-1)
    return largest(pre) @ s.W_dec, pre.unflatten(0, (1, -1)).clone()


def counted(s, x):
    pre = (x - s.b_dec) @ s.W_enc + s.b_enc
    return largest(pre) @ s.W_dec + (pre.detach() > 0).sum(), pre


def with_two_decoders(s, x):
    pre = (x - s.b_dec) @ s.W_enc + s.b_enc
    return largest(pre) @ s.W_dec + largest(pre.mul(1)) @ s.W_dec.sin(), pre


def in_the_loss(s, x):
    pre = (x - s.b_dec) @ s.W_enc + s.b_enc
    return largest(pre) @ s.W_dec, pre.abs().mean()


def in_a_second_topk(s, x):
    pre = (x - s.b_dec) @ s.W_enc + s.b_enc
    return largest(pre) @ s.W_dec, pre.topk(8).values.sum()


@pytest.mark.parametrize(
    ("program", "ratio"),
    [
        (only_returned, 64 / 4),
        (counted, 64 / 4),
        (with_two_decoders, 64 / 4),
        (in_the_loss, 0),
        (in_a_second_topk, 0),
    ],
)
def test_a_product_that_is_only_returned_has_a_break_even_point_of_its_own(
    program, ratio, monkeypatch
):
    """Its gradient is zero unless the caller has it in a loss; the gradients are right in any case."""
    asked = []

    def look_up(operator, device, **sizes):
        asked.append(sizes["ratio"])
        return Worth(1.0)

    monkeypatch.setattr(registered()["sparse_product"].__module__ + ".look_up", look_up)
    model, x = Autoencoder(program, neurons=64).double(), torch.randn(6, 8).double()
    wanted = [model.W_enc, model.b_enc, model.W_dec, model.b_dec]

    def gradients(program, kept):
        y, more = program(x)
        loss = y.square().sum() + (more.sin().sum() if kept else 0)
        return torch.autograd.grad(loss, wanted, allow_unused=True)

    patterns = "topk_encode", "sparse_decode", "sparse_product"
    with sparse_inductor.enabled(only=patterns, policy=dict.fromkeys(patterns, "always")):
        rewritten = compile_without_codegen(model)
        for kept in (False, True):
            torch.testing.assert_close(gradients(rewritten, kept), gradients(model, kept))
    torch._dynamo.reset()
    with sparse_inductor.enabled(only="sparse_product", policy="auto"):
        compile_without_codegen(model)(x)
    assert asked == [ratio]


@pytest.mark.parametrize("captured", [False, True])
def test_a_number_of_entries_in_a_buffer(captured):
    """A tensor k breaks the graph before the topk, so that the decoder's graph does not contain it."""

    def program(s, x):
        f = F.relu(F.linear(x - s.b_dec, s.W_enc.T, s.b_enc))
        values, indices = f.topk(s.k, sorted=False, dim=-1)
        return torch.zeros_like(f).scatter_(-1, indices, values) @ s.W_dec + s.b_dec

    model, x = Autoencoder(program), torch.randn(5, 8)
    model.register_buffer("k", torch.tensor(4, dtype=torch.int32))
    expected = model(x)
    with only(*BOTH) as report, torch._dynamo.config.patch(capture_scalar_outputs=captured):
        torch.testing.assert_close(compile_without_codegen(model)(x), expected)
        (miss,) = report.near_misses
    assert ("at run time" if captured else "from outside this graph") in miss.reason
    assert ("f.topk(s.k" if captured else "scatter_") in miss.source


def test_which_of_two_grad_modes_is_named():
    def program(s, x):
        f = F.relu(x @ s.W_enc + s.b_enc)
        with torch.no_grad():
            indices = f.topk(4).indices
        return torch.zeros_like(f).scatter_(1, indices, f.gather(1, indices)) @ s.W_dec

    model, x = Autoencoder(program), torch.randn(5, 8)
    expected = torch.autograd.grad(model(x).sum(), model.W_enc)
    with only(*BOTH) as report:
        got = torch.autograd.grad(compile_without_codegen(model)(x).sum(), model.W_enc)
        (miss,) = report.near_misses
    torch.testing.assert_close(got, expected)
    assert miss.reason == "no gradient goes through topk: it is under no_grad"
    assert miss.source == "indices = f.topk(4).indices"


def rows_of_the_decoder(s, x):
    values, indices = (x @ s.W_enc + s.b_enc).topk(4)
    return (values.relu().unsqueeze(-1) * s.W_dec[indices]).sum(-2)


def encoded_without_gradient(s, x):
    with torch.no_grad():
        pre = x @ s.W_enc + s.b_enc
    values, indices = pre.topk(4)
    return torch.zeros_like(pre).scatter_(-1, indices, values.relu()) @ s.W_dec


@pytest.mark.parametrize(
    ("program", "frozen"),
    [
        (plain, ("W_enc", "b_dec")),  # of the encoder, its bias alone is learnt
        (rows_of_the_decoder, ("W_dec",)),
        (rows_of_the_decoder, ("W_enc", "W_dec")),
        (encoded_without_gradient, ("W_enc", "b_enc")),
    ],
)
def test_a_frozen_weight_cuts_no_gradient(program, frozen):
    model = Autoencoder(program)
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    decoder = "gathered_decode" if program is rows_of_the_decoder else "sparse_decode"
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    with only("topk_encode", decoder):
        explanation = assert_matches_reference(model, (x,), grads=True)
    assert_rewrites(explanation, expected={"topk_encode": 1, decoder: 1})


def into_fewer_neurons(s, x):
    """Not all indices are in range, unless the largest happen to be."""
    values, indices = (x @ s.W_enc).topk(4)
    return x.new_zeros(5, 24).scatter(-1, indices, values) @ s.W_dec[:24]


def into_fewer_rows(s, x):
    values, indices = (x @ s.W_enc).flatten().topk(4)
    f = x.new_zeros(4 * 32)
    f[indices] = values
    return f.view(4, 32) @ s.W_dec


def by_short_indices(s, x):
    """Indices repeat in so few bits."""
    pre = (x @ s.W_enc).flatten()
    values, indices = pre.topk(4)
    indices = indices.to(torch.bool).long()
    return torch.zeros_like(pre).scatter(0, indices, values).view(5, 32) @ s.W_dec


def by_bits(s, x):
    pre = (x @ s.W_enc).flatten()
    values, indices = pre.detach().topk(4)
    f = torch.zeros(pre.shape, dtype=torch.int32).scatter(0, indices, values.view(torch.int32))
    return f.view(dtype=torch.float32).view(5, 32) @ s.W_dec


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (into_fewer_neurons, "out of range"),
        (into_fewer_rows, "out of range"),
        (by_short_indices, "they may repeat"),
        (by_bits, None),
    ],
)
def test_what_is_not_scattered_as_it_was_found(program, reason):
    model = Autoencoder(program)
    x = torch.cat([torch.randn(3, 8), torch.zeros(2, 8)])  # the largest are in the first rows
    with only("sparse_decode") as report:
        try:
            want = model(x)
        except (IndexError, RuntimeError) as error:
            with pytest.raises(type(error)):
                compile_without_codegen(model)(x)
        else:
            torch.testing.assert_close(compile_without_codegen(model)(x), want)
    assert not report.rewrites
    reasons = [miss.reason for miss in report.near_misses]
    assert any(reason in said for said in reasons) if reason else not reasons


def test_flat_zeros_of_a_symbolic_size():
    """Without the size of the flat activations, Inductor took that of the zeros from a node behind them."""

    def program(s, x):
        pre = x @ s.W_enc
        values, indices = pre.reshape(-1).topk(9)
        f = torch.zeros_like(pre).view(-1)
        f[indices] = values
        f = f.relu().view(pre.shape)
        return f @ s.W_dec, f.view(-1).sum()

    model, x = Autoencoder(program), torch.randn(5, 8, requires_grad=True)
    with only("topk_encode") as report:
        found = compile_without_codegen(model, dynamic=True)(x)
    assert report.rewrites
    torch.testing.assert_close(found, model(x))


def test_two_decoders_of_the_same_activations():
    def program(s, x):
        values, indices = (x @ s.W_enc).topk(4)
        f = x.new_zeros(*x.shape[:-1], 32).scatter(-1, indices, values.relu())
        return f @ s.W_dec, f @ (s.W_dec * 2)

    assert_rewrites(
        Autoencoder(program),
        (torch.randn(2, 6, 8),),
        expected={"topk_encode": 1, "sparse_decode": 2},
    )


def checked(program, dtype):
    """Return verify's check of the encoder of a program."""
    with only("topk_encode") as report:
        options = sparse_inductor.options(only="topk_encode", policy="always", verify=True)
        compiled = torch.compile(
            Autoencoder(program).to(dtype), options=options, backend="inductor"
        )
        compiled(torch.randn(200, 8, generator=torch.Generator().manual_seed(2)).to(dtype))
        (check,) = report.checks
    return check


@pytest.mark.parametrize("program", [plain, heavy(rectified_first)])
def test_verify_accepts_either_choice_among_equal_values(program):
    check = checked(program, torch.bfloat16)
    assert check.verdict == "agrees", check


@pytest.mark.heavy
def test_verify_catches_other_columns(monkeypatch):
    top = aten.top

    def shifted(scores, k, ordered):
        values, indices = top(scores, k, ordered)
        return values, (indices + 1) % scores.shape[1]

    monkeypatch.setattr(aten, "top", shifted)
    assert checked(plain, torch.float32).verdict == "differs"
