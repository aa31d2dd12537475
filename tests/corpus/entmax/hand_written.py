"""Implementations of entmax that programs have in their own files, including copies of the package."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from types import ModuleType

import torch
from torch.autograd import Function

from corpus.case import BOTH, each
from corpus.entmax.registry import (
    INFER,
    SCALE,
    H,
    attention,
    entmax,
    keep,
    normal,
    program,
    qkv,
    rows,
)

SEEN: list = []


def sort_entmax15(x, dim=-1):
    """the closed form by sorting, no custom backward"""
    x = (x - x.amax(dim, keepdim=True)) * 0.5
    s = x.sort(dim=dim, descending=True).values
    shape = [1] * x.dim()
    shape[dim] = -1
    n = torch.arange(1, x.size(dim) + 1, dtype=x.dtype).view(shape)
    mean = s.cumsum(dim) / n
    variance = (s * s).cumsum(dim) / n - mean * mean
    tau = mean - ((1 - n * variance) / n).clamp(min=0).sqrt()
    size = (tau <= s).sum(dim, keepdim=True)
    return torch.relu(x - tau.gather(dim, size - 1)).square()


def sort_sparsemax(x, dim=-1):
    """Martins & Astudillo, algorithm 1"""
    s, _ = torch.sort(x, dim=dim, descending=True)
    c = s.cumsum(dim)
    n = torch.arange(1, x.shape[dim] + 1, device=x.device).to(x.dtype)
    support = 1 + n * s > c
    size = support.sum(dim=dim, keepdim=True)
    tau = (c.gather(dim, size - 1) - 1) / size
    return torch.clamp(x - tau, min=0)


class Sparsemax(Function):
    """Sparsemax as an autograd.Function with static methods, as many repositories vendor it."""

    @staticmethod
    def forward(ctx, x, dim=-1):
        x = x - x.max(dim=dim, keepdim=True).values
        s = x.sort(dim, True)[0]
        c = s.cumsum(dim) - 1
        n = torch.arange(1, x.size(dim) + 1, device=x.device, dtype=x.dtype)
        size = (n * s > c).sum(dim=dim).unsqueeze(dim)
        tau = c.gather(dim, size - 1) / size.to(x.dtype)
        p = torch.clamp(x - tau, min=0)
        ctx.save_for_backward(size, p)
        ctx.dim = dim
        return p

    @staticmethod
    def backward(ctx, grad):
        size, p = ctx.saved_tensors
        g = grad.clone()
        g[p == 0] = 0
        mean = g.sum(dim=ctx.dim) / size.to(p.dtype).squeeze(ctx.dim)
        return torch.where(p != 0, g - mean.unsqueeze(ctx.dim), g), None


class Entmax15(Function):
    """Entmax with alpha 1.5 as an autograd.Function."""

    @staticmethod
    def forward(ctx, x):
        x = x - x.max(dim=-1, keepdim=True)[0]
        x = x / 2
        s, _ = torch.sort(x, dim=-1, descending=True)
        n = torch.arange(1, x.size(-1) + 1, device=x.device, dtype=x.dtype)
        mean = s.cumsum(-1) / n
        square = (s**2).cumsum(-1) / n
        delta = (1 - n * (square - mean**2)) / n
        tau = mean - torch.sqrt(torch.clamp(delta, 0))
        size = (tau <= s).sum(-1).unsqueeze(-1)
        y = torch.clamp(x - tau.gather(-1, size - 1), min=0) ** 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        root = y.sqrt()
        dx = dy * root
        q = dx.sum(-1) / root.sum(-1)
        return dx - q.unsqueeze(-1) * root


class Bisect(Function):
    """A bisection with alpha as an argument, as in AdaSplash's reference."""

    @staticmethod
    def forward(ctx, x, alpha=1.5, steps=32):
        ctx.alpha = alpha
        z = x * (alpha - 1)
        top = z.max(dim=-1, keepdim=True).values
        low, high = top - 1, top - (1 / x.shape[-1]) ** (alpha - 1)
        for _ in range(steps):
            middle = (low + high) / 2
            p = torch.clamp(z - middle, min=0) ** (1 / (alpha - 1))
            above = p.sum(-1, keepdim=True) >= 1
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        p = torch.clamp(z - (low + high) / 2, min=0) ** (1 / (alpha - 1))
        p = p / p.sum(-1, keepdim=True)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        g = torch.where(p > 0, p ** (2 - ctx.alpha), 0.0)
        d = grad * g
        return d - g * (d.sum(-1, keepdim=True) / g.sum(-1, keepdim=True)), None, None


class Watched(Function):
    """A Function that stores its result in a global: if a forward has side effects, Dynamo returns every intermediate
    result from it (torch 2.11 does so for every Function)."""

    @staticmethod
    def forward(ctx, x):
        p = sort_sparsemax(x)
        SEEN[:] = [p]
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        kept = (p > 0).to(grad.dtype)
        return kept * (grad - (kept * grad).sum(-1, True) / kept.sum(-1, True))


def halving(x, steps=40):
    """the package's loop, written out for alpha 1.5, squares instead of powers"""
    z = x * 0.5
    top, _ = z.max(dim=-1, keepdim=True)
    low = top - 1
    step = 1 - (1 / x.size(-1)) ** 0.5
    for _ in range(steps):
        step = step / 2
        tau = low + step
        p = torch.relu(z - tau) ** 2
        low = torch.where(p.sum(-1, keepdim=True) >= 1, tau, low)
    return p / p.sum(-1, keepdim=True)


def unhalved(x):
    """the closed form of a squared threshold without the half: entmax15 of twice the scores"""
    s = x.sort(-1, descending=True).values
    n = torch.arange(1, x.size(-1) + 1)
    mean = s.cumsum(-1) / n
    square = (s**2).cumsum(-1) / n
    tau = mean - torch.sqrt(torch.relu(mean**2 - square + 1.0 / n))
    size = (s > tau).sum(-1, keepdim=True)
    return torch.relu(x - tau.gather(-1, size - 1)) ** 2


def unhalved_halving(x):
    """the same by bisection, normalised with an epsilon"""
    x = x - x.max(-1, keepdim=True).values
    low, high = x.max(-1, keepdim=True).values - 1, x.max(-1, keepdim=True).values
    for _ in range(40):
        middle = (low + high) * 0.5
        z = (x - middle).clamp_min(0.0)
        above = (z * z).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    p = (x - (low + high) * 0.5).clamp_min(0.0)
    p = p * p
    return p / (p.sum(-1, keepdim=True) + 1e-12)


class Unhalved(Function):
    """A Function of `unhalved` with its backward."""

    @staticmethod
    def forward(ctx, x):
        p = unhalved(x)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        s = p.sqrt()
        d = 2 * grad * s
        return d - s * (d.sum(-1, keepdim=True) / s.sum(-1, keepdim=True))


each(
    rows(),
    twice_the_scores=lambda x: unhalved(x),
    function_of_twice_the_scores=lambda x: Unhalved.apply(x),
    sort_based_entmax15=lambda x: sort_entmax15(x),
    sort_based_entmax15_over_tokens=lambda x: sort_entmax15(x, 1),
    sort_based_sparsemax=lambda x: sort_sparsemax(x),
    function_sparsemax=lambda x: Sparsemax.apply(x, -1),
    # a Function that stores its result in a global
    function_with_side_effects=lambda x: Watched.apply(x),
    function_entmax15=lambda x: Entmax15.apply(x),
    function_bisection=lambda x: Bisect.apply(x, 1.3),
)


each(
    rows(modes=INFER),
    twice_the_scores_by_bisection=lambda x: unhalved_halving(x),
    # an unrolled loop, which in training has another gradient than entmax
    bisection_halving=lambda x: halving(x),
)


@attention()
def attention_of_twice_the_scores(q, k, v, mask):
    """no half before the threshold"""
    scores = (q @ k.mT * SCALE).masked_fill(~mask[:, None, None], -1e9)
    return unhalved(scores) @ v


@rows(modes=INFER)
def lowest_numbers_are_not_doubled(x):
    """a row of finfo.min alone is uniform, and twice finfo.min is infinite"""
    keep = (torch.arange(11) < 8) & torch.tensor([True, False, True])[:, None, None]
    return unhalved_halving(x.masked_fill(~keep, torch.finfo(x.dtype).min))


@rows()
def negative_differences_filled_with_zeros(x):
    """a rectifier by masked_fill()"""
    top = x.sort(-1, descending=True).values
    tau = (top.cumsum(-1) - 1) / torch.arange(1, x.size(-1) + 1)
    above = x - tau.gather(-1, (top > tau).sum(-1, keepdim=True) - 1)
    return above.masked_fill(above <= 0, 0)


@attention()
def threshold_in_front_of_the_scores(q, k, v, mask):
    scores = q @ k.mT * SCALE
    top = scores.sort(-1, descending=True).values
    tau = (top.cumsum(-1) - 1) / torch.arange(1, top.size(-1) + 1)
    support = (top > tau).sum(-1, keepdim=True)
    return torch.add(-tau.gather(-1, support - 1), scores).clamp(min=0) @ v


each(
    attention(),
    attention_by_sort=lambda q, k, v, mask: sort_entmax15(q @ k.mT * SCALE) @ v,
    # AdaSplash's reference
    attention_by_bisection=lambda q, k, v, mask: Bisect.apply(q @ k.mT * SCALE) @ v,
)


@attention()
def attention_by_function(q, k, v, mask):
    """a Function with its own backward"""
    scores = (q @ k.mT * SCALE).masked_fill(~mask[:, None, None], -1e9)
    return Entmax15.apply(scores) @ v


@program(dynamic=True)
def attention_by_function_dynamic():
    return lambda q, k, v: Sparsemax.apply(q @ k.mT * SCALE) @ v, qkv()


class RoundedAtTheEnd(Function):
    """A vendored sparsemax that computes rows of a matrix in fp32, and returns the input's dtype and shape."""

    @staticmethod
    def forward(ctx, x):
        p = sort_sparsemax(x.float().reshape(-1, x.size(-1)))
        ctx.save_for_backward(p)
        return p.view_as(x).to(x.dtype).contiguous()

    @staticmethod
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        on = p.view_as(grad) > 0
        return torch.where(
            on, grad - (grad * on).sum(-1, keepdim=True) / on.sum(-1, keepdim=True), 0
        )


def loses_the_gradient() -> str:
    """Return why the next program cannot be compared: torch 2.11 alone compiles it without a gradient."""
    return "" if torch.__version__ >= (2, 13) else "this torch loses the Function's gradient itself"


@attention(unsupported=loses_the_gradient)
def function_that_ends_in_a_cast(q, k, v, mask):
    """a view, a cast and a copy at its end"""
    return RoundedAtTheEnd.apply(q @ k.mT * SCALE) @ v


@rows()
def maximum_taken_off_in_place(x):
    """TabNet: the scores are an intermediate result without later readers"""
    z = x * 1.5
    z -= z.max(-1, keepdim=True).values
    return sort_sparsemax(z)


@rows(modes=INFER)
def threshold_taken_off_in_place(x):
    """all results are written to the memory of the scores"""
    z = x * 1.5
    z.sub_(z.amax(-1, keepdim=True))
    s = z.sort(-1, descending=True).values
    k = torch.arange(1, z.size(-1) + 1)
    size = (1 + k * s > s.cumsum(-1)).sum(-1, keepdim=True)
    z -= (s.cumsum(-1).gather(-1, size - 1) - 1) / size
    return z.clamp_(min=0)


def copy_of(name: str) -> ModuleType:
    """Import a module of the package under another name, so that it is traced like a user's copy."""
    path = pathlib.Path(entmax.__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"vendored_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# torch 2.11 breaks the graph at a Function's class method if a gradient is needed
MODES = BOTH if torch.__version__ >= (2, 13) else INFER
ACTIVATIONS, ROOTS = copy_of("activations"), copy_of("root_finding")


@attention(modes=MODES)
def copied_entmax15_module(q, k, v, mask):
    """Entmax15(dim=-1), k at least the number of keys"""
    scores = (q @ k.mT * 0.35).masked_fill(~mask[:, None, None], -1e9)
    return ACTIVATIONS.Entmax15(dim=-1, k=64)(scores) @ v


@attention(inputs=lambda: (*qkv(), normal((H,), 7)), modes=MODES)
def copied_bisection(q, k, v, raw):
    """a learned alpha per head"""
    alpha = 1 + torch.sigmoid(raw)[:, None, None]
    return ROOTS.entmax_bisect(q @ k.mT * 0.35, alpha) @ v


class ReadsItsSupport(Function):
    """OpenNMT-py's onmt.modules.sparse_activations: in-place forward, and squeezed support sizes in the backward."""

    @staticmethod
    def forward(ctx, x, dim=0):
        ctx.dim = dim
        top, _ = x.max(dim=dim, keepdim=True)
        x -= top
        s, _ = torch.sort(x, descending=True, dim=dim)
        c = s.cumsum(dim) - 1
        n = torch.arange(1, x.size(dim) + 1, dtype=x.dtype).view(-1, *(1,) * (x.dim() - 1))
        inside = n.transpose(0, dim) * s > c
        size = inside.sum(dim=dim).unsqueeze(dim)
        tau = c.gather(dim, size - 1)
        tau /= size.to(x.dtype)
        p = torch.clamp(x - tau, min=0)
        ctx.save_for_backward(size, p)
        return p

    @staticmethod
    def backward(ctx, grad):
        size, p = ctx.saved_tensors
        inside = grad.clone()
        inside[p == 0] = 0
        mean = inside.sum(dim=ctx.dim) / size.to(p.dtype).squeeze()
        return torch.where(p != 0, inside - mean.unsqueeze(ctx.dim), inside), None


@attention(inputs=lambda: (*qkv(), keep()))
def opennmt(q, k, v, mask):
    """.squeeze() of the support sizes is right only if no axis has one element"""
    return ReadsItsSupport.apply((q @ k.mT * 0.35).clone(), -1) @ v


@rows()
def tensorflow_addons(x):
    """flattened to 15 rows; tau is gathered by row numbers"""
    z = x.reshape(-1, x.shape[-1])
    s, _ = torch.topk(z, k=z.size(-1))
    c = torch.cumsum(s, -1)
    n = torch.arange(1, z.size(-1) + 1, dtype=z.dtype)
    size = (1 + n * s > c).to(torch.int32).sum(-1)
    at = torch.stack([torch.arange(z.size(0)), size.clamp(min=1).long() - 1], 1)
    tau = (c[at[:, 0], at[:, 1]] - 1) / size.to(z.dtype)
    return torch.maximum(torch.zeros((), dtype=z.dtype), z - tau[:, None]).reshape(x.shape)
