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
    encoder,
    formula,
    head,
    hidden,
    mask,
    tokens,
    weight,
)


def pool(logits, mask):
    return (tokens(logits) * mask.unsqueeze(-1)).max(dim=1).values


each(
    formula(),
    functional_weights=lambda h, mask, w, b: pool(F.linear(h, weight=w, bias=b), mask),
    einsum_with_ellipsis=lambda h, mask, w: pool(torch.einsum("...d,vd->...v", h, w), mask),
)


@formula()
def vocabulary_first(h, mask, w, b):
    """W @ h^T: logits [B, V, S], the max over the last dimension."""
    logits = torch.matmul(w, h.transpose(1, 2)) + b[:, None]
    return (tokens(logits) * mask[:, None, :]).amax(-1)


@formula()
def vocabulary_first_flattened(h, mask, w, b):
    """einsum("vd,bsd->vbs"): the values are contiguous [V, B], which view requires."""
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


@formula()
def einsum_sequence_first(h, mask, w, b):
    """Logits [S, B, V] without a mask that says which axis is which."""
    return tokens(torch.einsum("bsd,vd->sbv", h, w) + b).amax(0)


@encoder(bias=False, parts={"bias": lambda: nn.Parameter(torch.linspace(-1.0, 1.0, V))})
def bias_added_in_place(self, h, mask):
    logits = self.decoder(h)
    logits += self.bias
    return pool(logits, mask)


@encoder(parts={"a": lambda: nn.Linear(D, 4, bias=False), "b": lambda: nn.Linear(4, V, bias=False)})
def adapter_of_the_decoder(self, h, mask):
    """peft's `lora.Linear`: W x + s B (A x)."""
    return pool(self.decoder(h) + self.b(self.a(h)) * 0.5, mask)


@encoder(parts={"others": lambda: nn.ModuleList(nn.Linear(D, V) for _ in range(2))})
def mean_of_decoders(self, h, mask):
    """sum() starts with a 0."""
    return pool(sum(linear(h) for linear in (self.decoder, *self.others)) / 3, mask)


@formula()
def sum_of_einsums_sequence_first(h, mask, w, b):
    """Logits [S, B, V] without a mask that says which axis is which."""
    logits = [torch.einsum("bsd,vd->sbv", x, w) for x in (h, h.tanh())]
    return tokens(logits[0] + logits[1] + b).amax(0)


@encoder(
    parts={
        "other": lambda: nn.Linear(D, V),
        "seen": lambda: nn.Parameter(torch.rand(V) < 0.8, False),
    }
)
def mean_of_two_decoders(self, h, mask):
    logits = 0.5 * (self.decoder(h) + self.other(torch.tanh(h)))
    return pool(logits.masked_fill(~self.seen, -100.0), mask)


@formula(inputs={"scale": lambda: weight(V, 1).detach().squeeze(1).requires_grad_()})
def scaled_weight(h, mask, w, scale):
    """F.linear(h, w * scale): the weight is computed, its parts get gradients."""
    return pool(F.linear(h, w * scale.unsqueeze(-1)), mask)


def eight_bits():
    return torch.arange(V * D).remainder(255).sub(127).view(V, D).to(torch.int8)


@formula(modes=INFER, inputs={"w8": eight_bits, "scale": lambda: torch.full((V,), 0.01)})
def dequantised_weight(h, mask, w8, scale):
    """An int8 weight with one scale a row, dequantised on the fly."""
    return pool(F.linear(h, w8.to(h.dtype) * scale[:, None]), mask)


@encoder(parts={"decoder": lambda: nn.Linear(D, 40, bias=False)})
def padded_vocabulary(self, h, mask):
    """A weight padded to a multiple of 8, the logits sliced back."""
    return pool(self.decoder(h)[:, :, :V], mask)


@encoder(dense=None)
def terms_of_a_list(self, h, mask):
    """A few entries of the vocabulary, by a Python list."""
    return pool(self.decoder(h)[..., [1, 5, 30, 5]], mask)


@encoder()
def halves_put_together_again(self, h, mask):
    """Inductor moves the activation in front of the concatenation."""
    logits = self.decoder(h)
    return pool(torch.cat((logits[..., :10], logits[..., 10:]), -1), mask)


@encoder()
def tokens_in_two_parts(self, h, mask):
    weights = tokens(self.decoder(h)) * mask.unsqueeze(-1)
    return torch.cat((weights[:, 1:4], weights[:, 4:]), 1).amax(1)


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


@formula()
def sequence_first_inside(h, mask, w, b):
    """The model turns its input around, and pools over the first axis."""
    logits = F.linear(h.transpose(0, 1).contiguous(), w, b)
    return (tokens(logits) * mask.t()[..., None]).amax(0)


@encoder(inputs=(lambda: hidden(shape=(S, B, D)), lambda: mask() == 0))
def sequence_first(self, h, padding):
    """nn.Transformer's layout: the hidden states [S, B, D], the mask of padding [B, S]."""
    return tokens(self.decoder(h)).masked_fill(padding.t().unsqueeze(-1), 0.0).max(0).values


@encoder("no_rewrite", "over the batch: axis 0 is a sequence where", at=".amax(1)")
def terms_first_over_the_batch(self, h, mask):
    """Which terms a batch has at each position."""
    return (tokens(self.decoder(h)) * mask[..., None]).permute(2, 0, 1).amax(1)


@encoder(
    "maybe",
    "a learned scale on the logits: its sign is unknown and it needs a gradient",
    parts={"logit_scale": lambda: nn.Parameter(torch.tensor(0.3))},
)
def learned_logit_scale(self, h, mask):
    return pool(self.decoder(h) * self.logit_scale.exp(), mask)


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


fields = hidden, lambda: hidden().detach().flip(0).requires_grad_()


@encoder(inputs=fields)
@encoder(inputs=fields, dynamic=True, prefix="dynamic_")
def fields_stacked(self, title, body):
    """The result is the largest weight of a term in any field of a document."""
    logits = torch.stack([self.decoder(title), self.decoder(body)])
    return tokens(logits).amax((0, 2))


each(
    encoder(),
    # Logits of a few tokens at a time.
    in_chunks=lambda self, h, mask: pool(
        torch.cat([self.decoder(part) for part in h.split(3, dim=1)], dim=1), mask
    ),
    hstack_of_chunks=lambda self, h, mask: pool(
        torch.hstack([self.decoder(part) for part in h.tensor_split(2, dim=1)]), mask
    ),
    token_by_token=lambda self, h, mask: pool(
        torch.stack([tokens(self.decoder(h[:, i])) for i in range(S)], dim=1), mask
    ),
    axes_kept=lambda self, h, mask: tokens(self.decoder(h[:, :, None])).amax((1, 2), keepdim=True),
    axes_apart=lambda self, h, mask: tokens(self.decoder(h[:, None])).mT.amax((1, 3), keepdim=True),
)


@encoder(dynamic=True, modes=INFER, dense=None)
def beside_a_product_over_computed_axes(self, h, mask):
    """einsum with axes by numbers that the graph computes"""
    at = h.size(0) - h.size(0) + 2
    alike = torch.einsum(h, [0, 1, at], h, [0, 3, at], [0, 1, 3])
    return pool(self.decoder(h), mask), alike
