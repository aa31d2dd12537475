"""Dynamo sees the entmax package's functions as nodes; otherwise it behaves as without the plugin."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._dynamo.exc import InternalTorchDynamoError
from torch.func import grad, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import sparse_inductor
from corpus.entmax.hand_written import Bisect
from fuzz.vocabulary import Doubling
from sparse_inductor import compat, rewrite
from sparse_inductor.graph import trial
from sparse_inductor.match.entmax import leaves
from sparse_inductor.testing import compile_without_codegen
from support import heavy, only

entmax = pytest.importorskip("entmax")

# Weights of the outputs in the loss: the sum of a row of probabilities alone has no gradient.
WEIGHTS = torch.linspace(-1, 2, 7)
TRANSFORMS = {
    "vmap": lambda t, x: vmap(t)(x),
    "grad": lambda t, x: vmap(grad(lambda row: (t(row) * WEIGHTS).sum()))(x),
    "jacrev": lambda t, x: jacrev(lambda row: t(row))(x[0]),
    "jvp": lambda t, x: jvp(lambda row: t(row), (x[0],), (WEIGHTS,))[1],
}
ROWS = {
    "sparsemax": lambda row: entmax.sparsemax(row, 0),
    "entmax15": lambda row: entmax.entmax15(row, dim=-1),
    "entmax_bisect": lambda row: entmax.entmax_bisect(row, 1.3, 0),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("rows", ["sparsemax", "entmax15", heavy("entmax_bisect")])
def test_inside_a_transform_the_packages_own_function_is_traced(transform, rows):
    def program(x):
        return TRANSFORMS[transform](ROWS[rows], x)

    x = torch.randn(3, 7)

    def run():
        torch._dynamo.reset()
        try:
            return torch.compile(program, backend="aot_eager", fullgraph=True)(x)
        except Exception as error:  # Dynamo cannot differentiate every bisection
            return type(error)

    expected = run()
    assert rows == "entmax_bisect" or isinstance(expected, torch.Tensor)
    with only("entmax", "entmax_attention"):
        got = run()
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected)
    else:
        assert got is expected


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("alpha", (0.7, 1.5))
def test_what_is_declined_is_told_once_at_the_users_line(training, alpha):
    """Without a rewrite, Dynamo traces the package's code in place of the call; in training it breaks the graph there
    and compiles that code separately."""

    def program(q, k, v):
        return entmax.entmax_bisect(q @ k.mT, alpha=alpha, n_iter=5) @ v

    given = [torch.randn(2, 3, 7, requires_grad=training) for _ in "qkv"]
    with only("entmax", "entmax_attention") as report:
        compile_without_codegen(program)(*given)
        (miss,) = report.near_misses
    assert miss.location.startswith("test_entmax_dynamo.py:") and "n_iter=5" in miss.source


def test_the_rewrites_of_a_graph_that_dynamo_discards_are_not_counted():
    """Dynamo first tries a symbolic float, and restarts with a constant after the passes have run."""

    def program(x, y, factor):
        return entmax.sparsemax(torch.addmm(x, y, y.t(), alpha=factor), -1) @ y

    with only("entmax", "entmax_attention") as report:
        compile_without_codegen(program, dynamic=True)(torch.randn(7, 7), torch.randn(7, 5), 0.3)
        (miss,) = report.near_misses
        assert report.graphs == 1 and "alpha that is not a constant" in miss.reason
        assert [r.pattern for r in report.rewrites] == ["entmax_attention"]


def test_the_packages_code_under_a_call_that_stays_as_written_is_no_near_miss():
    with sparse_inductor.enabled(policy="auto"):
        report = sparse_inductor.report()
        report.clear()
        rows = compile_without_codegen(lambda x: entmax.sparsemax(x, -1).exp())
        rows(torch.randn(3, 7, requires_grad=True)).sum().backward()
        assert report.pending and not report.near_misses


@pytest.mark.parametrize("steps", (20, 50))
def test_a_bisection_that_is_not_renormalised_is_judged_once(steps):
    def program(x):
        return entmax.entmax_bisect(x, 1.3, n_iter=steps, ensure_sum_one=False)

    with only("entmax") as report:
        compile_without_codegen(program)(torch.randn(3, 7, requires_grad=True)).sum().backward()
        (rewrite,) = report.rewrites
    assert rewrite.replaced == ("entmax_bisect",) and not report.near_misses


def test_a_bisection_of_single_scores_that_are_masked():
    """As of the first token that is decoded; a masked one is NaN in both."""

    def program(x, keep):
        return entmax.entmax_bisect(x.masked_fill(~keep, -1e9), 1.5, n_iter=30)

    x, keep = torch.randn(4, 1), torch.tensor([[True], [False], [True], [True]])
    with only("entmax") as report, torch.no_grad():
        got = compile_without_codegen(program)(x, keep)
        assert len(report.rewrites) == 1 and not rewrite.failures
    torch.testing.assert_close(got, program(x, keep), equal_nan=True)


def test_a_bisection_that_is_not_renormalised_has_no_nan_for_large_scores():
    """For scores with x - 1 == x in fp32, renormalising divides 0 by 0."""

    def program(x):
        return entmax.entmax_bisect(x, 1.5, ensure_sum_one=False)

    x = 1e7 * torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
    assert entmax.entmax_bisect(x, 1.5).isnan().any(), "no longer the case this test is about"
    with only("entmax") as report, torch.no_grad():
        got = compile_without_codegen(program)(x)
        assert len(report.rewrites) == 1
    torch.testing.assert_close(got, entmax.entmax15(x.double()).float())
    lost = torch.full((2, 33), -torch.inf)
    with only("entmax"), torch.no_grad():
        torch.testing.assert_close(
            compile_without_codegen(program)(lost), program(lost), equal_nan=True
        )


@pytest.mark.parametrize(
    ("fill", "dtype"),
    [(None, torch.float32), (-1e9, torch.float32), heavy(-1e4, torch.bfloat16)],
)
def test_a_bisection_that_is_not_renormalised_makes_zeros_of_rows_masked_with_large_numbers(
    fill, dtype
):
    """For such a number x, x - 1 == x, so the bisection gives zeros; the operator gives equal probabilities."""

    def program(x, keep):
        number = torch.finfo(x.dtype).min if fill is None else fill
        return entmax.entmax_bisect(x.masked_fill(~keep, number), 1.5, ensure_sum_one=False)

    x, keep = torch.randn(4, 33).to(dtype), torch.zeros(4, 33, dtype=torch.bool)
    assert not program(x, keep).any(), "no longer the case this test is about"
    with only("entmax") as report, torch.no_grad():
        compile_without_codegen(program)(x, keep)
    (miss,) = report.near_misses
    assert not report.rewrites and "zero in a row that is masked throughout" in miss.reason


def test_beside_a_transform_calls_are_rewritten():
    def program(x):
        return vmap(ROWS["sparsemax"])(x) + entmax.sparsemax(x, -1)

    x = torch.randn(3, 7)
    with only("entmax") as report, torch.no_grad():
        torch.testing.assert_close(compile_without_codegen(program)(x), 2 * entmax.sparsemax(x, -1))
        assert [r.replaced for r in report.rewrites] == [("sparsemax",)]


def masked_assignment(z, ok):
    s = torch.full_like(z, -torch.inf)
    s[ok] = z[ok]
    return entmax.entmax15(s, -1)


def beside(z, ok):
    """Call sparsemax beside an unrelated operation that the backend cannot compile."""
    p = entmax.sparsemax(z, -1)
    s = torch.zeros_like(z)
    s[ok] = z[ok] * 2
    return p * s


@pytest.mark.parametrize("program", [masked_assignment, beside])
def test_what_a_backend_cannot_compile_is_a_graph_break(program):
    ok = torch.ones(4, 7, dtype=torch.bool).tril(2)
    z = torch.randn(4, 7, requires_grad=True)
    expected = program(z, ok)
    wanted = torch.autograd.grad((expected * WEIGHTS).sum(), z)
    with only("entmax"):
        got = compile_without_codegen(program)(z, ok)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad((got * WEIGHTS).sum(), z), wanted)


def written_behind(linear, x):
    h = torch.relu(x)
    p = entmax.entmax15(linear(h), -1)
    return p, h.add_(1)


def residual(linear, x):
    h = x * 2
    h += entmax.sparsemax(linear(h), -1)
    return h, x


class CopiedSquare(torch.autograd.Function):
    """A Function with class methods, as in the package."""

    @classmethod
    def forward(cls, ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @classmethod
    def backward(cls, ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def written_behind_a_copy(linear, x):
    h = torch.relu(x)
    return CopiedSquare.apply(linear(h)), h.add_(1)


@pytest.mark.parametrize("program", [written_behind, residual, written_behind_a_copy])
def test_what_autograd_saved_is_written_behind_a_call(program):
    """Dynamo alone breaks the graph at the call, and a program without a backward runs."""
    linear, x = torch.nn.Linear(7, 7), torch.randn(4, 7)
    with only("entmax"):
        got = compile_without_codegen(program)(linear, x)
    torch.testing.assert_close(got, program(linear, x))


def written_by_a_checkpoint(linear, x):
    checkpoint(lambda w: w.mul_(0.5), linear.weight.detach(), use_reentrant=False)
    return entmax.sparsemax(linear(x), -1)


def result_of_a_checkpoint_written_to(linear, x):
    p = checkpoint(lambda z: entmax.sparsemax(z, -1), linear(x), use_reentrant=False)
    return p.add_(0.5)


def list_with_a_checkpoint_s_result_written_to(linear, x):
    p = checkpoint(lambda z: entmax.entmax_bisect(z, 1.3), linear(x), use_reentrant=False)
    torch._foreach_mul_([p], 2.0)
    return p


def view_of_a_checkpoint_s_result_written_to(linear, x):
    p, z = checkpoint(lambda z: (entmax.entmax15(z, -1), z * 2), linear(x), use_reentrant=False)
    p.mT.data[0].zero_()
    return p, z


def region_that_returns_its_input(linear, x):
    region = torch.compiler.nested_compile_region(lambda z: (entmax.sparsemax(z, -1), z))
    return region(linear(x))


def one_result_without_gradient(linear, x):
    region = torch.compiler.nested_compile_region(lambda z, x: (entmax.entmax15(z, -1), x.exp()))
    return region(linear(x), x.detach())


def given_other_memory(linear, x):
    p = entmax.entmax15(linear(x), -1)
    linear.weight.data = linear.weight.data * 2.0
    return p


def written_to_a_module(linear, x):
    linear.scale *= 0.5
    return entmax.sparsemax(linear(x), -1), x.exp() * linear.scale


def view_and_what_is_detached(linear, x):
    z = linear(x).mT
    return entmax.sparsemax(z, -1), z, z.detach()


APART = [
    result_of_a_checkpoint_written_to,
    list_with_a_checkpoint_s_result_written_to,
    view_of_a_checkpoint_s_result_written_to,
    region_that_returns_its_input,
    one_result_without_gradient,
    written_to_a_module,
    view_and_what_is_detached,
]


def module_and_inputs():
    linear = torch.nn.Linear(7, 7)
    with torch.no_grad():
        linear.weight.copy_(torch.linspace(-1, 1, 49).cos().view(7, 7))
        linear.bias.zero_()
    linear.register_buffer("scale", torch.full((7,), 2.0), persistent=False)
    return linear, torch.linspace(-2, 3, 28).sin().view(4, 7).requires_grad_()


def trained(compiled):
    linear, x = module_and_inputs()
    results = compiled(linear, x)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((r * r).sum() for r in results)
    return results, torch.autograd.grad(loss, [x, linear.weight])


@pytest.mark.parametrize("program", APART)
def test_what_torch_alone_compiles_apart_from_a_call(program):
    """torch compiles these programs wrongly or not at all if the call is in the same graph as the rest.

    AOTAutograd saves the results of a checkpoint, although they are written to later. It recomputes from a module's
    tensor in the backward, and assumes that the tensor does not change. Dynamo refuses a region that returns its input.
    Up to torch 2.11, all results of a region require a gradient. Views of one tensor get each other's shapes.
    """
    with only("entmax"):
        got = trained(compile_without_codegen(program))
    expected = trained(program)
    assert [r.requires_grad for r in got[0]] == [r.requires_grad for r in expected[0]]
    torch.testing.assert_close(got, expected)


def test_results_of_several_parts_are_differentiated_apart():
    """In one graph, the second backward would fail, and the first would give zeros in place of None."""

    def program(linear, x, scores):
        return torch.tanh(x), linear(entmax.sparsemax(scores, -1))

    def outcome(compiled):
        (linear, x), scores = module_and_inputs(), torch.ones(4, 7, requires_grad=True)
        found = []
        for result in compiled(linear, x, scores):
            result.square().sum().backward()
            found += [t.grad for t in (linear.weight, x, scores)]
        return found

    expected = outcome(compile_without_codegen(program))
    assert expected[0] is None
    with only("entmax"):
        got = outcome(compile_without_codegen(program))
    torch.testing.assert_close(got, expected)


def test_results_behind_one_another_stay_in_one_graph():
    def program(x):
        z = x * 2
        p = entmax.sparsemax(z, -1)
        y = p.exp()
        return z, z.view(-1), p, y, y.sin(), z.sum()

    with only("entmax") as report:
        compiled = compile_without_codegen(program)
        compiled(torch.randn(4, 7, requires_grad=True))
        assert compiled.dynamo_graphs == 1 and len(report.rewrites) == 1


def test_what_ends_at_a_call_is_a_near_miss():
    """The body of the checkpoint was rewritten before Dynamo restarted; that rewrite must not be in the report."""
    with only("entmax") as report:
        trained(compile_without_codegen(result_of_a_checkpoint_written_to))
        assert not report.rewrites
        (miss,) = report.near_misses
    assert miss.pattern == "entmax" and "checkpoint whose result is written to" in miss.reason
    assert "sparsemax" in miss.source


@pytest.mark.parametrize("program", [written_by_a_checkpoint, given_other_memory])
def test_what_becomes_of_it_is_what_torch_alone_makes_of_it(program):
    """In one graph with the call, the backward would repeat a checkpoint's write, or read a weight's earlier memory.

    With two graphs, up to torch 2.13, the backward raises.
    """

    def outcome():
        torch._dynamo.reset()
        try:
            return trained(compile_without_codegen(program))
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            return None

    alone = outcome()
    assert alone is None or torch.__version__ >= (2, 14)
    with only("entmax"):
        torch.testing.assert_close(outcome(), alone)


def test_a_backend_for_debugging_compiles_what_it_does_without_us():
    def program(x):
        return entmax.sparsemax(x * 2, -1).sin()

    def graphs():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.compile(program, backend="aot_eager")(torch.randn(4, 7, requires_grad=True))
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    alone = graphs()
    with only("entmax"):
        assert graphs() == alone


def test_the_body_of_a_function_is_tried_as_it_is(monkeypatch):
    """The body is not copied for each kind of rows, which would take longer than running it."""
    monkeypatch.setattr(trial, "compat", None)
    x = torch.randn(4, 11, requires_grad=True)
    with only("entmax") as report:
        torch.testing.assert_close(
            compile_without_codegen(lambda x: Bisect.apply(x, 1.5))(x), Bisect.apply(x, 1.5)
        )
        assert report.rewrites


def test_what_is_tried_out_leaves_no_mode_behind(capfd):
    """Autocast does not affect fake tensors within inference_mode, and a failing trial must not leave the mode on."""

    def program(x, w):
        y = entmax.sparsemax(x @ x.mT, -1) @ x
        y.add_(1)
        with torch.inference_mode():
            return torch.einsum("...d,vd->...v", y, w)

    def backend(gm, inputs):
        return compat.pre_grad_passes(gm, inputs).forward

    x, w = torch.randn(2, 4, 7, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    with only("entmax_attention", "entmax") as report, torch.autocast("cpu"):
        got = torch.compile(program, backend=backend)(x, w)
        torch.testing.assert_close(got, program(x, w), rtol=0.1, atol=0.1)
        assert report.rewrites and not rewrite.failures
    assert "failed" not in capfd.readouterr().err


def test_a_call_that_is_not_rewritten_ends_the_graph_as_without_the_plugin():
    def program(x):
        return entmax.sparsemax(x * 2, -1).sin()

    def outcome(compiled):
        x = inputs.clone().requires_grad_()
        y = compiled(x)
        return y, *torch.autograd.grad((y * WEIGHTS).sum(), x)

    def graphs(**options):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        got = outcome(compile_without_codegen(program, **options))
        torch.testing.assert_close(got, outcome(program))
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    inputs = torch.randn(4, 7)
    alone = graphs()
    assert alone > 1 or torch.__version__ >= (2, 14), "it is traced without us"
    with sparse_inductor.enabled(policy="auto"):
        sparse_inductor.report().clear()
        assert graphs() == alone
        pending = sparse_inductor.report().pending
        assert "test_entmax_dynamo" in pending[0].location
        assert graphs(fullgraph=True) == 1


def test_a_compile_that_restarts_at_a_call_reports_each_block_once():
    up, down = torch.nn.Linear(7, 16), torch.nn.Linear(16, 7)

    def program(x, z):
        return down(torch.relu(up(x))) + entmax.entmax15(z, dim=-1)

    with sparse_inductor.enabled(policy="auto"):
        report = sparse_inductor.report()
        report.clear()
        compile_without_codegen(program)(torch.randn(3, 7), torch.randn(3, 7, requires_grad=True))
        here = [p.pattern for p in report.pending if "test_entmax_dynamo" in p.location]
    # From torch 2.14 on, Dynamo does not compile the part in front of the call.
    assert sorted(here) == (["entmax", "relu_ffn"] if torch.__version__ < (2, 14) else ["entmax"])


def test_what_dynamo_cannot_trace_behind_a_call():
    """Up to torch 2.13, in one graph with the call, `cond` refuses sizes that come from a product of equal symbols."""

    def program(x):
        y = torch.nn.functional.layer_norm(entmax.sparsemax(x @ x.mT, -1) @ x, (7,))
        return torch.cond(y.sum() > -99.0, lambda y, w: (y @ w).exp(), lambda y, w: y @ w, (y, w))

    def outcome(compiled):
        torch._dynamo.reset()  # eager's `cond` is compiled, too
        x = inputs.clone().requires_grad_()
        y = compiled(x)
        return y, *torch.autograd.grad((y * WEIGHTS).sum(), x)

    inputs, w = torch.randn(4, 4, 7).double(), torch.randn(7, 7).double()
    expected = outcome(program)
    with only("entmax"):
        got = outcome(compile_without_codegen(program, dynamic=True))
    torch.testing.assert_close(got, expected)


def test_an_axis_that_is_a_symbol():
    """The package's function is compiled separately. Its axis is an input of the graph, unused after rewriting."""
    written = torch.zeros(8)

    def program(x, dim):
        p = entmax.sparsemax(x, dim=dim)
        checkpoint(lambda t: t.mul_(0.5), written, use_reentrant=False)
        return p

    with only("entmax") as report:
        compiled = compile_without_codegen(program, dynamic=True)
        for n, dim in enumerate((2, 1, 0, 1)):
            x = torch.randn(2 + n, 3, 7)
            torch.testing.assert_close(compiled(x, dim), entmax.sparsemax(x, dim=dim))
        assert report.rewrites


def test_what_is_written_before_a_call_stays_in_one_graph():
    linear, x = torch.nn.Linear(7, 7), torch.randn(4, 7)

    def program(x):
        h = torch.zeros_like(x)
        h += linear(x)
        return entmax.entmax15(h, -1)

    with only("entmax"):
        compiled = compile_without_codegen(program)
        got = compiled(x)
    assert compiled.dynamo_graphs == 1
    torch.testing.assert_close(got, program(x))


def test_a_backend_that_gives_up_gets_the_rest():
    """Dynamo falls back to a graph break for some exceptions of a backend, but not for calls allowed in a graph.

    The plugin restores this for the package's functions.
    """
    calls = []

    def backend(gm, inputs):
        calls.append([n.name for n in gm.graph.nodes if n.op.startswith("call")])
        if len(calls) == 1:
            raise torch._subclasses.fake_tensor.DynamicOutputShapeException(torch.nonzero)
        return gm.forward

    def program(z):
        return entmax.sparsemax(z.exp(), -1).sin()

    z = torch.randn(3, 7)
    with only("entmax"):
        torch.testing.assert_close(torch.compile(program, backend=backend)(z), program(z))
    assert any("sparsemax" in name for name in calls[0])


def test_a_tensor_with_functions_of_its_own_keeps_them():
    def program(s, v):
        return torch.matmul(entmax.entmax15(s.as_subclass(Doubling), dim=-1), v)

    if torch.__version__ < (2, 13):
        pytest.skip("this torch calls the functions of such a tensor twice, as it does without us")
    s, v = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    wanted = program(s, v).as_subclass(torch.Tensor)
    with only("entmax", "entmax_attention"):
        got = torch.compile(program, backend="eager")(s, v).as_subclass(torch.Tensor)
    torch.testing.assert_close(got, wanted)


REFUSED = {
    "one too many": lambda z: entmax.sparsemax(z, -1, None, True),
    "one twice": lambda z: entmax.entmax15(z, -1, dim=-1),
    "another name": lambda z: entmax.entmax15(z, axis=-1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_the_package_refuses(name):
    with only("entmax"), pytest.raises(TypeError):
        torch.compile(REFUSED[name], backend="eager")(torch.randn(3, 5))


@pytest.mark.parametrize(
    "other",
    [
        lambda z: entmax.normmax_bisect(z, 2, dim=-1),
        lambda z: entmax.NormmaxBisect(alpha=2)(z),
        lambda z: entmax.SparsemaxLoss()(z, z.argmax(-1)),
    ],
    ids=["normmax", "module", "loss"],
)
def test_what_is_no_entmax_is_reported_once_where_it_is_called(other):
    z = torch.randn(3, 7, requires_grad=True)
    with only("entmax") as report:
        with contextlib.suppress(InternalTorchDynamoError):  # Dynamo cannot trace the losses
            compile_without_codegen(other)(z)
        (miss,) = report.near_misses
    assert miss.location.startswith("test_entmax_dynamo.py") and not report.rewrites
    assert "entmax." in miss.source


def test_nothing_is_left_behind():
    from torch._dynamo import trace_rules

    before = set(trace_rules.get_torch_obj_rule_map())
    with sparse_inductor.enabled(only="entmax"):
        assert set(trace_rules.get_torch_obj_rule_map()) > before
    assert set(trace_rules.get_torch_obj_rule_map()) == before


def test_a_bisection_takes_one_step_where_its_shape_alone_is_asked_for(monkeypatch):
    steps = []
    bisect = entmax.entmax_bisect

    def counted(x, alpha, dim, n_iter, ensure_sum_one):
        steps.append(n_iter)
        return bisect(x, alpha, dim, n_iter, ensure_sum_one)

    x = torch.randn(3, 7)
    with torch._subclasses.FakeTensorMode() as mode:
        monkeypatch.setattr(entmax, "entmax_bisect", counted)
        assert leaves.entmax_bisect(mode.from_tensor(x), 1.3, -1, 50, True).shape == x.shape
        assert steps == [1]
    traced = make_fx(lambda x: leaves.entmax_bisect(x, 1.3, -1, 50, True), tracing_mode="fake")(x)
    assert steps == [1, 50]
    torch.testing.assert_close(traced(x), bisect(x, 1.3, -1))
