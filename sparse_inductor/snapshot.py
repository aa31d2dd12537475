"""A graph as it was before a pattern changed it: cheap to take, and restoring keeps the nodes' identity."""

from __future__ import annotations

from torch import fx

__all__ = ["Snapshot"]


class Snapshot:
    """The nodes of a graph, their order and their arguments."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._nodes = [(n, n.op, n.target, n.args, n.kwargs, n.name, n.type) for n in graph.nodes]

    def restore(self) -> bool:
        """Put the graph back; False if some nodes had been erased and are now copies of what they
        were."""
        graph, alive = self._graph, set(self._graph.nodes)
        now: dict[fx.Node, fx.Node] = {}
        place: fx.Node | None = None
        for node, op, target, args, kwargs, name, kind in self._nodes:
            args, kwargs = fx.map_arg((args, kwargs), lambda n: now.get(n, n))
            if node in alive:
                now[node] = node
                node.op, node.target, node.args, node.kwargs = op, target, args, kwargs
            else:
                now[node] = graph.create_node(op, target, args, kwargs, name, kind)
                now[node].meta = node.meta
            if place is not None and place.next is not now[node]:
                place.append(now[node])
            place = now[node]
        keep = set(now.values())
        for node in reversed(graph.nodes):
            if node not in keep:
                graph.erase_node(node)
        return all(old is new for old, new in now.items())
