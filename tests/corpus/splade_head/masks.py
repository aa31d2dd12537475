"""Masks: every way to exclude tokens."""

from __future__ import annotations

import torch
from torch import nn

from corpus.case import each, of
from corpus.splade_head.registry import (
    INFER,
    B,
    S,
    V,
    encoder,
    head,
    hidden,
    mask,
    masked,
    tokens,
)

INF = float("inf")


@head()
def logical_not_finfo_min(logits, mask):
    """Transformers habit: the lowest finite number of the dtype before everything else."""
    lowest = torch.finfo(logits.dtype).min
    logits = logits.masked_fill(mask.logical_not()[..., None], lowest)
    return torch.log1p(torch.relu(logits.amax(dim=1)))


each(
    masked(),
    eq_zero_fill_zero=lambda w, mask: w.masked_fill(mask.eq(0).unsqueeze(-1), 0),
    # for memory
    fill_in_place_after_log=lambda w, mask: w.masked_fill_((mask != 1)[:, :, None], 0.0),
    where_with_scalar=lambda w, mask: torch.where(mask.unsqueeze(2) > 0, w, 0.0),
    where_swapped=lambda w, mask: torch.where(mask.unsqueeze(-1) == 0, torch.zeros_like(w), w),
    repeat_over_vocabulary=lambda w, mask: w * mask.unsqueeze(-1).repeat(1, 1, w.shape[-1]),
    repeat_interleaved=lambda w, mask: (
        w * mask.unsqueeze(-1).repeat_interleave(w.shape[-1], dim=-1)
    ),
    # sentence-transformers' mean pooling idiom
    expand_as_logits=lambda w, mask: w * mask.unsqueeze(-1).expand(w.size()).float(),
)


@head()
def extended_attention_mask(logits, mask):
    """BERT's extended mask: (1.0 - mask) * finfo.min, added."""
    extended = (1.0 - mask[:, :, None].to(torch.float32)) * torch.finfo(torch.float32).min
    return torch.amax(tokens(logits + extended), dim=1)


@head()
def subtract_penalty(logits, mask):
    best = (logits - (1 - mask).unsqueeze(-1) * 1e4).max(dim=1).values
    return best.relu().log1p()


@encoder(
    inputs=(hidden, lambda: torch.zeros(B, 1, 1, S).masked_fill(mask()[:, None, None] == 0, -INF))
)
def penalty_precomputed(self, h, penalty):
    """The collator hands over 0 / -inf as attention takes it, [B, 1, 1, S], and the model adds it."""
    logits = self.decoder(h) + penalty.squeeze(1).transpose(1, 2)
    return torch.log1p(torch.relu(logits.amax(1)))


@head()
def where_with_tensor(logits, mask):
    """torch.where with a 0-dim tensor made on the spot."""
    kept = torch.where(mask.unsqueeze(-1) == 1, logits, torch.tensor(-INF))
    return tokens(kept.max(dim=1).values)


@head()
def boolean_assignment(logits, mask):
    weights = tokens(logits)
    weights[mask == 0] = 0
    return weights.max(dim=1).values


@head()
def boolean_assignment_of_every_element(logits, mask):
    """The mask is expanded over the vocabulary as numbers and compared, then assigned: max pooling of dense vectors."""
    weights = tokens(logits)
    spread = mask.unsqueeze(-1).expand(weights.size()).float()
    weights[spread == 0] = -1e9
    return torch.max(weights, 1)[0]


@head(lengths=(7, 4, 0))
def empty_sequence_clamped(logits, mask):
    """-inf first, clamped at 0 after the max."""
    best = logits.masked_fill(~mask.bool().unsqueeze(-1), -INF).max(dim=1).values
    return best.clamp(min=0.0).log1p()


@head()
def mask_twice(logits, mask):
    """A defensive author masks before the activation and again after it."""
    keep = mask.unsqueeze(-1).to(logits.dtype)
    return (tokens(logits * keep) * keep).max(dim=1).values


@head()
def transposed_before_mask(logits, mask):
    """Channels first: [B, V, S] times [B, 1, S]."""
    return (tokens(logits.transpose(1, 2)) * mask.unsqueeze(1)).amax(dim=-1)


@head()
def cls_dropped_by_slicing(logits, mask):
    """logits[:, 1:]: [CLS] is excluded."""
    return (tokens(logits[:, 1:]) * mask[:, 1:].unsqueeze(-1)).max(dim=1).values


@encoder(parts={"forbid": lambda: nn.Buffer(torch.zeros(V).index_fill(0, torch.arange(4), -INF))})
def vocabulary_bias_forbids(self, h, mask):
    """-inf for unused vocabulary entries, added to the logits like one more bias."""
    logits = self.decoder(h) + self.forbid
    return (tokens(logits) * mask.unsqueeze(-1)).amax(1)


@encoder(parts={"idf": lambda: nn.Parameter(torch.linspace(-1.0, 1.0, V))})
def weights_of_terms_inside_the_logarithm(self, h, mask):
    """A weight per term multiplies the activation, not its logarithm."""
    weights = torch.relu(self.decoder(h)) * mask.unsqueeze(-1) * self.idf.exp()
    return torch.log1p(weights).amax(1)


@head("maybe", "positions filled by index: a [S] row mask that has to be built")
def index_fill_positions(logits, mask):
    """[CLS] and the last position zeroed by index_fill_."""
    weights = tokens(logits)
    weights.index_fill_(1, torch.tensor([0, S - 1]), 0.0)
    return weights.amax(1)


@head("maybe", "slice assignment to some positions")
def slice_assignment(logits, mask):
    weights = tokens(logits) * mask.unsqueeze(-1)
    weights[:, 0] = 0
    return weights.amax(1)


@head("maybe", "a mask of vocabulary entries before the max")
def vocabulary_filled(logits, mask):
    """masked_fill over vocabulary entries, the same for all tokens."""
    unused = torch.arange(V) < 4
    return (tokens(logits.masked_fill(unused, -1e4)) * mask.unsqueeze(-1)).amax(1)


@encoder(
    "maybe",
    "the fill value is a buffer, unknown when compiling",
    parts={"neg_inf": lambda: nn.Buffer(torch.tensor(-1e4))},
)
def fill_value_in_a_buffer(self, h, mask):
    kept = torch.where(mask.unsqueeze(-1).bool(), self.decoder(h), self.neg_inf)
    return tokens(kept).amax(1)


@head()
@head(dynamic=True, prefix="any_size_")
def mask_by_einsum(logits, mask):
    return torch.einsum("bsv,bs->bsv", tokens(logits), mask.to(logits.dtype)).amax(1)


@head(mask_dtype=torch.float32)
def mask_by_einsum_that_turns(logits, mask):
    """The mask is applied first, to the logits, and the einsum moves the sequence to the last axis."""
    return tokens(torch.einsum("b s, b s v -> b v s", mask, logits).max(-1).values)


each(
    masked(mask_dtype=torch.float32),
    # its last axis has a separate letter
    mask_by_einsum_with_an_axis_of_one=lambda w, m: torch.einsum("bsv,bsk->bsv", w, m[..., None]),
    mask_by_einsum_with_ellipsis=lambda w, m: torch.einsum("...v,...->...v", w, m),
)


def _of_lengths(keep):
    """Return a head with a mask `keep(positions [S], lengths [B])` that is expanded to all terms."""

    def pool(self, h, n):
        logits = self.decoder(h)
        kept = keep(torch.arange(logits.size(1)), n).expand(logits.size(0), -1, logits.size(2))
        return (tokens(logits) * kept).amax(1)

    return pool


each(
    of(encoder(inputs=(hidden, lambda: torch.tensor([7, 4, 2]))), _of_lengths),
    lengths_new_axes=lambda at, n: at[None, :, None] < n[:, None, None],
    lengths_repeated=lambda at, n: ~(at.repeat(len(n), 1) >= n.view(-1, 1)).unsqueeze(2),
    lengths_of_a_mesh=lambda at, n: torch.gt(*torch.meshgrid(n, at, indexing="ij"))[..., None],
    lengths_expanded_first=lambda at, n: at[:, None].expand(-1, V)[None] < n[:, None, None],
)


@encoder(
    "maybe",
    "a vocabulary mask a sequence, 0 or 1, multiplied before the max",
    inputs=(hidden, mask, lambda: torch.arange(B * V).view(B, V) % 3 > 0),
)
def restricted_to_batch_vocabulary(self, h, mask, allowed):
    """Only terms that occur in each document are scored: a mask [B, 1, V]."""
    weights = tokens(self.decoder(h)) * mask.unsqueeze(-1)
    return (weights * allowed[:, None, :]).amax(1)


def _states_with(value):
    """Return hidden states with `value` at a padded position, as in an uninitialised buffer."""
    h = hidden().detach()
    h[1, 5, 3] = value
    return h.requires_grad_()


@encoder(modes=INFER, inputs=(lambda: _states_with(float("nan")), mask))
def nan_under_masked_fill(self, h, mask):
    """NaN in the padding, filled before it can spread."""
    logits = self.decoder(h).masked_fill(mask.unsqueeze(-1) == 0, -1e4)
    return tokens(logits).max(dim=1).values


@encoder(modes=INFER, inputs=(lambda: _states_with(float("nan")), mask), prefix="nan_")
@encoder(modes=INFER, inputs=(lambda: _states_with(INF), mask), prefix="infinity_")
def under_multiplication(self, h, mask):
    """NaN in the padding times a mask of 0 is NaN; so is inf * 0 where the logit was positive."""
    return (tokens(self.decoder(h)) * mask.unsqueeze(-1)).amax(dim=1)


@encoder(modes=INFER, inputs=(lambda: _states_with(INF), mask))
def infinity_under_a_mask_first(self, h, mask):
    """inf * 0 is NaN before the activation, whatever the sign was."""
    return tokens(self.decoder(h) * mask.unsqueeze(-1)).max(dim=1).values


@encoder(modes=INFER, inputs=(lambda: _states_with(float("nan")),))
def nan_without_a_mask(self, h):
    """A token has a NaN: clamp, relu and max propagate it."""
    return torch.log1p(self.decoder(h).clamp(min=0)).max(dim=1).values


@encoder(modes=INFER, inputs=(lambda: _states_with(float("nan")), mask))
def nan_under_where_mask(self, h, mask):
    """torch.where(keep, x, 0) after the activation drops the NaN of the padding."""
    return torch.where(mask.unsqueeze(-1) > 0, tokens(self.decoder(h)), 0.0).amax(1)


@head()
def broadcast_mask_through_a_flatten(logits, mask):
    """One mask for the batch, applied before [B, S] is flattened and split again."""
    weights = (tokens(logits) * mask[:1].unsqueeze(-1)).flatten(0, 1)
    return weights.unflatten(0, mask.shape).amax(dim=1)


@head()
def broadcast_mask_in_front_of_other_sequences(logits, mask):
    """One mask for the batch, applied before its tokens are regrouped into other sequences."""
    weights = (tokens(logits) * mask[:1].unsqueeze(-1)).flatten(0, 1)
    return weights.unflatten(0, (mask.shape[1], -1)).amax(dim=1)


@head()
def mask_through_a_flatten(logits, mask):
    """A mask of every token, applied before [B, S] is flattened and split again."""
    weights = (tokens(logits) * mask.unsqueeze(-1)).flatten(0, 1)
    return weights.unflatten(0, mask.shape).amax(dim=1)
