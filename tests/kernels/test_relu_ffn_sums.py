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
from support import heavy

CAP = 128
LEAST = 8
GROUPS = ptx.BLOCK // ptx.GROUP


class Arranged:
    """The lists of random packed rows, some of them heavy, as the PTX makes them."""

    def __init__(
        self,
        M: int,
        N: int,
        most: int,
        wanted: int = 1,
        apart: int = 1,
        least: int = 0,
        pools: int = 0,
    ) -> None:
        g = np.random.default_rng(0)
        self.M = M
        blocks = -(-M // ptx.BLOCK)
        self.count = g.integers(least, most, M).astype(np.int32)
        self.count[g.random(M) < 0.1] = CAP + 5
        self.index = np.stack([g.permutation(N)[:CAP] * apart for _ in range(M)]).astype(np.int16)
        there = np.arange(CAP) < self.count[:, None]
        self.index = np.where(there, self.index, np.int16(-20))
        self.groups = blocks * GROUPS
        self.tokens = np.full((self.groups, 8), -9, np.int32)
        self.heads = np.full((self.groups, 2), -9, np.int32)
        self.lists = np.full((self.groups * ptx.TURNS, 256), 0x5B5B, np.int16)
        self.flags, self.summed = np.full(blocks, -9, np.int32), np.zeros(1, np.int32)
        self.pool_rows = pools
        self.pool_size = g.integers(0, 2, 64).astype(np.int32) * 7
        self.memory = Memory()
        names = "count index tokens heads lists flags summed pool_size".split()
        self.at = {n: self.memory.add((i + 1) << 40, getattr(self, n)) for i, n in enumerate(names)}
        for b in range(blocks):
            inputs = [b, self.at["count"], M, wanted, *(self.at[n] for n in names[1:-1])]
            for share in range(ptx.SHARES):
                given = [*inputs, share, self.at["pool_size"]]
                code = ptx.arrange(CAP, LEAST, pools)
                block(code, given, Memory(), self.memory, warps=ptx.WARPS)
        self.pooled = (self.tokens >= 0) & (self.tokens & ptx.POOLED > 0)
        self.owners = np.where(self.tokens < 0, -1, self.tokens & (ptx.POOLED - 1))

    def places(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """(neurons, which of its token's entries each is or -1) [places, tokens] of the group's turns."""
        first, places = self.heads[group]
        turns = self.lists[first : first + -(-places // 16)].reshape(-1, 32, 2, 4)
        n, of = (np.empty((len(turns) * 16, 8), int) for _ in range(2))
        for i, t in np.ndindex(n.shape):
            quarter = i % 16 // 4
            turn = (t // 2 + quarter) % 4
            found = turns[i // 16, i % 4 * 8 + 2 * turn + t % 2, 0, quarter]
            assert found & 1 == found >> 3 & 1
            n[i, t] = found >> 1
            of[i, t] = turns[i // 16, 4 * t + turn, 1, i % 4]
        return n, of


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("M", "most", "apart", "pools"), [heavy(600, 45, 1, 16), (200, 40, 8, 0), heavy(100, CAP, 1, 0)]
)
def test_entries_have_places(M, most, apart, pools):
    """Each has one; those of a place are of different classes, where they may be. apart: neurons of all classes, or of
    one."""
    made = Arranged(M, 500, most, apart=apart, pools=pools)
    assert made.flags.tolist() == [1] * len(made.flags) and made.summed[0] == len(made.flags)
    packed = [m for m in range(M) if made.count[m] <= CAP]
    tokens = made.owners.reshape(-1)
    there = tokens[tokens >= 0]
    assert (
        made.pooled.reshape(-1)[tokens >= 0]
        == (made.pool_size[there // (pools or M)] > 0) * (pools > 0)
    ).all()
    for b in range(len(made.flags)):
        mine = [m for m in packed if m // ptx.BLOCK == b]
        mine.sort(key=lambda m: (-made.count[m], m))
        here = tokens[b * ptx.BLOCK : (b + 1) * ptx.BLOCK].tolist()
        assert here == mine + [-1] * (ptx.BLOCK - len(mine))
    reads = lines = turns = 0
    for g in range(made.groups):
        own = made.owners[g]
        counts = [made.count[m] if m >= 0 else 0 for m in own]
        places = made.heads[g, 1]
        full, more = divmod(max(counts), ptx.SPAN)
        assert places == full * ptx.WINDOW + (more + ptx.EXTRA + 3) // 4 * 4 * (more > 0)
        n, of = made.places(g)
        turns += len(n) // 16
        for t, m in enumerate(own):
            used = np.flatnonzero(of[:, t] >= 0)
            assert sorted(of[used, t]) == list(range(counts[t])) and (used < places).all()
            assert (n[used, t] == made.index[m, of[used, t]]).all()
        for row in n[:places]:
            reads += 1
            lines += max(len(set(row[row % 8 == k])) for k in range(8))
    firsts = made.heads[made.heads[:, 1] > 0, 0]
    assert len(set(firsts)) == len(firsts) and turns <= len(made.lists)
    assert lines <= (1.3 if apart == 1 else 8) * reads


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("M", "least", "most", "wanted"),
    [(100, 0, LEAST, 1), (100, 0, CAP, 0), heavy(512, 100, CAP, 1)],
)
def test_what_is_not_summed(M, least, most, wanted):
    """Few entries; all rows dense; more than there is room for."""
    made = Arranged(M, 500, most, wanted=wanted, least=least)
    assert made.flags.tolist() == [0] and made.summed[0] == 0
    assert (made.tokens == -1).all() and not made.heads.any() and (made.lists == 0x5B5B).all()


@pytest.mark.parametrize(
    ("kind", "shares", "biased", "pools"),
    [
        heavy("bf16", 1, False, 0),
        heavy("f16", 2, True, 0),
        ("bf16", 2, True, 16),
        heavy("f16", 1, False, 8),
    ],
)
def test_rows_of_a_slice_are_summed(kind, shares, biased, pools):
    """pools: of so many rows; those that have one are added to."""
    M, N, D = 90, 150, 32
    made = Arranged(M, N, 60, pools=pools)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    torch.manual_seed(0)
    table, h, bias = (torch.randn(*s).to(dtype) for s in ((N, D), (M, CAP), (D,)))
    h[torch.from_numpy(np.arange(CAP) >= made.count[:, None])] = torch.nan
    given = {n: torch.from_numpy(getattr(made, n)) for n in ("tokens", "heads", "lists")}
    sums._values_kernel[(made.groups,)](
        *given.values(), given["lists"].view(dtype), h, STEPS=encode(()), CAP=CAP, EARLY=False
    )
    pooled = np.zeros(M, bool)
    pooled[made.owners[made.pooled]] = True
    part = torch.randn(M, D).to(dtype)
    part[torch.from_numpy(~pooled)] = torch.nan
    out = part.view(torch.int16).numpy().copy()
    before = out.copy()
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
                at + 2 * ptx.FEATURES * piece, 2 * D, made.at["tokens"], made.at["heads"], made.at["lists"],
                made.groups, share, biases + 2 * ptx.FEATURES * piece,
            ]  # fmt: skip
            code = ptx.sums(kind, shares, biased, pools > 0)
            block(code, inputs, shared, made.memory, warps=2, dynamic=start)
    got = torch.from_numpy(out).view(dtype).double()
    for m in range(M):
        c = made.count[m]
        if c > CAP:
            assert (out[m] == before[m]).all()
            continue
        want = h[m, :c].double() @ table[torch.from_numpy(made.index[m, :c].astype(int))].double()
        want += bias.double() * biased
        if pooled[m]:
            want += part[m].double()
        torch.testing.assert_close(got[m], want, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("N", "D", "pays"),
    [(5632, 2048, True), (3072, 1024, True), (5632, 4096, True)]
    + [(7200, 2048, False), (5632, 1408, False), (5632, 2056, False), (5632, 8, False)],
)
def test_where_it_pays(N, D, pays):
    """Tables that do not fit, and widths that leave too many multiprocessors without a slice."""
    assert sums._pays(N, D, 132) == pays


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
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
    monkeypatch.setattr(packer, "DENSE_ROW", 1.0)
    monkeypatch.setattr(packer, "DENSE_ROW_MANY", 1.0)
    monkeypatch.setattr(forward_kernel, "FEW", 0)
    monkeypatch.setattr(sums, "LEAST", 2)
    made = []
    plain = sums.Lists.sums
    monkeypatch.setattr(sums.Lists, "sums", lambda s, *args: made.append(s) or plain(s, *args))
    found = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(forward_kernel, "SUMMED", least)
        found.append(outcomes(M, K, N, D, dtype, steps, train, stats))
    assert len(made) == 1 and made[0].done[0].all()
    for mine, gathered in zip(*found):
        scale = gathered.float().abs().mean()
        torch.testing.assert_close(mine / scale, gathered / scale, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("pools", [False, True])
def test_what_pools_yield_is_added_to(pools):
    """Eight blocks of tokens, of the second of which some rows share their neurons."""
    M, N, D, cap = 8 * sums.BLOCK, 3000, 2048, 64
    torch.manual_seed(0)
    count = torch.randint(0, cap + 4, (M,), device="cuda", dtype=torch.int32)
    index = torch.rand(M, N, device="cuda").topk(cap, 1).indices.to(torch.int16)
    value = torch.randn(M, cap, device="cuda").bfloat16()
    table = torch.randn(N, D, device="cuda").bfloat16()
    size = torch.zeros(M // rows_pool.ROWS, dtype=torch.int32, device="cuda")
    size[sums.BLOCK // rows_pool.ROWS + 1] = 5 * pools
    lists = sums.Lists(count, index, torch.zeros(1, dtype=torch.int32, device="cuda"))
    lists.fill(None, size, rows_pool.ROWS)
    out = torch.full((M, D), 7.0, device="cuda").bfloat16()
    lists.put(value)
    lists.sums(table, None, out)
    assert lists.done[0].tolist() == [1] * 8 and lists.done[1] == 8
    there = (torch.arange(cap, device="cuda") < count[:, None]) & (count <= cap)[:, None]
    dense = torch.zeros(M, N, device="cuda").scatter_(1, index.long(), value.float() * there)
    want = dense @ table.float()
    first = sums.BLOCK + rows_pool.ROWS
    want[first : first + rows_pool.ROWS] += 7 * pools
    want = want.bfloat16()
    want[count > cap] = 7
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
