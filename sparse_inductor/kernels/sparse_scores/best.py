"""The k best documents by their scores: the largest first, equal scores by lowest id, NaN above all numbers.

For few documents one launch suffices: the place of every score is the number of better scores. These comparisons take
less time than the host needs for a selection. For more documents, keys are selected one block of documents at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from ..common.launch import relaunched
from . import documents
from .rescore import _key, _ordered
from .sort import LOWEST, doc_of, score_of

_LOWEST = tl.constexpr(LOWEST)
_NAN = tl.constexpr(0x7FC00000)  # every NaN, above infinity

# Scores per program, and scores they are compared with per step: 32 comparisons per thread of 4 warps.
_BLOCK, _OTHERS = 64, 64
# The largest number of comparisons for all queries: about 10 us on an H200, where keys and a sort take the host 200 us.
_COMPARED = 1 << 26
# The largest number of documents for one launch: every program reads all of them.
_DOCUMENTS = 1 << 12

# Documents and queries per tile of `_keys_kernel`, which transposes: scores are document-major, keys query-major.
_TILE, _QUERIES = 64, 32
_RESULTS = 1024


@triton.jit
def _key_of(x, id_):
    """Keys of scores: a larger score, or the lower id of equal scores, has the larger key."""
    x = x.to(tl.float32)
    return _key(tl.where(x != x, _NAN, _ordered(x)), id_)


@triton.jit
def _keys(scores, at, N, stride):
    """Keys of documents of a query; LOWEST past the end."""
    x = tl.load(scores + at.to(tl.int64) * stride, mask=at < N, other=0.0)
    return tl.where(at < N, _key_of(x, at), _LOWEST)


@relaunched
@triton.jit(do_not_specialize=["N"])
def _rank_kernel(
    scores, best, ids, N, k, stride_q, stride_n, BLOCK: tl.constexpr, OTHERS: tl.constexpr
):
    """Program (q, part), with parts varying fastest, handles BLOCK scores of a query and writes those among the k best
    to their places.

    It reads all N scores of the query. Keys are distinct, so every place is written once.
    """
    parts = tl.cdiv(N, BLOCK)
    q = (tl.program_id(0) // parts).to(tl.int64)
    at = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    mine = scores + q * stride_q
    key = _keys(mine, at, N, stride_n)
    place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, N, OTHERS):
        other = _keys(mine, first + tl.arange(0, OTHERS), N, stride_n)
        place += tl.sum((other[None, :] > key[:, None]).to(tl.int32), 1)
    kept = (at < N) & (place < k)
    tl.store(best + q * k + place, score_of(key).to(best.dtype.element_ty), mask=kept)
    tl.store(ids + q * k + place, at.to(tl.int64), mask=kept)


@relaunched
@triton.jit(do_not_specialize=["N", "B", "first"])
def _keys_kernel(
    scores, keys, N, B, first, stride_q, stride_n, TILE: tl.constexpr, QUERIES: tl.constexpr
):
    """keys [B, N] = keys of the scores of documents first, first + 1, ..."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    q = (tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)).to(tl.int64)
    here = (at < N)[:, None] & (q < B)[None, :]
    x = tl.load(
        scores + at.to(tl.int64)[:, None] * stride_n + q[None, :] * stride_q, mask=here, other=0.0
    )
    key = _key_of(x, (first + at)[:, None])
    tl.store(keys + q[None, :] * N + at[:, None], key, mask=here)


@relaunched
@triton.jit(do_not_specialize=["total"])
def _results_kernel(keys, best, ids, total, BLOCK: tl.constexpr):
    """Write the scores and ids of keys."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + at, mask=at < total, other=0)
    tl.store(best + at, score_of(key).to(best.dtype.element_ty), mask=at < total)
    tl.store(ids + at, doc_of(key), mask=at < total)


def search(
    query: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor | None,
    offsets: torch.Tensor | None,
    num_docs: int,
    k: int,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best documents [B, k] of `sparse_scores`'s arguments, k > 0: scores in out_dtype, not fp64, and int64 ids."""
    blocks = documents.blocks(query, ids, values, rows, offsets, num_docs, out_dtype)
    if num_docs <= _DOCUMENTS and query.shape[0] * num_docs**2 <= _COMPARED:
        ((_, scores),) = blocks  # so few documents are one block
        return best(scores, k)
    return selected(blocks, k)


def best(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, int64 ids) [B, k] of the k best of scores [B, N], any strides, ordered as by `aten.top.best_of`."""
    B, N = scores.shape
    found, ids = _results(scores, B, k)
    with torch.cuda.device_of(scores):
        _rank_kernel[(B * triton.cdiv(N, _BLOCK),)](
            scores, found, ids, N, k, *scores.stride(), BLOCK=_BLOCK, OTHERS=_OTHERS, num_warps=4
        )
    return found, ids


def selected(
    parts: Iterable[tuple[int, torch.Tensor]], k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `best`, over at least one part (first id, scores [B, n]). Holds the keys of one part and k keys per query."""
    kept = None
    for first, scores in parts:
        keys = _keys_of(scores, first)
        if kept is not None:
            keys = torch.cat((kept, keys), 1)
        kept = torch.topk(keys, min(k, keys.shape[1]), dim=1).values
    assert kept is not None, "at least one part"
    found, ids = _results(scores, *kept.shape)
    with torch.cuda.device_of(kept):
        _results_kernel[(triton.cdiv(kept.numel(), _RESULTS),)](
            kept, found, ids, kept.numel(), BLOCK=_RESULTS, num_warps=4
        )
    return found, ids


def _keys_of(scores: torch.Tensor, first: int) -> torch.Tensor:
    B, N = scores.shape
    keys = torch.empty(B, N, dtype=torch.int64, device=scores.device)
    width = min(_QUERIES, triton.next_power_of_2(B))
    with torch.cuda.device_of(scores):
        _keys_kernel[(triton.cdiv(N, _TILE), triton.cdiv(B, width))](
            scores, keys, N, B, first, *scores.stride(), TILE=_TILE, QUERIES=width, num_warps=4
        )
    return keys


def _results(scores: torch.Tensor, B: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.new_empty(B, k), torch.empty(B, k, dtype=torch.int64, device=scores.device)
