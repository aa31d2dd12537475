"""Which nodes write memory, and which value of a tensor a reader sees.

A Dynamo graph is not functional: `x.relu_()` or `x[~mask] = 0` as a statement changes the value that later readers of
the node `x` get. Aliases are found by the storages of the fake tensors. A call that is not known to leave its operands
unchanged is assumed to write them all: a NumPy call, a function that was allowed in the graph, a higher-order operator
without a body.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .. import compat
from .fakes import attribute, fake, tensors_in
from .habits import habit_of, unsaid_writes
from .memory import UNKNOWN, apart, same_geometry, storages
from .names import name_of, target_name, trailing_inplace
from .search import made_of
from .vocabulary import COPIES

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_GIVEN = ("placeholder", "get_attr")
_REGRADES = frozenset(("detach_", "requires_grad_"))


def written(node: fx.Node) -> list[fx.Node]:
    """Return the argument nodes whose memory this call writes, or may write."""
    if node.op == "call_module":
        return _tensors(node)
    if node.op not in ("call_function", "call_method"):
        return []
    target, args, kwargs = node.target, node.args, node.kwargs
    habit = habit_of(node.op, target)
    if habit.quiet and not kwargs:
        return []
    if habit.foreign:
        return _tensors(node)
    if compat.is_higher_order(target):
        return _by_bodies(node)
    out: list[Any] = []
    if not habit.operator:
        at = trailing_inplace(habit.name, args)
        last = at is not None and args[at] is True
        if last or habit.first or kwargs.get("inplace") is True:
            out.append(args[0] if args else kwargs.get("input"))
        out.append(kwargs.get("out"))
    for at, name, several in habit.by_schema:
        given = args[at] if at is not None and at < len(args) else kwargs.get(name)
        if isinstance(given, (tuple, list)) == several:
            out.append(given)  # else TorchScript's list function of this name
    if habit.unsaid:
        out += unsaid_writes(target, args, kwargs)
    return [a for a in dict.fromkeys(_nodes(out)) if not isinstance(fake(a), _NUMBERS)]


def gives_memory(node: fx.Node) -> bool:
    """Whether a node is an assignment `tensor.data = other`."""
    return target_name(node.target) in ("set_", "shallow_copy_data_")


def _nodes(x: Any) -> Iterator[fx.Node]:
    if isinstance(x, fx.Node):
        yield x
    elif isinstance(x, (tuple, list)):
        for v in x:
            yield from _nodes(v)


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [a for a in node.all_input_nodes if any(True for _ in tensors_in(fake(a)))]


def _by_bodies(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a higher-order operator may write: none if it has bodies and these write no input."""
    inner = bodies(node)
    if inner and not any(map(_writes_inputs, inner)):
        return []
    return _tensors(node)


def bodies(node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs that a higher-order operator calls; none for anything else."""
    given = node.all_input_nodes if compat.is_higher_order(node.target) else ()
    return [b for a in given if isinstance(b := attribute(a), fx.GraphModule)]


def writes_past_autograd(node: fx.Node) -> bool:
    """Whether a body of a higher-order operator writes to its inputs without autograd's version counter."""
    return any(_writes_inputs(body, uncounted=True) for body in bodies(node))


def _writes_inputs(body: fx.GraphModule, uncounted: bool = False) -> bool:
    """Whether a body writes to its inputs; with `uncounted`, whether autograd's version counter misses such a write."""
    effects = Effects(body.graph)
    given = {None, *body.graph.find_nodes(op="placeholder"), *body.graph.find_nodes(op="get_attr")}
    return any(
        not given.isdisjoint(effects.creators(t))
        for by, ts in effects.writers.items()
        for t in ts
        if not uncounted or (by, t) in effects.uncounted
    )


def _is_result(writer: fx.Node, target: fx.Node) -> bool:
    """Whether a call returns the tensor that it wrote, unlike with `out=(values, indices)` or lists of tensors."""
    value = fake(writer)
    if value is None:
        return name_of(writer) == "setitem"
    same = isinstance(value, torch.Tensor) and storages(value) == storages(fake(target))
    return same and same_geometry(writer, target)


def _follows(target: fx.Node, node: fx.Node) -> bool:
    """Whether autograd records a write through `target` as a change of `node`: not if that is `node.detach()`."""
    return target is node or not fake(node).requires_grad or fake(target).requires_grad


def _last(events: Sequence[tuple[fx.Node, fx.Node]], node: fx.Node) -> fx.Node | None:
    """Return the last of some writers, each with the tensor passed to it, if it wrote just the elements of `node`."""
    if not all(_follows(target, node) for _, target in events):
        return None
    writer, target = events[-1]
    return writer if _is_result(writer, target) and same_geometry(target, node) else None


# Calls that copy their argument if the result has the same geometry, and calls that copy it with a neutral operand.
_SAME = COPIES | frozenset("cast repeat tile pad cat".split())
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1, "pow": 1}


def _copy_of(node: fx.Node) -> fx.Node | None:
    """Return the argument whose values a call copies unchanged, in the same layout; None for other calls."""
    name, given = name_of(node), node.all_input_nodes
    if len(given) != 1 or not all(isinstance(fake(n), torch.Tensor) for n in (node, *given)):
        return None
    numbers = node.args if name in ("add", "mul") else node.args[1:2]
    if name not in _SAME and (name not in _NEUTRAL or _NEUTRAL[name] not in numbers):
        return None
    return given[0] if same_geometry(node, given[0]) else None


class Effects:
    """The order of a graph's nodes and the writes, by storage. Storages are looked up only if the graph has writes."""

    def __init__(self, graph: fx.Graph):
        self._graph = graph
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.writers = {n: targets for n in graph.nodes if (targets := written(n))}
        self._known: dict[fx.Node, frozenset[int]] = {}

    def _of(self, node: fx.Node) -> frozenset[int]:
        if node not in self._known:
            self._known[node] = storages(fake(node))
        return self._known[node]

    @functools.cached_property
    def _writes(self) -> dict[int, list[tuple[fx.Node, fx.Node]]]:
        writes: dict[int, list[tuple[fx.Node, fx.Node]]] = {}
        for node, targets in self.writers.items():
            for target in targets:
                for key in self._of(target):
                    writes.setdefault(key, []).append((node, target))
        return writes

    @functools.cached_property
    def _creator(self) -> dict[int, fx.Node]:
        creator: dict[int, fx.Node] = {}
        for node in self._graph.nodes:
            if isinstance(fake(node), torch.Tensor):  # of a tuple, the getitem nodes count
                for key in self._of(node) - {UNKNOWN}:
                    creator.setdefault(key, node)
        return creator

    def _between(self, node: fx.Node, after: int, before: int) -> list[tuple[fx.Node, fx.Node]]:
        if not self.writers:
            return []
        keys = self._of(node)
        if UNKNOWN in keys:
            keys = frozenset(self._writes)
        elif keys:
            keys |= {UNKNOWN}
        events = {e: None for key in keys for e in self._writes.get(key, ())}
        found = [
            (writer, target)
            for writer, target in events
            if after < self.order[writer] < before and not apart(target, node)
        ]
        return sorted(found, key=lambda e: self.order[e[0]])

    def value(self, node: fx.Node, reader: fx.Node) -> fx.Node | None:
        """Return the node whose result `reader` sees when it reads `node`: the last write of all of it, or itself.

        None where the last write went through a view of another shape, or past autograd, so that no single node has the
        value. A reader that is a view reads only the elements that it shows; a write in place is no such reader.
        """
        if not self.writers:
            return node
        events = self._between(node, self.order[node], self.order[reader])
        is_view = isinstance(fake(reader), torch.Tensor) and reader not in self.writers
        if events and is_view and self._of(reader) == self._of(node):
            events = [(writer, target) for writer, target in events if not apart(target, reader)]
        return _last(events, node) if events else node

    def shown(self, node: fx.Node) -> fx.Node | None:
        """Return the node whose result a view shows: the last write to its elements, if that covered just these."""
        creator = self.creator(node) if self.writers else None
        if creator is None:
            return None
        events = self._between(node, self.order[creator], self.order[node])
        return _last(events, node) if events else None

    def last_write(self, node: fx.Node, reader: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return the last write that `reader` may see when it reads `node`: the writer, and the tensor passed to it."""
        return self._between(node, self.order[node], self.order[reader])[-1]

    def changes(
        self, node: fx.Node, since: fx.Node, until: fx.Node
    ) -> list[tuple[fx.Node, fx.Node]]:
        """Return the writers to the memory of `node` between two points, each with the tensor passed to it."""
        return self._between(node, self.order[since], self.order[until])

    def sharing(self, node: fx.Node) -> list[fx.Node] | None:
        """Return the nodes that share the memory of `node`; None where it is an input's memory, or unknown."""
        keys = self._of(node)
        creators = self.creators(node)
        if UNKNOWN in keys or any(c is None or c.op in _GIVEN for c in creators):
            return None
        return [n for n in self._graph.nodes if not keys.isdisjoint(self._of(n))]

    def returned(self, node: fx.Node) -> bool:
        """Whether the graph returns the memory of `node` to its caller, perhaps only after Inductor removes copies."""
        return not self._of(node).isdisjoint(self._results)

    @functools.cached_property
    def _results(self) -> frozenset[int]:
        found: set[int] = set()
        queue = self._graph.output_node().all_input_nodes
        while queue:
            node = queue.pop()
            found |= self._of(node)
            queue += self.copied(node)
        return frozenset(found)

    def copied(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that the memory of `node` is a mere copy of. Inductor may share one memory between them."""
        creators = [c for c in self.creators(node) if c is not None and not self.writers_to(c)]
        return [source for c in creators if (source := _copy_of(c)) is not None]

    def past_autograd(self, node: fx.Node, since: fx.Node) -> fx.Node | None:
        """Return a writer to the memory of `node` after `since` whose write autograd does not record or count; None if
        there is none."""
        for writer, target in self._between(node, self.order[since], len(self.order)):
            if not _follows(target, node) or (writer, target) in self.uncounted:
                return writer
        return None

    @functools.cached_property
    def uncounted(self) -> set[tuple[fx.Node, fx.Node]]:
        """The writes that do not increase autograd's version counter, as pairs of writer and tensor passed to it."""
        through_data: set[fx.Node] = set()  # `.data` of a tensor, and views of it
        for node in self._graph.nodes if self.writers else ():
            source = node.args[0] if node.args else None
            seen = isinstance(source, fx.Node) and source in through_data
            if compat.is_data(node.target) or (seen and self._of(source) == self._of(node)):
                through_data.add(node)
        return {
            (writer, target)
            for writer, targets in self.writers.items()
            for target in targets
            if target in through_data or habit_of(writer.op, writer.target).foreign
        }

    def given_and_written(self, node: fx.Node, since: fx.Node) -> fx.Node | None:
        """Return a writer, after `since`, to an input of the graph that `node` is, or is computed from.

        AOTAutograd's partitioner may save such an input and recompute `node` in the backward from its later contents.
        """
        later = {
            key: writer
            for writer, key in self._given_written
            if self.order[writer] > self.order[since]
        }
        for one in made_of(node) if later else ():
            if one.op in _GIVEN:
                for key in self._of(one) & later.keys():
                    return later[key]
        return None

    @functools.cached_property
    def _given_written(self) -> list[tuple[fx.Node, int]]:
        """The writers to inputs of the graph, each with the storage that it writes."""
        return [
            (writer, key)
            for writer, targets in self.writers.items()
            for target in targets
            if (creator := self.creator(target)) is not None and creator.op in _GIVEN
            for key in self._of(target)
        ]

    def creators(self, node: fx.Node) -> set[fx.Node | None]:
        """Return the nodes that first held the memory of `node`. None stands for an unknown node."""
        return {self._creator.get(key) for key in self._of(node)} or {None}

    def writers_to(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that write to the memory of `node`."""
        if not self.writers:
            return []
        return [writer for key in self._of(node) for writer, _ in self._writes.get(key, ())]

    def creator(self, node: fx.Node) -> fx.Node | None:
        """Return the node that first held the memory of `node`, if it is a single one."""
        found = self.creators(node)
        return found.pop() if len(found) == 1 else None

    def regraded(self, node: fx.Node) -> fx.Node | None:
        """Return a call of detach_() or requires_grad_() on a tensor that shares the memory of `node`.

        The fake tensor shows only whether the tensor requires a gradient at the end of the graph.
        """
        for writer in self._regrading:
            if not self._of(writer.args[0]).isdisjoint(self._of(node)):
                return writer
        return None

    @functools.cached_property
    def _regrading(self) -> list[Any]:
        return [n for n in self.writers if n.op == "call_method" and n.target in _REGRADES]
