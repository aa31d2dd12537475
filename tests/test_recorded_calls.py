"""Recorded calls with ATen operators: which can be replayed, and that a replay has the bits of the original call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparse_inductor.kernels.common import replay

pytestmark = pytest.mark.usefixtures("nothing_recorded")


def products(x: Tensor, weights: list[Tensor], bias: Tensor | None, factor: float) -> list[Tensor]:
    """Compute products into a part of a buffer, with writes in place, keyword operands, and factory functions."""
    room = x.new_empty(len(x) + 3, weights[0].shape[0])
    torch.mm(x, weights[0].t(), out=room[: len(x)])
    h = room[: len(x)]
    h.mul_(factor)
    if bias is not None:
        h += bias
    count = torch.full((2,), 3, dtype=torch.int32, device=x.device)
    out = torch.addmm(h, h, weights[1], beta=2.0) + torch.arange(h.shape[1], device=x.device)
    return [out, torch.topk(out, 2, dim=-1).indices, count]


def chosen(x: Tensor) -> Tensor:
    return x[(x > 0).nonzero().squeeze(1)] * 2


def decided(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


def arguments(seed: int, bias: bool = True) -> tuple:
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g)
    return draw(5, 4), [draw(6, 4), draw(6, 6)], draw(6) if bias else None, 0.5


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("how", [replay.replayed, replay.Site])
def test_a_recorded_call_gives_the_bits_of_the_function(how, bias):
    call = how(products)
    for seed in range(5):
        args = arguments(seed, bias)
        for got, wanted in zip(call(*args), products(*args), strict=True):
            assert torch.equal(got, wanted)
    assert [type(p) for p in replay._plans.values()] == [replay.Plan]


def test_a_site_keeps_arguments_that_are_the_same_at_each_call():
    _, *kept = arguments(0)
    call = replay.Site(products, kept=kept)
    for seed in range(5):
        x = arguments(seed)[0]
        assert all(map(torch.equal, call(x), products(x, *kept)))
    assert call._plan is not None


@pytest.mark.parametrize("kept", [(), (None,), (torch.ones(5, 6), 2.0)])
def test_a_site_takes_its_tensors_from_among_other_arguments(kept):
    def fn(factor, x, _, y, *more):
        return x @ y * factor + (more[0] if more and more[0] is not None else 0)

    call = replay.Site(fn, kept=kept)
    for seed in range(4):
        x, (_, _), _, _ = arguments(seed)
        y = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(call(0.5, x, None, y), fn(0.5, x, None, y, *kept))
    assert call._plan is not None


def test_a_site_takes_tensors_that_are_aligned_otherwise_and_new_plans():
    call = replay.Site(products)
    x, *rest = arguments(0)
    shifted = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    wanted = products(x, *rest)
    for _ in range(4):
        for given in (x, shifted):
            torch.testing.assert_close(call(given, *rest), wanted)
    assert len(replay._plans) == 2
    replay.forget()
    torch.testing.assert_close(call(x, *rest), wanted)


def test_a_dtype_is_no_number_that_depends_on_what_tensors_hold():
    call = replay.replayed(lambda x, y: x.to(torch.promote_types(x.dtype, y.dtype)) * y)
    for seed in range(4):
        x, (y, *_), *_ = arguments(seed)
        x = x.to(torch.float16)
        assert torch.equal(call(x, y[:5]), x.float() * y[:5])
    assert [type(p) for p in replay._plans.values()] == [replay.Plan]


@pytest.mark.parametrize("fn", [chosen, decided])
def test_what_depends_on_what_tensors_hold_is_called_each_time(fn):
    call = replay.replayed(fn)
    for seed in range(5):
        x = torch.randn(7, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(call(x), fn(x))
    assert [*replay._plans.values()] == [None]
