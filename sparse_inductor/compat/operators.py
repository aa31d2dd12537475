"""The kinds of targets that graph nodes call, and operator schemas."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from typing_extensions import TypeIs

# The module of Dynamo's wrappers for NumPy functions, and the modules of functions that Dynamo adds to graphs.
NUMPY_WRAPPERS = "torch._dynamo.utils"
INTERNAL_MODULES = ("torch._dynamo", "torch._ops")


def is_overload(target: Any) -> TypeIs[OpOverload]:
    """Whether a target is an operator with one schema, such as `torch.ops.aten.add.Tensor`."""
    return isinstance(target, torch._ops.OpOverload)


def is_packet(target: Any) -> TypeIs[OpOverloadPacket]:
    """Whether a target is an operator with all its schemas, such as `torch.ops.aten.add`."""
    return isinstance(target, torch._ops.OpOverloadPacket)


def is_higher_order(target: Any) -> TypeIs[HigherOrderOperator]:
    """Whether a target is an operator that takes functions, such as `torch.cond`."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def marks_every_result(target: Any) -> bool:
    """Whether a target is a `nested_compile_region` whose results all require a gradient if one of them does, as in
    torch up to 2.11."""
    if target is not torch.ops.higher_order.invoke_subgraph:
        return False
    own = sys.modules[type(target).__module__]
    return not hasattr(own, "get_non_differentiable_indices")


def schema(overload: Any) -> Any:
    """Return the operator's schema: its name, such as `aten::add`, and its arguments, including those it writes to."""
    return overload._schema


def schemas(target: Any) -> tuple[Any, ...]:
    """Return the schema of an operator, or those of all its overloads; empty for any other target."""
    if is_packet(target):
        return tuple(schema(getattr(target, overload)) for overload in target.overloads())
    return (schema(target),) if is_overload(target) else ()


def is_data(target: Any) -> bool:
    """Whether a target is the function that Dynamo inserts for `tensor.data`."""
    return target is torch._C._autograd._get_data_attr


def fused_attention() -> Callable[..., Any]:
    """Return the function that `nn.MultiheadAttention` calls in inference."""
    return torch._native_multi_head_attention
