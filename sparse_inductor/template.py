"""Patterns defined by two functions: the operations to search for, and their replacement.

    def search(x, weight):
        return torch.relu(x) * weight

    def replacement(x, weight):
        return torch.ops.mine.gated(x, weight)

    PATTERN = Template("gated", "mine::gated", "relu(x) * w -> gated(x, w)", search, replacement)

This is sufficient if the operations are always the same, in the same arrangement. Their spelling does not matter
(`torch.relu(x)`, `x.relu()`, `F.relu(x)`), nor does the order of the operands of a sum or a product. If a family has
variants, or if something has to be proved, write a `Pattern` with its own `match`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .graph.emit import Emitter
from .graph.fakes import fake
from .graph.names import canonical
from .graph.recogniser import Recogniser
from .graph.signatures import SIGNATURES
from .graph.values import matched_nodes
from .graph.view import GraphView, label
from .pattern import Example, Miss

__all__ = ["Template"]

_COMMUTES = frozenset("add mul maximum minimum eq ne and_ or_ xor".split())
_OPERANDS = ("input", "other")

Bindings = dict[str, Any]


@dataclasses.dataclass
class TemplateMatch:
    """The nodes that match a template, and the values of its parameters."""

    template: Template
    anchor: fx.Node
    bindings: Bindings
    matched_nodes: tuple[fx.Node, ...]
    bytes_saved: int | None = None
    note: str = ""

    @property
    def pattern(self) -> str:
        return self.template.name

    @property
    def op(self) -> str:
        return self.template.op

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(dict.fromkeys(v for v in self.bindings.values() if isinstance(v, fx.Node)))

    def replace(self) -> None:
        emitter, values = Emitter(self.anchor), {}
        for node in self.template.replaced_by.nodes:
            if node.op == "placeholder":
                values[node] = self.bindings[node.target]
            elif node.op == "output":
                new = values[node.args[0]]
            else:
                values[node] = emitter.again(node, values)
        self.anchor.replace_all_uses_with(emitter.cast(new, fake(self.anchor).dtype))


class Template(Recogniser):
    """A pattern that replaces exactly the operations of `search` by those of `replacement`.

    Args:
        name, op, summary, examples, near_misses: as in `Pattern`.
        search: a function of tensors and numbers that returns one tensor. Its parameters match any value; a parameter
            that is used twice has to have the same value both times. No control flow may depend on them.
        replacement: a function with the same parameters, in plain PyTorch calls (`torch.ops.mine.op(...)`). If
            gradients are needed, its operator has to be differentiable.
        check: called with the bound parameters (numbers, or graph nodes with the tensors `fake(node)`); returns the
            reason why this match must not be replaced, or None.

    Raises TypeError for functions that cannot be traced or whose parameters differ.
    """

    def __init__(
        self,
        name: str,
        op: str,
        summary: str,
        search: Callable[..., torch.Tensor],
        replacement: Callable[..., torch.Tensor],
        *,
        check: Callable[..., str | None] | None = None,
        examples: Sequence[Example] = (),
        near_misses: Sequence[Example] = (),
    ) -> None:
        self.name, self.op, self.summary = name, op, summary
        self.examples, self.near_misses = tuple(examples), tuple(near_misses)
        self.functions = tuple(f for f in (search, replacement, check) if f is not None)
        self._check = check
        self.searched = _trace(search, name)
        self.replaced_by = _trace(replacement, name)
        mine, theirs = (
            [n.target for n in g.nodes if n.op == "placeholder"]
            for g in (self.searched, self.replaced_by)
        )
        if mine != theirs:
            raise TypeError(f"template {name}: search and replacement take different parameters")
        if not isinstance(self.replaced_by.output_node().args[0], fx.Node):
            raise TypeError(f"template {name}: replacement has to return one tensor")
        self._calls: dict[fx.Node, Any] = {n: canonical(n) for n in _operations(self.searched)}
        for node, call in self._calls.items():
            if call is None:
                raise TypeError(
                    f"template {name}: search calls {node.target}, which has no canonical name"
                )
        output = self.searched.output_node().args[0]
        if output not in self._calls:
            raise TypeError(f"template {name}: search has to return the result of one operation")
        self._last: fx.Node = output
        self.anchors = frozenset({self._calls[output].name})

    def _match(self, node: fx.Node, view: GraphView) -> TemplateMatch | Miss | None:
        search = _Search(self._calls, view)
        found = next(search.node(self._last, node, {}), None)
        if found is None:
            return search.miss(self._last, node)
        bindings = {
            p.target: found[p] for p in self.searched.nodes if p.op == "placeholder" and p in found
        }
        nodes = matched_nodes(view, [found[n] for n in self._calls])
        if self._check is not None and (reason := self._check(**bindings)) is not None:
            return Miss(reason, node)
        return TemplateMatch(self, node, bindings, nodes)


def _trace(fn: Callable[..., Any], name: str) -> fx.Graph:
    try:
        return fx.symbolic_trace(fn).graph
    except Exception as error:
        raise TypeError(
            f"template {name}: {getattr(fn, '__name__', fn)} cannot be traced: {error}"
        ) from error


def _operations(graph: fx.Graph) -> Iterator[fx.Node]:
    return (n for n in graph.nodes if n.op in ("call_function", "call_method"))


class _Search:
    """One attempt to match a template in a graph, from the template's last operation upwards."""

    def __init__(self, calls: Mapping[fx.Node, Any], view: GraphView) -> None:
        self._calls, self._view = calls, view
        self._reached = 0
        self._failed: tuple[str, fx.Node] | None = None

    def node(
        self, wanted: fx.Node, node: fx.Node, found: dict[fx.Node, Any]
    ) -> Iterator[dict[fx.Node, Any]]:
        """Yield every way in which `node` matches `wanted`, as a dict from template nodes to their values."""
        call, call_wanted = self._view.call(node), self._calls[wanted]
        if call.inplace or call.name != call_wanted.name:
            there = label(node) if call or node.op == "placeholder" else str(node)
            self._note(found, f"{call_wanted.name} is looked for where {there} is", node)
            return
        found = {**found, wanted: node}
        fits, defaults = False, SIGNATURES[call.name].defaults  # may be passed or omitted
        wanted_args = {**defaults, **call_wanted.args}
        for order in self._orders(call):
            args = {**defaults, **order}
            if args.keys() == wanted_args.keys():
                pairs = [(v, args[k], node) for k, v in wanted_args.items()]
                # Constants first: their mismatch is a more precise reason than one of the operands' operations.
                pairs.sort(key=lambda pair: isinstance(pair[0], fx.Node))
                for one in self._values(pairs, found):
                    fits = True
                    yield one
        if not fits:
            self._note(found, f"{call.name} has other arguments than are looked for", node)

    def _orders(self, call: Any) -> Iterator[dict[str, Any]]:
        yield call.args
        if call.name in _COMMUTES and all(k in call.args for k in _OPERANDS):
            yield {**call.args, "input": call["other"], "other": call["input"]}

    def _values(
        self, pairs: list[tuple[Any, Any, fx.Node]], found: dict[fx.Node, Any]
    ) -> Iterator[dict[fx.Node, Any]]:
        """Yield every way to match several arguments: each way for the first, combined with those for the rest."""
        if not pairs:
            yield found
            return
        (wanted, value, reader), *rest = pairs
        for one in self._value(wanted, value, reader, found):
            yield from self._values(rest, one)

    def _value(
        self, wanted: Any, value: Any, reader: fx.Node, found: dict[fx.Node, Any]
    ) -> Iterator[dict[fx.Node, Any]]:
        if isinstance(wanted, (tuple, list)):
            if isinstance(value, (tuple, list)) and len(value) == len(wanted):
                yield from self._values([(w, v, reader) for w, v in zip(wanted, value)], found)
        elif not isinstance(wanted, fx.Node):
            if self._is_constant(wanted, value, reader):
                yield found
        elif wanted in found:
            if self._view.same_value(found[wanted], value):
                yield found
        elif wanted.op == "placeholder":
            yield {**found, wanted: value}
        elif isinstance(value, fx.Node):
            now = self._view.value(value, reader)
            if now is not None:
                yield from self.node(wanted, now, found)

    def _is_constant(self, wanted: Any, value: Any, reader: fx.Node) -> bool:
        if isinstance(value, fx.Node):
            is_number = isinstance(wanted, (int, float)) and not isinstance(wanted, bool)
            return is_number and self._view.const(value, reader) == wanted
        # True == 1 in Python, but a flag is no number.
        return value is wanted or (
            isinstance(value, bool) == isinstance(wanted, bool) and value == wanted
        )

    def _note(self, found: dict[fx.Node, Any], reason: str, node: fx.Node) -> None:
        """Keep the reason of the attempt that matched the most operations; of several such attempts, the first."""
        reached = sum(n in self._calls for n in found)
        if self._failed is None or reached > self._reached:
            self._reached, self._failed = reached, (reason, node)

    def miss(self, last: fx.Node, node: fx.Node) -> Miss | None:
        """Return a near miss if at least two operations, and three quarters of all, agree apart from constants."""
        if self._failed is None or self._alike(last, node) < max(2, 0.75 * len(self._calls)):
            return None
        return Miss(*self._failed)

    def _alike(self, wanted: fx.Node, node: fx.Node) -> int:
        """Return how many operations of the template, from `wanted` upwards, have the same name in the graph."""
        call = self._view.call(node)
        if call.name != self._calls[wanted].name:
            return 0
        operands = [i for i in wanted.all_input_nodes if i in self._calls]
        return 1 + sum(
            max((self._alike(operand, i) for i in node.all_input_nodes), default=0)
            for operand in operands
        )
