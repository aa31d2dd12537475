"""Sparse autoencoders of each kind, written so that their training steps have the graphs of public libraries.

Trainers compile the whole step (`torch.compile(autoencoder.step)`), which returns the loss, its terms, the
reconstruction, the activations and the pre-activations.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, NEURONS, K = 8, 64, 4


@dataclasses.dataclass
class Step:
    """The results of a training step."""

    reconstruction: torch.Tensor
    activations: torch.Tensor
    pre: torch.Tensor
    loss: torch.Tensor
    losses: dict[str, torch.Tensor]


class Autoencoder(nn.Module):
    """The base class: the weights, and the training step that all kinds share."""

    def __init__(self, width: int = WIDTH, neurons: int = NEURONS):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.W_enc = nn.Parameter(torch.randn(width, neurons, generator=g) / width**0.5)
        self.W_dec = nn.Parameter(torch.randn(neurons, width, generator=g) / width**0.5)
        self.b_enc = nn.Parameter(0.1 * torch.randn(neurons, generator=g))
        self.b_dec = nn.Parameter(0.1 * torch.randn(width, generator=g))
        self.hook = nn.Identity()

    def centred(self, x: torch.Tensor) -> torch.Tensor:
        return self.hook(x.to(self.W_enc.dtype)) - self.b_dec * True

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pre = self.hook(self.centred(x) @ self.W_enc + self.b_enc)
        return self.hook(F.relu(pre)), pre

    def decode(self, f: torch.Tensor) -> torch.Tensor:
        return self.hook(f @ self.W_dec + self.b_dec)

    def terms(self, x, f, pre, y, dead) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x)[0])

    def step(self, x: torch.Tensor, dead: torch.Tensor | None = None) -> Step:
        f, pre = self.encode(x)
        y = self.decode(f)
        loss = F.mse_loss(y, x, reduction="none").sum(dim=-1).mean()
        losses = {"reconstruction": loss, **self.terms(x, f, pre, y, dead)}
        for name, term in losses.items():
            if name != "reconstruction":
                loss = loss + term
        return Step(y, f, pre, loss, losses)


class Standard(Autoencoder):
    """The ReLU autoencoder with an L1 loss of the activations, weighted by the norms of the decoder's rows."""

    def terms(self, x, f, pre, y, dead):
        weighted = f * self.W_dec.norm(dim=1)
        return {"l1": (0.1 * weighted.norm(p=1.0, dim=-1)).mean()}


def _near(z, threshold, width):
    offset = (z - threshold) / width
    return ((offset > -0.5) & (offset < 0.5)).to(z)


class _Jump(torch.autograd.Function):
    """JumpReLU: z where it is above the threshold, 0 elsewhere.

    The threshold's gradient is estimated with a rectangular kernel of the given width.
    """

    @staticmethod
    def forward(z, threshold, width):
        return (z * (z > threshold)).to(z)

    @staticmethod
    def setup_context(ctx, inputs, output):
        z, threshold, ctx.width = inputs
        ctx.save_for_backward(z, threshold)

    @staticmethod
    def backward(ctx, grad):
        z, threshold = ctx.saved_tensors
        slope = -(threshold / ctx.width) * _near(z, threshold, ctx.width)
        return (z > threshold) * grad, (slope * grad).sum(0), None


class _Above(_Jump):
    """The step function: 1 where z is above the threshold. Only the threshold gets a gradient."""

    @staticmethod
    def forward(z, threshold, width):
        return (z > threshold).to(z)

    @staticmethod
    def backward(ctx, grad):
        z, threshold = ctx.saved_tensors
        return None, (-(1.0 / ctx.width) * _near(z, threshold, ctx.width) * grad).sum(0), None


class JumpReLU(Autoencoder):
    """The JumpReLU autoencoder in training: each neuron's threshold is the exponential of a parameter.

    The loss has the number of active neurons (L0).
    """

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.log_threshold = nn.Parameter(torch.full_like(self.b_enc, -0.5))

    @property
    def threshold(self) -> torch.Tensor:
        return self.log_threshold.exp()

    def encode(self, x):
        pre = self.centred(x) @ self.W_enc + self.b_enc
        return _Jump.apply(pre, self.threshold, 0.5), pre

    def terms(self, x, f, pre, y, dead):
        count = _Above.apply(pre, self.threshold, 0.5).sum(dim=-1)
        return {"l0": (0.1 * count).mean()}


class JumpReLUInference(Autoencoder):
    """The JumpReLU autoencoder in inference: relu(pre) * (pre > threshold)."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.threshold = nn.Parameter(torch.full_like(self.b_enc, 0.6))

    def encode(self, x):
        pre = self.hook(self.centred(x) @ self.W_enc + self.b_enc)
        return self.hook(F.relu(pre) * (pre > self.threshold).to(pre.dtype)), pre


class Gated(Autoencoder):
    """The gated autoencoder: one projection decides which neurons are active.

    The same weights with other scales and biases give the values of the active neurons.
    """

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.r_mag = nn.Parameter(0.1 * torch.ones_like(self.b_enc))
        self.b_mag = nn.Parameter(torch.zeros_like(self.b_enc))

    def encode(self, x):
        x = self.centred(x)
        active = (x @ self.W_enc + self.b_enc > 0).to(x.dtype)
        pre = self.hook(x @ (self.W_enc * self.r_mag.exp()) + self.b_mag)
        return self.hook(active * F.relu(pre)), pre

    def terms(self, x, f, pre, y, dead):
        gate = torch.relu((x - self.b_dec * True) @ self.W_enc + self.b_enc)
        l1 = 0.1 * torch.sum(gate * self.W_dec.norm(dim=1), dim=-1).mean()
        again = gate @ self.W_dec + self.b_dec
        return {"l1": l1, "by the gate": (again - x).pow(2).sum(dim=-1).mean()}


class TopK(Autoencoder):
    """The TopK autoencoder, which keeps the k largest pre-activations of each row.

    Pre-activations are scaled as if the decoder's rows had norm 1. An auxiliary loss trains dead neurons to reconstruct
    the residual.
    """

    def activation(self, pre: torch.Tensor) -> torch.Tensor:
        values, indices = torch.topk(pre, k=K, dim=-1, sorted=False)
        f = torch.zeros_like(pre)
        f.scatter_(-1, indices, values.relu())
        return f

    def encode(self, x):
        pre = self.hook(self.centred(x) @ self.W_enc + self.b_enc)
        pre = pre * self.W_dec.norm(dim=-1)
        return self.hook(self.activation(pre)), pre

    def decode(self, f):
        return self.hook((f * (1 / self.W_dec.norm(dim=-1))) @ self.W_dec + self.b_dec)

    def terms(self, x, f, pre, y, dead):
        if dead is None or (number := int(dead.sum())) == 0:
            return {"dead": y.new_tensor(0.0)}
        rest = (x - y).detach()
        k = min(x.shape[-1] // 2, number)
        values, indices = torch.where(dead[None], pre, -torch.inf).topk(k, sorted=False)
        f = torch.zeros_like(pre)
        f.scatter_(-1, indices, values)
        return {"dead": (self.decode(f) - rest).pow(2).sum(dim=-1).mean()}


class BatchTopK(TopK):
    """The BatchTopK autoencoder, which keeps the largest activations of the whole batch, k per row on average."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.register_buffer("threshold", torch.tensor(0.0, dtype=torch.double))

    def activation(self, pre):
        f = pre.relu()
        flat = f.flatten()
        top = torch.topk(flat, int(K * f.shape[:-1].numel()), dim=-1)
        return torch.zeros_like(flat).scatter(-1, top.indices, top.values).reshape(f.shape)

    def step(self, x, dead=None):
        out = super().step(x, dead)
        with torch.no_grad():
            active = out.activations > 0
            if active.any():
                least = out.activations[active].min().to(self.threshold.dtype)
                self.threshold = 0.99 * self.threshold + 0.01 * least
        return out


class Matryoshka(BatchTopK):
    """The Matryoshka autoencoder: prefixes of the neurons have to reconstruct the input, too."""

    def step(self, x, dead=None):
        out = super().step(x, dead)
        inverse = 1 / self.W_dec.norm(dim=-1)
        for width in (NEURONS // 4, NEURONS // 2):
            f = out.activations[:, :width] * inverse[:width]
            y = f @ self.W_dec[:width] + self.b_dec
            out.loss = out.loss + F.mse_loss(y, x, reduction="none").sum(dim=-1).mean()
        return out


KINDS = (Standard, JumpReLU, Gated, TopK, BatchTopK, Matryoshka)
