"""Random variations of given inputs, made so that a program that accepts the inputs should accept the variations."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

FEW = 4  # the most distinct values of a floating-point mask, for example 0 and -1e4
SPREAD = 0.3  # standard deviation of the logarithm of a value's magnitude
KEPT = 0.7  # probability of a one in a mask


def varied(tree: Any, seed: int) -> Any:
    """Return the same tree with other tensors of the same shapes, dtypes and `requires_grad`.

    Values keep their sign and approximate magnitude. A constant tensor gets values around the constant. Inputs with
    few distinct values are permuted. Flags (bool, integers that are all 0 or 1, and floating-point inputs that are 0 or
    1 throughout) are drawn at random. Other integers are unchanged, because they may be indices.
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
