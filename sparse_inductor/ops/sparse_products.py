"""Products with a mostly zero tensor, whose non-zero entries are found on the device. Examples are the activations of a
sparse autoencoder that materializes them because it returns them, and the gradient of its pre-activations.

    y = f W + b            the decoder: f [..., N] is mostly zeros
    z = x We^T + be        the encoder: the gradient of z is mostly zeros

The program itself computes f from z: with a rectifier, or with thresholds that have a custom gradient. "Entry" means a
non-zero element. Dispatcher operators:

    sparse_product             the decoder; the gradient of f is a dense product, unless the operator applies the ReLU
    sparse_gradient_linear     the encoder, a dense product with sparse gradients
    sparse_entries             the entries of h [M, N], packed
    sparse_matmul              h W
    sparse_outer_sum           h^T x, and the sums of h over its rows
    sparse_masked_matmul       x W^T at the entries of h

The results are exact for any tensor; a tensor with many entries costs a dense product. Zeros contribute nothing, where
a dense product would compute 0 * inf = NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _sparse_products_aten as aten
from ._arguments import (
    as_rows,
    check_floats,
    check_shape,
    differ,
    laid_out_as,
    shifted,
    suit_kernels,
)
from ._dispatch import (
    as_autocast,
    autocast_off,
    define,
    first_order,
    outside_transforms,
    recorded,
    register,
)
from ._sharding import Rule, dims, whole
from .sparse_rows import linear_gradients

_ENTRIES = "Tensor count, Tensor index, Tensor values"
_lib = define(
    "sparse_product(Tensor f, Tensor weight, Tensor? bias, bool relu=False) -> Tensor",
    "sparse_gradient_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? shift=None) -> Tensor",
    "sparse_entries(Tensor h) -> (Tensor, Tensor, Tensor)",
    f"sparse_matmul(Tensor h, {_ENTRIES}, Tensor weight) -> Tensor",
    f"sparse_outer_sum(Tensor h, {_ENTRIES}, Tensor x) -> (Tensor, Tensor)",
    f"sparse_masked_matmul(Tensor h, {_ENTRIES}, Tensor x, Tensor weight) -> Tensor",
)


def sparse_product(
    f: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False
) -> Tensor:
    """f @ weight + bias, or with `relu` f.relu() @ weight + bias, computed over the non-zero entries only.

    Args:
        f: [..., N]; fp32, fp16, bf16 or fp64.
        weight: [N, D], any strides, in the dtype of `f`. bias: [D] or None.
        relu: whether `f` is rectified first. The gradient of `f` is then computed at the entries only; without `relu`
            it is a dense product.

    Returns:
        y [..., D]. Sums over entries are in fp32 (fp64 for fp64 inputs), in the same order on every run.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, naming them.
    """
    f, weight, bias = as_autocast(f, weight, bias)
    return torch.ops.sparse_inductor.sparse_product(f, weight, bias, relu)


def sparse_gradient_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, shift: Tensor | None = None
) -> Tensor:
    """F.linear(x - shift, weight, bias), with a backward over the non-zero entries of the incoming gradient only.

    Args:
        x: [..., D]; fp32, fp16, bf16 or fp64.
        weight: [N, D], any strides, in the dtype of `x`. bias: [N] or None.
        shift: [D] or None. If `x` needs no gradient, the gradient of `shift` costs a matrix-vector product.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, naming them.
    """
    x, weight, bias, shift = as_autocast(x, weight, bias, shift)
    return torch.ops.sparse_inductor.sparse_gradient_linear(x, weight, bias, shift)


def _check(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, inputs: int) -> None:
    """Raises the errors of shapes and dtypes. inputs: the axis of `weight` that matches the last axis of `x`."""
    if x.dim() < 1 or weight.dim() != 2 or differ(weight.shape[inputs], x.shape[-1]):
        raise ValueError(
            f"{name} and weight do not fit: {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    check_shape("bias", bias, (weight.shape[1 - inputs],))
    check_floats(name, x, weight=weight, bias=bias)


def _products(*tensors: Tensor):
    """The module of kernels for products of these tensors, or None if ATen computes them."""
    if not suit_kernels(*tensors):
        return None
    from ..kernels.sparse_rows import products as kernels

    return kernels


def _entries(h):
    found = _fake_entries(h)
    with autocast_off(h.device.type):
        if kernels := _products(h):
            kernels.pack(h, found)
        else:
            count, index, values = found
            count.fill_(index.shape[1] + 1)  # marks every row as not packed
            index.zero_()
            values.zero_()
    return found


def _matmul(h, count, index, values, weight):
    with autocast_off(h.device.type):
        kernels = _products(h, weight)
        if kernels is None:
            return aten.matmul(h, weight)
        return kernels.matmul(h, (count, index, values), weight)


def _outer_sum(h, count, index, values, x):
    with autocast_off(h.device.type):
        kernels = _products(h, x)
        return kernels.outer(h, (count, index, values), x) if kernels else aten.outer(h, x)


def _masked_matmul(h, count, index, values, x, weight):
    with autocast_off(h.device.type):
        kernels = _products(h, x, weight)
        if kernels is None:
            return x @ weight.t()
        return kernels.masked_matmul((count, index, values), x, weight)


def _product(f, weight, bias, relu=False):
    y, _ = _product_of(as_rows(f.relu() if relu else f), weight, bias)
    return y.view(*f.shape[:-1], y.shape[-1])


def _product_of(f, weight, bias):
    """(y, the entries of f)."""
    ops = torch.ops.sparse_inductor
    entries = ops.sparse_entries(f)
    y = ops.sparse_matmul(f, *entries, weight)
    return y if bias is None else y + bias, entries


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, weight, bias, relu):
        f = f.relu() if relu else f
        y, entries = _product_of(f, weight, bias)
        ctx.save_for_backward(f, weight, *entries)
        ctx.relu = relu
        return y

    @staticmethod
    @first_order("sparse_product")
    def backward(ctx, grad):
        ops = torch.ops.sparse_inductor
        f, weight, *entries = ctx.saved_tensors
        for_f, for_weight, for_bias, _ = ctx.needs_input_grad
        d_f = d_weight = None
        if for_f and ctx.relu:
            d_f = ops.sparse_masked_matmul(f, *entries, grad, weight)
            # Rows that are not packed are computed at all columns: keep the entries only.
            d_f = torch.ops.aten.threshold_backward(d_f, f, 0)
        elif for_f:
            d_f = grad @ weight.t()
        if for_weight:
            d_weight = laid_out_as(weight, ops.sparse_outer_sum(f, *entries, grad)[0])
        return d_f, d_weight, grad.sum(0) if for_bias else None, None


def _linear(x, weight, bias, shift=None):
    return F.linear(shifted(x, shift), weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, shift):
        x = shifted(x, shift)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @first_order("sparse_gradient_linear")
    def backward(ctx, grad):
        ops = torch.ops.sparse_inductor
        x, weight = ctx.saved_tensors
        entries = ops.sparse_entries(grad)

        def of_weight():
            d_weight, d_bias = ops.sparse_outer_sum(grad, *entries, x)
            return laid_out_as(weight, d_weight), d_bias

        of_x = lambda: ops.sparse_matmul(grad, *entries, weight)
        return linear_gradients(ctx.needs_input_grad, weight, of_x, of_weight)


def _composed(name: str, function: Any, plain: Callable[..., Tensor], check: tuple[str, int]):
    """Register the implementation of an operator that is composed of others, including its gradients."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, more: Any = None) -> Tensor:
        shift = more if isinstance(more, Tensor) else None
        outside_transforms(name, x, weight, bias, shift)
        _check(check[0], x, weight, bias, check[1])
        check_shape("shift", shift, x.shape[-1:])
        with autocast_off(x.device.type):
            if not recorded(x, weight, bias, shift):
                return plain(x, weight, bias, more)
            # The caller may write to the result, so it must not be a view that a Function returns: autograd refuses
            # in-place operations on those.
            y = function.apply(as_rows(x), weight, bias, more)
            return y.view(*x.shape[:-1], y.shape[-1])

    _lib.impl(name, run, "CompositeImplicitAutograd")


def _fake_entries(h):
    M, N = h.shape
    cap = aten.capacity(N)
    count, index = (h.new_empty(*shape, dtype=torch.int32) for shape in ((M,), (M, cap)))
    return count, index, h.new_empty(M, cap)


def _fake_matmul(h, count, index, values, weight):
    return h.new_empty(h.shape[0], weight.shape[1])


def _fake_outer_sum(h, count, index, values, x):
    return h.new_empty(h.shape[1], x.shape[1]), h.new_empty(h.shape[1])


def _fake_masked_matmul(h, count, index, values, x, weight):
    return torch.empty_like(h, memory_format=torch.contiguous_format)


# Can be sharded over the rows; operators that sum over rows run on whole tensors in every process.


_OF_ROWS = (("T", ""), ("T",), ("T", ""), ("T", ""))  # h and its entries


def _shared_entries(h) -> Rule:
    return Rule(_OF_ROWS[:1], _OF_ROWS[1:], ("T",))


def _shared_matmul(h, count, index, values, weight) -> Rule:
    return Rule((*_OF_ROWS, dims(weight, "..")), (("T", ""),), ("T",))


def _shared_masked_matmul(h, count, index, values, x, weight) -> Rule:
    return Rule((*_OF_ROWS, ("T", ""), dims(weight, "..")), (("T", ""),), ("T",))


_composed("sparse_product", _Product, _product, ("f", 0))
_composed("sparse_gradient_linear", _Linear, _linear, ("x", 1))
register(_lib, "sparse_entries", _entries, _fake_entries, _shared_entries)
register(_lib, "sparse_matmul", _matmul, _fake_matmul, _shared_matmul)
register(_lib, "sparse_outer_sum", _outer_sum, _fake_outer_sum, whole)
register(_lib, "sparse_masked_matmul", _masked_matmul, _fake_masked_matmul, _shared_masked_matmul)
