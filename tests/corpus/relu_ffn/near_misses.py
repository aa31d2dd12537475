"""Programs that look like the block and are not one."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from corpus.case import each
from corpus.relu_ffn.registry import (
    BOTH,
    INFER,
    TRAIN,
    B,
    K,
    N,
    S,
    block,
    formula,
    program,
    tokens,
    weight,
)

miss = functools.partial(block, "no_rewrite")


@miss("gelu has no zeros")
def gelu_block(x, m):
    """BERT, GPT-2"""
    return m.down(F.gelu(m.up(x)))


@miss("leaky_relu(0.1)", at="F.leaky_relu(")
def leaky(x, m):
    return m.down(F.leaky_relu(m.gate(x), 0.1) * m.up(x))


@formula("no_rewrite", "its slope below 0 is a tensor", at="F.prelu(")
def learnt_slope(x, w, d, b):
    return F.prelu(x @ w, b[:1]) @ d


@miss("zero below some number: mul(-1.0) | relu", at="F.relu(-m.up(x))")
def negated(x, m):
    """the half of a CReLU that is zero above 0"""
    return m.down(F.relu(-m.up(x)))


@formula("no_rewrite", "a comparison (gt) of another value", at="torch.where(")
def prolu(x, w, d, b):
    """ProLU: projections that are positive with and without their bias"""
    z = x @ w
    return torch.where((z > 0) & (z + b > 0), z, 0.0) @ d


@miss("abs is not monotone", at=".abs()")
def hard_threshold(x, m):
    """the elements of large magnitude, as their comparison with a threshold selects them"""
    z = m.up(x)
    return m.down(z * (z.abs() > m.gate.weight.abs().amax(-1)))


@miss("rounded to a range around 0, which rectifies nothing", modes=INFER)
def quantised_activations(x, m):
    return m.down((m.up(x) * 16).clamp(-128, 127) / 16)


@miss("the down projection is a vector", at="m.down.weight[0]")
def one_number_a_token(x, m):
    return F.relu(m.up(x)) @ m.down.weight[0]


@miss("over several axes at once", at="bsln,lnd->bsd")
def neurons_on_two_axes(x, m):
    """the down projection is over both axes"""
    f = F.relu(torch.einsum("bsd,lnd->bsln", x, m.up.weight.view(2, -1, K)))
    return torch.einsum("bsln,lnd->bsd", f, m.gate.weight.view(2, -1, K))


@miss("activations are also returned", at="h =")
def hidden_returned(x, m):
    h = F.relu(m.gate(x)) * m.up(x)
    return m.down(h), h


@miss("layer_norm", at="F.layer_norm(")
def norm_between(x, m):
    """Sub-LN"""
    h = F.relu(m.up(x))
    return m.down(F.layer_norm(h, (N,)))


@miss("add combines two tensors", at="+ m.up(x)")
def sum_of_branches(x, m):
    return m.down(F.relu(m.gate(x)) + m.up(x))


@miss("cumsum", at=".cumsum(1)")
def mixed_tokens(x, m):
    return m.down(F.relu(m.up(x)).cumsum(1))


@miss("read different inputs", at="m.norm(x)")
def two_inputs(x, m):
    return m.down(F.relu(m.gate(x)) * m.up(m.norm(x)))


@miss("the rectifier is on the output")
def relu_outside(x, m):
    return F.relu(m.down(m.up(x)))


@miss("clamp_min(-1.0)", at=".clamp(min=-1.0)")
def clamp_below_zero(x, m):
    return m.down(m.gate(x).clamp(min=-1.0) * m.up(x))


@miss("relu | exp", at="torch.exp(")
def exp_of_relu(x, m):
    return m.down(torch.exp(F.relu(m.up(x))))


@miss("detach()", modes=TRAIN, at=".detach()")
def detached(x, m):
    return m.down(F.relu(m.up(x)).detach())


@miss("changed in place through a view", modes=TRAIN, at=".data.mul_(")
def written_through_data(x, m):
    """the gradient of relu reads what is written; in inference it is a block with another step"""
    h = F.relu(m.up(x))
    h.data.mul_(2)
    return m.down(h)


block(modes=INFER)(written_through_data)


@miss("grad mode changes", modes=TRAIN, at="y = m.down(h)")
def down_without_gradients(x, m):
    """with torch.no_grad() around the down projection alone"""
    h = F.relu(m.up(x))
    with torch.no_grad():
        y = m.down(h)
    return y + x


@formula(
    "no_rewrite",
    "rectified scores",
    inputs={"q": tokens, "k": tokens, "v": tokens},
    at="torch.relu(q @ k",
)
def relu_attention(q, k, v):
    """Primer's cousin: relu(q k^T) v."""
    return torch.relu(q @ k.transpose(-1, -2)) @ v


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Parameter(weight(3, K, N).detach())
        self.down = torch.nn.Parameter(weight(3, N, K, seed=37).detach())

    def forward(self, x):
        return torch.bmm(torch.relu(torch.bmm(x, self.up)).square(), self.down)


@program("no_rewrite", "every expert", at="torch.bmm(torch.relu(")
def stacked_experts():
    """All experts of a mixture at once, as Llama 4 and GPT-OSS keep their weights."""
    return Experts(), (tokens(shape=(3, 5, K)),)


@program("no_rewrite", "a weight of its own", at="torch.relu(torch.bmm(")
def one_of_stacked_encoders():
    """a transcoder for each layer, all of them encoded at once"""
    experts = Experts()
    experts.forward = lambda x: torch.relu(torch.bmm(x, experts.up))[1] @ experts.down[1]
    return experts, (tokens(shape=(3, 5, K)),)


class WeighedExperts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(K, 3)
        self.up = torch.nn.Parameter(weight(3, K, N).detach())
        self.down = torch.nn.Parameter(weight(3, N, K, seed=37).detach())

    def forward(self, x):
        h = torch.relu(torch.einsum("btd,edn->bten", x, self.up))
        weighed = h * self.router(x).softmax(-1).unsqueeze(-1)
        return torch.einsum("bten,end->btd", weighed, self.down)


@program("no_rewrite", "over several axes at once", at="bten,end->btd")
def weighed_experts():
    """a mixture of all experts, weighed by a softmax"""
    return WeighedExperts(), (tokens(),)


@formula("no_rewrite", "read different inputs", modes=INFER, at="(x @ u)")
def input_written(x, g, u, d):
    x = x.clone()
    a = torch.relu(x @ g)
    x.mul_(2.0)
    return (a * (x @ u)) @ d


@miss("every neuron over the tokens", at="h.mean((0, 1))")
def per_neuron(x, m):
    h = F.relu(m.up(x))
    return m.down(h), h.mean((0, 1))


@block(modes=INFER)
@miss("read different inputs", modes=TRAIN, at="m.drop(x)")
def dropout_of_each_input(x, m):
    """nn.Dropout called for the gate and again for the up projection"""
    return m.down(F.relu(m.gate(m.drop(x))) * m.up(m.drop(x)))


ONE_SEQUENCE = {"x": lambda: tokens(shape=(1, S, K))}


@formula("no_rewrite", "masked_fill spreads", inputs=ONE_SEQUENCE, at=".masked_fill(")
def sequences_spread_by_a_mask(x, w, d):
    """tokens [1, S, K], a mask [B, S, 1]"""
    keep = (torch.arange(S) < torch.tensor([[S], [3]]))[..., None]
    return torch.relu(x @ w).masked_fill(~keep, 0.0) @ d


@formula("no_rewrite", "maximum spreads", inputs=ONE_SEQUENCE, at="torch.maximum(")
def sequences_spread_by_zeros(x, w, d):
    """torch.maximum(h, zeros(B, S, N)) of one sequence"""
    return torch.maximum(x @ w, torch.zeros(B, S, N)) @ d


@miss("read different inputs", at="m.up(x)")
def halves_of_the_tokens(x, m):
    """chunk(2, 0), where gate and up would be chunk(2, -1)"""
    gate, up = m.up(x).view(B, S, N)[:, :4].reshape(-1, N).chunk(2, dim=0)
    return m.down(F.relu(gate) * up)


@miss("read different inputs", at="m.up(x)")
def tokens_shifted(x, m):
    return m.down(F.relu(m.gate(x))[:, 1:] * m.up(x)[:, :-1])


@block(modes=BOTH, pattern="relu_ffn")
def the_same_part_of_the_tokens(x, m):
    """the first token left out of both"""
    return m.down(F.relu(m.gate(x))[:, 1:] * m.up(x)[:, 1:])


@miss("also read by ne", at="h != 0")
def statistic_of_more_neurons(x, m):
    """(h != 0).sum(-1) beside a pruned down projection"""
    h = F.relu(m.up(x))
    return F.linear(h[..., :20], m.down.weight[:, :20]), (h != 0).sum(-1)


@miss("also read by mean", at="h.mean(-1)")
def statistic_of_each_token_in_another_order(x, m):
    """h.mean(-1) is [B, S], the block sees [S, B]"""
    h = F.relu(m.up(x))
    return m.down(h.transpose(0, 1)), h.mean(-1)


@block("no_rewrite", "an einsum of 3 tensors", at="torch.einsum(")
def product_in_the_einsum_of_the_projection(x, m):
    return torch.einsum("bsn,bsn,dn->bsd", F.relu(m.gate(x)), m.up(x), m.down.weight)


@block("no_rewrite", "an assignment after", at="h[g < 0] = 1.0")
def product_assigned_one(x, m):
    """the assigned value is not 0"""
    g = m.gate(x)
    h = g * m.up(x)
    h[g < 0] = 1.0
    return m.down(h)


@block("no_rewrite", "also read by sum", at="before = h.sum()")
def product_read_before_it_is_assigned(x, m):
    """the sum reads other values than the projection"""
    g = m.gate(x)
    h = g * m.up(x)
    before = h.sum()
    h[g < 0] = 0.0
    return m.down(h), before


@miss("single elements", modes=INFER, at="h[0, :, 3] = 0.0")
def one_neuron_of_one_sequence_ablated(x, m):
    """activation patching"""
    h = F.relu(m.up(x))
    h[0, :, 3] = 0.0
    return m.down(h)


@miss("relu is changed in place by _foreach_mul", modes=INFER, at="torch._foreach_mul_(")
def scaled_in_a_list(x, m):
    """A write by a call that does not return the written tensor"""
    h = F.relu(m.up(x))
    torch._foreach_mul_([h], 2.0)
    return m.down(h)


@miss("changed in place through a view of it", modes=INFER, at=".relu_()")
def rectified_through_a_view(x, m):
    """the statement rectifies a view of the activations, with the tokens flattened"""
    h = m.up(x)
    h.view(-1, N).relu_()
    return m.down(h)


@miss("changed in place through a view of it", modes=INFER, at=".relu_()")
def rectified_token_by_token(x, m):
    h = m.up(x)
    for token in h.unbind(1):
        token.relu_()
    return m.down(h)


@program("no_rewrite", "getitem is changed in place", modes=INFER, at="gate.mul_(2)")
def overlapping_parts_in_place():
    """the other factor shares a neuron with the part that was scaled in place"""
    wide, down = weight(2 * N, K), weight(K, N, seed=34)

    def f(x):
        h = F.linear(x, wide)
        gate, up = h[..., :N], h[..., N - 1 : -1]
        gate.mul_(2)
        return F.linear(F.relu(gate) * up, down)

    return f, (tokens(),)


@miss("the largest neurons of each token", modes=INFER)
def first_of_the_largest_neurons(x, m):
    """a Matryoshka autoencoder with a TopK, whose first group is narrow"""
    pre = m.up(x)
    values, indices = pre.topk(4)
    h = torch.zeros_like(pre).scatter(-1, indices, values.relu())
    return F.linear(h[..., :K], m.down.weight[:, :K])


@miss("a factor of its own", modes=INFER, at="h > torch.linspace(0, 0.2, N)")
def learned_threshold_of_a_gate(x, m):
    """FATReLU with a threshold of every neuron, in a gated block"""
    h = F.relu(m.gate(x))
    return m.down(torch.where(h > torch.linspace(0, 0.2, N), h, 0.0) * m.up(x))


@miss("cat puts the values beside an input of the graph", at="torch.cat(")
def beside_the_input(x, m):
    """DenseNet: a part of what the projection reads comes from no other one"""
    h = torch.cat((x, F.relu(m.up(x))), -1)
    return F.linear(h, torch.cat((m.down.weight, m.gate.weight[:K]), -1))


@miss("cat after the linear", at="torch.cat(")
def joined_parts_of_both(x, m):
    """the middle of a concatenation"""
    h = torch.cat((m.gate(x), m.up(x)), -1)
    return m.down(F.relu(h[..., :N]) * h[..., N // 2 : -N // 2])


@miss("stack after the linear", at="torch.stack(")
def stack_that_is_written(x, m):
    """scaled in place"""
    h = torch.stack((m.gate(x), m.up(x)))
    h.mul_(torch.linspace(0, 1, N))
    return m.down(F.relu(h[0]) * h[1])


@miss("a factor of its own", at="torch.where(")
def threshold_in_a_buffer(x, m):
    """FATReLU with its threshold in a buffer of one number, in a gated block"""
    h = m.gate(x)
    return m.down(torch.where(h > torch.linspace(0.1, 1, N)[0], h * m.up(x), 0.0))


@miss(
    "the down projection is in torch.float32",
    dtype=torch.bfloat16,
    precision=torch.bfloat16,
    at="F.linear(h",
)
def down_projection_kept_in_fp32(x, m):
    """T5 in bf16"""
    h = F.relu(m.up(x))
    down = m.down.weight.float()
    if down.dtype != h.dtype:
        h = h.to(down.dtype)
    return F.linear(h, down)


@miss(
    "the down projection is in torch.float32",
    dtype=torch.bfloat16,
    precision=torch.bfloat16,
    at="F.linear(h",
)
def gated_down_projection_kept_in_fp32(x, m):
    """mT5 with a rectified gate, in bf16"""
    h = F.relu(m.gate(x)) * m.up(x)
    return F.linear(h.float(), m.down.weight.float())


@formula(
    "no_rewrite",
    "probabilities weigh the nodes",
    inputs={
        "x": lambda: tokens(shape=(B, K)),
        "w": lambda: weight(K, 8),
        "c": lambda: weight(8, 2),
    },
)
def graph_attention(x, w, c):
    """scores of pairs where there is an edge"""
    nodes = x @ w
    scores = F.leaky_relu(nodes @ c[:, :1] + (nodes @ c[:, 1:]).T, 0.2)
    return torch.where(torch.eye(B) > 0, scores, -9e15).softmax(-1) @ nodes


def scaled_to_eight_bits(h):
    scale = 127 / h.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (h * scale).round().clamp(-128, 127) / scale


each(
    miss("gelu and silu have no zeros"),
    # the divisor is kept away from zero
    quantised_silu=lambda x, m: m.down(scaled_to_eight_bits(F.silu(m.gate(x)) * m.up(x))),
    gelu_of_unit_length=lambda x, m: m.down(
        (h := F.gelu(m.up(x))) / h.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    ),
    # a comparison says which tokens are padding
    gelu_without_padding=lambda x, m: m.down(
        torch.where((torch.arange(S) < 3)[:, None], F.gelu(m.up(x)), 0.0)
    ),
)


class Swish(torch.autograd.Function):
    """Keeps its input instead of the intermediate results."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        p = torch.sigmoid(x)
        return grad * p * (1 + x * (1 - p))


class SoftShrinkage(torch.autograd.Function):
    """Zero around 0, by a function that is no step of an operator."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.softshrink(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() > 0.5)


class ClampedRelu(torch.autograd.Function):
    """The ReLU of PyTorch's tutorial."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x >= 0)


each(
    miss("nothing in it rectifies", modes=TRAIN),
    function_without_zeros=lambda x, m: m.down(Swish.apply(m.up(x))),
)
each(
    miss("cannot be seen through", modes=TRAIN, at="ClampedRelu.apply("),
    function_with_zeros=lambda x, m: m.down(ClampedRelu.apply(m.up(x))),
)
each(
    miss("cannot be seen through", modes=TRAIN, at="SoftShrinkage.apply("),
    function_with_zeros_in_the_middle=lambda x, m: m.down(SoftShrinkage.apply(m.up(x))),
)


@miss("texts are scored against texts")
def first_tokens_scored(x, m):
    """naver/splade aggregated by "cls", tevatron's pooling "last": in-batch scores"""
    kept = (torch.arange(S) < 3)[:, None]
    queries, documents = ((torch.log1p(F.relu(m.up(t))) * kept)[:, 0] for t in (x, x.flip(0)))
    return queries @ documents.T
