"""Spellings of the activation, of its conditions, and of the maximum over the sequence."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from corpus.case import each
from corpus.splade_head.registry import INFER, TRAIN, S, V, activated, encoder, head, pooled, tokens


@head()
def numpy_keywords(logits, mask):
    """A NumPy port: axis=, keepdims=."""
    weights = torch.log1p(torch.clip(logits, 0, None)) * mask[:, :, None]
    return torch.squeeze(torch.amax(weights, axis=1, keepdims=True), axis=1)


@head(modes=INFER)
@head("maybe", "the gradient at 0 is another than the rectifier's", TRAIN)
def rectified_by_the_absolute_value(logits, mask):
    rectified = (logits + logits.abs()) / 2
    return (torch.log1p(rectified) * mask.unsqueeze(-1)).amax(1)


each(
    activated(),
    threshold_zero=lambda z: torch.log1p(F.threshold(z, 0.0, 0.0)),
    where_positive=lambda z: torch.where(z > 0, z, torch.zeros_like(z)).log1p(),
    masked_fill_negative=lambda z: z.masked_fill(z < 0, 0.0).log1p(),
    # a constant threshold that makes terms sparser
    shifted_bias_constant=lambda z: torch.log1p(torch.relu(z - 0.5)),
)


@encoder(parts={"dropout": lambda: nn.Dropout(0.0)})
def dropout_that_is_off(self, h, mask):
    """nn.Dropout(0.0) on the logits, left over from an experiment."""
    return (tokens(self.dropout(self.decoder(h))) * mask.unsqueeze(-1)).amax(1)


each(
    pooled(),
    movedim_first=lambda w: w.movedim(1, 0).amax(0),
    tokens_by_a_list=lambda w: w[:, [0, 3, 2]].amax(1),
    einsum_then_last_dim=lambda w: torch.einsum("bsv->bvs", w).amax(-1),
    permute_then_last_dim=lambda w: w.permute(0, 2, 1).contiguous().max(-1)[0],
    keepdim_then_index=lambda w: torch.max(w, dim=1, keepdim=True)[0][:, 0],
    # A leading head dimension that the pooling carries along, as in multi-head code.
    unsqueeze_before=lambda w: w.unsqueeze(1).max(dim=2).values.squeeze(1),
    sorted_first=lambda w: torch.sort(w, dim=1, descending=True).values[:, 0],
    # the maximum by a quantile
    last_of_a_sort=lambda w: torch.sort(w, dim=1).values[:, -1],
    # moved back to the original positions
    stack_of_unbound=lambda w: torch.stack(w.unbind(1), dim=1).amax(1),
    gathered_where_largest=lambda w: w.gather(1, w.argmax(dim=1, keepdim=True)).squeeze(1),
)


@head()
def einops_like(logits, mask):
    """What einops.reduce(x, 'b s v -> b v', 'max') does: reshape, then amax over a tuple."""
    weights = tokens(logits) * mask.reshape(mask.shape[0], mask.shape[1], 1)
    return weights.reshape(weights.shape).amax(dim=(1,))


@head()
def flatten_and_unflatten(logits, mask):
    flat = tokens(logits.flatten(0, 1)) * mask.flatten().unsqueeze(-1)
    return flat.unflatten(0, mask.shape).max(dim=1).values


@head()
def tokens_taken_by_a_vector(logits, mask):
    """Every other token, its mask with it."""
    weights = tokens(logits) * mask.unsqueeze(-1)
    return weights[:, torch.arange(0, logits.shape[1], 2)].amax(1)


@head()
def shape_readers(logits, mask):
    """The program reads the logits' shape, dtype and device, but not their values."""
    assert logits.dim() == 3
    batch, length, vocabulary = logits.shape
    keep = mask.view(batch, length, 1).to(device=logits.device, dtype=logits.dtype)
    pooled = (tokens(logits) * keep).max(dim=1).values
    return pooled.view(batch, vocabulary) / length


@encoder(dynamic=True)
def symbolic_sizes(self, h, mask):
    batch, length, _ = h.shape
    keep = mask.view(batch, length, 1)
    return (tokens(self.decoder(h)) * keep).max(dim=1).values


@encoder(dynamic=True)
def symbolic_sizes_flattened(self, h, mask):
    batch, length, width = h.size()
    logits = self.decoder(h.reshape(batch * length, width)).view(batch, length, -1)
    return torch.log1p(torch.relu(logits - (1 - mask[..., None]) * 1e6)).amax(1)


each(
    pooled("maybe", "other operations that take a maximum"),
    topk_one=lambda w: w.topk(1, dim=1).values.squeeze(1),
    adaptive_max_pool=lambda w: F.adaptive_max_pool1d(w.transpose(1, 2), 1).squeeze(-1),
    max_pool_of_full_width=lambda w: F.max_pool1d(w.mT, kernel_size=w.size(1)).squeeze(-1),
    negative_min=lambda w: -torch.min(-w, dim=1).values,
)
each(
    pooled(dynamic=True, prefix="any_size_"),
    max_pool_of_full_width=lambda w: F.max_pool1d(w.mT, kernel_size=w.size(1)).squeeze(-1),
)
each(
    pooled(),
    max_pool_of_an_image=lambda w: F.max_pool2d(w[:, None], (S, 1))[:, 0, 0],
    adaptive_max_pool_of_an_image=lambda w: F.adaptive_max_pool2d(w, (1, V)).squeeze(1),
)


def aminmax_without_gradient() -> str:
    """torch 2.11 has none."""
    x = torch.zeros(2, requires_grad=True)
    try:
        torch.autograd.grad(torch.aminmax(x).max, x)
    except RuntimeError as error:
        return str(error)
    return ""


@head("maybe", "aminmax computes both ends", INFER)
@head("maybe", "aminmax computes both ends", TRAIN, unsupported=aminmax_without_gradient)
def aminmax_upper(logits, mask):
    return torch.aminmax(tokens(logits) * mask.unsqueeze(-1), dim=1).max


@head()
@head(dynamic=True, prefix="any_size_")
def stack_of_tokens(logits, mask):
    weights = tokens(logits) * mask.unsqueeze(-1)
    return torch.stack([weights[:, i] for i in range(weights.size(1))]).max(0).values


@head(modes=INFER)
@head("no_rewrite", "unequal parts of the gradient", TRAIN, at="functools.reduce(torch.maximum")
def reduce_maximum(logits, mask):
    weights = tokens(logits) * mask.unsqueeze(-1)
    return functools.reduce(torch.maximum, weights.unbind(1))


@head(modes=INFER, dynamic=True)
def loop_from_zeros(logits, mask):
    """best starts as zeros, so that empty sequences have them; the mask is -inf before"""
    logits = logits.masked_fill(mask.unsqueeze(-1) == 0, -torch.inf)
    best = torch.zeros_like(logits[:, 0])
    for i in range(logits.size(1)):
        best = torch.maximum(best, logits[:, i])
    return best.log1p()


@head(modes=INFER)
def loop_from_the_first(logits, mask):
    weights = tokens(logits) * mask.unsqueeze(-1)
    best = weights[:, 0]
    for i in range(weights.size(1) - 1, 0, -1):
        best = torch.max(weights[:, i], best)
    return best


each(
    activated("maybe", "another monotone activation, or relu for finite numbers"),
    relu6_and_sqrt=lambda z: F.relu6(z).sqrt(),
    # no exact zeros, but no dead terms
    softplus_head=lambda z: torch.log1p(F.softplus(z)),
    multiplied_by_its_sign=lambda z: torch.log1p(z * (z > 0)),
)


@activated()
def softplus_by_logaddexp(logits):
    return torch.log1p(torch.logaddexp(torch.zeros(()), logits))


@encoder("maybe", "one logits tensor reduced in slices of the sequence")
def running_maximum_over_windows(self, h, mask):
    """The running maximum over windows of the logits, initialised with zeros."""
    weights = tokens(self.decoder(h)) * mask.unsqueeze(-1)
    best = torch.zeros_like(weights[:, 0])
    for window in weights.split(3, dim=1):
        best = torch.maximum(best, window.amax(dim=1))
    return best


@head()
def taken_along_where_largest(logits, mask):
    """the same with an index that gets its axis back"""
    weights = tokens(logits).masked_fill(mask.unsqueeze(-1) == 0, 0.0)
    return torch.take_along_dim(weights, weights.argmax(1)[:, None], dim=1)[:, 0]


@head()
def logarithm_of_the_positive(logits, mask):
    """where() instead of a relu: the logarithm of the others is thrown away"""
    kept = torch.where(logits > 0, torch.log1p(logits), torch.zeros_like(logits))
    return (kept * mask.unsqueeze(-1)).amax(1)


@head()
def confident_logits_alone(logits, mask):
    """a threshold on the logits, applied to their weights"""
    weights = torch.where(logits.ge(0.4), tokens(logits), 0.0)
    return (weights * mask.unsqueeze(-1)).max(dim=1).values


@head()
def gate_of_zeros_and_ones(logits, mask):
    """the weights times a float comparison of the halved logits"""
    logits = logits / 2
    return (tokens(logits) * (logits > 0.1).float() * mask[..., None]).amax(1)


@head()
def weights_assigned_by_their_logits(logits, mask):
    """index assignment, padding in the same condition"""
    weights = tokens(logits)
    weights[(logits < 0.3) | (mask == 0).unsqueeze(-1)] = 0
    return weights.amax(1)


@head()
def one_condition_for_all(logits, mask):
    """one condition: positive and not padding"""
    keep = torch.logical_and(logits > 0, mask.unsqueeze(-1) == 1)
    return torch.where(keep, torch.log1p(logits), 0.0).amax(1)


@head()
def one_factor_for_all(logits, mask):
    """the same as a factor"""
    keep = ((logits > 0.2) & mask.bool().unsqueeze(-1)).to(logits.dtype)
    return torch.max(torch.log1p(F.relu(logits)) * keep, dim=1)[0]


@head()
def two_gates(logits, mask):
    """two thresholds on the same logits: the higher one counts"""
    weights = torch.where(logits > 0.2, tokens(logits), 0.0)
    weights = weights.masked_fill(logits <= 0.5, 0.0)
    return (weights * mask.unsqueeze(-1)).amax(1)


@head(modes=INFER)
def square_root_of_the_positive(logits, mask):
    """the root of the others is NaN, and thrown away"""
    roots = torch.where(logits > 0, torch.sqrt(logits), 0.0)
    return (roots * mask.unsqueeze(-1)).amax(1)


@head("no_rewrite", "fills in 9", at="torch.where(")
def filled_with_more(logits, mask):
    """logits that are not confident get a weight of 9"""
    return (torch.where(logits > 0.4, tokens(logits), 9.0) * mask.unsqueeze(-1)).amax(1)


@head("no_rewrite", "keeps the small values", at="torch.where(")
def small_logits_alone(logits, mask):
    """the opposite of a threshold"""
    return (torch.where(logits < 0.4, tokens(logits), 0.0) * mask.unsqueeze(-1)).amax(1)


@head("no_rewrite", "(or_) differs by token and by output", at="torch.where(")
def either_condition(logits, mask):
    """`or` instead of `and`"""
    keep = (logits > 0.4) | mask.bool().unsqueeze(-1)
    return torch.where(keep, tokens(logits), 0.0).amax(1)


@head("no_rewrite", "what may be no number", INFER, at="(logits > 1)")
def undefined_times_zero(logits, mask):
    """a factor does not hide the logarithm of a negative number"""
    return (torch.log(logits) * (logits > 1) * mask.unsqueeze(-1)).amax(1)


@head("no_rewrite", "(gt) differs by token and by output", at="torch.where(")
def compared_after_a_write(logits, mask):
    """the condition sees the doubled logits, the weights do not"""
    weights = tokens(logits)
    logits.mul_(2)
    return (torch.where(logits > 0.4, weights, 0.0) * mask.unsqueeze(-1)).amax(1)


@head("maybe", "the mask is emptied once it is in the condition")
def mask_emptied_between(logits, mask):
    """the mask was overwritten after the condition read it"""
    real = mask.bool().unsqueeze(-1)
    keep = (logits > 0.2) & real
    real.zero_()
    return torch.where(keep, tokens(logits), 0.0).amax(1)
