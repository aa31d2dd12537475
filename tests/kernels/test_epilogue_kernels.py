"""The kernels' evaluator of epilogues against its specification, `steps.dual`, in value and slope."""

import math

import pytest
import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.functions import FUNCTIONS, SCALAR
from sparse_inductor.epilogue.steps import Step, dual, parse
from sparse_inductor.kernels.common import epilogue

INF = math.inf

# In the interpreter, NumPy warns where a GPU silently produces inf and NaN, which these tests need.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@triton.jit
def scalar_kernel(x_ptr, value_ptr, dual_ptr, slope_ptr, STEPS: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(value_ptr + at, epilogue.evaluate(x, STEPS))
    y, slope = epilogue.dual(x, STEPS)
    tl.store(dual_ptr + at, y)
    tl.store(slope_ptr + at, slope)


def kernel_dual(program, x):
    """Return (value, slope) of the kernel, and assert that `evaluate` and `dual` give the same value."""
    n = max(128, triton.next_power_of_2(x.numel()))
    padded = torch.nn.functional.pad(x, (0, n - x.numel()), value=0.5)
    value, again, slope = (torch.full_like(padded, math.nan) for _ in range(3))
    scalar_kernel[(1,)](padded, value, again, slope, epilogue.encode(program), n)
    assert torch.equal(value.nan_to_num(7.5), again.nan_to_num(7.5))
    return value[: x.numel()], slope[: x.numel()]


# One or more settings of every scalar step, with the interval of its random points. Steps of functions in FUNCTIONS
# that are missing here are added with their defaults.
CASES = [
    (Step("add", (0.3,)), -5, 5),
    (Step("mul", (-1.7,)), -5, 5),
    (Step("clamp_min", (0.25,)), -2, 2),
    (Step("clamp_max", (0.25,)), -2, 2),
    (Step("cap", (0.25,)), -2, 2),
    (Step("relu"), -2, 2),
    (Step("threshold", (0.5, -3.0)), -2, 2),
    (Step("fill_below", (0.5, -3.0)), -2, 2),
    (Step("fill_above", (0.5, 3.0)), -2, 2),
    (Step("gate_above", (0.5, -3.0)), -2, 2),
    (Step("gate_at_least", (0.5, -3.0)), -2, 2),
    (Step("above", (0.5, -3.0)), -2, 2),
    (Step("at_least", (0.5, -3.0)), -2, 2),
    (Step("maximum", (0.25,)), -2, 2),
    (Step("minimum", (0.25,)), -2, 2),
    (Step("leaky_relu", (0.01,)), -2, 2),
    (Step("elu", (1.6732632, 1.0507009)), -8, 4),
    (Step("softplus", (1.0, 20.0)), -30, 30),
    (Step("softplus", (2.5, 5.0)), -4, 4),
    (Step("log"), 0, 20),
    (Step("log1p"), -1, 20),
    (Step("log2"), 0, 20),
    (Step("log10"), 0, 20),
    (Step("exp"), -80, 80),
    (Step("expm1"), -10, 80),
    (Step("sqrt"), 0, 20),
    (Step("square"), -5, 5),
    *[(Step("pow", (p,)), -4, 4) for p in (0.0, 1.0, 2.0, 3.0, -1.0, -2.0, 11.0)],
    *[(Step("pow", (p,)), 0, 9) for p in (0.5, 1.5, -0.5, 0.333)],
    (Step("tanh"), -6, 6),
    (Step("sigmoid"), -20, 20),
    (Step("logsigmoid"), -20, 20),
    (Step("softsign"), -20, 20),
    (Step("atan"), -20, 20),
    (Step("asinh"), -20, 20),
    (Step("erf"), -4, 4),
]
_LISTED = {step.fn for step, _, _ in CASES}
CASES += [
    (step, -6, 6)
    for function in FUNCTIONS.values()
    if None not in function.defaults.values()
    for step in parse(function.steps(*function.defaults.values()))
    if step.fn not in _LISTED
]


def assert_close(got, want, what):
    """Compare with relative tolerance 2e-6 (1e-5 for pow, which uses exp and log).

    Slopes have an absolute tolerance of 1e-6, because they may cancel, as in 1 - tanh^2.
    """
    rtol, atol = (1e-5 if "pow" in what else 2e-6), (1e-6 if "slope" in what else 1e-30)
    want32 = want.float()  # values that overflow in fp32 become inf
    torch.testing.assert_close(
        got.cpu(), want32, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def test_every_scalar_step_has_a_case():
    assert {step.fn for step, _, _ in CASES} == set(SCALAR)


@pytest.mark.parametrize("step, low, high", CASES, ids=lambda a: str(a))
def test_value_and_slope_at_random_points(device, step, low, high):
    torch.manual_seed(0)
    step = Step(step.fn, tuple(torch.tensor(c).item() for c in step.consts))  # rounded as in fp32
    x = torch.rand(500) * (high - low) + low
    if low <= 0:  # near 0, where naive implementations of log1p and expm1 lose digits
        signs = 1.0 if low == 0 else torch.tensor([-1.0, 1.0]).repeat(50)
        x = torch.cat([x, 10.0 ** (-8 * torch.rand(100)) * signs])
    value, slope = kernel_dual((step,), x.to(device))
    want_value, want_slope = dual((step,), x.double())
    assert_close(value, want_value, f"value of {step}")
    assert_close(slope, want_slope, f"slope of {step}")


@pytest.mark.parametrize("step", [c[0] for c in CASES], ids=str)
def test_boundary_points(device, step):
    """The constants themselves, signed zeros, infinities and NaN behave as in PyTorch in fp32."""
    x = torch.tensor([0.0, -0.0, INF, -INF, math.nan, 1.0, -1.0, *step.consts])
    if step.fn == "pow":
        # (-inf) ** 0.5 is inf in C, but NaN here, as for every other negative base. The base -0.0
        # differs from 0.0 only in the sign of an infinity.
        x = x[(x != -INF) & ~((x == 0) & x.signbit())]
    value, slope = kernel_dual((step,), x.to(device))
    want_value, want_slope = dual((step,), x)
    if step.fn == "pow" and step.consts[0] == 0.0:
        want_slope = torch.zeros_like(want_slope)  # as in autograd; `dual` computes 0 * inf at 0
    # In fp32 the reference itself is off by an ulp or two of exp and log.
    torch.testing.assert_close(value.cpu(), want_value, rtol=2e-6, atol=1e-7, equal_nan=True)
    torch.testing.assert_close(slope.cpu(), want_slope, rtol=2e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize(
    "text",
    ["relu | sqrt", "clamp_min(0.0) | log", "relu | pow(0.5)", "threshold(0.0, 0.0) | log | exp"],
)
def test_flat_stays_flat_before_an_infinite_slope(device, text):
    x = torch.tensor([-2.0, -1e-30, 1.0, 4.0])
    _, slope = kernel_dual(parse(text), x.to(device))
    assert slope[:2].tolist() == [0.0, 0.0]
    assert (slope[2:] > 0).all()


def test_long_programs_and_constants_beyond_fp32(device):
    program = parse(
        "mul(0.125) | add(1e300) | clamp_max(3.0) | relu | log1p | mul(1e-45) | add(-2.0)"
    )
    x = torch.linspace(-3, 3, 64)
    value, slope = kernel_dual(program, x.to(device))
    assert value.dtype == torch.float32
    assert (value == -2.0).all() and (slope == 0.0).all()
    value, slope = kernel_dual((), x.to(device))
    assert torch.equal(value.cpu(), x) and (slope == 1.0).all()


@triton.jit
def tile_kernel(
    x_ptr, rows, strides, out_ptr, S, b, STEPS: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr
):
    v, s = tl.arange(0, BV)[:, None], tl.arange(0, BS)[None, :]
    x = tl.load(x_ptr + v * BS + s)
    one = tl.full([], 1, tl.int32)
    y = epilogue.evaluate_rows(x, rows, strides, b * one, s, s < S, STEPS)
    tl.store(out_ptr + v * BS + s, y)


@triton.jit
def gathered_kernel(
    x_ptr, b_ptr, s_ptr, rows, strides, y_ptr, slope_ptr, STEPS: tl.constexpr, N: tl.constexpr
):
    n = tl.arange(0, N)
    b, s = tl.load(b_ptr + n), tl.load(s_ptr + n)
    y, slope = epilogue.dual_rows(tl.load(x_ptr + n), rows, strides, b, s, s >= 0, STEPS)
    tl.store(y_ptr + n, y)
    tl.store(slope_ptr + n, slope)


ROW_PROGRAM = parse("mul(0.5) | row_add(1) | row_mul(2) | row_where(0, -1.5) | relu | log1p")


def row_operands(B, S):
    """Return a mask, one row for all sequences, and a row operand [B, S] with transposed strides."""
    mask = torch.rand(B, S) > 0.3
    return [mask, torch.randn(S).expand(B, S), torch.randn(S, B).bfloat16().t()]


def test_rows_vary_along_the_second_axis_of_a_tile(device):
    torch.manual_seed(1)
    B, S, BV, BS, b = 3, 13, 8, 16, 2
    rows, x = [r.to(device) for r in row_operands(B, S)], torch.randn(BV, BS)
    out = torch.full_like(x, math.nan).to(device)
    given = epilogue.row_arguments(rows)
    tile_kernel[(1,)](x.to(device), *given, out, S, b, epilogue.encode(ROW_PROGRAM), BV, BS)
    want, _ = dual(ROW_PROGRAM, x[:, :S], [r[b].cpu().expand(BV, S) for r in rows])
    torch.testing.assert_close(out[:, :S].cpu(), want, rtol=2e-6, atol=1e-7)


def test_rows_of_gathered_entries(device):
    torch.manual_seed(2)
    B, S, N = 3, 13, 64
    rows, x = [r.to(device) for r in row_operands(B, S)], torch.randn(N)
    b, s = torch.randint(0, B, (N,)), torch.randint(0, S, (N,))
    y, slope = (torch.full_like(x, math.nan).to(device) for _ in range(2))
    given = epilogue.row_arguments(rows)
    gathered_kernel[(1,)](
        x.to(device), b.to(device), s.to(device), *given, y, slope, epilogue.encode(ROW_PROGRAM), N
    )
    want_y, want_slope = dual(ROW_PROGRAM, x, [r.cpu()[b, s] for r in rows])
    torch.testing.assert_close(y.cpu(), want_y, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(slope.cpu(), want_slope, rtol=2e-6, atol=1e-7)
