"""Comparison of a rewritten program and the original with an fp64 reference.

Two correct programs differ by rounding, so neither can serve as the reference for the other. The rewritten program
passes if its error against the reference is at most that of the unrewritten program plus `TOLERANCE` for its precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .. import compat

# By how much the error may exceed that of the unrewritten program, by the lowest precision of the computation: absolute
# for values below 1, relative above. This is about a hundred roundings in fp32 and a few in half precisions.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 1e-2}

# Among many entries some maxima are ties up to rounding. Either choice is then right, but the whole gradient or the
# position differs. This share of the elements of a gradient or of an integer result may be wrong; in a tensor of fewer
# than a thousand elements none may be.
TIES = 1e-3

# If a tensor depends on a cast to a lower precision, this share of its elements may be rounded in the other direction.
ROUNDED = 1e-2

# Values of at least this magnitude are fill values of masks and must be equal.
HUGE = 1e30


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of one tensor of a rewritten program with the unrewritten program and the reference.

    `complaint` describes the difference and is empty if the tensors agree. `error` and `plain_error` are the largest
    distances of the rewritten and the unrewritten tensor from the reference (absolute below 1, relative above), None if
    nothing was measured.
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
    """Compare a tensor of the rewritten program with the unrewritten program and the reference.

    `ties` allows a share of `TIES` elements to differ, for gradients and positions of a program that chooses among its
    inputs. `precision` is the lowest precision of the program if it is lower than that of the tensor, as for gradients
    of fp32 weights under autocast. A gradient of None belongs to an unused input and is equal to zeros.
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
    if lower > tolerance and plain_error > tolerance:  # the lower precision affects this tensor
        tolerance = lower
    elif lower > tolerance and error <= lower:
        few = max(1, int(ours.numel() * ROUNDED))
    # In half precisions the winner of a maximum depends on the order of summation. The typical error is therefore
    # decisive, and single elements may have larger errors.
    low = tolerance > 1e-3
    limit = (4 * plain_error + 16 * tolerance) if low else plain_error + tolerance
    off = ours > limit
    # Elements that ties may explain do not count in the typical error.
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
    """Return distances, absolute below 1 and relative above; 0 where the truth is not finite or at least `HUGE`."""
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
    """Describe the number of wrong elements, and the first of them."""
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
    """A mode that runs a program in fp64. The program's casts to half precisions round, and are widened again.

    Tensors that the program creates are widened at once; other tensors (constants, tensors of a closure) are widened
    when an operation reads them. Convert inputs and parameters with gradients beforehand (`to_double`), because
    autograd rounds a gradient to the dtype of its leaf.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if compat.schema(func).is_mutable:
            return func(*args, **kwargs)
        # Without floating-point inputs, results have the default dtype and must become fp64: zeros(n), which may be an
        # accumulator, or the product of integers and 0.5.
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


# Autograd decomposes `to` into `_to_copy`. Below autograd, `to` arrives as it is.
_CASTS = frozenset({torch.ops.aten._to_copy, torch.ops.aten.to})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_FLOATS = _HALVES | {torch.float32}


class Chosen(TorchDispatchMode):
    """A mode in which `topk` returns the entries at given indices, which another program has chosen. Without indices,
    `topk` selects them itself and sorts them.

    right: whether the entries at the given indices equal the largest ones up to rounding. `topk` does not specify which
    of equal entries it returns.
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
    """A mode that records in `dtype` the lowest floating-point precision of all results of operations."""

    dtype: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self.dtype = lowest(self.dtype, tensor.dtype)
        return result


def lowest(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype with the larger tolerance. Dtypes that are not floating-point are ignored."""
    known = [d for d in (a, b) if d in TOLERANCE]
    return max(known, key=TOLERANCE.__getitem__, default=None)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _FLOATS else value
    if isinstance(value, torch.Tensor) and value.dtype in _FLOATS:
        return value.to(torch.float64)
    return value


def to_double(value: Any) -> Any:
    """Convert a floating-point tensor to fp64, as a leaf with the same `requires_grad`. Return other values as is."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of nested tuples, lists, mappings (including model outputs) and dataclasses, in order."""
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
    """Return fixed random cotangents for the outputs that require a gradient. The global random state is unchanged."""
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
    """Return the gradients of `leaves`, None for a leaf on which no output depends."""
    pairs = [
        (o, c.to(o.dtype))
        for o, c in zip(outputs, cotangents, strict=True)
        if c is not None and o.requires_grad
    ]
    if not pairs or not leaves:
        return [None] * len(leaves)
    used, cotangent = zip(*pairs, strict=True)
    return list(torch.autograd.grad(used, leaves, cotangent, allow_unused=True))
