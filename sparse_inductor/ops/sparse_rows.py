"""The encoder and decoder of a TopK autoencoder, which keeps k entries per row: the encoder finds the entries, the
decoder sums over them, and every gradient is computed over the same entries.

    values, indices = the k largest of (x - b) We^T + be   [..., k], of N columns
    y = the sum of values * Wd[indices] + bd               [..., D]

Dispatcher operators:

    topk_encode       the entries, without materializing the whole [..., N] product
    sparse_decode     the sums over a row's entries
    sparse_dots       x . W[indices], the gradient of the decoder's values
    sparse_columns    the entries of each column in the order of their rows
    sparse_outer      the sums over a column's entries, the gradient of a weight and of a bias

Every row has exactly k entries. The last three operators also accept entries in coordinate form, as `batch_topk` has
them: flat values and columns, and a tensor `rows`. NaN counts as the largest value, as in torch.topk. Of equal values
those in the smallest columns are kept; torch.topk does not specify which. Columns that are not entries contribute
nothing, where a dense product would compute 0 * inf = NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..aten import sparse_rows as aten
from ._arguments import (
    INTEGERS,
    as_rows,
    check_floats,
    check_shape,
    differ,
    is_column_major,
    known,
    same,
    shifted,
    suit_kernels,
)
from ._dispatch import (
    as_autocast,
    autocast_off,
    by_gradient,
    define,
    first_order,
    inline,
    register,
)
from ._sharding import Dims, Rule, dims, whole

_lib = define(
    "topk_encode(Tensor x, Tensor weight, Tensor? bias, Tensor? scores, SymInt k, bool ordered, Tensor? shift)"
    " -> (Tensor, Tensor)",
    "sparse_decode(Tensor values, Tensor indices, Tensor weight, Tensor? bias) -> Tensor",
    "sparse_dots(Tensor x, Tensor weight, Tensor indices, Tensor? rows=None) -> Tensor",
    "sparse_columns(Tensor indices, SymInt columns, Tensor? rows=None, SymInt num_rows=0)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "sparse_outer(Tensor values, Tensor x, Tensor entry, Tensor start, Tensor total, Tensor ends, bool column_major,"
    " Tensor? rows=None, Tensor? bias=None) -> (Tensor, Tensor)",
)


def topk_encode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    k: int,
    scores: Tensor | None = None,
    ordered: bool = True,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k largest of each row of (x - shift) @ weight.t() + bias, with a backward over k entries per row.

    Args:
        x: [..., D]; fp32, fp16, bf16 or fp64; any strides.
        weight: [N, D], any strides, in the dtype of `x`. bias: [N] or None.
        k: the number of entries per row, at most N.
        scores: [..., N] or None: the product, if the program has computed it already. It gets no gradient; the gradient
            of the entries goes to `x`, `weight` and `bias`.
        ordered: sort each row's entries by value, the largest first, and equal values by column; if False, sort by
            column.
        shift: [D] or None. If `x` needs no gradient, the gradient of `shift` costs a matrix-vector product.

    Returns:
        (values, int64 indices), both [..., k]. NaN counts as the largest value; of equal values those in the smallest
        columns are kept.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, naming them.
    """
    x, weight, bias, scores, shift = as_autocast(x, weight, bias, scores, shift)
    return torch.ops.sparse_inductor.topk_encode(x, weight, bias, scores, k, ordered, shift)


def sparse_decode(
    values: Tensor, indices: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """bias + the sum over i of values[..., i] * weight[indices[..., i]].

    Args:
        values: [..., k]; fp32, fp16, bf16 or fp64.
        indices: [..., k], int64 or int32 in [0, N), distinct within a row.
        weight: [N, D], any strides, in the dtype of `values`. bias: [D] or None.

    Returns:
        y [..., D]. Sums are in fp32 (fp64 for fp64 inputs). Gradients are summed in the same order on every run.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, naming them.
    """
    values, weight, bias = as_autocast(values, weight, bias)
    return torch.ops.sparse_inductor.sparse_decode(values, indices, weight, bias)


def check_linear(x, weight, bias, shift) -> None:
    """Raises the errors of the operands of (x - shift) @ weight.t() + bias."""
    if x.dim() < 1 or weight.dim() != 2 or differ(weight.shape[1], x.shape[-1]):
        raise ValueError(
            f"x must be [..., D] and weight [N, D], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    check_shape("bias", bias, weight.shape[:1])
    check_shape("shift", shift, weight.shape[1:])
    check_floats("x", x, weight=weight, bias=bias, shift=shift)


def check_k(k, *sizes) -> None:
    """Raises ValueError if k is known to be no number of entries among this many."""
    if known(k, *sizes) and not 0 <= k <= math.prod(sizes):
        raise ValueError(f"k must be between 0 and {math.prod(sizes)}, got {k}")


def check_entries(values, indices, weight, bias, flat: bool = False) -> None:
    """Raises the errors of the operands of a decoder. flat: entries are [k], not [..., k]."""
    right = values.dim() == 1 if flat else values.dim() >= 1
    if not right or not same(indices.shape, values.shape):
        raise ValueError(
            f"values and indices must be {'[k]' if flat else '[..., k]'}, got {tuple(values.shape)} and "
            f"{tuple(indices.shape)}"
        )
    check_shape("weight", weight, (None, None), "[N, D]")
    check_shape("bias", bias, weight.shape[1:])
    if indices.dtype not in INTEGERS:
        raise TypeError(f"indices must be one of {INTEGERS}, got {indices.dtype}")
    if indices.device != values.device:
        raise ValueError(f"indices is on {indices.device}, values on {values.device}")
    check_floats("values", values, weight=weight, bias=bias)


def _check_encode(x, weight, bias, scores, k, shift) -> None:
    check_linear(x, weight, bias, shift)
    N = weight.shape[0]
    check_shape("scores", scores, (*x.shape[:-1], N), f"[..., {N}]")
    check_floats("x", x, scores=scores)
    check_k(k, N)


def _sums(*tensors: Tensor):
    """The module that computes sums on these tensors: the kernels if they apply, else ATen."""
    if not suit_kernels(*tensors):
        return aten
    from ..kernels.sparse_rows import sums as kernels

    return kernels


def _encode(x, weight, bias, scores, k, ordered, shift, **run):
    _check_encode(x, weight, bias, scores, k, shift)
    given = None if scores is None else as_rows(scores)
    with autocast_off(x.device.type):
        operands = as_rows(shifted(x, shift)), weight, bias, given, k, ordered
        if suit_kernels(x, weight) and k:
            from ..kernels.sparse_rows import topk as kernels

            found = kernels.encode(*operands, **run)
        else:
            found = aten.encode(*operands)
    values, indices = (t.view(*x.shape[:-1], k) for t in found)
    return values, indices


def _decode(values, indices, weight, bias, **run):
    check_entries(values, indices, weight, bias)
    with autocast_off(values.device.type):
        sums = _sums(values, weight)
        y = sums.decode(as_rows(values), as_rows(indices), weight, bias, **run)
    return y.view(*values.shape[:-1], weight.shape[1])


def _dots(x, weight, indices, rows=None, **run):
    at = as_rows(indices) if rows is None else indices
    with autocast_off(x.device.type):
        sums = _sums(x, weight, indices)
        return sums.dots(as_rows(x), weight, at, rows, **run).view(indices.shape)


def _columns(indices, columns, rows=None, num_rows=0):
    at = as_rows(indices) if rows is None else indices
    return tuple(_sums(indices).columns(at, columns, rows, num_rows))


def _outer(values, x, entry, start, total, ends, column_major, rows=None, bias=None, **run):
    by = aten.Columns(entry, start, total, ends)
    values = as_rows(values) if rows is None else values
    with autocast_off(x.device.type):
        return _sums(x, values).outer(values, as_rows(x), by, column_major, rows, bias, **run)


def weight_gradients(
    values: Tensor, x: Tensor, indices: Tensor, weight: Tensor, rows: Tensor | None = None
):
    """(the gradient of a weight [N, D] in the weight's memory order, the gradient of a bias [N])."""
    ops = torch.ops.sparse_inductor
    num_rows = 0 if rows is None else x.shape[0]
    lists = ops.sparse_columns(indices, weight.shape[0], rows, num_rows)
    return ops.sparse_outer(values, x, *lists, is_column_major(weight), rows)


def linear_gradients(
    needs: Sequence[bool],
    weight: Tensor,
    of_x: Callable[[], Tensor],
    of_weight: Callable[[], tuple[Tensor, Tensor]],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias and shift in (x - shift) @ weight.t() + bias, None where none is needed.

    of_x: computes the gradient of x. of_weight: computes those of the weight and the bias.
    """
    for_x, for_weight, for_bias, for_shift = needs
    d_x = of_x() if for_x else None
    d_weight = d_bias = d_shift = None
    if for_weight or for_bias or (for_shift and not for_x):
        d_weight, d_bias = of_weight()
    if for_shift:
        # The gradient of x summed over all rows is weight^T times the gradient of the bias.
        d_shift = -torch.mv(weight.t(), d_bias) if d_x is None else -as_rows(d_x).sum(0)
    return d_x, d_weight if for_weight else None, d_bias if for_bias else None, d_shift


class _Encode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, scores, k, ordered, shift):
        _check_encode(x, weight, bias, scores, k, shift)
        x = shifted(x, shift)
        found = torch.ops.sparse_inductor.topk_encode(x, weight, bias, scores, k, ordered, None)
        values, indices = found
        ctx.save_for_backward(x, weight, indices)
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    @first_order("topk_encode")
    def backward(ctx, grad, _):
        x, weight, indices = ctx.saved_tensors
        ops, needs = torch.ops.sparse_inductor, ctx.needs_input_grad
        *grads, d_shift = linear_gradients(
            (*needs[:3], needs[-1]),
            weight,
            lambda: ops.sparse_decode(grad, indices, weight, None),
            lambda: weight_gradients(grad, x, indices, weight),
        )
        return *grads, None, None, None, d_shift


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, indices, weight, bias):
        ctx.save_for_backward(values, indices, weight)
        return torch.ops.sparse_inductor.sparse_decode(values, indices, weight, bias)

    @staticmethod
    @first_order("sparse_decode")
    def backward(ctx, grad):
        values, indices, weight = ctx.saved_tensors
        for_values, _, for_weight, for_bias = ctx.needs_input_grad
        d_values = d_weight = d_bias = None
        if for_values:
            d_values = torch.ops.sparse_inductor.sparse_dots(grad, weight, indices)
        if for_weight:
            d_weight, _ = weight_gradients(values, grad, indices, weight)
        if for_bias:
            d_bias = as_rows(grad).sum(0)
        return d_values, None, d_weight, d_bias


def _fake_encode(x, weight, bias, scores, k, ordered, shift):
    _check_encode(x, weight, bias, scores, k, shift)
    values = x.new_empty(*x.shape[:-1], k)
    return values, torch.empty_like(values, dtype=torch.int64)


def _fake_decode(values, indices, weight, bias):
    check_entries(values, indices, weight, bias)
    return values.new_empty(*values.shape[:-1], weight.shape[1])


def _fake_dots(x, weight, indices, rows=None):
    return x.new_empty(indices.shape)


def _fake_columns(indices, columns, rows=None, num_rows=0):
    new = lambda n: indices.new_empty(n, dtype=torch.int32)
    return new(indices.numel()), new(columns), new(columns), new(columns)


def _fake_outer(values, x, entry, start, total, ends, column_major, rows=None, bias=None):
    N, D = start.shape[0], x.shape[-1]
    return x.new_empty(D, N).t() if column_major else x.new_empty(N, D), x.new_empty(N)


# Can be sharded over the rows; operators that sum over rows run on whole tensors in every process.


def _rows(t: Tensor) -> Dims:
    return ("T",) + ("",) * (t.dim() - 1) if t.dim() > 1 else ("",)


def _shared_encode(x, weight, bias, scores, k, ordered, shift) -> Rule:
    given = None if scores is None else _rows(scores)
    inputs = (_rows(x), dims(weight, ".."), dims(bias, "."), given, dims(shift, "."))
    return Rule(inputs, (_rows(x), _rows(x)), ("T",))


def _shared_decode(values, indices, weight, bias) -> Rule:
    inputs = (_rows(values), _rows(indices), dims(weight, ".."), dims(bias, "."))
    return Rule(inputs, (_rows(values),), ("T",))


def _shared_dots(x, weight, indices, rows=None) -> Rule:
    if rows is not None:
        return whole(x, weight, indices, rows)
    return Rule((_rows(x), dims(weight, ".."), _rows(indices)), (_rows(x),), ("T",))


_autograd_encode = by_gradient("topk_encode", _encode, _Encode.apply, (0, 1, 2, 6))
_autograd_decode = by_gradient("sparse_decode", _decode, _Decode.apply, (0, 2, 3))
register(_lib, "topk_encode", _encode, _fake_encode, _shared_encode, _autograd_encode)
register(_lib, "sparse_decode", _decode, _fake_decode, _shared_decode, _autograd_decode)
register(_lib, "sparse_dots", _dots, _fake_dots, _shared_dots)
register(_lib, "sparse_columns", _columns, _fake_columns, whole)
register(_lib, "sparse_outer", _outer, _fake_outer, whole)
# `sparse_columns` is not inlined: the gradients of both weights call it with the same indices, and as an operator in a
# graph it runs once.
inline(
    _lib,
    "topk_encode",
    _encode,
    lambda x, weight, bias, scores, k, *_: k and suit_kernels(x, weight),
)
inline(
    _lib, "sparse_decode", _decode, lambda values, indices, weight, *_: suit_kernels(values, weight)
)
inline(_lib, "sparse_dots", _dots, lambda x, weight, indices, *_: suit_kernels(x, weight, indices))
inline(_lib, "sparse_outer", _outer, lambda values, x, *_: suit_kernels(x, values))
