"""Sparse search on a CPU by published packages, and by the loop that people write with numba.

Each contender is made of documents [N, terms] and queries [B, terms] as scipy's CSR, and gives for every query the ids
of k documents with the largest scores, in any order. All but seismic are exact.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Search = Callable[[], np.ndarray]
"""Gives ids [B, k]."""
Make = Callable[[Any, Any, int, int], Search]
"""Of documents, queries, k and how many threads."""

RECALL = 0.977
"""What an approximate index is asked for."""


def scipy_product(documents: Any, queries: Any, k: int, threads: int) -> Search:
    """`queries @ documents.T`, both sparse, and argpartition of each row; scipy has one thread."""
    columns = documents.T.tocsr()

    def search() -> np.ndarray:
        scores = queries @ columns
        found = np.zeros((len(queries.indptr) - 1, k), np.int64)
        for row, (first, end) in enumerate(itertools.pairwise(scores.indptr)):
            best = np.argpartition(scores.data[first:end], end - first - k)[-k:]
            found[row] = scores.indices[first:end][best]
        return found

    return search


def sparse_dot_topn(documents: Any, queries: Any, k: int, threads: int) -> Search:
    """`sp_matmul_topn`, which keeps the best of each row while it multiplies."""
    import sparse_dot_topn as package

    columns = documents.T.tocsr()

    def search() -> np.ndarray:
        found = package.sp_matmul_topn(queries, columns, top_n=k, n_threads=threads)
        return found.indices.reshape(-1, k)

    return search


def numba_postings(documents: Any, queries: Any, k: int, threads: int) -> Search:
    """A loop over the postings of each query's terms, compiled by numba, the queries spread over threads."""
    import numba

    postings = documents.tocsc()

    @numba.njit(parallel=True, fastmath=True)
    def scored(starts, ids, values, offsets, terms, weights, N, k):
        B = len(offsets) - 1
        found = np.zeros((B, k), np.int64)
        for b in numba.prange(B):
            scores = np.zeros(N, np.float32)
            for q in range(offsets[b], offsets[b + 1]):
                weight = weights[q]
                for i in range(starts[terms[q]], starts[terms[q] + 1]):
                    scores[ids[i]] += weight * values[i]
            least = np.partition(scores, N - k)[N - k]
            n = 0
            for above in (True, False):  # of equal ones as many as there is room for
                for d in range(N):
                    if n < k and (scores[d] > least if above else scores[d] == least):
                        found[b, n] = d
                        n += 1
        return found

    lists = (postings.indptr, postings.indices, postings.data)
    given = (*lists, queries.indptr, queries.indices, queries.data, documents.shape[0], k)

    def search() -> np.ndarray:
        numba.set_num_threads(threads)
        return scored(*given)

    return search


def seismic_index(documents: Any) -> Any:
    """The package's index of documents, by its own settings."""
    import seismic as package

    N, terms = documents.shape
    data = package.SeismicDataset(dim=terms)
    data.add_documents_by_id(
        list(map(str, range(N))), documents.indices.astype(np.int64),
        documents.data.astype(np.float32), documents.indptr.astype(np.int64),
    )  # fmt: skip
    return package.SeismicIndex.build_from_dataset(data)


def seismic(
    index: Any, queries: Any, k: int, threads: int, exact: np.ndarray
) -> tuple[Search, str]:
    """The fastest settings of those tried that find `RECALL` of `exact`, ids [B, k]; and what they are."""
    import seismic as package

    kind = package.get_seismic_string()
    names = np.arange(queries.shape[0]).astype(kind)
    parts = [slice(*pair) for pair in itertools.pairwise(queries.indptr)]
    components = [queries.indices[p].astype(kind) for p in parts]
    values = [queries.data[p].astype(np.float32) for p in parts]

    def search_with(cut: int, heap: float) -> np.ndarray:
        results = index.batch_search(names, components, values, k, cut, heap, num_threads=threads)
        found = np.full((len(parts), k), -1, np.int64)
        for result in results:
            row = int(result[0][0])
            found[row, : len(result)] = [int(document) for _, _, document in result]
        return found

    best: tuple[float, int, float, float] | None = None
    for cut, heap in itertools.product((10, 20, 32), (0.7, 0.8, 0.9, 1.0)):
        found = search_with(cut, heap)
        recall = float(np.mean([len(np.intersect1d(a, b)) / k for a, b in zip(found, exact)]))
        start = time.perf_counter()
        search_with(cut, heap)
        taken = time.perf_counter() - start
        if recall >= RECALL and (best is None or taken < best[0]):
            best = taken, cut, heap, recall
    if best is None:
        raise RuntimeError(f"no settings of seismic that were tried find {RECALL} of the best {k}")
    _, cut, heap, recall = best
    return lambda: search_with(
        cut, heap
    ), f"query_cut {cut}, heap_factor {heap}, recall {recall:.3f}"


EXACT: dict[str, Make] = {
    "scipy": scipy_product,
    "sparse_dot_topn": sparse_dot_topn,
    "numba": numba_postings,
}
"""By the name of the package that is needed."""
