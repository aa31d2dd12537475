"""Entmax attention by candidate lists, and lists mixed with block passes, against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from test_entmax_attention import PLAIN, check, check_nan, operands, run

from sparse_inductor.kernels.entmax_attention import attention as entmax_attention
from sparse_inductor.kernels.entmax_attention import lists as entmax_attention_lists
from support import heavy

pytestmark = pytest.mark.usefixtures("nan_filled_memory", "any_length")


@pytest.fixture
def narrow():
    """The span in key tiles up to which a block goes directly to the two passes; 0, the default, turns this off."""
    return 0


@pytest.fixture
def any_length(narrow, monkeypatch):
    monkeypatch.setattr(entmax_attention_lists, "MIN_KEYS", 0)
    monkeypatch.setattr(entmax_attention_lists, "NARROW_SPAN", narrow)


def sizes(device, **keywords):
    """Return sizes that the list kernels accept.

    On a GPU they need 16-bit operands of width 64. In the interpreter the defaults are small: one head and two blocks
    of queries.
    """
    if device.type == "cuda":
        keywords = {"D": 64, "dtype": torch.bfloat16, **keywords}
    few = {"H": 1, "Lq": 20} if device.type == "cpu" else {"H": 2, "Lq": 40}
    return {**few, "Lk": 130, **keywords}


def left(q, k, v, **keywords):
    """Return a mask [B, H, Lq] of the rows that were left to the block passes."""
    keywords = {**PLAIN, "scale": q.shape[3] ** -0.5, **keywords}
    saved = entmax_attention.forward(q, k, v, training=True, **keywords)[1]
    counts, rows, earlier = saved[4:7]
    out = counts < 0
    assert torch.equal(earlier[..., -1], out.sum(-1))
    for mask, listed, many in zip(
        out.flatten(0, 1), rows.flatten(0, 1), earlier.flatten(0, 1)[:, -1]
    ):
        assert torch.equal(mask.nonzero()[:, 0], listed[:many])
    return out


@pytest.mark.parametrize("narrow", [0, 24])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [heavy((40, 130)), heavy((130, 130)), (17, 64)])
def test_peaked_rows_need_no_block_pass(lengths, causal, device):
    q, k, v, grad = operands(device, **sizes(device, Lq=lengths[0], Lk=lengths[1]))
    check(q, k, v, grad, causal=causal)
    assert not left(q, k, v, causal=causal).any()


@pytest.mark.parametrize("narrow", [0, heavy(24)])
@pytest.mark.parametrize("alpha", [1.4, heavy(2.0), heavy(3.0)])
def test_any_alpha(alpha, device):
    check(*operands(device, **sizes(device)), alpha_value=alpha, tolerance=1e-5)


@pytest.mark.heavy
def test_alpha_tensor_has_a_gradient(device):
    alpha = torch.tensor([1.4, 1.9]).view(1, 2, 1, 1).to(device)
    check(*operands(device, **sizes(device, H=2)), alpha=alpha, tolerance=1e-5)


def test_flat_rows_go_to_the_block_passes(device):
    q, k, v, grad = operands(device, **sizes(device, variance=1e-3))
    check(q, k, v, grad)
    assert left(q, k, v).all()


@pytest.mark.heavy
@pytest.mark.parametrize("causal", [heavy(False), True])
def test_flat_and_peaked_rows_in_one_head(causal, device):
    rows = entmax_attention_lists.block_rows(torch.empty(0, device=device))
    heads = {"H": 4, "Hkv": 2} if device.type == "cuda" else {"H": 2, "Hkv": 1}
    q, k, v, grad = operands(device, **sizes(device, Lq=3 * rows, Lk=3 * rows + 150, **heads))
    q[:, 1:, rows : 2 * rows] *= 1e-3
    check(q, k, v, grad, causal=causal)
    chosen = left(q, k, v)[0].unflatten(1, (3, rows))
    assert chosen[1:, 1].all() and not chosen[:, 0].any() and not chosen[0].any()


@pytest.mark.parametrize(
    "alpha, causal", [heavy(1.25, False), heavy(1.25, True), heavy(1.5, False), (1.5, True)]
)
def test_broad_rows_need_no_block_pass(alpha, causal, device):
    """Rows have supports of 20 to 100 keys."""
    variance = {1.25: 12.0, 1.5: 1.0}[alpha]
    heads = {"H": 2, "Hkv": 1} if device.type == "cuda" else {}
    q, k, v, grad = operands(device, **sizes(device, variance=variance, Lk=300, **heads))
    check(q, k, v, grad, alpha_value=alpha, causal=causal, tolerance=1e-5)
    assert left(q, k, v, alpha_value=alpha, causal=causal).float().mean() < 0.3


@pytest.mark.parametrize("narrow", [0, heavy(24)])
@pytest.mark.heavy
@pytest.mark.parametrize("causal", [heavy(False), True])
def test_each_row_goes_its_own_way(causal, device):
    """Adjacent rows have small, large and full supports."""
    rows = entmax_attention_lists.block_rows(torch.empty(0, device=device))
    q, k, v, grad = operands(device, **sizes(device, H=1, Lq=rows + 5, Lk=400, variance=1.0))
    factor = torch.tensor([2.5, 1.0, 1e-2], device=device)[torch.arange(q.shape[2]) % 3]
    q *= factor[:, None].to(q.dtype)
    check(q, k, v, grad, causal=causal, tolerance=1e-5)
    flat = left(q, k, v)
    assert flat[..., 2::3].all() and not flat[..., ::3].any() and not flat[..., 1::3].any()


@pytest.mark.heavy
def test_variable_lengths(device):
    lengths = {
        "query_lengths": torch.tensor([20, 0, 40]).to(device),
        "key_lengths": torch.tensor([0, 130, 70]).to(device),
    }
    heads = {"H": 4, "Hkv": 2} if device.type == "cuda" else {}
    check(*operands(device, **sizes(device, B=3, Lq=40, **heads)), **lengths)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "fill, added", [heavy(-1e4, False), heavy(-1e4, True), heavy(0.0, False), (0.0, True)]
)
def test_causal_fill(fill, added, device):
    q, k, v, grad = operands(device, **sizes(device, Lq=70, Lk=70, variance=2.0))
    check(q, k, v, grad, causal=True, fill=fill, added=added)
    assert left(q, k, v, causal=True, fill=fill).any() == (fill == 0.0)


def kept(form, B, Lq, Lk):
    """Return a mask of kept keys, bool [B or 1, 1, Lq or 1, Lk]."""
    i, j = torch.arange(Lq)[:, None] + Lk - Lq, torch.arange(Lk)[None]
    lengths = torch.tensor([Lk - 70, Lk // 3])[:B, None, None, None]
    keep = {
        "causal": j <= i,
        "padding on the right": j < lengths,
        "padding on the left": (j >= lengths - 20) & (j <= i),
        "window with sinks": (j <= i) & ((j > i - 40) | (j < 3)),
        "documents": i // 90 == j // 90,
        "nothing": (j < 0) & (i < 0),
        "scattered": torch.rand(B, 1, Lq, Lk, generator=torch.Generator().manual_seed(3)) > 0.7,
    }[form]
    return keep[(None,) * (4 - keep.dim())]


@pytest.mark.parametrize(
    "form, way",
    [("causal", "bool"), ("window with sinks", "added")]
    + [heavy(form, "bool") for form in ("padding on the right", "documents", "window with sinks")]
    + [heavy("padding on the left", way) for way in ("bool", "fill", "added", "infinite")]
    + [heavy("nothing", way) for way in ("bool", "fill", "added")]
    + [heavy("scattered", way) for way in ("bool", "fill", "added", "infinite")],
)
@pytest.mark.parametrize("narrow", [0, 24])
def test_masks(form, way, device):
    """Tiles that are fully masked are skipped. Rows without keys give the same result as in the original program."""
    B = 2 if "padding" in form or device.type == "cuda" else 1
    heads = {"H": 2, "Hkv": 1} if device.type == "cuda" else {}
    q, k, v, grad = operands(device, **sizes(device, B=B, Lq=20, Lk=200, **heads))
    keep = kept(form, B, 20, 200).to(device)
    zeros = torch.zeros(keep.shape, dtype=q.dtype, device=device)
    keywords = {
        "bool": {"mask": keep},
        "fill": {"mask": keep, "fill": torch.finfo(torch.float32).min},
        "added": {"bias": zeros.masked_fill(~keep, torch.finfo(q.dtype).min)},
        "infinite": {"bias": zeros.masked_fill(~keep, -math.inf)},
    }[way]
    check(q, k, v, grad, **keywords)


def test_negative_scores(device):
    """The bit patterns of negative floats sort in reverse order."""
    q, k, v, grad = operands(device, **sizes(device, Lq=16, Lk=64))
    check(-q.abs(), k.abs(), v, grad)


@pytest.mark.parametrize("weight", [heavy(3.0), heavy(30.0)])
def test_a_key_that_every_row_attends_to(weight, device):
    """A key's rows are ordered by ranking up to 128 of them, and by sorting if there are more."""
    Lq = 200 if device.type == "cuda" else 72
    q, k, v, grad = operands(device, **sizes(device, H=2, Hkv=1, Lq=Lq, Lk=70))
    q, k = q.abs() * 0.3, k * 0.3
    k[:, :, 7] = weight / 10
    check(q, k, v, grad)


def test_nan_stays_in_its_rows(device):
    check_nan(operands(device, **sizes(device)), 7, off=0.02)


@pytest.mark.gpu
def test_gradients_repeat_bitwise():
    device = torch.device("cuda")
    tensors = operands(device, **sizes(device, B=2, H=4, Hkv=2, Lq=130))
    for a, b in zip(run(*tensors)[:4], run(*tensors)[:4]):
        assert torch.equal(a, b)


def warp(source, values):
    """Emulate a warp that executes the PTX of a sorting network on values [32, n], and return its result [32, n]."""
    lane, n = torch.arange(32), values.shape[1]
    registers = {f"${n + r}": values[:, r] for r in range(n)} | {"%laneid": lane}
    functions = {
        "mov": lambda a: a,
        "and": lambda a, b: a & b,
        "setp.eq": lambda a, b: a == b,
        "min": torch.minimum,
        "max": torch.maximum,
        "shfl.sync.bfly": lambda a, mask, *_: a[lane ^ mask],
    }
    for statement in source.strip("{}\n ").replace("\n", " ").split(";"):
        words = statement.replace(",", " ").split()
        guard = words.pop(0)[1:] if words and words[0].startswith("@") else None
        if not words or words[0].startswith("."):
            continue
        name, to, *operands = words
        operands = [registers[x] if x in registers else int(x) for x in operands]
        result = functions[name.rpartition(".")[0]](*operands)
        if guard is not None:
            taken = ~registers[guard[1:]] if guard.startswith("!") else registers[guard]
            result = torch.where(taken, result, registers[to])
        registers[to] = result
    return torch.stack([registers[f"${r}"] for r in range(n)], 1)


@pytest.mark.parametrize("pack", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("lanes", [8, 32])
def test_sorting_networks(lanes, pack):
    """On a GPU a key's rows are sorted in registers. The interpreter has no lanes, so the PTX is emulated."""
    source = entmax_attention_lists._network(pack, lanes.bit_length() - 1)
    values = torch.randint(0, 40 * pack, (32, pack), generator=torch.Generator().manual_seed(pack))
    groups = values.reshape(-1, lanes * pack)
    assert torch.equal(warp(source, values).reshape(-1, lanes * pack), groups.sort(1).values)
