"""Activations chosen by what they were computed from, as in where(x > 0, log1p(x), 0); maybe with the mask in it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from corpus.splade_head.registry import INFER, head, tokens


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
    """positive and no padding, once"""
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
    """what is not confident weighs 9"""
    return (torch.where(logits > 0.4, tokens(logits), 9.0) * mask.unsqueeze(-1)).amax(1)


@head("no_rewrite", "keeps the small values", at="torch.where(")
def small_logits_alone(logits, mask):
    """the contrary of a threshold"""
    return (torch.where(logits < 0.4, tokens(logits), 0.0) * mask.unsqueeze(-1)).amax(1)


@head("no_rewrite", "(or_) differs by token and by output", at="torch.where(")
def either_condition(logits, mask):
    """or where and is meant"""
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
    """what the condition has read is not there any more"""
    real = mask.bool().unsqueeze(-1)
    keep = (logits > 0.2) & real
    real.zero_()
    return torch.where(keep, tokens(logits), 0.0).amax(1)
