"""What kind of thing a node of a graph calls, and what an operator's schema says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from typing_extensions import TypeIs

# Where Dynamo keeps the functions that it wraps around NumPy's, and where what it adds to a graph comes from.
NUMPY_WRAPPERS = "torch._dynamo.utils"
INTERNAL_MODULES = ("torch._dynamo", "torch._ops")


def is_overload(target: Any) -> TypeIs[OpOverload]:
    """Whether it is an operator with one schema, as `torch.ops.aten.add.Tensor`."""
    return isinstance(target, torch._ops.OpOverload)


def is_packet(target: Any) -> TypeIs[OpOverloadPacket]:
    """Whether it is an operator with all its schemas, as `torch.ops.aten.add`."""
    return isinstance(target, torch._ops.OpOverloadPacket)


def is_higher_order(target: Any) -> TypeIs[HigherOrderOperator]:
    """Whether it is an operator that takes functions, as `torch.cond`."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def marks_every_result(target: Any) -> bool:
    """Whether it is a `nested_compile_region` whose results all require a gradient where one of them does: so up to
    torch 2.11."""
    if target is not torch.ops.higher_order.invoke_subgraph:
        return False
    own = sys.modules[type(target).__module__]
    return not hasattr(own, "get_non_differentiable_indices")


def schema(overload: Any) -> Any:
    """The operator's schema: its name, as `aten::add`, arguments and what it writes to."""
    return overload._schema


def schemas(target: Any) -> tuple[Any, ...]:
    """The schema of an operator, or those of all its overloads; empty for anything else."""
    if is_packet(target):
        return tuple(schema(getattr(target, overload)) for overload in target.overloads())
    return (schema(target),) if is_overload(target) else ()


def is_data(target: Any) -> bool:
    """Whether it is what Dynamo puts for `tensor.data`."""
    return target is torch._C._autograd._get_data_attr


def fused_attention() -> Callable[..., Any]:
    """What `nn.MultiheadAttention` calls in inference."""
    return torch._native_multi_head_attention
