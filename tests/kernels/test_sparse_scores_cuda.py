"""The scoring kernels in CUDA C++, run on a CPU, against sums in integers and in fp64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from on_cpu import ORDERS, OnCpu

from sparse_inductor.kernels.sparse_scores import accumulate, rescore

CHUNK = accumulate.CHUNK_DOCS
APART = accumulate.COUNTERS_APART


def ordered(score):
    """Return integers that sort in the order of the fp32 scores."""
    bits = score.view(np.int32).astype(np.int64)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def keys_of(score, doc):
    return (ordered(score) << 32) | (4294967295 - doc)


def ints(*values):
    return np.array(values, np.int32)


def query_rows(g, B, L, vocabulary, longest):
    """Return terms [B, L], their counts [B], and `longs` [B].

    A row begins with its `longs` terms of long posting lists and ends with the others; -1 fills the gap.
    """
    counts = g.integers(longest // 2, longest + 1, B).astype(np.int32)
    longs = (counts // 3).astype(np.int32)
    terms = np.full((B, L), -1, np.int32)
    for q, (n, long) in enumerate(zip(counts, longs)):
        mine = g.permutation(vocabulary)[:n]
        terms[q, :long], terms[q, L - n + long :] = mine[:long], mine[long:]
    return terms, counts, longs


@pytest.mark.parametrize(
    "listed, ranked, longest", [(0, 0, 40), (1, 0, 3), (1, 1024, 40), (1, 8192, 70)]
)
def test_a_chunk_is_scored_in_integers(listed, ranked, longest):
    """Candidates are the documents that reach the threshold and are not deleted.

    With `ranked`, the kernel instead computes the threshold from a chunk of sampled documents.
    """
    g, B, V, chunks, L = np.random.default_rng(longest), 2, 90, 2, 100
    lengths = g.integers(0, 30, (chunks, V))
    lengths[:, :9] = (g.random((chunks, 9)) * 1500).astype(
        int
    )  # posting lists with pieces of all sizes, and with several pieces
    offsets = np.concatenate([np.zeros((chunks, 1), int), lengths.cumsum(1)], 1).astype(np.int32)
    places = [np.concatenate([g.permutation(CHUNK)[:n] for n in row]) for row in lengths]
    bases = np.cumsum([0, *map(len, places)]).astype(np.int64)[:-1]
    places = np.concatenate(places)
    post = ((g.integers(-(1 << 16), 1 << 18, len(places)) << 13) | places).astype(np.int32)
    terms, counts, longs = query_rows(g, B, L, V, longest)
    weights = g.integers(1 << 20, 1 << 24, (B, L)).astype(np.int32)
    docs = g.permutation(3 * CHUNK)[: chunks * CHUNK].astype(np.int32) if listed else ints(CHUNK, 0)
    deleted = g.random(3 * CHUNK) < 0.2
    scores = np.zeros((chunks, B, CHUNK), np.int64)
    for c, q in np.ndindex(chunks, B):
        for at in np.flatnonzero(terms[q] >= 0):
            t = terms[q, at]
            x = post[bases[c] + offsets[c, t] : bases[c] + offsets[c, t + 1]].astype(np.int64)
            np.add.at(scores[c, q], x % CHUNK, (x * weights[q, at] >> 32) | 1)
    threshold, capacity = np.sort(scores.max(0), 1)[:, -200].astype(np.int32), 150
    candidates, given = np.zeros((B, capacity), np.int64), threshold.copy()
    rank = 17
    for order in ORDERS:
        found = np.zeros((B, APART), np.int32)
        threshold[:] = given
        OnCpu(accumulate.shared_kernel, CHUNK=CHUNK, APART=APART, LISTED=listed, RANKED=ranked)(
            (B if ranked else chunks * B, 1), post, offsets, bases, docs, terms, weights, counts, longs,
            threshold, found, candidates, deleted, B, V + 1, L, capacity, rank, order=order,
        )  # fmt: skip
        for q in range(B):
            doc = docs.reshape(chunks, -1).astype(np.int64) + (0 if listed else np.arange(CHUNK))
            live = np.where(deleted[doc] & (scores[:, q] > 0), 0, scores[:, q])
            if ranked:
                best = np.sort(live[0, :ranked])[-rank]
                assert found[q, 0] == 0 and best * (1 - 2**-11) - 1 <= threshold[q] <= max(best, 1)
                continue
            wanted = (live >= threshold[q]) & ~deleted[doc]
            keys = (live << 32 | (doc ^ 0x7FFFFFFF))[wanted]
            assert found[q, 0] == len(keys) > 20
            mine = candidates[q, : len(keys)]
            assert len(set(mine)) == len(mine) and set(mine) <= set(keys)


KINDS = {"float": np.float32, "unsigned short": np.float16, "unsigned char": np.uint8}


def rescored(kind, V, lengths, longest, kept, parts=1, k=0, pdl=True, order=1, levels=0):
    """Run the kernel for two queries; return its results for the second, (keys, scores, ids, left), and exact keys."""
    g, n, B, room = np.random.default_rng(len(kept)), len(lengths), 2, 2048
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    terms = [np.sort(g.permutation(V)[:length]) for length in lengths]
    terms = np.concatenate([*terms, np.zeros(rescore.READ_ANYHOW)]).astype(np.uint16)
    stored = (
        g.integers(1, 200, len(terms)) if kind == "unsigned char" else g.random(len(terms)) - 0.3
    )
    if levels:
        stored = np.round(stored * levels) / levels
    stored = stored.astype(KINDS[kind])
    first_docs, scales = (
        ints(0, n // 3, n // 2),
        np.array([[0.25, 3], [0.5, 7], [2, 0]], np.float32),
    )
    weights = stored.astype(np.float32)
    if kind == "unsigned char":
        chunk = np.searchsorted(first_docs, np.repeat(np.arange(n), lengths), "right") - 1
        weights[: offsets[-1]] = (weights[: offsets[-1]] - scales[chunk, 1]) * scales[chunk, 0]
    L = longest + 5
    query_terms, counts, longs = query_rows(g, B, L, V, longest)
    query = np.zeros((B, V), np.float32)
    for q in range(B):
        mine = query_terms[q][query_terms[q] >= 0]
        query[q, mine] = 1 if levels else g.random(len(mine)) + 0.1
    products = weights.astype(np.float64) * query[1, terms].astype(np.float64)
    exact = np.array([products[a:b].sum() for a, b in itertools.pairwise(offsets)]).astype(
        np.float32
    )
    exact += np.float32(0)
    list_of, keys = np.full((B, room), 0x7ABCDEF0, np.int32), np.full((B, room), -5, np.int64)
    list_of[1, : len(kept)] = kept
    kept_counts, found, progress = (
        ints(0, len(kept)),
        np.full((B, APART), len(kept), np.int32),
        np.zeros(4, np.int32),
    )
    scores, ids = np.zeros((B, max(k, 1)), np.float32), np.zeros((B, max(k, 1)), np.int64)
    constants = {"STORED": kind, "ROOM": room, "APART": APART, "READ_ANYHOW": rescore.READ_ANYHOW}
    OnCpu(
        rescore.filtered_kernel, **constants, RANKED=bool(k), RANKED_UP_TO=rescore.RANKED_UP_TO, PDL=pdl
    )(
        (B, parts), query, offsets, terms, stored, scales, first_docs, len(first_docs), query_terms, counts, longs,
        list_of, kept_counts, keys, found, scores, ids, progress, V, L, k, order=order, late=(list_of, kept_counts),
    )  # fmt: skip
    assert (keys[0] == -5).all() and (keys[1, len(kept) :] == -5).all()
    return (keys[1, : len(kept)], scores[1], ids[1], (kept_counts[1], progress[2])), keys_of(
        exact, np.arange(n)
    )[kept]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "kind, vocabulary, longest, query_terms, count, parts",
    [
        ("float", 30522, 250, 46, 50, 1),  # like the collections of the benchmarks
        ("float", 60000, 700, 100, 20, 1),  # rows that need further reads; terms use all 16 bits
        (
            "unsigned short",
            600,
            500,
            200,
            80,
            2,
        ),  # more entries pass the filter than a list has room for
        ("unsigned char", 600, 250, 50, 35, 1),
        ("float", 250, 250, 240, 70, 1),  # nearly all entries pass, and rows need a second round
        ("float", 30522, 4, 400, 9, 1),  # empty rows
        ("unsigned char", 600, 9, 30, 900, 1),  # more rows than one look-up handles
        ("float", 600, 100, 60, 700, 1),  # a list that is full before its last turn
        ("unsigned short", 5000, 200, 3000, 60, 2),  # no filter
    ],
)
def test_rescoring_is_exact(kind, vocabulary, longest, query_terms, count, parts, order):
    g = np.random.default_rng(1)
    lengths = g.integers(0, longest + 1, max(100, count))
    kept = g.permutation(len(lengths))[:count]
    (keys, *_), want = rescored(
        kind, vocabulary, lengths, query_terms, kept, parts, order=order, pdl=order == 1
    )
    assert (np.sort(keys) == np.sort(want)).all()


@pytest.mark.parametrize("levels", [0, 8])
@pytest.mark.parametrize("n, k", [(1003, 1000), (1024, 1024), (300, 7), (1100, 1000), (150, 200)])
def test_the_best_are_written_at_their_ranks(n, k, levels):
    """Scores have both signs. With few `levels`, hundreds are equal, and ties go to lower documents.

    If fewer than k documents are kept, or more than a block can rank, another kernel has to answer the query.
    """
    g = np.random.default_rng(n)
    lengths = g.integers(0, 24, 2000)
    (keys, scores, ids, left), want = rescored(
        "float", 200, lengths, 40, g.permutation(2000)[:n], k=k, levels=levels
    )
    assert (np.sort(keys) == np.sort(want)).all()
    if not k <= n <= rescore.RANKED_UP_TO:
        assert left == (n, 2)
        return
    best = np.sort(want)[::-1][:k]
    assert left == (-1, 1) and (ids == 4294967295 - (best & 4294967295)).all()
    assert (ordered(scores) == best >> 32).all()
