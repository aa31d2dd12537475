"""The SPLADE head: linear to the vocabulary, mask, activation, maximum over the sequence (Sparton, Eq. 1).

    values[b, v] = max_s program(hidden[b, s] . weight[v] + bias[v], rows[:, b, s])

Neither the forward nor the backward materializes the [B, S, V] logits. There are three dispatcher operators:

    splade_head            inserted by a rewrite; calls the next two if a gradient is needed
    splade_head_train      also returns the winning positions and their logits for the backward, 6 bytes per [B, V]
                           entry
    splade_head_backward   gradients over active entries only

`even` selects the gradient where several positions share a maximum: with it the gradient is divided among them, as in
`amax`; without it the first position gets all of it, as in `max(dim)`. The kernels implement the latter only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..aten import compute_dtype
from ..epilogue.plan import Lowered, Plan, lower, plan
from ..epilogue.steps import Program
from . import _linear_max_aten as aten
from ._arguments import FLOATS, fake_gradients, fits, returned, suit_kernels
from ._dispatch import (
    as_autocast,
    autocast_off,
    by_gradient,
    define,
    first_order,
    register,
)
from ._sharding import Dims, Rule, dims

DEFAULT_STEPS = "relu | log1p | row_mul(0)"

_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor[] rows, str steps"
_lib = define(
    f"splade_head({_INPUTS}, ScalarType? out_dtype=None, bool argmax=False, bool even=False)"
    " -> (Tensor, Tensor)",
    f"splade_head_train({_INPUTS}, ScalarType? out_dtype, bool argmax, ScalarType winner_dtype,"
    " bool even=False) -> (Tensor, Tensor, Tensor, Tensor)",
    f"splade_head_backward(Tensor grad, {_INPUTS}, Tensor winner, Tensor peak, Tensor per_element, bool argmax,"
    " bool[3] needs, bool even=False) -> (Tensor, Tensor, Tensor)",
)


# fmt: off
@overload
def splade_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, *,
    rows: Sequence[Tensor] = (), steps: str | None = None, out_dtype: torch.dtype | None = None,
    return_argmax: Literal[False] = False,
) -> Tensor: ...
@overload
def splade_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, *,
    rows: Sequence[Tensor] = (), steps: str | None = None, out_dtype: torch.dtype | None = None,
    return_argmax: Literal[True],
) -> tuple[Tensor, Tensor]: ...
# fmt: on
def splade_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    rows: Sequence[Tensor] = (),
    steps: str | None = None,
    out_dtype: torch.dtype | None = None,
    return_argmax: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sparse lexical representations from hidden states (Sparton, Eq. 1), in O(B*V) memory.

    Args:
        hidden: hidden states [..., S, D]; fp32, fp16, bf16 or fp64 (computed by ATen, without a kernel); any strides.
        weight: vocabulary embeddings [V, D] in the dtype of `hidden`; any strides.
        bias: [V] or None.
        mask: [..., S], non-zero or True for tokens that are kept; shorthand for `rows=(mask,)` with the default
            steps, which multiply the activation by it. Any real values are allowed, and the result is exact.
        rows: per-token operands [..., S] (broadcastable) that `steps` refers to by index. They get no gradient.
        steps: the elementwise program between the linear and the maximum, in the text form of
            `sparse_inductor.epilogue.steps`; default "relu | log1p", and "| row_mul(0)" with a mask.
        out_dtype: dtype of the values; defaults to the dtype of `hidden`. Arithmetic is fp32 (fp64 for fp64 inputs).
        return_argmax: also return int64 positions [..., V] of the first maximum over s of the program's value.

    Returns:
        values [..., V], or (values, argmax). If all tokens of a sequence are masked, the result is the value of the
        program for a masked token (0 under the default steps). If several positions share the maximum, the
        gradient goes to the first.

    Raises:
        ValueError: shapes, steps or rows that do not fit, naming the offending value.
        TypeError: a dtype that is not accepted.
    """
    if mask is not None:
        if rows:
            raise ValueError("pass either mask or rows, not both")
        rows = (mask,)
    if steps is None:
        steps = DEFAULT_STEPS if mask is not None else "relu | log1p"
    hidden, weight, bias = as_autocast(hidden, weight, bias)
    values, argmax = torch.ops.sparse_inductor.splade_head(
        hidden, weight, bias, list(rows), steps, out_dtype, return_argmax
    )
    return (values, argmax) if return_argmax else values


def _check(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Sequence[Tensor],
    steps: str,
    out_dtype: torch.dtype | None,
) -> None:
    """Raises the errors that `splade_head` documents."""
    if hidden.dim() < 2:
        raise ValueError(f"hidden must be [..., S, D], got shape {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight must be [V, D] with D = {hidden.shape[-1]}, got shape {tuple(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias must be [V] = [{weight.shape[0]}], got shape {tuple(bias.shape)}")
    for name, t in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if t is not None and t.dtype not in FLOATS:
            raise TypeError(f"{name} must be one of {FLOATS}, got {t.dtype}")
        if t is not None and t.device != hidden.device:
            raise ValueError(f"{name} is on {t.device}, hidden on {hidden.device}")
    if weight.dtype != hidden.dtype:
        raise TypeError(f"weight must have the dtype of hidden, {hidden.dtype}, got {weight.dtype}")
    if hidden.shape[-2] == 0:
        raise ValueError("hidden has S = 0 positions: the maximum over none is undefined")
    p = plan(steps)
    used = {s.row for s in p.program if s.row is not None}
    if used != set(range(len(rows))):
        raise ValueError(f"steps {steps!r} refer to rows {sorted(used)}, but {len(rows)} are given")
    for i, r in enumerate(rows):
        if r.is_complex():
            raise TypeError(f"rows[{i}] must be real or bool, got {r.dtype}")
        if r.device != hidden.device:
            raise ValueError(f"rows[{i}] is on {r.device}, hidden on {hidden.device}")
        wanted = hidden.shape[:-1]
        if not fits(r.shape, wanted):
            raise ValueError(
                f"rows[{i}] must broadcast to [..., S] = {tuple(wanted)}, got shape {tuple(r.shape)}"
            )
    if out_dtype is not None and out_dtype not in FLOATS:
        raise TypeError(f"out_dtype must be one of {FLOATS}, got {out_dtype}")


def _flat(hidden: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """[..., S, D] and [..., S] to [B, S, D] and [B, S]."""
    S = hidden.shape[-2]
    B = math.prod(hidden.shape[:-2])
    x = hidden if hidden.dim() == 3 else hidden.reshape(B, S, hidden.shape[-1])
    return x, [r.expand(hidden.shape[:-1]).reshape(B, S) for r in rows]


def _lower(p: Plan, x: Tensor, rows: Sequence[Tensor]) -> Lowered:
    """Call `lower`, with a mask of the tokens with finite hidden states if it needs one, at the cost of one pass."""
    finite = None
    if p.hoists and any(s.fn == "row_mul" for s in p.program) and x.numel():
        finite = torch.linalg.vector_norm(x, float("inf"), -1).isfinite()
    return lower(p, rows, compute_dtype(x), finite)


def _winner_dtype(S: int | torch.SymInt) -> torch.dtype:
    """The smallest signed integer dtype that holds a position s and -2 - s; int32 for a symbolic length, which must not
    be guarded on."""
    if isinstance(S, torch.SymInt):
        return torch.int32
    return torch.int8 if S < 128 else torch.int16 if S < 32768 else torch.int32


def _run(hidden, weight, bias, rows, steps, out_dtype, argmax, winner_dtype, even=False):
    _check(hidden, weight, bias, rows, steps, out_dtype)
    p = plan(steps, argmax)
    out_dtype = out_dtype or hidden.dtype
    lead, V = hidden.shape[:-2], weight.shape[0]
    x, flat_rows = _flat(hidden, rows)
    with autocast_off(hidden.device.type):
        if not suit_kernels(x, weight):
            low = _lower(p, x, flat_rows)
            values, winner, peak = aten.forward(
                x, weight, bias, flat_rows, low, out_dtype, winner_dtype, even
            )
            per_element = low.per_element
        else:
            values, winner, peak, per_element = _cuda_forward(
                x, weight, bias, flat_rows, p, out_dtype, winner_dtype
            )
    return values.view(*lead, V), winner, peak, per_element


def _cuda_forward(x, weight, bias, rows, p: Plan, out_dtype, winner_dtype):
    """(values, winner, peak, per_element)."""
    from ..kernels.splade_head import forward as kernel
    from ..kernels.splade_head.positions import classify

    low = None
    if p.hoists and rows:
        low = classify(p.program, rows, x, exhaustive=p.exhaustive)
    add, fill, per_element = (low.add, low.fill, low.per_element) if low else (None, None, None)
    outer, more = _epilogue(p, rows, per_element)
    out = kernel.forward(
        x, weight, bias, add, fill, outer,
        out_dtype=out_dtype, winner_dtype=winner_dtype, positions=low, **more,
    )  # fmt: skip
    return *out, per_element


def _epilogue(p: Plan, rows, per_element) -> tuple[Program, dict[str, Any]]:
    """The program that the kernels run after the maximum, and the extra arguments for sequences that need the general
    path."""
    if p.exhaustive:
        return p.scalar, {}
    general = {"inner": p.inner, "rows": rows, "per_element": per_element, "outer_fast": p.scalar}
    return p.outer, general


def _infer(hidden, weight, bias, rows, steps, out_dtype=None, argmax=False, even=False):
    rows = rows or []  # as in `_autograd`
    dtype = torch.int64 if argmax else None
    values, winner, _, _ = _run(hidden, weight, bias, rows, steps, out_dtype, argmax, dtype)
    return values, _positions(winner, values, argmax)


def _positions(winner: Tensor, values: Tensor, argmax: bool) -> Tensor:
    if not argmax:
        return values.new_empty(0, dtype=torch.int64)
    # If every position is -inf, the kernels return a negative position, torch.max returns the first.
    return winner.long().clamp_min_(0).view(values.shape)


def _train(hidden, weight, bias, rows, steps, out_dtype, argmax, winner_dtype, even=False):
    *saved, per_element = _run(
        hidden, weight, bias, rows, steps, out_dtype, argmax, winner_dtype, even
    )
    return *saved, hidden.new_empty(0, dtype=torch.bool) if per_element is None else per_element


def _backward(
    grad, hidden, weight, bias, rows, steps, winner, peak, per_element, argmax, needs, even=False
):
    x, flat_rows = _flat(hidden, rows)
    grad = grad.reshape(x.shape[0], weight.shape[0])
    # The forward has classified the row operands; the backward needs only which sequences take the general path.
    low = Lowered(plan(steps, argmax), None, None, per_element if len(per_element) else None)
    with autocast_off(hidden.device.type):
        if grad.numel() == 0:
            grads = tuple(t.zero_() for t in fake_gradients((x, weight, bias), needs, hidden))
        elif suit_kernels(x, weight):
            grads = _cuda_backward(grad, x, weight, bias, flat_rows, low, winner, peak, needs)
        else:
            grads = aten.backward(grad, x, weight, bias, flat_rows, low, winner, peak, needs, even)
    d_hidden, d_weight, d_bias = returned(grads, hidden)
    return d_hidden.view(hidden.shape) if needs[0] else d_hidden, d_weight, d_bias


def _cuda_backward(grad, x, weight, bias, rows, low: Lowered, winner, peak, needs):
    from ..kernels.splade_head import backward as kernel

    outer, more = _epilogue(low.plan, rows, low.per_element)
    return kernel.backward(grad, x, weight, bias, winner, peak, outer, needs=tuple(needs), **more)


class _SpladeHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, steps, out_dtype=None, argmax=False, even=False):
        _check(hidden, weight, bias, rows, steps, out_dtype)
        values, winner, peak, per_element = torch.ops.sparse_inductor.splade_head_train(
            hidden, weight, bias, rows, steps, out_dtype, argmax, _winner_dtype(hidden.shape[-2]), even
        )  # fmt: skip
        ctx.save_for_backward(hidden, weight, bias, winner, peak, per_element, *rows)
        ctx.steps, ctx.argmax, ctx.even = steps, argmax, even
        positions = _positions(winner, values, argmax)
        ctx.mark_non_differentiable(positions)
        return values, positions

    @staticmethod
    @first_order("splade_head")
    def backward(ctx, grad, _):
        hidden, weight, bias, winner, peak, per_element, *rows = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        grads = torch.ops.sparse_inductor.splade_head_backward(
            grad, hidden, weight, bias, rows, ctx.steps, winner, peak, per_element, ctx.argmax, needs, ctx.even
        )  # fmt: skip
        return *(g if n else None for g, n in zip(grads, needs)), *(None,) * 5


def _fake(hidden, weight, bias, rows, steps, out_dtype=None, argmax=False, even=False):
    _check(hidden, weight, bias, rows, steps, out_dtype)
    values = hidden.new_empty(*hidden.shape[:-2], weight.shape[0], dtype=out_dtype or hidden.dtype)
    positions = (
        torch.empty_like(values, dtype=torch.int64)
        if argmax
        else values.new_empty(0, dtype=torch.int64)
    )
    return values, positions


def _fake_train(hidden, weight, bias, rows, steps, out_dtype, argmax, winner_dtype, even=False):
    values, _ = _fake(hidden, weight, bias, rows, steps, out_dtype, argmax)
    B, V = math.prod(hidden.shape[:-2]), weight.shape[0]
    winner = hidden.new_empty(B, V, dtype=winner_dtype)
    peak = hidden.new_empty(B, V, dtype=compute_dtype(hidden))
    p = plan(steps, argmax)
    asked = p.hoists and not p.exhaustive and len(rows) > 0
    return values, winner, peak, hidden.new_empty(B if asked else 0, dtype=torch.bool)


def _fake_backward(
    grad, hidden, weight, bias, rows, steps, winner, peak, per_element, argmax, needs, even=False
):
    return fake_gradients((hidden, weight, bias), needs, hidden)


# Can be sharded over the batch or over the vocabulary (a column-sharded decoder).


def _shared(hidden, weight, bias, rows, *_) -> Rule:
    # The winner and peak are [B, V] with flattened leading dimensions, so with several of them B is no dimension of
    # the input and cannot be sharded.
    lead = "B.." if hidden.dim() == 3 else "." * hidden.dim()
    rows = (dims(r, lead[:-1]) for r in rows)
    values: Dims = ("B", "V") if hidden.dim() == 3 else ("",) * (hidden.dim() - 2) + ("V",)
    winner: Dims = ("B" if hidden.dim() == 3 else "", "V")
    inputs = (dims(hidden, lead), dims(weight, "V."), dims(bias, "V"), *rows)
    return Rule(inputs, (values, winner, winner, winner[:1]), ("B", "V"))


def _shared_values(hidden, weight, bias, rows, *_) -> Rule:
    rule = _shared(hidden, weight, bias, rows)
    # The positions are sharded as the values are.
    return dataclasses.replace(rule, outputs=rule.outputs[:1])


def _shared_backward(
    grad, hidden, weight, bias, rows, steps, winner, peak, per_element, *_
) -> Rule:
    rule = _shared(hidden, weight, bias, rows)
    values, *kept = rule.outputs
    if per_element.numel() == 0:
        kept[2] = ("",)
    return rule.backward((values,), kept, rule.inputs[:3])


_by_gradient = by_gradient("splade_head", _infer, _SpladeHead.apply, (0, 1, 2))


def _autograd(hidden, weight, bias, rows, *more):
    # An AOTInductor package passes None for an empty list of tensors.
    return _by_gradient(hidden, weight, bias, rows or [], *more)


register(_lib, "splade_head", _infer, _fake, _shared_values, _autograd)
register(_lib, "splade_head_train", _train, _fake_train, _shared)
register(_lib, "splade_head_backward", _backward, _fake_backward, _shared_backward)
