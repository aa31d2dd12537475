"""The comparison that decides whether a rewritten tensor is as accurate as the original one."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_inductor.verify.accuracy import (
    InDouble,
    LowestPrecision,
    compare,
    cotangents,
    gradients,
    tensors_in,
)

TRUTH = torch.linspace(-2, 2, 2000, dtype=torch.float64)
PLAIN = TRUTH.float()


def at(index: int, value: float, like: torch.Tensor = PLAIN) -> torch.Tensor:
    new = like.clone()
    new[index] = value
    return new


@pytest.mark.parametrize(
    ("got", "plain", "complaint"),
    [
        (PLAIN, PLAIN, ""),
        (PLAIN + 1e-5, PLAIN, ""),  # a few roundings
        (PLAIN + 1e-4, PLAIN, "error 0.0001"),
        (at(7, 5.0), PLAIN, "1 of 2000 elements, the first at [7]: rewritten 5"),
        (at(3, math.nan), PLAIN, "is NaN in other places"),
        (at(3, math.nan), at(3, math.nan), ""),
        (at(3, math.inf), PLAIN, "is infinite in other places"),
        (at(3, 1e31), at(3, -1e31), "holds other huge values"),
        (PLAIN.double(), PLAIN, "has dtype torch.float64, unrewritten torch.float32"),
        (PLAIN[1:], PLAIN, "has shape [1999], unrewritten [2000]"),
        (None, PLAIN, "is missing in the rewritten program"),
        (PLAIN, None, "is missing in the unrewritten program"),
        (None, None, ""),
        (torch.zeros(3), None, ""),  # zeros and no gradient are equivalent
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "differs; 1 of 2 elements"),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), ""),
    ],
)
def test_the_verdict(got, plain, complaint):
    found = compare("x", got, plain, TRUTH)
    assert found.ok == (not complaint) and complaint in found.complaint, found


def test_it_may_be_as_far_off_as_the_unrewritten_one():
    off = PLAIN + 1e-3
    assert compare("x", off, off, TRUTH).ok
    assert not compare("x", off * 1.1, off, TRUTH).ok


def test_rounding_of_a_lower_precision_counts_where_it_shows():
    """An example is the gradient of an fp32 weight that is computed in bf16 under autocast."""
    rounded = TRUTH.bfloat16().float()
    other = (TRUTH * 1.001).bfloat16().float()
    assert not compare("x", other, rounded, TRUTH).ok
    assert compare("x", other, rounded, TRUTH, precision=torch.bfloat16).ok
    assert not compare(
        "x", other, PLAIN, TRUTH, precision=torch.bfloat16
    ).ok  # the original was not rounded
    assert not compare("x", other * 1.3, rounded, TRUTH, precision=torch.bfloat16).ok


def test_the_lowest_precision_is_that_of_any_operation():
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    with LowestPrecision() as seen:
        torch.nn.functional.linear(x, w).argmax()
    assert seen.dtype == torch.float32
    with LowestPrecision() as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        torch.nn.functional.linear(x, w).float().sum()
    assert seen.dtype == torch.bfloat16


def test_errors_are_relative_above_one():
    truth = torch.full((10,), 1e6, dtype=torch.float64)
    plain = truth.float()
    assert compare("x", plain + 8, plain, truth).ok  # 8e-6
    assert not compare("x", plain + 80, plain, truth).ok


def test_single_gradients_may_go_elsewhere_where_maxima_tie():
    other = at(7, 5.0)
    assert compare("x", other, PLAIN, TRUTH, ties=True).ok
    many = PLAIN.clone()
    many[:50] += 1
    assert not compare("x", many, PLAIN, TRUTH, ties=True).ok
    few = slice(0, 500)
    assert not compare("x", other[few], PLAIN[few], TRUTH[few], ties=True).ok  # of few, none


def test_in_half_precision_the_typical_error_counts():
    plain, noise = TRUTH.bfloat16(), torch.randn(2000, generator=torch.Generator().manual_seed(0))
    assert compare("x", (TRUTH + 0.01 * noise).bfloat16(), plain, TRUTH).ok
    assert not compare("x", (TRUTH + 0.1 * noise).bfloat16(), plain, TRUTH).ok
    assert compare("x", at(7, 0.0, plain), plain, TRUTH, ties=True).ok
    assert not compare("x", at(7, 0.0, plain), plain, TRUTH).ok


def test_double_rounds_where_the_program_casts_and_nowhere_else():
    weight = torch.tensor([1.0, 3.0])

    def program(x):
        y = (x.to(torch.bfloat16) * weight).float()
        return y + torch.full((2,), 1 / 3, dtype=torch.float16)

    x = torch.tensor([1 / 3, 1 / 7], dtype=torch.float64)
    with InDouble():
        got = program(x)
    assert got.dtype == torch.float64
    cast = x.to(torch.bfloat16).double()
    torch.testing.assert_close(got, cast * weight.double() + 1 / 3, rtol=1e-14, atol=0)


def test_what_integers_become_is_double_too():
    """For example, an accumulator may start as `lengths * 0.1` and receive contributions in fp64."""
    lengths, x = torch.tensor([3, 7]), torch.tensor([1 / 3, 1 / 7], dtype=torch.float64)
    with InDouble():
        got = (lengths * 0.1).index_add_(0, torch.tensor([1, 0]), x)
    torch.testing.assert_close(got, lengths.double() * 0.1 + x.flip(0), rtol=1e-14, atol=0)


def test_cotangents_are_fixed_and_leave_the_random_state_alone():
    outputs = [torch.ones(3, requires_grad=True) * 2, torch.ones(3)]
    state = torch.get_rng_state()
    (first, none), (again, _) = cotangents(outputs), cotangents(outputs)
    assert none is None and first is not None and again is not None and torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_of_what_is_not_used_are_none():
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    outputs = [x * 2]
    got = gradients(outputs, [x, y], [torch.ones(3)])
    assert torch.equal(got[0], torch.full((3,), 2.0)) and got[1] is None
    assert gradients([torch.ones(3)], [x], [None]) == [None]


def test_tensors_are_found_in_whatever_a_model_returns():
    one, two = torch.ones(1), torch.ones(2)
    assert [t.numel() for t in tensors_in({"a": [one, (two, None)], "b": 3})] == [1, 2]
