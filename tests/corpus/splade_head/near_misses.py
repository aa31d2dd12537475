"""Programs that look like a SPLADE head and are not one, and functions that do not commute with a maximum."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from corpus.case import each
from corpus.splade_head.registry import (
    INFER,
    TRAIN,
    B,
    D,
    S,
    V,
    activated,
    encoder,
    formula,
    hidden,
    ids,
    mask,
    tokens,
    weight,
)
from corpus.splade_head.registry import head as any_head

head = functools.partial(any_head, "no_rewrite")
maybe = functools.partial(any_head, "maybe")
miss = functools.partial(encoder, "no_rewrite")


class Half(torch.autograd.Function):
    """The identity with half the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


@head("softmax", at="logits.softmax(dim=-1)")
def softmax_over_vocabulary(logits, mask):
    """Probabilities instead of logits."""
    return (torch.log1p(logits.softmax(dim=-1)) * mask.unsqueeze(-1)).amax(dim=1)


@head("log_softmax", at="F.log_softmax(logits")
def log_softmax_over_vocabulary(logits, mask):
    return (tokens(F.log_softmax(logits, dim=-1) + 5) * mask.unsqueeze(-1)).amax(dim=1)


@head("(softmax) differs by token and", at="logits.softmax(dim=1)")
def softmax_over_sequence(logits, mask):
    """Attention over tokens, for every term."""
    return (logits.softmax(dim=1) * tokens(logits)).max(dim=1).values


@head("div combines two functions of one linear", at="x / (1 + x)")
def saturation_of_bm25(logits, mask):
    x = torch.relu(logits)
    return (x / (1 + x) * mask.unsqueeze(-1)).amax(dim=1)


@head("layer_norm", at="F.layer_norm(logits")
def layer_norm_on_logits(logits, mask):
    logits = F.layer_norm(logits, logits.shape[-1:])
    return (tokens(logits) * mask.unsqueeze(-1)).amax(dim=1)


@head("mean", at="logits.mean(dim=-1")
def centred_over_vocabulary(logits, mask):
    centred = logits - logits.mean(dim=-1, keepdim=True)
    return (tokens(centred) * mask.unsqueeze(-1)).amax(dim=1)


@head("the largest keeps a softmax over the tokens in range")
def softmax_over_sequence_written_out(logits, mask):
    exp = torch.exp(logits - logits.max(dim=1, keepdim=True).values)
    return exp / exp.sum(dim=1, keepdim=True)


@head("numbers between 0 and 1, of every token")
def scaled_to_their_range(logits, mask):
    low, high = logits.amin(dim=1, keepdim=True), logits.amax(dim=1, keepdim=True)
    return (logits - low) / (high - low + 1e-6)


@head("also read by sub", at="logits - largest")
def largest_and_what_is_below_it(logits, mask):
    largest = logits.amax(dim=1, keepdim=True)
    return largest, logits - largest


@head("also read by mean", at="logits.mean(dim=1")
def centred_over_sequence(logits, mask):
    return tokens(logits - logits.mean(dim=1, keepdim=True)).amax(dim=1)


@head("normalize", at="F.normalize(tokens(logits)")
def tokens_normalised(logits, mask):
    return (F.normalize(tokens(logits), dim=-1) * mask.unsqueeze(-1)).max(dim=1).values


@head("logits are also returned", at="self.decoder(h)")
def logits_in_the_output(logits, mask):
    """An output class that carries logits along."""
    return {"pooled": (tokens(logits) * mask.unsqueeze(-1)).amax(dim=1), "logits": logits}


@head("also returned", at="weights =")
def activations_in_the_output(logits, mask):
    """Per-token weights for highlighting."""
    weights = tokens(logits) * mask.unsqueeze(-1)
    return weights.max(dim=1).values, weights


@head("over the vocabulary", at="weights.amax(dim=2)")
def token_saliency_too(logits, mask):
    """Term weights and token saliency from one tensor."""
    weights = tokens(logits) * mask.unsqueeze(-1)
    return weights.amax(dim=1), weights.amax(dim=2)


@encoder("maybe", "needs a gradient", parts={"gate": lambda: nn.Linear(D, 1)}, prefix="narrow_")
@miss(
    "two tensors that come from linears",
    parts={"gate": lambda: nn.Linear(D, V)},
    at="torch.sigmoid(self.gate(h))",
)
def learned_gate(self, h, mask):
    """A second projection gates every logit, or has one gate per token."""
    weights = tokens(self.decoder(h)) * torch.sigmoid(self.gate(h))
    return (weights * mask.unsqueeze(-1)).amax(dim=1)


@miss(
    "maximum with a tensor",
    inputs=(hidden, mask, lambda: torch.sin(torch.arange(B * S * V).float()).view(B, S, V)),
    at="torch.maximum(self.decoder(h), prior)",
)
def maximum_with_a_prior(self, h, mask, prior):
    """Logits bounded below by those of a teacher."""
    logits = torch.maximum(self.decoder(h), prior)
    return (tokens(logits) * mask.unsqueeze(-1)).amax(dim=1)


@miss(
    "weighted sum over the sequence",
    parts={"score": lambda: nn.Linear(D, 1)},
    at="torch.einsum(",
)
def attention_pooled(self, h, mask):
    """A learned attention over tokens instead of the max."""
    score = self.score(h).squeeze(-1).masked_fill(mask == 0, -1e9).softmax(-1)
    return torch.einsum("bs,bsv->bv", score, tokens(self.decoder(h)))


@head("log-sum-exp", at="torch.logsumexp(")
def temperature_logsumexp(logits, mask):
    logits = logits.masked_fill(mask.unsqueeze(-1) == 0, -1e4)
    return torch.log1p(torch.relu(0.1 * torch.logsumexp(logits / 0.1, dim=1)))


@head("penalties on all weights of the tokens: numbers, and no vectors of texts")
def penalties_alone(logits, mask):
    weights = tokens(logits) * mask.unsqueeze(-1)
    return weights.abs().sum(-1).mean() + weights.mean()


@head("mean pooling", at=".mean(dim=1)")
def power_mean(logits, mask):
    weights = tokens(logits) * mask.unsqueeze(-1)
    return (weights.pow(2).mean(dim=1) + 1e-6).sqrt()


@maybe("a second max over the vocabulary, which could follow the head")
def max_over_both(logits, mask):
    return (tokens(logits) * mask.unsqueeze(-1)).amax(dim=(1, 2))


@head("minimum over the sequence is that of the smallest", at="amin(dim=1)")
def min_over_sequence(logits, mask):
    """The weakest evidence: amin."""
    return tokens(logits.masked_fill(mask.unsqueeze(-1) == 0, 1e4)).amin(dim=1)


@head("median", at=".median(dim=1)")
def median_over_sequence(logits, mask):
    return tokens(logits).median(dim=1).values


@head("k-th smallest", at=".kthvalue(")
def second_largest(logits, mask):
    return (tokens(logits) * mask.unsqueeze(-1)).kthvalue(S - 1, dim=1).values


@head("2 largest", at=".topk(2, dim=1)")
def mean_of_top_two(logits, mask):
    return (tokens(logits) * mask.unsqueeze(-1)).topk(2, dim=1).values.mean(dim=1)


@head("only the positions", INFER, at=".argmax(dim=1)")
def argmax_positions(logits, mask):
    """The best token for each term is returned."""
    return logits.masked_fill(mask.unsqueeze(-1) == 0, -1e4).argmax(dim=1)


@head("running maximum", at=".cummax(dim=1)")
def cumulative_maximum(logits, mask):
    """Prefix representations for streaming."""
    return (tokens(logits) * mask.unsqueeze(-1)).cummax(dim=1).values


@head("windows", at="F.max_pool1d(")
def sliding_window_pool(logits, mask):
    weights = (tokens(logits) * mask.unsqueeze(-1)).transpose(1, 2)
    return F.max_pool1d(weights, kernel_size=3, stride=1).mean(dim=-1)


@encoder(
    "maybe",
    "the second matmul and its max are a head of their own, the first is not",
    parts={"out": lambda: nn.Linear(V, 5)},
)
def projected_after_activation(self, h, mask):
    return torch.relu(self.out(tokens(self.decoder(h)))).amax(dim=1)


@miss(
    "batched",
    inputs=(hidden, mask, lambda: torch.tensor([2, 0, 3])),
    parts={"decoder": nn.Module, "heads": lambda: nn.Parameter(torch.randn(4, D, V))},
    at="torch.bmm(h, self.heads[language])",
)
def weight_per_sequence(self, h, mask, language):
    """Language-specific projections gathered per sample, then bmm."""
    logits = torch.bmm(h, self.heads[language])
    return (tokens(logits) * mask.unsqueeze(-1)).amax(dim=1)


@miss("differs by token and by output", TRAIN, at="torch.log(-torch.log(uniform))")
def gumbel_noise(self, h, mask):
    logits = self.decoder(h)
    uniform = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
    logits = logits - torch.log(-torch.log(uniform))
    return (tokens(logits) * mask.unsqueeze(-1)).amax(dim=1)


@head("dropout is active", TRAIN, at="F.dropout(logits")
def dropout_on_logits(logits, mask):
    return (tokens(F.dropout(logits, 0.3, training=True)) * mask.unsqueeze(-1)).amax(dim=1)


@head("batch_norm", TRAIN, at="F.batch_norm(")
def batch_norm_on_logits(logits, mask):
    flat = F.batch_norm(logits.flatten(0, 1), None, None, training=True)
    return (tokens(flat.view_as(logits)) * mask.unsqueeze(-1)).amax(dim=1)


@formula(
    "no_rewrite",
    "logits are torch.int64",
    INFER,
    inputs={
        "h": lambda: torch.arange(B * S * D).view(B, S, D) % 17 - 8,
        "w": lambda: torch.arange(V * D).view(V, D) % 11 - 5,
    },
    at="amax(dim=1)",
)
def integer_logits(h, mask, w):
    """An int8 model that accumulates in int64."""
    return torch.relu((h @ w.T) * mask.unsqueeze(-1)).amax(dim=1)


@formula("no_rewrite", "the scale of what is quantised")
def quantised_activations(h, mask, w):
    """The input of an int8 layer."""
    hidden = torch.relu(h @ w.T)
    scale = hidden.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return (hidden / scale).round(), scale


@formula("no_rewrite", "how sure a router is")
def one_expert_a_token(h, mask, w):
    """A switch transformer."""
    gate, expert = (h @ w.T).softmax(-1).max(-1)
    return torch.where(expert == 1, gate, 0.0)


@formula("no_rewrite", "nan_to_num after the linear is no step", at="nan_to_num(")
def cleaned_logits(h, mask, w):
    return torch.nan_to_num(h @ w.T).relu().log1p().amax(dim=1)


@formula("no_rewrite", "zeros_like fills a tensor with one number", at="zeros_like(")
def a_token_of_zeros(h, mask, w):
    logits = h @ w.T
    return torch.cat([logits, torch.zeros_like(logits[:, :1])], 1).amax(dim=1)


@formula(
    "no_rewrite",
    "are complex",
    INFER,
    inputs={"real": weight, "imaginary": lambda: weight(seed=42)},
    at="logits.abs()",
)
def complex_logits(h, mask, real, imaginary):
    """The modulus of a complex projection."""
    logits = torch.complex(h, h.flip(-1)) @ torch.complex(real, imaginary).T
    return (torch.log1p(logits.abs()) * mask.unsqueeze(-1)).amax(dim=1)


@head("differs by token and by output", TRAIN, at=".detach()")
def straight_through(logits, mask):
    weights = tokens(logits) * mask.unsqueeze(-1)
    return (weights + ((weights > 0.5).float() - weights).detach()).amax(dim=1)


@head("gradient of its own", TRAIN, at="Half.apply(logits)")
def gradient_rescaled(logits, mask):
    """An autograd.Function that halves the gradient of the logits."""

    return (tokens(Half.apply(logits)) * mask.unsqueeze(-1)).amax(dim=1)


@head("index_add", at="words.index_add(")
def words_summed_before_max(logits, mask):
    """Sub-word logits are added up to words by index_add."""
    word = torch.tensor([0, 0, 1, 1, 1, 2, 3])
    words = logits.new_zeros(B, 4, V)
    return words.index_add(1, word, tokens(logits) * mask.unsqueeze(-1)).amax(dim=1)


@head("cumsum", at="logits.cumsum(dim=1)")
def cumulative_logits(logits, mask):
    return tokens(logits.cumsum(dim=1) * mask.unsqueeze(-1)).amax(dim=1)


each(
    activated("maybe", "not monotone, or falling: exact per token, wrong with the max first"),
    negative_scale=lambda z: tokens(-z),
    square_without_relu=lambda z: torch.log1p(z**2),
    cosine_activation=lambda z: tokens(torch.cos(z)),
    gelu_activation=lambda z: F.gelu(z / 2),
    inverted_activation=lambda z: 1.0 / (1.0 + torch.relu(z)),
)
each(
    activated("no_rewrite", "erfc after the linear is no step", at="torch.erfc(z)"),
    monotone_but_no_step=lambda z: 1.0 - torch.erfc(z),
)


@maybe("a masked token counts with log1p(0.5), not with 0")
def masked_token_not_zero(logits, mask):
    """The mask before an activation that is not 0 at 0."""
    return torch.log1p(torch.relu(logits * mask.unsqueeze(-1)) + 0.5).amax(dim=1)


@miss(
    "a weight for its own term alone",
    inputs=(hidden, ids),
    parts={"weigh": lambda: nn.Linear(D, 1)},
    at=".scatter(",
)
def weights_of_own_terms(self, h, terms):
    """BGE-M3: one weight per token, scattered into a row of the vocabulary per token, then the maximum."""
    weights = torch.relu(self.weigh(h))
    rows = weights.new_zeros(*terms.shape, V).scatter(-1, terms.unsqueeze(-1), weights)
    return rows.max(dim=1).values


@miss(
    "a number for all tokens (scale)",
    TRAIN,
    parts={"scale": lambda: nn.Parameter(torch.tensor(1.3))},
    at="* self.scale)",
)
def learned_scale_of_activations(self, h, mask):
    """One number for all activations, trained, between the rectifier and the logarithm."""
    weights = torch.log1p(torch.relu(self.decoder(h)) * self.scale)
    return (weights * mask.unsqueeze(-1)).amax(dim=1)


@miss("a per-token operand", TRAIN, parts={"importance": lambda: nn.Linear(D, 1)}, at="* matters)")
def learned_importance_of_tokens(self, h, mask):
    """EPIC: a separate linear layer computes the importance of a token."""
    matters = torch.log1p(F.softplus(self.importance(h)))
    return tokens(self.decoder(h) * mask.unsqueeze(-1) * matters).amax(dim=1)


@miss(
    "a per-token operand (logsumexp) is made of what it is applied to",
    TRAIN,
    at="logits - logits.logsumexp",
)
def logits_less_their_logsumexp(self, h, mask):
    """Log-probabilities in the place of logits."""
    logits = self.decoder(h)
    likely = logits - logits.logsumexp(-1, keepdim=True)
    return (tokens(likely) * mask.unsqueeze(-1)).amax(dim=1)


@head("only the positions", at="weights.argmax(")
def other_weights_where_largest(logits, mask):
    """weights are gathered at the positions of another tensor's maxima"""
    weights = tokens(logits) * mask.unsqueeze(-1)
    return (2 - weights).gather(1, weights.argmax(dim=1, keepdim=True)).squeeze(1)


@head("a sort keeps every position", at="torch.sort(")
def second_of_a_sort(logits, mask):
    return torch.sort(tokens(logits) * mask.unsqueeze(-1), dim=1, descending=True).values[:, 1]


@head("a norm over the sequence", at="vector_norm(")
def norm_of_infinite_order(logits, mask):
    return torch.linalg.vector_norm(tokens(logits) * mask.unsqueeze(-1), float("inf"), dim=1)


@head("end to end", at=".index_reduce(")
def packed_sequences(logits, mask):
    """tokens end to end, reduced by sequence"""
    owner = torch.arange(logits.size(0)).repeat_interleave(logits.size(1))
    weights = tokens(logits).flatten(0, 1)
    return torch.zeros_like(logits[:, 0]).index_reduce(0, owner, weights, "amax")


@miss(
    "mul spreads the values",
    inputs=(lambda: hidden(shape=(1, S, D)), mask),
    at="m.unsqueeze(-1)",
)
def one_sequence_under_several_masks(self, h, m):
    """hidden [1, S, D], masks [B, S]: spans of one document"""
    return (tokens(self.decoder(h)) * m.unsqueeze(-1)).amax(dim=1)


@head("may be negative", modes=INFER, at="* importance")
def importance_written_to(logits, mask):
    """Terms that count against a text, assigned."""
    importance = torch.linspace(-1, 1, V).abs()
    importance[3:9] = -2.0
    return (tokens(logits) * importance * mask.unsqueeze(-1)).amax(1)


@head("neither is a weight", modes=INFER, at="torch.bmm(")
def weight_written_after_it_was_repeated(logits, mask):
    """The product uses a copy of the weight from before the write."""
    turned = torch.linspace(-1, 1, V * V).view(V, V)
    repeated = turned.repeat(B, 1, 1)
    turned.zero_()
    return (tokens(torch.bmm(logits, repeated)) * mask.unsqueeze(-1)).amax(1)


@head("a product of its own", at="functools.reduce(")
def tokens_projected_one_by_one(logits, mask):
    """rows of the logits, each activated in a loop"""
    return functools.reduce(
        torch.maximum, [tokens(logits[:, i]) * mask[:, i, None] for i in range(logits.size(1))]
    )


@head("some of the tokens", modes=INFER, at="functools.reduce(")
def maximum_of_some_tokens(logits, mask):
    """CLS does not count"""
    weights = tokens(logits) * mask.unsqueeze(-1)
    return functools.reduce(torch.maximum, weights.unbind(1)[1:])


@head("maximum is also returned", modes=INFER, at="before = functools.reduce(")
def best_so_far(logits, mask):
    """early exit: the result without the last token"""
    first, *rest = (tokens(logits) * mask.unsqueeze(-1)).unbind(1)
    before = functools.reduce(torch.maximum, rest[:-1], first)
    return torch.maximum(before, rest[-1]), before


@head("stack after the linear", modes=INFER, at="torch.stack(")
def stacked_backwards(logits, mask):
    """the position is that of another token"""
    weights = tokens(logits) * mask.unsqueeze(-1)
    return torch.stack(weights.unbind(1)[::-1]).max(0)


@head("differs by token and by output", at="torch.einsum(")
def einsum_of_tokens_and_terms(logits, mask):
    noise = torch.linspace(0, 1, logits[0].numel()).view(logits.shape[1:])
    return torch.einsum("bsv,sv->bsv", tokens(logits), noise).amax(1)


@head("weighted sum over the sequence", mask_dtype=torch.float32, at="torch.einsum(")
def einsum_that_adds_up(logits, mask):
    return torch.einsum("bsv,bs->bv", tokens(logits), mask)


@miss(
    "stack after the linear is followed where all parts have the same weight",
    parts={"other": lambda: nn.Linear(D, V)},
    at="torch.stack(",
)
def heads_stacked(self, h, mask):
    """Weights of two heads over the vocabulary, and the larger one of each term."""
    logits = torch.stack([self.decoder(h), self.other(h)])
    return (tokens(logits) * mask.unsqueeze(-1)).amax((0, 2))


@miss(
    "conv1d is not followed as a product of two tensors",
    parts={"wide": lambda: nn.Conv1d(D, V, 3, padding=1)},
    at="self.wide(",
)
def convolution_of_width_three(self, h, mask):
    return (tokens(self.wide(h.mT).mT) * mask.unsqueeze(-1)).amax(1)


@miss(
    "addmm adds more than a bias",
    inputs=(hidden, mask, weight, lambda: weight(B * S, V)),
    at="torch.addmm(",
)
def logits_of_a_teacher_added(self, h, mask, w, other):
    logits = torch.addmm(other, h.flatten(0, 1), w.t())
    return (tokens(logits.view(B, S, V)) * mask.unsqueeze(-1)).amax(1)


@miss("scores of pairs, no terms", parts={"moves": lambda: nn.Parameter(weight(V, V).detach())})
def best_path(self, h, mask):
    """a step of Viterbi's algorithm, as in a conditional random field"""
    scores = self.decoder(h)
    return (scores[:, 0, :, None] + self.moves + scores[:, 1, None]).max(dim=1)


@miss("vectors of texts, no terms")
def largest_features(self, h, mask):
    """max pooling of an encoder, whose last layer ends in a norm"""
    features = F.layer_norm(h + F.gelu(self.decoder(h))[..., :D], (D,))
    return features.masked_fill(mask.unsqueeze(-1) == 0, -1e9).amax(dim=1)


@miss("what an action is worth, no terms")
def best_action(self, h, mask):
    """Q-learning"""
    return torch.relu(self.decoder(h)).amax(dim=-1)


@miss("groups of features, no tokens")
def largest_of_each_group(self, h, mask):
    """the encoder of a GroupMax autoencoder"""
    return torch.relu(self.decoder(h))[..., 1:].unflatten(-1, (-1, 2)).max(dim=-1)


def log_sum_exp(logits, dim):
    top = logits.max(dim=dim, keepdim=True).values
    return (logits - top.detach()).exp().sum(dim=dim).log() + top.squeeze(dim)


@head("subtracted so that nothing overflows")
def written_out_cross_entropy(logits, mask):
    return (log_sum_exp(logits, -1) - logits[..., 3]).mean()


@head("subtracted so that nothing overflows")
def written_out_log_sum_exp(logits, mask):
    return log_sum_exp(logits + (1 - mask.unsqueeze(-1)) * -1e4, 1)


@miss("distances of pairs, no terms")
def hardest_pairs(self, h, mask):
    """a triplet loss of the furthest similar pair and the nearest dissimilar pair"""
    vectors = self.decoder(h[:, 0])
    distances, alike = torch.cdist(vectors, vectors), torch.eye(B) > 0
    furthest = torch.where(alike, distances, -1e9).amax(1)
    return torch.relu(furthest - torch.where(alike, 1e9, distances).amin(1) + 0.3).mean()
