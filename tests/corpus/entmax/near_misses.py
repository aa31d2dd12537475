"""Programs that look like entmax attention and are not."""

from __future__ import annotations

import functools
import importlib.util
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from corpus.entmax.hand_written import (
    Unhalved,
    halving,
    sort_entmax15,
    sort_sparsemax,
    unhalved_halving,
)
from corpus.entmax.masks import some_rows_without_keys
from corpus.entmax.registry import INFER, SCALE, TRAIN, B, D, H, L, entmax, normal, program, qkv
from corpus.entmax.registry import attention as any_attention
from corpus.entmax.registry import rows as any_rows
from corpus.entmax.registry import scored as any_scored
from corpus.entmax.repositories import InPlaceSparsemax

attention = functools.partial(any_attention, "no_rewrite")
rows = functools.partial(any_rows, "no_rewrite")
scored = functools.partial(any_scored, "no_rewrite")


@attention("softmax has no zeros")
def softmax(q, k, v, mask):
    return torch.softmax(q @ k.mT * SCALE, dim=-1) @ v


@attention("top-k softmax is another function")
def top_k_softmax(q, k, v, mask):
    scores = q @ k.mT * SCALE
    least = scores.topk(3, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, float("-inf")).softmax(-1) @ v


@attention("rectified scores", at="torch.relu(")
def relu_squared(q, k, v, mask):
    """Primer-like attention without normalisation"""
    return torch.relu(q @ k.mT * SCALE).square() @ v


@attention("less a threshold of each row", at="torch.relu(")
def above_their_mean(q, k, v, mask):
    scores = q @ k.mT * SCALE
    return torch.relu(scores - scores.mean(-1, keepdim=True)) @ v


@attention("divided by their sum", at="p / (p.sum(")
def relu_normalised(q, k, v, mask):
    p = torch.relu(q @ k.mT * SCALE)
    return p / (p.sum(-1, keepdim=True) + 1e-6) @ v


@rows("norm of the probabilities", modes=INFER, at="normmax_bisect(")
def normmax(x):
    return entmax.normmax_bisect(x, alpha=2)


@rows("budget", modes=INFER, at="budget_bisect(")
def budget(x):
    return entmax.budget_bisect(x, budget=2)


@rows("n_iter=12, ensure_sum_one=False", at="entmax_bisect(")
def few_steps_not_renormalised(x):
    return entmax.entmax_bisect(x, alpha=1.5, n_iter=12, ensure_sum_one=False)


@rows("n_iter=4", at="entmax_bisect(")
def few_steps(x):
    return entmax.entmax_bisect(x, alpha=1.5, n_iter=4)


@rows("alpha=inf is no sparse", modes=INFER, at="entmax_bisect(")
def infinite_alpha(x):
    return entmax.entmax_bisect(x, alpha=math.inf)


@scored("masked twice are masked", at="> 3")
def masked_before_and_after_a_triangle(scores, mask):
    """-1e9 for padding, an added -inf triangle, -1e9 for what is far away"""
    at = torch.arange(scores.size(2))
    scores = scores.masked_fill(~mask[:, None, None], -1e9)
    scores = scores + torch.full((len(at), len(at)), -torch.inf).triu(1)
    return scores.masked_fill((at[:, None] - at).abs() > 3, -1e9)


@attention("spreads the scores over an axis", pattern="entmax_attention", at="+ steps")
def one_head_of_scores_for_all(q, k, v, mask):
    """the bias has an axis of heads, but the scores do not"""
    steps = torch.arange(H)[:, None, None] * 0.1
    scores = q[:, :1] @ k[:, :1].mT * SCALE
    return entmax.entmax15(scores + steps, dim=-1) @ v


@attention("topk between the product", pattern="entmax_attention", at=".topk(")
def scores_of_the_best_keys(q, k, v, mask):
    """every query has different keys"""
    scores, keys = (q @ k.mT * SCALE).topk(3, dim=-1)
    p = entmax.entmax15(scores, dim=-1)
    return (p.unsqueeze(-1) * v.unsqueeze(2).expand(-1, -1, L, -1, -1)[..., :3, :]).sum(-2), keys


@attention("scores come from sum", pattern="entmax_attention", at="k.sum(-1)")
def pooled_by_a_sum(q, k, v, mask):
    """attention pooling: one score per token, which is not a product of queries and keys"""
    return entmax.sparsemax(k.sum(-1), dim=-1).unsqueeze(-2) @ v


@attention("mixed over heads", pattern="entmax_attention", at="torch.einsum(")
def heads_mixed_in_the_scores(q, k, v, mask):
    mix = torch.eye(H) + 0.1
    return entmax.entmax15(torch.einsum("bhij,hg->bgij", q @ k.mT * SCALE, mix), dim=-1) @ v


@attention("mul changes the prob", pattern="entmax_attention", at="* kept")
def keys_dropped_by_a_number(q, k, v, mask):
    """a mask as a number after the probabilities, which the scores did not have"""
    p = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    kept = mask[:, None, None].float()
    return (p * kept) @ v


@attention("a layer's outputs are experts, no keys", pattern="entmax_attention")
def routed_to_experts(q, k, v, mask):
    """tokens distributed to experts"""
    gates = entmax.entmax15(F.linear(k, torch.eye(D)[:4] + 0.1) / 2, dim=-1)
    return torch.einsum("bhse,bhsd->bhed", gates, v)


@attention("a row's own features are weighed", pattern="entmax_attention")
def features_weighed(q, k, v, mask):
    """TabNet's mask, and a sum"""
    return (entmax.sparsemax(q, dim=-1) * v).sum(-1)


class FeatureMask(nn.Module):
    """TabNet's: sparsemax over a layer's outputs, written out as there, times the features, which the next layer takes;
    and NODE's, which is learnt itself."""

    def __init__(self):
        super().__init__()
        self.bn, self.scores, self.next = nn.BatchNorm1d(D), nn.Linear(D, D), nn.Linear(D, D)
        self.choice = nn.Parameter(normal((D, D), 6, 2.0).detach())

    def forward(self, x, priors):
        scores = torch.cat([self.bn(part) for part in self.scores(x).chunk(2)]) * priors
        kept = InPlaceSparsemax.apply(scores) * x
        return self.next(kept) @ entmax.entmax15(self.choice, dim=0)


@program("no_rewrite", "a layer weighs features, and learnt weights choose some")
def features_of_a_layer():
    return FeatureMask(), (normal((6, D), 1), normal((6, D), 2).detach().abs())


class ClearedPastAutograd(InPlaceSparsemax):
    """What saved the scores before reads zeros in its gradient."""

    @staticmethod
    def forward(ctx, x):
        out = sort_sparsemax(x)
        ctx.save_for_backward(out)
        x.data.zero_()
        return out


@rows("past autograd", modes=TRAIN, at="ClearedPastAutograd.apply(")
def function_that_writes_to_its_input_past_autograd(x):
    scores = x * 1.5
    return scores.square(), ClearedPastAutograd.apply(scores)


@attention("einsum of 3 tensors makes the scores", pattern="entmax_attention", at="torch.einsum(")
def bilinear_scores_in_one_einsum(q, k, v, mask):
    """q W k"""
    w = torch.eye(D) + 0.1
    scores = torch.einsum("bhid,de,bhje->bhij", q, w, k)
    return entmax.entmax15(scores, dim=-1) @ v


@attention("a part of the result of entmax15", pattern="entmax_attention", at="[..., :-1]")
def attention_sink(q, k, v, mask):
    """an additional score without a key"""
    scores = torch.cat([q @ k.mT * SCALE, q.new_zeros(B, H, L, 1)], -1)
    return entmax.entmax15(scores, dim=-1)[..., :-1] @ v


@attention("another axis", pattern="entmax_attention", at="dim=-2")
def over_queries(q, k, v, mask):
    """slot attention"""
    return entmax.entmax15(q @ k.mT * SCALE, dim=-2) @ v


@attention("mul changes the probabilities", pattern="entmax_attention", at="* mask[:, None")
def renormalised_after_mask(q, k, v, mask):
    attn = entmax.entmax15(q @ k.mT * SCALE, dim=-1) * mask[:, None, None]
    return attn / (attn.sum(-1, keepdim=True) + 1e-9) @ v


@attention("einsum changes the probabilities", pattern="entmax_attention", at="torch.einsum(")
def talking_heads(q, k, v, mask):
    mix = torch.eye(H, dtype=q.dtype) + 0.1
    attn = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    return torch.einsum("gh,bhij->bgij", mix, attn) @ v


@attention("no values are weighed", pattern="entmax_attention")
def entropy_of_the_probabilities(q, k, v, mask):
    """TabNet: of a mask's features"""
    p = entmax.sparsemax(q @ k.mT * SCALE, dim=-1)
    return (-p * torch.log(p + 1e-10)).sum(-1)


@attention("also read by mean", pattern="entmax_attention", at="scores.mean(")
def masked_scores_less_their_mean(q, k, v, mask):
    """the mean of a row with a masked key is -inf, so the row becomes NaN"""
    scores = (q @ k.mT * SCALE).masked_fill(~mask[:, None, None], float("-inf"))
    scores = scores - scores.mean(-1, keepdim=True)
    return entmax.entmax_bisect(scores, alpha=1.5, dim=-1) @ v


@attention("also read by amax", pattern="entmax_attention", at="scores.amax(")
def masked_scores_less_the_largest_of_their_columns(q, k, v, mask):
    """the maximum of a masked key's column is -inf, so a row becomes NaN"""
    scores = (q @ k.mT * SCALE).masked_fill(~mask[:, None, None], float("-inf"))
    scores = scores - scores.amax(-2).unsqueeze(-1)
    return entmax.entmax_bisect(scores, alpha=1.5, dim=-1) @ v


@attention("heads are mixed, and no values weighed", pattern="entmax_attention")
def mixed_and_returned(q, k, v, mask):
    mix = torch.eye(H, dtype=q.dtype) + 0.1
    return torch.einsum("gh,bhij->bgij", mix, entmax.entmax15(q @ k.mT * SCALE, dim=-1))


def hook_ends_the_graph():
    """Return why the hook programs cannot run: torch before 2.13 cannot trace hooks."""
    found = importlib.util.find_spec("torch._higher_order_ops.register_hook")
    return "" if found else "Dynamo traces no hook"


hooked = functools.partial(
    attention, modes=TRAIN, pattern="entmax_attention", unsupported=hook_ends_the_graph
)


@hooked("register_hook is between the probabilities and the values", at="register_hook(")
def hook_on_the_probabilities(q, k, v, mask):
    attn = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    attn.register_hook(lambda grad: grad / 2)
    return attn @ v


@hooked("from register_hook, which is not followed", at="register_hook(")
def hook_on_the_scores(q, k, v, mask):
    scores = q @ k.mT * SCALE
    scores.register_hook(lambda grad: grad / 2)
    return entmax.entmax15(scores, dim=-1) @ v


@attention("tanh", pattern="entmax_attention", at="torch.tanh(")
def soft_capped(q, k, v, mask):
    """Gemma 2: tanh between scores and normalisation"""
    return entmax.entmax15(torch.tanh(q @ k.mT * SCALE / 5) * 5, dim=-1) @ v


def tau_of(z):
    """Return the threshold of entmax15(2 z), by sorting."""
    s = z.sort(dim=-1, descending=True).values
    n = torch.arange(1, z.size(-1) + 1, dtype=z.dtype)
    mean = s.cumsum(-1) / n
    delta = (1 - n * ((s * s).cumsum(-1) / n - mean**2)) / n
    tau = mean - delta.clamp(min=0).sqrt()
    return tau.gather(-1, (tau <= s).sum(-1, keepdim=True) - 1)


@rows("row that sums to", at="torch.clamp(x - c.gather(")
def truncated_support(x):
    """a top-k of 2 without the package's second attempt"""
    s, _ = x.topk(2, dim=-1)
    n = torch.arange(1, 3, dtype=x.dtype)
    c = s.cumsum(-1) - 1
    size = (n * s > c).sum(-1, keepdim=True)
    return torch.clamp(x - c.gather(-1, size - 1) / size, min=0)


@rows("what exceeds the k-th largest, nothing is normalised")
def above_the_third(x):
    return torch.relu(x - x.topk(3, dim=-1).values[..., -1:])


@rows("gradient is not entmax's", modes=TRAIN, at="p / p.sum(")
def bisection_without_a_backward(x):
    return halving(x)


class StraightThrough(Function):
    """A Function with entmax as its forward and the identity as its backward."""

    @staticmethod
    def forward(ctx, x):
        return sort_entmax15(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


@attention("too large to be multiplied", modes=INFER, pattern="entmax_attention", at="p / (p.sum(")
def lowest_numbers_doubled(q, k, v, mask):
    """finfo.min filled in, no half before the threshold"""
    scores = (q @ k.mT * SCALE).masked_fill(~mask[:, None, None], torch.finfo(q.dtype).min)
    return unhalved_halving(scores) @ v


@rows("gradient is not entmax's", modes=TRAIN, at="StraightThrough.apply(x)")
def straight_through(x):
    return StraightThrough.apply(x)


class Entmoid(Function):
    """The two-class entmax of NODE."""

    @staticmethod
    def forward(ctx, x):
        sign = x >= 0
        x = x.abs()
        tau = (x + torch.sqrt((8 - x**2).clamp(min=0))) / 2
        tau = torch.where(tau <= x, torch.full_like(tau, 2.0), tau)
        y = 0.25 * (tau - x).clamp(min=0) ** 2
        ctx.save_for_backward(y)
        return torch.where(sign, 1 - y, y)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        g = y.sqrt()
        return grad * g * (1 - y).sqrt() / (g + (1 - y).sqrt())


@rows("an activation, nothing is normalised", modes=INFER)
def entmoid(x):
    """NODE's bin function"""
    return Entmoid.apply(x)


@attention("scores are also returned", pattern="entmax_attention", at="scores =")
def scores_returned(q, k, v, mask):
    scores = q @ k.mT * SCALE
    return entmax.entmax15(scores, dim=-1) @ v, scores


@rows("alpha=1 is softmax", modes=INFER, at="alpha=1.0")
def alpha_one(x):
    return entmax.entmax_bisect(x, alpha=1.0)


@rows("no family member", modes=INFER)
def hard_max(x):
    return F.one_hot(x.argmax(-1), x.size(-1)).to(x.dtype)


@attention("under no_grad", modes=TRAIN, pattern="entmax_attention", at="attn =")
def probabilities_without_gradient(q, k, v, mask):
    """the probabilities are computed under no_grad"""
    with torch.no_grad():
        attn = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    return attn @ v


@attention("softmax over what top-k keeps is another function", modes=INFER)
def top_k_of_entmax(q, k, v, mask):
    scores = q @ k.mT * SCALE
    top = scores.topk(3, dim=-1)
    p = torch.softmax(top.values, dim=-1)
    return torch.zeros_like(scores).scatter(-1, top.indices, p) @ v


@rows("power 3", modes=INFER, at="** 3")
def cubed(x):
    z = x / 2
    return torch.clamp(z - tau_of(z), min=0) ** 3


@rows("multiplied by 1", at="torch.relu(x - (x.amax(")
def threshold_not_looked_for(x):
    """relu(z - max + 1) ** 2, normalised"""
    p = torch.relu(x - (x.amax(-1, keepdim=True) - 1)).square()
    return p / p.sum(-1, keepdim=True)


@rows("multiplied by 1", at="torch.relu(x - low).square()")
def bisection_by_arithmetic(x):
    """no where, and no division by the sum"""
    low = x.amax(-1, keepdim=True) - 1
    for i in range(20):
        p = torch.relu(x - low).square()
        low = low + 0.5 ** (i + 1) * (p.sum(-1, keepdim=True) >= 1)
    return torch.relu(x - low).square()


@attention("not entmax's for all rows", at="torch.relu(scores - scores.mean(")
def scaled_scores_above_their_mean_squared(q, k, v, mask):
    """The obstacle is the threshold, not the factor"""
    scores = q @ k.mT * SCALE
    return torch.relu(scores - scores.mean(-1, keepdim=True)).square() @ v


@rows("no near miss")
def above_the_mean_squared(x):
    """relu(0.3 x - mean) ** 2 is no threshold that is looked for"""
    x = x * 0.3
    return torch.relu(x - x.mean(-1, keepdim=True)).square()


@attention(
    "where changes the probabilities",
    inputs=lambda: (*qkv(), some_rows_without_keys()),
    modes=INFER,
    at="torch.where(dropped.mT",
)
def another_mask_afterwards(q, k, v, dropped):
    """scores lose the keys of one mask, probabilities those of another"""
    scores = (q @ k.mT * SCALE).masked_fill(dropped[:, None], -1e9)
    p = entmax.entmax15(scores, dim=-1)
    return torch.where(dropped.mT[:, None], torch.zeros_like(p), p) @ v


@attention(
    "masked_fill changes the prob",
    inputs=lambda: (*qkv(), some_rows_without_keys()),
    modes=INFER,
    at=".masked_fill(dropped[:, None], 0.0)",
)
def a_weak_mask_and_the_same_afterwards(q, k, v, dropped):
    """scores may be below the fill value"""
    scores = (q @ k.mT * 3e3).masked_fill(dropped[:, None], -1e3)
    return entmax.entmax15(scores, dim=-1).masked_fill(dropped[:, None], 0.0) @ v


@attention("a bias makes as low as the mask does", at=".masked_fill(later, 0.0)")
def padding_added_and_the_triangle_afterwards(q, k, v, mask):
    """left padding: the first queries have no key except by the fill of the triangle"""
    pads = torch.zeros(B, 1, 1, L).masked_fill(~mask.flip(1)[:, None, None], -1e30)
    later = torch.ones(L, L, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * SCALE + pads).masked_fill(later, -1e30)
    return entmax.sparsemax(scores, dim=-1).masked_fill(later, 0.0) @ v


@attention(
    "a bias makes as low as the mask does",
    inputs=lambda: (*qkv(), normal((H, L, L), 7)),
    at=".masked_fill(later, 0.0)",
)
def learned_biases_with_padding_in_them(q, k, v, bias):
    """one sum of a table and of a mask, then the triangle twice"""
    pads = torch.zeros(L).masked_fill(torch.arange(L) < 2, -1e30)
    later = torch.ones(L, L, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * SCALE + (bias + pads)).masked_fill(later, -1e30)
    return entmax.sparsemax(scores, dim=-1).masked_fill(later, 0.0) @ v


@attention("div changes the probabilities", modes=INFER, at="+ 1e-3")
def divided_by_more_than_their_sum(q, k, v, mask):
    """p / (sum + 1e-3)"""
    p = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    return p / (p.sum(-1, keepdim=True) + 1e-3) @ v


@attention("div changes the probabilities", modes=INFER, at="p.sum(-2")
def divided_by_the_sum_over_queries(q, k, v, mask):
    """weighted mean of slot attention"""
    p = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    return p / (p.sum(-2, keepdim=True) + 1e-8) @ v


@attention(
    "mul changes the probabilities",
    inputs=lambda: (*qkv(), some_rows_without_keys()),
    modes=INFER,
    at="~dropped",
)
def empty_rows_divided_by_zero(q, k, v, dropped):
    """NaN, where the operator gives zeros"""
    p = entmax.entmax15((q @ k.mT * SCALE).masked_fill(dropped[:, None], -1e9), dim=-1)
    p = p * ~dropped[:, None]
    return p / p.sum(-1, keepdim=True) @ v


@attention("mul changes the probabilities", modes=INFER, at="* 1e-25")
def factor_that_may_vanish(q, k, v, mask):
    return entmax.entmax15(q @ k.mT * SCALE, dim=-1) * 1e-25 @ v


@attention("probabilities are changed in place", modes=INFER, at="p[..., 0] = 0")
def zeroed_in_place(q, k, v, mask):
    p = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    p[..., 0] = 0
    return p @ v


@attention("changed in place before", modes=INFER, at="k[:, :, 0] = 0")
def keys_written_before_the_values(q, k, v, mask):
    """k[:, :, 0] = 0 between the two products"""
    k = k.clone()
    p = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    k[:, :, 0] = 0
    return p @ v, k


@attention("clamp between", modes=INFER, at=".clamp(min=-1e3)")
def floor_that_scores_reach(q, k, v, mask):
    """a floor that is not the lowest number"""
    return entmax.entmax15((q @ k.mT * SCALE).clamp(min=-1e3), dim=-1) @ v


@attention("maximum halves", modes=TRAIN, at="torch.max(")
def maximum_of_a_row_that_ties(q, k, v, mask):
    """torch.max(scores + padding, finfo.min), where padding is finfo.min, too"""
    low = torch.finfo(q.dtype).min
    scores = q @ k.mT * SCALE + (1.0 - mask[:, None, None].to(q.dtype)) * low
    return entmax.entmax15(torch.max(scores, torch.tensor(low)), dim=-1) @ v


@attention("floor are masked or biased", modes=TRAIN, at="torch.arange(")
def floored_mask_then_distances(q, k, v, mask):
    """a floor, then a bias"""
    scores = q @ k.mT * SCALE + torch.where(mask, 0.0, -torch.inf)[:, None, None]
    scores = scores.clamp(min=torch.finfo(q.dtype).min)
    return entmax.entmax15(scores - torch.arange(L, dtype=q.dtype), dim=-1) @ v


@scored("several terms", modes=INFER, at=".clamp(min=low)")
def floor_of_two_masks(scores, mask):
    """one filled in, one added: twice finfo.min is -inf"""
    low = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(torch.ones(L, L).triu(1).bool(), low)
    return (scores + (1.0 - mask[:, None, None].to(scores.dtype)) * low).clamp(min=low)


@attention(
    "masked_fill spreads the scores",
    modes=INFER,
    inputs=lambda: tuple(t[:1].detach() for t in qkv()),
    at=".masked_fill(",
)
def sequences_spread_by_a_mask(q, k, v):
    """the mask has a batch axis, but queries and keys have none"""
    keep = (torch.arange(k.size(2)) < torch.tensor([[7], [4]]))[:, None, None]
    return entmax.entmax15((q @ k.mT * SCALE).masked_fill(~keep, -1e9), dim=-1) @ v


@attention("einsum of 3 tensors", modes=INFER, at="torch.einsum(")
def three_in_one_einsum(q, k, v, mask):
    out = torch.linspace(-1, 1, H * D * 3).view(H, D, 3)
    return torch.einsum("bhqk,bhkd,hde->bqe", entmax.entmax15(q @ k.mT * SCALE, -1), v, out)


@attention("mul changes the probabilities", at="torch.linspace(0.1, 1.0, L)")
def keys_gated(q, k, v, mask):
    p = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    return (p * torch.linspace(0.1, 1.0, L)) @ v


@attention("changes the probabilities", modes=INFER, at="H, 1, 1)")
def weighted_and_normalised_again(q, k, v, mask):
    """p * head_mask / sum"""
    p = entmax.entmax15(q @ k.mT * SCALE, dim=-1) * torch.linspace(0.5, 1.0, H).view(1, H, 1, 1)
    return (p / p.sum(-1, keepdim=True)) @ v


@attention("differs from entmax by", at="n_iter=5) @ v")
def attention_of_few_steps(q, k, v, mask):
    return entmax.entmax_bisect(q @ k.mT * SCALE, 1.5, n_iter=5) @ v


@rows("mul is written in place and lives on", modes=INFER, at="z -=")
def scores_read_through_a_view_afterwards(x):
    """a view of the scores is read after the write in place"""
    z = x * 1.5
    flat = z.view(-1)
    z -= z.max(-1, keepdim=True).values
    return sort_sparsemax(z), flat * 2


@scored("which is no exclusion", at="scores[..., -2:] = 0.0")
def assigned_zeros(scores, mask):
    scores[..., -2:] = 0.0


@attention("numbers known only at run time", at="scores[..., -1] = (q")
def assigned_scores(q, k, v, mask):
    """the last key has the scores of the first"""
    scores = q @ k.mT * SCALE
    scores[..., -1] = (q @ k[:, :, :1].mT * SCALE)[..., 0]
    return entmax.entmax15(scores, dim=-1) @ v


@scored("through a view of them", at="scores[..., -2:].fill_(")
def filled_through_a_view(scores, mask):
    """scores[..., k:].fill_(-inf)"""
    scores[..., -2:].fill_(-1e9)


class Halved(Unhalved):
    """A Function of entmax15(2 x) with the backward of entmax15(x)."""

    @staticmethod
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        s = p.sqrt()
        d = grad * s
        return d - s * (d.sum(-1, keepdim=True) / s.sum(-1, keepdim=True))


@rows("gradient is not entmax's", modes=TRAIN, at="Halved.apply(")
def half_a_gradient(x):
    """entmax15 of twice the scores with the backward of entmax15"""
    return Halved.apply(x)


class ClippedBackward(Unhalved):
    """A Function of entmax15(2 x) that bounds the gradient that arrives."""

    @staticmethod
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        s = p.sqrt()
        d = 2 * grad.clamp(-50, 50) * s
        return d - s * (d.sum(-1, keepdim=True) / s.sum(-1, keepdim=True))


@rows("gradient is not entmax's", modes=TRAIN, at="ClippedBackward.apply(")
def gradient_clipped_by_the_backward(x):
    """The backward is entmax's for gradients of moderate size alone"""
    return ClippedBackward.apply(x)
