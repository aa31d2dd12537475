"""The memory of the tensors of nodes, according to their fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import compat
from .fakes import fake, same_size, same_sizes, tensors_in

UNKNOWN = 0  # stands for an inaccessible storage, which may alias any other


def storages(value: Any) -> frozenset[int]:
    """Return the storages of a value. A tensor subclass has the storages of its inner tensors."""
    found: set[int] = set()
    for t in tensors_in(value):
        if is_traceable_wrapper_subclass(t):
            names, _ = t.__tensor_flatten__()
            found |= storages([getattr(t, name) for name in names])
            continue
        try:
            found.add(compat.storage_key(t) if t.layout == torch.strided else UNKNOWN)
        except (NotImplementedError, RuntimeError):
            found.add(UNKNOWN)
    return frozenset(found)


def same_geometry(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors of one storage have the same offset, shape, strides and dtype."""
    x, y = fake(a), fake(b)
    if x.dtype != y.dtype or not same_size(x.storage_offset(), y.storage_offset()):
        return False
    return same_sizes(x.shape, y.shape) and same_sizes(x.stride(), y.stride())


def apart(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors of one storage have no element in common, such as the halves from chunk() along the last
    axis: within each period of some stride, one tensor comes after the other."""
    x, y = fake(a), fake(b)
    if not all(isinstance(t, torch.Tensor) and t.layout == torch.strided for t in (x, y)):
        return False
    if x.dtype != y.dtype or any(map(is_traceable_wrapper_subclass, (x, y))):
        return False
    first, second = x.storage_offset(), y.storage_offset()
    if not (isinstance(first, int) and isinstance(second, int)) or first == second:
        return False
    strides = {s for t in (x, y) for s in t.stride() if isinstance(s, int) and s > 0}
    return any(
        (one := _span(x, period)) is not None
        and (two := _span(y, period)) is not None
        and (one[1] <= two[0] or two[1] <= one[0])
        for period in (*strides, None)
    )


def _span(t: torch.Tensor, period: int | None) -> tuple[int, int] | None:
    """Return the range of offsets, within each period, that holds a tensor's elements; None where it is not known."""
    extent = 1
    for size, stride in zip(t.shape, t.stride()):
        if period is not None and _is_multiple(stride, period):
            continue
        if not (isinstance(size, int) and isinstance(stride, int)):
            return None
        extent += max(0, size - 1) * stride
    start = int(t.storage_offset()) % period if period else int(t.storage_offset())
    return (start, start + extent) if period is None or start + extent <= period else None


def _is_multiple(stride: Any, period: int) -> bool:
    if isinstance(stride, int):
        return stride % period == 0
    return bool((stride.node.expr / period).is_integer)
