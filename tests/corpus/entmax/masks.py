"""Padding masks, causal masks, biases."""

from __future__ import annotations

import math

import torch

from corpus.case import each, of
from corpus.entmax.registry import (
    INFER,
    SCALE,
    TRAIN,
    B,
    D,
    H,
    L,
    attention,
    entmax,
    normal,
    qkv,
    scored,
)

INF = math.inf
LOW = torch.finfo(torch.float32).min
FUTURE = torch.ones(L, L).triu(1).bool()


def left(mask):
    """Return a mask [B, 1, 1, Lk] of sequences that begin with padding."""
    return mask.flip(1)[:, None, None]


def first_alone(mask):
    """Return a mask [B, 1, 1, Lk] in which the second sequence is all padding."""
    return (mask & torch.tensor([True, False])[:, None])[:, None, None]


def added(keep):
    """Hugging Face: (1 - mask) * finfo.min"""
    return (1.0 - keep.to(torch.float32)) * LOW


def triangle():
    return torch.full((L, L), -INF).triu(1)


def distances():
    at = torch.arange(L)
    return -(at[:, None] - at).abs() * 0.3


each(
    scored(),
    fill_minus_infinity=lambda s, mask: s.masked_fill(mask[:, None, None] == 0, -INF),
    # as the annotated transformer's descendants do
    fill_minus_1e9_in_place=lambda s, mask: s.masked_fill_(~mask.unsqueeze(1).unsqueeze(2), -1e9),
    # lucidrains
    fill_finfo_min=lambda s, mask: s.masked_fill(~mask[:, None, None, :], -torch.finfo(s.dtype).max),
    log_of_a_mask=lambda s, mask: s + mask[:, None, None].to(s.dtype).log(),
    # one's own stabilisation before the package's
    maximum_subtracted_first=lambda s, mask: s - s.max(dim=-1, keepdim=True)[0],
    detached_maximum_subtracted=lambda s, mask: s - s.detach().amax(-1)[..., None].expand_as(s),
    where_mask=lambda s, mask: torch.where(mask[:, None, None], s, LOW),
    # GPT-2: the value filled in is a tensor
    where_tensor_fill=lambda s, mask: torch.where(mask[:, None, None], s, torch.full([], LOW)),
    extended_mask=lambda s, mask: s + added(mask[:, None, None]),
    # (mask - 1) * large; a product with the mask plus a fill value
    mask_less_one=lambda s, mask: s + (mask[:, None, None].float() - 1.0) * -LOW,
    product_and_fill=lambda s, mask: (
        s * mask[:, None, None] + torch.where(mask[:, None, None], 0.0, -1e4)
    ),
    # made for more keys than there are
    part_of_an_extended_mask=lambda s, mask: (
        s + added(torch.cat((mask, mask), 1)[:, None, None])[..., :L]
    ),
    # old BERT
    extended_mask_in_place=lambda s, mask: s.add_((1 - mask[:, None, None].float()) * -10000.0),
    # a mask that is made in the graph, -inf back to finfo.min by clamp
    floored_mask=lambda s, mask: (
        (s + torch.where(mask, 0.0, -INF)[:, None, None]).clamp(min=torch.finfo(s.dtype).min)
    ),
    # clamp passes a tie's gradient on, as the sum does in a sequence that is all padding
    floor_at_the_added_number=lambda s, mask: (s + added(first_alone(mask))).clamp(min=LOW),
    # finfo.min by a floor and by a fill; neither passes a gradient on
    floored_mask_then_triangle=lambda s, mask: torch.where(
        ~FUTURE, (s + torch.where(left(mask), 0.0, -INF)).clamp(min=LOW), LOW
    ),
    # minGPT
    tril_ones=lambda s, mask: s.masked_fill(torch.tril(torch.ones(L, L)).view(1, 1, L, L) == 0, -INF),
    # kept where a number is positive
    tril_above_zero=lambda s, mask: torch.where(torch.ones(L, L).tril() > 0, s, -INF),
    # nn.Transformer.generate_square_subsequent_mask
    triu_minus_infinity_added=lambda s, mask: s + torch.triu(torch.full((L, L), -INF), diagonal=1),
    # one boolean mask for causality and padding
    causal_and_padding=lambda s, mask: torch.where(
        torch.ones(L, L).bool().tril() & mask[:, None, None], s, torch.tensor(-INF)
    ),
    # the triangle filled with min, then an additive padding mask
    gpt2_then_padding=lambda s, mask: (
        torch.where(torch.ones(L, L).tril().bool(), s, LOW) + added(mask[:, None, None])
    ),
    # a sequence that is all padding: an added mask passes the gradient on to the scores
    row_without_keys_added=lambda s, mask: s + added(first_alone(mask)),
    # Hugging Face's decoders: one additive mask for both, with sequences that begin with padding
    causal_and_left_padding_added=lambda s, mask: s + torch.where(~FUTURE & left(mask), 0.0, LOW),
    # two sums: keys that the second one drops no longer have the first one's fill value
    left_padding_added_then_triangle_of_infinity=lambda s, mask: s + added(left(mask)) + triangle(),
    # three terms: finfo.min filled in, an added -inf triangle, ALiBi
    padding_then_causal_then_distances=lambda s, mask: (
        s.masked_fill(~mask[:, None, None], LOW) + triangle() + distances()
    ),
    # a completely filled row passes no gradient on, although a bias is added to it
    padding_filled_then_distances=lambda s, mask: s.masked_fill(~first_alone(mask), LOW) + distances(),
    # GPT-2 on sequences that begin with padding: in some rows all keys are dropped, by the fill or by the sum
    left_padding_after_the_triangle=lambda s, mask: torch.where(~FUTURE, s, LOW) + added(left(mask)),
    # -1e9 for padding, -inf for the future, either way round, or the triangle added
    padding_then_causal_of_another_fill=lambda s, mask: (
        s.masked_fill(~left(mask), -1e9).masked_fill(FUTURE, -INF)
    ),
    padding_then_causal_added=lambda s, mask: s.masked_fill(~left(mask), -1e9) + triangle(),
    causal_then_padding_of_another_fill=lambda s, mask: (
        s.masked_fill(FUTURE, -INF).masked_fill(~mask[:, None, None], -1e9)
    ),
)  # fmt: skip
each(
    scored(modes=INFER),
    # a sequence that is all padding: uniform under a finite fill
    row_without_keys=lambda s, mask: s.masked_fill(~first_alone(mask), -1e9),
    # in a row without keys, all filled scores are equal
    two_masks_in_front_of_a_bias=lambda s, mask: (
        s.masked_fill(FUTURE, LOW).masked_fill(~left(mask), LOW) + distances()
    ),
)
each(
    scored(inputs=lambda: (*qkv(), combined_biases())),
    given_bias=lambda s, bias: s + bias,
    # the same after a causal fill
    given_bias_after_the_triangle=lambda s, bias: torch.where(~FUTURE, s, LOW) + bias.flip(3),
)


@attention(modes=INFER, inputs=lambda: (*qkv(), combined_biases()))
def floored_scores(q, k, v, bias):
    """OPT: causal and padding biases added up, -inf where both drop, back to finfo.min afterwards"""
    scores = (q @ k.mT * SCALE + bias).view(B * H, L, L)
    scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))
    return torch.bmm(entmax.entmax15(scores, dim=-1), v.flatten(0, 1))


@scored()
def boolean_assignment(scores, mask):
    scores[~mask[:, None, None, :].expand_as(scores)] = -INF


@attention()
def fairseq_padding(q, k, v, mask):
    """view to [B, H, L, L], fill, view back, bmm"""
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)) * SCALE
    weights = weights.view(B, H, L, L)
    weights = weights.masked_fill(~mask.unsqueeze(1).unsqueeze(2), -INF)
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
def expanded_padding_negated(q, k, v, mask):
    """[B, L] expanded to [B*H, 1, L], whose negation is assigned"""
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) * SCALE
    kept = mask[:, None].expand(B, H, L).reshape(B * H, 1, L)
    scores.masked_fill_(torch.logical_not(kept), -INF)
    return torch.bmm(entmax.entmax15(scores, dim=-1), v)


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
    scores = scores.masked_fill(torch.ones(L, L).triu(1).bool(), -INF)
    return entmax.entmax15(scores, dim=-1) @ v


@attention()
def causal_rows_without_keys_added(q, k, v, mask):
    """more queries than keys, so that the first queries have none"""
    k, v = k[:, :, : L - 2], v[:, :, : L - 2]
    future = torch.full((L, L - 2), torch.finfo(torch.float32).min).triu(-1)
    return entmax.sparsemax(q @ k.mT * SCALE + future, dim=-1) @ v


def combined_biases() -> torch.Tensor:
    """Return [B, 1, L, L]: finfo.min where the padding or the causal mask drops a key, twice that where both do. The
    first key of the second sequence is padding, so that its first query has no key."""
    low = torch.finfo(torch.float32).min
    padding = torch.zeros(B, 1, 1, L)
    padding[0, ..., -2:] = padding[1, ..., 0] = low
    return padding + torch.full((L, L), low).triu(1)


def some_rows_without_keys() -> torch.Tensor:
    """Return a boolean mask [B, L, L], True at dropped keys; the first query of one sequence keeps none."""
    dropped = ~torch.tril(torch.ones(B, L, L, dtype=torch.bool))
    dropped[0, 0] = True
    return dropped


@attention()
def assigned_behind_an_ellipsis(q, k, v, mask):
    """scores[..., later] = -1e9, with batch and heads in one axis"""
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * SCALE
    scores[..., torch.ones(L, L, dtype=torch.bool).triu(1)] = -1e9
    return torch.bmm(entmax.sparsemax(scores, dim=-1), v.flatten(0, 1)).view_as(v)


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
    """probabilities times a learned gate of every query, halved"""
    p = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    return (p * torch.sigmoid(q.mean(-1, keepdim=True)) / 2) @ v


@attention(inputs=lambda: (*qkv(), normal((H, L, L), 7)))
def learned_biases_and_the_triangle_twice(q, k, v, bias):
    """learned biases are not a mask"""
    later = torch.ones(L, L, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * SCALE + bias).masked_fill(later, -1e30)
    return entmax.sparsemax(scores, dim=-1).masked_fill(later, 0.0) @ v


def part_of_all_pairs():
    """Return a boolean mask after an assignment to a part of it."""
    keep = torch.ones(L, L, dtype=torch.bool)
    keep[2:, 1] = False
    return keep


each(
    scored(),
    mask_assigned_to=lambda s, mask: s.masked_fill(~part_of_all_pairs(), -INF),
    bias_of_a_mask_assigned_to=lambda s, mask: s + torch.where(part_of_all_pairs(), 0.0, -INF),
    cast_of_a_mask_assigned_to=lambda s, mask: s + added(part_of_all_pairs()),
)


@scored()
def bias_assigned_to(scores, mask):
    """rows and columns by triu_indices, which do not make a boolean mask"""
    bias, (rows, columns) = torch.zeros(L, L), torch.triu_indices(L, L, 1)
    bias[rows, columns] = -INF
    return scores + bias


@scored()
def scores_scaled_in_part(scores, mask):
    """a factor of every query, half of them assigned"""
    scale = torch.ones(L, 1)
    scale[3:] = 0.5
    return scores * scale


@scored()
def diagonal_filled_through_a_view(scores, mask):
    """no token attends to itself"""
    keep = torch.ones(L, L, dtype=torch.bool)
    keep.diagonal().fill_(False)
    return scores.masked_fill(~keep, -INF)


@scored()
def prefix_filled_through_a_view(scores, mask):
    """the triangle, but for a prefix that every token attends to"""
    keep = torch.ones(L, L).tril()
    keep[:, :2].fill_(1.0)
    return scores.masked_fill(keep == 0, -1e9)


@scored()
def positions_written_through_a_view(scores, mask):
    """after the write, the positions are no longer an arange"""
    queries, keys = torch.arange(L), torch.arange(L)
    keys[3:5].zero_()
    return scores.masked_fill(queries[:, None] < keys, -1e9)


@scored("no_rewrite", "changed in place", at="keep.fill_(")
def mask_filled_after_its_cast(scores, mask):
    """the bias was computed from the mask before the write"""
    keep = mask.clone()
    bias = (1 - keep[:, None, None].float()) * LOW
    keep.fill_(True)
    return scores + bias


@attention()
def biases_of_heads_flattened(q, k, v, mask):
    """BLOOM: baddbmm of [B * H, L, D]"""
    bias = torch.zeros(B, H, L, L).masked_fill(~mask[:, None, None], -INF)
    q, k, v, bias = (t.flatten(0, 1) for t in (q, k, v, bias))
    scores = torch.baddbmm(bias, q, k.mT, beta=1.0, alpha=SCALE)
    return torch.bmm(entmax.entmax15(scores, dim=-1), v)


def assigned(drop):
    """Register attention in which `drop(scores)` removes keys from the scores."""
    for fields in ({}, {"modes": INFER, "dynamic": True, "prefix": "any_size_"}):
        of(scored(**fields), lambda drop: lambda scores, mask: drop(scores))(drop)


@assigned
def last_keys(scores):
    scores[..., -2:] = -INF


@assigned
def listed_keys(scores):
    """a list of keys, then the first one of one head"""
    scores[:, :, :, [1, 3]] = -1e9
    scores[:, 0, :, 0] = -1e9


@assigned
def filled_by_index(scores):
    return scores.index_fill(-1, torch.tensor([1, 2]), -INF)


@assigned
def filled_by_index_in_place(scores):
    scores.index_fill_(3, torch.arange(2), -1e9)


@assigned
def merged_heads(scores):
    """batch and heads are one axis"""
    merged = scores.flatten(0, 1)
    merged[1:, :, 2] = -1e9
    return merged.view_as(scores)


@assigned
def sequences_and_heads(scores):
    """batch and heads were one axis: their two indices go together"""
    scores = scores.unflatten(0, (1, -1)).clone()
    scores[0, 1:, :, :, -1] = -INF
    return scores.flatten(0, 1)


@scored()
def assigned_and_biased(scores, mask):
    """keys are removed from scores that later get a bias and a causal mask"""
    scores[..., -1] = -INF
    scores = scores + torch.linspace(-1, 1, L)
    return scores.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -INF)
