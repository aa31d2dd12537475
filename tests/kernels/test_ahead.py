"""What an operator's call launches is found with fake tensors, as where a compiler traces it; no GPU need be there."""

from __future__ import annotations

import json

import pytest
from compiling import run_compiled

HEADS = [(2, 4, 2048, 64)] * 3
# Shapes, and kernels of a call and of its backward.
CASES = {
    "splade_head": ([(16, 128, 64), (30522, 64), (30522,)], "_peak_kernel _hidden_rows"),
    "relu_ffn": (
        [(8192, 64), (2048, 64), (64, 2048), (2048, 64)],
        "_pack_kernel _dots_kernel _weighted_rows_kernel _by_neuron_kernel",
    ),
    "entmax_attention": (HEADS, "broad_kernel _output_kernel _rows_kernel _keys_kernel"),
    "entmax": ([(512, 64)], "_forward_kernel _backward_kernel"),
    "topk_encode": ([(512, 64), (1024, 64), (1024,)], "_top_kernel _outer_kernel"),
}


@pytest.fixture(scope="module")
def begun():
    return json.loads(run_compiled(__file__).stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_begun(name, begun):
    assert {*CASES[name][1].split()} <= {*begun[name]}


def test_every_call_is_gone_through_to_its_end(begun):
    assert begun["cut off"] == []


def main() -> None:
    """Prints the names of the kernels that would be compiled."""
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
    operators = {
        "splade_head": ops.splade_head,
        "relu_ffn": ops.relu_ffn,
        "entmax_attention": ops.entmax_attention,
        "entmax": lambda x: ops.entmax(x, 1.5, -1),
        "topk_encode": lambda x, weight, bias: ops.topk_encode(x, weight, bias, k=8)[0],
    }
    found: dict[str, list[str]] = {}
    with FakeTensorMode():
        for name, fn in operators.items():
            names = found[name] = []
            launch.begin = lambda jobs, to=names: to.extend(j.kernel.__name__ for j in jobs)
            for training in (False, True):
                like = {"dtype": torch.bfloat16, "requires_grad": training}
                y = fn(*[torch.empty(shape, **like) for shape in CASES[name][0]])
                if training:
                    y.sum().backward()
    print(json.dumps({**found, "cut off": cut_off}))


if __name__ == "__main__":
    main()
