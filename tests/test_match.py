"""The matching vocabulary on graphs as Dynamo captures them."""

from __future__ import annotations

import importlib
import operator
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from sparse_inductor.patterns.splade_head import PATTERN
from torch import fx, nn

from sparse_inductor.graph.emit import Emitter, own_operator
from sparse_inductor.graph.fakes import fake
from sparse_inductor.graph.gemm import linears
from sparse_inductor.graph.names import canonical
from sparse_inductor.graph.no_match import NoMatch
from sparse_inductor.graph.shapes import move
from sparse_inductor.graph.values import uniform
from sparse_inductor.graph.view import GraphView
from sparse_inductor.match.chains.family import above, may_be_above
from sparse_inductor.pattern import registered
from sparse_inductor.reporting.records import Report
from sparse_inductor.rewrite import RewritePass

B, S, D, V = 2, 6, 4, 10


def capture(fn: Callable, *args: Any, dynamic: bool = False) -> fx.GraphModule:
    """Return the graph that Dynamo captures of a call."""
    seen: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable:
        seen.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    return seen[-1]


def returned(gm: fx.GraphModule) -> fx.Node:
    (out,) = gm.graph.find_nodes(op="output")
    return out.args[0][0]


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- Names ----------------------------------------------------------------------------------------

aten = torch.ops.aten
ONE, TWO = tensor(B, S), tensor(B, S, seed=1)


SAME = {
    "relu": (torch.relu, F.relu, lambda x, _: x.relu(), lambda x, _: F.relu(x, False),
             lambda x, _: aten.relu.default(x), lambda x, _: aten.relu(x), lambda x, _: F.relu(input=x)),
    "log1p": (torch.log1p, lambda x, _: x.log1p(), torch.special.log1p),
    "exp": (torch.exp, lambda x, _: x.exp()),
    "sigmoid": (torch.sigmoid, F.sigmoid, torch.special.expit, lambda x, _: x.sigmoid()),
    "logsigmoid": (F.logsigmoid, lambda x, _: F.logsigmoid(x)),
    "mul": (torch.mul, torch.multiply, operator.mul, lambda x, y: x.mul(y),
            lambda x, y: torch.mul(input=x, other=y), lambda x, y: x.multiply(y),
            lambda x, y: aten.mul.Tensor(x, y)),
    "add": (torch.add, operator.add, lambda x, y: x.add(y), lambda x, y: aten.add.Tensor(x, y)),
    "sub": (torch.sub, torch.subtract, operator.sub, lambda x, y: x.sub(other=y)),
    "div": (torch.div, torch.true_divide, operator.truediv, lambda x, y: x.divide(y)),
    "neg": (torch.neg, torch.negative, operator.neg, lambda x, _: -x),
    "pow": (torch.pow, operator.pow, lambda x, y: x.pow(exponent=y), lambda x, y: torch.pow(x, y)),
    "clamp": (lambda x, _: torch.clamp(x, 0.0, 1.0), lambda x, _: x.clamp(min=0.0, max=1.0),
              lambda x, _: torch.clip(x, min=0.0, max=1.0), lambda x, _: x.clip(0.0, 1.0)),
    "maximum": (torch.maximum, torch.max, lambda x, y: x.maximum(y), lambda x, y: x.max(other=y)),
    "max_dim": (lambda x, _: x.max(1)[0], lambda x, _: torch.max(x, dim=1)[0],
                lambda x, _: x.max(dim=1).values, lambda x, _: torch.max(x, 1)[0]),
    "amax": (lambda x, _: x.amax(1), lambda x, _: torch.amax(x, dim=1), lambda x, _: x.amax(dim=1)),
    "max_all": (torch.max, lambda x, _: x.max()),
    "gt": (torch.gt, operator.gt, lambda x, y: x.greater(y), lambda x, y: x > y),
    "eq": (torch.eq, operator.eq, lambda x, y: x == y),
    "logical_not": (torch.logical_not, lambda x, _: x.logical_not()),
    "where": (lambda x, y: torch.where(x > 0, x, y), lambda x, y: x.where(x > 0, y),
              lambda x, y: torch.where(condition=x > 0, input=x, other=y)),
    "masked_fill": (lambda x, y: x.masked_fill(y > 0, 0.0),
                    lambda x, y: torch.masked_fill(x, y > 0, 0.0),
                    lambda x, y: x.masked_fill(mask=y > 0, value=0.0)),
    "transpose": (lambda x, _: x.transpose(0, 1), lambda x, _: torch.swapaxes(x, 0, 1),
                  lambda x, _: x.transpose(dim0=0, dim1=1), lambda x, _: x.swapdims(0, 1)),
    "permute": (lambda x, _: x.permute(1, 0), lambda x, _: x.permute((1, 0)),
                lambda x, _: torch.permute(x, (1, 0))),
    "view": (lambda x, _: x.view(-1, 3), lambda x, _: x.reshape(-1, 3),
             lambda x, _: torch.reshape(x, (-1, 3)), lambda x, _: x.reshape((-1, 3))),
    "unsqueeze": (lambda x, _: x.unsqueeze(-1), lambda x, _: torch.unsqueeze(x, dim=-1)),
    "expand": (lambda x, _: x.expand(3, -1, -1), lambda x, _: x.expand((3, -1, -1)),
               lambda x, _: torch.broadcast_to(x, (3, -1, -1))),
    "flatten": (lambda x, _: x.flatten(), lambda x, _: torch.flatten(x), lambda x, _: x.ravel(), torch.ravel),
    "matmul": (lambda x, y: x @ y.t(), lambda x, y: torch.matmul(x, y.t()), lambda x, y: x.matmul(y.t()),
               lambda x, y: torch.linalg.matmul(x, y.t())),
    "linear": (F.linear, lambda x, y: F.linear(x, weight=y), lambda x, y: F.linear(input=x, weight=y)),
    "leaky_relu": (lambda x, _: F.leaky_relu(x, 0.2), lambda x, _: F.leaky_relu(x, negative_slope=0.2)),
    "topk": (lambda x, _: x.topk(1, 1)[0], lambda x, _: torch.topk(x, k=1, dim=1)[0]),
}  # fmt: skip


UNARY = "relu log1p exp sigmoid logsigmoid neg max_all logical_not flatten".split()


def of_two(fn: Callable, name: str) -> Callable:
    """Return a spelling as a function of `x` and `y`, also if the table has a unary function of PyTorch."""
    if name in UNARY and getattr(fn, "__name__", "") != "<lambda>":
        return lambda x, y: fn(x)
    return lambda x, y: fn(x, y)


@pytest.mark.parametrize("name", SAME)
def test_spellings_of_one_call(name):
    found = []
    for fn in SAME[name]:
        node = returned(capture(of_two(fn, name), ONE.clone(), TWO.clone()))
        if node.target is operator.getitem:  # .values and [0] of a pair
            node = node.args[0]
        call = canonical(node)
        assert call is not None, f"{node.format_node()} has no canonical name"
        given = {k: v for k, v in call.args.items() if v is not None}
        found.append((call.name, call.inplace, fx.map_arg(given, _of_the_arguments)))
    assert found[0][0] == name
    assert all(f == found[0] for f in found), found


@pytest.mark.parametrize("name", ["eq", "ne", "gt", "ge", "lt", "le"])
def test_a_comparison_may_be_a_method(name):
    """Dynamo of torch 2.11 writes x == 0 as x.__eq__(0)."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = canonical(graph.call_method(f"__{name}__", (x, 0)))
    assert call is not None and call.name == name and call["other"] == 0


def _of_the_arguments(node: fx.Node) -> str:
    """Return a description of a node that does not depend on the spelling: canonical names of nested calls."""
    if node.op == "placeholder":
        return node.name
    call = canonical(node)
    return f"{call.name}({', '.join(_of_the_arguments(n) for n in node.all_input_nodes)})"


@pytest.mark.parametrize(
    "plain, in_place",
    [
        (lambda x, y: x.relu(), lambda x, y: x.relu_()),
        (lambda x, y: F.relu(x), lambda x, y: F.relu(x, inplace=True)),
        (lambda x, y: F.relu(x), lambda x, y: F.relu(x, True)),
        (lambda x, y: F.leaky_relu(x, 0.1), lambda x, y: F.leaky_relu(x, 0.1, True)),
        (lambda x, y: torch.relu(x), lambda x, y: torch.relu_(x)),
        (lambda x, y: x + y, lambda x, y: operator.iadd(x, y)),
        (lambda x, y: x * y, lambda x, y: x.mul_(y)),
        (lambda x, y: x / y, lambda x, y: operator.itruediv(x, y)),
        (lambda x, y: x.clamp(min=0), lambda x, y: x.clamp_(min=0)),
        (lambda x, y: x.masked_fill(y > 0, 0.0), lambda x, y: x.masked_fill_(y > 0, 0.0)),
        (lambda x, y: x.log1p(), lambda x, y: torch.log1p(x, out=x)),
    ],
)
def test_in_place_is_the_same_call_and_says_so(plain, in_place):
    calls = []
    for fn in (plain, in_place):
        gm = capture(lambda x, y, fn=fn: fn(x * 1, y), ONE.clone(), TWO.clone())
        nodes = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
        calls.append(canonical(nodes[-1]))
    a, b = calls
    assert (a.name, list(a.args)) == (b.name, list(b.args))
    assert (a.inplace, b.inplace) == (False, True)


@pytest.mark.parametrize(
    "fn, name, args",
    [
        (lambda x, y: 1 - x, "rsub|sub", {"other", "input"}),
        (lambda x, y: torch.sub(x, y, alpha=2), "sub", {"alpha"}),
        (lambda x, y: torch.div(x, y, rounding_mode=None), "div", {"other"}),
        (lambda x, y: torch.div(x, y, rounding_mode="floor"), "div_floor", {"other"}),
        (lambda x, y: x.div_(y, rounding_mode="trunc"), "div_trunc", {"other"}),
        (lambda x, y: x.to(torch.float64), "cast", {"rest"}),
        (lambda x, y: x.double(), "cast", set()),
        (lambda x, y: x[..., None], "getitem", {"index"}),
        (lambda x, y: torch.einsum("bs,bs->b", x, y), "einsum", {"equation", "operands"}),
        (lambda x, y: torch.einsum("bs,bs->b", [x, y]), "einsum", {"equation", "operands"}),
        (lambda x, y: F.dropout(x, 0.0), "dropout", {"p"}),
    ],
)
def test_calls_with_a_form_of_their_own(fn, name, args):
    call = canonical(returned(capture(fn, ONE, TWO)))
    assert call.name in name.split("|")
    assert args <= call.args.keys()


@pytest.mark.parametrize("name", ["T", "mT", "H"])
def test_attributes_that_are_views(name):
    gm = capture(lambda x: getattr(x, name).exp(), ONE)
    assert canonical(returned(gm).args[0]).name == name


def test_placeholders_and_foreign_functions_have_no_name():
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert canonical(x) is None
    assert canonical(graph.call_function(test_spellings_of_one_call, (x,))) is None
    assert canonical(graph.call_function(own_operator("splade_head"), (x,))) is None


# --- In-place operations: the value that a reader sees --------------------------------------------


def last(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in reversed(gm.graph.nodes) if (c := canonical(n)) and c.name == name)


def assigned(y, m):
    y[m] = 0.0


# A write to a value, and the call whose result a later reader sees; None if there is no single such call.
WRITTEN = {
    "twice": (lambda y, m: (y.relu_(), y.log1p_()), "log1p"),
    "by an assignment": (assigned, "setitem"),
    "through a view of the same shape": (lambda y, m: y.view(B, S).relu_(), "relu"),
    "through another view": (lambda y, m: y[:, :2].relu_(), None),
    "elsewhere": (lambda y, m: y.clone().relu_(), "add"),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_a_reader_sees_the_last_write(how):
    write, seen = WRITTEN[how]

    def fn(x, m):
        y = x + 1
        before = y.exp()
        write(y, m)
        return before, y.amax(1)

    gm = capture(fn, ONE, TWO > 0)
    view, y = GraphView(gm.graph), last(gm, "add")
    assert view.value(y, last(gm, "exp")) is y
    assert view.value(y, last(gm, "amax")) is (last(gm, seen) if seen else None)


LAST_IS_INPLACE = {
    "relu": lambda x: F.relu(x, True),
    "elu": lambda x: F.elu(x, 1.0, True),
    "celu": lambda x: F.celu(x, 1.0, True),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0, True),
    "hardtanh": lambda x: F.hardtanh(x, 0.0, 6.0, True),
    "dropout": lambda x: F.dropout(x, 0.5, False, True),
}


@pytest.mark.parametrize("name", LAST_IS_INPLACE)
def test_the_last_argument_may_say_that_it_is_in_place(name):
    gm = capture(lambda x: (y := x + 1, LAST_IS_INPLACE[name](y), y.amax(1))[2], ONE)
    call = last(gm, name)
    assert canonical(call).inplace
    assert GraphView(gm.graph).value(last(gm, "add"), last(gm, "amax")) is call


def test_a_dimension_that_the_graph_computes_is_not_known():
    graph = fx.Graph()
    x, index, dim = (graph.placeholder(name) for name in ("x", "index", "dim"))
    assert canonical(graph.call_function(torch.gather, (x, 1, index)))["dim"] == 1
    assert canonical(graph.call_function(torch.gather, (x, dim, index))) is None
    assert canonical(graph.call_method("transpose", (x, 0, dim))) is None


def test_training_is_no_word_of_being_in_place():
    gm = capture(lambda x: F.dropout(x, 0.5, True) + F.dropout(x, 0.5, False), ONE)
    view = GraphView(gm.graph)
    assert not view.effects.writers
    first, second = (n for n in gm.graph.nodes if view.name_of(n) == "dropout")
    assert not view.same_value(first, second)


def test_two_draws_are_two_values():
    gm = capture(
        lambda x: [F.dropout(x, 0.5, training) for training in (True, True, False, False)], ONE
    )
    view = GraphView(gm.graph)
    a, b, c, d = (n for n in gm.graph.nodes if view.name_of(n) == "dropout")
    assert not view.same_value(a, b)
    assert view.same_value(c, d)


def test_statistics_that_are_only_read_are_not_written():
    gm = capture(lambda x: F.batch_norm(ONE, x[0], x[1]) + x[0], torch.ones(S, S))
    assert not GraphView(gm.graph).effects.writers


@pytest.mark.parametrize(
    "make, number",
    [
        (lambda x: torch.full_like(x, -2.5), -2.5),
        (lambda x: torch.zeros_like(x), 0.0),
        (lambda x: x.new_ones(B, S), 1.0),
        (lambda x: torch.full((B, S), float("-inf")), float("-inf")),
        (lambda x: -torch.ones_like(x) * 3, -3.0),
        (lambda x: torch.tensor(0.5).expand(B, S), 0.5),
        (lambda x: x * 0, None),
        (lambda x: torch.zeros_like(x).fill_(2.0) + x, None),
    ],
)
def test_numbers_that_a_graph_spells_out(make, number):
    gm = capture(lambda x: torch.maximum(x, make(x)), ONE)
    node = returned(gm)
    assert GraphView(gm.graph).const(node.args[1], node) == number


def test_a_constant_that_is_written_is_none():
    def fn(x, m):
        c = torch.zeros_like(x)
        c[m] = -1e4
        return x + c

    gm = capture(fn, ONE, TWO > 0)
    node = returned(gm)
    assert GraphView(gm.graph).const(node.args[1], node) is None


# --- Matrix products ------------------------------------------------------------------------------

H, W, BIAS = OPERANDS = tensor(B, S, D), tensor(V, D, seed=1), tensor(V, seed=2)
BATCHED = lambda w: w.t().unsqueeze(0).expand(B, D, V)

GEMMS = {
    "linear": lambda h, w, b: F.linear(h, w),
    "linear_bias": lambda h, w, b: F.linear(h, w, b),
    "matmul_t": lambda h, w, b: h @ w.t(),
    "matmul_T": lambda h, w, b: torch.matmul(h, w.T),
    "matmul_mT": lambda h, w, b: h.matmul(w.mT),
    "matmul_transpose": lambda h, w, b: h @ w.transpose(0, 1),
    "matmul_permute": lambda h, w, b: h @ w.permute(1, 0),
    "mm": lambda h, w, b: torch.mm(h.reshape(-1, D), w.t()),
    "addmm": lambda h, w, b: torch.addmm(b, h.reshape(-1, D), w.t()),
    "bmm": lambda h, w, b: torch.bmm(h, BATCHED(w)),
    "baddbmm": lambda h, w, b: torch.baddbmm(b, h, BATCHED(w)),
    "batched_matmul": lambda h, w, b: h @ w.t()[None].expand(B, -1, -1),
    "repeated": lambda h, w, b: h @ w.t().unsqueeze(0).repeat(B, 1, 1),
    "weight_first": lambda h, w, b: w @ h.transpose(1, 2),
    "weight_first_bmm": lambda h, w, b: torch.bmm(w[None].expand(B, V, D), h.mT),
    "einsum": lambda h, w, b: torch.einsum("bsd,vd->bsv", h, w),
    "einsum_dv": lambda h, w, b: torch.einsum("bsd,dv->bsv", h, w.t()),
    "einsum_weight_first": lambda h, w, b: torch.einsum("vd,bsd->bsv", w, h),
    "einsum_bvs": lambda h, w, b: torch.einsum("bsd,vd->bvs", h, w),
    "einsum_vbs": lambda h, w, b: torch.einsum("bsd,vd->vbs", h, w),
    "einsum_implicit": lambda h, w, b: torch.einsum("abz,cz", h, w),
    "einsum_ellipsis": lambda h, w, b: torch.einsum("...d,vd->...v", h, w),
    "tensordot": lambda h, w, b: torch.tensordot(h, w, dims=([2], [1])),
    "tensordot_one": lambda h, w, b: torch.tensordot(h, w.t(), 1),
    "inner": lambda h, w, b: torch.inner(h, w),
    "multi_dot": lambda h, w, b: torch.linalg.multi_dot([h.reshape(-1, D), w.t()]),
    "conv1d": lambda h, w, b: F.conv1d(h.transpose(1, 2), w.unsqueeze(-1)),
    "conv1d_bias": lambda h, w, b: F.conv1d(h.transpose(1, 2), w.unsqueeze(-1), b),
    "aten_linear": lambda h, w, b: aten.linear.default(h, w, b),
}  # fmt: skip


BIASED = {"linear_bias", "addmm", "baddbmm", "conv1d_bias", "aten_linear"}


def splice(gm: fx.GraphModule, node: fx.Node, build: Callable[[Emitter], Any], args: tuple) -> Any:
    """Run the graph up to `node` and return what `build` inserts there, next to the node's result."""
    (out,) = gm.graph.find_nodes(op="output")
    extra = build(Emitter(out))
    out.args = ((node, *extra),)
    gm.graph.lint()
    gm.recompile()
    order = [n for n in gm.graph.nodes if n.op == "placeholder"]
    by_shape = {tuple(a.shape): a for a in args}
    return gm(*(by_shape[tuple(fake(p).shape)] for p in order))


def product(gm: fx.GraphModule) -> fx.Node:
    view = GraphView(gm.graph)
    return next(n for n in reversed(gm.graph.nodes) if linears(view, n) is not None)


@pytest.mark.parametrize("name", GEMMS)
def test_every_product_is_the_same_linear(name):
    """The product equals the linear's input (its D axis at the place of V) times the [V, D] weight."""
    gm = capture(GEMMS[name], H, W, BIAS)
    node = product(gm)
    # In a product of two matrices either may be the weight.
    readings = linears(GraphView(gm.graph), node)
    (linear,) = (r for r in readings if fake(node).shape[r.v_dim] == V)
    result, linear_input, weight = splice(
        gm, node, lambda e: (linear.linear_input(e), linear.weight(e)), (H, W, BIAS)
    )
    assert torch.equal(weight, W)
    rebuilt = linear_input.movedim(linear.v_dim, -1) @ weight.t()
    if linear.bias is not None:
        rebuilt = rebuilt + BIAS
    assert (linear.bias is not None) == (name in BIASED)
    torch.testing.assert_close(rebuilt.movedim(-1, linear.v_dim), result)


@pytest.mark.parametrize(
    "fn, readings",
    [
        (lambda h, w, b: h @ h.mT, 0),  # attention scores have no matrix that all sequences share
        (lambda h, w, b: torch.einsum("bsd,btd->bst", h, h), 0),
        (lambda h, w, b: torch.bmm(h, h.mT), 0),
        (lambda h, w, b: torch.addmm(b, h[0], w.t(), alpha=3), 0),  # weights times 3 are rounded
        (lambda h, w, b: torch.addmm(b, h[0], w.t(), alpha=2), 1),
        (lambda h, w, b: F.conv1d(h.mT, w.unsqueeze(-1), stride=2), 0),
        (lambda h, w, b: torch.einsum("bsd,vd->bs", h, w), 0),
        (lambda h, w, b: h[0] @ w.t(), 2),
    ],
)
def test_how_many_readings(fn, readings):
    gm = capture(fn, H, W, BIAS)
    assert len(linears(GraphView(gm.graph), product(gm))) == readings


def test_what_is_no_product_has_no_reading():
    gm = capture(torch.relu, H)
    assert linears(GraphView(gm.graph), returned(gm)) is None


# --- Shapes: the vocabulary axis through views ----------------------------------------------------

MOVES = {  # op on logits [B, S, V], the resulting position of V, and the origin of each axis
    "transpose": (lambda z: z.transpose(1, 2), 1, (0, 2, 1)),
    "mT": (lambda z: z.mT, 1, (0, 2, 1)),
    "permute": (lambda z: z.permute(2, 0, 1), 0, (2, 0, 1)),
    "permute_negative": (lambda z: z.permute(-1, 0, 1), 0, (2, 0, 1)),
    "movedim": (lambda z: z.movedim(2, 0), 0, (2, 0, 1)),
    "movedim_pairs": (lambda z: z.movedim((0, 1), (1, 2)), 0, (2, 0, 1)),
    "unsqueeze": (lambda z: z.unsqueeze(1), 3, (0, None, 1, 2)),
    "unsqueeze_last": (lambda z: z.unsqueeze(-1), 2, (0, 1, 2, None)),
    "index_none": (lambda z: z[:, None], 3, (0, None, 1, 2)),
    "slice": (lambda z: z[:, 1:4], 2, (0, 1, 2)),
    "slice_step": (lambda z: z[:, ::2], 2, (0, 1, 2)),
    "select": (lambda z: z.select(0, 1), 1, (1, 2)),
    "index": (lambda z: z[1], 1, (1, 2)),
    "index_negative": (lambda z: z[:, -1], 1, (0, 2)),
    "ellipsis": (lambda z: z[..., :3, :], 2, (0, 1, 2)),
    "narrow": (lambda z: z.narrow(1, 2, 3), 2, (0, 1, 2)),
    "flatten": (lambda z: z.flatten(0, 1), 1, (None, 2)),
    "view_flat": (lambda z: z.view(-1, V), 1, (None, 2)),
    "view_split": (lambda z: z.view(B, 2, 3, V), 3, (0, None, None, 2)),
    "reshape_split": (lambda z: z.reshape(B, 3, -1, V), 3, (0, None, None, 2)),
    "unflatten": (lambda z: z.unflatten(1, (2, 3)), 3, (0, None, None, 2)),
    "chunk": (lambda z: z.chunk(2, 1)[1], 2, (0, 1, 2)),
    "split": (lambda z: z.split(4, 1)[0], 2, (0, 1, 2)),
    "split_sizes": (lambda z: z.split([1, 5], dim=1)[1], 2, (0, 1, 2)),
    "unbind": (lambda z: z.unbind(0)[1], 1, (1, 2)),
    "expand_new_axis": (lambda z: z.expand(3, B, S, V), 3, (None, 0, 1, 2)),
    "index_select": (lambda z: z.index_select(1, torch.tensor([0, 3])), 2, (0, 1, 2)),
    "squeeze_nothing": (lambda z: z.squeeze(1), 2, (0, 1, 2)),
}  # fmt: skip


def moved(fn, *args):
    """Return the graph of a view of logits, the view's node, and its effect on their last axis."""
    gm = capture(fn, *args)
    view, node = GraphView(gm.graph), returned(gm)
    return gm, node, move(view, node, view.call(node), 2)


@pytest.mark.parametrize("name", MOVES)
def test_a_view_of_the_logits_is_the_same_view_of_the_input(name):
    op, v_dim, origin = MOVES[name]
    gm, node, step = moved(lambda h, w: op(F.linear(h, w)), H, W)
    assert (step.v_dim, step.origin) == (v_dim, origin)
    hidden = product(gm).args[0]
    result, linear_input = splice(gm, node, lambda e: (step.apply(e, hidden),), (H, W))
    torch.testing.assert_close((linear_input.movedim(v_dim, -1) @ W.t()).movedim(-1, v_dim), result)


@pytest.mark.parametrize("name", [n for n in MOVES if n not in ("expand_new_axis",)])
def test_a_mask_takes_the_view_too(name):
    """A per-token operand has size 1 at the place of V, so it can be masked before or after the view."""
    op, v_dim, _ = MOVES[name]
    mask = torch.arange(B * S).view(B, S, 1).float()
    gm, node, step = moved(lambda h, w, m: op(F.linear(h, w) * m), H, W, mask)
    operand, hidden = last(gm, "mul").args[1], product(gm).args[0]
    both = lambda e: (step.apply(e, hidden), step.apply(e, operand))
    result, linear_input, row = splice(gm, node, both, (H, W, mask))
    assert row.shape[v_dim] == 1
    logits = (linear_input.movedim(v_dim, -1) @ W.t()).movedim(-1, v_dim)
    torch.testing.assert_close(logits * row, result)


def test_a_slice_of_the_vocabulary_is_kept_for_the_weight():
    _, _, step = moved(lambda h, w: F.linear(h, w)[..., 2:7], H, W)
    assert step.columns == slice(2, 7)


@pytest.mark.parametrize(
    "op, reason",
    [
        (lambda z: z.flatten(1, 2), "output axis"),
        (lambda z: z.view(B, -1), "output axis"),
        (lambda z: z.unflatten(2, (5, 2)), "splits the linear's output axis"),
        (lambda z: z[..., 3], "single outputs"),
        (lambda z: z.select(2, 0), "single outputs"),
    ],
)
def test_views_that_lose_the_vocabulary(op, reason):
    with pytest.raises(NoMatch, match=reason):
        moved(lambda h, w: op(F.linear(h, w)), H, W)


# --- Whole heads: writes, and replacements --------------------------------------------------------


class Head(nn.Module):
    def __init__(self, pool: Callable):
        super().__init__()
        torch.manual_seed(0)
        self.decoder = nn.Linear(D, V)
        self.pool = pool

    def forward(self, hidden, mask):
        return self.pool(self.decoder, hidden, mask)


MASK = (torch.arange(S) < torch.tensor([[S], [3]])).long()


def rewritten(pool: Callable, mask: torch.Tensor = MASK) -> tuple[fx.GraphModule, Report]:
    """Return the graph after the pass, and check its results against the unchanged program."""
    head = Head(pool)
    expected = head(H.clone(), mask.clone())
    gm = capture(head, H.clone(), mask.clone())
    report = Report()
    RewritePass([PATTERN], report)(gm.graph)
    gm.graph.lint()
    gm.recompile()
    inputs = {"weight": head.decoder.weight, "bias": head.decoder.bias}
    args = []
    for p in (n for n in gm.graph.nodes if n.op == "placeholder"):
        found = next((t for k, t in inputs.items() if p.name.endswith(f"_{k}_")), None)
        is_mask = fake(p).dtype == mask.dtype and tuple(fake(p).shape) == tuple(mask.shape)
        args.append(found if found is not None else mask.clone() if is_mask else H.clone())
    torch.testing.assert_close(gm(*args), expected if type(expected) is tuple else (expected,))
    return gm, report


def tokens(z: torch.Tensor) -> torch.Tensor:
    return torch.log1p(torch.relu(z))


def changed_before_it_is_read(change):
    def pool(decoder, h, m):
        z = decoder(h)
        change(decoder, h)
        return (tokens(z) * m.unsqueeze(-1)).amax(1)

    return pool


@torch.no_grad()
def _weight_changes(decoder, h):
    decoder.weight.mul_(1.0)


def _mask_changes(decoder, h, m):
    y = tokens(decoder(h)) * m.unsqueeze(-1)
    m.zero_()
    return y.amax(1)


def _logits_change_afterwards(decoder, h, m):
    z = decoder(h)
    y = (tokens(z) * m.unsqueeze(-1)).amax(1)
    z.zero_()
    return y, z


@pytest.mark.parametrize(
    "pool, reason",
    [
        (changed_before_it_is_read(lambda decoder, h: h.mul_(0)), "changed in place before"),
        (changed_before_it_is_read(lambda decoder, h: h[:, 0].zero_()), "changed in place before"),
        (changed_before_it_is_read(_weight_changes), "changed in place before"),
        (_mask_changes, "changed in place before"),
        (_logits_change_afterwards, "the logits are also"),
    ],
    ids="hidden a_view_of_hidden weight mask logits".split(),
)
def test_writes_that_forbid_the_rewrite(pool, reason):
    _, report = rewritten(pool)
    assert not report.rewrites
    (miss,) = report.near_misses
    assert reason in miss.reason


def _in_place_chain(decoder, h, m):
    z = decoder(h)
    z.relu_().log1p_()
    z *= m.unsqueeze(-1)
    return z.amax(1)


def _assigned(decoder, h, m):
    z = decoder(h)
    z[m == 0] = float("-inf")
    return tokens(z.amax(1))


def _hidden_changes_before(decoder, h, m):
    h.mul_(2)
    return (tokens(decoder(h)) * m.unsqueeze(-1)).amax(1)


def _hidden_changes_after(decoder, h, m):
    y = (tokens(decoder(h)) * m.unsqueeze(-1)).amax(1)
    h.mul_(2)
    return y


@pytest.mark.parametrize(
    "pool, note",
    [
        (_in_place_chain, "relu | log1p | row_mul(0)"),
        (_assigned, "row_where(0, -inf)"),
        (_hidden_changes_before, "relu | log1p | row_mul(0)"),
    ],
)
def test_writes_that_are_followed(pool, note):
    gm, report = rewritten(pool)
    assert [r.note for r in report.rewrites] == [note], report.near_misses
    assert "linear" not in text(gm)


def test_an_input_that_is_written_to_afterwards():
    """AOTAutograd's partitioner could read its changed value in the backward. Without a backward it is rewritten."""
    gm, report = rewritten(_hidden_changes_after)
    assert "writes to an input that hidden is made of" in report.near_misses[0].reason
    assert not report.rewrites and "linear" in text(gm)
    with torch.no_grad():
        _, report = rewritten(_hidden_changes_after)
    assert [r.note for r in report.rewrites] == ["relu | log1p | row_mul(0)"], report.near_misses


def text(gm: fx.GraphModule) -> str:
    """Return a graph as text, one call per line, without placeholders."""
    lines = []
    for n in gm.graph.nodes:
        if n.op == "placeholder":
            continue
        args = ", ".join(
            [*(_argument(a) for a in n.args), *(f"{k}={_argument(v)}" for k, v in n.kwargs.items())]
        )
        if n.op == "output":
            lines.append(f"return {args}")
            continue
        target = n.target
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        if isinstance(target, torch._ops.OpOverload):
            name = str(target)
        name = name.removeprefix("__").removesuffix("__")  # torch 2.11 compares by method
        shape = list(fake(n).shape) if isinstance(fake(n), torch.Tensor) else ""
        line = f"{n.name} = {name}({args})  {shape}".rstrip()
        lines.append(line if len(line) < 100 else line.replace("(", "(\n    ", 1))
    return "\n".join(lines)


def _argument(a: Any) -> str:
    if isinstance(a, fx.Node):
        return a.name.replace("l_self_modules_decoder_parameters", "").strip("_").removeprefix("l_")
    if isinstance(a, (tuple, list)):
        return f"[{', '.join(map(_argument, a))}]"
    return repr(a)


def test_what_a_rewritten_graph_looks_like():
    gm, _ = rewritten(lambda decoder, h, m: (tokens(decoder(h)) * m.unsqueeze(-1)).amax(1))
    assert_expected_inline(
        text(gm),
        """\
unsqueeze = unsqueeze(mask, -1)  [2, 6, 1]
squeeze = squeeze(unsqueeze, -1)  [2, 6]
splade_head_default = sparse_inductor.splade_head.default(
    hidden, weight, bias, [squeeze], 'relu | log1p | row_mul(0)', None, False, True)
getitem = getitem(splade_head_default, 0)  [2, 10]
return [getitem]""",
    )


def test_a_mask_of_another_kind_and_positions():
    def pool(decoder, h, m):
        z = decoder(h).masked_fill(m[..., None] == 0, -1e4)
        return tuple(torch.max(tokens(z).transpose(1, 2), dim=2))

    gm, _ = rewritten(pool)
    assert_expected_inline(
        text(gm),
        """\
getitem = getitem(mask, [Ellipsis, None])  [2, 6, 1]
eq = eq(getitem, 0)  [2, 6, 1]
permute_1 = permute(hidden, [0, 2, 1])  [2, 4, 6]
permute_2 = permute(permute_1, [0, 2, 1])  [2, 6, 4]
logical_not_1 = logical_not(eq)  [2, 6, 1]
permute_3 = permute(logical_not_1, [0, 2, 1])  [2, 1, 6]
permute_4 = permute(permute_3, [0, 2, 1])  [2, 6, 1]
squeeze = squeeze(permute_4, -1)  [2, 6]
splade_head_default = sparse_inductor.splade_head.default(
    permute_2, weight, bias, [squeeze], 'row_where(0, -10000.0) | relu | log1p', None, True, False)
getitem_3 = getitem(splade_head_default, 0)  [2, 10]
getitem_4 = getitem(splade_head_default, 1)  [2, 10]
return [getitem_3, getitem_4]""",
    )


@pytest.fixture
def walked(monkeypatch):
    """Counts the backward walks by their first node and their kind."""
    counted: Counter[tuple[fx.Node, type]] = Counter()
    module = importlib.import_module("sparse_inductor.match.chains.backward_walk")
    walk = module._walk_back

    def counting(view: GraphView, node: fx.Node, depth: int, kind: type) -> Any:
        counted[node, kind] += 1
        return walk(view, node, depth, kind)

    monkeypatch.setattr(module, "_walk_back", counting)
    return counted


def test_a_residual_stream_is_walked_once(walked):
    """Every linear on it needs a walk from its input, and every sum from both of its operands."""
    up, down = nn.Linear(4, 6), nn.Linear(6, 4)

    def stack(x):
        for _ in range(5):
            x = x + down(torch.relu(up(x)))
        return x

    report = Report()
    with torch.no_grad():
        gm = capture(stack, torch.randn(2, 3, 4))
        RewritePass(registered().values(), report).run(gm.graph)
    assert len(report.rewrites) == 5
    assert len(walked) > 5 and max(walked.values()) == 1


def test_a_residual_stream_longer_than_a_walk_is_walked_in_proportion(walked):
    """Blocks read the stream itself. A walk that hits the depth limit is not repeated for each of them."""
    up, down = tensor(8, 4), tensor(4, 8)

    def stream(x):
        for _ in range(layers):
            x = x + F.linear(torch.sigmoid(F.linear(x, up)) * 2 - 1, down)
        return F.relu(F.linear(x, up)).amax(1)

    for layers in (60, 90):
        walked.clear()
        RewritePass(registered().values(), Report())(capture(stream, tensor(2, 3, 4)).graph)
        assert walked.total() < 200 * layers


def test_what_has_no_rectifier_above_it_is_not_walked(walked):
    """Only the head at the end of a residual stream of blocks has a rectifier."""
    up, down = tensor(8, 4), tensor(4, 8)

    def stream(x):
        for _ in range(5):
            x = x + F.linear(F.gelu(F.linear(x, up)), down)
        return F.relu(F.linear(x, up)).amax(1)

    report = Report()
    RewritePass(registered().values(), report)(capture(stream, tensor(2, 3, 4)).graph)
    assert len(report.rewrites) == 1 and [n.name for n, _ in walked.elements()] == [
        "relu",
        "linear_10",
    ]


# --- The amount of work ---------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, layers: int, activation: Callable) -> None:
        super().__init__()
        self.activation = activation
        for name, outputs, inputs in ("qkv", 24, 8), ("out", 8, 8), ("up", 16, 8), ("down", 8, 16):
            made = [nn.Linear(inputs, outputs) for _ in range(layers)]
            setattr(self, name, nn.ModuleList(made))

    def forward(self, x):
        for qkv, out, up, down in zip(self.qkv, self.out, self.up, self.down):
            q, k, v = (t.view(*x.shape[:2], 2, 4).transpose(1, 2) for t in qkv(x).chunk(3, dim=-1))
            p = (q @ k.transpose(-1, -2) * 0.5).softmax(-1)
            x = F.layer_norm(x + out((p @ v).transpose(1, 2).reshape(x.shape)), (8,))
            x = F.layer_norm(x + down(self.activation(up(x))), (8,))
        return x


def calls(run: Callable[..., Any], *args: Any) -> int:
    """Return the number of Python function calls during a call."""
    found = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        run(*args)
    finally:
        sys.setprofile(None)
    return found


def test_a_pattern_is_asked_nothing_about_graphs_without_its_signs():
    """A transformer with softmax and GELU has no maximum, top-k, scatter or look-up, and no rectifier."""
    report = Report()
    RewritePass(registered().values(), report)(capture(Encoder(1, F.gelu), tensor(2, 3, 8)).graph)
    assert not report and report.pattern_ms.keys() <= {"relu_ffn"}


@pytest.mark.parametrize("activation", [F.gelu, F.relu])
def test_the_work_is_in_proportion_to_the_graph(activation):
    work = []
    for layers in (1, 4, 12):  # the first run includes imports
        graph = capture(Encoder(layers, activation), tensor(2, 3, 8)).graph
        run = RewritePass(
            registered().values(), Report(), policy=dict.fromkeys(registered(), "auto")
        )
        work.append(calls(run, graph))
    assert work[2] <= 3 * work[1]


def chain(length: int) -> fx.Graph:
    """Return the graph of x + y + y + ..."""
    graph = fx.Graph()
    x, y = (graph.placeholder(name) for name in "xy")
    for node in (x, y):
        node.meta["example_value"] = ONE
    for _ in range(length):
        x = graph.call_function(operator.add, (x, y))
        x.meta["example_value"] = ONE
    graph.output(x)
    return graph


def test_a_long_stream_is_followed_once_to_its_start():
    """For every sum, the last one first, the test asks whether it is a constant and whether it varies along an axis."""
    graph = chain(2000)
    view = GraphView(graph)
    ends = [node for node in graph.nodes if node.op == "call_function"][::-1]
    reader = graph.output_node()

    def ask() -> None:
        assert not any(view.const(node) == 0 or uniform(view, node, 1, reader) for node in ends)

    assert calls(ask) < 200 * len(ends)


def test_long_streams_are_compared_once():
    """For every pair of sums on two streams, the last ones first, the test asks whether they have the same value."""
    graph = chain(2000)
    x, y = graph.find_nodes(op="placeholder")
    first = [node for node in graph.nodes if node.op == "call_function"]
    second = []
    with graph.inserting_before(graph.output_node()):
        for _ in first:
            second.append(graph.call_function(operator.add, (second[-1] if second else x, y)))
            second[-1].meta["example_value"] = ONE
    view = GraphView(graph)

    def ask() -> None:
        assert all(map(view.same_value, first[::-1], second[::-1]))
        assert not any(map(view.same_value, first[:0:-1], second[-2::-1]))

    assert calls(ask) < 200 * len(first)


def test_inputs_and_modes_are_looked_at_once(monkeypatch):
    """This must not be repeated for every match."""
    seen: Counter = Counter()

    def counting(module: Any, name: str) -> None:
        usual = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: seen.update([name]) or usual(*args))

    counting(importlib.import_module("sparse_inductor.compat"), "given_class")
    for module in ("view", "modes"):
        counting(importlib.import_module(f"sparse_inductor.graph.{module}"), "modes_by_node")
    gm = capture(Encoder(3, F.relu), tensor(2, 3, 8))
    inputs = len(gm.graph.find_nodes(op="placeholder"))
    report = Report()
    RewritePass(registered().values(), report)(gm.graph)
    assert len(report.rewrites) == 3
    assert seen == {"given_class": inputs, "modes_by_node": 1}


@pytest.mark.parametrize("how", ["inplace", "statement", "einsum", "view"])
def test_one_look_tells_what_may_be_above(how):
    """It may report operations that are not above a node, as for a matmul or an einsum, but must not miss any."""
    w = tensor(4, 4)

    def program(x):
        h = F.linear(x, w)
        if how == "statement":
            h.relu_()
        elif how == "inplace":
            h = F.relu(h, True)
        elif how == "einsum":
            h = torch.einsum("bsd,d->bsd", h.relu(), w[0])
        else:
            h = h.relu().unsqueeze(1).transpose(2, 3)[:, 0].mT
        return torch.tanh(F.linear(h, w)) + h, F.linear(h * 2, w)

    view = GraphView(capture(program, tensor(2, 3, 4)).graph)
    for node in view.graph.nodes:
        for name in above(view, node) - {"linear", "batched matmul"}:
            assert may_be_above(view, [node], frozenset({name}))
    *_, last = (n for n in view.graph.nodes if view.name_of(n) == "linear")
    assert may_be_above(view, last.all_input_nodes, frozenset({"relu"}))
    assert not may_be_above(view, last.all_input_nodes, frozenset({"tanh"}))
