"""Mistakes of another kind: properties of a program that a pattern or an operator fails to take into account.

Correct code leaves such a program as written, or its rewrite has the unusual property, too. Each program shows one
mistake. Programs in training are compared in their gradients as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import fx

from fuzz.kept import kept, tensor
from fuzz.program import Program
from fuzz.vocabulary import entmax15, negate_
from planted.bug import Plant, instead, result
from sparse_inductor import compat, graph_run
from sparse_inductor.aten import sparse_scores as scores
from sparse_inductor.graph import checks, effects
from sparse_inductor.graph.view import GraphView
from sparse_inductor.match.chains import comparisons
from sparse_inductor.match.chains.chain import Chain
from sparse_inductor.match.chains.comparisons import Edge
from sparse_inductor.match.entmax.replacement import Attention
from sparse_inductor.match.feed_forward import readers
from sparse_inductor.match.scoring.scored import Scores
from sparse_inductor.ops import _linear_max_aten as head
from sparse_inductor.ops import _relu_ffn_aten as block

__all__ = ["OVERLOOKED", "Overlooked"]

head_op = importlib.import_module("sparse_inductor.ops.splade_head")


@dataclasses.dataclass(frozen=True)
class Overlooked:
    """A mistake, the program that shows it, and the parameters of the fuzzer's search for it.

    The fuzzer draws programs of `family` with `hazards` and inputs of `values`, and runs those that can show the
    mistake according to `drawn`.
    """

    name: str
    plant: Plant
    program: Program
    family: str
    hazards: tuple[str, ...] | None = None
    values: str | None = None
    drawn: Callable[[Program], bool] = lambda program: True
    by_verify: bool = True
    """Whether verify can catch it: verify checks the first call only, and one rewrite at a time."""


# --- Writers ------------------------------------------------------------------------------------------


def _no_writer(*names: str) -> Plant:
    """Return a plant that makes patterns take calls of these names for calls that write nothing."""

    def overlooks(written: Callable[..., Any], node: fx.Node) -> Any:
        target = node.target
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        return [] if any(n in name for n in names) else written(node)

    return instead(effects, "written", overlooks)


_HEAD = {
    "seed": 1,
    "x": tensor((2, 4, 8)),
    "w": tensor((9, 8), "weight"),
    "mask": tensor((2, 4), "mask:weights"),
}
_BLOCK = {
    "seed": 1,
    "x": tensor((4, 8)),
    "up": tensor((16, 8), "weight"),
    "down": tensor((8, 16), "weight"),
}
_ATTENTION = {"seed": 1, "q": tensor((2, 4, 8)), "k": tensor((2, 5, 8)), "v": tensor((2, 5, 8))}
_SCORES = {
    "seed": 1,
    "q": tensor((2, 9)),
    "ids": tensor((6, 5), "ids:9", dtype=torch.int64),
    "w": tensor((6, 5)),
}


@kept(**_HEAD)
def numpy_assignment(x, w, mask):
    a = torch.log1p(F.relu(F.linear(x, w))) * mask.unsqueeze(-1)
    mask.numpy()[:, 0] = 9.0
    return (a.amax(1),)


@kept(**_HEAD)
def own_operator(x, w, mask):
    a = torch.log1p(F.relu(F.linear(x, w))) * mask.unsqueeze(-1)
    negate_(mask)
    return (a.amax(1),)


@kept(**_HEAD)
def branch(x, w, mask):
    a = torch.log1p(F.relu(F.linear(x, w))) * mask.unsqueeze(-1)
    torch.cond(x.sum() > -1e9, lambda m: m.mul_(3.0).sum(), lambda m: m.sum(), (mask,))
    return (a.amax(1),)


@kept(**_HEAD)
def assignment(x, w, mask):
    a = torch.log1p(F.relu(F.linear(x, w))) * mask.unsqueeze(-1)
    mask[:, 0] = 9.0
    return (a.amax(1),)


@kept(**_HEAD)
def through_a_view(x, w, mask):
    a = torch.log1p(F.relu(F.linear(x, w))) * mask.unsqueeze(-1)
    mask[:, :2].fill_(9.0)
    return (a.amax(1),)


@kept(**_BLOCK)
def list_of_tensors(x, up, down):
    h = F.relu(F.linear(x, up))
    torch._foreach_mul_([h], 0.5)
    return (F.linear(h, down),)


@kept(**_BLOCK)
def out_argument(x, up, down):
    h = F.relu(F.linear(x, up))
    torch.mul(h, 0.5, out=h)
    return (F.linear(h, down),)


@kept(**_BLOCK)
def inplace_argument(x, up, down):
    h = F.linear(x, up)
    F.relu(h, inplace=True)
    return (F.linear(F.relu(h + 0.5), down),)


@kept(**_BLOCK, training=True)
def clipped_through_detach(x, up, down):
    h = F.relu(F.linear(x, up))
    h.detach().clamp_(max=0.2)
    return (F.linear(h, down),)


@kept(**_ATTENTION)
def scores_through_data(q, k, v):
    z = q @ k.mT * 0.5
    z.data.mul_(3.0)
    return (entmax15(z, dim=-1) @ v,)


@kept(**_SCORES)
def weights_overwritten(q, ids, w):
    parts = q[:, ids] * w
    w.zero_()
    return (parts.sum(-1),)


@kept(**_HEAD)
def states_overwritten_in_part(x, w, mask):
    y = x * 2.0
    z = F.linear(y[:, :3], w)
    y[:, 2:].fill_(9.0)
    return (torch.log1p(F.relu(z)).amax(1),)


_ELSEWHERE = instead(effects, "apart", lambda apart, written, read: written is not read)

_LATE = ("late write", "late write", "write")
# The writer's name as patterns know it, the program, its family, and the writer's text in a program if it is not that
# name.
_WRITERS = (
    ("wrapped", numpy_assignment, "splade_head", ".numpy()"),
    ("negate_", own_operator, "splade_head", "negate_("),
    ("cond", branch, "splade_head"),
    ("setitem", assignment, "splade_head", "] = "),
    ("fill_", through_a_view, "splade_head"),
    ("_foreach", list_of_tensors, "relu_ffn"),
    ("mul", out_argument, "relu_ffn", "out="),
    ("relu", inplace_argument, "relu_ffn", "inplace=True"),
    ("clamp_", clipped_through_detach, "relu_ffn"),
    ("mul_", scores_through_data, "entmax_attention"),
    ("zero_", weights_overwritten, "sparse_scores"),
)


# --- Gradients ----------------------------------------------------------------------------------------

_LEARNT = {
    "seed": 1,
    "training": True,
    "x": tensor((2, 4, 8), grad=True),
    "w": tensor((8, 8), "weight", grad=True),
}


@contextlib.contextmanager
def _gradients_unasked() -> Any:
    """Disable all checks of where gradients are cut, including inference mode."""
    with (
        mock.patch.object(GraphView, "in_inference_mode", lambda self, node: False),
        mock.patch.object(checks, "_check_gradient", lambda *args: None),
        mock.patch.object(effects.Effects, "regraded", lambda self, node: None),
    ):
        yield


@kept(**_LEARNT)
def frozen_logits(x, w):
    with torch.no_grad():
        z = F.linear(x, w)
    return (torch.log1p(F.relu(z)).amax(1),)


@kept(**_LEARNT)
def island_of_inference(x, w):
    with torch.inference_mode():
        z = F.linear(x, w)
    return (torch.log1p(F.relu(z)).amax(1),)


_ISLANDS = ((frozen_logits, "splade_head"), (island_of_inference, "splade_head"))


# --- Casts that are dropped ---------------------------------------------------------------------------


def _uncast(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target in ("to", "half", "bfloat16", "float"):
        node = node.args[0]
    return node


def _operand(emit: Callable[..., Any], self: Attention, e: Any) -> Any:
    q = dataclasses.replace(self.q, node=_uncast(self.q.node))
    return emit(dataclasses.replace(self, q=q), e)


def _documents(documents: Callable[..., Any], self: Scores, e: Any, V: Any) -> Any:
    ids, values = documents(self, e, V)
    return ids, _uncast(values)


_INPUT = instead(
    Chain, "linear_input", lambda f, self, e, *args, **kw: _uncast(f(self, e, *args, **kw))
)


@kept(**_HEAD)
def hidden_states_in_bfloat16(x, w, mask):
    z = F.linear(x.to(torch.bfloat16).to(torch.float32), w)
    return ((torch.log1p(F.relu(z)) * mask.unsqueeze(-1)).amax(1),)


@kept(**_BLOCK)
def input_in_eight_bits(x, up, down):
    return (F.linear(F.relu(F.linear(x.to(torch.float8_e4m3fn).to(torch.float32), up)), down),)


@kept(**_ATTENTION)
def queries_in_bfloat16(q, k, v):
    return (entmax15(q.to(torch.bfloat16).to(torch.float32) @ k.mT * 0.5, dim=-1) @ v,)


@kept(**_SCORES)
def weights_in_bfloat16(q, ids, w):
    return ((q[:, ids] * w.to(torch.bfloat16).to(torch.float32)).sum(-1),)


@kept(**_BLOCK)
def statistic_in_eight_bits(x, up, down):
    h = F.relu(F.linear(x, up))
    return F.linear(h, down), h.to(torch.float8_e4m3fn).to(h.dtype).sum()


# --- Results: tensors of their own ------------------------------------------------------------------------


@kept(**_LEARNT)
def computed_again(x, w):
    y = F.relu(F.linear(x, w)).amax(1)
    return y, F.relu(F.linear(x.detach(), w)).amax(1)


@kept(**{**_BLOCK, "x": tensor((4, 8), grad=True)}, training=True, sizes=({}, {}))
def written_to_by_the_caller(x, up, down):
    return (F.linear(F.relu(F.linear(x, up)), down),)


# --- Ties, NaN, infinities, and what was decided before --------------------------------------------------


def _last_winner(max_: Callable[..., Any], y: torch.Tensor, want_winner: bool) -> Any:
    top, winner = max_(y, want_winner)
    if winner is not None:
        winner = y.shape[1] - 1 - y.flip(1).max(1)[1]
    return top, winner


@kept(
    seed=3,
    training=True,
    exact=True,
    x=tensor((2, 6, 8), "integers", grad=True),
    w=tensor((9, 8), "integers", grad=True),
)
def first_of_equals(x, w):
    return (F.relu(F.linear(x, w)).max(1)[0],)


def _slope_at_zero(dual: Callable[..., Any], steps: Any, y: torch.Tensor, *rest: Any) -> Any:
    value, slope = dual(steps, y, *rest)
    return value, torch.where(y == 0, 1.0, slope)


@kept(
    seed=3,
    training=True,
    exact=True,
    x=tensor((4, 2, 8), "integers", grad=True),
    w=tensor((16, 8), "integers", grad=True),
)
def logits_of_zero(x, w):
    return (F.relu(F.linear(x, w)).max(1)[0],)


@kept(**{**_HEAD, "x": tensor((2, 4, 8), "nan")})
def head_of_a_nan(x, w, mask):
    return ((torch.log1p(F.relu(F.linear(x, w))) * mask.unsqueeze(-1)).amax(1),)


@kept(**{**_HEAD, "x": tensor((2, 4, 8), "infinite")})
def head_of_an_infinity(x, w, mask):
    return (F.relu(F.linear(x, w)).amax(1),)


@kept(**{**_BLOCK, "x": tensor((4, 8), "nan")})
def block_of_a_nan(x, up, down):
    return (F.linear(F.relu(F.linear(x, up)), down),)


@kept(**{**_SCORES, "q": tensor((2, 9), "nan")})
def scores_of_a_nan(q, ids, w):
    return ((q[:, ids] * w).sum(-1),)


@kept(
    seed=1,
    training=True,
    x=tensor((4, 8), "nan"),
    up=tensor((16, 8), "weight", grad=True),
    down=tensor((8, 16), "weight", grad=True),
)
def product_with_a_comparison(x, up, down):
    z = F.linear(x, up)
    return (F.linear(z * (z > 0.3), down),)


def _chosen(
    threshold: Callable[..., Any], edge: Edge, after: Any, c: float, factor: bool, node: Any
) -> Any:
    return threshold(edge._replace(nan=edge.nan or factor), after, c, False, node)


def _cleaned(first: torch.Tensor, *rest: Any) -> Any:
    return (first.nan_to_num(), *rest) if rest else first.nan_to_num()


def _clean_scores(blocks: Callable[..., Any], *args: Any) -> Any:
    for first, found in blocks(*args):
        yield first, found.nan_to_num()


@contextlib.contextmanager
def _first_mask_kept() -> Any:
    """Reuse the lowered form of the first mask for all later masks of its shape."""
    known: dict[Any, Any] = {}

    def stale(lower: Callable[..., Any], *args: Any) -> Any:
        shapes = (
            tuple(tuple(r.shape) for r in args[0]) if isinstance(args[0], (list, tuple)) else ()
        )
        return known.setdefault((len(args), shapes), lower(*args))

    with instead(head_op, "_lower", stale)():
        yield


@kept(**_HEAD, sizes=({}, {}))
def other_masks(x, w, mask):
    z = F.linear(x, w).masked_fill(mask.unsqueeze(-1) < 0.5, -1e4)
    return (torch.log1p(F.relu(z)).amax(1),)


def _learnt(*texts: str) -> Callable[[Program], bool]:
    """Return a filter of exact programs with gradients that contain one of the texts."""

    def shows(program: Program) -> bool:
        source = program.source()
        learns = program.exact and any(i.grad for i in program.inputs)
        return learns and any(text in source for text in texts)

    return shows


def _narrowed_query(program: Program) -> bool:
    narrowed = re.findall(r"(\w+) = .*(?:float16|half\(|float8)", program.source())
    return any(f"{name} @" in program.source() for name in narrowed)


def _statistic_of_a_cast(program: Program) -> bool:
    source = program.source()
    narrowed = re.findall(r"(\w+) = .*(?:float16|half\(|float8)", source)
    read = "|".join(narrowed)
    return bool(narrowed and re.search(rf"r\d+ = ({read})\.(abs|mean|square)", source))


def _called_again(program: Program) -> bool:
    return program.training and len(program.sizes) > 1


def _masked_again(program: Program) -> bool:
    return program.sizes[1:] == program.sizes[:1] and "masked_fill" in program.source()


_NARROWED = ("narrowed",) * 3
_QUERY = instead(Attention, "emit", _operand)
_VALUES = instead(Scores, "documents", _documents)
_CLEAN_HEAD = result(head, "forward", _cleaned)
_CLEAN_BLOCK = result(block, "forward", _cleaned)
_CLEAN_SCORES = instead(scores, "blocks", _clean_scores)
_LAST = instead(head, "_max", _last_winner)
_SLOPE = instead(head, "dual", _slope_at_zero)


def _writer(name: str, shown: Program, family: str, text: str = "") -> Overlooked:
    called = f".{name}(" if name.endswith("_") else name
    return Overlooked(
        f"{name} overlooked: {shown.name}",
        _no_writer(name),
        shown,
        family,
        _LATE,
        drawn=lambda program: (text or called) in program.source(),
    )


def _island(shown: Program, family: str) -> Overlooked:
    name = f"gradients not asked for: {shown.name}"
    return Overlooked(name, _gradients_unasked, shown, family, ("mode", "cut"))


OVERLOOKED = (
    *(_writer(*these) for these in _WRITERS),
    *(_island(*these) for these in _ISLANDS),
    Overlooked(
        "cast of states dropped", _INPUT, hidden_states_in_bfloat16, "splade_head", _NARROWED
    ),
    Overlooked("cast of inputs dropped", _INPUT, input_in_eight_bits, "relu_ffn", _NARROWED),
    Overlooked(
        "cast of queries dropped",
        _QUERY,
        queries_in_bfloat16,
        "entmax_attention",
        _NARROWED,
        drawn=_narrowed_query,
    ),
    Overlooked(
        "cast of documents dropped", _VALUES, weights_in_bfloat16, "sparse_scores", _NARROWED
    ),
    Overlooked(
        "cast of a statistic dropped",
        result(readers, "rounds", lambda narrows: False),
        statistic_in_eight_bits,
        "relu_ffn",
        ("narrowed", "read", "read", "read"),
        drawn=_statistic_of_a_cast,
    ),
    Overlooked(
        "equal calls merged",
        instead(graph_run, "keep_apart", lambda keep_apart, graph: None),
        computed_again,
        "splade_head",
        ("again",),
        by_verify=False,
    ),
    Overlooked(
        "results are views",
        instead(compat, "views_untracked", lambda untracked: contextlib.nullcontext()),
        written_to_by_the_caller,
        "relu_ffn",
        (),
        drawn=_called_again,
        by_verify=False,
    ),
    Overlooked(
        "the last of equal maxima",
        _LAST,
        first_of_equals,
        "splade_head",
        (),
        "integers",
        drawn=_learnt(".max(1)", "torch.max("),
    ),
    Overlooked(
        "slope of relu at zero",
        _SLOPE,
        logits_of_zero,
        "splade_head",
        (),
        "integers",
        drawn=_learnt("relu("),
    ),
    Overlooked(
        "a write taken for one elsewhere",
        _ELSEWHERE,
        states_overwritten_in_part,
        "splade_head",
        _LATE,
        drawn=lambda program: "] = " in program.source() or "].fill_(" in program.source(),
    ),
    Overlooked(
        "a product taken for a choice",
        instead(comparisons, "_threshold", _chosen),
        product_with_a_comparison,
        "relu_ffn",
        (),
        "nan",
        drawn=lambda program: program.training and "> 0" in program.source(),
    ),
    Overlooked("NaN cleaned in a head", _CLEAN_HEAD, head_of_a_nan, "splade_head", (), "nan"),
    Overlooked("infinity cleaned", _CLEAN_HEAD, head_of_an_infinity, "splade_head", (), "infinite"),
    Overlooked("NaN cleaned in a block", _CLEAN_BLOCK, block_of_a_nan, "relu_ffn", (), "nan"),
    Overlooked("NaN cleaned in scores", _CLEAN_SCORES, scores_of_a_nan, "sparse_scores", (), "nan"),
    Overlooked(
        "the first mask kept",
        _first_mask_kept,
        other_masks,
        "splade_head",
        (),
        drawn=_masked_again,
        by_verify=False,
    ),
)
