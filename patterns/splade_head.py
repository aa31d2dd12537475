"""SPLADE head: linear to the vocabulary, mask, activation, maximum over the sequence -> `splade_head`.

    logits = linear(hidden, weight, bias)                      [B, S, V]
    max_s program(logits, mask)                                [B, V]
        ->  splade_head(hidden, weight, bias, [mask], program)

`program` is whatever elementwise chain stands between (relu, log1p, soft-caps, masks of every kind); it has to be
non-decreasing in the logits, which is proved by intervals. Masks need no proof: the operator looks at their values.
Sources: Sparton, Eq. 1 and Algorithms 2-3; SPLADE v2 max pooling.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

import sparse_inductor.ops  # noqa: F401  (defines the operators)
from sparse_inductor.epilogue.ranges import prove
from sparse_inductor.epilogue.steps import Program, Step, render
from sparse_inductor.match.chain import Chain, climb, swallowed
from sparse_inductor.match.emit import Emitter
from sparse_inductor.match.gemm import Linear, is_parameter, linears
from sparse_inductor.match.graph import GraphView, Unknown, fake
from sparse_inductor.match.shapes import Decline
from sparse_inductor.pattern import Example, Miss

NAME = "splade_head"
OP = "sparse_inductor::splade_head"

_RISES = {
    "relu",
    "clamp",
    "clamp_min",
    "maximum",
    "softplus",
    "leaky_relu",
    "elu",
    "where",
    "threshold",
    "hardtanh",
}
_LOGS = {"log", "log1p", "log2", "log10"}
_OTHER_POOLS = {
    "sum": "sum pooling: every position counts, so the logits of all of them are needed",
    "mean": "mean pooling: every position counts, so the logits of all of them are needed",
    "logsumexp": "log-sum-exp pooling: every position counts, so the logits of all of them are needed",
    "median": "median pooling is no maximum",
    "argmax": "only the positions are used, not the values",
    "cummax": "a running maximum keeps every position",
}


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A maximum over one axis: which axis, what the results look like, and whether it is a minimum."""

    source: fx.Node
    dim: int
    keepdim: bool
    pair: bool  # results are (values, indices)
    minimum: bool = False


def _reduction(view: GraphView, node: fx.Node) -> Reduction | None:
    call = view.call(node)
    if call is None or not view.is_tensor(call.get("input")):
        return None
    source = call["input"]
    ndim = len(view.shape(source))
    dim = call.get("dim")
    if isinstance(dim, (tuple, list)):
        dim = dim[0] if len(dim) == 1 else None
    match call.name:
        case "amax" | "amin" if isinstance(dim, int):
            return Reduction(
                source, dim % ndim, bool(call.get("keepdim", False)), False, call.name == "amin"
            )
        case "max_dim" | "min_dim" if isinstance(dim, int):
            return Reduction(
                source, dim % ndim, bool(call.get("keepdim", False)), True, call.name == "min_dim"
            )
        case "topk" if call["k"] == 1:
            return Reduction(
                source, call.get("dim", -1) % ndim, True, True, not call.get("largest", True)
            )
    return None


@dataclasses.dataclass
class HeadMatch:
    """A recognised head, ready to be replaced."""

    anchor: fx.Node
    reduction: Reduction
    chain: Chain
    program: Program
    swallowed: tuple[fx.Node, ...]
    bytes_saved: int | None
    pattern: str = NAME
    op: str = OP

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(dict.fromkeys(n for n, _ in self.chain.reads))

    @property
    def wants_argmax(self) -> bool:
        return self.reduction.pair and any(u.args[1] == 1 and u.users for u in self.anchor.users)

    @property
    def note(self) -> str:
        steps = render(self.program) or "no steps"
        return steps + (", argmax kept" if self.wants_argmax else "")

    def replace(self) -> None:
        chain, anchor, red = self.chain, self.anchor, self.reduction
        e = Emitter(anchor)
        v, ndim = chain.v_dim, len(chain.origin)
        others = [d for d in range(ndim) if d not in (red.dim, v)]
        hidden = _permuted(e, chain.stand_in(e), [*others, red.dim, v])
        rows = []
        for row in chain.row_operands(e):
            row = _permuted(e, row, [*others, red.dim, v])
            rows.append(e.method("squeeze", row, -1))
        weight, bias = chain.weight_and_bias(e)
        dtype = fake(
            chain.linear.node
        ).dtype  # under autocast the linear computes in another dtype than its inputs
        hidden, weight = _cast(e, hidden, dtype), _cast(e, weight, dtype)
        bias = None if bias is None else _cast(e, bias, dtype)
        want, pair = self.wants_argmax, red.pair
        target = torch.ops.sparse_inductor.splade_head.default
        out = fake(anchor)[0].dtype if pair else fake(anchor).dtype
        op = e.call(target, hidden, weight, bias, rows, render(self.program), out, want)
        values = self._shaped(e, e.call(operator.getitem, op, 0), others)
        if red.minimum:
            values = e.call(operator.neg, values)
        if not pair:
            anchor.replace_all_uses_with(values)
            return
        positions = self._shaped(e, e.call(operator.getitem, op, 1), others) if want else None
        for user in list(anchor.users):
            user.replace_all_uses_with(
                values if user.args[1] == 0 or positions is None else positions
            )

    def _shaped(self, e: Emitter, t: fx.Node, others: list[int]) -> fx.Node:
        """[*others, V] in the axis order of the user's result."""
        order = [*others, self.chain.v_dim]
        t = _permuted(e, t, [order.index(d) for d in sorted(order)])
        return e.method("unsqueeze", t, self.reduction.dim) if self.reduction.keepdim else t


def _permuted(e: Emitter, t: fx.Node, dims: Sequence[int]) -> fx.Node:
    return t if list(dims) == sorted(dims) else e.method("permute", t, tuple(dims))


def _cast(e: Emitter, t: fx.Node, dtype: torch.dtype) -> fx.Node:
    return t if fake(t).dtype == dtype else e.method("to", t, dtype)


class SpladeHead:
    """The pattern; see the module docstring."""

    name = NAME
    op = OP
    summary = "max_s program(linear(hidden), mask) -> splade_head(hidden, weight, bias, mask)"
    anchors = frozenset({"max_dim", "amax", "min_dim", "amin", "topk", *_OTHER_POOLS})

    def match(self, node: fx.Node, view: GraphView) -> HeadMatch | Miss | None:
        try:
            return self._match(node, view)
        except Unknown:
            return None

    def _match(self, node: fx.Node, view: GraphView) -> HeadMatch | Miss | None:
        if view.batched:
            return None
        red = _reduction(view, node)
        if red is None:
            return self._other_pool(node, view)
        if not fake(red.source).dtype.is_floating_point or len(view.shape(red.source)) < 2:
            return None
        try:
            return self._head(node, view, red)
        except Decline as e:
            return Miss(e.reason, e.node or node) if _resembles(view, node, red) else None

    def _other_pool(self, node: fx.Node, view: GraphView) -> Miss | None:
        call = view.call(node)
        if call is None or call.name not in _OTHER_POOLS or not view.is_tensor(call.get("input")):
            return None
        family = _family(view, call["input"], node)
        return Miss(_OTHER_POOLS[call.name], node) if {"matmul", "rise", "log"} <= family else None

    def _head(self, node: fx.Node, view: GraphView, red: Reduction) -> HeadMatch:
        spine = climb(view, red.source, node)
        first: Decline | None = None
        for linear in spine.linears:
            try:
                return self._reading(node, view, red, Chain(view, spine, linear), linear)
            except Decline as e:
                first = first or e
        assert first is not None
        raise first

    def _reading(
        self, node: fx.Node, view: GraphView, red: Reduction, chain: Chain, linear: Linear
    ) -> HeadMatch:
        if chain.v_dim == red.dim or (
            is_parameter(view, linear.source) and not is_parameter(view, linear.weight_source)
        ):
            raise Decline("it reduces over the vocabulary, not over the sequence", node)
        if _over_batch(view, chain, red, linear):
            raise Decline("it reduces over the batch, not over the sequence", node)
        if not fake(linear.node).dtype.is_floating_point:
            raise Decline(f"the logits are {fake(linear.node).dtype}", linear.node)
        if red.pair and any(u.target is not operator.getitem for u in node.users):
            raise Decline("the pair of values and indices is used as a whole", node)
        program = chain.program + ((Step("mul", (-1.0,)),) if red.minimum else ())
        proof = prove(program)
        if proof.direction != 1:
            pool = "minimum" if red.minimum else "maximum"
            raise Decline(f"the {pool} cannot move past the activation: {proof.why()}", node)
        if not (is_parameter(view, linear.weight_source) or _resembles(view, node, red)):
            raise Decline(
                "neither operand of the matmul is a parameter and no activation follows", node
            )
        nodes = swallowed(view, [*chain.nodes, node])
        self._check_memory(view, chain, nodes, node, linear)
        return HeadMatch(node, red, chain, program, nodes, _bytes_saved(view, linear, red))

    def _check_memory(
        self,
        view: GraphView,
        chain: Chain,
        nodes: Sequence[fx.Node],
        anchor: fx.Node,
        linear: Linear,
    ) -> None:
        """The operator reads its inputs at the anchor, so nothing may have changed them since the user read them."""
        for source, reader in chain.reads:
            if not view.effects.unchanged(source, reader, anchor):
                raise Decline(
                    f"{source.name} is changed in place between the linear and the maximum", reader
                )
        inside = set(nodes)
        for n in nodes:
            for target in view.effects.writers.get(n, ()):
                if view.effects.creator(target) not in inside:
                    raise Decline(
                        f"{target.name} is written in place and lives on outside the head", n
                    )
        start, end = view.order[linear.node], view.order[anchor]
        for n in view.graph.nodes:
            if start < view.order[n] < end and "set_grad_enabled" in n.name:
                raise Decline("grad mode changes between the linear and the maximum", n)

    def resolve(
        self, matches: Sequence[HeadMatch], view: GraphView
    ) -> tuple[list[HeadMatch], list[Miss]]:
        """Heads may share a linear (slices of one sequence, two poolings); nobody else may read what they swallow."""
        accepted, misses = list(matches), []
        while True:
            inside = {n for m in accepted for n in m.swallowed}
            kept = []
            for m in accepted:
                reader = _outside_reader(view, m, inside)
                if reader is None:
                    kept.append(m)
                else:
                    misses.append(
                        Miss(
                            _reads(view, m, *reader),
                            reader[1] if reader[1].op != "output" else reader[0],
                        )
                    )
            if len(kept) == len(accepted):
                return kept, misses
            accepted = kept

    examples: Sequence[Example] = ()
    near_misses: Sequence[Example] = ()


def _outside_reader(
    view: GraphView, m: HeadMatch, inside: set[fx.Node]
) -> tuple[fx.Node, fx.Node] | None:
    for n in m.swallowed:
        if n is m.anchor:
            continue
        for reader in view.readers(n):
            if reader not in inside:
                return n, reader
    return None


def _reads(view: GraphView, m: HeadMatch, node: fx.Node, reader: fx.Node) -> str:
    what = (
        "the logits are"
        if node is m.chain.linear.node
        else f"the result of {view.name_of(node) or node.name} is"
    )
    if reader.op == "output":
        return f"{what} also returned"
    return f"{what} also read by {view.name_of(reader) or reader.name}"


def _over_batch(view: GraphView, chain: Chain, red: Reduction, linear: Linear) -> bool:
    """Axis 0 of a 3-D output is the batch, unless the input was put sequence-first on purpose."""
    if len(view.shape(linear.node)) != 3 or chain.origin[red.dim] != 0:
        return False
    call = view.call(linear.source)
    if call is not None and call.name == "transpose":
        return {call["dim0"] % 3, call["dim1"] % 3} != {0, 1}
    return not (
        call is not None and call.name == "permute" and [d % 3 for d in call["dims"]][:2] == [1, 0]
    )


def _bytes_saved(view: GraphView, linear: Linear, red: Reduction) -> int | None:
    """What a training step keeps of the logits, less the winning positions and peaks that replace them."""
    tensors = (linear.source, linear.weight_source)
    if not torch.is_grad_enabled() or not any(view.requires_grad(t) for t in tensors):
        return 0
    sizes = view.shape(linear.node)
    if not all(isinstance(s, int) for s in sizes):
        return None
    logits = math.prod(sizes) * fake(linear.node).dtype.itemsize
    entries = math.prod(fake(red.source).shape) // fake(red.source).shape[red.dim]
    return max(
        0, logits - 6 * entries
    )  # a peak (fp32) and a winning position (int16) for each entry


def _family(view: GraphView, source: fx.Node, reader: fx.Node) -> set[str]:
    """What a looser walk finds above a node: "matmul", "rise" (relu and the like), "log"."""
    found: set[str] = set()
    seen: set[fx.Node] = set()
    queue = [source]
    while queue and len(seen) < 40:
        node = queue.pop(0)
        if node in seen or not view.is_tensor(node):
            continue
        seen.add(node)
        readings = linears(view, node)
        if readings is not None:
            found.add("matmul" if readings else "batched matmul")
            continue
        call = view.call(node)
        if call is None:
            continue
        found |= ({"rise"} if call.name in _RISES else set()) | (
            {"log"} if call.name in _LOGS else set()
        )
        queue += node.all_input_nodes
    return found


def _resembles(view: GraphView, node: fx.Node, red: Reduction) -> bool:
    """Whether the looser signature of the family is there: a matmul, and an activation before or after the maximum."""
    above = _family(view, red.source, node)
    if "matmul" not in above:
        # Attention scores are batched on both sides too, but do not go through a logarithm.
        return {"batched matmul", "rise", "log"} <= above
    if {"rise", "log"} & above:
        return True
    queue, depth = list(node.users), 0
    while queue and depth < 8:
        user = queue.pop(0)
        depth += 1
        if view.name_of(user) in _RISES | _LOGS:
            return True
        queue += user.users
    return False


# Examples: what is rewritten and what is declined, as people write it. Tests and documentation are built from these.


class _Head(nn.Module):
    def __init__(self, pool: Callable[..., Any]):
        super().__init__()
        self.decoder = nn.Linear(8, 40)
        self.pool = pool

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.pool(self.decoder(hidden), mask)


def _example(
    name: str, pool: Callable[..., Any], training: bool = False, reason: str = ""
) -> Example:
    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(0)
        mask = torch.ones(2, 6, dtype=torch.int64)
        mask[0, 4:] = 0
        return _Head(pool), (torch.randn(2, 6, 8, requires_grad=training), mask)

    return Example(name, build, training, reason)


SpladeHead.examples = (
    _example("splade", lambda z, m: (torch.log1p(torch.relu(z)) * m.unsqueeze(-1)).amax(1)),
    _example(
        "splade_train",
        lambda z, m: (torch.log1p(torch.relu(z)) * m.unsqueeze(-1)).max(1).values,
        True,
    ),
    _example(
        "tevatron",
        lambda z, m: torch.log1p(torch.relu((z + (1 - m.unsqueeze(-1)) * -1e4).max(1)[0])),
    ),
    _example(
        "masked_fill",
        lambda z, m: z.relu().log1p().masked_fill(m[..., None] == 0, float("-inf")).amax(1),
    ),
    _example(
        "soft_cap", lambda z, m: ((torch.tanh(z / 30) * 30).relu().log1p() * m[..., None]).amax(1)
    ),
    _example(
        "term_positions", lambda z, m: torch.max(torch.log1p(torch.relu(z)) * m[..., None], dim=1)
    ),
)
SpladeHead.near_misses = (
    _example(
        "logits_returned",
        lambda z, m: ((z.relu().log1p() * m[..., None]).amax(1), z),
        reason="also returned",
    ),
    _example(
        "sum_pooling", lambda z, m: (z.relu().log1p() * m[..., None]).sum(1), reason="sum pooling"
    ),
    _example(
        "not_monotone",
        lambda z, m: (torch.sin(z).relu().log1p() * m[..., None]).amax(1),
        reason="sin is not monotone",
    ),
    _example(
        "over_the_batch",
        lambda z, m: (z.relu().log1p() * m[..., None]).amax(0),
        reason="over the batch",
    ),
)

PATTERN = SpladeHead()
