"""Sparse scoring: exact top-k of a batch of sparse queries over a collection of sparse documents.

The contenders run in one process and take turns: `SparseIndex.search` ("ours"), the same in a CUDA graph ("ours,
graph"), with the portable kernels ("ours, portable") and with integer scores alone, in a graph ("ours, not exact,
graph"); and a reimplementation of the scatter-add and top-k of the GPUSparse paper ("scatter-add"). On a CPU, the
search is compared with the sparse products of scipy and torch, followed by torch.topk, and with the packages of
`_packages`. The data is synthetic, with the paper's statistics.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.bench import NONE, Bench, Label, Limits, graphed
from benchmarks.measure import MIB, Timing, Work
from sparse_inductor import SparseIndex

from . import _packages as packages

TERMS = 30522
FULL = 8_841_823  # passages of MS MARCO
BATCH = 1 << 16  # documents generated at a time


def run(bench: Bench) -> None:
    """Measure everything for this device."""
    bench.section(bench.measure_limits)
    if not bench.cuda:
        bench.section(_cpu, bench, 2_000 if bench.quick else 100_000, 4 if bench.quick else 64)
        bench.section(_packages, bench, 2_000 if bench.quick else 100_000)
        return
    sizes = [20_000] if bench.quick else [100_000, 1_000_000, FULL]
    for size in sizes:
        bench.section(_gpu, bench, size)
        bench.save()
    if not bench.quick:
        bench.section(_orders, bench)
        bench.section(_precisions, bench)


# --- The data ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The number of terms per text (mean, deviation, least, most), and the share drawn from the common vocabulary."""

    mean: float
    deviation: float
    least: int
    most: int
    common: float


DOCUMENTS = Statistics(127, 34, 20, 250, 0.40)
QUERIES = Statistics(47, 18, 5, 107, 0.30)


class Generator:
    """A generator of sparse texts. Terms follow two Zipf-Mandelbrot laws, one for all texts and one for each topic.

    Each topic permutes the ranking of terms differently, so that topics share few of their terms. Weights are absolute
    values of normal numbers.
    """

    def __init__(self, device: torch.device, seed: int = 0, topics: int = 256) -> None:
        self.device, self.topics = device, topics
        self._random = torch.Generator(device=device).manual_seed(seed)
        self._common = self._law(12.0, 0.95)
        self._topical = self._law(6.0, 1.15)
        odd = torch.randint(0, TERMS // 2, (topics,), device=device, generator=self._random) * 2 + 1
        # Factors that share no divisor with 30522 = 2 * 3 * 5087 permute the terms.
        odd = torch.where(odd % 3 == 0, odd + 2, odd)
        self._factor = torch.where(odd % 5087 == 0, odd + 6, odd)
        self._shift = torch.randint(0, TERMS, (topics,), device=device, generator=self._random)

    def _law(self, offset: float, exponent: float) -> Tensor:
        ranks = torch.arange(TERMS, device=self.device, dtype=torch.float64)
        mass = torch.cumsum((ranks + offset) ** -exponent, 0)
        return (mass / mass[-1]).float()

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.device, generator=self._random)

    def texts(self, n: int, of: Statistics, topic: Tensor | None = None) -> Tensor:
        """Return n texts as CSR [n, TERMS]."""
        if topic is None:
            topic = torch.randint(0, self.topics, (n,), device=self.device, generator=self._random)
        draws = 2 * of.most
        common = torch.searchsorted(self._common, self._uniform(n, draws)).clamp_(max=TERMS - 1)
        own = torch.searchsorted(self._topical, self._uniform(n, draws)).clamp_(max=TERMS - 1)
        own = (own * self._factor[topic, None] + self._shift[topic, None]) % TERMS
        terms = torch.where(self._uniform(n, draws) < of.common, common, own)
        normal = torch.randn(n, device=self.device, generator=self._random)
        wanted = (of.mean + of.deviation * normal).round_().clamp_(of.least, of.most)
        # Keep the first `wanted` distinct terms of every row, in the order in which they were drawn.
        ordered, order = torch.sort(terms, dim=1, stable=True)
        again = torch.zeros_like(ordered, dtype=torch.bool)
        again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        again = torch.zeros_like(again).scatter_(1, order, again)
        kept = ~again & ((~again).cumsum(1) <= wanted[:, None])
        terms = torch.sort(torch.where(kept, terms, TERMS), dim=1).values
        kept = terms < TERMS
        offsets = torch.zeros(n + 1, dtype=torch.int64, device=self.device)
        offsets[1:] = kept.sum(1).cumsum(0)
        terms = terms[kept]
        normal = torch.randn(terms.numel(), device=self.device, generator=self._random)
        weights = (normal.abs_() * 0.7 + 0.03).clamp_(max=3.5)
        return torch.sparse_csr_tensor(
            offsets, terms, weights, (n, TERMS), check_invariants=False
        )  # fmt: skip

    def collection(self, n: int, order: str = "shuffled") -> Iterator[Tensor]:
        """Yield n documents in batches: "shuffled", "topics" (ordered by topic) or "copies" (blocks of near-copies)."""
        for first in range(0, n, BATCH):
            size = min(BATCH, n - first)
            if order == "topics":
                topic = torch.arange(first, first + size, device=self.device) * self.topics // n
                yield self.texts(size, DOCUMENTS, topic)
            elif order == "copies":
                yield self._copies(self.texts(-(-size // 64), DOCUMENTS), size)
            else:
                yield self.texts(size, DOCUMENTS)

    def _copies(self, originals: Tensor, size: int) -> Tensor:
        """Repeat each text 64 times in a row, with weights that differ by up to a thousandth."""
        lengths = originals.crow_indices().diff()
        which = torch.arange(size, device=self.device) // 64
        counts = lengths[which]
        offsets = torch.zeros(size + 1, dtype=torch.int64, device=self.device)
        offsets[1:] = counts.cumsum(0)
        inside = torch.arange(int(offsets[-1]), device=self.device)
        inside -= torch.repeat_interleave(offsets[:-1], counts)
        at = torch.repeat_interleave(originals.crow_indices()[which], counts) + inside
        weights = originals.values()[at] * (1 + 1e-3 * self._uniform(at.numel()))
        return torch.sparse_csr_tensor(
            offsets, originals.col_indices()[at], weights, (size, TERMS), check_invariants=False
        )


@dataclasses.dataclass
class Collection:
    """An index over n synthetic documents, and queries for it."""

    index: SparseIndex
    queries: Tensor
    build_seconds: float

    @staticmethod
    def make(
        n: int,
        device: torch.device,
        queries: int,
        order: str = "shuffled",
        weights: str = "float32",
    ) -> Collection:
        generator = Generator(device)
        made = generator.texts(queries, QUERIES).to_dense()
        spent = 0.0
        index = SparseIndex(TERMS, weights).to(device)
        batches = generator.collection(n, order)
        synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

        def timed() -> Iterator[Tensor]:
            nonlocal spent
            while True:
                synchronize()
                start = time.perf_counter()
                batch = next(batches, None)
                synchronize()
                spent += time.perf_counter() - start
                if batch is None:
                    return
                yield batch

        start = time.perf_counter()
        index.append(timed())
        synchronize()
        return Collection(index, made, time.perf_counter() - start - spent)


def exact_top(c: Collection, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the inner products of one query with all documents in descending order, and the documents' ids.

    The products are computed by row in fp64 and rounded to fp32, without the index's search.
    """
    parts = []
    for s in c.index._contents.segments:
        products = s.values().double() * query.double()[s.term_ids()]
        parts.append(torch.segment_reduce(products, "sum", offsets=s.offsets))
    return torch.sort(torch.cat(parts).float(), descending=True, stable=True)


# --- The paper's scatter-add ------------------------------------------------------------------------------------------


@triton.jit
def _scatter_kernel(offsets, docs, weights, terms, query, scores, N, L, BLOCK: tl.constexpr):
    """Add one posting list times the query weight to a row of scores by atomics; one (query, term) per program."""
    q = tl.program_id(0).to(tl.int64)
    term = tl.load(terms + q * L + tl.program_id(1))
    if term >= 0:
        w = tl.load(query + q * L + tl.program_id(1))
        start = tl.load(offsets + term)
        end = tl.load(offsets + term + 1)
        for i in range(start, end, BLOCK):
            at = i + tl.arange(0, BLOCK)
            doc = tl.load(docs + at, mask=at < end, other=0)
            value = tl.load(weights + at, mask=at < end, other=0.0) * w
            tl.atomic_add(scores + q * N + doc, value, mask=at < end, sem="relaxed")


class ScatterAdd:
    """GPUSparse, section 4: term-parallel scatter-add into dense scores [B, N], then torch.topk."""

    def __init__(self, index: SparseIndex, queries: Tensor) -> None:
        device, segments = index.device, index._contents.segments
        counts = torch.stack([torch.bincount(s.term_ids(), minlength=TERMS) for s in segments])
        totals = counts.sum(0)
        self.offsets = torch.zeros(TERMS + 1, dtype=torch.int64, device=device)
        self.offsets[1:] = totals.cumsum(0)
        before = counts.cumsum(0) - counts
        self.docs = torch.empty(int(self.offsets[-1]), dtype=torch.int32, device=device)
        self.weights = torch.empty(self.docs.numel(), device=device)
        first = 0
        for s, count, skipped in zip(segments, counts, before):
            rows = torch.repeat_interleave(
                torch.arange(first, first + s.count, device=device, dtype=torch.int32),
                s.offsets.diff(), output_size=s.nnz,
            )  # fmt: skip
            terms, order = torch.sort(s.term_ids(), stable=True)
            rank = torch.arange(s.nnz, device=device) - (count.cumsum(0) - count)[terms]
            at = self.offsets[terms] + skipped[terms] + rank
            self.docs[at], self.weights[at] = rows[order], s.values()[order]
            first += s.count
        self.N = len(index)
        self.set_queries(queries)

    def set_queries(self, queries: Tensor) -> None:
        """Convert queries to padded lists of terms and weights; this is not part of the timing."""
        L = int((queries != 0).sum(1).max())
        values, terms = queries.topk(L, dim=1)
        self.terms = torch.where(values > 0, terms, -1).int().contiguous()
        self.query = values.contiguous()

    def __call__(self, k: int) -> tuple[Tensor, Tensor]:
        B, L = self.terms.shape
        step = max(1, min(B, (24 << 30) // (4 * self.N)))  # no more than 24 GiB of scores at a time
        found = []
        for b in range(0, B, step):
            terms, query = self.terms[b : b + step], self.query[b : b + step]
            scores = torch.zeros(terms.shape[0], self.N, device=query.device)
            _scatter_kernel[(terms.shape[0], L)](
                self.offsets, self.docs, self.weights, terms, query, scores, self.N, L,
                BLOCK=1024, num_warps=4,
            )  # fmt: skip
            found.append(torch.topk(scores, k))
        return torch.cat([f.values for f in found]), torch.cat([f.indices for f in found])


# --- GPU --------------------------------------------------------------------------------------------------------------

_LIMITS: dict[int, Limits] = {100_000: (5, 9), 1_000_000: (10, 20), FULL: (12, 26)}
_PUBLIC = {
    100_000: 1.81,
    1_000_000: 16.7,
    FULL: 142.7,
}  # ms, the best published times, on another H200


def _gpu(bench: Bench, n: int) -> None:
    B, k = (8, 20) if bench.quick else (500, 1000)
    c = Collection.make(n, bench.device, B)
    case = f"N {n:,}"
    bench.row(f"{case}: build on the GPU", c.build_seconds, "s", *((60, 10) if n == FULL else ()))
    _bytes(bench, c, case)
    _agreement(bench, c, case, k)
    same = all(map(torch.equal, _search(c, k), _search(c, k, shared=False)))
    bench.row(f"{case}: the portable kernels give the same bits", float(same), "", 1, 1, True)
    scatter = ScatterAdd(c.index, c.queries)
    label = f"{case}, B {B}, top-{k}"
    works: dict[Label, Work] = {
        (label, "ours"): lambda: c.index.search(c.queries, k),
        (label, "ours, graph"): graphed(lambda: c.index.search(c.queries, k)),
        (label, "ours, not exact, graph"): graphed(lambda: _search(c, k, proved=False)),
        (label, "ours, portable"): lambda: _search(c, k, shared=False),
        (label, "scatter-add"): lambda: scatter(k),
    }
    taken = bench.race(works, 6.0 if n == FULL else None)
    best = min((taken[label, "ours"], taken[label, "ours, graph"]), key=lambda t: t.ms)
    limits, theirs = _LIMITS.get(n, NONE), taken[label, "scatter-add"]
    bench.compare(f"{label}: time, scatter-add over ours", theirs, best, limits, True)
    if n in _PUBLIC:
        name = f"{label}: public best ({_PUBLIC[n]} ms) over ours"
        bench.row(name, _PUBLIC[n] / best.ms, "x", higher=True)
    name = f"{label}: time, scatter-add over ours, portable kernel"
    bench.compare(name, theirs, taken[label, "ours, portable"], (2, 4), True)
    name = f"{label}: time, the exact set proved and rescored over integer scores alone"
    exact, rough = taken[label, "ours, graph"], taken[label, "ours, not exact, graph"]
    bench.compare(name, exact, rough, (1.3, 1.05))
    weight = bench.found(label, "ours")
    if weight is not None and weight.scratch_bytes is not None:
        bench.row(f"{label}: workspace", weight.scratch_bytes / MIB, "MiB", 1024, 256)
    if n == FULL:
        _single(bench, c, scatter)
    if bench.sweep:
        _sweep(bench, c, scatter, n)


def _search(c: Collection, k: int, **options: bool) -> tuple[Tensor, Tensor]:
    from sparse_inductor.kernels.sparse_scores.search import search

    i = c.index
    return search(c.queries, *i.operands(), k, **options)


def _single(bench: Bench, c: Collection, scatter: ScatterAdd) -> None:
    one = c.queries[:1].contiguous()
    scatter.set_queries(one)
    for k in (10, 1000):
        label = f"N {len(c.index):,}, one query, top-{k}"
        works: dict[Label, Work] = {
            (label, "ours"): lambda k=k: c.index.search(one, k),
            (label, "ours, graph"): graphed(lambda k=k: c.index.search(one, k)),
            (label, "scatter-add"): lambda k=k: scatter(k),
        }
        taken = bench.race(works, weigh=False)
        mine, theirs = taken[label, "ours, graph"], taken[label, "scatter-add"]
        # The floor refers to the best published time, 16.9 ms.
        bench.row(f"{label}: public best (16.9 ms) over ours", 16.9 / mine.ms, "x", 60, 200, True)
        bench.compare(f"{label}: scatter-add over ours", theirs, mine, higher=True)
    scatter.set_queries(c.queries)


def _bytes(bench: Bench, c: Collection, case: str) -> None:
    taken, postings = c.index.nbytes, max(c.index.num_postings, 1)
    lists = taken["postings"]
    bench.row(f"{case}: index bytes a posting", lists / postings, "", 4.5, 3)
    with_rows = (lists + taken["forward"]) / postings
    bench.row(f"{case}: index bytes a posting, with the rows", with_rows, "", 10.5, 8)


def _agreement(bench: Bench, c: Collection, case: str, k: int) -> None:
    """Check for a few queries that the ids are those of fp64's top-k, in its order, and that the scores agree.

    Equal scores are ordered by id.
    """
    scores, ids = c.index.search(c.queries, k)
    right = 0
    some = range(0, c.queries.shape[0], max(1, c.queries.shape[0] // 8))
    for b in some:
        best, order = exact_top(c, c.queries[b], k)
        right += torch.equal(ids[b], order[:k]) and torch.allclose(scores[b], best[:k], rtol=2e-7)
    bench.row(f"{case}: queries whose top-{k} is fp64's", right / len(some), "", 1, 1, True)


def _orders(bench: Bench) -> None:
    """Compare a collection ordered by topic, and one of blocks of near-copies, with a shuffled one."""
    n, B, k = 1_000_000, 500, 1000
    taken: dict[str, Timing] = {}
    for order in ("shuffled", "topics", "copies"):
        c = Collection.make(n, bench.device, B, order)
        _agreement(bench, c, f"N {n:,}, {order}", k)
        label = f"N {n:,}, B {B}, top-{k}, {order}"
        found = bench.race({(label, "ours"): lambda c=c: c.index.search(c.queries, k)}, 1.5)
        taken[order] = found[label, "ours"]
        del c
        gc.collect()
    for order in ("topics", "copies"):
        name = f"N {n:,}: time, {order} over shuffled"
        bench.compare(name, taken[order], taken["shuffled"], (1.5, 1.1))


def _precisions(bench: Bench) -> None:
    """Measure the memory and time that narrower weights save."""
    n, B, k = 1_000_000, 500, 1000
    for weights in ("float16", "int8"):
        c = Collection.make(n, bench.device, B, weights=weights)
        _bytes(bench, c, f"N {n:,}, {weights}")
        label = f"N {n:,}, B {B}, top-{k}, {weights}"
        bench.race({(label, "ours"): lambda c=c: c.index.search(c.queries, k)}, 1.5)
        bench.note(f"{weights}: a weight is off by at most {c.index.weight_error:.2g}")


def _sweep(bench: Bench, c: Collection, scatter: ScatterAdd, n: int) -> None:
    """Sweep the batch size, at this collection size."""
    bench.results.fixed = {"k": 1000}
    for B in [1, 8, 64, 250, 500]:
        if bench.late() or c.queries.shape[0] < B:
            continue
        q = c.queries[:B].contiguous()
        scatter.set_queries(q)
        k = min(1000, n)
        works = {
            "ours": functools.partial(c.index.search, q, k),
            "scatter-add": functools.partial(scatter, k),
        }
        for name, work in works.items():
            make = lambda work=work: work
            bench.point(bench.measure_point(f"B at N {n:,}", B, name, make, 0.4))
    scatter.set_queries(c.queries)


# --- CPU --------------------------------------------------------------------------------------------------------------


def _cpu(bench: Bench, n: int, B: int) -> None:
    """Compare with the libraries' sparse products, with torch.topk after them and without."""
    from scipy import sparse

    k = 10 if bench.quick else 1000
    c = Collection.make(n, bench.device, B)
    case = f"N {n:,}"
    bench.row(f"{case}: build", c.build_seconds, "s")
    _agreement(bench, c, case, k)
    rows = [s.rows() for s in c.index._contents.segments]
    lengths = torch.cat([r.offsets.diff() for r in rows])
    offsets = torch.zeros(n + 1, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    terms, weights = torch.cat([r.terms for r in rows]), torch.cat([r.weights for r in rows])
    matrix = torch.sparse_csr_tensor(
        offsets.int(), terms.int(), weights, (n, TERMS), check_invariants=False
    )
    scipy_matrix = sparse.csr_matrix(
        (weights.numpy(), terms.int().numpy(), offsets.int().numpy()), (n, TERMS)
    )
    columns = c.queries.t().contiguous()
    label = f"{case}, B {B}, top-{k}"
    works: dict[Label, Work] = {
        (label, "ours"): lambda: c.index.search(c.queries, k),
        (label, "torch.sparse.mm"): lambda: torch.sparse.mm(matrix, columns).t().topk(k),
        (label, "scipy"): lambda: torch.from_numpy(scipy_matrix @ columns.numpy()).t().topk(k),
        (label, "torch.sparse.mm, no top-k"): lambda: torch.sparse.mm(matrix, columns),
        (label, "scipy, no top-k"): lambda: scipy_matrix @ columns.numpy(),
    }
    taken = bench.race(works)
    mine = taken[label, "ours"]
    for kind, limits in (("", (1, 3)), (", no top-k", NONE)):
        theirs = min(
            (taken[label, name + kind] for name in ("torch.sparse.mm", "scipy")), key=lambda t: t.ms
        )
        name = f"{label}: time, the better library{kind} over ours"
        bench.compare(name, theirs, mine, limits, True)


FEW_TERMS = Statistics(32, 0, 32, 32, 0.30)
FASTER = {"scipy": (1.3, 3), "sparse_dot_topn": (1.2, 3), "numba": (1.0, 2), "seismic": (0.5, 1)}


def _packages(bench: Bench, n: int) -> None:
    """Compare with published packages on 32 sparse queries of 32 terms, with one thread and with all."""
    from scipy import sparse

    k = 10 if bench.quick else 100
    generator = Generator(bench.device)
    queries = generator.texts(32, FEW_TERMS)
    batches = [*generator.collection(n)]
    index = SparseIndex(TERMS)
    index.append(batches)
    documents = sparse.vstack([_as_scipy(batch) for batch in batches]).tocsr()
    there = [name for name in FASTER if importlib.util.find_spec(name) is not None]
    for name in FASTER.keys() - there:
        bench.note(f"Not measured: {name}, which is not installed here.")
    seismic = packages.seismic_index(documents) if "seismic" in there else None
    threads = torch.get_num_threads()
    try:
        for number in sorted({1, threads}):
            torch.set_num_threads(number)
            given = _as_scipy(queries), k, number
            found = index.search(queries, k)[1].numpy()
            works, remarks = _searches(there, documents, seismic, given, found)
            works = {"ours": lambda: index.search(queries, k), **works}
            label = f"N {n:,}, 32 queries of 32 terms, top-{k}, threads {number}"
            taken = bench.race({(label, name): work for name, work in works.items()})
            for name in there:
                bench.over(taken, label, name, "ours", FASTER[name], remark=remarks[name])
    finally:
        torch.set_num_threads(threads)


def _as_scipy(texts: Tensor) -> Any:
    from scipy import sparse

    parts = (texts.values(), texts.col_indices().int(), texts.crow_indices().int())
    return sparse.csr_matrix(tuple(t.numpy() for t in parts), texts.shape)


def _searches(
    names: list[str], documents: Any, seismic: Any, given: tuple[Any, int, int], found: Any
) -> tuple[dict[str, Work], dict[str, str]]:
    """Return the search of each package and a remark on it.

    For an exact package, the remark is the number of ids that differ from the ids `found` [B, k], which includes ties
    broken differently. For an approximate index, it is the settings.
    """
    works: dict[str, Work] = {}
    remarks: dict[str, str] = {}
    for name in names:
        if name in packages.EXACT:
            works[name] = search = packages.EXACT[name](documents, *given)
            others = sum(len(set(a) - set(b)) for a, b in zip(search().tolist(), found.tolist()))
            remarks[name] = f"; {others} of {found.size} are others" if others else ""
        else:
            works[name], settings = packages.seismic(seismic, *given, found)
            remarks[name] = f"; {settings}"
    return works, remarks
