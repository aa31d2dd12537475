"""Ahead-of-time compilation: a call with fake tensors, as during tracing, finds the kernels that it would launch.

The tests need no GPU.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from compiling import compiled_job, run_compiled

HEADS = [(2, 4, 2048, 64)] * 3
AUTOENCODER = [(4096, 64), (64, 4096), (4096,), (4096, 64), (64,)]
# Shapes of the operands, and some of the kernels of a call and its backward.
CASES = {
    "splade_head": ([(16, 128, 64), (30522, 64), (30522,)], "_peak_kernel _hidden_rows"),
    "relu_ffn": (
        [(8192, 64), (2048, 64), (64, 2048), (2048, 64)],
        "_pack_kernel _dots_kernel _weighted_rows_kernel _by_neuron_kernel",
    ),
    "entmax_attention": (HEADS, "large_support_kernel _output_kernel _rows_kernel _keys_kernel"),
    "entmax": ([(512, 64)], "_forward_kernel _backward_kernel"),
    "topk_encode": ([(512, 64), (1024, 64), (1024,)], "_top_kernel _outer_kernel"),
    "batch_topk": (
        AUTOENCODER,
        "_maxima_kernel _histogram_kernel _count_kernel _write_kernel _outer_kernel _dots_kernel",
    ),
    "counted": (AUTOENCODER, "_packed_kernel _listed_counts_kernel _by_neuron_kernel _sums_kernel"),
    "jumps": (AUTOENCODER, "_pack_kernel _weighted_rows_kernel"),
    "kept": (AUTOENCODER, "_pack_kernel _gradients_kernel _put_kernel"),
}
# These kernels are compiled here, because the interpreter accepts code that the compiler rejects. For the other
# operators, separate tests compile the kernels.
COMPILED = ("relu_ffn", "topk_encode", "batch_topk", "counted", "jumps", "kept")


@pytest.fixture(scope="module")
def begun():
    return json.loads(run_compiled(__file__).stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_begun(name, begun):
    assert {*CASES[name][1].split()} <= {*begun[name]}


def test_every_call_is_gone_through_to_its_end(begun):
    assert begun["cut off"] == []


def test_kernels_compile(begun):
    assert begun["fail to compile"] == []


def main() -> None:
    """Print as JSON the names of the kernels that would be compiled, and the kernels that fail to compile."""
    import logging

    import torch
    from torch._subclasses import FakeTensorMode

    from sparse_inductor import layers, ops
    from sparse_inductor.kernels.common import ahead, launch

    cut_off: list[str] = []
    ahead.log.setLevel(logging.DEBUG)
    ahead.log.addHandler(logging.Handler())
    ahead.log.handlers[-1].emit = lambda record: cut_off.append(record.getMessage())
    layers.DEVICES = {"cpu"}
    torch.cuda.current_device, torch.cuda.is_available = lambda: 0, lambda: True

    def counted(x, encoder, b, decoder, mean):
        biases = {"gate_bias": b, "down_bias": mean}
        y, stats, _ = ops.relu_ffn(
            x, encoder.t(), decoder.t(), **biases, shift=mean,
            return_stats=True, stat_weight=b, return_counts=True,
        )  # fmt: skip
        return y.sum(-1) + stats.sum(0)

    def jumps(x, encoder, b, decoder, mean):
        return ops.relu_ffn(x, encoder.t(), decoder.t(), gate_steps="", thresholds=b.detach())

    def kept(x, encoder, b, decoder, mean):
        z = ops.sparse_gradient_linear(x.detach(), encoder.t(), b, shift=mean)
        return ops.sparse_product(z, decoder, mean, relu=True)

    def batch_topk(x, encoder, b, decoder, mean):
        values, indices = ops.batch_topk_encode(x, encoder.t(), b, k=8 * len(x), shift=mean)
        return ops.batch_topk_decode(values, indices, decoder, mean, sizes=x.shape[:1])

    operators = {
        "batch_topk": batch_topk,
        "counted": counted,
        "jumps": jumps,
        "kept": kept,
        "splade_head": ops.splade_head,
        "relu_ffn": ops.relu_ffn,
        "entmax_attention": ops.entmax_attention,
        "entmax": lambda x: ops.entmax(x, 1.5, -1),
        "topk_encode": lambda x, weight, bias: ops.topk_encode(x, weight, bias, k=8)[0],
    }
    begun: dict[str, dict[Any, Any]] = {name: {} for name in operators}
    with FakeTensorMode():
        for name, fn in operators.items():
            launch.begin = lambda jobs, to=begun[name]: to.update((job.key, job) for job in jobs)
            for training in (False, True):
                like = {"dtype": torch.bfloat16, "requires_grad": training}
                y = fn(*[torch.empty(shape, **like) for shape in CASES[name][0]])
                if training:
                    y.sum().backward()
    failed = []
    for job in {key: job for name in COMPILED for key, job in begun[name].items()}.values():
        try:
            compiled_job(job)
        except Exception as error:
            failed.append(f"{job.kernel.__name__}: {error}")
    names = {name: [job.kernel.__name__ for job in jobs.values()] for name, jobs in begun.items()}
    print(json.dumps({**names, "cut off": cut_off, "fail to compile": failed}))


if __name__ == "__main__":
    main()
