"""The functions that the text of a program may call beside torch."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from entmax import entmax15, entmax_bisect, sparsemax
from torch import Tensor
from torch.utils.checkpoint import checkpoint as _checkpoint

__all__ = ["F", "entmax15", "entmax_bisect", "np", "sparsemax", "torch"]


# --- Regions: each takes a function and its arguments ---------------------------------------------


def checkpoint(fn, *args):
    return _checkpoint(fn, *args, use_reentrant=False)


def region(fn, *args):
    return torch.compiler.nested_compile_region(fn)(*args)


def branch(fn, *args):
    def other(*args):
        return fn(*args)

    return torch.cond(args[0].sum() > -1e30, fn, other, args)


def either(chosen, yes, no, operands):
    return (yes if chosen else no)(*operands)


def directly(fn, *args):
    return fn(*args)


# --- Documented deviations of rewrites -------------------------------------------------------------


def above_minus_infinity(x):
    return x.masked_fill(x == -torch.inf, 0.0)


def softmax_at_one(x, alpha, dim):
    one = alpha == 1
    return torch.where(one, x.softmax(dim), entmax_bisect(x, alpha.masked_fill(one, 2.0), dim))


# --- Autograd Functions ---------------------------------------------------------------------------


class StraightThrough(torch.autograd.Function):
    """A clip with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Reversed(torch.autograd.Function):
    """The identity with a negated gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Scaled(torch.autograd.Function):
    """A multiplication by 0.5 that writes to its argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


straight_through, reverse, scale_in_place = StraightThrough.apply, Reversed.apply, Scaled.apply


# --- Custom operators -----------------------------------------------------------------------------


@torch.library.custom_op("fuzz::negate_", mutates_args={"x"})
def negate_(x: Tensor) -> None:
    x.neg_()


@torch.library.custom_op("fuzz::keep", mutates_args=())
def keep(x: Tensor) -> Tensor:
    return x.clone()


keep.register_fake(torch.empty_like)
keep.register_autograd(lambda ctx, grad: grad)


# --- Subclasses -----------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    """A tensor subclass without behaviour."""


class Doubling(torch.Tensor):
    """A tensor subclass that doubles the results of linear layers and matmul."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func in (F.linear, torch.matmul) else out
