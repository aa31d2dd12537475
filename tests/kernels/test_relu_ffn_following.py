"""Two variants of the kernels have the results of the plain ones: weighted rows that follow the dot products row by row
instead of waiting for their kernel, and gates that are read from the product instead of a packed copy."""

from __future__ import annotations

import pytest
import torch
from uneven_block import block, of_a_step, tokens

import sparse_inductor
from sparse_inductor.kernels.common import replay
from sparse_inductor.kernels.relu_ffn import dots

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu", "nothing_recorded")]


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("share", [0.005, 0.03, 0.5])
@pytest.mark.parametrize(
    ("M", "N", "K", "D", "dtype"),
    [
        (1025, 5632, 512, 640, torch.bfloat16),
        (2048, 640, 256, 2304, torch.bfloat16),
        (4095, 1408, 2048, 512, torch.bfloat16),
        (3000, 1408, 256, 512, torch.float32),
    ],
)
def test_rows_that_follow(M, N, K, D, dtype, share, uneven, monkeypatch):
    w = block(N, K, D, share, dtype)
    x = tokens(M, K, uneven, dtype)
    assert dots.follows(x, w["up"])
    for t in (x, *w.values()):
        t.requires_grad_()
    dy = torch.randn(M, D, device="cuda", dtype=dtype)

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [of_a_step(x, w, dy) for _ in range(3)]
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        captured = of_a_step(x, w, dy)
    for _ in range(3):
        for t in captured:
            t.zero_()
        graph.replay()
        found.append([t.clone() for t in captured])
    monkeypatch.setattr(dots, "follows", lambda *_: False)
    replay.forget()
    want = of_a_step(x, w, dy)
    for got in found:
        assert all(map(torch.equal, got, found[0]))
    # The two variants are different programs, in which the compiler may add products in another order.
    for a, b in zip(found[0], want, strict=True):
        off = (a - b).float().norm(dim=1)
        assert (off <= 4 * torch.finfo(dtype).eps * b.float().norm(dim=1)).all()


@pytest.mark.parametrize("share", [0.005, 0.03])
@pytest.mark.parametrize("M", [1500, 4500, 12000])
def test_gates_that_are_not_packed(M, share):
    """Inference reads gates from the product, a training step from their packed form."""
    w = block(1408, 512, 640, share)
    x = tokens(M, 512, True)
    with torch.no_grad():
        got = sparse_inductor.ops.relu_ffn(x, **w)
    want = sparse_inductor.ops.relu_ffn(x.requires_grad_(), **w)
    assert torch.equal(got, want)
