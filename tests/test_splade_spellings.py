"""Spellings the recogniser was not written against: exact ones are rewritten, numbers hold."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

import sparse_inductor
from cases import assert_case, left_behind
from splade_spellings import CASES, B, S, V
from support import compile_without_codegen, only_splade_head, rewrites

ALL = ("splade_head", "relu_ffn", "entmax_attention", "entmax", "sparse_scores")
BY_NAME = {case.name: case for case in CASES}


class Share:
    """Counts what was rewritten by expectation, and says so at the end of the run."""

    def __init__(self):
        self.total, self.rewritten = collections.Counter(), collections.Counter()

    def pytest_terminal_summary(self, terminalreporter):
        parts = [f"{self.rewritten[k]} of {n} '{k}'" for k, n in self.total.items()]
        terminalreporter.write_line("SPLADE spellings rewritten: " + ", ".join(parts))


@pytest.fixture(scope="module")
def share(request):
    counts = Share()
    request.config.pluginmanager.register(counts)
    return counts


def aminmax_has_a_gradient() -> bool:
    """Not in torch 2.11."""
    x = torch.zeros(2, requires_grad=True)
    try:
        torch.autograd.grad(torch.aminmax(x).max, x)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("name", BY_NAME)
def test_spelling(name, share):
    case = BY_NAME[name]
    if name == "aminmax_upper__train" and not aminmax_has_a_gradient():
        pytest.skip("this torch has no gradient of aminmax, rewritten or not")
    share.total[case.expect] += 1
    explanation = assert_case(case, only=("splade_head",))
    share.rewritten[case.expect] += bool(explanation.report.rewrites)
    if case.expect == "rewrite":
        assert not left_behind(explanation, B * S * V), "logits are still computed"


def test_under_inference_mode():
    """encode() of a server: the compiled module is called under torch.inference_mode()."""
    module, inputs = BY_NAME["bool_mask_multiplied__infer"].build()
    with only_splade_head() as report, torch.inference_mode():
        compiled = compile_without_codegen(module.eval())
        torch.testing.assert_close(compiled(*inputs), module(*inputs))
        assert len(rewrites(report)) == 1


def test_new_sizes_are_rewritten_too():
    """A second batch size and length makes Dynamo compile anew with symbolic sizes."""
    module, (h, mask) = BY_NAME["eq_zero_fill_zero__infer"].build()
    with only_splade_head() as report, torch.no_grad():
        compiled = compile_without_codegen(module.eval())
        for batch, length in ((3, 7), (2, 5), (3, 4)):
            args = h[:batch, :length], mask[:batch, :length]
            torch.testing.assert_close(compiled(*args), module(*args))
        assert len(rewrites(report)) == compiled.dynamo_graphs >= 2


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)


def test_what_becomes_of_the_terms_is_no_near_miss():
    """Pruning by the largest term, scores of a batch, a second lookup: of no family, so no word of it."""
    near = {
        name: [m.reason for m in assert_case(BY_NAME[name], only=ALL).report.near_misses]
        for name in (
            "pruned_by_ratio__infer",
            "two_towers_shared__train",
            "sparse_embed_recomputed__infer",
        )
    }
    assert not any(near.values()), near


def test_norms_of_texts_are_no_poolings():
    """L1 and FLOPS of vectors that one token each makes: sums over terms and over texts."""
    vocabulary = nn.Linear(8, 20)

    def vectors(hidden):
        r = torch.log1p(torch.relu(vocabulary(hidden[:, 0])))
        several = torch.log1p(torch.relu(vocabulary(hidden)))
        return r.sum(-1).mean() + r.mean(0).square().sum() + several.sum(-1).mean()

    sparse_inductor.enable()
    compile_without_codegen(vectors)(torch.randn(3, 5, 8))
    assert not sparse_inductor.report().near_misses
