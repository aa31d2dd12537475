"""The encoder and decoder of a BatchTopK autoencoder, which keeps the k largest pre-activations of a whole batch: rows
may have any number of entries.

    values, indices = the k largest of all entries of (x - b) We^T + be    [k], indices into its flattened [M * N]
    y[m] = the sum over the entries of row m of values * Wd[column] + bd   [M, D]

Dispatcher operators:

    batch_topk            the k largest entries of a tensor
    batch_topk_encode     the entries of the encoder's product, and its gradients over them
    batch_topk_decode     the sums over the entries of each row, and their gradients

The gradients are computed by `sparse_dots`, `sparse_columns` and `sparse_outer` (`sparse_rows`), from the row and the
column of each entry. NaN counts as the largest value, as in torch.topk. Of equal values those with the smallest indices
are kept; torch.topk does not specify which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..aten import sparse_rows as aten
from ._arguments import as_rows, check_floats, known, shifted, suit_kernels
from ._dispatch import (
    as_autocast,
    autocast_off,
    define,
    first_order,
    inline,
    outside_transforms,
    recorded,
    register,
)
from ._sharding import whole
from .sparse_rows import (
    check_entries,
    check_k,
    check_linear,
    linear_gradients,
    weight_gradients,
)

_lib = define(
    "batch_topk(Tensor x, SymInt k) -> (Tensor, Tensor)",
    "batch_topk_encode(Tensor x, Tensor weight, Tensor? bias, Tensor? scores, SymInt k, bool ordered,"
    " Tensor? shift) -> (Tensor, Tensor)",
    "batch_topk_decode(Tensor values, Tensor indices, Tensor weight, Tensor? bias, SymInt[] sizes) -> Tensor",
)
# The kernels compute positions in 32 bits.
_MOST = 2**31 - 1


def batch_topk_encode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    k: int,
    scores: Tensor | None = None,
    ordered: bool = True,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k largest of all entries of (x - shift) @ weight.t() + bias, with a backward over these entries.

    Args:
        x: [..., D]; fp32, fp16, bf16 or fp64; any strides.
        weight: [N, D], any strides, in the dtype of `x`. bias: [N] or None.
        k: the number of entries of the whole batch, at most that of the product.
        scores: the product in any shape, if the program has computed it already, or None. It gets no gradient; the
            gradient of the entries goes to `x`, `weight` and `bias`.
        ordered: sort the entries by value, the largest first, and equal values by index; if False, sort by index.
        shift: [D] or None. If `x` needs no gradient, the gradient of `shift` costs a matrix-vector product.

    Returns:
        (values, int64 indices into the flattened product), both [k]. NaN counts as the largest value; of equal values
        those with the smallest indices are kept.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, naming them.
    """
    x, weight, bias, scores, shift = as_autocast(x, weight, bias, scores, shift)
    return torch.ops.sparse_inductor.batch_topk_encode(x, weight, bias, scores, k, ordered, shift)


def batch_topk_decode(
    values: Tensor,
    indices: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sizes: Sequence[int],
) -> Tensor:
    """f @ weight + bias for an f [*sizes, N] that is `values` at these indices of its flattened form and 0 elsewhere.

    Args:
        values: [k]; fp32, fp16, bf16 or fp64.
        indices: [k], int64 or int32, distinct, in [0, prod(sizes) * N), in any order. The range is checked on a CPU
            only.
        weight: [N, D], any strides, in the dtype of `values`. bias: [D] or None.
        sizes: the leading sizes of the result.

    Returns:
        y [*sizes, D]. Sums are in fp32 (fp64 for fp64 inputs), in the same order on every run; so are the gradients.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, naming them.
    """
    values, weight, bias = as_autocast(values, weight, bias)
    return torch.ops.sparse_inductor.batch_topk_decode(values, indices, weight, bias, sizes)


def _check_encode(x, weight, bias, scores, k, shift) -> None:
    check_linear(x, weight, bias, shift)
    sizes = *x.shape[:-1], weight.shape[0]
    if scores is not None and known(*sizes, *scores.shape) and scores.numel() != math.prod(sizes):
        raise ValueError(
            f"scores must have {math.prod(sizes)} elements, got shape {tuple(scores.shape)}"
        )
    check_floats("x", x, scores=scores)
    check_k(k, *sizes)


def _topk(x, k, **run):
    check_k(k, *x.shape)
    x = x.reshape(-1)
    if suit_kernels(x) and k > 0 and x.numel() <= _MOST:
        from ..kernels.sparse_rows import batch as kernels

        return kernels.top(x, k, **run)
    return aten.top_of_batch(x, k)


def _fake_topk(x, k):
    check_k(k, *x.shape)
    return x.new_empty(k), x.new_empty(k, dtype=torch.int64)


def _places(indices: Tensor, N) -> tuple[Tensor, Tensor]:
    """The row and the column of each entry."""
    return (indices // N).int(), (indices % N).int()


def _row_sums(values, rows, columns, table, bias, M):
    """[M, D]: bias + the sums over the entries of each row of value * table[column]."""
    ops = torch.ops.sparse_inductor
    lists = ops.sparse_columns(rows, M, columns, table.shape[0])
    return ops.sparse_outer(values, table, *lists, False, columns, bias)[0]


def _largest(x, weight, bias, scores, k, ordered):
    """(values, indices) of the k largest of the product, which may be given as `scores`."""
    product = F.linear(x, weight, bias) if scores is None else scores
    # Flat, so that the graph computes the size of the program's flat zeros before these: Inductor folds views of
    # constants with a size from any node, also from one that depends on them.
    values, indices = torch.ops.sparse_inductor.batch_topk(product.flatten(), k)
    if not ordered:
        return values, indices
    values, order = values.sort(stable=True, descending=True)
    return values, indices[order]


class _Encode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, scores, k, ordered, shift):
        x = shifted(x, shift)
        values, indices = _largest(x, weight, bias, scores, k, ordered)
        ctx.save_for_backward(x, weight, indices)
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    @first_order("batch_topk_encode")
    def backward(ctx, grad, _):
        x, weight, indices = ctx.saved_tensors
        rows, columns = _places(indices, weight.shape[0])
        needs = ctx.needs_input_grad
        *grads, d_shift = linear_gradients(
            (*needs[:3], needs[-1]),
            weight,
            lambda: _row_sums(grad, rows, columns, weight, None, x.shape[0]),
            lambda: weight_gradients(grad, x, columns, weight, rows),
        )
        return *grads, None, None, None, d_shift


def _decoded(values, indices, weight, bias, M):
    return _row_sums(values, *_places(indices, weight.shape[0]), weight, bias, M)


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, indices, weight, bias, M):
        ctx.save_for_backward(values, indices, weight)
        return _decoded(values, indices, weight, bias, M)

    @staticmethod
    @first_order("batch_topk_decode")
    def backward(ctx, grad):
        values, indices, weight = ctx.saved_tensors
        for_values, _, for_weight, for_bias, _ = ctx.needs_input_grad
        rows, columns = _places(indices, weight.shape[0])
        d_values = d_weight = d_bias = None
        if for_values:
            d_values = torch.ops.sparse_inductor.sparse_dots(grad, weight, columns, rows)
        if for_weight:
            d_weight, _ = weight_gradients(values, grad, columns, weight, rows)
        if for_bias:
            d_bias = grad.sum(0)
        return d_values, None, d_weight, d_bias, None


def _encode(x, weight, bias, scores, k, ordered, shift):
    outside_transforms("batch_topk_encode", x, weight, bias, scores, shift)
    _check_encode(x, weight, bias, scores, k, shift)
    with autocast_off(x.device.type):
        if recorded(x, weight, bias, shift):
            return _Encode.apply(as_rows(x), weight, bias, scores, k, ordered, shift)
        return _largest(shifted(x, shift), weight, bias, scores, k, ordered)


def _decode(values, indices, weight, bias, sizes):
    outside_transforms("batch_topk_decode", values, weight, bias)
    check_entries(values, indices, weight, bias, flat=True)
    if known(*sizes) and any(size < 0 for size in sizes):
        raise ValueError(f"sizes must not be negative, got {tuple(sizes)}")
    check_k(values.shape[0], *sizes, weight.shape[0])
    with autocast_off(values.device.type):
        decode = _Decode.apply if recorded(values, weight, bias) else _decoded
        y = decode(values, indices, weight, bias, math.prod(sizes))
        return y.view(*sizes, weight.shape[1])


register(_lib, "batch_topk", _topk, _fake_topk, whole)
inline(_lib, "batch_topk", _topk, lambda x, k: k and suit_kernels(x) and x.numel() <= _MOST)
_lib.impl("batch_topk_encode", _encode, "CompositeImplicitAutograd")
_lib.impl("batch_topk_decode", _decode, "CompositeImplicitAutograd")
