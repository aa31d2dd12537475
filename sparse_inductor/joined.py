"""Graphs that hold together what Dynamo would compile apart.

Dynamo ends the graph at a call of the entmax package in training, or of a copy of its autograd Functions; with
`match.leaves` it goes on. The whole may be refused, or computed otherwise, by what stands behind Dynamo. In parts, such
a program runs. Where nothing in the whole is rewritten, Dynamo ends the graph as it does by itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from . import compat
from .graph.effects import Effects, gives_memory, written
from .graph.fakes import attribute, fake, tensors_in
from .graph.memory import storages
from .graph.names import is_operator
from .match.entmax import leaves
from .notices import described
from .pattern import Miss
from .rehearsal import differentiating_fakes

_OPERATORS = ("sparse_inductor::entmax", "sparse_inductor::entmax_attention")

log = logging.getLogger("sparse_inductor")


def why_in_parts(graph: fx.Graph) -> Miss | None:
    """Why a graph that is one only because of `match.leaves`, at which node, has to be compiled in parts; None for any
    other graph, and where it need not."""
    node = _joined_at(graph)
    where = None if node is None else _hazard(graph)
    return None if where is None else Miss(f"an entmax call stands in a {where}", node)


def _hazard(graph: fx.Graph) -> str | None:
    """Where in a graph such a call stands, if what is behind Dynamo refuses that, or computes something else."""
    effects = Effects(graph, {node: at for at, node in enumerate(graph.nodes)})
    for node in graph.nodes:
        if gives_memory(node):
            return "graph that gives a tensor other memory"
        if not compat.is_higher_order(node.target) or _is_function(node):
            continue
        if written(node):
            # AOTAutograd's partitioner has a checkpoint's body run again in the backward, writes included.
            return f"graph in which the body of {node.target} writes"
        joins, end = any(_joins(body.graph) for body in _bodies(node)), graph.output_node()
        if joins and any(effects.changes(result, node, end) for result in node.users):
            # AOTAutograd puts a checkpoint's body into its caller's graph, and saves what it returned.
            return f"body of {node.target} whose result is written to"
        if compat.marks_every_result(node.target) and _lets_one_go(node):
            return "region of which one result requires no gradient"
    if _reads_what_it_wrote_to_a_module(graph):
        return "graph that writes to a module's tensor and reads it then"
    if _returns_a_view_twice(graph):
        return "graph that returns a view and what is detached of it"
    if _returns_a_copy(graph, effects):
        return "graph that returns a copy of what it computes"
    try:
        if effects.writers and _refused(graph):
            return "graph that writes to what autograd saved"
    except Exception as error:
        log.debug("a graph could not be tried out: %s", described(error))
    return None


def joined_in_vain(graph: fx.Graph) -> bool:
    """Whether no operator stands now in a frame's graph that is one only because of `match.leaves`."""
    module = graph.owning_module
    whole = compat.graph_end(module) is not None and not compat.in_ddp_bucket(module)
    return whole and _joined_at(graph) is not None and not _has_operators(graph)


def _joined_at(graph: fx.Graph) -> fx.Node | None:
    return _joining(graph) if compat.has_joined() and torch.is_grad_enabled() else None


def _has_operators(graph: fx.Graph) -> bool:
    return any(
        is_operator(node) or any(_has_operators(body.graph) for body in _bodies(node))
        for node in graph.nodes
    )


def _joins(graph: fx.Graph) -> bool:
    return _joining(graph) is not None


def _joining(graph: fx.Graph) -> fx.Node | None:
    """The first node of a graph, or of a body in it, at which Dynamo would end it. Bodies are rewritten first: it may
    be an operator."""
    for node in graph.nodes:
        leaf = getattr(node.target, "__module__", None) == leaves.__name__
        own = compat.is_overload(node.target) and node.target.name() in _OPERATORS
        if leaf or own or _is_function(node):
            return node
        inner = (_joining(body.graph) for body in _bodies(node))
        if (found := next((n for n in inner if n is not None), None)) is not None:
            return found
    return None


def _is_function(node: fx.Node) -> bool:
    return compat.is_higher_order(node.target) and str(node.target) == "autograd_function_apply"


def _bodies(node: fx.Node) -> Iterator[fx.GraphModule]:
    if compat.is_higher_order(node.target):
        for given in node.all_input_nodes:
            if isinstance(body := attribute(given), fx.GraphModule):
                yield body


def _lets_one_go(node: fx.Node) -> bool:
    """Whether a body that joins, given something that requires a gradient, returns a number that requires none."""
    given = any(t.requires_grad for n in node.all_input_nodes for t in tensors_in(fake(n)))
    return given and any(
        t.is_floating_point() and not t.requires_grad
        for body in _bodies(node)
        if _joins(body.graph)
        for result in body.graph.find_nodes(op="output")
        for n in result.all_input_nodes
        for t in tensors_in(fake(n))
    )


def _reads_what_it_wrote_to_a_module(graph: fx.Graph) -> bool:
    """Whether the partitioner of AOTAutograd may compute in the backward, from what the tensor holds by then, what the
    graph read after it had written to it: a module's tensors it takes for ones that stay."""
    held: frozenset[int] = frozenset()
    changed: frozenset[int] = frozenset()
    for node in graph.nodes:
        if compat.held_by_a_module(node):
            held |= storages(fake(node))
        given = node.all_input_nodes if changed and node.op != "output" else []
        if any(changed & storages(fake(n)) for n in given):
            return True
        for target in written(node):
            changed |= held & storages(fake(target))
    return False


def _returns_a_view_twice(graph: fx.Graph) -> bool:
    """Whether AOTAutograd may make the views that the graph returns of a tensor of its own, of which autograd does not
    follow all, in one another's shape."""
    results = [t for n in graph.output_node().all_input_nodes for t in tensors_in(fake(n))]
    views = storages([t for t in results if t.requires_grad and compat.is_view(t)])
    others = storages([t for t in results if not t.requires_grad])
    given = storages([fake(n) for n in graph.nodes if n.op in ("placeholder", "get_attr")])
    return bool(views & others - given)


def _returns_a_copy(graph: fx.Graph, effects: Effects) -> bool:
    """Whether Inductor may return, in the place of a copy, a tensor that the graph saves: a write of the caller's would
    change the gradients without a word."""
    return any(
        effects.sharing(source) is not None
        for node in graph.output_node().all_input_nodes
        for source in effects.copied(node)
    )


def _refused(graph: fx.Graph) -> bool:
    """Whether autograd refuses the graph's backward, tried on fakes: AOTAutograd differentiates the whole while it
    compiles, even if the program never asks for a gradient."""
    inputs = [fake(node) for node in graph.nodes if node.op == "placeholder"]
    state = compat.ShapeState(compat.shape_env_of(inputs))
    try:
        _forward_and_backward(graph, inputs)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return True
    finally:
        state.restore()
    return False


def _forward_and_backward(graph: fx.Graph, inputs: list[Any]) -> None:
    module = graph.owning_module
    assert module is not None
    mode = next((t.fake_mode for t in inputs if hasattr(t, "fake_mode")), None)
    leaf = [t.detach().requires_grad_(t.requires_grad) if _is_tensor(t) else t for t in inputs]
    with differentiating_fakes(), mode or contextlib.nullcontext():
        # What is written to may be an input.
        given = [t.clone() if _is_tensor(t) else t for t in leaf]
        results = [t for t in tensors_in(_run(module, given)) if t.requires_grad]
        wanted = [t for t in leaf if _is_tensor(t) and t.requires_grad]
        if results and wanted:
            grads = [torch.empty_like(t) for t in results]
            torch.autograd.grad(results, wanted, grads, allow_unused=True)


class _Trial(fx.Interpreter):
    """Runs a graph on fakes: within inference_mode, where autocast does nothing to them, as within no_grad."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "__name__", "") == "_enter_inference_mode" and args[0]:
            mode = torch.no_grad()
            mode.__enter__()
            return mode
        return super().call_function(target, args, kwargs)


def _run(module: fx.GraphModule, given: list[Any]) -> Any:
    """What a graph makes of its inputs; where it fails, the modes are left that it was in."""
    trial = _Trial(module)
    with torch.enable_grad():
        try:
            return trial.run(*given)
        finally:
            for value in reversed([*trial.env.values()]):
                if hasattr(value, "__exit__"):
                    value.__exit__(None, None, None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
