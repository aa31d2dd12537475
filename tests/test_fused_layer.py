"""nn.TransformerEncoderLayer in inference is one fused call: compiled code is rewritten, eager code keeps the call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparse_inductor
from sparse_inductor.testing import compile_without_codegen
from support import only

CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()


def layer(**how):
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True, **how).eval()
    for p in made.parameters():
        nn.init.normal_(p, std=0.5)
    return made.requires_grad_(False)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    "masks", [{}, {"src_mask": CAUSAL}, {"src_key_padding_mask": PADDING}], ids=lambda m: "".join(m)
)
def test_its_block_is_rewritten(norm_first, masks):
    model, x = layer(norm_first=norm_first), torch.randn(2, 5, 8)
    with only("relu_ffn") as report:
        fn = compile_without_codegen(model)
        torch.testing.assert_close(fn(x, **masks), model(x, **masks))
        (rewrite,) = report.rewrites
        assert rewrite.replaced == ("_transformer_encoder_layer_fwd",)
        assert not report.near_misses


@pytest.mark.parametrize(("batch", "activation"), [(0, "relu"), (3, "gelu")])
def test_what_is_not_rewritten_stays_the_fused_call(batch, activation):
    model, x = layer(activation=activation), torch.randn(batch, 5, 8)
    with only("relu_ffn") as report:
        fn = compile_without_codegen(model)
        torch.testing.assert_close(fn(x), model(x))
        assert not report.rewrites
        (graph,) = fn.graphs
        assert any("_transformer_encoder_layer_fwd" in str(n.target) for n in graph.nodes)
        assert [m.reason for m in report.near_misses] == ["there are no tokens"] * (
            activation == "relu"
        )


def test_options_alone_rewrite_it():
    model, x = layer(), torch.randn(2, 5, 8)
    options = sparse_inductor.options(only="relu_ffn")
    name = sparse_inductor.session.REWRITE_SLOT
    with torch._inductor.config.patch({name: options[name]}):
        got = compile_without_codegen(model)(x)
    torch.testing.assert_close(got, model(x))
    assert [r.pattern for r in sparse_inductor.report().rewrites] == ["relu_ffn"]


@pytest.mark.parametrize("compiles", [False, True])
def test_a_padded_encoder_is_what_it_is_without_us(compiles):
    """On the fused path, eager code packs tokens into a nested tensor, so that the results of padding are 0."""
    encoder = nn.TransformerEncoder(layer(), 2, mask_check=False).eval().requires_grad_(False)
    x = torch.randn(2, 5, 8)

    def padded():
        torch._dynamo.reset()
        fn = torch.compile(encoder, backend="aot_eager") if compiles else encoder
        return fn(x, src_key_padding_mask=PADDING)

    expected = padded()
    assert compiles or not expected[1, 3:].any()
    before = torch.backends.mha.get_fastpath_enabled()
    with only("relu_ffn"):
        assert torch.backends.mha.get_fastpath_enabled() == before
        torch.testing.assert_close(padded(), expected)
