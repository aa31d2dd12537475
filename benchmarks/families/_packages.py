"""Sparse search on a CPU with published packages, and with the loop that users write with numba.

Each contender is built from documents [N, terms] and queries [B, terms] in scipy's CSR format. It returns for every
query the ids of the k documents with the largest scores, in any order. All contenders but seismic are exact.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Search = Callable[[], np.ndarray]
"""Returns ids [B, k]."""
Make = Callable[[Any, Any, int, int], Search]
"""Builds a search from documents, queries, k and the number of threads."""

RECALL = 0.977
"""The recall that an approximate index must reach."""


def scipy_product(documents: Any, queries: Any, k: int, threads: int) -> Search:
    """Search with `queries @ documents.T`, both sparse, and argpartition of each row; scipy uses one thread."""
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
    """Search with `sp_matmul_topn`, which keeps the largest products of each row while it multiplies."""
    import sparse_dot_topn as package

    columns = documents.T.tocsr()

    def search() -> np.ndarray:
        found = package.sp_matmul_topn(queries, columns, top_n=k, n_threads=threads)
        return found.indices.reshape(-1, k)

    return search


def numba_postings(documents: Any, queries: Any, k: int, threads: int) -> Search:
    """Search with a loop over the posting lists of each query's terms, compiled by numba and parallel over queries."""
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
            for above in (True, False):  # ties fill the remaining places
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
    """Build the package's index of documents with its default settings."""
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
    """Return the fastest search among several settings that finds `RECALL` of the ids `exact` [B, k], and its settings.

    Raises RuntimeError if none of the settings does.
    """
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
"""The exact searches by the name of the package that they need."""
