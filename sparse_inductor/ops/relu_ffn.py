"""The ReLU feed-forward block: y = down(f(gate(x)) * g(up(x))), at the cost of the neurons that are not zero.

    h = f(x Wg^T + bg) * g(x Wu^T + bu)          [..., N]; without Wu: h = f(x Wg^T + bg)
    y = h Wd^T + bd                              [..., D]; with a residual r: y = r + h Wd^T + bd

f is zero up to some number, so most of h is zero in a trained sparse model (TwELL, section 3). Three dispatcher
operators:

    relu_ffn            what a rewrite puts in; chooses by whether a gradient is needed
    relu_ffn_train      also returns the packed activations, at most `capacity(N)` a row
    relu_ffn_backward   every gradient over the same pattern

Exact for every input: a row with more active neurons than the packed format holds is computed by products of tiles.
Where the other factor of an inactive neuron is infinite or NaN, the neuron may contribute nothing or a NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import compat
from ..epilogue.steps import ROW, Program, parse, run
from ..epilogue.zero_threshold import zero_threshold
from ..layers import launches
from ..policy.popular import may_take_popular
from . import _relu_ffn_aten as aten
from ._arguments import as_rows, check_floats, differ, fake_gradients, returned
from ._dispatch import (
    as_autocast,
    autocast_off,
    call_below_autograd,
    define,
    first_order,
    large_scratch,
    outside_transforms,
    register,
)
from ._sharding import Dims, Rule, dims

_INPUTS = (
    "Tensor x, Tensor gate, Tensor? gate_bias, Tensor? up, Tensor? up_bias, Tensor down, Tensor? down_bias,"
    " str gate_steps, str up_steps, bool stats"
)
_PACKED = (
    "Tensor count, Tensor index, Tensor gates, Tensor ups,"
    " Tensor popular, Tensor popular_gates, Tensor popular_ups"
)
_lib = define(
    f"relu_ffn({_INPUTS}, Tensor? residual=None, int popular=0) -> (Tensor, Tensor)",
    f"relu_ffn_train({_INPUTS}, int popular=0)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"relu_ffn_backward(Tensor grad, Tensor d_stats, {_INPUTS}, {_PACKED}, bool[7] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


# fmt: off
@overload
def relu_ffn(
    x: Tensor, gate: Tensor, down: Tensor, up: Tensor | None = None, *,
    gate_bias: Tensor | None = None, up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    gate_steps: str = "relu", up_steps: str = "", return_stats: Literal[False] = False, residual: Tensor | None = None,
    popular: int = 0,
) -> Tensor: ...
@overload
def relu_ffn(
    x: Tensor, gate: Tensor, down: Tensor, up: Tensor | None = None, *,
    gate_bias: Tensor | None = None, up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    gate_steps: str = "relu", up_steps: str = "", return_stats: Literal[True], residual: Tensor | None = None,
    popular: int = 0,
) -> tuple[Tensor, Tensor]: ...
# fmt: on
def relu_ffn(
    x: Tensor,
    gate: Tensor,
    down: Tensor,
    up: Tensor | None = None,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_steps: str = "relu",
    up_steps: str = "",
    return_stats: bool = False,
    residual: Tensor | None = None,
    popular: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """A feed-forward block whose hidden activations are mostly zeros (TwELL, section 3).

    Args:
        x: tokens [..., K]; fp32, fp16, bf16 or fp64 (which has no kernel of its own); any strides.
        gate: [N, K], the projection that is rectified; any strides, the dtype of `x`, as all weights.
        down: [D, N].
        up: [N, K] or None for a block without a second factor.
        gate_bias, up_bias: [N] or None. down_bias: [D] or None.
        gate_steps: the elementwise program f after the gate projection, in the text form of
            `sparse_inductor.epilogue.steps`; must be 0 up to some number, as "relu", "relu | square",
            "threshold(0.1, 0.0)" or "add(-1.0) | relu" are.
        up_steps: the program g after the up projection; "" leaves it as it is.
        return_stats: also return statistics of every token.
        residual: [..., D] or None, in the dtype of the result, to which that is added, rounded as it is without.
        popular: how many neurons, the most active ones of a call, are taken by products over all tokens; the others
            are gathered; at most N / 2. A matter of speed, where neurons are unequally active: best those that more
            than one token in seventy activates. On Hopper GPUs, in 16 bits, of up to 32,768 neurons, without
            statistics; elsewhere it changes nothing.

    Returns:
        y [..., D], or (y, stats), stats [4, ...] in fp32 (fp64 for fp64): of f(gate(x)) the sum of absolute values
        and the number of non-zeros, then the same of the product h. The sums have a gradient.

    Raises:
        ValueError: shapes, steps or a number of neurons that do not fit, naming the offending value.
        TypeError: a dtype that is not accepted.
    """
    x, *weights = as_autocast(x, gate, gate_bias, up, up_bias, down, down_bias)
    y, stats = torch.ops.sparse_inductor.relu_ffn(
        x, *weights, gate_steps, up_steps, return_stats, residual, popular
    )
    return (y, stats) if return_stats else y


def capacity(N: int) -> int:
    """Active neurons a row that the packed format holds: a multiple of 32, all of a small N.

    Twice what is worth having packed on average (N / 45 on an H100 in bf16): rows are uneven, and a few rows that do
    not fit take as long as a tile of them.
    """
    return min(-(-N // 32) * 32, max(64, -(-N // (22 * 32)) * 32))


@functools.lru_cache(maxsize=256)
def _programs(gate_steps: str, up_steps: str) -> tuple[Program, Program, float]:
    f, g = parse(gate_steps), parse(up_steps)
    for name, program in (("gate_steps", f), ("up_steps", g)):
        rows = [s.fn for s in program if s.fn in ROW]
        if rows:
            raise ValueError(f"{name} takes no row operands, got {rows[0]!r}")
    at = zero_threshold(f)
    if at is None:
        raise ValueError(f"gate_steps must be 0 up to some number, got {gate_steps!r}")
    return f, g, at


def _check(x, gate, gate_bias, up, up_bias, down, down_bias, *, residual=None, popular=0) -> None:
    """Raises the errors that `relu_ffn` documents."""
    if x.dim() < 1:
        raise ValueError(f"x must be [..., K], got shape {tuple(x.shape)}")
    if gate.dim() != 2 or differ(gate.shape[1], x.shape[-1]):
        raise ValueError(
            f"gate must be [N, K] with K = {x.shape[-1]}, got shape {tuple(gate.shape)}"
        )
    N = gate.shape[0]
    if up is not None and (up.dim() != 2 or any(map(differ, up.shape, gate.shape))):
        raise ValueError(f"up must be [N, K] = {tuple(gate.shape)}, got shape {tuple(up.shape)}")
    if up is None and up_bias is not None:
        raise ValueError("up_bias is given without up")
    if down.dim() != 2 or differ(down.shape[1], N):
        raise ValueError(f"down must be [D, N] with N = {N}, got shape {tuple(down.shape)}")
    biases = (("gate_bias", gate_bias, N), ("up_bias", up_bias, N))
    for name, t, n in (*biases, ("down_bias", down_bias, down.shape[0])):
        if t is not None and (t.dim() != 1 or differ(t.shape[0], n)):
            raise ValueError(f"{name} must be [{n}], got shape {tuple(t.shape)}")
    shape = (*x.shape[:-1], down.shape[0])
    if residual is not None and (
        residual.dim() != len(shape) or any(map(differ, residual.shape, shape))
    ):
        raise ValueError(f"residual must be {shape}, got shape {tuple(residual.shape)}")
    if popular and not 0 <= 2 * popular <= N:
        raise ValueError(f"popular must be 0 to N / 2 = {N // 2}, got {popular}")
    check_floats(
        "x", x, gate=gate, gate_bias=gate_bias, up=up, up_bias=up_bias, down=down, down_bias=down_bias,
        residual=residual,
    )  # fmt: skip


def _has_kernels(x: Tensor, block: aten.Block) -> bool:
    """Whether the Triton kernels take this: the rest, empty or fp64, goes the ATen way on any device."""
    sizes = (*x.shape, *block.gate.shape, *block.down.shape)
    return launches(x) and x.dtype != torch.float64 and all(sizes)


def _wide(x: Tensor) -> torch.dtype:
    """What the statistics are summed in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _block(weights: Sequence[Any], gate_steps: str, up_steps: str) -> aten.Block:
    gate, gate_bias, up, up_bias, down, down_bias = weights
    f, g, at = _programs(gate_steps, up_steps)
    return aten.Block(gate, gate_bias, up, up_bias, down, down_bias, f, g, at)


def _empty_packed(x: Tensor, N, gated: bool, popular: int) -> aten.Packed:
    M = math.prod(x.shape[:-1])
    index = torch.int16 if isinstance(N, int) and N <= 32768 else torch.int32
    cap = capacity(N)
    return aten.Packed(
        x.new_empty(M, dtype=torch.int32),
        x.new_empty(M, cap, dtype=index),
        x.new_empty(M, cap),
        x.new_empty(M if gated else 0, cap),
        x.new_empty(popular, dtype=torch.int64),
        x.new_empty(M, popular),
        x.new_empty(M if gated else 0, popular),
    )


def _run(
    train, x, gate, gate_bias, up, up_bias, down, down_bias, gate_steps, up_steps, stats,
    residual=None, popular=0,
):  # fmt: skip
    """(y, statistics, what is packed)."""
    weights = (gate, gate_bias, up, up_bias, down, down_bias)
    _check(x, *weights, residual=residual, popular=popular)
    block = _block(weights, gate_steps, up_steps)
    lead = x.shape[:-1]
    flat = as_rows(x)
    numbers = flat.new_empty(4 if stats else 0, len(flat), dtype=_wide(x))
    N, gated = block.gate.shape[0], block.up is not None
    packed = _empty_packed(flat, N, gated, popular) if train else None
    with autocast_off(x.device.type):
        if _has_kernels(flat, block):
            from ..kernels.relu_ffn import forward as kernel

            cap = capacity(N)
            rest = None if residual is None else residual.reshape(len(flat), -1)
            apart = popular if may_take_popular(flat.dtype, N, flat.shape[1], stats) else 0
            y = kernel.forward(flat, block, numbers if stats else None, packed, cap, rest, apart)
        else:
            y = aten.forward(flat, block, numbers if stats else None, packed)
            if residual is not None:
                y += residual.reshape(y.shape)
    return y.view(*lead, y.shape[-1]), numbers.view(len(numbers), *lead), packed


def _infer(*call):
    return _run(False, *call)[:2]


def _train(*call):
    without_residual = (*call[:10], None, *call[10:])
    y, numbers, p = _run(True, *without_residual)
    return y, numbers, *_fields(p)


def _fields(p: aten.Packed) -> tuple[Tensor, ...]:
    return tuple(getattr(p, field.name) for field in dataclasses.fields(p))


def _backward(
    grad, d_stats, x, gate, gate_bias, up, up_bias, down, down_bias, gate_steps, up_steps, stats,
    count, index, gates, ups, popular, popular_gates, popular_ups, needs,
):  # fmt: skip
    weights = (gate, gate_bias, up, up_bias, down, down_bias)
    block = _block(weights, gate_steps, up_steps)
    flat = as_rows(x)
    dy = as_rows(grad)
    d_numbers = d_stats.reshape(4, -1) if stats else None
    packed = aten.Packed(count, index, gates, ups, popular, popular_gates, popular_ups)
    with autocast_off(x.device.type):
        if _has_kernels(flat, block):
            from ..kernels.relu_ffn import backward as kernel

            grads = kernel.backward(dy, d_numbers, flat, block, packed, needs)
        else:
            grads = aten.backward(dy, d_numbers, flat, block, packed, needs)
    dx, *others = returned(grads, x)
    return dx.view(x.shape) if needs[0] else dx, *others


class _ReluFfn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_steps, up_steps, stats, popular, *tensors):
        y, numbers, *packed = torch.ops.sparse_inductor.relu_ffn_train(
            *tensors, gate_steps, up_steps, stats, popular
        )
        ctx.save_for_backward(*tensors, *packed)
        ctx.call = gate_steps, up_steps, stats
        ctx.set_materialize_grads(False)  # autograd's zeros are no DTensors
        ctx.shapes = y.shape, numbers.shape
        return y, numbers

    @staticmethod
    @first_order("relu_ffn")
    def backward(ctx, grad, d_stats):
        saved = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[4:])
        if grad is None:
            grad = saved[0].new_zeros(ctx.shapes[0])
        if d_stats is None:
            d_stats = saved[0].new_zeros(ctx.shapes[1], dtype=_wide(saved[0]))
        grads = torch.ops.sparse_inductor.relu_ffn_backward(
            grad, d_stats, *saved[:7], *ctx.call, *saved[7:], needs
        )
        return None, None, None, None, *(g if n else None for g, n in zip(grads, needs))


def _autograd(
    x, gate, gate_bias, up, up_bias, down, down_bias, gate_steps, up_steps, stats,
    residual=None, popular=0,
):  # fmt: skip
    tensors = (x, gate, gate_bias, up, up_bias, down, down_bias)
    outside_transforms("relu_ffn", *tensors, residual)
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*tensors, residual)
    )
    if residual is not None and needs_grad:
        _check(*tensors, residual=residual)
        y, numbers = _autograd(*tensors, gate_steps, up_steps, stats, popular=popular)
        return residual + y, numbers
    if _dense_in_graphs(x, tensors, gate_steps, up_steps, stats):
        y, numbers = _dense(x, tensors[1:], gate_steps, up_steps, stats)
        return (y if residual is None else residual + y), numbers
    if needs_grad:
        return _ReluFfn.apply(gate_steps, up_steps, stats, popular, *tensors)
    args = (*tensors, gate_steps, up_steps, stats, residual, popular)
    return call_below_autograd(torch.ops.sparse_inductor.relu_ffn, _infer, args)


def _dense_in_graphs(x, tensors, gate_steps, up_steps, stats) -> bool:
    """Whether a graph is traced for a compiler in which so few tokens are known to come that nothing is packed, and so
    many that all weights are read: Inductor makes the better dense block."""
    if not x.is_cuda or type(x) in (Tensor, torch.nn.Parameter) or compat.keeps_operators():
        return False
    present = [t for t in tensors if t is not None]
    sizes = [n for t in present for n in (*t.shape, *t.stride())]
    block = _block(tensors[1:], gate_steps, up_steps)
    if not all(type(n) is int for n in sizes) or not _has_kernels(x, block):
        return False
    if not all(compat.plain_when_traced(type(t)) for t in present):
        return False
    from ..kernels.relu_ffn import forward as kernel

    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in present)
    flat = as_rows(x)
    few = kernel.is_few(len(flat), block.gate.shape[0])
    return few and (needs_grad or stats or not kernel.decode.applies(flat, block))


def saves_nothing(device: torch.device, dtype: torch.dtype, tokens: int, neurons: int) -> bool:
    """Whether a compiled training step keeps what it would keep unrewritten: a block of so few tokens is ATen's
    operators again on a GPU (`_dense_in_graphs`)."""
    if device.type != "cuda" or dtype == torch.float64:
        return False
    from ..kernels.relu_ffn import forward as kernel

    return kernel.is_few(tokens, neurons)


def _dense(x, weights, gate_steps, up_steps, stats):
    """(y, statistics), of ATen's operators."""
    block = _block(weights, gate_steps, up_steps)
    with autocast_off(x.device.type):
        h = a = run(block.f, block.wide(F.linear(x, block.gate, block.gate_bias)))
        if block.up is not None:
            h = a * run(block.g, block.wide(F.linear(x, block.up, block.up_bias)))
        y = F.linear(h.to(x.dtype), block.down, block.down_bias)
        if not stats:
            return y, x.new_empty(0, *x.shape[:-1], dtype=_wide(x))
        numbers = [n for t in (a, h) for n in (t.abs().sum(-1), (t != 0).sum(-1))]
        return y, torch.stack([n.to(_wide(x)) for n in numbers])


def _fake(
    x, gate, gate_bias, up, up_bias, down, down_bias, gate_steps, up_steps, stats,
    residual=None, popular=0,
):  # fmt: skip
    weights = (gate, gate_bias, up, up_bias, down, down_bias)
    _check(x, *weights, residual=residual, popular=popular)
    _programs(gate_steps, up_steps)
    lead = x.shape[:-1]
    numbers = x.new_empty(4 if stats else 0, *lead, dtype=_wide(x))
    return x.new_empty(*lead, down.shape[0]), numbers


def _fake_train(
    x, gate, gate_bias, up, up_bias, down, down_bias, gate_steps, up_steps, stats, popular=0
):
    weights = (gate, gate_bias, up, up_bias, down, down_bias)
    y, numbers = _fake(x, *weights, gate_steps, up_steps, stats, popular=popular)
    return y, numbers, *_fields(_empty_packed(x, gate.shape[0], up is not None, popular))


def _fake_backward(
    grad, d_stats, x, gate, gate_bias, up, up_bias, down, down_bias, gate_steps, up_steps, stats,
    count, index, gates, ups, popular, popular_gates, popular_ups, needs,
):  # fmt: skip
    tensors = (x, gate, gate_bias, up, up_bias, down, down_bias)
    return fake_gradients(tensors, needs, x)


# Spread over the tokens, or over the neurons: gate and up by column, down by row, results that are summands.


def _shared(x, gate, gate_bias, up, up_bias, down, down_bias, *_) -> Rule:
    tokens: Dims = ("T",) + ("",) * (x.dim() - 2) if x.dim() > 1 else ()
    packed: Dims = ("TN", "")
    return Rule(
        (
            (*tokens, ""), dims(gate, "N."), dims(gate_bias, "N"), dims(up, "N."), dims(up_bias, "N"),
            dims(down, ".N"), dims(down_bias, "."),
        ),
        ((*tokens, ""), ("", *tokens), ("TN",), *(packed,) * 3, ("TN",), packed, packed),
        ("T", "N") if down_bias is None else ("T",),  # a bias would be added by everybody
        sums=True,
    )  # fmt: skip


def _shared_with_residual(*args) -> Rule:
    rule = _shared(*args)
    if len(args) < 11 or args[10] is None:
        return rule
    return dataclasses.replace(rule, inputs=(*rule.inputs, rule.outputs[0]), ways=("T",))


def _shared_backward(grad, d_stats, *args) -> Rule:
    rule = _shared(*args)
    return rule.backward(rule.outputs[:2], rule.outputs[2:], rule.inputs)


large_scratch.update((_infer, _train, _backward))
register(_lib, "relu_ffn", _infer, _fake, _shared_with_residual, _autograd)
register(_lib, "relu_ffn_train", _train, _fake_train, _shared)
register(_lib, "relu_ffn_backward", _backward, _fake_backward, _shared_backward)
