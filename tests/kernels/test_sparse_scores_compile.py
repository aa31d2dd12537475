"""Every form of the scoring kernels compiles for a Hopper GPU, on a machine that has none; what became of those with
inline assembly, or whose programs work together, is run by `ptx_machine`.

The interpreter accepts what the compiler does not. Compiling needs a process in which it is off.
"""

from __future__ import annotations

import collections
import itertools
import re
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from compiling import compiled as for_hopper
from compiling import run_compiled
from ptx_machine import Memory, kernel
from test_sparse_scores_ptx import keys_of

from sparse_inductor.kernels.sparse_scores import ptx
from support import heavy

# Every form of a search's kernels is compiled, for a GPU that need not be there.
pytestmark = pytest.mark.heavy

LISTS = "*i32 *i32 *i64 *i32 *i32 *i32 *i32 *i32 *i32 *i32 *i64 *i1"
SIZES = "i32 i32 i32 i32 i32 i32"
SCORE = {"LONG": 512, "LISTS": 32, "WIDTH": 32, "READ": 2048}
PREPARE = (
    "*fp32 *i32 *fp64 *i32 *i32 *i32 *i32 *i32 *fp32 *i32 *i32 *i32 *i32 *i32 *i32 *i32 i32 i32"
)
SELECT = "*i64 *i32 *i32 *i32 *i32 *i1 *i32 *i32 *i32 *i64 i32 i32 i32"
SORT = "*i64 *i32 *i32 *fp32 *i32 *i32 *i32 *i64 *fp32 *i64 i32"
ROWS = "*fp32 *i64 *i16 {} *fp32 *i32 i32"
RESCORE = f"{ROWS} *i32 *i32 *i32 *i32 *i32 *i32 *i64 *i32 *fp32 *i64 *i32 i32 i32 i32"
EVERYTHING = (
    f"{ROWS} *i1 *i32 *i64 *i32 *fp32 *i32 *i32 *i32 *i32 *fp32 *i32 *i32 *i32 *i64 *fp32 *i64 "
    "i32 i32 i32 i32"
)
# Numbers that are multiples of 16 in a search, as addresses are: vector loads change what a kernel needs.
ROUND = ("L", "capacity")
KINDS = {"ROOM": 2048, "DEPTH": 11, "UNSIGNED16": True, "PDL": True}


def forms():
    """(module, kernel, types of the arguments, constants, options) of everything that is launched."""
    warps, many = {"num_warps": 8}, {"num_warps": 8, "maxnreg": 64}
    for ranked, listed in ((0, False), (8192, True), (0, True)):
        const = {"CHUNK": 8192, "RANKED": ranked, "LISTED": listed}
        options = {**warps, "maxnreg": 64 if ranked else 40}
        yield "accumulate", "shared_kernel", f"{LISTS} {SIZES}", const, options
        types = f"*i32 i32 {LISTS} {SIZES}"
        yield "accumulate", "portable_kernel", types, {**const, **SCORE}, warps
    for portable in (True, False):
        const = {"BLOCK": 8192, "SORTED": portable, "BITS": portable}
        yield "search", "_prepare_kernel", PREPARE, const, {"num_warps": 16}
    yield "search", "_threshold_kernel", "*i64 *i32 *i32 i32 i32", {"BLOCK": 4096}, {}
    for proved in (True, False):
        const = {"ROOM": 2048, "PROVED": proved, "PDL": proved}
        yield "select", "select_kernel", SELECT, {**const, "BLOCK": 4096, "PART": 1024}, many
        options = {**many, "launch_pdl": proved}
        yield "sort", "sort_kernel", SORT, {**const, "SMALL": 1024}, options
    for weight, by in (("*fp32", False), ("*fp16", False), ("*u8", True)):
        of_weights = {**KINDS, "BYTES": by, "DOCS": 16}
        for filtered in (True, False):
            const = {**of_weights, "FILTERED": filtered, "RANKED": filtered, "BITS": not filtered}
            options = {**many, "launch_pdl": True}
            yield "rescore", "rescore_kernel", RESCORE.format(weight), const, options
        const = {
            **of_weights,
            "WIDTH": 32,
            "GROUP": 4,
            "READ": 512,
            "SMALL": 1024,
            "SORTED": not by,
        }
        options = {"num_warps": 8, "maxnreg": 128, "launch_pdl": True}
        yield "rescore", "everything_kernel", EVERYTHING.format(weight), const, options
    yield "merge", "_keys_kernel", "*fp32 *i64 *i64 i32 i32", {"BLOCK": 1024}, {}
    sizes = {"WORLD": 2, "BLOCK": 1024, "DEPTH": 10}
    yield "merge", "_merge_kernel", "*i64 *fp32 *fp32 *i64 i32 i32", sizes, {}
    for scores in ("*fp32", "*bf16"):
        sizes = {"BLOCK": 64, "OTHERS": 64}
        yield "best", "_rank_kernel", f"{scores} {scores} *i64 i32 i32 i32 i32", sizes, {}
        for queries in (1, 32):
            sizes = {"TILE": 64, "QUERIES": queries}
            yield "best", "_keys_kernel", f"{scores} *i64 i32 i32 i32 i32 i32", sizes, {}
        yield "best", "_results_kernel", f"*i64 {scores} *i64 i32", {"BLOCK": 1024}, {}
    wide = {f"WIDE{i}": i == 0 for i in range(4)}
    types = "*i64 *i64 i32 *i32 i32 *i16 i32 *i8 i32 *fp32 i32 *i32 *i64"
    yield "checksum", "_checksum_kernel", types, {"TILE": 1024, **wide}, many
    for table, ids, padded in (
        ("*fp32", "*i64", True),
        ("*fp64", "*i16", False),
        ("*fp32", "*i32", False),
    ):
        offsets = "none" if padded else "*i64"
        types = f"{table} {offsets} {ids} *fp16 *fp32 i32 i32 i32 i32 i32"
        const = {"PADDED": padded, "UNSIGNED16": ids == "*i16"}
        yield "documents", "_rows_kernel", types, {**const, "BB": 256, "UNROLL": 8}, {}
        few = {**const, "WIDE": table == "*fp64", "DOCS": 16, "WIDTH": 32}
        yield "documents", "_few_kernel", f"{types} i32 i32", few, {}


def effects(code: str) -> collections.Counter[str]:
    """How often each piece of inline assembly stands there that waits or writes."""
    pieces = re.findall(r'elementwise_inline_asm "((?:[^"\\]|\\.)*)"', code)
    return collections.Counter(p for p in pieces if re.search(r"\b(st|red|atom|bar)\.", p))


def compile_all(folder: str) -> None:
    """In a process of its own. Leaves the PTX of kernels that others run, by the type of the weights, and in its first
    line the shared memory they need besides."""
    import importlib

    for module, name, types, const, options in forms():
        found = importlib.import_module(f"sparse_inductor.kernels.sparse_scores.{module}")
        kernel = getattr(found, name).kernel  # as it is without `relaunched`
        kinds = dict(zip((a for a in kernel.arg_names if a not in const), types.split()))
        const = {**const, **{a: None for a, kind in kinds.items() if kind == "none"}}
        given = [kind for kind in kinds.values() if kind != "none"]
        made = for_hopper(kernel, given, const, is_round=ROUND.__contains__, **options)
        declared = re.findall(r"\.shared .*sparse_scores\w+\[(\d+)\]", made.asm["ptx"])
        assert len(declared) <= 1, f"{name} {const} has several arrays of one name"
        # Triton asks for more where what it declares itself is more: a launch fails where both together are.
        assert made.metadata.shared + sum(map(int, declared)) <= 48 << 10, (
            f"{name} {const} needs more than is given unasked: {declared} and {made.metadata.shared}"
        )
        # Where threads would have to exchange the results, the compiler has each do the work again instead.
        assert effects(made.asm["ttir"]) == effects(made.asm["ttgir"]), (
            f"{name} {const} does something twice"
        )
        assert ".local" not in made.asm["ptx"], f"{name} {const} keeps arrays in memory"
        if name == "shared_kernel":
            assert "red.shared" in made.asm["ptx"]
        if const.get("FILTERED") or (const.get("SORTED") and name == "everything_kernel"):
            text = f"// {made.metadata.shared}\n{made.asm['ptx']}"
            Path(folder, f"{name}{types.split()[3][1:]}.ptx").write_text(text)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Where the PTX is."""
    pytest.importorskip("triton.backends.nvidia")
    folder = tmp_path_factory.mktemp("ptx")
    run_compiled(__file__, folder, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("cache")))
    return folder


@pytest.mark.newest
def test_every_form_compiles_for_hopper(compiled):
    assert list(compiled.iterdir())


V, ROOM = 512, 2048  # terms; keys of a query


class Launch:
    """Arguments in memory, in the order of the kernel's."""

    def __init__(self) -> None:
        self.memory, self.given = Memory(), []

    def __call__(self, *arguments: np.ndarray | int) -> None:
        for a in arguments:
            if isinstance(a, np.ndarray):
                a = self.memory.add((len(self.given) + 1) << 36, a)
            self.given.append(a)

    def run(self, path: Path, grid: tuple[int, int], at_once: int = 1) -> None:
        code = path.read_text()
        dynamic = int(code[3 : code.index("\n")])
        try:
            kernel(code, [*self.given, 0, 0], grid, dynamic, self.memory, at_once=at_once)
        except NotImplementedError as instruction:
            pytest.skip(f"another compiler's instruction: {instruction}")


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def rows(g, n, longest, kind):
    """Arguments that describe the rows, and fp32 weights."""
    lengths = g.integers(0, longest, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    terms = [np.sort(g.permutation(V)[:length]) for length in lengths]
    terms = np.concatenate([*terms, np.zeros(ptx.READ_ANYHOW)]).astype(np.uint16)
    stored = (g.integers(1, 200, len(terms)) / (1 if kind == "u8" else 128)).astype(
        {"fp32": np.float32, "fp16": np.float16, "u8": np.uint8}[kind]
    )
    scale = np.array([0.25, 3.0] if kind == "u8" else [1.0, 0.0], np.float32)
    return (offsets, terms, stored, scale, ints(0), 1), (
        stored.astype(np.float32) - scale[1]
    ) * scale[0]


def scores_of(query, rows_, weights):
    offsets, terms = rows_[:2]
    products = weights.astype(np.float64) * query[..., terms].astype(np.float64)
    parts = [products[..., a:b].sum(-1) for a, b in itertools.pairwise(offsets)]
    return np.stack(parts, -1).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "wanted", "kept_here"),
    [heavy("fp32", 300, 420), heavy("fp32", 1000, 1024), ("fp16", 100, 200), ("u8", 100, 200), ("fp32", 200, 150),
     ("fp32", 1000, 1100)],
)  # fmt: skip
def test_a_program_rescores_and_ranks(compiled, kind, wanted, kept_here):
    """Exact keys of the documents that are kept, and the best wanted of them in order; where too few are kept, or more
    than it ranks, it leaves the query to others."""
    g, n, k = np.random.default_rng(0), 2000, wanted
    made, weights = rows(g, n, 24, kind)
    query = np.zeros(V, np.float32)
    of_query = g.permutation(V)[:40]
    query[of_query] = g.random(len(of_query)) + 0.1
    exact = scores_of(query, made, weights)
    here = g.permutation(n)[:kept_here]
    terms_of = np.full(V, -1, np.int32)
    terms_of[: len(of_query)] = of_query
    kept, keys = np.full(ROOM, 0x7ABCDEF0, np.int32), np.full(ROOM, -5, np.int64)
    kept[:kept_here] = here
    found, kept_count, progress = np.zeros(32, np.int32), ints(kept_here), np.zeros(4, np.int32)
    found[0] = kept_here
    scores, ids = np.zeros(k, np.float32), np.zeros(k, np.int64)
    count, launch = ints(len(of_query)), Launch()
    launch(query, *made, terms_of, count, count.copy(), np.zeros(V // 32, np.int32))
    launch(kept, kept_count, keys, found, scores, ids, progress)
    launch(V, V, k)
    launch.memory.late(kept, kept_count)
    launch.run(compiled / f"rescore_kernel{kind}.ptx", (1, 1))
    want = keys_of(exact, np.arange(n))[here]
    assert sorted(keys[:kept_here]) == sorted(want)
    if k <= kept_here <= ptx.RANKED:
        assert (kept_count[0], progress[2]) == (-1, 0)
        order = here[np.lexsort((here, -exact[here]))][:k]
        assert (ids == order).all() and (scores == exact[order]).all()
    else:
        assert (kept_count[0], progress[2]) == (kept_here, 1)


@pytest.mark.skipif(
    tuple(map(int, version("triton").split(".")[:2])) >= (3, 8),
    reason="the programs this compiler makes wait without end on `ptx_machine`",
)
@pytest.mark.parametrize("at_once", [1, 2])
def test_programs_that_score_everything_wait_for_none_that_has_not_begun(compiled, at_once):
    """Three programs, not all of which run at once. Queries: unproved, proved but not sorted, not finite, unproved."""
    g, n, k, programs, status = np.random.default_rng(at_once), 200, 20, 3, ints(1, 0, 2, 1)
    made, weights = rows(g, n, 12, "fp32")
    B = len(status)
    query = ((g.random((B, V)) < 0.1) * g.integers(1, 4, (B, V))).astype(np.float32)
    deleted = g.random(n) < 0.1
    exact = scores_of(query, made, weights)
    kept_counts, found = np.zeros(B, np.int32), np.full((B, 32), k, np.int32)
    keys, kept_counts[1] = np.full((B, ROOM), -5, np.int64), k + 7
    mine = g.permutation(np.flatnonzero(~deleted))[: k + 7]
    keys[1, : k + 7] = keys_of(exact[1], np.arange(n))[mine]
    scores, ids = np.zeros((B, k), np.float32), np.zeros((B, k), np.int64)
    scratch = lambda *shape, dtype=np.int32: np.full(shape, 0x5B, dtype)
    launch = Launch()
    launch(query, *made, deleted, status, keys, kept_counts)
    launch(scratch(V, 4, dtype=np.float32), scratch(4, n), scratch(32, 4), scratch(programs, 2))
    progress = ints(0, 0, B, 0)
    launch(progress, np.ones(B, np.float32), found)
    launch(scratch(B, ROOM), scratch(B, ROOM), scratch(B, ROOM, dtype=np.int64), scores, ids)
    launch(V, n, B, k)
    launch.memory.late(progress, kept_counts, keys, status)
    launch.run(compiled / "everything_kernelfp32.ptx", (programs, 1), at_once)
    assert np.isnan(scores[2]).all() and (ids[2] == -1).all()
    for q in (0, 1, 3):
        order = np.lexsort((np.arange(n), -exact[q]))
        order = order[np.isin(order, mine) if q == 1 else ~deleted[order]][:k]
        assert (ids[q] == order).all() and (scores[q] == exact[q][order]).all()


if __name__ == "__main__":
    compile_all(sys.argv[1])
