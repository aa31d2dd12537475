"""Autograd features beyond plain gradients: forward mode, second derivatives, weights that are tensor subclasses."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import nn

import sparse_inductor
from corpus.entmax.hand_written import sort_sparsemax
from programs import LAYERS, D, layer
from sparse_inductor import ops
from sparse_inductor.testing import compile_without_codegen

aten = torch.ops.aten


def tokens(requires_grad: bool = False) -> torch.Tensor:
    x = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(requires_grad)


def direct(pattern: str):
    """Return a function that calls the operator directly on a [5, 4] tensor."""
    square = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    return {
        "relu_ffn": lambda x: ops.relu_ffn(x, square, square),
        "entmax_attention": lambda x: ops.entmax_attention(x[None], x[None], x[None]),
        "entmax": lambda x: ops.entmax(x * x),
        "splade_head": lambda x: ops.splade_head(x[None], square, steps="relu"),
        "sparse_scores": lambda x: ops.sparse_scores(
            x * x, torch.tensor([[0, 1], [2, 3]]), torch.rand(2, 2)
        ),
    }[pattern]


# Forward mode


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("pattern", LAYERS)
def test_forward_mode_gives_the_tangent_or_runs_as_written(pattern, learns):
    if pattern in ("entmax", "entmax_attention"):
        pytest.skip("the entmax package has no forward mode")
    module, x = layer(pattern).requires_grad_(learns), tokens()
    direction = torch.randn_like(x)

    def tangent(x, direction):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(module(forward_ad.make_dual(x, direction))).tangent

    def around(x, direction):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, direction)
            return forward_ad.unpack_dual(compiled(dual)).tangent

    wanted = tangent(x, direction).detach()
    with sparse_inductor.enabled(only=pattern), torch.set_grad_enabled(learns):
        torch.testing.assert_close(compile_without_codegen(tangent)(x, direction), wanted)
        report = sparse_inductor.report()
        assert not report.rewrites
        assert any("forward-mode" in miss.reason for miss in report.near_misses)
        if learns:
            return  # AOTAutograd's compiled training functions do not support forward mode
        compiled = compile_without_codegen(module)
        torch.testing.assert_close(around(x, direction), wanted)
        assert not report.rewrites


@pytest.mark.parametrize("pattern", LAYERS)
def test_an_operator_has_no_tangent_and_says_so(pattern):
    x = torch.randn(5, 4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=f"{pattern} has no forward-mode derivative"):
            direct(pattern)(dual)
        assert direct(pattern)(x).isfinite().all()


@pytest.mark.parametrize("transform", ["grad", "vmap"])
@pytest.mark.parametrize("pattern", [name for name in LAYERS if name != "sparse_scores"])
def test_an_operator_inside_a_transform_says_so(pattern, transform):
    operator, x = direct(pattern), torch.randn(5, 4)
    with pytest.raises(NotImplementedError, match=f"::{pattern} takes no part in torch.func"):
        if transform == "grad":
            torch.func.grad(lambda x: operator(x).sum())(x)
        else:
            torch.vmap(operator)(x[None])


# Second derivatives


@pytest.mark.parametrize("pattern", LAYERS)
def test_a_gradient_that_the_graph_differentiates_is_as_written(pattern):
    if pattern in ("entmax", "entmax_attention"):
        pytest.skip("the entmax package has no second derivative")
    module, x = layer(pattern), tokens(requires_grad=True)

    def penalty(x):
        (g,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return g.square().mean()

    def step(program):
        module.zero_grad()
        program(x).backward()
        return [p.grad for p in module.parameters()]

    wanted = step(penalty)
    x.grad = None
    with (
        sparse_inductor.enabled(only=pattern),
        torch._dynamo.config.patch(trace_autograd_ops=True),
    ):
        torch.testing.assert_close(step(compile_without_codegen(penalty)), wanted)
    report = sparse_inductor.report()
    assert not report.rewrites
    assert any("create_graph" in miss.reason for miss in report.near_misses)


PENALTIES = {
    "alone": lambda y, g, x: g.square().sum().backward(),
    # `torch.autograd.grad` visits only nodes on a path to its inputs, and the error has to be raised there, too.
    "of inputs": lambda y, g, x: torch.autograd.grad(y + g.square().sum(), x, allow_unused=True),
}


@pytest.mark.parametrize("asked", PENALTIES)
@pytest.mark.parametrize("pattern", LAYERS)
def test_a_second_derivative_of_an_operator_raises_its_name(pattern, asked):
    x = torch.randn(5, 4).requires_grad_()
    y = direct(pattern)(x).square().sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(
        RuntimeError, match=f"sparse_inductor::{pattern} has a first derivative only"
    ):
        PENALTIES[asked](y, g, x)


def test_a_penalty_within_a_checkpoint_is_not_dropped_either():
    x = torch.randn(5, 4).requires_grad_()
    run = direct("relu_ffn")
    y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).square().sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="relu_ffn has a first derivative only"):
        torch.autograd.grad(y + g.square().sum(), x)


def test_create_graph_alone_is_no_error():
    x = torch.randn(5, 4).requires_grad_()
    (g,) = torch.autograd.grad(direct("relu_ffn")(x).sum(), x, create_graph=True)
    (wanted,) = torch.autograd.grad(direct("relu_ffn")(x).sum(), x)
    assert torch.equal(g, wanted)


@pytest.mark.parametrize("pattern", LAYERS)
def test_gradients_of_several_vectors_at_once(pattern):
    """The gradients are right, or an error names the operator: vmap has no fallback for operators with lists."""
    module, x = layer(pattern), tokens(requires_grad=True)

    def rows(model):
        y = model(x)
        vectors = torch.randn(3, *y.shape, generator=torch.Generator().manual_seed(2))
        return torch.autograd.grad(y, x, vectors, is_grads_batched=True)[0]

    wanted = rows(module)
    with sparse_inductor.enabled(only=pattern, policy="always"):
        model = compile_without_codegen(module)
        try:
            torch.testing.assert_close(rows(model), wanted)
        except RuntimeError as error:
            assert pattern in ("splade_head", "entmax_attention")
            assert f"sparse_inductor::{pattern}" in str(error)
        assert sparse_inductor.report().rewrites


# Saved-tensor hooks


class _Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(D, 600), nn.Linear(600, D)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        f = self.encoder(x).relu()
        return self.decoder(f), f


SAVING_INTEGERS = {
    "relu_ffn": lambda: nn.Sequential(nn.Linear(D, 600), nn.ReLU(), nn.Linear(600, D)),
    "sparse_product": _Autoencoder,
    "entmax_attention": lambda: layer("entmax_attention"),
}


@pytest.mark.parametrize("pattern", SAVING_INTEGERS)
def test_hooks_that_take_what_is_saved_for_floating_point_numbers(pattern):
    """The hooks would round an operator's saved indices of neurons to eight bits, and thus change them."""
    torch.manual_seed(0)
    block, x = SAVING_INTEGERS[pattern](), tokens()
    rounded = torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t.dtype, t.bfloat16()), lambda packed: packed[1].to(packed[0])
    )

    def step(model):
        with rounded:
            y = pytree.tree_leaves(model(x))
        return torch.autograd.grad(sum(t.square().sum() for t in y), list(block.parameters()))

    wanted = step(block)
    with sparse_inductor.enabled(only=pattern, policy="always"):
        got = step(compile_without_codegen(block))
        assert "the program has saved-tensor hooks" in str(sparse_inductor.report())
    torch.testing.assert_close(got, wanted, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("pattern", LAYERS)
def test_what_is_saved_may_wait_elsewhere(pattern):
    module, x = layer(pattern), tokens(requires_grad=True)

    def step(model):
        with torch.autograd.graph.save_on_cpu():
            y = model(x)
        return torch.autograd.grad(y.square().sum(), [x, *module.parameters()])

    wanted = step(module)
    with sparse_inductor.enabled(only=pattern, policy="always"):
        torch.testing.assert_close(step(compile_without_codegen(module)), wanted)
        assert sparse_inductor.report().rewrites


# Tensor subclasses


class Rounded(torch.Tensor):
    """A weight subclass that rounds itself in matrix products, as quantised weights do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Rounded(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.alias.default, aten.t.default):
            return Rounded(func(args[0].inner))

        def plain(t):
            return torch.round(t.inner * 2) / 2 if isinstance(t, Rounded) else t

        return func(*pytree.tree_map(plain, args), **(kwargs or {}))


@pytest.mark.parametrize("pattern", ["relu_ffn", "splade_head"])
def test_weights_of_a_subclass_are_left_to_it(pattern):
    if torch.__version__ < (2, 13):
        pytest.skip("this torch does not trace the subclass")
    module, x = layer(pattern).requires_grad_(False), tokens()
    for linear in (m for m in module.modules() if isinstance(m, nn.Linear)):
        linear.weight = nn.Parameter(Rounded(linear.weight.detach() * 3), requires_grad=False)
    wanted = module(x)
    with sparse_inductor.enabled(only=pattern):
        torch.testing.assert_close(compile_without_codegen(module)(x), wanted)
    report = sparse_inductor.report()
    assert not report.rewrites
    assert any("Rounded, a tensor subclass" in miss.reason for miss in report.near_misses)


# Writes to what an operator saves


def add_to_result(f, x):
    y = f(x)
    y += x
    return y


def scale_part_of_result(f, x):
    y = f(x)
    y[:, 1:].mul_(2.0)
    return y


def add_to_input(f, x):
    x = x * 1.0
    y = f(x)
    x += y
    return x


def add_to_input_by_a_view(f, x):
    x = x * 1.0
    y = f(x)
    x.transpose(0, 1).add_(y.transpose(0, 1).detach())
    return x + y


PROGRAMS = {
    **{pattern: None for pattern in LAYERS if pattern != "entmax"},
    "entmax": sort_sparsemax,  # plain operations that do not save their result
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("pattern", PROGRAMS)
@pytest.mark.parametrize(
    "writes",
    [add_to_result, scale_part_of_result, add_to_input, add_to_input_by_a_view],
    ids=lambda f: f.__name__,
)
def test_what_is_saved_may_be_written_to(pattern, writes, learns):
    """This holds if the original program can train; with trained weights it saves more tensors."""
    module = PROGRAMS[pattern] or layer(pattern).requires_grad_(learns)

    def step(program):
        x = tokens(requires_grad=True)
        y = program(x)
        y.square().sum().backward()
        return [y.detach(), x.grad]

    def program(x):
        return writes(module, x)

    try:
        wanted = step(program)
    except RuntimeError:
        assert learns or pattern.startswith("entmax")
        return
    # Sparsemax in plain operations is not rewritten if its operands have other readers.
    strict = pattern != "entmax" or writes in (add_to_result, scale_part_of_result)
    with sparse_inductor.enabled(only=pattern, strict=strict):
        torch.testing.assert_close(step(compile_without_codegen(program)), wanted)


def test_a_bias_may_be_written_to_when_it_was_added():
    """A linear layer saves no bias, but the operator does. It is not used if AOTAutograd could read a changed bias."""
    decoder = layer("splade_head")
    (bias,) = (p for name, p in decoder.named_parameters() if name.endswith("bias"))

    def program(x):
        y = decoder(x)
        with torch.no_grad():
            bias.clamp_(-0.1, 0.1)
        return y

    def step(program):
        decoder.zero_grad()
        with torch.no_grad():
            bias.fill_(0.3)
        program(tokens()).sum().backward()
        return [p.grad for p in decoder.parameters()]

    wanted = step(program)
    with sparse_inductor.enabled(only="splade_head"):
        torch.testing.assert_close(step(compile_without_codegen(program)), wanted)
    report = sparse_inductor.report()
    assert not report.rewrites and "writes to an input" in report.near_misses[0].reason
