"""Further tests of some programs with a SPLADE head, beyond `test_programs`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import sparse_inductor
from corpus.cases import named
from sparse_inductor.testing import (
    assert_matches_reference,
    assert_not_rewritten,
    assert_rewrites,
)
from support import compile_without_codegen, only_splade_head, rewrites

BY_NAME = named("splade_head")


def test_new_sizes_are_rewritten_too():
    """A second batch size and length makes Dynamo recompile with symbolic sizes."""
    module, (h, mask) = BY_NAME["eq_zero_fill_zero__infer"].build()
    with only_splade_head() as report, torch.no_grad():
        compiled = compile_without_codegen(module.eval())
        for batch, length in ((3, 7), (2, 5), (3, 4)):
            args = h[:batch, :length], mask[:batch, :length]
            torch.testing.assert_close(compiled(*args), module(*args))
        assert len(rewrites(report)) == compiled.dynamo_graphs >= 2


def test_norms_of_texts_are_no_poolings():
    """L1 and FLOPS losses of vectors are sums over terms and over texts, not maxima over positions."""
    vocabulary = nn.Linear(8, 20)

    def vectors(hidden):
        r = torch.log1p(torch.relu(vocabulary(hidden[:, 0])))
        several = torch.log1p(torch.relu(vocabulary(hidden)))
        return r.sum(-1).mean() + r.mean(0).square().sum() + several.sum(-1).mean()

    sparse_inductor.enable()
    compile_without_codegen(vectors)(torch.randn(3, 5, 8))
    assert not sparse_inductor.report().near_misses


def test_a_vocabulary_of_unknown_size_has_its_bias():
    """The size is a node of the graph and not a symbol, because a graph that runs as it is has no symbols."""

    def head(x, w, b):
        ones = x.new_ones(w.shape[0])
        return torch.relu(b + x @ w.T).amax(1) + ones

    inputs = torch.randn(2, 3, 6), torch.randn(9, 6), torch.randn(9)
    found = assert_matches_reference(head, inputs, grads=False, dynamic=True, aot=False)
    assert_rewrites(found, expected={"splade_head": 1})


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, math.inf), (torch.float32, 1e-42), (torch.float16, 1e-4)],
)
def test_sums_of_linears_times_what_their_weights_do_not_hold(dtype, scale):
    """Joined weights times infinity become NaN, and weights times a small number lose digits in fp16."""

    def head(x, w, v):
        return torch.log1p(torch.relu(x @ w.T * scale + x.tanh() @ v.T)).amax(1)

    inputs = [torch.randn(2, 3, 6), torch.randn(9, 6) / 50, torch.randn(9, 6) / 50]
    reason = "add combines two tensors that come from linears"
    assert_not_rewritten(head, [t.to(dtype) for t in inputs], "splade_head", reason=reason)


def test_what_is_filled_in_where_there_is_no_bias_is_of_the_logits_dtype():
    def head(x, w, unseen):
        return torch.relu((x @ w.T).masked_fill(unseen, 0.1)).amax(1)

    inputs = torch.randn(2, 3, 6), torch.randn(9, 6), torch.arange(9) % 2 == 0
    inputs = [t.double() if t.is_floating_point() else t for t in inputs]
    with only_splade_head() as report:
        found = compile_without_codegen(head)(*inputs)
        assert len(rewrites(report)) == 1
    torch.testing.assert_close(found, head(*inputs), rtol=1e-14, atol=0)
