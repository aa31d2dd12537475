"""Portable kernels of the feed-forward block fit into the shared memory of GPUs that have less than a Hopper GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NONE = dict.fromkeys("x_desc up_desc gate_desc a_desc b_desc half_desc out_desc bias".split())


def compile_all() -> None:
    """In a process of its own, where the interpreter is off."""
    from types import SimpleNamespace

    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sparse_inductor.epilogue.steps import parse
    from sparse_inductor.kernels.common.epilogue import encode
    from sparse_inductor.kernels.relu_ffn import dense

    relu = {"F_STEPS": encode(parse("relu")), "G_STEPS": encode(()), "GATED": True}
    kernels = [
        (dense._hidden_kernel.kernel, {**relu, "K": 2048, "stride_xk": 1, "stride_uk": 1}),
        (dense._product_kernel.kernel, {"K": 5632, "stride_ak": 1, "stride_bk": 1}),
    ]
    for capability, kib in ((80, 163), (89, 99)):  # A100, RTX 4090
        dense.shared_memory = lambda device, kib=kib: kib * 1024
        on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=None)
        _, able, tile = dense._listed_tile(on_gpu, [None])
        options = {n: tile.pop(n) for n in ("num_warps", "num_stages")}
        fixed = {**NONE, **tile, "TMA": able, "PDL": False, "HAS_BIAS": False, "PRECISION": "ieee"}
        for kernel, sizes in kernels:
            constants = {n: v for n, v in {**fixed, **sizes}.items() if n in kernel.arg_names}
            kinds = dict.fromkeys("x up gate a b out".split(), "*bf16")
            kinds |= {"state": "*i32", "rows": "*i32", "parts": "*fp32", "THRESHOLD": "fp32"}
            signature = {
                n: "constexpr" if n in constants else kinds.get(n, "i32") for n in kernel.arg_names
            }
            places = {(kernel.arg_names.index(n),): v for n, v in constants.items()}
            aligned = {
                (i,): [["tt.divisibility", 16]]
                for i, n in enumerate(kernel.arg_names)
                if signature[n].startswith("*") or n.startswith("stride")
            }
            source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
            compiled = triton.compile(
                source, target=GPUTarget("cuda", capability, 32), options=options
            )
            assert 0 < compiled.metadata.shared <= kib * 1024, (kernel.__name__, capability)


@pytest.mark.heavy
def test_listed_rows_fit() -> None:
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=500
    )
    assert not done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    compile_all()
