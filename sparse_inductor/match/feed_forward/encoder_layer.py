"""The fused call that nn.TransformerEncoderLayer makes in inference, with a feed-forward block in it.

    torch._transformer_encoder_layer_fwd(src, ...)
        ->  _native_multi_head_attention, layer_norm, relu_ffn, layer_norm

The fused call runs the same operations one after the other. Only its feed-forward block is replaced.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
import torch.nn.functional as F
from torch import fx

from ... import compat
from ...epilogue.steps import Step, render
from ...graph.checks import check_device
from ...graph.emit import Emitter, own_operator
from ...graph.fakes import fake, same_size
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.view import GraphView
from ...pattern import Sparse

NAME = "_transformer_encoder_layer_fwd"


@dataclasses.dataclass
class LayerMatch:
    """A fused encoder layer whose activation is a ReLU."""

    anchor: fx.Node
    call: Call
    pattern: str
    op: str
    bytes_saved: int | None = 0
    note: str = "relu, in nn.TransformerEncoderLayer's fused call"
    sparse: tuple[Sparse, ...] = ()  # the graph has no node for the hidden activations

    @property
    def matched_nodes(self) -> tuple[fx.Node, ...]:
        return (self.anchor,)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(self.call[name] for name in ("src", "ffn_weight_1", "ffn_weight_2"))

    def replace(self) -> None:
        call, e = self.call, Emitter(self.anchor)
        src, first = call["src"], call["norm_first"]

        def norm(x: fx.Node, which: int) -> fx.Node:
            weight, bias = call[f"norm_weight_{which}"], call[f"norm_bias_{which}"]
            return e.call(F.layer_norm, x, (call["embed_dim"],), weight, bias, call["eps"])

        x = norm(src, 1) if first else src
        attention = e.call(
            compat.fused_attention(), x, x, x, call["embed_dim"], call["num_heads"],
            call["qkv_weight"], call["qkv_bias"], call["proj_weight"], call["proj_bias"],
            call.get("mask"), False, True, call.get("mask_type"),
        )  # fmt: skip
        x = e.call(operator.add, e.call(operator.getitem, attention, 0), src)
        x = x if first else norm(x, 1)
        block = e.call(
            own_operator("relu_ffn"),
            norm(x, 2) if first else x, call["ffn_weight_1"], call["ffn_bias_1"], None, None,
            call["ffn_weight_2"], call["ffn_bias_2"], None, None, render((Step("relu"),)), "", False, False,
        )  # fmt: skip
        x = e.call(operator.add, e.call(operator.getitem, block, 0), x)
        x = x if first else norm(x, 2)
        self.anchor.replace_all_uses_with(e.laid_out(x, fake(self.anchor)))


def encoder_layer(view: GraphView, node: fx.Node, pattern: str, op: str) -> LayerMatch | None:
    """The match of a node that is a fused layer with a ReLU; None for other nodes. Raises NoMatch if it cannot be
    replaced."""
    call = view.call(node)
    if call.name != NAME or call["use_gelu"] is not False:
        return None
    check_device(node)
    tensors = [fake(a) for a in call.args.values() if view.is_tensor(a)]
    if any(map(view.needs_grad, call.args.values())):
        raise NoMatch("the fused layer has no gradient", node)
    if not all(t.dtype == fake(node).dtype for t in tensors if t.dtype != torch.bool):
        raise NoMatch("its parts differ in their dtypes", node)
    if any(same_size(s, 0) for t in tensors for s in t.shape):
        raise NoMatch("there are no tokens", node)
    return LayerMatch(node, call, pattern, op)
