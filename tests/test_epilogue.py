"""The language of epilogues: text form, derivatives, proofs, and the split that `plan` and `lower` make."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse_inductor.epilogue.functions import FUNCTIONS, SCALAR, Interval
from sparse_inductor.epilogue.plan import lower, plan
from sparse_inductor.epilogue.ranges import hoistable_suffix, prove
from sparse_inductor.epilogue.steps import ROW, Step, dual, parse, render, run, simplified
from sparse_inductor.epilogue.zero_threshold import zero_threshold

INF = math.inf
QUICK = settings(derandomize=True, max_examples=200, suppress_health_check=list(HealthCheck))

# --- Text form ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, steps",
    [
        ("", ()),
        ("relu", (Step("relu"),)),
        ("relu | log1p | row_mul(0)", (Step("relu"), Step("log1p"), Step("row_mul", (), 0))),
        ("row_where(1, -inf)", (Step("row_where", (-INF,), 1),)),
        ("mul(0.125) | clamp_max(6)", (Step("mul", (0.125,)), Step("clamp_max", (6.0,)))),
        ("  relu|  threshold( 0.5 ,0 ) ", (Step("relu"), Step("threshold", (0.5, 0.0)))),
        ("mul(1e-3)", (Step("mul", (0.001,)),)),
    ],
)
def test_parse(text, steps):
    assert parse(text) == steps


@pytest.mark.parametrize(
    "text, says",
    [
        ("gelu", "'gelu'"),
        ("relu | frelu(1)", "'frelu'"),
        ("mul", r"'mul' takes 1 constants, got \(\)"),
        ("relu(1)", r"'relu' takes 0 constants, got \(1.0,\)"),
        ("threshold(1)", "'threshold' takes 2"),
        ("mul(two)", r"'mul\(two\)'.*'two'"),
        ("row_mul", "'row_mul'.*None"),
        ("row_mul(0.5)", r"'row_mul\(0.5\)'.*'0.5'"),
        ("row_where(0)", "'row_where' takes 1"),
        ("row_mul(0, 1)", "'row_mul' takes 0"),
        ("mul(1", r"'mul\(1' has no closing parenthesis"),
    ],
)
def test_errors_name_the_step(text, says):
    with pytest.raises(ValueError, match=says):
        parse(text)


def test_an_unknown_step_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"known steps: .*log1p.*row_where"):
        Step("swish")


def test_only_row_steps_have_an_operand():
    with pytest.raises(ValueError, match="relu.*3"):
        Step("relu", (), 3)


numbers = st.floats(allow_nan=False, width=64)


@st.composite
def any_step(draw):
    name = draw(st.sampled_from([*SCALAR, *ROW]))
    arity = SCALAR[name].arity if name in SCALAR else ROW[name]
    row = draw(st.integers(0, 12)) if name in ROW else None
    return Step(name, tuple(draw(numbers) for _ in range(arity)), row)


@QUICK
@given(st.lists(any_step(), max_size=6).map(tuple))
def test_parse_is_the_inverse_of_render(program):
    assert parse(render(program)) == program


# --- Values and derivatives -----------------------------------------------------------------------

# Steps that are no function of PyTorch's (FUNCTIONS) with its defaults: constants, the same in PyTorch
OURS_AND_TORCHS = {
    "add": ((1.5,), lambda x: x + 1.5),
    "mul": ((-2.5,), lambda x: x * -2.5),
    "clamp_min": ((0.5,), lambda x: torch.clamp(x, min=0.5)),
    "clamp_max": ((0.5,), lambda x: torch.clamp(x, max=0.5)),
    "cap": ((0.5,), lambda x: F.hardtanh(x, -9.0, 0.5)),
    "threshold": ((0.5, 0.1), lambda x: F.threshold(x, 0.5, 0.1)),
    "fill_below": ((0.5, 0.1), lambda x: x.masked_fill(x < 0.5, 0.1)),
    "fill_above": ((0.5, 0.7), lambda x: x.masked_fill(x > 0.5, 0.7)),
    "gate_above": ((0.5, 0.0), lambda x: x * (x > 0.5)),
    "gate_at_least": ((0.5, 0.0), lambda x: x * (x >= 0.5)),
    "above": ((0.5, 0.1), lambda x: torch.where(x > 0.5, x, 0.1)),
    "at_least": ((0.5, 0.1), lambda x: torch.where(x >= 0.5, x, 0.1)),
    "maximum": ((0.5,), lambda x: torch.maximum(x, torch.full_like(x, 0.5))),
    "minimum": ((0.5,), lambda x: torch.minimum(x, torch.full_like(x, 0.5))),
    "leaky_relu": ((0.2,), lambda x: F.leaky_relu(x, 0.2)),
    "elu": ((0.7, 1.3), lambda x: torch.ops.aten.elu(x, 0.7, 1.3)),
    "softplus": ((2.0, 4.0), lambda x: F.softplus(x, 2.0, 4.0)),
    "pow": ((3.0,), lambda x: x.pow(3.0)),
}


def points(low: float = -6.0, high: float = 6.0) -> torch.Tensor:
    """Return equidistant points that include the kinks at 0 and 0.5."""
    return torch.linspace(low, high, 49, dtype=torch.float64).requires_grad_()


def test_every_scalar_step_is_tested():
    assert not SCALAR.keys() - FUNCTIONS.keys() - OURS_AND_TORCHS.keys()


def check_program(program, function):
    """Compare values and slopes with PyTorch's in fp64, NaN included.

    The slopes' tolerance is larger because PyTorch's hardsigmoid multiplies by 1 / 6 in fp32.
    """
    x = torch.cat([torch.tensor([math.nan]), points().detach()]).requires_grad_()
    y = function(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    # Only in eager mode on a CPU, and only in vectorised code, the slope of elu at NaN is NaN.
    if any(step.fn == "elu" for step in program):
        (slope[:1],) = torch.autograd.grad(function(one := x[:1]).sum(), one)
    ours, our_slope = dual(program, x.detach())
    torch.testing.assert_close(ours, y.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(our_slope, slope, rtol=1e-7, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(run(program, x.detach()), ours, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OURS_AND_TORCHS)
def test_a_step_and_its_derivative_are_torchs(name):
    consts, function = OURS_AND_TORCHS[name]
    check_program((Step(name, consts),), function)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_torchs(name):
    """PyTorch is called with its own defaults, which the table has to equal; required constants are given."""
    defaults = FUNCTIONS[name].defaults
    given = {key: 0.5 for key, value in defaults.items() if value is None}
    program = parse(FUNCTIONS[name].steps(*{**defaults, **given}.values()))
    function = getattr(F, name, None) or getattr(torch, name)
    check_program(program, lambda x: function(x, **given))
    if FUNCTIONS[name].kind == "rectifier":
        assert zero_threshold(parse(FUNCTIONS[name].steps(*[0.0] * len(defaults)))) == 0


@pytest.mark.parametrize("power", [-1.0, -0.5, 0.5, 1.0, 2.0, 2.5, 0.0])
def test_powers(power):
    x = points(0.05, 5.0)
    (slope,) = torch.autograd.grad(x.pow(power).sum(), x)
    torch.testing.assert_close(dual((Step("pow", (power,)),), x.detach())[1], slope)


@pytest.mark.parametrize(
    "text",
    [
        "relu | log1p",
        "relu | log1p | log1p",
        "mul(0.0333) | tanh | mul(30) | relu | log1p",
        "relu | sqrt",
        "clamp_min(0) | sqrt | add(1) | log",
        "threshold(0, 0) | pow(0.5)",
        "clamp_max(1) | clamp_min(-1) | exp",
        "row_add(0) | relu | log1p | row_mul(1)",
        "row_mul(1) | relu | log1p | row_where(2, -3)",
    ],
)
def test_dual_of_a_program_is_autograds(text):
    """This includes infinite slopes after a flat step: sqrt(relu(x)) has gradient 0 at x <= 0."""
    program = parse(text)
    x = points()
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randn(49, generator=generator, dtype=torch.float64),
        torch.randn(49, generator=generator, dtype=torch.float64),
        torch.arange(49) % 3,
    ]
    y = run(program, x, rows)
    (slope,) = torch.autograd.grad(y.sum(), x)
    value, ours = dual(program, x.detach(), rows)
    torch.testing.assert_close(value, y.detach())
    torch.testing.assert_close(ours, slope)


@pytest.mark.parametrize("bound", ["clamp_min", "clamp_max", "maximum", "minimum"])
def test_signs_that_turn_back_are_left_out(bound):
    """Values and slopes stay the same, also at ties and for inputs that are not finite."""
    x = torch.tensor([-math.inf, -2.0, -0.5, 0.0, 0.5, 2.0, math.inf, math.nan])
    minus = Step("mul", (-1.0,))
    for program in ((minus, Step(bound, (0.5,)), minus), (Step("relu"), minus, minus)):
        short = simplified(program)
        assert len(short) == 1
        for ours, theirs in zip(dual(short, x), dual(program, x)):
            torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=0, atol=0)
    assert simplified((minus, Step("relu"), minus)) == (minus, Step("relu"), minus)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_row_steps_take_any_dtype(dtype):
    r = torch.tensor([0, 1, 1, 0]).to(dtype)
    x = torch.tensor([5.0, 6.0, 7.0, 8.0])
    for text, expected in (
        ("row_mul(0)", [0.0, 6.0, 7.0, 0.0]),
        ("row_add(0)", [5.0, 7.0, 8.0, 8.0]),
        ("row_where(0, -2)", [-2.0, 6.0, 7.0, -2.0]),
    ):
        torch.testing.assert_close(dual(parse(text), x, [r])[0], torch.tensor(expected))


# --- Proofs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, direction",
    [
        ("", 1),
        ("relu | log1p", 1),
        ("relu | add(1) | log", 1),
        ("mul(-1)", -1),
        ("mul(-1) | exp | mul(-1)", 1),
        ("mul(0.1) | tanh | mul(10) | relu | log1p", 1),
        ("relu | sqrt", 1),
        ("relu | square", 1),
        ("mul(-1) | clamp_max(0) | square", 1),
        ("exp | log", 1),
        ("sigmoid | log", 1),
        ("pow(3)", 1),
        ("relu | add(1) | pow(-1)", -1),
        ("threshold(0.5, 0)", 1),
        ("row_mul(0) | relu | row_add(1)", 1),  # row steps do not affect the proof
        ("square", 0),
        ("log", 0),
        ("sqrt", 0),
        ("log1p", 0),
        ("tanh | log1p", 1),
        ("tanh | add(-0.5) | log1p", 0),
        ("pow(-1)", 0),
        ("pow(2)", 0),
        ("pow(0.5)", 0),
        ("threshold(0, 1)", 0),  # falls from 1 to 0+ at 0
        ("leaky_relu(-0.1)", 0),
        ("elu(-1, 1)", 0),
        ("elu(1, 1)", 1),
        ("softplus(1, 20)", 1),
        ("softplus(1, 2)", 0),  # falls by 0.13 where it turns linear
        ("add(nan)", 0),
        ("add(inf)", 0),
    ],
)
def test_what_is_proved(text, direction):
    assert prove(parse(text)).direction == direction


def test_a_failed_proof_says_where():
    assert prove(parse("tanh | square | relu")).why() == "square is not monotone on [-1, 1]"
    assert prove(parse("mul(-1)")).why() == "it decreases"


def test_the_range_of_a_proof():
    assert prove(parse("sigmoid | mul(4) | add(-1)")).range == Interval(-1.0, 3.0)
    assert prove(parse("relu | log1p")).range == Interval(0.0, INF)
    assert prove(parse("square"), Interval(-3.0, -1.0)).range == Interval(1.0, 9.0)


@pytest.mark.parametrize(
    "text, start",
    [
        ("relu | log1p", 0),
        ("relu | row_mul(0)", 2),
        ("row_where(0, -inf) | relu | log1p", 1),
        ("square | relu", 1),
        ("row_mul(0) | square | add(1) | sqrt", 4),
        ("relu | log1p | row_mul(0) | tanh", 3),
    ],
)
def test_the_longest_suffix_that_rises(text, start):
    assert hoistable_suffix(parse(text)) == start


CONSTANTS = st.sampled_from([-2.0, -1.0, -0.5, 0.1, 0.5, 1.0, 2.0, 3.0]) | st.floats(
    -20, 20, width=32
)


@st.composite
def scalar_step(draw):
    name = draw(st.sampled_from(list(SCALAR)))
    if name == "softplus":
        return Step(
            name, (draw(st.sampled_from([0.5, 1.0, 2.0])), draw(st.sampled_from([3.0, 20.0])))
        )
    consts = tuple(draw(CONSTANTS) for _ in range(SCALAR[name].arity))
    if name in ("mul", "leaky_relu", "elu") and consts[-1] == 0:
        consts = (*consts[:-1], 1.0)  # see test_a_product_with_zero
    return Step(name, consts)


SAMPLE = torch.cat(
    [
        torch.linspace(-8, 8, 129, dtype=torch.float64),
        torch.tensor([-1e4, -40.0, -1e-3, 1e-3, 40.0, 1e4], dtype=torch.float64),
    ]
).sort().values  # fmt: skip


@settings(QUICK, max_examples=1500)
@given(st.lists(scalar_step(), min_size=1, max_size=5).map(tuple))
def test_no_proof_is_contradicted_by_points(program):
    """max_s f(x_s) = f(max_s x_s), NaN included, on every prefix of the sample."""
    direction = prove(program).direction
    if direction == 0:
        return
    y = run(program, SAMPLE)
    assert not y.isnan().any(), "proved on all reals, and not defined there"
    running = direction * torch.cummax(direction * y, 0).values
    torch.testing.assert_close(y, running, rtol=1e-7, atol=1e-7)


@settings(QUICK, max_examples=500)
@given(
    st.lists(scalar_step(), min_size=1, max_size=3).map(tuple),
    st.floats(-8, 8),
    st.floats(0, 8),
)
def test_a_range_holds_every_value(program, low, width):
    proof = prove(program, Interval(low, low + width))
    if proof.direction == 0:
        return
    y = run(program, torch.linspace(low, low + width, 50, dtype=torch.float64))
    slack = 1e-9 * y.abs().clamp(min=1.0, max=1e300)
    assert bool((y >= proof.range.lo - slack).all() and (y <= proof.range.hi + slack).all())


def test_overflow_keeps_its_sign():
    """(-1e200)^3 is -inf, of which sqrt is not defined."""
    assert prove(parse("clamp_min(-1e200) | pow(3) | sqrt")).direction == 0


def test_a_product_with_zero():
    """inf * 0 is NaN: log(relu(x)) * 0 is NaN as soon as one position is inactive, not only when
    the largest is."""
    assert prove(parse("relu | log | mul(0)")).direction == 0
    assert prove(parse("relu | log | leaky_relu(0)")).direction == 0
    assert prove(parse("relu | mul(0)")).direction == 1


# --- plan and lower -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, hoists, exhaustive",
    [
        ("relu | log1p", True, True),
        ("row_where(0, -inf) | relu | log1p", True, True),
        ("relu | row_where(0, 0)", True, True),
        ("row_add(0) | relu", True, True),
        ("relu | row_add(0)", True, False),
        ("relu | row_mul(0)", True, False),
        ("row_mul(0) | relu", True, False),
        ("square | row_mul(0)", False, False),
    ],
)
def test_what_a_plan_promises(text, hoists, exhaustive):
    p = plan(text)
    assert (p.hoists, p.exhaustive) == (hoists, exhaustive)
    assert p.inner + p.outer == p.program
    assert all(s.fn not in ROW for s in (*p.scalar, *p.outer))


def test_every_position_hoists_nothing():
    p = plan("row_where(0, -inf) | relu | log1p", every_position=True)
    assert not p.hoists and p.outer == () and p.inner == p.program


def test_positions_are_classified_by_their_values():
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.5, 0.0], [0.0, 0.0, 0.0]])
    low = lower(plan("relu | log1p | row_mul(0)"), [mask])
    assert low.per_element.tolist() == [False, True, False]
    assert low.add.tolist() == [[0.0, 0.0, -INF], [0.0, 0.0, -INF], [-INF] * 3]
    assert low.fill.tolist() == [0.0, 0.0, 0.0]


def test_an_additive_mask_is_a_shift():
    add = torch.tensor([[0.0, -1e4], [0.0, -INF]])
    low = lower(plan("row_add(0) | relu"), [add])
    assert low.per_element is None
    assert torch.equal(low.add, add)
    assert low.fill.tolist() == [-INF, 0.0]  # relu(-inf) of the one dropped position


def evaluate(steps: str, z: torch.Tensor, rows: list[torch.Tensor], every: bool = False):
    """Compute the values that a plan defines from the logits [B, S, V]."""
    p = plan(steps, every)
    low = lower(p, rows, torch.float64)
    per_element = torch.full(z.shape[:1], not p.hoists)
    if low.per_element is not None:
        per_element = per_element | low.per_element
    add = torch.zeros(z.shape[:2], dtype=z.dtype) if low.add is None else low.add
    dropped = (add == -INF)[..., None]

    def finish(y, program):
        top = y.amax(1)
        values = run(program, top)
        if low.fill is not None:
            fill = low.fill[:, None]
            values = torch.where(top == -INF, fill, torch.maximum(values, fill))
        return values

    fast = finish(z + add[..., None], p.scalar)
    slow = finish(torch.where(dropped, -INF, run(p.inner, z, rows)), p.outer)
    return torch.where(per_element[:, None], slow, fast)


B, S, V = 4, 5, 6
MASKS = {  # kinds of row operands
    "binary": lambda g: torch.randint(0, 2, (B, S), generator=g).double(),
    "zeros": lambda g: torch.zeros(B, S, dtype=torch.float64),
    "ones": lambda g: torch.ones(B, S, dtype=torch.float64),
    "one sequence real": lambda g: torch.cat(
        [torch.randint(0, 2, (B - 1, S), generator=g), torch.rand(1, S, generator=g)]
    ).double(),
    "real": lambda g: torch.randn(B, S, generator=g, dtype=torch.float64),
    "additive": lambda g: torch.randint(0, 2, (B, S), generator=g).double() * -1e4,
    "bool": lambda g: torch.rand(B, S, generator=g) < 0.5,
    "int": lambda g: torch.randint(-2, 3, (B, S), generator=g),
}
ADDED = {
    **MASKS,
    "minus infinity": lambda g: torch.where(torch.rand(B, S, generator=g) < 0.5, -INF, 0.0),
}


@st.composite
def program_and_rows(draw):
    """Draw a program of scalar and row steps with finite values, except where a mask produces infinities."""
    tame = "relu log1p tanh sigmoid atan softsign".split()
    steps, rows = [], []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["tame", "const", "row_mul", "row_add", "row_where"]))
        if kind == "tame":
            name = draw(st.sampled_from(tame))
            steps += [Step("relu"), Step(name)] if name == "log1p" else [Step(name)]
        elif kind == "const":
            name = draw(st.sampled_from(["mul", "add", "clamp_min", "clamp_max"]))
            steps.append(Step(name, (draw(st.sampled_from([-1.5, -0.5, 0.5, 2.0])),)))
        else:
            table = ADDED if kind == "row_add" else MASKS
            rows.append(draw(st.sampled_from(sorted(table))))
            consts = ()
            if kind == "row_where":
                consts = (draw(st.sampled_from([0.0, -1e4, -INF, 0.7])),)
            steps.append(Step(kind, consts, len(rows) - 1))
    tables = [ADDED[r] for r in rows]
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return render(steps), [t(g) for t in tables], g


@settings(QUICK, max_examples=600)
@given(program_and_rows(), st.booleans())
def test_the_split_equals_the_maximum_over_elements(case, every):
    steps, rows, g = case
    z = torch.randn(B, S, V, generator=g, dtype=torch.float64)
    direct = run(parse(steps), z, rows).amax(1)
    if direct.isnan().any():  # the user's formula has -inf * 0
        return
    torch.testing.assert_close(evaluate(steps, z, rows, every), direct, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "steps",
    [
        "relu | log1p | row_mul(0)",
        "row_mul(0) | relu | log1p",
        "row_where(0, -inf) | relu | log1p",
        "relu | log1p | row_where(0, -inf)",
        "relu | log1p | row_where(0, 0)",
        "row_add(0) | relu | log1p",
        "relu | log1p | row_add(0)",
        "tanh | row_mul(0) | add(1)",
        "square | row_mul(0)",
        "mul(-1) | row_mul(0) | mul(-1)",
    ],
)
def test_masks_as_people_write_them(steps, mask):
    g = torch.Generator().manual_seed(1)
    rows = [MASKS[mask](g)]
    z = torch.randn(B, S, V, generator=g, dtype=torch.float64)
    direct = run(parse(steps), z, rows).amax(1)
    torch.testing.assert_close(evaluate(steps, z, rows), direct, rtol=1e-12, atol=1e-12)
