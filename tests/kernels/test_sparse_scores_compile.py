"""Every form of the scoring kernels compiles for a Hopper GPU, on a machine that has none.

The interpreter accepts what the compiler does not. Compiling needs a process in which it is off.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LISTS = "*i32 *i32 *i64 *i32 *i32 *i32 *i32 *i32 *i32 *i32 *i64 *i1"
SIZES = "i32 i32 i32 i32 i32 i32"
SCORE = {"LONG": 512, "LISTS": 32, "WIDTH": 32, "READ": 2048}
PREPARE = (
    "*fp32 *i32 *fp64 *i32 *i32 *i32 *i32 *i32 *fp32 *i32 *i32 *i32 *i32 *i32 *i32 *i32 i32 i32"
)
SELECT = "*i64 *i32 *i32 *i32 *i32 *i1 *i32 *i32 *i32 *i64 i32 i32 i32"
ROWS = "*fp32 *i64 *i16 {} *fp32 *i32 i32"
RESCORE = f"{ROWS} *i32 *i32 *i32 *i32 *i32 *i32 *i64 *i32 *fp32 *i64 *i32 i32 i32 i32"
EVERYTHING = (
    f"{ROWS} *i1 *i32 *i64 *i32 *fp32 *i32 *i32 *i32 *i32 *fp32 *i32 *i32 *i32 *i64 *fp32 *i64 "
    "i32 i32 i32 i32"
)
# Numbers that are multiples of 16 in a search, as addresses are: vector loads change what a kernel needs.
ROUND = ("L", "capacity")
KINDS = {"ROOM": 2048, "DEPTH": 11, "UNSIGNED16": True, "EARLY": True}


def forms():
    """(module, kernel, types of the arguments, constants, options) of everything that is launched."""
    for ranked, listed in ((0, False), (8192, True), (0, True)):
        const = {"CHUNK": 8192, "RANKED": ranked, "LISTED": listed}
        registers = {"maxnreg": 64 if ranked else 40}
        yield (
            "accumulate",
            "shared_kernel",
            f"{LISTS} {SIZES}",
            const,
            {"num_warps": 8, **registers},
        )
        yield (
            "accumulate",
            "portable_kernel",
            f"*i32 i32 {LISTS} {SIZES}",
            {**const, **SCORE},
            {"num_warps": 8},
        )
    for portable in (True, False):
        const = {"BLOCK": 8192, "SORTED": portable, "BITS": portable}
        yield "search", "_prepare_kernel", PREPARE, const, {"num_warps": 16}
    yield "search", "_threshold_kernel", "*i64 *i32 *i32 i32 i32", {"BLOCK": 4096}, {}
    for proved in (True, False):
        const = {"ROOM": 2048, "PROVED": proved, "EARLY": proved}
        yield (
            "select",
            "select_kernel",
            SELECT,
            {**const, "BLOCK": 4096, "PART": 1024},
            {"num_warps": 8, "maxnreg": 64},
        )
        types = "*i64 *i32 *i32 *fp32 *i32 *i32 *i32 *i64 *fp32 *i64 i32"
        yield (
            "sort",
            "sort_kernel",
            types,
            {**const, "SMALL": 1024},
            {"num_warps": 8, "maxnreg": 64, "launch_pdl": proved},
        )
    for weight, by in (("*fp32", False), ("*fp16", False), ("*u8", True)):
        for filtered in (True, False):
            const = {
                **KINDS,
                "BYTES": by,
                "DOCS": 16,
                "FILTERED": filtered,
                "RANKED": filtered,
                "BITS": not filtered,
            }
            yield (
                "rescore",
                "rescore_kernel",
                RESCORE.format(weight),
                const,
                {"num_warps": 8, "maxnreg": 64, "launch_pdl": True},
            )
        const = {**KINDS, "BYTES": by, "DOCS": 16, "WIDTH": 32, "GROUP": 4, "READ": 512}
        const |= {"SMALL": 1024, "SORTED": not by}
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


def compile_all() -> None:
    """In a process of its own."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for module, name, types, const, options in forms():
        found = importlib.import_module(f"sparse_inductor.kernels.sparse_scores_{module}")
        kernel = getattr(found, name).kernel  # as it is without `relaunched`
        given = iter(types.split())
        signature = {a: "constexpr" if a in const else next(given) for a in kernel.arg_names}
        const = {**const, **{a: None for a, t in signature.items() if t == "none"}}
        signature = {a: "constexpr" if t == "none" else t for a, t in signature.items()}
        places = {(kernel.arg_names.index(a),): value for a, value in const.items()}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name_ in enumerate(kernel.arg_names)
            if signature[name_].startswith("*") or name_ in ROUND
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
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
    print("compiled")


def test_every_form_compiles_for_hopper(tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    env = {
        **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    command = "from kernels.test_sparse_scores_compile import compile_all; compile_all()"
    done = subprocess.run(
        [sys.executable, "-c", command], env=env, capture_output=True, text=True, check=False
    )
    assert "compiled" in done.stdout, done.stderr[-3000:]
