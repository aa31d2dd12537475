"""Extracts a replacement from a graph: the operations as written and the inserted operators, each as a function.

`Watch` compares a graph before and after one `match.replace()`. Independently of the pattern, it finds the new nodes
and the old nodes that they replace.

The operations as written are not only those that the pattern matched: operations between them that may write to one of
their results are included. Each operation reads its inputs as they were when it ran (copies are made if an input may be
written to before the operator runs), and runs under its original autocast and gradient modes.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from .. import compat
from ..graph.fakes import fake
from ..graph.modes import DEVICES, Modes, modes_by_node, modes_now
from ..graph.names import canonical, name_of
from ..graph.search import reached
from ..graph.values import ELEMENTWISE, REPEATS
from ..graph.vocabulary import COPIES, VIEWS
from ..rehearsal import check_shape
from .writes import may_write, with_writers

_REACH = 20  # nodes between a tensor and the expansion of which it is made


class CannotCut(Exception):
    """Raised for a replacement that cannot be separated from its surroundings."""


class Subgraph:
    """Part of a graph as a function of `inputs`, nodes outside it; its nodes run under their original modes.

    writes: whether it may write to its inputs, so that it runs on copies of them. chooses: whether it selects among
    equal values in an unspecified order (topk, sort).
    """

    def __init__(self, root: nn.Module | None, modes: dict[fx.Node, Modes]) -> None:
        self.inputs: list[fx.Node] = []
        self.places: list[int] = []
        self.writes = self.chooses = False
        self._numbers = itertools.count()
        self._root: Any = {} if root is None else root
        self._graph = fx.Graph()
        self._inner: dict[fx.Node, fx.Node] = {}
        self._modes = modes
        self._states: dict[str, Modes] = {}
        self._module: fx.GraphModule | None = None

    def take(
        self,
        nodes: Sequence[fx.Node],
        instead: dict[tuple[fx.Node, fx.Node], fx.Node] | None = None,
    ) -> None:
        """Copy these nodes, in graph order. instead: for (node, input), the node that the copy reads for that input."""
        self.writes = any(map(may_write, nodes))
        self.chooses = any(map(_chooses, nodes))
        for node in nodes:
            self._copy(node, set(nodes), instead or {})

    def widen(self, node: fx.Node) -> None:
        """Compute one of the inputs within the subgraph, from the inputs of that node.

        Raises CannotCut if computing the node twice differs from computing it once.
        """
        if not _may_run_twice(node):
            raise CannotCut(f"it would have to compute {node} once more")
        placeholder = self._inner.pop(node)
        self.inputs.remove(node)
        # The node's inputs precede the node's first reader, as in the original graph.
        users = set(placeholder.users)
        first = next(n for n in self._graph.nodes if n in users)
        with self._graph.inserting_before(first):
            self._copy(node, set(), {})
        placeholder.replace_all_uses_with(self._inner[node])
        self._graph.erase_node(placeholder)

    def finish(self, results: Sequence[fx.Node]) -> None:
        """Make the subgraph a function that returns these nodes' values."""
        for node in results:
            self._input(node, set())
        self._graph.output(tuple(self._inner[node] for node in results))
        self._module = fx.GraphModule(self._root, self._graph)

    def __call__(self, values: Sequence[Any]) -> tuple[Tensor, ...]:
        """Run on values of the region's inputs; `places` are the indices of this subgraph's inputs."""
        assert self._module is not None
        arguments = [values[place] for place in self.places]
        if self.writes:
            arguments = [v.clone() if isinstance(v, Tensor) else v for v in arguments]
        if not all(map(_is_ordinary, self._states.values())):
            return _Interpreter(self._module, self._states).run(*arguments)
        with _autocast({}):
            return self._module(*arguments)

    def _copy(
        self,
        node: fx.Node,
        inside: set[fx.Node],
        instead: dict[tuple[fx.Node, fx.Node], fx.Node],
    ) -> None:
        reads = {n: instead.get((node, n), n) for n in node.all_input_nodes}
        for one in reads.values():
            self._input(one, inside)
        inner = self._graph.node_copy(node, lambda n: self._inner[reads[n]])
        self._inner[node] = inner
        self._states[inner.name] = self._modes.get(node, Modes({}))

    def _input(self, node: fx.Node, inside: set[fx.Node]) -> None:
        if node in self._inner:
            return
        value = fake(node)
        if isinstance(value, (Tensor, torch.SymInt)):
            first = next(iter(self._graph.nodes), None)
            with self._graph.inserting_before(first):
                placeholder = self._graph.placeholder(f"input_{next(self._numbers)}")
            self._inner[node] = placeholder
            self.inputs.append(node)
        elif node.op in ("call_function", "call_method", "get_attr"):
            self._copy(node, inside, {})  # a shape: computing it once more is cheap
        else:
            raise CannotCut(f"it reads {node}, which is {type(value).__name__}")


class Watch:
    """One replacement in a graph. Create it before `match.replace()` of these nodes, and call `finish` afterwards."""

    def __init__(self, graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
        self._graph = graph
        matched_nodes = set(nodes)
        matched_nodes |= {
            user
            for n in matched_nodes
            if not isinstance(fake(n), Tensor)  # the elements of a tuple
            for user in n.users
            if user.target is operator.getitem
        }
        self._present = set(graph.nodes)
        inside = [n for n in graph.nodes if n in matched_nodes]
        readers = dict.fromkeys(u for n in inside for u in n.users if u not in matched_nodes)
        self._reads = [
            (user, at, argument)
            for user in readers
            for at, argument in enumerate(_flat(user)[0])
            if isinstance(argument, fx.Node) and argument in matched_nodes
        ]
        self._modes = _modes_by_node(graph)
        self.copies: dict[fx.Node, fx.Node] = {}
        nodes = with_writers(graph, inside)
        self._own = set(nodes)
        instead = self._as_they_were(nodes)
        self._present |= set(self.copies)
        self.written = Subgraph(graph.owning_module, self._modes)
        self.written.take(nodes, instead)

    def _as_they_were(self, nodes: Sequence[fx.Node]) -> dict[tuple[fx.Node, fx.Node], fx.Node]:
        """Return substitutes, by (node, input), for inputs from outside that are written to.

        If an input may be written to between the node and the operator, the substitute is a copy (`copies` maps it to
        the input), else the result of the last write (`_results`).
        """
        instead = self._results(nodes)
        order = self._order
        last = order[nodes[-1]]
        writers = [n for n in self._graph.nodes if may_write(n) and n not in self._own]
        for node in nodes:
            for one in node.all_input_nodes:
                if one in self._own or not isinstance(fake(one), Tensor):
                    continue
                if any(order[node] < order[w] <= last for w in writers):
                    with self._graph.inserting_before(node):
                        detached = self._graph.call_method("detach", (one,))
                        copy = self._graph.call_method("clone", (detached,))
                    for new in (detached, copy):
                        new.meta = {**one.meta, "example_value": fake(one).detach()}
                    self._present.add(detached)
                    self.copies[copy], instead[node, one] = one, copy
        return instead

    def _results(self, nodes: Sequence[fx.Node]) -> dict[tuple[fx.Node, fx.Node], fx.Node]:
        """Return, by (node, input), the last operation before the node that writes to the input and returns it.

        The node reads its result, so that gradients flow as in the program.
        """
        order = self._order
        writers: dict[fx.Node, list[fx.Node]] = {}
        for w in self._graph.nodes:
            returned = w.args[0] if w.args else None
            other = w not in self._own and w in self._modes
            if not (other and isinstance(returned, fx.Node) and may_write(w)):
                continue
            was, now = fake(returned), fake(w)
            tensors = isinstance(was, Tensor) and isinstance(now, Tensor)
            if tensors and was.shape == now.shape and self._modes[w].records:
                writers.setdefault(returned, []).append(w)
        found = {}
        for node in nodes:
            for one in node.all_input_nodes:
                before = [w for w in writers.get(one, ()) if order[w] < order[node]]
                if before and one not in self._own:
                    found[node, one] = before[-1]
        return found

    def cancel(self) -> None:
        """Remove the copies that were inserted for the check."""
        for copy in self.copies:
            if not copy.users:
                (detached,) = copy.all_input_nodes
                self._graph.erase_node(copy)
                self._graph.erase_node(detached)

    def finish(self) -> None:
        """Find the inserted nodes and the nodes that they replace.

        Raises CannotCut, or ValueError if a node differs in shape or dtype from the node that it replaces.
        """
        self.new = [n for n in self._graph.nodes if n not in self._present]
        self.replaced: dict[fx.Node, fx.Node] = {}
        self._redirected = []
        for user, at, old in self._reads:
            now = _flat(user)[0][at]
            if now is old:
                continue  # the user only reads a shape, or is about to be erased
            if self.replaced.setdefault(old, now) is not now:
                raise CannotCut(f"{old} was replaced by several nodes")
            self._redirected.append((user, at, old))
        if not self.replaced:
            raise CannotCut("nothing reads its result")
        for old, now in self.replaced.items():
            _check_alike(old, now)
        self.rewritten = Subgraph(self._graph.owning_module, _modes_by_node(self._graph))
        self.rewritten.take(self.new, self._results(self.new))
        self._align()
        self.written.finish(list(self.replaced))
        self.rewritten.finish(list(self.replaced.values()))
        nodes = list(dict.fromkeys([*self.written.inputs, *self.rewritten.inputs]))
        nodes += [n for copy, n in self.copies.items() if copy in nodes and n not in nodes]
        self.tensors = [n for n in nodes if isinstance(fake(n), Tensor)]
        self.sizes = [n for n in nodes if n not in self.tensors]
        order = {n: at for at, n in enumerate([*self.tensors, *self.sizes])}
        self.origins = [order[self.copies.get(n, n)] for n in self.tensors]
        for part in (self.written, self.rewritten):
            part.places = [order[n] for n in part.inputs[::-1]]

    @property
    def _order(self) -> dict[fx.Node, int]:
        """The present position of each node."""
        return {n: at for at, n in enumerate(self._graph.nodes)}

    @property
    def _last(self) -> fx.Node:
        """The last of the inserted nodes, after which the operator stands."""
        present = {*self.new, *self.replaced.values()}
        return next(n for n in reversed(self._graph.nodes) if n in present)

    def _align(self) -> None:
        """Make both subgraphs read the same inputs, so that their gradients belong to the same tensors: if one of them
        reads a value computed from inputs of the other, such as repeated key heads, it computes that value itself. So
        it does with an expanded tensor, of whose gradient only the sum over the new axis matters, and with a value that
        is computed after the place of the operator."""
        order, last = self._order, self._last
        own = lambda n: order[n] > order[last] or _is_repeated(n)
        for part in (self.written, self.rewritten):
            while (node := next(filter(own, part.inputs), None)) is not None:
                part.widen(node)
        while True:
            ours, theirs = set(self.written.inputs), set(self.rewritten.inputs)
            behind = [
                (part, node)
                for part, mine, others in (
                    (self.written, ours, theirs),
                    (self.rewritten, theirs, ours),
                )
                for node in self._made_of(others - mine)
                if node in mine - others and node not in self.copies and not may_write(node)
            ]
            if not behind:
                return
            part, node = behind[-1]  # the last one: its inputs may be in the list, too
            part.widen(node)

    def _made_of(self, sources: Collection[fx.Node]) -> list[fx.Node]:
        """Return the nodes that depend on any of `sources`, directly or indirectly, in graph order."""
        found: dict[fx.Node, None] = {}
        for node in self._graph.nodes if sources else ():
            if any(n in sources or n in found for n in node.all_input_nodes):
                found[node] = None
        return list(found)

    def enclose(self, target: Callable[..., Any], *arguments: Any) -> None:
        """Replace the inserted nodes by one call of `target(tensors, sizes, *arguments)`, which returns a list of
        contiguous tensors, one for each value that is read outside."""
        values = [
            t.new_empty(t.shape).requires_grad_(t.requires_grad)
            for t in map(fake, self.replaced.values())
        ]
        last = self._last
        with self._graph.inserting_after(last):
            call = self._graph.call_function(target, (self.tensors, self.sizes, *arguments))
        call.meta = {**last.meta, "example_value": values}
        self._keep_for_backward(call)
        outputs: dict[fx.Node, fx.Node] = {}
        place = call
        for at, (old, value) in enumerate(zip(self.replaced, values, strict=True)):
            with self._graph.inserting_after(place):
                place = self._graph.call_function(operator.getitem, (call, at))
            place.meta = {**last.meta, "example_value": value}
            outputs[old] = place
        for user, at, old in self._redirected:
            flat, spec = _flat(user)
            flat[at] = outputs[old]
            user.args, user.kwargs = pytree.tree_unflatten(flat, spec)
        for node in reversed(self.new):
            if not node.users:
                self._graph.erase_node(node)

    def _keep_for_backward(self, call: fx.Node) -> None:
        """Give `call` copies of the tensors that may be written to after it: it saves all of them for its backward."""
        nodes = list(self._graph.nodes)
        written = {
            compat.storage_key(fake(n))
            for writer in nodes[nodes.index(call) :]
            if writer is not call and may_write(writer)
            for n in writer.all_input_nodes
            if isinstance(fake(n), Tensor)
        }
        with self._graph.inserting_before(call):
            for t in self.tensors:
                if compat.storage_key(fake(t)) in written:
                    copy = self._graph.call_method("clone", (t,))
                    copy.meta = dict(t.meta)
                    call.replace_input_with(t, copy)


def _may_run_twice(node: fx.Node) -> bool:
    call = canonical(node)
    return call is not None and not call.inplace and not call.name.startswith(("rand", "dropout"))


def _is_repeated(node: fx.Node) -> bool:
    """Whether a node requires a gradient and is computed from an expanded tensor, element by element."""

    def up(n: fx.Node) -> Sequence[fx.Node]:
        call = canonical(n)
        passed = call is not None and not call.inplace and call.name in COPIES | VIEWS | ELEMENTWISE
        return n.all_input_nodes if passed else ()

    if not getattr(fake(node), "requires_grad", False):
        return False
    return any(name_of(n) in REPEATS for n in reached([node], up, _REACH))


def _chooses(node: fx.Node) -> bool:
    call = canonical(node)
    return call is not None and call.name in ("topk", "sort", "argsort")


def _flat(node: fx.Node) -> tuple[list[Any], Any]:
    return pytree.tree_flatten((node.args, node.kwargs))


def _check_alike(old: fx.Node, now: fx.Node) -> None:
    was, new = fake(old), fake(now)
    if not isinstance(was, Tensor) or not isinstance(new, Tensor):
        raise CannotCut(f"{old} is no tensor")
    if was.dtype != new.dtype:
        raise ValueError(f"the replacement of {old} has dtype {new.dtype}, it was {was.dtype}")
    check_shape(old, now)


# --- Modes ----------------------------------------------------------------------------------------


def _modes_by_node(graph: fx.Graph) -> dict[fx.Node, Modes]:
    """Return the modes of each node, assuming that gradients are recorded around the graph."""
    return modes_by_node(graph, Modes(modes_now().autocast))


def _is_ordinary(modes: Modes) -> bool:
    return modes.records and not any(on for on, _ in modes.autocast.values())


@contextlib.contextmanager
def _autocast(state: dict[str, tuple[bool, torch.dtype]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device in DEVICES:
            on, dtype = state.get(device, (False, None))
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=on))
        yield


class _Interpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, states: dict[str, Modes]) -> None:
        super().__init__(module)
        self._states = states

    def run_node(self, n: fx.Node) -> Any:
        state = self._states.get(n.name, Modes({}))
        grad = torch.is_grad_enabled() and state.records
        with _autocast(state.autocast), torch.set_grad_enabled(grad):
            return super().run_node(n)
