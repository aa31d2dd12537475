"""Decoders of TopK autoencoders that gather the rows of their weight: their rewrites and their results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sparse_inductor
from sparse_inductor.testing import (
    assert_matches_reference,
    assert_rewrites,
    compile_without_codegen,
)
from support import only
from test_topk_autoencoders import Autoencoder


def as_sparsify_does(s, x):
    top = (x @ s.W_enc + s.b_enc).relu().flatten(0, 1).topk(4, sorted=False)
    y = F.embedding_bag(top.indices, s.W_dec, per_sample_weights=top.values, mode="sum")
    return y.view(*x.shape[:-1], 8) + s.b_dec


def over_positions(s, x):
    values, indices = (x @ s.W_enc).topk(4)
    return (s.W_dec[indices] * values.relu()[..., None]).sum(dim=-2) + s.b_dec


def kept_axis(s, x):
    values, indices = torch.topk(x @ s.W_enc, 1)
    return (F.embedding(indices, s.W_dec) * values.unsqueeze(-1)).sum(2, keepdim=True)


def one_row_matrices(s, x):
    values, indices = (x @ s.W_enc).flatten(0, 1).topk(4)
    rows = torch.index_select(s.W_enc.T, 0, indices.flatten()).view(12, 4, 8)  # tied
    return torch.bmm(values.unsqueeze(1), s.W_enc.T[indices]), rows.sum()


def flattened(s, x):
    values, indices = (x @ s.W_enc).topk(4)
    rows = torch.index_select(s.W_dec, 0, indices.reshape(-1)).view(*indices.shape, -1)
    return (values.relu().unsqueeze(-1) * rows).sum(-2)


def letters(s, x):
    values, indices = (x @ s.W_enc).topk(4)
    return torch.einsum("...kd,...k->...d", s.W_dec[indices], values)


def columns(s, x):
    values, indices = (x @ s.W_enc).topk(4)
    return torch.einsum("dbsk,bsk->bsd", s.W_dec.T[:, indices], values)


def flattened_columns(s, x):
    values, indices = (x @ s.W_enc).topk(4)
    columns = torch.index_select(s.W_enc, 1, indices.flatten()).view(8, *indices.shape)  # tied
    return torch.einsum("d...k,...k->...d", columns, values)


def columns_first(s, x):
    values, indices = (x @ s.W_enc).flatten(0, 1).topk(4)
    return (s.W_enc[:, indices] * values).sum(-1).T  # tied


def columns_of_one_row(s, x):
    values, indices = (x[0, 0] @ s.W_enc).topk(4)
    return s.W_enc.index_select(1, indices) @ values


def of_rows(gathered):
    def program(s, x):
        values, indices = (x @ s.W_enc).topk(4)
        return (gathered(s.W_dec, indices) * values.unsqueeze(-1)).sum(-2)

    return program


def under_no_grad(w, i):
    with torch.no_grad():
        return w[i]


WITHOUT_GRADIENT = {
    "detached": lambda w, i: w[i].detach(),
    "data": lambda w, i: w[i].data,
    "copied": lambda w, i: F.embedding(i, w, padding_idx=3).detach().clone(),
    "reshaped": lambda w, i: w.index_select(0, i.flatten()).view(*i.shape, -1).detach(),
    "reshaped_after_it": lambda w, i: w.index_select(0, i.flatten()).detach().view(*i.shape, -1),
    "no_grad": under_no_grad,
}


@pytest.mark.parametrize(
    "program",
    [
        as_sparsify_does, over_positions, kept_axis, one_row_matrices, flattened, letters,
        columns, columns_first, columns_of_one_row, flattened_columns,
    ],
)  # fmt: skip
def test_it_is_rewritten_and_keeps_its_numbers(program):
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    with only("gathered_decode"):
        explanation = assert_matches_reference(Autoencoder(program), (x,), grads=True)
    assert {r.pattern for r in explanation.report.rewrites} == {"gathered_decode"}


def test_columns_that_a_topk_chooses_are_no_weights_of_experts():
    def program(s, x):
        values, indices = (x @ s.W_enc).relu().topk(4)
        return torch.einsum("dbsk,bsk->dbs", s.W_enc[:, indices], values)

    with only("relu_ffn") as report:
        compile_without_codegen(Autoencoder(program))(torch.randn(2, 6, 8))
    assert not report.near_misses


@pytest.mark.parametrize("gathered", WITHOUT_GRADIENT)
def test_rows_that_pass_no_gradient_to_the_weight(gathered):
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    with only("gathered_decode"):
        model = Autoencoder(of_rows(WITHOUT_GRADIENT[gathered]))
        explanation = assert_matches_reference(model, (x,), grads=True)
    assert_rewrites(explanation, expected={"gathered_decode": 1})


def test_the_whole_step_of_such_an_autoencoder_is_rewritten():
    x = torch.randn(2, 6, 8)
    expected = {"topk_encode": 1, "gathered_decode": 1}
    assert_rewrites(Autoencoder(over_positions), (x,), expected=expected)


def written_after_it_is_gathered_from(s, x):
    weight = s.W_dec * 1
    values, indices = (x @ s.W_enc).topk(4)
    rows = weight[indices]
    weight.zero_()
    return (rows * values.unsqueeze(-1)).sum(-2)


def several_values_for_the_same_rows(s, x):
    values, indices = (x @ s.W_enc).topk(4)
    return torch.stack((values, -values), -2) @ s.W_dec[indices]


def under_autocast(s, x):
    values, indices = (x @ s.W_enc).topk(4)
    with torch.autocast("cpu", torch.bfloat16):
        return torch.einsum("...k,...kd->...d", values, s.W_dec[indices])


def of_bags(**options):
    def program(s, x):
        values, indices = (x @ s.W_enc).flatten(0, 1).topk(4)
        weight = s.W_dec.detach().clone()
        return F.embedding_bag(indices, weight, per_sample_weights=values, mode="sum", **options)

    return program


narrows = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="this torch drops casts that narrow itself"
)


@pytest.mark.parametrize(
    "program, reason",
    [
        (written_after_it_is_gathered_from, "changed in place"),
        (several_values_for_the_same_rows, "the same rows are summed up with several values"),
        (of_rows(lambda w, i: F.embedding(i, w, padding_idx=3)), "padding_idx"),
        (of_rows(lambda w, i: F.embedding(i, w, scale_grad_by_freq=True)), "scale_grad_by_freq"),
        (of_rows(lambda w, i: w[:20][i % 20]), ""),  # the indices are not those of a topk
        (
            of_rows(lambda w, i: w[i.mT.reshape(-1)].view(*i.shape, -1)),
            "",
        ),  # rows are in another order
        (of_rows(lambda w, i: torch.cat((w, w))[i]), "one row for each column"),
        pytest.param(
            of_rows(lambda w, i: w[i].bfloat16().float()),
            "cast to torch.bfloat16",
            marks=narrows,
        ),
        (of_rows(lambda w, i: w[i].double()), "cast to torch.float64"),
        (under_autocast, "gradients of the rows are added up in torch.float32"),
        (of_bags(padding_idx=3), "padding_idx"),
        (of_bags(max_norm=1.0), "renormalise"),
    ],
)
def test_what_is_left_as_it_is(program, reason):
    x = torch.randn(2, 6, 8)
    with only("gathered_decode") as report:
        model = Autoencoder(program)
        torch.testing.assert_close(compile_without_codegen(model)(x), model(x))
        assert not report.rewrites
        assert [reason in m.reason for m in report.near_misses] == [True] * bool(reason)


@narrows
def test_numbers_of_another_precision_are_widened_as_the_program_does():
    def program(s, x):
        values, indices = (x @ s.W_enc).topk(4)
        return (values.unsqueeze(-1) * s.W_dec.bfloat16()[indices]).sum(-2)

    model, x = Autoencoder(program), torch.randn(2, 6, 8)
    with only("gathered_decode") as report:
        y = compile_without_codegen(model)(x)
        assert len(report.rewrites) == 1
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, model(x))


@pytest.mark.parametrize(
    "neurons, weight, rewritten",
    [
        (4096, lambda w, i: w[i], True),
        (4096, lambda w, i: w.T.contiguous().T[i], False),
        (4096, lambda w, i: w.T[:, i], True),
        (4096, lambda w, i: w.T.contiguous()[:, i], False),
        (1024, lambda w, i: w.T.contiguous()[:, i], True),
    ],
)
def test_a_weight_is_transposed_where_its_entries_are_many(neurons, weight, rewritten):
    """There are 2,048 entries: half an entry for each row of the weight, or two."""
    scores, table = torch.randn(64, neurons), torch.randn(neurons, 256)

    def program(scores, table):
        values, indices = scores.topk(32)
        rows = weight(table, indices)
        letters = "bkd,bk->bd" if rows.shape[0] == 64 else "dbk,bk->bd"
        return torch.einsum(letters, rows, values)

    with sparse_inductor.enabled(only="gathered_decode", policy="auto"):
        explanation = sparse_inductor.explain(program, scores, table)
    assert bool(explanation.report.rewrites) == rewritten


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_any_number_of_rows(rows):
    model = Autoencoder(over_positions)
    x = torch.randn(rows, 3, 8)
    with only("gathered_decode"):
        compiled = compile_without_codegen(model, dynamic=True)
        torch.testing.assert_close(compiled(torch.randn(4, 3, 8)).shape, (4, 3, 8))
        got = torch.autograd.grad(compiled(x).square().sum(), (model.W_dec, model.W_enc))
    torch.testing.assert_close(
        got, torch.autograd.grad(model(x).square().sum(), (model.W_dec, model.W_enc))
    )
