"""verify=True: every rewrite is checked when it first runs, and a wrong rewrite is not used."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._dynamo.testing import CompileCounter

import sparse_inductor
from planted import BUGS, PROGRAMS, Bug, bug_named, program
from sparse_inductor import compat
from sparse_inductor.pattern import registered as known
from sparse_inductor.rewrite import failures
from support import heavy, one_in, registered
from toy import Toy

PATTERN = "splade_head"


def by_passes(gm, inputs):
    """Compile with Inductor without code generation."""
    return compat.compile_graph(gm, inputs, codegen=False)


def compiled(fn, **options):
    return torch.compile(fn, backend=by_passes, **options)


def verdicts():
    return [c.verdict for c in sparse_inductor.report().checks]


@pytest.fixture
def splade():
    """A head and its arguments, with verification enabled."""
    sparse_inductor.enable(only=PATTERN, verify=True)
    return program("splade")


def forward_and_backward(fn, args):
    outputs = fn(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (o * torch.rand(o.shape, generator=generator)).sum() for o in outputs if o.requires_grad
    )
    leaves = [t for t in args if t.requires_grad]
    leaves += fn.parameters() if isinstance(fn, nn.Module) else ()
    return [o.detach() for o in outputs], torch.autograd.grad(loss, leaves, allow_unused=True)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_right_rewrite_agrees_and_is_used(name, training):
    model, args = program(name)
    pattern = PROGRAMS[name].pattern
    run = forward_and_backward if training else torch.no_grad()(lambda fn, args: fn(*args))
    expected = run(model, args)
    sparse_inductor.enable(only=pattern, verify=True)
    fn = compiled(model)
    for _ in range(2):  # the second call is not checked
        torch.testing.assert_close(run(fn, args), expected)
    (check,) = sparse_inductor.report().checks
    assert (check.pattern, check.verdict) == (pattern, "agrees")
    assert check.error is not None and check.error < 1e-5 and check.source
    assert ("gradients" in check.detail) == training
    assert "checked  values" in str(sparse_inductor.report())


@pytest.mark.parametrize("bug", one_in(3, BUGS), ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught_and_the_unrewritten_result_kept(bug: Bug, caplog):
    model, args = program(bug.program)
    pattern = PROGRAMS[bug.program].pattern
    expected = forward_and_backward(model, args)
    sparse_inductor.enable(only=pattern, verify=True)
    fn = compiled(model)
    with bug.plant(), caplog.at_level(logging.WARNING, "sparse_inductor"):
        for _ in range(2):
            torch.testing.assert_close(forward_and_backward(fn, args), expected)
    (check,) = sparse_inductor.report().checks
    assert check.verdict == "differs"
    assert ("gradient" if bug.backward else "result") in check.detail
    assert "is wrong; its result is not used" in caplog.text
    report = str(sparse_inductor.report())
    assert "caught by verify" in report and check.detail in report and check.source in report


def of_repeated_queries(q, ids, values):
    """Only the sum of the gradient over the repeats is that of the queries."""
    queries = q.unsqueeze(1).repeat(1, len(ids), 1).relu()
    return (queries.gather(2, ids.expand(len(q), -1, -1)) * values).sum(-1)


def of_queries_cleared_afterwards(q, ids, values):
    q = q * 1
    scores = (q[:, ids] * values).sum(-1)
    q.zero_()
    return scores


@pytest.mark.parametrize("score", [of_repeated_queries, of_queries_cleared_afterwards])
def test_scores_in_training(score):
    args = torch.randn(3, 30, requires_grad=True), torch.randint(30, (20, 6)), torch.rand(20, 6)
    expected = forward_and_backward(score, args)
    sparse_inductor.enable(only="sparse_scores", verify=True)
    torch.testing.assert_close(forward_and_backward(compiled(score), args), expected)
    assert verdicts() == ["agrees"]


def test_an_einsum_under_autocast():
    ids, values = torch.randint(30, (20, 6)), torch.rand(20, 6)
    score = lambda q: torch.einsum("bnt,nt->bn", q[:, ids], values)
    sparse_inductor.enable(only="sparse_scores", verify=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert compiled(score)(torch.rand(3, 30)).dtype == torch.bfloat16
    assert verdicts() == ["agrees"]


class RunningActivity(nn.Module):
    """A block that averages how often each neuron is active."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.register_buffer("activity", torch.zeros(24))

    def forward(self, x):
        h = self.up(x).relu()
        with torch.no_grad():
            self.activity.mul_(0.9).add_((h > 0).float().mean((0, 1)))
        return self.down(h)


def test_statistics_that_are_added_to_a_buffer():
    model, x = RunningActivity(), torch.randn(2, 5, 8)
    sparse_inductor.enable(only="relu_ffn", verify=True)
    expected = forward_and_backward(model, (x,))
    activity = model.activity.clone()
    model.activity.zero_()
    torch.testing.assert_close(forward_and_backward(compiled(model), (x,)), expected)
    torch.testing.assert_close(model.activity, activity)
    assert verdicts() == ["agrees"]


def test_a_weight_of_activations_that_is_computed_after_the_decoder():
    def losses(x, w_enc, w_dec):
        f = (x @ w_enc).relu()
        error, sparsity = (f @ w_dec - x).square().mean(), (f * w_dec.norm(dim=1)).sum(-1).mean()
        return error, sparsity, (f > 0).float().sum(-1)

    shapes = (5, 6), (6, 32), (32, 6)
    args = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
    expected = forward_and_backward(losses, args)
    sparse_inductor.enable(only="relu_ffn", verify=True)
    fn = compiled(losses)
    torch.testing.assert_close(forward_and_backward(fn, args), expected)
    assert not fn(*args)[2].requires_grad
    assert verdicts() == ["agrees"]


def test_what_was_caught_concerns_no_other_rewrite(splade):
    model, args = splade
    with bug_named("bias dropped").plant():
        compiled(model)(*args)
    sparse_inductor.report().clear()
    other, args = program("soft_cap")
    compiled(other)(*args)
    assert verdicts() == ["agrees"]


# The first example of a pattern with programs above runs in `make test-all` only.
ABOVE = {program.pattern for program in PROGRAMS.values()}
EXAMPLES = [
    heavy(p.name, e) if at and p.name in ABOVE else (p.name, e)
    for p in known().values()
    for at, e in enumerate(p.examples)
]


@pytest.mark.parametrize(("name", "example"), EXAMPLES, ids=lambda v: getattr(v, "name", v))
def test_every_patterns_examples_agree(name, example):
    fn, args = example.build()
    sparse_inductor.enable(only=name, verify=True)
    with torch.set_grad_enabled(example.training):
        compiled(fn)(*args)
    checks = sparse_inductor.report().checks
    assert checks and {(c.pattern, c.verdict) for c in checks} == {(name, "agrees")}


def test_exact_ties_agree(splade):
    model, (x, m) = splade
    x = x.detach()[:, :1].repeat(1, x.shape[1], 1).requires_grad_()  # one token, six times
    compiled(model)(x, m)
    (check,) = sparse_inductor.report().checks
    assert check.verdict == "agrees" and "moved" not in check.detail


def test_it_is_off_by_default():
    model, args = program("splade")
    sparse_inductor.enable(only=PATTERN)
    with bug_named("bias dropped").plant():
        compiled(model)(*args)
    assert not sparse_inductor.report().checks and not failures


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_generated_code_checks_and_computes_the_same(dynamic):
    model, args = program("splade")
    expected = forward_and_backward(model, args)
    fn = torch.compile(
        model, options=sparse_inductor.options(only=PATTERN, verify=True), dynamic=dynamic
    )
    torch.testing.assert_close(forward_and_backward(fn, args), expected)
    assert verdicts() == ["agrees"]
    with torch.no_grad():
        torch.testing.assert_close(fn(*args), expected[0][0])


@pytest.mark.heavy
def test_generated_code_keeps_the_unrewritten_result():
    model, args = program("splade")
    expected = forward_and_backward(model, args)
    fn = torch.compile(model, options=sparse_inductor.options(only=PATTERN, verify=True))
    with bug_named("slope of log1p forgotten").plant():
        torch.testing.assert_close(forward_and_backward(fn, args), expected)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast_is_that_of_the_operations(where, splade):
    model, args = splade

    def inside(x, m):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x, m)

    def around(x, m):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return compiled(model)(x, m)

    got = compiled(inside)(*args) if where == "inside" else around(*args)
    assert got.dtype == inside(*args).dtype
    (check,) = sparse_inductor.report().checks
    assert check.verdict == "agrees"
    assert check.plain_error is not None and check.plain_error > 1e-4  # the error of bf16


class Two(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first, self.second = first, program("soft_cap")[0]

    def forward(self, x, m):
        a = self.first(x, m)
        return a, self.second(x * a.mean(), m)


@pytest.mark.parametrize("shared", [False, True], ids=["two linears", "one linear"])
def test_several_rewrites_of_a_graph_are_checked_each(shared, splade):
    model, args = splade
    if shared:
        model.pool = lambda z, mask: (
            (torch.log1p(torch.relu(z)) * mask.unsqueeze(-1)).amax(1),
            torch.relu(z).amax(1),
        )
    else:
        model = Two(model)
    expected = forward_and_backward(model, args)
    torch.testing.assert_close(forward_and_backward(compiled(model), args), expected)
    assert verdicts() == ["agrees", "agrees"]


def test_sizes_may_be_symbolic(splade):
    model, args = splade
    fn = compiled(model, dynamic=True)
    for rows in (
        5,
        4,
    ):  # the number of sequences differs from that of positions, or both would share a symbol
        some = tuple(t[:rows] for t in args)
        torch.testing.assert_close(fn(*some), model(*some))
    assert len(sparse_inductor.report().checks) == 1


@pytest.mark.parametrize("outside", [False, True])
def test_within_a_checkpointed_region(splade, outside):
    """The operations of a check are not part of a checkpoint around the compiled function."""
    model, args = splade
    inner = compiled(model) if outside else model

    def checkpointed(x, m):
        return torch.utils.checkpoint.checkpoint(inner, x, m, use_reentrant=False)

    got = (checkpointed if outside else compiled(checkpointed))(*args)
    leaves = [args[0], *model.parameters()]
    found = torch.autograd.grad(got.sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(model(*args).sum(), leaves))
    assert verdicts() == ["agrees"]


def test_explain_of_a_checkpointed_region(splade):
    model, args = splade
    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    explained = sparse_inductor.explain(
        lambda *given: checkpoint(model, *given), *args, verify=True
    )
    assert [check.verdict for check in explained.report.checks] == ["agrees"]


def test_in_inference_mode_and_with_frozen_parameters(splade):
    model, (x, m) = splade
    with torch.inference_mode():
        torch.testing.assert_close(compiled(model)(x.detach(), m), model(x.detach(), m))
    model.decoder.weight.requires_grad_(False)
    torch._dynamo.reset()
    compiled(model)(x, m).sum().backward()
    assert model.decoder.bias.grad is not None and model.decoder.weight.grad is None
    assert verdicts() == ["agrees", "agrees"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_precisions(dtype, splade):
    model, (x, m) = splade
    compiled(model.to(dtype))(x.detach().to(dtype).requires_grad_(), m)
    assert verdicts() == ["agrees"]


def test_it_is_part_of_the_session():
    sparse_inductor.enable(verify=True)
    from sparse_inductor import session

    first = session._state.session
    sparse_inductor.enable(verify=True)
    assert session._state.session is first
    sparse_inductor.enable()
    assert session._state.session is not first
    assert first is not None and first.key() is None  # such a graph is not cached


@pytest.mark.breaks_pattern
def test_a_replacement_of_another_shape_is_not_put_in():
    class Wrong(Toy):
        def match(self, node, view):
            found = super().match(node, view)
            if hasattr(found, "replace"):
                replace = found.replace

                def widened():
                    replace()
                    (new,) = (n for n in found.anchor.graph.nodes if "hardtanh" in n.name)
                    new.meta["example_value"] = new.meta["example_value"].expand(2, 4)

                found.replace = widened
            return found

    with registered(Wrong()):
        sparse_inductor.enable(only="toy", verify=True)
        counter = CompileCounter()

        def backend(gm, inputs):
            return counter(compat.pre_grad_passes(gm, inputs), inputs)

        x = torch.randn(4)
        torch.testing.assert_close(
            torch.compile(lambda x: torch.relu(x + 1), backend=backend)(x), torch.relu(x + 1)
        )
        (miss,) = sparse_inductor.report().near_misses
        assert "has shape [2, 4], it was [4]" in miss.reason


def test_out_of_memory_leaves_the_rewrite_unchecked(monkeypatch, splade):
    from sparse_inductor.verify import session as verify

    def full(self, values, needs):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(verify.Region, "_compare", full)
    model, args = splade
    torch.testing.assert_close(compiled(model)(*args), model(*args))
    (check,) = sparse_inductor.report().checks
    assert check.verdict == "unchecked"
    assert "checked  no: there was not enough memory" in str(sparse_inductor.report())


# explain


def test_scores_that_are_masked_in_place_in_front_of_a_rewrite_agree():
    """The operator reads what the mask wrote, and its gradient passes the mask, too."""
    entmax = pytest.importorskip("entmax")

    def rows(x):
        scores = x @ x.T
        scores.masked_fill_(torch.eye(6, dtype=torch.bool), -torch.inf)
        return entmax.sparsemax(scores, dim=-1).tanh()

    x = torch.randn(6, 8, requires_grad=True)
    sparse_inductor.enable(policy="always", only="entmax", verify=True)
    compiled(rows)(x).square().sum().backward()
    assert verdicts() == ["agrees"]


def test_explain_runs_programs_that_register_hooks():
    def head(x, w):
        weights = torch.log1p(torch.relu(x @ w.T)).amax(1)
        weights.register_hook(lambda grad: grad / 2)
        return weights * 2

    args = torch.randn(2, 5, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    sparse_inductor.enable(policy="always", only=PATTERN)
    (check,) = sparse_inductor.explain(head, *args, verify=True).report.checks
    assert check.verdict == "agrees"


def test_explain_runs_the_checks():
    model, args = program("splade")
    explanation = sparse_inductor.explain(model, *args, verify=True)
    (check,) = explanation.report.checks
    assert check.verdict == "agrees" and "gradients" in check.detail
    assert "splade_head" in explanation.graphs[0].after
    assert "verified" not in explanation.graphs[0].after
    assert not sparse_inductor.report().checks
