"""Portable kernels fit the shared memory of GPUs that have less than a Hopper GPU; the tests need no GPU."""

from __future__ import annotations

import sys

import pytest
from compiling import compiled, run_compiled

NONE = dict.fromkeys("gate_bias up_bias d_stats bias thresholds weight".split())


def attention() -> None:
    """Compile the launches of entmax attention, forward and backward, for an RTX 4090."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from sparse_inductor.kernels.common import launch, tiles
    from sparse_inductor.kernels.entmax_attention import attention, problem

    class Absent:
        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", 89, 32)

    def only_compiled(kernel, grid, args, constants, num_warps, **options):
        like = map(launch._without_memory, args)
        made = kernel.warmup(*like, grid=(1,), **constants, num_warps=num_warps, **options)
        assert made.metadata.shared <= 99 * 1024, (kernel.__name__, made.metadata.shared)
        seen.append(kernel.__name__)

    driver.set_active(Absent())
    launch.launch = only_compiled
    tiles.shared_memory, tiles.compute_capability = lambda device: 99 * 1024, lambda device: (8, 9)
    problem.Problem.interpreted = False
    seen: list[str] = []
    for keys, width, masked in ((512, 128, True), (512, 256, False), (256, 128, True)):
        q, k, v = (torch.zeros(1, 1, keys, width, dtype=torch.bfloat16) for _ in range(3))
        given = dict.fromkeys("bias mask alpha query_lengths key_lengths".split())
        given |= {"alpha_value": 1.5, "scale": 0.1, "fill": -1e9, "causal": False, "added": False}
        if masked:
            square = 1, 1, keys, keys
            given |= {"mask": torch.ones(square) > 0, "bias": q.new_zeros(square)}
        out, saved = attention.forward(q, k, v, training=True, **given)
        needs = (True, True, True, masked, False)
        attention.backward(out, q, k, v, out, saved, needs=needs, **given)
    wanted = "_threshold_kernel _output_kernel _short_kernel _rows_kernel _keys_kernel"
    assert {*wanted.split()} <= {*seen}


def listed_rows() -> None:
    """Compile the kernels for rows of a feed-forward block with many active neurons."""
    from types import SimpleNamespace

    import torch

    from sparse_inductor.epilogue.steps import parse
    from sparse_inductor.kernels.common import tiles
    from sparse_inductor.kernels.common.epilogue import encode
    from sparse_inductor.kernels.relu_ffn import listed

    relu = {"F_STEPS": encode(parse("relu")), "G_STEPS": encode(())}
    kernels = [
        (listed._hidden_kernel.kernel, {**relu, "K": 2048}),
        (listed._gradients_kernel.kernel, {**relu, "K": 2048, "D": 2048, "stride_dn": 1}),
        (listed._product_kernel.kernel, {"K": 5632, "stride_bk": 1, "stride_dk": 1}),
    ]
    for capability, kib in ((80, 163), (89, 99), (120, 99)):  # A100, RTX 4090, RTX 5090
        tiles.shared_memory = lambda device, kib=kib: kib * 1024
        tiles.row_of.cache_clear()
        tiles.compute_capability = lambda device, found=capability: divmod(found, 10)
        on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=None)
        tile = listed._tile_of(on_gpu)
        options = {n: tile.pop(n) for n in ("num_warps", "num_stages")}
        fixed = {**NONE, **tile, "PDL": False}
        for kernel, sizes in kernels:
            constants = {n: v for n, v in {**fixed, **sizes}.items() if n in kernel.arg_names}
            kinds = dict.fromkeys(
                "x dy up gate down d_gate d_up hidden a b c d out".split(), "*bf16"
            )
            kinds |= dict.fromkeys(("length", "arrived", "rows"), "*i32")
            kinds |= {"parts": "*fp32", "THRESHOLD": "fp32"}
            types = [kinds.get(n, "i32") for n in kernel.arg_names if n not in constants]
            found = compiled(kernel, types, constants, capability=capability, **options)
            assert 0 < found.metadata.shared <= kib * 1024, (kernel.__name__, capability)


@pytest.mark.heavy
@pytest.mark.parametrize("part", ["listed_rows", "attention"])
def test_kernels_fit(part: str) -> None:
    run_compiled(__file__, part)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
