"""The ReLU feed-forward block: y = down(f(gate(x)) * g(up(x))), with up and down computed for active neurons only.

    h = f(x Wg^T + bg) * g(x Wu^T + bu)          [..., N]; without Wu: h = f(x Wg^T + bg)
    y = h Wd^T + bd                              [..., D]; with a residual r: y = r + h Wd^T + bd

f is zero up to some threshold, so most of h is zero in a trained sparse model (TwELL, section 3). There are three
dispatcher operators:

    relu_ffn            inserted by a rewrite; calls the next two if a gradient is needed
    relu_ffn_train      also returns the packed activations, at most `capacity(N)` per row
    relu_ffn_backward   every gradient over the same sparsity pattern

The result is exact for every input: a row with more active neurons than the packed format holds is computed by dense
products of tiles. If the other factor of an inactive neuron is infinite or NaN, the neuron may contribute either
nothing or a NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import compat
from ..epilogue.steps import ROW, Program, parse, run
from ..epilogue.zero_threshold import zero_threshold
from ..layers import launches
from ..policy.popular import may_take_popular
from . import _relu_ffn_aten as aten
from ._arguments import (
    arguments,
    as_rows,
    check_floats,
    check_shape,
    fake_gradients,
    is_column_major,
    returned,
    shifted,
)
from ._dispatch import (
    as_autocast,
    autocast_off,
    call_below_autograd,
    define,
    first_order,
    outside_transforms,
    recorded,
    register,
)
from ._sharding import Dims, Rule, dims

_INPUTS = (
    "Tensor x, Tensor gate, Tensor? gate_bias, Tensor? up, Tensor? up_bias, Tensor down, Tensor? down_bias,"
    " Tensor? stat_weight, Tensor? thresholds, str gate_steps, str up_steps, bool stats, bool counts"
)
_TENSORS, _SETTINGS = 9, 13  # the number of leading tensors, and of all arguments in _INPUTS
_OPTIONS = "Tensor? residual=None, int popular=0, Tensor? shift=None"
_Call = arguments(f"{_INPUTS}, {_OPTIONS}")
_PACKED = (
    "Tensor count, Tensor index, Tensor gates, Tensor ups,"
    " Tensor popular, Tensor popular_gates, Tensor popular_ups"
)
_lib = define(
    f"relu_ffn({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    f"relu_ffn_train({_INPUTS}, int popular=0)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"relu_ffn_backward(Tensor grad, Tensor d_stats, {_INPUTS}, {_PACKED}, bool[9] needs, bool[3] column_major)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


# fmt: off
@overload
def relu_ffn(
    x: Tensor, gate: Tensor, down: Tensor, up: Tensor | None = None, *,
    gate_bias: Tensor | None = None, up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    gate_steps: str = "relu", up_steps: str = "", return_stats: Literal[False] = False, residual: Tensor | None = None,
    popular: int = 0, shift: Tensor | None = None, thresholds: Tensor | None = None,
) -> Tensor: ...
@overload
def relu_ffn(
    x: Tensor, gate: Tensor, down: Tensor, up: Tensor | None = None, *,
    gate_bias: Tensor | None = None, up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    gate_steps: str = "relu", up_steps: str = "", return_stats: Literal[True], stat_weight: Tensor | None = None,
    return_counts: Literal[False] = False, residual: Tensor | None = None, popular: int = 0,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def relu_ffn(
    x: Tensor, gate: Tensor, down: Tensor, up: Tensor | None = None, *,
    gate_bias: Tensor | None = None, up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    gate_steps: str = "relu", up_steps: str = "", return_stats: Literal[True], stat_weight: Tensor | None = None,
    return_counts: Literal[True], residual: Tensor | None = None, popular: int = 0, shift: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
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
    stat_weight: Tensor | None = None,
    return_counts: bool = False,
    residual: Tensor | None = None,
    popular: int = 0,
    shift: Tensor | None = None,
    thresholds: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """A feed-forward block whose hidden activations are mostly zeros (TwELL, section 3).

    Args:
        x: tokens [..., K]; fp32, fp16, bf16 or fp64 (computed by ATen, without a kernel); any strides.
        gate: [N, K], the projection that is rectified; any strides. All weights have the dtype of `x`.
        down: [D, N].
        up: [N, K] or None for a block without a second factor.
        gate_bias, up_bias: [N] or None. down_bias: [D] or None.
        gate_steps: the elementwise program f after the gate projection, in the text form of
            `sparse_inductor.epilogue.steps`; must be 0 up to some threshold, as "relu", "relu | square",
            "threshold(0.1, 0.0)" and "add(-1.0) | relu" are.
        up_steps: the program g after the up projection; "" is the identity.
        return_stats: also return statistics of every token.
        stat_weight: [N] in the dtype of `x` or fp32, or None. With `return_stats`, adds a fifth statistic, the sum of
            h * stat_weight. An example is a sparse autoencoder whose L1 term is weighted by the norms of its decoder's
            rows. `stat_weight` has a gradient.
        return_counts: with `return_stats`, also return for each neuron the number of tokens at which it is not 0.
        residual: [..., D] or None, in the dtype of the result. It is added to the result after the result has been
            rounded to its dtype.
        popular: the number of neurons, the most active ones of a call, that are computed by dense products over all
            tokens; the others are gathered. At most N / 2. Affects speed only, where neurons are unequally active; a
            good choice is the number of neurons that more than one token in seventy activates. Used on Hopper GPUs
            in 16 bits with up to 32,768 neurons and without statistics; ignored elsewhere.
        shift: [K] or None, subtracted from `x`. If `x` needs no gradient, the gradient of `shift` costs a
            matrix-vector product.
        thresholds: [N] or None. A neuron is active where its gate projection is above its threshold, and 0 elsewhere
            regardless of `gate_steps`, as in JumpReLU. Cannot be combined with `up`, `return_stats` or `popular`. The
            thresholds get no gradient.

    Returns:
        y [..., D], or (y, stats) or (y, stats, counts). stats [4 or 5, ...] in fp32 (fp64 for fp64 inputs): the sum of
        absolute values and the number of non-zeros of f(gate(x)), the same two of the product h, then the weighted sum
        of h. The sums have a gradient. counts [N], int32: the number of tokens at which h is not 0.

    Raises:
        ValueError: shapes, steps or a number of neurons that do not fit, naming the offending value; `stat_weight` or
            `return_counts` without `return_stats`; `thresholds` with an argument that it cannot be combined with.
        TypeError: a dtype that is not accepted.
    """
    if not return_stats and (stat_weight is not None or return_counts):
        given = "return_counts" if stat_weight is None else "stat_weight"
        raise ValueError(f"{given} is given without return_stats")
    x, *weights, thresholds, shift = as_autocast(
        x, gate, gate_bias, up, up_bias, down, down_bias, thresholds, shift
    )
    settings = gate_steps, up_steps, return_stats, return_counts
    y, stats, counts = torch.ops.sparse_inductor.relu_ffn(
        x, *weights, stat_weight, thresholds, *settings, residual, popular, shift
    )
    return (y, stats, counts) if return_counts else (y, stats) if return_stats else y


def capacity(N: int) -> int:
    """The number of active neurons per row that the packed format holds: a multiple of 32, all neurons for a small N.

    Twice the average count up to which packing pays off (N / 45 on an H100 in bf16), because counts differ between
    rows and a few rows that do not fit take as long as a full tile of them.
    """
    return min(-(-N // 32) * 32, max(64, -(-N // (22 * 32)) * 32))


@functools.lru_cache(maxsize=256)
def _programs(gate_steps: str, up_steps: str, jumps: bool) -> tuple[Program, Program, float]:
    """(f, g, the number up to which f is 0). The last is -inf and unused if neurons have thresholds (`jumps`)."""
    f, g = parse(gate_steps), parse(up_steps)
    for name, program in (("gate_steps", f), ("up_steps", g)):
        rows = [s.fn for s in program if s.fn in ROW]
        if rows:
            raise ValueError(f"{name} takes no row operands, got {rows[0]!r}")
    at = -math.inf if jumps else zero_threshold(f)
    if at is None:
        raise ValueError(f"gate_steps must be 0 up to some number, got {gate_steps!r}")
    return f, g, at


def _check(c) -> None:
    """Raises the errors that `relu_ffn` documents."""
    x, gate, up, down = c.x, c.gate, c.up, c.down
    if x.dim() < 1:
        raise ValueError(f"x must be [..., K], got shape {tuple(x.shape)}")
    check_shape("gate", gate, (None, x.shape[-1]), "[N, K] with K = {1}")
    N = gate.shape[0]
    check_shape("up", up, gate.shape, "[N, K] = ({0}, {1})")
    if up is None and c.up_bias is not None:
        raise ValueError("up_bias is given without up")
    check_shape("down", down, (None, N), "[D, N] with N = {1}")
    for name in ("gate_bias", "up_bias", "stat_weight", "thresholds"):
        check_shape(name, getattr(c, name), (N,))
    check_shape("down_bias", c.down_bias, down.shape[:1])
    check_shape("shift", c.shift, x.shape[-1:])
    shape = (*x.shape[:-1], down.shape[0])
    check_shape("residual", c.residual, shape, str(shape))
    if c.popular and not 0 <= 2 * c.popular <= N:
        raise ValueError(f"popular must be 0 to N / 2 = {N // 2}, got {c.popular}")
    check_floats(
        "x", x, gate=gate, gate_bias=c.gate_bias, up=up, up_bias=c.up_bias, down=down, down_bias=c.down_bias,
        residual=c.residual, shift=c.shift, thresholds=c.thresholds,
    )  # fmt: skip
    if c.thresholds is not None and (up is not None or c.popular):
        raise ValueError(f"thresholds are given with {'up' if up is not None else 'popular'}")
    if c.stat_weight is not None and c.stat_weight.dtype != torch.float32:
        check_floats("x", x, stat_weight=c.stat_weight)


def _has_kernels(x: Tensor, block: aten.Block) -> bool:
    """Whether the Triton kernels support this call; ATen computes fp64 and empty operands on every device."""
    sizes = (*x.shape, *block.gate.shape, *block.down.shape)
    return launches(x) and x.dtype != torch.float64 and all(sizes)


def _wide(x: Tensor) -> torch.dtype:
    """The dtype in which statistics are summed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _block(c) -> aten.Block:
    f, g, at = _programs(c.gate_steps, c.up_steps, c.thresholds is not None)
    thresholds = None if c.thresholds is None else c.thresholds.contiguous()
    weights = c.gate, c.gate_bias, c.up, c.up_bias, c.down, c.down_bias
    return aten.Block(*weights, f, g, at, thresholds)


def _empty_statistics(x: Tensor, c) -> tuple[Tensor, Tensor]:
    """(statistics of the tokens, counts of the neurons), empty tensors if they are not requested."""
    rows = 0 if not c.stats else 4 if c.stat_weight is None else 5
    numbers = x.new_empty(rows, *x.shape[:-1], dtype=_wide(x))
    return numbers, x.new_zeros(c.gate.shape[0] if c.counts else 0, dtype=torch.int32)


def _empty_packed(x: Tensor, c) -> aten.Packed:
    M, N = math.prod(x.shape[:-1]), c.gate.shape[0]
    index = torch.int16 if isinstance(N, int) and N <= 32768 else torch.int32
    cap, of_up = capacity(N), 0 if c.up is None else M
    return aten.Packed(
        x.new_empty(M, dtype=torch.int32),
        x.new_empty(M, cap, dtype=index),
        x.new_empty(M, cap),
        x.new_empty(of_up, cap),
        x.new_empty(c.popular, dtype=torch.int64),
        x.new_empty(M, c.popular),
        x.new_empty(of_up, c.popular),
    )


def _run(train, c):
    """(y, statistics, counts, packed activations or None)."""
    _check(c)
    block = _block(c)
    if c.stats and c.thresholds is not None:
        raise ValueError("thresholds are given with return_stats")
    lead = c.x.shape[:-1]
    x, N = as_rows(shifted(c.x, c.shift)), c.gate.shape[0]
    numbers, active = _empty_statistics(x, c)
    counts = active if c.counts else None
    wanted = aten.Statistics(numbers, c.stat_weight, counts) if c.stats else None
    packed = _empty_packed(x, c) if train else None
    with autocast_off(x.device.type):
        if _has_kernels(x, block):
            from ..kernels.relu_ffn import forward as kernel

            cap = capacity(N)
            rest = None if c.residual is None else c.residual.reshape(len(x), -1)
            apart = c.popular if may_take_popular(x.dtype, N, x.shape[1], c.stats) else 0
            y = kernel.forward(x, block, wanted, packed, cap, rest, apart)
        else:
            y = aten.forward(x, block, wanted, packed)
            if c.residual is not None:
                y += c.residual.reshape(y.shape)
    return y.view(*lead, y.shape[-1]), numbers.view(len(numbers), *lead), active, packed


def _infer(*call):
    return _run(False, _Call(*call))[:3]


def _of_training(call):
    """The arguments of `relu_ffn_train`."""
    return _Call(*call[:_SETTINGS], None, *call[_SETTINGS:])


def _train(*call):
    y, numbers, active, p = _run(True, _of_training(call))
    return y, numbers, active, *_fields(p)


def _fields(p: aten.Packed) -> tuple[Tensor, ...]:
    return tuple(getattr(p, field.name) for field in dataclasses.fields(p))


def _backward(grad, d_stats, *call):
    c, (*fields, needs, column_major) = _Call(*call[:_SETTINGS]), call[_SETTINGS:]
    block, x, dy = _block(c), as_rows(c.x), as_rows(grad)
    d_numbers = d_stats.reshape(len(d_stats), -1) if c.stats else None
    packed = aten.Packed(*fields)
    with autocast_off(x.device.type):
        if _has_kernels(x, block):
            from ..kernels.relu_ffn import backward as kernel

            grads = kernel.backward(
                dy, d_numbers, c.stat_weight, x, block, packed, needs, column_major
            )
        else:
            grads = aten.backward(
                dy, d_numbers, c.stat_weight, x, block, packed, needs, column_major
            )
    dx, *others = returned([*grads, None], c.x)  # the thresholds have no gradient
    return dx.view(c.x.shape) if needs[0] else dx, *others


class _ReluFfn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, popular, shift, x, *tensors):
        tensors = (shifted(x, shift), *tensors)
        y, numbers, counts, *packed = torch.ops.sparse_inductor.relu_ffn_train(
            *tensors, *settings, popular
        )
        ctx.save_for_backward(*tensors, *packed)
        ctx.settings = settings
        ctx.mark_non_differentiable(counts)
        ctx.set_materialize_grads(False)  # autograd would materialize plain tensors, not DTensors
        ctx.shapes = y.shape, numbers.shape
        return y, numbers, counts

    @staticmethod
    @first_order("relu_ffn")
    def backward(ctx, grad, d_stats, _):
        saved = ctx.saved_tensors
        tensors, packed = saved[:_TENSORS], saved[_TENSORS:]
        x, gate, gate_bias, up, _, down, *_ = tensors
        for_shift, *wanted = ctx.needs_input_grad[2:]
        needs = [*wanted[:-1], False]
        if for_shift and not needs[0]:
            # The gradient of x summed over all tokens is Wg^T times the gradient of the gate's bias.
            by_bias = gate_bias is not None and up is None
            needs[2 if by_bias else 0] = True
        if grad is None:
            grad = x.new_zeros(ctx.shapes[0])
        if d_stats is None:
            d_stats = x.new_zeros(ctx.shapes[1], dtype=_wide(x))
        column_major = [t is not None and is_column_major(t) for t in (gate, up, down)]
        grads = torch.ops.sparse_inductor.relu_ffn_backward(
            grad, d_stats, *tensors, *ctx.settings, *packed, needs, column_major
        )
        d_shift = None
        if for_shift:
            d_shift = -as_rows(grads[0]).sum(0) if needs[0] else -torch.mv(gate.t(), grads[2])
        return None, None, d_shift, *(g if n else None for g, n in zip(grads, needs))


def _autograd(*call):
    c = _Call(*call)
    tensors = c[:_TENSORS]
    outside_transforms("relu_ffn", *tensors, c.residual, c.shift)
    needs_grad = recorded(*tensors, c.residual, c.shift)
    if c.residual is not None and needs_grad:
        _check(c)
        y, *others = _autograd(*c._replace(residual=None))
        return c.residual + y, *others
    if _dense_in_graphs(c):
        y, *others = _dense(c._replace(x=shifted(c.x, c.shift)))
        return (y if c.residual is None else c.residual + y), *others
    if needs_grad:
        return _ReluFfn.apply(c[_TENSORS:_SETTINGS], c.popular, c.shift, *tensors)
    return call_below_autograd(torch.ops.sparse_inductor.relu_ffn, _infer, c)


def _dense_in_graphs(c) -> bool:
    """Whether a graph is being traced for a compiler, with a number of tokens that is too small for packing and too
    large for reading only the active weights. Inductor's dense block is faster in this case."""
    x = c.x
    if not x.is_cuda or type(x) in (Tensor, torch.nn.Parameter) or compat.keeps_operators():
        return False
    present = [t for t in c[:_TENSORS] if t is not None]
    sizes = [n for t in present for n in (*t.shape, *t.stride())]
    block = _block(c)
    if not all(type(n) is int for n in sizes) or not _has_kernels(x, block):
        return False
    if not all(compat.plain_when_traced(type(t)) for t in present):
        return False
    from ..kernels.relu_ffn import forward as kernel

    needs_grad = recorded(*present)
    flat = as_rows(x)
    few = kernel.is_few(len(flat), block.gate.shape[0])
    return few and (needs_grad or c.stats or not kernel.decode.applies(flat, block))


def saves_nothing(device: torch.device, dtype: torch.dtype, tokens: int, neurons: int) -> bool:
    """Whether a compiled training step saves the same tensors as without the rewrite: on a GPU a block with few tokens
    is traced as ATen operators (`_dense_in_graphs`)."""
    if device.type != "cuda" or dtype == torch.float64:
        return False
    from ..kernels.relu_ffn import forward as kernel

    return kernel.is_few(tokens, neurons)


def _dense(c):
    """(y, statistics, counts), computed by ATen operators."""
    x, block, weight = c.x, _block(c), c.stat_weight
    with autocast_off(x.device.type):
        gate = F.linear(x, block.gate, block.gate_bias)
        h = a = run(block.f, block.wide(gate))
        if block.thresholds is not None:
            h = a = torch.where(block.active(gate), a, 0.0)
        if block.up is not None:
            h = a * run(block.g, block.wide(F.linear(x, block.up, block.up_bias)))
        y = F.linear(h.to(x.dtype), block.down, block.down_bias)
        numbers, active = _empty_statistics(x, c)
        if c.stats:
            found = [n for t in (a, h) for n in (t.abs().sum(-1), (t != 0).sum(-1))]
            found += [] if weight is None else [(h * block.wide(weight)).sum(-1)]
            numbers = torch.stack([n.to(_wide(x)) for n in found])
        if c.counts:
            active = (as_rows(h) != 0).sum(0).to(torch.int32)
        return y, numbers, active


def _fake(*call):
    c = _Call(*call)
    _check(c)
    _programs(c.gate_steps, c.up_steps, c.thresholds is not None)
    return c.x.new_empty(*c.x.shape[:-1], c.down.shape[0]), *_empty_statistics(c.x, c)


def _fake_train(*call):
    c = _of_training(call)
    return *_fake(*c), *_fields(_empty_packed(c.x, c))


def _fake_backward(grad, d_stats, *call):
    tensors, (needs, column_major) = call[:_TENSORS], call[-2:]
    found = list(fake_gradients(tensors, needs, tensors[0]))
    for i, by_columns in zip((1, 3, 5), column_major):
        if by_columns and needs[i]:
            found[i] = found[i].t().contiguous().t()
    return tuple(found)


# Can be sharded over the tokens, or over the neurons: gate and up by column, down by row, with partial sums as results.


def _shared(*call) -> Rule:
    c = _Call(*call[:_SETTINGS])
    tokens: Dims = ("T",) + ("",) * (c.x.dim() - 2) if c.x.dim() > 1 else ()
    packed: Dims = ("TN", "")
    counts: Dims = ("N",) if c.counts else ("",)
    # The weights and biases, stat_weight and thresholds.
    letters = ("N.", "N", "N.", "N", ".N", ".", "N", "N")
    return Rule(
        ((*tokens, ""), *map(dims, c[1:_TENSORS], letters)),
        ((*tokens, ""), ("", *tokens), counts, ("TN",), *(packed,) * 3, ("TN",), packed, packed),
        ("T", "N") if c.down_bias is None else ("T",),  # each shard of N would add the bias
        sums=True,
    )


def _shared_inference(*call) -> Rule:
    rule, c = _shared(*call), _Call(*call)
    if c.residual is not None:
        rule = dataclasses.replace(rule, inputs=(*rule.inputs, rule.outputs[0]), ways=("T",))
    return dataclasses.replace(rule, inputs=(*rule.inputs, dims(c.shift, ".")))


def _shared_backward(grad, d_stats, *args) -> Rule:
    rule = _shared(*args)
    return rule.backward(rule.outputs[:2], rule.outputs[3:], rule.inputs)


register(_lib, "relu_ffn", _infer, _fake, _shared_inference, _autograd)
register(_lib, "relu_ffn_train", _train, _fake_train, _shared)
register(_lib, "relu_ffn_backward", _backward, _fake_backward, _shared_backward)
