"""Kernels in Gluon compile for a Hopper GPU, on a machine that need not have one.

The interpreter cannot run them, and Gluon's names change between versions.
"""

from __future__ import annotations

import functools
import itertools

import pytest
from compiling import compiled, run_compiled


def compile_all() -> None:
    """Compile the kernels; this runs in a subprocess without the interpreter."""
    import torch
    from triton.experimental.gluon._runtime import GluonASTSource

    from sparse_inductor.epilogue.steps import parse
    from sparse_inductor.kernels.common.epilogue import encode
    from sparse_inductor.kernels.relu_ffn import hopper, packing
    from sparse_inductor.kernels.splade_head import hopper as splade

    made = functools.partial(compiled, of=GluonASTSource)

    def descriptor(rows, columns):
        return (
            f"tensordesc<bf16[{rows}, {columns}],{hopper.layout(torch.bfloat16, rows, columns)!r}>"
        )

    def multiplies(found, copies):
        code = found.asm["ptx"]
        assert "wgmma" in code and copies in code and ".local" not in code
        assert found.metadata.shared <= 227 * 1024

    token, bulk = descriptor(64, 64), "cp.async.bulk.tensor"

    for columns, k_major, least in itertools.product(
        dict(hopper.COSTS), (True, False), ("i32", "*bf16")
    ):
        constants = {
            "COLUMNS": columns, "KBLOCKS": 16, "STAGES": hopper.stages(columns),
            "HAS_BIAS": not k_major, "K_MAJOR": k_major,
        }  # fmt: skip
        weight = descriptor(columns, 64) if k_major else descriptor(64, columns)
        types = [token, weight, token, *f"*bf16 *i32 *i32 i32 i32 {least} i32".split()]
        multiplies(made(hopper._product_kernel, types, constants, num_warps=4), bulk)
    granule, types = (
        descriptor(32, 64),
        "*bf16 *fp32 *fp32 *i32 *i64 *i32 *i32 *bf16 *i16 *fp32".split(),
    )
    for training in (False, True):
        constants = {
            "KBLOCKS": 12, "EACH": 2, "OUTER": encode(parse("relu | log1p")), "HAS_BIAS": True,
            "HAS_ADD": True, "HAS_FILL": training, "WANT_WINNER": training,
        }  # fmt: skip
        given = [granule, token, *types, *["i32"] * 5]
        multiplies(made(splade._peak_kernel, given, constants, num_warps=4), bulk)
    types = "*i32 *i32 *bf16 *i32 *i16 *bf16 *i32 *i32 *i32".split()
    for words, each in ((packing.WORDS, 1), (packing.WORDS, packing.EACH)):
        constants = {
            "CAP": 256, "PIECE": 64, "PIECES": 4, "WORDS": words,
            "EACH": each, "PDL": True, "NONZERO": False, "thresholds": None,
        }  # fmt: skip
        given = [*types, *"i32 i32 i32 fp32 i32".split()]
        found = compiled(packing._pack_kernel.kernel, given, constants, num_warps=1)
        assert (
            found.asm["ptx"].count("griddepcontrol.wait") == 1 and ".local" not in found.asm["ptx"]
        )
    compile_popular()


def compile_popular() -> None:
    """Compile the Triton kernels that only the Hopper path launches, for a gated block of 5,632 neurons."""
    from sparse_inductor.epilogue.steps import parse
    from sparse_inductor.kernels.common.epilogue import encode
    from sparse_inductor.kernels.relu_ffn import popular

    relu, itself, rows, columns = encode(parse("relu")), encode(parse("")), *popular.TILE
    steps = {"F_STEPS": relu, "G_STEPS": itself, "BM": rows, "BP": columns}
    counted = {"ROWS": popular.ROWS, "AT_ONCE": popular.AT_ONCE, "WORDS": popular.WORDS}
    chosen = {"MANY": popular.MANY, "POPULAR": 896, "BLOCK": 8192}
    row = "*bf16 *bf16 i32 i32 i32 i32".split()
    two = dict.fromkeys(("t2", "r2", "w2", "st2", "sc2", "sr2"))
    one = {**two, **dict.fromkeys(("t1", "r1", "w1", "st1", "sc1", "sr1"))}
    for kernel, types, constants, warps in (
        *(
            (popular._rows_kernel, " ".join([*row * n, "*i64"]), {**none, "ADD": add, "BLOCK": 2048}, 4)
            for n, none in ((1, one), (2, two))
            for add in (True, False)
        ),
        (popular._count_kernel, "*i32 *i32 i32 i32 i32", counted, 4),
        (popular._choose_kernel, "*i32 *i64 *i32 i32 i32", chosen, 16),
        (popular._rows_kernel, " ".join([*row * 3, "*i64"]), {"ADD": True, "BLOCK": 2048}, 4),
        (
            popular._hidden_kernel, "*bf16 *i64 *bf16 *bf16 *bf16 i32 i32 i32 fp32", steps, 4,
        ),
        (
            popular._slopes_kernel, "*bf16 *bf16 *bf16 *i32 *bf16 i32 i32 fp32",
            {**steps, "GATED": True, "CAP": 256}, 4,
        ),
    ):  # fmt: skip
        found = compiled(kernel.kernel, types.split(), constants, num_warps=warps)
        assert ".local" not in found.asm["ptx"]


@pytest.mark.heavy
@pytest.mark.newest
def test_kernels_compile_for_hopper(tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    run_compiled(__file__, TRITON_CACHE_DIR=str(tmp_path))


if __name__ == "__main__":
    compile_all()
