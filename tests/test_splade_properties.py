"""Every linear map, rising step and masking of a SPLADE head, with every kind of mask: rewritten, with eager's results.

The fuzzer (tests/fuzz) tests random whole programs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import compile_without_codegen, heavy, near_misses, only_splade_head, rewrites

B, S, D, V = 3, 5, 4, 9
INF = math.inf

# The tests compute in fp64, so that rounding makes no ties and every difference is a wrong rewrite.
DTYPE = torch.float64


LINEARS = {
    "linear": lambda h, w, b: F.linear(h, w, b),
    "no_bias": lambda h, w, b: F.linear(h, w),
    "matmul": lambda h, w, b: h @ w.t() + b,
    "einsum": lambda h, w, b: torch.einsum("bsd,vd->bsv", h, w) + b,
    "einsum_vocabulary_first": lambda h, w, b: torch.einsum("vd,bsd->bvs", w, h).mT,
    "bmm": lambda h, w, b: torch.bmm(h, w.t().unsqueeze(0).expand(h.shape[0], -1, -1)) + b,
    "flat": lambda h, w, b: F.linear(h.reshape(-1, D), w, b).view(h.shape[0], -1, V),
    "addmm": lambda h, w, b: torch.addmm(b, h.reshape(-1, D), w.t()).unflatten(0, h.shape[:2]),
    "weight_first": lambda h, w, b: (w @ h.transpose(1, 2)).transpose(1, 2) + b,
    "scaled": lambda h, w, b: F.linear(h, w, b) * 0.5,
    "sequence_first": lambda h, w, b: F.linear(h.transpose(0, 1), w, b).transpose(0, 1),
}

RISING = {
    "log1p_relu": lambda z: torch.log1p(torch.relu(z)),
    "log_of_one_plus": lambda z: torch.log(1 + F.relu(z)),
    "relu": lambda z: z.clamp(min=0),
    "relu_in_place": lambda z: (z * 1).relu_(),
    "sqrt_relu": lambda z: torch.sqrt(F.relu(z)),
    "soft_cap": lambda z: 3 * torch.tanh(z / 3),
    "sigmoid": torch.sigmoid,
    "softplus": lambda z: F.softplus(z),
    "elu": lambda z: F.elu(z),
    "leaky": lambda z: F.leaky_relu(z, 0.1),
    "clamp": lambda z: z.clamp(-0.5, 1.5),
    "threshold": lambda z: F.threshold(z, 0.3, 0.0),
    "shift": lambda z: z - 0.25,
    "scale": lambda z: z / 2,
    "cube": lambda z: z**3,
    "gate": lambda z: z * (z > 0),
    "two_signs": lambda z: -(-z).clamp(max=0.2),
}


def _assigned(z: Tensor, keep: Tensor, value: float) -> Tensor:
    z = z.clone()
    z[~keep.expand(z.shape[:2])] = value
    return z


MASKINGS = {
    "none": lambda z, m: z,
    "multiply": lambda z, m: z * m.unsqueeze(-1),
    "multiply_cast": lambda z, m: z * m[..., None].to(z.dtype).expand_as(z),
    "fill_zero": lambda z, m: z.masked_fill(m.unsqueeze(-1) == 0, 0.0),
    "fill_low": lambda z, m: z.masked_fill(~m.bool().unsqueeze(-1), -1e4),
    "fill_minus_inf": lambda z, m: z.masked_fill((m == 0)[:, :, None], -INF),
    "where": lambda z, m: torch.where(m.bool()[..., None], z, 0.0),
    "where_other_way": lambda z, m: torch.where((m == 0)[..., None], torch.full_like(z, -2.0), z),
    "add_low": lambda z, m: z + (1 - m.to(z.dtype)).unsqueeze(-1) * -1e4,
    "add_minus_inf": lambda z, m: (
        z + torch.zeros_like(m, dtype=z.dtype).masked_fill(m == 0, -INF)[..., None]
    ),
    "subtract": lambda z, m: z - (m == 0).to(z.dtype).unsqueeze(-1) * 50,
    "assign": lambda z, m: _assigned(z, m.bool(), 0.0),
    "assign_minus_inf": lambda z, m: _assigned(z, m != 0, -INF),
    "divide": lambda z, m: z / (1 + m.to(z.dtype).abs()).unsqueeze(-1),
}

_KEEP = (torch.arange(S) < torch.tensor([[5], [3], [1]])).double()
_NONE = _KEEP.clone()
_NONE[1] = 0
_REAL = torch.tensor([[1.0, 0.5, 2.0, 0.0, 0.25], [1, 1, 1, 1, 0], [0.3, 1.7, 0, 0, 0]])
_SIGNED = torch.tensor([[1.0, -0.5, 2.0, 0.0, -1.0], [1, 1, 1, 0, 0], [-1, -2, -0.5, -3, -1]])
# One program is compiled for all masks of a kind.
MASKS = {
    "integers": (
        _KEEP.long(), _NONE.long(), torch.zeros(B, S, dtype=torch.int64), (_SIGNED * 2).long(),
    ),
    "double": (_KEEP, _REAL.double(), _SIGNED.double()),
    "float": (_KEEP.float(), torch.ones(B, S)),
    "bool": (_KEEP.bool(),),
    "shared": (_KEEP[1:2].long(),),
}  # fmt: skip


class Head(nn.Module):
    """A linear map, steps with the mask before one of them or after all, and the maximum over positions."""

    def __init__(self, linear: str, *steps: Callable[..., Tensor]):
        super().__init__()
        self.linear, self.steps = LINEARS[linear], steps
        g = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(V, D, generator=g, dtype=DTYPE))
        self.bias = nn.Parameter(torch.randn(V, generator=g, dtype=DTYPE))

    def forward(self, h: Tensor, m: Tensor) -> Tensor:
        y = self.linear(h, self.weight, self.bias)
        return functools.reduce(lambda y, step: step(y, m), self.steps, y).amax(1)


def assert_rewritten(heads: list[Head], *masks: Tensor, dynamic: bool | None = None) -> None:
    hidden = torch.randn(B, S, D, generator=torch.Generator().manual_seed(1), dtype=DTYPE)

    def program(h: Tensor, m: Tensor) -> list[Tensor]:
        return [head(h, m) for head in heads]

    with only_splade_head() as report:
        compiled = compile_without_codegen(program, dynamic=dynamic)
        got = [compiled(hidden, mask) for mask in masks]
        assert len(rewrites(report)) == len(heads), near_misses(report)
    expected = [program(hidden, mask) for mask in masks]
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10, equal_nan=True)


def unmasked(step: str) -> Callable[..., Tensor]:
    return lambda z, m: RISING[step](z)


@pytest.mark.parametrize("kind", ["integers", "double", *map(heavy, ("float", "bool", "shared"))])
@pytest.mark.parametrize("masking", MASKINGS)
@torch.no_grad()
def test_every_masking_with_every_mask(masking, kind):
    """The mask is applied before the activation or after it."""
    activation, masked = unmasked("log_of_one_plus"), MASKINGS[masking]
    before, behind = Head("linear", masked, activation), Head("linear", activation, masked)
    assert_rewritten([before, behind], *MASKS[kind])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("linear", LINEARS)
def test_every_linear_is_read(linear, dynamic):
    head = Head(linear, unmasked("log1p_relu"), MASKINGS["multiply"])
    assert_rewritten([head], _KEEP.long(), dynamic=dynamic)


@pytest.mark.parametrize("step", RISING)
@torch.no_grad()
def test_every_rising_step_is_proved(step):
    assert_rewritten([Head("linear", unmasked(step), MASKINGS["multiply"])], _KEEP.bool())
