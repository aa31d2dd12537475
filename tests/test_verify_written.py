"""verify compares with the program that the user wrote, whatever the pattern overlooks.

The pattern of these tests is careless. It matches a maximum and the chain of first arguments that leads to it, and
recomputes this chain at the place of the maximum. It ignores writes and gradient modes, and drops casts and detach.
"""

from __future__ import annotations

import dataclasses
import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import sparse_inductor
from sparse_inductor import admission, pattern
from sparse_inductor.verify.writes import may_write
from support import compile_without_codegen
from writers import WRITERS, writer


@pytest.fixture(autouse=True)
def unchecked_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the pass's checks of matches, which would decline the careless pattern's mistakes before verify."""
    monkeypatch.setattr(admission, "check_match", lambda view, match: None)


DROPPED = ("to", "detach", "half", "float")


@dataclasses.dataclass
class CarelessMatch:
    anchor: fx.Node
    matched_nodes: tuple[fx.Node, ...]
    pattern: str = "careless"
    op: str = "amax"
    inputs: tuple[fx.Node, ...] = ()
    bytes_saved: int | None = None
    note: str = ""

    def replace(self) -> None:
        made: dict[fx.Node, fx.Node] = {}
        with self.anchor.graph.inserting_before(self.anchor):
            for node in self.matched_nodes:
                if node.target in DROPPED:
                    first = node.args[0]
                    made[node] = made.get(first, first)
                    continue
                made[node] = self.anchor.graph.node_copy(node, lambda n: made.get(n, n))
                made[node].meta = dict(node.meta)
        self.anchor.replace_all_uses_with(made[self.anchor])


class Careless:
    name, op, summary = "careless", "amax", "a chain -> itself, later"
    anchors = frozenset({"amax"})
    examples = near_misses = ()

    def match(self, node: fx.Node, view: object) -> CarelessMatch:
        chain = [node]
        while isinstance(first := chain[-1].args[0], fx.Node) and first.op != "placeholder":
            chain.append(first)
        return CarelessMatch(node, tuple(reversed(chain)))


@pytest.fixture(autouse=True)
def careless():
    pattern.register(Careless())
    sparse_inductor.enable(only="careless", verify=True)
    yield
    pattern.unregister("careless")


@torch.library.custom_op("test_verify_written::halve_", mutates_args={"x"})
def halve_(x: Tensor) -> None:
    x.mul_(0.5)


# Programs that the pattern gets wrong


def written_by(write):
    """Return a program that writes to the product before it is rectified."""

    def program(x, w, m):
        z = F.linear(x, w)
        write(z)
        return (z.relu() * m).amax(1)

    return program


def numpy_and_its_tensor_read(x, w, m):
    a = F.linear(x, w).relu() * m
    n = m.numpy()
    np.multiply(n, 3.0, out=n)
    return (a + m).amax(1)


def before_an_alias_is_read(x, w, m):
    alias = m[:, :, :1]
    a = F.linear(x, w).relu() * alias
    m.add_(1.0)
    return a.amax(1)


def sixteen_bits_between(x, w, m):
    return (F.linear(x, w).relu().to(torch.bfloat16).float() * m).amax(1)


def eight_bits_between(x, w, m):
    return (F.linear(x, w).relu().to(torch.float8_e4m3fn).to(torch.float32) * m).amax(1)


def scaled_without_gradient(z):
    with torch.no_grad():
        z.mul_(0.25)


def linear_under(mode):
    def program(x, w, m):
        with mode():
            z = F.linear(x, w)
        return (z.relu() * m).amax(1)

    return program


VALUES = {
    "through_detach": written_by(lambda z: z.detach().clamp_(-0.1, 0.1)),
    "through_data": written_by(lambda z: z.data.mul_(2.0)),
    "through_a_view": written_by(lambda z: z.mT[:, 0].fill_(3.0)),
    "numpy_and_its_tensor_read": numpy_and_its_tensor_read,
    "before_an_alias_is_read": before_an_alias_is_read,
    "sixteen_bits_between": sixteen_bits_between,
    "eight_bits_between": eight_bits_between,
}
GRADIENTS = {
    "scaled_without_gradient": written_by(scaled_without_gradient),
    "linear_without_gradient": linear_under(torch.no_grad),
    "island_of_inference": linear_under(torch.inference_mode),
    "cut": lambda x, w, m: (F.linear(x, w).detach().relu() * m).amax(1),
    "straight_through": written_by(lambda z: z.detach().round_()),
}


def arguments(training: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 3, 4, generator=generator), torch.randn(5, 4, generator=generator)
    return x.requires_grad_(training), w.requires_grad_(training), torch.full((2, 3, 5), 2.0)


def ran(fn, training: bool):
    """Run the program eagerly and compiled, and return verify's check and both (result, needs gradient, gradients)."""
    results = []
    with torch.set_grad_enabled(training):
        for program in (fn, compile_without_codegen(fn)):
            args = arguments(training)
            y = program(*args)
            grads = [None, None]
            if y.requires_grad:
                grads = torch.autograd.grad(y.sum(), args[:2], allow_unused=True)
            results.append(
                (y.detach(), y.requires_grad, [torch.zeros(()) if g is None else g for g in grads])
            )
    (check,) = sparse_inductor.report().checks
    return check, *results


def read_before(write):
    def program(x, w, m):
        a = F.linear(x, w).relu() * m
        write(m)
        return a.amax(1)

    return program


@pytest.mark.parametrize("name", [*VALUES, *WRITERS])
def test_values_are_those_of_the_program(name):
    fn = read_before(writer(name)) if name in WRITERS else VALUES[name]
    check, eager, got = ran(fn, training=False)
    assert check.verdict == "differs" and "result 0" in check.detail
    torch.testing.assert_close(got[0], eager[0])


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_the_program(name):
    check, eager, got = ran(GRADIENTS[name], training=True)
    assert check.verdict == "differs" and ("gradient" in check.detail or "result" in check.detail)
    torch.testing.assert_close(got[0], eager[0])
    if eager[1]:  # without gradients there is nothing to compare
        torch.testing.assert_close(got[2], eager[2])


# Programs that the pattern gets right: writes without effect on it, and in-place steps that it repeats


def written_afterwards(x, w, m):
    y = (F.linear(x, w).relu() * m).amax(1)
    m.zero_()
    return y


def written_before(x, w, m):
    m.mul_(0.5)
    return (F.linear(x, w).relu() * m).amax(1)


def something_else_is_written(x, w, m):
    other = torch.zeros(3)
    z = F.linear(x, w)
    other.add_(1.0)
    return (z.relu() * m).amax(1) + other[0]


def counted(x, w, m):
    a = F.linear(x, w).relu()
    count = (a > 0).sum()
    return (a * m).amax(1) + count


def in_place(x, w, m):
    return F.linear(x, w).mul_(2.0).relu_().mul(m).amax(1)


def part_of_the_result_is_written(x, w, m):
    y = (F.linear(x, w).relu() * m).amax(1)
    y[..., 0].zero_()
    return y


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "fn",
    [written_afterwards, written_before, something_else_is_written, counted, in_place, part_of_the_result_is_written],
    ids=lambda fn: fn.__name__,
)  # fmt: skip
def test_what_is_right_agrees(fn, training):
    if fn in (written_afterwards, part_of_the_result_is_written) and training:
        pytest.skip("eager refuses it: it was saved for the backward")
    check, eager, got = ran(fn, training)
    assert check.verdict == "agrees", check.detail
    torch.testing.assert_close(got[0], eager[0])
    torch.testing.assert_close(got[2], eager[2])


def test_who_may_write():
    graph = fx.Graph()
    x, m = graph.placeholder("x"), graph.placeholder("m")
    call, method = graph.call_function, graph.call_method
    reads = [
        call(operator.add, (x, 1)),
        call(torch.relu, (x,)),
        call(F.relu, (x, False)),
        call(F.dropout, (x, 0.5, True, False)),
        call(torch.ops.aten.mul.Tensor, (x, 2)),
        call(torch.ops.aten.mul, (x, 2)),
        call(torch.ops.aten.mT, (x,)),
        call(F.embedding, (m, x)),
        method("mul", (x, 2)),
        method("__getitem__", (x, 0)),
    ]
    writes = [
        call(operator.iadd, (x, 1)),
        call(operator.setitem, (x, 0, 1)),
        call(F.relu, (x, True)),
        call(F.relu, (x,), {"inplace": True}),
        call(torch.mul, (x, 2), {"out": m}),
        call(torch.ops.aten.mul_.Tensor, (x, 2)),
        call(torch.ops.aten.mul_, (x, 2)),
        call(torch.ops.aten.mul, (x, 2), {"out": m}),
        call(torch.ops.test_verify_written.halve_.default, (x,)),
        call(np.multiply, (x, 2)),
        call(torch.ops.higher_order.cond, (x, None, None, (m,))),
        call(F.embedding, (m, x, None, 1.0)),
        method("mul_", (x, 2)),
        method("numpy", (x,)),
    ]
    assert [n for n in reads if may_write(n)] == []
    assert [n for n in writes if not may_write(n)] == []
