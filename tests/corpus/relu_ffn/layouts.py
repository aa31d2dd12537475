"""Layouts of the weights, such as one parameter [2, K, N] for gate and up, and of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from corpus.case import each, of
from corpus.relu_ffn.registry import (
    INFER,
    B,
    K,
    N,
    S,
    block,
    formula,
    function,
    program,
    tokens,
    weight,
)


class Fused(nn.Module):
    """One projection makes gate and up."""

    def __init__(self, split, bias: bool = False):
        super().__init__()
        torch.manual_seed(34)
        self.gate_up, self.down = nn.Linear(K, 2 * N, bias=bias), nn.Linear(N, K, bias=bias)
        self.split = split

    def forward(self, x):
        gate, up = self.split(self.gate_up(x))
        return self.down(F.relu(gate) * up)


def fused(bias: bool = False, **fields):
    """Register a block in which `split(z)` makes gate and up from one projection."""
    return function(lambda split: (Fused(split, bias), (tokens(),)), prefix="fused_", **fields)


each(
    fused(),
    chunk=lambda z: z.chunk(2, dim=-1),
    swapped=lambda z: z.chunk(2, dim=-1)[::-1],
    unbind=lambda z: z.unflatten(-1, (2, N)).unbind(-2),
    view_select=lambda z: (z.view(B, S, 2, N)[:, :, 0], z.view(B, S, 2, N)[:, :, 1]),
    pairs=lambda z: z.view(B, S, N, 2).unbind(-1),
    halves_first=lambda z: z.view(B, S, 2, N).permute(2, 0, 1, 3),
    dsplit=lambda z: torch.dsplit(z, 2),
    hsplit=lambda z: [t.view(B, S, N) for t in z.view(B * S, 2 * N).hsplit([N])],
)
each(
    fused(bias=True),
    slices=lambda z: (z[..., :N], z[..., N:]),
    interleaved=lambda z: (z[..., ::2], z[..., 1::2]),
    pairs_first=lambda z: z.unflatten(-1, (N, 2)).movedim(-1, 0).contiguous().unbind(0),
)


@fused(modes=INFER)
def half_in_place(z):
    """nn.ReLU(inplace=True) on one of the halves"""
    gate, up = z.chunk(2, -1)
    return gate.relu_(), up


@fused(modes=INFER)
def half_in_place_and_cut_again(z):
    F.relu_(z[..., :N])
    return z[..., :N], z[..., N:]


@block(modes=INFER)
def half_multiplied_in_place(x, m):
    """as little memory as possible: every step in place on a part of one buffer"""
    z = torch.cat((m.gate(x), m.up(x)), -1)
    z[..., :N].relu_()
    z[..., :N].mul_(z[..., N:])
    return m.down(z[..., :N])


def _put_together(apart):
    """Return a block whose projections are stacked or concatenated and split again by `apart(gate, up)`."""

    def both(x, m):
        gate, up = apart(m.gate(x), m.up(x))
        return m.down(F.relu(gate) * up)

    return both


each(
    of(block(), _put_together),
    stacked_entries=lambda g, u: torch.stack([g, u]),
    stacked_unbind=lambda g, u: torch.stack((g, u), -1).unbind(-1),
    stacked_chunk=lambda g, u: [h.squeeze(1) for h in torch.stack((g, u), 1).chunk(2, 1)],
    joined_chunk=lambda g, u: torch.cat((g, u), -1).chunk(2, -1),
    joined_tokens=lambda g, u: (torch.cat((g, u))[: len(g)], torch.cat((g, u))[len(g) :]),
    # of three the first two
    joined_narrow=lambda g, u: [torch.cat((g, u, g), -1).narrow(-1, i * N, N) for i in (0, 1)],
)


@block()
@block(dynamic=True, prefix="any_size_")
def product_where_the_gate_is_positive(x, m):
    gate = m.gate(x)
    return m.down(torch.where(gate > 0, gate * m.up(x), 0))


@block(dynamic=True)
def crosscoder(x, m):
    """one dictionary for the activations of several layers"""
    layers, decoder = x.unflatten(-1, (2, -1)), m.down.weight.t().reshape(N, 2, -1)
    f = F.relu(torch.einsum("bsld,nld->bsn", layers, m.up.weight.view(N, 2, -1)))
    return torch.einsum("bsn,nld->bsld", f, decoder)


@block()
def crosscoder_by_tensordot(x, m):
    """both by tensordot, the weights [D, N] and [N, D] as views"""
    layers, decoder = x.unflatten(-1, (2, -1)), m.down.weight.t().unflatten(1, (2, -1))
    encoder = m.up.weight.t().unflatten(0, (2, -1))
    return torch.tensordot(F.relu(torch.tensordot(layers, encoder, 2)), decoder, 1)


@block(dynamic=True)
def stacked_in_a_loop(x, m):
    h = torch.stack([f(x) for f in (m.gate, m.up)], dim=2)
    return m.down(F.relu(h[:, :, 0]) * h.select(2, 1))


each(
    formula(),
    # x @ W, weights stored [K, N] as JAX ports do.
    bare_matmul=lambda x, g, u, d: (torch.relu(x @ g) * (x @ u)) @ d,
    transposed_functional=lambda x, w, b, d: F.linear(F.relu(F.linear(x, w.t()) + b), d.T),
)


@formula()
def addmm_of_a_residual(x, b, w, d):
    """addmm adds the residual."""
    x = x.flatten(0, 1)
    return torch.addmm(x, torch.relu(torch.addmm(b, x, w)), d)


@formula(dynamic=True)
def addmm_at_any_size(x, b, w, c, d):
    """GPT-2: the sizes of the result are put together to a torch.Size."""
    h = torch.addmm(b, x.view(-1, x.size(-1)), w).view(x.size()[:-1] + (N,)).relu()
    return torch.addmm(c, h.view(-1, N), d).view(x.size())


@formula()
def addmm_with_numbers(x, b, w, c, d):
    """alpha and beta, and a bias that was expanded."""
    x = x.flatten(0, 1)
    h = torch.relu(torch.addmm(b.expand(B * S, N), x, w, beta=2.0, alpha=0.5))
    return torch.addmm(c[None], h, d, beta=0.5, alpha=-4.0)


@formula()
def baddbmm_of_shared_weights(x, b, w, d):
    """baddbmm, one weight for the batch; the result is added to its input."""
    h = torch.baddbmm(b, x, w.expand(B, K, N)).relu()
    return torch.baddbmm(x, h, d.expand(B, N, K), beta=0.5)


@formula(
    "no_rewrite",
    "out of the block itself",
    inputs={"d": lambda: weight(N, N, seed=36)},
    at="torch.addmm(h, torch.relu(h), d)",
)
def addmm_of_its_own_activations(x, w, d):
    h = x.flatten(0, 1) @ w
    return torch.addmm(h, torch.relu(h), d)


@program()
def sequential():
    """nn.Sequential with an in-place ReLU and a Dropout that is off."""
    torch.manual_seed(37)
    return nn.Sequential(
        nn.Linear(K, N), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(N, K)
    ), (tokens(),)


@program()
def other_output_width():
    """The down projection goes somewhere else than the input came from."""
    torch.manual_seed(39)
    return nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 5)), (tokens(),)


each(
    block(),
    flattened_between=lambda x, m: m.down(F.relu(m.up(x)).flatten(0, 1)),
    # .to(x.dtype), which does nothing here.
    cast_back=lambda x, m: m.down((F.relu(m.gate(x)) * m.up(x)).to(x.dtype).contiguous()),
)


class Convolutions(nn.Module):
    """Two convolutions over images; those of width 1 are linears over the channels."""

    def __init__(self, dims, width=1, **kwargs):
        super().__init__()
        torch.manual_seed(37)
        kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.up, self.down = kind(K, N, width, **kwargs), kind(N, K, 1)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


@program()
def convolutions_of_width_one():
    """Position-wise feed-forward as two 1x1 convolutions over [B, K, S]."""
    block = Convolutions(1)
    return lambda x: block(x.transpose(1, 2)).transpose(1, 2), (tokens(),)


each(
    program(),
    # A pointwise feed-forward block of a vision model.
    conv2d=lambda: (Convolutions(2), (tokens(shape=(B, K, 3, S)),)),
    # The same over video, without a bias, the padding given by name.
    conv3d=lambda: (Convolutions(3, bias=False, padding="same"), (tokens(shape=(B, K, 2, 3, S)),)),
)


@program("no_rewrite", "a window of 3 by 3")
def conv_window():
    """The first convolution looks at its neighbours."""
    return Convolutions(2, 3, padding=1), (tokens(shape=(B, K, 3, S)),)


@program("no_rewrite", "every second position is left out")
def conv_stride():
    return Convolutions(2, stride=2), (tokens(shape=(B, K, 4, 6)),)


VECTOR = {
    "x": lambda: tokens(shape=(K,)),
    "k": lambda: weight(N, K),
    "v": lambda: weight(K, N, seed=35),
    "r": lambda: weight(K, K, seed=36),
}


each(
    formula(inputs=VECTOR),
    one_token_matmul=lambda x, w, d: torch.relu(x @ w) @ d,
    one_token_mv=lambda x, k, v: torch.mv(v, torch.relu(k.mv(x) + v[0])) + x,
)


class Viewed(nn.Module):
    def forward(self, y):
        return y.view(y.shape[0], -1)


@program()
def convolutions_flattened():
    """Convolutions return contiguous [B, K, S], which view requires."""
    return nn.Sequential(Convolutions(1), Viewed()), (tokens(shape=(B, K, S)),)


@program(dynamic=True)
def convolutions_flattened_of_any_size():
    return nn.Sequential(Convolutions(2), Viewed()), (tokens(shape=(B, K, 3, S)),)


COLUMNS = {
    "x": lambda: tokens(shape=(K, B)),
    "g": lambda: weight(N, K),
    "u": lambda: weight(N, K, seed=35),
    "d": lambda: weight(K, N, seed=36),
}


each(
    formula(inputs=COLUMNS),
    # W2 relu(W1 x), every token a column
    columns=lambda x, g, d: d @ torch.relu(g @ x),
    columns_gated=lambda x, g, u, d: (d @ (F.relu(g @ x) * (u @ x))).view(-1),
    columns_with_bias=lambda x, g, u, d: d @ torch.relu(torch.matmul(g, x) + u[:, :1]),
)


def stacked(*sizes: int, **fields: Any) -> Callable[[Callable], Callable]:
    """Register `forward(x, w, down)` with a stack of weights of these sizes."""

    def make(forward: Callable) -> tuple:
        w = weight(sizes[0] * sizes[1], sizes[2]).detach().view(sizes).requires_grad_()
        return forward, (tokens(), w, weight(N, K, seed=36))

    return function(make, prefix="stacked_", **fields)


@stacked(2, K, N)
def einsum_first(x, w, down):
    """einsum to [2, B, S, N], taken apart by unpacking"""
    gate, up = torch.einsum("bsk,ekn->ebsn", x, w)
    return (F.relu(gate) * up) @ down


@stacked(2, N, K)
def einsum_inside(x, w, down):
    gate, up = torch.einsum("bsk,enk->bsen", x, w).unbind(2)
    return torch.einsum("bsn,nk->bsk", F.relu(gate).square() * up, down)


@stacked(K, 2, N)
def flax_order(x, w, down):
    """weights as [K, 2, N], the statistic of TwELL beside it"""
    h = torch.einsum("...k,kgn->...gn", x, w)
    a = F.relu(h[..., 0, :]) * h[..., -1, :]
    return a @ down, a.abs().mean()


@stacked(2, K, N)
def bmm_of_repeated_tokens(x, w, down):
    h = torch.bmm(x.reshape(1, -1, K).expand(2, -1, -1), w)
    return ((F.relu(h[0]) * h.select(0, 1)) @ down).view(B, S, K)


@stacked(2, N, K)
def broadcast_matmul(x, w, down):
    """matmul, tokens and weights with an axis to broadcast"""
    h = torch.matmul(x.unsqueeze(0), w.transpose(1, 2).unsqueeze(1))
    return (F.relu(h[0]) * h[1]) @ down


@stacked(3, K, N, expect="no_rewrite", why="also read by sum", at="h[2].sum()")
def third_is_read(x, w, down):
    """the third part of the joint projection is read, too"""
    h = torch.einsum("bsk,ekn->ebsn", x, w)
    return (F.relu(h[0]) * h[1]) @ down, h[2].sum()


@stacked(2, K, N, expect="no_rewrite", why="changed in place before", modes=(False,), at="x *= 2")
def tokens_written_in_between(x, w, down):
    x = x.clone()
    h = torch.einsum("bsk,ekn->ebsn", x, w)
    x *= 2
    return (F.relu(h[0]) * h[1]) @ down


@formula(inputs={"keep": lambda: (torch.arange(S) < 3).float()[:, None]})
def outputs_in_front_of_the_tokens(x, w, d, keep):
    """the layout that a subsequent convolution over the tokens needs"""
    return torch.einsum("bsn,nk->bks", F.relu(x @ w) * keep, d)
