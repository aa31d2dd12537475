"""Products with a tensor that is mostly zeros, whose entries are found on the device: activations of an autoencoder
that the program makes whole, since it returns them, and the gradient that comes back through them.

    y = f W + b            the decoder: f [..., N] is mostly zeros
    z = x We^T + be        the encoder: the gradient of z is mostly zeros

Whatever lies between z and f is the program's own: a rectifier, thresholds with a gradient of their own, the largest of
a whole batch. Dispatcher operators:

    sparse_product             the decoder. The gradient of f is wanted where f is 0, too, and is a dense product
    sparse_gradient_linear     the encoder, a dense product, whose gradients are those below
    sparse_matmul              h W, h [M, N]
    sparse_outer_sum           h^T x, and the sums of h over its rows

Exact for any tensor; what has many entries costs a dense product. Of what is 0 nothing is added, where a dense product
has 0 * inf = NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _sparse_products_aten as aten
from ._arguments import as_rows, check_floats, differ, same, suit_kernels, turned_as
from ._dispatch import (
    as_autocast,
    autocast_off,
    define,
    first_order,
    outside_transforms,
    register,
)
from ._sharding import Rule, dims, whole

_lib = define(
    "sparse_product(Tensor f, Tensor weight, Tensor? bias) -> Tensor",
    "sparse_gradient_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    "sparse_matmul(Tensor h, Tensor weight) -> Tensor",
    "sparse_outer_sum(Tensor h, Tensor x) -> (Tensor, Tensor)",
)


def sparse_product(f: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """f @ weight + bias at the cost of the entries of `f` that are not zero.

    Args:
        f: [..., N]; fp32, fp16, bf16 or fp64. Its gradient is dense.
        weight: [N, D], any strides, the dtype of `f`. bias: [D] or None.

    Returns:
        y [..., D]. Sums over entries are in fp32 (fp64 for fp64), in the same order on every run.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, naming them.
    """
    f, weight, bias = as_autocast(f, weight, bias)
    return torch.ops.sparse_inductor.sparse_product(f, weight, bias)


def sparse_gradient_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias), whose gradients cost what the entries of the incoming one do that are not zero.

    Args:
        x: [..., D]; fp32, fp16, bf16 or fp64.
        weight: [N, D], any strides, the dtype of `x`. bias: [N] or None.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, naming them.
    """
    x, weight, bias = as_autocast(x, weight, bias)
    return torch.ops.sparse_inductor.sparse_gradient_linear(x, weight, bias)


def _check(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, inputs: int) -> None:
    """inputs: the axis of `weight` that is the last one of `x`."""
    if x.dim() < 1 or weight.dim() != 2 or differ(weight.shape[inputs], x.shape[-1]):
        raise ValueError(
            f"{name} and weight do not fit: {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and not same(bias.shape, (weight.shape[1 - inputs],)):
        raise ValueError(
            f"bias must be [{weight.shape[1 - inputs]}], got shape {tuple(bias.shape)}"
        )
    check_floats(name, x, weight=weight, bias=bias)


def _products(*tensors: Tensor):
    """What computes products of these tensors: the kernels where they apply, else ATen."""
    if not suit_kernels(*tensors):
        return aten
    from ..kernels.sparse_rows import products as kernels

    return kernels


def _matmul(h, weight):
    with autocast_off(h.device.type):
        return _products(h, weight).matmul(h, weight)


def _outer_sum(h, x):
    with autocast_off(h.device.type):
        return _products(h, x).outer(h, x)


def _product(f, weight, bias):
    y = torch.ops.sparse_inductor.sparse_matmul(as_rows(f), weight)
    y = y if bias is None else y + bias
    return y.view(*f.shape[:-1], weight.shape[1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, weight, bias):
        ctx.save_for_backward(f, weight)
        return _product(f, weight, bias)

    @staticmethod
    @first_order("sparse_product")
    def backward(ctx, grad):
        f, weight = ctx.saved_tensors
        for_f, for_weight, for_bias = ctx.needs_input_grad
        rows = as_rows(grad)
        d_weight = None
        if for_weight:
            d_weight = torch.ops.sparse_inductor.sparse_outer_sum(as_rows(f), rows)[0]
            d_weight = turned_as(weight, d_weight)
        return grad @ weight.t() if for_f else None, d_weight, rows.sum(0) if for_bias else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @first_order("sparse_gradient_linear")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = as_rows(grad)
        d_x = d_weight = d_bias = None
        if for_x:
            d_x = torch.ops.sparse_inductor.sparse_matmul(rows, weight).view(x.shape)
        if for_weight or for_bias:
            d_weight, d_bias = torch.ops.sparse_inductor.sparse_outer_sum(rows, as_rows(x))
        return (
            d_x,
            turned_as(weight, d_weight) if for_weight else None,
            d_bias if for_bias else None,
        )


def _composed(name: str, function: Any, plain: Callable[..., Tensor], check: tuple[str, int]):
    """What the dispatcher runs for an operator that is made of others, gradients included."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        outside_transforms(name, x, weight, bias)
        _check(check[0], x, weight, bias, check[1])
        needs_grad = any(t is not None and t.requires_grad for t in (x, weight, bias))
        call = function.apply if torch.is_grad_enabled() and needs_grad else plain
        with autocast_off(x.device.type):
            return call(x, weight, bias)

    _lib.impl(name, run, "CompositeImplicitAutograd")


def _fake_matmul(h, weight):
    return h.new_empty(h.shape[0], weight.shape[1])


def _fake_outer_sum(h, x):
    return h.new_empty(h.shape[1], x.shape[1]), h.new_empty(h.shape[1])


# Spread over the rows; what sums over them is made of all of them by every process.


def _matmul_rows(h, weight) -> Rule:
    return Rule((("T", ""), dims(weight, "..")), (("T", ""),), ("T",))


_composed("sparse_product", _Product, _product, ("f", 0))
_composed("sparse_gradient_linear", _Linear, F.linear, ("x", 1))
register(_lib, "sparse_matmul", _matmul, _fake_matmul, _matmul_rows)
register(_lib, "sparse_outer_sum", _outer_sum, _fake_outer_sum, whole)
