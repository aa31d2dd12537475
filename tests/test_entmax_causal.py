"""Causal masks computed from positions: which are passed to the operator as `causal`, and which stay masks."""

from __future__ import annotations

import pytest
import torch

import sparse_inductor
from corpus.entmax.published import Transformer, token_ids
from support import compile_without_codegen, heavy, only, rewrites

entmax = pytest.importorskip("entmax")
B, H, L, D = 3, 2, 9, 8


def gathered(positions):
    """Return positions as [B, 1, L, 1] and [B, 1, 1, L], gathered for every sequence as transformers does."""
    batch = torch.arange(B)[:, None, None, None]
    at = torch.arange(L)
    return positions[batch, at[None, None, :, None]], positions[batch, at[None, None, None]]


def documents(positions):
    """Return a document number for each position; a new document begins where a position is not the successor."""
    before = positions[:, :1] - 1
    return (positions.diff(prepend=before, dim=-1) != 1).cumsum(-1)


def same_document(positions):
    mine, theirs = gathered(documents(positions))
    return mine == theirs


def not_after(positions):
    mine, theirs = gathered(positions)
    return theirs <= mine


def in_order():
    return torch.arange(L)[None].expand(B, -1)


def packed():
    return torch.cat([torch.arange(4), torch.arange(L - 4)])[None].expand(B, -1)


def one_is_shifted():
    """Return a mask in which queries of the last sequence also see the next key."""
    ahead = (torch.arange(B) == B - 1).long()[:, None, None, None]
    mine, theirs = gathered(in_order())
    return theirs <= mine + ahead


def column():
    return torch.arange(L)[:, None]


def wrapping(positions):
    """Return positions in uint8 of which the last overflow to 0, 1, ..."""
    return (positions + 250).to(torch.uint8)


MASKS = {
    "positions of every sequence": (lambda: not_after(in_order()), "causal"),
    "positions from seven on": (lambda: not_after(in_order() + 7), "causal"),
    "one document": (lambda: not_after(in_order()) & same_document(in_order()), "causal"),
    "through a copy": (lambda: not_after(in_order()).to("cpu").contiguous(), "causal"),
    "what comes after is dropped": (lambda: ~(not_after(in_order()).logical_not()), "causal"),
    "two documents": (lambda: not_after(packed()) & same_document(packed()), "mask"),
    "documents alone": (lambda: same_document(packed()), "mask"),
    "positions of two documents": (lambda: not_after(packed()), "mask"),
    "one sequence sees more": (one_is_shifted, "mask"),
    "strictly before": (lambda: gathered(in_order())[1] < gathered(in_order())[0], "mask"),
    "keys without the first": (lambda: torch.arange(L + 1)[None, 1:] <= column(), "mask"),
    "rows in another order": (lambda: torch.ones(L, L).tril()[torch.arange(L).flip(0)] > 0, "mask"),
    "positions that wrap": (lambda: wrapping(torch.arange(L)) <= wrapping(column()), "mask"),
    "both without the first": (lambda: torch.arange(L + 1)[None, 1:] <= column() + 1, "causal"),
}


def notes(program, inputs, training, rounding=1e-5):
    """Compare results and gradients with the program's, and return the notes of the rewrites."""
    leaves = [t.requires_grad_(training) if t.is_floating_point() else t for t in inputs]
    with torch.set_grad_enabled(training), only("entmax_attention") as report:
        got, want = compile_without_codegen(program)(*leaves), program(*leaves)
        torch.testing.assert_close(got, want, rtol=10 * rounding, atol=rounding)
        if training:
            learnt = [t for t in leaves if t.requires_grad]
            if learnt:
                weights = torch.randn_like(want)
                grads = [torch.autograd.grad((y * weights).sum(), learnt) for y in (got, want)]
                torch.testing.assert_close(*grads, rtol=100 * rounding, atol=rounding)
        return [set(r.note.split(", ")) for r in rewrites(report, "entmax_attention")]


# Every mask runs once, in one of these four ways by turns.
WAYS = [(added, training) for added in (False, True) for training in (False, True)]
IN_TURN = [
    (name, *way) if at % 4 == turn else heavy(name, *way)
    for at, name in enumerate(MASKS)
    for turn, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("name", "added", "training"), IN_TURN)
def test_masks_of_positions(name, added, training):
    make, said = MASKS[name]
    torch.manual_seed(0)

    def program(q, k, v):
        scores, low = q @ k.mT * D**-0.5, torch.finfo(q.dtype).min
        if added:
            scores = scores + torch.where(make(), torch.zeros(()), low)
        else:
            scores = torch.where(make(), scores, low)
        return entmax.entmax15(scores, dim=-1) @ v

    (note,) = notes(program, [torch.randn(B, H, L, D) for _ in range(3)], training)
    assert ("causal" in note) == (said == "causal")
    assert (not {"mask", "bias"} & note) == (said == "causal")


def test_a_comparison_that_always_holds_may_drop_every_key():
    def program(q, k, v):
        keep = not_after(in_order()) & ~same_document(in_order())
        scores = torch.where(keep, q @ k.mT * D**-0.5, -1e9)
        return entmax.entmax15(scores, dim=-1) @ v

    (note,) = notes(program, [torch.randn(B, H, L, D) for _ in range(3)], training=True)
    assert {"causal", "mask"} <= note


@pytest.mark.parametrize("training", [False, True], ids=["infer", "train"])
def test_a_negated_mask_is_read_as_it_is_where_nothing_is_kept_for_a_backward(training):
    def program(q, k, v, keep):
        return entmax.entmax15((q @ k.mT * D**-0.5).masked_fill(~keep, -torch.inf), dim=-1) @ v

    inputs = [torch.randn(B, H, L, D, requires_grad=training) for _ in range(3)]
    keep = torch.rand(B, 1, L, L) > 0.3
    keep[..., 0] = True
    with only("entmax_attention") as report, torch.set_grad_enabled(training):
        graph = str(sparse_inductor.explain(program, *inputs, keep))
        want, kept = program(*inputs, keep), keep.clone()
        got = compile_without_codegen(program)(*inputs, kept)
        kept.fill_(False)  # as in a program that reuses one mask for all batches
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        if training:
            grads = [torch.autograd.grad(y.square().sum(), inputs) for y in (got, want)]
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
        assert len(rewrites(report, "entmax_attention")) == 1
    assert ("l_v_, None, l_keep_," in graph) == (not training)


LEFT = torch.arange(L) >= torch.tensor([0, 4, L])[:, None]  # the last sequence is all padding


@pytest.mark.parametrize("training", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_added_mask_of_both_is_causal_and_a_mask(dtype, training):
    """Queries before the first token have no key, and the sum passes their gradient on."""

    def program(q, k, v, kept):
        keep = not_after(in_order()) & kept[:, None, None]
        extended = torch.where(keep, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)
        q, k, v = (t.to(dtype) for t in (q, k, v))
        return entmax.entmax15(q @ k.mT * D**-0.5 + extended, dim=-1) @ v

    inputs = [torch.randn(B, H, L, D) for _ in range(3)]
    rounding = 0.03 if dtype == torch.bfloat16 else 1e-5
    (note,) = notes(program, [*inputs, LEFT], training, rounding)
    assert {"causal", "mask"} <= note and "bias" not in note


def test_masks_that_are_added_up_stay_biases():
    """2 * finfo.min is -inf, so in a query without keys those dropped by one mask and by both differ."""

    def program(q, k, v, kept):
        low = torch.finfo(q.dtype).min
        scores = q @ k.mT * D**-0.5 + torch.where(not_after(in_order()), 0.0, low)
        scores = scores + torch.where(kept[:, None, None], 0.0, low)
        return entmax.entmax15(scores, dim=-1) @ v

    inputs = [torch.randn(B, H, L, D) for _ in range(3)]
    (note,) = notes(program, [*inputs, LEFT], training=True)
    assert "bias" in note and "mask" not in note


@pytest.mark.parametrize("training", [False, True], ids=["infer", "train"])
def test_a_decoder_without_padding_is_causal_alone(training):
    model = Transformer("llama", "entmax15", layers=2)
    ids, _ = token_ids()
    found = notes(lambda ids: model.model(ids).last_hidden_state, [ids], training)
    assert len(found) == 2
    assert all("causal" in note and not {"mask", "bias"} & note for note in found)
