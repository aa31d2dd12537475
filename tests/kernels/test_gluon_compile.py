"""The feed-forward block's kernels in Gluon and around PTX compile for a Hopper GPU, on a machine that has none: the
interpreter does not run them, and Gluon's names change from one version to the next."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compile_all(every: bool) -> None:
    """In a process of its own, where the interpreter is off. every: kernels of all tile widths; else of a few, one of
    each way that a tile lies in shared memory."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from sparse_inductor.epilogue.steps import parse
    from sparse_inductor.kernels import hopper_ring as ring
    from sparse_inductor.kernels import hopper_tiles as tiles
    from sparse_inductor.kernels import hopper_wide as wide
    from sparse_inductor.kernels import relu_ffn_hopper as hopper
    from sparse_inductor.kernels import relu_ffn_marked as marked
    from sparse_inductor.kernels import relu_ffn_marked_ptx as marked_ptx
    from sparse_inductor.kernels import splade_head_hopper as splade
    from sparse_inductor.kernels.epilogue import encode

    def made(kernel, types, constants, of=GluonASTSource, **options):
        given = iter(types)
        signature = {a: "constexpr" if a in constants else next(given) for a in kernel.arg_names}
        places = {(kernel.arg_names.index(a),): v for a, v in constants.items()}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, a in enumerate(kernel.arg_names)
            if signature[a].startswith("*") or a.startswith("stride")
        }
        source = of(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

    def box(rows, columns):
        return f"tensordesc<bf16[{rows}, {columns}],{ring.layout(torch.bfloat16, rows, columns)!r}>"

    def multiplies(compiled, copies):
        code = compiled.asm["ptx"]
        assert "wgmma" in code and copies in code and ".local" not in code
        assert compiled.metadata.shared <= 227 * 1024

    token, bulk = box(64, 64), "cp.async.bulk.tensor"

    def widened(kernel, types, constants):
        """Its products are as wide as a tile, each of them."""
        with wide.completing():
            compiled = made(kernel.kernel, types, constants, num_warps=4)
        multiplies(compiled, bulk)
        widths = re.findall(r"wgmma.mma_async.sync.aligned.m64n(\d+)k16", compiled.asm["ptx"])
        assert {*map(int, widths)} == {constants["COLUMNS"]}, "parts are left"

    def products(of):
        """(types of operands, of what is written, constants) of all tiles."""
        for turned, costs in ((False, of.upright), (True, of.turned)):
            for columns, _ in costs:
                if not every and columns not in (128, 176, 240):
                    continue
                parts = [box(tiles.part_of(columns, i), 64) for i in range(tiles.parts_in(columns))]
                constants = {
                    "COLUMNS": columns, "TURNED": turned, "KBLOCKS": 16, "EACH": 8,
                    "STAGES": of.stages(columns), "HAS_BIAS": False,
                }  # fmt: skip
                operands = [token, *parts, *[parts[-1]] * (4 - len(parts))]
                yield operands, [token, box(tiles.small_of(columns), 64)], constants

    for operands, written, constants in products(hopper.TILES):
        types = [*operands, *written, *"*bf16 *i32 *i64 i32 i32 i32 i32".split()]
        widened(hopper._product_kernel, types, constants)
    granule, types = box(32, 64), "*bf16 *fp32 *fp32 *i32 *i64 *i32 *i32 *bf16 *i16 *fp32".split()
    for training in (False, True) if every else (True,):
        constants = {
            "KBLOCKS": 12, "EACH": 12, "OUTER": encode(parse("relu | log1p")), "HAS_BIAS": True,
            "HAS_ADD": True, "HAS_FILL": training, "WANT_WINNER": training,
        }  # fmt: skip
        given = [granule, token, *types, *["i32"] * 5]
        multiplies(made(splade._peak_kernel, given, constants, num_warps=4), bulk)
    types = "*i32 *bf16 *i32 *i16 *bf16 *i64 *i32 *i32 i32 fp32".split()
    for words, by_quad, N, rows, warps in (
        (176, True, 5632, 1, 1),
        (176, True, 5632, 32, 8),
        (512, False, 16384, 32, 8),
    ):
        body = marked_ptx.pack(words, by_quad, N, N // 15, 64, 40, False, rows, warps)
        constants = {"BODY": body, "EARLY": True}
        compiled = made(marked._pack_kernel.kernel, types, constants, ASTSource, num_warps=warps)
        code = compiled.asm["ptx"]
        assert code.count("griddepcontrol.wait") == 1 and ".local" not in code
        declared = re.findall(r"\.shared .*ffn_\w+\[(\d+)\]", code)
        assert sum(map(int, declared)) + compiled.metadata.shared <= 48 << 10, (
            f"{words} words, {warps} warps: {declared} is more than is given unasked"
        )
    print("compiled")


@pytest.mark.heavy
@pytest.mark.parametrize("every", [pytest.param(False, marks=pytest.mark.newest), True])
def test_kernels_compile_for_hopper(every, tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    env = {
        **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, Path(__file__).parent))),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    command = f"from test_gluon_compile import compile_all; compile_all({every})"
    done = subprocess.run(
        [sys.executable, "-c", command], env=env, capture_output=True, text=True, check=False
    )
    assert "compiled" in done.stdout, done.stderr[-3000:]
