"""Checksums that detect whether tensors have changed, in the time of reading them.

    sums[s] = sum over 64-bit words w of (low(w) + a) * (high(w) + b)  mod 2^64,   s = 0, 1

a and b are random 32-bit keys for each place in a tile, plus a multiple of the tile's number (the universal hash NH of
UMAC). For any change, each sum stays the same with probability 2^-32, and both do with probability 2^-64.

One launch reads all tensors; its last program writes the sums to pinned memory of the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import relaunched, sm_count

# (programs per SM, warps), enough loads in flight: 62 us for 100,000 x 128 entries on an H100 (66 with three programs,
# 67 to 74 with one program that reads two or four tiles at a time). On a separate stream, concurrent with the search,
# the checksum ends later, and the host waits for it.
_PROGRAMS, _WARPS = 4, 8
_TENSORS = 4
_COUNTER = tl.constexpr(2 * _TENSORS + 1)


def buffers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(totals, result) for one checksum at a time. totals: int64, 0 before and after. result: in host memory, two sums
    per tensor, then the number of the query's weights that are not finite."""
    size = 2 * _TENSORS + 1
    result = torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return torch.zeros(size + 1, dtype=torch.int64, device=device), result


@triton.jit
def _add(data, words, keys, totals, TILE: tl.constexpr, WIDE: tl.constexpr):
    """Add the sums of tiles pid, pid + num_programs, ...; unless WIDE, words are the low halves of 64-bit words."""
    if words > 0:
        at = tl.arange(0, TILE)
        a = tl.load(keys + 2 * at).to(tl.uint32, bitcast=True)
        b = tl.load(keys + 2 * at + 1).to(tl.uint32, bitcast=True)
        c = tl.load(keys + 2 * TILE + 2 * at).to(tl.uint32, bitcast=True)
        d = tl.load(keys + 2 * TILE + 2 * at + 1).to(tl.uint32, bitcast=True)
        one = tl.zeros([TILE], tl.uint64)
        two = tl.zeros([TILE], tl.uint64)
        for tile in range(tl.program_id(0), tl.cdiv(words, TILE), tl.num_programs(0)):
            number = tl.full([TILE], 0, tl.int64) + tile
            place = number * TILE + at
            here = place < words
            word = tl.load(data + place, mask=here, other=0)
            low = word.to(tl.uint32)
            if WIDE:
                high = (word >> 32).to(tl.uint32)
            else:
                high = tl.zeros([TILE], tl.uint32)
            p = (number * 0x9E3779B1).to(tl.uint32)
            r = (number * 0x85EBCA77).to(tl.uint32)
            first = (low + a + p).to(tl.uint64) * (high + b + r).to(tl.uint64)
            second = (low + c + r).to(tl.uint64) * (high + d + p).to(tl.uint64)
            one += tl.where(here, first, 0)
            two += tl.where(here, second, 0)
        tl.atomic_add(totals, tl.sum(one.to(tl.int64)), sem="relaxed")
        tl.atomic_add(totals + 1, tl.sum(two.to(tl.int64)), sem="relaxed")


@relaunched
@triton.jit(do_not_specialize=["words0", "words1", "words2", "words3", "size"])
def _checksum_kernel(
    result, data0, words0, data1, words1, data2, words2, data3, words3, query, size, keys, totals,
    TILE: tl.constexpr, WIDE0: tl.constexpr, WIDE1: tl.constexpr, WIDE2: tl.constexpr, WIDE3: tl.constexpr,
):  # fmt: skip
    _add(data0, words0, keys, totals, TILE, WIDE0)
    _add(data1, words1, keys, totals + 2, TILE, WIDE1)
    _add(data2, words2, keys, totals + 4, TILE, WIDE2)
    _add(data3, words3, keys, totals + 6, TILE, WIDE3)
    at = tl.arange(0, 4 * TILE)
    bad = tl.zeros([4 * TILE], tl.int32)
    for first in range(tl.program_id(0) * 4 * TILE, size, tl.num_programs(0) * 4 * TILE):
        x = tl.load(query + first + at, mask=first + at < size, other=0.0)
        bad += (tl.abs(x) < float("inf")).to(tl.int32) ^ 1
    lost = tl.sum(bad)
    if lost > 0:
        tl.atomic_add(totals + _COUNTER - 1, lost.to(tl.int64), sem="relaxed")
    tl.debug_barrier()
    done = tl.atomic_add(totals + _COUNTER, 1, sem="acq_rel")
    if done == tl.num_programs(0) - 1:
        for i in range(0, _COUNTER):
            tl.store(result + i, tl.atomic_xchg(totals + i, 0, sem="relaxed"))
        tl.atomic_xchg(totals + _COUNTER, 0, sem="relaxed")


def checksum(
    query: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    third: torch.Tensor | None,
    fourth: torch.Tensor | None,
    totals: torch.Tensor,
    result: torch.Tensor,
    keys: torch.Tensor,
) -> None:
    """Launch the computation of `result` (see `buffers`) for dense tensors and a query in fp32.

    keys: random int32 [2, words of a tile, 2].
    """
    device, tile = keys.device, keys.shape[1]
    words = [None if t is None else _words(t) for t in (first, second, third, fourth)]
    sizes = [0 if w is None else w.numel() for w in words]
    programs = _PROGRAMS * (sm_count(device) if device.type == "cuda" else 1)
    args = [a for w, size in zip(words, sizes) for a in (keys if w is None else w, size)]
    wide = {f"WIDE{i}": w is not None and w.dtype == torch.int64 for i, w in enumerate(words)}
    with torch.cuda.device_of(keys):
        _checksum_kernel[(max(1, min(programs, triton.cdiv(max(sizes), tile))),)](
            result, *args, query, query.numel(), keys, totals,
            TILE=tile, **wide, num_warps=_WARPS, maxnreg=64,
        )  # fmt: skip


def _words(t: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, as the widest integers that fit."""
    if t.dtype == torch.int64 and not t.data_ptr() % 8:
        return t
    flat = t.as_strided((t.numel(),), (1,))
    size = t.numel() * t.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if t.element_size() <= dtype.itemsize and not (size | t.data_ptr()) % dtype.itemsize:
            return flat.view(dtype)
    return flat.view(torch.uint8)
