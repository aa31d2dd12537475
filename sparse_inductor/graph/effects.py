"""Which nodes write memory, and which value of a tensor a reader sees.

A Dynamo graph is not functional: `x.relu_()` or `x[~mask] = 0` as a statement changes what later readers of the
node `x` get. Storage identity of the fake tensors says what aliases what. What is not known to leave its operands
alone is taken to write them all: a NumPy call, a function that somebody allowed in the graph, an operator of higher
order without a body.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from .. import compat
from .fakes import attribute, fake, tensors_in
from .memory import UNKNOWN, apart, same_geometry, storages
from .names import INPLACE_OPERATORS, TRAILING_INPLACE, is_plain, name_of, trailing_inplace
from .vocabulary import COPIES

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_GIVEN = ("placeholder", "get_attr")
_REGRADES = frozenset(("detach_", "requires_grad_"))

At = TypeVar("At")  # a node, or more than that


def _in_place(op: str, target: Any) -> bool:
    """Whether the name alone says that the first argument is written: `x.relu_()`, `x += y`, `x[i] = v`."""
    name = target if op == "call_method" else getattr(target, "__name__", "")
    if getattr(target, "__module__", "") == "_operator" or name.endswith("__"):
        return name.strip("_") == "setitem" or name.strip("_") in INPLACE_OPERATORS
    return name.endswith("_")


# Functions whose schemas do not say that they write in the middle: what asks for it, and which arguments.
_STATISTICS = ("running_mean", "running_var")
_UNSAID: dict[str, tuple[str, tuple[str, ...]]] = {
    "batch_norm": ("training", _STATISTICS),
    "native_batch_norm": ("training", _STATISTICS),
    "cudnn_batch_norm": ("training", _STATISTICS),
    "miopen_batch_norm": ("training", _STATISTICS),
    "instance_norm": ("use_input_stats", _STATISTICS),
    "embedding": ("max_norm", ("weight",)),
    "embedding_bag": ("max_norm", ("weight",)),
}


@functools.lru_cache(maxsize=4096)
def _schemas(name: str) -> tuple[Any, ...]:
    """The schemas of ATen's operators of that name."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    return compat.schemas(packet)  # "__eq__" is what every object has, and no operator


class _Written(NamedTuple):
    """An argument that a schema says is written: its place, None where it is given by name alone, its name, and
    whether it is a list of tensors."""

    at: int | None
    name: str
    several: bool


class _Habit(NamedTuple):
    """What the target of a call says of what it writes, whatever its arguments are.

    operator: it has schemas of its own. foreign: nobody knows what it writes, as of NumPy's functions; autograd learns
    nothing of it. first: its name says that it writes its first argument. unsaid: it may write more, of which neither
    its name nor its schemas speak. quiet: it writes nothing that no keyword tells it to.
    """

    name: str
    operator: bool = False
    foreign: bool = False
    first: bool = False
    by_schema: tuple[_Written, ...] = ()
    unsaid: bool = False
    quiet: bool = False


@functools.lru_cache(maxsize=4096)
def _habit(op: str, target: Any) -> _Habit:
    own = getattr(target, "__name__", "")
    name, known = target if op == "call_method" else own, compat.schemas(target)
    if compat.is_higher_order(target):
        return _Habit(name)
    if not known and op == "call_function" and not is_plain(target):
        return _Habit(name, foreign=True)
    by_schema = dict.fromkeys(
        _Written(None if arg.kwarg_only else at, arg.name, "List" in str(arg.type))
        for schema in known or _schemas(name)
        for at, arg in enumerate(schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    )
    first = not known and _in_place(op, target)
    unsaid = own.partition(".")[0] in _UNSAID
    by_place = any(w.at is not None for w in by_schema) or name in TRAILING_INPLACE
    quiet = not (first or unsaid or by_place)
    return _Habit(name, bool(known), False, first, (*by_schema,), unsaid, quiet)


def written(node: fx.Node) -> list[fx.Node]:
    """The argument nodes whose memory this call writes, or may."""
    if node.op == "call_module":
        return _tensors(node)
    if node.op not in ("call_function", "call_method"):
        return []
    target, args, kwargs = node.target, node.args, node.kwargs
    habit = _habit(node.op, target)
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
            out.append(given)  # else it is TorchScript's function of lists of that name
    if habit.unsaid:
        out += _unsaid(target, args, kwargs)
    return [a for a in dict.fromkeys(_nodes(out)) if not isinstance(fake(a), _NUMBERS)]


def reached(
    start: Iterable[At], step: Callable[[At], Iterable[At]], most: float = math.inf
) -> Iterator[At]:
    """The nodes that are reached from some, the nearest first, each once: `step` says where a node leads to."""
    queue, seen = deque(start), set[At]()
    while queue and len(seen) < most:
        node = queue.popleft()
        if node not in seen:
            seen.add(node)
            yield node
            queue += step(node)


def taken_apart(whole: At, apart: Callable[[At], Sequence[At]], most: int = 32) -> list[At]:
    """What it is made of, in order: `apart` gives the parts of one, or none. More than `most` are not taken apart, for
    `k & k` is twice as many each time."""
    found: list[At] = []
    left = [whole]
    while left and len(found) + len(left) <= most:
        one = left.pop(0)
        parts = apart(one)
        found += [] if parts else [one]
        left[:0] = parts
    return found + left


def made_of(node: fx.Node) -> Iterator[fx.Node]:
    """The node and all that goes into it."""
    return reached([node], lambda n: n.all_input_nodes)


def gives_memory(node: fx.Node) -> bool:
    """Whether it is what `tensor.data = other` is in a graph."""
    return getattr(node.target, "__name__", node.target) in ("set_", "shallow_copy_data_")


def _nodes(x: Any) -> Iterator[fx.Node]:
    if isinstance(x, fx.Node):
        yield x
    elif isinstance(x, (tuple, list)):
        for v in x:
            yield from _nodes(v)


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [a for a in node.all_input_nodes if any(True for _ in tensors_in(fake(a)))]


def _by_bodies(node: fx.Node) -> list[fx.Node]:
    """What an operator of higher order writes: nothing, if its bodies are there and leave alone what they are given."""
    bodies = [b for a in node.all_input_nodes if isinstance(b := attribute(a), fx.GraphModule)]
    if bodies and not any(map(_writes_inputs, bodies)):
        return []
    return _tensors(node)


def _writes_inputs(body: fx.GraphModule) -> bool:
    effects = Effects(body.graph, {n: i for i, n in enumerate(body.graph.nodes)})
    given = {None, *body.graph.find_nodes(op="placeholder"), *body.graph.find_nodes(op="get_attr")}
    return any(
        not given.isdisjoint(effects.creators(t)) for ts in effects.writers.values() for t in ts
    )


def _unsaid(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    name = getattr(target, "__name__", "").partition(".")[0]
    when, names = _UNSAID[name]
    try:
        parameters = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin: as ATen has it
        parameters = [a.name for schema in _schemas(name)[:1] for a in schema.arguments]
    bound = {**dict(zip(parameters, args)), **kwargs}
    return [bound.get(n) for n in names] if bound.get(when) not in (False, None) else []


def _is_result(writer: fx.Node, target: fx.Node) -> bool:
    """Whether what a call returns is what it wrote: not so for `out=(values, indices)` and lists of tensors."""
    value = fake(writer)
    if value is None:
        return name_of(writer) == "setitem"
    same = isinstance(value, torch.Tensor) and storages(value) == storages(fake(target))
    return same and same_geometry(writer, target)


def _follows(target: fx.Node, node: fx.Node) -> bool:
    """Whether autograd records of a node what is written through another: not through `node.detach()`."""
    return target is node or not fake(node).requires_grad or fake(target).requires_grad


# What changes nothing where its argument and its result are alike, and what changes nothing with a number.
_SAME = COPIES | frozenset("cast repeat tile pad cat".split())
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1, "pow": 1}


def _copy_of(node: fx.Node) -> fx.Node | None:
    """The argument whose values a call puts into memory of its own, laid out as they are there."""
    name, given = name_of(node), node.all_input_nodes
    if len(given) != 1 or not all(isinstance(fake(n), torch.Tensor) for n in (node, *given)):
        return None
    numbers = node.args if name in ("add", "mul") else node.args[1:2]
    if name not in _SAME and (name not in _NEUTRAL or _NEUTRAL[name] not in numbers):
        return None
    return given[0] if same_geometry(node, given[0]) else None


class Effects:
    """Writes of a graph, by storage. Storages are looked up only in graphs that write at all."""

    def __init__(self, graph: fx.Graph, order: dict[fx.Node, int]):
        self._graph, self._order = graph, order
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
            if isinstance(fake(node), torch.Tensor):  # a pair's parts count when they are taken out
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
            if after < self._order[writer] < before and not apart(target, node)
        ]
        return sorted(found, key=lambda e: self._order[e[0]])

    def value(self, node: fx.Node, reader: fx.Node) -> fx.Node | None:
        """The node whose result `reader` sees when it reads `node`: the last whole write, or the node itself.

        None where the last write went through a view of other shape, or past autograd, so that no single node is the
        value. A reader that is a view reads what it shows alone.
        """
        if not self.writers:
            return node
        events = self._between(node, self._order[node], self._order[reader])
        if events and isinstance(fake(reader), torch.Tensor) and self._of(reader) == self._of(node):
            events = [(writer, target) for writer, target in events if not apart(target, reader)]
        if not events:
            return node
        if not all(_follows(target, node) for _, target in events):
            return None
        writer, target = events[-1]
        return writer if _is_result(writer, target) and same_geometry(target, node) else None

    def last_write(self, node: fx.Node, reader: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The last write that `reader` may see when it reads `node`: the writer, and the tensor that it is given."""
        return self._between(node, self._order[node], self._order[reader])[-1]

    def changes(
        self, node: fx.Node, since: fx.Node, until: fx.Node, but: Collection[fx.Node] = ()
    ) -> list[tuple[fx.Node, fx.Node]]:
        """Who writes to the memory of `node` between two points, each with the tensor that it is given."""
        events = self._between(node, self._order[since], self._order[until])
        return [(writer, target) for writer, target in events if writer not in but]

    def sharing(self, node: fx.Node) -> list[fx.Node] | None:
        """The nodes of the memory of `node`; None where it is an input's, or may be anybody's."""
        keys = self._of(node)
        creators = self.creators(node)
        if UNKNOWN in keys or any(c is None or c.op in _GIVEN for c in creators):
            return None
        return [n for n in self._graph.nodes if not keys.isdisjoint(self._of(n))]

    def returned(self, node: fx.Node) -> bool:
        """Whether the graph returns the memory of `node` to its caller, or would without what Inductor leaves out."""
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
        """What the memory of `node` is nothing but a copy of: Inductor may use the same memory for both."""
        creators = [c for c in self.creators(node) if c is not None and not self.writers_to(c)]
        return [source for c in creators if (source := _copy_of(c)) is not None]

    def past_autograd(self, node: fx.Node, since: fx.Node) -> fx.Node | None:
        """Who writes to the memory of `node` after `since` through another node that autograd does not follow, or does
        not count the writes to."""
        for writer, target in self._between(node, self._order[since], len(self._order)):
            if not _follows(target, node) or (writer, target) in self._uncounted:
                return writer
        return None

    @functools.cached_property
    def _uncounted(self) -> set[tuple[fx.Node, fx.Node]]:
        """The writes that autograd does not count, each with the tensor that is given to its writer."""
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
            if target in through_data or _habit(writer.op, writer.target).foreign
        }

    def given_and_written(self, node: fx.Node, since: fx.Node) -> fx.Node | None:
        """Who writes after `since` to an input of the graph that `node` is made of, or is.

        AOTAutograd's partitioner may save such an input and compute `node` in the backward from what it holds then.
        """
        later = {
            key: writer
            for writer, key in self._given_written
            if self._order[writer] > self._order[since]
        }
        for one in made_of(node) if later else ():
            if one.op in _GIVEN:
                for key in self._of(one) & later.keys():
                    return later[key]
        return None

    @functools.cached_property
    def _given_written(self) -> list[tuple[fx.Node, int]]:
        """Who writes to inputs of the graph, each with their memory."""
        return [
            (writer, key)
            for writer, targets in self.writers.items()
            for target in targets
            if (creator := self.creator(target)) is not None and creator.op in _GIVEN
            for key in self._of(target)
        ]

    def creators(self, node: fx.Node) -> set[fx.Node | None]:
        """The nodes that first held the memory of `node`; None stands for one that is not known."""
        return {self._creator.get(key) for key in self._of(node)} or {None}

    def writers_to(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that write to the memory of `node`."""
        if not self.writers:
            return []
        return [writer for key in self._of(node) for writer, _ in self._writes.get(key, ())]

    def creator(self, node: fx.Node) -> fx.Node | None:
        """The node that first held the memory of `node`, if it is one."""
        found = self.creators(node)
        return found.pop() if len(found) == 1 else None

    def regraded(self, node: fx.Node) -> fx.Node | None:
        """Who says that a tensor, or another one of its memory, follows gradients from there on, or no longer does.

        Its fake tensor knows what holds in the end alone.
        """
        for writer in self._regrading:
            if not self._of(writer.args[0]).isdisjoint(self._of(node)):
                return writer
        return None

    @functools.cached_property
    def _regrading(self) -> list[Any]:
        return [n for n in self.writers if n.op == "call_method" and n.target in _REGRADES]
