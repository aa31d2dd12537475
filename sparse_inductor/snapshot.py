"""The state of a graph before a pattern changes it: cheap to record, and restoring it keeps the nodes' identity."""

from __future__ import annotations

from torch import fx


class Snapshot:
    """The nodes of a graph with their order, arguments, users and metadata."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._nodes = [
            (n, n.op, n.target, n.args, n.kwargs, n.name, n.type, dict(n.meta), list(n.users))
            for n in graph.nodes
        ]

    def new_nodes(self) -> list[fx.Node]:
        """The nodes that have been inserted since, in graph order."""
        old = {entry[0] for entry in self._nodes}
        return [n for n in self._graph.nodes if n not in old]

    def restore(self) -> bool:
        """Restore the graph; returns False if some nodes had been erased and were replaced by copies."""
        graph, alive = self._graph, set(self._graph.nodes)
        now: dict[fx.Node, fx.Node] = {}
        copied: dict[fx.Node, fx.Node] = {}
        place: fx.Node | None = None
        for node, op, target, args, kwargs, name, kind, meta, _ in self._nodes:
            if copied:
                args, kwargs = fx.map_arg((args, kwargs), lambda n: copied.get(n, n))
            now[node] = node
            if node not in alive:
                now[node] = copied[node] = graph.create_node(op, target, args, kwargs, name, kind)
            elif node.args is not args or node.kwargs is not kwargs:
                node.args, node.kwargs = args, kwargs
            now[node].op, now[node].target, now[node].name, now[node].type = op, target, name, kind
            now[node].meta.clear()
            now[node].meta.update(meta)
            if place is not None and place.next is not now[node]:
                place.append(now[node])
            place = now[node]
        keep = set(now.values())
        for node in reversed(graph.nodes):
            if node not in keep:
                graph.erase_node(node)
        for node, *_, users in self._nodes:
            now[node].users = {now[user]: None for user in users}
        return not copied
