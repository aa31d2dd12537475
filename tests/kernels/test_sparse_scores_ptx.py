"""The inline PTX of rescoring, run on a CPU by `ptx_machine`, against fp64."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_machine import Memory, block

from sparse_inductor.kernels.sparse_scores import ptx

SHARED = 1024  # where a block's shared memory begins
ROWS = 64


def ordered(score):
    """fp32 as integers that sort the same way."""
    bits = score.view(np.int32).astype(np.int64)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def keys_of(score, doc):
    return (ordered(score) << 32) | (4294967295 - doc)


def rescored(kind, vocabulary, lengths, query_terms, kept, parts=1, part=0, seed=0):
    """(keys that the PTX wrote, keys that are right) of the documents of one block."""
    g = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    terms = [np.sort(g.permutation(vocabulary)[:n]) for n in lengths]
    terms = np.concatenate([*terms, np.zeros(ptx.READ_ANYHOW)]).astype(np.uint16)
    scale = (g.random(len(lengths)) + 0.1).astype(np.float32)
    stored = {
        "singles": lambda n: (g.random(n) - 0.3).astype(np.float32),
        "halves": lambda n: (g.random(n) - 0.3).astype(np.float16),
        "bytes": lambda n: g.integers(0, 255, n).astype(np.uint8),
    }[kind](starts[-1])
    weights = stored.astype(np.float32)
    if kind == "bytes":
        weights = (weights - np.float32(127)) * np.repeat(scale, lengths)
    query = np.zeros(vocabulary, np.float32)
    of_query = g.permutation(vocabulary)[:query_terms]
    query[of_query] = g.random(query_terms) + 0.1
    n = len(kept)
    keys = np.zeros(n, np.int64)

    memory, shared = Memory(), Memory()
    places = SHARED + ptx.FILTER_BYTES
    room = np.full(ptx.FILTER_BYTES + 16 * ROWS + ptx.PASSED_BYTES, 0xAB, np.uint8)
    room[: ptx.FILTER_BYTES] = 0
    shared.add(SHARED, room)
    arrays = (terms, stored, kept.astype(np.int32), keys, query)
    at = [memory.add((i + 1) << 40, a) for i, a in enumerate(arrays)]
    # A third of the query's terms at the beginning of the row, the others at its end.
    first, length = query_terms // 3, query_terms + 5
    row = np.zeros(length, np.int32)
    row[:first], row[first + 5 :] = of_query[:first], of_query[first:]
    row_at = memory.add(99 << 40, row)
    block(ptx.mark(), [SHARED, row_at, query_terms, first, length - query_terms], shared, memory)

    mine = []
    for turn in range(0, -(-n // (ptx.TURN * parts)) * ptx.TURN, ROWS):
        r = turn + np.arange(ROWS)
        i = (r // ptx.TURN * parts + part) * ptx.TURN + r % ptx.TURN
        here = i < n
        mine.append(i[here])
        doc = np.where(here, kept[np.minimum(i, n - 1)], 0)
        size = np.where(here, lengths[doc], 0).astype(np.int64)
        shared.at(places, 8 * ROWS)[:] = (
            np.where(here, starts[doc], 0) | (size << ptx.LENGTH_AT)
        ).view(np.uint8)
        if kind == "bytes":
            pairs = np.stack([scale[doc], np.full(ROWS, 127, np.float32)], 1)
            shared.at(places + 8 * ROWS, 8 * ROWS)[:] = pairs.view(np.uint8).reshape(-1)
        numbers = [n, turn * parts + part * ptx.TURN, parts * ptx.TURN]
        block(ptx.rescore(kind, ROWS), [SHARED, places, *at, *numbers], shared, memory)

    products = weights.astype(np.float64) * query[terms[: starts[-1]]].astype(np.float64)
    score = np.array([products[starts[d] : starts[d + 1]].sum() for d in kept], np.float32)
    where = np.concatenate(mine)
    return keys[where], keys_of(score + np.float32(0), kept.astype(np.int64))[where]


@pytest.mark.parametrize(
    "kind, vocabulary, longest, query_terms, count, parts",
    [
        ("singles", 30522, 250, 46, 50, 1),  # as the collections of the benchmarks
        ("singles", 60000, 700, 100, 20, 1),  # rows that go on; terms of 16 bits
        ("halves", 600, 500, 200, 80, 2),  # more passes than a list has room for
        ("bytes", 600, 250, 50, 35, 1),
        ("singles", 250, 250, 240, 70, 1),  # nearly all of a row, and a second lot of rows
        ("singles", 30522, 4, 400, 9, 1),  # empty rows
    ],
)
def test_rescoring_is_exact(kind, vocabulary, longest, query_terms, count, parts):
    g = np.random.default_rng(1)
    lengths = g.integers(0, longest + 1, 100)
    kept = g.permutation(100)[:count]
    got, want = rescored(kind, vocabulary, lengths, query_terms, kept, parts, parts - 1)
    assert len(got) and (got == want).all()


@pytest.mark.parametrize("n, k", [(1003, 1000), (1024, 1024), (300, 7)])
@pytest.mark.parametrize("levels", [0, 40])
def test_keys_are_written_at_their_ranks(n, k, levels):
    """Scores of both signs; with few `levels`, hundreds are equal, and lower documents go first."""
    g = np.random.default_rng(n)
    doc = g.permutation(200_000)[:n].astype(np.int64)
    score = g.normal(0, 1, n).astype(np.float32)
    if levels:
        score = (np.round(score * levels / 6) / levels).astype(np.float32) + np.float32(0)
    keys = keys_of(score, doc)
    scores, ids = np.zeros(k, np.float32), np.zeros(k, np.int64)
    memory, shared = Memory(), Memory()
    shared.add(SHARED, np.full(ptx.RANK_BYTES, 0xAB, np.uint8))
    at = [memory.add((i + 1) << 40, a) for i, a in enumerate((keys, scores, ids))]
    block(ptx.rank(), [SHARED, at[0], n, k, at[1], at[2]], shared, memory)
    order = np.argsort(-keys)[:k]
    assert (scores == score[order]).all() and (ids == doc[order]).all()


@pytest.mark.parametrize(
    "code",
    [
        ptx.accumulate(8192, 8),
        ptx.append(8192, 256, True),
        ptx.mark(),
        ptx.ordinal(),
        *(ptx.rescore(weights, 512) for weights in ("singles", "halves", "bytes")),
        ptx.rank(),
    ],
)
def test_a_line_ends_with_its_statement(code):
    """Triton 3.9 says between the lines which is which."""
    for line in filter(None, map(str.strip, code.splitlines())):
        assert line.endswith((";", ":", "{", "}")), line
