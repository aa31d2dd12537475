"""Entmax over one dimension: p = argmax_{p in simplex} p.x + H_alpha(p) (Peters et al. 2019, Eq. 10).

    p_i = [(alpha - 1) x_i - tau]_+^(1 / (alpha - 1)),    tau such that sum_i p_i = 1

tau is solved to the precision of the arithmetic for every row. There are two dispatcher operators: `entmax`, which a
rewrite inserts, and `entmax_backward`, which needs the probabilities only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..compat import below_autograd
from ..layers import launches
from . import _entmax_aten as aten
from ._arguments import FLOATS, fits, returned
from ._dispatch import (
    autocast_off,
    by_gradient,
    define,
    first_order,
    inline,
    register,
)
from ._sharding import Rule, dims

# The result of the ATen implementation for a row whose maximum m is not finite; the kernels always implement ''.
#   ''         zeros for m = -inf, NaN for +inf and NaN
#   'nan'      NaN
#   'refused'  raises an error on a CPU, like a program that indexes with the result of sorting such a row
# 'nan absorbed' and 'refused absorbed' also apply to m so large that (alpha - 1) m - 1 rounds to (alpha - 1) m. Any
# value other than '' requires rows with at least one score.
UNDEFINED = "str undefined=''"
_lib = define(
    f"entmax(Tensor x, Tensor? alpha, float alpha_value, int dim, {UNDEFINED}) -> Tensor",
    "entmax_backward(Tensor grad, Tensor y, Tensor? alpha, float alpha_value, int dim, bool[2] needs)"
    " -> (Tensor, Tensor)",
)


def entmax(x: Tensor, alpha: float | Tensor = 1.5, dim: int = -1) -> Tensor:
    """Sparse probabilities along `dim`: softmax as alpha goes to 1, entmax-1.5, sparsemax at 2.

    Args:
        x: scores of any shape and strides; fp32, fp16, bf16 or fp64. Arithmetic is fp32 (fp64 for fp64 inputs).
        alpha: above 1; a number, or a tensor that broadcasts to x and has size 1 at `dim` (for example one alpha per
            head), which may require a gradient. Entries of a tensor are not checked: if one is at or below 1, the
            result for its rows is undefined.
        dim: the dimension along which the probabilities sum to 1.

    Returns:
        Probabilities of the shape and dtype of x. A row of -inf gives zeros, a row with NaN or +inf gives NaN.

    Raises:
        ValueError: alpha not above 1, an alpha that does not broadcast, a `dim` that x does not have.
        TypeError: a dtype that is not accepted.
    """
    if isinstance(alpha, Tensor):
        return torch.ops.sparse_inductor.entmax(x, alpha, 0.0, dim)
    return torch.ops.sparse_inductor.entmax(x, None, float(alpha), dim)


def check_alpha(alpha: Tensor | None, alpha_value: float, like: Tensor) -> None:
    """Raises the errors of `alpha` that both operators share."""
    if alpha is None:
        if not alpha_value > 1:
            raise ValueError(f"alpha must be above 1, got {alpha_value}")
        if alpha_value == float("inf"):
            raise ValueError("alpha must be finite, got inf")
    elif alpha.dtype not in FLOATS:
        raise TypeError(f"alpha must be one of {FLOATS}, got {alpha.dtype}")
    elif alpha.device != like.device:
        raise ValueError(f"alpha is on {alpha.device}, the scores on {like.device}")


def _check(x: Tensor, alpha: Tensor | None, alpha_value: float, dim: int) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be one of {FLOATS}, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("x must have a dimension, got a scalar")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"dim must be from {-x.dim()} to {x.dim() - 1} for x of shape {tuple(x.shape)}, got {dim}"
        )
    check_alpha(alpha, alpha_value, x)
    if alpha is not None:
        wanted = list(x.shape)
        wanted[dim] = 1
        if not fits(alpha.shape, wanted):
            raise ValueError(
                f"alpha must broadcast to {tuple(wanted)} (x with size 1 at dim {dim}), got shape {tuple(alpha.shape)}"
            )


def _full(alpha: Tensor | None, alpha_value: float, x: Tensor) -> Tensor | float:
    """alpha with as many dimensions as x, or the number."""
    if alpha is None:
        return alpha_value
    return alpha.reshape((1,) * (x.dim() - alpha.dim()) + alpha.shape)


def _rows(x: Tensor):
    """The module that computes the rows of x: the kernels if they support x, else chunked ATen."""
    if not launches(x):
        return aten
    from ..kernels.entmax import rows as kernels

    return kernels if kernels.applies(x) else aten


def _forward(x, alpha, alpha_value, dim, undefined="", **run):
    _check(x, alpha, alpha_value, dim)
    aten.check_not_empty(x.shape[dim], undefined)
    with autocast_off(x.device.type):
        rows, full = _rows(x), _full(alpha, alpha_value, x)
        if rows is aten:
            return aten.forward(x, full, dim, undefined)
        return rows.forward(x, full, dim, **run)


def _backward(grad, y, alpha, alpha_value, dim, needs, **run):
    with autocast_off(y.device.type):
        dx, d_alpha = _rows(y).backward(grad, y, _full(alpha, alpha_value, y), dim, needs, **run)
    return returned((dx, None if d_alpha is None else d_alpha.view(alpha.shape)), y)


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha, alpha_value, dim, undefined=""):
        with below_autograd():
            y = torch.ops.sparse_inductor.entmax(x, alpha, alpha_value, dim, undefined)
        ctx.save_for_backward(y, alpha)
        ctx.alpha_value, ctx.dim = alpha_value, dim
        return y

    @staticmethod
    @first_order("entmax")
    def backward(ctx, grad):
        y, alpha = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:2])
        grads = torch.ops.sparse_inductor.entmax_backward(
            grad, y, alpha, ctx.alpha_value, ctx.dim, needs
        )
        return *(g if n else None for g, n in zip(grads, needs)), None, None, None


def _fake(x, alpha, alpha_value, dim, undefined=""):
    _check(x, alpha, alpha_value, dim)
    return torch.empty_like(x)


def _fake_backward(grad, y, alpha, alpha_value, dim, needs):
    dx = torch.empty_like(y) if needs[0] else y.new_empty(0)
    d_alpha = alpha.new_empty(alpha.shape) if needs[1] and alpha is not None else y.new_empty(0)
    return dx, d_alpha


# Can be sharded over any dimension but `dim`.


def _letters(x, dim) -> str:
    letters = [chr(ord("a") + i) for i in range(x.dim())]
    letters[dim] = "."
    return "".join(letters)


def _shared(x, alpha, alpha_value, dim, undefined="") -> Rule:
    letters = _letters(x, dim)
    of_x = tuple("" if c == "." else c for c in letters)
    return Rule((of_x, dims(alpha, letters)), (of_x,), tuple(letters.replace(".", "")))


def _shared_backward(grad, y, alpha, alpha_value, dim, needs) -> Rule:
    rule = _shared(y, alpha, alpha_value, dim)
    return rule.backward(rule.outputs, (), rule.inputs)


_autograd = by_gradient("entmax", _forward, _Entmax.apply, (0, 1))
register(_lib, "entmax", _forward, _fake, _shared, _autograd)
register(_lib, "entmax_backward", _backward, _fake_backward, _shared_backward)
inline(_lib, "entmax", _forward, lambda x, *_: _rows(x) is not aten)
inline(_lib, "entmax_backward", _backward, lambda grad, y, *_: _rows(y) is not aten)
