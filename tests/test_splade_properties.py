"""Whole programs drawn at random: whatever is decided about one, its outputs and gradients are eager's."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparse_inductor import rewrite
from sparse_inductor.testing import assert_matches_reference
from support import compile_without_codegen, near_misses, one_in, only_splade_head, rewrites

B, S, D, V = 3, 5, 4, 9
INF = math.inf

# Computed in fp64, so that no tie comes from rounding and any difference is a wrong rewrite.
DTYPE = torch.float64


def _bmm(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(h, w.t().unsqueeze(0).expand(h.shape[0], -1, -1)) + b


LINEARS = {
    "linear": lambda h, w, b: F.linear(h, w, b),
    "no_bias": lambda h, w, b: F.linear(h, w),
    "matmul": lambda h, w, b: h @ w.t() + b,
    "einsum": lambda h, w, b: torch.einsum("bsd,vd->bsv", h, w) + b,
    "einsum_vocabulary_first": lambda h, w, b: torch.einsum("vd,bsd->bvs", w, h).mT,
    "bmm": _bmm,
    "flat": lambda h, w, b: F.linear(h.reshape(-1, D), w, b).view(h.shape[0], -1, V),
    "addmm": lambda h, w, b: torch.addmm(b, h.reshape(-1, D), w.t()).unflatten(0, h.shape[:2]),
    "weight_first": lambda h, w, b: (w @ h.transpose(1, 2)).transpose(1, 2) + b,
    "scaled": lambda h, w, b: F.linear(h, w, b) * 0.5,
    "sequence_first": lambda h, w, b: F.linear(h.transpose(0, 1), w, b).transpose(0, 1),
}

# Steps without infinite slopes at a masked position: there eager has inf * 0 = NaN in its own gradient.
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
OTHER = {
    "square": torch.square,
    "negated": lambda z: -z,
    "absolute": torch.abs,
    "sine": torch.sin,
    "gelu": F.gelu,
    "square_relu": lambda z: F.relu(z).square(),
    "reciprocal": lambda z: 1 / (1 + z.exp()),
    "centred": lambda z: (z - 0.5) ** 2,
    "normalised": lambda z: z.softmax(-1),
    "by_the_mean": lambda z: z - z.mean(1, keepdim=True),
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


def _chunked(y: Tensor) -> Tensor:
    a, b = y[:, :2], y[:, 2:]
    return torch.maximum(a.amax(1), b.amax(1))


REDUCTIONS = {
    "amax": lambda y: y.amax(1),
    "amax_negative_dim": lambda y: torch.amax(y, dim=-2),
    "amax_keepdim": lambda y: y.amax(1, keepdim=True),
    "max_values": lambda y: y.max(1).values,
    "max_first": lambda y: torch.max(y, dim=1)[0],
    "max_both": lambda y: torch.max(y, dim=1),
    "max_pair": lambda y: tuple(y.max(dim=1, keepdim=True)),
    "transposed": lambda y: y.transpose(1, 2).max(-1)[0],
    "min_of_negated": lambda y: -(-y).amin(1),
    "top1": lambda y: y.topk(1, dim=1).values.squeeze(1),
    "chunked": _chunked,
    "a_prefix": lambda y: y[:, :3].amax(1),
    "then_log": lambda y: torch.log1p(y.amax(1).clamp(min=0)),
    "minimum": lambda y: y.amin(1),
    "sum": lambda y: y.sum(1),
    "over_vocabulary": lambda y: y.amax(2),
    "and_the_mean": lambda y: (y.amax(1), y.mean()),
}

_KEEP = (torch.arange(S) < torch.tensor([[5], [3], [1]])).double()
_NONE = _KEEP.clone()
_NONE[1] = 0
_REAL = torch.tensor([[1.0, 0.5, 2.0, 0.0, 0.25], [1, 1, 1, 1, 0], [0.3, 1.7, 0, 0, 0]])
_SIGNED = torch.tensor([[1.0, -0.5, 2.0, 0.0, -1.0], [1, 1, 1, 0, 0], [-1, -2, -0.5, -3, -1]])
MASKS = {
    "bool": _KEEP.bool(),
    "int": _KEEP.long(),
    "float": _KEEP.float(),
    "double": _KEEP,
    "a_sequence_without": _NONE.long(),
    "all_zero": torch.zeros(B, S, dtype=torch.int64),
    "all_one": torch.ones(B, S),
    "shared": _KEEP[1:2].long(),
    "real": _REAL.double(),
    "signed": _SIGNED.double(),
    "small_integers": (_SIGNED * 2).long(),
}


@dataclasses.dataclass(frozen=True)
class Spelling:
    """Names from the tables above; `where` is before which step the mask comes."""

    linear: str
    chain: tuple[str, ...]
    masking: str
    where: int
    mask: str
    reduction: str


class Program(nn.Module):
    def __init__(self, spelling: Spelling):
        super().__init__()
        self.spelling = spelling
        g = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(V, D, generator=g, dtype=DTYPE))
        self.bias = nn.Parameter(torch.randn(V, generator=g, dtype=DTYPE))

    def forward(self, h: Tensor, m: Tensor) -> Any:
        s = self.spelling
        y = LINEARS[s.linear](h, self.weight, self.bias)
        for at, step in enumerate((*s.chain, None)):
            if at == s.where:
                y = MASKINGS[s.masking](y, m)
            if step is not None:
                y = (RISING.get(step) or OTHER[step])(y)
        return REDUCTIONS[s.reduction](y)


def mostly(good: list[str], all_of: dict) -> st.SearchStrategy[str]:
    """One of `good` half of the time, so that enough programs are heads."""
    return st.sampled_from(good) | st.sampled_from(list(all_of))


@st.composite
def spellings(draw) -> Spelling:
    rising = st.sampled_from(list(RISING))
    steps = rising | rising | rising | st.sampled_from(list(OTHER))
    chain = draw(
        st.sampled_from([("log1p_relu",), ("soft_cap", "log1p_relu")])
        | st.lists(steps, max_size=4).map(tuple)
    )
    return Spelling(
        draw(st.sampled_from(list(LINEARS))),
        chain,
        draw(st.sampled_from(list(MASKINGS))),
        draw(st.integers(0, len(chain))),
        draw(st.sampled_from(list(MASKS))),
        draw(mostly(["amax", "max_values"], REDUCTIONS)),
    )


def inputs_of(spelling: Spelling) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, S, D, generator=g, dtype=DTYPE)
    return hidden.requires_grad_(), MASKS[spelling.mask]


def ties_with_a_gradient(spelling: Spelling) -> bool:
    """Equal values (-inf too) at positions whose slope is not 0: amax and max(dim) share the gradient
    differently, and which position the operator takes is its own business."""
    hidden, mask = inputs_of(spelling)
    program = Program(spelling)
    seen: list[Tensor] = []
    flat = dataclasses.replace(spelling, reduction="amax")
    program.spelling = flat

    def keep(y: Tensor) -> Tensor:
        seen.append(y)
        return y.amax(1)

    original = REDUCTIONS["amax"]
    REDUCTIONS["amax"] = keep
    try:
        program(hidden, mask)
    finally:
        REDUCTIONS["amax"] = original
    (y,) = seen
    winners = y == y.amax(1, keepdim=True)
    tied = winners & (winners.sum(1, keepdim=True) > 1)
    if not tied.any():
        return False
    (grad,) = torch.autograd.grad(y, hidden, tied.to(DTYPE))
    return bool(grad.abs().sum() > 0)


SEEN: collections.Counter[str] = collections.Counter()


def check(spelling: Spelling, training: bool, dynamic: bool) -> None:
    with only_splade_head():
        report = assert_matches_reference(
            Program(spelling), inputs_of(spelling), grads=training, inference=not training,
            dynamic=dynamic or None, vary=0, must_rewrite=False,
        ).report  # fmt: skip
    assert not rewrite.failures, rewrite.failures
    decided = "rewritten" if report.rewrites else "declined" if report.near_misses else "left"
    SEEN[decided] += 1
    event(decided)


@settings(
    derandomize=True,
    deadline=None,
    max_examples=30,
    suppress_health_check=list(HealthCheck),
)
@given(spellings(), st.booleans(), st.booleans())
def draw_and_check(spelling, training, dynamic):
    if training and ties_with_a_gradient(spelling):
        training = False
    check(spelling, training, dynamic)


def test_numbers_hold_whatever_is_decided():
    """And enough is decided: nothing would be tested if every program were left alone."""
    SEEN.clear()
    draw_and_check()
    assert SEEN["rewritten"] >= 0.4 * sum(SEEN.values()), SEEN
    assert SEEN["declined"] + SEEN["left"] >= 2, SEEN


@pytest.mark.parametrize("mask", one_in(3, MASKS))
@pytest.mark.parametrize("masking", MASKINGS)
def test_every_masking_with_every_mask(masking, mask):
    """The default head, one compilation for the whole table of where the mask comes."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(
                Program(Spelling("linear", ("relu", "log_of_one_plus"), masking, at, mask, "amax"))
                for at in (0, 2)
            )

        def forward(self, h, m):
            return [part(h, m) for part in self.parts]

    model, (hidden, m) = Both(), inputs_of(Spelling("", (), "", 0, mask, ""))
    expected = model(hidden, m)
    with only_splade_head() as report, torch.no_grad():
        got = compile_without_codegen(model)(hidden, m)
        assert len(rewrites(report)) == 2, near_misses(report)
    for ours, eager in zip(got, expected):
        torch.testing.assert_close(ours, eager, rtol=1e-10, atol=1e-10, equal_nan=True)


def assert_rewritten(*spelling: Any, dynamic: bool | None = None) -> None:
    model, inputs = Program(Spelling(*spelling)), inputs_of(Spelling(*spelling))
    with only_splade_head() as report:
        got = compile_without_codegen(model, dynamic=dynamic)(*inputs)
        assert len(rewrites(report)) == 1, near_misses(report)
    torch.testing.assert_close(got, model(*inputs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("linear", LINEARS)
def test_every_linear_is_read(linear, dynamic):
    assert_rewritten(linear, ("log1p_relu",), "multiply", 1, "int", "amax", dynamic=dynamic)


@pytest.mark.parametrize("step", RISING)
@torch.no_grad()
def test_every_rising_step_is_proved(step):
    assert_rewritten("linear", (step,), "multiply", 1, "bool", "amax")
