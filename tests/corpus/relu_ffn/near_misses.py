"""Programs that look like the block and are not one."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from corpus.case import BOTH
from corpus.relu_ffn.registry import TRAIN, B, K, N, S, block, program, tokens, weight

miss = functools.partial(block, "no_rewrite")
seen = functools.partial(block, "no_rewrite")


@miss("gelu has no zeros")
def gelu_block(x, m):
    """BERT, GPT-2"""
    return m.down(F.gelu(m.up(x)))


@miss("silu has no zeros")
def silu_gate(x, m):
    """Llama"""
    return m.down(F.silu(m.gate(x)) * m.up(x))


@seen("leaky_relu is nowhere zero")
def leaky(x, m):
    """leaky_relu"""
    return m.down(F.leaky_relu(m.gate(x), 0.1) * m.up(x))


@seen("0 times what a mask drops may be NaN")
def filled_by_another_projection(x, m):
    """a predictor of which neurons are active"""
    return m.down(F.relu(m.up(x)).masked_fill(~(m.gate(x) > 0), 0.0))


@seen("0 times what a mask drops may be NaN")
def selected_by_another_projection(x, m):
    """the same by where()"""
    return m.down(torch.where(m.gate(x) > 0.1, m.up(x), 0.0))


@seen("the two axes of the decoder's outputs are apart in memory")
def crosscoder_of_turned_weights(x, m):
    """one dictionary for the activations of several layers, the decoder's weight by layer"""
    layers, decoder = x.unflatten(-1, (2, -1)), m.gate.weight.view(2, -1, K)
    f = F.relu(torch.einsum("bsld,nld->bsn", layers, m.up.weight[: N // 2].unflatten(1, (2, -1))))
    return torch.einsum("bsn,lnd->bsld", f, decoder)


@seen("each layer has neurons of its own")
def layers_of_their_own(x, m):
    """the activations are not summed over the layers"""
    layers = x.unflatten(-1, (2, -1))
    f = F.relu(torch.einsum("bsld,nld->bsln", layers, m.up.weight.view(N, 2, -1)))
    return torch.einsum("bsln,nld->bsld", f, m.gate.weight.view(N, 2, -1))


@seen("the layers' activations are summed over as well")
def neurons_on_two_axes(x, m):
    """the down projection is over both axes"""
    f = F.relu(torch.einsum("bsd,lnd->bsln", x, m.up.weight.view(2, -1, K)))
    return torch.einsum("bsln,lnd->bsd", f, m.gate.weight.view(2, -1, K))


@seen("the activations are returned")
def hidden_returned(x, m):
    """A model that returns its features."""
    h = F.relu(m.gate(x)) * m.up(x)
    return m.down(h), h


@seen("a norm between the activation and the down projection")
def norm_between(x, m):
    """Sub-LN"""
    h = F.relu(m.up(x))
    return m.down(F.layer_norm(h, (N,)))


@seen("dropout is on", modes=TRAIN)
def active_dropout(x, m):
    """Dropout in training draws a mask over every activation."""
    return m.down(m.drop(F.relu(m.up(x))))


@seen("the sum of the factors is not sparse")
def sum_of_branches(x, m):
    """relu(g) + u"""
    return m.down(F.relu(m.gate(x)) + m.up(x))


@seen("zero inputs become ones")
def shifted_up(x, m):
    """relu(u) + 1"""
    return m.down(F.relu(m.up(x)) + 1.0)


@seen("the activations mix over the tokens")
def mixed_tokens(x, m):
    """A cumulative sum over the sequence between the projections."""
    return m.down(F.relu(m.up(x)).cumsum(1))


@seen("two different inputs")
def two_inputs(x, m):
    """The up projection reads something else than the gate."""
    return m.down(F.relu(m.gate(x)) * m.up(m.norm(x)))


@miss("the rectifier is on the output")
def relu_outside(x, m):
    """relu(down(up(x)))"""
    return F.relu(m.down(m.up(x)))


@seen("the clamp leaves negative values")
def clamp_below_zero(x, m):
    """clamp(min=-1)"""
    return m.down(m.gate(x).clamp(min=-1.0) * m.up(x))


@seen("exp(relu(x)) is 1 where the rectifier is 0")
def exp_of_relu(x, m):
    """exp after relu"""
    return m.down(torch.exp(F.relu(m.up(x))))


@seen("the gradient is cut", modes=TRAIN)
def detached(x, m):
    """The hidden activations are detached."""
    return m.down(F.relu(m.up(x)).detach())


@seen("what comes after the rectifier learns nothing", modes=TRAIN)
def down_without_gradients(x, m):
    """with torch.no_grad() around the down projection alone"""
    h = F.relu(m.up(x))
    with torch.no_grad():
        y = m.down(h)
    return y + x


@program("no_rewrite", "the down weight is an activation: attention with relu, not a block")
def relu_attention():
    """Primer's cousin: relu(q k^T) v."""

    def attention(q, k, v):
        return torch.relu(q @ k.transpose(-1, -2)) @ v

    return attention, (tokens(), tokens(), tokens())


@program("no_rewrite", "a down projection for every expert")
def stacked_experts():
    """All experts of a mixture at once, as Llama 4 and GPT-OSS keep their weights."""

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Parameter(weight(3, K, N).detach())
            self.down = torch.nn.Parameter(weight(3, N, K, seed=37).detach())

        def forward(self, x):
            return torch.bmm(torch.relu(torch.bmm(x, self.up)).square(), self.down)

    return Experts(), (tokens(shape=(3, 5, K)),)


@program("no_rewrite", "the two linears are written to one another's input", modes=(False,))
def input_written():
    """x changes between the gate and the up projection."""

    def ffn(x, g, u, d):
        a = torch.relu(x @ g)
        x.mul_(2.0)
        return (a * (x @ u)) @ d

    def fresh(x, *rest):
        return ffn(x.clone(), *rest)

    return fresh, (tokens(), weight(K, N), weight(K, N, seed=35), weight(N, K, seed=36))


@seen("a statistic of every neuron needs the activations")
def per_neuron(x, m):
    """h.mean over the tokens."""
    h = F.relu(m.up(x))
    return m.down(h), h.mean((0, 1))


@seen("softmax over the neurons")
def softmax_of_relu(x, m):
    """softmax after relu"""
    return m.down(F.relu(m.up(x)).softmax(-1))


@seen("each projection has a draw of its own", modes=TRAIN)
def dropout_of_each_input(x, m):
    """nn.Dropout called for the gate and again for the up projection"""
    return m.down(F.relu(m.gate(m.drop(x))) * m.up(m.drop(x)))


@block(modes=(False,), pattern="relu_ffn")
def dropout_of_each_input_in_eval(x, m):
    """the same where it is off"""
    return m.down(F.relu(m.gate(m.drop(x))) * m.up(m.drop(x)))


@program("no_rewrite", "one sequence becomes two between the projections")
def sequences_spread_by_a_mask():
    """tokens [1, S, K], a mask [B, S, 1]"""

    def ffn(x, keep, u, d):
        return torch.relu(x @ u).masked_fill(~keep, 0.0) @ d

    keep = (torch.arange(S) < torch.tensor([[S], [3]]))[..., None]
    return ffn, (tokens(shape=(1, S, K)), keep, weight(K, N), weight(N, K, seed=36))


@program("no_rewrite", "zeros of another shape than what they bound")
def sequences_spread_by_zeros():
    """torch.maximum(h, zeros(B, S, N)) of one sequence"""

    def ffn(x, u, d):
        return torch.maximum(x @ u, torch.zeros(B, S, N)) @ d

    return ffn, (tokens(shape=(1, S, K)), weight(K, N), weight(N, K, seed=36))


@seen("one half of the tokens gates the other")
def halves_of_the_tokens(x, m):
    """chunk(2, 0), where gate and up would be chunk(2, -1)"""
    gate, up = m.up(x).view(B, S, N)[:, :4].reshape(-1, N).chunk(2, dim=0)
    return m.down(F.relu(gate) * up)


@seen("shifted tokens gate")
def tokens_shifted(x, m):
    """token shift after the projections"""
    return m.down(F.relu(m.gate(x))[:, 1:] * m.up(x)[:, :-1])


@block(modes=BOTH, pattern="relu_ffn")
def the_same_part_of_the_tokens(x, m):
    """the first token left out of both"""
    return m.down(F.relu(m.gate(x))[:, 1:] * m.up(x)[:, 1:])


@seen("the statistic is of tokens that the block leaves out")
def statistic_of_more_tokens(x, m):
    """h.mean() beside down(h[:, 1:])"""
    h = F.relu(m.up(x))
    return m.down(h[:, 1:]), h.mean()


@seen("the statistic is of neurons that the block leaves out")
def statistic_of_more_neurons(x, m):
    """(h != 0).sum(-1) beside a pruned down projection"""
    h = F.relu(m.up(x))
    return F.linear(h[..., :20], m.down.weight[:, :20]), (h != 0).sum(-1)


@seen("the statistic is in another order")
def statistic_of_each_token_in_another_order(x, m):
    """h.mean(-1) is [B, S], the block sees [S, B]"""
    h = F.relu(m.up(x))
    return m.down(h.transpose(0, 1)), h.mean(-1)


@block("no_rewrite", "an einsum of 3 tensors")
def product_in_the_einsum_of_the_projection(x, m):
    """bsn,bsn,dn->bsd"""
    return torch.einsum("bsn,bsn,dn->bsd", F.relu(m.gate(x)), m.up(x), m.down.weight)


@block("no_rewrite", "an assignment after the product")
def product_assigned_one(x, m):
    """what is assigned is not 0"""
    g = m.gate(x)
    h = g * m.up(x)
    h[g < 0] = 1.0
    return m.down(h)


@block("no_rewrite", "also read by sum")
def product_read_before_it_is_assigned(x, m):
    """what is read is not what the projection takes"""
    g = m.gate(x)
    h = g * m.up(x)
    before = h.sum()
    h[g < 0] = 0.0
    return m.down(h), before


@miss("one neuron of one sequence has to be found again", modes=(False,))
def one_neuron_of_one_sequence_ablated(x, m):
    """activation patching"""
    h = F.relu(m.up(x))
    h[0, :, 3] = 0.0
    return m.down(h)


@program("no_rewrite", "what is read overlaps what is written", modes=(False,))
def overlapping_parts_in_place():
    """the other factor shares a neuron with what was scaled in place"""
    wide, down = weight(2 * N, K), weight(K, N, seed=34)

    def f(x):
        h = F.linear(x, wide)
        gate, up = h[..., :N], h[..., N - 1 : -1]
        gate.mul_(2)
        return F.linear(F.relu(gate) * up, down)

    return f, (tokens(),)


@miss("a gate with a threshold of every neuron is two factors", modes=(False,))
def learned_threshold_of_a_gate(x, m):
    """FATReLU with a threshold of every neuron, in a gated block"""
    h = F.relu(m.gate(x))
    return m.down(torch.where(h > torch.linspace(0, 0.2, N), h, 0.0) * m.up(x))


@miss("a gate with a threshold that is a tensor is two factors")
def threshold_in_a_buffer(x, m):
    """FATReLU with its threshold in a buffer of one number, in a gated block"""
    h = m.gate(x)
    return m.down(torch.where(h > torch.linspace(0.1, 1, N)[0], h * m.up(x), 0.0))


@seen("half of each is taken")
def joined_parts_of_both(x, m):
    """the middle of a concatenation"""
    h = torch.cat((m.gate(x), m.up(x)), -1)
    return m.down(F.relu(h[..., :N]) * h[..., N // 2 : -N // 2])


@seen("the stack is read elsewhere")
def stack_that_is_measured(x, m):
    """the norm of both"""
    h = torch.stack((m.gate(x), m.up(x)))
    return m.down(F.relu(h[0]) * h[1]), h.norm()


@seen("the stack is written to")
def stack_that_is_written(x, m):
    """scaled in place"""
    h = torch.stack((m.gate(x), m.up(x)))
    h.mul_(torch.linspace(0, 1, N))
    return m.down(F.relu(h[0]) * h[1])
