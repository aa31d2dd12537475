"""The operator `splade_head` called directly on the CPU, against the same formula written out in PyTorch."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_inductor.ops import splade_head
from support import TOLERANCE, Largest, error, heavy

INF = math.inf
ops = torch.ops.sparse_inductor


def make(B=3, S=7, D=5, V=11, dtype=torch.float32, bias=True, lead=None):
    g = torch.Generator().manual_seed(0)
    lead = (B,) if lead is None else lead
    hidden = torch.randn(*lead, S, D, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype)
    b = torch.randn(V, generator=g, dtype=torch.float64).to(dtype) if bias else None
    return hidden, weight, b


def lengths(B=3, S=7, dtype=torch.int64):
    """Return a mask [B, S] with right padding; the last sequence is entirely masked."""
    keep = torch.tensor([S - (i * S) // max(1, B - 1) for i in range(B)])
    return (torch.arange(S) < keep[:, None]).to(dtype)


def logits(hidden, weight, bias):
    z = hidden @ weight.mT
    return z if bias is None else z + bias


def log1p_relu(z):
    return torch.log1p(torch.relu(z))


def m_(r):
    return r.unsqueeze(-1)


# name: (steps, the user's formula of logits and mask, the mask's dtype)
FORMULAS = {
    "mul": ("relu | log1p | row_mul(0)", lambda z, m: log1p_relu(z) * m_(m)),
    "mul_first": ("row_mul(0) | relu | log1p", lambda z, m: log1p_relu(z * m_(m))),
    "where_zero": (
        "relu | log1p | row_where(0, 0)",
        lambda z, m: log1p_relu(z).masked_fill(m_(m) == 0, 0.0),
    ),
    "where_minus_inf": (
        "relu | log1p | row_where(0, -inf)",
        lambda z, m: log1p_relu(z).masked_fill(m_(m) == 0, -INF),
    ),
    "where_minus_inf_first": (
        "row_where(0, -inf) | relu | log1p",
        lambda z, m: log1p_relu(z.masked_fill(m_(m) == 0, -INF)),
    ),
    "add_first": (
        "row_add(0) | relu | log1p",
        lambda z, m: log1p_relu(z + m_((1 - m.to(z.dtype)) * -1e4)),
    ),
    "add_minus_inf_first": (
        "row_add(0) | relu | log1p",
        lambda z, m: log1p_relu(z + m_(torch.where(m != 0, 0.0, -INF).to(z.dtype))),
    ),
    "add": (
        "relu | log1p | row_add(0)",
        lambda z, m: log1p_relu(z) + m_((1 - m.to(z.dtype)) * -1e4),
    ),
    "add_minus_inf": (
        "relu | log1p | row_add(0)",
        lambda z, m: log1p_relu(z) + m_(torch.where(m != 0, 0.0, -INF).to(z.dtype)),
    ),
}


def row_of(name, mask, dtype):
    """Return the row operand of a formula: the mask, or the values that are added."""
    if "add_minus_inf" in name:
        return torch.where(mask != 0, 0.0, -INF).to(dtype)
    return (1 - mask.to(dtype)) * -1e4 if "add" in name else mask


def gradients(values, leaves, seed=3):
    g = torch.Generator().manual_seed(seed)
    cotangent = torch.randn(values.shape, generator=g, dtype=torch.float64).to(values.dtype)
    # A loss of an infinite value is not finite, so gradients at infinite values are not compared.
    cotangent = torch.where(values.isinf(), 0.0, cotangent)
    return torch.autograd.grad(values, leaves, cotangent)


def leaves_of(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors if t is not None]


def check(operands, formula, *, rows=(), steps=None):
    """Check that values and gradients are as close to the fp64 formula as the formula in the inputs' dtype."""
    hidden, weight, bias = operands
    dtype = hidden.dtype
    results = []
    for how in ("ours", "plain", "truth"):
        cast = torch.float64 if how == "truth" else dtype
        leaves = [t.detach().to(cast).requires_grad_() for t in (hidden, weight)]
        b = None if bias is None else bias.detach().to(cast).requires_grad_()
        if how == "ours":
            values = splade_head(*leaves, b, rows=rows, steps=steps)
        else:
            values = formula(logits(*leaves, b)).amax(-2)
        results.append((values, *gradients(values, [*leaves, *([] if b is None else [b])])))
    for what, ours, plain, truth in zip(
        ("values", "hidden", "weight", "bias"), *results, strict=False
    ):
        assert ours.shape == plain.shape and ours.dtype == plain.dtype, what
        assert torch.equal(ours.isinf(), truth.isinf()), what
        assert not ours.isnan().any(), what
        ours_off, plain_off = error(ours, truth, dtype), error(plain, truth, dtype)
        assert ours_off <= plain_off + TOLERANCE[dtype], (
            f"{what}: {ours_off:.2e}, plain {plain_off:.2e}"
        )
    return results[0][0]


# --- Gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps, row",
    [
        ("relu | log1p | row_mul(0)", lengths(2, 4)),
        ("row_where(0, -inf) | relu | log1p", lengths(2, 4)),
        ("relu | log1p | row_mul(0)", torch.linspace(-1, 1, 8).view(2, 4)),
        ("row_add(0) | tanh | row_mul(0)", torch.linspace(-1, 1, 8).view(2, 4)),
        ("square | row_mul(0)", lengths(2, 4)),
        ("mul(0.1) | tanh | mul(10) | elu(1, 1)", None),
        ("softplus(1, 20) | sqrt | add(1) | log", None),
        ("mul(-1) | leaky_relu(0.25) | mul(-1)", None),
    ],
)
@pytest.mark.parametrize("bias", [True, heavy(False)])
def test_gradcheck(steps, row, bias):
    rows = [] if row is None else [row]
    leaves = leaves_of(*make(B=2, S=4, D=3, V=5, dtype=torch.float64, bias=bias))
    torch.autograd.gradcheck(
        lambda h, w, b=None: splade_head(h, w, b, rows=rows, steps=steps), leaves
    )


@pytest.mark.parametrize("mask", [lengths(24, 9), torch.rand(24, 9)], ids=["binary", "real"])
def test_two_runs_are_bitwise_equal(mask):
    """There are enough entries for several of PyTorch's threads. Two backwards over one graph are equal, too."""

    def once():
        leaves = leaves_of(*make(B=24, S=9, D=4, V=4000))
        values = splade_head(*leaves, mask)
        again = torch.autograd.grad(values.sum(), leaves, retain_graph=True)
        assert all(
            map(torch.equal, again, torch.autograd.grad(values.sum(), leaves, retain_graph=True))
        )
        return values, *gradients(values, leaves)

    assert all(map(torch.equal, once(), once()))


def test_a_weight_used_by_two_heads_gets_both_gradients():
    hidden, weight, bias = make()
    results = []
    for head in (splade_head, lambda h, w, b: log1p_relu(logits(h, w, b)).amax(-2)):
        h, w, b = leaves_of(hidden, weight, bias)
        both = head(h, w, b) + head(2 * h, w, b)
        results.append(gradients(both, [h, w, b]))
    torch.testing.assert_close(*results)


# --- Precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_less_accurate_than_the_formula(name, dtype):
    steps, formula = FORMULAS[name]
    mask = lengths(4, 24)
    operands = make(B=4, S=24, D=32, V=60, dtype=dtype)
    rows = [row_of(name, mask, dtype)]
    check(operands, lambda z: formula(z, mask), rows=rows, steps=steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16])
def test_out_dtype(dtype, out_dtype):
    hidden, weight, bias = leaves_of(*make(dtype=dtype))
    values = splade_head(hidden, weight, bias, lengths(), out_dtype=out_dtype)
    assert values.dtype == (out_dtype or dtype)
    truth = (
        log1p_relu(logits(*(t.double() for t in (hidden, weight, bias)))) * m_(lengths())
    ).amax(1)
    limit = 1e-2 if torch.bfloat16 in (out_dtype, dtype) else 2e-3
    torch.testing.assert_close(values.double(), truth, rtol=limit, atol=limit)
    values.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == bias.grad.dtype == dtype


def test_half_inputs_accumulate_in_fp32():
    """The sum has 1024 products 1 * 1 and one product 2048 * 1: fp16 accumulation would lose the ones."""
    hidden = torch.ones(1, 1, 1025, dtype=torch.float16)
    hidden[..., 0] = 2048
    weight = torch.ones(1, 1025, dtype=torch.float16)
    values = splade_head(hidden, weight, steps="", out_dtype=torch.float32)
    assert values.item() == 3072


# --- Shapes and layouts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "B, S, D, V",
    [
        (1, 1, 1, 1),
        (1, 1, 5, 7),
        (2, 1, 3, 1),
        (1, 9, 1, 3),
        (3, 7, 5, 1),
        (2, 129, 3, 5),
        (1, 300, 17, 9),
        (5, 3, 31, 513),
        (2, 2049, 3, 2),
        (0, 7, 5, 11),
        (2, 7, 5, 0),
        (2, 7, 0, 11),
    ],
)
@pytest.mark.parametrize("steps", ["relu | log1p | row_mul(0)", "square | row_mul(0)"])
def test_any_size(B, S, D, V, steps):
    mask = lengths(B, S) if B > 1 else torch.ones(B, S)
    activation = log1p_relu if "relu" in steps else torch.square
    check(make(B, S, D, V), lambda z: activation(z) * m_(mask), rows=[mask], steps=steps)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("real", [False, True])
def test_leading_dimensions(lead, real):
    g = torch.Generator().manual_seed(5)
    mask = torch.rand(*lead, 7, generator=g)
    mask = mask if real else (mask > 0.4).long()
    formula, steps = lambda z: log1p_relu(z) * m_(mask), "relu | log1p | row_mul(0)"
    values = check(make(lead=lead), formula, rows=[mask], steps=steps)
    assert values.shape == (*lead, 11)


def test_positions_of_an_empty_batch():
    hidden, mask = torch.empty(0, 7, 5), torch.empty(0, 7)
    values, positions = splade_head(hidden, *make()[1:], mask, return_argmax=True)
    assert values.shape == positions.shape == (0, 11) and positions.dtype == torch.int64


# --- Masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64, torch.bfloat16]
)
@pytest.mark.parametrize("shape", ["[B, S]", "[1, S]", "[S]", "[B, 1]"])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_dtype_and_shape(dtype, shape, hidden_dtype):
    mask = {
        "[B, S]": lengths(),
        "[1, S]": lengths()[1:2],
        "[S]": lengths()[1],
        "[B, 1]": torch.tensor([[1], [0], [1]]),
    }[shape].to(dtype)
    hidden, weight, bias = make(dtype=hidden_dtype)
    full = mask.expand(3, 7)
    values = splade_head(hidden, weight, bias, mask)
    expected = splade_head(hidden, weight, bias, full.bool())
    assert torch.equal(values, expected)
    assert torch.equal(
        values,
        splade_head(hidden, weight, bias, rows=[mask], steps="relu | log1p | row_where(0, 0)"),
    )


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("argmax", [False, True])
def test_a_fully_masked_sequence_is_what_the_formula_says(name, bias, argmax):
    """It is 0, -inf or about -1e4, and its gradients are those of the formula."""
    steps, formula = FORMULAS[name]
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[1] = 0
    results = []
    for ours in (True, False):
        hidden, weight, *b = leaves_of(*make(bias=bias))
        b = b[0] if bias else None
        if ours:
            rows = [row_of(name, mask, torch.float32)]
            values = splade_head(hidden, weight, b, rows=rows, steps=steps, return_argmax=argmax)
            values = values[0] if argmax else values
        else:
            values = formula(logits(hidden, weight, b), mask).max(1).values
        results.append((values, *gradients(values, [hidden, weight, *([b] if bias else [])])))
    ours, plain = results
    assert torch.equal(ours[0][1].isinf(), plain[0][1].isinf())
    if (
        name != "add"
    ):  # here the formula rounds log1p(x) - 1e4, and its product is summed in another order
        assert torch.equal(ours[0][1], plain[0][1])
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("everything", [heavy(False), True])
@pytest.mark.parametrize(
    "weights",
    [
        lambda g: torch.rand(3, 7, generator=g),
        lambda g: torch.randn(3, 7, generator=g),
        lambda g: -torch.rand(3, 7, generator=g),
        lambda g: torch.randint(-2, 4, (3, 7), generator=g),
        lambda g: torch.rand(3, 7, generator=g) * lengths(),
        lambda g: torch.full((3, 7), 2.0),
    ],
    ids=["positive", "signed", "negative", "integers", "padded", "twos"],
)
@pytest.mark.parametrize(
    "steps, formula",
    [
        ("relu | log1p | row_mul(0)", lambda z, m: log1p_relu(z) * m_(m)),
        ("row_mul(0) | relu | log1p", lambda z, m: log1p_relu(z * m_(m))),
        ("row_mul(0)", lambda z, m: z * m_(m)),
        ("tanh | row_add(0)", lambda z, m: torch.tanh(z) + m_(m)),
        ("tanh | row_mul(0) | add(0.5) | relu", lambda z, m: (torch.tanh(z) * m_(m) + 0.5).relu()),
    ],
)
def test_real_valued_weights_are_exact(steps, formula, weights, everything):
    m = weights(torch.Generator().manual_seed(2))
    if not everything:  # one sequence of the batch keeps the fast path
        m = torch.cat([torch.ones_like(m[:1]), m[1:]])
    check(make(), lambda z: formula(z, m), rows=[m], steps=steps)


def test_a_neighbour_on_the_general_path_changes_nothing():
    hidden, weight, bias = make(B=4, S=9, D=6, V=700)
    mask = lengths(4, 9, torch.float32)
    mixed = mask.clone()
    mixed[2] = torch.rand(9)
    for argmax in (False, True):
        alone = splade_head(hidden, weight, bias, mask, return_argmax=argmax)
        both = splade_head(hidden, weight, bias, mixed, return_argmax=argmax)
        keep = [0, 1, 3]
        a, b = (alone[0], both[0]) if argmax else (alone, both)
        torch.testing.assert_close(a[keep], b[keep], rtol=1e-6, atol=1e-6)


def test_two_rows_and_one_row_used_twice():
    add, keep, mask = torch.linspace(-1, 1, 7), lengths(), torch.rand(3, 7)
    formula = lambda z: log1p_relu(z + m_(add)).masked_fill(m_(keep) == 0, -INF)
    steps = "row_add(0) | relu | log1p | row_where(1, -inf)"
    check(make(), formula, rows=[add, keep], steps=steps)
    twice = lambda z: log1p_relu(z * m_(mask)) * m_(mask)
    check(make(), twice, rows=[mask], steps="row_mul(0) | relu | log1p | row_mul(0)")


def test_rows_get_no_gradient():
    hidden, weight, bias = leaves_of(*make())
    mask = torch.rand(3, 7, requires_grad=True)
    splade_head(hidden, weight, bias, mask).sum().backward()
    assert mask.grad is None and hidden.grad is not None


def test_non_finite_hidden_states_behind_a_selecting_mask_do_not_leak():
    hidden, weight, bias = make()
    mask = lengths()
    hidden[mask == 0] = torch.nan
    given = {"rows": [mask], "steps": "relu | log1p | row_where(0, 0)"}
    values = splade_head(hidden, weight, bias, **given)
    hidden[mask == 0] = 0
    torch.testing.assert_close(values, splade_head(hidden, weight, bias, **given))


# --- Positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("S", [7, 129, 200])
def test_positions_are_those_of_torch_max(name, grad, S):
    """On plateaus (inactive or masked tokens), too, the first maximum counts."""
    steps, formula = FORMULAS[name]
    mask = lengths(3, S)
    mask[0, 0] = 0
    hidden, weight, bias = make(S=S, dtype=torch.float64)
    expected = formula(logits(hidden, weight, bias), mask).max(1)
    hidden.requires_grad_(grad)
    given = {"rows": [row_of(name, mask, torch.float64)], "steps": steps}
    values, positions = splade_head(hidden, weight, bias, **given, return_argmax=True)
    assert positions.dtype == torch.int64 and not positions.requires_grad
    torch.testing.assert_close(values, expected.values)
    assert torch.equal(positions, expected.indices)


# --- Autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_what_explicit_casts_do(dtype):
    leaves = leaves_of(*make())
    with torch.autocast("cpu", dtype=dtype):
        values = splade_head(*leaves, lengths())
    assert values.dtype == dtype
    assert torch.equal(values, splade_head(*(t.to(dtype) for t in leaves), lengths()))
    values.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in leaves)


def test_autocast_leaves_double_alone():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert splade_head(*make(dtype=torch.float64)).dtype == torch.float64


def test_a_backward_inside_autocast_is_the_same():
    results = []
    for region in (True, False):
        leaves = leaves_of(*make())
        values = splade_head(*leaves, lengths())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=region):
            results.append(gradients(values, leaves))
    assert all(map(torch.equal, *results))


# --- Errors ---------------------------------------------------------------------------------------

H, W, BIAS = torch.randn(2, 7, 5), torch.randn(11, 5), torch.randn(11)


@pytest.mark.parametrize(
    "kwargs, exception, says",
    [
        ({"hidden": torch.randn(5)}, ValueError, r"hidden must be.*\(5,\)"),
        ({"hidden": torch.randn(2, 0, 5)}, ValueError, "S = 0"),
        ({"weight": torch.randn(11, 6)}, ValueError, r"weight must be.*D = 5.*\(11, 6\)"),
        ({"weight": torch.randn(11)}, ValueError, r"weight must be.*\(11,\)"),
        ({"bias": torch.randn(10)}, ValueError, r"bias must be \[V\] = \[11\].*\(10,\)"),
        ({"bias": torch.randn(11, 1)}, ValueError, r"bias must be.*\(11, 1\)"),
        ({"hidden": H.long()}, TypeError, "hidden must be one of.*torch.int64"),
        ({"weight": W.int()}, TypeError, "weight must be one of.*torch.int32"),
        ({"bias": BIAS.bool()}, TypeError, "bias must be one of.*torch.bool"),
        ({"weight": W.bfloat16()}, TypeError, "dtype of hidden, torch.float32, got torch.bfloat16"),
        ({"weight": W.to("meta")}, ValueError, "weight is on meta, hidden on cpu"),
        ({"mask": torch.ones(2, 8)}, ValueError, r"rows\[0\].*\(2, 8\)"),
        ({"mask": torch.ones(3, 7)}, ValueError, r"rows\[0\].*\(3, 7\)"),
        ({"mask": torch.ones(2, 7, 1)}, ValueError, r"rows\[0\].*\(2, 7, 1\)"),
        ({"mask": torch.ones(2, 7) * 1j}, TypeError, r"rows\[0\].*complex64"),
        ({"mask": H[..., 0], "rows": [H[..., 0]]}, ValueError, "mask or rows"),
        ({"steps": "relu | row_mul(0)"}, ValueError, r"rows \[0\], but 0 are given"),
        ({"mask": H[..., 0], "steps": "relu"}, ValueError, r"rows \[\], but 1 are given"),
        ({"mask": H[..., 0], "steps": "row_mul(1)"}, ValueError, r"rows \[1\], but 1 are given"),
        ({"mask": H[..., 0], "steps": "row_mul(-1)"}, ValueError, r"rows \[-1\]"),
        ({"steps": "relu | swish"}, ValueError, "'swish'"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype.*torch.int32"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_errors_name_the_value(kwargs, exception, says, grad):
    inputs = {"hidden": H, "weight": W, "bias": BIAS, **kwargs}
    if grad:
        inputs = {
            k: v.clone().requires_grad_()
            if isinstance(v, torch.Tensor) and v.is_floating_point()
            else v
            for k, v in inputs.items()
        }
    with pytest.raises(exception, match=says):
        splade_head(**inputs)


# --- As an operator of PyTorch --------------------------------------------------------------------


def compile_bare(**how):
    return torch.compile(lambda *tensors: splade_head(*tensors), fullgraph=True, **how)


@pytest.mark.parametrize("dynamic", [heavy(False), True])
def test_compiled_by_inductor(dynamic):
    """User code that calls the operator is one graph with equal results, and other sizes need no trace if dynamic."""
    compiled = compile_bare(dynamic=dynamic)
    for B, S in [(3, 7), (4, 9)] if dynamic else [(3, 7)]:
        leaves = leaves_of(*make(B=B, S=S))
        mask = lengths(B, S)
        values = compiled(*leaves, mask)
        expected = splade_head(*leaves, mask)
        torch.testing.assert_close(values, expected)
        torch.testing.assert_close(gradients(values, leaves), gradients(expected, leaves))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves, mask), expected)


def test_compiled_under_autocast():
    leaves = leaves_of(*make())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = compile_bare(backend="aot_eager")(*leaves, lengths())
        expected = splade_head(*leaves, lengths())
    assert values.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(values, expected)


# --- Memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("argmax", [False, True])
@pytest.mark.parametrize("mask", ["none", "binary", "real"])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_as_large_as_the_logits_is_made(mask, argmax, training):
    B, S, V = 4, 64, 5000
    hidden, weight, bias = make(B, S, 16, V)
    mask = {"none": None, "binary": lengths(B, S), "real": torch.rand(B, S)}[mask]
    with Largest() as seen:
        (hidden @ weight.mT).sum()
    assert seen.elements == B * S * V
    leaves = leaves_of(hidden, weight, bias)
    with Largest() as seen, torch.set_grad_enabled(training):
        values = splade_head(*leaves, mask, return_argmax=argmax)
        values = values[0] if argmax else values
        if training:
            values.square().sum().backward()
    assert B * V <= seen.elements < B * S * V / 3
