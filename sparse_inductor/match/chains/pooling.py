"""Poolings over the sequence: maxima in all their spellings, and other reductions, which a SPLADE head does not use.

The reason for not replacing one of the others refers to a single line of user code. It names the reduction in that line
and why it differs from a maximum.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any, NamedTuple

from torch import fx

from ...epilogue.functions import FUNCTIONS
from ...graph.fakes import fake, same_size, same_sizes
from ...graph.gemm import linears
from ...graph.indices import listed, taken
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.parts import Part, entries_of, entry_of_axis
from ...graph.search import reached
from ...graph.view import GraphView
from ...graph.vocabulary import SAME_VALUES, VIEWS
from .backward_walk import walk_back
from .chain import Chain
from .family import FLOOR, RANGE, above, below

_PICKS = frozenset("gather take_along_dim getitem".split())  # at the position of the maximum
_WINDOWS = frozenset(f"{name}max_pool{n}d" for name in ("", "adaptive_") for n in (1, 2, 3))
_MAXIMA = _PICKS | _WINDOWS | frozenset("max_dim amax maximum min_dim amin aminmax topk".split())


class Reduction(NamedTuple):
    """A maximum (or minimum) over one or several axes. Several axes are merged into one, which is then axis `dim`.

    values, positions: their indices among the node's results; None if the node itself is the values, or if it returns
    no positions.
    """

    source: fx.Node
    dims: tuple[int, ...]
    keepdim: bool = False
    values: int | None = None
    positions: int | None = None
    minimum: bool = False
    even: bool = False  # tied maxima share the gradient evenly; else the first one receives it
    within: tuple[fx.Node, ...] = ()  # further nodes that compute it
    one_by_one: bool = False  # computed by maximum() of two values at a time
    least: float = -math.inf  # a lower bound of the result

    @property
    def dim(self) -> int:
        return self.dims[-1] - len(self.dims) + 1


def maximum(view: GraphView, node: fx.Node) -> Reduction | None:
    """The maximum (or minimum) that a node computes; None for other nodes, and for maxima over windows."""
    call = view.call(node)
    if not view.is_tensor(call.get("input")):
        return None
    if call.name == "maximum":
        return _one_by_one(view, node)
    source, over = call["input"], listed(call.get("dim"))
    ndim, keepdim = len(view.shape(source)), bool(call.get("keepdim", False))
    known = all(isinstance(d, int) for d in over)
    dims = tuple(sorted(d % ndim for d in over)) if known else ()
    match call.name:
        case "amax" | "amin" if dims:
            return Reduction(source, dims, keepdim, minimum=call.name == "amin", even=True)
        case "max_dim" | "min_dim" if dims:
            return Reduction(source, dims, keepdim, 0, 1, call.name == "min_dim")
        case "aminmax" if dims and not any(u.args[1] == 0 and u.users for u in node.users):
            return Reduction(source, dims, keepdim, 1, even=True)
        case "gather" | "take_along_dim" if dims:
            within = _where_largest(view, node, source, call["index"], dims[0])
            return None if within is None else Reduction(source, dims, True, within=within)
        case "getitem":
            return _end_of_sort(view, node, call)
        case "topk" if call["k"] == 1:
            return Reduction(source, dims or (ndim - 1,), True, 0, 1, not call.get("largest", True))
        case name if name in _WINDOWS and not call.get("return_indices"):
            dims = _windowed(view, node, call)
            return Reduction(source, dims, True) if dims else None
    return None


def _windowed(view: GraphView, node: fx.Node, call: Call) -> tuple[int, ...]:
    """The axes that a pooling covers with a single window, if it leaves the other axes unchanged."""
    n, shape = int(call.name[-2]), view.shape(call["input"])
    sizes = [*zip(shape[-n:], view.shape(node)[-n:])]
    given = listed(call.get("kernel_size", shape[-n:]))
    kernels = [fake(k) if isinstance(k, fx.Node) else k for k in given]
    kernels = kernels if len(kernels) == n else kernels * n
    one = [same_size(o, 1) and same_size(k, s) for k, (s, o) in zip(kernels, sizes)]
    kept = all(whole or same_size(s, o) for whole, (s, o) in zip(one, sizes))
    spread = any(listed(call.get("padding", 0))) or {*listed(call.get("dilation", 1))} != {1}
    return tuple(len(shape) - n + d for d in range(n) if one[d] and kept and not spread)


def _compared(view: GraphView, node: fx.Node) -> tuple[list[fx.Node], list[tuple[Any, fx.Node]]]:
    """The maximum() nodes that compare two values at a time, and the values that they compare, in order, each with its
    reader. Empty if the result is an operand of a further maximum()."""
    if node.users and all(view.name_of(u) == "maximum" for u in node.users):
        return [], []
    nodes: list[fx.Node] = []
    leaves: list[tuple[Any, fx.Node]] = []
    left: list[tuple[Any, fx.Node]] = [(node, node)]
    while left:
        x, reader = left.pop()
        call = view.call(x)
        if call.name != "maximum" or call.inplace or view.value(x, reader) is not x:
            leaves.append((x, reader))
            continue
        nodes.append(x)
        left += [(call["other"], x), (call["input"], x)]
    return nodes, leaves


def _entries(view: GraphView, leaves: list[tuple[Any, fx.Node]]) -> Part | None:
    """The compared values, without the numbers among them, as entries of an axis; see `entries_of`."""
    return entries_of(view, [leaf for leaf in leaves if view.const(*leaf) is None])


def _one_by_one(view: GraphView, node: fx.Node) -> Reduction | None:
    """The maximum over an axis that is computed by maximum() of two entries at a time, and possibly of a number."""
    nodes, leaves = _compared(view, node)
    numbers = [c for x, reader in leaves if (c := view.const(x, reader)) is not None]
    entries = _entries(view, leaves)
    if entries is None:
        return None
    x, dim, which, passed = entries
    shape = list(view.shape(x))
    if len(which) < 2 or not same_size(shape.pop(dim), len(which)):
        return None
    if sorted(which) != [*range(len(which))] or not same_sizes(view.shape(node), shape):
        return None
    within, least = (*passed, *reversed(nodes[1:])), max(numbers, default=-math.inf)
    return Reduction(x, (dim,), within=within, one_by_one=True, least=least)


def _where_largest(
    view: GraphView, node: fx.Node, source: fx.Node, index: Any, dim: int
) -> tuple[fx.Node, ...] | None:
    """The nodes that compute `index`, if it is the argmax of `source` along `dim`; else None."""
    ndim, nodes, keepdim = len(view.shape(source)), [], True
    part = taken(view, view.call(index))
    if part is not None and part.items == [None if d == dim else slice(None) for d in range(ndim)]:
        nodes.append(index)
        keepdim, index = False, part.x
    call = view.call(index)
    if call.name != "argmax" or not isinstance(call.get("dim"), int):
        return None
    if call["dim"] % ndim != dim or bool(call.get("keepdim", False)) != keepdim:
        return None
    same = view.value(call["input"], index) is view.value(source, node)
    return (*nodes, index) if same else None


def _end_of_sort(view: GraphView, node: fx.Node, call: Call) -> Reduction | None:
    """The last entry of sort(x, dim).values along dim, or the first entry of a descending sort."""
    entry = entry_of_axis(view, call)
    if entry is None:
        return None
    values, dim, which, _ = entry
    part = view.call(values)
    sort = view.call(part.get("input"))
    if (part.name, sort.name) != ("getitem", "sort") or part["index"] != 0:
        return None
    source = sort["input"]
    seen = (view.value(values, node), view.value(source, node))
    if seen != (values, view.value(source, part["input"])) or view.read_by_strides(node):
        return None
    end = 0 if sort.get("descending", False) is True else -1
    along = dim == sort.get("dim", -1) % len(view.shape(values))
    return (
        Reduction(source, (dim,), within=(part["input"], values))
        if along and which == end
        else None
    )


_RISES = frozenset(
    (
        *"clamp clamp_min maximum gelu silu mish where".split(),
        FLOOR,
        RANGE,
        *(name for name, function in FUNCTIONS.items() if function.kind),
    )
)
_LOGS = frozenset("log log1p log2 log10".split())
_NORMS = frozenset("layer_norm rms_norm rsqrt".split())
_ALIKE = VIEWS | SAME_VALUES
_ALL = "every position counts, so the logits of all of them are needed"
_SUMS = {
    "sum": f"sum pooling: {_ALL}",
    "mean": f"mean pooling: {_ALL}",
    "logsumexp": f"log-sum-exp pooling: {_ALL}",
}
_ENDS = "sequences that lie end to end, their bounds in a tensor: cut them apart by numbers, or pad them"
_EACH = "every token has a product of its own: project all tokens at once, then take the largest"
_SOME = (
    "some of the tokens are compared with maximum(): take them by a slice, and the largest by amax"
)
_ORDERS = {
    "median": "median pooling is no maximum",
    "argmax": "only the positions are used, not the values",
    "argmin": "only the positions are used, not the values",
    "cummax": "a running maximum keeps every position",
    "kthvalue": "the k-th smallest value is no maximum",
    "sort": "a sort keeps every position",
    "norm": "a norm over the sequence: where it is the largest value, write amax",
    "vector_norm": "a norm over the sequence: where it is the largest value, write amax",
    "topk": "the {k} largest values of every term are used, not the largest alone",
    "max_pool1d": "a maximum over windows, not over the whole sequence",
}
# Operations that reduce packed (concatenated) sequences, and the name of the argument that holds the tokens.
_PACKED = {"scatter_reduce": "src", "index_reduce": "src", "segment_reduce": "data"}
_POOLS = frozenset({*_SUMS, *_ORDERS, *_PACKED})
_PRODUCTS = frozenset("einsum matmul bmm".split())
ANCHORS = _MAXIMA | _POOLS | _PRODUCTS
# Every graph with a head, or with something similar to a head, contains one of these.
SIGNS = (_MAXIMA - _PICKS) | _LOGS | {"argmax", "sort"}
# The results of these are already pooled: they have one value per sequence, or per pair of sequences.
_POOLED = frozenset("amax amin max_dim min_dim aminmax cdist".split()) | _POOLS | _WINDOWS


def other_pool(view: GraphView, node: fx.Node) -> str | None:
    """Why this sum, mean, top-k or the like is no SPLADE head; None if it does not resemble one."""
    call = view.call(node)
    if not _is_activated(view.names) and call.name != "argmax":
        return None
    if call.name in _PRODUCTS:
        return _weighted_sum(view, node)
    if call.name == "maximum":
        return _separate(view, _compared(view, node)[1])
    if call.name == "getitem":
        return _picked_token(view, node, call)
    tokens = call.get(_PACKED.get(call.name, "input"))
    if call.name not in _POOLS or not view.is_tensor(tokens):
        return None
    found = above(view, tokens, _POOLED)
    if "linear" not in found:
        return None
    activated = _is_activated(found)
    if call.name in _PACKED:
        largest = call.get("reduce") in ("amax", "max")
        return _ENDS if activated and largest else None
    if call.name in _SUMS:
        if call.name == "logsumexp":  # the activation often follows it
            activated |= below(view, node, _RISES) and below(view, node, _LOGS)
        return _SUMS[call.name] if activated and not _over_terms(view, node, call) else None
    ndim = len(view.shape(call["input"]))
    dim = ndim - 1 if call.name == "max_pool1d" else call.get("dim")
    if not isinstance(dim, int) or ndim < 3:
        return None
    readers = (r for n in (node, *node.users) for r in n.users)
    if any(view.name_of(r) in _PICKS and maximum(view, r) is not None for r in readers):
        return None  # the values are taken, too
    vocabulary = _vocabulary_axis(view, call["input"], node)
    # A maximum over the terms of each token is common and does not resemble a head.
    known = vocabulary is not None and vocabulary != dim % ndim
    if (known and (activated or call.name == "argmax")) or (vocabulary is None and activated):
        return _ORDERS[call.name].format(k=call.get("k"))
    return None


def _separate(view: GraphView, leaves: list[tuple[Any, fx.Node]]) -> str | None:
    """Why tensors that are compared two at a time are not the tokens of one product; None if they are not tokens."""
    names = [above(view, x, _POOLED) for x, _ in leaves if view.is_tensor(x)]
    if sum("linear" in found and _is_activated(found) for found in names) < 2:
        return None
    return _EACH if _entries(view, leaves) is None else _SOME


def _over_terms(view: GraphView, node: fx.Node, call: Call) -> bool:
    """Whether a sum reduces the terms of each vector (a norm, say) or of all vectors, or adds vectors of texts."""
    ndim = len(view.shape(call["input"]))
    over = [d for d in listed(call.get("dim")) if isinstance(d, int)]
    if ndim < 3 or not over:
        return True
    vocabulary = _vocabulary_axis(view, call["input"], node)
    return (ndim - 1 if vocabulary is None else vocabulary) in [d % ndim for d in over]


def _picked_token(view: GraphView, node: fx.Node, call: Call) -> str | None:
    """Why `logits[torch.arange(B), last]` is no SPLADE head; None for other nodes."""
    index = call["index"] if isinstance(call["index"], tuple) else ()
    if sum(isinstance(i, fx.Node) and view.is_tensor(i) for i in index) != 2:
        return None
    if not view.is_tensor(call["input"]) or "linear" not in above(view, call["input"], _POOLED):
        return None
    if not (below(view, node, _RISES) and below(view, node, _LOGS)):
        return None
    return "one token of each sequence is picked: no maximum, and its logits alone are needed"


def _vocabulary_axis(view: GraphView, source: fx.Node, reader: fx.Node) -> int | None:
    try:
        epilogue = walk_back(view, source, reader)
        return Chain(view, epilogue, epilogue.linears[0]).v_dim
    except NoMatch:
        return None


def _weighted_sum(view: GraphView, node: fx.Node) -> str | None:
    """Why a product that weights the activations of the tokens is no SPLADE head; None for other products."""
    if linears(view, node) != []:
        return None  # not a product, or a linear map
    call = view.call(node)
    factors = call.get("operands") or (call["input"], call["other"])
    for x in factors if len(factors) > 1 else ():
        if view.is_tensor(x) and view.dtype(x).is_floating_point:
            found = above(view, x, _POOLED)
            if "linear" in found and _is_activated(found):
                return f"a weighted sum over the sequence: {_ALL}"
    return None


class OverTerms(NoMatch):
    """A maximum over the terms of a token, or over any other features, which is a common operation."""


def resembles(
    view: GraphView, node: fx.Node, red: Reduction, bare: bool = True, terms: bool = False
) -> bool:
    """Whether a maximum has the looser signature of the family: a linear, and an activation before or after the
    maximum, or (`bare`) no activation but a maximum over another axis than the last.

    A maximum of absolute values does not resemble a head, because it is the scale of a quantisation, nor does a maximum
    of a softmax, which is the confidence of a router or classifier. Values that are normalised, or reduced over the
    axis of the terms (`terms`), are ordinary features unless they have a SPLADE activation.
    """
    if view.name_of(view.behind(red.source, SAME_VALUES)[0]) in ("abs", "softmax"):
        return False
    found = above(view, red.source, _POOLED)  # a second pooling of pooled values is no head
    ndim = len(view.shape(red.source))
    if "linear" in found:
        if terms or found & _NORMS:
            return _is_activated(found)
        over_tokens = bare and ndim > 2 and red.dim < ndim - 1 and not red.minimum
        return over_tokens or bool(found & (_RISES | _LOGS)) or below(view, node, _RISES | _LOGS)
    # Attention scores are batched on both sides too, but do not go through a logarithm.
    return "batched matmul" in found and _is_activated(found)


def rescales(view: GraphView, node: fx.Node, red: Reduction) -> bool:
    """Whether a maximum is subtracted from the values that it reduces, or divides them, so that all of them are needed:
    a softmax written out, the logarithm of a sum of exponentials, or a range (minus the minimum)."""
    made = {node, *reached(node.users, lambda n: n.users if view.name_of(n) in _ALIKE else (), 8)}

    def is_own(n: fx.Node) -> bool:
        origin, _ = view.behind(n, _ALIKE)
        return red.source in (n, *origin.all_input_nodes)

    within = (n for n in made if view.name_of(n) in ("sub", "div"))
    beside = [n for r in within for n in r.all_input_nodes if n not in made]
    return any(map(is_own, beside)) and all(n.op != "output" for n in made)


def _is_activated(found: Set[str | None]) -> bool:
    """Whether the names above a value contain the functions of a SPLADE activation."""
    return bool(found & _RISES and found & _LOGS)
