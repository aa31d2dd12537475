"""Products with pools on a Hopper GPU: by tiles, and with a block's values in shared memory."""

from __future__ import annotations

import pytest
import torch

from sparse_inductor.epilogue.steps import parse, run
from sparse_inductor.kernels import relu_ffn_packing as packer
from sparse_inductor.kernels import relu_ffn_pool as rows_pool
from sparse_inductor.kernels import relu_ffn_pool_hopper as pool_hopper


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("M", "K", "N", "D", "f", "g", "biased"),
    [
        (1000, 512, 1024, 256, "relu", "", False),
        (129, 2048, 5632, 2048, "relu | add(1)", "relu", True),
        (20000, 256, 3000, 768, "relu | mul(2)", "relu", True),
    ],
)
def test_both_kernels(monkeypatch, M, K, N, D, f, g, biased, dtype):
    """Pools of all sizes, none among them; what lies behind a pool's values is not finite."""
    torch.manual_seed(0)
    cuda = torch.device("cuda")
    x, up = (torch.randn(n, K, device=cuda).to(dtype) / K**0.25 for n in (M, N))
    table = torch.randn(N, D, device=cuda).to(dtype)
    bias = torch.randn(N, device=cuda).to(dtype) if biased else None
    pool = rows_pool.Pool(x)
    sizes = torch.tensor([0, 1, 63, 64, 65, 128, 129, 256, 300, 384, 385, 511, 512], device=cuda)
    pool.size.copy_(sizes[torch.arange(pool.blocks, device=cuda) % len(sizes)].flip(0))
    order = torch.rand(pool.blocks, N, device=cuda).argsort(1)
    pool.neuron.copy_(order[:, : rows_pool.SIZE])
    block = torch.arange(M, device=cuda) // rows_pool.ROWS
    place = torch.arange(rows_pool.SIZE, device=cuda)
    size = pool.size[block][:, None]
    filled = (size + 63) // 64 * 64
    gates = torch.randn(M, rows_pool.SIZE, device=cuda).abs()
    gates *= (torch.rand_like(gates) < 0.3) & (place < size)
    gates = torch.where(place < filled, gates, torch.nan).to(dtype)
    state = packer.new_state(cuda, 0).zero_()
    monkeypatch.setattr(pool_hopper, "BLOCKS", 0)
    assert pool_hopper.applies(pool.value, table, x.new_empty(M, D))
    outcomes = []
    for mine in (True, False):
        monkeypatch.setattr(pool_hopper, "applies", lambda *_, mine=mine: mine)
        pool.value.copy_(gates)
        out = torch.full((M, D), 7.0, device=cuda, dtype=dtype)
        rows_pool.products(x, up, bias, table, pool, state, out, parse(f), parse(g), "ieee")
        outcomes.append((torch.where(place < size, pool.value, 0), out))
    u = (x.float() @ up.float().T + (0 if bias is None else bias.float())).gather(
        1, pool.neuron.long()[block]
    )
    a, u = run(parse(f), gates.float().nan_to_num()), run(parse(g), u)
    want = torch.where((place < size) & (gates != 0), a * u, 0)
    for h, out in outcomes:
        torch.testing.assert_close(h.float(), want, rtol=2e-2, atol=2e-2)
        dense = torch.zeros(M, N, device=cuda).scatter_(1, pool.neuron.long()[block], h.float())
        y = torch.where(size > 0, dense @ table.float(), 7)
        torch.testing.assert_close(out.float(), y, rtol=2e-2, atol=2e-1)
    assert (outcomes[0][1] != outcomes[1][1]).float().mean() < 0.2  # but for the last bit
    pool.value.copy_(gates)
    again = torch.full((M, D), 7.0, device=cuda, dtype=dtype)
    monkeypatch.setattr(pool_hopper, "applies", lambda *_: True)
    rows_pool.products(x, up, bias, table, pool, state, again, parse(f), parse(g), "ieee")
    assert torch.equal(again, outcomes[0][1])
