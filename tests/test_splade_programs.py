"""What is asked of some programs with a SPLADE head beyond `test_programs`."""

from __future__ import annotations

import torch
from torch import nn

import sparse_inductor
from corpus.cases import named
from sparse_inductor.testing import assert_matches_reference, assert_rewrites
from support import compile_without_codegen, only_splade_head, rewrites

BY_NAME = named("splade_head")


def test_new_sizes_are_rewritten_too():
    """A second batch size and length makes Dynamo compile anew with symbolic sizes."""
    module, (h, mask) = BY_NAME["eq_zero_fill_zero__infer"].build()
    with only_splade_head() as report, torch.no_grad():
        compiled = compile_without_codegen(module.eval())
        for batch, length in ((3, 7), (2, 5), (3, 4)):
            args = h[:batch, :length], mask[:batch, :length]
            torch.testing.assert_close(compiled(*args), module(*args))
        assert len(rewrites(report)) == compiled.dynamo_graphs >= 2


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


def test_a_vocabulary_of_unknown_size_has_its_bias():
    """The size is a node of the graph, not a symbol of the compile: a graph that is run as it is knows none."""

    def head(x, w, b):
        ones = x.new_ones(w.shape[0])
        return torch.relu(b + x @ w.T).amax(1) + ones

    inputs = torch.randn(2, 3, 6), torch.randn(9, 6), torch.randn(9)
    found = assert_matches_reference(head, inputs, grads=False, dynamic=True, aot=False)
    assert_rewrites(found, expected={"splade_head": 1})
