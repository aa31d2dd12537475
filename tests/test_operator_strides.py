"""What an operator's fake promises of shapes, dtypes and strides is what the operator returns, forward and backward."""

from __future__ import annotations

import pytest
import torch

from sparse_inductor import ops
from support import Promises

LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "channels_last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1) if t.dim() > 2 else t,
    "batch_inside": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 1 else t,
    "strided": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda t: t[:1].expand(t.shape),
    "offset": lambda t: torch.cat([t, t])[len(t) :],
}


def program(name: str, batch: int, length: int):
    """(operator of the tensors, their shapes)."""
    x, square, heads = (batch, length, 4), (6, 4), (batch, 2, length, 4)
    steps = "row_mul(0) | relu | log1p"
    return {
        "relu_ffn": (lambda x, w, d: ops.relu_ffn(x, w, d), (x, square, (4, 6))),
        "relu_ffn_gated": (
            lambda x, w, d, u, r, a, b: ops.relu_ffn(
                x, w, d, u, gate_bias=a, down_bias=b, return_stats=True, residual=r
            ),
            (x, square, (4, 6), square, x, (6,), (4,)),
        ),
        "splade_head": (lambda x, w, b: ops.splade_head(x, w, b), (x, square, (6,))),
        "splade_head_rows": (
            lambda x, w, m: ops.splade_head(x, w, None, rows=[m], steps=steps), (x, square, (batch, length)),
        ),
        "entmax": (lambda x: ops.entmax(x), (x,)),
        "entmax_rows_inside": (lambda x: ops.entmax(x, 2.0, dim=1), (x,)),
        "entmax_alpha": (lambda x, a: ops.entmax(x, 1.5 + a.sigmoid() / 4), (x, (batch, length, 1))),
        "entmax_attention": (lambda q, k, v: ops.entmax_attention(q, k, v), (heads,) * 3),
        "entmax_attention_bias": (
            lambda q, k, v, b, a: ops.entmax_attention(q, k, v, 1.5 + a.sigmoid() / 4, bias=b),
            (*(heads,) * 3, (batch, 2, length, length), (batch, 2, length, 1)),
        ),
        "sparse_scores": (
            lambda q: ops.sparse_scores(q, torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)),
            ((batch, 4),),
        ),
        "topk_encode": (lambda x, w, b: ops.topk_encode(x, w, b, k=2)[0], (x, square, (6,))),
        "sparse_decode": (
            lambda v, w, b: ops.sparse_decode(v, torch.arange(4).expand(v.shape), w, b),
            (x, square, (4,)),
        ),
    }[name]  # fmt: skip


NAMES = (
    "relu_ffn", "relu_ffn_gated", "splade_head", "splade_head_rows", "entmax", "entmax_rows_inside",
    "entmax_alpha", "entmax_attention", "entmax_attention_bias", "sparse_scores",
    "topk_encode", "sparse_decode",
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_fakes_promise_what_is_returned(name, layout):
    generator = torch.Generator().manual_seed(0)
    for batch, length in ((3, 5), (1, 5), (3, 1), (0, 5)):
        if batch == 0 and layout == "offset":
            continue
        fn, shapes = program(name, batch, length)
        inputs = [torch.randn(s, generator=generator) for s in shapes]
        inputs = [LAYOUTS[layout](t).detach().requires_grad_() for t in inputs]
        assert any(t.requires_grad for t in inputs)
        with Promises() as promises:
            outputs = fn(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            cotangents = [
                LAYOUTS[layout](torch.randn(o.shape, generator=generator)) for o in outputs
            ]
            torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
            with torch.no_grad():
                fn(*inputs)
        gradients = {op for op in promises.seen if "backward" in op or op == "sparse_outer"}
        assert gradients and promises.seen > gradients


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_results_are_views_of_nothing(name, compiled):
    """The caller may write to them, which autograd refuses of a view that an autograd.Function returns."""
    fn, shapes = program(name, 3, 5)
    inputs = [torch.randn(s).requires_grad_() for s in shapes]
    if compiled:
        fn = torch.compile(fn, backend="aot_eager")
    for _ in range(2):
        outputs = fn(*inputs)
        for out in outputs if isinstance(outputs, tuple) else (outputs,):
            assert not out._is_view()
            out.mul_(2)
