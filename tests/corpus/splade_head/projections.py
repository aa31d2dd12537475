"""The matmul to the vocabulary: where its weight comes from and how it is multiplied."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.case import each
from corpus.splade_head.registry import (
    INFER,
    B,
    D,
    S,
    V,
    Vocabulary,
    bias,
    encoder,
    formula,
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


@encoder(
    inputs=(ids, mask),
    parts={"decoder": lambda: nn.Embedding(V, D), "mixer": lambda: nn.Linear(D, D)},
)
def tied_embeddings(self, input_ids, mask):
    """The input embedding is the output projection: its gradient has two parts."""
    h = torch.tanh(self.mixer(self.decoder(input_ids)))
    return pool(F.linear(h, self.decoder.weight), mask)


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


each(
    formula(),
    functional_weights=lambda h, mask, w, b: pool(F.linear(h, weight=w, bias=b), mask),
    einsum_with_ellipsis=lambda h, mask, w: pool(torch.einsum("...d,vd->...v", h, w), mask),
)


@formula(inputs={"kernel": lambda: weight(D, V)})
def weight_stored_transposed(h, mask, kernel, b):
    """A JAX checkpoint keeps the kernel as [D, V]: h @ kernel + bias."""
    return pool(h @ kernel + b, mask)


@formula()
def vocabulary_first(h, mask, w, b):
    """W @ h^T: logits [B, V, S], the max over the last dimension."""
    logits = torch.matmul(w, h.transpose(1, 2)) + b[:, None]
    return (tokens(logits) * mask[:, None, :]).amax(-1)


@formula()
def vocabulary_first_flattened(h, mask, w, b):
    """einsum("vd,bsd->vbs"): values [V, B] that lie as they are written, which view counts on."""
    logits = torch.einsum("vd,bsd->vbs", w, h) + b[:, None, None]
    values, positions = (tokens(logits) * mask).max(-1)
    return values.view(-1), positions.view(-1)


@formula()
def addmm_on_flat_tokens(h, mask, w, b):
    logits = torch.addmm(b, h.view(-1, h.size(-1)), w.t())
    return pool(logits.view(h.size(0), h.size(1), -1), mask)


@formula()
def flat_until_the_max(h, mask, w):
    """Packed [B*S, ...] all the way, reshaped just before the max."""
    flat = tokens(torch.mm(h.reshape(-1, D), w.T)) * mask.reshape(-1, 1)
    return torch.amax(flat.reshape(B, S, V), dim=1)


@formula()
def einsum_transposed_output(h, mask, w, b):
    logits = torch.einsum("b s d, v d -> b v s", h, w) + b.view(1, -1, 1)
    return torch.log1p(logits.relu() * mask.unsqueeze(1)).max(dim=2).values


@encoder(bias=False, parts={"bias": lambda: nn.Parameter(torch.linspace(-1.0, 1.0, V))})
def bias_added_in_place(self, h, mask):
    logits = self.decoder(h)
    logits += self.bias
    return pool(logits, mask)


@encoder(parts={"log_prior": lambda: nn.Buffer(torch.linspace(-2.0, 0.0, V))})
def two_biases(self, h, mask):
    """A linear with a bias and a frequency prior on top of it."""
    return pool(self.decoder(h).add(self.log_prior), mask)


@formula(inputs={"scale": lambda: weight(V, 1).detach().squeeze(1).requires_grad_()})
def scaled_weight(h, mask, w, scale):
    """F.linear(h, w * scale): the weight is computed, its parts get gradients."""
    return pool(F.linear(h, w * scale.unsqueeze(-1)), mask)


@program()
def weight_normalised():
    class Model(Vocabulary):
        def __init__(self):
            super().__init__()
            torch.nn.utils.parametrizations.weight_norm(self.decoder)

        def forward(self, h, mask):
            return pool(self.decoder(h), mask)

    return Model(), (hidden(), mask())


@formula()
def cosine_vocabulary(h, mask, w):
    """Normalised tokens and vocabulary, times a fixed scale."""
    logits = F.normalize(h, dim=-1) @ F.normalize(w, dim=-1).T * 20.0
    return pool(logits, mask)


def eight_bits():
    return torch.arange(V * D).remainder(255).sub(127).view(V, D).to(torch.int8)


@formula(modes=INFER, inputs={"w8": eight_bits, "scale": lambda: torch.full((V,), 0.01)})
def dequantised_weight(h, mask, w8, scale):
    """An int8 weight with one scale a row, dequantised on the fly."""
    return pool(F.linear(h, w8.to(h.dtype) * scale[:, None]), mask)


@encoder()
def vocabulary_rows_sliced(self, h, mask):
    """Only the real words: weight[5:], bias[5:]."""
    return pool(F.linear(h, self.decoder.weight[5:], self.decoder.bias[5:]), mask)


@encoder(parts={"decoder": lambda: nn.Linear(D, 40, bias=False)})
def padded_vocabulary(self, h, mask):
    """A weight padded to a multiple of 8, the logits sliced back."""
    return pool(self.decoder(h)[:, :, :V], mask)


@encoder(
    parts={
        "decoder": nn.Module,
        "heads": lambda: nn.Parameter(torch.randn(3, V, D)),
        "language": lambda: 1,
    }
)
def language_specific_head(self, h, mask):
    """One projection a language, chosen by a Python attribute."""
    return pool(F.linear(h, self.heads[self.language]), mask)


@formula(inputs={"shared": weight})
def t5_scaled_hidden(h, mask, shared):
    """T5 with tied embeddings: h * d ** -0.5 before the shared projection."""
    return pool(F.linear(h * (D**-0.5), shared), mask)


@encoder(inputs=(hidden, hidden, hidden, hidden, mask))
def four_layers_averaged(self, a, b, c, d, mask):
    h = torch.stack([a, b, c, d]).mean(dim=0)
    return pool(self.decoder(h), mask)


@encoder(parts={"project": lambda: nn.Linear(D, D, bias=False)})
def last_layers_summed_by_matmul_out(self, h, mask):
    return pool(self.decoder(self.project(h)), mask)


@formula(rewrites=4)
def vocabulary_in_chunks(h, mask, w, b):
    """The vocabulary in four parts, concatenated: the poor man's fused head."""
    parts = zip(w.split(10), b.split(10), strict=True)
    return torch.cat([pool(F.linear(h, rows, own), mask) for rows, own in parts], dim=-1)


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


PASSAGES = (
    lambda: hidden(shape=(B, 2, S, D)),
    lambda: torch.stack([mask(), mask(lengths=(5, 7, 1))], dim=1),
)


@encoder(inputs=PASSAGES)
def passages_of_a_document(self, h, mask):
    """[B, C, S, D]: the max over the tokens of every passage, then over the passages."""
    weights = tokens(self.decoder(h)) * mask.unsqueeze(-1)
    return weights.amax(dim=2).amax(dim=1)


@encoder("maybe", "the max over two dimensions at once", inputs=PASSAGES)
def passages_in_one_amax(self, h, mask):
    return (tokens(self.decoder(h)) * mask.unsqueeze(-1)).amax(dim=(1, 2))


LAYERS = {"dense": lambda: nn.Linear(D, D), "norm": lambda: nn.LayerNorm(D)}


@encoder(parts=LAYERS)
def sequence_first_inside(self, h, mask):
    """The model turns its input around, and pools over the first axis."""
    x = h.transpose(0, 1).contiguous()
    logits = self.decoder(self.norm(F.gelu(self.dense(x))))
    return (tokens(logits) * mask.t()[..., None]).amax(0)


@encoder(parts=LAYERS)
def sequence_first_until_the_logits(self, h, mask):
    """The logits are turned back before they are pooled."""
    x = h.transpose(0, 1).contiguous()
    logits = self.decoder(self.norm(F.gelu(self.dense(x)))).transpose(0, 1)
    return (tokens(logits) * mask[..., None]).amax(1)


@encoder(inputs=(lambda: hidden(shape=(S, B, D)), mask))
def sequence_first_terms_before_tokens(self, h, mask):
    """The logits of [S, B, D] as [V, B, S]: tokens come last."""
    return (tokens(self.decoder(h)).permute(2, 1, 0) * mask).amax(-1).t()


@encoder("no_rewrite", "over the batch: axis 0 is a sequence where", at=".amax(1)")
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


@formula("maybe", "unusual products: tensordot")
def tensordot_product(h, mask, w):
    return pool(torch.tensordot(h, w, dims=([2], [1])), mask)


@formula("maybe", "unusual products: inner")
def inner_product(h, mask, w):
    return pool(torch.inner(h, w), mask)


@formula("maybe", "unusual products: baddbmm")
def batched_addition(h, mask, w, b):
    return pool(torch.baddbmm(b, h, w.t().expand(h.size(0), -1, -1)), mask)


@encoder("maybe", "a 1x1 convolution", parts={"decoder": lambda: nn.Conv1d(D, V, kernel_size=1)})
def pointwise_convolution(self, h, mask):
    logits = self.decoder(h.transpose(1, 2))
    return (tokens(logits) * mask.unsqueeze(1)).amax(-1)


@encoder(
    "maybe",
    "a learned scale on the logits: its sign is unknown and it needs a gradient",
    parts={"logit_scale": lambda: nn.Parameter(torch.tensor(0.3))},
)
def learned_logit_scale(self, h, mask):
    return pool(self.decoder(h) * self.logit_scale.exp(), mask)


@formula(
    "maybe",
    "a scale a vocabulary entry: a column operand that may be negative",
    inputs={"scale": bias},
)
def scale_per_term(h, mask, w, scale):
    return pool(F.linear(h, w) * scale, mask)


@encoder(
    "maybe",
    "two projections added: one matmul only after concatenation",
    parts={"down": lambda: nn.Linear(D, 2, bias=False), "up": lambda: nn.Linear(2, V, bias=False)},
)
def low_rank_adapter(self, h, mask):
    return pool(self.decoder(h) + 0.5 * self.up(self.down(h)), mask)


@encoder(
    "maybe",
    "some columns of the logits, gathered",
    inputs=(hidden, mask, lambda: torch.tensor([3, 30, 7, 8])),
)
def candidate_terms_gathered(self, h, mask, candidates):
    return pool(self.decoder(h).index_select(-1, candidates), mask)


@head(modes=INFER, dynamic=True)
def flattened_axis_by_axis(logits, mask):
    """rearrange leaves a flatten of one axis, and channels are dropped in training alone"""
    logits = F.dropout1d(logits, 0.1, False).flatten(0, 0)
    return (tokens(logits) * mask.unsqueeze(-1)).amax(1)
