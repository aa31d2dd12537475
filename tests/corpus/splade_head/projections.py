"""The matmul to the vocabulary: where its weight comes from and how it is multiplied."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.splade_head.registry import (
    INFER,
    B,
    D,
    S,
    V,
    Vocabulary,
    bias,
    encoder,
    head,
    hidden,
    ids,
    mask,
    program,
    tokens,
    weight,
)


def pool(logits, mask):
    return (tokens(logits) * mask.unsqueeze(-1)).max(dim=1).values


@program()
def tied_embeddings():
    """The input embedding is the output projection: its gradient has two parts."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(21)
            self.embed = nn.Embedding(V, D)
            self.mixer = nn.Linear(D, D)

        def forward(self, input_ids, mask):
            h = torch.tanh(self.mixer(self.embed(input_ids)))
            return pool(F.linear(h, self.embed.weight), mask)

    return Model(), (ids(), mask())


@program()
def bert_prediction_head():
    """dense, gelu, LayerNorm, tied decoder, and the bias as a parameter of its own."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(22)
            self.embed = nn.Embedding(V, D, padding_idx=0)
            self.dense, self.norm = nn.Linear(D, D), nn.LayerNorm(D)
            self.decoder = nn.Linear(D, V, bias=False)
            self.decoder.weight = self.embed.weight
            self.bias = nn.Parameter(torch.linspace(-0.5, 0.5, V))

        def forward(self, h, mask):
            h = self.norm(F.gelu(self.dense(h)))
            return pool(self.decoder(h) + self.bias, mask)

    return Model(), (hidden(), mask())


@program()
def functional_weights():
    """A pure function of its weights."""

    def encode(h, mask, w, b):
        return pool(F.linear(h, weight=w, bias=b), mask)

    return encode, (hidden(), mask(), weight(), bias())


@program()
def weight_stored_transposed():
    """A JAX checkpoint keeps the kernel as [D, V]: h @ kernel + bias."""

    def encode(h, mask, kernel, b):
        return pool(h @ kernel + b, mask)

    return encode, (hidden(), mask(), weight(D, V), bias())


@program()
def vocabulary_first():
    """W @ h^T: logits [B, V, S], the max over the last dimension."""

    def encode(h, mask, w, b):
        logits = torch.matmul(w, h.transpose(1, 2)) + b[:, None]
        return (tokens(logits) * mask[:, None, :]).amax(-1)

    return encode, (hidden(), mask(), weight(), bias())


@program()
def vocabulary_first_flattened():
    """einsum("vd,bsd->vbs"): values [V, B] that lie as they are written, which view counts on."""

    def encode(h, mask, w, b):
        logits = torch.einsum("vd,bsd->vbs", w, h) + b[:, None, None]
        values, positions = (tokens(logits) * mask).max(-1)
        return values.view(-1), positions.view(-1)

    return encode, (hidden(), mask(), weight(), bias())


@program()
def addmm_on_flat_tokens():
    """torch.addmm on [B*S, D]."""

    def encode(h, mask, w, b):
        logits = torch.addmm(b, h.view(-1, h.size(-1)), w.t())
        return pool(logits.view(h.size(0), h.size(1), -1), mask)

    return encode, (hidden(), mask(), weight(), bias())


@program()
def flat_until_the_max():
    """Packed [B*S, ...] all the way, reshaped just before the max."""

    def encode(h, mask, w):
        flat = tokens(torch.mm(h.reshape(-1, D), w.T)) * mask.reshape(-1, 1)
        return torch.amax(flat.reshape(B, S, V), dim=1)

    return encode, (hidden(), mask(), weight())


@program()
def einsum_with_ellipsis():
    """einsum('...d,vd->...v')"""

    def encode(h, mask, w):
        return pool(torch.einsum("...d,vd->...v", h, w), mask)

    return encode, (hidden(), mask(), weight())


@program()
def einsum_transposed_output():
    """einsum that puts the sequence last."""

    def encode(h, mask, w, b):
        logits = torch.einsum("b s d, v d -> b v s", h, w) + b.view(1, -1, 1)
        return torch.log1p(logits.relu() * mask.unsqueeze(1)).max(dim=2).values

    return encode, (hidden(), mask(), weight(), bias())


@program()
def bias_added_in_place():
    """logits += self.bias"""

    class Model(Vocabulary):
        def __init__(self):
            super().__init__(bias=False)
            self.bias = nn.Parameter(torch.linspace(-1.0, 1.0, V))

        def forward(self, h, mask):
            logits = self.decoder(h)
            logits += self.bias
            return pool(logits, mask)

    return Model(), (hidden(), mask())


@program()
def two_biases():
    """A linear with a bias and a frequency prior on top of it."""

    class Model(Vocabulary):
        def __init__(self):
            super().__init__()
            self.register_buffer("log_prior", torch.linspace(-2.0, 0.0, V))

        def forward(self, h, mask):
            return pool(self.decoder(h).add(self.log_prior), mask)

    return Model(), (hidden(), mask())


@program()
def scaled_weight():
    """F.linear(h, w * scale): the weight is computed, its parts get gradients."""

    def encode(h, mask, w, scale):
        return pool(F.linear(h, w * scale.unsqueeze(-1)), mask)

    return encode, (hidden(), mask(), weight(), weight(V, 1).detach().squeeze(1).requires_grad_())


@program()
def weight_normalised():
    """torch.nn.utils.parametrizations.weight_norm on the decoder."""

    class Model(Vocabulary):
        def __init__(self):
            super().__init__()
            torch.nn.utils.parametrizations.weight_norm(self.decoder)

        def forward(self, h, mask):
            return pool(self.decoder(h), mask)

    return Model(), (hidden(), mask())


@program()
def cosine_vocabulary():
    """Normalised tokens and vocabulary, times a fixed scale."""

    def encode(h, mask, w):
        logits = F.normalize(h, dim=-1) @ F.normalize(w, dim=-1).T * 20.0
        return pool(logits, mask)

    return encode, (hidden(), mask(), weight())


@program(modes=INFER)
def dequantised_weight():
    """An int8 weight with one scale a row, dequantised on the fly."""

    def encode(h, mask, w8, scale):
        return pool(F.linear(h, w8.to(h.dtype) * scale[:, None]), mask)

    w8 = torch.arange(V * D).remainder(255).sub(127).view(V, D).to(torch.int8)
    return encode, (hidden(), mask(), w8, torch.full((V,), 0.01))


@encoder()
def vocabulary_rows_sliced(self, h, mask):
    """Only the real words: weight[5:], bias[5:]."""
    return pool(F.linear(h, self.decoder.weight[5:], self.decoder.bias[5:]), mask)


@program()
def padded_vocabulary():
    """A weight padded to a multiple of 8, the logits sliced back."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(23)
            self.lm_head = nn.Linear(D, 40, bias=False)

        def forward(self, h, mask):
            return pool(self.lm_head(h)[:, :, :V], mask)

    return Model(), (hidden(), mask())


@program()
def language_specific_head():
    """One projection a language, chosen by a Python attribute."""

    class Model(nn.Module):
        language = 1

        def __init__(self):
            super().__init__()
            torch.manual_seed(24)
            self.heads = nn.Parameter(torch.randn(3, V, D))

        def forward(self, h, mask):
            return pool(F.linear(h, self.heads[self.language]), mask)

    return Model(), (hidden(), mask())


@program()
def t5_scaled_hidden():
    """T5 with tied embeddings: h * d ** -0.5 before the shared projection."""

    def encode(h, mask, shared):
        return pool(F.linear(h * (D**-0.5), shared), mask)

    return encode, (hidden(), mask(), weight())


@encoder(inputs=(hidden, hidden, hidden, hidden, mask))
def four_layers_averaged(self, a, b, c, d, mask):
    """The mean of the last four hidden states."""
    h = torch.stack([a, b, c, d]).mean(dim=0)
    return pool(self.decoder(h), mask)


@encoder(parts={"project": lambda: nn.Linear(D, D, bias=False)})
def last_layers_summed_by_matmul_out(self, h, mask):
    """A learned projection before the decoder, without an activation between."""
    return pool(self.decoder(self.project(h)), mask)


@program(rewrites=4)
def vocabulary_in_chunks():
    """The vocabulary in four parts, concatenated: the poor man's fused head."""

    def encode(h, mask, w, b):
        parts = zip(w.split(10), b.split(10), strict=True)
        return torch.cat([pool(F.linear(h, rows, own), mask) for rows, own in parts], dim=-1)

    return encode, (hidden(), mask(), weight(), bias())


@encoder(rewrites=B)
def batch_in_chunks(self, h, mask):
    """One sequence at a time, because the logits do not fit."""
    rows = [pool(self.decoder(h[i : i + 1]), mask[i : i + 1]) for i in range(h.size(0))]
    return torch.cat(rows)


@encoder(rewrites=3)
def hidden_in_chunks(self, h, mask):
    """The running maximum over chunks of hidden states, each with its own matmul."""
    best = None
    for part, keep in zip(h.split(3, dim=1), mask.split(3, dim=1), strict=True):
        pooled = pool(self.decoder(part), keep)
        best = pooled if best is None else torch.maximum(best, pooled)
    return best


@encoder(inputs=(lambda: hidden(shape=(1, S, D)), lambda: mask()[:1]))
def single_query(self, h, mask):
    """A batch of one, squeezed to [S, V] before the max."""
    logits = self.decoder(h).squeeze(0)
    return (tokens(logits) * mask.squeeze(0).unsqueeze(-1)).max(dim=0).values


@program()
def passages_of_a_document():
    """[B, C, S, D]: the max over the tokens of every passage, then over the passages."""

    class Model(Vocabulary):
        def forward(self, h, mask):
            weights = tokens(self.decoder(h)) * mask.unsqueeze(-1)
            return weights.amax(dim=2).amax(dim=1)

    keep = torch.stack([mask(), mask(lengths=(5, 7, 1))], dim=1)
    return Model(), (hidden(shape=(B, 2, S, D)), keep)


@program("maybe", "the max over two dimensions at once")
def passages_in_one_amax():
    """amax(dim=(1, 2)) over passages and tokens."""

    class Model(Vocabulary):
        def forward(self, h, mask):
            return (tokens(self.decoder(h)) * mask.unsqueeze(-1)).amax(dim=(1, 2))

    keep = torch.stack([mask(), mask(lengths=(5, 7, 1))], dim=1)
    return Model(), (hidden(shape=(B, 2, S, D)), keep)


class SequenceFirst(Vocabulary):
    """Layers of a model that has its tokens along the first axis, in front of the head."""

    def __init__(self, pool):
        super().__init__()
        self.dense, self.norm, self.pool = nn.Linear(D, D), nn.LayerNorm(D), pool

    def forward(self, h, mask):
        x = h.transpose(0, 1).contiguous()
        return self.pool(self.decoder(self.norm(F.gelu(self.dense(x)))), mask)


@program()
def sequence_first_inside():
    """The model turns its input around, and pools over the first axis."""
    return SequenceFirst(lambda z, m: (tokens(z) * m.t()[..., None]).amax(0)), (hidden(), mask())


@program()
def sequence_first_until_the_logits():
    """The logits are turned back before they are pooled."""
    turned = SequenceFirst(lambda z, m: (tokens(z.transpose(0, 1)) * m[..., None]).amax(1))
    return turned, (hidden(), mask())


@encoder(inputs=(lambda: hidden(shape=(S, B, D)), mask))
def sequence_first_terms_before_tokens(self, h, mask):
    """The logits of [S, B, D] as [V, B, S]: tokens come last."""
    return (tokens(self.decoder(h)).permute(2, 1, 0) * mask).amax(-1).t()


@encoder("no_rewrite", "terms first, then a maximum over the batch")
def terms_first_over_the_batch(self, h, mask):
    """Which terms a batch has at each position."""
    return (tokens(self.decoder(h)) * mask[..., None]).permute(2, 0, 1).amax(1)


@encoder(
    "maybe",
    "sequence first, [S, B, D]: in the graph the same as a max over the batch",
    inputs=(lambda: hidden(shape=(S, B, D)), lambda: mask().t().contiguous()),
)
def sequence_first(self, h, mask):
    """fairseq layout."""
    return (tokens(self.decoder(h)) * mask.unsqueeze(-1)).amax(dim=0)


@program("maybe", "unusual products: tensordot")
def tensordot_product():
    """torch.tensordot(h, w, dims=([2], [1]))"""

    def encode(h, mask, w):
        return pool(torch.tensordot(h, w, dims=([2], [1])), mask)

    return encode, (hidden(), mask(), weight())


@program("maybe", "unusual products: inner")
def inner_product():
    """torch.inner(h, w)"""

    def encode(h, mask, w):
        return pool(torch.inner(h, w), mask)

    return encode, (hidden(), mask(), weight())


@program("maybe", "unusual products: baddbmm")
def batched_addition():
    """torch.baddbmm with an expanded bias and weight."""

    def encode(h, mask, w, b):
        return pool(torch.baddbmm(b, h, w.t().expand(h.size(0), -1, -1)), mask)

    return encode, (hidden(), mask(), weight(), bias())


@program("maybe", "a 1x1 convolution")
def pointwise_convolution():
    """nn.Conv1d(D, V, 1) on channels first."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(25)
            self.conv = nn.Conv1d(D, V, kernel_size=1)

        def forward(self, h, mask):
            logits = self.conv(h.transpose(1, 2))
            return (tokens(logits) * mask.unsqueeze(1)).amax(-1)

    return Model(), (hidden(), mask())


@encoder(
    "maybe",
    "a learned scale on the logits: its sign is unknown and it needs a gradient",
    parts={"logit_scale": lambda: nn.Parameter(torch.tensor(0.3))},
)
def learned_logit_scale(self, h, mask):
    """CLIP-style logit_scale.exp()."""
    return pool(self.decoder(h) * self.logit_scale.exp(), mask)


@program("maybe", "a scale a vocabulary entry: a column operand that may be negative")
def scale_per_term():
    """logits * scale[V]"""

    def encode(h, mask, w, scale):
        return pool(F.linear(h, w) * scale, mask)

    return encode, (hidden(), mask(), weight(), bias())


@program("maybe", "two projections added: one matmul only after concatenation")
def low_rank_adapter():
    """LoRA on the decoder."""

    class Model(Vocabulary):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, V, bias=False)

        def forward(self, h, mask):
            return pool(self.decoder(h) + 0.5 * self.up(self.down(h)), mask)

    return Model(), (hidden(), mask())


@encoder(
    "maybe",
    "some columns of the logits, gathered",
    inputs=(hidden, mask, lambda: torch.tensor([3, 30, 7, 8])),
)
def candidate_terms_gathered(self, h, mask, candidates):
    """logits.index_select over a candidate list."""
    return pool(self.decoder(h).index_select(-1, candidates), mask)


@head(modes=INFER, dynamic=True)
def flattened_axis_by_axis(logits, mask):
    """rearrange leaves a flatten of one axis, and channels are dropped in training alone"""
    logits = F.dropout1d(logits, 0.1, False).flatten(0, 0)
    return (tokens(logits) * mask.unsqueeze(-1)).amax(1)
