"""The shared tables of operations against the operations themselves: each row of a table is a separate test."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses import FakeTensorMode

import test_match
from sparse_inductor.graph.contraction import Contraction, contraction
from sparse_inductor.graph.effects import Effects
from sparse_inductor.graph.fakes import complete, fake
from sparse_inductor.graph.indices import taken
from sparse_inductor.graph.names import name_of
from sparse_inductor.graph.selection import Assigned, selections
from sparse_inductor.graph.shapes import order_of
from sparse_inductor.graph.view import GraphView, label
from sparse_inductor.graph.vocabulary import COPIES, PARTS, REGROUPS, REORDERS, SHAPE_OPS, SPREADS
from test_match import capture, returned, tensor

aten = torch.ops.aten
X, Y = tensor(2, 3, 4), tensor(2, 3, 4, seed=1)


def traced(fn: Callable, *args: Any) -> tuple[GraphView, fx.Node, list[torch.Tensor]]:
    """Capture a call; return its `GraphView`, the returned node, and the arguments in the order of the inputs."""
    gm = capture(fn, *args)
    given = {tuple(a.shape): a for a in args}
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return GraphView(gm.graph), returned(gm), [given[tuple(fake(n).shape)] for n in inputs]


def run_up_to(node: fx.Node, *args: Any) -> torch.Tensor:
    """Return the value of a node of the graph for these inputs."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for n in node.graph.nodes:
        if n.op != "output":
            known[n] = graph.node_copy(n, known.__getitem__)
        if n is node:
            break
    graph.output(known[node])
    for n in node.graph.nodes:
        if n.op == "placeholder" and n not in known:
            known[n] = graph.node_copy(n)
    return fx.GraphModule(node.graph.owning_module, graph)(*args)


def test_a_call_that_no_table_knows_has_its_own_name():
    """Dynamo names a node after the program's variable, so the node's name must not be used."""

    def assigned(x):
        mine = x.masked_scatter(x > 0, x)
        return mine

    def of_torch(x):
        mine = torch.masked_scatter(x, x > 0, x)
        return mine

    for fn in (assigned, of_torch):
        assert label(returned(capture(fn, X))) == "masked_scatter"


# Copies, views

_COPIES = {
    "contiguous": lambda x: x.mT.contiguous(),
    "clone": lambda x: x.clone(),
    "alias": lambda x: aten.alias.default(x),
    "lift_fresh": lambda x: aten.lift_fresh.default(x),
    "positive": lambda x: +x,
}
_VIEWS: dict[str, Callable] = {
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.swapaxes(0, -1),
    "movedim": lambda x: x.moveaxis((0, 1), (-1, 0)),
    "T": lambda x: x[0].T,
    "mT": lambda x: x.clone().mT,
    "t": lambda x: x[0].t(),
    "view": lambda x: x.reshape(6, -1),
    "view_as": lambda x: x.reshape_as(x.new_empty(3, 8)),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(-1, (2, 2)),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "expand": lambda x: x[:, :1].broadcast_to(2, 5, 4),
    "expand_as": lambda x: x[:, :1].expand_as(x),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "select": lambda x: x.select(0, 1),
    "slice": lambda x: aten.slice.Tensor(x, 1, 0, 2),
    "index_select": lambda x: x.index_select(2, torch.tensor([3, 1])),
    "getitem": lambda x: x[..., 1:3],
}


def test_every_row_is_walked():
    assert set(_COPIES) == COPIES and set(_VIEWS) == SHAPE_OPS
    assert REORDERS | REGROUPS | SPREADS <= SHAPE_OPS and PARTS.isdisjoint(SHAPE_OPS)


@pytest.mark.parametrize("name", _COPIES)
def test_copies_keep_values_and_gradients(name):
    view, node, (x,) = traced(_COPIES[name], X)
    assert name_of(node) == name
    inner = view.kept(view.call(node))
    assert inner is not None
    x = x.clone().requires_grad_()
    before, after = run_up_to(inner, x), run_up_to(node, x)
    assert torch.equal(before, after) and after.dtype == x.dtype
    (grad,) = torch.autograd.grad(after.sum(), x)
    assert torch.equal(grad, torch.ones_like(x))


@pytest.mark.parametrize("name", _VIEWS)
def test_views_only_move_elements(name):
    """A view of numbered elements has some of them; one that reorders or regroups has each of them once."""
    view, node, (x,) = traced(_VIEWS[name], X)
    call = view.call(node)
    assert call.name == name
    numbered = torch.arange(x.numel()).view_as(x)
    before, after = run_up_to(call["input"], numbered), run_up_to(node, numbered)
    assert set(after.flatten().tolist()) <= set(before.flatten().tolist())
    if name in REORDERS | REGROUPS:
        assert sorted(after.flatten().tolist()) == sorted(before.flatten().tolist())
    order = order_of(call, before.dim())
    assert (order is not None) == (name in REORDERS)
    if order is not None:
        assert torch.equal(before.permute(order), after)
    elif name in REGROUPS:
        assert torch.equal(before.flatten(), after.flatten())


_TAKEN: dict[str, Callable] = {
    "getitem": lambda x: x[:, 1, None, ::2],
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "squeeze_of_more": lambda x: x.squeeze(1),
    "squeeze_of_a_number": lambda x: x.sum().squeeze(-1),
    "select": lambda x: x.select(-1, 2),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "slice": lambda x: aten.slice(x, 1, 1, None, 2),
    "chunk": lambda x: x.chunk(2, 1)[-1],
    "split": lambda x: x.split([1, 3], -1)[1],
    "unbind": lambda x: x.unbind(1)[2],
}


@pytest.mark.parametrize("name", _TAKEN)
def test_what_is_taken_is_an_index(name):
    view, node, (x,) = traced(_TAKEN[name], X)
    part = taken(view, view.call(node))
    numbered = torch.arange(x.numel()).view_as(x)
    assert torch.equal(run_up_to(part.x, numbered)[tuple(part.items)], run_up_to(node, numbered))


def test_an_index_of_no_axes_leaves_an_axis_of_one_element():
    view, node, _ = traced(lambda x, i: x.index_select(1, i), X, torch.tensor(2))
    assert taken(view, view.call(node)) is None and fake(node).shape == (2, 1, 4)


def test_an_einsum_of_one_tensor_puts_its_axes_in_another_order():
    for fn in (
        lambda x: torch.einsum("a b c -> c a b", x),
        lambda x: torch.einsum(x, [0, 1, 2], [2, 0, 1]),
    ):
        view, node, _ = traced(fn, X)
        assert order_of(view.call(node), 3) == [2, 0, 1]
    for fn in (lambda x: torch.einsum("abc->ac", x), lambda x: torch.einsum("abb->ab", x[..., :3])):
        assert name_of(traced(fn, X)[1]) == "einsum"


# Products

A, W, V1, BIAS = tensor(2, 5, 4), tensor(6, 4, seed=1), tensor(4, seed=2), tensor(6, seed=3)
_PRODUCTS: dict[str, tuple[Callable, tuple[torch.Tensor, ...]]] = {
    **{name: (fn, test_match.OPERANDS) for name, fn in test_match.GEMMS.items()},
    "linear_of_a_vector": (lambda v, w: F.linear(v, w), (V1, W)),
    "matmul_broadcast": (lambda a, b: a[:, None] @ b, (A, tensor(3, 4, 7))),
    "mv": (lambda w, v: torch.mv(w, v), (W, V1)),
    "vector_first": (lambda v, a: v @ a.mT, (V1, A)),
    "bmm_of_two": (lambda a, b: torch.bmm(a, b), (A, tensor(2, 4, 3))),
    "addmm_scaled": (lambda a, w, b: torch.addmm(b, a[0], w.t(), beta=3, alpha=0.7), (A, W, BIAS)),
    "baddbmm_scaled": (
        lambda a, b, c: torch.baddbmm(c, a, b, alpha=2),
        (A, tensor(2, 4, 3), tensor(2, 5, 3)),
    ),
    "einsum_batched": (
        lambda a, b: torch.einsum("bid,bjd->bij", a, b),
        (A, tensor(2, 3, 4)),
    ),
    "einsum_of_numbers": (
        lambda a, b: torch.einsum(a, [1, 0, 3], b, [1, 5, 3], [1, 5, 0]),
        (A, tensor(2, 3, 4)),
    ),
    "einsum_of_numbers_and_ellipsis": (
        lambda a, w: torch.einsum(a, [..., 3], w, [7, 3]),
        (A, W),
    ),
    "einsum_outer": (lambda v, b: torch.einsum("i,j->ji", v, b), (V1, BIAS)),
    "tensordot_number": (lambda a, b: torch.tensordot(a, b, 2), (tensor(3, 5, 4), tensor(5, 4, 2))),
    "vecdot": (lambda a, v: torch.linalg.vecdot(a, v), (A, V1)),
    "vecdot_along_another": (
        lambda a, b: torch.linalg.vecdot(a, b, dim=1),
        (A, tensor(2, 5, 1)),
    ),
    "conv2d": (
        lambda x, w: F.conv2d(x, w, padding="same"),
        (tensor(2, 4, 3, 5), tensor(6, 4, 1, 1)),
    ),
    "multiplied_and_summed": (lambda a, v: (a * v).sum(-1), (A, V1)),
    "summed_and_kept": (
        lambda a, b: (a[:, :, None] * b).sum(3, keepdim=True),
        (A, tensor(3, 4)),
    ),
}  # fmt: skip


def computed(product: Contraction, args: list[torch.Tensor]) -> torch.Tensor:
    """Compute scale * a * b, summed over axes that the result lacks, plus the bias, from the axes' letters alone."""
    letters = {}
    for o in product.operands:
        for letter in o.axes:
            letters.setdefault(letter, "abcdefghijkl"[len(letters)])
    values = [run_up_to(o.node, *args) for o in product.operands]
    values = [
        t.squeeze([d for d, letter in enumerate(o.axes) if letter is None])
        for t, o in zip(values, product.operands)
    ]
    sides = ["".join(letters[c] for c in o.axes if c is not None) for o in product.operands]
    out = "".join(letters[c] for c in product.axes if c is not None)
    result = product.scale * torch.einsum(f"{sides[0]},{sides[1]}->{out}", *values)
    for d, letter in enumerate(product.axes):
        if letter is None:
            result = result.unsqueeze(d)
    if product.bias is not None:
        bias, factor = product.bias
        b = run_up_to(bias, *args)
        ones = [1] * (-1 - product.bias_dim)
        result = result + factor * b.reshape(*b.shape, *ones)
    return result


@pytest.mark.parametrize("name", _PRODUCTS)
def test_every_product_is_its_letters(name):
    fn, args = _PRODUCTS[name]
    view, node, given = traced(fn, *args)
    product = contraction(view, node)
    assert product is not None
    torch.testing.assert_close(computed(product, given), fn(*args))


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, w: torch.einsum("bdd->b", a[:, :4]),
        lambda a, w: F.conv1d(a.mT, w[..., None], stride=2),
        lambda a, w: F.conv1d(a.mT, w[..., None], padding=1),
        lambda a, w: torch.linalg.multi_dot([a[0], w.t(), w]),
        lambda a, w: (a * a).sum(),
        lambda a, w: a * a,
    ],
)
def test_what_is_no_product_of_two(fn):
    view, node, _ = traced(fn, A, W)
    assert contraction(view, node) is None


# Selections

M, COLUMN = X > 0, torch.tensor([True, False, True, False])
_SELECTIONS: dict[str, Callable] = {
    "where": lambda x, m, c: torch.where(m, x, 7.0),
    "where_negated": lambda x, m, c: torch.where(m, 7.0, x),
    "where_method": lambda x, m, c: x.where(m, 7.0),
    "masked_fill": lambda x, m, c: x.masked_fill(m, 7.0),
    "index_fill": lambda x, m, c: x.index_fill(-1, torch.tensor([0, 2]), 7.0),
    "index_put": lambda x, m, c: x.index_put((m,), torch.tensor(7.0)),
    "index_put_rows": lambda x, m, c: x.index_put((torch.tensor([0]),), torch.tensor(7.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", _SELECTIONS)
def test_every_selection_keeps_what_it_says(name):
    args = (X, M, COLUMN)
    gm = capture(_SELECTIONS[name], *args)
    view, node = GraphView(gm.graph), returned(gm)
    given = [X if fake(n).dtype.is_floating_point else M if fake(n).dim() == 3 else COLUMN
             for n in gm.graph.nodes if n.op == "placeholder"]  # fmt: skip
    (one,) = (s for s in selections(view, view.call(node)) if view.const(s.other, node) == 7)
    x = run_up_to(one.x, *given)
    if isinstance(one.keep, Assigned):
        kept = torch.ones_like(x, dtype=torch.bool)
        index = fx.map_arg(one.keep.index, lambda n: run_up_to(n, *given))
        kept[index] = False
    else:
        mask = run_up_to(one.keep, *given)
        kept = ~mask if one.negate else mask
    assert torch.equal(torch.where(kept, x, 7.0), _SELECTIONS[name](*args))


# Memory


def parts_of(base: torch.Tensor, rng: random.Random) -> torch.Tensor:
    t = base
    for _ in range(rng.randint(1, 3)):
        dim = rng.randrange(t.dim())
        size = t.size(dim)
        match rng.randrange(4):
            case 0:
                start = rng.randrange(size)
                t = t.narrow(dim, start, rng.randint(1, size - start))
            case 1:
                t = t.movedim(dim, 0)[:: rng.randint(1, 2)]
            case 2 if size % 2 == 0:
                t = t.unflatten(dim, (2, -1)).select(dim + rng.randrange(2), 0)
            case _ if t.dim() > 1:
                t = t.select(dim, rng.randrange(size))
    return t


def test_parts_that_are_apart_share_no_element():
    """Random parts of a tensor that are reported as disjoint share no element; most disjoint pairs are reported."""
    rng = random.Random(0)
    said = apart = 0
    mode = FakeTensorMode()
    for _ in range(150):
        base = torch.arange(2 * 6 * 8).view(2, 6, 8)
        parts = [parts_of(base, rng) for _ in range(2)]
        graph = fx.Graph()
        x = graph.placeholder("x")
        nodes = [graph.call_function(torch.clone, (x,)) for _ in parts]
        fakes = mode.from_tensor(base)
        x.meta["example_value"] = fakes
        for node, part in zip(nodes, parts):
            with mode:
                node.meta["example_value"] = fakes.as_strided(
                    part.shape, part.stride(), part.storage_offset()
                )
        writer = graph.call_method("zero_", (nodes[0],))
        writer.meta["example_value"] = fake(nodes[0])
        reader = graph.call_function(torch.clone, (nodes[1],))
        reader.meta["example_value"] = fake(nodes[1])
        graph.output((reader,))
        effects = Effects(graph)
        unseen = not effects.changes(nodes[1], nodes[1], reader)
        disjoint = not {*parts[0].flatten().tolist()} & {*parts[1].flatten().tolist()}
        assert disjoint or not unseen
        said, apart = said + unseen, apart + disjoint
    assert said > apart / 2


def test_values_that_an_earlier_pass_left_out_are_filled_in():
    """Inductor moves functions before a concatenation, and gives the new nodes no example values."""
    linear = nn.Linear(4, 6)
    gm = capture(lambda x, y: linear(torch.tanh(x + y)).relu(), X, Y)
    for node in gm.graph.nodes:
        if name_of(node) in ("add", "tanh"):
            del node.meta["example_value"]
    complete(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert fake(node).shape[:2] == (2, 3) and fake(node).requires_grad == (
                name_of(node) not in ("add", "tanh")
            )
