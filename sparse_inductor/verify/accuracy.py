"""Is a rewritten program as good as the one it replaces? Both are compared with a reference in fp64.

Two correct programs differ by rounding, so neither is the truth about the other. The rewritten one passes where its
error against the reference is no larger than the unrewritten one's, plus `TOLERANCE` of its precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .. import compat

# How much larger than the unrewritten program's the error may be, by the lowest precision computed
# in: absolute below 1, relative above. In fp32 about a hundred roundings; in half precisions a few.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 1e-2}

# Among many entries some maxima are ties up to rounding, where either choice is right and the whole
# gradient or position differs. That many elements of a gradient, or of an integer result, may be off;
# it lets none through in a tensor of less than a thousand.
TIES = 1e-3

# Of a tensor that a cast to a lower precision goes into, that many elements may be rounded to the other side.
ROUNDED = 1e-2

# Where so large a number stands it is a mask's, and has to be the same one.
HUGE = 1e30


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One tensor of a rewritten program beside the unrewritten one's and the reference.

    `complaint` says what is wrong, empty where nothing is; `error` and `plain_error` are the
    largest distances from the reference (absolute below 1, relative above), None where there is
    nothing to measure.
    """

    what: str
    complaint: str = ""
    error: float | None = None
    plain_error: float | None = None

    @property
    def ok(self) -> bool:
        return not self.complaint

    def __str__(self) -> str:
        return f"{self.what}: {self.complaint or 'agrees'}"


def compare(
    what: str,
    got: torch.Tensor | None,
    plain: torch.Tensor | None,
    truth: torch.Tensor | None,
    *,
    ties: bool = False,
    precision: torch.dtype | None = None,
) -> Comparison:
    """Compare a tensor of the rewritten program with the unrewritten one's and the reference.

    `ties` allows for `TIES`: gradients and positions of a program that chooses among its inputs. `precision` is the
    lowest that the program computes in, where that is not the tensor's own: gradients of fp32 weights under autocast.
    None stands for a gradient that was nowhere used, which zeros are as good as.
    """
    if got is None or plain is None:
        present = got if got is not None else plain
        if present is None or not present.any():
            return Comparison(what)
        which = "rewritten" if got is None else "unrewritten"
        return Comparison(what, f"is missing in the {which} program alone")
    if got.shape != plain.shape:
        return Comparison(what, f"has shape {list(got.shape)}, unrewritten {list(plain.shape)}")
    if got.dtype != plain.dtype:
        return Comparison(what, f"has dtype {got.dtype}, unrewritten {plain.dtype}")
    if not (got.is_floating_point() or got.is_complex()):
        return _compare_exact(what, got, plain, ties)
    for kind, name in ((torch.isnan, "NaN"), (torch.isinf, "infinite")):
        where = kind(got) ^ kind(plain)
        if where.any():
            return Comparison(what, f"is {name} in other places; {_at(where, got, plain)}")
    large = plain.abs() >= HUGE
    if large.any() and not torch.equal(got[large].nan_to_num(), plain[large].nan_to_num()):
        where = large & (got != plain)
        return Comparison(what, f"holds other huge values; {_at(where, got, plain)}")
    return _compare_values(
        what, got, plain, torch.zeros_like(plain) if truth is None else truth, ties, precision
    )


def _compare_exact(what: str, got: torch.Tensor, plain: torch.Tensor, ties: bool) -> Comparison:
    wrong = got != plain
    count = int(wrong.sum())
    if count > (int(got.numel() * TIES) if ties else 0):
        return Comparison(what, f"differs; {_at(wrong, got, plain)}")
    return Comparison(what)


def _compare_values(
    what: str,
    got: torch.Tensor,
    plain: torch.Tensor,
    truth: torch.Tensor,
    ties: bool,
    precision: torch.dtype | None,
) -> Comparison:
    ours, theirs = _distance(got, truth), _distance(plain, truth)
    if not ours.numel():
        return Comparison(what)
    tolerance = TOLERANCE.get(got.dtype, TOLERANCE[torch.float32])
    error, plain_error = float(ours.max()), float(theirs.max())
    few = int(ours.numel() * TIES) if ties else 0
    lower = TOLERANCE.get(precision, 0.0) if precision is not None else 0.0
    if lower > tolerance and plain_error > tolerance:  # its rounding shows in this tensor
        tolerance = lower
    elif lower > tolerance and error <= lower:
        few = max(1, int(ours.numel() * ROUNDED))
    # In a half precision the winner of a maximum changes with the order of summation, so there it
    # is the typical error that counts, and single elements may be off by more.
    low = tolerance > 1e-3
    limit = (4 * plain_error + 16 * tolerance) if low else plain_error + tolerance
    off = ours > limit
    # What ties may explain is not held against the rest.
    rest = ~off if few else torch.ones_like(off)
    typical, plain_typical = float(_rms(ours[rest])), float(_rms(theirs[rest]))
    too_many = int(off.sum()) > max(few, int(off.numel() * TIES) if low else 0)
    typical_limit = plain_typical + tolerance if low else 2 * plain_typical + 500 * tolerance
    complaint = ""
    if too_many or typical > typical_limit:
        worst = off if too_many else ours >= ours.max()
        complaint = (
            f"error {error:.2g} (typically {typical:.2g}) against the reference, unrewritten "
            f"{plain_error:.2g} (typically {plain_typical:.2g}); {_at(worst, got, plain, truth)}"
        )
    return Comparison(what, complaint, error, plain_error)


def _distance(value: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Absolute below 1 and relative above; 0 where the truth is no finite number."""
    if value.is_complex():
        value, truth = torch.view_as_real(value), torch.view_as_real(truth)
    value, truth = value.detach().double(), truth.detach().double()
    counts = truth.isfinite() & (truth.abs() < HUGE)
    gap = (value - truth).abs() / truth.abs().clamp(min=1.0)
    return torch.where(counts, gap, 0.0).nan_to_num(nan=float("inf"))


def _rms(distances: torch.Tensor) -> torch.Tensor:
    return distances.square().sum().div(max(1, distances.numel())).sqrt()


def _at(
    wrong: torch.Tensor, got: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor | None = None
) -> str:
    """How many elements are wrong, and the first of them."""
    if wrong.dim() > plain.dim():
        wrong = wrong.any(-1)
    index = tuple(int(i) for i in wrong.nonzero()[0])
    text = f"{int(wrong.sum())} of {wrong.numel()} elements"
    values = [("rewritten", got), ("unrewritten", plain)]
    values += [] if truth is None else [("reference", truth)]
    shown = ", ".join(f"{name} {_number(t[index].item())}" for name, t in values)
    return f"{text}, the first at {list(index)}: {shown}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# --- The reference --------------------------------------------------------------------------------


class InDouble(TorchDispatchMode):
    """Runs a program in fp64; a cast that it makes to a half precision rounds, and is widened again.

    What the program creates is widened at once, what it reads from elsewhere (constants, a closure's
    tensors) where it meets an operation. Inputs and parameters whose gradient matters are best converted
    beforehand (`to_double`): autograd rounds a gradient to its leaf's dtype.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if compat.schema(func).is_mutable:
            return func(*args, **kwargs)
        # zeros(n) of the default dtype is an accumulator, perhaps, and so is a product of integers and 0.5
        made = not any(t.is_floating_point() for t in tensors_in((args, kwargs)))
        if func.overloadpacket in _CASTS and not made:
            rounded = func(*args, **kwargs)
            if rounded.dtype in _HALVES:
                return _widen(rounded)
        args, kwargs = pytree.tree_map(_widen, (args, kwargs))
        if not made:
            return func(*args, **kwargs)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return pytree.tree_map(_widen, func(*args, **kwargs))
        finally:
            torch.set_default_dtype(default)


# The first is what autograd makes of the second; below autograd it is not there to do so.
_CASTS = frozenset({torch.ops.aten._to_copy, torch.ops.aten.to})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_FLOATS = _HALVES | {torch.float32}


class Chosen(TorchDispatchMode):
    """Has a topk in the block take the entries that another program has chosen, at these indices; without them it
    sorts what it takes.

    right: whether all are as large as those that it would take, up to rounding: it does not say which of equal ones.
    """

    def __init__(self, indices: torch.Tensor | None) -> None:
        super().__init__()
        self._indices, self.right = indices, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is not torch.ops.aten.topk:
            return func(*args, **kwargs)
        args, kwargs = args[:4], {name: v for name, v in kwargs.items() if name != "sorted"}
        best, indices = result = func(*args, **kwargs)
        if self._indices is None or indices.shape != self._indices.shape:
            return result
        x, dim = args[0], args[2] if len(args) > 2 else -1
        values = x.gather(dim, self._indices)
        pair = (t.double().sort(dim=dim).values for t in (values, best))
        tolerance = TOLERANCE.get(x.dtype, 0.0)
        same = torch.isclose(*pair, rtol=tolerance, atol=tolerance, equal_nan=True)
        self.right = self.right and bool(same.all())
        return values, self._indices


class LowestPrecision(TorchDispatchMode):
    """Notes in `dtype` the lowest floating-point precision of what operations return in the block."""

    dtype: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self.dtype = lowest(self.dtype, tensor.dtype)
        return result


def lowest(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    """Of two dtypes the one with the larger tolerance; what is no floating-point type does not count."""
    known = [d for d in (a, b) if d in TOLERANCE]
    return max(known, key=TOLERANCE.__getitem__, default=None)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _FLOATS else value
    if isinstance(value, torch.Tensor) and value.dtype in _FLOATS:
        return value.to(torch.float64)
    return value


def to_double(value: Any) -> Any:
    """A floating-point tensor in fp64, as a leaf that needs a gradient where it did; else as is."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of nested tuples, lists, mappings (model outputs too) and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [tensor for part in parts for tensor in tensors_in(part)]


def cotangents(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Fixed random cotangents for the outputs that have a gradient; the global random state is left
    alone."""
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(o.shape, generator=generator, dtype=torch.float32) for o in outputs]
    return [
        d.to(o.device, o.dtype) if o.requires_grad else None
        for d, o in zip(drawn, outputs, strict=True)
    ]


def gradients(
    outputs: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Gradients of `leaves`, None where nothing leads to one."""
    pairs = [
        (o, c.to(o.dtype))
        for o, c in zip(outputs, cotangents, strict=True)
        if c is not None and o.requires_grad
    ]
    if not pairs or not leaves:
        return [None] * len(leaves)
    used, cotangent = zip(*pairs, strict=True)
    return list(torch.autograd.grad(used, leaves, cotangent, allow_unused=True))
