"""Blocks inside layers: encoders, checkpointing, two in a row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from corpus.relu_ffn.registry import BOTH, INFER, TRAIN, Block, K, N, block, program, tokens


@program(modes=INFER)
def encoder_layer_in_eval():
    """The same in eval mode, where PyTorch has a fused call of its own."""
    torch.manual_seed(51)
    return nn.TransformerEncoderLayer(K, 2, N, dropout=0.0, batch_first=True), (tokens(),)


@program(modes=TRAIN)
def decoder_layer():
    """nn.TransformerDecoderLayer, norm first."""
    torch.manual_seed(52)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(
                K, 2, N, dropout=0.0, batch_first=True, norm_first=True
            )

        def forward(self, x):
            return self.layer(x, x)

    return Model(), (tokens(),)


@program(modes=TRAIN)
def checkpointed():
    def forward(x, m):
        def ffn(h):
            return m.down(F.relu(m.gate(h)) * m.up(h))

        return x + checkpoint(ffn, x, use_reentrant=False)

    return Block(forward), (tokens(),)


@program(rewrites=2, modes=BOTH)
def two_layers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            first = lambda x, m: x + m.down(F.relu(m.gate(m.norm(x))) * m.up(m.norm(x)))
            self.a, self.b = Block(first), Block(lambda x, m: m.down(F.relu(m.up(x))), bias=True)

        def forward(self, x):
            return self.b(self.a(x))

    return Model(), (tokens(),)


@block()
def normalised_output(x, m):
    """A norm after the block is nobody's business."""
    return m.norm(m.down(F.relu(m.gate(x)) * m.up(x)) + x)
