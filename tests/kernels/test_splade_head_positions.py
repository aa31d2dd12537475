"""The positions that count, and the list of granules that the Hopper kernel processes, against plain PyTorch."""

import bisect
import math

import pytest
import torch

from sparse_inductor.epilogue.plan import lower, plan
from sparse_inductor.kernels.splade_head.positions import ADDED, classify
from support import heavy

hopper = pytest.importorskip("sparse_inductor.kernels.splade_head.hopper")

PROGRAMS = [
    "relu | log1p | row_mul(0)",
    "row_where(0, -inf) | relu | log1p",
    "row_add(0) | relu",
    "row_add(0) | relu | row_mul(1) | log1p",
    "row_mul(0) | relu | row_mul(1)",
    "relu | row_add(0)",
    "row_where(0, -10000.0) | row_mul(1) | relu | row_add(2) | sqrt",
]


def operand(kind, B, S, g):
    """Return a row operand made from a mask of random lengths: the mask, its product with reals, or 0 and -inf."""
    keep = torch.arange(S)[None] < torch.randint(0, S + 1, (B, 1), generator=g)
    real = torch.randn(B, S, generator=g)
    return {
        "bool": keep,
        "int64": keep.long(),
        "fp16": keep.half(),
        "real": torch.where(keep, real, 0.0),
        "added": torch.where(keep, 0.0, -math.inf),
        "strided": keep.int().t().contiguous().t(),
        "one for all": keep[:1].float().expand(B, S),
    }[kind]


KINDS = ["bool", "int64", "fp16", "real", "added", "strided", "one for all"]
# The interpreter runs every pair. On a GPU, where each pair is compiled, each program and each kind runs once.
CASES = [("cpu", steps, kind, S) for steps in PROGRAMS for kind in KINDS for S in (5, 64, 600)] + [
    pytest.param("cuda", steps, kind, 600, marks=pytest.mark.gpu)
    for steps, kind in zip(PROGRAMS, KINDS, strict=True)
]


@pytest.mark.parametrize("device, steps, kind, S", CASES, indirect=["device"])
def test_positions_are_those_of_the_plan(device, steps, kind, S):
    g = torch.Generator().manual_seed(S)
    p, B = plan(steps), 3
    number = 1 + max(step.row for step in p.program if step.row is not None)
    rows = [operand(kind, B, S, g).to(device) for _ in range(number)]
    hidden = torch.randn(B, S, 24, generator=g).to(device, torch.bfloat16)
    got = classify(p.program, rows, hidden, exhaustive=p.exhaustive)
    wanted = lower(p, rows)
    torch.testing.assert_close(got.add, wanted.add, rtol=0, atol=0)
    torch.testing.assert_close(got.fill, wanted.fill, rtol=2e-6, atol=1e-7, equal_nan=True)
    assert (got.per_element is None) == (wanted.per_element is None)
    if wanted.per_element is not None:
        assert torch.equal(got.per_element, wanted.per_element)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lost", [math.nan, heavy(math.inf), heavy(-math.inf)])
@pytest.mark.parametrize("D", [23, 24])
@pytest.mark.parametrize("layout", ["plain", "transposed", "part"])
def test_0_times_a_state_that_is_not_finite_is_not_dropped(device, dtype, lost, D, layout):
    p, S = plan("relu | row_mul(0)"), 40
    hidden = torch.full((3, S, D), torch.finfo(dtype).max).to(device, dtype)
    if layout == "transposed":
        hidden = hidden.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "part":
        hidden = torch.cat([hidden, hidden], -1)[..., 1 : D + 1]
    hidden[0, 7, D - 1] = hidden[1, S - 1, 0] = hidden[2, 3, 5] = lost
    mask = torch.ones(3, S, device=device)
    mask[0, 7] = mask[1, S - 1] = mask[1, 4] = 0
    got = classify(p.program, [mask], hidden, exhaustive=False)
    assert got.per_element.tolist() == [True, True, False]
    assert (got.add == -math.inf).nonzero().tolist() == [[1, 4]]


def listed(add, skip, B, S, device, blocks):
    """Return (rows, flags, sequences, groups) of the list of granules as Python lists."""
    positions = None if add is None else classify(ADDED, (add,), torch.zeros(B, S, 8).to(device))
    slots = B * -(-S // 32)

    def filled(n, dtype):
        return torch.full((n,), -9, dtype=dtype, device=device)

    rows, flags = filled(slots + 8, torch.int32), filled(-(-slots // 8) + 2, torch.int64)
    sequences = filled(5 * (B + 2), torch.int32)
    groups = filled(2 * (-(-slots // 320) + 256) + 3, torch.int32)
    hopper.list_granules(
        positions, skip, rows, flags.view(torch.uint8), sequences, groups, B, S, blocks, 132
    )
    return (
        rows.tolist(),
        flags.view(torch.uint8).tolist(),
        sequences.view(-1, 5).tolist(),
        groups.tolist(),
    )


def check_list(add, skip, B, S, device, blocks=239):
    rows, flags, sequences, groups = listed(add, skip, B, S, device, blocks)
    slot, starts = 0, []
    for b in range(B):
        if skip is not None and skip[b]:
            continue
        a = torch.zeros(S) if add is None else add[b].cpu()
        kept = (a != -math.inf).nonzero().flatten().tolist()
        first, stop, which, shift, repeats = sequences[len(starts)]
        assert (first, which) == (slot, b)
        starts.append(first)
        begins = [row - b * S for row in rows[first:stop]]
        if kept and len(kept) == kept[-1] + 1 - kept[0] and (a[kept] == 0).all():
            wide = min(32, len(kept))
            assert flags[first:stop] == [0 if wide == 32 else wide] * (stop - first)
            assert stop - first == -(-len(kept) // 32)
            assert sorted({s for begin in begins for s in range(begin, begin + wide)}) == kept
            for slot, begin in zip(range(first, stop), begins, strict=True):
                assert slot * 32 + shift - (repeats if slot == stop - 1 else 0) == begin
        else:
            assert shift == -(2**31)
            assert begins == (sorted({s // 32 * 32 for s in kept}) or [0])
            for slot, begin in zip(range(first, stop), begins, strict=True):
                plain = begin + 32 <= S and bool((a[begin : begin + 32] == 0).all())
                assert flags[slot] == (0 if plain else 255)
        slot = stop
    assert [s[1] for s in sequences[len(starts) : len(starts) + 2]] == [2**30] * 2
    assert rows[slot : slot + 8] == [0] * 8 and flags[slot : slot + 16] == [0] * 16
    ends = [*starts, slot]
    for i in range(groups[0] + 1 if starts else 0):
        k = bisect.bisect_left(ends, i * slot // groups[0])
        assert groups[1 + 2 * i : 3 + 2 * i] == [ends[k], k]
    assert (groups[0] > 0) == bool(starts)


MASKS = ("none", "right", "left", "holes", "real")


@pytest.mark.parametrize(
    "mask, B, S, blocks",
    [(mask, *sizes) for mask in MASKS for sizes in ((1, 5, 239), (3, 33, 1), (20, 64, 239))]
    + [("holes", 70, 40, 50), ("real", 3, 2100, 1), ("left", 3, 2100, 1)]
    + [heavy(mask, 70, 300, 239) for mask in MASKS],
)
def test_the_list_holds_what_is_kept(device, mask, B, S, blocks):
    g = torch.Generator().manual_seed(B + S)
    right = operand("added", B, S, g)
    holes = torch.where(torch.rand(B, S, generator=g) < 0.97, 0.0, -math.inf)
    few = torch.rand(B, S, generator=g) < 0.02
    add = {
        "none": None,
        "right": right,
        "left": right.flip(1),
        "holes": holes,
        "real": torch.where(few, torch.randn(B, S, generator=g), -math.inf),
    }[mask]
    add = None if add is None else add.to(device)
    check_list(add, None, B, S, device, blocks)
    check_list(add, (torch.rand(B, generator=g) < 0.5).to(device), B, S, device, blocks)
    check_list(add, torch.ones(B, dtype=torch.bool, device=device), B, S, device, blocks)
