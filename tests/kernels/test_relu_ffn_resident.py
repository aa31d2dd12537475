"""Dot products with a table in shared memory: the PTX on a CPU, by `ptx_machine`, and the whole on a Hopper GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from ptx_machine import Memory, block
from test_relu_ffn import empty_packed, make

from sparse_inductor.kernels import relu_ffn as forward_kernel
from sparse_inductor.kernels import relu_ffn_backward as backward_kernel
from sparse_inductor.kernels import relu_ffn_packing as packer
from sparse_inductor.kernels import relu_ffn_ptx as ptx
from sparse_inductor.kernels import relu_ffn_resident as resident

CAP = 48


class Arranged:
    """The lists of random packed rows, some of them heavy, as the PTX makes them."""

    def __init__(self, M: int, N: int, parts: int, seed: int = 0) -> None:
        g = np.random.default_rng(seed)
        self.parts, self.groups = parts, -(-M // ptx.GROUP)
        self.count = g.integers(0, CAP + 3, M).astype(np.int32)
        self.count[8:16] = 2  # a group that is left alone
        self.index = np.stack([g.permutation(N)[:CAP] for _ in range(M)]).astype(np.int16)
        room = M * CAP // 8 + self.groups * parts + 1
        self.octets, self.alone = np.zeros(2, np.int32), np.full(self.groups, -5, np.int32)
        self.heads = np.full((parts, self.groups), -5, np.int32)
        self.records = np.full((room, 8), 0x5B5B, np.int16)
        self.places = np.full((room, 8), -7, np.int32)
        self.memory = Memory()
        arrays = [
            self.count, self.index, self.octets, self.heads, self.records, self.places, self.alone,
        ]  # fmt: skip
        at = [self.memory.add((i + 1) << 40, a) for i, a in enumerate(arrays)]
        for group in g.permutation(self.groups):
            inputs = [int(group), *at[:6], self.groups, M, at[6]]
            code = ptx.arrange(parts, CAP)
            block(code, inputs, Memory(), self.memory, warps=ptx.ARRANGE_WARPS)

    def entries(self, group: int) -> dict[int, tuple[int, int]]:
        """(neuron, token of the group) of each place that is to have a result."""
        rows = range(group * ptx.GROUP, min((group + 1) * ptx.GROUP, len(self.count)))
        return {
            m * CAP + i: (int(self.index[m, i]), m % ptx.GROUP)
            for m in rows
            if self.count[m] <= CAP
            for i in range(self.count[m])
        }


@pytest.mark.parametrize(("M", "N", "parts"), [(37, 100, 4), (21, 300, 12), (16, 3000, 32)])
def test_entries_are_arranged(M, N, parts):
    made = Arranged(M, N, parts)
    taken = []
    alone = made.alone[: made.octets[1]]
    assert 1 in alone and len(set(alone)) == len(alone) < made.groups
    for group in range(made.groups):
        entries = made.entries(group)
        assert (len(entries) < ptx.FEWEST) == (group in alone)
        if group in alone:
            assert not made.heads[:, group].any()
            continue
        for part in range(parts):
            head = int(made.heads[part, group])
            octets = range(head >> ptx.LEFT, (head >> ptx.LEFT) + (head & (1 << ptx.LEFT) - 1))
            taken += octets
            for octet in octets:
                for k in range(8):
                    place = int(made.places[octet, k])
                    record = int(made.records[octet, 2 * (k % 4) + k // 4])
                    row, token = record & (1 << ptx.PART_ROWS) - 1, record >> ptx.PART_ROWS
                    if place == -1:
                        assert row * parts < N  # it is read all the same
                    else:
                        assert entries.pop(place) == (row * parts + part, token)
        assert not entries
    assert sorted(taken) == list(range(made.octets[0]))


@pytest.mark.parametrize(("kind", "shares"), [("bf16", 1), ("f16", 2)])
def test_tokens_are_multiplied_by_a_slice_of_a_part(kind, shares):
    M, N, K, parts, slices, run = 37, 50, 256, 4, 2, 2
    made = Arranged(M, N, parts)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    torch.manual_seed(0)
    x, table = (torch.randn(s, K).to(dtype) for s in (M, N))
    bits = x.view(torch.int16).numpy()
    octets = int(made.octets[0])
    partial = np.full((octets, slices, 8), np.nan, np.float32)
    memory = Memory()
    at = [
        memory.add((i + 1) << 40, a)
        for i, a in enumerate((bits, made.heads, made.records, partial))
    ]
    rows = -(-N // parts)
    for part in range(parts):
        for piece in range(slices):
            own = torch.zeros(rows, ptx.FEATURES, dtype=dtype)
            neurons = torch.arange(part, N, parts)
            own[: len(neurons)] = table[neurons, piece * ptx.FEATURES :][:, : ptx.FEATURES]
            for share in range(shares):
                shared = Memory()
                start = shared.add(4096, own.view(torch.int16).numpy())
                inputs = [
                    at[0] + 2 * ptx.FEATURES * piece, 2 * K, M - 1, at[1] + 4 * made.groups * part, made.groups,
                    at[2], at[3] + 32 * piece, run, share,
                ]  # fmt: skip
                code = ptx.dots(kind, slices, shares)
                block(code, inputs, shared, memory, warps=2, dynamic=start)
    places = made.places[:octets]
    there = places >= 0
    token, entry = np.divmod(places[there], CAP)
    want = (x.double()[token] * table.double()[made.index[token, entry].astype(int)]).sum(1)
    np.testing.assert_allclose(partial.sum(1)[there], want, rtol=1e-4, atol=1e-3)


def outcomes(M, K, N, D, dtype, steps, train, stats):
    """What a forward, and a backward, make of rows of which some groups have few entries, and some rows too many."""
    x, b = make(M, K, N, D, steps=steps, share=min(0.02, 30 / N))
    x[8:24] = 0  # the biases' neurons only
    x[40::9] *= 3
    x = x.to(dtype)
    tensors = {k: v.to(dtype) for k, v in vars(b).items() if isinstance(v, torch.Tensor)}
    b = dataclasses.replace(b, **tensors)
    packed = empty_packed(x, b, 64) if train else None
    numbers = torch.zeros(4, M, device=x.device) if stats else None
    found = [forward_kernel.forward(x, b, numbers, packed, 64)]
    if stats:
        found.append(numbers)
    if train:
        torch.manual_seed(1)
        dy = torch.randn(M, D, device=x.device).to(dtype)
        d_stats = torch.rand(4, M, device=x.device) if stats else None
        found += backward_kernel.backward(dy, d_stats, x, b, packed, [True] * 7)
    return found


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("M", "K", "N", "D", "steps", "train", "stats"),
    [
        (1001, 256, 700, 384, "relu", False, False),
        (1001, 2048, 5632, 2048, "relu | square", False, False),
        (4500, 512, 1500, 256, "relu", False, False),
        (999, 256, 700, 384, "relu", True, False),
        (1001, 1024, 3000, 2048, "relu | square", True, True),
    ],
)
def test_as_gathered(monkeypatch, dtype, M, K, N, D, steps, train, stats):
    monkeypatch.setattr(packer, "DENSE_ROW", 1.0)
    monkeypatch.setattr(forward_kernel, "FEW", 0)
    lists = []
    plain = resident.Lists.fill
    monkeypatch.setattr(
        resident.Lists, "fill", lambda made, state=None: lists.append(made) or plain(made, state)
    )
    found = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(forward_kernel, "RESIDENT", least)
        monkeypatch.setattr(forward_kernel, "RESIDENT_TRAINING", least)
        found.append(outcomes(M, K, N, D, dtype, steps, train, stats))
    assert len(lists) == 1 + train
    assert all(made.octets[0] > 0 and made.octets[1] > 0 for made in lists)
    for mine, gathered in zip(*found):
        scale = gathered.float().abs().mean()
        torch.testing.assert_close(mine / scale, gathered / scale, rtol=3e-2, atol=3e-2)
