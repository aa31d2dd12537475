"""Copies of the entmax package and ports of it, as repositories carry them."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from types import ModuleType

import pytest
import torch
from torch.autograd import Function

from corpus.case import BOTH
from corpus.entmax.registry import INFER, H, attention, keep, normal, qkv, rows

entmax = pytest.importorskip("entmax")


def copy_of(name: str) -> ModuleType:
    """A module of the package under another name, which nothing was substituted in."""
    path = pathlib.Path(entmax.__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"vendored_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# torch 2.11 ends the graph at a class method where a gradient is wanted
MODES = BOTH if torch.__version__ >= (2, 13) else INFER
ACTIVATIONS, ROOTS = copy_of("activations"), copy_of("root_finding")


@attention(modes=MODES)
def copied_sparsemax(q, k, v, mask):
    """class methods, at which Dynamo ends the graph in training"""
    return ACTIVATIONS.sparsemax(q @ k.mT * 0.35, dim=-1) @ v


@attention(modes=MODES)
def copied_entmax15_module(q, k, v, mask):
    """Entmax15(dim=-1), k at least the number of keys"""
    scores = (q @ k.mT * 0.35).masked_fill(~mask[:, None, None], -1e9)
    return ACTIVATIONS.Entmax15(dim=-1, k=64)(scores) @ v


@attention(inputs=lambda: (*qkv(), normal((H,), 7)), modes=MODES)
def copied_bisection(q, k, v, raw):
    """a learned alpha a head"""
    alpha = 1 + torch.sigmoid(raw)[:, None, None]
    return ROOTS.entmax_bisect(q @ k.mT * 0.35, alpha) @ v


class ReadsItsSupport(Function):
    """OpenNMT-py's onmt.modules.sparse_activations: sizes squeezed in the backward, in place in the forward."""

    @staticmethod
    def forward(ctx, x, dim=0):
        ctx.dim = dim
        top, _ = x.max(dim=dim, keepdim=True)
        x -= top
        s, _ = torch.sort(x, descending=True, dim=dim)
        c = s.cumsum(dim) - 1
        n = torch.arange(1, x.size(dim) + 1, dtype=x.dtype).view(-1, *(1,) * (x.dim() - 1))
        inside = n.transpose(0, dim) * s > c
        size = inside.sum(dim=dim).unsqueeze(dim)
        tau = c.gather(dim, size - 1)
        tau /= size.to(x.dtype)
        p = torch.clamp(x - tau, min=0)
        ctx.save_for_backward(size, p)
        return p

    @staticmethod
    def backward(ctx, grad):
        size, p = ctx.saved_tensors
        inside = grad.clone()
        inside[p == 0] = 0
        mean = inside.sum(dim=ctx.dim) / size.to(p.dtype).squeeze()
        return torch.where(p != 0, inside - mean.unsqueeze(ctx.dim), inside), None


@attention(inputs=lambda: (*qkv(), keep()))
def opennmt(q, k, v, mask):
    """.squeeze() of sizes that no axis of one element may take part in"""
    return ReadsItsSupport.apply((q @ k.mT * 0.35).clone(), -1) @ v


@rows()
def tensorflow_addons(x):
    """flattened; tau is looked up by the numbers of the rows, and there are 15"""
    z = x.reshape(-1, x.shape[-1])
    s, _ = torch.topk(z, k=z.size(-1))
    c = torch.cumsum(s, -1)
    n = torch.arange(1, z.size(-1) + 1, dtype=z.dtype)
    size = (1 + n * s > c).to(torch.int32).sum(-1)
    at = torch.stack([torch.arange(z.size(0)), size.clamp(min=1).long() - 1], 1)
    tau = (c[at[:, 0], at[:, 1]] - 1) / size.to(z.dtype)
    return torch.maximum(torch.zeros((), dtype=z.dtype), z - tau[:, None]).reshape(x.shape)
