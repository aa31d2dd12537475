"""Unusual but real programs around a compiled model have eager's results and gradients, with every family rewritten."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_inductor
from corpus.entmax.hand_written import sort_sparsemax
from processes import threads
from programs import D, Model, draw, step
from sparse_inductor import compat, rewrite
from sparse_inductor.testing import compile_without_codegen

Compile = Callable[[Any], Any]


USAGES: dict[str, Callable[[Compile], Any]] = {}


def usage(f: Callable[[Compile], Any]) -> Callable[[Compile], Any]:
    USAGES[f.__name__] = f
    return f


@usage
def compiled_inside_compiled(compiled):
    m = Model()
    m[1] = compiled(m[1])
    return step(compiled(m), m)


@usage
def without_gradients_first(compiled):
    m = Model()
    f = compiled(m)
    with torch.no_grad():
        quiet = f(draw())
    with torch.inference_mode():
        quieter = f(draw()).sum().item()
    return quiet, quieter, step(f, m)


@usage
def weights_are_reloaded(compiled):
    m = Model()
    f = compiled(m)
    first = step(f, m)
    m.load_state_dict(Model(1).state_dict())
    second = step(f, m)
    m.load_state_dict(Model(2).state_dict(), assign=True)
    return first, second, step(f, m)


@usage
def a_method_of_two_objects(compiled):
    class Trainer:
        def __init__(self, seed):
            self.m = Model(seed)

        @compiled
        def run(self, x, *, scale=1.0):
            return self.m(x) * scale

    a, b = Trainer(0), Trainer(1)
    return step(functools.partial(a.run, scale=2.0), a.m), step(b.run, b.m)


@usage
def a_generator_in_forward(compiled):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = Model()

        def parts(self, x) -> Iterator[Tensor]:
            for layer in self.m:
                x = layer(x)
                yield x

        def forward(self, x):
            return sum(self.parts(x))

    m = Sum()
    return step(compiled(m), m)


@usage
def hooks_of_every_kind(compiled):
    m = Model()
    m[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    m[1].up.register_forward_hook(lambda module, inputs, output: output * 1.5)
    m[2].register_full_backward_hook(lambda module, incoming, outgoing: (incoming[0] * 2,))
    m[3].decoder.weight.register_hook(lambda grad: grad * 3)

    def double(p):
        p.grad.mul_(2)

    m[3].decoder.bias.register_post_accumulate_grad_hook(double)
    return step(compiled(m), m)


@usage
def an_optimizer_in_backward(compiled):
    m = Model()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in m.parameters()}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in m.parameters():
        p.register_post_accumulate_grad_hook(update)
    f = compiled(m)
    for seed in range(2):
        f(draw(seed=seed)).square().mean().backward()
    return [p.detach() for p in m.parameters()]


@usage
def tied_and_normalised_weights(compiled):
    m = Model()
    m[3].decoder.weight = m[0].q.weight
    parametrizations.spectral_norm(m[1].up)
    parametrizations.orthogonal(m[0].v)
    prune.l1_unstructured(m[1].down, "weight", 0.5)
    return step(compiled(m), m)


@usage
def other_default_dtypes(compiled):
    m = Model()
    f = compiled(m)
    found = [step(f, m)]
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            found.append(step(f, m))
        finally:
            torch.set_default_dtype(torch.float32)
    return found


@usage
def anomaly_and_determinism(compiled):
    m = Model()
    f = compiled(m)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            return step(f, m)
    finally:
        torch.use_deterministic_algorithms(False)


@usage
def modes_of_the_callers(compiled):
    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    m = Model()
    f = compiled(m)
    with Functions():
        first = step(f, m)
    with Dispatched():
        second = step(f, m)
    with torch.autograd.graph.save_on_cpu():
        return first, second, step(f, m)


@usage
def results_of_other_kinds(compiled):
    @dataclasses.dataclass
    class Result:
        y: Tensor
        rest: None
        number: int

    m = Model()
    f = compiled(lambda x: Result(m(x), None, x.shape[0]))
    return f(draw()).number, step(lambda x: f(x).y, m)


@usage
def arguments_of_other_kinds(compiled):
    m = Model()

    @compiled
    def f(*tensors, scale, bias=None):
        x = next(t for t in tensors if t is not None)
        return m(x) * scale if bias is None else m(x) * scale + bias

    calls = (
        lambda x: f(x, scale=1.0),
        lambda x: f(None, x, scale=2),
        lambda x: f(x, None, scale=True, bias=0.5),
    )
    return [step(call, m) for call in calls]


@usage
def batches_that_are_empty(compiled):
    m = Model()
    f = compiled(m)
    return [step(f, m, draw(batch, length)) for batch, length in ((2, 5), (0, 5), (1, 1), (3, 2))]


@usage
def several_threads_compile(compiled):
    models = [Model(seed) for seed in range(3)]
    found: list[Any] = [None] * 3

    def run(i):
        found[i] = step(compiled(models[i]), models[i])

    with threads(*(functools.partial(run, i) for i in range(3))):
        pass
    return found


@usage
def tasks_of_asyncio(compiled):
    m = Model().requires_grad_(False)
    f = compiled(m)

    async def run():
        return await asyncio.gather(
            *(asyncio.to_thread(f, draw(seed=i).detach()) for i in range(3))
        )

    return asyncio.run(run())


@usage
def layers_are_changed_later(compiled):
    m = Model()
    f = compiled(m)
    found = [step(f, m)]
    m[1].requires_grad_(False)
    found.append(step(f, m))
    with torch.no_grad():
        m[3].decoder.weight.data = m[3].decoder.weight.data * 2
    found.append(step(f, m))
    m[1] = nn.Identity()
    return [*found, step(f, m)]


@usage
def gradients_inside(compiled):
    m = Model()
    optimizer = torch.optim.SGD(m.parameters(), 0.1)

    @compiled
    def train(x):
        optimizer.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return [train(draw(seed=i)) for i in range(2)], [p.detach() for p in m.parameters()]


@usage
def an_average_inside(compiled):
    m = Model()
    average = copy.deepcopy(m).requires_grad_(False)

    @compiled
    def f(x):
        y = m(x)
        with torch.no_grad():
            z = average(x)
            for a, b in zip(average.parameters(), m.parameters()):
                a.lerp_(b, 0.5)
        return y - z

    return step(f, m), step(f, m), [*average.parameters()]


@usage
def inputs_are_written_to(compiled):
    m = Model()

    def f(x):
        x.mul_(2)
        y = m(x)
        x.add_(1)
        return y

    x = draw().detach()
    return compiled(f)(x).detach(), x


@usage
def what_raises_in_between(compiled):
    m = Model()
    f = compiled(m)
    found = [step(f, m)]
    for bad in (torch.randn(2, 5, D + 1), torch.zeros(2, 5, D, dtype=torch.int64)):
        with pytest.raises(Exception):
            f(bad)
    return [*found, step(f, m)]


@pytest.mark.heavy
@pytest.mark.parametrize("policy", ["always", "auto"])
@pytest.mark.parametrize("program", USAGES.values(), ids=USAGES)
def test_usage(program, policy):
    wanted = program(lambda fn: fn)
    torch._dynamo.reset()
    with sparse_inductor.enabled(policy=policy):
        got = program(compile_without_codegen_as_module)
    rewritten = {rewrite.pattern for rewrite in sparse_inductor.report().rewrites}
    assert policy == "auto" or {"relu_ffn", "splade_head"} <= rewritten
    got, wanted = (pytree.tree_leaves(t) for t in (got, wanted))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3)


def compile_without_codegen_as_module(fn: Any) -> Any:
    """Return what `torch.compile` returns: a module for a module, a function (perhaps a method) for a function."""
    if isinstance(fn, nn.Module):
        compiled = compile_without_codegen(fn)
        return compiled._fn
    return compile_without_codegen(fn)._fn


def test_what_a_pass_tries_passes_through_no_mode():
    """A mode of the caller, or one left on by a failed compilation, would refuse or count the pass's trial runs."""

    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was seen")

    def passes(gm, inputs):
        with Refuses():
            return compat.pre_grad_passes(gm, inputs).forward

    q, k, v = torch.randn(3, 2, 4, 6, 8)
    with sparse_inductor.enabled(policy="always"):
        found = torch.compile(lambda: sort_sparsemax(q @ k.mT) @ v, backend=passes)()
    assert [r.pattern for r in sparse_inductor.report().rewrites] == ["entmax_attention"]
    assert not rewrite.failures
    torch.testing.assert_close(found, sort_sparsemax(q @ k.mT) @ v)
