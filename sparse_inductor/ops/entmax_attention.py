"""Entmax attention: out = entmax_alpha(scores) v, without the [B, H, Lq, Lk] probabilities (AdaSplash, Sec. 3).

    scores = scale * q k^T + bias, then `fill` where the mask or causality drops a key
    p = [(alpha - 1) scores - tau]_+^(1 / (alpha - 1)),    out = p v

There are three dispatcher operators:

    entmax_attention            inserted by a rewrite; saves nothing for a backward
    entmax_attention_train      also returns a few numbers per query for the backward
    entmax_attention_backward   gradients of q, k, v, bias and alpha
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..layers import has_kernels, launches
from . import _entmax_aten as rows
from . import _entmax_attention_aten as aten
from ._arguments import (
    FLOATS,
    arguments,
    check_floats,
    check_shape,
    fake_gradients,
    fits,
    known,
    returned,
)
from ._dispatch import (
    as_autocast,
    autocast_off,
    by_gradient,
    define,
    first_order,
    register,
)
from ._sharding import Dims, Rule, dims
from .entmax import UNDEFINED, check_alpha

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? alpha, Tensor? query_lengths,"
    " Tensor? key_lengths"
)
# A fill of None stands for -inf, which an AOTInductor package cannot store.
_NUMBERS = "float alpha_value, float scale, float? fill, bool causal, bool added"
_Call = arguments(f"{_INPUTS}, {_NUMBERS}, {UNDEFINED}")
_lib = define(
    f"entmax_attention({_INPUTS}, {_NUMBERS}, {UNDEFINED}) -> Tensor",
    f"entmax_attention_train({_INPUTS}, {_NUMBERS}, {UNDEFINED}) -> (Tensor, Tensor[])",
    f"entmax_attention_backward(Tensor grad, {_INPUTS}, Tensor out, Tensor[] saved, {_NUMBERS}, bool[5] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def entmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: float | Tensor = 1.5,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    *,
    fill: float = -math.inf,
    added: bool = False,
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """Attention whose probabilities are entmax of the scores, in memory linear in the lengths.

    Args:
        q: queries [B, H, Lq, D], or [B, Lq, D] (one head); fp32, fp16, bf16 or fp64; any strides.
        k: keys [B, Hkv, Lk, D], where H is a multiple of Hkv; query head h reads key head h // (H / Hkv).
        v: values [B, Hkv, Lk, Dv].
        alpha: above 1; a number, or a tensor that broadcasts to [B, H, Lq, 1] and may require a gradient.
            Entries of a tensor are not checked: if one is at or below 1, the result for its rows is undefined.
        scale: factor of the products q k^T; default D ** -0.5.
        mask: bool, broadcasts to [B, H, Lq, Lk], True where a key is kept.
        bias: floating, broadcasts to [B, H, Lq, Lk], added to the scores; may require a gradient.
        causal: query i keeps the keys j <= i + Lk - Lq, that is, the last query is aligned with the last key.
        fill: the score of keys that `mask` or `causal` drop. A finite fill is treated like any other score: a query
            that keeps no key averages all values.
        added: the program adds the fill to the dropped scores, which vanish in the sum by rounding; so dropped scores
            pass their gradient on to q, k and bias. With such a low fill this affects only queries that keep no key.
        query_lengths: [B] integers; queries at or after this position are padding and give zeros.
        key_lengths: [B] integers; keys at or after this position are padding and are ignored.

    With 3-D inputs mask, bias and alpha have no head dimension either.

    Returns:
        [B, H, Lq, Dv] (or [B, Lq, Dv]) in the dtype of q. Scores and probabilities are fp32 (fp64 for fp64 inputs). A
        query whose scores are all -inf gives zeros and no gradient; NaN in a query's scores gives NaN.

    Raises:
        ValueError: shapes or numbers that do not fit, naming the offending value.
        TypeError: a dtype that is not accepted.
    """
    q, k, v = as_autocast(q, k, v)
    flat = q.dim() == 3
    if flat:
        if k.dim() != 3 or v.dim() != 3:
            raise ValueError(
                f"q is [B, Lq, D], so k and v must have 3 dimensions, got {tuple(k.shape)} and {tuple(v.shape)}"
            )
        q, k, v = (t.unsqueeze(1) for t in (q, k, v))
    number, alpha = (0.0, alpha) if isinstance(alpha, Tensor) else (float(alpha), None)
    out = torch.ops.sparse_inductor.entmax_attention(
        q,
        k,
        v,
        _four("bias", bias, flat),
        _four("mask", mask, flat),
        _four("alpha", alpha, flat),
        query_lengths,
        key_lengths,
        number,
        q.shape[-1] ** -0.5 if scale is None else scale,
        None if fill == -math.inf else fill,
        causal,
        added,
    )
    return out.squeeze(1) if flat else out


def _four(name: str, t: Tensor | None, flat: bool) -> Tensor | None:
    """Reshape a tensor that broadcasts to [B, H, .., ..] to four dimensions. flat: it has no head dimension."""
    if t is None:
        return None
    most = 3 if flat else 4
    if t.dim() > most:
        raise ValueError(f"{name} must have at most {most} dimensions, got shape {tuple(t.shape)}")
    t = t.reshape((1,) * (most - t.dim()) + t.shape)
    return t.unsqueeze(1) if flat else t


def _check(c) -> None:
    """Raises the errors that `entmax_attention` documents."""
    q, k, v = c.q, c.k, c.v
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise ValueError(f"{name} must be [B, H, L, D], got shape {tuple(t.shape)}")
    check_floats("q", q, k=k, v=v)
    (B, H, Lq, D), (_, Hkv, Lk, _) = q.shape, k.shape
    check_shape("k", k, (B, Hkv, Lk, D), "[B, Hkv, Lk, D] with B = {0} and D = {3} of q")
    check_shape("v", v, (B, Hkv, Lk, None), "[B, Hkv, Lk, Dv] = [{0}, {1}, {2}, Dv] as k is")
    if known(H, Hkv) and (H % Hkv if Hkv else H):
        raise ValueError(f"q has {H} heads, which is no multiple of the {Hkv} heads of k")
    for name in ("bias", "mask", "alpha", "query_lengths", "key_lengths"):
        t = getattr(c, name)
        if t is not None and t.device != q.device:
            raise ValueError(f"{name} is on {t.device}, q on {q.device}")
    for name, shape in (
        ("bias", (B, H, Lq, Lk)),
        ("mask", (B, H, Lq, Lk)),
        ("alpha", (B, H, Lq, 1)),
    ):
        t = getattr(c, name)
        if t is not None and (t.dim() != 4 or not fits(t.shape, shape)):
            raise ValueError(f"{name} must broadcast to {tuple(shape)}, got shape {tuple(t.shape)}")
    if c.bias is not None and c.bias.dtype not in FLOATS:
        raise TypeError(f"bias must be one of {FLOATS}, got {c.bias.dtype}")
    if c.mask is not None and c.mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool (True keeps a key), got {c.mask.dtype}")
    for name in ("query_lengths", "key_lengths"):
        t = getattr(c, name)
        check_shape(name, t, (B,), "[B] = [{0}]")
        if t is not None and (t.dtype.is_floating_point or t.dtype == torch.bool or t.is_complex()):
            raise TypeError(f"{name} must be integers, got {t.dtype}")
    check_alpha(c.alpha, c.alpha_value, q)
    if c.fill is not None and (math.isnan(c.fill) or c.fill == math.inf):
        raise ValueError(f"fill must be finite or -inf, got {c.fill}")
    if not math.isfinite(c.scale):
        raise ValueError(f"scale must be finite, got {c.scale}")


def _kernels(c):
    """(the kernels' module, or None if it does not support the call; its keyword arguments; the terms for chunked
    ATen)."""
    named = {name: getattr(c, name) for name in c._fields[3:-1]}
    if c.fill is None:
        named["fill"] = -math.inf
    kernels = None
    if has_kernels(c.q):
        try:
            from ..kernels.entmax_attention import attention as module

            kernels = module if module.applies(c.q, c.k, c.v, **named) else None
        except ImportError:
            if launches(c.q):
                raise
    alpha = c.alpha_value if c.alpha is None else c.alpha
    rest = {name: t for name, t in named.items() if name not in ("alpha", "alpha_value")}
    return kernels, named, aten.Terms(alpha=alpha, **rest)


def _forward(c, training):
    _check(c)
    q, k, v, undefined = c.q, c.k, c.v, c.undefined
    rows.check_not_empty(k.shape[2], undefined)
    kernels, named, terms = _kernels(c)
    with autocast_off(q.device.type):
        if kernels is None:
            out, y = aten.forward(q, k, v, terms, undefined)
            return out, (y,)
        if launches(q):
            return kernels.forward(q, k, v, **named, training=training)
        # The fake implementation promises the tensors that kernels save, so return them uninitialized; `_backward` does
        # not read them.
        out, _ = aten.forward(q, k, v, terms, undefined)
        return out, kernels.saved_like(q, k, v, **named) if training else ()


def _infer(*call):
    return _forward(_Call(*call), training=False)[0]


def _train(*call):
    out, saved = _forward(_Call(*call), training=True)
    return out, list(saved)


def _backward(grad, *call):
    *inputs, out, saved = call[:10]
    *numbers, needs = call[10:]
    c = _Call(*inputs, *numbers)
    q, k, v = inputs[:3]
    kernels, named, terms = _kernels(c)
    with autocast_off(q.device.type):
        if kernels is not None and launches(q):
            grads = kernels.backward(grad, q, k, v, out, tuple(saved), **named, needs=tuple(needs))
        else:
            y = saved[0] if kernels is None else None
            grads = aten.backward(grad, q, k, v, y, terms, needs)
    return returned(grads, q)


class _EntmaxAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        out, saved = torch.ops.sparse_inductor.entmax_attention_train(*args)
        ctx.save_for_backward(*args[:8], out, *saved)
        ctx.numbers = args[8:13]
        return out

    @staticmethod
    @first_order("entmax_attention")
    def backward(ctx, grad):
        saved = ctx.saved_tensors  # read once: checkpointing allows a single access
        *inputs, out = saved[:9]
        needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 3, 5)]
        grads = torch.ops.sparse_inductor.entmax_attention_backward(
            grad, *inputs, out, list(saved[9:]), *ctx.numbers, needs
        )
        q, k, v, bias, alpha = (g if n else None for g, n in zip(grads, needs))
        return q, k, v, bias, None, alpha, *(None,) * (len(ctx.needs_input_grad) - 6)


def _fake(*call):
    c = _Call(*call)
    _check(c)
    return c.q.new_empty(*c.q.shape[:3], c.v.shape[-1])


def _fake_train(*call):
    out, c = _fake(*call), _Call(*call)
    kernels, named, terms = _kernels(c)
    if kernels is not None:
        return out, list(kernels.saved_like(c.q, c.k, c.v, **named))
    return out, [c.q.new_empty(c.q.shape[:3], dtype=aten.saved_dtype(c.q, c.k, c.v, terms))]


def _fake_backward(grad, *call):
    c = _Call(*call[:8], *call[10:15])
    return fake_gradients((c.q, c.k, c.v, c.bias, c.alpha), call[-1], c.q)


# Can be sharded over the batch or over the heads; a key head stays with the query heads that read it.


def _shared(q, k, v, bias, mask, alpha, query_lengths, key_lengths, *_) -> Rule:
    queries: Dims = ("B", "H", "", "")
    keys: Dims = ("B", "G", "", "")
    inputs = (
        queries, keys, keys,
        *(dims(t, "BH..") for t in (bias, mask, alpha)),
        *(dims(t, "B") for t in (query_lengths, key_lengths)),
    )  # fmt: skip
    saved = (queries,) * 6 + (keys,)  # see kernels.entmax_attention.attention.saved_like
    return Rule(inputs, saved, ("B", "HG"), even="HG")


def _shared_backward(grad, *call) -> Rule:
    rule, saved = _shared(*call), call[9]
    out, inputs = rule.outputs[0], rule.inputs
    kept = ((letters or ())[: t.dim()] for letters, t in zip(rule.outputs[1:], saved))
    return rule.backward((out,), (out, *kept), (*inputs[:4], inputs[5]))


_autograd = by_gradient("entmax_attention", _infer, _EntmaxAttention.apply, (0, 1, 2, 3, 5))
register(_lib, "entmax_attention", _infer, _fake, _shared, _autograd)
register(_lib, "entmax_attention_train", _train, _fake_train, _shared)
register(
    _lib, "entmax_attention_backward", _backward, _fake_backward, _shared_backward,
    follows="entmax_attention_train",
)  # fmt: skip
