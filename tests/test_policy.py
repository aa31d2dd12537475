"""The policy "auto": blocks run as written until counted densities show that the operator is faster, and back."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sparse_inductor
from corpus.entmax.hand_written import sort_sparsemax
from sparse_inductor import compat
from sparse_inductor.choices import policies
from sparse_inductor.pattern import registered
from sparse_inductor.policy import break_even, counting, decisions, popular, profile
from sparse_inductor.policy.popular import Apart
from sparse_inductor.policy.worth import Worth
from sparse_inductor.testing import compile_without_codegen

NAMES = ["relu_ffn", "splade_head"]


class Blocks(nn.Module):
    """Two feed-forward blocks; a large negative bias makes one of them inactive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ups = nn.ModuleList(nn.Linear(8, 40) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(40, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs):
            x = x + down(torch.relu(up(x)))
        return x


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = registered()["relu_ffn"]
    monkeypatch.setattr(type(pattern), "worth", lambda *_: Worth(0.05, "for this test"))
    monkeypatch.setattr(profile, "LOOKS", ())
    monkeypatch.setattr(profile, "RECHECK", 6)
    monkeypatch.delenv("SPARSE_INDUCTOR_POLICY", raising=False)


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("training", [pytest.param(False, marks=pytest.mark.heavy), True])
def test_a_block_is_rewritten_when_it_becomes_sparse_and_goes_back(training):
    model, reference, report = Blocks(), Blocks(), sparse_inductor.report()
    sparse_inductor.enable(only="relu_ffn")
    compiled = compile_without_codegen(model)
    bias, same_bias = model.ups[0].bias, reference.ups[0].bias

    def step() -> None:
        x = torch.randn(4, 5, 8)
        with torch.set_grad_enabled(training):
            y, expected = compiled(x), reference(x)
            torch.testing.assert_close(y, expected)
            if training:
                y.square().sum().backward()
                expected.square().sum().backward()
                for p, q in zip(model.parameters(), reference.parameters()):
                    torch.testing.assert_close(p.grad, q.grad)
                model.zero_grad()
                reference.zero_grad()

    def run(value: float) -> None:
        with torch.no_grad():
            bias.fill_(value)
            same_bias.fill_(value)
        for _ in range(14):
            step()

    run(0.0)
    assert not report.rewrites
    first, _ = report.pending
    assert first.measured is not None and first.measured > 0.2
    assert "of 40 neurons active; pays below" in first.reason

    run(-50.0)
    assert [r.pattern for r in report.rewrites] == ["relu_ffn"]
    assert len(report.pending) == 1

    run(0.0)
    assert len(report.rewrites) == 1
    assert len(report.pending) == 2


@pytest.fixture
def popular_apart(looks_often, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the break-even point to 5 % active neurons, also for the cost with popular neurons computed separately.

    Each popular neuron then costs as much as a neuron of which 2 % of the entries are active.
    """
    pattern = registered()["relu_ffn"]
    apart = Apart(0.05, 0.02, 0.001)
    monkeypatch.setattr(type(pattern), "worth", lambda *_: Worth(0.05, "for this test", apart))
    monkeypatch.setattr(popular, "STEP", 4)


@pytest.mark.usefixtures("popular_apart")
@pytest.mark.parametrize("training", [True, False])
def test_popular_neurons_are_told_apart(training):
    """At first one neuron in ten is active in half of the rows, the others in none; later all are in half of them."""
    model, reference, report = Blocks(), Blocks(), sparse_inductor.report()
    sparse_inductor.enable(only="relu_ffn")
    compiled = compile_without_codegen(model)
    biases = [up.bias for m in (model, reference) for up in m.ups]

    def run(value: float) -> None:
        with torch.no_grad():
            for bias in biases:
                bias[4:] = value
        for _ in range(14):
            x = torch.randn(30, 8)
            with torch.set_grad_enabled(training):
                y, expected = compiled(x), reference(x)
                torch.testing.assert_close(y, expected)
                if training:
                    got = torch.autograd.grad(y.sum(), [*model.parameters()])
                    want = torch.autograd.grad(expected.sum(), [*reference.parameters()])
                    torch.testing.assert_close(got, want)

    run(0.0)
    assert [bool(p.measured and p.measured > 0.3) for p in report.pending] == [True, True]
    run(-50.0)
    assert len(report.rewrites) == 2 and not report.pending
    name = "relu_ffn_train" if training else "relu_ffn"
    op = getattr(torch.ops.sparse_inductor, name).default
    calls = [n for g in compiled.graphs for n in g.find_nodes(op="call_function", target=op)]
    assert [n.args[-1] for n in calls] == [4, 4]
    run(0.0)
    assert len(report.pending) == 2


@pytest.mark.parametrize(
    ("K", "N", "dtype", "l1", "told"),
    [
        (16, 40, torch.bfloat16, False, True),
        (16, 40, torch.float16, False, True),
        (16, 40, torch.float32, False, False),
        (16, 36, torch.bfloat16, False, False),
        (12, 40, torch.bfloat16, False, False),
        (16, 40, torch.bfloat16, True, False),
    ],
)
def test_which_blocks_have_popular_neurons(K, N, dtype, l1, told, monkeypatch):
    """Only blocks for which the operator supports popular neurons; the decision must not assume them for others."""
    from sparse_inductor.patterns import relu_ffn

    apart, given = Apart(0.05, 0.02, 0.001), []
    site = decisions._site
    monkeypatch.setattr(
        decisions, "_site", lambda c, w, *a: given.append(w.apart) or site(c, w, *a)
    )
    monkeypatch.setattr(relu_ffn, "look_up", lambda *_, **__: Worth(0.05, "", apart))
    up, down = (torch.randn(s, dtype=dtype) for s in ((N, K), (K, N)))

    def block(x):
        h = torch.relu(x @ up.t())
        y = h @ down.t()
        return (y, h.abs().mean()) if l1 else y

    with sparse_inductor.enabled(only="relu_ffn", policy="auto"), torch.no_grad():
        compile_without_codegen(block)(torch.randn(4, K, dtype=dtype))
    assert given == [apart if told else None]


@pytest.mark.usefixtures("popular_apart")
def test_the_report_says_what_popular_neurons_cost():
    model = Blocks()
    with torch.no_grad():
        for up in model.ups:
            up.bias[12:] = -50.0
    found = sparse_inductor.explain(model, torch.randn(400, 8)).report.pending[0]
    assert re.fullmatch(
        r"1\d\.\d+% of 40 neurons active, which cost 0\.70% with the 12 most popular apart;"
        r" pays below 5\.00% here; counted in this call; .*",
        found.reason,
    )


@given(
    frequencies=st.lists(st.floats(0, 1), min_size=2, max_size=40),
    rows=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_the_cheapest_number_of_popular_neurons(frequencies, rows, seed):
    torch.manual_seed(seed)
    apart, N = Apart(1.0, 0.3, 0.01), len(frequencies)
    active = torch.binomial(torch.full((2, N), float(rows)), torch.tensor([frequencies] * 2)).long()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(popular, "STEP", 1)
        found = popular.cheapest(active, rows, apart)
    order = active[0].argsort(descending=True)

    def of(neurons: torch.Tensor) -> float:
        left = set(range(N)) - {*neurons.tolist()}
        gathered = sum(active[1, n].item() / rows for n in left)
        return (gathered + 0.3 * len(neurons)) / N + 0.01

    assert torch.equal(found, order[: len(found)]) and 1 <= len(found) <= N // 2
    cost = popular.cost(active[1], rows, apart, found)
    assert cost == pytest.approx(of(found), abs=1e-5)
    assert cost <= min(of(order[:n]) for n in range(1, N // 2 + 1)) + 1e-5
    assert popular.cost(active[1], rows, apart, found[:0]) == pytest.approx(
        active[1].sum().item() / rows / N, abs=1e-6
    )


@pytest.mark.parametrize(
    ("policy", "default", "expected"),
    [
        (None, "always", {"relu_ffn": "always", "splade_head": "always"}),
        ("never", "always", {"relu_ffn": "never", "splade_head": "never"}),
        ({"relu_ffn": "auto"}, "always", {"relu_ffn": "auto", "splade_head": "always"}),
    ],
)
def test_choices(policy, default, expected, monkeypatch):
    monkeypatch.delenv("SPARSE_INDUCTOR_POLICY", raising=False)
    assert policies(policy, NAMES, default) == expected


def test_the_environment_chooses_where_the_caller_does_not(monkeypatch):
    monkeypatch.setenv("SPARSE_INDUCTOR_POLICY", "never")
    assert set(policies(None, NAMES, "always").values()) == {"never"}
    assert set(policies("auto", NAMES, "always").values()) == {"auto"}


@pytest.mark.parametrize(
    ("policy", "error", "text"),
    [
        ("sometimes", ValueError, "policy takes 'auto', 'always' or 'never', got 'sometimes'"),
        ({"relu_fn": "auto"}, ValueError, "no pattern 'relu_fn', did you mean 'relu_ffn'?"),
        ({"relu_ffn": "on"}, ValueError, "policy['relu_ffn'] takes"),
        (3, TypeError, "or a dict of pattern names to them, got 3"),
    ],
)
def test_bad_policies_are_named(policy, error, text):
    with pytest.raises(error) as caught:
        policies(policy, NAMES, "always")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "reason"), [("never", "the policy is 'never'"), ("auto", "whatever is active")]
)
def test_a_block_that_is_not_to_be_rewritten_or_does_not_gain_is_left_as_written(policy, reason):
    report = sparse_inductor.report()
    sparse_inductor.enable(only="relu_ffn", policy=policy)
    with torch.no_grad():
        compiled = compile_without_codegen(Blocks())
        compiled(torch.randn(2, 3, 8))
    assert compiled.calls("relu_ffn") == 0 and not report.rewrites
    assert len(report.pending) == 2 and all(reason in p.reason for p in report.pending)
    assert "as written for now" in str(report)


def test_a_head_whose_weights_would_be_joined_at_every_call_is_left_as_written():
    one, other = nn.Linear(8, 40), nn.Linear(8, 40)

    def head(h, mask):
        return (torch.log1p(torch.relu(one(h) + other(h))) * mask.unsqueeze(-1)).amax(1)

    args = torch.randn(2, 6, 8), torch.ones(2, 6)
    with sparse_inductor.enabled(policy="auto"):
        pending = sparse_inductor.explain(head, *args).report.pending
    assert [p.reason for p in pending] == [
        "a sum of linears, whose weights are joined at every call: not measured"
    ]


def biased(*biases: float) -> Blocks:
    """Return blocks in which the neurons' biases are these values, repeated."""
    model = Blocks()
    with torch.no_grad():
        for up in model.ups:
            up.bias.copy_(torch.tensor(biases).repeat(40 // len(biases)))
    return model


def inactive(*which: int) -> Blocks:
    """Return blocks of which the given ones, or by default both, have no active neuron."""
    model = Blocks()
    with torch.no_grad():
        for at in which or range(2):
            model.ups[at].bias.fill_(-50.0)
    return model


def changes(model: nn.Module, inputs, **how) -> tuple[int, int]:
    """Run on each of the inputs, and return the number of rewritten blocks and of compilations of the frame."""
    report = sparse_inductor.report()
    report.clear()
    sparse_inductor.enable(only="relu_ffn")
    compiled = compile_without_codegen(model, **how)
    with torch.no_grad():
        for x in inputs:
            torch.testing.assert_close(compiled(x), model(x))
    return len(report.rewrites), compiled.dynamo_graphs


@pytest.mark.usefixtures("looks_often")
def test_a_module_is_what_it_was():
    model = inactive()
    names = [*model.state_dict()], [*dict(model.named_buffers())]
    assert changes(model, [torch.ones(3, 8)] * 8, fullgraph=True) == (2, 2)
    assert names == ([*model.state_dict()], [*dict(model.named_buffers())])
    pickle.dumps(model)
    copy.deepcopy(model)
    exported = torch.export.export(model, (torch.ones(3, 8),))
    assert not exported.graph_signature.buffers


@pytest.mark.heavy
@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_change(dynamic):
    inputs = [torch.ones(3 + i % 4, 8) for i in range(12)]
    assert changes(inactive(), inputs, dynamic=dynamic)[0] == 2


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize(("shape", "dynamic"), [((3, 50, 8), None), ((8,), None), ((50, 8), True)])
def test_the_share_is_that_of_every_row(shape, dynamic):
    assert changes(biased(-50, 50, 50, 50), [torch.ones(shape)] * 8, dynamic=dynamic) == (0, 1)
    assert [p.measured for p in sparse_inductor.report().pending] == [0.75, 0.75]


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_where_nothing_runs_nothing_is_decided(shape):
    assert changes(Blocks(), [torch.ones(shape)] * 8) == (0, 1)
    assert [p.measured for p in sparse_inductor.report().pending] == [None, None]


@pytest.mark.parametrize("counting", ["looks_often", "popular_apart"])
def test_a_block_that_some_calls_give_no_rows(counting, request):
    """Examples are an expert that no token chose and an empty batch. The number of rows is unknown at compile time."""
    request.getfixturevalue(counting)
    blocks = inactive(0)

    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return blocks(x[x[:, 0] > 0])

    inputs = [
        torch.ones(4, 8).index_fill_(0, torch.arange(n), -1) for n in (0, 4, 2, 1, 4, 3, 0, 2)
    ]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert changes(Chosen(), inputs, fullgraph=True)[0] >= 1
    torch._dynamo.reset()
    changes(blocks, map(torch.ones, [(2, 5, 8), (3, 7, 8), (0, 5, 8), (0, 6, 8), (1, 4, 8)]))


@pytest.mark.usefixtures("popular_apart")
@pytest.mark.parametrize(
    ("shape", "dynamic"), [((4, 25, 8), None), ((100, 8), True), ((2, 3, 50, 8), True)]
)
def test_popular_neurons_of_any_shape(shape, dynamic):
    model = biased(50, *[-50] * 9)
    assert changes(model, [torch.ones(shape)] * 8, dynamic=dynamic)[0] == 2
    assert not sparse_inductor.report().pending


@pytest.mark.parametrize("row", [row for row in break_even.TABLE if row.operator == "relu_ffn"])
def test_what_the_operator_computes_by_tiles_does_not_pay(row):
    from sparse_inductor.kernels.relu_ffn import packing

    if row.where == "sm90":
        assert row.below in (0, 1) or max(row.below, row.apart) <= 0.9 * packing.DENSE_ROW


def test_costs_do_not_depend_on_the_default_dtype():
    active = torch.arange(1000).repeat(2, 1)
    apart = Apart(1.0, 0.4, 0.0)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        neurons = popular.cheapest(active, 1000, apart)
        found.append((len(neurons), popular.cost(active[1], 1000, apart, neurons)))
    assert found[0] == found[1] and found[0][0] == 384


@pytest.mark.usefixtures("looks_often")
def test_a_default_device_is_none_of_the_profiles():
    with torch.device("meta"):
        sites = [profile.Site("relu_ffn", "", "", "neurons", 4, 0.5)]
        one = profile.Profile(sites, torch.device("cpu"))
        one.counters += torch.tensor([[1], [8]], device="cpu")
        for _ in range(7):
            one.accepts((None,))
    assert sites[0].share == 1 / 8 and one.version == (0,)


@pytest.mark.usefixtures("looks_often")
def test_what_was_counted_before_a_reset_does_not_count():
    """Dynamo compiles the same frame for every nn.Sequential, so counters of an earlier model must not remain."""
    inputs = [torch.ones(3, 8)] * 8
    assert changes(nn.Sequential(Blocks()), inputs)[0] == 0
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(nn.Sequential(Blocks()), backend="eager")(inputs[0])
    assert changes(nn.Sequential(inactive()), inputs)[0] == 2


@pytest.mark.usefixtures("looks_often")
def test_blocks_at_one_line_are_told_apart():
    assert changes(inactive(1), [torch.ones(3, 8)] * 8) == (1, 2)
    (written,) = sparse_inductor.report().pending
    assert written.measured is not None and written.measured > 0.2


@pytest.mark.usefixtures("looks_often")
def test_nothing_is_decided_where_nothing_may_be_compiled():
    sparse_inductor.enable(only="relu_ffn")
    compiled = compile_without_codegen(inactive())
    with torch.no_grad():
        compiled(torch.ones(3, 8))
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(14):
                compiled(torch.ones(3, 8))
        with torch._dynamo.config.patch(recompile_limit=2):
            for _ in range(14):
                compiled(torch.ones(3, 8))
    assert compiled.dynamo_graphs == 1


@pytest.mark.usefixtures("looks_often")
def test_the_program_has_as_many_versions_as_without_us():
    sizes = torch._dynamo.config.recompile_limit
    inputs = [torch.ones(size, 8) for size in range(1, sizes + 1) for _ in range(14)]
    rewritten, compiled = changes(inactive(), inputs, dynamic=False, fullgraph=True)
    assert rewritten and compiled > sizes


@pytest.mark.heavy
@pytest.mark.usefixtures("looks_often")
def test_what_runs_again_in_the_backward_is_not_counted():
    model, report = inactive(), sparse_inductor.report()
    sparse_inductor.enable(only="relu_ffn")
    compiled = compile_without_codegen(lambda x: checkpoint(model, x, use_reentrant=False))
    for _ in range(7):
        compiled(torch.ones(3, 8, requires_grad=True)).sum().backward()
    assert not report.rewrites and len(report.pending) == 2
    assert "within a checkpoint" in report.pending[0].reason


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize(
    "settings,name",
    [
        (torch._dynamo.config, "enable_compiler_collectives"),
        (torch._inductor.config, "reorder_for_compute_comm_overlap"),
        (torch._inductor.config, "aten_distributed_optimizations.enable_overlap_scheduling"),
        (torch._inductor.config, "distributed_max_autotune_gemm"),
    ],
)
def test_nothing_is_counted_where_ranks_have_to_compile_the_same_graphs(settings, name):
    """A rank that recompiled because of its own counts would wait for ranks that do not compile."""
    if name not in settings._config:
        pytest.skip("this torch does not have the setting")
    with settings.patch(name, True):
        assert changes(inactive(), [torch.ones(3, 8)] * 8) == (0, 1)
    assert "ranks" in sparse_inductor.report().pending[0].reason


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("calls", [1, 4])
def test_a_checkpoint_computes_again_what_it_computed(calls, monkeypatch):
    """A decision may occur in the forward or in its recomputation, and several calls may precede one backward.

    The recomputation must run the same code as the forward.
    """
    monkeypatch.setattr(profile, "LOOKS", (3,))
    model, reference, report = inactive(), inactive(), sparse_inductor.report()
    sparse_inductor.enable(only="relu_ffn")
    compiled = compile_without_codegen(model)
    for _ in range(10):
        inputs = [torch.randn(3, 8) for _ in range(calls)]
        sum(checkpoint(compiled, x, use_reentrant=False).square().sum() for x in inputs).backward()
        sum(reference(x).square().sum() for x in inputs).backward()
        for p, q in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(p.grad, q.grad)
    assert len(report.rewrites) == 2


@pytest.mark.heavy
@pytest.mark.usefixtures("looks_often")
def test_what_dynamo_forgets_is_forgotten():
    assert changes(inactive(), [torch.ones(3, 8)] * 8) == (2, 2)
    compat.reset_dynamo()
    assert changes(inactive(), [torch.ones(3, 8)]) == (0, 1)


@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    dim=st.integers(-1, 2),
    positive=st.booleans(),
    apart=st.booleans(),
    most=st.sampled_from([None, 1, 4, 100]),
)
def test_counts(shape, dim, positive, apart, most):
    assume(-len(shape) <= dim < len(shape) and shape[dim])
    torch.manual_seed(0)
    x = torch.randint(-1, 2, shape)
    found, total = counting.counts(x, dim, positive, apart, most)
    rows = x.movedim(dim, -1).reshape(-1, shape[dim])
    active = (rows > 0 if positive else rows != 0).long()
    if most is not None and most < len(rows):
        active = active[torch.arange(most) * (len(rows) // most)]
    if not apart:
        assert found.tolist() == [active.sum()] and total == active.numel()
        return
    if len(rows) == 1 or most == 1:
        active = active[:1].repeat(2, 1)
    pairs = len(active) // 2
    assert total == pairs
    halves = torch.stack([active[0 : 2 * pairs : 2].sum(0), active[1 : 2 * pairs : 2].sum(0)])
    assert torch.equal(found, halves.flatten())


def test_only_calls_that_are_due_are_counted(monkeypatch):
    x, counters = torch.tensor([[0.0, 2.0, -1.0]]), torch.zeros(2, 1, dtype=torch.int64)
    for due in (False, True):
        monkeypatch.setattr(counting.call, "due", due)
        torch.library.opcheck(counting.operator, (x, counters.clone(), 0, 1, 1, False))
        counting.operator(x, counters, 0, 1, 1, False)
        assert counters.flatten().tolist() == [2 * due, 3 * due]


def test_a_look_reads_some_calls_of_all_since_the_last():
    one = profile.Profile(
        [profile.Site("relu_ffn", "", "", "neurons", 4, 0.5)], torch.device("cpu")
    )
    one.begins(one.version)
    counted = [call for call in range(1, 2049) if one.accepts((None,)) and counting.call.due]
    for since, look in itertools.pairwise((0, *profile.LOOKS, 1024, 2048)):
        calls = [call for call in counted if since <= call < look]
        assert min(look - since - 1, profile.COUNTED - 2) <= len(calls) <= 2 * profile.COUNTED
        assert {call % 4 for call in calls} == {0, 1, 2, 3} or look == profile.LOOKS[0]


@pytest.mark.heavy
@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("training", [False, True])
def test_what_is_counted_is_what_the_product_reads(training):
    """The count reads the product's operand, after autocast's cast, so that no tensor is written for the count only."""

    def squares(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.relu(F.linear(x, up)).float().square(), down)

    sparse_inductor.enable(only="relu_ffn")
    args = [torch.randn(n, k, requires_grad=training) for n, k in ((3, 8), (40, 8), (8, 40))]
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
        _, codes = run_and_get_code(torch.compile(squares), *args)
    (counted,) = re.findall(r"sparse_inductor_count\((\w+),", codes[0])
    # The two calls are the count and the product; the kernel that writes it has it as its last argument.
    assert len(re.findall(rf"\w\({counted},", codes[0])) == 2


@pytest.mark.gpu
@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_blocks_on_a_gpu(mode):
    report = sparse_inductor.report()
    sparse_inductor.enable(only="relu_ffn")
    for model, rewritten in ((biased(-50, 50, 50, 50), 0), (inactive(), 2)):
        torch._dynamo.reset()
        report.clear()
        model, x = model.to("cuda", torch.bfloat16), torch.ones(64, 8, device="cuda").bfloat16()
        compiled = torch.compile(model, mode=mode)
        with torch.no_grad():
            for _ in range(14):
                torch.testing.assert_close(compiled(x), model(x))
        assert len(report.rewrites) == rewritten
        assert [p.measured for p in report.pending] == [0.75] * (2 - rewritten)


@pytest.mark.usefixtures("looks_often")
def test_explain_says_at_once_what_is_active(monkeypatch):
    explanation = sparse_inductor.explain(inactive(0), torch.ones(3, 8))
    first, second = explanation.report.pending
    assert {first.measured == 0, second.measured == 0} == {True, False}
    assert not explanation.report.rewrites
    assert "40 neurons active; pays below 5.00% here; counted in this call" in str(explanation)
    monkeypatch.setenv("SPARSE_INDUCTOR_POLICY", "always")
    assert len(sparse_inductor.explain(Blocks(), torch.ones(3, 8)).report.rewrites) == 2


@pytest.mark.usefixtures("looks_often")
def test_a_block_left_as_written_has_matched():
    with sparse_inductor.enabled(only="relu_ffn", strict=True), torch.no_grad():
        compile_without_codegen(Blocks())(torch.ones(3, 8))


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("operator", "sizes", "below"),
    [
        ("sparse_scores", {"queries": 1, "products": 64_000, "constant": 0}, 0),
        ("sparse_scores", {"queries": 32, "products": 20_480_000, "constant": 0}, 1),
        ("sparse_scores", {"queries": 1, "documents": 4096, "entries": 1 << 19, "constant": 1}, 0),
        ("sparse_scores", {"queries": 2, "documents": 4096, "entries": 1 << 19, "constant": 1}, 1),
        ("sparse_scores", {"queries": 1, "documents": 1024, "entries": 1 << 17, "constant": 1}, 0),
        ("entmax", {"elements": 1024, "columns": 32, "sorts": 1, "training": 1}, 0),
        ("entmax", {"elements": 1 << 16, "columns": 32, "sorts": 1, "training": 0}, 0),
        ("entmax", {"elements": 1 << 16, "columns": 32, "sorts": 1, "training": 1}, 1),
        ("entmax", {"elements": 1 << 18, "columns": 8, "sorts": 1, "training": 0}, 1),
        ("entmax", {"elements": 1 << 18, "columns": 4, "sorts": 1, "training": 0}, 0),
        ("entmax", {"elements": 1 << 18, "columns": 4, "sorts": 0, "training": 0}, 1),
        ("entmax_attention", {"scores": 1 << 20}, 1),
        ("relu_ffn", {"tokens": 64, "weight": 1 << 24, "bits": 32, "training": 0}, 0),
    ],
)
def test_what_gains_on_a_cpu(operator, sizes, below):
    assert break_even.look_up(operator, CPU, **sizes).below == below


@pytest.mark.parametrize(
    ("name", "columns", "training", "rewritten"),
    [
        ("entmax15", 4, True, 0),
        ("entmax15", 8, True, 1),
        ("sparsemax", 4, False, 0),
        ("sparsemax", 4, True, 0),
        ("sparsemax_bisect", 4, False, 1),
        ("written out", 4, False, 0),
        ("written out", 8, False, 1),
    ],
)
def test_short_rows_on_a_cpu_stay_sorted(name, columns, training, rewritten):
    entmax = pytest.importorskip("entmax")
    function = sort_sparsemax if name == "written out" else getattr(entmax, name)
    x = torch.randn(2**18 // columns, columns, requires_grad=training)
    with sparse_inductor.enabled(only="entmax", policy="auto"):
        found = sparse_inductor.explain(lambda x: function(x), x).report
    assert len(found.rewrites) == rewritten


def test_without_gradients_rows_need_not_require_one():
    """A backward gains from 65,536 elements, inference from 262,144."""
    x = torch.randn(2048, 32, requires_grad=True)
    with sparse_inductor.enabled(only="entmax", policy="auto"), torch.no_grad():
        assert not sparse_inductor.explain(sort_sparsemax, x).report.rewrites


@pytest.mark.parametrize("operator", ["topk_encode", "sparse_decode"])
def test_kernels_of_a_gpu_are_not_compiled_for_ever_new_k(operator):
    sizes = {
        "tokens": 8192,
        "neurons": 65_536,
        "width": 4096,
        "ratio": 2048,
        "bits": 16,
        "training": 1,
        "batch": 0,
        "kept": 0,
    }
    found = break_even.look_up(operator, torch.device("cuda"), **sizes, changing=1)
    assert found.below == 0 and "k changes" in found.reason
    assert "k changes" not in break_even.look_up(operator, CPU, **sizes, changing=1).reason


@pytest.mark.parametrize("operator", ["topk_encode", "sparse_decode"])
@pytest.mark.parametrize(
    ("where", "tokens", "bits", "kept", "below"),
    [
        ("cpu", 32, 32, 0, 0),
        ("cpu", 64, 32, 0, 1),
        ("cpu", 256, 32, 1, 1),
        ("cpu", 512, 16, 0, 0),
        ("sm90", 2048, 32, 0, 0),
        ("sm90", 4096, 16, 1, 1),
        ("sm90", 4096, 32, 0, 1),
        ("sm90", 4096, 64, 0, 0),
    ],
)
def test_a_top_k_of_a_batch_has_its_own_break_even_points(
    operator, where, tokens, bits, kept, below, monkeypatch
):
    places = {"cpu": ("cpu",), "sm90": ("sm90", "cuda")}
    monkeypatch.setattr(break_even, "_places", lambda device: places[where])
    sizes = {"neurons": 24_576, "width": 768, "ratio": 768, "bits": bits, "training": 1}
    sizes |= {"tokens": tokens, "changing": 1, "batch": 1, "kept": kept}
    found = break_even.look_up(operator, CPU, **sizes)
    assert found.below == below and "batch" in found.reason


def test_a_product_that_is_kept_is_multiplied_twice_for_the_gradient_of_its_weight():
    """That costs more than it gains where there are few tokens; the decoder gains by itself."""
    sizes = {"neurons": 4096, "width": 512, "ratio": 128, "bits": 32, "changing": 0, "batch": 0}
    for tokens, training, below in ((64, 1, 0), (255, 1, 0), (256, 1, 1)):
        sizes |= {"tokens": tokens, "training": training, "kept": 1}
        assert break_even.look_up("topk_encode", CPU, **sizes).below == below
        assert break_even.look_up("sparse_decode", CPU, **sizes).below == 1


def test_a_device_without_a_row_is_left_alone():
    found = break_even.look_up("entmax", torch.device("xpu"), elements=1 << 20, sorts=True)
    assert found.below == 0 and found.reason == "not measured on xpu for 1,048,576 elements"


def test_every_pattern_has_break_even_points():
    assert {row.operator for row in break_even.TABLE} == {*registered()}
    assert all(callable(getattr(p, "worth", None)) for p in registered().values())


def test_every_row_can_be_reached():
    """The first matching row decides, so no row may follow one that matches in all of its cases."""
    for at, row in enumerate(break_even.TABLE):
        assert re.fullmatch(r"sm\d{2,3}|cuda|cpu", row.where), row
        assert 0 <= row.below <= 1, row
        for earlier in break_even.TABLE[:at]:
            if earlier.operator == row.operator and earlier.where in (
                row.where,
                "cuda" if row.where.startswith("sm") else "",
            ):
                narrower = [row.least.get(n, -1) < v for n, v in earlier.least.items()]
                narrower += [row.most.get(n, math.inf) > v for n, v in earlier.most.items()]
                assert any(narrower), (earlier, row)


@pytest.mark.parametrize(
    ("gated", "below", "note"),
    [
        (False, 0.007, "as it is above a threshold of every neuron"),
        (True, 0.008, "gate is above 0, up as it is"),
    ],
)
def test_a_projection_above_thresholds_is_no_gated_block(gated, below, note, monkeypatch):
    """JumpReLU multiplies one product by the comparison of the same product with each neuron's threshold."""
    from sparse_inductor.patterns import relu_ffn

    found = []

    def on_a_large_gpu(operator, device, **sizes):
        more = {"tokens": 8192, "weight": 1 << 25, "bits": 16}
        found.append(break_even.look_up(operator, device, **(sizes | more)))
        return found[-1]

    monkeypatch.setattr(break_even, "_places", lambda device: ("sm90", "cuda"))
    monkeypatch.setattr(relu_ffn, "look_up", on_a_large_gpu)
    first, second, down = torch.randn(8, 32), torch.randn(8, 32), torch.randn(32, 8)
    thresholds = torch.rand(32)

    def block(x):
        z = x @ first
        return ((z > thresholds).to(z.dtype) * (x @ second if gated else z)) @ down

    with sparse_inductor.enabled(only="relu_ffn", policy="auto"), torch.no_grad():
        compile_without_codegen(block)(torch.randn(4, 8))
    assert [worth.below for worth in found] == [below]
    with sparse_inductor.enabled(only="relu_ffn", policy="always"), torch.no_grad():
        x = torch.randn(4, 8)
        torch.testing.assert_close(compile_without_codegen(lambda x: block(x))(x), block(x))
    assert [r.note for r in sparse_inductor.report().rewrites] == [note]
