"""The modes of torch.compile and autograd: in each, the program is rewritten and has the results of eager code."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import sparse_inductor
from programs import Encoder, batch, encoder
from support import compile_without_codegen, heavy

BOTH = {"splade_head", "entmax_attention"}


@pytest.fixture
def report():
    sparse_inductor.enable()
    return sparse_inductor.report()


def rewritten(report) -> set[str]:
    return {r.pattern for r in report.rewrites}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(got: nn.Module, wanted: nn.Module) -> None:
    mine, theirs = gradients(got), gradients(wanted)
    assert mine.keys() == theirs.keys() and mine
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], atol=1e-5, rtol=1e-4, msg=name)


def assert_trains_like_eager(program, model: nn.Module, eager: nn.Module, *args) -> None:
    (program(*args) ** 2).sum().backward()
    (eager(*args) ** 2).sum().backward()
    assert_gradients(model, eager)


# Shapes


def graphs_over(program, pairs, dynamic: bool | None) -> int:
    """Return the number of graphs that Dynamo compiles for training steps of these batch sizes and lengths."""
    torch._dynamo.reset()
    compiled = compile_without_codegen(program, dynamic=dynamic)
    for B, L in pairs:
        compiled(*batch(B, L)).sum().backward()
    return compiled.dynamo_graphs


class HeadOnly(Encoder):
    def body(self, ids, mask):
        return self.embedding(ids)


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
@pytest.mark.parametrize("kind", [HeadOnly, heavy(Encoder)])
@pytest.mark.filterwarnings("ignore:sparse_inductor was enabled after")
def test_no_recompiles_beyond_those_of_the_unrewritten_program(kind, dynamic):
    pairs = [(2 + i % 5, 4 + (7 * i) % 11) for i in range(20)]
    assert len(set(pairs)) == 20
    with sparse_inductor.enabled():
        ours = graphs_over(kind(), pairs, dynamic)
    patterns = rewritten(sparse_inductor.report())
    theirs = graphs_over(kind(), pairs, dynamic)
    if kind is HeadOnly:
        assert patterns == {"splade_head"} and ours == theirs
    else:  # without the rewrite, the entmax package breaks the graph
        assert patterns == BOTH and ours <= min(theirs, 2)


# Autograd


class Checkpointed(Encoder):
    """An encoder that is recomputed in the backward."""

    options: dict = {}

    def forward(self, ids, mask):
        return checkpoint(super().forward, ids, mask, use_reentrant=False, **self.options)


def save_these(ops, ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
def test_activation_checkpointing(report, selective):
    torch.manual_seed(0)
    model, eager = Checkpointed(), encoder()
    if selective:
        saved = {torch.ops.sparse_inductor.splade_head_train.default}
        policy = functools.partial(save_these, saved)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        model.options = {"context_fn": contexts}
    compiled = compile_without_codegen(model)
    assert_trains_like_eager(compiled, model, eager, *batch())
    assert rewritten(report) == BOTH
    # With the policy the head is not recomputed in the backward; attention is recomputed in both cases.
    assert compiled.calls("splade_head_train") == (1 if selective else 2)
    assert compiled.calls("entmax_attention_train") == 2


def test_grad_scaler_under_autocast(report):
    """Scaled steps equal eager's, and an overflow skips the step and halves the scale."""
    model, eager = encoder(), encoder()
    compiled = compile_without_codegen(model)
    scales, weights = [], []
    for program, parameters in ((compiled, model.parameters()), (eager, eager.parameters())):
        optimizer = torch.optim.SGD(list(parameters), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
        for scale_of_loss in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = program(*batch()).float().square().mean() * scale_of_loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        weights.append([p.detach().clone() for p in optimizer.param_groups[0]["params"]])
    assert rewritten(report) == BOTH
    assert scales == [2.0**11, 2.0**10, 2.0**11] * 2
    for mine, theirs in zip(*weights):
        torch.testing.assert_close(mine, theirs, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "jacrev"])
def test_torch_func_is_declined_with_a_reason(report, transform):
    model = encoder()
    _, mask = batch()
    hidden = torch.randn(3, 7, 16)
    cotangents = torch.ones(3, 37)

    def head(hidden):
        return model.head(hidden, mask)

    programs = {
        "grad": lambda h: torch.func.grad(lambda h: head(h).sum())(h),
        "vjp": lambda h: torch.func.vjp(head, h)[1](cotangents),
        "jvp": lambda h: torch.func.jvp(head, (h,), (torch.ones_like(h),)),
        "vmap": lambda h: torch.vmap(lambda h, m: model.head(h[None], m[None]))(h, mask),
        "jacrev": lambda h: torch.func.jacrev(head)(h),
    }
    program = programs[transform]
    torch.testing.assert_close(compile_without_codegen(program)(hidden), program(hidden))
    assert not report.rewrites
    assert any("torch.func" in miss.reason for miss in report.near_misses)


def test_what_stands_beside_a_transform_is_rewritten(report):
    """An example is Hugging Face's code, which builds masks with vmap."""
    model = encoder()
    ids, mask = batch()

    def program(ids, mask):
        kept = torch.vmap(lambda row: row > 0)(mask)
        return model(ids, kept.to(torch.float32))

    torch.testing.assert_close(compile_without_codegen(program)(ids, mask), model(ids, mask))
    assert "splade_head" in rewritten(report)


# Modes of torch


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_mode(report, deterministic):
    """No operator raises in this mode, and two runs agree bitwise."""
    runs = []
    for _ in range(2):
        model = encoder()
        values = compile_without_codegen(model)(*batch(8, 33))
        values.square().sum().backward()
        runs.append((values, gradients(model)))
    assert rewritten(report) == BOTH
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(report, mode):
    model = encoder()
    compiled = compile_without_codegen(model)
    with mode():
        got, wanted = compiled(*batch()), model(*batch())
    assert rewritten(report) == BOTH
    torch.testing.assert_close(got, wanted)
    assert compiled.calls("splade_head_train") == compiled.calls("entmax_attention_train") == 0


def topk_autoencoder(x, up, down):
    pre = x @ up
    values, indices = pre.topk(3)
    return torch.zeros_like(pre).scatter(-1, indices, values.relu()) @ down


def batch_topk_autoencoder(x, up, down):
    pre = (x @ up).relu()
    values, indices = pre.flatten().topk(12)
    return torch.zeros_like(pre).flatten().scatter(0, indices, values).view_as(pre) @ down


def feed_forward(x, up, down):
    return torch.relu(x @ up) @ down


def unit_rows(x, up, down):
    down.div_(down.norm(dim=1, keepdim=True))
    return topk_autoencoder(x, up.mul_(2), down)


@pytest.mark.parametrize(
    "program", [topk_autoencoder, batch_topk_autoencoder, feed_forward, unit_rows]
)
def test_within_inference_mode(program):
    """The program has no view of a weight, which AOTAutograd would refuse in there, but an operator needs one."""
    x, up, down = torch.randn(4, 8), torch.randn(8, 24), torch.randn(24, 8)
    with sparse_inductor.enabled(policy="always"):
        copies = [t.clone() for t in (x, up, down)]
        found = compile_without_codegen(torch.inference_mode()(program))(*copies)
        assert sparse_inductor.report().rewrites
    torch.testing.assert_close(found, program(x, up, down))


ENERGIES = {
    "a detached rectifier": lambda x, gate, up, down: down(torch.relu(gate(x)).detach() * up(x)),
    "a detached step": lambda x, gate, up, down: torch.log1p(
        torch.relu(gate(x).detach() * down.bias[0])
    ).amax(1),
    "a learned gate of tokens": lambda x, gate, up, down: (
        torch.log1p(torch.relu(gate(x))) * torch.sigmoid(down(up(x))[..., :1])
    ).amax(1),
}


@pytest.mark.parametrize("forward", ENERGIES.values(), ids=ENERGIES)
def test_gradients_that_the_program_turns_on_itself(report, forward):
    """Samplers use enable_grad inside a caller's no_grad, so gradients inside the program matter."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(24, 8)])
    twin = copy.deepcopy(layers)

    @torch.enable_grad()
    def energy(x, modules):
        return forward(x, *modules)

    x = torch.randn(2, 6, 8)
    with torch.no_grad():
        mine, theirs = compile_without_codegen(energy)(x, layers), energy(x, twin)
    mine.square().sum().backward()
    theirs.square().sum().backward()
    assert_gradients(layers, twin)


# Weights


def test_weights_that_come_from_meta(report):
    """The model is built on the meta device and compiled, and gets its weights afterwards."""
    trained = encoder()
    with torch.device("meta"):
        model = Encoder()
    compiled = compile_without_codegen(model)
    model.to_empty(device="cpu")
    model.load_state_dict(trained.state_dict())
    assert_trains_like_eager(compiled, model, trained, *batch())
    assert rewritten(report) == BOTH


def test_the_operators_run_on_meta():
    x = torch.empty(2, 5, 8, device="meta")
    assert sparse_inductor.ops.splade_head(x, x.new_empty(11, 8)).shape == (2, 11)
    assert sparse_inductor.ops.entmax(x).shape == x.shape
    assert sparse_inductor.ops.entmax_attention(x, x, x).shape == x.shape


# Devices


@pytest.mark.gpu
def test_several_streams(report):
    """The program runs on two streams at once, with separate inputs."""
    model = encoder().cuda().requires_grad_(False)
    compiled = torch.compile(model)
    inputs = [tuple(t.cuda() for t in batch(16, 64, seed)) for seed in range(4)]
    wanted = [model(*args) for args in inputs]
    compiled(*inputs[0])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    got = []
    for _ in range(5):
        got.clear()
        for stream, args in zip(streams, inputs):
            with torch.cuda.stream(stream):
                got.append(compiled(*args))
    torch.cuda.synchronize()
    assert rewritten(report) == BOTH
    for mine, theirs in zip(got, wanted):
        torch.testing.assert_close(mine, theirs, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
def test_two_devices_in_one_process(report):
    """One function is compiled for the CPU and for the GPU."""
    models = {device: encoder().to(device) for device in ("cpu", "cuda")}
    results = {}
    for device, model in models.items():
        values = torch.compile(model)(*(t.to(device) for t in batch()))
        values.square().sum().backward()
        results[device] = values.detach().cpu()
    assert rewritten(report) == BOTH
    torch.testing.assert_close(results["cpu"], results["cuda"], atol=1e-2, rtol=1e-2)
    for a, b in zip(models["cpu"].parameters(), models["cuda"].parameters()):
        torch.testing.assert_close(a.grad, b.grad.cpu(), atol=5e-2, rtol=5e-2)


@pytest.mark.gpu
def test_training_under_cuda_graphs_does_not_wait_for_the_gpu(report):
    model, eager = encoder().cuda(), encoder().cuda()
    compiled = torch.compile(model, mode="reduce-overhead")
    args = tuple(t.cuda() for t in batch(8, 32))
    for _ in range(3):  # warm-up, capture, replay
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        compiled(*args).square().sum().backward()
    torch.cuda.synchronize()
    with waiting_is_an_error():
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        compiled(*args).square().sum().backward()
    eager(*args).square().sum().backward()
    assert rewritten(report) == BOTH
    for a, b in zip(model.parameters(), eager.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=5e-2, rtol=5e-2)


@contextlib.contextmanager
def waiting_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
