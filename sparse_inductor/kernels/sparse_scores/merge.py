"""Merge of the sorted results of several processes: the place of a key is the number of larger keys in all lists."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import relaunched
from .rescore import _key, _ordered
from .sort import LOWEST, doc_of, score_of

_LOWEST = tl.constexpr(LOWEST)


@relaunched
@triton.jit(do_not_specialize=["total", "first"])
def _keys_kernel(scores, ids, keys, total, first, BLOCK: tl.constexpr):
    """Keys of results, scores fp32 and ids int64 to which `first` is added; LOWEST if there is no result."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < total
    id_ = tl.load(ids + at, mask=here, other=-1)
    key = _key(_ordered(tl.load(scores + at, mask=here, other=0.0)), id_ + first)
    tl.store(keys + at, tl.where(id_ < 0, _LOWEST, key), mask=here)


@triton.jit
def _before(row, key, k, DEPTH: tl.constexpr):
    """Number of larger keys in a descending row [k]."""
    low = tl.zeros(key.shape, tl.int32)
    high = low + k
    for _ in range(DEPTH):
        middle = (low + high) // 2
        larger = tl.load(row + middle, mask=low < high, other=_LOWEST) > key
        low = tl.where((low < high) & larger, middle + 1, low)
        high = tl.where(larger, high, tl.minimum(high, middle))
    return low


@relaunched
@triton.jit(do_not_specialize=["B"])
def _merge_kernel(
    keys, own, scores, ids, B, k, WORLD: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr
):
    """Program (q, r) writes the keys of list r that are among query q's k best to their places.

    keys [WORLD, B, k], distinct except for LOWEST. own: this process's scores, NaN if the query is not finite.
    """
    q = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    lists = keys + q * k
    step = B.to(tl.int64) * k
    key = tl.load(lists + r * step + at, mask=at < k, other=_LOWEST)
    place = at
    there = 0
    for s in range(WORLD):
        if s != r:
            place += _before(lists + s * step, key, k, DEPTH)
        if r == 0:
            there += tl.max(
                _before(lists + s * step, tl.full([1], _LOWEST, tl.int64), k, DEPTH), axis=0
            )
    score = score_of(key)
    kept = (key != _LOWEST) & (place < k)
    tl.store(scores + q * k + place, score, mask=kept)
    tl.store(ids + q * k + place, doc_of(key), mask=kept)
    if r == 0:
        lost = (at >= there) & (at < k)
        unsound = tl.load(own + q * k)
        none = tl.where(unsound != unsound, unsound, float("-inf"))
        tl.store(scores + q * k + at, tl.zeros([BLOCK], tl.float32) + none, mask=lost)
        tl.store(ids + q * k + at, tl.full([BLOCK], -1, tl.int64), mask=lost)


def keys(scores: torch.Tensor, ids: torch.Tensor, first: int) -> torch.Tensor:
    """int64 keys [B, k] of a process's results, comparable among processes; first: the id of its first document."""
    out = torch.empty_like(ids)
    with torch.cuda.device_of(scores):
        if out.numel():
            _keys_kernel[(triton.cdiv(out.numel(), 1024),)](
                scores, ids, out, out.numel(), first, BLOCK=1024, num_warps=4
            )
    return out


def merged(keys: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, ids) [B, k] of the best among keys [world, B, k]. own: this process's scores [B, k]."""
    world, B, k = keys.shape
    scores = torch.empty(B, k, dtype=torch.float32, device=keys.device)
    ids = torch.empty(B, k, dtype=torch.int64, device=keys.device)
    with torch.cuda.device_of(keys):
        if scores.numel():
            _merge_kernel[(B, world)](
                keys, own, scores, ids, B, k, WORLD=world, BLOCK=triton.next_power_of_2(k),
                DEPTH=k.bit_length(), num_warps=4,
            )  # fmt: skip
    return scores, ids
