"""Models of transformers with entmax attention, and graphs that contain the package's functions as nodes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparse_inductor
from corpus.case import Case
from corpus.check import check
from corpus.entmax.published import Transformer, token_ids
from processes import python
from support import compile_without_codegen, heavy, near_misses, only, rewrites

entmax = pytest.importorskip("entmax")
pytest.importorskip("transformers")

ATTENTION = "entmax_attention"


@pytest.mark.sample(2)
@pytest.mark.parametrize("training", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("kind", ["entmax15", heavy("sparsemax"), heavy("entmax_bisect")])
@pytest.mark.parametrize("which", ["bert", "llama"])
def test_every_layer_is_rewritten_in_one_graph(which, kind, training):
    build = lambda: (Transformer(which, kind, layers=3), token_ids())
    with only(ATTENTION):
        check(Case("", build, training=training, pattern=ATTENTION, rewrites=3), how="aten")


def test_a_decoder_is_seen_to_be_causal_and_to_share_key_heads():
    model = Transformer("llama", "entmax15")
    with only(ATTENTION) as report, torch.no_grad():
        compile_without_codegen(model.eval())(*token_ids())
        (found,) = rewrites(report, ATTENTION)
        assert "causal" in found.note and "grouped queries" in found.note


@pytest.mark.sample(1)
@pytest.mark.parametrize("side", ["left", heavy("right")])
@pytest.mark.parametrize("which, said", [("llama", {"causal", "mask"}), ("bert", {"mask"})])
def test_padding_is_a_mask_in_training(which, said, side):
    """One sequence consists of padding only; the mask is added, so its gradient reaches the scores."""
    length = torch.tensor([7, 3, 0])[:, None]
    mask = (torch.arange(7) < length).long()
    mask = mask if side == "right" else mask.flip(1)
    ids = torch.randint(5, 60, (3, 7), generator=torch.Generator().manual_seed(0))
    model = Transformer(which, "entmax15", layers=2)
    with only(ATTENTION) as report:
        out = compile_without_codegen(model)(ids, mask)
        assert len(rewrites(report, ATTENTION)) == 2
        for found in rewrites(report, ATTENTION):
            assert said <= {*found.note.split(", ")} and "bias" not in found.note
        eager = model(ids, mask)
    torch.testing.assert_close(out, eager, rtol=1e-4, atol=1e-5)
    weights = torch.randn(out.shape)
    learnt = [p for n, p in model.named_parameters() if "pooler" not in n]
    grads = [torch.autograd.grad((y * weights).sum(), learnt) for y in (out, eager)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


def test_a_number_that_may_change_is_alpha_as_well():
    """With dynamic=True a module's float is symbolic at first; Dynamo may restart with its value."""

    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha = 1.7

        def forward(self, q, k, v):
            return entmax.entmax_bisect(q @ k.mT, alpha=self.alpha) @ v

    module, inputs = Attend(), [torch.randn(2, 2, 5, 4) for _ in range(3)]
    with only(ATTENTION) as report, torch.no_grad():
        compiled = compile_without_codegen(module, dynamic=True)
        torch.testing.assert_close(compiled(*inputs), module(*inputs), rtol=1e-4, atol=1e-5)
        assert rewrites(report, ATTENTION) and not near_misses(report, ATTENTION)


# The package's functions


def _graphs(fn, *args) -> int:
    """Return the number of graphs that Dynamo makes of a call."""
    torch._dynamo.reset()
    compiled = compile_without_codegen(fn)
    compiled(*args)
    return compiled.dynamo_graphs


def test_disable_gives_dynamo_back_as_it_was():
    x = torch.randn(3, 7, requires_grad=True)

    def program(x):
        return entmax.entmax15(x, -1) * 2

    before = _graphs(program, x)
    for _ in range(2):
        sparse_inductor.enable(only="entmax")
        assert _graphs(program, x) == 1
        sparse_inductor.disable()
        assert _graphs(program, x) == before


def test_two_patterns_share_what_makes_the_package_visible():
    x = torch.randn(3, 7, requires_grad=True)
    with sparse_inductor.enabled(only=["entmax", ATTENTION]):
        with sparse_inductor.enabled(only="entmax"):
            pass
        assert _graphs(lambda x: entmax.sparsemax(x) * 2, x) == 1


PROGRAMS = {
    "a substitute of the user's own is kept": """
import torch, entmax, sparse_inductor
@torch.compiler.substitute_in_graph(entmax.entmax15)
def mine(X, dim=-1, k=None):
    return X * 0 + 5
sparse_inductor.enable()
compiled = torch.compile(lambda x: entmax.entmax15(x), backend="eager")
assert compiled(torch.ones(3)).tolist() == [5, 5, 5]
sparse_inductor.disable()
torch._dynamo.reset()
assert compiled(torch.ones(3)).tolist() == [5, 5, 5]
""",
    "it may be imported after enable": """
import sys, torch, sparse_inductor
sparse_inductor.enable(only="entmax")
import entmax
x = torch.randn(3, 7, requires_grad=True)
count = 0
def backend(gm, inputs):
    global count
    count += 1
    return gm.forward
torch.compile(lambda x: entmax.sparsemax(x, k=3) * 2, backend=backend)(x)
assert count == 1, count
""",
    "without it nothing is missed": """
import sys
sys.modules["entmax"] = None  # not importable
import torch, sparse_inductor
sparse_inductor.enable(strict=False)
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
sparse_inductor.disable()
""",
}


@pytest.mark.parametrize("name", [heavy(name) if "kept" in name else name for name in PROGRAMS])
def test_the_package_in_a_process_of_its_own(name):
    python("-c", PROGRAMS[name])


def test_options_rewrite_what_dynamo_shows():
    """`options()` changes no process-wide state, so Dynamo does not show the package's functions as nodes.

    In inference it inlines the package's code, which is recognised by structure; in training it breaks the graph.
    """
    q, k, v = (torch.randn(2, 2, 5, 4) for _ in range(3))

    def attend(q, k, v):
        return entmax.sparsemax(q @ k.mT, dim=-1) @ v

    compiled = torch.compile(attend, options=sparse_inductor.options(only=ATTENTION))
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    assert len(rewrites(sparse_inductor.report(), ATTENTION)) == 1
