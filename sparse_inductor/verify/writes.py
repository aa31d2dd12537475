"""Which nodes of a graph may write, for `verify`.

`graph/effects.py` answers this for the matcher. It is answered here a second time, independently, because `verify` is
to find mistakes of the matcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from .. import compat
from ..graph.names import target_name, trailing_inplace

_IN_PLACE = frozenset(
    "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift concat".split()
)


def may_write(node: fx.Node) -> bool:
    """Whether a node may write to memory of its inputs; unknown functions may."""
    target, kwargs = node.target, node.kwargs
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    if known := compat.schemas(target):
        return any(_writes(argument, kwargs) for schema in known for argument in schema.arguments)
    name = target_name(target)
    if kwargs.get("out") is not None or kwargs.get("inplace") not in (None, False):
        return True
    if name.endswith("_") and not name.endswith("__"):
        return True
    if node.op == "call_method":
        return name in ("__setitem__", "numpy", "data_ptr", "untyped_storage")
    module = getattr(target, "__module__", "") or ""
    if module == "_operator":
        return name in ("setitem", "delitem") or (name[:1] == "i" and name[1:] in _IN_PLACE)
    foreign = module.split(".")[0] not in ("torch", "math", "builtins", "entmax")
    if foreign or module.startswith(("torch.ops", "torch.utils", *compat.INTERNAL_MODULES)):
        return True
    if compat.is_higher_order(target):
        return True
    if name in ("batch_norm", "instance_norm"):
        return True
    if name in ("embedding", "embedding_bag"):
        return kwargs.get("max_norm") is not None or any(a is not None for a in node.args[3:4])
    at = trailing_inplace(name, node.args)
    return at is not None and node.args[at] is True


def _targets(writer: fx.Node) -> Sequence[fx.Node]:
    """Return the inputs that a node which may write may write to: the first, for a method such as add_, else all."""
    in_place = writer.op == "call_method" and str(writer.target).endswith("_")
    return writer.all_input_nodes[: 1 if in_place else None]


def _writes(argument: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator writes to the value of an argument; not to an `out` argument that is not passed."""
    written = argument.alias_info is not None and argument.alias_info.is_write
    return written and (not argument.kwarg_only or kwargs.get(argument.name) is not None)


def with_writers(graph: fx.Graph, matched: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the matched nodes, and the nodes between them that depend on them, up to the last that may write to one of
    them or of the matched nodes."""
    own, first_own = set(matched), frozenset(matched)
    followers: list[fx.Node] = []
    last_writer = 0
    begun, left = False, len(matched)
    for node in graph.nodes:
        begun |= node in first_own
        left -= node in first_own
        if not left:
            break
        if begun and node not in own and not own.isdisjoint(node.all_input_nodes):
            own.add(node)
            followers.append(node)
            if may_write(node) and not own.isdisjoint(_targets(node)):
                last_writer = len(followers)
    taken = {*matched, *followers[:last_writer]}
    return [n for n in graph.nodes if n in taken]
