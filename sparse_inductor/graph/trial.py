"""Running a piece of the user's graph on a few concrete rows on the CPU, to see what it computes.

Some properties are cheaper to test than to prove, such as whether a threshold from one of many sorting or bisection
schemes makes the rows sum to one. A trial alone never decides: the pattern checks the structure first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import compat
from .fakes import attribute, fake, same_size, static_size
from .names import is_plain, stored, target_name
from .view import GraphView

_MAX_NODES = 4000  # a bisection of 60 steps has about 600
_RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli normal multinomial dropout uniform "
    "exponential alpha_dropout feature_dropout rrelu poisson".split()
)
_SIZED = frozenset(
    "expand view full zeros ones new_full new_zeros new_ones empty new_empty repeat broadcast_to".split()
)
# Methods with a device or a precision in their name, and their replacements.
_METHODS = {"float": "double", "half": "double", "bfloat16": "double", "cuda": "cpu"}


class Untestable(Exception):
    """The piece cannot be run by itself."""


class Region(NamedTuple):
    """The nodes between `leaves` and `output`, in graph order, the output included."""

    nodes: tuple[fx.Node, ...]
    leaves: tuple[fx.Node, ...]
    output: fx.Node


def region(view: GraphView, output: fx.Node, leaves: Sequence[fx.Node]) -> Region | None:
    """Return the nodes that compute `output` from `leaves` alone; None where it also depends on other tensors."""
    stop = set(leaves)
    found: set[fx.Node] = set()
    queue = [output]
    until = view.order[output]
    while queue:
        node = queue.pop()
        if node not in found and node not in stop:
            if len(found) > _MAX_NODES or not _pure(view, node):
                return None
            found.add(node)
            if not _is_size(view, node):
                queue += node.all_input_nodes
        if not queue:
            # Writes to the memory of a value in between, through any view, belong to the region.
            for value in (*found, *stop):
                for writer in view.effects.writers_to(value):
                    late = view.order[value] < view.order[writer] <= until
                    if late and writer not in found and writer not in stop:
                        if value in stop:
                            return None
                        queue.append(writer)
    if any(map(view.in_inference_mode, found)):
        return None
    return Region(view.in_order(found), tuple(leaves), output)


def _is_size(view: GraphView, node: fx.Node) -> bool:
    """Whether a node is a size or other metadata, which does not depend on the values of tensors."""
    return isinstance(fake(node), torch.SymInt) or view.name_of(node) == "metadata"


def _pure(view: GraphView, node: fx.Node) -> bool:
    if _is_size(view, node):
        return True
    if node.op == "get_attr":
        return isinstance(attribute(node), (torch.Tensor, fx.GraphModule))
    if node.op == "placeholder":
        return False
    target = node.target
    name = target_name(target)
    if name.strip("_") in _RANDOM:
        call = view.call(node)
        return call.name == "dropout" and call.get("training", True) is False
    return node.op == "call_method" or is_plain(target)


class _Sizes(NamedTuple):
    """The sizes for which a graph was captured, and those with which it is run instead. If two axes share a symbol, it
    stands for the size of axis `first`."""

    made_for: tuple[Any, ...]
    run_with: tuple[int, ...]
    first: int = 0

    def pairs(self) -> list[tuple[Any, int]]:
        pairs = list(zip(self.made_for, self.run_with))
        return [*pairs[self.first :], *pairs[: self.first]]

    def of(self, size: Any) -> int:
        known = static_size(size)
        for mine, theirs in self.pairs():
            if known is None and same_size(mine, size):
                return theirs
        if known is None:  # computed from the rows' sizes, such as n + 1
            numbers = {
                mine.node.expr: theirs
                for mine, theirs in reversed(self.pairs())
                if isinstance(mine, torch.SymInt)
            }
            expression = size.node.expr.xreplace(numbers)
            if not expression.is_Integer:
                raise Untestable(f"the size {size} is not one of the rows'")
            return int(expression)
        return known

    def literal(self, value: Any) -> Any:
        """Return a list of sizes, with the sizes of the rows replaced."""
        if len(value) != len(self.made_for):
            return value
        return tuple(
            new if self._is(v, old) else v
            for v, old, new in zip(value, self.made_for, self.run_with)
        )

    @staticmethod
    def _is(v: Any, size: Any) -> bool:
        if isinstance(v, fx.Node):
            v = fake(v)
            return isinstance(v, torch.SymInt) and same_size(v, size)
        return isinstance(v, int) and isinstance(size, int) and v == size


def run(
    view: GraphView,
    piece: Region,
    values: dict[fx.Node, torch.Tensor],
    leaf: fx.Node | None,
    dim: int = 0,
    exact: bool = False,
) -> torch.Tensor:
    """Return the output for concrete leaves.

    leaf: the leaf whose shape shows how sizes have changed, or None. dim: its axis that takes precedence if two axes
    share a symbol. exact: compute in the program's dtypes, instead of in double.

    Raises Untestable where the piece fails on these leaves.
    """
    sizes = _Sizes((), ())
    if leaf is not None:
        sizes = _Sizes(view.shape(leaf), tuple(values[leaf].shape), dim)
    env: dict[fx.Node, Any] = dict(values)
    recording = torch.is_grad_enabled()
    try:
        # The trial tests the formula, which does not depend on autocast.
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            for node in piece.nodes:
                if node not in env:
                    with torch.set_grad_enabled(recording and view.records(node)):
                        env[node] = _step(view, node, env, sizes, exact)
    except Untestable:
        raise
    except Exception as error:  # whatever the user's code raises on rows it was not made for
        raise Untestable(f"{type(error).__name__} at {node.name}: {error}") from None
    result = env[stored(piece.output)]
    if not isinstance(result, torch.Tensor):
        raise Untestable(f"{piece.output.name} is no tensor")
    return result


def _step(
    view: GraphView, node: fx.Node, env: dict[fx.Node, Any], sizes: _Sizes, exact: bool
) -> Any:
    value = fake(node)
    if node.op == "get_attr":
        held = attribute(node)
        return _resized(held, sizes) if isinstance(held, fx.GraphModule) else held.to("cpu")
    if isinstance(value, torch.SymInt) and not all(n in env for n in node.all_input_nodes):
        return sizes.of(value)
    if node.op == "placeholder":
        return sizes.of(value)
    if view.name_of(node) == "metadata" and not all(n in env for n in node.all_input_nodes):
        if isinstance(value, (int, torch.SymInt)):
            return sizes.of(value)
        if isinstance(value, (tuple, list)):
            return torch.Size(sizes.of(s) for s in value)
        return value
    args, kwargs = _arguments(node, sizes, exact)
    args, kwargs = fx.map_arg((args, kwargs), env.__getitem__)
    if node.op == "call_method":
        name = str(node.target)
        name = name if exact and name != "cuda" else _METHODS.get(name, name)
        return getattr(args[0], name)(*args[1:], **kwargs)
    target: Callable[..., Any] = node.target
    return target(*args, **kwargs)


def _arguments(node: fx.Node, sizes: _Sizes, exact: bool = False) -> tuple[tuple, dict]:
    """Return the arguments on the CPU and, unless `exact`, in double precision, with literal sizes replaced.

    Double precision tests the formula itself, without the rounding of the program's dtypes.
    """

    def local(x: Any) -> Any:
        if isinstance(x, torch.device) or (isinstance(x, str) and x.startswith("cuda")):
            return torch.device("cpu")
        if isinstance(x, torch.dtype) and x.is_floating_point and not exact:
            return torch.float64
        return x

    args = tuple(local(a) for a in node.args)
    kwargs = {k: local(v) for k, v in node.kwargs.items()}
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    name = target_name(node.target)
    if name.rstrip("_") in _SIZED or name == "reshape":
        args = tuple(sizes.literal(a) if isinstance(a, (tuple, list)) else a for a in args)
        at = 0 if name in ("zeros", "ones", "empty") else 1
        if len(args) > at + 1 and all(isinstance(a, (int, fx.Node)) for a in args[at:]):
            args = (*args[:at], *sizes.literal(args[at:]))
        kwargs = {
            k: sizes.literal(v) if isinstance(v, (tuple, list)) else v for k, v in kwargs.items()
        }
    return args, kwargs


def _resized(gm: fx.GraphModule, sizes: _Sizes) -> fx.GraphModule:
    """Return a higher-order operator's body on the CPU for the sizes that it is run with. It is copied only if it
    contains other sizes, because to copy the body of a bisection takes longer than to run it."""
    calls = lambda body: [n for n in body.graph.nodes if n.op in ("call_function", "call_method")]
    if all(_arguments(n, sizes) == (n.args, n.kwargs) for n in calls(gm)):
        return gm
    copied = compat.copy_graph_module(gm)
    for node in calls(copied):
        node.args, node.kwargs = _arguments(node, sizes)
    copied.recompile()
    return copied
