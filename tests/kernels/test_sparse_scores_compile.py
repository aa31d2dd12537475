"""Every variant of the scoring kernels in Triton compiles for a Hopper GPU, on a machine that need not have one.

The interpreter accepts code that the compiler rejects. Compilation needs a process without the interpreter.
"""

from __future__ import annotations

import importlib

import pytest
from compiling import compiled as for_hopper
from compiling import run_compiled

LISTS = "*i32 *i32 *i64 *i32 *i32 *i32 *i32 *i32 *i32 *i32 *i64 *i1"
SIZES = "i32 i32 i32 i32 i32"
SCORE = {"LONG": 512, "LISTS": 32, "WIDTH": 32, "READ": 2048}
PREPARE = (
    "*fp32 *i32 *fp64 *i32 *i32 *i32 *i32 *i32 *fp32 *i32 *i32 *i32 *i32 *i32 *i32 *i32 i32 i32"
)
SELECT = "*i64 *i32 *i32 *i32 *i32 *i1 *i32 *i32 *i32 *i64 i32 i32 i32"
SORT = "*i64 *i32 *i32 *fp32 *i32 *i32 *i32 *i64 *fp32 *i64 i32"
ROWS = "*fp32 *i64 *i16 {} *fp32 *i32 i32"
RESCORE = f"{ROWS} *i32 *i32 *i32 *i64 *i32 i32"
EVERYTHING = (
    f"{ROWS} *i1 *i32 *i64 *i32 *fp32 *i32 *i32 *i32 *i32 *fp32 *i32 *i32 *i32 *i64 *fp32 *i64 "
    "i32 i32 i32 i32"
)
# Numbers that are multiples of 16 in a search, as addresses are. Vector loads change a kernel's resources.
ROUND = ("L", "capacity")
KINDS = {"ROOM": 2048, "DEPTH": 11, "UNSIGNED16": True, "PDL": True}


def forms():
    """Yield (module, kernel, types of the arguments, constants, options) for every variant that is launched."""
    warps, many = {"num_warps": 8}, {"num_warps": 8, "maxnreg": 64}
    for ranked, listed in ((0, False), (8192, True), (0, True)):
        const = {"CHUNK": 8192, "RANKED": ranked, "LISTED": listed, **SCORE}
        yield "accumulate", "portable_kernel", f"*i32 i32 {LISTS} {SIZES}", const, warps
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
        for left in (True, False):
            const = {**of_weights, "LEFT": left, "BITS": not left}
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


def compile_all() -> None:
    """Compile all variants; this runs in a subprocess without the interpreter."""
    for module, name, types, const, options in forms():
        found = importlib.import_module(f"sparse_inductor.kernels.sparse_scores.{module}")
        kernel = getattr(found, name).kernel  # the kernel without the decorator `relaunched`
        kinds = dict(zip((a for a in kernel.arg_names if a not in const), types.split()))
        const = {**const, **{a: None for a, kind in kinds.items() if kind == "none"}}
        given = [kind for kind in kinds.values() if kind != "none"]
        made = for_hopper(kernel, given, const, is_round=ROUND.__contains__, **options)
        assert ".local" not in made.asm["ptx"], f"{name} {const} keeps arrays in memory"


@pytest.mark.heavy
@pytest.mark.newest
def test_every_form_compiles_for_hopper(tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    run_compiled(__file__, TRITON_CACHE_DIR=str(tmp_path))


if __name__ == "__main__":
    compile_all()
