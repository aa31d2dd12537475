"""Sums of a table's rows in shared memory: the PTX on a CPU, by `ptx_machine`, and the whole on a Hopper GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_machine import Memory, block
from test_relu_ffn_resident import outcomes

from sparse_inductor.kernels import relu_ffn as forward_kernel
from sparse_inductor.kernels import relu_ffn_packing as packer
from sparse_inductor.kernels import relu_ffn_pool as rows_pool
from sparse_inductor.kernels import relu_ffn_sums as sums
from sparse_inductor.kernels import relu_ffn_sums_ptx as ptx
from sparse_inductor.kernels.epilogue import encode

CAP = 100
LEAST = 8
GROUPS = ptx.BLOCK // ptx.GROUP


class Scheduled:
    """The schedule of random packed rows, some of them heavy, as the PTX makes it."""

    def __init__(self, M: int, N: int, most: int, packed: int = 1, apart: int = 1) -> None:
        g = np.random.default_rng(0)
        self.blocks = -(-M // ptx.BLOCK)
        self.count = g.integers(0, most, M).astype(np.int32)
        self.index = np.stack([g.permutation(N)[:CAP] * apart for _ in range(M)])
        self.index = self.index.astype(np.int16)
        self.order = np.full((self.blocks, ptx.BLOCK), -9, np.int32)
        self.flags = np.full(self.blocks, -9, np.int32)
        self.taken = np.zeros(2, np.int32)
        self.groups = self.blocks * GROUPS
        self.heads = np.full((self.groups, 4), 0, np.int32)
        self.owners = np.full(4096, -9, np.int32)
        self.steps = np.full(4096, -9, np.int32)
        self.records = np.full((self.groups + M, 32 * ptx.SLOTS // 2), 0x5B5B, np.int16)
        self.memory = Memory()
        arrays = {
            name: self.memory.add((i + 1) << 40, getattr(self, name))
            for i, name in enumerate(
                "count index order flags taken heads owners steps records".split()
            )
        }
        self.at = arrays
        names = "order flags taken heads owners".split()
        for b in range(self.blocks):
            inputs = [b, arrays["count"], M, packed, *(arrays[n] for n in names), self.groups]
            block(ptx.rank(CAP, LEAST, 4), inputs, Memory(), self.memory, warps=4)
        names = "taken owners heads order count index records steps".split()
        used = [range(-(-M // ptx.GROUP)), range(self.groups, self.groups + self.taken[0])]
        self.windows = [w for r in used for w in r] if self.taken[1] else []
        for w in sorted({w // ptx.WINDOWS * ptx.WINDOWS for w in self.windows}):
            inputs = [w, *(arrays[n] for n in names), self.groups, arrays["flags"]]
            block(ptx.schedule(CAP), inputs, Memory(), self.memory, warps=1)

    def owner(self, window: int) -> int:
        return window if window < self.groups else int(self.owners[window - self.groups])

    def used(self, window: int) -> int:
        first = window < self.groups
        return int(self.heads[window, 0] if first else self.steps[window - self.groups])

    def slots(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, places) [slots, tokens] of the window's used chunks."""
        used = -(-self.used(window) // 8)
        record = self.records[window].reshape(4, 256)[:used]
        rows = np.full((16 * used, 8), -9)
        places = np.full((16 * used, 8), -9)
        for chunk in range(used):
            for step in range(8):
                for half in range(2):
                    slot = 16 * chunk + 2 * step + half
                    for token in range(8):
                        turn = (token // 2 + step) % 4
                        at = half * 64 + (2 * turn + token % 2) * 8 + step
                        rows[slot, token] = record[chunk, at] >> 1
                        assert record[chunk, at] & 1 == rows[slot, token] >> 2 & 1
                        places[slot, token] = record[chunk, self.value(token, turn, step, half)]
        return rows, places

    @staticmethod
    def value(token: int, turn: int, step: int, half: int) -> int:
        return 128 + (4 * token + turn) * 4 + step // 4 * 2 + half


@pytest.mark.parametrize("apart", [1, 4, 8])
def test_entries_are_scheduled(apart):
    """apart: neurons of all classes, of two, of one."""
    M, N = 300, 500
    made = Scheduled(M, N, CAP + 8, apart=apart)
    order = made.order.reshape(-1)
    packed = np.flatnonzero(made.count <= CAP)
    assert sorted(order[: len(packed)]) == list(packed) and (order[len(packed) :] == -1).all()
    ranked = sorted(packed, key=lambda m: (-made.count[m], m))
    assert list(order[: len(packed)]) == ranked
    assert made.flags.tolist() == [1]
    windows = []
    again = 0
    for g in range(-(-M // ptx.GROUP)):
        more, first = made.heads[g, 1:3]
        tokens = order[g * 8 : g * 8 + 8]
        left = {(t, k) for t, m in enumerate(tokens) if m >= 0 for k in range(made.count[m])}
        most = max([made.count[m] for m in tokens if m >= 0], default=0)
        assert more == max(0, -(-most // ptx.SPAN) - 1)
        for w in [g, *range(first, first + more)]:
            windows.append(w)
            assert made.owner(w) == g
            rows, places = made.slots(w)
            assert (0 < len(rows) <= ptx.SLOTS) or (w == g and not left)
            assert (places[2 * made.used(w) :] == -1).all()
            for s, t in np.argwhere(places >= 0):
                k = places[s, t]
                left.remove((t, k))
                assert rows[s, t] == made.index[tokens[t], k]
            for row, place in zip(rows, places):
                mine = row[place >= 0]
                again += len(mine) - len(set(mine % 8))
                assert set(row) <= (set(mine) or {0})
        assert not left
    share = again / made.count[packed].sum()
    assert (share > 0.01) == (apart > 1) and share < 1 - 1 / apart + 0.01
    assert sorted(windows) == made.windows


@pytest.mark.parametrize(("most", "packed"), [(LEAST, 1), (CAP, 0)])
def test_few_entries_are_not_scheduled(most, packed):
    made = Scheduled(100, 200, most, packed=packed)
    assert made.flags.tolist() == [0] and not made.taken.any()
    assert (made.order == -1).all() and not made.heads[:, :2].any()


@pytest.mark.parametrize(("kind", "shares", "biased"), [("bf16", 1, False), ("f16", 2, True)])
def test_rows_of_a_slice_are_summed(kind, shares, biased):
    M, N, D = 90, 150, 32
    made = Scheduled(M, N, CAP + 8)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    torch.manual_seed(0)
    table, h, bias = (torch.randn(*s).to(dtype) for s in ((N, D), (M, CAP), (D,)))
    made.heads[-(-M // ptx.GROUP) :, 0] = 0
    given = {n: torch.from_numpy(getattr(made, n)) for n in made.at}
    names = "taken owners heads order steps records".split()
    sums._values_kernel[(3,)](
        *(given[n] for n in names), given["records"].view(dtype), h, given["flags"], made.groups,
        STEPS=encode(()), CAP=CAP, EARLY=False,
    )  # fmt: skip
    out = np.full((M, D), 0x7E7E, np.int16)
    at = made.memory.add(1 << 50, out)
    biases = made.memory.add(1 << 51, bias.view(torch.int16).numpy())
    for piece in range(D // ptx.FEATURES):
        own = table[:, piece * ptx.FEATURES :][:, : ptx.FEATURES].reshape(N, 2, 8).clone()
        swapped = (torch.arange(N) & 4) > 0
        own[swapped] = own[swapped].flip(1)
        for share in range(shares):
            shared = Memory()
            start = shared.add(4096 + 16, own.view(torch.int16).numpy())
            inputs = [
                at + 2 * ptx.FEATURES * piece, 2 * D, made.at["order"], made.at["heads"],
                made.at["steps"], made.at["records"], made.groups, share, biases + 2 * ptx.FEATURES * piece,
            ]  # fmt: skip
            code = ptx.sums(kind, shares, biased)
            block(code, inputs, shared, made.memory, warps=2, dynamic=start)
    got = torch.from_numpy(out).view(dtype).double()
    for m in range(M):
        c = made.count[m]
        if c > CAP:
            assert (out[m] == 0x7E7E).all()
            continue
        want = h[m, :c].double() @ table[torch.from_numpy(made.index[m, :c].astype(int))].double()
        want += bias.double() * biased
        torch.testing.assert_close(got[m], want, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("N", "D", "pays"),
    [(5632, 2048, True), (3072, 1024, True), (5632, 4096, True)]
    + [(7200, 2048, False), (5632, 1536, False), (5632, 2056, False), (5632, 8, False)],
)
def test_where_it_pays(N, D, pays):
    """Tables that do not fit, and widths that leave too many multiprocessors without a slice."""
    assert sums._pays(N, D, 132) == pays


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("M", "K", "N", "D", "steps", "train", "stats"),
    [
        (1001, 256, 700, 2048, "relu", False, False),
        (9001, 256, 5632, 1024, "relu | square", False, False),
        (17000, 128, 3000, 2048, "relu", True, False),
        (999, 256, 7000, 2048, "relu", True, True),
    ],
)
def test_as_gathered(monkeypatch, dtype, M, K, N, D, steps, train, stats):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(packer, "DENSE_ROW", 1.0)
    monkeypatch.setattr(packer, "DENSE_ROW_MANY", 1.0)
    monkeypatch.setattr(forward_kernel, "FEW", 0)
    monkeypatch.setattr(sums, "LEAST", 2)
    made = []
    plain = sums.Schedule.sums
    monkeypatch.setattr(sums.Schedule, "sums", lambda s, *args: made.append(s) or plain(s, *args))
    found = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(forward_kernel, "SUMMED", least)
        found.append(outcomes(M, K, N, D, dtype, steps, train, stats))
    assert len(made) == 1 and made[0].flags.all()
    for mine, gathered in zip(*found):
        scale = gathered.float().abs().mean()
        torch.testing.assert_close(mine / scale, gathered / scale, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("pools", [False, True])
def test_blocks_with_pools_are_left_alone(monkeypatch, pools):
    """Two blocks of tokens, of the first of which some rows share their neurons."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    M, N, D, cap = 2 * sums.BLOCK, 3000, 2048, 64
    torch.manual_seed(0)
    count = torch.randint(0, cap + 4, (M,), device="cuda", dtype=torch.int32)
    index = torch.rand(M, N, device="cuda").topk(cap, 1).indices.to(torch.int16)
    value = torch.randn(M, cap, device="cuda").bfloat16()
    table = torch.randn(N, D, device="cuda").bfloat16()
    size = torch.zeros(M // rows_pool.ROWS, dtype=torch.int32, device="cuda")
    size[3] = 5 * pools
    schedule = sums.Schedule(
        count, index, M * cap, torch.zeros(2, dtype=torch.int32, device="cuda")
    )
    schedule.fill(None, size, rows_pool.ROWS)
    out = torch.full((M, D), 7.0, device="cuda").bfloat16()
    schedule.sums(value, table, None, out)
    assert schedule.flags.tolist() == [int(not pools), 1]
    there = (torch.arange(cap, device="cuda") < count[:, None]) & (count <= cap)[:, None]
    dense = torch.zeros(M, N, device="cuda").scatter_(1, index.long(), value.float() * there)
    want = (dense @ table.float()).bfloat16()
    want[count > cap] = 7
    if pools:
        want[: sums.BLOCK] = 7
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
