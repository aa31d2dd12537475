"""Joined graphs: graphs that continue past a call at which Dynamo would break them.

Dynamo breaks the graph at a call of the entmax package in training, or of a copy of its autograd Functions; with
`match.entmax.leaves` it continues. AOTAutograd or Inductor may reject such a joined graph, or compute different
results, although the program runs when it is compiled in parts. In these cases, and if nothing in the joined graph is
rewritten, Dynamo breaks the graph as usual.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from typing import Any

import torch
from torch import fx

from . import compat
from .facts import facts_of
from .graph.effects import Effects, bodies, gives_memory, written
from .graph.fakes import fake, has_gradient, tensors_in
from .graph.memory import storages
from .graph.names import is_operator
from .match.entmax import leaves
from .notices import described
from .pattern import Miss
from .rehearsal import differentiating_fakes, run_backward

log = logging.getLogger("sparse_inductor")


def why_in_parts(graph: fx.Graph) -> Miss | None:
    """Return why, and because of which node, a joined graph has to be compiled in parts; None for graphs that are not
    joined or need not be divided."""
    node = _joined_at(graph)
    where = None if node is None else _hazard(graph)
    return None if where is None else Miss(f"an entmax call stands in a {where}", node)


def _hazard(graph: fx.Graph) -> str | None:
    """Describe what surrounds the entmax call if AOTAutograd or Inductor rejects or miscomputes it; else None."""
    effects = Effects(graph)
    for node in graph.nodes:
        if gives_memory(node):
            return "graph that gives a tensor other memory"
        if not compat.is_higher_order(node.target) or _is_function(node):
            continue
        if written(node):
            # AOTAutograd's partitioner recomputes a checkpoint's body in the backward, writes included.
            return f"graph in which the body of {node.target} writes"
        joins, end = _joins_at(node), graph.output_node()
        if joins and any(effects.changes(result, node, end) for result in node.users):
            # AOTAutograd inlines a checkpoint's body into its caller's graph, and saves its result.
            return f"body of {node.target} whose result is written to"
        if compat.marks_every_result(node.target) and _lets_one_go(node):
            return "region of which one result requires no gradient"
    if _reads_what_it_wrote_to_a_module(graph):
        return "graph that writes to a module's tensor and reads it then"
    if _returns_a_view_twice(graph):
        return "graph that returns a view and what is detached of it"
    if _returns_a_copy(graph, effects):
        return "graph that returns a copy of what it computes"
    if _has_separate_results(graph):
        return "graph with results that can be differentiated apart"
    try:
        if effects.writers and _refused(graph):
            return "graph that writes to what autograd saved"
    except Exception as error:
        log.debug("a graph could not be tried out: %s", described(error))
    return None


def joined_in_vain(graph: fx.Graph) -> bool:
    """Whether a frame's joined graph contains no operator of this package after the rewriting."""
    module = graph.owning_module
    whole = compat.graph_end(module) is not None and not compat.in_ddp_bucket(module)
    return whole and _joined_at(graph) is not None and not _has_operators(graph)


def _joined_at(graph: fx.Graph) -> fx.Node | None:
    return _joining(graph) if compat.has_joined() and torch.is_grad_enabled() else None


def _has_operators(graph: fx.Graph) -> bool:
    return any(
        is_operator(node) or any(_has_operators(body.graph) for body in bodies(node))
        for node in graph.nodes
    )


def _joins(graph: fx.Graph) -> bool:
    return any(map(_joins_at, graph.nodes))


def _joins_at(node: fx.Node) -> bool:
    """Whether Dynamo would break a graph at a node, or within a body that it calls."""
    return _is_call(node) or any(_joins(body.graph) for body in bodies(node))


def _joining(graph: fx.Graph) -> fx.Node | None:
    """Return the first node of a graph, or of a body in it, at which Dynamo would break it. Bodies are rewritten first,
    so this node may already be an operator."""
    for node in graph.nodes:
        if _is_call(node):
            return node
        inner = (_joining(body.graph) for body in bodies(node))
        if (found := next((n for n in inner if n is not None), None)) is not None:
            return found
    return None


def _is_call(node: fx.Node) -> bool:
    leaf = getattr(node.target, "__module__", None) == leaves.__name__
    own = is_operator(node) and facts_of(node.target.name()).joins
    return leaf or own or _is_function(node)


def _is_function(node: fx.Node) -> bool:
    return compat.is_higher_order(node.target) and str(node.target) == "autograd_function_apply"


def _lets_one_go(node: fx.Node) -> bool:
    """Whether a body with a joining call has an input that requires a gradient and a floating-point result that does
    not."""
    return any(map(has_gradient, node.all_input_nodes)) and any(
        t.is_floating_point() and not t.requires_grad
        for body in bodies(node)
        if _joins(body.graph)
        for result in body.graph.find_nodes(op="output")
        for n in result.all_input_nodes
        for t in tensors_in(fake(n))
    )


def _reads_what_it_wrote_to_a_module(graph: fx.Graph) -> bool:
    """Whether the graph reads a module's tensor after writing to it. AOTAutograd's partitioner assumes that a module's
    tensors do not change, and may recompute the value in the backward from the tensor's later contents."""
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
    """Whether the graph returns, of one tensor that it computes, both a view that requires a gradient and an alias that
    does not. AOTAutograd may return one of them in the shape of the other."""
    results = [t for n in graph.output_node().all_input_nodes for t in tensors_in(fake(n))]
    views = storages([t for t in results if t.requires_grad and compat.is_view(t)])
    others = storages([t for t in results if not t.requires_grad])
    given = storages([fake(n) for n in graph.nodes if n.op in ("placeholder", "get_attr")])
    return bool(views & others - given)


def _returns_a_copy(graph: fx.Graph, effects: Effects) -> bool:
    """Whether the graph returns a copy of a tensor that it may save. Inductor may return the saved tensor in place of
    the copy; if the caller then writes to it, the gradients change silently."""
    return any(
        effects.sharing(source) is not None
        for node in graph.output_node().all_input_nodes
        for source in effects.copied(node)
    )


def _has_separate_results(graph: fx.Graph) -> bool:
    """Whether two results have no part between the calls in common. Broken there, each can be differentiated by itself;
    in one graph, a backward from one frees what the other needs, and gives zeros, not None, to its inputs."""
    part = 1
    parts: dict[fx.Node, int] = {}  # a bit for each part that a node is computed in, with gradients
    for node in graph.nodes:
        joins = _joins_at(node)
        part <<= joins
        if node.op != "output" and has_gradient(node):
            parts[node] = 0 if node.op in ("placeholder", "get_attr") else part
            for n in node.all_input_nodes:
                parts[node] |= parts.get(n, 0)
        part <<= joins
    found = {parts.get(result, 0) for result in graph.output_node().all_input_nodes} - {0}
    return any(not a & b for a, b in itertools.combinations(found, 2))


def _refused(graph: fx.Graph) -> bool:
    """Whether autograd rejects the graph's backward, tried on fake tensors. AOTAutograd differentiates the joined graph
    while it compiles, even if the program never computes a gradient."""
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
        # The graph may write to its inputs.
        given = [t.clone() if _is_tensor(t) else t for t in leaf]
        result = _run(module, given)
        run_backward(result, [t for t in leaf if _is_tensor(t) and t.requires_grad])


class _Trial(fx.Interpreter):
    """Runs a graph on fake tensors, with no_grad in place of inference_mode, in which autocast ignores fake tensors."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "__name__", "") == "_enter_inference_mode" and args[0]:
            mode = torch.no_grad()
            mode.__enter__()
            return mode
        return super().call_function(target, args, kwargs)


def _run(module: fx.GraphModule, given: list[Any]) -> Any:
    """Run a graph on its inputs; if it fails, exit the modes that it has entered."""
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
