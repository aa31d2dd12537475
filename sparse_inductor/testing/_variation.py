"""Inputs drawn around given ones, such that a program that takes those should take these too."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

FEW = 4  # distinct values of a tensor that is a mask in floating point: 0 and -1e4, say
SPREAD = 0.3  # of the logarithm of a value's size
KEPT = 0.7  # share of ones in a mask


def varied(tree: Any, seed: int) -> Any:
    """The same tree with other tensors of the same shapes, dtypes and need for gradients.

    Numbers keep their sign and about their size (what is all one number is spread around it), tensors of few
    distinct values have them dealt anew, and flags (bool, or integers and inputs that are all 0 and 1) are drawn.
    Other integers stay: they may be indices.
    """
    generator = torch.Generator().manual_seed(seed)

    def one(t: torch.Tensor) -> torch.Tensor:
        learned = t.requires_grad or isinstance(t, torch.nn.Parameter)
        new = _varied(t.detach(), learned, generator)
        return new.to(t.dtype).requires_grad_(t.requires_grad)

    return pytree.tree_map_only(torch.Tensor, one, tree)


def _varied(t: torch.Tensor, learned: bool, generator: torch.Generator) -> torch.Tensor:
    if not t.numel() or t.is_complex() or t.layout != torch.strided:
        return t.clone()
    if not t.is_floating_point():
        return _flags(t, generator) if bool(((t == 0) | (t == 1)).all()) else t.clone()
    distinct = t.flatten()[:4096].unique()
    if distinct.numel() == 1 and not learned and float(distinct) in (0.0, 1.0):
        return _flags(t, generator)
    noise = torch.randn(t.shape, generator=generator).to(t.device, torch.float64)
    if distinct.numel() == 1:
        return t.double() + SPREAD * noise * max(1.0, abs(float(distinct)))
    if distinct.numel() <= FEW and t.numel() > FEW and not learned:
        order = torch.randperm(t.numel(), generator=generator).to(t.device)
        return t.flatten()[order].view(t.shape)
    return t.double() * torch.exp(SPREAD * noise)


def _flags(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return (torch.rand(t.shape, generator=generator) < KEPT).to(t.device)
