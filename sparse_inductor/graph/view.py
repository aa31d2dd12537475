"""A read-only view of a graph for patterns: canonical calls, shapes, constants, versions, readers."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .. import compat
from .effects import Effects
from .fakes import fake, same_sizes
from .modes import changes_grad_mode, modes_by_node, modes_now
from .names import NO_CALL, Call, canonical, is_plain, name_of, stored
from .vocabulary import COPIES, SAME_VALUES, SHAPE_OPS

CONSTANT_LIKE = frozenset(
    "full_like zeros_like ones_like new_full new_zeros new_ones new_tensor".split()
)
_METADATA_READERS = CONSTANT_LIKE | {"metadata"}
_LIKE = {"view_as", "expand_as", "cast"}  # read only the metadata of every argument but the first
_FILLED = CONSTANT_LIKE | frozenset("full zeros ones tensor scalar_tensor".split())
_ARITHMETIC = frozenset("neg mul add sub div".split())
_SAME_NUMBER = SHAPE_OPS | SAME_VALUES | {"repeat"}
_FORWARD_AD = "forward-mode differentiation (torch.autograd.forward_ad)"
_Pair = tuple[fx.Node, fx.Node]
_LEVEL = re.compile(r"_(?P<transform>vmap|grad|jvp|func)_(?P<way>in|de)crement_nesting")


def label(node: fx.Node) -> str:
    """Return a user's name for a node: "decoder.weight" for a parameter, else the name of the call."""
    if node.op in ("placeholder", "get_attr"):
        name = re.sub(r"^[lL]_|_$", "", str(node.target))
        name = re.sub(r"^self_", "", name)
        return re.sub(r"_?(modules|parameters|buffers)_", ".", name).strip(".")
    if (call := canonical(node)) is not None:
        return call.name
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", node.name)


class Unknown(Exception):
    """A node's shape or dtype is not known, as under vmap. Patterns leave such a graph as it is."""


class GraphView:
    """The queries of patterns about a graph. Built once in each pass; stale as soon as the graph is edited.

    transforms: for each node that runs in a transform (of torch.func, or forward-mode differentiation), its name.
    """

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self._names = {n: name_of(n) for n in graph.nodes}
        self._calls: dict[fx.Node, Call] = {}
        self._shapes: dict[fx.Node, tuple[Any, ...]] = {}
        self._same: dict[_Pair, bool] = {}
        self._filled_with: dict[fx.Node, float | None] = {}  # a cache for chains of sums
        # The results of functions that are decorated with `no_match.remembered`.
        self.remembered: dict[Any, dict[Any, Any]] = {}
        self.walked: dict[Any, Any] = {}  # for `walk_back`, as is the next
        self.walks_cut = 0
        self.transforms = _transforms(graph)
        self.modes = modes_by_node(graph, modes_now())

    @functools.cached_property
    def function_body(self) -> bool:
        """Whether the graph is the forward of an autograd Function. Patterns match the Function's node in the outer
        graph instead."""
        last = next(iter(reversed(self.graph.nodes)))
        results = last.args[0] if last.op == "output" and last.args else ()
        return isinstance(results, (tuple, list)) and any(
            isinstance(r, (tuple, list)) for r in results
        )

    def call(self, node: Any) -> Call:
        """Return the canonical call of a node, or `NO_CALL`, without a name or arguments, for anything else."""
        if not isinstance(node, fx.Node):
            return NO_CALL
        if node not in self._calls:
            self._calls[node] = canonical(node) or NO_CALL
        return self._calls[node]

    def name_of(self, node: fx.Node) -> str | None:
        """The canonical name of a node, or None."""
        return self._names[node] if node in self._names else name_of(node)

    def names_of(self, node: fx.Node) -> tuple[str | None, ...]:
        """Return the names by which a node can be found: its own, and "index", ATen's name, for a getitem by
        tensors."""
        name = self.name_of(node)
        if name == "getitem":
            index = node.args[1] if len(node.args) > 1 else None
            items = index if isinstance(index, (tuple, list)) else (index,)
            if any(isinstance(item, fx.Node) for item in items):
                return name, "index"
        return (name,)

    @functools.cached_property
    def names(self) -> frozenset[str | None]:
        """The names of all nodes. If a name is not among them, a search upwards from each node can be skipped."""
        return frozenset(name for node in self._names for name in self.names_of(node))

    @functools.cached_property
    def effects(self) -> Effects:
        """The writes to memory in the graph."""
        return Effects(self.graph)

    @functools.cached_property
    def order(self) -> dict[fx.Node, int]:
        """The position of each node."""
        return self.effects.order

    def in_order(self, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        """Return nodes in graph order."""
        return tuple(sorted(nodes, key=self.order.__getitem__))

    # Values

    def is_tensor(self, node: Any) -> bool:
        return isinstance(fake(node), torch.Tensor)

    def shape(self, node: Any) -> tuple[Any, ...]:
        """Return the sizes, symbolic ones as SymInts. Raises Unknown where there is no fake tensor."""
        found = self._shapes.get(node) if isinstance(node, fx.Node) else None
        if found is None:
            found = self._shapes[node] = tuple(self._tensor(node).shape)
        return found

    def same_shape(self, a: Any, b: Any) -> bool:
        """Whether two tensors have the same sizes, so that neither is broadcast to the other. True if one of them is
        not a tensor (an assignment)."""
        if not (self.is_tensor(a) and self.is_tensor(b)):
            return True
        return same_sizes(self.shape(a), self.shape(b))

    def dtype(self, node: Any) -> torch.dtype:
        return self._tensor(node).dtype

    @staticmethod
    def _tensor(node: Any) -> torch.Tensor:
        value = fake(node)
        if value is None and isinstance(node, fx.Node):
            value = fake(stored(node))
        if not isinstance(value, torch.Tensor):
            raise Unknown(f"{node} has no fake tensor")
        return value

    def requires_grad(self, node: Any) -> bool:
        return self.is_tensor(node) and fake(node).requires_grad

    @functools.cached_property
    def differentiates_twice(self) -> bool:
        """Whether the graph asks for gradients that can be differentiated themselves (`create_graph=True`)."""
        places = {torch.autograd.grad: 4, torch.autograd.backward: 3, "backward": 3}
        return any(
            n.kwargs.get("create_graph", n.args[at] if len(n.args) > at else False)
            for n in self.graph.nodes
            if n.op in ("call_function", "call_method") and (at := places.get(n.target)) is not None
        )

    @functools.cached_property
    def grad_enabled(self) -> bool:
        """Whether autograd records at any node of the graph. False in a Function's forward, and when compiling ahead of
        time to a package."""
        if self.function_body or compat.compiling_ahead():
            return False
        return any(modes.records for modes in self.modes.values())

    def records(self, node: fx.Node) -> bool:
        """Whether autograd records at a node."""
        return self.modes[node].records

    def in_inference_mode(self, node: fx.Node) -> bool:
        """Whether the graph runs a node under inference_mode."""
        return self.modes[node].inference

    def autocasts(self, node: fx.Node) -> bool:
        """Whether autocast chooses the dtype in which a node computes."""
        device = fake(node).device.type
        known = self.modes[node].autocast.get(device)
        return torch.is_autocast_enabled(device) if known is None else known[0]

    def needs_grad(self, node: Any) -> bool:
        """Whether a gradient of a tensor may be requested."""
        return self.grad_enabled and self.requires_grad(node)

    def kept(self, call: Call) -> fx.Node | None:
        """Return the input of a call that keeps its values and dtype, and its gradient where one may be requested;
        None for other calls."""
        quiet = (
            call.name in COPIES
            or (call.name == "dropout" and not call.drops)
            or (call.name == "detach" and not self.needs_grad(call["input"]))
        )
        return call["input"] if quiet else None

    def behind(self, node: Any, names: Collection[str]) -> tuple[Any, list[fx.Node]]:
        """Go up through calls with certain names, none in place. Returns the first value above them, and the calls'
        nodes, the last one first."""
        passed: list[fx.Node] = []
        while (call := self.call(node)).name in names and not call.inplace:
            x = call["input"]
            seen = self.value(x, node) if isinstance(x, fx.Node) else None
            if seen is None:
                break
            passed.append(node)
            node = seen
        return node, passed

    def value(self, node: fx.Node, reader: fx.Node) -> fx.Node | None:
        """Return the node whose result `reader` sees when it reads `node` (see `Effects.value`)."""
        return self.effects.value(node, reader)

    def const(self, x: Any, reader: fx.Node | None = None) -> float | None:
        """Return the number that every element of `x` has, if the graph shows it (literals, `full_like`, `tensor(c)`,
        casts); else None."""
        if isinstance(x, (int, float)):
            return float(x)
        if not isinstance(x, fx.Node) or x not in self._made_of_numbers:
            return None
        call = self.call(x)
        if not call or (reader is not None and self.value(x, reader) is not x):
            return None
        if x not in self._filled_with:
            self._filled_with[x] = self._filled(x, call)
        c = self._filled_with[x]
        if c is None or not self.is_tensor(x):
            return c
        if self.dtype(x).is_floating_point:
            return rounded(c, self.dtype(x))
        if self.dtype(x) == torch.bool:
            return float(c != 0)
        return float(math.trunc(c)) if math.isfinite(c) else None  # full(0.5).long() is 0

    @functools.cached_property
    def _made_of_numbers(self) -> set[fx.Node]:
        """The nodes that may have one number in every element, judged by the names of all calls above them."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            name = self.name_of(node)
            if (
                name in _FILLED
                or (name in _SAME_NUMBER and not found.isdisjoint(node.all_input_nodes))
                or (name in _ARITHMETIC and found.issuperset(node.all_input_nodes))
            ):
                found.add(node)
        return found

    def _filled(self, x: fx.Node, call: Call) -> float | None:
        match call.name:
            case "full" | "full_like" | "new_full":
                return self.const(call["fill_value"])
            case "zeros" | "zeros_like" | "new_zeros":
                return 0.0
            case "ones" | "ones_like" | "new_ones":
                return 1.0
            case "tensor" | "scalar_tensor" | "new_tensor":
                data = call["data"]
                return self.const(data) if isinstance(data, (int, float, fx.Node)) else None
            case name if name in _SAME_NUMBER:
                return self.const(call["input"], x)
            case "neg":
                c = self.const(call["input"], x)
                return None if c is None else -c
            case "mul" | "add" | "sub" | "div":
                a, b = self.const(call["input"], x), self.const(call["other"], x)
                if a is None or b is None or call.get("alpha", 1) != 1:
                    return None
                if call.name == "div":
                    return a / b if b else math.copysign(math.inf, a) if a else math.nan
                return a * b if call.name == "mul" else a + b if call.name == "add" else a - b
        return None

    def same_value(self, a: Any, b: Any) -> bool:
        """Whether two values are structurally equal. Dynamo does not eliminate common subexpressions."""
        if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
            return a is b or (type(a) is type(b) and a == b)
        # For each pair, the pair whose equality depends on it.
        because: dict[_Pair, _Pair | None] = {(a, b): None}
        left: list[_Pair] = [(a, b)]
        while left:
            pair = left.pop()
            same = pair[0] is pair[1] or self._same.get(pair)
            if same:
                continue
            pairs = self._same_calls(*pair) if same is None else None
            if pairs is None:
                differs: _Pair | None = pair
                while differs is not None:
                    self._same[differs], differs = False, because[differs]
                return False
            new = [p for p in pairs if p not in because]
            because.update(dict.fromkeys(new, pair))
            left += new
        self._same.update(dict.fromkeys(because, True))
        return True

    def _same_calls(self, a: fx.Node, b: fx.Node) -> list[_Pair] | None:
        """Return the pairs that must be equal for the results of two calls to be equal; None if these differ."""
        x, y = self.call(a), self.call(b)
        if not x or x.inplace or y.inplace or (x.name, x.args.keys()) != (y.name, y.args.keys()):
            return None
        if x.drops:
            return None  # each call draws another mask
        if self.value(a, b) is not a and self.order[a] < self.order[b]:
            return None
        if getattr(fake(a), "placements", None) != getattr(fake(b), "placements", None):
            return None  # torch 2.11 gives functions of DTensors no arguments
        return self._same_arguments([*x.args.values()], [y.args[k] for k in x.args], a, b)

    def same_read(self, x: fx.Node, reader: fx.Node, y: fx.Node, other: fx.Node) -> bool:
        """Whether `reader` sees the same value of x as `other` does of y."""
        u, v = self.value(x, reader), self.value(y, other)
        return u is not None and v is not None and self.same_value(u, v)

    def _same_arguments(
        self, xs: Sequence[Any], ys: Sequence[Any], a: fx.Node, b: fx.Node
    ) -> list[_Pair] | None:
        """Return such pairs for the arguments `xs` of `a` and `ys` of `b`; None if they differ."""
        pairs: list[_Pair] = []
        for p, q in zip(xs, ys):
            if isinstance(p, fx.Node) and isinstance(q, fx.Node):
                if self.is_tensor(p) and self.is_tensor(q):
                    p, q = self.value(p, a), self.value(q, b)
                    if p is None or q is None:
                        return None
                pairs.append((p, q))
            elif isinstance(p, (tuple, list)) and isinstance(q, (tuple, list)):
                found = self._same_arguments(p, q, a, b) if len(p) == len(q) else None
                if found is None:
                    return None
                pairs += found
            elif not self.same_value(p, q):
                return None
        return pairs

    # Readers

    @functools.cached_property
    def _live(self) -> set[fx.Node]:
        live: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            if node.op == "output" or node in self.effects.writers or _impure(node):
                live.add(node)
            if node in live:
                live.update(node.all_input_nodes)
        return live

    def read_by(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs whose elements a call reads, not only their shape or dtype."""
        call = self.call(node)
        if call.name in _METADATA_READERS:
            return []
        return [call["input"]] if call.name in _LIKE else node.all_input_nodes

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the users that read the node's elements, without dead users and readers of its shape or dtype."""
        for user in node.users:
            if user not in self._live or node not in self.read_by(user):
                continue
            call = self.call(user)
            view = call.name in SHAPE_OPS and not call.inplace
            if not view or any(self.readers(user)):
                yield user  # else only the view's shape is read: zeros_like(logits[:, 0])

    def read_by_strides(self, node: fx.Node) -> bool:
        """Whether a reader chooses its own strides (as_strided), and so may read memory around the elements."""
        return any(
            label(reader) == "as_strided"
            or (self.name_of(reader) in SHAPE_OPS | {"detach"} and self.read_by_strides(reader))
            for reader in self.readers(node)
        )


def rounded(c: float, dtype: torch.dtype) -> float:
    """Return a number as rounded to a dtype."""
    return torch.tensor(c, dtype=torch.float64).to(dtype).item()


def _transforms(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the transform of each node in one. Dynamo writes a transform as calls that enter and leave its level."""
    inside: dict[fx.Node, str] = {}
    levels = [_FORWARD_AD] if compat.forward_ad_active() else []
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        level = _LEVEL.fullmatch(name) if name.endswith("_nesting") else None
        if name == "_enter_dual_level":
            levels.append(_FORWARD_AD)
        elif level and level["way"] == "in":
            levels.append(f"torch.func ({level['transform']})")
        elif (level or name == "_exit_dual_level") and levels:
            levels.pop()
        elif levels:
            # torch.func.jvp is implemented with forward-mode differentiation.
            inside[node] = next((x for x in reversed(levels) if x != _FORWARD_AD), _FORWARD_AD)
    return inside


def _impure(node: fx.Node) -> bool:
    """Whether a call must stay although its result is unused: anything but plain PyTorch arithmetic."""
    if node.op != "call_function" or node.users:
        return False
    if compat.is_overload(node.target):
        return bool(compat.schema(node.target).is_mutable)
    modes = changes_grad_mode(node) or "autocast" in node.name
    return modes or not is_plain(node.target) or node.is_impure()  # an assertion
