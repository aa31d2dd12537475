"""explain(): the rewrites in one call of a function, and the reasons why there are not more."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from .. import compat, session
from ..choices import Policy
from ..graph_run import Applied
from ..notices import bytes_text
from ..pattern import Sparse
from ..policy.counting import counts
from ..policy.profile import Site
from ..private_copy import private_copy
from ..reporting.findings import Density, NearMiss, Pending
from ..reporting.graphs import GraphNode, describe
from ..reporting.records import AS_WRITTEN, NEARLY, Report, found_of
from ..reporting.source import source_at
from ..rewrite import RewritePass
from ..slots import slot_value


@dataclasses.dataclass(frozen=True)
class ExplainedGraph:
    """A graph (or nested body) that torch.compile captured, before and after the rewriting."""

    before: str
    """As Python code with shapes."""
    after: str
    nodes_before: tuple[GraphNode, ...] = ()
    nodes_after: tuple[GraphNode, ...] = ()
    applied: tuple[Applied, ...] = ()
    """Its rewrites, with the names of their nodes in `nodes_before` and `nodes_after`."""

    @property
    def diff(self) -> str:
        """Unified diff from `before` to `after`; empty when nothing changed."""
        return _diff(self.before.splitlines(), self.after.splitlines())

    @property
    def short_diff(self) -> str:
        """Unified diff with one line per node."""
        return _diff([*map(str, self.nodes_before)], [*map(str, self.nodes_after)])


def _diff(before: list[str], after: list[str]) -> str:
    return "\n".join(difflib.unified_diff(before, after, "before", "after", lineterm="", n=3))


BREAKS = "graph breaks: no rewrite reaches across them"


@dataclasses.dataclass(frozen=True)
class GraphBreak:
    """A place where torch.compile ended a graph; no rewrite can reach across it."""

    location: str
    reason: str
    source: str = ""

    @property
    def why(self) -> str:
        """The first line of the reason."""
        return (self.reason.splitlines() or [""])[0]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of `explain`. `str()` is meant for a terminal."""

    report: Report
    """Rewrites and near misses of this call alone."""
    graphs: tuple[ExplainedGraph, ...]
    graph_breaks: tuple[GraphBreak, ...]
    capture_ms: float = 0.0
    """Milliseconds of the whole call: capture, the pass, and the run of the captured graphs."""

    @property
    def diff(self) -> str:
        """The diffs of all graphs that changed."""
        changed = [(at, graph.diff) for at, graph in enumerate(self.graphs) if graph.diff]
        return "\n".join(f"graph {at}\n{diff}" for at, diff in changed)

    def show(self) -> None:
        """Print the explanation: as tables if rich is installed and standard output is a terminal, else as `str()`."""
        from ..reporting.console import print_diff, print_table, print_text, rich_console

        if rich_console() is None or not self.graphs:
            print(self)
            return
        report = self.report
        print_text(str(report).splitlines()[0], "bold")
        rows, styles = [], []
        for rewrite in dict.fromkeys(report.rewrites):
            checks, densities = found_of(report, rewrite)
            check = checks[-1] if checks else None
            rows.append(
                (
                    f"{rewrite.location}\n{rewrite.source}",
                    f"{', '.join(rewrite.replaced)}\n-> {rewrite.op}",
                    bytes_text(rewrite.bytes_saved) if rewrite.bytes_saved else "",
                    "\n".join(map(str, dict.fromkeys(densities))),
                    check.detail if check else "not run: explain(..., verify=True)",
                )
            )
            styles.append("fail" if check and check.verdict == "differs" else "")

        def left(found: Sequence[Pending | NearMiss]) -> list[tuple[str, ...]]:
            places = dict.fromkeys(found)
            return [(f.pattern, f"{f.location}\n{f.source}", f.reason) for f in places]

        breaks = [(f"{b.location}\n{b.source}", b.why) for b in self.graph_breaks]
        rewritten = ("where", "replaced", "saved for backward", "active", "checked")
        as_it_is = ("pattern", "where", "because")
        for title, headers, lines in (
            ("rewritten", rewritten, rows),
            (AS_WRITTEN, as_it_is, left(report.pending)),
            (NEARLY, as_it_is, left(report.near_misses)),
            (BREAKS, as_it_is[1:], breaks),
        ):
            if lines:
                print_table(headers, lines, title, styles if lines is rows else ())
        for graph in self.graphs:
            if graph.short_diff:
                print_diff(graph.short_diff)

    def to_html(self, title: str = "explain") -> str:
        """Return a self-contained HTML page: rewrites in your source, drawings, near misses, the graphs."""
        from .page import render

        return render(self, title)

    def __str__(self) -> str:
        parts = [str(self.report)] if self.graphs or self.report else []
        if not self.graphs:
            parts.insert(0, "sparse_inductor: torch.compile captured no graph of this function")
        if self.graph_breaks:
            lines = [BREAKS]
            for one in self.graph_breaks:
                lines.append(f"  {one.location}")
                lines += [f"      {text}" for text in (one.source, one.why) if text]
            parts.append("\n".join(lines))
        if self.diff:
            parts.append(self.diff)
        return "\n\n".join(parts)


def explain(fn: Callable[..., Any], *args: Any, verify: bool = False, **kwargs: Any) -> Explanation:
    """Capture `fn(*args, **kwargs)` as torch.compile would, rewrite it, and return an explanation of the rewrites.

    The patterns are those of the enabled session, or all. For tensors that a pattern names as mostly zeros, the
    report's `densities` give the number of nonzero elements in this call. No code is generated, cached or kept. The
    graphs run unrewritten, on copies of the arguments and of the modules that the function uses (if a module cannot be
    copied, its buffers are restored), under your grad mode, and the random state is restored. Code that torch.compile
    already holds stays compiled.

    `verify=True` runs the rewritten graphs, each rewrite beside the operations that it replaces and an fp64 reference
    (see `enable`); the report's `checks` give the comparisons. If the function itself takes an argument of that name,
    wrap it first (`functools.partial`).

    The policy is that of the enabled session, or the default. A block that the policy rewrites depending on the data is
    shown as written, with its active share in this call and the share below which it is rewritten (`report.pending`);
    under `sparse_inductor.enabled(policy="always")` it is shown rewritten.

    Raises the errors of `fn`.
    """
    return explained(fn, args, kwargs, verify)


def explained(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    verify: bool = False,
    policy: Policy | None = None,
) -> Explanation:
    """Do the work of `explain`; `policy` overrides the policy of the session."""
    fn = compat.uncompiled(fn)
    patterns = session.current_patterns()
    choices = session.current_policy(policy)
    capture = Capture(patterns, choices)
    checked = Report()
    checking = RewritePass(patterns, checked, verify=True, trace=True, policy=choices)

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        with capture.of(gm):
            compat.pre_grad_passes(compat.copy_graph_module(gm), example_inputs)
        measured = _Counting(gm, capture)
        if not verify:
            return measured.run
        with compat.patched_settings(
            pre_grad_custom_pass=slot_value([*session.users_passes(), checking])
        ):
            rewritten = compat.pre_grad_passes(compat.copy_graph_module(gm), example_inputs)

        def run(*given: Any) -> Any:
            measured.aside(given)
            return rewritten.forward(*given)

        return run

    fresh = not compat.anything_compiled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(session.prepared(patterns))
        stack.enter_context(compat.fresh_capture())
        stack.enter_context(random_state_kept(args, kwargs))
        fn, args, kwargs = _isolated(fn, args, kwargs, stack)
        met, started = compat.untraceable(), time.perf_counter()
        torch.compile(fn, backend=backend)(*args, **kwargs)
        capture_ms = (time.perf_counter() - started) * 1e3
    capture.left_alone(compat.untraceable() - met)
    for check in checked.checks:
        capture.report.add_check(check)
    if fresh:
        compat.reset_dynamo()  # drops only the code of this call
    return capture.explanation(capture_ms)


class Capture:
    """Collects the graphs that one call of torch.compile captures, and the results of the patterns."""

    def __init__(self, patterns: list[Any], policy: Mapping[str, str] | None = None) -> None:
        self.report = Report()
        self.graphs: list[ExplainedGraph] = []
        self.watched: tuple[tuple[Site, Sparse], ...] = ()
        """The blocks of the last graph that run as written until they are counted."""
        self._breaks: list[GraphBreak] = []
        self._pass = RewritePass(patterns, self.report, trace=True, policy=policy)

    @contextlib.contextmanager
    def of(self, gm: fx.GraphModule) -> Iterator[None]:
        """Within the block, run the patterns with Inductor's passes on Dynamo's graph `gm`, and record the results."""
        end = compat.graph_end(gm)
        if end is not None and end.broke:
            where = source_at(*end.stack[-1]) if end.stack else None
            location, text = (where.location, where.text) if where else ("?", "")
            self._breaks.append(GraphBreak(location, end.reason, text))
        slot = slot_value([*session.users_passes(), self])
        with compat.patched_settings(pre_grad_custom_pass=slot):
            yield

    def left_alone(self, reasons: Mapping[str, int]) -> None:
        """Record the first reason why Dynamo left a frame to Python; later reasons are its consequences. The location
        is unknown, because no graph has it."""
        if not self._breaks:
            self._breaks += [GraphBreak("?", reason) for reason in [*reasons][:1]]

    def explanation(self, capture_ms: float = 0.0) -> Explanation:
        return Explanation(self.report, tuple(self.graphs), tuple(self._breaks), capture_ms)

    def __call__(self, graph: fx.Graph) -> None:
        """Run the pass, and record the graph before and after the rewriting."""
        before, nodes = compat.graph_text(graph), describe(graph)
        outcome = self._pass.run(graph)
        self.watched = outcome.watched
        after = compat.graph_text(graph)
        self.graphs.append(ExplainedGraph(before, after, nodes, describe(graph), outcome.applied))

    def __deepcopy__(self, memo: dict[int, Any]) -> Capture:
        return self


class _Counting:
    """A captured graph that runs as written and counts the active elements of the tensors that rewrites depend on."""

    def __init__(self, gm: fx.GraphModule, capture: Capture) -> None:
        self._gm, self._report = gm, capture.report
        self._wanted: dict[str, list[tuple[Any, Any]]] = {}
        for applied in capture.graphs[-1].applied if capture.graphs else ():
            for sparse in applied.sparse:
                self._wanted.setdefault(sparse.node.name, []).append((applied.rewrite, sparse))
        for site, sparse in capture.watched:
            self._wanted.setdefault(sparse.node.name, []).append((site, sparse))
        sites = [site for site, _ in capture.watched]

        def watched() -> list[Pending]:
            now = "counted in this call"
            then = f"{now}; rewritten once some calls like it have run"
            return [s.finding(then if s.rewritten else now) for s in sites]

        self._report.add_pending((), watched)

    def run(self, *given: Any) -> Any:
        if not self._wanted:
            return self._gm.forward(*given)
        return _Interpreter(self._gm, self._count).run(*given, enable_io_processing=False)

    def aside(self, given: tuple[Any, ...]) -> None:
        """Count without side effects: neither the inputs nor the random state change."""
        if self._wanted:
            copies = pytree.tree_map_only(torch.Tensor, compat.lazy_clone, given)
            with torch.no_grad(), random_state_kept(given):
                self.run(*copies)

    def _count(self, node: fx.Node, value: Any) -> None:
        for found, sparse in self._wanted.get(node.name, ()):
            t = value if sparse.result is None else value[sparse.result]
            if isinstance(found, Site):
                found.decide(*counts(t, sparse.dim, sparse.positive, found.apart is not None))
                continue
            active, total = counts(t, sparse.dim, sparse.positive, apart=False)
            row = t.shape[sparse.dim] if t.dim() else 1
            self._report.add_density(
                Density(found.pattern, found.location, sparse.what, int(active), total, row)
            )


class _Interpreter(fx.Interpreter):
    """Passes every node's value to `see`."""

    def __init__(self, gm: fx.GraphModule, see: Callable[[fx.Node, Any], None]) -> None:
        super().__init__(gm)
        self._see = see

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        with torch.no_grad():
            self._see(n, value)
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hooks = compat.is_higher_order(target) and target.name() == "register_hook"
        if hooks and not args[0].requires_grad:
            return args[0]  # counting aside records no gradients, and a hook would be refused
        return super().call_function(target, args, kwargs)


def _isolated(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stack: contextlib.ExitStack
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return `fn` and its arguments in a form that can run without changing any state of the caller."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, _clone, (args, kwargs))

    def duplicate(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        _copy_lazily(module, memo)
        try:
            return copy.deepcopy(module, memo)
        except Exception:  # non-leaf tensors, handles, locks: whatever a module may hold
            stack.enter_context(_buffers_kept(module))
            return module

    return private_copy(fn, duplicate)[0], args, kwargs


def _copy_lazily(module: nn.Module, memo: dict[int, Any]) -> None:
    """Add copies of the module's tensors to a memo of `deepcopy`. They share memory with the originals until they are
    written to, so that a large model is not duplicated."""
    for tensor in [*module.parameters(), *module.buffers()]:
        plain = type(tensor) in (nn.Parameter, torch.Tensor) and tensor.is_leaf
        if not plain or id(tensor) in memo:
            continue
        new = compat.lazy_clone(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        new.__dict__.update(tensor.__dict__)
        memo[id(tensor)] = new


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore the contents of the module's buffers after the block."""
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


@contextlib.contextmanager
def random_state_kept(*trees: Any) -> Iterator[None]:
    """Restore the random state of the CPU and of the devices of all tensors in `trees` after the block."""
    tensors = [leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, torch.Tensor)]
    devices = {t.device.index for t in tensors if t.device.type == "cuda"}
    with torch.random.fork_rng(sorted(devices)):
        yield
