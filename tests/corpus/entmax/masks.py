"""Padding masks, causal masks, biases."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from corpus.entmax.registry import (
    INFER,
    SCALE,
    TRAIN,
    B,
    D,
    H,
    L,
    attention,
    normal,
    program,
    qkv,
)

entmax = pytest.importorskip("entmax")


@attention()
def fill_minus_infinity(q, k, v, mask):
    scores = q @ k.mT * SCALE
    scores = scores.masked_fill(mask[:, None, None] == 0, float("-inf"))
    return entmax.entmax15(scores, dim=-1) @ v


@attention()
def fill_minus_1e9_in_place(q, k, v, mask):
    """masked_fill_ as the annotated transformer's descendants do"""
    scores = q @ k.mT * SCALE
    scores.masked_fill_(~mask.unsqueeze(1).unsqueeze(2), -1e9)
    return entmax.entmax15(scores, dim=-1) @ v


@attention()
def fill_finfo_min(q, k, v, mask):
    """lucidrains: masked_fill_(~mask, -torch.finfo(sim.dtype).max)"""
    sim = torch.einsum("bhid,bhjd->bhij", q, k) * SCALE
    sim = sim.masked_fill(~mask[:, None, None, :], -torch.finfo(sim.dtype).max)
    return torch.einsum("bhij,bhjd->bhid", entmax.entmax15(sim, dim=-1), v)


@attention()
def where_mask(q, k, v, mask):
    scores = q @ k.mT * SCALE
    low = torch.finfo(scores.dtype).min
    return entmax.sparsemax(torch.where(mask[:, None, None, :], scores, low), dim=-1) @ v


@attention()
def where_tensor_fill(q, k, v, mask):
    """GPT-2: the value filled in is a tensor"""
    scores = q @ k.mT * SCALE
    low = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
    return entmax.entmax15(torch.where(mask[:, None, None, :], scores, low), dim=-1) @ v


@attention()
def extended_mask(q, k, v, mask):
    """Hugging Face: (1 - mask[:, None, None, :]) * min, added"""
    extended = (1.0 - mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    scores = q @ k.mT / math.sqrt(D) + extended
    return entmax.entmax15(scores, dim=-1) @ v


@attention()
def extended_mask_1e4(q, k, v, mask):
    """old BERT: * -10000.0, added in place"""
    scores = q @ k.mT / math.sqrt(D)
    scores += (1.0 - mask[:, None, None, :].float()) * -10000.0
    return entmax.entmax15(scores, dim=-1) @ v


@attention(modes=INFER, inputs=lambda: (*qkv(), combined_biases()))
def floored_scores(q, k, v, bias):
    """OPT: causal and padding biases added up, -inf where both drop, back to finfo.min afterwards"""
    scores = (q @ k.mT * SCALE + bias).view(B * H, L, L)
    scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))
    return torch.bmm(entmax.entmax15(scores, dim=-1), v.flatten(0, 1))


@attention()
def floored_mask(q, k, v, mask):
    """the same of a mask that is made in the graph, by clamp"""
    scores = q @ k.mT * SCALE + torch.where(mask, 0.0, -torch.inf)[:, None, None]
    return entmax.entmax15(scores.clamp(min=torch.finfo(scores.dtype).min), dim=-1) @ v


@attention()
def floor_at_the_added_number(q, k, v, mask):
    """clamp passes a tie's gradient on, as the sum does in a sequence that is all padding"""
    mask = mask & torch.tensor([True, False])[:, None]
    low = torch.finfo(q.dtype).min
    scores = q @ k.mT * SCALE + (1.0 - mask[:, None, None].to(q.dtype)) * low
    return entmax.entmax15(scores.clamp(min=low), dim=-1) @ v


@attention()
def floored_mask_then_triangle(q, k, v, mask):
    """finfo.min by a floor and by a fill; neither passes a gradient on"""
    low, left = torch.finfo(q.dtype).min, mask.flip(1)[:, None, None]
    scores = (q @ k.mT * SCALE + torch.where(left, 0.0, -torch.inf)).clamp(min=low)
    return entmax.entmax15(torch.where(~FUTURE, scores, low), dim=-1) @ v


@attention()
def boolean_assignment(q, k, v, mask):
    scores = q @ k.mT * SCALE
    scores[~mask[:, None, None, :].expand_as(scores)] = float("-inf")
    return entmax.entmax15(scores, dim=-1) @ v


@attention()
def fairseq_padding(q, k, v, mask):
    """view to [B, H, L, L], fill, view back, bmm"""
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)) * SCALE
    weights = weights.view(B, H, L, L)
    weights = weights.masked_fill(~mask.unsqueeze(1).unsqueeze(2), float("-inf"))
    weights = weights.view(B * H, L, L)
    return torch.bmm(entmax.entmax15(weights, dim=-1), v)


@attention()
def repeated_padding(q, k, v, mask):
    """[B, L] repeated to [B*H, 1, L] by hand"""
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) * SCALE
    dropped = (~mask).repeat_interleave(H, dim=0).unsqueeze(1)
    return torch.bmm(entmax.entmax15(scores.masked_fill(dropped, -1e9), dim=-1), v)


@attention()
def tril_ones(q, k, v, mask):
    """minGPT: masked_fill(tril == 0, -inf)"""
    scores = q @ k.mT * SCALE
    lower = torch.tril(torch.ones(L, L)).view(1, 1, L, L)
    return entmax.entmax15(scores.masked_fill(lower == 0, float("-inf")), dim=-1) @ v


@attention()
def triu_bool(q, k, v, mask):
    """lucidrains: torch.ones(i, j, dtype=bool).triu(j - i + 1)"""
    sim = torch.einsum("bhid,bhjd->bhij", q, k) * SCALE
    i, j = sim.shape[-2:]
    causal = torch.ones((i, j), dtype=torch.bool).triu(j - i + 1)
    sim = sim.masked_fill(causal, -torch.finfo(sim.dtype).max)
    return entmax.entmax15(sim, dim=-1) @ v


@attention()
def triu_minus_infinity_added(q, k, v, mask):
    """nn.Transformer.generate_square_subsequent_mask"""
    causal = torch.triu(torch.full((L, L), float("-inf")), diagonal=1)
    return entmax.sparsemax(q @ k.mT * SCALE + causal, dim=-1) @ v


@attention()
def positions_compared(q, k, v, mask):
    at = torch.arange(q.size(2))
    scores = (q @ k.mT * SCALE).masked_fill(~(at[None, :] <= at[:, None]), float("-inf"))
    return entmax.entmax15(scores, dim=-1) @ v


@attention()
def causal_and_padding(q, k, v, mask):
    """one boolean mask of both"""
    lower = torch.ones(L, L, dtype=torch.bool).tril()
    both = lower[None, None] & mask[:, None, None, :]
    scores = torch.where(both, q @ k.mT * SCALE, torch.tensor(float("-inf")))
    return entmax.entmax15(scores, dim=-1) @ v


class Buffered(nn.Module):
    """nanoGPT: the triangle is a buffer, cut to the length."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, q, k, v):
        n = q.size(-2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :n, :n] == 0, float("-inf"))
        return entmax.entmax15(att, dim=-1) @ v


@program()
def causal_buffer():
    """nanoGPT"""
    return Buffered(), qkv()


@attention(modes=TRAIN, inputs=lambda: (*qkv(), normal((1, H, L, L), 9)))
def learned_bias(q, k, v, bias):
    """T5 and Swin: a bias a head and pair of positions, with its gradient"""
    return entmax.entmax15(q @ k.mT * SCALE + bias, dim=-1) @ v


@attention(inputs=lambda: (*qkv(), normal((H,), 9)))
def alibi(q, k, v, slopes):
    """ALiBi: slopes times distance, plus the triangle"""
    at = torch.arange(L)
    distance = (at[None, :] - at[:, None]).to(q.dtype)
    scores = q @ k.mT * SCALE + slopes[:, None, None] * distance
    scores = scores.masked_fill(torch.ones(L, L).triu(1).bool(), float("-inf"))
    return entmax.entmax15(scores, dim=-1) @ v


@attention(modes=TRAIN, inputs=lambda: (*qkv(), normal((15, H), 9)))
def relative_position_table(q, k, v, table):
    """Swin: gathered from a table of relative positions"""
    at = torch.arange(L)
    index = at[:, None] - at[None, :] + L
    bias = table[index.view(-1)].view(L, L, H).permute(2, 0, 1).unsqueeze(0)
    return entmax.entmax15(q * SCALE @ k.mT + bias, dim=-1) @ v


@attention()
def gpt2_then_padding(q, k, v, mask):
    """the triangle filled with min, then an additive padding mask"""
    low = torch.finfo(q.dtype).min
    scores = torch.where(torch.ones(L, L).tril().bool(), q @ k.mT * SCALE, low)
    scores = scores + (1.0 - mask[:, None, None].to(q.dtype)) * low
    return entmax.entmax15(scores, dim=-1) @ v


@attention(modes=INFER)
def row_without_keys(q, k, v, mask):
    """a sequence that is all padding: uniform under a finite fill"""
    mask = mask & torch.tensor([True, False])[:, None]
    scores = (q @ k.mT * SCALE).masked_fill(~mask[:, None, None], -1e9)
    return entmax.entmax15(scores, dim=-1) @ v


@attention()
def row_without_keys_added(q, k, v, mask):
    """the same with a mask that is added: there the gradient passes on to the scores"""
    mask = mask & torch.tensor([True, False])[:, None]
    scores = q @ k.mT * SCALE
    scores = scores + (1.0 - mask[:, None, None].to(q.dtype)) * torch.finfo(q.dtype).min
    return entmax.entmax15(scores, dim=-1) @ v


@attention()
def causal_rows_without_keys_added(q, k, v, mask):
    """more queries than keys, so that the first queries have none"""
    k, v = k[:, :, : L - 2], v[:, :, : L - 2]
    future = torch.full((L, L - 2), torch.finfo(torch.float32).min).triu(-1)
    return entmax.sparsemax(q @ k.mT * SCALE + future, dim=-1) @ v


FUTURE = torch.ones(L, L).triu(1).bool()


@attention()
def causal_and_left_padding_added(q, k, v, mask):
    """Hugging Face's decoders: one additive mask of both, to sequences that begin with padding"""
    keep = ~FUTURE & mask.flip(1)[:, None, None]
    extended = torch.where(keep, 0.0, torch.finfo(q.dtype).min)
    return entmax.entmax15(q @ k.mT * SCALE + extended, dim=-1) @ v


@attention()
def left_padding_added_then_triangle_of_infinity(q, k, v, mask):
    """two sums: what the second drops is no longer at the number of the first"""
    padding = (1.0 - mask.flip(1)[:, None, None].to(q.dtype)) * torch.finfo(q.dtype).min
    scores = q @ k.mT * SCALE + padding
    scores = scores + torch.full((L, L), -torch.inf).triu(1)
    return entmax.entmax15(scores, dim=-1) @ v


@attention()
def padding_then_causal_then_distances(q, k, v, mask):
    """three terms: finfo.min filled in, an added -inf triangle, ALiBi"""
    scores = (q @ k.mT * SCALE).masked_fill(~mask[:, None, None], torch.finfo(q.dtype).min)
    scores = scores + torch.full((L, L), -torch.inf).triu(1)
    return entmax.entmax15(scores + distances(q), dim=-1) @ v


@attention()
def padding_filled_then_distances(q, k, v, mask):
    """a row that the fill empties passes no gradient on, though a bias is added to it"""
    mask = mask & torch.tensor([True, False])[:, None]
    scores = (q @ k.mT * SCALE).masked_fill(~mask[:, None, None], torch.finfo(q.dtype).min)
    return entmax.entmax15(scores + distances(q), dim=-1) @ v


@attention()
def left_padding_after_the_triangle(q, k, v, mask):
    """GPT-2 on sequences that begin with padding: rows whose keys are filled here, added to there"""
    low = torch.finfo(q.dtype).min
    scores = torch.where(~FUTURE, q @ k.mT * SCALE, low)
    scores = scores + (1.0 - mask.flip(1)[:, None, None].to(q.dtype)) * low
    return entmax.sparsemax(scores, dim=-1) @ v


@attention(inputs=lambda: (*qkv(), combined_biases()))
def given_mask_after_the_triangle(q, k, v, bias):
    """the same with a mask that the caller made"""
    scores = torch.where(~FUTURE, q @ k.mT * SCALE, torch.finfo(q.dtype).min)
    return entmax.sparsemax(scores + bias.flip(3), dim=-1) @ v


@attention("maybe", "the mask that was added is another one by then", modes=INFER)
def mask_written_before_it_is_added(q, k, v, mask):
    """the additive mask of one layer, its boolean reused"""
    keep = mask[:, None, None].clone()
    bias = torch.where(keep, 0.0, -torch.inf)
    keep.fill_(True)
    return entmax.entmax15(q @ k.mT * SCALE + bias, dim=-1) @ v


def distances(q):
    at = torch.arange(L)
    return -(at[:, None] - at).abs().to(q.dtype) * 0.3


@attention()
def padding_then_causal_of_another_fill(q, k, v, mask):
    """-1e9 for padding, -inf for the future; the second sequence begins with padding"""
    left = torch.stack([mask[0], mask[1].flip(0)])
    scores = (q @ k.mT * SCALE).masked_fill(~left[:, None, None], -1e9)
    scores = scores.masked_fill(torch.ones(L, L).triu(1).bool(), float("-inf"))
    return entmax.entmax15(scores, dim=-1) @ v


@attention()
def padding_then_causal_added(q, k, v, mask):
    """the same, the triangle added"""
    left = torch.stack([mask[0], mask[1].flip(0)])
    scores = (q @ k.mT * SCALE).masked_fill(~left[:, None, None], -1e9)
    scores = scores + torch.full((L, L), float("-inf"), dtype=q.dtype).triu(1)
    return entmax.entmax15(scores, dim=-1) @ v


@attention()
def causal_then_padding_of_another_fill(q, k, v, mask):
    """-inf for the future first, then -1e9 for padding"""
    scores = (q @ k.mT * SCALE).masked_fill(torch.ones(L, L).triu(1).bool(), float("-inf"))
    scores = scores.masked_fill(~mask[:, None, None], -1e9)
    return entmax.entmax15(scores, dim=-1) @ v


def combined_biases() -> torch.Tensor:
    """[B, 1, L, L]: finfo.min where the padding or the causal mask drops, twice that where both do; the first key of
    the second row is padding, so that its first query has none."""
    low = torch.finfo(torch.float32).min
    padding = torch.zeros(B, 1, 1, L)
    padding[0, ..., -2:] = padding[1, ..., 0] = low
    return padding + torch.full((L, L), low).triu(1)


def some_rows_without_keys() -> torch.Tensor:
    """[B, L, L] boolean, True at keys that are dropped; the first query of one sequence keeps none."""
    dropped = ~torch.tril(torch.ones(B, L, L, dtype=torch.bool))
    dropped[0, 0] = True
    return dropped


@attention()
def assigned_by_a_mask_of_the_last_axes(q, k, v, mask):
    scores = q @ k.mT * SCALE
    scores[:, :, torch.ones(L, L, dtype=torch.bool).triu(1)] = float("-inf")
    return entmax.entmax15(scores, dim=-1) @ v


@attention()
def assigned_behind_an_ellipsis(q, k, v, mask):
    """scores[..., later] = -1e9, over heads that are one axis with the batch"""
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * SCALE
    scores[..., torch.ones(L, L, dtype=torch.bool).triu(1)] = -1e9
    return torch.bmm(entmax.sparsemax(scores, dim=-1), v.flatten(0, 1)).view_as(v)


@attention(modes=INFER)
def two_masks_in_front_of_a_bias(q, k, v, mask):
    """the triangle, then left padding, then ALiBi: in a row without keys all that are filled are alike"""
    low = torch.finfo(q.dtype).min
    place = torch.arange(L)
    scores = (q @ k.mT * SCALE).masked_fill(place[None] > place[:, None], low)
    scores = scores.masked_fill(~mask.flip(1)[:, None, None], low)
    return entmax.entmax15(scores - 0.1 * (place[:, None] - place[None]).abs(), dim=-1) @ v


@attention(inputs=lambda: (*qkv(), some_rows_without_keys()))
def dropped_before_and_after(q, k, v, dropped):
    """ESPnet and its descendants: masked_fill(mask, min) before, masked_fill(mask, 0) after"""
    dropped = dropped.unsqueeze(1)
    scores = (q @ k.mT * SCALE).masked_fill(dropped, torch.finfo(q.dtype).min)
    p = entmax.sparsemax(scores, dim=-1).masked_fill(dropped, 0.0)
    return torch.matmul(p, v)


@attention(inputs=lambda: (*qkv(), some_rows_without_keys()))
def multiplied_by_the_mask_again(q, k, v, dropped):
    """the mask as a number, over rows that may keep nothing"""
    kept = (~dropped)[:, None]
    scores = torch.where(kept, q @ k.mT * SCALE, -1e9)
    return (entmax.entmax15(scores, dim=-1) * kept.to(q.dtype)) @ v


@attention()
def heads_weighted(q, k, v, mask):
    """head_mask of Hugging Face's models: probabilities * head_mask"""
    head_mask = torch.linspace(0.0, 1.0, H).view(1, H, 1, 1)
    scores = (q @ k.mT * SCALE).masked_fill(~mask[:, None, None], torch.finfo(q.dtype).min)
    return (entmax.entmax15(scores, dim=-1) * head_mask) @ v


@attention()
def queries_masked_behind_the_keys(q, k, v, mask):
    """Kyubyong Park's transformer: rows of padding are zeros, keys of padding get -2^32 + 1"""
    low = torch.full((), -(2.0**32) + 1)
    scores = torch.where(mask[:, None, None], q @ k.mT * SCALE, low)
    p = entmax.sparsemax(scores, dim=-1) * mask[:, None, :, None].to(q.dtype)
    return torch.einsum("bhij,bhjd->bihd", p, v)


@attention()
def a_gate_of_every_query(q, k, v, mask):
    """halved, and times a gate that is learnt"""
    p = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    return (p * torch.sigmoid(q.mean(-1, keepdim=True)) / 2) @ v


@attention(inputs=lambda: (*qkv(), normal((H, L, L), 7)))
def learned_biases_and_the_triangle_twice(q, k, v, bias):
    """what is learnt is no mask"""
    later = torch.ones(L, L, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * SCALE + bias).masked_fill(later, -1e30)
    return entmax.sparsemax(scores, dim=-1).masked_fill(later, 0.0) @ v


def _all_pairs():
    return torch.ones(L, L, dtype=torch.bool)


@attention()
def mask_assigned_to(q, k, v, mask):
    """a part of the boolean mask is assigned to before it is read"""
    keep = _all_pairs()
    keep[2:, 1] = False
    return entmax.entmax15((q @ k.mT * SCALE).masked_fill(~keep, float("-inf")), dim=-1) @ v


@attention()
def dropped_pairs_assigned_to(q, k, v, mask):
    """the same, read as it is"""
    drop = ~_all_pairs()
    drop[2:, 1] = True
    return entmax.entmax15((q @ k.mT * SCALE).masked_fill(drop, float("-inf")), dim=-1) @ v


@attention()
def bias_of_a_mask_assigned_to(q, k, v, mask):
    """where() makes the bias of it"""
    keep = _all_pairs()
    keep[2:, 1] = False
    bias = torch.where(keep, 0.0, float("-inf"))
    return entmax.entmax15(q @ k.mT * SCALE + bias, dim=-1) @ v


@attention()
def cast_of_a_mask_assigned_to(q, k, v, mask):
    """(1 - keep.float()) * finfo.min"""
    keep = _all_pairs()
    keep[2:, 1] = False
    bias = (1 - keep.float()) * torch.finfo(q.dtype).min
    return entmax.entmax15(q @ k.mT * SCALE + bias, dim=-1) @ v


@attention()
def bias_assigned_to(q, k, v, mask):
    """rows and columns by triu_indices, which do not make a boolean mask"""
    bias, (rows, columns) = torch.zeros(L, L), torch.triu_indices(L, L, 1)
    bias[rows, columns] = float("-inf")
    return entmax.entmax15(q @ k.mT * SCALE + bias, dim=-1) @ v


@attention()
def queries_scaled_in_part(q, k, v, mask):
    """a factor of every query, half of them assigned"""
    scale = torch.ones(L, 1)
    scale[3:] = 0.5
    return entmax.entmax15(q @ k.mT * scale, dim=-1) @ v


@attention()
def diagonal_filled_through_a_view(q, k, v, mask):
    """no token attends to itself"""
    keep = _all_pairs()
    keep.diagonal().fill_(False)
    return entmax.entmax15((q @ k.mT * SCALE).masked_fill(~keep, float("-inf")), dim=-1) @ v


@attention()
def prefix_filled_through_a_view(q, k, v, mask):
    """the triangle, but for a prefix that every token attends to"""
    keep = torch.ones(L, L).tril()
    keep[:, :2].fill_(1.0)
    return entmax.entmax15((q @ k.mT * SCALE).masked_fill(keep == 0, -1e9), dim=-1) @ v


@attention()
def positions_written_through_a_view(q, k, v, mask):
    """arange no longer counts"""
    queries, keys = torch.arange(L), torch.arange(L)
    keys[3:5].zero_()
    dropped = queries[:, None] < keys
    return entmax.entmax15((q @ k.mT * SCALE).masked_fill(dropped, -1e9), dim=-1) @ v


@attention("no_rewrite", "changed in place", at="bias = (1 - keep")
def mask_filled_after_its_cast(q, k, v, mask):
    """the bias was made of the mask as it was before"""
    keep = mask.clone()
    bias = (1 - keep[:, None, None].float()) * torch.finfo(q.dtype).min
    keep.fill_(True)
    return entmax.entmax15(q @ k.mT * SCALE + bias, dim=-1) @ v


@attention()
def biases_of_heads_flattened(q, k, v, mask):
    """BLOOM: baddbmm of [B * H, L, D]"""
    bias = torch.zeros(B, H, L, L).masked_fill(~mask[:, None, None], float("-inf"))
    q, k, v, bias = (t.flatten(0, 1) for t in (q, k, v, bias))
    scores = torch.baddbmm(bias, q, k.mT, beta=1.0, alpha=SCALE)
    return torch.bmm(entmax.entmax15(scores, dim=-1), v)


def assigned(drop):
    """Register scores of which `drop(scores)` takes keys out."""

    def attend(q, k, v, mask):
        scores = q @ k.mT * SCALE
        dropped = drop(scores)
        return entmax.entmax15(scores if dropped is None else dropped, dim=-1) @ v

    attend.__name__ = "assigned_" + drop.__name__
    attention()(attend)
    attention(modes=INFER, dynamic=True, prefix="any_size_")(attend)


@assigned
def last_keys(scores):
    scores[..., -2:] = -math.inf


@assigned
def listed_keys(scores):
    """a list of keys, then the first one of one head"""
    scores[:, :, :, [1, 3]] = -1e9
    scores[:, 0, :, 0] = -1e9


@assigned
def filled_by_index(scores):
    return scores.index_fill(-1, torch.tensor([1, 2]), -math.inf)


@assigned
def filled_by_index_in_place(scores):
    scores.index_fill_(3, torch.arange(2), -1e9)


@assigned
def merged_heads(scores):
    """over heads that are one axis with the batch"""
    merged = scores.flatten(0, 1)
    merged[1:, :, 2] = -1e9
    return merged.view_as(scores)


@assigned
def sequences_and_heads(scores):
    """of an axis that was two: those that were one go together"""
    scores = scores.unflatten(0, (1, -1)).clone()
    scores[0, 1:, :, :, -1] = -math.inf
    return scores.flatten(0, 1)


@attention()
def assigned_and_biased(q, k, v, mask):
    """keys are taken out of scores that get a bias afterwards, and a causal mask"""
    scores = q @ k.mT * SCALE
    scores[..., -1] = -math.inf
    scores = scores + torch.linspace(-1, 1, L)
    later = torch.ones(L, L, dtype=torch.bool).triu(1)
    return entmax.sparsemax(scores.masked_fill(later, -math.inf), dim=-1) @ v
