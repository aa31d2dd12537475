"""Copies of graphs, and graphs as text."""

from __future__ import annotations

import copy

from torch import fx


def graph_text(graph: fx.Graph) -> str:
    """Return the graph as Python code with shapes if it belongs to a module, else as a list of nodes."""
    gm = graph.owning_module
    if gm is not None and gm.graph is graph:
        return gm.print_readable(print_output=False, include_device=True, colored=False)
    return str(graph)


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy whose graphs can be edited, nested bodies included; parameters are shared."""
    copied = fx.GraphModule(gm, copy_graph(gm.graph), gm.__class__.__name__)
    copied.meta = dict(gm.meta)
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, copy_graph_module(child))
    return copied


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of the nodes; the values in their `meta` are shared."""
    new = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        values[node] = new.node_copy(node, lambda n: values[n])
        values[node].meta = copy.copy(node.meta)
    new._codegen = copy.copy(graph._codegen)
    return new
